"""What a record says: speed, speed-up, acceptance and time, by category and overall, and how sure it is.

All figures are computed from the samples; ``Results`` is what ``--json`` writes under ``results``. Denominators are in
SCHEMA.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from localspec.commands.bench.record import Engine, Record, Settings
from localspec.commands.bench.reliability import Reliability, reliability
from localspec.commands.bench.remarks import remarks
from localspec.commands.doctor.payoff import break_even_by_length
from localspec.controllers.cost_model import PassTimes
from localspec.measuring.answer import NEAR_TIE, Sample
from localspec.measuring.statistics import Estimate, estimate, middle
from localspec.spec_decode.rounds import SpecStats

ALL = "all"
"""The row over all categories."""

Ratios = dict[str, list[float]]
Verdict = Literal["faster", "same", "slower"]


@dataclass(frozen=True, slots=True)
class Position:
    """One position of a draft, from 0: draft tokens sent there, and those accepted."""

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
        """Draft tokens sent."""
        return sum(each.drafted for each in self.by_source.values())

    @property
    def verdict(self) -> Verdict | None:
        """What the interval says of its speed, beside plain's; None where there is none of 95 %."""
        found = self.speedup
        if found is None or not found.is_firm or found.low is None or found.high is None:
            return None
        return "faster" if found.low > 1 else "slower" if found.high < 1 else "same"


@dataclass(frozen=True, slots=True)
class Duel:
    """Two arms on the same questions, in one category or all: how much faster the first is than the second."""

    category: str
    what: str
    first: str
    second: str
    ratio: Estimate


@dataclass(frozen=True, slots=True)
class Width:
    """A pass over so many tokens: t(w) as calibrated, and the median of the passes in this run."""

    width: int
    calibrated_ms: float | None
    observed_ms: float | None
    n_observed: int


@dataclass(frozen=True, slots=True)
class Passes:
    """What passes of one engine cost, and what acceptance draft tokens need."""

    backend: str
    widths: list[Width]
    step_ms: dict[str, float]  # the time of one draft token by drafter; 0 for n-grams
    break_even: dict[str, dict[str, float | None]]  # by drafter and draft length, see ``break_even``; None: never


@dataclass(frozen=True, slots=True)
class PredictionQuality:
    """How well an arm's predictions of acceptance held: of all its draft tokens, or of one drafter's."""

    backend: str
    arm: str
    source: str
    reliability: Reliability


@dataclass(frozen=True, slots=True)
class Drift:
    """Plain decoding's own speed over the run.

    Attributes:
        backend: the engine.
        change: median speed of a one-token pass in the last third of plain's answers over that in the first, less 1;
            None with fewer than 6 answers.
        noise: how far the speed of a plain answer lies from the median, relative; the median of that.
    """

    backend: str
    change: float | None
    noise: float | None


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
        """One row, if it is there."""
        wanted = (category, backend, arm)
        return next((row for row in self.rows if (row.category, row.backend, row.arm) == wanted), None)

    @property
    def categories(self) -> list[str]:
        """Without ``all``."""
        return [category for category in dict.fromkeys(row.category for row in self.rows) if category != ALL]

    @property
    def arms(self) -> list[tuple[str, str]]:
        """Engine and arm of every arm but plain."""
        return list(dict.fromkeys((row.backend, row.arm) for row in self.rows if row.arm != "plain"))


def analyse(record: Record) -> Results:
    """Draw the conclusions."""
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
        if (own := [sample for sample in group if (sample.backend, sample.arm) == (backend, arm)])
    ]
    drift = drifts(record)
    return Results(
        rows=rows,
        duels=[duel for category, group in groups.items() for duel in _duels(category, group, settings)],
        passes=[_passes(engine, samples) for engine in record.engines],
        judgements=list(_judgements(record)),
        drift=drift,
        remarks=remarks(record, rows, drift),
    )


def drifts(record: Record) -> list[Drift]:
    """Plain decoding's own speed over the run, by engine."""
    return [_drift(engine.backend, record.samples) for engine in record.engines]


def ratios(samples: Iterable[Sample], one: tuple[str, str], other: tuple[str, str]) -> Ratios:
    """By question, the speed of one engine and arm over another's, in each repeat that has both."""
    samples = list(samples)
    under = {(s.question, s.repeat): s.speed for s in samples if (s.backend, s.arm) == other}
    found: Ratios = {}
    for sample in samples:
        place = (sample.question, sample.repeat)
        if (sample.backend, sample.arm) == one and place in under:
            found.setdefault(sample.question, []).append(sample.speed / under[place])
    return found


def by_question(samples: Iterable[Sample], figure: Callable[[Sample], float]) -> Ratios:
    """A figure of each sample, gathered by question."""
    found: Ratios = {}
    for sample in samples:
        found.setdefault(sample.question, []).append(figure(sample))
    return found


def _sure(values: Ratios) -> Estimate:
    found = estimate(values)
    assert found is not None
    return found


def _row(category: str, own: Sequence[Sample], group: Sequence[Sample]) -> Row:
    """One arm's answers, among those of all arms."""
    backend, arm = own[0].backend, own[0].arm
    speedups = {} if arm == "plain" else ratios(group, (backend, arm), (backend, "plain"))
    medians = {question: statistics.median(values) for question, values in speedups.items()}
    worst = min(medians, key=lambda question: medians[question], default=None)
    plain = {(s.question, s.repeat): s.token_sha256 for s in group if (s.backend, s.arm) == (backend, "plain")}
    compared = [(s.token_sha256, plain[s.question, s.repeat]) for s in own if (s.question, s.repeat) in plain]
    total = SpecStats.total(sample.stats for sample in own)
    tokens = total.completion_tokens
    speeds = by_question(own, lambda sample: sample.speed)
    positions = zip(total.drafted_per_position, total.accepted_per_position, strict=True)
    return Row(
        category=category,
        backend=backend,
        arm=arm,
        n_questions=len({sample.question for sample in own}),
        n_samples=len(own),
        tokens=tokens,
        tokens_per_second=_sure(speeds),
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
        time_to_first_token=_sure(by_question(own, lambda sample: sample.time_to_first_token)),
        seconds_per_token={part: total[f"seconds_{part}"] / tokens for part in ("draft", "verify", "other")},
        n_same=sum(one == other for one, other in compared),
        n_compared=len(compared),
        n_near_ties=sum(sample.parted_by is not None and sample.parted_by <= NEAR_TIE for sample in own),
        prompt_tokens_per_second=middle(by_question(own, _prompt_speed)),
        spread=statistics.stdev(map(statistics.median, speeds.values())) if len(speeds) > 1 else None,
    )


def _prompt_speed(sample: Sample) -> float:
    """Of the prompt all but the last token is read before the answer begins."""
    return (sample.prompt_tokens - 1) / sample.seconds_prompt if sample.seconds_prompt else 0.0


# -- one against the other -------------------------------------------------------------------------------------------


def _duels(category: str, samples: Sequence[Sample], settings: Settings) -> Iterator[Duel]:
    first = settings.backends[0]
    for backend in settings.backends:
        prefix = f"{backend} " if len(settings.backends) > 1 else ""
        fixed = {
            arm: found
            for arm in settings.arms
            if arm.rpartition(":")[2].isdigit() and (found := ratios(samples, (backend, arm), (backend, "plain")))
        }
        if "auto" in settings.arms and fixed:
            best = max(fixed, key=lambda arm: middle(fixed[arm]))
            if duel := estimate(ratios(samples, (backend, "auto"), (backend, best))):
                yield Duel(category, "auto and the best fixed length", prefix + "auto", prefix + best, duel)
    for other in settings.backends[1:]:
        for arm in settings.arms:
            if duel := estimate(ratios(samples, (other, arm), (first, arm))):
                yield Duel(category, "engines", f"{other} {arm}", f"{first} {arm}", duel)


# -- costs, predictions, drift ---------------------------------------------------------------------------------------


def _passes(engine: Engine, samples: Iterable[Sample]) -> Passes:
    observed: dict[int, list[float]] = {}
    for sample in samples:
        if sample.backend == engine.backend:
            for _, ms_verify, _, n_draft, _, _ in sample.rounds:
                observed.setdefault(int(n_draft) + 1, []).append(ms_verify)
    calibrated = {int(width): ms for width, ms in engine.pass_ms.items()}
    widths = []
    for width in sorted({*calibrated, *observed}):
        passes = observed.get(width, [])
        middle_ms = round(statistics.median(passes), 4) if passes else None
        widths.append(Width(width, calibrated.get(width), middle_ms, len(passes)))
    times = PassTimes(calibrated)
    steps = {source: engine.draft_ms.get(source, 0.0) for source in engine.sources}
    even = {
        source: {str(length): share for length, share in found.items()}
        for source, step in steps.items()
        for found in [break_even_by_length(times, step, one_pass=source in engine.one_pass)]
    }
    return Passes(engine.backend, widths, steps, even)


def _judgements(record: Record) -> Iterable[PredictionQuality]:
    for backend in record.settings.backends:
        for arm in record.settings.arms:
            if arm.rpartition(":")[2] != "auto":
                continue
            own = [s for s in record.samples if (s.backend, s.arm) == (backend, arm)]
            judged = [(source, expected, bool(right)) for s in own for source, _, expected, right in s.judged]
            sources = list(dict.fromkeys(source for source, _, _ in judged))
            for name in [ALL, *(sources if len(sources) > 1 else [])]:
                found = reliability((p, right) for source, p, right in judged if name in (ALL, source))
                if found is not None:
                    yield PredictionQuality(backend, arm, name, found)


def _drift(backend: str, samples: Iterable[Sample]) -> Drift:
    plain = sorted((s for s in samples if (s.backend, s.arm) == (backend, "plain")), key=lambda s: s.started)
    speeds = [1e3 / statistics.median(row[1] for row in s.rounds) for s in plain if s.rounds]
    if len(speeds) < 6:
        return Drift(backend, None, None)
    third, usual = len(speeds) // 3, statistics.median(speeds)
    change = statistics.median(speeds[-third:]) / statistics.median(speeds[:third]) - 1
    noise = statistics.median(abs(speed / usual - 1) for speed in speeds)
    return Drift(backend, round(change, 4), round(noise, 4))
