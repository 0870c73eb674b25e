"""Whether a draft branches is a matter of what a row of the target's pass costs."""

from __future__ import annotations

import pytest

from localspec.controllers.acceptance import AFTER_UNSURE, GREEDY, SourceAcceptance
from localspec.controllers.auto import AutoController
from localspec.controllers.cost_model import PassTimes
from localspec.spec_decode.rounds import Draft, DraftToken, EmittedToken, Round, Verdict
from tests.support.simulator import CURVES
from tests.support.trees import draft_tree


def controller_on(curve: str) -> AutoController:
    times, acceptance = dict(CURVES[curve]), SourceAcceptance(GREEDY)
    controller = AutoController(PassTimes(times), {"model": PassTimes({1: 0.06 * times[1]})}, {"model": acceptance})
    controller.plan(room=100, n_past=64)  # the answer begins
    if curve == "ik":  # a text in which drafting hardly gains anything, so that time is not worth more than plainly
        for _ in range(200):
            acceptance.notice(0.3)
            acceptance.notice(0.3, AFTER_UNSURE)
    return controller


def beside(curve: str, first: float, rival: float, at: int = 0, length: int = 1) -> float | None:
    """What the plan says of a second token beside the one at this place of a chain, whose tokens are this likely."""
    controller = controller_on(curve)
    branching = controller.plan(room=100, n_past=64).branching()
    if branching is None:
        return None
    draft = Draft()
    for _ in range(length):
        draft.append(DraftToken(7, "model", first, None, first))
    return branching.branch(draft, at - 1, "model", rival)


def test_on_a_flat_curve_branches_are_cheap() -> None:
    assert beside("gpu", 0.5, 0.6) == pytest.approx(0.5 * 0.7 * 0.68)
    assert beside("gpu", 0.7, 0.9, at=2, length=5) is not None
    assert beside("gpu", 0.99, 0.05) is None, "not where the first is sure, and the second hardly known"


@pytest.mark.parametrize("curve", ["llama.cpp", "linear"])
def test_where_a_row_costs_nearly_a_pass_none_is_even_looked_for(curve: str) -> None:
    controller = controller_on(curve)
    assert controller.plan(room=100, n_past=64).branching() is None


def test_on_a_curve_between_a_branch_has_to_be_a_toss_up() -> None:
    assert beside("ik", 0.85, 0.6) is None
    assert beside("ik", 0.5, 0.3) is None
    assert beside("ik", 0.45, 0.99) is not None


def test_a_branch_pays_less_the_deeper_it_is() -> None:
    assert beside("gpu", 0.5, 0.6, length=3) is not None
    assert beside("gpu", 0.5, 0.6, at=2, length=3) is None


def test_no_more_than_there_is_room_for() -> None:
    controller = controller_on("gpu")
    plan = controller.plan(room=2, n_past=64)
    assert plan.keep("model", 0.9) is not None
    draft = Draft([DraftToken(7, "model", 0.5, None, 0.5)])
    branching = plan.branching()
    assert branching is not None
    assert branching.branch(draft, -1, "model", 0.9) is not None
    assert branching.branch(draft, -1, "model", 0.9) is None


def test_what_becomes_of_second_tokens_is_learned_apart() -> None:
    """Only where the first was rejected does the second count, and never for the first ones' estimates."""
    controller = controller_on("gpu")
    acceptance = controller.acceptance["model"]
    before, first = acceptance.sibling(0.6), acceptance.expected(0.6)
    draft = draft_tree([DraftToken(1, "model", 0.99), DraftToken(2, "model", 0.6)], [-1, -1])
    for verdict in [Verdict(1, 3, "bonus", (0,))] * 20:
        controller.plan(room=100, n_past=64)
        controller.learn(Round(0, draft, verdict, [EmittedToken(1, "accepted"), EmittedToken(3, "bonus")], 1.0, 10.0))
    assert acceptance.sibling(0.6) == before
    for verdict in [Verdict(1, 3, "bonus", (1,))] * 20:
        controller.plan(room=100, n_past=64)
        controller.learn(Round(0, draft, verdict, [EmittedToken(2, "accepted"), EmittedToken(3, "bonus")], 1.0, 10.0))
    assert acceptance.sibling(0.6) > 0.8
    assert acceptance.expected(0.6) == first
    assert acceptance.expected(0.99) < 0.8
