"""What the requests of all APIs have in common: sampling, drafting, thinking, messages and tools."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from localspec.errors import UsageError
from localspec.prompts.infill import FillPrompt
from localspec.prompts.thinking import THINK
from localspec.sampling.sampling import SamplingParams
from localspec.server.bodies import (
    LISTED,
    MAX_COUNT,
    Body,
    Flag,
    ModelBody,
    between,
    is_integer,
    items,
    kind_of,
    must_be,
    read,
    whole,
    wrong,
)
from localspec.server.http import invalid
from localspec.server.tools import ToolUse

MAX_CHOICES, MAX_STOPS, MAX_STOP, MAX_MESSAGES = 16, 16, 1024, 10_000
MAX_TOOLS = 128  # OpenAI's own limit
MAX_BIASES = 1024  # they are added to every row of logits
MAX_TOOL_NAME = 128  # the Model Context Protocol's and Anthropic's; OpenAI's is 64

Ending = Literal["assistant", "none", "continue"]
"""What the prompt of a chat ends with: the beginning of an answer, the last message, or the middle of it."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat to answer; messages and tools as OpenAI has them."""

    params: SamplingParams  # the server's defaults where the request says nothing
    options: dict[str, Any]  # further keywords of ``LLM.job``
    messages: Sequence[Any]
    tools: ToolUse = field(default_factory=ToolUse)
    ending: Ending = "assistant"
    variables: Mapping[str, Any] = field(default_factory=dict)  # further ones of the template
    opening: str = ""  # the beginning of the answer, which stands at the prompt's end


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Texts to continue, or to fill in before a suffix; ``params`` and ``options`` as ``ChatRequest`` has them."""

    params: SamplingParams
    options: dict[str, Any]
    prompts: Sequence[str | list[int] | FillPrompt]
    suffix: str | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against."""

    params: SamplingParams  # what holds where a request says nothing
    drafters: Mapping[str, str]  # public name -> loaded name of those that may draft for the client
    n_vocab: int
    on_request: Sequence[str] = ()  # loaded names of those that take part only where a request names them
    hides: bool = False  # others are loaded, which may not draft for the client
    thinks: bool = False  # the model is known to think before it answers
    item: Callable[[str], Mapping[str, Any] | None] = lambda name: None  # of an answer that is kept, by its id


class ApiBody(ModelBody):
    """The body of an endpoint that continues text."""

    @abstractmethod
    def asked(self, served: ServedModel) -> ChatRequest | CompletionRequest:
        """The request; an ``ApiError`` if it makes no sense, or asks for what the model has not."""


# -- sampling and drafting ---------------------------------------------------------------------------------------------

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
Stops = Annotated[list[Stop], items(MAX_STOPS), LISTED]

_BOUND = whole(-1, MAX_COUNT)
MaxTokens = Annotated[int, _BOUND, must_be("at least 1, or -1 for no bound of the request's own", lambda n: n != 0)]


class Prediction(Body):
    type: Literal["content"] = "content"
    content: Any = None


_DRAFT_LENGTH = must_be(
    '"auto" or an integer in 0..64',
    lambda value: value == "auto" or is_integer(value, 0, 64),
    lambda value: value if isinstance(value, str) else int(value),
)


class OwnFields(Body):
    """``localspec``: which drafters take part, how far they draft, and the request's priority."""

    draft: Annotated[list[str], LISTED] = []
    draft_length: Annotated[int | str, _DRAFT_LENGTH] | None = None
    off: Flag = False
    priority: Annotated[int, whole(-MAX_COUNT, MAX_COUNT)] | None = None

    def drafting(self, served: ServedModel) -> dict[str, Any]:
        """Which drafters take part, as keywords of ``LLM.job``. Only what is loaded: a request cannot make the server
        open files."""
        given = [name for name in self.draft if name]
        usual = given in ([], ["auto"])
        chosen = [name for name in served.drafters.values() if name not in served.on_request]
        if not usual and "auto" not in given:
            chosen = []
        for name in given if given != ["none"] else ():
            loaded = name if name in served.drafters.values() else served.drafters.get(name)
            if loaded is not None:
                chosen.append(loaded)
            elif name != "auto":
                there = ", ".join(served.drafters) or "none"
                raise invalid(f"no drafter {name!r:.80} is loaded; there is {there}", "localspec.draft")
        if usual and not (self.off or served.on_request or served.hides):
            return {}  # all
        if self.off or not chosen:  # the client's drafters still read the answer; the others do not
            return {"speculate": False} | ({"drafters": []} if served.hides else {})
        return {"drafters": list(dict.fromkeys(chosen))}


_Bias = Annotated[float, between(-100, 100)] | None
_FEW_BIASES = must_be(
    f"an object of at most {MAX_BIASES} token ids", lambda value: isinstance(value, dict) and len(value) <= MAX_BIASES
)  # before each of them is looked at


class Shared(Body):
    """The fields that all APIs take: sampling parameters, under OpenAI's names and those of local servers, and ours."""

    temperature: Annotated[float, between(0, 100)] | None = None
    top_k: Annotated[int, whole(-1, MAX_COUNT)] | None = None
    top_p: Annotated[float, between(0, 1)] | None = None
    min_p: Annotated[float, between(0, 1)] | None = None
    presence_penalty: Annotated[float, between(-2, 2)] | None = None
    frequency_penalty: Annotated[float, between(-2, 2)] | None = None
    repetition_penalty: Annotated[float, between(0, 100)] | None = None
    repeat_penalty: Annotated[float, between(0, 100)] | None = None
    repeat_last_n: Annotated[int, whole(0, MAX_COUNT)] | None = None
    seed: Annotated[int, whole(-(2**63), 2**64 - 1)] | None = None
    logit_bias: Annotated[dict[str, _Bias], _FEW_BIASES] | None = None
    grammar: str | None = None
    ignore_eos: Flag | None = None
    prediction: Prediction = Prediction()
    localspec: OwnFields = OwnFields()

    def job_options(
        self,
        served: ServedModel,
        *,
        stop: Sequence[str] | None = None,
        max_tokens: int | None = None,
        form: Any = None,
        form_name: str = "response_format",
        at: str = "",
        **more: Any,
    ) -> tuple[SamplingParams, dict[str, Any]]:
        """How to answer: the sampling parameters, and further keywords of ``LLM.job``.

        Args:
            served: what it is checked against; an ``ApiError`` for what no single field shows to be wrong.
            stop, max_tokens: as ``SamplingParams`` has them; -1 or None tokens are the server's.
            form: OpenAI's ``response_format``; ``form_name``: the field that it comes from.
            at: where these fields stand in the request, such as ``options.``.
            more: further keywords; None is left out.
        """
        given = {name: getattr(self, name) for name in _SAMPLING} | {
            "repeat_penalty": self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty,
            "top_p": None if self.top_p is None else max(self.top_p, 1e-9),  # OpenAI's 0 leaves the likeliest token
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "stop": stop,
            "max_tokens": None if max_tokens == -1 else max_tokens,
            "response_format": form,
            "logit_bias": self._biases(served.n_vocab, at),
            "ignore_eos": self.ignore_eos or None,
        }
        given = {name: value for name, value in given.items() if value is not None}
        try:
            params = replace(served.params, **given)
        except UsageError as error:
            formats = [name for name in ("response_format", "grammar") if name in given]
            name = next((name for name in given if str(error).startswith(name)), formats[0] if formats else "")
            path = form_name if name == "response_format" else name and at + name
            raise invalid(str(error).replace("response_format", form_name, 1), path or None) from None
        content, own = self.prediction.content, self.localspec
        where = at if "prediction" in self.sent else ""  # Ollama's top level has it too
        options = more | {
            "prediction": None if content is None else text_of(content, f"{where}prediction.content") or None,
            "draft_length": own.draft_length,
            "priority": own.priority,
        }
        return params, {name: value for name, value in options.items() if value is not None} | own.drafting(served)

    def _biases(self, n_vocab: int, at: str) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if not (key.isdecimal() and len(key) < 10 and int(key) < n_vocab):
                raise invalid(f"{at}logit_bias: {key!r:.40} is not a token id under {n_vocab}", f"{at}logit_bias")
        return {int(key): bias or 0.0 for key, bias in self.logit_bias.items()}


_SAMPLING = ("temperature", "min_p", "presence_penalty", "frequency_penalty", "repeat_last_n", "seed", "grammar")

_EFFORTS = {"none": "off", "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that ``THINK`` has no word for -> the nearest that it has."""

Effort = Literal["", "none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingBudget = Annotated[int, whole(0, MAX_COUNT)]

_OF_THE_SERVER = ("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token")


def thinking(
    served: ServedModel, effort: str = "", variables: Mapping[str, Any] | None = None, think: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Whether, or how much, to think, as ``LLM.job`` has it; and further variables of the template.

    Args:
        served: the model.
        effort: an effort; ``on``; empty is the template's own way. Models that do not think are sent it too.
        variables: ``chat_template_kwargs``, as vLLM and llama-server pass them on; some of them ask for thinking.
        think: our own field, which goes before both.
    """
    left, path = dict(variables or {}), "chat_template_kwargs"
    for name in left:
        if name in _OF_THE_SERVER:
            raise invalid(f"{path}.{name} is given by the server", f"{path}.{name}")
    for name in ("enable_thinking", "thinking"):
        if (switch := left.pop(name, None)) is not None:
            if not isinstance(switch, bool):
                raise wrong(f"{path}.{name}", "true or false", switch)
            effort = "on" if switch else "none"
    effort = _checked_effort(left.pop("reasoning_effort", None), f"{path}.reasoning_effort") or effort
    if think is not None:
        if not served.thinks and think not in ("auto", "off"):
            raise invalid("think cannot be had: this model is not known to think before it answers", "think")
        effort = _checked_effort(think, "think")
    elif not served.thinks:
        effort = ""
    return _EFFORTS.get(effort, effort) or "auto", left


def _checked_effort(value: Any, path: str) -> str:
    if value not in (None, "", *THINK, *_EFFORTS):
        raise wrong(path, f"one of {', '.join((*THINK, *_EFFORTS))}", value)
    return value or ""


# -- messages ----------------------------------------------------------------------------------------------------------


class TextPart(Body):
    type: str
    text: str


class RefusalPart(Body):
    type: str
    refusal: str


TEXT_KINDS = ("text", "input_text", "output_text", "refusal")  # types of the parts of a message that are text


def text_of(value: Any, path: str, kinds: Sequence[str] = TEXT_KINDS, between: str = "") -> str:
    """A text, or parts of these kinds with a text each, as one text; an ``ApiError`` for what else there is."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(f"{path} must be a text or a list of parts, not {kind_of(value)}", path)
    texts = []
    for i, part in enumerate(value):
        at = f"{path}[{i}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind not in kinds:
            raise invalid(f"{at}.type: only text parts can be used, not {kind!r:.40}", f"{at}.type")
        texts.append(read(RefusalPart, part, at).refusal if kind == "refusal" else read(TextPart, part, at).text)
    return between.join(texts)


class JsonSchema(Body):
    name: Any = None
    schema_: Any = Field(None, alias="schema")


class CalledFunction(Body):
    name: str
    arguments: Any = None


class ToolCall(Body):
    id: str | None = None
    type: str | None = None
    function: CalledFunction


def calling(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A message that is a tool call, as OpenAI has it."""
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def begins_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer, as it is in Anthropic's and Ollama's API."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"]) and not last.get("tool_calls")


def required_messages(messages: list[dict[str, Any]], name: str = "messages") -> list[dict[str, Any]]:
    """The messages; an ``ApiError`` if there are none."""
    if not messages:
        raise invalid(f"{name} is missing or empty", name, "missing_required_parameter")
    return messages


# -- tools -------------------------------------------------------------------------------------------------------------

_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME}}}")
_RULE = must_be(
    f"1 to {MAX_TOOL_NAME} letters, digits, _ . and -",
    lambda value: isinstance(value, str) and _NAME.fullmatch(value) is not None,
)
ToolName = Annotated[str, _RULE]


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag = False


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


Tools = Annotated[list[Tool], items(MAX_TOOLS)]


def openai_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as they were sent: templates print them in the order of their names."""
    return [tool.sent | {"type": "function"} for tool in tools]


def tool_use(
    tools: list[dict[str, Any]],
    choice: str = "auto",
    *,
    forced: str | None = None,
    allowed: Sequence[str] | None = None,
    parallel: bool = True,
) -> ToolUse:
    """The tools of a request, as OpenAI has them; an ``ApiError`` if ``tool_choice`` asks for what there is not.

    Args:
        choice: ``auto``, ``none`` or ``required``.
        forced: the function that must be called; ``allowed``: those that may be.
        parallel: whether there may be several calls.
    """
    names = [tool["function"]["name"] for tool in tools]
    for name in (*(allowed or ()), forced):
        if name is not None and name not in names:
            raise invalid(f"tool_choice must name one of the tools, not {name!r:.80}", "tool_choice")
    if allowed is not None:
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    if choice == "required" and not tools:
        raise invalid("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice == "none":
        return ToolUse()
    return ToolUse(tools, choice == "required" or forced is not None, forced, parallel)
