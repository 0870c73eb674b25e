"""Fill-in-the-middle prompts: their form for each family, and what goes where there is no room."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from localspec.errors import UsageError
from localspec.prompts.infill import FillPrompt, fill_prompt
from localspec.prompts.prompts import PromptEncoder
from tests.prompts.test_thinking import encoder_of
from tests.support import ggufs
from tests.support.gguf_vocabs import fim_vocab, spm_vocab

FAMILIES = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "starcoder2": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
    "granite": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>"),
    "codegemma": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"),
}


def encoder_for(folder: Path, names: tuple[str, ...], *, spm: bool = False, **extra: Any) -> PromptEncoder:
    vocab = fim_vocab(names, spm_vocab() if spm else None)
    shape = ggufs.Shape(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, n_ff=32)
    return encoder_of(ggufs.write_llama(folder / "tiny.gguf", shape, vocab, extra=extra))


def shown(encoder: PromptEncoder, tokens: list[int]) -> str:
    return "".join(map(encoder.token_text, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_form(family: str, tmp_path: Path) -> None:
    names = FAMILIES[family]
    pre, suf, mid = names[:3]
    encoder = encoder_for(tmp_path, names)
    alone = fill_prompt(encoder, "be fore", "be hind", room=200)
    assert shown(encoder, alone.tokens) == f"{pre}be fore{suf}be hind{mid}"
    assert shown(encoder, alone.tokens[: alone.n_before]) == f"{pre}be fore"
    others = fill_prompt(encoder, "P", "S", {"a.py": "one", "b.py": "two"}, room=200, name="c.py")
    sep = next((name for name in names if "sep" in name), None)
    if sep is None:
        expected = f"{pre}a.py\none\n\nb.py\ntwo\n\nP{suf}S{mid}"
    else:
        repository = f"{names[3]}project\n" if len(names) == 5 else ""
        expected = f"{repository}{sep}a.py\none{sep}b.py\ntwo{sep}c.py\n{pre}P{suf}S{mid}"
    assert shown(encoder, others.tokens) == expected


@pytest.mark.parametrize("words", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_ids_in_the_file_go_before_names(words: tuple[str, ...], tmp_path: Path) -> None:
    odd = ("<|one|>", "<|two|>", "<|three|>")
    n = len(fim_vocab(odd))
    ids = {f"tokenizer.ggml.{word}_token_id": n - 3 + i for i, word in enumerate(words)}
    encoder = encoder_for(tmp_path, odd, **ids)
    prompt = fill_prompt(encoder, "a", "b", room=100)
    assert shown(encoder, prompt.tokens) == "<|one|>a<|two|>b<|three|>"


def test_sentencepiece_puts_no_space_before_the_suffix(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path, FAMILIES["codellama"], spm=True)
    prompt = fill_prompt(encoder, "the", "that", room=100)
    text = [encoder.token_text(token) for token in prompt.tokens]
    assert text[:2] == ["<s>", "▁<PRE>"]
    assert "".join(text[text.index("▁<SUF>") + 1 : -1]) == "that"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return encoder_for(tmp_path_factory.mktemp("qwen"), FAMILIES["qwen"])


def test_what_makes_no_sense(qwen: PromptEncoder, tmp_path: Path) -> None:
    cases: list[tuple[PromptEncoder, Any, Any, Any, str]] = [
        (qwen, "", "", {}, "nothing to fill in from"),
        (qwen, 5, "", {}, "only a text can be tokenised"),
        (qwen, "a", None, {}, "only a text can be tokenised"),
        (qwen, "a", "", {"a.py": 1}, "context_files must be"),
        (qwen, "a", "", ["a.py"], "context_files must be"),
        (qwen, "a", "", 3, "context_files must be"),
        (encoder_for(tmp_path, ()), "a", "b", {}, "no fill-in-the-middle tokens"),
    ]
    for encoder, prefix, suffix, files, message in cases:
        with pytest.raises(UsageError, match=message):
            fill_prompt(encoder, prefix, suffix, files, room=100)


def letters(n: int, first: str) -> str:
    """So many tokens: pairs of letters that no merge joins."""
    return (f"{first}Q" * n)[:n]


@pytest.mark.parametrize("room", [8 + 3, 60, 61, 200, 1000])
@pytest.mark.parametrize("n", [0, 1, 40, 500, 3000])
def test_it_is_never_longer_than_the_room(qwen: PromptEncoder, room: int, n: int) -> None:
    for files in ((), [("a", letters(n, "A"))], [("a", letters(30, "A")), ("b", letters(n, "B"))]):
        prompt = fill_prompt(qwen, letters(n, "P") + "x", letters(n, "S"), files, room=room)
        assert len(prompt.tokens) <= room
        assert "x" in shown(qwen, prompt.tokens[: prompt.n_before])  # what is next to the cursor is always there


def test_files_go_first_and_the_farthest_of_them(qwen: PromptEncoder) -> None:
    files = [("far", letters(300, "F")), ("near", letters(300, "N"))]

    def kept(n_prefix: int) -> tuple[bool, bool]:
        text = shown(qwen, fill_prompt(qwen, letters(n_prefix, "P"), "S", files, room=800).tokens)
        return "far" in text, "near" in text

    assert kept(10) == (True, True)
    assert kept(200) == (False, True)
    whole = fill_prompt(qwen, letters(790, "P"), "S", files, room=800)
    assert (len(whole.tokens) > 780, "near" in shown(qwen, whole.tokens)) == (True, False)


def test_typing_leaves_what_stands_before_as_it_was(qwen: PromptEncoder) -> None:
    """Whatever has to go for lack of room goes in few steps: between them the beginning stays, to the token."""
    files = [(f"{i}.py", letters(60, "ABCDEFGH"[i])) for i in range(8)]

    def prompts(room: int) -> list[FillPrompt]:
        return [fill_prompt(qwen, letters(n, "P"), "SUFFIX", files, room=room) for n in range(1, 900)]

    made = prompts(700)
    changes = sum(new.tokens[: old.n_before] != old.tokens[: old.n_before] for old, new in pairwise(made))
    assert changes <= 16  # eight steps until the files are gone, and one for each eighth of the room after that


def test_the_suffix_is_bounded(qwen: PromptEncoder) -> None:
    long = fill_prompt(qwen, "P", letters(5000, "S"), room=4000)
    assert len(long.tokens) - long.n_before == 256 + 2
    short = fill_prompt(qwen, "P", letters(5000, "S"), room=4000, suffix_tokens=10)
    assert len(short.tokens) - short.n_before == 10 + 2
