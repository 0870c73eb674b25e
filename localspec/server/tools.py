"""Messages and tools as templates take them, forced calls, and rounds as text and calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from localspec.errors import UsageError, written_json
from localspec.prompts.templates import ChatTemplate, checked_messages
from localspec.sampling.grammar import changed
from localspec.sampling.sampling import SamplingParams
from localspec.server.tool_calls import CallArguments, CallStart, Piece, TextPiece, ToolCallReader
from localspec.spec_decode.rounds import EmittedToken, Round


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, as OpenAI has them; empty if none may be called."""

    tools: Sequence[Mapping[str, Any]] = field(default_factory=list)
    required: bool = False  # the answer must be a call
    forced: str | None = None  # of this function
    parallel: bool = True  # there may be several calls


def usual_role(role: str) -> str:
    """OpenAI's newest name of the system prompt as the usual one."""
    return "system" if role == "developer" else role


def messages_for(messages: Sequence[Any], system: str | None = None) -> list[dict[str, Any]]:
    """OpenAI's messages as templates take them; ``system``: where they have no system prompt.

    Arguments of earlier calls become objects: OpenAI has them as strings, templates print them as JSON. A
    ``UsageError`` for messages that are malformed.
    """
    prepared: list[dict[str, Any]] = []
    for message in checked_messages(messages):
        message = {name: value for name, value in message.items() if value is not None}
        message["role"] = usual_role(message["role"])
        message.setdefault("content", "")
        if "tool_calls" in message:
            message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        prepared.append(message)
    if system and prepared[0]["role"] != "system":
        prepared.insert(0, {"role": "system", "content": system})
    return prepared


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = written_json(arguments or "{}")
        except ValueError:
            arguments = {"arguments": arguments}
    return dict(call) | {"type": "function", "function": dict(function) | {"arguments": arguments}}


def forced_call(template: ChatTemplate, use: ToolUse, params: SamplingParams) -> tuple[str, SamplingParams]:
    """How an answer is made to be a call: its beginning, to be put behind the prompt; and the request's parameters,
    with a schema instead of its own.

    Raises:
        UsageError: the request also has a grammar, or the schema of a strict tool cannot be followed.
    """
    if params.grammar is not None:
        raise UsageError("grammar and a forced tool call, which follows the schema of its tool, exclude each other")
    if "<|python_tag|>" in template.source:
        prefix, key = "", "parameters"
    else:
        prefix, key = "<tool_call>\n", "arguments"
    chosen = [tool["function"] for tool in use.tools if use.forced in (None, tool["function"]["name"])]
    try:
        return prefix, _held_to(chosen, key, params)
    except UsageError:
        # A tool whose schema cannot be followed takes any object, unless it is strict; the others keep theirs.
        followed = [_followed(function, key, params) for function in chosen]
    return prefix, _held_to(followed, key, params)


def _followed(function: Mapping[str, Any], key: str, params: SamplingParams) -> Mapping[str, Any]:
    try:
        _held_to([function], key, params)
    except UsageError as error:
        if function.get("strict"):
            raise UsageError(f"the tool {function['name']} is strict, but {error}") from None
        return {"name": function["name"]}
    return function


def _held_to(functions: Sequence[Mapping[str, Any]], key: str, params: SamplingParams) -> SamplingParams:
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for i, function in enumerate(functions):
        arguments: dict[str, Any] = {"type": "object"}
        if parameters := function.get("parameters"):
            if not any(name in parameters for name in ("type", "$ref", "anyOf", "oneOf", "allOf")):
                parameters = arguments | parameters
            definitions[str(i)] = changed(parameters, partial(_move, f"#/$defs/{i}"))
            arguments = {"$ref": f"#/$defs/{i}"}
        properties = {"name": {"const": function["name"]}, key: arguments}
        form = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        calls.append(form)
    schema = (calls[0] if len(calls) == 1 else {"anyOf": calls}) | {"$defs": definitions}
    form = {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}
    return replace(params, response_format=form)


def _move(place: str, schema: dict[str, Any]) -> None:
    """References within a schema follow it to its new place."""
    schema.pop("$id", None)
    if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
        schema["$ref"] = place + schema["$ref"].removeprefix("#")


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last one."""

    pieces: Sequence[Piece] = ()  # verified text, and beginnings and arguments of tool calls, in their order
    thinking: str = ""  # before it
    tokens: list[EmittedToken] = field(default_factory=list)  # whose text has been released; calls, but not thinking

    def __bool__(self) -> bool:
        return bool(self.pieces or self.thinking or self.tokens)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, TextPiece))

    @property
    def calls(self) -> list[CallStart | CallArguments]:
        return [piece for piece in self.pieces if not isinstance(piece, TextPiece)]


def joined(deltas: Sequence[Delta]) -> Delta:
    """Several deltas as one."""
    return Delta(
        [piece for delta in deltas for piece in delta.pieces],
        "".join(delta.thinking for delta in deltas),
        [token for delta in deltas for token in delta.tokens],
    )


class DeltaReader:
    """Rounds -> deltas; ``opening``: the beginning of the answer that the model was given."""

    def __init__(self, use: ToolUse, opening: str = "", *, wants_tokens: bool = False) -> None:
        self._parallel = use.parallel
        self.calls = ToolCallReader(use.tools, parallel=use.parallel)
        self.calls.push(opening)
        self._wants_tokens = wants_tokens
        self._waiting: deque[tuple[int, EmittedToken]] = deque()
        self._n_read = 0
        self._n_released = 0

    @property
    def over(self) -> bool:
        """Whether there was a call, and may be no other."""
        return self.calls.n_done > 0 and not self._parallel

    def read(self, round_: Round) -> Delta:
        self._n_released += sum(len(span.text) for span in round_.spans)
        return Delta(self.calls.push(round_.text), round_.thinking, self._released(round_))

    def finish(self, *, cut: bool) -> Delta:
        """What was still waiting when the answer ended; ``cut``: before its end."""
        return Delta(self.calls.finish(cut=cut))

    def _released(self, round_: Round) -> list[EmittedToken]:
        """The tokens whose text has come out; those of a stop string never do, and an end token has none."""
        if not self._wants_tokens:
            return []
        for token in round_.emitted:
            self._waiting.append((self._n_read, token))
            self._n_read += len(token.text)
        over = round_.finish_reason is not None
        released = []
        while self._waiting:
            start, token = self._waiting[0]
            if not (start < self._n_released if over else start + len(token.text) <= self._n_released):
                break
            self._waiting.popleft()
            if not token.thinking:
                released.append(token)
        return released
