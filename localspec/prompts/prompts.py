"""Prompts into tokens: from any thread, while the engine works."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import Any, cast

from localspec.backends.base import Model
from localspec.errors import Closed, PromptTooLong, UsageError, listed, shown, token_ids
from localspec.prompts.folding import folded
from localspec.prompts.templates import ChatTemplate
from localspec.prompts.thinking import N_TAIL, THINK, ThinkingFormat, ThinkingState
from localspec.system.process import SharedLock, in_child

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Sequence[int]  # A text to continue as it is, messages for the chat template, or token ids


def is_messages(prompt: Prompt) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and len(prompt) > 0 and isinstance(prompt[0], Mapping)


class PromptEncoder:
    """The target's tokeniser and chat template; ``thinking`` is None where the model is not known to think.

    Engines tokenise from tables that never change, so no call waits for the thread that decodes.
    """

    def __init__(self, model: Model, template: ChatTemplate) -> None:
        self.template = template
        self.thinking = ThinkingFormat.found(template.source, model)
        self._model = model
        self.vocab = model.vocab
        self._open = True
        self._in_use = SharedLock()
        self._folded: dict[tuple[Any, ...], tuple[int, ...]] = {}
        in_child(self, PromptEncoder._renounce)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text; see ``backends.base.Model.tokenize``. ``Closed``: the model was closed."""
        if not isinstance(text, str):
            raise UsageError(f"only a text can be tokenised, not {type(text).__name__}")
        with self._in_use.shared():
            if not self._open:
                raise Closed("this LLM was closed")
            return self._model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text that tokens stand for; bytes that are not valid UTF-8 become U+FFFD."""
        ids = token_ids("tokens", tokens)
        return b"".join(map(self.vocab.token_bytes, ids)).decode("utf-8", "replace")

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
        """Token ids of a prompt: messages through the chat template, ids unchanged, a text as it is.

        In a text, names of special tokens such as ``<|im_end|>`` are these tokens; in messages they stay text. Messages
        that the template would leave out or refuse are changed so that it prints them, see ``folding``.

        Args:
            tools, add_generation_prompt, continue_final_message: see ``ChatTemplate.render_segments``.
            variables: further variables of the template.
            think: of ``thinking.THINK``; with ``off`` a block that the template opens is closed again.
            room: a text that must have more tokens is refused by its length alone (``PromptTooLong``); None takes any.

        Raises:
            UsageError: the messages are not messages, or the ids are not the model's.
            TemplateError: the chat template failed on them.
            Closed: the model was closed.
        """
        if isinstance(prompt, str):
            self.check_room(room, prompt)
            ids = self.tokenize(prompt, add_special=True, parse_special=True)
            return ids[1:] if self.vocab.add_bos and ids[:2] == [self.vocab.bos] * 2 else ids  # it was written out too
        parts = listed(prompt)
        if parts is None:
            kind = type(prompt).__name__
            raise UsageError(f"a prompt is a text, a list of messages or a list of token ids, not {kind}")
        if parts and isinstance(parts[0], Real):
            return token_ids("the prompt", parts, self._model.n_vocab)
        messages = cast(Messages, parts)
        tokens: list[int] = []
        self.checked_think(think)
        options: dict[str, Any] = dict(variables or {}) | {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        options |= {} if self.thinking is None else self.thinking.switches(think)
        put = folded(self.template, messages, tools, self._folded, **options)
        segments = self.template.render_segments(put.messages, tools=put.tools, **options)
        self.check_room(room, *(text for text, _ in segments))
        for text, parse_special in segments:
            tokens += self.tokenize(text, parse_special=parse_special)
        if think == "off" and options["add_generation_prompt"] and self.thinking_state(tokens) == "inside":
            tokens += self.thinking.forced  # type: ignore[union-attr] # there is a state
        if self.vocab.add_bos and self.vocab.bos is not None and tokens[:1] != [self.vocab.bos]:
            tokens.insert(0, self.vocab.bos)
        return tokens

    def most_characters(self, n_tokens: int) -> int:
        return n_tokens * max(1, self.vocab.longest)

    def check_room(self, room: int | None, *texts: str) -> None:
        """Refuse a text by its length (``PromptTooLong``), before it is tokenised, which takes time in proportion."""
        n = sum(map(len, texts))
        if room is not None and n > room and n > self.most_characters(room):
            least = -(-n // max(1, self.vocab.longest))
            raise PromptTooLong(
                f"the prompt has over {least - 1} tokens and the context holds {room}, answer included; "
                "shorten it, or take a larger context: --ctx N, in Python n_ctx=N"
            )

    def thinking_state(self, tokens: Sequence[int]) -> ThinkingState | None:
        if self.thinking is None:
            return None
        return self.thinking.state("".join(map(self.vocab.display, tokens[-N_TAIL:])))

    def checked_think(self, think: str) -> str:
        if think not in THINK:
            raise UsageError(f"think must be one of {', '.join(THINK)}, not {shown(think)}")
        if self.thinking is None and think not in ("auto", "off"):
            raise UsageError(f"{self._model.path.name} is not known to think before it answers: leave think out")
        return think

    @cached_property
    def end_marks(self) -> list[str]:
        """The chat template's marks of turns that are not tokens of this model, as of a base model asked in ChatML:
        text that ends its answer."""
        special = {*self.vocab.special_texts, *map(self.vocab.token_text, self.vocab.eog)}
        return [mark for mark in self.template.turn_marks() if mark not in special]

    def ids(self, what: str, text: str | Iterable[int]) -> list[int]:
        return self.tokenize(text) if isinstance(text, str) else token_ids(what, text, self._model.n_vocab)

    def token_text(self, token: int) -> str:
        (token,) = token_ids("the token", [token])
        return self.vocab.display(token)

    def close(self) -> None:
        """Wait for tokenisations that have begun, and refuse later ones."""
        with self._in_use.alone():
            self._open = False

    def _renounce(self) -> None:
        self._in_use = SharedLock()
