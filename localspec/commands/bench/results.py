"""Conclusions of a record: speed, speed-up, acceptance and time by category, and their intervals.

``Results`` is what ``--json`` writes under ``results``; SCHEMA.md has the denominators.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Literal

import numpy as np

from localspec.commands.bench.record import Engine, Record, Settings
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.stopping import Times
from localspec.measuring.passes import break_even_by_length
from localspec.measuring.statistics import FEWEST, Estimate, estimate, middle
from localspec.measuring.subject import NEAR_TIE, Sample
from localspec.spec_decode.rounds import SpecStats

# Remarks: a machine that was busy, hot, on battery, or drifting.

BUSY = 0.10  # CPU share of others from which an answer counts as disturbed
DRIFT = 0.05  # change of plain speed from the first third of a run to the last that is worth a remark


def remarks(record: Record, rows: Sequence[Row]) -> Iterator[str]:
    """Remarks in sentences, the gravest first."""
    if record.ended == "interrupted":
        yield "It was interrupted; this is what was measured until then."
    if record.skipped:
        few = ", ".join(record.skipped[:3]) + (", …" if len(record.skipped) > 3 else "")
        n = len(record.skipped)
        yield f"Left out, as they do not fit into the context: {n} question{'s' * (n != 1)} ({few})."
    if len(record.sessions) > 1:
        yield f"It was measured in {len(record.sessions)} parts; each began with the knowledge of a fresh start."
    yield from doubts(record)
    firm = [row.speedup.is_firm for row in rows if row.speedup is not None]
    if not all(firm):
        where = "Categories of fewer" if any(firm) else "Fewer"
        more = " Run without --quick for a verdict." if record.settings.mode == "quick" and not any(firm) else ""
        yield f"{where} than {FEWEST} questions: the range is shown instead of a 95 % interval.{more}"
    n_apart = sum(sample.parted_by is not None and sample.parted_by > NEAR_TIE for sample in record.samples)
    if n_apart:
        yield (
            f"{n_apart} answer{' parts' if n_apart == 1 else 's part'} from plain's at two tokens over {NEAR_TIE:g} "
            "logits apart, as a rule more than rounding: localspec verify tells."
        )


def doubts(record: Record) -> Iterator[str]:
    """Remarks on the machine, which make timings doubtful."""
    shares = [sample.others_share for sample in record.samples if sample.others_share is not None]
    disturbed = sum(share > BUSY for share in shares)
    if shares and disturbed > len(shares) / 10:
        yield (
            f"The machine was busy: others took {statistics.fmean(shares):.0%} of the CPUs' time on average, and over "
            f"{BUSY:.0%} during {disturbed} of {len(shares)} answers. Stop them for figures to rely on."
        )
    if any(session.throttled for session in record.sessions):
        yield "The CPU was slowed by heat or a power limit."
    if any(session.on_battery for session in record.sessions):
        yield "It ran on battery, where the clock is lower, as a rule."
    for why in dict.fromkeys(session.slow_clock for session in record.sessions if session.slow_clock):
        yield f"A setting keeps the CPU slow: {why}."
    threads, cores = [engine.threads for engine in record.engines], record.machine.get("cores")
    if cores and max(threads, default=0) > cores:
        yield f"{max(threads)} threads shared {cores} CPUs and waited for each other."
    for each in drifts(record):
        name = f" with {each.backend}" if len(record.engines) > 1 else ""
        if each.change is None or each.noise is None:
            continue
        if abs(each.change) > max(DRIFT, each.noise):
            what = "slower" if each.change < 0 else "faster"
            yield (
                f"Plain decoding{name} was {abs(each.change):.0%} {what} in the last third of the run than in the "
                "first; speed-ups are unaffected; tok/s are not comparable."
            )
        if each.noise > 2 * DRIFT:
            yield f"Plain decoding{name} itself varied by ±{each.noise:.0%} from answer to answer."


# How well predicted acceptances are calibrated.


@dataclass(frozen=True, slots=True)
class Bin:
    """Draft tokens of similar predicted acceptance."""

    low: float
    high: float  # predictions in [low, high), the last bin up to 1
    n: int
    predicted: float  # the mean
    observed: float  # the share that was accepted
    observed_low: float  # 95 % Wilson interval of that share, draft tokens taken as independent
    observed_high: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predicted against observed acceptance."""

    n: int  # draft tokens that the target judged: all before them in their draft were accepted
    expected_calibration_error: float  # mean of |predicted - observed| of their bin (Guo et al. 2017)
    bins: list[Bin]  # those of ten that have draft tokens


def reliability(judged: Iterable[tuple[float, bool]], n_bins: int = 10) -> Reliability | None:
    """Reliability of judged draft tokens (predicted, accepted); None of none."""
    pairs = np.array([(predicted, float(accepted)) for predicted, accepted in judged])
    if not len(pairs):
        return None
    index = np.clip((pairs[:, 0] * n_bins).astype(int), 0, n_bins - 1)
    bins, error = [], 0.0
    for each in np.unique(index):
        here = pairs[index == each]
        predicted, observed = map(float, here.mean(axis=0))
        error += abs(predicted - observed) * len(here)
        low, high = wilson(int(here[:, 1].sum()), len(here))
        bins.append(Bin(float(each / n_bins), float((each + 1) / n_bins), len(here), predicted, observed, low, high))
    return Reliability(len(pairs), error / len(pairs), bins)


def wilson(hits: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if not n:
        return 0.0, 1.0
    share, factor = hits / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / factor
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / factor
    return max(0.0, centre - half), min(1.0, centre + half)


ALL = "all"  # row over all categories
Ratios = dict[str, list[float]]
Verdict = Literal["faster", "same", "slower"]


@dataclass(frozen=True, slots=True)
class Position:
    """Draft tokens sent at a position, and those accepted."""

    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted


@dataclass(frozen=True, slots=True)
class Row:
    """One arm in one category, or in all."""

    category: str
    backend: str
    arm: str
    n_questions: int
    n_samples: int
    tokens: int
    tokens_per_second: Estimate
    speedup: Estimate | None  # over plain, same engine, question and repeat; None for plain itself
    n_slower: int  # questions whose speed-up is under 1
    worst_question: str | None
    worst_speedup: float | None
    mean_acceptance_length: float  # tokens per round; plain decoding is 1
    acceptance_rate: float | None  # of the draft tokens sent
    by_source: dict[str, Position]
    by_position: list[Position]
    time_to_first_token: Estimate
    seconds_per_token: dict[str, float]  # draft, verify, other
    n_same: int  # answers equal to plain's, token by token
    n_compared: int  # answers that have one of plain's to be compared with
    n_near_ties: int  # answers that part from plain's where two tokens are nearly tied
    prompt_tokens_per_second: float  # median over questions; read once for all arms
    spread: float | None  # standard deviation of tokens per second from question to question

    @property
    def drafted(self) -> int:
        return sum(each.drafted for each in self.by_source.values())

    @property
    def verdict(self) -> Verdict | None:
        """Speed against plain by the 95 % interval; None without one."""
        verdicts: dict[int | None, Verdict] = {1: "faster", 0: "same", -1: "slower"}
        return None if self.speedup is None else verdicts.get(self.speedup.against_one())


@dataclass(frozen=True, slots=True)
class Duel:
    """Speed of one arm over another's on the same questions."""

    category: str
    what: str
    first: str
    second: str
    ratio: Estimate


@dataclass(frozen=True, slots=True)
class Width:
    """A pass over ``width`` tokens: t(w) as calibrated, and the median in this run."""

    width: int
    calibrated_ms: float | None
    observed_ms: float | None
    n_observed: int


@dataclass(frozen=True, slots=True)
class Passes:
    """Pass costs of one engine, and the acceptance that drafts need."""

    backend: str
    widths: list[Width]
    step_ms: dict[str, float]  # the time of one draft token by drafter; 0 for n-grams
    break_even: dict[str, dict[str, float | None]]  # by drafter and draft length, see ``break_even``; None: never


@dataclass(frozen=True, slots=True)
class PredictionQuality:
    """Reliability of an arm's predictions, for all drafters or one."""

    backend: str
    arm: str
    source: str
    reliability: Reliability


@dataclass(frozen=True, slots=True)
class Drift:
    """Plain decoding's own speed over the run; None with fewer than 6 answers."""

    backend: str  # the engine
    change: float | None  # median speed of a one-token pass in the last third of its answers over the first, less 1
    noise: float | None  # how far the speed of a plain answer lies from the median, relative; the median of that


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that a record says."""

    rows: list[Row]  # all categories first; within each the arms
    duels: list[Duel]  # auto against the fixed arm that was best in hindsight, and engines
    passes: list[Passes]
    judgements: list[PredictionQuality]
    drift: list[Drift]
    remarks: list[str]  # what makes the figures doubtful, in sentences

    def row(self, category: str, backend: str, arm: str) -> Row | None:
        wanted = (category, backend, arm)
        return next((row for row in self.rows if (row.category, row.backend, row.arm) == wanted), None)

    @property
    def overall(self) -> list[Row]:
        """Over all categories, of every arm but plain."""
        return [row for row in self.rows if row.category == ALL and row.arm != "plain"]


def analyse(record: Record) -> Results:
    samples, settings = record.samples, record.settings
    categories = list(dict.fromkeys(sample.category for sample in samples))
    groups = {ALL: samples}
    if len(categories) > 1:
        groups |= {name: [sample for sample in samples if sample.category == name] for name in categories}
    rows = [
        _row(category, own, group)
        for category, group in groups.items()
        for backend in settings.backends
        for arm in settings.arms
        if (own := of_arm(group, backend, arm))
    ]
    return Results(
        rows=rows,
        duels=[duel for category, group in groups.items() for duel in _duels(category, group, settings)],
        passes=[_passes(engine, samples) for engine in record.engines],
        judgements=list(_judgements(record)),
        drift=list(drifts(record)),
        remarks=list(remarks(record, rows)),
    )


def of_arm(samples: Iterable[Sample], backend: str, arm: str) -> list[Sample]:
    return [sample for sample in samples if (sample.backend, sample.arm) == (backend, arm)]


def ratios(samples: Sequence[Sample], one: tuple[str, str], other: tuple[str, str]) -> Ratios:
    """By question, speed of one (engine, arm) over another in each repeat that has both."""
    under = {(s.question, s.repeat): s.speed for s in of_arm(samples, *other)}
    both = [sample for sample in of_arm(samples, *one) if (sample.question, sample.repeat) in under]
    return by_question(both, lambda sample: sample.speed / under[sample.question, sample.repeat])


def by_question(samples: Iterable[Sample], figure: Callable[[Sample], float]) -> Ratios:
    found: Ratios = {}
    for sample in samples:
        found.setdefault(sample.question, []).append(figure(sample))
    return found


def _row(category: str, own: Sequence[Sample], group: Sequence[Sample]) -> Row:
    """One arm's answers (``own``) among those of all arms."""
    backend, arm = own[0].backend, own[0].arm
    speedups = {} if arm == "plain" else ratios(group, (backend, arm), (backend, "plain"))
    medians = {question: statistics.median(values) for question, values in speedups.items()}
    worst = min(medians, key=lambda question: medians[question], default=None)
    plain = {(s.question, s.repeat): s.token_sha256 for s in of_arm(group, backend, "plain")}
    compared = [(s.token_sha256, plain[s.question, s.repeat]) for s in own if (s.question, s.repeat) in plain]
    total = SpecStats.total(sample.stats for sample in own)
    tokens = total.completion_tokens
    speeds = by_question(own, lambda sample: sample.speed)
    speed, first = estimate(speeds), estimate(by_question(own, lambda sample: sample.time_to_first_token))
    assert speed is not None
    assert first is not None
    positions = zip(total.drafted_per_position, total.accepted_per_position, strict=True)
    return Row(
        category=category,
        backend=backend,
        arm=arm,
        n_questions=len({sample.question for sample in own}),
        n_samples=len(own),
        tokens=tokens,
        tokens_per_second=speed,
        speedup=estimate(speedups),
        n_slower=sum(value < 1 for value in medians.values()),
        worst_question=worst,
        worst_speedup=None if worst is None else medians[worst],
        mean_acceptance_length=total["mean_acceptance_length"],
        acceptance_rate=total["acceptance_rate"],
        by_source={
            source: Position(counts["num_draft_tokens"], counts["num_accepted_tokens"])
            for source, counts in total.by_source.items()
        },
        by_position=[Position(drafted, accepted) for drafted, accepted in positions if drafted],
        time_to_first_token=first,
        seconds_per_token={part: total[f"seconds_{part}"] / tokens for part in ("draft", "verify", "other")},
        n_same=sum(one == other for one, other in compared),
        n_compared=len(compared),
        n_near_ties=sum(sample.parted_by is not None and sample.parted_by <= NEAR_TIE for sample in own),
        # All of a prompt but its last token is read before the answer begins.
        prompt_tokens_per_second=middle(
            by_question(own, lambda s: (s.prompt_tokens - 1) / max(s.seconds_prompt, 1e-9))
        ),
        spread=statistics.stdev(map(statistics.median, speeds.values())) if len(speeds) > 1 else None,
    )


def _duels(category: str, samples: Sequence[Sample], settings: Settings) -> Iterator[Duel]:
    first = settings.backends[0]
    lengths = [arm for arm in settings.arms if arm.rpartition(":")[2].isdigit()]
    for backend in settings.backends:
        prefix = f"{backend} " if len(settings.backends) > 1 else ""
        speeds = {arm: middle(ratios(samples, (backend, arm), (backend, "plain"))) for arm in lengths}
        fixed = [arm for arm in lengths if not math.isnan(speeds[arm])]
        if "auto" in settings.arms and fixed:
            best = max(fixed, key=lambda arm: speeds[arm])
            if duel := estimate(ratios(samples, (backend, "auto"), (backend, best))):
                yield Duel(category, "auto and the best fixed length", prefix + "auto", prefix + best, duel)
    for other in settings.backends[1:]:
        for arm in settings.arms:
            if duel := estimate(ratios(samples, (other, arm), (first, arm))):
                yield Duel(category, "engines", f"{other} {arm}", f"{first} {arm}", duel)


def _passes(engine: Engine, samples: Iterable[Sample]) -> Passes:
    observed: dict[int, list[float]] = {}
    for sample in samples:
        if sample.backend == engine.backend:
            for _, ms_verify, _, n_draft, _, _ in sample.rounds:
                observed.setdefault(int(n_draft) + 1, []).append(ms_verify)
    widths = []
    for width in sorted({*engine.pass_ms, *observed}):
        passes = observed.get(width, [])
        middle_ms = round(statistics.median(passes), 4) if passes else None
        widths.append(Width(width, engine.pass_ms.get(width), middle_ms, len(passes)))
    times, steps, even = PassTimes(engine.pass_ms), dict[str, float](), dict[str, dict[str, float | None]]()
    for source in engine.sources:
        step = steps[source] = engine.draft_ms.get(source, 0.0)
        # A pass that makes a whole draft takes by the number of its tokens, or always as long.
        rows = engine.block_ms.get(source)
        whole: Times | None = PassTimes(rows) if rows else partial(_always, step) if source in engine.one_pass else None
        found = break_even_by_length(times, step, whole)
        even[source] = {str(length): share for length, share in found.items()}
    return Passes(engine.backend, widths, steps, even)


def _always(ms: float, n: int) -> float:
    return ms


def _judgements(record: Record) -> Iterable[PredictionQuality]:
    predicting = [arm for arm in record.settings.arms if arm.rpartition(":")[2] == "auto"]
    for backend, arm in product(record.settings.backends, predicting):
        own = of_arm(record.samples, backend, arm)
        judged = [(source, expected, bool(right)) for s in own for source, _, expected, right in s.judged]
        sources = list(dict.fromkeys(source for source, _, _ in judged))
        for name in [ALL, *(sources if len(sources) > 1 else [])]:
            found = reliability((p, right) for source, p, right in judged if name in (ALL, source))
            if found is not None:
                yield PredictionQuality(backend, arm, name, found)


def drifts(record: Record) -> Iterator[Drift]:
    for backend in record.settings.backends:
        plain = sorted(of_arm(record.samples, backend, "plain"), key=lambda sample: sample.started)
        speeds = [1e3 / statistics.median(row[1] for row in s.rounds) for s in plain if s.rounds]
        if len(speeds) < 6:
            yield Drift(backend, None, None)
            continue
        third, usual = len(speeds) // 3, statistics.median(speeds)
        change = statistics.median(speeds[-third:]) / statistics.median(speeds[:third]) - 1
        noise = statistics.median(abs(speed / usual - 1) for speed in speeds)
        yield Drift(backend, round(change, 4), round(noise, 4))


def time_text(seconds: float) -> str:
    """``01:05`` or ``2:03:09``."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
