"""``POST /v1/completions``: a text continued as it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from localspec.commands.serve.events import event
from localspec.commands.serve.requests import CompletionAsked
from localspec.commands.serve.service import Job, Service, numbered
from localspec.commands.serve.wire import Envelope, completion_logprobs, prompt_tokens


def prepare(service: Service, asked: CompletionAsked) -> list[Job]:
    """The jobs that the request comes to; for a thread of its own.

    Raises:
        UsageError: a prompt is empty, or does not fit into the context.
    """
    jobs: list[Job] = []
    for prompt in asked.prompts:
        jobs += numbered(service.text_job(prompt, asked.common), asked.common.n)
    return jobs


def envelope(service: Service, jobs: Sequence[Job]) -> Envelope:
    return Envelope(service, "cmpl", "text_completion", "text_completion", prompt_tokens(jobs))


def _echoes(service: Service, asked: CompletionAsked) -> list[str]:
    """What each answer begins with."""
    if not asked.echo:
        return [""] * (len(asked.prompts) * asked.common.n)
    texts = [prompt if isinstance(prompt, str) else service.llm.detokenize(prompt) for prompt in asked.prompts]
    return [text for text in texts for _ in range(asked.common.n)]


async def whole(service: Service, asked: CompletionAsked, jobs: Sequence[Job]) -> dict[str, Any]:
    """The answer in one piece."""
    frame = envelope(service, jobs)
    choices: list[dict[str, Any]] = [
        {"index": i, "text": echo, "logprobs": None, "finish_reason": None}
        for i, echo in enumerate(_echoes(service, asked))
    ]
    tokens: list[list[Any]] = [[] for _ in jobs]
    async for happening in service.answers(asked.common, jobs):
        choice = choices[happening.index]
        if happening.delta is not None:
            choice["text"] += happening.delta.text
            tokens[happening.index] += happening.delta.tokens
        if happening.reply is not None:
            choice["finish_reason"] = happening.finish_reason
            frame.replies.append(happening.reply)
            if asked.common.logprobs is not None:
                choice["logprobs"] = completion_logprobs(service, tokens[happening.index], 0)
    return frame.frame(frame.kind) | {"choices": choices, "usage": frame.usage(), "localspec": frame.figures()}


async def events(service: Service, asked: CompletionAsked, jobs: Sequence[Job]) -> AsyncGenerator[bytes, None]:
    """The answer as it comes."""
    frame = envelope(service, jobs)
    common = asked.common
    usage = {"usage": None} if common.include_usage else {}
    echoes = _echoes(service, asked)
    offsets = [0] * len(jobs)

    def chunk(index: int, text: str, finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return event(frame.frame(frame.chunk) | {"choices": [choice]} | usage)

    async with aclosing(service.answers(common, jobs)) as happenings:
        async for happening in happenings:
            i = happening.index
            if echoes[i]:
                yield chunk(i, echoes[i])
                echoes[i] = ""
            if happening.round is not None and common.rounds:
                yield frame.round_event(happening)
            if happening.delta is not None:
                logprobs = None
                if common.logprobs is not None:
                    logprobs = completion_logprobs(service, happening.delta.tokens, offsets[i])
                    offsets[i] += sum(len(token.text) for token in happening.delta.tokens)
                yield chunk(i, happening.delta.text, logprobs=logprobs)
            if happening.reply is not None:
                frame.replies.append(happening.reply)
                yield chunk(i, "", happening.finish_reason)
    if common.include_usage or common.rounds:
        yield frame.last_event()
