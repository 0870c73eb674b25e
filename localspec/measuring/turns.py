"""The arms' answers to a question, in turns.

Other programs, heat and clock move a machine's speed by more than most speed-ups, and they move it from one second to
the next. Arms that answer in slices, a few passes of one and a few of the other, meet the same machine. For that each
has contexts of its own; the weights are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

from localspec.backends.base import shared_prefix
from localspec.measuring.answer import Sample, TimedAnswer
from localspec.measuring.arms import Arm
from localspec.measuring.schedule import Block
from localspec.measuring.subject import EngineUnderTest
from localspec.sampling.sampling import SamplingParams

SLICE_TOKENS = 4
"""How far an arm goes before the next has its turn. Other programs take the CPU in bursts of a second or less: with
slices of 16 tokens, a second on a laptop, passes of one token still differed by 5 % (standard deviation) between two
arms of a question, with 4 by 2 to 4 %, and with whole answers by 11 to 15 %. A pass reads all of the weights, so
nothing that an arm leaves in the CPU's caches outlives its first."""

Place = tuple[int, EngineUnderTest, Arm]
"""Place in the order of a block, and what answers there."""


def places(subjects: Sequence[EngineUnderTest], block: Block) -> list[Place]:
    """Every arm of every subject, in the order of a block."""
    everything = [(subject, arm) for subject in subjects for arm in subject.arms]
    return [(place, *everything[i]) for place, i in enumerate(turns(len(everything), block))]


def turns(n: int, block: Block) -> list[int]:
    """The order of n arms in a block: it shifts by one from question to question, and is reversed in every other
    repeat, so that what drifts favours none of them."""
    order = [(block.index + i) % n for i in range(n)]
    return order[::-1] if block.repeat % 2 else order


def measure(
    block: Block,
    wanted: Sequence[Place],
    params: SamplingParams,
    slice_tokens: int,
    report: Callable[[TimedAnswer, float], None] = lambda answer, fraction: None,
) -> list[Sample]:
    """Measure one question in several arms; it counts as a whole or not at all.

    Args:
        block: the question.
        wanted: what answers.
        params: how to sample.
        slice_tokens: see ``take_turns``.
        report: called before each slice, with whose it is and how much is done at least.

    Raises:
        Cancelled: a subject was stopped.
    """
    asked = {each: each.read(block.question, params) for each in dict.fromkeys(subject for _, subject, _ in wanted)}
    with ExitStack() as stack:
        answers = []
        for place, subject, arm in wanted:
            answers.append(TimedAnswer(subject, arm, asked[subject], params, (block.repeat, place)))
            stack.callback(answers[-1].close)
        budget = len(answers) * (params.max_tokens or subject.llm.n_ctx)
        for i in take_turns(answers, slice_tokens):
            report(answers[i], min(1.0, sum(each.n_tokens for each in answers) / budget))
    samples = [answer.sample() for answer in answers]
    return (
        _parted(answers, samples, {subject.llm.backend_name: subject for subject in asked})
        if params.greedy
        else samples
    )


def _parted(
    answers: Sequence[TimedAnswer], samples: Sequence[Sample], subjects: Mapping[str, EngineUnderTest]
) -> list[Sample]:
    """The samples with where greedy answers part from their engine's plain one, and how near the two tokens were."""
    plain = {answer.backend: answer.tokens for answer in answers if answer.arm.is_plain}
    found = []
    for answer, sample in zip(answers, samples, strict=True):
        own, other = answer.tokens, plain.get(answer.backend, answer.tokens)
        at = shared_prefix(own, other)
        if at < min(len(own), len(other)):
            row = subjects[answer.backend].row_behind([*answer.prompt, *own[:at]])
            sample = replace(sample, parted_at=at, parted_by=round(abs(float(row[own[at]] - row[other[at]])), 4))
        found.append(sample)
    return found


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
