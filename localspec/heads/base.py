"""Interface of a draft head, trained here or published."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Context, FloatArray, Forward, Model, TokenIds, Wanted
from localspec.backends.trust import MAX_MEAN_KL, agreement, verdict_key, verdicts
from localspec.errors import EngineError, EngineMismatch
from localspec.heads.kinds.base import PublishedHead
from localspec.system.files import remembered

STATE = "layer:0"  # the hidden state of a head's model that a chained head continues


class DraftHead(ABC):
    """A loaded head.

    Row p is made of the target's states after token p and of token p + 1, and guesses token p + 2.

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
    def new_context(self, n_ctx: int) -> Context:
        """A memory for a text of n_ctx tokens; a chained head's returns its states as ``hidden[STATE]``."""

    @abstractmethod
    def window(self, n_ctx: int) -> int:
        """Most states that wait to be read in a context of n_ctx rows."""

    @abstractmethod
    def true_rows(self, context: Context, states: FloatArray, tokens: Sequence[int]) -> FloatArray:
        """Rows for ``Context.decode_floats`` [n, n_embd]; the context, of this head, is unchanged.

        Args:
            states: the target's tapped ones side by side [n, n_taps * width].
            tokens: the tokens that came after [n].
        """

    def chained_rows(self, state: FloatArray, tokens: Sequence[int]) -> FloatArray:
        """Rows of the head's own states and of the tokens drafted after them."""
        return state

    def close(self) -> None:
        """Free the weights; safe to call twice. Contexts must be closed first."""
        self.model.close()


class HeadContext(Context):
    """Memory of a published head. ``decode_floats`` takes states as rows, and the tokens' real ids.

    That of a block drafter holds keys and values of the target's states, whose rows lead to no logits; ``guesses``
    puts a block behind them.
    """

    model: Any
    """Has the ``PublishedHead`` as ``head``."""

    def fuse(self, states: FloatArray) -> FloatArray:
        """The state that rows begin with [n, n_embd], of the target's tapped ones side by side [n, n_taps * n_target].

        Changes no memory.

        Raises:
            EngineError: the engine failed.
        """
        raise NotImplementedError

    def follow(self, target: Context) -> None:
        """Read the memory of a context of the target from here on: for heads that have none (``PublishedHead.reads``).

        Then every row is at the place of that context's next token, and the context may be cut and fed meanwhile.
        """
        raise NotImplementedError

    def guesses(self, token: int, n: int, n_best: int = 0) -> tuple[FloatArray, TokenIds | None]:
        """What follows a text whose states are in the memory, by one pass over its last token and masks.

        The block's rows stay in the memory until they are truncated.

        Args:
            token: the last token; its state is not in the memory.
            n: how many tokens to guess, 1 to ``MaskBlock.n_guesses``.
            n_best: how many of the largest logits of each row are enough, where ``finds_best``; 0 wants whole rows.

        Returns:
            Logits by position [n, n_out], or fewer of each row and the tokens that they are of, ascending by row.

        Raises:
            ContextFull: the block does not fit; the memory is unchanged.
            EngineError: the engine failed.
            Closed: the context was closed.
        """
        head: PublishedHead = self.model.head
        assert head.block is not None
        skipped = head.block.n_skipped
        block = [token, *[head.block.mask] * (n + skipped - 1)]
        self._check_input(block, are_ids=False)
        if not 0 <= token < head.n_vocab or not 0 < n <= head.block.n_guesses:
            raise EngineError(f"{head.path.name} cannot decode a block of {n} tokens after {token}")
        forward = self._feed(block, lambda: self._guess(block, n_best if self.finds_best else 0))
        ids = None if forward.ids is None else head.ids[forward.ids[skipped:]]
        return forward.logits[skipped:], ids

    def _guess(self, block: Sequence[int], n_best: int) -> Forward:
        raise NotImplementedError

    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward:
        raise EngineError(f"{self.model.path.name} is a draft head and cannot tokenize text")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if max(tokens) >= self.model.head.n_vocab:
            raise EngineError(f"{self.model.path.name} has no token {max(tokens)}")


def row_by_row(context: Context, rows: FloatArray, tokens: Sequence[int], widths: Sequence[int]) -> float:
    """The worst mean KL divergence [nats] between rows in one pass and the same rows in passes of these widths."""
    wide = context.decode_floats(rows, tokens).logits.copy()
    context.truncate(0)
    found = []
    for width in widths:
        part = slice(context.n_past, context.n_past + width)
        found.append(agreement(context.decode_floats(rows[part], tokens[part]).logits, wide[part]).mean_kl)
    return max(found)


def check_alike(
    model: Model,
    path: Path,
    digest: str,
    n_gpu_layers: int | None,
    disagreement: Callable[[], float],
    say: Callable[[str], None],
) -> None:
    """See that an engine computes a head alike row by row and in one pass (EngineMismatch); remembered.

    Args:
        path: of the head.
        digest: of all files that matter.
        disagreement: the divergence between the two [nats].
        say: takes a line before that is computed.
    """
    if model.capabilities.batch_invariant:
        return

    def examine() -> dict[str, Any]:
        say(f"checking that {model.engine} computes {path.name} correctly (once)")
        worst = disagreement()
        return {"holds": worst <= MAX_MEAN_KL, "why": f"KL {worst:.2g} nats"}

    verdict = remembered(verdicts(), verdict_key(model.backend, {"n_gpu_layers": n_gpu_layers}, digest), examine)
    if not verdict["holds"]:
        why = verdict["why"]
        raise EngineMismatch(
            f"{model.engine} gives different results for {path.name} row by row and in one pass: {why}"
        )
