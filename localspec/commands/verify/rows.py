"""Rows of the oracle, what rounding explains, rollbacks, and the audit's log and result; SCHEMA.md is of the JSON."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import chain, repeat
from typing import Any, Literal

import numpy as np

from localspec.backends.base import Context, FloatArray, Model
from localspec.backends.trust import MAX_MEAN_KL, agreement
from localspec.errors import EngineError, line_of
from localspec.measuring.subject import feed, row_behind
from localspec.sampling.sampling import Ids, SamplingParams, edit_logits, largest_ids
from localspec.spec_decode.decoder import PREFILL_CHUNK

# The oracle: the target alone, in fresh contexts that are never rolled back, token by token and in wide passes.

TOP = 20  # tokens that a deviation looks at: those that could have been chosen
KEPT = 64  # tokens of a row that are kept: whole rows of an audit would take gigabytes
SINGLE = 2e-5  # what logarithms in single precision may change [logits]
SLACK = 8  # tokens of room behind a text, for probes


Check = Callable[[], Literal[False]]  # called between passes; raises ``KeyboardInterrupt`` to end the audit


@dataclass(frozen=True, slots=True)
class Deviation:
    """Difference of two computations of one row; all 0 exactly where they are equal to the bit."""

    rms: float = 0.0  # root mean square change of the top 20 logits about their common shift, in logits
    swing: float = 0.0  # largest change of one of them against the best: bounds the gap that a flipped argmax can have
    kl: float = 0.0  # Kullback-Leibler divergence over the tokens kept, in nats
    flips: bool = False  # whether the argmax differs


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The most probable tokens of a row [n <= KEPT] with their logits [n], best first, lower ids first among equals;
    and a digest of the row."""

    ids: Ids
    logits: FloatArray
    digest: bytes

    @classmethod
    def of(cls, row: FloatArray) -> KeptRow:
        """Keep what matters of a row [n_vocab]. ``EngineError``: its largest value is not a finite number."""
        if not np.isfinite(row.max()):
            raise EngineError("the engine returned non-finite logits")
        ids = largest_ids(row, KEPT)
        return cls(ids, row[ids], digest_of(row))

    @property
    def best(self) -> int:
        return int(self.ids[0])

    def gap(self, token: int) -> float:
        """Logits from a token up to the best; a lower bound where it was not kept."""
        at = np.flatnonzero(self.ids == token)
        return float(self.logits[0]) - float(self.logits[int(at[0]) if len(at) else -1])

    def compared(self, row: FloatArray) -> Deviation:
        """Compare another computation [n_vocab] of the row."""
        if digest_of(row) == self.digest:
            return Deviation()
        change = (row[self.ids].astype(np.float64) - self.logits)[:TOP]
        rms, swing = float(change.std()), float(np.abs(change - change[0]).max())
        kl = agreement(self.logits[None], row[self.ids][None]).mean_kl
        # Not equal to the bit, but all by the same amount, or only far down: the smallest number that says so.
        return Deviation(max(rms, 1e-12), swing, kl, int(np.argmax(row)) != self.best)

    def near(self, top: Sequence[tuple[int, float]], argmax: int) -> Deviation:
        """Compare another computation, known only by its argmax and its top tokens with logprobs, which differ from
        logits by one number."""
        logits = dict(zip(self.ids.tolist(), self.logits.tolist(), strict=True))
        change = np.array([value - logits[token] for token, value in top if token in logits] or [0.0])
        rms, swing = float(change.std()), float(np.abs(change - change[0]).max())
        if rms < SINGLE:
            rms = swing = 0.0
        return Deviation(rms, swing, flips=argmax != self.best)


def digest_of(row: FloatArray) -> bytes:
    """Equal for rows that are equal to the bit."""
    return blake2b(row.tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """The target's own greedy answer, or what it computes of a given one; ``rows`` are behind each token, penalties
    applied."""

    name: str
    prompt: list[int]
    tokens: list[int]
    rows: list[KeptRow]
    params: SamplingParams

    def before(self, position: int) -> list[int]:
        """Tokens before the answer's token at ``position``."""
        return self.prompt + self.tokens[:position]

    def compared(self, position: int, row: FloatArray) -> Deviation:
        """Deviation of raw logits [n_vocab] for the token at ``position``."""
        return self.rows[position].compared(edit_logits(row, self.before(position), self.params))


def plain_answer(
    model: Model,
    name: str,
    prompt: list[int],
    params: SamplingParams,
    n_tokens: int,
    check: Check,
    given: Sequence[int] | None = None,
) -> PlainAnswer:
    """Greedy answer, or rows of a ``given`` one, from a fresh context, one token a pass."""
    ends = frozenset() if params.ignore_eos or given is not None else model.vocab.eog
    text, rows = list(prompt), list[KeptRow]()
    with model.new_context(len(prompt) + n_tokens) as context:
        while len(rows) < n_tokens and (not rows or rows[-1].best not in ends):
            check()
            rows.append(KeptRow.of(edit_logits(row_behind(context, text, check), text, params)))
            text.append(rows[-1].best if given is None else given[len(rows) - 1])
    return PlainAnswer(name, prompt, text[len(prompt) :], rows, params)


def wide_passes(
    model: Model,
    plain: PlainAnswer,
    n_rows: int,
    lengths: Iterable[int],
    widths: Iterator[int],
    check: Check,
    *,
    branches: bool = False,
) -> Iterator[list[Deviation]]:
    """Compute the first rows of an answer again in a fresh context, in passes over several tokens; yields their
    deviations.

    ``lengths`` of passes over the prompt matter like ``widths`` over the answer: engines choose kernels by length, and
    a cached prompt is cut elsewhere. ``branches`` matters too: without flash attention on ik-llama.
    """
    text, first = plain.before(n_rows - 1), len(plain.prompt) - 1
    with model.new_context(len(text) + SLACK, branches=branches) as context:
        feed(context, text[:first], check, lengths)
        while (at := context.n_past) < len(text):
            check()
            rows = context.decode(text[at : at + next(widths)]).logits
            yield [plain.compared(at - first + i, row) for i, row in enumerate(rows)]


def prompt_cuts(n_tokens: int) -> list[Iterable[int]]:
    """Cuts of a prompt into passes: as a half-filled cache would, long, short and very short."""
    half = max(1, n_tokens // 2)
    return [chain((half,), repeat(PREFILL_CHUNK)), repeat(PREFILL_CHUNK // 2 - 3), repeat(16), repeat(5)]


FORMAT, VERSION = "localspec-audit", 1
DefectKind = Literal["kernel", "row", "decision", "memory", "law", "engine"]
Figures = Mapping[str, Any]


@dataclass(eq=False)
class Defect(Exception):
    """Something that rounding does not explain; raised, it ends the answer that it was found in.

    Attributes:
        kind: ``kernel`` (wide passes contradict narrow ones), ``row`` (a row of logits is not that of its text),
            ``decision`` (a token is not what its row says), ``memory`` (a context does not hold what it should),
            ``law`` (tokens do not follow the target's distribution), ``engine`` (a pass failed).
        arm, prompt, position: where; position counts the tokens of the answer from 0.
    """

    kind: DefectKind
    arm: str
    prompt: str | None
    position: int | None
    evidence: str  # one sentence
    details: Figures = field(default_factory=dict)  # its figures


@dataclass(frozen=True, slots=True)
class Observation:
    """A row that the running system computed, at a position of a plain answer; ``token`` is what was emitted there, -1
    for none."""

    arm: str
    plain: PlainAnswer
    position: int
    deviation: Deviation
    token: int = -1

    @property
    def gap(self) -> float:
        """Logits from the token up to the argmax of the one-token pass."""
        return 0.0 if self.token < 0 else self.plain.rows[self.position].gap(self.token)

    @property
    def differs(self) -> bool:
        """Whether plain decoding has another token here."""
        return self.token >= 0 and self.token != self.plain.rows[self.position].best

    def within(self, bound: float, gap_bound: float) -> bool:
        return self.deviation.rms <= bound and self.gap <= gap_bound


@dataclass(slots=True)
class ArmTally:
    """Totals of one way of drafting: an entry of ``arms[]``."""

    arm: str
    sampled: bool
    answers: int = 0
    complete: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    widths: set[int] = field(default_factory=set)
    rejected_at: set[int] = field(default_factory=set)
    differences: int = 0
    largest_deviation: float | None = None


@dataclass(slots=True)
class AuditLog:
    arms: dict[tuple[str, bool], ArmTally] = field(default_factory=dict)
    observations: list[Observation] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)

    @contextmanager
    def noting(self, arm: str, prompt: str, what: str) -> Iterator[None]:
        """Note the defect that ends the block, or the failure of the engine."""
        try:
            yield
        except Defect as found:
            self.defects.append(found.with_traceback(None))  # whose frames hold rows of logits
        except Exception as error:
            self.defects.append(Defect("engine", arm, prompt, None, f"{what} broke off: {line_of(error)}"))

    @contextmanager
    def answering(self, arm: str, prompt: str, *, sampled: bool) -> Iterator[ArmTally]:
        """Totals of a way of drafting, for one more answer; notes as ``noting``."""
        tally = self.arms.setdefault((arm, sampled), ArmTally(arm, sampled, largest_deviation=None if sampled else 0.0))
        tally.answers += 1
        with self.noting(arm, prompt, "decoding"):
            yield tally
            tally.complete += 1


@dataclass(slots=True)
class AuditResult:
    """The JSON object; see SCHEMA.md."""

    interrupted: bool
    model: str
    backend: str
    engine: str
    draft: list[str]
    exact: bool
    settings: Figures
    seconds: float
    noise: Figures
    arms: list[ArmTally]
    memory: Figures | None
    sensitivity: Figures | None
    verification_law: Figures | None
    decoding_law: Figures | None
    samples: Figures | None
    thinking: Figures | None
    several: Figures | None
    ties: list[Figures]
    rechecked: Figures
    defects: list[Defect]

    @property
    def lossless(self) -> bool | None:
        """None where the audit was interrupted before a defect."""
        if self.defects:
            return False
        return None if self.interrupted else True

    @property
    def largest_deviation(self) -> float:
        """Of any row [logits]."""
        deviations = [arm.largest_deviation or 0.0 for arm in self.arms]
        return max([*deviations, self.memory["largest_deviation"] if self.memory else 0.0])

    @property
    def verdict(self) -> str:
        if self.defects:
            first = self.defects[0]
            prompt = f", prompt {first.prompt}" if first.prompt else ""
            token = f", token {first.position}" if first.position is not None else ""
            more = f" ({len(self.defects) - 1} more)" if len(self.defects) > 1 else ""
            return f"NOT lossless here: {first.arm}{prompt}{token}: {first.evidence}{more}"
        made = [asdict(arm) for arm in self.arms] + ([self.several] if self.several else [])
        n_answers, n_tokens = (sum(each[name] for each in made if each["drafted"]) for name in ("answers", "tokens"))
        checked = (
            f"{counted(n_answers, 'answer')} with guesses, {counted(n_tokens, 'token')}, each of them the model's own"
        )
        if self.ties:
            checked += f"; {counted(len(self.ties), 'token')} where rounding decides between two that are nearly tied"
        elif self.exact:
            checked += ", to the bit"
        return f"interrupted; no defect so far: {checked}" if self.interrupted else f"lossless here: {checked}"

    def as_dict(self) -> dict[str, Any]:
        found = {"format": FORMAT, "version": VERSION, "lossless": self.lossless, "verdict": self.verdict}
        return found | asdict(self)


def in_words(model: Model, token: int) -> str:
    return f"{model.vocab.display(token)!r} ({token})"


def counted(n: int, noun: str) -> str:
    """``1 answer``, ``2 answers``."""
    return f"{n} {noun}" + ("" if n == 1 else "s")


# The target's context after rollbacks: nothing rejected may be left in it, and nothing else be missing. A row right
# after a rollback (of a round, an edited question, a new conversation, a restored state) equals the plain answer's up
# to the noise of the width. The same rollback with other rejected tokens changes no bit of the rows that follow, where
# the engine computes rows independently (mixtures of experts do not). ``sensitivity`` measures the power of the first
# comparison.

ARM = "rollback"


@dataclass(slots=True)
class Rollbacks:
    """Figures of the probes: ``memory`` of the JSON."""

    rollbacks: int = 0  # how many were made
    restored: int = 0  # how many states were saved, and put back over another text
    pairs: int = 0  # rollbacks that were made twice, with different rejected tokens
    bitwise: bool = True  # whether equality to the bit could be demanded of those
    largest_deviation: float = 0.0  # of a row, in logits

    def probe(self, context: Context, plain: PlainAnswer, reach: int, log: AuditLog, check: Check) -> None:
        """Roll the running context back in every way that decoding does, for drafts of up to ``reach`` tokens, and
        compare the rows that follow; ``plain`` has at least two tokens."""
        rng, last = random.Random(7), len(plain.tokens) - 1

        def rejected(n: int) -> list[int]:
            return [rng.randrange(context.model.n_vocab) for _ in range(n)]

        def observe(position: int) -> FloatArray:
            row = row_behind(context, plain.before(position), check)
            deviation = plain.compared(position, row)
            self.largest_deviation = max(self.largest_deviation, deviation.rms)
            log.observations.append(Observation(ARM, plain, position, deviation))
            return row

        independent = rows_are_independent(context.model, plain, check)
        self.bitwise &= independent
        for n_draft, share in ((1, 0.25), (3, 0.5), (reach, 0.75), (reach, 1.0)):
            position = max(1, int(last * share))
            text, digests = plain.before(position), []
            # The first try leaves its cells behind; the two that are compared then find the same memory.
            for _ in range(3):
                feed(context, text[:-2], check)
                context.decode([text[-2], *rejected(n_draft)])
                digests.append(digest_of(observe(position)))
                self.rollbacks += 1
            self.pairs += 1
            if independent and digests[1] != digests[2]:
                evidence = (
                    f"after {n_draft} rejected guesses were taken back, the next row depends on what they were: "
                    "two rollbacks that should leave the same memory give rows that are not equal to the bit"
                )
                log.defects.append(Defect("memory", ARM, plain.name, position, evidence, {"guesses": n_draft}))
        for kept in (len(plain.prompt) + last // 2, max(1, len(plain.prompt) // 2), 0):
            context.truncate(min(kept, context.n_past))
            observe(last)
            self.rollbacks += 1
        if context.model.capabilities.saves_state:
            feed(context, plain.before(last)[:-1], check)
            state = context.export_state()
            context.truncate(0)
            context.decode(rejected(reach), "none")
            context.import_state(state)
            observe(last)
            self.restored += 1


def rows_are_independent(model: Model, plain: PlainAnswer, check: Check) -> bool:
    """Whether, in fresh contexts, a row is the same to the bit whatever follows it in its pass."""
    digests = set()
    for seed in (1, 2):
        rng = random.Random(seed)
        with model.new_context(len(plain.prompt) + SLACK) as context:
            feed(context, plain.prompt[:-1], check)
            tokens = [plain.prompt[-1], *(rng.randrange(model.n_vocab) for _ in range(4))]
            digests.add(digest_of(context.decode(tokens).logits[0]))
    return len(digests) == 1


def sensitivity(model: Model, plain: PlainAnswer, check: Check) -> list[Deviation]:
    """Deviations of contexts that are wrong on purpose: every fourth position, two ways each."""
    rng, found = random.Random(11), []
    with model.new_context(len(plain.prompt) + len(plain.tokens) + SLACK) as context:
        for position in range(2, len(plain.tokens), 4):
            text = plain.before(position)
            for spoiled in (text[:-2], [*text[:-2], rng.randrange(model.n_vocab)]):
                found.append(plain.compared(position, row_behind(context, [*spoiled, text[-1]], check)))
    return found


# What rounding explains. A text is decoded in fresh contexts token by token and in passes of every width. Above its 90
# % quantile u a deviation has an exponential tail (Balkema and de Haan 1974; Pickands 1975) with the upper 95 %
# confidence limit of its mean, from k of n values. The bound gives one crossing among all compared rows a probability
# of ``FALSE_ALARM``: u + mean * ln(k / n * n_tested / FALSE_ALARM), at least ``RESOLUTION``. A row beyond it is
# computed again in fresh contexts at several widths, and is a defect where none of them moves half as far. Where the
# engine claims that width does not matter, the bound is 0.

FALSE_ALARM = 0.01  # probability that a healthy audit has to compute a row again
RESOLUTION = 1e-3  # least bound [logits] of a fast engine: it moves a probability by a thousandth
MIN_ROWS = 10  # fewer rows say nothing about a tail
MOST_RECHECKS = 3  # after so many unexplained rows, further ones are not computed again
WIDTHS = (2, 5, 9, 16)  # passes that a suspicious row is computed again in, one for each of ``prompt_cuts``
EXPLAINED = 2.0  # A row is explained if fresh contexts move it at least 1 / EXPLAINED as far


@dataclass(slots=True)
class WidthNoise:
    """Deviations between narrow and wide passes of healthy contexts; with ``exact`` the engine claims that there are
    none."""

    exact: bool
    deviations: list[Deviation] = field(default_factory=list)
    widths: set[int] = field(default_factory=set)

    @property
    def mean_kl(self) -> float:
        """Mean divergence over the rows [nats]."""
        return float(np.mean([each.kl for each in self.deviations])) if self.deviations else 0.0

    @property
    def contradicts_itself(self) -> bool:
        """Whether wide passes compute something else than narrow ones: a wrong kernel."""
        if self.exact:
            return any(each.rms > 0 for each in self.deviations)
        return not self.mean_kl <= MAX_MEAN_KL

    def bounds(self, n_tested: int) -> tuple[float, float] | None:
        """What rounding explains if ``n_tested`` rows are compared [logits]: a row's deviation, and the gap between an
        emitted token and the argmax; None of too few rows."""
        if self.exact:
            return 0.0, 0.0
        if len(self.deviations) < MIN_ROWS:
            return None
        rms, swing = ([getattr(each, name) for each in self.deviations] for name in ("rms", "swing"))
        return max(RESOLUTION, tail_bound(rms, n_tested)), max(RESOLUTION, tail_bound(swing, n_tested))

    def figures(self, n_tested: int) -> dict[str, Any]:
        """``noise`` of the JSON."""
        rms = [each.rms for each in self.deviations]
        bound, gap_bound = self.bounds(n_tested) or (None, None)
        return {
            "rows": len(rms),
            "tested": n_tested,
            "widths": sorted(self.widths),
            "median": float(np.median(rms)) if rms else None,
            "largest": max(rms, default=None),
            "bound": bound,
            "gap_bound": gap_bound,
            "mean_kl": self.mean_kl,
            "mean_kl_limit": 0.0 if self.exact else MAX_MEAN_KL,
            "argmax_flips": sum(each.flips for each in self.deviations),
            "false_alarm": 0.0 if self.exact else FALSE_ALARM,
        }


def tail_bound(sample: Sequence[float], n_tested: int, false_alarm: float = FALSE_ALARM) -> float:
    """Bound of ``n_tested`` further values with probability 1 - ``false_alarm``, from at least ``MIN_ROWS`` values."""
    ordered = np.sort(np.asarray(sample, dtype=np.float64))
    n = len(ordered)
    k = max(5, n // 10)
    threshold = float(ordered[n - k - 1])
    # The sum of k exponential excesses over their mean is half a chi-square of 2k degrees of freedom.
    # The 5 % quantile of that law over its degrees of freedom: Wilson and Hilferty 1931, within 1 % from 10 degrees on.
    spread = 1 / (9 * k)
    low = (1 - spread - 1.6449 * math.sqrt(spread)) ** 3
    mean = float((ordered[n - k :] - threshold).mean()) / low
    share = k / n * max(1, n_tested) / false_alarm
    return max(float(ordered[-1]), threshold + mean * max(0.0, math.log(share)))


@dataclass(slots=True)
class Judge:
    """Tells ties from defects, given the target and the ``bounds`` of its ``WidthNoise``."""

    model: Model
    bounds: tuple[float, float] | None
    branches: bool = False  # whether the contexts that are judged take branching drafts
    ties: list[Observation] = field(default_factory=list)  # tokens unlike plain decoding's, where rounding explains it
    defects: list[Defect] = field(default_factory=list)  # the first unexplained row of each prompt and way of drafting
    n_rechecked: int = 0  # suspicious rows that were computed again
    n_explained: int = 0  # those of them that fresh contexts move as well

    def judge(self, observations: Iterable[Observation]) -> Judge:
        """Add what they show to ties and defects, nothing without bounds; returns itself."""
        if self.bounds is None:
            return self
        broken = set()
        for seen in observations:
            answer = seen.arm, seen.plain.name
            if answer in broken:
                continue
            if not seen.within(*self.bounds) and not self._explained(seen, *self.bounds):
                broken.add(answer)
                self.defects.append(self._defect(seen, *self.bounds))
            elif seen.differs:
                self.ties.append(seen)
        return self

    def _explained(self, seen: Observation, bound: float, gap_bound: float) -> bool:
        """Whether fresh contexts move the row as well, one for each of ``WIDTHS``."""
        if self.model.capabilities.batch_invariant or self.n_rechecked - self.n_explained >= MOST_RECHECKS:
            return False
        self.n_rechecked += 1
        answer, n_rows, branches, moved = seen.plain, seen.position + 1, self.branches, []
        for width, lengths in zip(WIDTHS, prompt_cuts(len(answer.prompt) - 1), strict=True):
            *_, last = wide_passes(self.model, answer, n_rows, lengths, repeat(width), lambda: False, branches=branches)
            moved.append(last[-1])
        rms, swing = (EXPLAINED * max(getattr(each, name) for each in moved) for name in ("rms", "swing"))
        explained = seen.within(max(bound, rms), max(gap_bound, swing))
        self.n_explained += explained
        return explained

    def _defect(self, seen: Observation, bound: float, gap_bound: float) -> Defect:
        position, rms = seen.position, seen.deviation.rms
        details = {"deviation": rms, "bound": bound, "gap": seen.gap, "gap_bound": gap_bound}
        evidence = (
            f"the row computed for it lies {rms:.3g} logits from that of the same text in a fresh memory "
            f"(rounding explains {bound:.3g})"
        )
        if seen.differs:
            plain = seen.plain.rows[position].best
            details |= {"plain": plain, "said": seen.token}
            said = f"{in_words(self.model, seen.token)} is said where plain decoding says "
            said += f"{in_words(self.model, plain)}, {seen.gap:.3g} logits above it"
            # Of some answers of several at a time no rows are known.
            evidence = f"{said}; {evidence}" if rms else f"{said} (rounding bridges {gap_bound:.3g})"
        return Defect("row", seen.arm, seen.plain.name, position, evidence, details)
