"""What a client may ask: the bodies of ``/v1/chat/completions`` and ``/v1/completions``, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localspec.commands.serve.errors import invalid
from localspec.commands.serve.fields import Fields
from localspec.commands.serve.tools import ToolUse
from localspec.errors import UsageError
from localspec.sampling.sampling import SamplingParams

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 10_000
MAX_TOOLS = 128
MAX_COUNT = 1 << 31

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LOCALSPEC_FIELDS = {"draft", "draft_length", "off"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What both kinds of request have in common.

    Attributes:
        params: how tokens are chosen; the server's defaults where nothing was said.
        n: how many answers.
        stream, include_usage, rounds: whether they come as events, with usage at the end, with every round.
        logprobs: alternatives to name for each token; None: no log-probabilities at all.
        prediction: a text that the answer is likely to repeat.
        drafters: those that may guess; None is all that are loaded, () is none.
        draft_length: ``auto``, a number, or None for the server's.
    """

    params: SamplingParams
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    rounds: bool = False
    logprobs: int | None = None
    prediction: str = ""
    drafters: tuple[str, ...] | None = None
    draft_length: int | str | None = None

    @property
    def speculate(self) -> bool:
        return self.drafters != ()


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """The body of ``/v1/chat/completions``."""

    common: Asked
    messages: list[Any]
    tools: ToolUse


@dataclass(frozen=True, slots=True)
class CompletionAsked:
    """The body of ``/v1/completions``; every prompt is a text or token ids."""

    common: Asked
    prompts: list[str | list[int]]
    echo: bool


@dataclass(frozen=True, slots=True)
class Served:
    """What requests are checked against.

    Attributes:
        params: what holds where a request says nothing.
        drafters: names of the drafters that are loaded.
        n_vocab: how many tokens there are.
    """

    params: SamplingParams
    drafters: Sequence[str]
    n_vocab: int


def chat_request(fields: Fields, served: Served) -> ChatAsked:
    """Check the body of ``/v1/chat/completions``.

    Raises:
        ApiError: it makes no sense, or asks for what there is not.
    """
    fields.refuse(
        functions="is the old form of tools: send tools and tool_choice",
        function_call="is the old form of tool_choice: send tools and tool_choice",
        audio="cannot be had: text only",
        web_search_options="cannot be had: nothing leaves this computer",
    )
    if any(kind != "text" for kind in fields.items("modalities", 8)):
        raise fields.wrong("modalities", '["text"]')
    messages = fields.items("messages", MAX_MESSAGES)
    if not messages:
        raise invalid("messages is missing or empty", "messages", "missing_required_parameter")
    wants = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wants:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    common = _common(fields, served, (top or 0) if wants else None)
    return ChatAsked(common, messages, _tools(fields))


def completion_request(fields: Fields, served: Served) -> CompletionAsked:
    """Check the body of ``/v1/completions``.

    Raises:
        ApiError: it makes no sense, or asks for what there is not.
    """
    fields.refuse(suffix="cannot be had: the model continues a text, it does not fill one in")
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    common = _common(fields, served, fields.integer("logprobs", 0, MAX_TOP_LOGPROBS))
    if best_of is not None and best_of != common.n:
        raise invalid("best_of must equal n: answers are not ranked", "best_of", "unsupported_parameter")
    prompts = _prompts(fields, served)
    if len(prompts) * common.n > MAX_CHOICES:
        raise invalid(f"n times the number of prompts must be at most {MAX_CHOICES}", "prompt")
    echo = fields.flag("echo")
    if echo and common.logprobs is not None:
        raise invalid("echo with logprobs cannot be had: prompts are not scored", "echo", "unsupported_parameter")
    return CompletionAsked(common, prompts, echo)


def _common(fields: Fields, served: Served, logprobs: int | None) -> Asked:
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    drafters, draft_length = _speculation(fields, served)
    return Asked(
        params=_params(fields, served),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        stream=stream,
        include_usage=options is not None and options.flag("include_usage"),
        rounds=options is not None and options.flag("localspec_rounds"),
        logprobs=logprobs,
        prediction=_prediction(fields),
        drafters=drafters,
        draft_length=draft_length,
    )


def _params(fields: Fields, served: Served) -> SamplingParams:
    """Sampling parameters under OpenAI's names, and those that local servers add to them."""
    given: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 100),
        "top_p": fields.number("top_p", 0, 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "seed": fields.integer("seed", -(2**63), 2**64 - 1),
        "max_tokens": fields.integer("max_completion_tokens", 1, MAX_COUNT),
        "top_k": fields.integer("top_k", -1, MAX_COUNT),
        "min_p": fields.number("min_p", 0, 1),
        "repeat_penalty": fields.number("repeat_penalty", 0, 100),
        "repeat_last_n": fields.integer("repeat_last_n", 0, MAX_COUNT),
    }
    if given["max_tokens"] is None:
        given["max_tokens"] = fields.integer("max_tokens", 1, MAX_COUNT)
    if given["repeat_penalty"] is None:
        given["repeat_penalty"] = fields.number("repetition_penalty", 0, 100)
    if given["top_p"] is not None:
        given["top_p"] = max(given["top_p"], 1e-9)  # OpenAI's 0 leaves the likeliest token
    if given["top_k"] == -1:
        given["top_k"] = 0
    if fields.has("stop"):
        given["stop"] = _stops(fields)
    if fields.has("logit_bias"):
        given["logit_bias"] = _logit_bias(fields, served)
    if fields.has("response_format"):
        if fields.has("grammar"):
            raise invalid("response_format and grammar exclude each other", "grammar")
        given["response_format"] = fields.get("response_format")
    given["grammar"] = fields.text("grammar")
    if fields.flag("ignore_eos"):
        given["ignore_eos"] = True
    try:
        return replace(served.params, **{name: value for name, value in given.items() if value is not None})
    except UsageError as error:
        formats = [name for name in ("response_format", "grammar") if given.get(name) is not None]
        param = next((name for name in given if str(error).startswith(name)), formats[0] if formats else None)
        raise invalid(str(error), param) from None


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise fields.wrong("stop", f"a string, or a list of at most {MAX_STOPS} strings, none empty")
    return tuple(stops)


def _logit_bias(fields: Fields, served: Served) -> dict[int, float]:
    value = fields.get("logit_bias")
    if not isinstance(value, Mapping) or len(value) > served.n_vocab:
        raise fields.wrong("logit_bias", "an object of token ids and numbers")
    biases = Fields(value, "logit_bias")
    found = {}
    for key in value:
        if not (isinstance(key, str) and key.isdecimal() and len(key) < 10 and int(key) < served.n_vocab):
            raise invalid(f"logit_bias: {key!r:.40} is not a token id under {served.n_vocab}", "logit_bias")
        found[int(key)] = biases.number(key, -100, 100) or 0.0
    return found


def _prediction(fields: Fields) -> str:
    prediction = fields.object("prediction")
    if prediction is None:
        return ""
    prediction.choice("type", ("content",), "content")
    content = prediction.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [Fields(part, prediction.path("content")).text("text") or "" for part in parts]
    return "".join(texts)


def _speculation(fields: Fields, served: Served) -> tuple[tuple[str, ...] | None, int | str | None]:
    """Our own field ``localspec``: who guesses, and how far."""
    own = fields.object("localspec")
    if own is None:
        return None, None
    unknown = sorted(set(fields.get("localspec")) - _LOCALSPEC_FIELDS)
    if unknown:
        known = ", ".join(sorted(_LOCALSPEC_FIELDS))
        raise invalid(f"localspec.{unknown[0]!s:.40} is unknown; there is {known}", f"localspec.{unknown[0]!s:.40}")
    length = own.get("draft_length")
    if length is not None and length != "auto":
        length = own.integer("draft_length", 0, 64)
    drafters: tuple[str, ...] | None = None
    draft = own.get("draft")
    names: Any = [draft] if isinstance(draft, str) else draft or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise own.wrong("draft", '"auto", "none", or names of loaded drafters')
    if names and names != ["auto"]:
        drafters = () if names == ["none"] else tuple(names)
        # Only what is loaded: a request cannot make the server open files.
        missing = [name for name in drafters if name not in served.drafters]
        if missing:
            there = ", ".join(served.drafters) or "none"
            raise invalid(f"no drafter {missing[0]!r:.80} is loaded; there is {there}", "localspec.draft")
    if own.flag("off"):
        drafters = ()
    return drafters, length


def _tools(fields: Fields) -> ToolUse:
    tools = []
    for i, item in enumerate(fields.items("tools", MAX_TOOLS)):
        tool = Fields(item, f"tools[{i}]")
        tool.choice("type", ("function",), "function")
        function = tool.object("function")
        if function is None or not _NAME.fullmatch(function.required_text("name")):
            raise invalid(
                f"tools[{i}].function needs a name of letters, digits, _ . and -", f"tools[{i}].function.name"
            )
        function.text("description")
        function.object("parameters")
        tools.append(dict(item) | {"type": "function"})
    choice = fields.get("tool_choice")
    names = [tool["function"]["name"] for tool in tools]
    forced: str | None = None
    if isinstance(choice, Mapping):
        inner = Fields(choice, "tool_choice").object("function")
        forced = inner.required_text("name") if inner is not None else None
        if forced is None or forced not in names:
            raise invalid("tool_choice.function must name one of the tools", "tool_choice")
        choice = "required"
    elif choice is None:
        choice = "auto"
    elif choice not in ("auto", "none", "required"):
        raise fields.wrong("tool_choice", '"auto", "none", "required" or {"type": "function", "function": {"name": …}}')
    if choice == "required" and not tools:
        raise invalid("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice == "none":
        return ToolUse()
    return ToolUse(tools, choice == "required", forced, fields.flag("parallel_tool_calls", True))


def _prompts(fields: Fields, served: Served) -> list[str | list[int]]:
    """A text, several, token ids, or several lists of them."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if _are_tokens(prompt, served.n_vocab):
            return [prompt]
        if all(isinstance(item, list) and item and _are_tokens(item, served.n_vocab) for item in prompt):
            return list(prompt)
    raise fields.wrong("prompt", f"a string, strings, or token ids under {served.n_vocab}")


def _are_tokens(items: list[Any], n_vocab: int) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < n_vocab for item in items)
