"""The n-gram drafter and the suffix automaton under it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.sampling.sampling import Noise, SamplingParams
from localspec.spec_decode.drafters import ngram
from localspec.spec_decode.drafters.base import Plan, Proposer
from localspec.spec_decode.drafters.ngram import MAX_WALK, NgramDrafter, SuffixAutomaton
from localspec.spec_decode.rounds import DraftToken

TOKENS = st.lists(st.integers(0, 2), max_size=40)

ANYTHING = Proposer(SamplingParams(), Noise(0))
"""A request without a grammar: every guess is legal."""


class Watching(Plan):
    """Room for n guesses of at least some confidence; ``asked`` is what the drafter said of each."""

    def __init__(self, room: int, least: float = 0.0) -> None:
        super().__init__(room)
        self.least = least
        self.asked: list[float] = []

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        self.asked.append(confidence)
        if confidence < self.least:
            return None
        self.room -= 1
        return confidence / 2


def automaton_of(tokens: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.push(token)
    return automaton


def occurs(part: Sequence[int], whole: Sequence[int]) -> int:
    return sum(list(whole[i : i + len(part)]) == list(part) for i in range(len(whole) - len(part) + 1))


def drafted(drafter: NgramDrafter, tokens: Sequence[int], n: int, least: float = 0.0) -> list[int]:
    guesses = drafter.draft(tokens, Watching(n, least), ANYTHING)
    return [guess.id for guess in guesses]


class TestSuffixAutomaton:
    @given(TOKENS)
    def test_match_is_the_longest_suffix_that_occurred_before(self, tokens: list[int]) -> None:
        longest = max(n for n in range(max(1, len(tokens))) if n == 0 or occurs(tokens[-n:], tokens) > 1)
        assert automaton_of(tokens).match()[1] == longest

    @given(TOKENS, TOKENS)
    def test_steps_keep_the_longest_suffix_that_occurs(self, tokens: list[int], walk: list[int]) -> None:
        automaton = automaton_of(tokens)
        place = 0, 0
        for i, token in enumerate(walk):
            place = automaton.step(place, token)
            walked = walk[: i + 1]
            assert place[1] == max(n for n in range(len(walked) + 1) if n == 0 or occurs(walked[-n:], tokens))

    @given(TOKENS)
    def test_continuation_follows_its_context_and_is_counted(self, tokens: list[int]) -> None:
        found = (automaton := automaton_of(tokens)).continuation(automaton.match())
        if found is None:
            assert automaton.match()[1] == 0
            return
        token, times, total, length = found
        context = tokens[len(tokens) - length :]
        assert total == occurs(context, tokens[:-1])
        assert 1 <= times <= occurs([*context, token], tokens)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("xaxbx", "b"),  # once each: the last one
            ("xaxaxaxaxbx", "a"),  # four to one
            ("xaxaxbx", "b"),  # two to one: the last counts double
            ("xbxaxaxax", "a"),
            ("qrsx qrty qr", "t"),
        ],
    )
    def test_frequency_and_recency(self, text: str, expected: str) -> None:
        automaton = automaton_of([ord(c) for c in text])
        found = automaton.continuation(automaton.match())
        assert found is not None
        assert chr(found[0]) == expected

    def test_repetition_costs_no_more_than_the_walk_allows_and_a_token_two_states(self) -> None:
        automaton = automaton_of([7] * 1000)
        assert len(automaton._link) == 1001
        assert max(len(changes) for *_, changes in automaton._log) <= 2 * MAX_WALK
        assert automaton.continuation(automaton.match())[0] == 7  # type: ignore[index]
        rng = random.Random(1)
        assert len(automaton_of([rng.randrange(2) for _ in range(2000)])._link) <= 4000


def reading(tokens: Sequence[int], said: Sequence[int] = (), **options: Any) -> NgramDrafter:
    drafter = NgramDrafter()
    drafter.begin(tokens, **options)
    drafter.accept(said)
    return drafter


TEXT = (1, 2, 3, 4, 5, 6, 9, 1, 2, 3)


class TestNgramDrafter:
    @pytest.mark.parametrize(
        ("read", "said", "after", "n", "least", "wanted"),
        [
            (TEXT, (), (), 4, 0.0, [4, 5, 6, 9]),
            (TEXT, (), (), 2, 0.0, [4, 5]),  # it stops where the plan does
            (TEXT, (), (), 9, 0.99, []),
            ([5], (), (), 4, 0.0, []),
            ([1, 2, 3], (), (), 4, 0.0, []),
            ([1, 2, 3] * 3, (), (), 8, 0.0, [1, 2, 3, 1, 2, 3, 1, 2]),  # round in a loop
            ([1, 2, 3], [9, 1], (), 3, 0.0, [2, 3, 9]),  # what was emitted is read
            ([1, 2, 3, 4, 5, 8, 8], (), [2, 3], 2, 0.0, [4, 5]),  # behind what others drafted
            ([1, 2, 3, 4, 5, 8, 8], (), [77, 2], 1, 0.0, [3]),
        ],
    )
    def test_copies_what_followed(
        self, read: Sequence[int], said: Sequence[int], after: Sequence[int], n: int, least: float, wanted: list[int]
    ) -> None:
        """And is not changed by that."""
        drafter, text = reading(read, said), [*read, *said]
        before = drafted(drafter, text, 9)
        assert drafted(drafter, [*text, *after], n, least) == wanted
        assert drafted(drafter, text, 9) == before

    def test_confidence_grows_with_the_match(self) -> None:
        text, plan = [*range(30), 99, 0], Watching(25)
        guesses = reading(text).draft(text, plan, ANYTHING)
        assert plan.asked == sorted(plan.asked)
        assert plan.asked[0] < 0.35
        assert plan.asked[-1] > 0.85
        assert all(guess.source == "ngram" and guess.dist is None for guess in guesses)
        assert [guess.expected for guess in guesses] == [guess.prob / 2 for guess in guesses]

    @given(TOKENS, st.lists(st.tuples(st.integers(0, 40), TOKENS), max_size=4), st.sampled_from([4, ngram.UNDO_DEPTH]))
    def test_an_edited_conversation_is_as_a_new_one(
        self, first: list[int], edits: list[tuple[int, list[int]]], depth: int
    ) -> None:
        """Also where the edit is older than what can be undone."""
        with patch.object(ngram, "UNDO_DEPTH", depth):
            drafter, tokens = reading(first), first
            for keep, added in edits:
                tokens = tokens[:keep] + added
                drafter.begin(tokens)
                for after in ([], [1], [1, 0], [0, 2]):
                    assert drafted(drafter, tokens + after, 9) == drafted(reading(tokens), tokens + after, 9)
                drafter.accept([1, 0])
                tokens = [*tokens, 1, 0]

    def test_a_second_turn_reads_only_what_is_new(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drafter = reading([1, 2, 3, 4], [5, 6])
        pushed: list[int] = []
        push = SuffixAutomaton.push
        monkeypatch.setattr(SuffixAutomaton, "push", lambda self, token: (pushed.append(token), push(self, token)))
        drafter.begin([1, 2, 3, 4, 5, 6, 7])
        assert pushed == [7]
        drafter.begin([1, 2, 3, 4, 5, 8])
        assert pushed == [7, 8]

    def test_estimates_follow_what_turned_out(self) -> None:
        """Over text whose copies are right p of the time, the mean estimate comes near p, from either side.

        500 trials of each; the estimate's memory is 100 trials, so its standard error is at most 0.036: a bound of 0.12
        is over 3.3 of them (false alarm under 0.1 % each; the seed is fixed).
        """
        for p in (0.1, 0.9):
            rng, drafter, fresh, tokens = random.Random(3), reading([]), itertools.count(1000), list[int]()
            estimates: list[float] = []
            for _ in range(500):
                a, b = next(fresh), next(fresh)
                said = [a, b, next(fresh), a]  # a, b seen once: the next guess after a is b
                drafter.accept(said)
                tokens += said
                guess: DraftToken = drafter.draft(tokens, Watching(1), ANYTHING)[0]
                assert guess.id == b
                estimates.append(guess.prob)
                tokens.append(b if rng.random() < p else next(fresh))
                drafter.accept(tokens[-1:])
            assert abs(sum(estimates[-100:]) / 100 - p) < 0.12


class TestExpectedText:
    """A text that the answer is likely to repeat."""

    PROMPT = tuple(range(100, 130))
    TEXT = tuple(range(200, 240))

    @pytest.mark.parametrize(
        ("said", "wanted"),
        [((), TEXT), (TEXT[:7], TEXT[7:]), ((*TEXT[:5], 999, 998, TEXT[5]), TEXT[6:])],  # the last after an insertion
    )
    def test_the_answer_is_guessed_from_its_first_token_on(self, said: Sequence[int], wanted: Sequence[int]) -> None:
        drafter = reading(self.PROMPT, said, prediction=self.TEXT)
        assert drafted(drafter, [*self.PROMPT, *said], 50) == list(wanted)
        drafter.begin(self.PROMPT)  # the next request knows nothing of it
        assert drafted(drafter, self.PROMPT, 5) == []

    @given(TOKENS, TOKENS, TOKENS)
    def test_only_tokens_that_were_said_are_guessed(
        self, text: list[int], prompt: list[int], answer: list[int]
    ) -> None:
        drafter = reading(prompt, answer, prediction=text)
        assert set(drafted(drafter, prompt + answer, 20)) <= {*text, *prompt, *answer}
