"""Heads of whose rows the engine hands out the largest logits only: they draft what they draft of whole rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, SamplingParams
from localspec.backends.base import Context, FloatArray
from localspec.backends.reference import ReferenceContext
from localspec.heads.published import EngineHead, load_published
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
    "penalty": replace(GREEDY, repeat_penalty=1.2),
    "grammar": replace(GREEDY, grammar='root ::= ("one" | "two")+', ignore_eos=False),
}
PROMPTS = ("one two one two", "three four five")

Made = tuple[Path, Any]
"""A target, and what is to draft for it."""


def of_eagle3(**options: Any) -> Callable[[TinyFiles, Path], Made]:
    return lambda tiny, folder: (tiny.pair.target, write_eagle3(tiny.pair.target, folder / "head.gguf", **options))


def of_block(**options: Any) -> Callable[[TinyFiles, Path], Made]:
    return lambda tiny, folder: (tiny.pair.target, write_dflash(tiny.pair.target, folder / "head.gguf", **options))


def of_mtp(name: str) -> Callable[[TinyFiles, Path], Made]:
    def make(tiny: TinyFiles, folder: Path) -> Made:
        return write_mtp(name, folder), "mtp"

    return make


def of_ours(**options: Any) -> Callable[[TinyFiles, Path], Made]:
    def make(tiny: TinyFiles, folder: Path) -> Made:
        return tiny.pair.target, f"head:{write_random_head(tiny.pair.target, folder / 'head.gguf', **options)}"

    return make


def early_exit(tiny: TinyFiles, folder: Path) -> Made:
    return tiny.pair.target, "early-exit:1"


PUBLISHED = {
    "eagle3": (of_eagle3(), ("llama-cpp", "mlx")),
    "eagle3 that borrows": (of_eagle3(own_output=False), ("llama-cpp", "mlx")),
    "eagle3 with a token map": (of_eagle3(n_out=200), ("llama-cpp", "mlx")),
    "dflash": (of_block(), ("llama-cpp", "mlx")),
    "dflash with a token map": (of_block(n_out=250, block_size=16), ("llama-cpp", "mlx")),
    "dspark": (of_block(markov=True, n_out=250), ("llama-cpp",)),
    "dspark behind the anchor": (of_block(markov=True, confidence=True, from_anchor=False), ("llama-cpp",)),
    "glm": (of_mtp("glm"), ("llama-cpp", "mlx")),
    "qwen35": (of_mtp("qwen35"), ("llama-cpp",)),
}
OURS = {
    "chained": (of_ours(kind="chained", n_out=150), ("llama-cpp", "mlx")),
    "parallel": (of_ours(kind="parallel", n_out=150), ("llama-cpp", "mlx")),
    "early exit": (early_exit, ("llama-cpp", "mlx")),
}


def on_engines(kinds: Mapping[str, tuple[Any, tuple[str, ...]]]) -> list[Any]:
    return [
        pytest.param((make, engine), id=f"{name} on {engine}")
        for name, (make, engines) in kinds.items()
        for engine in engines
    ]


Heads = tuple[Made, str]


@pytest.fixture
def heads(request: pytest.FixtureRequest, tiny: TinyFiles, tmp_path: Path) -> Heads:
    """What a kind makes, and the engine that is to compute it."""
    make, engine = request.param
    open_backend(engine)
    return make(tiny, tmp_path), engine


SOME = {name: PUBLISHED[name] for name in ("eagle3 with a token map", "dflash with a token map", "glm")}


@contextmanager
def two_contexts(
    made: Made, engine: str, n: int
) -> Iterator[tuple[EngineHead, Context, Context, FloatArray, list[int]]]:
    """A published head with two empty contexts, and n rows and tokens to feed them with."""
    path, draft = made
    rng = np.random.default_rng(0)
    tokens = rng.integers(40, 200, n).tolist()
    with open_backend(engine).load(path, n_threads=1) as target:
        head = load_published(path if draft == "mtp" else draft, target, n_threads=1)
        states = rng.standard_normal((n, len(head.taps) * head.facts.n_target)).astype(np.float32)
        with head.new_context(100) as one, head.new_context(100) as other:
            yield head, one, other, head.true_rows(one, states, tokens), tokens
        head.close()


def columns(head: EngineHead, tokens: Any) -> Any:
    return np.searchsorted(head.token_map, tokens)


@pytest.mark.parametrize("heads", on_engines(PUBLISHED), indirect=True)
def test_its_rows_hold_the_largest_logits(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, with the states that whole rows come with; and the memory goes on as if they were whole."""
    made, engine = heads
    force_best(monkeypatch, engine, True)
    with two_contexts(made, engine, 90) as (head, one, other, rows, tokens):
        for context in (one, other):
            context.decode_floats(rows[:70], tokens[:70], "none", 1)
        for start, end, n_best in ((70, 75, 1), (75, 76, 63), (76, 90, 40)):
            if head.facts.block:
                whole, _ = head.block_logits(one, tokens[0], head.steps)
                logits, ids = head.block_logits(other, tokens[0], head.steps, n_best)
                assert ids is not None
                found = columns(head, ids)
                assert np.array_equal(head.token_map[found], ids)
                for context in (one, other):
                    context.truncate(start)
                    context.decode_floats(rows[start:end], tokens[start:end], "none")
            else:
                forward = one.decode_floats(rows[start:end], tokens[start:end])
                cut = other.decode_floats(rows[start:end], tokens[start:end], "all", n_best)
                assert cut.ids is not None
                whole, logits, found = forward.logits, cut.logits, cut.ids
                assert all(np.array_equal(forward.hidden[name], cut.hidden[name]) for name in forward.hidden)
            assert n_best < logits.shape[1] < whole.shape[1]
            assert (np.diff(found, axis=1) > 0).all()
            assert np.array_equal(np.take_along_axis(whole, found, 1), logits)
            assert np.array_equal(np.sort(whole, 1)[:, -logits.shape[1] :], np.sort(logits, 1))
        assert one.tokens == other.tokens == tokens


@pytest.mark.parametrize("heads", on_engines(SOME), indirect=True)
def test_where_the_largest_do_not_do_rows_are_whole(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been tried: the pass is not in the memory twice."""
    made, engine = heads
    force_best(monkeypatch, engine, True)
    with two_contexts(made, engine, 30) as (head, one, other, rows, tokens):
        for start in (0, 10, 20):
            part = slice(start, start + 10)
            found = []
            for n_best, context in ((0, one), (5, other)):
                with monkeypatch.context() as patch:
                    if start == 10:
                        module = {"llama-cpp": "llama.passes", "mlx": "mlx.model"}[engine]
                        patch.setattr(f"localspec.backends.{module}.by_token", lambda *_: None)
                    if head.facts.block:
                        context.decode_floats(rows[part], tokens[part], "none")
                        logits, ids = head.block_logits(context, tokens[0], head.steps, n_best)
                        assert context.n_past == part.stop + head.steps + 1
                        context.truncate(part.stop)
                    else:
                        forward = context.decode_floats(rows[part], tokens[part], "all", n_best)
                        logits, ids = forward.logits, forward.ids
                assert (ids is None) == (n_best == 0 or start == 10)
                found.append(logits.copy())
            largest = [np.sort(each, 1)[:, -64:] for each in found]
            assert np.array_equal(*largest)
            assert start != 10 or np.array_equal(*found)
        assert one.tokens == other.tokens == tokens


def drafts(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    return [[[token.id for token in each.draft] for each in llm.rounds(prompt, params)] for prompt in PROMPTS]


def open_llm(path: Path, draft: Any, engine: str) -> LLM:
    defaults: dict[str, Any] = {"n_ctx": 256, "idle": False, "draft_length": 4, "remember": False, "n_threads": 1}
    return LLM(path, draft, backend=engine, **defaults)


@pytest.mark.parametrize("heads", on_engines(SOME | OURS), indirect=True)
def test_it_drafts_what_it_drafts_of_whole_rows(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, greedily and with top-k; what asks for more is given whole rows."""
    (path, draft), engine = heads
    found: list[list[Any]] = []
    for finds_best in (False, True):
        cut = force_best(monkeypatch, engine, finds_best)
        with open_llm(path, draft, engine) as llm:
            target = llm.run(lambda pair: pair.context)
            found.append([])
            for name in ("greedy", "top-k"):
                cut.clear()
                found[-1].append(drafts(llm, SETTINGS[name]))
                assert any(context is not target for context in cut) == finds_best
            cut.clear()
            found[-1].append(drafts(llm, WHOLE["all"]))
            assert not cut
    assert found[0] == found[1]
    assert all(sum(map(len, rounds)) > 10 for answers in found[0] for rounds in answers)


@pytest.mark.parametrize(
    "heads",
    on_engines(
        {"eagle3": (of_eagle3(n_out=200), ("reference",))}
        | {name: (make, ("reference",)) for name, (make, _) in OURS.items()}
    ),
    indirect=True,
)
def test_exactly_what_is_asked_for_is_enough(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, on the reference engine; where there is nothing to ask for, rows are whole."""
    (path, draft), engine = heads
    with open_llm(path, draft, engine) as llm:
        expected = {
            name: drafts(llm, params) for name, params in (SETTINGS | WHOLE).items() if name != "without a seed"
        }
        n_rows = hand_out_best(monkeypatch, ReferenceContext, llm.run(lambda pair: pair.context))
        for name, params in (SETTINGS | WHOLE).items():
            n_rows.clear()
            found = drafts(llm, params)
            assert bool(n_rows) == (name in SETTINGS), name
            assert expected.get(name, found) == found, name
