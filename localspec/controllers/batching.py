"""Passes that several answers share: what they cost, and how their rows are divided.

Every answer that takes part has one row for its own next token. Further rows go to the draft tokens, of whichever
answer, that are most likely to be emitted, as long as a millisecond of the wider pass brings more of them than a
millisecond did without; so drafts shorten by themselves as answers become more. Liu et al. 2024 (SmartSpec) choose one
draft length for all by the same measure, goodput. Where a wide pass costs more than two narrow ones, answers take
turns.

A row passes over all cells of the memory that are in use, those of other conversations too (llama.cpp's engines mask
them; on MLX the cells are its own). So a row costs what t(w) says and a share of every cell, which is learned here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np

from localspec.controllers.cost_model import CALIBRATED_PAST, NOISE, PassTimes

# How much of the waiting prompts is read in a pass with other answers. A prompt's row takes the place of a draft
# token's and delays every next token: small chunks keep other answers streaming, large ones read a prompt sooner. So a
# pass mostly has as much of the prompts as keeps it under ``STALL`` plain ones, and now and then much more. The
# constants were chosen with ``benchmarks/prompt_pieces.py``.

STALL = 2.4  # As a rule prompts make a pass with answers no longer than so many plain passes
LONG_MS = 500.0  # Most time of a long pass [ms]

# One of so many passes with answers may be a long one, so that the 95th percentile of times between tokens stays under
# ``STALL`` plain ones.
LONG_EVERY = 24

LEAST_ROWS = 4  # Least rows of prompts in a pass: they would never be read where every row costs as much as a pass
WIDE = 32  # Rows from which on engines have other kernels, and cost something else than t(w) says
LEARNED = 0.25  # Weight of one pass in what is expected of the next; set by hand


class PromptPieces:
    """Divides the rows of a pass among waiting prompts, by t(w) of passes with logits [ms]; rows of prompts have
    none."""

    def __init__(self, times: Callable[[int], float]) -> None:
        self._times = times
        self._dearer = {False: 1.0, True: 1.0}  # cost of a prompt's rows over t(w): narrow, wide
        self._n_since = LONG_EVERY  # passes with answers, since a long one
        self._is_long = False

    def divide(self, n_answers: int, unread: Sequence[int], priorities: Sequence[int], most: int) -> list[int]:
        """How many of the ``unread`` tokens of each prompt, in the order in which they came, the next pass has.

        Half of the rows are for the prompt that came first, the other half for the shortest ones; those of a higher
        priority go first.
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
        if n_answers:
            self._n_since += 1
        if rows and self._is_long:
            self._n_since, self._is_long = 0, False
        without = self._times(n_answers)
        expected = self._times(n_answers + rows) - without
        if rows and expected > 0:
            seen, known = min(4.0, max(0.25, (ms - without) / expected)), self._dearer[rows >= WIDE]
            self._dearer[rows >= WIDE] = known * (seen / known) ** LEARNED


TURNS_GAIN = 1.05  # Answers take turns where that is faster by this factor; less is noise


# Prior of what a row pays for a cell, by where the weights are, in times of reading its keys and values at the speed at
# which the weights are read; elsewhere 1 (``benchmarks/sequences.py``).
CELL_READS = {"cpu": 3.0, "mixed": 3.0}

DRIFT = 0.03, 0.01  # Share by which the machine's speed, and the price of a cell, may change from pass to pass


class SharedPasses:
    """The cost model of passes that answers share, and what follows from it.

    A pass over w rows in a memory with c cells in use takes t(w) + w·(c - ``CALIBRATED_PAST``)·``ms_cell``. ``times``
    is t(w) of passes of one answer, not changed by shared ones; ``ms_other`` the time outside the target for each
    answer. ``n_answers`` are decoding now, ``n_open`` include those whose prompts are being read.
    """

    def __init__(self, times: PassTimes, device: str = "cpu", ms_other: float = 0.3) -> None:
        self.times = deepcopy(times)
        self.times.n_past = CALIBRATED_PAST  # the cost of a longer memory is ``ms_cell``
        self.prompts = PromptPieces(self)
        self.n_answers = self.n_open = 1
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
        return self.times(width) + self._row_cells(width) * self.ms_cell

    @property
    def n_sharing(self) -> int:
        return max(1, min(self.n_answers, self._n_in_turn or self.n_answers))

    def with_overhead(self, width: int, n_answers: int) -> float:
        return self(width) + n_answers * self._ms_other

    def _row_cells(self, width: int) -> int:
        return width * max(0, self.n_cells - CALIBRATED_PAST)

    def observe(self, width: int, ms: float, n_cells: int) -> None:
        """Learn from a pass over ``width`` rows, each over ``n_cells`` tokens.

        What a cell costs is learned together with how fast the machine is now, by a Kalman filter of both. The rest
        corrects t(w).
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

        ``drafts`` are, for each answer in the order in which they wait, the probabilities that a draft token and those
        before it are accepted, which do not grow; ``n_reading`` rows of prompts are in the same pass. Returns how many
        draft tokens of the first answers are sent; those beyond its length wait for a later pass.
        """
        if not drafts:
            return []
        rates = [self._best(drafts[:n])[0] for n in range(1, len(drafts) + 1)]
        n = len(drafts)
        if max(rates) > TURNS_GAIN * rates[-1]:
            n = rates.index(max(rates)) + 1
        plain = [self._best([()] * n)[0] for n in range(1, self.n_answers + 1)]
        self._n_in_turn = plain.index(max(plain)) + 1 if max(plain) > TURNS_GAIN * plain[-1] else None
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
        """The worth of the best number of draft tokens, and that number: in tokens, where a millisecond is worth
        ``rate``; else in tokens/ms."""
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
    """What a pass costs one of the answers in it: a ``PassCost``.

    Its first row costs its share of a pass in which every answer has one row, further rows what they add to that. How
    fast the machine is shows in what the shared passes cost, so ``scale`` is 1; every row passes over the cells of all,
    so ``n_past`` is unused. ``has_company``: whether other answers were open in any of this answer's rounds.
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
        self.has_company |= self._shared.n_open > 1
        self._n_answers += self._shared.n_answers
        # With other answers no pass is over one token alone, and an answer that does not draft would not make it so.
        self.n_since_one = 0 if width == 1 or self._shared.n_answers > 1 else self.n_since_one + 1

    @property
    def ms_reading(self) -> float:
        return STALL * self._shared(1) / max(1, self._shared.n_answers)

    @property
    def mean_answers(self) -> float:
        return self._n_answers / self._n_rounds if self._n_rounds else 1.0
