"""The marks around what a model thinks before it answers: found in its chat template and its vocabulary.

=====================================================  =========================================================
``<think>…</think>``                                   Qwen3, DeepSeek, SmolLM3 and most others; often the
                                                       template opens the block itself, or an empty one
``<think>…</think><response>…</response>``             Granite 3.3
``Here is my thought process: … Here is my response:`` Granite 3.2
``<|channel>thought … <channel|>``                     Gemma 4
``<|channel|>analysis<|message|>…<|end|>…``            gpt-oss: every message of an answer names its channel
``[THINK]…[/THINK]``, ``<seed:think>…</seed:think>``   Magistral, Seed-OSS
=====================================================  =========================================================

Marks that are control tokens are known by their ids, others by their text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from localspec.backends.base import Model
from localspec.backends.tokenizer import NAMED
from localspec.model_files.vocab import CONTROL

# What may be asked for: the template's own way, a switch, or how much, for templates that take an effort.
THINK = ("auto", "on", "off", "low", "medium", "high")

ThinkingState = Literal["before", "inside", "over"]

N_TAIL = 32  # Tokens at the end of a prompt that show whether it opens a block: the longest known opening takes five


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """The marks of one model."""

    opening: Sequence[str]  # begin a block
    closing: Sequence[str]  # end one
    end: str  # ends a block that is closed for the model
    dropped: Sequence[str] = ()  # marks of an answer that are not shown
    names: Mapping[int, str] = field(default_factory=dict)  # token id -> name after ``NAMED``, of control tokens
    forced: Sequence[int] = ()  # the tokens of ``end``
    source: str = ""  # of the chat template

    @classmethod
    def found(cls, source: str, model: Model) -> ThinkingFormat | None:
        """The format of a model whose template (``source``) or vocabulary has its marks; None: none."""
        vocab = model.vocab

        def is_token(text: str) -> bool:
            found = model.tokenize(text, parse_special=True)
            return len(found) == 1 and vocab.token_text(found[0]) == text

        for each in _FORMATS:
            first, last = each.opening[0], each.closing[0]
            if last in source or (is_token(first) and is_token(last)):
                break
        else:
            return None
        dropped = tuple(mark for mark in each.dropped if mark.startswith("<|") or mark in source)
        texts = (*each.opening, *each.closing, *dropped)
        names = {
            int(i): NAMED + name
            for i in np.flatnonzero(vocab.types == CONTROL)
            if (name := vocab.token_text(int(i))) and any(name in text for text in texts)
        }

        def spelled(marks: Sequence[str]) -> tuple[str, ...]:
            for name in names.values():
                marks = [mark.replace(name[1:], name) for mark in marks]
            return tuple(marks)

        return replace(
            each,
            opening=spelled(each.opening),
            closing=spelled(each.closing),
            dropped=spelled(dropped),
            names=names,
            forced=tuple(model.tokenize(each.end, parse_special=True)),
            source=source,
        )

    def switches(self, think: str) -> dict[str, Any]:
        """The template's variables for one of ``THINK``."""
        if think == "auto":
            return {}
        on = think != "off"
        switches: dict[str, Any] = {}
        if "enable_thinking" in self.source:
            switches["enable_thinking"] = on
        if _HAS_THINKING.search(self.source):
            switches["thinking"] = on
        if "reasoning_effort" in self.source and think != "on":
            switches["reasoning_effort"] = think if on else "low"
        return switches

    def state(self, tail: str) -> ThinkingState:
        """Where the end of a prompt leaves the model: before a block, inside one, or after one."""
        tail = tail.rstrip()
        if tail.endswith(tuple(mark.replace(NAMED, "") for mark in self.opening)):
            return "inside"
        return "over" if tail.endswith(tuple(mark.replace(NAMED, "") for mark in self.closing)) else "before"


# A template's own variable ``thinking``, as of DeepSeek 3.1 and Granite; a message's is ``message.thinking``.
_HAS_THINKING = re.compile(r"\b(if|and|or|not)\s+thinking\b|\bthinking is defined")

_FORMATS = (
    ThinkingFormat(
        ("<|channel|>analysis<|message|>",),
        ("<|end|>",),
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        ("<|end|>", "<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
    ),
    ThinkingFormat(("<|channel>thought",), ("<channel|>",), "<channel|>"),
    ThinkingFormat(("<think>",), ("</think>",), "\n</think>\n\n", ("<response>", "</response>")),
    ThinkingFormat(("[THINK]",), ("[/THINK]",), "[/THINK]"),
    ThinkingFormat(("<seed:think>",), ("</seed:think>",), "</seed:think>"),
    ThinkingFormat(("Here is my thought process:",), ("Here is my response:",), "\nHere is my response:\n"),
)
