"""What the engines in C++ take for granted of a file, and end the whole process over where it does not hold.

They check most of what a header says and report it as an error; the rest they assert, or read beyond a table. Each rule
here stands for an abort that was seen with a damaged file; ``make fuzz`` looks for more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from localspec.errors import ModelFileError, UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile, TensorInfo
from localspec.model_files.vocab import Vocab

_UINT32 = 4
_NO_MATRIX = frozenset((9, 15, 24, 25, 26, 27, 28, 97, 98, 99, 136, 147, 148, 149, 150))
"""Q8_1, Q8_K and ik_llama.cpp's kinds of them, integers and F64: for activations and indices, not for weights."""
_MAX_EXPERTS = 512
_MOST_SPECIAL = {"gpt2": 11, "llama": 2, "t5": 1}
"""The largest id that an engine takes for a special token where the file declares none."""


def check_sound(gguf: GGUFFile, vocab: Vocab, computes: Callable[[TensorInfo], bool], alignment: int = 1) -> None:
    """Refuse a file that would end the process.

    Args:
        gguf: the open file.
        vocab: its vocabulary.
        computes: whether the engine can work with a tensor of that type and size.
        alignment: what the places of tensors in the file must be multiples of [bytes].

    Raises:
        ModelFileError: it is damaged.
        UnsupportedModel: the engine has no kernels for it.
    """
    name = gguf.path.name

    def damaged(what: str) -> ModelFileError:
        return ModelFileError(f"{name} is damaged: {what}; fetch it again")

    for key in ("general.file_type", "general.alignment"):
        if gguf.kinds.get(key, _UINT32) != _UINT32:
            raise damaged(f"{key} is not a 32-bit number")
    _check_experts(gguf, damaged)
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
        if len(tensor.shape) > 1 and tensor.ggml_type in _NO_MATRIX and tensor.name.endswith(".weight"):
            raise UnsupportedModel(f"{name} has weights of the type {tensor.type_name} ({tensor.name})")
    if vocab.n_tokens:  # a head has none
        _check_vocab(gguf, vocab, damaged)


def _check_experts(gguf: GGUFFile, damaged: Callable[[str], ModelFileError]) -> None:
    counts = [gguf.field(f"expert_{which}", 0) for which in ("count", "used_count")]
    if all(isinstance(count, int) for count in counts):
        total, used = counts
        if total > _MAX_EXPERTS or used > total or (total and not used):
            raise damaged(f"it says {total} experts of which {used} are used")


def _check_vocab(gguf: GGUFFile, vocab: Vocab, damaged: Callable[[str], ModelFileError]) -> None:
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    raw, offsets = bytes(tokens.raw), tokens.offsets.tolist()
    # They read a token as far as its first zero byte.
    texts = [text for start, end in pairwise(offsets) if (text := raw[start + 8 : end].partition(b"\0")[0])]
    if len(set(texts)) < len(texts):
        twice = Counter(texts).most_common(1)[0][0].decode("utf-8", "replace")
        raise damaged(f"the token {twice[:40]!r} occurs twice in its vocabulary")
    if _MOST_SPECIAL.get(vocab.kind, 0) >= vocab.n_tokens:
        raise damaged(f"it has only {vocab.n_tokens} tokens")
