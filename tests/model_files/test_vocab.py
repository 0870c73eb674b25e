"""Vocabularies: equal to the engines' on every token, and compared before one model drafts for another."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.errors import UnsupportedModel
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab
from tests.conftest import TinyFiles, open_backend
from tests.support.gguf_vocabs import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    TinyVocab,
    bpe_vocab,
    renamed_vocab,
    spm_vocab,
    with_tokens,
)
from tests.support.ggufs import write_llama, write_tokenizer_only


def read(path: Path) -> Vocab:
    with GGUFFile(path) as file:
        return Vocab.from_gguf(file)


@pytest.fixture
def make(tmp_path: Path) -> Callable[[TinyVocab], Vocab]:
    """A vocabulary by way of a file."""
    count = iter(range(1000))
    return lambda vocab: read(write_tokenizer_only(tmp_path / f"v{next(count)}.gguf", vocab))


def engine_view(name: str, path: Path) -> tuple[list[bytes], set[int]]:
    """Every token's text and the end tokens, as an engine sees them."""
    with open_backend(name).load(path, n_threads=1) as model:
        lib, handle = model.binding.lib, model.binding.tokenizer(model._handle)
        to_piece = lib.llama_token_to_piece
        is_eog = lib.llama_token_is_eog if name == "ik-llama" else lib.llama_vocab_is_eog
        if name == "ik-llama":  # whose functions have no types yet
            pointer, i32 = ctypes.c_void_p, ctypes.c_int32
            is_eog.argtypes, is_eog.restype = [pointer, i32], ctypes.c_bool
            to_piece.argtypes = [pointer, i32, ctypes.c_char_p, i32, i32, ctypes.c_bool]
        buffer, pieces = ctypes.create_string_buffer(4096), []
        for token in range(model.n_vocab):
            size = to_piece(handle, token, buffer, 4096, 0, False)
            pieces.append(buffer.raw[:size])
        return pieces, {token for token in range(model.n_vocab) if is_eog(handle, token)}


VOCABS = {
    "every type": TinyVocab(
        "llama",
        ["<unk>", "<s>", "</s>", "<0x0A>", "▁a", "<tool>", "<mark>", "<unused0>", "<|end|>"],
        [UNKNOWN, CONTROL, CONTROL, BYTE, NORMAL, USER_DEFINED, CONTROL, UNUSED, USER_DEFINED],
        [0.0] * 9, bos=1, eos=2, unk=0, add_bos=True,
    ),
    # Whose messages do not end with <|end|>.
    "Harmony": with_tokens(bpe_vocab(), "", control=["<|return|>", "<|call|>", "<|end|>", "<|channel|>"]),
}  # fmt: skip

# The vocabulary of the larger Qwen is compared with the smaller one's below.
REAL = [pytest.param(name, marks=pytest.mark.real) for name in ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b")]


@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama"])
@pytest.mark.parametrize("file", ["spm", "bpe", "sliding", *VOCABS, *REAL])
def test_equals_the_engines_on_every_token(
    engine: str, tiny: TinyFiles, file: str, real_model: Callable[[str], Path], tmp_path: Path
) -> None:
    open_backend(engine)
    if file in VOCABS:
        path = write_llama(tmp_path / "model.gguf", vocab=VOCABS[file])
    else:
        path = getattr(tiny, file, None) or real_model(file)
    vocab, (pieces, ends) = read(path), engine_view(engine, path)
    assert [i for i in range(vocab.n_tokens) if vocab.token_bytes(i) != pieces[i]] == []
    assert hasattr(tiny, file) or len(pieces) == vocab.n_tokens
    assert vocab.eog == ends


@pytest.mark.real
def test_the_default_pair_shares_a_vocabulary(real_model: Callable[[str], Path]) -> None:
    target, draft = read(real_model("qwen2.5-coder-1.5b")), read(real_model("qwen2.5-coder-0.5b"))
    assert target.difference(draft) is None
    assert target.fingerprint == draft.fingerprint
    other = read(real_model("smollm2-135m"))
    assert target.difference(other) == "token 0 is '!' in the target and '<|endoftext|>' in the draft"


def test_special_ids_and_what_a_file_gets_wrong(make: Callable[[TinyVocab], Vocab]) -> None:
    vocab = make(spm_vocab())
    assert (vocab.bos, vocab.eos, vocab.eot, vocab.unk, vocab.pad) == (1, 2, 4, 0, None)
    assert vocab.add_bos
    assert vocab.token_text(THE) == "▁the"
    assert vocab.token_bytes(vocab.n_tokens) == vocab.token_bytes(-1) == b""
    with pytest.raises(IndexError):
        vocab.token_text(vocab.n_tokens)
    vocab = make(VOCABS["every type"])
    assert [i for i in range(9) if vocab.is_control(i)] == [0, 1, 2, 6, 7, 8]
    vocab = make(replace(bpe_vocab(), bos=10**6, eos=2**31))
    assert (vocab.add_bos, vocab.bos, vocab.eos) == (False, None, None)
    with pytest.raises(UnsupportedModel, match="'klingon'"):
        make(replace(bpe_vocab(), model="klingon"))


# -- two vocabularies -------------------------------------------------------------------------------------------------


def with_types(vocab: TinyVocab, token: int, kind: int) -> TinyVocab:
    return replace(vocab, types=[kind if i == token else each for i, each in enumerate(vocab.types)])


def longer(vocab: TinyVocab, text: str, kind: str, count: int = 1) -> TinyVocab:
    return with_tokens(vocab, vocab.chat_template, **{kind: [text.format(i) for i in range(count)]})


BASE = spm_vocab()
THE = BASE.id("▁the")


@pytest.mark.parametrize(
    "other",
    [
        BASE,
        replace(BASE, add_bos=False, bos=3),
        replace(BASE, unk=5, chat_template=None),
        longer(BASE, "[PAD{}]", "unused", 300),
        longer(BASE, "[PAD{}]", "normal", 3),
        longer(BASE, "<|reserved_special_token_{}|>", "control", 3),
        longer(BASE, "<image_soft_token>", "control"),
    ],
)
def test_differences_that_do_not_matter(make: Callable[[TinyVocab], Vocab], other: TinyVocab) -> None:
    assert make(BASE).difference(make(other)) is None
    assert make(other).difference(make(BASE)) is None
    assert make(replace(BASE)).fingerprint == make(BASE).fingerprint


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (with_types(renamed_vocab(renamed_vocab(BASE, 300, "x"), 299, "longer"), 350, CONTROL), "token 299 is "),
        (with_types(renamed_vocab(BASE, 300, "x1"), 290, CONTROL), "token 290 "),
        (renamed_vocab(BASE, THE, "▁teh"), f"token {THE} is '▁the' in the target and '▁teh' in the draft"),
        (renamed_vocab(BASE, THE, "▁thee"), f"token {THE} is '▁the' in the target and '▁thee' in the draft"),
        (renamed_vocab(BASE, THE, "[PAD1]"), f"token {THE} is '▁the' in the target and '[PAD1]' in the draft"),
        (with_types(BASE, THE, USER_DEFINED), f"token {THE} ('▁the') has type 1 in the target and 4 in the draft"),
        (longer(BASE, "word", "normal"), f"token {len(BASE)} is 'word' in the draft and missing in the other"),
        (replace(BASE, eos=3), "the end-of-text token is 2 '</s>' in the target and 3 '<|im_start|>' in the draft"),
        (replace(BASE, bos=3), "the begin-of-text token is 1 '<s>' in the target and 3 '<|im_start|>' in the draft"),
        (replace(BASE, eot=3), "3 '<|im_start|>' ends an answer only in the draft"),
        (bpe_vocab(), "the target's tokenizer is of the kind 'llama', the draft's 'gpt2'"),
    ],
)
def test_the_first_difference_is_named(make: Callable[[TinyVocab], Vocab], other: TinyVocab, words: str) -> None:
    assert (make(BASE).difference(make(other)) or "").startswith(words)
    assert make(BASE).fingerprint != make(other).fingerprint


def test_padding_may_have_other_names(make: Callable[[TinyVocab], Vocab]) -> None:
    one, other = longer(BASE, "[PAD{}]", "unused", 9), longer(BASE, "<unused_{}>", "unused", 9)
    assert make(one).difference(make(other)) is None
    other = longer(replace(other), "word", "normal")
    one = longer(one, "ward", "normal")
    words = f"token {len(BASE) + 9} is 'ward' in the target and 'word' in the draft"
    assert make(one).difference(make(other)) == words


@pytest.mark.parametrize(
    ("other", "agrees"),
    [
        (renamed_vocab(BASE, 3, "<|User|>"), True),
        (renamed_vocab(BASE, 3, "<|longer than it was|>"), True),
        (replace(BASE, eos=3, bos=4, eot=3), True),
        (longer(BASE, "<image>", "user_defined", 2), True),
        (with_types(renamed_vocab(BASE, 3, "word"), 3, NORMAL), True),  # special in one of the two
        (renamed_vocab(renamed_vocab(BASE, 3, "<|longer than it was|>"), THE, "▁teh"), False),
        (longer(BASE, "word", "normal"), False),
        (bpe_vocab(), False),
    ],
)
def test_where_only_special_tokens_differ(make: Callable[[TinyVocab], Vocab], other: TinyVocab, agrees: bool) -> None:
    for one, two in ((make(BASE), make(other)), (make(other), make(BASE))):
        assert one.difference(two) is not None
        assert (one.difference(two, special=False) is None) == agrees
    assert make(BASE).difference(make(BASE), special=False) is None
