"""What of an answer needs a pass of a model, apart from who runs the pass.

The steps of an answer are a generator: it yields the pass that it waits for, and is sent what the pass returns. One
answer alone has its passes run here, one after the other; those of several answers can be run as one.

Where a device computes a pass while its caller goes on, a step may come before it that only begins it (``Launch``):
what a round leaves to be done is done meanwhile, and takes no time of the answer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from localspec.backends.base import Context, Forward, Wanted
from localspec.spec_decode.rounds import Draft, Round

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TargetPass:
    """A pass of the target that the next step waits for.

    Attributes:
        tokens: what comes next in the target's memory.
        logits: which rows are wanted, see ``Context.decode``.
        parents: where they branch, which of them each follows, see ``Context.decode_tree``; all rows are wanted then.
        draft: the draft that the tokens end with, if the last ones of it may be left out: then the pass has fewer rows.
            A draft token that was sampled may not, nor what comes before it: see ``drafters.base``.
        n_after: of a prompt, how many tokens are to be read after these.
        n_best: how many of the largest logits of each row are enough, see ``Context.decode_best``; 0 wants whole rows.
    """

    tokens: Sequence[int]
    logits: Wanted = "all"
    parents: Sequence[int] | None = None
    draft: Draft | None = None
    n_after: int = 0
    n_best: int = 0

    def run(self, target: Context | None) -> Forward:
        """Run it alone."""
        assert target is not None
        if self.parents is not None:
            return target.decode_tree(self.tokens, self.parents)
        if self.n_best:
            return target.decode_best(self.tokens, self.n_best)
        return target.decode(self.tokens, self.logits)

    def runs_in(self, target: Context) -> Context:
        """The context that computes it."""
        return target

    @property
    def n_needed(self) -> int:
        """How many of the tokens, from the first, cannot be left out."""
        if self.draft is None:
            return len(self.tokens)
        sampled = [i for i, token in enumerate(self.draft) if token.dist is not None]
        return len(self.tokens) - len(self.draft) + (sampled[-1] + 1 if sampled else 0)


@dataclass(slots=True)
class DraftPass:
    """A pass of a draft model that the next step waits for.

    Attributes:
        context: the draft model's.
        tokens: what comes next in it.
        logits: which rows are wanted, see ``Context.decode``.
        n_best: as of a ``TargetPass``.
        ms: what it took; of a pass that others shared, this one's part.
    """

    context: Context
    tokens: Sequence[int]
    logits: Wanted
    n_best: int = 0
    ms: float = 0.0

    def run(self, target: Context | None = None) -> Forward:
        """Run it alone."""
        started = time.perf_counter()
        if self.n_best and self.logits != "none":
            forward = self.context.decode_best(self.tokens, self.n_best, self.logits)
        else:
            forward = self.context.decode(self.tokens, self.logits)
        self.ms = (time.perf_counter() - started) * 1e3
        return forward

    def runs_in(self, target: Context) -> Context:
        """The context that computes it."""
        return self.context


@dataclass(frozen=True, slots=True)
class Launch:
    """The pass that comes next may begin: until it is asked for, there are things to do that do not need it.

    Whoever cannot begin it sends back nothing.

    Attributes:
        wanted: the pass.
    """

    wanted: TargetPass | DraftPass

    def run(self, target: Context | None = None) -> Forward:
        """Nothing: the pass is run when it is asked for."""
        return NOTHING

    def run_beside(self, target: Context, go_on: Callable[[], object]) -> Forward:
        """Run the pass, and call a function once it has begun; also where it fails at once."""
        context, is_left = self.wanted.runs_in(target), True

        def meanwhile() -> None:
            nonlocal is_left
            if is_left:
                is_left = False
                go_on()

        context.meanwhile = meanwhile
        try:
            return self.wanted.run(target)
        finally:
            context.meanwhile = None
            meanwhile()


AnyPass = TargetPass | DraftPass | Launch

NOTHING = Forward(np.empty((0, 0), dtype=np.float32))
"""What nobody waits for."""

Reading = Generator[AnyPass, Forward, Result]
"""Yields passes, is sent what they return, and has a result."""

Drafting = Generator[DraftPass, Forward, Result]
"""The same, of draft models only."""

Steps = Generator[AnyPass | Round, Forward | None, None]
"""The same, with the rounds that the passes make; for a round nothing is sent."""


def after(steps: Steps, forward: Forward | None = None) -> AnyPass | Round | None:
    """The next step; None at the end.

    Args:
        steps: they go on.
        forward: what the pass returned that they wait for, if they do.
    """
    try:
        return steps.send(forward)
    except StopIteration:
        return None


def left_to_caller(steps: Steps, wanted: AnyPass) -> Reading[AnyPass | Round | None]:
    """Have the pass run that the steps wait for; the next step."""
    try:
        forward = yield wanted
    except Exception as error:
        return thrown(steps, error)
    return after(steps, forward)


def rounds_alone(steps: Steps, target: Context) -> Iterator[Round]:
    """Run the passes one by one; the rounds."""
    with closing(steps):
        step = after(steps)
        while step is not None:
            if isinstance(step, Round):
                yield step
                step = after(steps)
            else:
                try:
                    forward = step.run(target)
                except BaseException as error:
                    step = thrown(steps, error)
                else:
                    step = after(steps, forward)


def read_alone(reading: Reading[Result] | Drafting[Result], target: Context | None = None) -> Result:
    """Run the passes one by one; the result."""
    with closing(reading):
        try:
            wanted = next(reading)
            while True:
                try:
                    if isinstance(wanted, Launch) and target is not None:
                        forward = wanted.run_beside(target, lambda: reading.send(NOTHING))
                    else:
                        forward = wanted.run(target)
                except BaseException as error:
                    wanted = reading.throw(error)
                else:
                    wanted = reading.send(forward)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return] # what the generator returned


def given(steps: Steps, take: Callable[[Round], None]) -> Reading[None]:
    """The same passes, every round given to a function at once."""
    with closing(steps):
        step = after(steps)
        while step is not None:
            if isinstance(step, Round):
                take(step)
                step = after(steps)
            else:
                step = yield from left_to_caller(steps, step)


def overlapping(steps: Steps, target: Context, finish: Callable[[Round], None]) -> Steps:
    """The same steps, each round finished and handed on while a device computes the first pass of the next.

    Where that pass is none that computes by itself, the round comes before it.

    Args:
        steps: of an answer.
        target: what its passes run in.
        finish: what is left to be done of a round before it is handed on.
    """
    last: Round | None = None
    with closing(steps):
        try:
            step = after(steps)
            while step is not None:
                if isinstance(step, Round):
                    last = step
                    step = after(steps)
                    continue
                if last is not None and not isinstance(step, Launch):
                    if step.runs_in(target).overlaps:
                        yield Launch(step)
                    round_, last = last, None
                    finish(round_)
                    yield round_
                step = yield from left_to_caller(steps, step)
        except GeneratorExit:
            last = None  # nobody takes it any more
            raise
        finally:
            if last is not None:
                finish(last)
                yield last


def thrown(steps: Steps, error: BaseException) -> AnyPass | Round | None:
    """The next step, where the pass that they wait for failed."""
    try:
        return steps.throw(error)
    except StopIteration:
        return None
