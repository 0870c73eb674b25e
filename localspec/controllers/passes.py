"""Which passes are timed: of a whole model over tokens, of a head over rows, of a target's first layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from localspec.backends.base import Context, FloatArray, Model
from localspec.backends.forward import Wanted
from localspec.backends.heads import Head
from localspec.backends.published_heads import EngineHead
from localspec.backends.trust import CHECK_TEXT


@dataclass(frozen=True, slots=True)
class PassKind:
    """A kind of pass that is timed; this one: a model over tokens."""

    def context(self, model: Model, n_ctx: int) -> Context:
        """A context for such passes."""
        return model.new_context(n_ctx)

    def tokens(self, model: Model) -> list[int]:
        """The tokens that the passes read: an ordinary text."""
        return model.tokenize(CHECK_TEXT, add_special=True) or [0]

    def feed(self, context: Context, tokens: Sequence[int], logits: Wanted = "all") -> None:
        """Run one pass; ``logits`` as in ``Context.decode``."""
        context.decode(tokens, logits)


@dataclass(frozen=True, slots=True)
class HeadPasses(PassKind):
    """Passes of a head over rows of floats.

    Attributes:
        hidden: the states that they return.
    """

    hidden: tuple[str, ...]

    def context(self, model: Model, n_ctx: int) -> Context:
        return model.new_context(n_ctx, hidden=self.hidden)

    def tokens(self, model: Model) -> list[int]:
        return [0]  # names of rows; which does not matter

    def feed(self, context: Context, tokens: Sequence[int], logits: Wanted = "all") -> None:
        context.decode_floats(_rows(len(tokens), context.model.n_embd), tokens, logits)


@dataclass(frozen=True, slots=True)
class BlockPasses(PassKind):
    """Passes of a block drafter: over a number of target states, then over a whole block.

    Attributes:
        head: the drafter.
    """

    head: EngineHead

    def context(self, model: Model, n_ctx: int) -> Context:
        return self.head.new_context(n_ctx)

    def tokens(self, model: Model) -> list[int]:
        return [0]  # names of rows; which does not matter

    def feed(self, context: Context, tokens: Sequence[int], logits: Wanted = "all") -> None:
        n = context.n_past + len(tokens)
        context.decode_floats(_rows(len(tokens), context.model.n_embd), tokens, "none")
        if logits != "none":
            self.head.block_logits(context, tokens[-1], self.head.steps)
            context.truncate(n)


@dataclass(frozen=True, slots=True)
class ChainedPasses(HeadPasses):
    """Passes of a head that reads true rows: building the rows from states, computing them, and the last row's logits.

    Attributes:
        head: the head.
        n_embd: width of the target's states.
    """

    head: Head
    n_embd: int

    def feed(self, context: Context, tokens: Sequence[int], logits: Wanted = "all") -> None:
        states = _rows(len(tokens), len(self.head.taps) * self.n_embd)
        rows = self.head.true_rows(context, states, tokens)
        context.decode_floats(rows, tokens, "none" if logits == "none" else "last")


@dataclass(frozen=True, slots=True)
class EarlyExits(PassKind):
    """Passes of a target's first layers over tokens, then of an output matrix over the last state.

    Attributes:
        target: the target.
        tap: the state that they end with, as ``Context.hidden`` names it.
        output: a context of the output matrix, which is left empty.
    """

    target: Model
    tap: str
    output: Context

    def context(self, model: Model, n_ctx: int) -> Context:
        return self.target.new_context(n_ctx, hidden=(self.tap,))

    def tokens(self, model: Model) -> list[int]:
        return WHOLE.tokens(self.target)

    def feed(self, context: Context, tokens: Sequence[int], logits: Wanted = "all") -> None:
        context.decode_first_layers(tokens, int(self.tap.removeprefix("layer:")) + 1)
        if logits != "none":
            self.output.decode_floats(_rows(1, self.output.model.n_embd), [0])
            self.output.truncate(0)


WHOLE = PassKind()


@lru_cache(maxsize=32)
def _rows(n: int, n_embd: int) -> FloatArray:
    return np.random.default_rng(0).standard_normal((n, n_embd), dtype=np.float32)
