"""Reading in idle time: the conversation, for draft models, and what the next prompt will begin with, for all.

A draft model that pays has to have read the conversation, and its reading of a long answer that was copied or decoded
plainly takes as long as several tokens. Between two turns that costs nothing. So does reading a system prompt
while a person types the first question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from localspec.backends.base import Context, shared_prefix
from localspec.errors import ContextFull

if TYPE_CHECKING:
    from localspec.runtime.idle import Stopped
    from localspec.runtime.pair import Pair

TARGET_PIECE = 16
DRAFT_PIECE = 32
"""Tokens in a pass: about 0.2 and 0.1 s on a laptop, which is how long a request that comes meanwhile may wait."""


class ReadAhead:
    """A task for idle time, see ``idle.IdleTask``.

    Args:
        pair: whose contexts read; on its worker's thread.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._expected: Sequence[int] = ()
        self._instead_of: Sequence[int] | None = None

    def expect(self, tokens: Sequence[int], *, anew: bool = False) -> None:
        """What the next prompt will begin with, for target and draft models to read; from any thread.

        It is forgotten when another conversation is answered first.

        Args:
            tokens: how the prompt will begin.
            anew: it need not go on with the present conversation.
        """
        self._instead_of = self._pair.conversation if anew else None
        self._expected = tuple(tokens)

    def __call__(self, stopped: Stopped) -> bool:
        """One pass of one model. Returns whether there is more to read."""
        pair = self._pair
        expected = self._expected
        present = pair.conversation
        if expected and present is not self._instead_of and not _continues(expected, present):
            expected = self._expected = ()
        work: list[tuple[Context, Sequence[int], int]] = [(pair.context, expected, TARGET_PIECE)]
        work += [(context, expected or pair.conversation, DRAFT_PIECE) for context in pair.useful_drafts()]
        for context, text, piece in work:
            readable = _readable(context, text)
            if shared_prefix(context.tokens, text) >= readable:
                continue
            if stopped():
                return True
            drafts = [context] if context is not pair.context else []
            try:
                with pair.prefix_cache.conversation(pair.context, drafts, text):
                    known = context.reuse(text)
                    context.decode(list(text[known : min(known + piece, readable)]), "none")
            except ContextFull:  # of a memory that holds other conversations too
                continue
            return True
        return False


def _continues(expected: Sequence[int], conversation: Sequence[int]) -> bool:
    """Whether a next turn could begin so: with nearly all of the conversation, whose end a template may change."""
    return shared_prefix(expected, conversation) >= len(conversation) - len(conversation) // 8 - 1


def _readable(context: Context, text: Sequence[int]) -> int:
    """How much of a text a model can read: up to its context, and to a token that it does not have."""
    n_vocab = context.model.n_vocab
    end = next((i for i, token in enumerate(text) if token >= n_vocab), len(text))
    return min(end, context.n_ctx - 1)
