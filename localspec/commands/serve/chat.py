"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from localspec.commands.serve.choice import Delta
from localspec.commands.serve.events import event
from localspec.commands.serve.requests import ChatAsked
from localspec.commands.serve.service import Job, Service, numbered
from localspec.commands.serve.tool_calls import CallStart
from localspec.commands.serve.wire import Envelope, chat_logprobs, prompt_tokens


def prepare(service: Service, asked: ChatAsked) -> list[Job]:
    """The jobs that the request comes to; for a thread of its own.

    Raises:
        LocalspecError: the messages do not fit the template or the context.
    """
    return numbered(service.chat_job(asked.messages, asked.tools, asked.common), asked.common.n)


def envelope(service: Service, jobs: Sequence[Job]) -> Envelope:
    return Envelope(service, "chatcmpl", "chat.completion", "chat.completion.chunk", prompt_tokens(jobs))


async def whole(service: Service, asked: ChatAsked, jobs: Sequence[Job]) -> dict[str, Any]:
    """The answer in one piece."""
    frame = envelope(service, jobs)
    choices: list[dict[str, Any]] = []
    for i in range(len(jobs)):
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        logprobs: dict[str, Any] | None = (
            {"content": [], "refusal": None} if asked.common.logprobs is not None else None
        )
        choices.append({"index": i, "message": message, "logprobs": logprobs, "finish_reason": None})
    async for happening in service.answers(asked.common, jobs):
        choice = choices[happening.index]
        if happening.delta is not None:
            _append(choice["message"], happening.delta)
            if choice["logprobs"] is not None:
                choice["logprobs"]["content"] += chat_logprobs(service, happening.delta.tokens)
        if happening.reply is not None:
            choice["finish_reason"] = happening.finish_reason
            frame.replies.append(happening.reply)
            if choice["message"].get("tool_calls") and not choice["message"]["content"]:
                choice["message"]["content"] = None
    return frame.frame(frame.kind) | {"choices": choices, "usage": frame.usage(), "localspec": frame.figures()}


def _append(message: dict[str, Any], delta: Delta) -> None:
    message["content"] += delta.text
    for piece in delta.calls:
        if isinstance(piece, CallStart):
            call = {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
            message.setdefault("tool_calls", []).append(call)
        else:
            message["tool_calls"][piece.index]["function"]["arguments"] += piece.text


async def events(service: Service, asked: ChatAsked, jobs: Sequence[Job]) -> AsyncGenerator[bytes, None]:
    """The answer as it comes."""
    frame = envelope(service, jobs)
    common = asked.common
    usage = {"usage": None} if common.include_usage else {}
    begun: set[int] = set()

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event(frame.frame(frame.chunk) | {"choices": [choice]} | usage)

    async with aclosing(service.answers(common, jobs)) as happenings:
        async for happening in happenings:
            i = happening.index
            if i not in begun:
                begun.add(i)
                yield chunk(i, {"role": "assistant", "content": "", "refusal": None})
            if happening.round is not None and common.rounds:
                yield frame.round_event(happening)
            if happening.delta is not None:
                logprobs = None
                if common.logprobs is not None:
                    logprobs = {"content": chat_logprobs(service, happening.delta.tokens), "refusal": None}
                if happening.delta.text or happening.delta.tokens:
                    yield chunk(i, {"content": happening.delta.text}, logprobs=logprobs)
                for piece in happening.delta.calls:
                    call: dict[str, Any] = {"index": piece.index}
                    if isinstance(piece, CallStart):
                        call |= {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
                    else:
                        call |= {"function": {"arguments": piece.text}}
                    yield chunk(i, {"tool_calls": [call]})
            if happening.reply is not None:
                frame.replies.append(happening.reply)
                yield chunk(i, {}, happening.finish_reason)
    if common.include_usage or common.rounds:
        yield frame.last_event()
