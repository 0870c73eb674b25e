"""A text carried from one vocabulary to another and back: the same bytes, whatever the text and wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, permutations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.backends.tokenizer import PythonByteLevel, Tokenizer
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab
from localspec.spec_decode.drafters.carried_text import CarriedText, Side
from tests.support.gguf_vocabs import TinyVocab, bpe_vocab, spm_vocab
from tests.support.ggufs import write_tokenizer_only

VOCABS = {
    "bpe": bpe_vocab(300),
    "wide bpe": bpe_vocab(384, "llama-bpe"),
    "spm": spm_vocab(),
    "spm without prefix": replace(spm_vocab(320), add_space_prefix=False),
}
REAL = list(permutations(["smollm2-135m", "qwen2.5-coder-0.5b", "gemma3-270m"], 2))
PAIRS = list(permutations(VOCABS, 2))
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([" the", " and", "\n", "  ", "é", "ü", " an", "東", "🎉", "x1", ".", "\t"])).map("".join),
)


def side_of(path: Path) -> Side:
    with GGUFFile(path) as gguf:
        vocab = Vocab.from_gguf(gguf)
        tokenizer = Tokenizer(gguf, vocab, PythonByteLevel)
    return Side(vocab, tokenizer.encode)


@cache
def side(name: str) -> Side:
    vocab: TinyVocab = VOCABS[name]
    with TemporaryDirectory() as folder:
        return side_of(write_tokenizer_only(Path(folder) / "vocab.gguf", vocab))


def bytes_of(side: Side, tokens: Sequence[int]) -> bytes:
    return b"".join(map(side.vocab.token_bytes, tokens))


def without_bos(side: Side, ids: Sequence[int]) -> Sequence[int]:
    return ids[1:] if side.vocab.add_bos else ids


@pytest.mark.parametrize(("one", "other"), PAIRS)
@given(text=TEXTS, data=st.data())
def test_any_text_grown_and_cut_anywhere(one: str, other: str, text: str, data: st.DataObject) -> None:
    """After any changes what the draft model reads spells the text up to its last whole character."""
    target, draft = side(one), side(other)
    tokens = target.tokens_of(text.encode())
    if tokens is None:
        return
    carried = CarriedText(target, draft)
    for n in [*data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)), len(tokens)]:
        ids = carried.follow(tokens[:n])
        so_far = bytes_of(target, tokens[:n])
        assert bytes_of(draft, without_bos(draft, ids)) + carried.pending == so_far
        assert carried.pending == b"" or so_far.decode("utf-8", "ignore").encode() + carried.pending == so_far


@pytest.mark.parametrize(("one", "other"), PAIRS)
@given(text=TEXTS, more=TEXTS, cut=st.integers(0, 80))
def test_what_the_draft_says_comes_back_as_it_is(one: str, other: str, text: str, more: str, cut: int) -> None:
    """Byte for byte, but for half a character at its end, and each token says what it was made of."""
    target, draft = side(one), side(other)
    tokens, said = target.tokens_of(text.encode()), draft.tokens_of(more.encode())
    if tokens is None or said is None:
        return
    carried = CarriedText(target, draft)
    carried.follow(tokens)
    drafted = list(said[:cut])
    back = carried.continuation(drafted)
    spelled = bytes_of(draft, drafted)
    whole = spelled.decode("utf-8", "ignore").encode() if cut < len(said) else spelled
    assert bytes_of(target, [token for token, _ in back]) == whole
    ends = list(accumulate(len(draft.vocab.token_bytes(token)) for token in drafted))
    at = 0
    for token, n in back:
        at += len(target.vocab.token_bytes(token))
        assert ends[n - 1] >= at
        assert n == 1 or ends[n - 2] < at


def test_half_a_character_waits_for_its_other_half() -> None:
    target, draft = side("bpe"), side("spm")
    tokens = target.tokens_of("é🎉".encode())
    assert tokens is not None
    carried, first = CarriedText(target, draft), [target.vocab.token_bytes(token) for token in tokens]
    n = next(
        n for n in range(1, len(tokens)) if b"".join(first[:n])[-1] >= 0x80 and b"".join(first[:n]) != "é".encode()
    )
    carried.follow(tokens[:n])
    assert carried.pending
    rest = "é🎉".encode()[len(b"".join(first[:n])) :]
    said = draft.tokens_of("🎉".encode()) if n > 1 else draft.tokens_of("é".encode())
    assert said is not None
    back = carried.continuation(said)
    assert rest.startswith(bytes_of(target, [token for token, _ in back]))
    assert carried.continuation(draft.tokens_of(b" the the") or []) == []  # which cannot follow half a character


def test_special_tokens_are_carried_over_by_name_and_meaning() -> None:
    target, draft = side("bpe"), side("spm")
    start, end = (
        next(i for i in target.vocab.marks if target.vocab.token_text(i) == name)
        for name in ("<|im_start|>", "<|im_end|>")
    )
    its_start, its_end = (
        next(i for i in draft.vocab.marks if draft.vocab.token_text(i) == name)
        for name in ("<|im_start|>", "<|im_end|>")
    )
    text = target.tokens_of(b" the") or []
    carried = CarriedText(target, draft)
    ids = without_bos(draft, carried.follow([start, *text, end, *text]))
    assert ids[0] == its_start
    assert its_end in ids
    assert bytes_of(draft, ids) == b" the the"
    assert [token for token, _ in carried.continuation([*(draft.tokens_of(b" and") or []), its_end])][-1] == end


@pytest.mark.real
@pytest.mark.parametrize(("one", "other"), REAL)
def test_real_vocabularies(real_model: Callable[[str], Path], one: str, other: str) -> None:
    """Grown token by token it is what the tokenizer makes of the whole, and as the text goes on so do the drafts."""
    target, draft = side_of(real_model(one)), side_of(real_model(other))
    text = (Path(__file__).parents[3] / "README.md").read_text("utf-8")[:4000] + "\n\tGröße 東京 🎉 naïve 1234567\n"
    tokens = target.tokens_of(text.encode())
    assert tokens is not None
    whole = list(CarriedText(target, draft).follow(tokens))
    carried = CarriedText(target, draft)
    for n in range(1, len(tokens) + 1):
        ids = carried.follow(tokens[:n])
    assert ids == whole
    assert bytes_of(draft, without_bos(draft, whole)) == text.encode()
    for n in range(100, len(tokens) - 40, 61):
        before = list(carried.follow(tokens[:n]))
        if whole[: len(before)] == before:
            back = carried.continuation(whole[len(before) : len(before) + 24])
            assert len(back) > 4
            assert [token for token, _ in back[:-2]] == tokens[n : n + len(back) - 2]
