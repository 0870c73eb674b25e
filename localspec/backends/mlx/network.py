"""A GGUF file as an mlx-lm model: every tensor of the file used, every parameter of the model filled."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from localspec.backends.base import NEXTN, NORM, Progress, layer_name
from localspec.backends.mlx.architecture import (
    ARCHITECTURES,
    Architecture,
    Header,
    common_arguments,
    read_attention,
    unsupported,
)
from localspec.backends.mlx.weights import ROPE_TENSORS, fill
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.nextn import n_layers

# -- rotary position embeddings as llama.cpp computes them -------------------------------------------------------------


@dataclass(frozen=True)
class RopeScaling:
    """How positions are stretched (llama.cpp: ``ggml_rope_ext``)."""

    factor: float = 1.0  # linear interpolation: positions are divided by it
    factors: npt.NDArray[np.float32] | None = None  # divisors of each frequency [dims / 2] (Llama 3's, Phi 3's)
    magnitude: float = 1.0  # queries and keys are multiplied by it
    yarn: bool = False  # whether high frequencies are left alone, by YaRN's ramp (arXiv:2309.00071, section 3.2)
    n_ctx_original: int = 0  # the context length before stretching, for YaRN


# Rotations over the original context above which YaRN leaves a frequency alone, and below which it interpolates fully
_BETA_FAST, _BETA_SLOW = 32.0, 1.0


class Rope(nn.Module):  # type: ignore[misc]
    """A drop-in for mlx-lm's rotary embeddings, of ``dims`` of a head's channels; where ``interleaved`` neighbouring
    channels are a pair (llama.cpp's NORM) instead of i and i + dims/2 (NEOX)."""

    def __init__(self, dims: int, base: float, *, interleaved: bool, scaling: RopeScaling) -> None:
        super().__init__()
        self.dims = dims
        self.interleaved = interleaved
        self.magnitude = scaling.magnitude
        if scaling.yarn and scaling.factor > 1:
            self.magnitude *= 1 + 0.1 * math.log(scaling.factor)
        # The underscore keeps it out of the module's parameters.
        self._periods = mx.array(periods(dims, base, scaling).astype(np.float32))
        self._depths: mx.array | None = None

    def branch(self, depths: Sequence[int] | None) -> None:
        """Turn the rows of the passes to come so far behind ``offset``, not one behind the other; None ends it."""
        self._depths = None if depths is None else mx.array(list(depths), mx.int32)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Turn x [1, n_heads, n, width] by the positions from ``offset`` on."""
        if self.magnitude != 1.0:
            turned = x[..., : self.dims] * self.magnitude
            x = turned if turned.shape == x.shape else mx.concatenate([turned, x[..., self.dims :]], axis=-1)
        how: dict[str, Any] = {"traditional": self.interleaved, "base": None, "scale": 1.0, "freqs": self._periods}
        if self._depths is None:
            return mx.fast.rope(x, self.dims, offset=offset, **how)
        # Each row is a batch of its own.
        return mx.fast.rope(x.swapaxes(0, 2), self.dims, offset=offset + self._depths, **how).swapaxes(0, 2)


def periods(dims: int, base: float, scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """Positions per radian for each pair of channels [dims / 2]."""
    plain = base ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
    if scaling.factors is not None:
        plain = plain * scaling.factors
    stretched = plain * scaling.factor
    if not scaling.yarn:
        return np.asarray(stretched)

    def channel(rotations: float) -> float:
        """The pair of channels that turns so often over the original context."""
        return dims * math.log(scaling.n_ctx_original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(channel(_BETA_FAST)))
    high = min(dims - 1.0, math.ceil(channel(_BETA_SLOW)))
    kept = 1 - np.clip((np.arange(dims // 2) - low) / max(0.001, high - low), 0, 1)
    return np.asarray(1 / ((1 - kept) / stretched + kept / plain))


# -- the network -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A model ready to compute, all of it in memory."""

    module: nn.Module  # mlx-lm's model: ``module(tokens [1, n], cache=...)`` -> logits [1, n, n_vocab]
    architecture: str  # GGUF's name of it
    n_vocab: int  # width of a row of logits
    n_layer: int
    n_embd: int  # width of the hidden states
    compute_dtype: mx.Dtype  # of activations, scales and plain numbers
    layer_windows: tuple[int | None, ...]  # for each layer, how many tokens its attention sees; None for all
    layer_states: tuple[int, ...]  # for each layer, arrays of a state that cannot be rewound; 0 has keys and values
    max_context: int | None  # tokens up to which it computes what the file means; None for no limit
    _trunk: nn.Module
    _head: Callable[[mx.array], mx.array]
    reads_tokens_too: bool = False  # where rows of floats are fed, their tokens are real ids

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state that cannot be rewound."""
        return any(self.layer_states)

    def states(
        self,
        tokens: mx.array,
        cache: list[Any] | None,
        names: Collection[str],
        *,
        rows: mx.array | None = None,
        n_layers: int | None = None,
    ) -> dict[str, mx.array]:
        """The last layer's states, normalised, as "norm" and "nextn", and those after the layers that are named.

        What is not evaluated is not computed.

        Args:
            tokens: [1, n].
            names: of hidden states, as ``Forward.hidden`` has them.
            rows: what the first layer takes instead of the tokens' embeddings [1, n, n_embd].
            n_layers: go no further than so many; "norm" has no meaning then.

        Returns:
            Each [1, n, n_embd].
        """
        states: dict[str, mx.array] = {}
        layers: list[Any] = self._trunk["layers"]
        originals = list(layers)
        layers[:] = [
            _Tap(layer, name, states, rows if i == 0 else None)
            if (name := layer_name(i)) in names or (i == 0 and rows is not None)
            else layer
            for i, layer in enumerate(originals[:n_layers])
        ]
        try:
            states[NORM] = states[NEXTN] = self._trunk(tokens, cache)
        finally:
            layers[:] = originals
        return states

    @cached_property
    def _ropes(self) -> list[Rope]:
        return [module for module in self.module.modules() if isinstance(module, Rope)]

    def branch(self, depths: Sequence[int] | None) -> None:
        """The rows of the passes to come are so far behind the memory; None ends that. See ``Rope.branch``."""
        for rope in self._ropes:
            rope.branch(depths)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits of (some rows of) ``hidden``: [1, n, n_embd] -> [1, n, n_vocab]."""
        return self._head(hidden)


class _Tap:
    """A layer that also notes what it puts out, and may be given something else than what is put in."""

    def __init__(self, layer: Any, name: str, states: dict[str, mx.array], rows: mx.array | None) -> None:
        self._layer = layer
        self._name = name
        self._states = states
        self._rows = rows

    def __call__(self, x: mx.array, *arguments: Any, **options: Any) -> mx.array:
        state: mx.array = self._layer(x if self._rows is None else self._rows, *arguments, **options)
        self._states[self._name] = state
        return state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def load_network(file: GGUFFile, progress: Progress | None = None) -> Network:
    """Load a GGUF file into mlx-lm's model class for its architecture, in the type of ``default_dtype``.

    Call it on the thread that will compute: MLX's streams belong to threads.

    Raises:
        UnsupportedModel: an architecture, setting, tensor or tensor type that is not handled; the message names it.
        ModelFileError: the file is damaged.
        EngineError: the load was cancelled.
    """
    network = _load(file, default_dtype(file), progress)
    if network.compute_dtype == mx.float16 and not fits_float16(network):
        del network
        network = _load(file, mx.float32, None)
    return network


def default_dtype(file: GGUFFile) -> mx.Dtype:
    """What to compute in, as far as the device and the header tell.

    float32 on a CPU, where half precision is emulated. On a GPU bfloat16 for files that hold it, else float16: scales
    in a file are float16, and bfloat16 would round them. Gemma's states and the rows that heads read can outgrow
    float16, and a recurrent state gathers its rounding: float32.
    """
    wide = file.architecture.startswith(("gemma", "mamba")) or file.has_rows_only
    if wide or mx.default_device() == mx.Device(mx.cpu):
        return mx.float32
    return mx.bfloat16 if "BF16" in file.bytes_by_type else mx.float16


_FLOAT16_ROOM = 2.0**14  # states may be so large in the probe, a quarter of what float16 holds


def fits_float16(network: Network) -> bool:
    """Whether the states of a pass leave room in float16, which some models' first tokens fill (SmolLM2: 24,494)."""
    tokens = mx.array([[i % network.n_vocab for i in range(1, 257, 4)]])
    states = network.states(tokens, None, [layer_name(i) for i in range(network.n_layer)])
    largest = [mx.abs(state.astype(mx.float32)).max() for state in states.values()]
    return bool((mx.stack(largest) < _FLOAT16_ROOM).all().item())  # false for NaN as well


def _load(file: GGUFFile, dtype: mx.Dtype, progress: Progress | None) -> Network:
    header = Header(file)
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        known = f"(it knows {', '.join(sorted(ARCHITECTURES))})"
        raise unsupported(file, f"the mlx backend does not know the architecture {file.architecture!r} {known}")
    tied = "output.weight" not in file.tensors
    n_vocab = file.tensors["token_embd.weight"].shape[-1]
    arguments = common_arguments(header, architecture, n_vocab, tied)
    scaling, max_context = rope_scaling(header) if architecture.attention else (RopeScaling(), None)
    header.ignore(architecture.ignored)
    header.refuse_unread()

    models = import_module(f"mlx_lm.models.{architecture.module}")
    args = getattr(models, f"{architecture.prefix}ModelArgs").from_dict(arguments)
    if architecture.attention and not hasattr(args, "head_dim"):  # then the class takes it to be hidden_size / heads
        attention = read_attention(header)
        if attention.d_head * attention.n_head != args.hidden_size:
            heads = f"{attention.n_head} heads of {attention.d_head} channels are not the {args.hidden_size} channels"
            raise unsupported(file, f"{heads} that mlx-lm's {architecture.module} expects")
    module: nn.Module = getattr(models, f"{architecture.prefix}Model")(args)
    if tied and architecture.module == "gemma3_text":
        module.sanitize({})  # to this class the output matrix is the embedding where none is handed to it
    if architecture.attention:
        install_rope(header, architecture, module, args, scaling)
    # Layers for multi-token prediction are loaded by what drafts with them.
    blocks = range(len(module.layers)) if n_layers(file) else None
    fill(file, architecture, module, dtype, progress, blocks)

    trunk: nn.Module = module[architecture.trunk]
    project: Callable[[mx.array], mx.array] = trunk[architecture.embedding].as_linear if tied else module.lm_head
    divisor = getattr(args, "logits_scaling", 1.0)
    return Network(
        module=module,
        architecture=file.architecture,
        n_vocab=n_vocab,
        n_layer=len(module.layers),
        n_embd=args.hidden_size,
        compute_dtype=dtype,
        layer_windows=_windows(module),
        layer_states=tuple(len(getattr(cache, "cache", ())) for cache in make_prompt_cache(module)),
        max_context=max_context,
        _trunk=trunk,
        _head=project if divisor == 1.0 else lambda hidden: project(hidden) / divisor,
    )


def rope_scaling(header: Header) -> tuple[RopeScaling, int | None]:
    """How positions are scaled, and the context length up to which that holds."""
    kind = str(header.field("rope.scaling.type", "linear"))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise unsupported(header.file, f"unknown rope scaling {kind!r}")
    factor = header.real("rope.scaling.factor", 0.0) or 1.0
    n_ctx = header.file.n_ctx_train
    n_original = header.integer("rope.scaling.original_context_length", n_ctx)
    for key, default in (("ext_factor", 1), ("attn_factor", 1), ("beta_fast", 32), ("beta_slow", 1)):
        header.expect(f"rope.scaling.yarn_{key}", default)  # llama.cpp reads these for few architectures
    factors, limit = None, None
    for name in ROPE_TENSORS:
        if name not in header.file.tensors or (name == "rope_factors_long.weight" and n_original < n_ctx):
            continue
        # Phi 3 has two sets and llama.cpp chooses by the size of the context: short ones up to the original length.
        factors = header.file.tensor_bytes(name).view(np.float32)
        if name == "rope_factors_short.weight" and n_original < n_ctx:
            limit = n_original
    scaling = RopeScaling(
        factor=1.0 if kind == "none" else factor,
        factors=factors,
        magnitude=header.real("rope.scaling.attn_factor", 1.0),
        yarn=kind == "yarn",
        n_ctx_original=n_original,
    )
    return scaling, limit


def install_rope(
    header: Header, architecture: Architecture, module: nn.Module, args: Any, scaling: RopeScaling
) -> None:
    attention = read_attention(header)
    base = header.real("rope.freq_base", 10000.0)
    if scaling.factors is not None and len(scaling.factors) != attention.d_rope // 2:
        raise unsupported(header.file, f"its rope factors do not fit {attention.d_rope} rotating channels")
    windows = _windows(module)
    everywhere = Rope(attention.d_rope, base, interleaved=architecture.interleaved, scaling=scaling)
    local_base = getattr(args, "rope_local_base_freq", base)
    local_scaling = scaling if architecture.stretched_windows else RopeScaling()
    local = Rope(attention.d_rope, local_base, interleaved=architecture.interleaved, scaling=local_scaling)
    for i, layer in enumerate(module.layers):
        if "self_attn" in layer and not architecture.without_rope(i):
            layer.self_attn.rope = everywhere if windows[i] is None else local


def _windows(module: nn.Module) -> tuple[int | None, ...]:
    return tuple(getattr(cache, "max_size", None) for cache in make_prompt_cache(module))
