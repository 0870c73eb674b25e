"""How a target is brought to write what a user might ask, and then to answer it.

A chat model that is given its chat template up to the user's turn, and nothing else, goes on as a user would (Magpie:
Xu et al. 2024, arXiv:2406.08464). A base model continues a heading, and then itself.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import resources

from localspec.backends.base import Model
from localspec.errors import TemplateError
from localspec.prompts.prompts import Messages, PromptEncoder
from localspec.prompts.templates import ChatTemplate

NO_FIELD_SHARE = 0.15
"""Share of prompts that no field of life is named for."""

_SENTENCE_END = re.compile(r"[.?!:;。？！](?=\s|$)|\n")
_MARK = "localspec users turn"


@cache
def fields() -> tuple[str, ...]:
    """Fields of life and work. A field and never a kind of task: what is done with it is the target's own idea."""
    text = resources.files("localspec.training").joinpath("fields.txt").read_text(encoding="utf-8")
    return tuple(text.split("\n")[:-1])


class PromptFormat(ABC):
    """What a target is fed; see ``format_of``.

    Attributes:
        ends: tokens that end what a user says.
        longest_prompt: tokens of it at most; where it goes on, it is cut after a sentence.
        is_chat: whether the target has a chat template.
        before_answer: tokens between what the user says and the answer.
        before_user: tokens between an answer and what the user says next; None where there is no such thing.
    """

    longest_prompt: int
    is_chat: bool
    before_answer: Sequence[int] = ()
    before_user: Sequence[int] | None = None

    def __init__(self, encoder: PromptEncoder, model: Model) -> None:
        self._encoder = encoder
        self.ends = model.vocab.eog

    @abstractmethod
    def opening(self, field: str | None) -> list[int]:
        """Tokens after which the target speaks as the user, of a field if one is named."""

    @abstractmethod
    def asked(self, field: str | None, said: str, *, ended: bool) -> str | None:
        """What the user asks, of what the target said; None if it is nothing.

        Args:
            field: as given to ``opening``.
            said: the text.
            ended: whether it came to an end by itself.
        """

    @abstractmethod
    def answering(self, messages: Messages) -> list[int]:
        """Tokens after which the target answers the last message.

        Raises:
            TemplateError: the template refuses the messages.
        """

    @abstractmethod
    def reading(self, messages: Messages) -> list[int]:
        """A conversation as the target reads it.

        Raises:
            TemplateError: the template refuses the messages.
        """


class ChatFormat(PromptFormat):
    """Of a model with a chat template."""

    longest_prompt = 128
    is_chat = True

    def __init__(self, encoder: PromptEncoder, model: Model) -> None:
        super().__init__(encoder, model)
        turns = [{"role": role, "content": _MARK} for role in ("user", "assistant", "user")]
        after = self._rendered(turns[:1], answering=True).partition(_MARK)[2]
        self.before_answer = encoder.tokenize(after, parse_special=True)
        self.ends |= {token for token in self.before_answer[:1] if model.vocab.is_control(token)}
        with suppress(TemplateError, IndexError):  # it refuses earlier answers, or leaves them out
            self.before_user = encoder.tokenize(self._rendered(turns).split(_MARK)[2], parse_special=True)
        self._bos = model.vocab.bos if model.vocab.add_bos else None

    def _rendered(self, messages: Messages, *, answering: bool = False) -> str:
        return self._encoder.template.render(messages, add_generation_prompt=answering)

    def opening(self, field: str | None) -> list[int]:
        turn = {"role": "user", "content": _MARK}
        system = {"role": "system", "content": f"You are a helpful assistant. The user asks about {field}."}
        try:
            text = self._rendered([turn] if field is None else [system, turn])
        except TemplateError:  # it knows no system prompt
            text = self._rendered([turn])
        tokens = self._encoder.tokenize(text.partition(_MARK)[0], parse_special=True)
        return tokens if self._bos is None or tokens[:1] == [self._bos] else [self._bos, *tokens]

    def asked(self, field: str | None, said: str, *, ended: bool) -> str | None:
        return (said if ended else _whole_sentences(said)).strip() or None

    def answering(self, messages: Messages) -> list[int]:
        return self._encoder.encode(messages)

    def reading(self, messages: Messages) -> list[int]:
        return self._encoder.encode(messages, add_generation_prompt=False)


class PlainFormat(PromptFormat):
    """Of a base model: a heading, a few words that are drawn, and what follows them."""

    longest_prompt = 24
    is_chat = False

    def opening(self, field: str | None) -> list[int]:
        return self._encoder.tokenize(_heading(field), add_special=True) or [0]

    def asked(self, field: str | None, said: str, *, ended: bool) -> str | None:
        return _heading(field) + said if said.strip() else None

    def answering(self, messages: Messages) -> list[int]:
        return self._encoder.tokenize(str(messages[-1]["content"]), add_special=True)

    def reading(self, messages: Messages) -> list[int]:
        text = "\n\n".join(str(message.get("content") or "") for message in messages)
        return self._encoder.tokenize(text, add_special=True)


def format_of(model: Model) -> PromptFormat:
    """What fits a target: its chat template, or plain text where it has none."""
    template = ChatTemplate.for_vocab(model.chat_template, model.vocab)
    encoder = PromptEncoder(model, template)
    return PlainFormat(encoder, model) if template.is_fallback else ChatFormat(encoder, model)


def _heading(field: str | None) -> str:
    return "" if field is None else f"{field[0].upper()}{field[1:]}\n\n"


def ends_a_sentence(text: str) -> bool:
    """Whether a text may end here."""
    return bool(_SENTENCE_END.search(text[-1:]))


def _whole_sentences(text: str) -> str:
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else ""
