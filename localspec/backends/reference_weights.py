"""The weights of the reference backend: a header's sizes, and tensors in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from localspec.errors import UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile

Array = npt.NDArray[np.float64]

BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_HEAD_COUNTS = ("head_count", "head_count_kv")


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The sizes of a llama-architecture model, or of a head's layer, from the metadata of its file."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    d_head: int
    rope_base: float
    rope_scale: float
    norm_eps: float

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], architecture: str = "llama") -> Hyperparameters:
        """Read them, where the file says ``architecture``.

        Raises:
            UnsupportedModel: the file uses a variant that this backend does not compute.
        """

        def get(key: str, default: Any = None) -> Any:
            value = metadata.get(f"{architecture}.{key}", default)
            if value is None:
                raise UnsupportedModel(f"the file does not say {architecture}.{key}")
            return value

        def number(key: str, default: float | None = None) -> float:
            value = get(key, default)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise UnsupportedModel(
                    f"the file says {architecture}.{key} = {_short(value)}, which is not a valid size"
                )
            return value

        def size(key: str, default: int | None = None) -> int:
            value = number(key, default)
            if value != int(value):
                raise UnsupportedModel(f"the file says {architecture}.{key} = {value}, which is not a valid size")
            return int(value)

        scaling = get("rope.scaling.type", "none")
        for what, unsupported in (
            ("a mixture of experts", number("expert_count", 0)),
            ("layers of different widths", any(isinstance(get(f"attention.{k}", 0), np.ndarray) for k in _HEAD_COUNTS)),
            (f"rope scaling {_short(scaling)}", not isinstance(scaling, str) or scaling not in ("none", "linear")),
        ):
            if unsupported:
                raise UnsupportedModel(f"the reference backend does not compute {what}; use another --backend")
        n_embd, n_head = size("embedding_length"), size("attention.head_count")
        n_head_kv = size("attention.head_count_kv", n_head)
        if not n_embd or not n_head or not n_head_kv or n_head % n_head_kv:
            raise UnsupportedModel(
                f"the file says {n_embd} channels, {n_head} heads, {n_head_kv} key heads, which do not fit together"
            )
        d_head = size("attention.key_length", n_embd // n_head)
        if size("rope.dimension_count", d_head) != d_head:
            raise UnsupportedModel(
                "the reference backend does not compute a rotation of some channels only; use another --backend"
            )
        if not d_head or d_head % 2:
            raise UnsupportedModel(f"the file says heads of {d_head} channels, which cannot be rotated in pairs")
        base, factor = number("rope.freq_base", 10000.0), number("rope.scaling.factor", 1.0)
        if not base or not factor:
            raise UnsupportedModel(f"the file says a rotation of base {base} and factor {factor}")
        norm_eps = number("attention.layer_norm_rms_epsilon")
        if not norm_eps:
            raise UnsupportedModel(
                f"the file says {architecture}.attention.layer_norm_rms_epsilon = 0, which divides by nothing"
            )
        return cls(
            n_layer=size("block_count"),
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=n_head_kv,
            d_head=d_head,
            rope_base=base,
            rope_scale=factor if scaling == "linear" else 1.0,
            norm_eps=norm_eps,
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. The weights of the norms are folded into the matrices that follow them."""

    qkv: Array
    """[(n_head + 2 n_head_kv) * d_head, n_embd]; of an EAGLE-3 head [..., 2 n_embd]"""
    qkv_bias: Array | None
    """[(n_head + 2 n_head_kv) * d_head]"""
    attn_output: Array
    """[n_embd, n_head * d_head]"""
    gate_up: Array
    """[2 n_ff, n_embd]"""
    down: Array
    """[n_embd, n_ff]"""

    @classmethod
    def read(
        cls, i: int, h: Hyperparameters, attn_norm: Array, tensors: Collection[str], read: Callable[..., Array]
    ) -> Layer:
        """Block i of a file.

        Args:
            i: which.
            h: the sizes.
            attn_norm: of what goes into the attention.
            tensors: names of those in the file.
            read: tensor and its shape -> values, as ``read_tensor``.
        """
        n_q, n_kv = h.n_head * h.d_head, h.n_head_kv * h.d_head
        parts = list(zip("qkv", (n_q, n_kv, n_kv), strict=True))
        qkv = [read(f"blk.{i}.attn_{part}.weight", n, len(attn_norm)) for part, n in parts]
        biases = [
            read(name, n) if (name := f"blk.{i}.attn_{part}.bias") in tensors else np.zeros(n) for part, n in parts
        ]
        ffn_norm = read(f"blk.{i}.ffn_norm.weight", h.n_embd)
        gate = read(f"blk.{i}.ffn_gate.weight", None, h.n_embd)
        return cls(
            qkv=np.concatenate(qkv) * attn_norm,
            qkv_bias=np.concatenate(biases) if any(bias.any() for bias in biases) else None,
            attn_output=read(f"blk.{i}.attn_output.weight", h.n_embd, n_q),
            gate_up=np.concatenate([gate, read(f"blk.{i}.ffn_up.weight", len(gate), h.n_embd)]) * ffn_norm,
            down=read(f"blk.{i}.ffn_down.weight", h.n_embd, len(gate)),
        )


def read_tensor(file: GGUFFile, name: str, shape: Sequence[int | None]) -> Array:
    """A tensor in float64, rows first; its shape must be the one given, None being any size."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise UnsupportedModel(f"{file.path.name} lacks the tensor {name}")
    found = tensor.shape[::-1]
    if len(found) != len(shape) or any(want not in (None, have) for want, have in zip(shape, found, strict=True)):
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise UnsupportedModel(f"{file.path.name}: {name} is {list(found)} where the header says [{expected}]")
    try:
        rows = file.tensor_bytes(name).reshape(*tensor.shape[:0:-1], -1)
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(tensor.ggml_type))
    except (NotImplementedError, ValueError):
        raise UnsupportedModel(
            f"{file.path.name}: the gguf package cannot unpack {tensor.type_name} ({name}); use another --backend"
        ) from None
    return np.asarray(values, dtype=np.float64)


def _short(value: Any) -> str:
    return " ".join(repr(value).split())[:60]
