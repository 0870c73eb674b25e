"""Whether drafting ahead pays, on times that are given: no clock but a made-up one."""

from __future__ import annotations

import random
import types
from concurrent.futures import Future
from typing import Any

import pytest

from localspec.controllers.fixed import FixedController
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.ahead import LONGEST_PAUSE, N_PAUSE, N_TRIAL, AheadBalance, DraftAhead
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from tests.conftest import TinyFiles
from tests.spec_decode.test_ahead import AtOnce, answer_of
from tests.spec_decode.test_lossless import N_CTX, run
from tests.support.waiting_engine import Timing, WaitingModel

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


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)


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
def test_what_saves_more_time_than_it_takes_goes_on(rng: random.Random, options: dict[str, Any], goes_on: bool) -> None:
    found = share(many(AheadBalance(), 2000, rng, **options))
    assert found > 0.9 if goes_on else found < 0.1


def test_pauses_grow_and_end_when_it_pays_again(rng: random.Random) -> None:
    balance = AheadBalance()
    beside = many(balance, 8000, rng, longer=0.3)
    starts = [i for i in range(1, len(beside)) if beside[i] and not any(beside[max(0, i - N_PAUSE) : i])]
    lengths = [later - earlier - N_TRIAL for earlier, later in zip([0, *starts], starts, strict=False)]
    lengths[0] -= N_TRIAL  # it has two to fail
    assert lengths == [min(N_PAUSE * 2**i, LONGEST_PAUSE) for i in range(len(lengths))]
    assert lengths[-1] == LONGEST_PAUSE
    assert share(many(balance, 4000, rng)[2 * LONGEST_PAUSE :]) > 0.9


# -- in a decoder ------------------------------------------------------------------------------------------------------


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
        answers.append(answer_of(rounds))
        hidden.update(ahead.hidden.values())
    assert all(answer == answers[0] for answer in answers)
    prepared = [count.prepared > 0 for count in counts]
    assert share(prepared) > 0.8 if goes_on else share(prepared) < 0.25
    assert (0.0 in hidden) is not goes_on
    assert all(each > 0.2 for each in hidden if each)  # a pause is not taken for drafts that came too late
