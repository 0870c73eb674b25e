"""Text to tokens and back: what an ``LLM`` does without waiting for the requests in its queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localspec.prompts import Prompt, PromptEncoder


class Tokenizing:
    """The methods on text of whatever has an encoder."""

    _encoder: PromptEncoder

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

    def encode(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """The token ids that a prompt stands for, chat template included where it is a list of messages.

        Args:
            prompt: messages, or a text.
            tools: descriptions of functions, for templates that know about tools.

        Raises:
            UsageError: the messages are not messages.
            TemplateError: the chat template failed on them.
        """
        return self._encoder.encode(prompt, tools=tools)

    def count_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt has, chat template included where it is a list of messages."""
        return len(self.encode(prompt))
