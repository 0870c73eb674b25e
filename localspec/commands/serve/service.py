"""Answering requests: the one ``LLM``, the line in front of it, and what is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import ClientDisconnect

from localspec import __version__
from localspec.commands.serve.body import BodyReader
from localspec.commands.serve.deltas import Delta, DeltaReader
from localspec.commands.serve.errors import as_api_error, stopping, too_busy, too_late
from localspec.commands.serve.metrics import Metrics
from localspec.commands.serve.requests import AnswerOptions, ServedModel
from localspec.commands.serve.settings import ServerSettings
from localspec.commands.serve.tool_calls import MARKERS
from localspec.commands.serve.tools import ToolUse, forced_call, messages_for
from localspec.errors import PromptTooLong, QueueFull, UsageError
from localspec.llm import LLM
from localspec.runtime.stream import AsyncRoundStream, Reply
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.rounds import Round


@dataclass(frozen=True, slots=True)
class AnswerTask:
    """One answer to make.

    Attributes:
        prompt: token ids.
        params: the sampling parameters.
        tools: functions that may be called.
        prediction: token ids of a text that the answer is likely to repeat.
        begun: the beginning of the answer that stands at the prompt's end.
    """

    prompt: list[int]
    params: SamplingParams
    tools: ToolUse = field(default_factory=ToolUse)
    prediction: Sequence[int] = ()
    begun: str = ""


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """What happened to answer ``index``: a round and the delta that it makes, or the end and the last delta."""

    index: int
    delta: Delta
    round: Round | None = None
    reply: Reply | None = None
    finish_reason: str | None = None


class Service:
    """What the endpoints share.

    Args:
        llm: the loaded pair; it is not closed here.
        settings: how to behave.

    Attributes:
        ending: set once the server goes down; whatever runs then ends.
    """

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        llm.max_queue = settings.queue
        self.bodies = BodyReader(settings.body_bytes, settings.bodies_bytes, settings.body_seconds)
        self.metrics = Metrics()
        self.ending = asyncio.Event()
        self.started = time.time()
        self.fingerprint = f"localspec-{__version__}-{llm.backend_name}"
        llm.vocab.show(MARKERS)  # the marks of tool calls are read as text

    @property
    def names(self) -> list[str]:
        """What requests may call the model; the first is what answers call it."""
        return list(dict.fromkeys([self.llm.model_name, *self.settings.aliases]))

    def served(self) -> ServedModel:
        return ServedModel(self.settings.params, self.llm.draft_names, self.llm.vocab.n_tokens)

    # -- prompts -------------------------------------------------------------------------------------------------------

    def chat_task(self, messages: Sequence[Any], tools: ToolUse, options: AnswerOptions) -> AnswerTask:
        """Messages through the chat template. It may take a while: not for the event loop.

        Raises:
            UsageError, TemplateError: they cannot be.
        """
        llm, params = self.llm, options.params
        prepared = messages_for(llm.template, messages, tools, self.settings.system)
        begun = ""
        if tools.required:
            begun, params = forced_call(llm.template, tools, params)
        tokens = llm.encode(prepared, tools=list(tools.tools) or None)
        if begun:
            tokens += llm.tokenize(begun, parse_special=True)
        return AnswerTask(self._fitting(tokens), params, tools, self._prediction(options), begun)

    def text_task(self, prompt: str | list[int], options: AnswerOptions) -> AnswerTask:
        """A text to continue as it is, or token ids. It may take a while: not for the event loop.

        Raises:
            UsageError: it is empty, or too long.
        """
        tokens = prompt if isinstance(prompt, list) else self.llm.encode(prompt)
        return AnswerTask(self._fitting(tokens), options.params, prediction=self._prediction(options))

    def _prediction(self, options: AnswerOptions) -> list[int]:
        # No answer is longer than the context, so what lies behind cannot be copied.
        return self.llm.tokenize(options.prediction)[: self.llm.n_ctx] if options.prediction else []

    def _fitting(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise UsageError("the prompt is empty: there is nothing to continue")
        if len(tokens) >= self.llm.n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens and the context holds {self.llm.n_ctx}, answer included"
            )
        return tokens

    # -- answers -------------------------------------------------------------------------------------------------------

    async def answers(self, options: AnswerOptions, tasks: Sequence[AnswerTask]) -> AsyncGenerator[AnswerEvent, None]:
        """Answer every task, one after the other. To be closed where it is not read to the end.

        Raises:
            ApiError: the queue is full, or the wait was too long.
            LocalspecError: the engine failed.
        """
        conversation = object()
        async with AsyncExitStack() as stack:
            try:
                streams = [await stack.enter_async_context(self._ask(options, task, conversation)) for task in tasks]
            except QueueFull as error:
                raise too_busy(str(error), self.metrics.mean_request_seconds * (self.llm.queue_length + 1)) from None
            for index, (task, stream) in enumerate(zip(tasks, streams, strict=True)):
                async with aclosing(self._answer(options, task, index, stream)) as events:
                    async for event in events:
                        yield event

    def _ask(self, options: AnswerOptions, task: AnswerTask, conversation: object) -> AsyncRoundStream:
        return self.llm.arounds(
            task.prompt,
            task.params,
            speculate=options.speculate,
            draft_length=options.draft_length,
            deadline=self.settings.time_limit,
            conversation=conversation,
            logprobs=options.logprobs,
            drafters=options.drafters or None,
            prediction=task.prediction,
        )

    async def _answer(
        self, options: AnswerOptions, task: AnswerTask, index: int, stream: AsyncRoundStream
    ) -> AsyncGenerator[AnswerEvent, None]:
        reader = DeltaReader(task.tools.tools, task.begun, wants_tokens=options.logprobs is not None)
        cut = False
        async for round_ in stream:
            yield AnswerEvent(index, reader.read(round_), round_)
            if reader.calls.n_done and not task.tools.parallel:
                cut = True
                await stream.aclose()
                break
        reply = await stream.reply()
        if index == 0 and reply.cancelled_by == "deadline" and not reply.stats.prompt_tokens:
            raise too_late(self.settings.time_limit)
        self.metrics.count(reply)
        last = reader.finish()
        finish_reason: str = "length" if reply.finish_reason == "cancelled" else reply.finish_reason
        if reader.calls.n_calls and (cut or finish_reason == "stop"):
            finish_reason = "tool_calls"
        yield AnswerEvent(index, last, reply=reply, finish_reason=finish_reason)

    def check_open(self) -> None:
        """Refuse what comes while the server goes down."""
        if self.ending.is_set():
            raise stopping()

    @contextmanager
    def counted(self, endpoint: str, started: float, *, goes_on: bool = False) -> Iterator[None]:
        """Count a request by how the block ends; ``goes_on``: only if it fails there, as another block follows."""
        outcome = "cancelled"
        try:
            yield
            outcome = "answered"
        except Exception as error:
            if not isinstance(error, ClientDisconnect):
                status = as_api_error(error).status
                outcome = "rejected" if status in (429, 503) else "invalid" if status < 500 else "failed"
            raise
        finally:
            if not (goes_on and outcome == "answered"):
                self.metrics.finished(endpoint, outcome, time.monotonic() - started)


def repeated(task: AnswerTask, n: int) -> list[AnswerTask]:
    """The same task n times; with a seed, each answer has a seed of its own."""
    seed = task.params.seed
    if seed is None:
        return [task] * n
    return [task, *(replace(task, params=replace(task.params, seed=(seed + i) % (1 << 63))) for i in range(1, n))]
