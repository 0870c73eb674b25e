"""A request's answer in OpenAI's shape, whole or as events; ``chat`` and ``completions`` say how theirs differ."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from localspec.engine.request import Reply
from localspec.server.events import event
from localspec.server.requests import AnswerOptions, ChatRequest, CompletionRequest
from localspec.server.service import AnswerEvent, AnswerTask, Service, repeated
from localspec.server.tool_calls import CallStart
from localspec.server.tools import Delta
from localspec.spec_decode.rounds import EmittedToken

ROUND_EVENT = "localspec.round"


class ApiAnswer(ABC):
    """One request's answer; it may have several choices.

    The choices of its chunks are what everything is made of: streamed as they are, or added up to whole choices.

    Args:
        service: what answers.
        options: of the request.
        tasks: one for each choice.

    Attributes:
        prefix: of the identifier, as OpenAI has it.
        kind, chunk_kind: ``object`` of a whole answer, and of a piece of one.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, service: Service, options: AnswerOptions, tasks: Sequence[AnswerTask]) -> None:
        self.service = service
        self.options = options
        self._tasks = tasks
        self._id = f"{self.prefix}-{secrets.token_hex(14)}"
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._replies: list[Reply] = []

    @abstractmethod
    def begin(self, index: int) -> Iterable[dict[str, Any]]:
        """What the chunks of a choice begin with."""

    @abstractmethod
    def pieces(self, index: int, delta: Delta) -> Iterable[dict[str, Any]]:
        """What the chunks say of a delta."""

    @abstractmethod
    def end(self) -> dict[str, Any]:
        """What the last chunk of a choice says, besides the reason."""

    @abstractmethod
    def whole_choice(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """All that the chunks of a choice said, as one."""

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        pieces: list[list[dict[str, Any]]] = [[] for _ in self._tasks]
        async with aclosing(self.service.answers(self.options, self._tasks)) as happenings:
            async for happening in happenings:
                pieces[happening.index] += [*self._opening(happening.index), *self._choices(happening)]
        return await asyncio.to_thread(self._whole, pieces)

    def _whole(self, pieces: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        choices = [_choice(i, self.whole_choice(said), said[-1]["finish_reason"]) for i, said in enumerate(pieces)]
        return self._frame(self.kind) | {
            "choices": choices,
            "usage": self._usage(),
            "localspec": figures(self._replies),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""

        def chunk(name: str | None = None, **content: Any) -> bytes:
            return event(self._frame(self.chunk_kind) | {"choices": []} | content, name)

        usage = {"usage": None} if self.options.include_usage else {}
        async with aclosing(self.service.answers(self.options, self._tasks)) as happenings:
            async for happening in happenings:
                for choice in self._opening(happening.index):
                    yield chunk(choices=[choice], **usage)
                if happening.round is not None and self.options.rounds:
                    # OpenAI's clients do not look at an event's name, so it is also a chunk without choices.
                    own = {"choice": happening.index, "round": happening.round.as_event()}
                    yield chunk(ROUND_EVENT, localspec=own)
                for choice in self._choices(happening):
                    yield chunk(choices=[choice], **usage)
        if self.options.include_usage or self.options.rounds:
            yield chunk(usage=self._usage(), localspec=figures(self._replies))

    def _opening(self, index: int) -> Iterator[dict[str, Any]]:
        if index not in self._begun:
            self._begun.add(index)
            for piece in self.begin(index):
                yield _choice(index, piece)

    def _choices(self, happening: AnswerEvent) -> Iterator[dict[str, Any]]:
        if happening.delta:
            for piece in self.pieces(happening.index, happening.delta):
                yield _choice(happening.index, piece)
        if happening.reply is not None:
            self._replies.append(happening.reply)
            yield _choice(happening.index, self.end(), happening.finish_reason)

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.service.names[0],
            "system_fingerprint": self.service.fingerprint,
        }

    def _usage(self) -> dict[str, Any]:
        """OpenAI's usage. Predictions are draft tokens of any drafter; what the client sent as one is among them.

        Accepted are those that are in the answer, rejected those that the target refused. Neither is part of
        ``completion_tokens`` twice: an accepted one is a token of the answer, a rejected one is none.
        """
        prompts = {id(task.prompt): len(task.prompt) for task in self._tasks}  # several answers to one count it once
        prompt = sum(prompts.values())
        completion = sum(reply.stats.completion_tokens for reply in self._replies)
        accepted = sum(token.kind == "accepted" for reply in self._replies for token in reply.tokens)
        thought = sum(reply.stats.thinking_tokens for reply in self._replies)
        rejected = sum(reply.stats.num_draft_tokens - reply.stats.num_accepted_tokens for reply in self._replies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": self._replies[0].stats.cached_tokens if self._replies else 0,
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
                "reasoning_tokens": thought,
                "audio_tokens": 0,
            },
        }


def figures(replies: Sequence[Reply]) -> dict[str, Any]:
    """Our own part of an answer: its statistics, or a list of them where there are several replies."""
    first, last = replies[0], replies[-1]
    stats = [reply.stats.as_dict() for reply in replies]
    return {
        "stats": stats[0] if len(stats) == 1 else stats,
        "draft": last.draft,
        "backend": last.backend,
        "explanation": last.explanation,
        "seconds_waited": round(first.seconds_waited, 3),
    }


def _choice(index: int, piece: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, **piece, "logprobs": piece.get("logprobs"), "finish_reason": finish_reason}


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # OpenAI's own figure for "never"; JSON has no infinity


# ``POST /v1/chat/completions``.


class ChatAnswer(ApiAnswer):
    """The answer to a chat. Made in a thread: templates and grammars may take a while.

    Raises:
        LocalspecError: the messages do not fit the template or the context.
    """

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, request: ChatRequest) -> None:
        task = service.chat_task(request.messages, request.tools, request.options)
        super().__init__(service, request.options, repeated(task, request.options.n))

    def begin(self, index: int) -> Iterator[dict[str, Any]]:
        yield {"delta": {"role": "assistant", "content": "", "refusal": None}}

    def pieces(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.thinking:
            yield {"delta": {"reasoning_content": delta.thinking}}
        if delta.text or delta.tokens:
            piece: dict[str, Any] = {"delta": {"content": delta.text}}
            if self.options.logprobs is not None:
                piece["logprobs"] = {"content": [self._entry(token) for token in delta.tokens], "refusal": None}
            yield piece
        for call in delta.calls:
            if isinstance(call, CallStart):
                said = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            else:
                said = {"function": {"arguments": call.text}}
            yield {"delta": {"tool_calls": [{"index": call.index} | said]}}

    def end(self) -> dict[str, Any]:
        return {"delta": {}}

    def whole_choice(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {}
        texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        calls: list[dict[str, Any]] = []
        arguments: list[list[str]] = []
        for delta in (dict(piece["delta"]) for piece in pieces):
            for call in delta.pop("tool_calls", ()):
                if "id" in call:
                    calls.append({name: value for name, value in call.items() if name != "index"})
                    arguments.append([])
                arguments[-1].append(call["function"]["arguments"])
            for name, said in texts.items():
                if name in delta:
                    said.append(delta[name])
            message |= delta
        message |= {name: "".join(said) for name, said in texts.items() if said}
        for call, said in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(said)
        if calls:
            message |= {"tool_calls": calls, "content": message["content"] or None}
        if self.options.logprobs is None:
            return {"message": message}
        tokens = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        return {"message": message, "logprobs": {"content": tokens, "refusal": None}}

    def _entry(self, token: EmittedToken) -> dict[str, Any]:
        """``logprobs.content`` for one token."""
        assert token.logprobs is not None
        top = [self._named(id, logprob) for id, logprob in token.logprobs.top]
        return self._named(token.id, token.logprobs.logprob) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        llm = self.service.llm
        raw = list(llm.vocab.token_bytes(token))
        return {"token": llm.token_text(token), "logprob": finite(logprob), "bytes": raw}


# ``POST /v1/completions``: a text continued as it is, or filled in before a suffix.

_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionAnswer(ApiAnswer):
    """The texts continued. Made in a thread: cutting long texts into tokens may take a while.

    Raises:
        UsageError: a prompt is empty, or does not fit into the context, or the model cannot fill in.
    """

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        n, prompts = request.options.n, request.prompts
        tasks = [each for task in completion_tasks(service, request) for each in repeated(task, n)]
        super().__init__(service, request.options, tasks)
        self._echoes: list[str] = []
        if request.echo:
            texts = [prompt if isinstance(prompt, str) else service.llm.detokenize(prompt) for prompt in prompts]
            self._echoes = [text for text in texts for _ in range(n)]
        self._offsets = [0] * len(tasks)

    def begin(self, index: int) -> Iterator[dict[str, Any]]:
        if self._echoes:
            yield {"text": self._echoes[index]}

    def pieces(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        piece: dict[str, Any] = {"text": delta.text}
        if self.options.logprobs is not None:
            piece["logprobs"] = self._logprobs(index, delta.tokens)
        yield piece

    def end(self) -> dict[str, Any]:
        return {"text": ""}

    def whole_choice(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        text = "".join(piece["text"] for piece in pieces)
        if self.options.logprobs is None:
            return {"text": text}
        each = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        return {"text": text, "logprobs": {name: [v for one in each for v in one[name]] for name in _LOGPROBS}}

    def _logprobs(self, index: int, tokens: Sequence[EmittedToken]) -> dict[str, Any]:
        llm = self.service.llm
        rows = []
        for token in tokens:
            assert token.logprobs is not None
            top = {llm.token_text(id): finite(logprob) for id, logprob in token.logprobs.top}
            rows.append((llm.token_text(token.id), finite(token.logprobs.logprob), top, self._offsets[index]))
            self._offsets[index] += len(token.text)
        return {name: [row[i] for row in rows] for i, name in enumerate(_LOGPROBS)}


def completion_tasks(service: Service, request: CompletionRequest) -> list[AnswerTask]:
    """What to answer, for each prompt.

    Raises:
        UsageError: a prompt is empty, or does not fit into the context, or the model cannot fill in.
    """
    if request.suffix is None:
        return [service.text_task(prompt, request.options) for prompt in request.prompts]
    return [service.fill_task(str(prompt), request.suffix, request.options) for prompt in request.prompts]
