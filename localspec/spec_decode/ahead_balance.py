"""Whether drafting while the target verifies saves time, measured while it is done."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

N_TRIAL, N_PAUSE, LONGEST_PAUSE = 24, 96, 1536
"""Rounds of a trial, over which drafting ahead must save time, and rounds without it where two in a row do not. After a
pause comes one trial, and if that fails a pause twice as long."""

N_ALONE, N_BESIDE, OFTEN, RARELY = 12, 48, 4, 24
"""Passes without drafting beside them and with it that are compared; one of so many goes without, until there are
enough and afterwards."""


def moved(mean_ms: float, ms: float, share: float) -> float:
    """A running mean, moved by a share of the way to one more time; 0 is none yet."""
    return mean_ms + share * (ms - mean_ms) if mean_ms else ms


class AheadBalance:
    """Whether drafting ahead saves time: the steps that it spares, less what it makes passes take longer.

    It may take time from a pass on another device after all: the driver's thread or the server that a pass needs can be
    on the cores that draft. So some passes go without it, and passes over equally many tokens are compared.

    Args:
        cautious: False is for tests and benchmarks: no pass goes without, whatever it costs.
    """

    def __init__(self, *, cautious: bool = True) -> None:
        self._is_cautious = cautious
        self._alone: deque[tuple[int, float]] = deque(maxlen=N_ALONE)
        self._beside: deque[tuple[int, float]] = deque(maxlen=N_BESIDE)
        self._step_ms = self._saved_ms = 0.0
        self._n_tried = self._n_beside = self._n_paused = 0
        self._pause = 0  # the first that fails is followed by another: these times are noisy

    @property
    def is_pausing(self) -> bool:
        """Whether it did not pay lately."""
        return self._n_paused > 0

    def leaves_alone(self) -> bool:
        """Whether the pass that comes next goes without."""
        if not self._is_cautious:
            return False
        if self._n_paused:
            self._n_paused -= 1
            if not self._n_paused:  # times from before the pause may be of a machine that did other things
                self._alone.clear()
                self._beside.clear()
            return True
        if self._n_tried == N_TRIAL:
            self._judge()
            return self.leaves_alone()
        self._n_tried += 1
        return self._n_tried % (OFTEN if len(self._alone) < N_ALONE else RARELY) == 0

    def took_in_order(self, n_tokens: int, ms: float) -> None:
        """So many tokens of draft models were drafted in the ordinary order."""
        if n_tokens:
            self._step_ms = moved(self._step_ms, ms / n_tokens, 0.2)

    def spared(self, n_tokens: int) -> None:
        """So many tokens of draft models were there when the verdict was."""
        self._saved_ms += n_tokens * self._step_ms

    def passed(self, n_tokens: int, ms: float, *, late_ms: float | None = None) -> None:
        """A pass is done; ``late_ms`` is how long the drafting beside it was then waited for."""
        if late_ms is None:
            self._alone.append((n_tokens, ms))
        else:
            self._beside.append((n_tokens, ms))
            self._saved_ms -= late_ms
            self._n_beside += 1

    def _judge(self) -> None:
        if self._saved_ms < self._n_beside * self._longer_ms():
            self._n_paused, self._pause = self._pause, max(N_PAUSE, min(2 * self._pause, LONGEST_PAUSE))
        else:
            self._pause = 0
        self._n_tried, self._n_beside, self._saved_ms = 0, 0, 0.0

    def _longer_ms(self) -> float:
        """How much longer a pass usually takes with drafting beside it."""
        by_tokens: defaultdict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for which, passes in enumerate((self._alone, self._beside)):
            for n_tokens, ms in passes:
                by_tokens[n_tokens][which].append(ms)
        longer: list[float] = []
        for alone, beside in by_tokens.values():
            if alone and beside:
                difference = statistics.median(beside) - statistics.median(alone)
                longer += [difference] * min(len(alone), len(beside))
        return statistics.median(longer) if longer else 0.0
