"""What an audit finds: the log it keeps while it runs, and its result, a verdict in one sentence and one JSON object.

The object of ``verify --json`` (``"format": "localspec-audit", "version": 1``; a field is never renamed or removed
without another version):

========================= =============================================================================================
``lossless``              true, false, or null where the audit was interrupted before it found a defect
``verdict``               the sentence that the report begins with
``interrupted``           Ctrl-C ended the audit early: everything below is what was checked until then
``model, backend``        what was audited; ``engine`` and ``draft`` (the names) with it
``exact``                 whether the engine claims that the width of a pass changes nothing, so that the bound is 0
``settings``              ``prompts, tokens`` (longest answer), ``draft_length, longest_draft``, ``sampling`` (the chain
                          of the laws)
``seconds``               wall time of the audit, without loading
``noise``                 ``rows, widths, median, largest, bound, gap_bound`` (logits), ``mean_kl, mean_kl_limit``
                          (nats), ``argmax_flips, false_alarm``; ``tested``: rows held against the bound
``arms[]``                ``arm, sampled, answers, complete, tokens, rounds, drafted, accepted, widths, rejected_at,
                          differences, largest_deviation``: one for each way of drafting
``memory``                ``rollbacks, restored, pairs, bitwise, largest_deviation`` or null
``sensitivity``           ``tries, median, smallest, found``: rows of contexts that are wrong on purpose, and the share
                          of them over the bound; or null
``verification_law``      ``draws, largest_excess, worst_cell, detectable_error`` and the fields of ``decoding_law``; or
                          null
``samples``               ``drawn, sent, impossible, evidence_nats, threshold_nats, worst, detectable_error,
                          false_alarm``: the samples of drafters against the laws they were drawn from; or null
``thinking``              ``answers, closed``: answers with a budget for thinking, and blocks closed by it; or null
``several``               ``sequences, reason, answers, tokens, drafted, accepted, passes, largest_deviation, bound``:
                          answers made at a time; ``reason`` where there were none; or null
``decoding_law``          ``tokens, impossible_tokens, evidence_nats, threshold_nats, strongest_suspicion, false_alarm,
                          power`` (by suspicion), or null
``ties[]``                ``arm, prompt, position, plain, speculative`` (``id, text``), ``gap, deviation``
``rechecked``             ``rows, explained``: suspicious rows that were computed again from nothing
``defects[]``             ``kind, arm, prompt, position, evidence, details``; see ``Defect``
========================= =============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from localspec.commands.verify.plain import AuditStopped, Deviation, PlainAnswer
from localspec.errors import line_of

FORMAT, VERSION = "localspec-audit", 1

DefectKind = Literal["kernel", "row", "decision", "memory", "law", "engine"]
Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Defect:
    """Something that rounding does not explain.

    Attributes:
        kind: ``kernel`` (wide passes contradict narrow ones), ``row`` (a row of logits is not that of its text),
            ``decision`` (a token is not what its row says), ``memory`` (a context does not hold what it should),
            ``law`` (tokens do not follow the target's distribution), ``engine`` (a pass failed).
        arm, prompt, position: where; position counts the tokens of the answer from 0.
        evidence: one sentence.
        details: its figures.
    """

    kind: DefectKind
    arm: str
    prompt: str | None
    position: int | None
    evidence: str
    details: Figures = field(default_factory=dict)


class DefectFound(Exception):
    """A defect that ends the answer it was found in."""

    def __init__(self, defect: Defect) -> None:
        super().__init__(defect.evidence)
        self.defect = defect


@dataclass(frozen=True, slots=True)
class Observation:
    """A row that the running system computed, against the row for the same position of the plain answer; ``token`` is
    what was emitted there, -1 where only the row was looked at."""

    arm: str
    plain: PlainAnswer
    position: int
    deviation: Deviation
    token: int = -1

    @property
    def gap(self) -> float:
        """How far the token lies under the argmax of the one-token pass, in logits."""
        return 0.0 if self.token < 0 else self.plain.rows[self.position].gap(self.token)

    @property
    def differs(self) -> bool:
        """Whether plain decoding has another token here."""
        return self.token >= 0 and self.token != self.plain.rows[self.position].best


@dataclass(slots=True)
class ArmTally:
    """The answers of one way of drafting, added up: an entry of ``arms[]``.

    Attributes:
        sampled: at a temperature, so that there is no plain answer to compare with.
        complete: answers that no defect broke off.
        widths: of the target's passes.
        rejected_at: positions in a draft, from 1, at which a token was rejected.
        differences: tokens that plain decoding has otherwise.
        largest_deviation: of a row, in logits; None if ``sampled``.
    """

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
    """All that was noted down so far."""

    arms: dict[tuple[str, bool], ArmTally] = field(default_factory=dict)
    observations: list[Observation] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)

    @contextmanager
    def noting(self, arm: str, prompt: str, what: str) -> Iterator[None]:
        """Note the defect that ends the block, or the failure of the engine."""
        try:
            yield
        except AuditStopped:
            raise
        except DefectFound as found:
            self.defects.append(found.defect)
        except Exception as error:
            self.defects.append(Defect("engine", arm, prompt, None, f"{what} broke off: {line_of(error)}"))

    @contextmanager
    def answering(self, arm: str, prompt: str, *, sampled: bool) -> Iterator[ArmTally]:
        """The figures of a way of drafting, for one more answer to be added to; notes as ``noting``."""
        tally = self.arms.setdefault((arm, sampled), ArmTally(arm, sampled, largest_deviation=None if sampled else 0.0))
        tally.answers += 1
        with self.noting(arm, prompt, "decoding"):
            yield tally
            tally.complete += 1


@dataclass(slots=True)
class AuditResult:
    """See the module's docstring."""

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
        """Whether the check held; None where it was not finished."""
        if self.defects:
            return False
        return None if self.interrupted else True

    @property
    def largest_deviation(self) -> float:
        """Of any row, in logits."""
        deviations = [arm.largest_deviation or 0.0 for arm in self.arms]
        return max([*deviations, self.memory["largest_deviation"] if self.memory else 0.0])

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.defects:
            first = self.defects[0]
            where = f"{first.arm}" + (f", prompt {first.prompt}" if first.prompt else "")
            where += f", token {first.position}" if first.position is not None else ""
            more = f" ({len(self.defects) - 1} more)" if len(self.defects) > 1 else ""
            return f"NOT lossless here: {where}: {first.evidence}{more}"
        n_answers = sum(arm.answers for arm in self.arms if arm.drafted)
        n_tokens = sum(arm.tokens for arm in self.arms if arm.drafted)
        if self.several and self.several["drafted"]:
            n_answers += self.several["answers"]
            n_tokens += self.several["tokens"]
        checked = (
            f"{counted(n_answers, 'answer')} with guesses, {counted(n_tokens, 'token')}, each of them the model's own"
        )
        if self.ties:
            checked += f"; {counted(len(self.ties), 'token')} where rounding decides between two that are nearly tied"
        elif self.exact:
            checked += ", to the bit"
        return f"interrupted; no defect so far: {checked}" if self.interrupted else f"lossless here: {checked}"

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        found = {"format": FORMAT, "version": VERSION, "lossless": self.lossless, "verdict": self.verdict}
        return found | asdict(self, dict_factory=_with_lists)


def _with_lists(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: sorted(value) if isinstance(value, set) else value for name, value in items}


def in_words(display: Callable[[int], str]) -> Callable[[int], str]:
    """Turns a token into words for a sentence."""
    return lambda token: f"{display(token)!r} ({token})"


def counted(n: int, noun: str) -> str:
    """``1 answer``, ``2 answers``."""
    return f"{n} {noun}" + ("" if n == 1 else "s")
