"""Whether a draft model should read what it has missed of a conversation: an investment, weighed before it is made.

Reading a prompt of 50 tokens takes a draft model as long as the target takes for 3 to 5 tokens, and it is lost if the
answer ends soon after or turns out hard to draft for. How long an answer will be nobody knows; what is known is how far
it has come. It is taken to go on for twice as long again, so an early reading has to pay soon, and a later one may take
its time. What is read now need not be read again, so the cost is not that of one round.

The constants were chosen on recorded answers to the tuning prompts and to 27 short questions, with the costs of two
machines (``benchmarks/replay_traces.py``): 4 to 7 of 832 whole answers are under 0.97 of plain there.
"""

from __future__ import annotations

from localspec.controllers.estimates import Estimates
from localspec.controllers.time_budget import TimeBudget

READING = 0.5
"""What a draft model has missed is more than a step if reading it takes this many plain tokens: an investment, which is
not counted as a draft's cost. A step after a draft of one's own takes two or three tokens, 0.1 to 0.3; with 0.25 or
1 the replay is the same."""

LONG_READING = 2.0
"""It is a long one, for which a draft model has to wait and to show more gain, from this many plain tokens on. With 0.5
(every reading) 9 instead of 5 whole answers of the replay are under 0.97 of plain, and with 4 as many."""

PATIENCE_TOKENS = 16
"""An answer must have come this far before a draft model reads the prompt: many are shorter, and how certain the
target is of its first tokens predicts, for nothing, how the draft will fare. With 24: 2 % slower on code and maths."""

OUTLOOK = 2
"""An answer is expected to go on for this many times what it has said. With 1 or 8 the replay differs by 1 %."""

LEAST_GAIN = 0.2
"""Share of a plain token's time that drafting must be expected to save of each. What is predicted from 16 tokens is not
more exact: with 0.15 two to four of 48 answers fell below 0.97 of plain, with 0.1 four to eight, to 0.86."""

STRETCH_TOKENS = 24
"""Tokens over which a short stretch, decoded without the draft model, has to pay for its reading. With 12 the replay
has 9 instead of 5 whole answers under 0.97 of plain; with 48 it is the same."""

BUSY_SCALE = 1.25
"""Where the target's passes take this many times what was calibrated, another program has the CPU. Without first pieces
the replay of a machine beside another program is 1.2 % slower, with 39 instead of 29 of 386 answers under 0.97."""

PROBE_TOKENS = 8
"""Tokens of a long reading that are read first on a machine that has become slower: with more in a pass a token is
cheaper, and with fewer the pass says less of the rest."""

GAIN_ROUNDS = 48
"""Rounds for which the gain of the other sources alone is taken as known."""


def prompt_pays(cost_ms: float, gain_ms: float, plain_ms: float, n_emitted: int, room: int) -> bool:
    """Whether a draft model should read a prompt, or another long stretch.

    Args:
        cost_ms: what reading takes.
        gain_ms: what drafting with the model is expected to save, per token.
        plain_ms: what a token of plain decoding takes.
        n_emitted: tokens of the answer so far.
        room: most tokens that it may still have.
    """
    if n_emitted < PATIENCE_TOKENS or gain_ms < LEAST_GAIN * plain_ms:
        return False
    return gain_ms * min(room, OUTLOOK * n_emitted) > cost_ms


class PrefillGate:
    """Weighs the readings of one answer."""

    def __init__(self, estimates: Estimates, budget: TimeBudget) -> None:
        self._estimates = estimates
        self._budget = budget
        self._gains: dict[str, tuple[float, int]] = {}

    def is_reading(self, source: str, n_tokens: int) -> bool:
        """Whether a pass over so many tokens is more than a step: a prompt, or a stretch that was decoded plainly."""
        return self._catch_up(source, n_tokens) > READING * self._estimates.times(1)

    def piece(self, source: str, n_tokens: int) -> int:
        """How many tokens of a reading to begin with, before it is weighed again.

        A long reading is decided on in advance, at a price that may be out of date: beside a program that takes 40 % of
        the CPUs a target pass took 2.2 times as long, one of the draft model 3.1. First pieces show today's price.
        """
        is_uncertain = self._estimates.times.scale > BUSY_SCALE and not self._estimates.draft_times[source].is_recent
        return min(n_tokens, PROBE_TOKENS) if is_uncertain else n_tokens

    def pays(self, source: str, n_tokens: int, room: int, round_index: int) -> bool:
        """Whether a draft model should decode the tokens that it has missed, to draft one more.

        Args:
            source: its name.
            n_tokens: what it has to decode; 1 is an ordinary step.
            room: most tokens that the answer may still have.
            round_index: counts the rounds of the answer.
        """
        estimates, n_emitted = self._estimates, self._budget.n_tokens
        cost, plain = self._catch_up(source, n_tokens), estimates.times(1)
        if cost <= 0:
            return True
        if cost > READING * plain and cost > self._budget.for_reading * estimates.ms_plain:
            return False
        is_long = cost > LONG_READING * plain
        if is_long and n_emitted < PATIENCE_TOKENS:
            return False
        gain = estimates.ms_plain / self._gain_without(source, round_index) - 1.0 / estimates.joined(source).rate
        if is_long:
            return prompt_pays(cost, gain, estimates.ms_plain, n_emitted, room)
        return gain * min(room, STRETCH_TOKENS) > cost

    def _catch_up(self, source: str, n_tokens: int) -> float:
        if n_tokens == 1:
            return 0.0
        times = self._estimates.draft_times[source]
        return times(n_tokens) - times(1)

    def _gain_without(self, source: str, round_index: int) -> float:
        """The rate with the other sources that are at hand, over that of plain decoding."""
        estimates = self._estimates
        if source in estimates.lagging:
            return estimates.at_hand.rate * estimates.ms_plain
        gain, until = self._gains.get(source, (1.0, 0))
        if round_index >= until:
            others = [each for each in estimates.acceptance if each != source and each not in estimates.lagging]
            # Kept as a ratio, so that a machine that slows down does not make it stale.
            gain, until = estimates.solve(*others).rate * estimates.ms_plain, round_index + GAIN_ROUNDS
            self._gains[source] = gain, until
        return gain
