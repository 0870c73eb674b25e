"""What of an answer needs a pass of the target, apart from who runs the pass.

The steps of an answer are a generator: it yields the pass that it waits for, and is sent what the pass returns. One
answer alone has its passes run here, one after the other; those of several answers can be run as one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, TypeVar

from localspec.backends.base import Context
from localspec.backends.forward import Forward
from localspec.spec_decode.rounds import Round

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TargetPass:
    """A pass of the target that the next step waits for.

    Attributes:
        tokens: what comes next in the target's memory.
        logits: which rows are wanted, see ``Context.decode``.
        parents: where they branch, which of them each follows, see ``Context.decode_tree``; all rows are wanted then.
    """

    tokens: Sequence[int]
    logits: Literal["all", "last", "none"] = "all"
    parents: Sequence[int] | None = None

    def run(self, target: Context) -> Forward:
        """Run it alone."""
        if self.parents is not None:
            return target.decode_tree(self.tokens, self.parents)
        return target.decode(self.tokens, self.logits)


Reading = Generator[TargetPass, Forward, Result]
"""Yields passes, is sent what they return, and has a result."""

Steps = Generator[TargetPass | Round, Forward | None, None]
"""The same, with a round after every pass; for a round nothing is sent."""


def read_alone(reading: Reading[Result], target: Context) -> Result:
    """Run the passes one by one; the result."""
    forward: Forward | None = None
    try:
        while True:
            wanted = next(reading) if forward is None else reading.send(forward)
            forward = wanted.run(target)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return] # what the generator returned


def rounds_alone(steps: Steps, target: Context) -> Iterator[Round]:
    """Run the passes one by one; the rounds."""
    with closing(steps):
        step = next(steps, None)
        while step is not None:
            if isinstance(step, Round):
                yield step
                step = next(steps, None)
            else:
                step = steps.send(step.run(target))
