"""What a client may ask: the bodies of ``/v1/chat/completions`` and ``/v1/completions``, checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from localspec.errors import UsageError
from localspec.prompts.thinking import THINK
from localspec.sampling.sampling import SamplingParams
from localspec.server import known_fields as known
from localspec.server.fields import Fields, invalid, kind_of
from localspec.server.tools import ToolUse

MAX_CHOICES, MAX_STOPS, MAX_STOP, MAX_MESSAGES, MAX_COUNT = 16, 16, 1024, 10_000, 1 << 31
MAX_TOP_LOGPROBS, MAX_TOOLS = 20, 128  # OpenAI's own limits
MAX_BIASES = 1024  # they are added to every row of logits

# The sampling parameters, under OpenAI's names and those that local servers add to them, and what each may be.
_NUMBERS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 100),
    "repeat_penalty": (0, 100),
}
_INTEGERS = {
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (-1, MAX_COUNT),
    "max_completion_tokens": (-1, MAX_COUNT),
    "n_predict": (-1, MAX_COUNT),
    "top_k": (-1, MAX_COUNT),
    "repeat_last_n": (0, MAX_COUNT),
}
_SYNONYMS = {
    "n_predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "repetition_penalty": "repeat_penalty",
}
"""Name of a field -> what ``SamplingParams`` calls it; it goes before a field of that name."""

SHARED = tuple(known.SHARED.honoured)
"""Fields that other APIs have under the same names, or that we add to all of them."""

TEXT_KINDS = ("text", "input_text", "output_text", "refusal")
"""Types of the parts of a message that are text."""

_EFFORTS = {"none": "off", "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that ``THINK`` has no word for -> the nearest that it has."""

Ending = Literal["assistant", "none", "continue"]
"""What the prompt of a chat ends with: the beginning of an answer, the last message, or the middle of it."""

_VARIABLES_OF_OURS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token")

MAX_TOOL_NAME = 128  # the Model Context Protocol's and Anthropic's; OpenAI's is 64
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME}}}")


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What both kinds of request have in common.

    Attributes:
        params: how tokens are chosen; the server's defaults where the request says nothing.
        n: how many answers.
        stream, include_usage, rounds: whether they come as events, with usage at the end, with every round.
        logprobs: alternatives to name for each token; None: no log-probabilities at all.
        prediction: a text that the answer is likely to repeat.
        drafters: those that take part; None is all that are loaded, () is none.
        draft_length: ``auto``, a number, or None for the server's.
        priority: see ``Asking.rounds``; None: as is usual for what is asked.
        think, thinking_budget: of a chat, see ``Asking.rounds``.
        ending: of a chat.
        variables: further variables of a chat's template.
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
    priority: int | None = None
    think: str = "auto"
    thinking_budget: int | None = None
    ending: Ending = "assistant"
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speculate(self) -> bool:
        return self.drafters != ()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The body of ``/v1/chat/completions``."""

    options: AnswerOptions
    messages: list[Any]
    tools: ToolUse


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """The body of ``/v1/completions``; every prompt is a text or token ids, before a suffix a text."""

    options: AnswerOptions
    prompts: list[str | list[int]]
    echo: bool
    suffix: str | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against.

    Attributes:
        params: what holds where a request says nothing.
        drafters: names of the drafters that are loaded.
        on_request: those of them that take part only where a request names them.
        n_vocab: how many tokens there are.
        thinks: whether the model is known to think before it answers.
        item: an item of an answer that is kept, by its id.
        as_loaded: other names of the drafters, those that ``--draft`` was given -> the names above.
    """

    params: SamplingParams
    drafters: Sequence[str]
    n_vocab: int
    on_request: Sequence[str] = ()
    thinks: bool = False
    item: Callable[[str], Mapping[str, Any] | None] = lambda name: None
    as_loaded: Mapping[str, str] = field(default_factory=dict)

    @property
    def usual(self) -> tuple[str, ...]:
        """The drafters that take part where a request names none."""
        return tuple(name for name in self.drafters if name not in self.on_request)


def chat_request(fields: Fields, served: ServedModel) -> ChatRequest:
    """Check the body of ``/v1/chat/completions``.

    Raises:
        ApiError: it makes no sense, or asks for what there is not.
    """
    fields.known(known.CHAT)
    if any(kind != "text" for kind in fields.items("modalities", 8)):
        raise fields.wrong("modalities", '["text"]')
    messages = _messages(fields)
    wants = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wants:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    options = _answer_options(fields, served, (top or 0) if wants else None)
    budget = fields.integer("thinking_budget", 0, MAX_COUNT)
    think, variables = _think(fields, served)
    ending = _ending(fields, messages)
    options = replace(options, think=think, thinking_budget=budget, ending=ending, variables=variables)
    return ChatRequest(options, messages, _tools(fields))


def completion_request(fields: Fields, served: ServedModel) -> CompletionRequest:
    """Check the body of ``/v1/completions``.

    Raises:
        ApiError: it makes no sense, or asks for what there is not.
    """
    fields.known(known.COMPLETIONS)
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    options = _answer_options(fields, served, fields.integer("logprobs", 0, MAX_TOP_LOGPROBS))
    if best_of is not None and best_of != options.n:
        raise invalid("best_of must equal n: answers are not ranked", "best_of", "unsupported_parameter")
    prompts = _prompts(fields, served)
    if len(prompts) * options.n > MAX_CHOICES:
        raise invalid(f"n times the number of prompts must be at most {MAX_CHOICES}", "prompt")
    echo = fields.flag("echo")
    if echo and options.logprobs is not None:
        raise invalid("echo with logprobs cannot be had: prompts are not scored", "echo", "unsupported_parameter")
    suffix = fields.text("suffix") or None  # an empty one asks for what a prompt alone asks for
    if suffix is not None and not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid("prompt must be a text where there is a suffix", "prompt")
    return CompletionRequest(options, prompts, echo, suffix)


def _answer_options(fields: Fields, served: ServedModel, logprobs: int | None) -> AnswerOptions:
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is not None:
        options.known(known.STREAM_OPTIONS)
        if not stream:
            raise invalid("stream_options needs stream: true", "stream_options")
    drafters, draft_length, priority = _own(fields, served)
    return AnswerOptions(
        params=_params(fields, served),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        stream=stream,
        include_usage=options is not None and options.flag("include_usage"),
        rounds=options is not None and options.flag("localspec_rounds"),
        logprobs=logprobs,
        prediction=_prediction(fields),
        drafters=drafters,
        draft_length=draft_length,
        priority=priority,
    )


def _params(fields: Fields, served: ServedModel) -> SamplingParams:
    given: dict[str, Any] = {name: fields.number(name, *within) for name, within in _NUMBERS.items()}
    given |= {name: fields.integer(name, *within) for name, within in _INTEGERS.items()}
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        if given[name] == 0:
            raise fields.wrong(name, "at least 1, or -1 for no bound of the request's own")
        if given[name] == -1:  # llama-server's word for that, and llama.vscode's
            given[name] = None
    for synonym, name in _SYNONYMS.items():
        if (value := given.pop(synonym)) is not None:
            given[name] = value
    if given["top_p"] is not None:
        given["top_p"] = max(given["top_p"], 1e-9)  # OpenAI's 0 leaves the likeliest token
    if given["top_k"] == -1:
        given["top_k"] = 0
    given["stop"] = _stops(fields)
    given["logit_bias"] = _logit_bias(fields, served)
    given["response_format"] = _response_format(fields)
    given["grammar"] = fields.text("grammar")
    given["ignore_eos"] = fields.flag("ignore_eos") or None
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return replace(served.params, **given)
    except UsageError as error:
        formats = [name for name in ("response_format", "grammar") if name in given]
        param = next((name for name in given if str(error).startswith(name)), formats[0] if formats else None)
        raise invalid(str(error), param) from None


def _response_format(fields: Fields) -> Any:
    form = fields.get("response_format")
    if isinstance(form, Mapping):
        inner = Fields(form, "response_format").known(known.RESPONSE_FORMAT)
        if isinstance(form.get("json_schema"), Mapping):
            Fields(form["json_schema"], inner.path("json_schema")).known(known.JSON_SCHEMA)
    return form


def _stops(fields: Fields) -> list[str] | None:
    value = fields.get("stop")
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise fields.wrong("stop", f"a string, or a list of at most {MAX_STOPS} strings, none empty")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP:
        raise invalid(f"stop must be of strings of at most {MAX_STOP} characters, not of {longest}", "stop")
    return stops


def _logit_bias(fields: Fields, served: ServedModel) -> dict[int, float] | None:
    biases = fields.object("logit_bias")
    if biases is None:
        return None
    found: dict[int, float] = {}
    if len(fields.get("logit_bias")) > MAX_BIASES:
        raise fields.wrong("logit_bias", f"an object of at most {MAX_BIASES} token ids")
    for key in fields.get("logit_bias"):
        if not (isinstance(key, str) and key.isdecimal() and len(key) < 10 and int(key) < served.n_vocab):
            raise invalid(f"logit_bias: {key!r:.40} is not a token id under {served.n_vocab}", "logit_bias")
        found[int(key)] = biases.number(key, -100, 100) or 0.0
    return found


def _prediction(fields: Fields) -> str:
    prediction = fields.object("prediction")
    if prediction is None:
        return ""
    prediction.known(known.PREDICTION).choice("type", ("content",))
    content = prediction.get("content")
    return "" if content is None else text_of(content, prediction.path("content"))


def _own(fields: Fields, served: ServedModel) -> tuple[tuple[str, ...] | None, int | str | None, int | None]:
    """Our own field ``localspec``: which drafters take part, how far they draft, and the request's priority."""
    own = fields.object("localspec")
    if own is None:
        return None, None, None
    own.known(known.LOCALSPEC)
    length = own.get("draft_length")
    if length is not None and length != "auto":
        length = own.integer("draft_length", 0, 64)
    drafters: tuple[str, ...] | None = None
    draft = own.get("draft")
    names: Any = [draft] if isinstance(draft, str) else draft or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise own.wrong("draft", '"auto", "none", or names of loaded drafters')
    if names and names != ["auto"]:
        drafters = () if names == ["none"] else tuple(served.as_loaded.get(name, name) for name in names)
        if "auto" in drafters:
            drafters = tuple(dict.fromkeys([*served.usual, *(name for name in drafters if name != "auto")]))
        # Only what is loaded: a request cannot make the server open files.
        for name in drafters:
            if name not in served.drafters:
                there = ", ".join(served.drafters) or "none"
                raise invalid(f"no drafter {name!r:.80} is loaded; there is {there}", "localspec.draft")
    return () if own.flag("off") else drafters, length, own.integer("priority", -MAX_COUNT, MAX_COUNT)


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages, the content of each as one text; None where an answer said nothing."""
    messages = []
    items = fields.items("messages", MAX_MESSAGES)
    for i, item in enumerate(items):
        message = Fields(item, f"messages[{i}]").known(known.CHAT_MESSAGE)
        if message.flag("prefix") and i < len(items) - 1:
            raise message.wrong("prefix", "of the last message")
        content = message.get("content")
        if content is None and item.get("role") == "assistant":
            content = message.text("refusal")
        elif not isinstance(content, str):
            content = text_of(content, message.path("content"))
        for j, call in enumerate(message.items("tool_calls", MAX_MESSAGES)):
            function = Fields(call, message.path(f"tool_calls[{j}]")).known(known.TOOL_CALL).object("function")
            if function is not None:
                function.known(known.CALLED_FUNCTION)
        thoughts = (message.text(name) for name in ("reasoning_content", "reasoning", "thinking"))
        kept = {
            name: value for name, value in item.items() if name not in ("reasoning", "thinking", "refusal", "prefix")
        }
        messages.append(kept | {"content": content, "reasoning_content": next(filter(None, thoughts), None)})
    if not messages:
        raise invalid("messages is missing or empty", "messages", "missing_required_parameter")
    return messages


def text_of(value: Any, path: str, kinds: Sequence[str] = TEXT_KINDS, between: str = "") -> str:
    """A text, or parts of these kinds with a text each, as one text.

    Raises:
        ApiError: there is something else, such as an image.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(f"{path} must be a text or a list of parts, not {kind_of(value)}", path)
    texts = []
    for i, item in enumerate(value):
        if isinstance(item, str):
            texts.append(item)
            continue
        part = Fields(item, f"{path}[{i}]")
        kind = part.get("type")
        if kind not in kinds:
            raise invalid(f"{path}[{i}].type: only text parts can be used, not {kind!r:.40}", f"{path}[{i}].type")
        table = known.REFUSAL_PART if kind == "refusal" else known.PART
        texts.append(part.known(table).required_text("refusal" if kind == "refusal" else "text"))
    return between.join(texts)


def _ending(fields: Fields, messages: Sequence[Mapping[str, Any]]) -> Ending:
    begins = fields.flag("add_generation_prompt", True)
    asked = "continue_final_message" if fields.flag("continue_final_message") else ""
    last = Fields(messages[-1], f"messages[{len(messages) - 1}]")
    if Fields(fields.get("messages")[-1]).flag("prefix"):  # the name that DeepSeek and Mistral gave it
        asked = asked or last.path("prefix")
    if not asked:
        return "assistant" if begins else "none"
    if fields.has("add_generation_prompt") and begins:
        raise invalid(f"{asked} and add_generation_prompt exclude each other", asked)
    if last.get("role") != "assistant" or last.get("tool_calls") or not last.get("content"):
        raise invalid(f"{asked}: the last message must be an answer of the assistant with a text", asked)
    return "continue"


def _think(fields: Fields, served: ServedModel) -> tuple[str, dict[str, Any]]:
    """Whether, or how much, to think, and further variables of the template.

    The first is our own field, OpenAI's, or among the variables that vLLM and llama-server pass on.
    """
    effort = fields.choice("reasoning_effort", ("", "none", "minimal", "low", "medium", "high", "xhigh", "max"))
    variables = dict(fields.get("chat_template_kwargs") or {}) if fields.object("chat_template_kwargs") else {}
    given = Fields(variables, "chat_template_kwargs")
    for name in variables:
        if name in _VARIABLES_OF_OURS:
            raise invalid(f"{given.path(name)} is given by the server", given.path(name))
    for name in ("enable_thinking", "thinking"):
        if given.has(name):
            effort = "on" if given.flag(name) else "none"
    effort = given.text("reasoning_effort") or effort
    for name in ("enable_thinking", "thinking", "reasoning_effort"):
        variables.pop(name, None)
    if fields.has("think"):
        if not served.thinks and fields.get("think") not in ("auto", "off"):
            raise invalid("think cannot be had: this model is not known to think before it answers", "think")
        effort = fields.choice("think", (*THINK, *_EFFORTS))
    elif not served.thinks:  # clients send the others to any model
        effort = ""
    think = _EFFORTS.get(effort, effort) or "auto"
    if think not in THINK:
        raise given.wrong("reasoning_effort", "an effort such as low, medium or high")
    return think, variables


def _tools(fields: Fields) -> ToolUse:
    tools = []
    for i, item in enumerate(fields.items("tools", MAX_TOOLS)):
        tool = Fields(item, f"tools[{i}]").known(known.TOOL)
        tool.choice("type", ("function",))
        function = tool.object("function")
        if function is None or not _NAME.fullmatch(function.required_text("name")):
            path = f"tools[{i}].function.name"
            raise invalid(f"{path} must be 1 to {MAX_TOOL_NAME} letters, digits, _ . and -", path)
        function.known(known.FUNCTION).text("description")
        function.object("parameters")
        function.flag("strict")
        tools.append(dict(item) | {"type": "function"})
    choice = fields.get("tool_choice") or "auto"
    forced: str | None = None
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(Fields(choice, "tool_choice").known(known.TOOL_CHOICE), tools)
    if isinstance(choice, Mapping):
        inner = Fields(choice, "tool_choice").known(known.TOOL_CHOICE).object("function")
        forced = inner.required_text("name") if inner is not None else None
        if forced not in [tool["function"]["name"] for tool in tools]:
            raise invalid("tool_choice.function must name one of the tools", "tool_choice")
        choice = "required"
    elif choice not in ("auto", "none", "required"):
        raise fields.wrong("tool_choice", '"auto", "none", "required" or {"type": "function", "function": {"name": …}}')
    if choice == "required" and not tools:
        raise invalid("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice == "none":
        return ToolUse()
    return ToolUse(tools, choice == "required", forced, fields.flag("parallel_tool_calls", True))


def _allowed(choice: Fields, tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The tools that ``allowed_tools`` leaves, and whether one of them must be called."""
    allowed = choice.object("allowed_tools") or Fields({}, choice.path("allowed_tools"))
    mode = allowed.known(known.ALLOWED_TOOLS).choice("mode", ("auto", "required"))
    names = []
    for i, item in enumerate(allowed.items("tools", MAX_TOOLS)):
        function = Fields(item, allowed.path(f"tools[{i}]")).known(known.TOOL).object("function")
        names.append(None if function is None else function.text("name"))
        if names[-1] not in [tool["function"]["name"] for tool in tools]:
            raise invalid(f"{allowed.path('tools')} must name some of the tools", allowed.path("tools"))
    return [tool for tool in tools if tool["function"]["name"] in names], mode


def _prompts(fields: Fields, served: ServedModel) -> list[str | list[int]]:
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
