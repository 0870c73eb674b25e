"""What an audit notes down: observations that have to be judged, differences, and defects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from localspec.commands.verify.rows import Deviation, KeptRow

Kind = Literal["kernel", "row", "decision", "memory", "law", "engine"]


@dataclass(frozen=True, slots=True)
class Path:
    """What the target says when it is alone: decoded token by token in a memory that is never rolled back.

    Attributes:
        name: the prompt's id.
        prompt: its tokens.
        answer: the greedy answer.
        rows: the row behind each token of the answer.
        ignore_eos: whether the answer goes on behind end tokens.
    """

    name: str
    prompt: list[int]
    answer: list[int]
    rows: list[KeptRow]
    ignore_eos: bool

    @property
    def second_best(self) -> list[int]:
        """At each place of the answer, the token that came closest to being said."""
        return [int(row.ids[min(1, len(row.ids) - 1)]) for row in self.rows]

    def before(self, position: int) -> list[int]:
        """All tokens before the answer's token at ``position``."""
        return self.prompt + self.answer[:position]


@dataclass(frozen=True, slots=True)
class Observation:
    """A row that the running system computed, against the same row of the path.

    Attributes:
        position: of the token that the row predicts, in the answer.
        token: what was said there; None where only the row was looked at.
    """

    path: Path
    position: int
    deviation: Deviation
    token: int | None = None

    @property
    def gap(self) -> float:
        """How far the token lies under the argmax of the one-token pass, in logits."""
        return 0.0 if self.token is None else self.path.rows[self.position].gap(self.token)

    @property
    def differs(self) -> bool:
        """Whether plain decoding says something else here."""
        return self.token is not None and self.token != self.path.answer[self.position]


@dataclass(slots=True)
class Run:
    """One answer, or one series of probes, in the running system.

    Attributes:
        arm: who drafted and how far, in words.
        observations: in order; of rows on the path only.
        sampled: at a temperature, so that there is no path to compare with.
        widths: of the target's passes.
        rejected_at: positions in a draft, from 1, at which a guess was rejected.
    """

    arm: str
    prompt: str
    sampled: bool = False
    observations: list[Observation] = field(default_factory=list)
    n_tokens: int = 0
    n_rounds: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    widths: set[int] = field(default_factory=set)
    rejected_at: set[int] = field(default_factory=set)
    complete: bool = False

    @property
    def largest(self) -> float:
        """The largest deviation of a row, in logits."""
        return max((each.deviation.rms for each in self.observations), default=0.0)

    @property
    def differences(self) -> list[Observation]:
        """Where something else was said than in plain decoding."""
        return [each for each in self.observations if each.differs]


@dataclass(frozen=True, slots=True)
class Defect:
    """Something that rounding does not explain.

    Attributes:
        kind: ``kernel`` (wide passes contradict narrow ones), ``row`` (a row of logits is not that of its text),
            ``decision`` (a token is not what its row says), ``memory`` (a memory does not hold what it should),
            ``law`` (tokens do not follow the target's distribution), ``engine`` (a pass failed).
        arm, prompt, position: where; position counts the tokens of the answer from 0.
        evidence: one sentence.
        details: its figures.
    """

    kind: Kind
    arm: str
    evidence: str
    prompt: str | None = None
    position: int | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {
            "kind": self.kind,
            "arm": self.arm,
            "prompt": self.prompt,
            "position": self.position,
            "evidence": self.evidence,
            "details": self.details,
        }


class Stopped(Exception):
    """The audit was interrupted."""


class Found(Exception):
    """A defect that ends the answer it was found in."""

    def __init__(self, defect: Defect) -> None:
        super().__init__(defect.evidence)
        self.defect = defect


@dataclass(frozen=True, slots=True)
class Tie:
    """A difference from plain decoding that rounding explains."""

    run: Run
    observation: Observation

    def as_dict(self, text: Any) -> dict[str, Any]:
        """For the report; ``text`` turns a token into text."""
        seen = self.observation
        plain, said = seen.path.answer[seen.position], seen.token
        return {
            "arm": self.run.arm,
            "prompt": self.run.prompt,
            "position": seen.position,
            "plain": {"id": plain, "text": text(plain)},
            "speculative": {"id": said, "text": text(said)},
            "gap": seen.gap,
            "deviation": seen.deviation.rms,
        }


def numbers_text(numbers: Sequence[int]) -> str:
    """``2-5, 8``: a set of numbers in few characters."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
