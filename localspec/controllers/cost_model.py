"""What a pass costs: t(w), the time of a pass over w tokens, as calibrated and corrected by every round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Protocol

CALIBRATED_PAST = 64  # Tokens in the context where passes are timed
ONCE_MOST = math.log(2.0)  # One pass counts at most as if it had taken twice as long as expected, or half
NOISE = 0.15  # Differences under this (of logarithms) are noise: passes of one width spread by 5 to 10 % here

AGREED_SHARE = 0.7  # Share of what two passes in a row agree on that is believed at once
AGREED_MOST = math.log(4.0)  # Most of it

# How far passes may be from what was calibrated, as standard deviations of logarithms: all of them (and a random walk
# from there), further rows together, one width alone, and the noise of a single pass. What was learned of rows and of a
# width fades where they are not seen, by half in 69 passes, so that an unused width is tried again.
ALL = 0.1
WALK = 0.01
ROWS = 0.15
ALONE = 0.05
SPREAD = 0.05
KEPT = 0.99
ONCE_MORE = 0.25  # Most that a pass counts for, as a logarithm of its time over the expected


class PassCost(Protocol):
    """What passes cost one answer: its own (``PassTimes``), or shared with others (``batching.ShareOfPass``)."""

    n_past: int  # tokens in the memory now
    n_since_one: int  # passes since one over one token alone was seen

    def __call__(self, width: int) -> float:
        """Expected milliseconds of a pass over ``width`` tokens; 0 for no tokens."""

    def begin(self) -> None: ...
    def observe(self, width: int, ms: float) -> None:
        """Correct what is expected by one measured pass."""

    def slow_down(self, factor: float) -> None:
        """Expect all passes to take so many times as long, as those of another model were found to."""

    @property
    def scale(self) -> float:
        """How many times as long as calibrated passes of all widths take now."""

    @property
    def ms_reading(self) -> float:
        """How long a draft model may read in one round: others may be waiting for the passes [ms]."""


@dataclass(slots=True)
class Curve:
    """t(w) as calibrated [ms], with ``CALIBRATED_PAST`` tokens in the memory: linear between what was measured."""

    measured: dict[int, float]
    widest: int = field(init=False, repr=False, compare=False)
    read: dict[int, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.widest, self.read = max(self.measured), {}

    def __call__(self, width: int) -> float:
        if (ms := self.read.get(width)) is not None:
            return ms
        known, widths = self.measured, sorted(self.measured)
        if width > widths[-1] and len(widths) == 1:
            ms = known[widths[-1]] * width / widths[-1]
        elif width > widths[-1]:
            # Beyond what was measured: the mean slope of the whole curve; the last step alone may be a plateau. A curve
            # that falls was disturbed while it was measured: going on so, wide passes would take less than no time.
            rise = known[widths[-1]] - known[widths[0]]
            slope = max(0.0, rise / (widths[-1] - widths[0]))
            ms = known[widths[-1]] + slope * (width - widths[-1])
        elif width in known:
            ms = known[width]
        else:
            above = next(w for w in widths if w > width)
            below = max(w for w in widths if w < width)
            share = (width - below) / (above - below)
            ms = known[below] * (1 - share) + known[above] * share
        self.read[width] = ms
        return ms


@dataclass(slots=True)
class Corrections:
    """What passes take now, as factors of what was calibrated.

    Reading the weights is bound by memory, further rows by arithmetic, and other programs slow each differently. What a
    pass tells is divided among the factors by how uncertain each is (a Kalman filter): ``scale`` of all widths,
    ``rows`` of all but the first, ``trim`` of one width alone. ``beyond``, of wider passes, is no part of the filter.
    """

    scale: float = 1.0
    rows: float = 1.0
    beyond: float = 1.0
    trim: dict[int, float] = field(default_factory=dict)
    _unsure: float = ALL**2  # variance of the logarithm of ``scale``
    _unsure_rows: float = ROWS**2
    _together: float = 0.0  # covariance of the two
    _unsure_alone: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    def observe(self, width: int, surprise: float, believed: float) -> float:
        """Correct by one pass, which took exp(``surprise``) times as long as expected; returns the change of the
        logarithm of ``scale``. ``believed`` is taken at once for the machine's speed; 0: the filter decides."""
        self._unsure += WALK**2
        if width == 1:
            self.rows **= KEPT
            self._together *= KEPT
            self._unsure_rows += (1.0 - KEPT**2) * (ROWS**2 - self._unsure_rows)
        for known, unsure in self._unsure_alone.items():
            if known != width:
                self.trim[known] **= KEPT
                self._unsure_alone[known] = unsure + (1.0 - KEPT**2) * (ALONE**2 - unsure)
        told = min(ONCE_MORE, max(-ONCE_MORE, surprise))
        scale, rows, alone = self._unsure, self._together, 0.0  # covariances with what is seen
        if width > 1:
            scale, rows = scale + rows, rows + self._unsure_rows
            alone = self._unsure_alone.get(width, ALONE**2)
        total = (scale if width == 1 else scale + rows) + alone + SPREAD**2
        change = max(believed, told * scale / total, key=abs)
        self.scale *= math.exp(change)
        if not believed:
            self.rows = min(2.0, max(0.5, self.rows * math.exp(told * rows / total)))
        self._unsure -= scale * scale / total
        self._together -= scale * rows / total
        self._unsure_rows -= rows * rows / total
        if width > 1:
            told_alone = 0.0 if believed else told * alone / total
            self.trim[width] = min(2.0, max(0.5, self.trim.get(width, 1.0) * math.exp(told_alone)))
            self._unsure_alone[width] = alone * (1.0 - alone / total)
        return change

    def observe_beyond(self, surprise: float) -> None:
        once = min(ONCE_MOST, max(-ONCE_MOST, surprise))
        self.beyond = min(3.0, max(0.33, self.beyond * math.exp(0.3 * once)))


@dataclass(slots=True)
class PassTimes:
    """t(w) of one model in one engine [ms]: the calibrated curve times the corrections that follow what is observed."""

    measured: InitVar[dict[int, float]]
    growth: float = 0.0  # share by which a pass grows per token in the memory
    n_past: int = CALIBRATED_PAST
    n_since_one: int = 0
    noisy: bool = False  # provisional: repeats did not agree, others used the CPU, or it is quick
    quick: bool = False  # it comes of a few passes only
    others_share: float = 0.0  # of the CPUs' time, used by other programs while it was calibrated
    curve: Curve = field(init=False)
    corrections: Corrections = field(init=False, default_factory=Corrections)
    _n_observed: int = 0  # since the calibration
    _drift: float = 0.0  # mean logarithm of the time that passes took over the calibrated one
    _left: float = 0.0  # of the last surprise in this answer, what was not believed

    def __post_init__(self, measured: dict[int, float]) -> None:
        self.curve = Curve(measured)

    def __call__(self, width: int) -> float:
        if width <= 0:
            return 0.0
        curve, now = self.curve, self.corrections
        longer = (1.0 + self.growth * self.n_past) / (1.0 + self.growth * CALIBRATED_PAST)
        ms = curve(width) * longer * now.scale * (now.rows if width > 1 else 1.0)
        return ms * (now.beyond if width > curve.widest else now.trim.get(width, 1.0))

    def begin(self) -> None:
        self._left = 0.0

    def observe(self, width: int, ms: float) -> None:
        """Correct the curve by one measured pass. An outlier counts as ``ONCE_MORE`` at most (beyond the calibrated
        widths ``ONCE_MOST``); two in a row that differ by more than noise are believed in what they agree on."""
        expected = self(width)
        if expected <= 0 or ms <= 0:
            return
        surprise = math.log(ms / expected)
        if width > self.curve.widest:
            self.corrections.observe_beyond(surprise)
            return
        self._n_observed += 1
        self._drift += (math.log(ms / self.curve(width)) - self._drift) / min(self._n_observed, 500)
        self.n_since_one = 0 if width == 1 else self.n_since_one + 1
        agreed = min(abs(surprise), abs(self._left), AGREED_MOST) if surprise * self._left > 0 else 0.0
        believed = math.copysign(AGREED_SHARE * agreed, surprise) if agreed > NOISE else 0.0
        self._left = surprise - self.corrections.observe(width, surprise, believed)

    def slow_down(self, factor: float) -> None:
        self.corrections.scale *= factor

    def replace(self, measured: PassTimes) -> None:
        """Go on from another calibration of the same passes, without corrections."""
        self.curve, self.noisy, self.quick = measured.curve, measured.noisy, measured.quick
        self.others_share = measured.others_share
        self.corrections = Corrections()
        self._n_observed, self._drift = 0, 0.0

    @property
    def scale(self) -> float:
        return self.corrections.scale

    @property
    def ms_reading(self) -> float:
        return math.inf

    @property
    def fits(self) -> bool:
        return self._n_observed < 300 or abs(self._drift) < math.log(1.5)


class Costs:
    """What passes of a target and of its drafters cost one answer [ms].

    ``times`` is the target's t(w), ``draft_times`` by source d(w) of drafters that run a model (the others draft for
    nothing), ``one_pass`` those whose single pass proposes all of a draft, ``rows_of_draft`` those of them whose pass
    has a row for each draft token, ``passes`` those whose drafts are carried over as text, with how many passes a draft
    token takes on average, ``ms_other`` the time of a round outside the models, ``hidden`` by source the share of its
    steps that overlaps with verification (see ``Controller.plan``).
    """

    def __init__(
        self,
        times: PassCost,
        draft_times: Mapping[str, PassCost],
        one_pass: Set[str] = frozenset(),
        rows_of_draft: Set[str] = frozenset(),
        passes: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.times = times
        self.draft_times = draft_times
        self.one_pass, self.rows_of_draft, self.passes = one_pass, rows_of_draft, passes
        self.ms_other = 0.3
        self.hidden: Mapping[str, float] = {}

    @property
    def all_times(self) -> tuple[PassCost, ...]:
        return self.times, *self.draft_times.values()

    @property
    def ms_plain(self) -> float:
        return self.times(1) + self.ms_other

    def step_ms(self, source: str, n: int = 1) -> float:
        """Time that the target waits for one draft token, or for a whole draft of one pass.

        Where that pass has a row for each draft token, for one of ``n`` tokens.
        """
        if source not in self.draft_times:
            return 0.0
        width = n if source in self.rows_of_draft else 1
        return self.passes.get(source, 1.0) * self.draft_times[source](width) * (1.0 - self.hidden.get(source, 0.0))


def row_ms(times: PassCost) -> float:
    """What a further row of a pass over a few costs [ms]."""
    return (times(8) - times(2)) / 6
