"""What an ``LLM`` does with text without waiting for its queue: tokens and back, and what is to be read next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localspec.backends.base import shared_prefix
from localspec.prompts.infill import FILL_TOKENS, SUFFIX_TOKENS, ContextFiles, FillPrompt, fill_prompt, marked_prompt
from localspec.prompts.prompts import Prompt, PromptEncoder
from localspec.prompts.thinking import ThinkingFormat
from localspec.runtime.read_ahead import ReadAhead
from localspec.runtime.worker import Worker


class Tokenizing:
    """The methods on text of whatever has an encoder, and a worker."""

    _encoder: PromptEncoder
    _read_ahead: ReadAhead
    _worker: Worker
    n_ctx: int

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
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        think: str = "auto",
        room: int | None = None,
    ) -> list[int]:
        """The token ids that a prompt stands for, chat template included where it is a list of messages.

        In a text, names of special tokens such as ``<|im_end|>`` are these tokens; in messages they are text.

        Args:
            prompt: messages, or a text.
            tools: descriptions of functions, for templates that know about tools.
            add_generation_prompt: end with what begins the answer to messages.
            continue_final_message: end in the middle of the last message, which is the beginning of the answer.
            variables: further variables of the chat template.
            think: as in ``rounds``.
            room: a text that must have more tokens than this is refused by its length, before it is cut into tokens;
                None takes any.

        Raises:
            UsageError: the messages are not messages.
            PromptTooLong: see ``room``.
            TemplateError: the chat template failed on them.
        """
        return self._encoder.encode(
            prompt,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            think=think,
            room=room,
        )

    @property
    def thinking(self) -> ThinkingFormat | None:
        """How the model marks what it thinks before it answers; None where it is not known to think."""
        return self._encoder.thinking

    def count_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt has, chat template included where it is a list of messages."""
        return len(self.encode(prompt))

    def fill_prompt(
        self,
        prefix: str,
        suffix: str = "",
        context_files: ContextFiles = (),
        *,
        name: str | None = None,
        max_tokens: int | None = None,
        suffix_tokens: int = SUFFIX_TOKENS,
    ) -> FillPrompt:
        """The prompt that ``fill`` sends; what there is no room for is left out, what is far from the cursor first.

        >>> prompt = llm.fill_prompt("def area(r):\\n    return ", "\\n")
        >>> llm.stream(prompt.tokens, params, keep_tokens=prompt.n_before)  # as ``fill``, piece by piece

        Args:
            prefix: the text before the cursor.
            suffix: the text behind it.
            context_files: names and texts of other files (a mapping, or pairs), the most relevant last.
            name: of the file with the cursor.
            max_tokens: room that is left for the answer; at most half of the context is.
            suffix_tokens: most tokens of the suffix. They are read anew after every key stroke.

        Raises:
            UsageError: the model has no fill-in-the-middle tokens, or all texts are empty.
        """
        n_answer = min(max_tokens or FILL_TOKENS, self.n_ctx // 2)
        room = self.n_ctx - n_answer
        return fill_prompt(
            self._encoder, prefix, suffix, context_files, room=room, name=name, suffix_tokens=suffix_tokens
        )

    def marked_fill_prompt(self, text: str) -> FillPrompt | None:
        """A text with the model's own fill-in-the-middle marks in it, read as these; None if it has not all three.

        >>> llm.marked_fill_prompt("<|fim_prefix|>def area(r):<|fim_suffix|>\\n<|fim_middle|>")
        """
        return marked_prompt(self._encoder, text, self.n_ctx)

    def read_ahead(self, messages: Sequence[Mapping[str, Any]] | FillPrompt, *, think: str = "auto") -> None:
        """Have idle time spent on reading what a chat's next prompt will begin with: these messages, then the user's.

        >>> llm.read_ahead([{"role": "system", "content": "You are terse."}])  # while somebody types the first question

        Args:
            messages: what is known already, the system prompt or the conversation so far; or what ``fill_prompt`` made
                of a file in which something is about to be typed.
            think: as the next question will be asked, see ``rounds``.

        Raises:
            UsageError, TemplateError: as from ``encode``.
        """
        if isinstance(messages, FillPrompt):
            self._read_ahead.expect(messages.tokens[: messages.n_before], anew=True)
            self._worker.idle_work_waits()
            return
        asked = ([*messages, {"role": "user", "content": text}] for text in ("a", "1"))
        one, other = (self.encode(each, think=think) for each in asked)
        self._read_ahead.expect(one[: shared_prefix(one, other)])
        self._worker.idle_work_waits()
