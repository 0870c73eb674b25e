"""Rows of which the engine hands out the largest logits only: heads draft what they draft of whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, SamplingParams
from localspec.backends.reference import ReferenceContext
from localspec.heads.card import Kind
from localspec.heads.published import load_published
from tests.conftest import TinyFiles, open_backend
from tests.spec_decode.drafters.test_published_heads import write_mtp
from tests.support.best_rows import force_best, hand_out_best
from tests.support.heads import write_random_head
from tests.support.published_heads import write_dflash, write_eagle3

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SETTINGS = {
    "greedy": GREEDY,
    "top-k": replace(GREEDY, temperature=1.0, top_k=40, seed=3),
    "without a seed": replace(GREEDY, temperature=1.0, top_k=12, top_p=0.9),
}
WHOLE = {
    "all": replace(GREEDY, temperature=1.0, seed=3),
    "top-p": replace(GREEDY, temperature=1.0, top_p=0.9, seed=5),
    "penalty": replace(GREEDY, repeat_penalty=1.2),
    "grammar": replace(GREEDY, grammar='root ::= ("one" | "two")+', ignore_eos=False),
}
PROMPTS = ("one two one two", "three four five")

Made = tuple[Path, Any]
"""A target, and what is to draft for it."""

Make = Callable[[TinyFiles, Path], Made]


def published(write: Callable[..., Path], **options: Any) -> Make:
    return lambda tiny, folder: (tiny.pair.target, write(tiny.pair.target, folder / "head.gguf", **options))


def of_mtp(name: str) -> Make:
    return lambda tiny, folder: (write_mtp(name, folder), "mtp")


def ours(kind: Kind) -> Make:
    def make(tiny: TinyFiles, folder: Path) -> Made:
        target = tiny.pair.target
        return target, f"head:{write_random_head(target, folder / 'head.gguf', kind, n_out=150)}"

    return make


def early_exit(tiny: TinyFiles, folder: Path) -> Made:
    return tiny.pair.target, "early-exit:1"


PUBLISHED = {
    "eagle3": (published(write_eagle3), ("llama-cpp", "mlx")),
    "eagle3 that borrows": (published(write_eagle3, own_output=False), ("llama-cpp", "mlx")),
    "eagle3 with a token map": (published(write_eagle3, n_out=200), ("llama-cpp", "mlx")),
    "dflash": (published(write_dflash), ("llama-cpp", "mlx")),
    "dflash with a token map": (published(write_dflash, n_out=250, block_size=16), ("llama-cpp", "mlx")),
    "dspark": (published(write_dflash, markov=True, n_out=250), ("llama-cpp",)),
    "dspark behind the anchor": (
        published(write_dflash, markov=True, confidence=True, from_anchor=False),
        ("llama-cpp",),
    ),
    "glm": (of_mtp("glm"), ("llama-cpp", "mlx")),
    "qwen35": (of_mtp("qwen35"), ("llama-cpp",)),
}
OURS = {
    "chained": (ours("chained"), ("llama-cpp", "mlx", "reference")),
    "parallel": (ours("parallel"), ("llama-cpp", "mlx", "reference")),
    "early exit": (early_exit, ("llama-cpp", "mlx", "reference")),
    "eagle3": (published(write_eagle3, n_out=200), ("reference",)),
}


Heads = tuple[Made, str]


def on_engines(kinds: Mapping[str, tuple[Any, tuple[str, ...]]]) -> list[Any]:
    return [
        pytest.param((make, engine), id=f"{name} on {engine}")
        for name, (make, engines) in kinds.items()
        for engine in engines
    ]


@pytest.fixture
def heads(request: pytest.FixtureRequest, tiny: TinyFiles, tmp_path: Path) -> Heads:
    make, engine = request.param
    open_backend(engine)
    return make(tiny, tmp_path), engine


SOME = {name: PUBLISHED[name] for name in ("eagle3 with a token map", "dflash with a token map", "glm")}


@pytest.mark.parametrize("heads", on_engines(PUBLISHED), indirect=True)
def test_its_rows_hold_the_largest_logits(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, with the states that whole rows come with; and the memory goes on as if they were whole.

    In the last pass the largest do not do, and rows are whole as if nothing had been tried.
    """
    (path, draft), engine = heads
    force_best(monkeypatch, engine, True)
    rng = np.random.default_rng(0)
    tokens = rng.integers(40, 200, 100).tolist()
    with open_backend(engine).load(path, n_threads=1) as target:
        head = load_published(path if draft == "mtp" else draft, target, n_threads=1)
        one, other = head.new_context(120), head.new_context(120)
        rows = head.true_rows(one, rng.standard_normal((100, len(head.taps) * head.facts.n_target), np.float32), tokens)
        for context in (one, other):
            context.decode_floats(rows[:70], tokens[:70], "none", 1)
        for start, end, n_best in ((70, 75, 1), (75, 76, 63), (76, 90, 40), (90, 100, 5)):
            if end == 100:
                module = {"llama-cpp": "llama.passes", "mlx": "mlx.model"}[engine]
                monkeypatch.setattr(f"localspec.backends.{module}.by_token", lambda *_: None)
            if head.facts.block:
                whole, _ = head.block_logits(one, tokens[0], head.steps)
                logits, ids = head.block_logits(other, tokens[0], head.steps, n_best)
                found = None if ids is None else np.searchsorted(head.token_map, ids)
                assert ids is None or np.array_equal(head.token_map[found], ids)
                for context in (one, other):
                    context.truncate(start)
                    context.decode_floats(rows[start:end], tokens[start:end], "none")
            else:
                forward = one.decode_floats(rows[start:end], tokens[start:end])
                cut = other.decode_floats(rows[start:end], tokens[start:end], "all", n_best)
                whole, logits, found = forward.logits, cut.logits, cut.ids
                assert all(np.array_equal(forward.hidden[name], cut.hidden[name]) for name in forward.hidden)
            if end == 100:
                assert found is None
                assert np.array_equal(whole, logits)
                continue
            assert n_best < logits.shape[1] < whole.shape[1]
            assert (np.diff(found, axis=1) > 0).all()
            assert np.array_equal(np.take_along_axis(whole, found, 1), logits)
            assert np.array_equal(np.sort(whole, 1)[:, -logits.shape[1] :], np.sort(logits, 1))
        assert one.tokens == other.tokens == tokens
        for opened in (one, other, head):
            opened.close()


def drafts(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    return [[[token.id for token in each.draft] for each in llm.rounds(prompt, params)] for prompt in PROMPTS]


def open_llm(path: Path, draft: Any, engine: str) -> LLM:
    defaults: dict[str, Any] = {"n_ctx": 256, "idle": False, "draft_length": 4, "remember": False, "n_threads": 1}
    return LLM(path, draft, backend=engine, **defaults)


@pytest.mark.parametrize("heads", on_engines(SOME | OURS), indirect=True)
def test_it_drafts_what_it_drafts_of_whole_rows(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token; what asks for more is given whole rows. The reference engine hands out exactly what is asked for,
    to the bit, but for its target."""
    (path, draft), engine = heads
    is_exact = engine == "reference"
    found: list[dict[str, Any]] = []
    for finds_best in (False, True):
        cut: list[Any] = [] if is_exact else force_best(monkeypatch, engine, finds_best)
        with open_llm(path, draft, engine) as llm:
            target = llm.run(lambda pair: pair.context)
            if is_exact and finds_best:
                cut = hand_out_best(monkeypatch, ReferenceContext, target)
            found.append({})
            for name in SETTINGS | WHOLE if is_exact else ("greedy", "top-k", "all"):
                cut.clear()
                drafted = drafts(llm, (SETTINGS | WHOLE)[name])
                if name != "without a seed":
                    found[-1][name] = drafted
                assert not cut or (finds_best and name in SETTINGS), name
                assert any(each is not target for each in cut) == (finds_best and name in SETTINGS), name
    assert found[0] == found[1]
    assert all(sum(map(len, rounds)) > 10 for name in ("greedy", "top-k", "all") for rounds in found[0][name])


def test_who_needs_more_than_the_largest_is_given_whole_rows(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the target too, and of a draft model."""
    drafts = ["ngram", tiny.quick.draft]
    with LLM(tiny.quick.target, draft=drafts, backend="reference", n_ctx=512, draft_length=2) as llm:
        n_rows = hand_out_best(monkeypatch, ReferenceContext)
        for params in (*WHOLE.values(), replace(SETTINGS["top-k"], logit_bias={7: 1.0})):
            for prompt in PROMPTS:
                llm.generate(prompt, params)
        llm.generate("one", GREEDY, speculate=False, logprobs=2)
        assert not n_rows
        llm.generate("one", GREEDY)
        assert n_rows
