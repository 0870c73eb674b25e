"""OpenAI's ``POST /v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from localspec.sampling.sampling import SamplingParams
from localspec.server.answers import ApiAnswer, prompt_progress
from localspec.server.bodies import Body, Flag, are_tokens, items, must_be, read, whole, wrong
from localspec.server.events import event
from localspec.server.http import invalid
from localspec.server.requests import (
    MAX_CHOICES,
    MAX_MESSAGES,
    ApiBody,
    ChatRequest,
    CompletionRequest,
    Effort,
    Ending,
    Function,
    JsonSchema,
    MaxTokens,
    ServedModel,
    Shared,
    Stops,
    ThinkingBudget,
    ToolCall,
    Tools,
    openai_tools,
    required_messages,
    text_of,
    thinking,
    tool_use,
)
from localspec.server.service import Service
from localspec.server.tool_calls import CallStart
from localspec.server.tools import Delta, ToolUse, joined
from localspec.spec_decode.rounds import EmittedToken, PromptProgress, Round

LOADING_EVENT, PROMPT_EVENT, ROUND_EVENT = "localspec.loading", "localspec.prompt", "localspec.round"

MAX_TOP_LOGPROBS = 20  # OpenAI's own limit

# What is asked.


class StreamOptions(Body):
    include_usage: Flag = False
    localspec_rounds: Flag = False


class ResponseFormat(JsonSchema):
    type: Any = None
    json_schema: JsonSchema | None = None


class OpenAIBody(ApiBody, Shared):
    """What both have in common, with the fields that vLLM and llama-server add."""

    stop: Stops | None = None
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, whole(1, MAX_CHOICES)] = 1
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    n_predict: MaxTokens | None = None
    response_format: ResponseFormat | None = None
    return_progress: Flag = False

    @property
    def tells_loading(self) -> bool:
        return self.stream_options.localspec_rounds

    def job_options(self, served: ServedModel, **more: Any) -> tuple[SamplingParams, dict[str, Any]]:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise invalid("stream_options needs stream: true", "stream_options")
        bounds = (self.max_completion_tokens, self.n_predict, self.max_tokens)  # the first one that says something
        return super().job_options(
            served,
            stop=self.stop,
            max_tokens=next((bound for bound in bounds if bound not in (None, -1)), None),
            form=self.response_format and self.response_format.sent,
            **more,
        )


class ChatMessage(Body):
    role: str | None = None
    name: str | None = None
    content: Any = None
    tool_calls: Annotated[list[ToolCall], items(MAX_MESSAGES)] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    prefix: Flag = False

    def for_template(self, path: str) -> dict[str, Any]:
        """The message with its content as one text; None where an answer said nothing."""
        content = self.content
        if content is None and self.role == "assistant":
            content = self.refusal
        elif not isinstance(content, str):
            content = text_of(content, f"{path}.content")
        thought = self.reasoning_content or self.reasoning or self.thinking or None
        own = ("reasoning", "thinking", "refusal", "prefix")
        kept = {name: value for name, value in self.sent.items() if name not in own}
        return kept | {"content": content, "reasoning_content": thought}


class AllowedTools(Body):
    mode: Literal["auto", "required"] = "auto"
    tools: Tools = []


class ToolChoice(Body):
    type: str | None = None
    function: Function | None = None
    allowed_tools: AllowedTools = AllowedTools()


class ChatBody(OpenAIBody):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], items(MAX_MESSAGES)] = []
    tools: Tools = []
    tool_choice: Any = None
    parallel_tool_calls: Flag = True
    logprobs: Flag = False
    top_logprobs: Annotated[int, whole(0, MAX_TOP_LOGPROBS)] | None = None
    modalities: Annotated[list[str], must_be('["text"]', lambda value: value in ([], ["text"]))] = []
    think: str | None = None
    reasoning_effort: Effort = ""
    thinking_budget: ThinkingBudget | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag = False

    def asked(self, served: ServedModel) -> ChatRequest:
        messages = required_messages([each.for_template(f"messages[{i}]") for i, each in enumerate(self.messages)])
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        think, variables = thinking(served, self.reasoning_effort, self.chat_template_kwargs, self.think)
        how = self.job_options(
            served,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            thinking_budget=self.thinking_budget,
            think=think,
        )
        return ChatRequest(*how, messages, self._tools(), self._ending(), variables)

    def _ending(self) -> Ending:
        *earlier, last = self.messages
        path = f"messages[{len(earlier)}]"
        for i, message in enumerate(earlier):
            if message.prefix:
                raise wrong(f"messages[{i}].prefix", "of the last message", True)
        asked = "continue_final_message" if self.continue_final_message else f"{path}.prefix" if last.prefix else ""
        if not asked:
            return "none" if self.add_generation_prompt is False else "assistant"
        if self.add_generation_prompt:
            raise invalid(f"{asked} and add_generation_prompt exclude each other", asked)
        if last.role != "assistant" or last.tool_calls or not last.content:
            raise invalid(f"{asked}: the last message must be an answer of the assistant with a text", asked)
        return "continue"

    def _tools(self) -> ToolUse:
        tools, choice, forced, allowed = openai_tools(self.tools), self.tool_choice or "auto", None, None
        if isinstance(choice, dict):
            given = read(ToolChoice, choice, "tool_choice")
            if given.type == "allowed_tools":
                choice, allowed = given.allowed_tools.mode, [tool.function.name for tool in given.allowed_tools.tools]
            elif given.function is None:
                raise invalid("tool_choice.function is missing", "tool_choice")
            else:
                choice, forced = "required", given.function.name
        elif choice not in ("auto", "none", "required"):
            rule = '"auto", "none", "required" or {"type": "function", "function": {"name": …}}'
            raise wrong("tool_choice", rule, choice)
        return tool_use(tools, choice, forced=forced, allowed=allowed, parallel=self.parallel_tool_calls)


class CompletionBody(OpenAIBody):
    """The body of ``/v1/completions``."""

    prompt: Any = None
    suffix: str | None = None
    echo: Flag = False
    best_of: Annotated[int, whole(1, MAX_CHOICES)] | None = None
    logprobs: Annotated[int, whole(0, MAX_TOP_LOGPROBS)] | None = None

    def asked(self, served: ServedModel) -> CompletionRequest:
        how = self.job_options(served, logprobs=self.logprobs)
        if self.best_of is not None and self.best_of != self.n:
            raise invalid("best_of must equal n: answers are not ranked", "best_of", "unsupported_parameter")
        prompts = self._prompts(served.n_vocab)
        if len(prompts) * self.n > MAX_CHOICES:
            raise invalid(f"n times the number of prompts must be at most {MAX_CHOICES}", "prompt")
        if self.echo and self.logprobs is not None:
            raise invalid("echo with logprobs cannot be had: prompts are not scored", "echo", "unsupported_parameter")
        if self.suffix and not all(isinstance(prompt, str) for prompt in prompts):
            raise invalid("prompt must be a text where there is a suffix", "prompt")
        # An empty suffix asks for what a prompt alone asks for.
        return CompletionRequest(*how, prompts, self.suffix or None)

    def _prompts(self, n_vocab: int) -> list[str | list[int]]:
        """A text, several, token ids, or several lists of them."""
        prompt = self.prompt
        several = prompt if isinstance(prompt, list) and not are_tokens(prompt, n_vocab) else [prompt]
        are_texts = all(isinstance(each, str) for each in several)
        if are_texts or all(each and are_tokens(each, n_vocab) for each in several):
            return list(several)
        raise wrong("prompt", f"a string, strings, or token ids under {n_vocab}", prompt)


# What is answered.


class OpenAIAnswer(ApiAnswer):
    """Chunks of one or several choices."""

    prefix: ClassVar[str]  # of the identifier
    kind: ClassVar[str]  # ``object`` of a whole answer
    chunk_kind: ClassVar[str]  # and of a piece of one
    nothing: ClassVar[dict[str, Any]]  # what the last chunk of a choice says, apart from the reason

    def __init__(self, service: Service, body: OpenAIBody) -> None:
        self.asked = body.asked(service.served())
        super().__init__(service, service.choices(self.asked, body.n))
        self.body = body
        self._id = f"{self.prefix}-{secrets.token_hex(14)}"
        self._deltas: list[list[Delta]] = [[] for _ in self.choices]
        self._reasons: dict[int, str] = {}

    @abstractmethod
    def opening(self, index: int) -> Iterable[dict[str, Any]]:
        """What the chunks of a choice begin with."""

    @abstractmethod
    def pieces(self, index: int, delta: Delta) -> Iterable[dict[str, Any]]:
        """What the chunks say of a delta."""

    @abstractmethod
    def whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """All that the chunks of a choice said."""

    def progress(self, index: int, progress: PromptProgress) -> Iterator[bytes]:
        if self.body.stream_options.localspec_rounds:
            yield from self._opened(index)
            yield self._chunk({"localspec": {"choice": index, "prompt": progress.as_event()}}, PROMPT_EVENT)
        if self.body.return_progress and progress.reader == "target":
            yield from self._opened(index)
            said = {"choices": [_choice(index, self.nothing)], "prompt_progress": prompt_progress(progress)}
            yield self._chunk(said)

    def read(self, index: int, delta: Delta, round_: Round | None = None) -> Iterator[bytes]:
        yield from self._opened(index)
        if round_ is not None and self.body.stream_options.localspec_rounds:
            # OpenAI's clients do not look at an event's name, so it is also a chunk without choices.
            yield self._chunk({"localspec": {"choice": index, "round": round_.as_event()}}, ROUND_EVENT)
        self._deltas[index].append(delta)
        if delta and self.body.stream:
            for piece in self.pieces(index, delta):
                yield self._piece(index, piece)

    def done(self, index: int, delta: Delta, finish_reason: str) -> Iterator[bytes]:
        yield from self.read(index, delta)
        self._reasons[index] = finish_reason
        yield self._piece(index, self.nothing, finish_reason)

    def _opened(self, index: int) -> Iterator[bytes]:
        if not self._deltas[index]:
            self._deltas[index].append(Delta())
            for piece in self.opening(index):
                yield self._piece(index, piece)

    def _piece(self, index: int, piece: dict[str, Any], finish_reason: str | None = None) -> bytes:
        usage = {"usage": None} if self.body.stream_options.include_usage else {}
        return self._chunk({"choices": [_choice(index, piece, finish_reason)]} | usage)

    def _chunk(self, content: dict[str, Any], name: str | None = None) -> bytes:
        return event(self._frame(self.chunk_kind) | {"choices": []} | content, name)

    def end(self) -> Iterator[bytes]:
        if self.body.stream_options.include_usage or self.body.stream_options.localspec_rounds:
            yield self._chunk({"usage": self._usage(), "localspec": self.figures()})

    def finished(self) -> dict[str, Any]:
        choices = [
            _choice(i, self.whole_choice(i, joined(said)), self._reasons[i]) for i, said in enumerate(self._deltas)
        ]
        return self._frame(self.kind) | {"choices": choices, "usage": self._usage(), "localspec": self.figures()}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": int(self.created),
            "model": self.service.names[0],
            "system_fingerprint": self.service.fingerprint,
        }

    def _usage(self) -> dict[str, Any]:
        """OpenAI's usage. Predictions are the draft tokens of all drafters."""
        prompts = {id(each.prompt): len(each.prompt) for each in self.choices}  # several answers to one count it once
        prompt, stats = sum(prompts.values()), [reply.stats for reply in self.replies]
        completion = sum(each.completion_tokens for each in stats)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": stats[0].cached_tokens if stats else 0, "audio_tokens": 0},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(each.kind == "accepted" for r in self.replies for each in r.tokens),
                "rejected_prediction_tokens": sum(each.num_draft_tokens - each.num_accepted_tokens for each in stats),
                "reasoning_tokens": sum(each.thinking_tokens for each in stats),
                "audio_tokens": 0,
            },
        }


def _choice(index: int, piece: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, **piece, "logprobs": piece.get("logprobs"), "finish_reason": finish_reason}


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # OpenAI's own figure for "never"; JSON has no infinity


class ChatAnswer(OpenAIAnswer):
    """The answer to ``/v1/chat/completions``."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    nothing: ClassVar = {"delta": {}}

    def opening(self, index: int) -> Iterator[dict[str, Any]]:
        yield {"delta": {"role": "assistant", "content": "", "refusal": None}}

    def pieces(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.thinking:
            yield {"delta": {"reasoning_content": delta.thinking}}
        if delta.text or delta.tokens:
            yield {"delta": {"content": delta.text}} | self._logprobs(delta)
        for call in delta.calls:
            said = _call(call) if isinstance(call, CallStart) else {"function": {"arguments": call.text}}
            yield {"delta": {"tool_calls": [{"index": call.index} | said]}}

    def whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.thinking:
            message["reasoning_content"] = delta.thinking
        of_calls: Iterator[list[Any]] = (list(said) for _, said in groupby(delta.calls, lambda piece: piece.index))
        calls = [_call(start, "".join(each.text for each in said)) for start, *said in of_calls]
        if calls:
            message |= {"tool_calls": calls, "content": delta.text or None}
        return {"message": message} | self._logprobs(delta)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        if "logprobs" not in self.asked.options:
            return {}
        content = []
        for token in delta.tokens:
            assert token.logprobs is not None
            top = [self._named(*each) for each in token.logprobs.top]
            content.append(self._named(token.id, token.logprobs.logprob) | {"top_logprobs": top})
        return {"logprobs": {"content": content, "refusal": None}}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        llm = self.service.llm
        raw = list(llm.vocab.token_bytes(token))
        return {"token": llm.token_text(token), "logprob": finite(logprob), "bytes": raw}


def _call(call: Any, arguments: str = "") -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


class CompletionAnswer(OpenAIAnswer):
    """The answer to ``/v1/completions``: texts continued as they are, or filled in before a suffix."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    nothing: ClassVar = {"text": ""}
    asked: CompletionRequest

    def __init__(self, service: Service, body: CompletionBody) -> None:
        super().__init__(service, body)
        prompts, n = self.asked.prompts if body.echo else (), body.n
        texts = [service.llm.detokenize(prompt) if isinstance(prompt, list) else str(prompt) for prompt in prompts]
        self._echoes = [text for text in texts for _ in range(n)]
        self._offsets = [0] * len(self.choices)

    def opening(self, index: int) -> Iterator[dict[str, Any]]:
        if self._echoes:
            yield {"text": self._echoes[index]}

    def pieces(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        yield {"text": delta.text} | self._logprobs(index, delta.tokens)

    def whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        before = self._echoes[index] if self._echoes else ""
        return {"text": before + delta.text} | self._logprobs(index, delta.tokens)

    def _logprobs(self, index: int, tokens: Sequence[EmittedToken]) -> dict[str, Any]:
        if "logprobs" not in self.asked.options:
            return {}
        llm, rows = self.service.llm, []
        for token in tokens:
            assert token.logprobs is not None
            top = {llm.token_text(id): finite(logprob) for id, logprob in token.logprobs.top}
            rows.append((llm.token_text(token.id), finite(token.logprobs.logprob), top, self._offsets[index]))
            self._offsets[index] += len(token.text)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {"logprobs": {name: [row[i] for row in rows] for i, name in enumerate(names)}}
