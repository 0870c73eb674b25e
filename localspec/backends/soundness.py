"""Refuses files that would end the process in an engine in C++.

The engines check most of what a header says; the rest they assert, or read beyond a table. Each rule here stands for an
abort that was seen with a damaged file; ``make fuzz`` looks for more. What no rule knows, the sizes of the many kinds
of models, is tried in another process: see ``has_usual_sizes`` and ``trial``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from localspec.errors import ModelFileError, UnsupportedModel, shown
from localspec.model_files.gguf import GGUFFile, TensorInfo
from localspec.model_files.vocab import Vocab

_UINT32 = 4
_NO_WEIGHTS = frozenset((9, 15, 24, 25, 26, 27, 28, 97, 98, 99, 136, 147, 148, 149, 150))
"""Q8_1, Q8_K and ik_llama.cpp's kinds of them, integers and F64: for activations and indices, not for weights."""
_SCALINGS = ("none", "linear", "yarn", "longrope")  # rope scalings by the names that engines know
_MAX_EXPERTS = 512
_MAX_LAYERS = 512
_LARGEST = (1 << 31) - 1
_LEAST = 5e-324  # the smallest number over 0

_RANGES: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("epsilon",), _LEAST, 1.0),
    (("freq_base", "freq_base_swa"), _LEAST, math.inf),
    (("embedding_length", "context_length"), 1, _LARGEST),
    (("block_count",), 0, _MAX_LAYERS),
    (("_count", "_count_kv", "_length", "_length_swa", "_size", "_rank", "_interval", "sliding_window"), 0, _LARGEST),
)
"""How names of hyperparameters end, and what their values may be: the first that fits."""

_USUAL = frozenset(
    (
        "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
        "rope.dimension_count", "rope.freq_base", "rope.scaling.factor", "rope.scaling.original_context_length",
    )
)  # fmt: skip
"""The numbers of an ordinary decoder."""

_WINDOW = 512
_MOST_SPECIAL = {"gpt2": 11, "llama": 2, "t5": 1}
"""The largest id that an engine takes for a special token where the file declares none."""


def check_sound(gguf: GGUFFile, vocab: Vocab, computes: Callable[[TensorInfo], bool], alignment: int = 1) -> None:
    """Refuse a file that would end the process, of an engine that ``computes`` a tensor of some type and size, and
    needs tensors at multiples of ``alignment`` bytes.

    Raises:
        ModelFileError: it is damaged.
        UnsupportedModel: the engine has no kernels for it.
    """
    name = gguf.path.name
    _refuse(gguf, _damages(gguf, vocab))
    scaling = gguf.field("rope.scaling.type", "none")
    if isinstance(scaling, str) and scaling not in _SCALINGS:
        raise UnsupportedModel(f"{name} has rope scaling of the unknown type {shown(scaling)}")
    for tensor in gguf.tensors.values():
        if tensor.offset % alignment:
            raise UnsupportedModel(
                f"{name}: {tensor.name} does not begin at a multiple of {alignment} bytes, as this engine needs it; "
                "try another --backend"
            )
        if not computes(tensor):
            raise UnsupportedModel(
                f"{name}: this engine does not compute {tensor.name}, which is {tensor.type_name} in rows of "
                f"{tensor.shape[0]}; try another --backend"
            )
        if tensor.ggml_type in _NO_WEIGHTS and tensor.name.endswith((".weight", ".bias")):
            raise UnsupportedModel(f"{name} has weights of the type {tensor.type_name} ({tensor.name})")


def has_usual_sizes(gguf: GGUFFile) -> bool:
    """Whether a file has only the numbers of an ordinary decoder, and they fit together: no assertion fails then."""
    sizes = dict(_numbers(gguf))
    if not _USUAL.issuperset(sizes):
        return False

    def whole(name: str, otherwise: int = 0) -> int:
        value = sizes.get(name, otherwise)
        return value if isinstance(value, int) else 0

    n_embd, n_heads, window = (
        whole(name) for name in ("embedding_length", "attention.head_count", "attention.sliding_window")
    )
    n_kv = whole("attention.head_count_kv", n_heads)
    width = whole("attention.key_length", n_embd // n_heads if n_heads else 0)
    rotated = whole("rope.dimension_count", width)
    return (
        0 < n_kv <= n_heads <= n_embd
        and n_heads % n_kv == 0
        and 0 < rotated <= width <= n_embd
        and rotated % 2 == 0
        and whole("attention.value_length", width) == width
        and whole("feed_forward_length") > 0
        and (window == 0 or window >= _WINDOW)
    )


def _numbers(gguf: GGUFFile) -> list[tuple[str, Any]]:
    """The hyperparameters that are numbers, or lists of numbers, by their names without the architecture's."""
    prefix = f"{gguf.architecture}."
    return [
        (key.removeprefix(prefix), value)
        for key, value in gguf.metadata.items()
        if key.startswith(prefix) and isinstance(value, int | float | np.ndarray) and not isinstance(value, bool)
    ]


def check_hyperparameters(gguf: GGUFFile) -> None:
    """Raise ModelFileError for NaN and infinity, sizes that are negative or over 31 bits, a norm without epsilon."""
    _refuse(gguf, _odd_numbers(gguf))


def _refuse(gguf: GGUFFile, damages: Iterator[str]) -> None:
    for what in damages:
        raise ModelFileError(f"{gguf.path.name} is damaged: {what}; fetch it again")


def _odd_numbers(gguf: GGUFFile) -> Iterator[str]:
    for name, value in _numbers(gguf):
        low, high = next(((low, high) for ends, low, high in _RANGES if name.endswith(ends)), (-math.inf, math.inf))
        for each in np.atleast_1d(value).tolist():
            # A list of numbers may say with an infinite one that a layer has no bound.
            if not low <= each <= high or (isinstance(value, float) and math.isinf(value)):
                yield f"its {gguf.architecture}.{name} is {each:g}"


def _damages(gguf: GGUFFile, vocab: Vocab) -> Iterator[str]:
    for key in ("general.file_type", "general.alignment"):
        if gguf.kinds.get(key, _UINT32) != _UINT32:
            yield f"{key} is not a 32-bit number"
    yield from _odd_numbers(gguf)
    total, used = (gguf.field(f"expert_{which}", 0) for which in ("count", "used_count"))
    are_counts = isinstance(total, int) and isinstance(used, int)
    if are_counts and (total > _MAX_EXPERTS or used > total or (total and not used)):
        yield f"it says that {used} of {total} experts are used"
    if not vocab.n_tokens:  # a head
        return
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    raw, offsets = bytes(tokens.raw), tokens.offsets.tolist()
    # Engines read a token as far as its first zero byte.
    texts = [text for start, end in pairwise(offsets) if (text := raw[start + 8 : end].partition(b"\0")[0])]
    if len(set(texts)) < len(texts):
        twice = Counter(texts).most_common(1)[0][0].decode("utf-8", "replace")
        yield f"the token {twice[:40]!r} occurs twice in its vocabulary"
    if _MOST_SPECIAL.get(vocab.kind, 0) >= vocab.n_tokens:
        yield f"it has only {vocab.n_tokens} tokens"
