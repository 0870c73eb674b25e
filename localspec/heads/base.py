"""Interface of a draft head, trained here or published."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Context, FloatArray

if TYPE_CHECKING:
    from localspec.backends.base import Model


STATE = "layer:0"
"""The hidden state of a head's model that a chained head continues."""


class DraftHead(ABC):
    """A loaded head.

    It reads rows: that at place p is made of the target's states after the p-th token and of the token after that, and
    leads to a guess for place p + 2.

    Attributes:
        kind: key of ``drafters.HEAD_DRAFTERS``.
        taps: the hidden states of the target that it reads, in the order in which ``true_rows`` takes them.
        token_map: the target's token for each column of its logits, ascending [n_out].
        steps: how many tokens ahead it guesses.
        rate: share of places at which its first token is right, by its file; None where that says nothing.
        model: its layer and output matrix, on an engine; fed by ``Context.decode_floats``.
        has_zeroth: whether its memory begins with a row of the first token, with zeros for states.
    """

    kind: str
    taps: tuple[str, ...]
    token_map: npt.NDArray[np.integer]
    steps: int
    model: Model
    rate: float | None = None
    has_zeroth: bool = False

    @abstractmethod
    def new_context(self, n_ctx: int, *, n_threads: int | None = None) -> Context:
        """A memory for a text of n_ctx tokens; a chained head's returns its states as ``hidden[STATE]``."""

    @abstractmethod
    def window(self, n_ctx: int) -> int:
        """Most states that wait to be read in a context of n_ctx rows; after more were missed, its memory begins
        anew."""

    @abstractmethod
    def true_rows(self, context: Context, states: FloatArray, tokens: Sequence[int]) -> FloatArray:
        """Rows of states that the target computed, for ``Context.decode_floats`` [n, n_embd].

        Args:
            context: of this head; unchanged.
            states: the tapped ones side by side [n, n_taps * width].
            tokens: the tokens that came after [n].
        """

    @abstractmethod
    def chained_rows(self, state: FloatArray, tokens: Sequence[int]) -> FloatArray:
        """Rows of the head's own states and of the tokens drafted after them."""

    @abstractmethod
    def close(self) -> None:
        """Free the weights; safe to call twice. Contexts must be closed first."""
