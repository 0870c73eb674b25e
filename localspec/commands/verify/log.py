"""What an audit notes down while it runs: figures of each way of drafting, rows to be judged, and defects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from localspec.commands.verify.plain import AuditStopped, PlainAnswer
from localspec.commands.verify.rows import Deviation
from localspec.errors import line_of

DefectKind = Literal["kernel", "row", "decision", "memory", "law", "engine"]


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
    details: dict[str, Any] = field(default_factory=dict)


class DefectFound(Exception):
    """A defect that ends the answer it was found in."""

    def __init__(self, defect: Defect) -> None:
        super().__init__(defect.evidence)
        self.defect = defect


@dataclass(frozen=True, slots=True)
class Observation:
    """A row that the running system computed, against the same row of the plain answer.

    Attributes:
        arm: how it was drafted.
        plain: the plain answer.
        position: of the token that the row predicts.
        deviation: of the row.
        token: what was emitted there; -1 where only the row was looked at.
    """

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
        return self.token >= 0 and self.token != self.plain.tokens[self.position]


@dataclass(slots=True)
class ArmTally:
    """The answers of one way of drafting, added up: an entry of ``arms[]``, see ``result``.

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

    def tally(self, arm: str, *, sampled: bool) -> ArmTally:
        """The figures of a way of drafting, to be added to."""
        return self.arms.setdefault((arm, sampled), ArmTally(arm, sampled, largest_deviation=None if sampled else 0.0))

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
