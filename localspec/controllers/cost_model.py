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

# How far passes may be from what was calibrated, as standard deviations of logarithms: all of them at once (and a
# random walk from there), further rows together, one width alone; and how far one pass is from what passes take. What
# was learned of further rows and of a width fades where they are not seen, by half in 69 passes: a width that was found
# slow, and is not used, is tried again. Chosen on answers to the tuning questions, replayed with costs that differ from
# those calibrated: where passes over 2 and 3 tokens take 1.25 times as long, 2 to 9 of 100 ends of answers are under
# 0.97 of plain; where a fixed share of every surprise went to each correction, 11 to 37 were.
ALL = 0.1
WALK = 0.01
ROWS = 0.15
ALONE = 0.05
SPREAD = 0.05
KEPT = 0.99
ONCE_MORE = 0.25
"""A pass counts at most as if it had been this much longer or shorter than expected."""


@dataclass(slots=True)
class PassTimes:
    """t(w) of one model in one engine, in milliseconds.

    The calibrated curve is kept as measured, steps and dips included, and read by linear interpolation between
    measured widths. A longer context makes every pass longer, by the share that reading its keys and values has in
    reading the weights. Corrections follow what is observed. Reading the weights is bound by memory, further rows by
    arithmetic, and other programs take of each what they will: where a neighbour took memory bandwidth while the costs
    were measured, a second token seemed to cost 0.08 of the first, and cost 0.31 later. So ``scale`` moves all widths
    together, ``rows`` all but the first, ``trim`` one width alone, and ``beyond`` widths that were not calibrated. What
    a pass tells is divided among them by how uncertain each is (a Kalman filter): while only passes over two tokens are
    seen, they say nothing of what one takes alone, and one such pass then moves ``scale`` and ``rows`` apart.

    Attributes:
        base: calibrated milliseconds by width, with ``CALIBRATED_PAST`` tokens in the memory; at least width 1. It is
            replaced as a whole, never changed.
        growth: relative increase per token in the memory: its bytes in the KV cache over the bytes of the weights.
        n_past: tokens in the memory now.
        scale, rows, trim, beyond: the corrections; 1 is none.
        noisy: whether the calibration was disturbed, and should be repeated when there is time.
        quick: whether it comes of a few passes only, see ``calibrate_quickly``.
    """

    base: dict[int, float]
    growth: float = 0.0
    n_past: int = CALIBRATED_PAST
    scale: float = 1.0
    rows: float = 1.0
    beyond: float = 1.0
    trim: dict[int, float] = field(default_factory=dict)
    noisy: bool = False
    quick: bool = False
    _n_observed: int = 0
    _n_recent: int = 0
    _last: float = 0.0
    _drift: float = 0.0
    _n_since_one: int = 0
    _unsure: float = ALL**2  # variance of the logarithm of ``scale``
    _unsure_rows: float = ROWS**2
    _together: float = 0.0  # covariance of the two
    _unsure_alone: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    _read: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    """The curve by width, as read from ``_read_of`` so far: a draft asks for it a hundred times a round."""
    _read_of: dict[int, float] | None = field(default=None, repr=False, compare=False)
    _widest: int = field(default=1, repr=False, compare=False)

    def __call__(self, width: int) -> float:
        """Expected milliseconds of a pass over ``width`` tokens; 0 for no tokens."""
        if width <= 0:
            return 0.0
        curve = self._read.get(width)  # not by _curve: it is asked for so often
        if self._read_of is not self.base or curve is None:
            curve = self._curve(width)
        longer = (1.0 + self.growth * self.n_past) / (1.0 + self.growth * CALIBRATED_PAST)
        ms = curve * longer * self.scale * (self.rows if width > 1 else 1.0)
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
        self._fade(width)
        told = min(ONCE_MORE, max(-ONCE_MORE, surprise))
        scale, rows, alone = self._unsure, self._together, 0.0  # covariances with what is seen
        self._n_since_one += 1
        if width == 1:
            self._n_since_one = 0
        else:
            scale, rows = scale + rows, rows + self._unsure_rows
            alone = self._unsure_alone.get(width, ALONE**2)
        total = (scale if width == 1 else scale + rows) + alone + SPREAD**2
        change = max(quick, told * scale / total, key=abs)
        self.scale *= math.exp(change)
        self._last = surprise - change
        if not quick:
            self.rows = min(2.0, max(0.5, self.rows * math.exp(told * rows / total)))
        self._unsure -= scale * scale / total
        self._together -= scale * rows / total
        self._unsure_rows -= rows * rows / total
        if width > 1:
            told_alone = 0.0 if quick else told * alone / total
            self.trim[width] = min(2.0, max(0.5, self.trim.get(width, 1.0) * math.exp(told_alone)))
            self._unsure_alone[width] = alone * (1.0 - alone / total)

    def _fade(self, width: int) -> None:
        """A pass later, of what was seen before less is left."""
        self._unsure += WALK**2
        if width == 1:
            self.rows **= KEPT
            self._together *= KEPT
            self._unsure_rows += (1.0 - KEPT**2) * (ROWS**2 - self._unsure_rows)
        for known, unsure in self._unsure_alone.items():
            if known != width:
                self.trim[known] **= KEPT
                self._unsure_alone[known] = unsure + (1.0 - KEPT**2) * (ALONE**2 - unsure)

    @property
    def n_since_one(self) -> int:
        """Passes since one over one token alone was seen."""
        return self._n_since_one

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
        self.scale = self.rows = self.beyond = 1.0
        self.trim, self._unsure_alone = {}, {}
        self._unsure, self._unsure_rows, self._together = ALL**2, ROWS**2, 0.0
        self._n_observed, self._drift = 0, 0.0

    @property
    def fits(self) -> bool:
        """False when hundreds of passes took, on average, over 1.5 times or under two thirds of what was calibrated."""
        return self._n_observed < 300 or abs(self._drift) < math.log(1.5)
