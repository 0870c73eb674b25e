"""How models mark their tool calls.

Models were trained to write calls in many ways. A mark says that calls follow; what follows it has one of a few forms,
whichever the mark:

=========================================================  ======================================================
``{"name": …, "arguments": {…}}``, several, or a list      Hermes, Qwen 2.5 and 3, SmolLM, Granite, Phi-4-mini, Llama 3,
                                                           Mistral, Command-R, Nemotron, and our fallback
``name[ARGS]{…}``, ``name<｜tool▁sep｜>{…}``               Mistral, DeepSeek, Kimi K2, gpt-oss
``<function=name><parameter=…>…``, ``<invoke name="…">``   Qwen3-Coder, Seed-OSS, MiniMax, DeepSeek V3.2
``<function=name>{…}</function>``                          Llama 3.1, Functionary
``name <arg_key>…</arg_key><arg_value>…</arg_value>``      GLM-4.5
``[name(key="value")]``                                    LFM2, Llama 4, Olmo 3, Gemma 3
``call:name{key:<|"|>value<|"|>}``                         Gemma 4, FunctionGemma
=========================================================  ======================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """A text that announces calls.

    Attributes:
        closers: what may end them; an answer may also just go on, or end.
        each: what a single call may begin with, and end with, where there are several behind one mark.
        sure: only calls are written behind it; otherwise the call must be of a tool that was offered.
        header: what ends the words between a call's name and its arguments.
        first: it is a mark only at the beginning of an answer.
    """

    closers: tuple[str, ...] = ()
    each: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    sure: bool = True
    header: str = ""
    first: bool = False


def _deepseek(name: str) -> tuple[str, ...]:
    """A mark of DeepSeek's, in the ways in which models that were distilled from it write it."""
    return tuple(f"<{bar}{name.replace('_', gap)}{bar}>" for bar in "｜|" for gap in ("▁", "_", " "))


_DEEPSEEK = Mark(_deepseek("tool_calls_end"), (_deepseek("tool_call_begin"), _deepseek("tool_call_end")))
_KIMI = Mark(
    ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"), (("<|tool_call_begin|>",), ("<|tool_call_end|>",))
)

MARKS: Mapping[str, Mark] = {
    "<tool_call>": Mark(("</tool_call>",)),
    "<|tool_call|>": Mark(("<|/tool_call|>", "</tool_call>")),
    "<|tool_call>": Mark(("<tool_call|>",)),
    "<|tool_call_start|>": Mark(("<|tool_call_end|>",)),
    "<tool_calls>": Mark(("</tool_calls>",), sure=False),
    "<tools>": Mark(("</tools>",), sure=False),
    "<function_call>": Mark(("</function_call>",), sure=False),
    "<function_calls>": Mark(("</function_calls>",), sure=False),
    "<TOOLCALL>": Mark(("</TOOLCALL>",)),
    "<minimax:tool_call>": Mark(("</minimax:tool_call>",)),
    "<seed:tool_call>": Mark(("</seed:tool_call>",)),
    "<function=": Mark(("</tool_call>",), sure=False),
    "[TOOL_CALLS]": Mark(),
    "<|python_tag|>": Mark(),
    "<|python_start|>": Mark(("<|python_end|>",)),
    "<|START_ACTION|>": Mark(("<|END_ACTION|>",)),
    "<|tools_prefix|>": Mark(("<|tools_suffix|>",)),
    "<|action_start|><|plugin|>": Mark(("<|action_end|>",)),
    "<start_function_call>": Mark(("<end_function_call>",)),
    "functools[": Mark(("]",), sure=False, first=True),
    "```tool_code\n": Mark(("```",), sure=False),
    "```tool_call\n": Mark(("```",), sure=False),
    "Action: ```json\n": Mark(("```",), sure=False, first=True),
    "Action:```json\n": Mark(("```",), sure=False, first=True),
    **{f"<｜DSML｜{name}>": Mark((f"</｜DSML｜{name}>",)) for name in ("function_calls", "tool_calls")},
    **dict.fromkeys((*_deepseek("tool_calls_begin"), *_DEEPSEEK.each[0]), _DEEPSEEK),
    **dict.fromkeys(("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", *_KIMI.each[0]), _KIMI),
    **{f"<|channel|>{name} to=": Mark(("<|call|>",), header="<|message|>") for name in ("commentary", "analysis")},
    "to=functions.": Mark(("<|call|>",), sure=False, header="<|message|>"),
}

SEPARATORS = ("[ARGS]", "<|tool_call_argument_begin|>", *_deepseek("tool_sep"))

MARKERS = (
    *(text for opener in MARKS for text in re.findall(r"<[^<]*>|\[\w+\]", opener) if text != "<|channel|>"),
    *(text for mark in MARKS.values() for text in (*mark.closers, *mark.each[1]) if len(text) > 3),
    *(*SEPARATORS, "[CALL_ID]", '<|"|>', "<escape>"),
)
"""Tokens that have no text of their own in some vocabularies, but are read here."""


@dataclass(frozen=True, slots=True)
class Tags:
    """A way of writing arguments as text between tags.

    Attributes:
        key: what begins an argument, up to its name.
        value_ends: what ends it.
        ends: what ends the call; "" where that is what ends the mark.
        lines: whether values stand on lines of their own.
    """

    key: str
    value_ends: str
    ends: str = ""
    lines: bool = False


TAGS = {
    "<function=": Tags("<parameter=", "</parameter>", "</function>", lines=True),
    '<invoke name="': Tags('<parameter name="', "</parameter>", "</invoke>"),
    '<｜DSML｜invoke name="': Tags('<｜DSML｜parameter name="', "</｜DSML｜parameter>", "</｜DSML｜invoke>"),
    "<arg_key>": Tags("<arg_key>", "</arg_value>"),
}
