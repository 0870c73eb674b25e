"""Prompts into tokens: for any thread, while the engine works."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard, cast

import numpy as np

from localspec.backends.base import Model
from localspec.errors import Closed, UsageError
from localspec.templates import ChatTemplate

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Sequence[int]
"""A text to continue as it is, messages for the chat template, or token ids."""


class PromptEncoder:
    """The target's tokeniser and chat template.

    Engines tokenise from tables that never change, so this need not wait for the thread that decodes: a server can
    count the tokens of one request while another runs.

    Args:
        model: the target.
        template: its chat template.
    """

    def __init__(self, model: Model, template: ChatTemplate) -> None:
        self.template = template
        self._model = model
        self._vocab = model.vocab
        self._open = True
        self._in_use = threading.RLock()

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text; see ``backends.base.Model.tokenize``.

        Raises:
            Closed: the model was closed.
        """
        with self._in_use:
            if not self._open:
                raise Closed("this LLM was closed")
            return self._model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text that tokens stand for; bytes that are not valid UTF-8 become U+FFFD."""
        return b"".join(self._vocab.token_bytes(token) for token in tokens).decode("utf-8", "replace")

    def encode(
        self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a prompt: messages through the chat template, a string as it is, ids unchanged.

        Raises:
            UsageError: it is none of these, or a token id lies outside of the vocabulary.
            TemplateError: the chat template failed on the messages.
            Closed: the model was closed.
        """
        if isinstance(prompt, str):
            return self.tokenize(prompt, add_special=True)
        if is_token_ids(prompt):
            return self._checked_ids(prompt)
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Sequence):
            raise UsageError(f"a prompt is a text, a list of messages or token ids, not {type(prompt).__name__}")
        messages = cast(Messages, prompt)
        tokens: list[int] = []
        with self._in_use:
            for text, parse_special in self.template.render_segments(
                messages, add_generation_prompt=add_generation_prompt, tools=tools
            ):
                tokens += self.tokenize(text, parse_special=parse_special)
        if self._vocab.add_bos and self._vocab.bos is not None and tokens[:1] != [self._vocab.bos]:
            tokens.insert(0, self._vocab.bos)
        return tokens

    def _checked_ids(self, tokens: Sequence[int]) -> list[int]:
        end = self._model.n_vocab
        for token in tokens:
            if not isinstance(token, Integral) or not 0 <= token < end:
                raise UsageError(f"token ids must lie in 0..{end - 1}, not {token!r:.40}")
        return [int(token) for token in tokens]

    def token_text(self, token: int) -> str:
        """A token on its own, for display."""
        if not 0 <= token < self._vocab.n_tokens:
            return f"<{token}>"
        return self._vocab.token_bytes(token).decode("utf-8", "replace") or self._vocab.token_text(token)

    def close(self) -> None:
        """Wait for whoever tokenises now, and refuse everybody after."""
        with self._in_use:
            self._open = False


def is_token_ids(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    """Whether a prompt is a sequence of token ids; an empty one is not."""
    is_list = isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, str | bytes)
    return is_list and len(prompt) > 0 and isinstance(prompt[0], Integral)
