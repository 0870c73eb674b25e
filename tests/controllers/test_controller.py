"""The policy, in worlds whose costs and text are known: never slower than plain, near the best fixed length."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from localspec import LLM
from localspec.backends.base import FEW_ROWS
from localspec.controllers import auto as auto_module
from localspec.controllers import stopping as stopping_module
from localspec.controllers.acceptance import COPIED, GREEDY, N_BINS, SourceAcceptance, bin_of, of_a_head
from localspec.controllers.auto import MAX_DRAFT, AutoController
from localspec.controllers.cost_model import Curve, PassTimes
from localspec.controllers.fixed import FixedController
from localspec.controllers.learned import TimeBudget
from localspec.controllers.stopping import Continuation, Prospects
from localspec.errors import UsageError
from localspec.sampling.sampling import Distribution, Row, SamplingParams, top_probability
from localspec.spec_decode.rounds import Draft, DraftToken, EmittedToken, Round, Verdict
from tests.conftest import TinyFiles, open_backend
from tests.support.simulator import CURVES, Source, World, adversarial, stationary, switching

N_TOKENS = 500


def auto(world: World) -> AutoController:
    models = world.draft_times()
    head = world.sources.get("head")
    priors = {"head": of_a_head(GREEDY, head and float(head.right.mean()))} | {
        name: COPIED for name in world.sources if name not in models
    }
    sources = {name: SourceAcceptance(priors.get(name, GREEDY)) for name in world.sources}
    return AutoController(world.true_times(), models, sources)


def world(curve: str, draft_share: float, kind: str) -> World:
    rng = np.random.default_rng(zlib.crc32(f"{curve} {draft_share} {kind}".encode()))
    n = N_TOKENS + 64
    name, _, value = kind.partition(" ")
    source = {
        "stationary": lambda: stationary(rng, n, float(value)),
        "dishonest": lambda: stationary(rng, n, float(value), honesty=0.0),
        "switching": lambda: switching(rng, n, (0.9, 0.2), 80),
        "adversarial": lambda: adversarial(rng, n),
    }[name]()
    source.step_ms = CURVES[curve][1] * draft_share
    source.prefill_ms = source.step_ms / 4
    return World(CURVES[curve], {"model": source})


KINDS = [
    "stationary 0.05",
    "stationary 0.4",
    "stationary 0.8",
    "stationary 0.95",
    "dishonest 0.6",
    "switching",
    "adversarial",
]


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("draft_share", [0.1, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_never_slower_than_plain_decoding(curve: str, draft_share: float, kind: str) -> None:
    here = world(curve, draft_share, kind)
    assert here.run(auto(here), N_TOKENS) >= 0.98 * here.plain_rate()


@pytest.mark.parametrize("curve", ["ik", "gpu"])
@pytest.mark.parametrize("draft_share", [0.1, 0.2])
@pytest.mark.parametrize("mean", [0.05, 0.6, 0.95])
def test_close_to_the_best_fixed_length_in_hindsight(curve: str, draft_share: float, mean: float) -> None:
    here = world(curve, draft_share, f"stationary {mean}")
    best = max(here.run(FixedController(k), N_TOKENS) for k in (0, 1, 2, 3, 4, 6, 8, 12))
    assert here.run(auto(here), N_TOKENS) >= 0.95 * best


def test_a_slower_machine_is_noticed_and_not_mistaken_for_a_bad_draft() -> None:
    here = world("ik", 0.2, "stationary 0.8")
    here.slowdown = lambda position: 3.0 if position > 150 else 1.0
    steady = world("ik", 0.2, "stationary 0.8")
    steady.slowdown = lambda position: 1.0
    plain = World(here.curve, {"model": here.sources["model"]}, slowdown=here.slowdown)
    gain = here.run(auto(here), N_TOKENS) / plain.run(FixedController(0), N_TOKENS)
    assert gain >= 0.9 * steady.run(auto(steady), N_TOKENS) / steady.plain_rate()


def test_acceptance_is_learned_and_forgotten() -> None:
    acceptance = SourceAcceptance(GREEDY)
    assert acceptance.expected(0.97) > 0.9
    for _ in range(60):
        acceptance.observe(0.97, accepted=False)
    assert acceptance.expected(0.97) < 0.15
    for _ in range(200):
        acceptance.observe(0.97, accepted=True)
    assert acceptance.expected(0.97) > 0.85
    assert acceptance.expected(0.15) == pytest.approx(SourceAcceptance(GREEDY).expected(0.15))


def test_expected_acceptance_is_calibrated() -> None:
    """Expected calibration error at most 0.05 on a source whose confidences are off by a third."""
    rng = np.random.default_rng(11)
    acceptance = SourceAcceptance(GREEDY)
    confidence = rng.random(4000)
    right = rng.random(4000) < confidence * 2 / 3
    predicted = np.empty(4000)
    for i, (c, ok) in enumerate(zip(confidence, right, strict=True)):
        predicted[i] = acceptance.expected(c)
        acceptance.observe(c, bool(ok))
    late = slice(1000, None)
    bins = np.array([bin_of(c) for c in confidence])
    error = sum(
        abs(predicted[late][bins[late] == b].mean() - right[late][bins[late] == b].mean()) * (bins[late] == b).mean()
        for b in range(N_BINS)
        if (bins[late] == b).any()
    )
    assert error <= 0.05


def one_kind(acceptance: float, step_ms: float) -> Prospects:
    """A source whose guesses are all alike."""
    return Prospects(np.array([[1.0]]), np.array([0]), np.array([acceptance]), step_ms)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("step_share", [0.0, 0.1, 0.5])
def test_the_stopping_problem_has_the_solution_of_the_theory(curve: str, acceptance: float, step_share: float) -> None:
    """With guesses all alike the best rate is max_k (1 - a^(k+1)) / (1 - a) / (t(k + 1) + k·d)."""
    times, step = PassTimes(CURVES[curve]), step_share * CURVES[curve][1]
    rows = [times(w) for w in range(1, 18)]
    best = max((1 - acceptance ** (k + 1)) / (1 - acceptance) / (times(k + 1) + k * step) for k in range(17))
    found = Continuation(rows, [one_kind(acceptance, step)], None)
    assert found.rate == pytest.approx(best, rel=0.02)
    assert (found.step(0, 1.0) > 0) == (best > 1.001 / times(1))
    if step == 0:
        free = Continuation(rows, [], one_kind(acceptance, 0.0))
        assert free.rate == pytest.approx(best, rel=0.02)


def test_a_step_is_an_option_on_its_guess() -> None:
    """Half of the guesses are surely right, half surely wrong, the confidence tells: the wrong ones are not sent."""
    rows = [10.0 + 3.0 * w for w in range(17)]
    both = Prospects(np.array([[0.5, 0.5]]), np.array([0, 0]), np.array([1e-6, 1.0]), 2.0)
    blind = one_kind(0.5, 2.0)
    assert Continuation(rows, [both], None).rate > 1.1 * Continuation(rows, [blind], None).rate
    assert Continuation(rows, [both], None).send(0, 1.0, 1e-6) < 0


def test_a_step_behind_a_token_that_is_not_settled_counts_that_token() -> None:
    costs = PassTimes(CURVES["ik"]), {"model": PassTimes({1: 5.0})}
    controller = AutoController(*costs, {"model": SourceAcceptance(GREEDY)})
    plan = controller.plan(room=20, n_past=10)
    assert plan.more("model", 1)
    assert plan.more("model", 1, held=0.97)
    assert not plan.more("model", 1, held=0.15)


def test_drafts_carried_over_as_text_may_cost_less_reading() -> None:
    costs = PassTimes(CURVES["ik"]), {"model": PassTimes({1: 5.0, 64: 160.0})}  # 64 tokens take three of the target's
    same, other = (AutoController(*costs, {"model": SourceAcceptance(GREEDY)}, passes=n) for n in ({}, {"model": 1.0}))
    assert same.plan(room=99, n_past=10).more("model", 64)
    assert not other.plan(room=99, n_past=10).more("model", 64)
    assert other.plan(room=99, n_past=10).more("model", 32)


def test_what_takes_more_passes_for_a_token_costs_more() -> None:
    costs = PassTimes(CURVES["ik"]), {"model": PassTimes({1: 5.0})}
    once, twice = (
        AutoController(*costs, {"model": SourceAcceptance(GREEDY)}, passes={"model": n}).stopping for n in (1.0, 2.0)
    )
    assert twice.costs.step_ms("model") == 2 * once.costs.step_ms("model")
    assert twice.break_even("model") > once.break_even("model") + 0.05


def test_samples_are_accepted_at_rates_of_their_own() -> None:
    likeliest, sampled = ({"model": SourceAcceptance(GREEDY)} for _ in range(2))
    costs, params = (PassTimes(CURVES["ik"]), {"model": PassTimes({1: 5.0})}), SamplingParams(temperature=1.0)
    controller = AutoController(*costs, likeliest, sampled, params=params)
    plan, acceptance = controller.plan(room=20, n_past=10), controller.acceptance
    sample = DraftToken(0, "model", 0.6, Distribution(np.arange(2), np.array([0.6, 0.4])), 0.6)
    for _ in range(30):
        acceptance.observe(Draft([sample]), [])
        acceptance.observe(Draft([DraftToken(0, "model", 0.6, None, 0.6)]), [0])
    assert plan.keep("model", 0.6) == likeliest["model"].expected(0.6) > 0.8
    assert sampled["model"].expected(0.6) < 0.4
    assert plan.keep("model", 0.6, sampled=True) in (None, sampled["model"].expected(0.6))
    assert acceptance.table("model")[bin_of(0.6)] == sampled["model"].table()[bin_of(0.6)]


@pytest.mark.parametrize("length", [-1, 65])
def test_absurd_lengths_are_refused(length: int) -> None:
    with pytest.raises(UsageError, match="draft length"):
        FixedController(length)


def test_a_draft_model_does_not_read_a_prompt_for_a_short_answer() -> None:
    controller = auto(world("ik", 0.2, "stationary 0.9"))
    assert not controller.plan(room=8, n_past=60).more("model", pending=60)
    assert controller.plan(room=500, n_past=60).more("model", pending=60)


def rounds_of(ms_verify: float, n_drafted: int, n_accepted: int, ms_draft: float = 0.0) -> Round:
    draft = Draft([DraftToken(0, "model", 0.9, None, 0.9)] * n_drafted)
    emitted = [EmittedToken(0, "plain")] * (n_accepted + 1)
    return Round(0, draft, Verdict(n_accepted, 0, "plain"), emitted, ms_draft=ms_draft, ms_verify=ms_verify)


def finish(controller: AutoController, round_: Round) -> None:
    controller.observe(round_)
    controller.learn(round_)


def test_a_stall_is_charged_no_more_than_was_expected() -> None:
    """A pass of 9 s, of the target or of a draft model, as when the process was stopped or swapped out."""
    controller = auto(world("ik", 0.2, "stationary 0.8"))
    costs = controller.costs
    step = costs.draft_times["model"](1)
    for ms_draft, ms_verify in ((step, 9000.0), (9000.0, 60.0)):
        before = controller.time_budget.balance
        controller.plan(room=500, n_past=60).spent("model", 1, ms_draft)
        most = (costs.times(2) + step + costs.ms_other) / costs.ms_plain
        finish(controller, rounds_of(ms_verify, 1, 0))
        assert before - controller.time_budget.balance <= most
    assert controller.time_budget.for_drafts > -2.5


CURVE = {1: 50.0, 2: 60.0, 4: 80.0, 8: 120.0}


Seen = tuple[Sequence[int], Mapping[int, float], int]


def times_after(curve: Mapping[int, float], *seen: Seen, sd: float = 0.0) -> PassTimes:
    """After passes over these widths in turns, that took so long, so many times."""
    times, rng = PassTimes(dict(curve)), np.random.default_rng(0)
    for widths, ms, n in seen:
        for i in range(n):
            width = widths[i % len(widths)]
            times.observe(width, ms[width] * rng.normal(1, sd))
    return times


@pytest.mark.parametrize(("calibrated", "slower"), [(52.0, 2.2), (14.0, 3.1), (14.0, 0.4)])
def test_two_rounds_show_that_a_neighbour_has_taken_the_cpu_and_one_slow_pass_shows_nothing(
    calibrated: float, slower: float
) -> None:
    """Beside a program that takes 40 % of the CPUs: target passes 2.2 times as long, the draft's 3.1 times."""
    curve = {1: calibrated, 2: 1.2 * calibrated}
    times = times_after(curve, ([1], curve, 50), ([1], {1: 20 * calibrated}, 1), ([1], curve, 49))
    assert times(1) == pytest.approx(calibrated, rel=0.02)
    times.observe(1, slower * calibrated)
    assert times(1) == pytest.approx(calibrated, rel=0.1)
    times.observe(1, slower * calibrated)
    assert abs(np.log(times(1) / calibrated)) > 0.6 * abs(np.log(slower))


def test_a_width_that_was_slow_is_tried_again() -> None:
    slow = ([1, 1, 8], {1: 50.0, 8: 220.0}, 300)
    times = times_after(CURVE, slow)
    assert times(8) == pytest.approx(220.0, rel=0.1)
    assert times(1) == pytest.approx(50.0, rel=0.05)
    assert times_after(CURVE, slow, ([1], CURVE, 400))(8) == pytest.approx(120.0, rel=0.02)


def test_some_passes_show_that_a_second_token_costs_more_than_was_measured() -> None:
    """Calibrated beside a neighbour that took memory bandwidth: 26 and 28.3 ms; it has left: 22.4 and 29.5."""
    widths = (1, 1, 2, 1, 1, 1, 2, 1, 1, 2, 1, 1, 1, 2)
    times = times_after({1: 26.0, 2: 28.3, 3: 38.9, 4: 47.8}, (widths, {1: 22.4, 2: 29.5}, len(widths)), sd=0.04)
    assert times(2) / times(1) == pytest.approx(29.5 / 22.4, rel=0.05)
    assert times(3) / times(1) > 1.1 * 38.9 / 26.0  # what no pass has shown is learned of the others


def test_a_plain_pass_tells_scale_and_further_rows_apart() -> None:
    """While every pass has two tokens, it is not known which of the two takes less time than it did."""
    times = times_after({1: 25.0, 2: 28.0}, ([2], {2: 26.0}, 100), ([1], {1: 20.0}, 3), sd=0.03)
    assert times(1) == pytest.approx(20.0, rel=0.06)
    assert times(2) == pytest.approx(26.0, rel=0.04)


def test_rows_that_cost_more_are_told_from_a_machine_that_is_slower() -> None:
    slower = times_after(CURVE, ([1, 2, 4], {width: 1.4 * ms for width, ms in CURVE.items()}, 200))
    dearer = times_after(CURVE, ([1, 2, 4], {width: 2 * ms - 50.0 for width, ms in CURVE.items()}, 200))
    assert slower(8) == pytest.approx(1.4 * 120.0, rel=0.08)
    assert dearer(1) == pytest.approx(50.0, rel=0.08)
    assert dearer(4) == pytest.approx(110.0, rel=0.1)
    assert dearer(8) > 130.0  # never seen, but what was seen of 2 and 4 rows tells something of it
    # A prompt's length is no calibrated width: what it took says nothing about the others.
    before = slower(4)
    slower.observe(300, 10 * slower(300))
    assert slower(4) == before
    assert slower(300) > 1.15 * before


def test_a_calibration_that_no_longer_fits_is_noticed() -> None:
    outliers = [([1], {1: 500.0 if i % 2 else 50.0}, 1 if i % 2 else 49) for i in range(24)]
    assert times_after({1: 50.0}, *outliers).fits
    assert not times_after({1: 50.0}, ([1], {1: 90.0}, 600)).fits


def test_where_little_is_gained_a_round_is_plain_now_and_then() -> None:
    """Else nothing would show that plain decoding has become faster than drafting: a second token costs 0.3 of the
    first, not 0.02."""
    head = Source(np.full(300, 0.5), np.arange(300) % 5 == 0, step_ms=2.0)
    here = World({1: 20.0, 2: 26.0, 3: 40.0, 16: 400.0}, {"head": head})
    times = PassTimes({1: 25.0, 2: 25.5, 3: 40.0, 16: 400.0})
    acceptance = {"head": SourceAcceptance(of_a_head(GREEDY, 0.35))}
    rate = here.run(AutoController(times, here.draft_times(), acceptance), 200)
    assert times(1) == pytest.approx(20.0, rel=0.06)
    assert rate > 0.93 * here.plain_rate()


def test_on_a_machine_that_has_become_slower_no_long_prompt_is_read() -> None:
    """As another program may slow a draft model more than the target."""
    calm, busy = (auto(world("ik", 0.2, "stationary 0.9")) for _ in range(2))
    for controller, slower in ((calm, 1.0), (busy, 2.0)):
        for _ in range(20):
            controller.plan(room=500, n_past=60)
            finish(controller, rounds_of(slower * 52.0, 0, 0))
        controller.time_budget.balance = 40.0
    plans = [controller.plan(room=500, n_past=80) for controller in (calm, busy)]
    assert [plan.more("model", 200) for plan in plans] == [200, 0]  # ten plain tokens' time
    assert [plan.more("model", 80) for plan in plans] == [80, 80]


def test_a_slow_machine_is_expected_to_slow_a_draft_model_that_is_not_running_too() -> None:
    controller = auto(world("ik", 0.2, "stationary 0.8"))
    times, draft_times = controller.costs.times, controller.costs.draft_times["model"]
    before = draft_times(1) / times(1)
    for _ in range(50):
        finish(controller, rounds_of(2 * 52.0, 0, 0))
    assert times(1) == pytest.approx(2 * 52.0, rel=0.05)
    assert draft_times(1) / times(1) == pytest.approx(before, rel=0.01)


def test_copies_that_failed_do_not_cost_a_draft_model_its_chance() -> None:
    here = world("ik", 0.2, "stationary 0.9")
    alone = here.run(auto(here), N_TOKENS)
    n = N_TOKENS + 64
    here.sources = {"ngram": Source(np.full(n, 0.9), np.zeros(n, dtype=bool)), **here.sources}
    here.n_prompt = 40
    assert here.run(auto(here), N_TOKENS) >= 0.9 * alone


def reading_world(certainty: float, mean: float, share: float = 0.31, n_prompt: int = 52) -> World:
    """A text after a prompt that a draft model would have to read; ``share`` of a token's time a step."""
    here = world("ik", share, f"stationary {mean}")
    here.n_prompt = n_prompt
    here.certainty = np.full(len(here.sources["model"].confidence), certainty)
    return here


def test_a_prompt_is_not_read_for_a_text_that_the_target_is_unsure_of() -> None:
    """It costs 15 plain tokens, which no answer may risk at once: by then its first tokens have told."""

    def gain(certainty: float, mean: float) -> float:
        here = reading_world(certainty, mean, 0.1, n_prompt=600)
        controller = auto(here)
        controller.time_budget.balance = 40.0  # of earlier answers
        return here.run(controller, N_TOKENS) / here.plain_rate()

    assert 0.995 <= gain(0.25, 0.4) < 1.01
    assert gain(0.97, 0.9) > 1.5


def test_a_longer_prompt_is_read_from_what_copies_have_saved() -> None:
    """It costs 12 plain tokens and more, which no answer may risk; but this one is ahead by that already."""
    here = reading_world(0.97, 0.95, 0.2, n_prompt=250)
    rng = np.random.default_rng(3)
    copied = stationary(rng, N_TOKENS + 64, 0.95)
    copied.confidence[200:] = np.nan  # then there is nothing to copy any more
    here.sources = {"ngram": copied, **here.sources}
    copies = World(here.curve, {"ngram": copied}, certainty=here.certainty)
    assert here.run(auto(here), N_TOKENS) >= 1.1 * copies.run(auto(copies), N_TOKENS)
    alone = reading_world(0.97, 0.95, 0.2, n_prompt=250)
    assert alone.run(auto(alone), N_TOKENS) == pytest.approx(alone.plain_rate(), rel=0.01)


def test_what_was_read_while_another_program_had_the_cpu_is_used_all_the_same() -> None:
    """A reading that took twice as long as predicted costs that time, and not the draft's chance too."""
    usual, disturbed = reading_world(0.97, 0.9), reading_world(0.97, 0.9)
    disturbed.burst = 2.2
    source = disturbed.sources["model"]
    lost = 1.2 * disturbed.draft_times()["model"](disturbed.n_prompt)
    assert source.prefill_ms > 0
    there, here = usual.run(auto(usual), N_TOKENS), disturbed.run(auto(disturbed), N_TOKENS)
    assert N_TOKENS / here == pytest.approx(N_TOKENS / there + lost, rel=0.03)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """The target's rows whose certainty was looked at."""
    rows: list[Row] = []

    def look(row: Row, temperature: float = 1.0) -> float:
        rows.append(row)
        return top_probability(row, temperature)

    monkeypatch.setattr(auto_module, "top_probability", look)
    return rows


def test_a_model_that_would_not_pay_if_always_right_costs_no_thought_until_it_would(
    monkeypatch: pytest.MonkeyPatch, looked_at: list[Row]
) -> None:
    solved = []

    class Watched(Continuation):
        def __init__(self, rows: Sequence[float], models: Sequence[Prospects], *rest: Any) -> None:
            solved.append(len(models))
            super().__init__(rows, models, *rest)

    monkeypatch.setattr(stopping_module, "Continuation", Watched)
    here = world("linear", 0.3, "stationary 0.95")
    here.certainty = np.full(N_TOKENS + 64, 0.95)
    controller = auto(here)
    here.run(controller, 200)
    assert len(looked_at) <= 1
    assert controller.explain() == "Draft model: off, too slow on this machine."
    assert sum(solved) <= 2
    # Another machine, as it were: passes over more tokens are nearly free.
    here.curve = CURVES["gpu"]
    controller.costs.times.curve = Curve(dict(here.curve))
    steps = controller.costs.draft_times["model"]
    steps.curve = Curve(dict.fromkeys(steps.curve.measured, 1.0))
    here.sources["model"].step_ms = here.sources["model"].prefill_ms = 1.0
    assert "too slow" not in controller.explain()
    assert here.run(controller, 300) > 1.5 * here.plain_rate()


def test_a_target_that_was_watched_for_a_while_is_looked_at_half_as_often(looked_at: list[Row]) -> None:
    here = reading_world(0.25, 0.4, n_prompt=200)
    here.run(auto(here), 132)
    assert auto_module.WATCHED_TOKENS + 45 <= len(looked_at) <= auto_module.WATCHED_TOKENS + 55


def test_a_model_that_has_not_read_the_text_does_not_stand_in_the_way_of_copies() -> None:
    here = world("ik", 0.31, "stationary 0.95")
    rng = np.random.default_rng(3)
    here.sources = {"ngram": stationary(rng, N_TOKENS + 64, 0.6), **here.sources}
    here.n_prompt = 2000  # costs more to read than it will ever save
    alone = World(here.curve, {"ngram": here.sources["ngram"]})
    assert here.run(auto(here), N_TOKENS) >= 0.99 * alone.run(auto(alone), N_TOKENS)


def test_a_copy_that_is_wrong_leaves_something_to_try_the_next_with() -> None:
    """A predicted output whose first words are not those of the answer, which is short and repeats all the rest."""
    curve = {1: 18.6, 2: 24.7, 3: 28.8, 4: 31.5, 5: 37.2, 6: 43.6, 7: 51.0, 8: 55.5, 16: 103.0}
    right = np.ones(60, dtype=bool)
    right[0] = False
    here = World(curve, {"ngram": Source(np.full(60, 0.9), right)})
    assert here.run(auto(here), 40) >= 1.7 * here.plain_rate()  # 1.07 where all may be staked at once


@pytest.mark.parametrize(("engine", "longest"), [("ik-llama", FEW_ROWS - 1), ("llama-cpp", MAX_DRAFT)])
def test_copies_are_no_longer_than_an_engine_bears(tiny: TinyFiles, engine: str, longest: int) -> None:
    """Where wide passes make all later ones longer, the free copies of a text that repeats itself stay narrow."""
    open_backend(engine)
    with LLM(tiny.pair.target, "ngram", backend=engine, n_ctx=512) as llm:
        llm.inspect().state.times = PassTimes({1: 10.0, 24: 10.5})  # where width is all but free
        params = SamplingParams(max_tokens=120, ignore_eos=True)
        prediction = llm.generate("a b c d", params, speculate=False).token_ids
        with llm.rounds("a b c d", params, prediction=prediction) as rounds:
            assert max(len(round_.draft) for round_ in rounds) == longest


def two_models(head: float, model: float) -> World:
    """A cheap head that reads next to nothing beside a dear draft model that has a prompt to read, and n-grams."""
    rng = np.random.default_rng(17)
    cheap, dear = stationary(rng, N_TOKENS + 64, head), stationary(rng, N_TOKENS + 64, model)
    cheap.step_ms, dear.step_ms = 4.0, 15.0
    cheap.prefill_ms, dear.prefill_ms = 0.5, 4.0
    return World(CURVES["ik"], {"head": cheap, "model": dear})


@pytest.mark.parametrize(("head", "model"), [(0.5, 0.55), (0.75, 0.6), (0.2, 0.9), (0.05, 0.9)])
def test_of_two_models_the_one_that_pays_more_is_asked_first(head: float, model: float) -> None:
    both = two_models(head, model)
    alone = [World(both.curve, {name: source}) for name, source in both.sources.items()]
    best = max(here.run(auto(here), N_TOKENS) for here in alone)
    assert both.run(auto(both), N_TOKENS) >= 0.93 * best


def test_steps_that_are_hidden_behind_the_targets_passes_cost_as_much_less() -> None:
    """A draft as slow as its target does not pay, unless most of its steps are taken while the target verifies."""
    here = world("gpu", 0.99, "stationary 0.8")
    controller = auto(here)
    assert here.run(controller, N_TOKENS) == pytest.approx(here.plain_rate(), rel=0.03)
    needed = controller.stopping.break_even("model")
    controller.costs.hidden = {"model": 0.7}
    controller.stopping.stale = True
    assert controller.costs.step_ms("model") == pytest.approx(0.3 * controller.costs.draft_times["model"](1))
    assert controller.stopping.break_even("model") < 0.5 < needed
    controller.costs.hidden = {"another": 0.7}
    assert controller.stopping.break_even("model") == needed


NEAR_FREE = {1: 50.0, 2: 50.1, 24: 52.0}
CHEAP = {1: 50.0, 2: 65.0, 24: 400.0}
DEAR = {1: 50.0, 2: 85.0, 3: 120.0, 24: 900.0}
DEARER = {1: 50.0, 2: 101.0, 24: 1300.0}


@pytest.mark.parametrize(
    ("mean", "curve", "step_ms", "wanted"),
    [
        (0.9, DEARER, None, "off, checking a guess costs more than it saves on this machine"),
        (0.9, DEAR, 40.0, "off, too slow on this machine"),
        (0.2, DEAR, None, "off, too few guesses are right"),
        (0.9, CHEAP, None, "on ("),
        (0.1, NEAR_FREE, None, "on, as measured"),
        (None, {1: 50.0, 2: 68.0, 24: 500.0}, None, "on, only where a repeat is likely"),
    ],
)
def test_the_figures_beside_a_verdict_lead_to_it(
    mean: float | None, curve: dict[int, float], step_ms: float | None, wanted: str
) -> None:
    """Of a source of which this share of the guesses is right in this text; None: one in five is sure, and right."""
    acceptance, source = SourceAcceptance(GREEDY), "ngram" if step_ms is None else "model"
    for i in range(400):
        confidence = 0.55 if mean is not None else 0.97 if i % 5 == 0 else 0.05
        acceptance.notice(confidence)
        acceptance.observe(confidence, i % 5 == 0 if mean is None else i % 100 < 100 * mean)
    steps = {} if step_ms is None else {source: PassTimes({1: step_ms})}
    said = AutoController(PassTimes(dict(curve)), steps, {source: acceptance}).explain()
    assert said.partition(": ")[2].startswith(wanted)
    assert said.endswith(".")
    if shares := [int(share) for share in re.findall(r"(\d+) %", said)]:
        needed, share = shares
        assert (share >= needed) == (": on (" in said), said


def test_where_nothing_more_may_be_lost_that_is_the_reason() -> None:
    acceptance = SourceAcceptance(GREEDY)
    times, budget = PassTimes({1: 50.0, 2: 65.0, 24: 400.0}), TimeBudget(balance=0.0)
    controller = AutoController(times, {}, {"ngram": acceptance}, budget=budget)
    assert controller.explain() == "Copying from the text: off for now, a wrong guess would cost more than may be lost."


def test_every_source_has_a_line() -> None:
    sources = {name: SourceAcceptance(GREEDY) for name in ("ngram", "head", "model", "model2")}
    steps = {name: PassTimes({1: 1.0}) for name in ("head", "model", "model2")}
    lines = AutoController(PassTimes({1: 50.0, 2: 60.0, 24: 400.0}), steps, sources).explain().split("\n")
    shown = ["Copying from the text", "Head", "Draft model", "Draft model 2"]
    assert [line.partition(":")[0] for line in lines] == shown
