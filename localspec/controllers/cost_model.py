"""What a pass costs: t(w), the time of a pass over w tokens, as calibrated and corrected by every round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

CALIBRATED_PAST = 64
"""Tokens in the context where passes are timed."""

ONCE_MOST = math.log(2.0)
"""One pass counts at most as if it had taken twice as long as expected, or half."""

NOISE = 0.15
"""Differences under this (of logarithms) are noise: passes of one width spread by 5 to 10 % here."""

AGREED_SHARE = 0.7
AGREED_MOST = math.log(4.0)
"""Of what two passes in a row agree on, the share that is believed at once, and the most."""

TRIM_KEPT = 0.99
"""Of the correction of one width alone, what is left after a pass of another width: half after 69 passes. A width that
was found slow is not used, and would otherwise be taken for slow for ever."""


@dataclass(slots=True)
class PassTimes:
    """t(w) of one model in one engine, in milliseconds.

    The calibrated curve is kept as measured, steps and dips included, and read by linear interpolation between
    measured widths. A longer context makes every pass longer, by the share that reading its keys and values has in
    reading the weights. Corrections follow what is observed. Reading the weights is bound by memory, further rows by
    arithmetic, and other programs take of each what they will: ``scale`` moves all widths together, ``slope`` what
    further rows cost, ``trim`` one width alone, and ``beyond`` widths that were not calibrated. Where passes of
    the replay over 2 and 3 tokens take 1.25 times what was calibrated, 375 of 3,088 ends of answers are under 0.97 of
    plain; without ``slope`` 448, without ``trim`` 598.

    Attributes:
        base: calibrated milliseconds by width, with ``CALIBRATED_PAST`` tokens in the memory; at least width 1. It is
            replaced as a whole, never changed.
        growth: relative increase per token in the memory: its bytes in the KV cache over the bytes of the weights.
        n_past: tokens in the memory now.
        scale, slope, trim, beyond: the corrections; 1 is none.
        noisy: whether the calibration was disturbed, and should be repeated when there is time.
        quick: whether it comes of a few passes only, see ``calibrate_quickly``.
    """

    base: dict[int, float]
    growth: float = 0.0
    n_past: int = CALIBRATED_PAST
    scale: float = 1.0
    slope: float = 1.0
    beyond: float = 1.0
    trim: dict[int, float] = field(default_factory=dict)
    noisy: bool = False
    quick: bool = False
    _n_observed: int = 0
    _n_recent: int = 0
    _last: float = 0.0
    _drift: float = 0.0
    _read: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    """The curve by width, as read from ``_read_of`` so far: a draft asks for it a hundred times a round."""
    _read_of: dict[int, float] | None = field(default=None, repr=False, compare=False)
    _widest: int = field(default=1, repr=False, compare=False)

    def __call__(self, width: int) -> float:
        """Expected milliseconds of a pass over ``width`` tokens; 0 for no tokens."""
        if width <= 0:
            return 0.0
        one, curve = self._read.get(1), self._read.get(width)  # not by _curve: it is asked for so often
        if self._read_of is not self.base or one is None or curve is None:
            one, curve = self._curve(1), self._curve(width)
        longer = (1.0 + self.growth * self.n_past) / (1.0 + self.growth * CALIBRATED_PAST)
        ms = (one + self.slope * (curve - one)) * longer * self.scale
        return ms * (self.beyond if width > self._widest else self.trim.get(width, 1.0))

    def _curve(self, width: int) -> float:
        if self._read_of is not self.base:
            self._read, self._read_of, self._widest = {}, self.base, max(self.base)
        if (ms := self._read.get(width)) is None:
            ms = self._read[width] = self._interpolated(width)
        return ms

    def _interpolated(self, width: int) -> float:
        known = self.base
        if width in known:
            return known[width]
        widths = sorted(known)
        if width > widths[-1]:
            if len(widths) == 1:
                return known[widths[-1]] * width / widths[-1]
            # Beyond what was measured: the mean slope of the whole curve; the last step alone may be a plateau.
            slope = (known[widths[-1]] - known[widths[0]]) / (widths[-1] - widths[0])
            return known[widths[-1]] + slope * (width - widths[-1])
        above = next(w for w in widths if w > width)
        below = max(w for w in widths if w < width)
        share = (width - below) / (above - below)
        return known[below] * (1 - share) + known[above] * share

    def begin(self) -> None:
        """Another answer begins."""
        self._n_recent, self._last = 0, 0.0

    def observe(self, width: int, ms: float) -> None:
        """Correct the curve by one measured pass.

        One pass says little: it moves the estimate by a tenth of the difference, and an outlier counts as a factor of
        two at most. Two in a row that both differ by more than noise are another machine, as when a neighbour has taken
        the CPU, and what they agree on is believed at once.
        """
        expected = self(width)
        if expected <= 0 or ms <= 0:
            return
        wide = width > self._widest
        surprise = math.log(ms / expected)
        agreed = min(abs(surprise), abs(self._last), AGREED_MOST) if surprise * self._last > 0 else 0.0
        quick = math.copysign(AGREED_SHARE * agreed, surprise) if agreed > NOISE else 0.0
        once = min(ONCE_MOST, max(-ONCE_MOST, surprise))
        self._n_recent += 1
        if wide:
            self.beyond = min(3.0, max(0.33, self.beyond * math.exp(0.3 * once)))
            return
        self._n_observed += 1
        self._drift += (math.log(ms / self._curve(width)) - self._drift) / min(self._n_observed, 500)
        change = max(quick, (0.1 if width == 1 else 0.08) * once, key=abs)
        self.scale *= math.exp(change)
        self._last = surprise - change
        if width == 1:
            self.slope **= 0.98  # nothing is learned of it now, so it drifts back to what was calibrated
        else:
            self.slope = min(2.5, max(0.4, self.slope * math.exp(0.06 * once)))
        for known in self.trim:
            if known != width:  # the same
                self.trim[known] **= TRIM_KEPT
        if width > 1:
            self.trim[width] = min(1.5, max(0.67, self.trim.get(width, 1.0) * math.exp(0.04 * once)))

    @property
    def ms_beside(self) -> float:
        """How long a draft model may read in one round: others may be waiting for the passes [ms]."""
        return math.inf

    @property
    def is_recent(self) -> bool:
        """Whether passes of this answer have shown what they cost now: two, see ``observe``."""
        return self._n_recent >= 2

    def replace(self, measured: PassTimes) -> None:
        """Go on from another calibration of the same passes: what was corrected in the old one does not hold for it."""
        self.base, self.noisy, self.quick = measured.base, measured.noisy, measured.quick
        self.scale = self.slope = self.beyond = 1.0
        self.trim = {}
        self._n_observed, self._drift = 0, 0.0

    @property
    def fits(self) -> bool:
        """False when hundreds of passes took, on average, over 1.5 times or under two thirds of what was calibrated."""
        return self._n_observed < 300 or abs(self._drift) < math.log(1.5)
