"""Tokenizers built from a GGUF alone, MLX's and the reference's, against llama.cpp's, token for token.

The tiny vocabularies join any two neighbouring letters, so that a word that is cut at another place shows at once.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from localspec.errors import UnsupportedModel
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab
from tests.conftest import open_backend
from tests.support import ggufs
from tests.support.gguf_vocabs import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    TinyVocab,
    byte_symbols,
    with_tokens,
)

pytest.importorskip("tokenizers")

from localspec.backends.mlx.tokenizer import SPLITS, ByteLevel
from localspec.backends.tokenizer import PythonByteLevel, Tokenizer

OF_THE_REFERENCE = ("gpt-2", "default", "qwen2", "smollm", "llama-bpe")

PIECES = [
    " ", "  ", "\t", "\n", "\r\n", "\r", "\u00a0", "\u3000", "\x85", "\x1c", "\u2028", "\u200b", "\u200d", "\ufeff",
    "a", "b", "S", "Z", "é", "É", "ß", "ǅ", "e\u0301", "日", "本語", "한", "ไทย", "ا", "अ", "ि",
    "😀", "👨‍👩‍👧", "\U0001e030",
    "'s", "'LL", "'ſ", "'", "1", "23", "456789", "４", "²", "Ⅷ", "٣", "!", "?!",
    "_", '"', "<", "|", ">", "$", "+=", "~", "\\",
    "the", "ing", "sab", "def ", "(x)", "{", "}", "==", "\x00", "\x7f", "\ufffd", "\uffff", "\ue000", "\U0010ffff",
    "▁", "▁▁", "Ġ",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<0x0A>", "<mark>", "<mark><", "k>", "[x]",
]  # fmt: skip
"""Ingredients that tokenizers are known to treat each in its own way."""


def mixtures(n: int, seed: int = 0) -> Iterator[str]:
    """Random texts from the pieces, and from code points of all planes."""
    rng = random.Random(seed)
    for i in range(n):
        if i % 4:
            yield "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 30)))
        else:
            ranges = [(0, 0x7F), (0, 0x7FF), (0, 0xD7FF), (0xE000, 0x10FFFF)]
            yield "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 40)))


def all_of_unicode(step: int = 1) -> Iterator[str]:
    """Every code point, among letters and among marks.

    Args:
        step: leave out all but one in so many blocks of those planes where next to nothing is assigned.
    """
    for i, start in enumerate(range(0, 0x110000, 0x200)):
        empty = start >= 0x33400 and not 0xE0000 <= start < 0xE0200
        chars = [chr(code) for code in range(start, start + 0x200) if not 0xD800 <= code < 0xE000]
        if chars and not (empty and i % step):
            yield "a".join(chars)
            yield "!".join(chars)


def runs() -> Iterator[str]:
    for n in (1, 2, 3, 4, 5, 7, 15, 16, 17, 33, 64, 257):
        for piece in (" ", "\n", "\t", "\r\n", " \n", "a", "ab ", "0123456789", "!", "日", "▁", "é", "'s"):
            yield piece * n
        yield "x" + " " * n + "y" + "\n" * n + "z"


def pair_vocab(pre: str) -> TinyVocab:
    """Byte-level BPE in which any two letters, digits, marks or blanks that meet in a word are one token."""
    symbols = byte_symbols()
    tokens = list(symbols)
    used = [symbols[byte] for byte in b" \n\rabsSzZtl'0123456789!?$+<|>\xc3\xa9\xe6\x97\xa5"]
    merges = [f"{left} {right}" for left in used for right in used]
    tokens += [left + right for left in used for right in used]
    # A merge of merges, one whose product has no token, and two of what is no token itself.
    merges += ["ab ab", "zz zz", "nowhere a", "b nowhere"]
    tokens.append("abab")
    # No merges lead here: only splits that take whole words as they are find it.
    tokens.append("sab")
    types = [NORMAL] * len(tokens)
    special = {"<|endoftext|>": CONTROL, "<|im_end|>": NORMAL, "<mark>": USER_DEFINED, "<mark><mark>": USER_DEFINED}
    tokens += special
    types += special.values()
    end = tokens.index("<|endoftext|>")
    return TinyVocab("gpt2", tokens, types, merges=merges, pre=pre, bos=end, eos=end)


def every_pair_vocab(pre: str) -> TinyVocab:
    """Byte-level BPE with a token for any two bytes: where a word begins shows in how its bytes pair up."""
    symbols = byte_symbols()
    merges = [f"{left} {right}" for left in symbols for right in symbols]
    tokens = [*symbols, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    types = [NORMAL] * (len(tokens) - 1) + [CONTROL]
    return TinyVocab("gpt2", tokens, types, merges=merges, pre=pre, bos=len(types) - 1, eos=len(types) - 1)


def score_vocab() -> TinyVocab:
    """SentencePiece with several ways to the same token, equal scores, and runs of spaces as tokens."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = special + [f"<0x{i:02X}>" for i in range(256)]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    pieces = [
        "▁",
        *"abst01<>x0A",
        *["▁▁", "▁▁▁", "▁▁▁▁", "ab", "ba", "aba", "bab", "abab", "▁a", "▁ab", "▁t", "st", "日", "é"],
    ]
    pieces = list(dict.fromkeys(pieces))
    tokens += pieces
    types += [NORMAL] * len(pieces)
    scores = [0.0] * 259 + [-float(i // 2) for i in range(len(pieces))]
    tokens.append("<mark>")
    types.append(USER_DEFINED)
    return TinyVocab("llama", tokens, types, [*scores, 0.0], bos=1, eos=2, unk=0, add_bos=True)


class Both:
    """Our tokenizers and those of engines in C++, for one file."""

    def __init__(self, path: Path, engines: Sequence[str] = ("llama-cpp",)) -> None:
        with GGUFFile(path) as file:
            self.vocab = Vocab.from_gguf(file)
            kinds = [ByteLevel, PythonByteLevel] if self.vocab.pre in OF_THE_REFERENCE else [ByteLevel]
            self.ours, *self.others = [Tokenizer(file, self.vocab, kind) for kind in kinds]
        self.theirs = [open_backend(name).load(path, n_gpu_layers=0) for name in engines]

    def __enter__(self) -> Both:
        return self

    def __exit__(self, *exc: object) -> None:
        for model in self.theirs:
            model.close()

    def check(self, *texts: str, special: Sequence[bool] = (False, True)) -> None:
        for text, parse_special in product(texts, special):
            options = {"add_special": True, "parse_special": parse_special}
            ours, (theirs, *same) = (
                self.ours.encode(text, **options),
                [m.tokenize(text, **options) for m in self.theirs],
            )
            if ours != theirs:
                at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
                spelled = [[self.vocab.token_text(token) for token in each[at : at + 5]] for each in (ours, theirs)]
                pytest.fail(f"{text[:200]!r}: at {at} ours {spelled[0]}, llama.cpp's {spelled[1]}")
            # The one in Python takes a time that grows with the square of a word's length, and knows the characters
            # that this Python knows.
            if len(text) < 300 and all(unicodedata.category(char) != "Cn" for char in text):
                same += [each.encode(text, **options) for each in self.others]
            assert all(each == theirs for each in same), text[:200]


SHAPE = ggufs.Shape(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, n_ff=32)


def tiny_file(folder: Path, vocab: TinyVocab, name: str) -> Path:
    return ggufs.write_llama(folder / f"{name}.gguf", SHAPE, vocab)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def byte_level(folder: Path) -> Iterator[Both]:
    with Both(tiny_file(folder, pair_vocab("qwen2"), "byte-level")) as both:
        yield both


@pytest.fixture(scope="module")
def sentencepiece(folder: Path) -> Iterator[Both]:
    with Both(tiny_file(folder, score_vocab(), "sentencepiece")) as both:
        yield both


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_split_that_is_known_cuts_as_llama_cpp_does(folder: Path, pre: str) -> None:
    engines = ("llama-cpp", "ik-llama") if pre in OF_THE_REFERENCE else ("llama-cpp",)
    with Both(tiny_file(folder, pair_vocab(pre), pre), engines) as both:
        both.check(*mixtures(70, seed=len(pre)), *list(runs())[::9])


@pytest.mark.parametrize("pre", ["qwen2", "deepseek-v3"])
def test_all_of_unicode(folder: Path, pre: str) -> None:
    """The two splits use all the classes of characters that there are."""
    with Both(tiny_file(folder, every_pair_vocab(pre), f"unicode-{pre}")) as both:
        both.check(*all_of_unicode(step=16), special=[False])


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_sentencepiece(folder: Path, add_space_prefix: bool) -> None:
    vocab = replace(score_vocab(), add_space_prefix=add_space_prefix)
    with Both(tiny_file(folder, vocab, f"spm-{add_space_prefix}"), ("llama-cpp", "ik-llama")) as both:
        both.check(*mixtures(400), *runs(), *list(all_of_unicode(step=64))[::4])


def test_sentencepiece_with_tokens_across_words(folder: Path) -> None:
    """Where a token has a space inside, words cannot be looked at one by one."""
    vocab = with_tokens(score_vocab(), "", normal=["a▁", "a▁b"])
    vocab = replace(vocab, scores=[*vocab.scores[:-2], -0.1, -0.2])
    with Both(tiny_file(folder, vocab, "spm-across")) as both:
        both.check("a b a b  a ba b", *mixtures(200), *runs())
        assert vocab.id("a▁b") in both.ours.encode("xa b")


def test_special_tokens_swallow_blanks_where_the_model_is_a_phi_3(folder: Path) -> None:
    vocab = with_tokens(score_vocab(), "", control=["<|endoftext|>"])
    path = ggufs.write_llama(folder / "phi.gguf", SHAPE, vocab, extra={"general.name": "Tiny Phi-3"})
    with Both(path) as both:
        both.check("</s>  \n ab", "<s> ab", "<mark>\t ab <mark> ", "a</s>\u00a0b", *mixtures(100))
        assert both.ours.encode("</s>  ab", parse_special=True) == both.ours.encode("</s>ab", parse_special=True)


def test_a_vocabulary_that_lacks_bytes_drops_them(folder: Path) -> None:
    """As llama.cpp does; SmolLM2 has no token for 21 of the 256 bytes."""
    vocab = pair_vocab("gpt-2")
    missing = {byte_symbols()[0], byte_symbols()[0xC0], byte_symbols()[0xF5], "q"}
    kept = [i for i, token in enumerate(vocab.tokens) if token not in missing]
    vocab = replace(
        vocab, tokens=[vocab.tokens[i] for i in kept], types=[vocab.types[i] for i in kept], bos=None, eos=0
    )
    with Both(tiny_file(folder, vocab, "lacking")) as both:
        both.check("\x00", "a\x00b", "quick", "zzzz", "a q b", *mixtures(200))


def test_an_unknown_split_is_named(folder: Path) -> None:
    path = tiny_file(folder, pair_vocab("never-heard-of"), "unknown")
    with GGUFFile(path) as file, pytest.raises(UnsupportedModel, match=r"unknown\.gguf .*'never-heard-of'.*llama-cpp"):
        Tokenizer(file, Vocab.from_gguf(file), ByteLevel)


def test_speed_does_not_fall_with_length(byte_level: Both, sentencepiece: Both) -> None:
    """A hundred thousand letters without a space, and as many spaces: no quadratic work (pytest's timeout fails it)."""
    for both in (byte_level, sentencepiece):
        for text in ("ab" * 50_000, " " * 100_000, "\n" * 100_000, "1" * 100_000):
            assert both.ours.encode(text)


@pytest.mark.real
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "smollm2-135m", "gemma3-270m"])
def test_real_vocabularies(name: str, real_model: Callable[[str], Path]) -> None:
    code = [path.read_text() for path in sorted(Path(__file__).parents[1].rglob("test_*.py"))[::3]]
    with Both(real_model(name)) as both:
        both.check(*mixtures(1500), *runs(), *code, *all_of_unicode())
