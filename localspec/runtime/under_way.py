"""Answers under way beside others, and requests whose turn has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from localspec.backends.base import ContextState, Forward
from localspec.runtime.jobs import Job
from localspec.runtime.request import AnswerRequest
from localspec.runtime.stream import Reply
from localspec.spec_decode.passes import AnyPass, Reading, TargetPass
from localspec.spec_decode.thinking import ThinkingReader


@dataclass(eq=False, slots=True)
class OpenAnswer:
    """An answer under way.

    Attributes:
        reading: its steps.
        sequence: where in the memory it is made.
        needs: room that it is reckoned with [tokens].
        wanted: the pass that it waits for.
        n_fed: of the pass's tokens, how many it has had already.
        forwards: what they returned.
        served: number of the pass that it last had rows in.
        aside: what its sequence held, where that had to make room; else None.
    """

    job: Job
    reading: Reading[Reply]
    sequence: int
    needs: int
    wanted: AnyPass
    n_fed: int = 0
    forwards: list[Forward] = field(default_factory=list)
    served: int = 0
    aside: ContextState | list[int] | None = None

    @property
    def decodes(self) -> bool:
        """Whether its next pass makes tokens of the answer; else it reads its prompt."""
        return self.target_pass.logits == "all"

    @property
    def target_pass(self) -> TargetPass:
        """The pass of the target that it waits for, its draft being made."""
        assert isinstance(self.wanted, TargetPass)
        return self.wanted

    @property
    def reaches(self) -> list[float]:
        """For each draft token that may be left out, how likely it and those before it are accepted."""
        wanted = self.target_pass
        reaches: list[float] = []
        reach = 1.0
        for i, token in enumerate(wanted.draft or ()):
            reach *= token.expected
            if 1 + i >= wanted.n_needed:
                reaches.append(reach)
        return reaches


@dataclass(eq=False, slots=True)
class Prepared:
    """A request whose turn has come, and which waits for room."""

    job: Job
    asked: tuple[list[int], ThinkingReader | None]

    @property
    def request(self) -> AnswerRequest:
        request: AnswerRequest = self.job.request
        return request


def rank(answer: OpenAnswer | Prepared) -> tuple[int, float]:
    """Those first that are to go on, or begin, first."""
    return -answer.job.priority, answer.job.started
