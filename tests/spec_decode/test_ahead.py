"""Drafting while the target verifies: the same answers, to the bit and in law, a thread that never stays behind, and
whether it pays."""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from localspec.backends import reference
from localspec.backends.base import Context
from localspec.controllers.fixed import FixedController
from localspec.errors import EngineError
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.ahead import LONGEST_PAUSE, N_PAUSE, N_TRIAL, AheadBalance, DraftAhead
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Controller, Drafter, DrafterInfo, Plan, Proposer
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.rounds import DraftToken, Round
from tests.conftest import TinyFiles
from tests.spec_decode.test_exactness import EXACT, SAMPLING, Predictions
from tests.spec_decode.test_lossless import (
    N_CTX,
    Answer,
    NosyController,
    RandomController,
    TableContext,
    World,
    law_difference,
    run,
)
from tests.support.contexts import watch_passes
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


@pytest.mark.parametrize(
    ("n_steps", "make"),
    [(1, NosyController), (3, NosyController), (6, NosyController), (3, lambda: FixedController(1))],
)
def test_the_law_of_whole_answers_is_that_of_plain_sampling(
    target: Predictions,
    small: Predictions,
    monkeypatch: pytest.MonkeyPatch,
    n_steps: int,
    make: Callable[[], Controller],
) -> None:
    """Whatever the steps suffice for, with samples and most probable tokens, and a controller that cuts at will."""
    rounds, params = list[Round](), replace(SAMPLING, top_k=2, max_tokens=4, ignore_eos=True)

    def made() -> SpeculativeDecoder:
        ahead = DraftAhead(cautious=False, new_executor=AtOnce, n_steps=n_steps)
        return SpeculativeDecoder(TableContext(target), [DraftModelDrafter(TableContext(small))], make(), ahead=ahead)

    assert law_difference(monkeypatch, target, params, made, rounds.extend) < EXACT
    assert n_steps < 3 or any(round_.ahead and round_.ahead.taken for round_ in rounds)


class WorldAhead(World):
    def decoder(self, context: Context, group: list[Drafter]) -> SpeculativeDecoder:
        ahead = DraftAhead(cautious=False, n_steps=self.rng.choice([1, 3, 6, 10, 20]))
        return SpeculativeDecoder(context, group, RandomController(self.rng), ahead=ahead)


@pytest.mark.parametrize("seeded", [False, True])
def test_answers_equal_plain_ones(tiny: TinyFiles, tmp_path: Path, seeded: bool) -> None:
    """Drafts come in part from what was prepared; ``test_lossless`` has the negative control of the comparison."""
    rounds = WorldAhead(tiny.quick, random.Random(1), tmp_path).compare_all(80, seeded)
    assert not ahead_threads()
    assert sum(round_.ahead.hit for round_ in rounds if round_.ahead) > 20
    assert any(round_.ahead and 0 < round_.ahead.taken < len(round_.draft) for round_ in rounds)
    assert any(round_.ahead and round_.ahead.taken and round_.verdict.n_accepted for round_ in rounds)


class Reader(Drafter):
    """One that drafts from states of the target, which there are none of while the target computes them."""

    info = DrafterInfo("reader", taps=("norm",))
    n_asked = 0

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        assert type(plan) is Plan  # the controller's: what is drafted early has another one
        self.n_asked += 1
        return []


def test_what_reads_states_waits_for_them(tiny: TinyFiles) -> None:
    reader = Reader()
    with reference.load(tiny.quick.target) as target, reference.load(tiny.quick.draft) as small:
        ahead = DraftAhead(cautious=False, new_executor=AtOnce, n_steps=8)
        drafters = [reader, DraftModelDrafter(small.new_context(N_CTX))]
        context = target.new_context(N_CTX, hidden=("norm",))
        decoder = SpeculativeDecoder(context, drafters, FixedController(3), ahead=ahead)
        rounds = run(decoder, [5, 6], SamplingParams(max_tokens=20))
    assert reader.n_asked > 0
    assert any(round_.ahead and round_.ahead.prepared for round_ in rounds)


class Fragile(DraftModelDrafter):
    """Its n-th pass fails."""

    def __init__(self, context: Context, error: Exception, n: int) -> None:
        super().__init__(context)
        decode, calls = context._decode, count(1)

        def counted(tokens: Any, logits: Any) -> Any:
            if next(calls) == n:
                raise error
            return decode(tokens, logits)

        context._decode = counted  # type: ignore[method-assign]


TEXT, PARAMS = [5, 6, 7], SamplingParams(max_tokens=30, ignore_eos=True)


class Failing:
    """A decoder with a thread beside it, what it should say, and what it lost."""

    def __init__(self, tiny: TinyFiles, drafter: Callable[[Context], Drafter] = DraftModelDrafter) -> None:
        target, small = reference.load(tiny.quick.target), reference.load(tiny.quick.draft)
        self.lost: list[str] = []
        plain = SpeculativeDecoder(target.new_context(N_CTX), [], FixedController(0))
        self.wanted = Answer.of(run(plain, TEXT, PARAMS)).tokens
        self.decoder = SpeculativeDecoder(
            target.new_context(N_CTX),
            [drafter(small.new_context(N_CTX))],
            FixedController(3),
            lambda each, why: self.lost.append(why),
            ahead=DraftAhead(cautious=False, n_steps=8),
        )

    def answer(self) -> list[int]:
        return Answer.of(run(self.decoder, TEXT, PARAMS)).tokens

    def check_that_it_goes_on(self) -> None:
        assert not ahead_threads()
        assert self.answer() == self.wanted


@pytest.mark.parametrize("n", range(4, 16))
def test_a_draft_that_fails_is_done_without_and_a_mistake_is_raised_in_the_answer(tiny: TinyFiles, n: int) -> None:
    failing = Failing(tiny, lambda context: Fragile(context, EngineError("out of memory"), n))
    assert failing.answer() == failing.wanted
    assert failing.lost == ["failed: out of memory"]
    failing.check_that_it_goes_on()
    failing = Failing(tiny, lambda context: Fragile(context, ZeroDivisionError("a mistake"), n))
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        failing.answer()
    failing.check_that_it_goes_on()


@pytest.mark.parametrize("n_rounds", [0, 1, 3])
def test_an_answer_that_is_dropped_ends_the_thread(tiny: TinyFiles, n_rounds: int) -> None:
    failing = Failing(tiny)
    failing.decoder.prefill(TEXT, lambda: False)
    rounds = failing.decoder.rounds(TEXT, PARAMS, TextAssembler(failing.decoder.target.model.vocab, ()))
    for _ in range(n_rounds):
        next(rounds)
    rounds.close()
    failing.check_that_it_goes_on()


def test_a_pass_that_fails_ends_the_thread(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(tiny)

    def broken(n: int) -> None:
        if n == 5:
            raise EngineError("the device is gone")

    watch_passes(failing.decoder.target, monkeypatch, before=broken)
    with pytest.raises(EngineError, match="the device is gone"):
        failing.answer()
    failing.check_that_it_goes_on()


# -- whether it pays, on times that are given: no clock but a made-up one ----------------------------------------------


STEP_MS = 5.0


def many(
    balance: AheadBalance,
    n: int,
    rng: random.Random,
    *,
    longer: float = 0.0,
    n_spared: float = 1.0,
    late: float = 0.0,
    noise: float = 0.0,
    wide_beside: bool = False,
) -> list[bool]:
    """Which of n passes had drafting beside them.

    Args:
        longer: what a pass takes longer with drafting beside it, of 50 ms.
        n_spared: draft tokens that were there, after such a pass.
        late: what the drafting is waited for afterwards [ms].
        noise: what the machine's other work adds to a pass, at most, of itself.
        wide_beside: passes over many tokens, which take longer, are mostly such that have drafting beside them.
    """
    beside = []
    for _ in range(n):
        balance.took_in_order(4, 4 * STEP_MS)
        alone = balance.leaves_alone()
        wide = rng.random() < (0.5 if not wide_beside else 0.2 if alone else 0.8)
        ms = 50.0 * (1.0 + 0.5 * wide) * (1.0 + noise * rng.random())
        if alone:
            balance.passed(1 + 4 * wide, ms)
        else:
            balance.passed(1 + 4 * wide, ms * (1.0 + longer), late_ms=late)
            balance.spared(int(n_spared) + (rng.random() < n_spared % 1))
        beside.append(not alone)
    return beside


def share(beside: list[bool]) -> float:
    return sum(beside) / len(beside)


@pytest.mark.parametrize(
    ("options", "goes_on"),
    [
        ({"n_spared": 2.0}, True),
        ({"n_spared": 2.0, "noise": 0.4}, True),
        ({"n_spared": 2.0, "longer": 0.1}, True),  # 10 ms a round for 6
        ({"longer": 0.3}, False),
        ({"longer": 0.3, "noise": 0.4}, False),
        ({"late": 8.0}, False),
        ({"n_spared": 0.8, "wide_beside": True}, True),  # passes over more tokens are not taken for slowed ones
    ],
)
def test_what_saves_more_time_than_it_takes_goes_on(options: dict[str, Any], goes_on: bool) -> None:
    found = share(many(AheadBalance(), 2000, random.Random(1), **options))
    assert found > 0.9 if goes_on else found < 0.1


def test_pauses_grow_and_end_when_it_pays_again() -> None:
    balance, rng = AheadBalance(), random.Random(1)
    beside = many(balance, 8000, rng, longer=0.3)
    starts = [i for i in range(1, len(beside)) if beside[i] and not any(beside[max(0, i - N_PAUSE) : i])]
    lengths = [later - earlier - N_TRIAL for earlier, later in zip([0, *starts], starts, strict=False)]
    lengths[0] -= N_TRIAL  # it has two to fail
    assert lengths == [min(N_PAUSE * 2**i, LONGEST_PAUSE) for i in range(len(lengths))]
    assert lengths[-1] == LONGEST_PAUSE
    assert share(many(balance, 4000, rng)[2 * LONGEST_PAUSE :]) > 0.9


class Clock(AtOnce):
    """The time of a target and a draft model that work at once; drafting takes the target's time as told.

    Attributes:
        toll_ms: what a pass takes longer by each draft step beside it.
    """

    def __init__(self, toll_ms: float) -> None:
        super().__init__()
        self.now, self.toll_ms = 0.0, toll_ms
        self._is_preparing, self._n_steps = False, 0

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Future[Any]:
        self._is_preparing = work.func.__name__ == "_prepare"
        future = super().submit(work, *args, **options)
        self._is_preparing = False
        return future

    def pass_of(self, decode: Any, ms: float, *, is_target: bool) -> Any:
        def timed(tokens: Any, *args: Any) -> Any:
            if is_target:
                self.now += (ms + self._n_steps * self.toll_ms) / 1e3
                self._n_steps = 0
            elif self._is_preparing:
                self._n_steps += 1
            else:
                self.now += ms / 1e3
            return decode(tokens, *args)

        return timed


@pytest.mark.parametrize(("toll_ms", "goes_on"), [(0.0, True), (0.1, True), (3.0, False)])
def test_a_target_whose_passes_the_drafting_slows_is_left_alone(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, toll_ms: float, goes_on: bool
) -> None:
    clock = Clock(toll_ms)
    monkeypatch.setattr("localspec.spec_decode.ahead.time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    target = WaitingModel(tiny.quick.target, Timing(0.0)).new_context(N_CTX)
    draft = WaitingModel(tiny.quick.draft, Timing(0.0, device="cpu", right=0.8)).new_context(N_CTX)
    for context, ms in ((target, 20.0), (draft, 2.0)):
        timed = clock.pass_of(context._decode, ms, is_target=context is target)
        monkeypatch.setattr(context, "_decode", timed)
    ahead = DraftAhead(new_executor=lambda: clock, n_steps=6)
    decoder = SpeculativeDecoder(target, [DraftModelDrafter(draft)], FixedController(3), ahead=ahead)
    params, counts, answers, hidden = SamplingParams(max_tokens=60, ignore_eos=True), [], [], set[float]()
    for _ in range(20):
        rounds = run(decoder, [5, 6, 7], params)
        counts += [round_.ahead for round_ in rounds if round_.ahead and round_.draft]
        answers.append(Answer.of(rounds).tokens)
        hidden.update(ahead.hidden.values())
    assert all(answer == answers[0] for answer in answers)
    prepared = [count.prepared > 0 for count in counts]
    assert share(prepared) > 0.8 if goes_on else share(prepared) < 0.25
    assert (0.0 in hidden) is not goes_on
    assert all(each > 0.2 for each in hidden if each)  # a pause is not taken for drafts that came too late
