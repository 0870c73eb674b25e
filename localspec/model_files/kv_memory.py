"""How much memory a context takes, computed from a file's header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from localspec.errors import KV_CACHE_TYPES, UsageError
from localspec.model_files.gguf import GGUFFile

# Every n-th layer sees the whole context and the others a window, where the file does not list the layers itself.
_GLOBAL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "llama4": 4, "exaone4": 4}

# Type of a KV cache -> bytes per value: the quantised types keep 2 bytes of scale with every 32. f64 is the reference
# backend's own.
KV_VALUE_BYTES = {"f64": 8.0, "f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}

KV_BLOCK = 32  # Values that share a scale in a quantised KV cache, of ggml and of MLX
_WINDOW_SLACK = 256  # Rows beyond the window that an engine keeps for the tokens of one pass


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the keys and values of a model take."""

    values_per_token: tuple[int, ...]  # numbers stored per token of context, for each layer with attention
    windowed: tuple[bool, ...]  # for each of these layers, whether it only looks at the last ``window`` tokens
    window: int  # 0: no window
    recurrent: bool  # whether some layers keep a state of fixed size instead, which is not counted here

    def bytes(self, n_ctx: int, kv_type: str = "f16", *, only_window: bool = False) -> int:
        """Memory for a context of ``n_ctx`` tokens [bytes].

        ``only_window`` is for an engine that forgets what left the window. localspec keeps all: a rejected token can
        only be taken back exactly if nothing was forgotten for it.
        """
        in_window = min(n_ctx, self.window + _WINDOW_SLACK) if only_window else n_ctx
        layers = zip(self.values_per_token, self.windowed, strict=True)
        total = sum(values * (in_window if windowed else n_ctx) for values, windowed in layers)
        return round(total * KV_VALUE_BYTES[kv_type])


def kv_shape(gguf: GGUFFile) -> KVShape:
    """Read the shape from the header; unknown or odd values count as absent."""
    n_layer = min(_int(gguf, "block_count"), 4096)
    n_layer -= min(_int(gguf, "nextn_predict_layers"), n_layer)
    heads = _per_layer(gguf.field("attention.head_count"), n_layer)
    kv_heads = _per_layer(gguf.field("attention.head_count_kv"), n_layer) or heads
    size = _int(gguf, "embedding_length") // heads[0] if heads and heads[0] else 0
    key, value = _int(gguf, "attention.key_length", size), _int(gguf, "attention.value_length", size)
    in_window = _int(gguf, "attention.key_length_swa", key) + _int(gguf, "attention.value_length_swa", value)
    window = _int(gguf, "attention.sliding_window")
    windowed = _windowed(gguf, n_layer) if window else [False] * n_layer
    interval = _int(gguf, "full_attention_interval") or 1
    n_own = n_layer - _int(gguf, "attention.shared_kv_layers")
    own = [i for i, n in enumerate(kv_heads[: max(n_own, 0)]) if n > 0 and (i + 1) % interval == 0]
    return KVShape(
        tuple(kv_heads[i] * (in_window if windowed[i] else key + value) for i in own),
        tuple(windowed[i] for i in own),
        window,
        len(own) < n_own or gguf.field("ssm.state_size") is not None,
    )


def check_kv_type(gguf: GGUFFile, kv_type: str) -> None:
    """Refuse (``UsageError``) an unknown type of KV cache, or one whose blocks do not divide the heads: ik-llama aborts
    the process then."""
    if kv_type not in KV_CACHE_TYPES:
        raise UsageError(f"KV cache type {kv_type!r} is not one of {', '.join(KV_CACHE_TYPES)}")
    if not kv_type.startswith("q"):
        return
    n_embd, n_head = _int(gguf, "embedding_length"), _int(gguf, "attention.head_count")
    for part in ("key_length", "value_length"):
        length = _int(gguf, f"attention.{part}", n_embd // n_head if n_head else 0)
        if length % KV_BLOCK:
            raise UsageError(
                f"--kv-cache {kv_type} needs head sizes that are multiples of {KV_BLOCK}; the heads of "
                f"{gguf.path.name} are {length} wide; use f16"
            )


def _windowed(gguf: GGUFFile, n_layer: int) -> list[bool]:
    pattern = gguf.field("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and len(pattern) >= n_layer:
        return [bool(each) for each in pattern[:n_layer]]
    every = pattern if isinstance(pattern, int) and pattern > 0 else _GLOBAL_EVERY.get(gguf.architecture, 1)
    return [(i + 1) % every != 0 for i in range(n_layer)]


def _int(gguf: GGUFFile, name: str, default: int = 0) -> int:
    value = gguf.field(name)
    return int(value) if isinstance(value, int) and value >= 0 else default


def _per_layer(value: Any, n_layer: int) -> list[int]:
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        return [max(0, int(each)) for each in value[:n_layer]]
    return [int(value)] * n_layer if isinstance(value, int) and value > 0 else []
