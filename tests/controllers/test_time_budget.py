"""What drafting may lose: in a process what was saved, a grant and 0.75 %; in an answer two tokens and 1 %."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.controllers.auto import CLEAR_GAIN, HORIZON, LONGEST_HORIZON, reading_pays
from localspec.controllers.learned import (
    ANSWER_GRANT,
    ANSWER_SHARE,
    GRANT,
    KEPT,
    READING_GRANT,
    READING_SHARE,
    SHARE,
    TimeBudget,
)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.floats(0, 1), st.floats(0, 8)), max_size=200))
def test_spending_all_that_is_allowed_never_loses_more_than_the_bounds(rounds: list[Any]) -> None:
    """Every round loses as much of what is allowed as it likes, and saves what it likes."""
    budget = TimeBudget()
    net = in_answer = 0.0
    total = n_answer = 0
    for is_new, n_tokens, share, gain in rounds:
        if is_new:
            budget.begin()
            in_answer, n_answer = 0.0, 0
        loss = share * max(0.0, budget.for_drafts)
        budget.book(n_tokens, gain - loss)
        net, in_answer = net + gain - loss, in_answer + gain - loss
        total, n_answer = total + n_tokens, n_answer + n_tokens
        assert net >= -(GRANT + SHARE * total) - 1e-9
        assert in_answer >= -(ANSWER_GRANT + ANSWER_SHARE * n_answer) - 1e-9


def test_what_one_answer_saved_is_there_for_the_next_but_no_single_answer_may_lose_it() -> None:
    budget = TimeBudget()
    budget.begin()
    for _ in range(30):
        budget.book(4, 1.0)
    assert budget.for_drafts > 20
    budget.begin()
    assert budget.balance > 30
    assert budget.for_drafts == ANSWER_GRANT
    budget.book(16, 0.0)
    assert budget.for_drafts == pytest.approx(ANSWER_GRANT + 16 * ANSWER_SHARE)


def test_reading_a_prompt_is_paid_by_the_process_and_leaves_the_answer_its_own() -> None:
    budget = TimeBudget()
    budget.begin()
    budget.book(1, saved=-4.2, invested=4.0)
    assert budget.balance == pytest.approx(GRANT + SHARE - 4.2)
    assert budget.in_answer == pytest.approx(-0.2)


def test_the_grant_is_given_once_and_savings_are_kept_across_runs() -> None:
    poor, rich = TimeBudget(balance=0.5), TimeBudget(balance=GRANT + 20)
    assert TimeBudget.restored(poor.as_dict()).balance == GRANT  # a new process
    assert TimeBudget.restored(rich.as_dict()).balance == GRANT + KEPT * 20
    for damaged in (None, 3, {}, {"saved": "much"}, {"saved": float("nan")}):
        assert TimeBudget.restored(damaged).balance == GRANT


def test_reading_is_bounded_within_an_answer_too() -> None:
    budget = TimeBudget(balance=40.0)
    budget.begin()
    assert budget.for_reading == READING_GRANT
    budget.book(20, -0.5)
    assert budget.for_reading == pytest.approx(READING_GRANT + 20 * READING_SHARE)
    budget.book(20, 8.5)
    assert budget.for_reading == pytest.approx(READING_GRANT + 40 * READING_SHARE + 8.0)
    assert TimeBudget(balance=0.5).for_reading == 0.5


def test_a_reading_pays_soon_or_clearly_and_before_the_answer_must_end() -> None:
    plain_ms = 50.0
    clear = CLEAR_GAIN * plain_ms

    def pays(cost_ms: float, gain_ms: float, room: int = 1000, step: float = 0.25) -> bool:
        return reading_pays(cost_ms, gain_ms, plain_ms, step * plain_ms, room)

    assert pays(4.0 * HORIZON, 4.1)  # a small gain, a short reading
    assert not pays(4.0 * HORIZON, 3.9)
    assert pays(4.0 * LONGEST_HORIZON, 4.1, step=0.05)  # the same, where steps of the draft model are cheap
    assert not pays(4.0 * LONGEST_HORIZON, 3.9, step=0.001)
    assert pays(100.0 * HORIZON, 1.01 * clear)  # however long, where the gain is clear
    assert not pays(100.0 * HORIZON, 0.99 * clear)
    assert not pays(10.0, 0.0)
    assert not pays(20.5 * clear, clear, room=20)
    assert pays(18.0 * clear, 1.01 * clear, room=20)
