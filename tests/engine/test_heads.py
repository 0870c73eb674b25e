"""Heads and early exits in a loaded pair: the text is as without, whatever becomes of them and of the conversation."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, LocalspecError, SamplingParams
from localspec.controllers.acceptance import GREEDY as GREEDY_PRIOR
from localspec.controllers.acceptance import MOST_PROBABLE, SAMPLE, Prior, SourceAcceptance, of_a_head
from localspec.controllers.calibration import curve_key, curves
from localspec.engine.answer import rounds as rounds_of_pair
from localspec.engine.pair import Pair
from localspec.errors import EngineError
from localspec.heads.card import Training
from localspec.heads.file import engine_folder, heads_folder
from localspec.spec_decode.drafters.names import AUTOMATIC
from tests.conftest import Backend, TinyFiles, open_backend
from tests.support.heads import write_random_head
from tests.support.published_heads import write_eagle3

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=32, ignore_eos=True)
TAPS = ("layer:0", "norm")


@pytest.fixture
def engine(backend: Backend, measured_home: Path) -> str:
    """Every engine in turn, in a home where the tiny files are measured once."""
    return backend.name


@pytest.fixture
def head(tiny: TinyFiles, measured_home: Path) -> Path:
    """The only head on this disk; it fits the pair's target."""
    heads_folder().mkdir(parents=True)
    return write_random_head(tiny.pair.target, heads_folder() / "a-head.gguf", taps=TAPS)


def open_llm(tiny: TinyFiles, draft: Any, engine: str = "reference", **options: Any) -> LLM:
    defaults: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "idle": False, "draft_length": 3, "remember": False}
    return LLM(tiny.pair.target, draft, backend=engine, **(defaults | options))


def says(llm: LLM, text: str = "one two one two", params: SamplingParams = GREEDY, **options: Any) -> list[int]:
    return llm.generate(text, params, **options).token_ids


def sources_of(reply: Any) -> set[str]:
    return {source for source, counts in reply.stats["by_source"].items() if counts["num_draft_tokens"]}


# What is said.


def test_drafts_change_in_mid_conversation(tiny: TinyFiles, head: Path, engine: str) -> None:
    """The target's context is replaced, so that it returns what its drafters want, and goes on from what it held."""
    with open_llm(tiny, None, engine, n_ctx=1024) as plain, open_llm(tiny, None, engine, n_ctx=1024) as llm:
        text, wanted = "one two three", list[tuple[str, ...]]()
        for draft in (None, "head", ["ngram", tiny.pair.draft], ["early-exit:1", "ngram"], "auto", "none"):
            held = llm.run(lambda pair: list(pair.context.tokens))
            llm.set_draft(draft)
            assert llm.run(lambda pair: pair.context.tokens) == held
            wanted.append(llm.run(lambda pair: pair.context.hidden))
            reply = llm.generate(text, GREEDY)
            assert reply.token_ids == says(plain, text)
            text += reply.text
        assert wanted == [(), TAPS, (), ("layer:0",), TAPS, ()]
        assert llm.warnings == []


def test_an_engine_that_cannot_copy_a_context_reads_the_conversation_again(
    tiny: TinyFiles, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(tiny, None) as llm:
        before = says(llm)

        def refuse() -> Any:
            raise EngineError("not now")

        monkeypatch.setattr(llm.inspect().context, "export_state", refuse)
        llm.set_draft("head")
        assert llm.run(lambda pair: pair.context.tokens) == []
        assert says(llm) == before


def test_other_conversations_are_brought_back_to_a_context_that_was_replaced(tiny: TinyFiles, head: Path) -> None:
    texts = [" ".join([word] * 40) for word in ("one", "two")]
    with open_llm(tiny, "head") as llm:
        plain = [says(llm, text, speculate=False) for text in texts]
        assert [says(llm, text) for text in texts] == plain
        llm.set_draft("none")
        hits = llm.cache_info()["hits"]
        assert [says(llm, text) for text in texts] == plain
        assert llm.cache_info()["hits"] > hits
        llm.set_draft(["head", "ngram"])
        assert [says(llm, text) for text in texts] == plain
        assert llm.cache_info()["entries"] > 0
        contexts = llm.run(lambda pair: {entry.context for entry in pair.prefix_cache.entries})
        assert contexts == {llm.run(lambda pair: pair.context)}  # nothing of heads is put aside


# Heads that fail, or are not there.


def test_auto_takes_a_head_of_either_kind(tiny: TinyFiles, measured_home: Path, tmp_path: Path) -> None:
    """One that was trained here and one that was published, and of each kind no second."""
    open_backend("llama-cpp")
    heads_folder().mkdir(parents=True)
    target = Path(shutil.copy(tiny.pair.target, tmp_path / "target.gguf"))
    trained = [write_random_head(target, heads_folder() / f"{name}.gguf", taps=TAPS) for name in "ab"]
    published = [write_eagle3(target, tmp_path / f"{name}.gguf") for name in "cd"]
    options: dict[str, Any] = {"backend": "llama-cpp", "n_ctx": 256, "n_threads": 1, "idle": False, "remember": False}
    with LLM(target, "auto", draft_length=3, **options) as llm:
        assert (llm.draft_names, llm.warnings) == ([*AUTOMATIC, "head", "head2"], [])
        first, second = llm.run(lambda pair: [draft.path for draft in pair.state.models])
        assert first in trained
        assert second == published[0]
        for params in (GREEDY, SEEDED):
            assert says(llm, params=params) == says(llm, params=params, speculate=False)
        llm.set_draft("head")
        assert llm.run(lambda pair: [draft.path for draft in pair.state.models]) == [first]
    first.write_bytes(b"no head")  # then the other goes on alone
    trained[first == trained[0]].unlink()
    with LLM(target, "auto", **options) as llm:
        assert llm.run(lambda pair: [draft.path for draft in pair.state.models]) == [second]


def test_auto_goes_on_without_a_head_that_cannot_be_loaded(tiny: TinyFiles, head: Path) -> None:
    engine_folder().write_text("in the way")  # of the folder where its file for engines is made
    with open_llm(tiny, "auto") as llm:
        assert llm.draft_names == list(AUTOMATIC)
        (warning,) = llm.warnings
        assert warning.endswith("; drafting without it")
        assert llm.run(lambda pair: pair.context.hidden) == ()
        assert len(says(llm)) == 32
        with pytest.raises(LocalspecError):
            llm.set_draft("head")
        assert llm.draft_names == list(AUTOMATIC)


def test_auto_goes_on_without_a_head_where_the_target_cannot_return_its_states(
    tiny: TinyFiles, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(tiny, None) as llm:
        real = llm.inspect().target.new_context

        def refuse(n_ctx: int, *, hidden: Sequence[str] = (), **options: Any) -> Any:
            if hidden:
                raise EngineError("no memory")
            return real(n_ctx, **options)

        monkeypatch.setattr(llm.inspect().target, "new_context", refuse)
        before = llm.run(lambda pair: pair.context)
        with pytest.raises(EngineError, match="no memory"):
            llm.set_draft("head")
        assert llm.draft_names == []
        llm.set_draft("auto")
        assert (llm.draft_names, llm.warnings) == (list(AUTOMATIC), ["no memory; drafting without it"])
        assert llm.run(lambda pair: pair.context) is before


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ("head", "there is no head for .* on this disk; localspec distill trains one"),
        ("head:", "names a head file"),
        ("head:nowhere.gguf", "nowhere.gguf"),
        ("early-exit:0", "takes a number of layers"),
        ("early-exit:4", "after 1 to 3 layers, not after 4"),
        ("early-exit:x", "takes a number of layers"),
        ("early-exit:٣", "takes a number of layers"),
        (["early-exit:1", "early-exit"], "can be named once"),
        ("heads", "did you mean head"),
    ],
)
def test_what_does_not_work_is_said_in_a_line(tiny: TinyFiles, measured_home: Path, draft: Any, why: str) -> None:
    with pytest.raises(LocalspecError, match=why) as caught:
        open_llm(tiny, draft)
    assert "\n" not in str(caught.value)


# State.


def test_a_forks_own_context_returns_only_what_its_drafters_want(tiny: TinyFiles, head: Path) -> None:
    def compare(pair: Pair) -> None:
        def answer() -> list[int]:
            prompt = pair.target.tokenize("one two one two", add_special=True)
            rounds = rounds_of_pair(pair, prompt, GREEDY, 3, lambda n_cached: None, lambda: False)
            return [token.id for round_ in rounds for token in round_.emitted]

        before, expected = pair.state, answer()
        for sources in (None, ["ngram"], ["head"], ["early-exit", "ngram"]):
            fork = before.fork(sources, own_contexts=True)
            wanted = {tap for drafter in fork.drafters for tap in drafter.info.taps}
            assert set(fork.context.hidden) == wanted
            assert bool(wanted) == (sources != ["ngram"])
            assert not {id(context) for context in fork.contexts} & {id(context) for context in before.contexts}
            pair.use(fork)
            assert answer() == expected
            pair.use(before)
            pair.release(fork)
            assert all(context.closed for context in fork.contexts)
        shared = before.fork(["head"])
        assert shared.contexts[0] is before.context
        pair.use(shared)
        assert answer() == expected
        pair.use(before)
        pair.release(shared)
        assert answer() == expected

    with open_llm(tiny, ["ngram", "head", "early-exit:1"]) as llm:
        llm.run(compare)


def test_passes_of_heads_are_measured_as_they_run(tiny: TinyFiles, head: Path) -> None:
    with open_llm(tiny, ["head", "early-exit:1"]) as llm:
        one, other = llm.run(lambda pair: pair.state.models)
        assert one.model.path != other.model.path
        for draft in (one, other):
            assert {1, 2, 4, 8} <= set(draft.times.curve.measured)
            assert curves().get(curve_key(draft.model, "f16")) is not None
            assert draft.context.n_past == 0
        known = [llm.inspect().times, one.times, other.times]
        llm.run(lambda pair: pair.recalibrate(lambda what, fraction: None))
        again = [llm.inspect().times, one.times, other.times]
        assert not {id(times) for times in known} & {id(times) for times in again}
        assert all(1 in times.curve.measured for times in again)


def test_drafters_that_are_replaced_give_their_memory_back(tiny: TinyFiles, head: Path) -> None:
    with open_llm(tiny, ["head", "early-exit:2"]) as llm:
        models = llm.run(lambda pair: pair.state.models)
        context = llm.run(lambda pair: pair.context)
        llm.set_draft(["head"])  # the same, not loaded again
        (kept,) = llm.run(lambda pair: pair.state.models)
        assert kept.model is models[0].model
        for closed in (lambda: models[1].model.new_context(8), lambda: context.decode([1])):
            with pytest.raises(LocalspecError, match="was closed"):
                closed()
        assert len(says(llm)) == 32
    with pytest.raises(LocalspecError, match="was closed"):
        kept.context.decode_floats(np.zeros((1, kept.model.n_embd), dtype=np.float32), [0])


def test_a_head_is_expected_to_be_right_as_often_as_its_card_says(tiny: TinyFiles, measured_home: Path) -> None:
    """In the median kind of text, until it shows how often it is; where nothing is said, as the usual one is."""
    heads_folder().mkdir(parents=True)
    for name, rates in (
        ("good", {"all": (0.9,), "own": (0.95,), "chat": (0.6, 0.4), "code": (0.5, 0.2)}),
        ("unknown", {}),
    ):
        training = Training(acceptance=rates)
        write_random_head(tiny.pair.target, heads_folder() / f"{name}.gguf", taps=TAPS, training=training)
    expected = {}
    for name in ("good", "unknown"):
        with open_llm(tiny, f"head:{heads_folder() / name}.gguf", draft_length="auto") as llm:
            pair = llm.inspect()
            expected[name] = pair.state.controller("auto", GREEDY).acceptance["head"].mean()  # type: ignore[attr-defined]
    assert expected["good"] == pytest.approx(0.6, abs=0.005)
    assert expected["unknown"] == SourceAcceptance(of_a_head(GREEDY_PRIOR)).mean()


@pytest.mark.parametrize("prior", [GREEDY_PRIOR, MOST_PROBABLE, SAMPLE])
@pytest.mark.parametrize("rate", [0.2, 0.33, 0.6])
def test_a_card_s_rate_is_what_is_expected_of_a_draft_s_first_token(prior: Prior, rate: float) -> None:
    assert SourceAcceptance(of_a_head(prior, rate)).mean() == pytest.approx(rate, abs=0.005)
