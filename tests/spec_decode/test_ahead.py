"""Drafting while the target verifies: the same answers, to the bit and in law, and a thread that never stays behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.backends import reference
from localspec.backends.base import Context
from localspec.controllers.fixed import FixedController
from localspec.errors import EngineError
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.ahead import DraftAhead
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Drafter, DrafterInfo, Plan, Proposer
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.rounds import Draft, DraftToken, Round
from tests.conftest import TinyFiles
from tests.spec_decode.test_exactness import DEFECT, EXACT, PROMPT, SAMPLING, Predictions, plain_law
from tests.spec_decode.test_lossless import N_CTX, NosyController, RandomController, TableContext, World, run
from tests.support.contexts import watch_passes
from tests.support.enumeration import largest_difference, law_of_answers
from tests.support.waiting_engine import Timing, WaitingModel


class AtOnce(Executor):
    """Does the work at once, in the same thread: every run of an enumeration is alike."""

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(work(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


def ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("localspec-ahead")]


# -- the law -----------------------------------------------------------------------------------------------------------


Tables = tuple[Predictions, Predictions]


@pytest.fixture
def tables(target: Predictions, small: Predictions) -> Tables:
    return target, small


def law_of(
    tables: Tables,
    patch: pytest.MonkeyPatch,
    n: int,
    n_steps: int,
    make: Callable[[], Any] = NosyController,
    params: SamplingParams = SAMPLING,
) -> tuple[float, int]:
    """The largest difference between the law of whole answers of n tokens and plain sampling's; and the hits."""
    params, n_hits, (target, small) = replace(params, top_k=2, max_tokens=n, ignore_eos=True), [0], tables

    def answer() -> list[Round]:
        ahead = DraftAhead(cautious=False, new_executor=AtOnce, n_steps=n_steps)
        drafters = [DraftModelDrafter(TableContext(small))]
        rounds = run(SpeculativeDecoder(TableContext(target), drafters, make(), ahead=ahead), list(PROMPT), params)
        n_hits[0] += sum(round_.ahead.taken > 0 for round_ in rounds if round_.ahead)
        return rounds

    return largest_difference(plain_law(params, target, n), law_of_answers(patch, answer)), n_hits[0]


@pytest.mark.parametrize(("n", "n_steps"), [(4, 1), (4, 2), (4, 3), (4, 6)])
def test_the_law_of_whole_answers_is_that_of_plain_sampling(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, n: int, n_steps: int
) -> None:
    """Whatever the steps suffice for, with samples and most probable tokens, and a controller that cuts at will."""
    difference, n_hits = law_of(tables, monkeypatch, n, n_steps)
    assert difference < EXACT
    assert n_hits > 0 or n_steps < 3


def test_with_drafts_of_a_fixed_length_too(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    difference, n_hits = law_of(tables, monkeypatch, 4, 3, lambda: FixedController(1))
    assert difference < EXACT
    assert n_hits > 0


def test_a_prepared_draft_that_is_dropped_for_what_it_says_makes_the_law_differ(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeded defect: an unlikely sample is thrown away, and drawn again in the ordinary order."""
    taken = DraftAhead._taken

    def picky(self: DraftAhead, tokens: Sequence[int], plan: Plan) -> tuple[list[DraftToken], bool]:
        prepared = self._cache.get(tuple(tokens[self._n_before :]))
        if prepared is not None and prepared[0][0].dist is not None and prepared[0][0].prob < 0.5:
            self._cache.clear()
        return taken(self, tokens, plan)

    monkeypatch.setattr(DraftAhead, "_taken", picky)
    difference, n_hits = law_of(tables, monkeypatch, 4, 3, lambda: FixedController(1))
    assert n_hits > 0
    assert difference > DEFECT


# -- the same texts ----------------------------------------------------------------------------------------------------


class WorldAhead(World):
    """As ``World``, with a thread beside every decoder."""

    def __init__(self, pair_files: object, rng: random.Random, folder: Path) -> None:
        super().__init__(pair_files, rng, folder)
        self.decoders = [
            SpeculativeDecoder(
                each.target,
                each.group.drafters,
                RandomController(rng),
                ahead=DraftAhead(cautious=False, n_steps=n_steps),
            )
            for each, n_steps in zip(self.decoders, (1, 3, 6, 10, 20, 4), strict=True)
        ]


@pytest.fixture
def world(tiny: TinyFiles, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    yield WorldAhead(tiny.quick, random.Random(request.node.name), tmp_path)
    assert not ahead_threads()


def test_greedy_and_seeded_answers_equal_plain_ones(world: WorldAhead) -> None:
    """160 answers, penalties, stop strings and budgets among them; drafts come in part from what was prepared."""
    rounds: list[Round] = []
    for seed in range(80):
        chain = world.rng.choice([SAMPLING, replace(SAMPLING, temperature=0.6, top_k=20), replace(SAMPLING, top_p=0.8)])
        rounds += world.compare(SamplingParams())
        rounds += world.compare(replace(chain, seed=seed))
    counts = [round_.ahead for round_ in rounds if round_.ahead is not None]
    assert sum(count.hit for count in counts) > 40
    assert any(round_.ahead and 0 < round_.ahead.taken < len(round_.draft) for round_ in rounds)
    assert any(round_.ahead and round_.ahead.taken and round_.verdict.n_accepted for round_ in rounds)


def test_the_comparison_notices_a_draft_context_that_is_not_rewound(
    world: WorldAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the target believes the prepared tokens."""
    draft = DraftAhead.draft

    def believing(self: DraftAhead, tokens: list[int], plan: Plan) -> Any:
        found = draft(self, tokens, plan)
        if self.count.taken:
            tokens[-1] = found[0].id
        return found

    monkeypatch.setattr(DraftAhead, "draft", believing)

    def many() -> None:
        for _ in range(60):
            world.compare(SamplingParams())

    with pytest.raises(AssertionError):
        many()


def test_passes_overlap_with_drafting_on_a_waiting_engine(tiny: TinyFiles) -> None:
    """Real threads and the real clock: draft steps of 1 ms beside passes of 20."""
    target = WaitingModel(tiny.quick.target, Timing(20.0))
    small = WaitingModel(tiny.quick.draft, Timing(1.0, device="cpu", right=0.9))
    params, answers = SamplingParams(max_tokens=60, ignore_eos=True), []
    ahead = DraftAhead()
    for beside in (None, ahead):
        drafters = [DraftModelDrafter(small.new_context(N_CTX))]
        decoder = SpeculativeDecoder(target.new_context(N_CTX), drafters, FixedController(3), ahead=beside)
        rounds = run(decoder, [5, 6, 7], params)
        answers.append(answer_of(rounds))
    assert answers[0] == answers[1]
    assert sum(round_.ahead.taken for round_ in rounds if round_.ahead) > 0
    assert sum(round_.ahead.prepared for round_ in rounds if round_.ahead) > 0


class Reader(Drafter):
    """One that drafts from states of the target, which there are none of while the target computes them."""

    info = DrafterInfo("reader", taps=("norm",))
    is_early, n_asked = False, 0

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        assert not self.is_early
        self.n_asked += 1
        return []


def test_what_reads_states_waits_for_them(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, prepare = Reader(), DraftAhead._prepare

    def prepared(self: DraftAhead, tokens: list[int], draft: Draft) -> None:
        reader.is_early = True
        prepare(self, tokens, draft)
        reader.is_early = False

    monkeypatch.setattr(DraftAhead, "_prepare", prepared)
    with reference.load(tiny.quick.target) as target, reference.load(tiny.quick.draft) as small:
        ahead = DraftAhead(cautious=False, new_executor=AtOnce, n_steps=8)
        drafters = [reader, DraftModelDrafter(small.new_context(N_CTX))]
        context = target.new_context(N_CTX, hidden=("norm",))
        rounds = run(
            SpeculativeDecoder(context, drafters, FixedController(3), ahead=ahead),
            [5, 6],
            SamplingParams(max_tokens=20),
        )
    assert reader.n_asked > 0
    assert any(round_.ahead and round_.ahead.prepared for round_ in rounds)


# -- what can go wrong -------------------------------------------------------------------------------------------------


class Fragile(DraftModelDrafter):
    """Raises when it is asked in another thread than the first for the n-th time."""

    def __init__(self, context: Context, error: Exception, n: int) -> None:
        super().__init__(context)
        self.error, self.n = error, n

    def _decode(self, tokens: Sequence[int], rows: Any) -> Any:
        self.n -= 1
        if self.n == 0:
            self.context._decode = self._broken  # type: ignore[method-assign]
        return super()._decode(tokens, rows)

    def _broken(self, tokens: Any, logits: Any) -> Any:
        del self.context._decode  # type: ignore[misc]
        raise self.error


def decoder_of(tiny: TinyFiles, drafter: type[Drafter] | Callable[[Context], Drafter], lost: list[str]) -> Any:
    target, small = reference.load(tiny.quick.target), reference.load(tiny.quick.draft)
    ahead = DraftAhead(cautious=False, n_steps=8)
    drafters = [drafter(small.new_context(N_CTX))]  # type: ignore[abstract,call-arg,arg-type]
    return SpeculativeDecoder(
        target.new_context(N_CTX), drafters, FixedController(3), lambda each, why: lost.append(why), ahead=ahead
    )


def answer_of(rounds: list[Round]) -> list[int]:
    return [token.id for round_ in rounds for token in round_.emitted]


@pytest.mark.parametrize("n", range(4, 16))
def test_a_draft_that_fails_is_done_without(tiny: TinyFiles, n: int) -> None:
    lost: list[str] = []
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    wanted = answer_of(run(decoder_of(tiny, DraftModelDrafter, lost), [5, 6, 7], params))
    decoder = decoder_of(tiny, lambda context: Fragile(context, EngineError("out of memory"), n), lost)
    assert answer_of(run(decoder, [5, 6, 7], params)) == wanted
    assert lost == ["failed: out of memory"]
    assert answer_of(run(decoder, [5, 6, 7], params)) == wanted
    assert not ahead_threads()


@pytest.mark.parametrize("n", range(4, 16))
def test_an_error_in_the_thread_is_raised_in_the_answer(tiny: TinyFiles, n: int) -> None:
    decoder = decoder_of(tiny, lambda context: Fragile(context, ZeroDivisionError("a mistake"), n), [])
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        run(decoder, [5, 6, 7], params)
    assert not ahead_threads()
    assert len(answer_of(run(decoder, [5, 6, 7], params))) == 30


@pytest.mark.parametrize("n_rounds", [0, 1, 3])
def test_an_answer_that_is_dropped_ends_the_thread(tiny: TinyFiles, n_rounds: int) -> None:
    decoder = decoder_of(tiny, DraftModelDrafter, [])
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    wanted = answer_of(run(decoder, [5, 6, 7], params))
    decoder.prefill([5, 6, 7], lambda: False)
    rounds = decoder.rounds([5, 6, 7], params, TextAssembler(decoder.target.model.vocab, ()))
    for _ in range(n_rounds):
        next(rounds)
    rounds.close()
    assert not ahead_threads()
    assert answer_of(run(decoder, [5, 6, 7], params)) == wanted


def test_a_pass_that_fails_ends_the_thread(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(tiny, DraftModelDrafter, [])
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    wanted = answer_of(run(decoder, [5, 6, 7], params))

    def broken(n: int) -> None:
        if n == 5:
            raise EngineError("the device is gone")

    watch_passes(decoder.target, monkeypatch, before=broken)
    with pytest.raises(EngineError, match="the device is gone"):
        run(decoder, [5, 6, 7], params)
    assert not ahead_threads()
    assert answer_of(run(decoder, [5, 6, 7], params)) == wanted
