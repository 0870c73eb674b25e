"""The numbers of the GGUF format by name, and how to find the strings of a list quickly."""

from __future__ import annotations

import struct
from collections.abc import Container

import numpy as np
import numpy.typing as npt

TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""ggml's tensor types: number -> (name, values in a block, bytes of a block). Importing ``gguf`` would take 0.2 s."""

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS",
    20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M",
    28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip
"""``general.file_type``: the mix of tensor types a file was quantised with."""

_EMBEDDING = (
    "bert nomic-bert nomic-bert-moe modern-bert neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding llama-embed"
)
HEADS = {"eagle3": "eagle3", "dflash": "dflash", "dflash-draft": "dflash", "gemma4-assistant": "mtp"}
"""The architecture that a file of a published head names -> the module of ``head_kinds`` that reads it. MTP layers in
files of their own name that of their target."""

NOT_GENERATORS = {
    **dict.fromkeys(_EMBEDDING.split(), "an embedding model"),
    "t5encoder": "an encoder",
    "t5": "an encoder-decoder model",
    "clip": "an image projector",
    "wavtokenizer-dec": "an audio decoder",
    "whisper": "a speech recogniser",
    "flux": "an image model",
    "sd1": "an image model",
    "sdxl": "an image model",
    "sd3": "an image model",
    "dream": "a diffusion model",
    "llada": "a diffusion model",
    **dict.fromkeys(("localspec-head", *HEADS), "a head that drafts for another model"),
}
"""Architectures that cannot continue a text token by token, and what they are."""


def is_mtp_alone(tensors: Container[str], n_blocks: object, n_extra: object) -> bool:
    """Whether a file has a layer for multi-token prediction without the model that it is for.

    Args:
        tensors: names of what it holds.
        n_blocks: layers that its header counts, those of the model too.
        n_extra: how many of these are for multi-token prediction.
    """
    if not n_extra or not isinstance(n_blocks, int):
        return False
    return f"blk.{n_blocks - 1}.nextn.eh_proj.weight" in tensors and "blk.0.attn_norm.weight" not in tensors


_WINDOW = 1 << 20


def string_offsets(buffer: memoryview, start: int, count: int) -> npt.NDArray[np.int64]:
    """Where each string of a list begins: 8 bytes of length, then the bytes, ``count`` times.

    Going from length to length in Python takes 0.1 s for a large vocabulary. Nearly all strings are shorter than 256
    bytes, and then their length is the only place with seven zero bytes in a row: those places are found with NumPy
    and kept only as far as each leads exactly to the next; where that breaks, single steps are taken.

    Args:
        buffer: the whole file.
        start: where the first length begins [bytes].
        count: number of strings.

    Returns:
        Offsets in the buffer [count + 1]; the last is the end of the list.

    Raises:
        struct.error, ValueError: a string reaches beyond the buffer.
    """
    size, unpack = len(buffer), struct.Struct("<Q").unpack_from
    parts: list[npt.NDArray[np.int64]] = []
    found, at = 0, start
    while found < count:
        if at + 8 > size:
            raise ValueError("a list of texts reaches beyond its end")
        window = np.frombuffer(buffer[at : at + _WINDOW], dtype=np.uint8)
        starts, ends = _links(window)
        breaks = np.flatnonzero(starts[1:] != ends[:-1])
        many = len(breaks) * 8 > len(starts)
        singles: list[int] = []
        position, limit = 0, len(window)
        while found < count and position < limit:
            i = int(np.searchsorted(starts, position)) if not many else len(starts)
            if i < len(starts) and starts[i] == position:
                next_break = int(np.searchsorted(breaks, i))
                last = int(breaks[next_break]) if next_break < len(breaks) else len(starts) - 1
                last = min(last, i + count - found - 1)
                parts.append(np.array(singles, dtype=np.int64) + at)
                parts.append(starts[i : last + 1] + at)
                singles = []
                found += last + 1 - i
                position = int(ends[last])
            else:
                if position + 8 > limit and position and at + limit < size:
                    break  # the length straddles two windows
                singles.append(position)
                position += 8 + unpack(buffer, at + position)[0]
                found += 1
        parts.append(np.array(singles, dtype=np.int64) + at)
        at += position
        if at > size:
            raise ValueError("a text reaches beyond its end")
    return np.concatenate([*parts, np.array([at], dtype=np.int64)])


def _links(window: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Places followed by seven zero bytes, and where a string whose length stands there would end."""
    zero = window == 0
    two = zero[:-1] & zero[1:]
    four = two[:-2] & two[2:]
    seven = four[:-3] & four[3:]
    starts = np.flatnonzero(seven[1:]) if len(window) > 8 else np.empty(0, dtype=np.int64)
    return starts, starts + 8 + window[starts]
