"""What an ``LLM`` does with text without waiting for its queue: tokens and back, and what is to be read next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localspec.backends.base import shared_prefix
from localspec.prompts.prompts import Prompt, PromptEncoder
from localspec.runtime.read_ahead import ReadAhead
from localspec.runtime.worker import Worker


class Tokenizing:
    """The methods on text of whatever has an encoder, and a worker."""

    _encoder: PromptEncoder
    _read_ahead: ReadAhead
    _worker: Worker

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any Unicode text.
            add_special: put the begin-of-text token in front if the model wants one.
            parse_special: read ``<|im_end|>`` and the like as the special tokens they name; not for a user's own text.
        """
        return self._encoder.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text that tokens stand for; bytes that are not valid UTF-8 become U+FFFD."""
        return self._encoder.detokenize(tokens)

    def token_text(self, token: int) -> str:
        """A token on its own, for display: half of a character shows as U+FFFD, a special token as its name."""
        return self._encoder.token_text(token)

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The token ids that a prompt stands for, chat template included where it is a list of messages.

        Args:
            prompt: messages, or a text.
            tools: descriptions of functions, for templates that know about tools.
            add_generation_prompt: end with what begins the answer to messages.

        Raises:
            UsageError: the messages are not messages.
            TemplateError: the chat template failed on them.
        """
        return self._encoder.encode(prompt, tools=tools, add_generation_prompt=add_generation_prompt)

    def count_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt has, chat template included where it is a list of messages."""
        return len(self.encode(prompt))

    def read_ahead(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Have idle time spent on reading what a chat's next prompt will begin with: these messages, then the user's.

        >>> llm.read_ahead([{"role": "system", "content": "You are terse."}])  # while somebody types the first question

        Args:
            messages: what is known already, the system prompt or the conversation so far.

        Raises:
            UsageError, TemplateError: as from ``encode``.
        """
        one, other = (self.encode([*messages, {"role": "user", "content": text}]) for text in ("a", "1"))
        self._read_ahead.expect(one[: shared_prefix(one, other)])
        self._worker.idle_work_waits()
