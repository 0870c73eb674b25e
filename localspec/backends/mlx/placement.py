"""Where each tensor of a GGUF belongs in an mlx-lm model, and putting it there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from localspec.backends.base import Progress
from localspec.backends.mlx.architecture import Architecture, Header
from localspec.backends.mlx.weights import BlockType, Stored, read_tensor
from localspec.errors import EngineError, UnsupportedModel
from localspec.model_files.gguf import GGUFFile, TensorInfo

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are no parameter: they set the rotary embedding's frequencies."""


def fill(
    file: GGUFFile,
    architecture: Architecture,
    module: nn.Module,
    dtype: mx.Dtype,
    progress: Progress | None,
    blocks: range | None = None,
) -> None:
    """Put every tensor of the file into the model, in the file's order.

    Args:
        dtype: of plain numbers and scales.
        blocks: of the file that are the module's layers; others are left out. None is all, which have to be.

    Raises:
        UnsupportedModel: a tensor has no place, or a wrong shape, or a parameter is left without one.
    """
    infos = [info for info in file.tensors.values() if blocks is None or block_of(info.name) in (None, *blocks)]
    first = blocks.start if blocks is not None else 0
    if first:  # what the blocks share is another module's
        infos = [info for info in infos if block_of(info.name) is not None]
    places = {info.name: place_of(first, architecture, module, info) for info in infos}
    places = {name: place for name, place in places.items() if name not in (*ROPE_TENSORS, *architecture.no_parameters)}
    lost = [name for name, place in places.items() if place is None]
    if lost:
        raise UnsupportedModel(
            f"{file.path.name}: the mlx backend does not use {_some(lost)} in a {file.architecture} model; "
            "use --backend llama-cpp"
        )
    _check_complete(file, architecture, module, {place for place in places.values() if place is not None})

    total, done = sum(info.n_bytes for info in file.tensors.values()), 0
    for info in sorted(file.tensors.values(), key=lambda one: (one.shard, one.offset)):
        if progress is not None and not progress(done / max(total, 1)):
            raise EngineError(f"loading {file.path.name} was cancelled")
        place = places.get(info.name)
        if place is not None:
            _put(file, architecture, module, info, place, dtype)
        file.forget(info.name)
        done += info.n_bytes
    if progress is not None:
        progress(1.0)


def block_of(tensor: str) -> int | None:
    """Which block a tensor is in; None for those outside of blocks."""
    kind, _, rest = tensor.partition(".")
    number = rest.partition(".")[0]
    return int(number) if kind == "blk" and number.isdecimal() else None


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter of a submodule."""

    path: str
    parameter: str

    @property
    def full(self) -> str:
        return f"{self.path}.{self.parameter}" if self.path else self.parameter


def place_of(first: int, architecture: Architecture, module: nn.Module, info: TensorInfo) -> _Place | None:
    """Where a tensor belongs; None for nowhere. Block ``first`` is the module's first layer."""
    trunk = architecture.trunk
    top = {
        "token_embd": f"{trunk}.{architecture.embedding}",
        "output_norm": f"{trunk}.{architecture.norm}",
        "output": "lm_head",
    } | {name: f"{trunk}.{path}" for name, path in architecture.top.items()}
    stem, _, suffix = info.name.rpartition(".")
    if stem in top:
        path = top[stem]
    elif info.name.startswith("blk."):
        block, key = block_of(info.name), info.name.split(".", 2)[-1]
        # Parameters that belong to no submodule are stored without a suffix.
        stem, _, suffix = key.rpartition(".") if key not in architecture.blocks else (key, "", "")
        if stem not in architecture.blocks or block is None or not 0 <= block - first < len(module.layers):
            return None
        path = f"{trunk}.layers.{block - first}.{architecture.blocks[stem]}"
    else:
        return None
    if not suffix:
        path, _, suffix = path.rpartition(".")
        return _Place(path, suffix) if suffix in (_submodule(module, path) or {}) else None
    owner = _submodule(module, path)
    if owner is None or suffix not in ("weight", "bias"):
        return None
    return _Place(path, suffix) if suffix in owner or isinstance(owner, nn.Linear) else None


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    """The module at a dotted path; None where there is none."""
    current: Any = module
    for part in path.split("."):
        if isinstance(current, list):
            current = current[int(part)]
        elif isinstance(current, nn.Module) and part in current:
            current = current[part]
        else:
            return None
    return current if isinstance(current, nn.Module) else None


def _check_complete(file: GGUFFile, architecture: Architecture, module: nn.Module, places: set[_Place]) -> None:
    filled = {place.full for place in places}
    missing = []
    for name, _ in tree_flatten(module.parameters()):
        if name in filled:
            continue
        owner = _submodule(module, name.rpartition(".")[0])
        if name.endswith(".bias") and isinstance(owner, nn.Linear):
            del owner["bias"]  # the class has one, this model does without, as in llama.cpp
            continue
        missing.append(_tensor_name(architecture, name))
    if missing:
        raise UnsupportedModel(f"{file.path.name} lacks {_some(missing)}")


def _tensor_name(architecture: Architecture, parameter: str) -> str:
    """The name that a GGUF tensor for a parameter would have."""
    prefix = f"{architecture.trunk}.layers."
    if not parameter.startswith(prefix):
        return {f"{architecture.trunk}.{architecture.norm}.weight": "output_norm.weight"}.get(parameter, parameter)
    layer, _, rest = parameter.removeprefix(prefix).partition(".")
    for key, path in architecture.blocks.items():
        if rest == path or rest.rpartition(".")[0] == path:
            return f"blk.{layer}.{key}{rest.removeprefix(path)}"
    return parameter


def _put(
    file: GGUFFile, architecture: Architecture, module: nn.Module, info: TensorInfo, place: _Place, dtype: mx.Dtype
) -> None:
    owner = cast(nn.Module, _submodule(module, place.path))
    key = info.name.split(".", 2)[-1] if info.name.startswith("blk.") else info.name
    convert = architecture.converted.get(key)
    if architecture.shifted_norms and info.name.endswith("norm.weight"):
        convert = lambda stored: stored - 1  # noqa: E731
    can_be_packed = place.parameter == "weight" and hasattr(owner, "to_quantized")
    stored = read_tensor(file, info, dtype, convert=convert, plain=not can_be_packed)
    if key in architecture.rearranged:
        axis, order = architecture.rearranged[key]
        stored = _rearranged(file, info, stored, axis, order(Header(file)))
    expected = _expected_shape(owner, place.parameter)
    if expected is not None and stored.shape != expected:
        raise UnsupportedModel(
            f"{file.path.name}: {info.name} has the shape {'x'.join(map(str, stored.shape))}, "
            f"but {'x'.join(map(str, expected))} is needed"
        )
    if stored.kind is None:
        owner[place.parameter] = stored.weight
    else:
        parent, _, name = place.path.rpartition(".")
        cast(nn.Module, _submodule(module, parent) if parent else module)[name] = _packed(owner, stored, stored.kind)


def _rearranged(file: GGUFFile, info: TensorInfo, stored: Stored, axis: int, order: list[int]) -> Stored:
    """With the equal parts of an axis in another order."""
    if order == sorted(order):
        return stored
    kind = stored.kind
    if stored.shape[axis] % (len(order) * (kind.group if kind is not None and axis == -1 else 1)):
        raise UnsupportedModel(
            f"{file.path.name}: {info.name} cannot be cut into {len(order)} heads as {info.type_name}; "
            "use --backend llama-cpp or another quantisation of the model"
        )

    def moved(array: mx.array) -> mx.array:
        at = axis % array.ndim
        found = mx.take(mx.unflatten(array, at, (len(order), -1)), mx.array(order), axis=at).reshape(array.shape)
        mx.eval(found)
        return found

    scales, biases = (None if array is None else moved(array) for array in (stored.scales, stored.biases))
    return Stored(moved(stored.weight), scales, biases, kind)


def _expected_shape(owner: nn.Module, parameter: str) -> tuple[int, ...] | None:
    if parameter in owner:
        return tuple(owner[parameter].shape)
    # A bias that the class has no place for by itself; the weight may be packed by now, but has its rows.
    return (owner["weight"].shape[0],) if parameter == "bias" else None


def _packed(owner: nn.Module, stored: Stored, kind: BlockType) -> nn.Module:
    """The quantised counterpart of a module, holding what was read."""
    bias = owner.get("bias")
    # mlx makes it by quantising the random weights it was built with; they are never computed.
    packed: nn.Module = owner.to_quantized(group_size=kind.group, bits=kind.bits, mode=kind.mode)
    packed.weight, packed.scales, packed.biases = stored.weight, stored.scales, stored.biases
    if bias is not None:
        packed.bias = bias
    return packed


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
