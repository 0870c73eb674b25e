"""Passes that several answers share: what they cost, and who gets their rows.

Every answer that takes part has one row for its own next token, and draft tokens compete for more: a row goes to the
draft tokens, of whichever answer, that are most likely to be emitted, as long as a millisecond of the wider pass brings
more of them than a millisecond did without. So drafts grow shorter by themselves as answers become more. Liu et al.
2024 (SmartSpec) choose one draft length for all by the same measure, goodput; here every token is weighed, with the
t(w) that this machine was measured to have, its steps included. Where a wide pass costs more than two narrow ones,
answers take turns.

A row passes over all cells of the memory that are in use, those of other conversations too: llama.cpp's engines compute
the whole and mask what is not the row's own. So a row costs what t(w) says and a share of every cell, which is learned
here. On MLX the cells are those of its own conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np

from localspec.controllers.cost_model import CALIBRATED_PAST, NOISE, PassTimes

# How much of the prompts that wait is read in a pass beside other answers.
#
# A prompt's row takes the place of a draft token's, and makes everybody's next token later. Read in wide pieces a
# prompt is read sooner, in narrow ones nobody's text stalls. So a pass mostly has as much of the prompts as keeps it
# under ``STALL`` plain ones, and now and then much more.
#
# By ``benchmarks/prompt_pieces.py``, which has a simulated clock, with four clients: 8.6 s to the first token at the
# 95th percentile instead of 10.5 with narrow pieces only that prompts share alike; 61 ms between two instead of 74;
# 37.5 tokens per second instead of 37.0. All of a prompt at once: 39.1 tokens per second, 5.0 s to the first, and
# three seconds of silence. The constants below were tried there.

STALL = 2.4
"""A pass that somebody's next token is in takes no longer than so many plain passes because of prompts, mostly: three,
with what comes on top. With 2.75 it was 3.2 on ik-llama, at the 95th percentile of times between pieces of text."""

LONG_MS = 500.0
"""What the others may take. With 800 the 95th percentile of times to the first token is 6.9 s, at longer pauses."""

LONG_EVERY = 24
"""Of so many passes beside answers one may be a long one: 4 of 100, so that the 95th percentile of times between tokens
stays under ``STALL`` plain ones. With one of 12 and two that may come close together, 5 to 10 of 100 pieces of text
came after 350 to 450 ms with four or eight clients; simulated, 7 of 60 short runs were so, and none with 24."""

LEAST_ROWS = 4
"""Of prompts, in a pass: else they would never be read where every row costs as much as a pass."""

WIDE = 32
"""Rows from which on engines have other kernels, and cost something else than t(w) says."""

LEARNED = 0.25
"""Share of what a pass took that is believed of the next; set by hand."""


class PromptPieces:
    """See above.

    Args:
        times: t(w) of the passes [ms], as of rows with logits: those of prompts have none.
    """

    def __init__(self, times: Callable[[int], float]) -> None:
        self._times = times
        self._dearer = {False: 1.0, True: 1.0}  # what a prompt's rows cost, narrow pieces and wide ones, beside t(w)
        self._n_since = LONG_EVERY  # passes beside answers, after a long one
        self._is_long = False

    def divide(self, n_answers: int, unread: Sequence[int], priorities: Sequence[int], most: int) -> list[int]:
        """How many tokens of each prompt the next pass has.

        Of the rows one half is for the prompt that came first, the other for the shortest ones, which so are answered
        soon; those of a higher priority go first.

        Args:
            n_answers: rows that answers have in it.
            unread: of each prompt so many tokens, those first that came first.
            priorities: theirs.
            most: tokens in a pass.
        """
        rows, self._is_long = most, False
        if not unread:
            return []
        if n_answers:
            rows = self._rows_within(STALL * self._times(1), n_answers, most)
            if self._n_since >= LONG_EVERY and sum(unread) > rows:
                wide = self._rows_within(max(LONG_MS, STALL * self._times(1)), n_answers, most)
                rows, self._is_long = wide, wide > rows
        pieces = [0] * len(unread)
        first = priorities.index(max(priorities))
        by_length = sorted(range(len(unread)), key=lambda i: (-priorities[i], unread[i]))
        for i, share in [(first, -(-rows // 2)), *((i, rows) for i in by_length)]:
            n = max(0, min(share, unread[i] - pieces[i], rows))
            pieces[i] += n
            rows -= n
        return pieces

    def _rows_within(self, ms: float, n_answers: int, most: int) -> int:
        rows = most
        while rows > LEAST_ROWS and self._cost(n_answers, rows) > ms:
            rows = max(LEAST_ROWS, rows - max(1, rows // 8))
        return rows

    def _cost(self, n_answers: int, rows: int) -> float:
        without = self._times(n_answers)
        return without + self._dearer[rows >= WIDE] * (self._times(n_answers + rows) - without)

    def observe(self, n_answers: int, rows: int, ms: float) -> None:
        """A pass took so long that had so many rows of answers, and of prompts."""
        if n_answers:
            self._n_since += 1
        if rows and self._is_long:
            self._n_since, self._is_long = 0, False
        without = self._times(n_answers)
        expected = self._times(n_answers + rows) - without
        if rows and expected > 0:
            seen, known = min(4.0, max(0.25, (ms - without) / expected)), self._dearer[rows >= WIDE]
            self._dearer[rows >= WIDE] = known * (seen / known) ** LEARNED


LEAST_GAIN = 1.05
"""Answers take turns where that is faster by this factor; what is gained by less is noise."""


CELL_READS = {"cpu": 3.0, "mixed": 3.0}
"""What a row pays for a cell at first, by where the weights are, in times of reading its keys and values at the speed
at which the weights are read; elsewhere 1. Qwen2.5-Coder 0.5B and 1.5B on ik-llama were measured to pay 5
(``benchmarks/sequences.py``); where several rows read them together it is less than one. Passes over a fuller memory
tell which it is."""

DRIFT = 0.03, 0.01
"""By what share, from pass to pass, the machine's speed and the price of a cell may have changed."""


class SharedPasses:
    """The cost model of passes that answers share, and what follows from it.

    A pass over w rows in a memory with c cells in use takes t(w) + w·(c - ``CALIBRATED_PAST``)·``ms_cell``.

    Args:
        times: t(w) of passes of one answer [ms]; what is learned of shared ones does not change it. Where it is
            calibrated anew, so is this.
        device: where the weights are, see ``Capabilities``.
        ms_other: of a pass, outside of the target: as ``Estimates.ms_other`` for each answer [ms].

    Attributes:
        n_answers: how many answers are decoding now; prompts that are read do not count.
        n_under_way: how many answers there are, those whose prompts are read included.
        n_cells: tokens that every row passes over now.
        ms_cell: what a row pays for one of them [ms].
        prompts: how much of those goes into a pass.
    """

    def __init__(self, times: PassTimes, device: str = "cpu", ms_other: float = 0.3) -> None:
        self.times = deepcopy(times)
        self.times.n_past = CALIBRATED_PAST  # what a longer memory costs is told apart
        self.prompts = PromptPieces(self)
        self.n_answers = self.n_under_way = 1
        self._n_in_turn: int | None = None
        self.n_cells = CALIBRATED_PAST
        self.ms_cell = CELL_READS.get(device, 1.0) * times.growth * times.curve(1)
        self._calibrated = times
        self._curve = times.curve
        self._ms_other = ms_other
        # Of how many times the calibrated time a pass takes now, and of ``ms_cell``: estimate and covariance.
        self._found = np.array([times.scale, self.ms_cell])
        self._drift = np.diag([DRIFT[0], DRIFT[1] * self.ms_cell]) ** 2
        self._covariance = np.diag([0.3, self.ms_cell]) ** 2

    def __call__(self, width: int) -> float:
        """Expected milliseconds of a pass over ``width`` rows."""
        return self.times(width) + self._row_cells(width) * self.ms_cell

    @property
    def n_sharing(self) -> int:
        """How many answers would share a pass without drafts, where they take turns; at least 1."""
        return max(1, min(self.n_answers, self._n_in_turn or self.n_answers))

    def with_overhead(self, width: int, n_answers: int) -> float:
        """The same, and what each of so many answers takes besides."""
        return self(width) + n_answers * self._ms_other

    def _row_cells(self, width: int) -> int:
        return width * max(0, self.n_cells - CALIBRATED_PAST)

    def observe(self, width: int, ms: float, n_cells: int) -> None:
        """A pass over so many rows took so long.

        What a cell costs is learned together with how fast the machine is now, by a Kalman filter of both: passes over
        few cells tell the one, over many the other. The rest corrects t(w).

        Args:
            n_cells: tokens that every row passed over.
        """
        if self._calibrated.curve is not self._curve:
            self._curve = self._calibrated.curve
            self.times.replace(self._calibrated)
        self.n_cells = n_cells
        row_cells = self._row_cells(width)
        of = np.array([self._curve(width), row_cells])
        expected = float(of @ self._found)
        if ms <= 0 or expected <= 0:
            return
        surprise = min(expected, max(-expected / 2, ms - expected))  # an outlier counts as in ``PassTimes.observe``
        self._covariance += self._drift
        gain = self._covariance @ of / (of @ self._covariance @ of + (NOISE * expected) ** 2)
        self._found += gain * surprise
        self._covariance -= np.outer(gain, of) @ self._covariance
        self.ms_cell = max(0.0, float(self._found[1]))
        self.times.observe(width, max(ms / 2, ms - row_cells * self.ms_cell))

    def share(self, drafts: Sequence[Sequence[float]], n_reading: int = 0) -> list[int]:
        """Which answers take part in the next pass, and how many of their draft tokens.

        Args:
            drafts: for each answer, in the order in which they wait, its draft tokens: for each the probability that it
                and those before it are accepted, which does not grow.
            n_reading: rows of prompts in the same pass.

        Returns:
            How many draft tokens of the first answers are sent; those beyond its length wait for a later pass.
        """
        if not drafts:
            return []
        rates = [self._best(drafts[:n])[0] for n in range(1, len(drafts) + 1)]
        n = len(drafts)
        if max(rates) > LEAST_GAIN * rates[-1]:
            n = rates.index(max(rates)) + 1
        plain = [self._best([()] * n)[0] for n in range(1, self.n_answers + 1)]
        self._n_in_turn = plain.index(max(plain)) + 1 if max(plain) > LEAST_GAIN * plain[-1] else None
        rate, _ = self._best(drafts[:n])
        # With prompts in the pass its rows have another price, and a token is worth what it is without them.
        _, k = self._best(drafts[:n], n_reading, rate)
        reaches = sorted(((-reach, i, j) for i, draft in enumerate(drafts[:n]) for j, reach in enumerate(draft)))
        lengths = [0] * n
        for _, i, _ in reaches[:k]:
            lengths[i] += 1
        return lengths

    def _best(
        self, drafts: Sequence[Sequence[float]], n_reading: int = 0, rate: float | None = None
    ) -> tuple[float, int]:
        """What the best number of draft tokens is worth [tokens/ms; tokens where a rate is given], and that number.

        Args:
            rate: what a millisecond is worth; None: the most that it can be worth.
        """
        reaches = sorted((reach for draft in drafts for reach in draft), reverse=True)
        n = len(drafts) + n_reading
        worth, best, tokens = -float("inf"), 0, float(len(drafts))
        for k in range(len(reaches) + 1):
            if k:
                tokens += reaches[k - 1]
            ms = self.with_overhead(n + k, len(drafts))
            value = tokens / ms if rate is None else tokens - rate * ms
            if value > worth:
                worth, best = value, k
        return worth, best


class ShareOfPass:
    """What a pass costs one of the answers in it, as its controller sees it: a ``PassCost``.

    Its first row costs its share of a pass in which every answer has one row, and further rows what they add to that.
    So the rate of plain decoding is that of all answers together, which the time of a draft token, and of a draft
    model's step that all wait for, is weighed against.

    Args:
        shared: the passes.

    Attributes:
        n_past: tokens in this answer's memory; not used, as every row passes over the cells of all (``n_cells``).
        n_since_one: passes since one over one token alone was seen.
        has_company: whether others were under way in any of this answer's rounds, whose rows its passes had too.
        scale: always 1: how fast the machine is shows in what the shared passes cost.
    """

    scale = 1.0

    def __init__(self, shared: SharedPasses) -> None:
        self.n_past = CALIBRATED_PAST
        self.n_since_one = 0
        self.has_company = False
        self._shared = shared
        self._n_rounds = self._n_answers = 0

    def __call__(self, width: int) -> float:
        if width <= 0:
            return 0.0
        n = self._shared.n_sharing
        return self._shared(n - 1 + width) - self._shared(n) * (n - 1) / n

    def begin(self) -> None:
        pass  # the other answers go on

    def slow_down(self, factor: float) -> None:
        pass  # the passes themselves are observed

    def observe(self, width: int, ms: float) -> None:
        # What one answer waited for is no time of its rows; the passes themselves are observed.
        self._n_rounds += 1
        self.has_company |= self._shared.n_under_way > 1
        self._n_answers += self._shared.n_answers
        # Beside others no pass is over one token alone, and an answer that does not draft would not make it so.
        self.n_since_one = 0 if width == 1 or self._shared.n_answers > 1 else self.n_since_one + 1

    @property
    def ms_beside(self) -> float:
        return STALL * self._shared(1) / max(1, self._shared.n_answers)

    @property
    def mean_answers(self) -> float:
        """How many answers were decoded at a time, on the average of this one's rounds."""
        return self._n_answers / self._n_rounds if self._n_rounds else 1.0

    @property
    def is_recent(self) -> bool:
        return self._shared.times.is_recent
