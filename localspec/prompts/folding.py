"""Conversations that a chat template refuses, or prints in part only, changed so that all of them is in the prompt.

Some templates have no role ``system``, or only one message of it, some want users and assistants in turns, some print
no text of a message with calls, some no results of tools. So a template is probed with a word of its own in place of
each text. Where that fails, or a word is missing, the conversation is changed by the repairs that change the least of
it: see ``_REPAIRS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, groupby
from operator import itemgetter
from typing import Any

from localspec.errors import TemplateError
from localspec.prompts.templates import ChatTemplate, checked_messages

Message = dict[str, Any]
Known = MutableMapping[tuple[Any, ...], tuple[int, ...]]  # Traits of conversations -> the repairs that one of them took

_KNOWS_TOOLS = re.compile(r"\btools\b")
_KNOWS_NULL = re.compile(r"""content(['"]\])? is (not )?none""", re.IGNORECASE)
_WORD = re.compile(r"localspec\d+(?:text|call\d+x|tool)")
_MOST_KNOWN, _MOST_TRAITS = 256, 256  # Kinds of conversations that are remembered, and what one may consist of
# Messages -> how many repairs are tried together, before all of them are; one for longer conversations.
_AT_A_TIME = ((200, 3), (1000, 2))

_TOOLS_AS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[Message]
    tools: Sequence[Mapping[str, Any]] | None = None


def folded(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    known: Known,
    **variables: Any,
) -> Conversation:
    """The conversation so that the template prints all of it.

    Args:
        template: the model's.
        messages, tools: as OpenAI has them, arguments of calls as objects or as JSON.
        known: what was found for this template before; it is added to.
        variables: further arguments of ``ChatTemplate.render_segments``.

    Raises:
        UsageError: the messages are malformed.
        TemplateError: the template refuses them, or leaves something out, however they are put.
    """
    asked = Conversation(checked_messages(messages), tools)
    probe, said = _probe(asked)
    traits = _traits(asked)
    always = () if _KNOWS_TOOLS.search(template.source) else (_TOOLS,)
    refusal: TemplateError | None = None
    lost: list[str] = []
    for repairs in _candidates(template, probe, always, known.get(traits)):
        put = _applied(probe, repairs)
        try:
            text = template.render(put.messages, tools=put.tools, **variables)
        except TemplateError as error:
            refusal = refusal or error
            continue
        found = set(_WORD.findall(text.lower()))
        missing = [name for word, name in said.items() if word not in found]
        if not missing:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            if len(traits) <= _MOST_TRAITS:
                known[traits] = repairs
            return _applied(asked, repairs)
        lost = lost or missing
    if lost:
        raise TemplateError(f"the model's chat template leaves out {lost[0]}, and knows no other way to say it")
    assert refusal is not None
    raise refusal


def merged(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Messages in which no two of the same role follow each other, except results of calls; an assistant's thinking,
    the text and the calls after it are one message."""
    found: list[Message] = []
    for role, run in groupby(map(dict, messages), itemgetter("role")):
        whole, *others = run
        if role == "tool":
            found += [whole, *others]
            continue
        found.append(whole)
        if others:
            for name in ("content", "reasoning_content"):
                if texts := [message[name] for message in (whole, *others) if message.get(name)]:
                    whole[name] = "\n\n".join(texts)
            if calls := [call for message in (whole, *others) for call in message.get("tool_calls") or ()]:
                whole["tool_calls"] = calls
    return found


# -- what a template prints --------------------------------------------------------------------------------------------


def _probe(asked: Conversation) -> tuple[Conversation, dict[str, str]]:
    """A conversation with a word in place of every text, and what each word stands for, as errors name it."""
    said: dict[str, str] = {}

    def word(text: str, name: str) -> str:
        said[text] = name
        return text

    messages, tools = [], None if asked.tools is None else list(asked.tools)
    for i, message in enumerate(asked.messages):
        probe, name = dict(message), f"message {i} ({message['role']})"
        if message["content"]:
            probe["content"] = word(f"localspec{i}text", name)
        if message.get("reasoning_content"):
            probe["reasoning_content"] = "thought"
        if message.get("tool_calls"):
            probe["tool_calls"] = []
            for j, call in enumerate(_calls(message)):
                arguments: Any = {"localspec": word(f"localspec{i}call{j}x", f"a call of {name}")}
                if isinstance(call["function"].get("arguments"), str):
                    arguments = json.dumps(arguments)
                probe["tool_calls"].append(_with_function(call, arguments=arguments))
        messages.append(probe)
    for i, tool in enumerate(tools or ()):
        if tools and isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
            tools[i] = _with_function(tool, description=word(f"localspec{i}tool", f"tool {i}"))
    return Conversation(messages, tools), said


def _with_function(call: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """A call or a tool, with some fields of its function changed."""
    return dict(call) | {"function": dict(call["function"]) | fields}


def _traits(asked: Conversation) -> tuple[Any, ...]:
    """What decides which repairs a template takes, as far as it is known beforehand."""
    before, traits = "", set[str]()
    for i, message in enumerate(asked.messages):
        role = message["role"]
        calls = "+calls" if message.get("tool_calls") else ""
        traits.add(f"{before}>{role}{calls}{'+text' if message['content'] else ''}{'' if i else '!'}")
        before = role + calls
    return (*sorted(traits), asked.tools is not None)


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list | tuple) else ()
    return [call for call in calls if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)]


# -- repairs -----------------------------------------------------------------------------------------------------------


def _tools_as_text(asked: Conversation) -> Conversation:
    """Tools, calls and results as text, in the way of Hermes."""
    messages = [_said(message) for message in asked.messages]
    if not asked.tools:
        return Conversation(messages)
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in asked.tools)
    text = _TOOLS_AS_TEXT.format(tools=lines)
    if messages[0]["role"] == "system":
        messages[0] = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
    else:
        messages.insert(0, {"role": "system", "content": text})
    return Conversation(messages)


def _said(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content'] or ''}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    texts = [message["content"] or ""]
    for call in _calls(message):
        arguments = call["function"].get("arguments", {})
        if isinstance(arguments, str):
            arguments = _object(arguments)
        said = json.dumps({"name": call["function"].get("name"), "arguments": arguments}, ensure_ascii=False)
        texts.append(f"<tool_call>\n{said}\n</tool_call>")
    return _without("tool_calls", message) | {"content": "\n".join(text for text in texts if text)}


def _without(name: str, message: Message) -> Message:
    return {key: value for key, value in message.items() if key != name}


def _object(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"arguments": text}


def _text_before_calls(asked: Conversation) -> Conversation:
    """The text of a message with calls as a message of its own."""
    messages = []
    for message in asked.messages:
        if message["content"] and message.get("tool_calls"):
            messages.append(_without("tool_calls", message))
            message = _without("reasoning_content", message) | {"content": ""}
        messages.append(message)
    return replace(asked, messages=messages)


def _one_call_each(asked: Conversation) -> Conversation:
    """Calls that were made together one after the other, each with its result."""
    messages: list[Message] = []
    waiting: dict[str, Message] = {}  # calls whose results have not come
    for message in asked.messages:
        if message["role"] == "tool" and waiting:
            id = str(message.get("tool_call_id"))
            messages += [waiting.pop(id if id in waiting else next(iter(waiting))), message]
            continue
        messages += waiting.values()
        waiting = {}
        calls = _calls(message)
        if len(calls) < 2:
            messages.append(message)
            continue
        later = {"role": message["role"], "content": ""}
        for i, call in enumerate(calls):
            id = str(call.get("id"))
            one = (message if i == 0 else later) | {"tool_calls": [call]}
            waiting[id if id not in waiting else f"{id} again: {i}"] = one
    return replace(asked, messages=[*messages, *waiting.values()])


def _one_system(asked: Conversation) -> Conversation:
    n = _n_systems(asked)
    return replace(asked, messages=[*merged(asked.messages[:n]), *asked.messages[n:]])


def _n_systems(asked: Conversation) -> int:
    """System messages at the beginning."""
    return next((i for i, message in enumerate(asked.messages) if message["role"] != "system"), len(asked.messages))


def _in_users_name(first: int, asked: Conversation) -> Conversation:
    """System messages from the ``first`` place on in the user's name, at their place."""
    messages: list[Message] = []
    waiting: list[str] = []  # for the user's message behind them, or before
    for i, message in enumerate(asked.messages):
        if message["role"] == "system" and i >= first:
            waiting.append(message["content"])
            continue
        if waiting and message["role"] == "user":
            message = message | {"content": "\n\n".join((*waiting, message["content"]))}
        elif waiting:
            _add_user(messages, "\n\n".join(waiting))
        waiting = []
        messages.append(message)
    if waiting:
        _add_user(messages, "\n\n".join(waiting))
    return replace(asked, messages=messages)


def _add_user(messages: list[Message], text: str) -> None:
    if messages and messages[-1]["role"] == "user":
        messages[-1] = messages[-1] | {"content": f"{messages[-1]['content']}\n\n{text}"}
    else:
        messages.append({"role": "user", "content": text})


def _user_first(asked: Conversation) -> Conversation:
    """An empty message of the user before an assistant that begins."""
    n = _n_systems(asked)
    if n < len(asked.messages) and asked.messages[n]["role"] == "user":
        return asked
    empty = {"role": "user", "content": ""}
    return replace(asked, messages=[*asked.messages[:n], empty, *asked.messages[n:]])


def _null_contents(asked: Conversation) -> Conversation:
    """No text, rather than an empty one, in a message with calls."""
    messages = [m | {"content": m["content"] or None} if m.get("tool_calls") else m for m in asked.messages]
    return replace(asked, messages=messages)


def _arguments_as_json(asked: Conversation) -> Conversation:
    messages = []
    for message in asked.messages:
        if message.get("tool_calls"):
            calls = _calls(message)
            given = [call["function"].get("arguments", {}) for call in calls]
            texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in given]
            put = [_with_function(call, arguments=text) for call, text in zip(calls, texts, strict=True)]
            message = message | {"tool_calls": put}
        messages.append(message)
    return replace(asked, messages=messages)


def _short_ids(asked: Conversation) -> Conversation:
    """Ids of nine letters and digits, also where there were none."""
    new: dict[str, str] = {}
    messages, waiting = [], dict[str, None]()  # ids of calls without a result
    for message in asked.messages:
        if message.get("tool_calls"):
            calls, waiting = [], {}
            for call in _calls(message):
                id = f"call{len(new) + 1:05}"
                new[str(call.get("id") or id)] = id
                calls.append(dict(call) | {"id": id})
                waiting[id] = None
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool":
            id = new.get(str(message.get("tool_call_id"))) or next(iter(waiting), "call00000")
            waiting.pop(id, None)
            message = message | {"tool_call_id": id}
        messages.append(message)
    return replace(asked, messages=messages)


def _usual_roles(asked: Conversation) -> Conversation:
    """OpenAI's newest role for the system prompt, and its oldest for results, as the usual ones."""
    usual = {"developer": "system", "function": "tool"}
    return replace(asked, messages=[m | {"role": usual.get(m["role"], m["role"])} for m in asked.messages])


# How much each changes, and what it does; in the order in which they are applied.
_REPAIRS: Sequence[tuple[int, Callable[[Conversation], Conversation]]] = (
    (1, _usual_roles),
    (6, _tools_as_text),
    (1, _one_call_each),
    (1, _text_before_calls),
    (1, _one_system),
    (2, partial(_in_users_name, 1)),
    (3, partial(_in_users_name, 0)),
    (1, lambda asked: replace(asked, messages=merged(asked.messages))),
    (2, _user_first),
    (1, _null_contents),
    (1, _arguments_as_json),
    (1, _short_ids),
)

_TOOLS = next(i for i, (_, repair) in enumerate(_REPAIRS) if repair is _tools_as_text)
_NULLS = next(i for i, (_, repair) in enumerate(_REPAIRS) if repair is _null_contents)


def _applied(asked: Conversation, repairs: Iterable[int]) -> Conversation:
    for i in repairs:
        asked = _REPAIRS[i][1](asked)
    return asked


def _candidates(
    template: ChatTemplate, probe: Conversation, always: tuple[int, ...], before: tuple[int, ...] | None
) -> Iterator[tuple[int, ...]]:
    """Combinations of repairs, those that change the least first."""
    if before is not None:
        yield before
    yield always
    start = _applied(probe, always)
    starts = [start, *(repair(start) for _, repair in _REPAIRS)]
    starts += accumulate(_REPAIRS, lambda put, repair: repair[1](put), initial=start)  # one may make another possible
    able = [i for i, (_, repair) in enumerate(_REPAIRS) if i not in always and any(repair(s) != s for s in starts)]
    if not _KNOWS_NULL.search(template.source):  # others would print "None"
        able = [i for i in able if i != _NULLS]
    most = next((n for many, n in _AT_A_TIME if len(probe.messages) <= many), 1)
    subsets = [subset for n in range(1, most + 1) for subset in combinations(able, n)]
    subsets.append(tuple(able))
    for subset in sorted(subsets, key=lambda subset: sum(_REPAIRS[i][0] for i in subset)):
        yield tuple(sorted({*always, *subset}))
