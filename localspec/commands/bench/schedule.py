"""Which answer comes next, and when it is enough: modes, turns, narrow intervals, a time budget."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from localspec.commands.bench.statistics import Values, estimate, range_level
from localspec.commands.questions import Question


@dataclass(frozen=True, slots=True)
class Mode:
    """How thorough a run is.

    Attributes:
        name: ``quick``, ``default`` or ``full``.
        arms: what is measured where no arm is named.
        max_tokens: longest answer.
        minutes: the time budget, loading included; None: none.
        repeats: most repeats of a question.
        tolerance: half-width of the overall interval of every speed-up, relative, that is narrow enough.
        least_answers: how many questions a time budget should suffice for, if need be with shorter answers.
    """

    name: str
    arms: tuple[str, ...]
    max_tokens: int
    minutes: float | None
    repeats: int
    tolerance: float
    least_answers: int = 0


QUICK = Mode("quick", ("plain", "auto"), 64, 2.0, 3, 0.05, least_answers=9)
DEFAULT = Mode("default", ("plain", "auto"), 128, 15.0, 3, 0.03)
FULL = Mode("full", ("plain", "auto", "1", "2", "4", "8"), 256, None, 5, 0.02)

LEAST_TOKENS = 24
"""A draft model is not asked before an answer has some tokens, so shorter answers would say nothing."""

SLICE_TOKENS = 4
"""How far an arm goes before the next has its turn. Other programs take the CPU in bursts of a second or less: with
slices of 16 tokens, a second on a laptop, passes of one token still differed by 5 % (standard deviation) between two
arms of a question, with 4 by 2 to 4 %, and with whole answers by 11 to 15 %. A pass reads all of the weights, so
nothing that an arm leaves in the CPU's caches outlives its first."""

READING = 0.8
"""Time to read a prompt, guessed before any was read, as a share of the time that an answer takes plainly."""


def affordable_tokens(mode: Mode, seconds: float, n_answers: int, tokens_per_second: float) -> int:
    """The longest answers for which a time budget suffices.

    Args:
        mode: says for how many questions it should.
        seconds: what is left.
        n_answers: arms times engines.
        tokens_per_second: expected speed of plain decoding.
    """
    if not mode.least_answers:
        return mode.max_tokens
    each = seconds / mode.least_answers / (n_answers + READING)
    return max(LEAST_TOKENS, min(mode.max_tokens, int(each * tokens_per_second)))


@dataclass(frozen=True, slots=True)
class Block:
    """All arms on one question, once.

    Attributes:
        repeat: from 0.
        index: place in the repeat, from 0.
        question: what is asked.
        ends_cycle: whether every category that still has questions has had its turn.
    """

    repeat: int
    index: int
    question: Question
    ends_cycle: bool


def blocks(questions: Sequence[Question], repeats: int) -> Iterator[Block]:
    """The blocks of a run, in order.

    Args:
        questions: categories in turn; see ``in_turns``.
        repeats: most repeats.
    """
    for repeat in range(repeats):
        seen: set[str] = set()
        for index, question in enumerate(questions):
            seen.add(question.category)
            following = questions[index + 1].category if index + 1 < len(questions) else None
            ends = following is None or following in seen
            if ends:
                seen = set()
            yield Block(repeat, index, question, ends)


def turns(n: int, block: Block) -> list[int]:
    """The order of n arms in a block: it shifts by one from question to question, and is reversed in every other
    repeat, so that what drifts favours none of them."""
    order = [(block.index + i) % n for i in range(n)]
    return order[::-1] if block.repeat % 2 else order


class _Answer(Protocol):
    @property
    def n_tokens(self) -> int: ...
    @property
    def finish_reason(self) -> str | None: ...
    def advance(self, n_tokens: int | None) -> None: ...


def take_turns(answers: Sequence[_Answer], slice_tokens: int) -> Iterator[int]:
    """Bring answers to their ends, a slice at a time: the one with the fewest tokens is always next.

    So all are as far, and end at about the same time, whichever decodes faster.

    Args:
        answers: in their order.
        slice_tokens: how far each goes at a time; 0: one after the other, each as a whole.

    Yields:
        The index of the answer that is next.
    """
    left = list(range(len(answers)))
    while left:
        at = min(left, key=lambda i: answers[i].n_tokens) if slice_tokens else left[0]
        yield at
        answers[at].advance(slice_tokens or None)
        left = [i for i in left if answers[i].finish_reason is None]


def is_tight(speedups: Sequence[Values], tolerance: float) -> bool:
    """Whether every arm's overall speed-up is known well enough; each has to have a 95 % interval for that."""
    found = [estimate(values) for values in speedups]
    return bool(found) and all(each is not None and each.is_firm and each.half_width <= tolerance for each in found)


class Clock:
    """How long a run will still take.

    Args:
        began: when, on a monotonic clock.
        seconds: the budget; None: none.
        n_blocks: blocks in all.
    """

    def __init__(self, began: float, seconds: float | None, n_blocks: int) -> None:
        self.deadline = None if seconds is None else began + seconds
        self.n_blocks = n_blocks
        self._took: list[float] = []

    def add(self, seconds: float) -> None:
        """A block took so long."""
        self._took.append(seconds)

    def has_time(self, now: float) -> bool:
        """Whether another block fits; the first one is always begun."""
        if self.deadline is None or not self._took:
            return True
        return now + statistics.fmean(self._took[-8:]) <= self.deadline

    def left(self, now: float, n_done: int) -> float | None:
        """Seconds until the end, None where nothing is known yet."""
        by_budget = None if self.deadline is None else max(0.0, self.deadline - now)
        if not self._took:
            return by_budget
        by_work = statistics.fmean(self._took[-16:]) * (self.n_blocks - n_done)
        return by_work if by_budget is None else min(by_work, by_budget)


def needed_for_an_interval() -> int:
    """Questions that a 95 % interval takes."""
    return next(n for n in range(2, 20) if range_level(n) >= 0.95)
