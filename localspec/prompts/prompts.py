"""Prompts into tokens: for any thread, while the engine works."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, cast

from localspec.backends.base import Model
from localspec.errors import Closed, UsageError
from localspec.prompts.templates import ChatTemplate
from localspec.system.forking import in_child
from localspec.values import listed, token_ids

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
        in_child(self, PromptEncoder._renounce)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text; see ``backends.base.Model.tokenize``.

        Raises:
            UsageError: that is no text.
            Closed: the model was closed.
        """
        if not isinstance(text, str):
            raise UsageError(f"only a text can be tokenised, not {type(text).__name__}")
        with self._in_use:
            if not self._open:
                raise Closed("this LLM was closed")
            return self._model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text that tokens stand for; bytes that are not valid UTF-8 become U+FFFD."""
        ids = token_ids("tokens", tokens)
        return b"".join(map(self._vocab.token_bytes, ids)).decode("utf-8", "replace")

    def encode(
        self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a prompt: messages through the chat template, a string as it is, ids unchanged.

        Raises:
            UsageError: the messages are not messages, or the ids are not the model's.
            TemplateError: the chat template failed on them.
            Closed: the model was closed.
        """
        if isinstance(prompt, str):
            return self.tokenize(prompt, add_special=True)
        parts = listed(prompt)
        if parts is None:
            kind = type(prompt).__name__
            raise UsageError(f"a prompt is a text, a list of messages or a list of token ids, not {kind}")
        if parts and isinstance(parts[0], Real):
            return self.ids("the prompt", parts)
        messages = cast(Messages, parts)
        tokens: list[int] = []
        with self._in_use:
            for text, parse_special in self.template.render_segments(
                messages, add_generation_prompt=add_generation_prompt, tools=tools
            ):
                tokens += self.tokenize(text, parse_special=parse_special)
        if self._vocab.add_bos and self._vocab.bos is not None and tokens[:1] != [self._vocab.bos]:
            tokens.insert(0, self._vocab.bos)
        return tokens

    def ids(self, what: str, text: str | Iterable[int]) -> list[int]:
        """A text, or ids that the model takes, as ids.

        Raises:
            UsageError: other ids than the model's.
        """
        return self.tokenize(text) if isinstance(text, str) else token_ids(what, text, self._model.n_vocab)

    def token_text(self, token: int) -> str:
        """A token on its own, for display."""
        (token,) = token_ids("the token", [token])
        return self._vocab.display(token)

    def close(self) -> None:
        """Wait for a tokenisation under way, and refuse later ones."""
        with self._in_use:
            self._open = False

    def _renounce(self) -> None:
        """In a forked child: the lock may be held by a thread that only the parent has."""
        self._in_use = threading.RLock()
