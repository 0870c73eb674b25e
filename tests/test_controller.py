"""The policy, in worlds whose costs and text are known: never slower than plain, near the best fixed length."""

from __future__ import annotations

import re
import zlib

import numpy as np
import pytest

from localspec.acceptance import N_BINS, SourceAcceptance, bin_of, model_prior
from localspec.controller import AutoController, FixedController, best_threshold_policy
from localspec.cost_model import PassTimes
from localspec.errors import UsageError
from tests.simulator import CURVES, World, adversarial, stationary, switching

N_TOKENS = 500


def auto(world: World) -> AutoController:
    controller = AutoController(world.true_times(), world.draft_times())
    for source in world.sources:
        controller.register(source)
    return controller


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
@pytest.mark.parametrize("draft_share", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_never_slower_than_plain_decoding(curve: str, draft_share: float, kind: str) -> None:
    here = world(curve, draft_share, kind)
    assert here.run(auto(here), N_TOKENS) >= 0.98 * here.plain_rate()


@pytest.mark.parametrize("curve", ["ik", "gpu"])
@pytest.mark.parametrize("draft_share", [0.1, 0.2])
@pytest.mark.parametrize("mean", [0.05, 0.4, 0.6, 0.8, 0.95])
def test_close_to_the_best_fixed_length_in_hindsight(curve: str, draft_share: float, mean: float) -> None:
    here = world(curve, draft_share, f"stationary {mean}")
    best = max(here.run(FixedController(k), N_TOKENS) for k in (0, 1, 2, 3, 4, 6, 8, 12))
    assert here.run(auto(here), N_TOKENS) >= 0.95 * best


def test_six_rows_are_sent_where_they_cost_less_than_five() -> None:
    # Only wide passes pay: every width from 2 to 5 is dear, six rows are nearly free.
    curve = {1: 50.0, 2: 120.0, 3: 130.0, 4: 140.0, 5: 150.0, 6: 55.0, 7: 200.0, 8: 210.0, 16: 400.0}
    rng = np.random.default_rng(5)
    source = stationary(rng, N_TOKENS + 64, 0.97, sharpness=20)
    here = World(curve, {"ngram": source})
    assert here.run(auto(here), N_TOKENS) > 2 * here.plain_rate()


def test_a_slower_machine_is_noticed_and_not_mistaken_for_a_bad_draft() -> None:
    here = world("ik", 0.2, "stationary 0.8")
    here.slowdown = lambda position: 3.0 if position > 150 else 1.0
    steady = world("ik", 0.2, "stationary 0.8")
    steady.slowdown = lambda position: 1.0
    plain = World(here.curve, {"model": here.sources["model"]}, slowdown=here.slowdown)
    gain = here.run(auto(here), N_TOKENS) / plain.run(FixedController(0), N_TOKENS)
    assert gain >= 0.9 * steady.run(auto(steady), N_TOKENS) / steady.plain_rate()


def test_acceptance_is_learned_and_forgotten() -> None:
    acceptance = SourceAcceptance(model_prior())
    assert acceptance.expected(0.97) > 0.9
    for _ in range(60):
        acceptance.observe(0.97, accepted=False)
    assert acceptance.expected(0.97) < 0.15
    for _ in range(200):
        acceptance.observe(0.97, accepted=True)
    assert acceptance.expected(0.97) > 0.85
    assert acceptance.expected(0.15) == pytest.approx(SourceAcceptance(model_prior()).expected(0.15))


def test_expected_acceptance_is_calibrated() -> None:
    """Expected calibration error at most 0.05 on a source whose confidences are off by a third."""
    rng = np.random.default_rng(11)
    acceptance = SourceAcceptance(model_prior())
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


def test_threshold_policy_is_the_theory_where_all_guesses_are_alike() -> None:
    """With one confidence and free steps the best rate is max_k (1 - a^(k+1)) / (1 - a) / t(k + 1)."""
    times = PassTimes({1: 10.0, 2: 11.0, 4: 14.0, 8: 21.0, 16: 40.0})
    acceptance = SourceAcceptance(tuple([0.7] * N_BINS))
    policy = best_threshold_policy(times, 0.0, acceptance, 0.0)
    best = max((1 - 0.7 ** (k + 1)) / 0.3 / times(k + 1) for k in range(17))
    assert policy.rate == pytest.approx(best, rel=1e-6)


def test_break_even_is_where_the_theory_says() -> None:
    times = PassTimes({1: 10.0, 2: 15.0, 3: 40.0, 16: 400.0})
    controller = AutoController(times, {"model": PassTimes({1: 2.0})})
    controller.register("model")
    controller.ms_other = 0.0
    # One guess: 1 + a tokens in 15 + 2 ms against one in 10: a = 0.7.
    assert controller.break_even("model") == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("length", [-1, 65])
def test_absurd_lengths_are_refused(length: int) -> None:
    with pytest.raises(UsageError, match="draft length"):
        FixedController(length)


def test_explains_itself() -> None:
    here = world("ik", 0.6, "stationary 0.4")
    controller = auto(here)
    controller.sources["model"].climate = [1.0] + [0.0] * (N_BINS - 1)
    assert re.search(
        r"not drafting with model: needs \d+% acceptance to break even here, this text gives \d+%", controller.explain()
    )


def test_a_draft_model_does_not_read_a_prompt_for_a_short_answer() -> None:
    here = world("ik", 0.2, "stationary 0.9")
    controller = auto(here)
    assert not controller.plan(room=500, n_past=200).more("model", pending=200)
    here.run(controller, 20)
    assert controller.plan(room=500, n_past=220).more("model", pending=220)
