"""What drafters ask of a head, whoever made it: ours (``heads``), or one that a model is published with."""

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
"""The hidden state of a head's model that a chained head goes on from."""


class DraftHead(ABC):
    """A head, ready to draft for its target.

    It reads rows: that at place p is made of the target's states after the p-th token and of the token after that, and
    leads to a guess for place p + 2.

    Attributes:
        kind: what drafts with it; see ``spec_decode.drafters.parallel.HEAD_DRAFTERS``.
        taps: the hidden states of the target that it reads, in the order in which ``true_rows`` takes them.
        token_map: the target's token for each column of its logits, ascending [n_out].
        steps: how many tokens ahead it guesses.
        rate: share of places at which its first token is right, so far as its file says; else None.
        model: its layer and output matrix, on an engine; fed by ``Context.decode_floats``.
        has_zeroth: whether its memory begins with a row of the first token, and zeros in the place of states.
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
        """A memory for a text of n_ctx tokens; a chained head's returns the state that it goes on from, as STATE."""

    @abstractmethod
    def window(self, n_ctx: int) -> int:
        """Of the last states of a text, how many wait to be read; where more were missed, its memory begins anew.

        Args:
            n_ctx: room of its context [rows].
        """

    @abstractmethod
    def true_rows(self, context: Context, states: FloatArray, tokens: Sequence[int]) -> FloatArray:
        """Rows of states that the target computed, for ``Context.decode_floats``.

        Args:
            context: of this head; unchanged.
            states: the tapped ones side by side [n, n_taps * width].
            tokens: the tokens that came after [n].

        Returns:
            [n, n_embd]
        """

    @abstractmethod
    def chained_rows(self, state: FloatArray, tokens: Sequence[int]) -> FloatArray:
        """Rows of the head's own states, in the place of the target's, and of the tokens drafted after them."""

    @abstractmethod
    def close(self) -> None:
        """Free the weights; safe to call twice. Contexts must be closed first."""
