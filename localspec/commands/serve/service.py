"""Answering requests: the one ``LLM``, the line in front of it, and what is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import ClientDisconnect

from localspec import __version__
from localspec.commands.serve.body import BodyReader
from localspec.commands.serve.deltas import Delta, DeltaReader
from localspec.commands.serve.errors import as_api_error, stopping
from localspec.commands.serve.metrics import Metrics
from localspec.commands.serve.requests import AnswerOptions, ServedModel
from localspec.commands.serve.settings import ServerSettings
from localspec.commands.serve.tool_calls import MARKERS
from localspec.commands.serve.tools import ToolUse, forced_call, messages_for
from localspec.commands.serve.turns import Turns
from localspec.errors import PromptTooLong, UsageError
from localspec.llm import LLM
from localspec.runtime.stream import Reply
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
        self.turns = Turns(settings.queue)
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
            forced = forced_call(llm.template, tools, params)
            begun, params = forced.prefix, forced.params
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
        """Answer every task, one after the other, in one turn. To be closed where it is not read to the end.

        Raises:
            ApiError: the queue is full, the wait was too long, or the server ends.
            LocalspecError: the engine failed.
        """
        deadline = time.monotonic() + self.settings.time_limit
        async with self.turns.turn(self.settings.time_limit):
            for index, task in enumerate(tasks):
                async with aclosing(self._answer(options, task, index, deadline)) as events:
                    async for event in events:
                        yield event

    async def _answer(
        self, options: AnswerOptions, task: AnswerTask, index: int, deadline: float
    ) -> AsyncGenerator[AnswerEvent, None]:
        reader = DeltaReader(task.tools.tools, task.begun, wants_tokens=options.logprobs is not None)
        cut = False
        stream = self.llm.arounds(
            task.prompt,
            task.params,
            speculate=options.speculate,
            draft_length=options.draft_length,
            deadline=max(0.001, deadline - time.monotonic()),
            logprobs=options.logprobs,
            drafters=options.drafters or None,
            prediction=task.prediction,
        )
        async with stream:
            async for round_ in stream:
                yield AnswerEvent(index, reader.read(round_), round_)
                if reader.n_done and not task.tools.parallel:
                    cut = True
                    await stream.aclose()
                    break
            reply = await stream.reply()
        self.metrics.count(reply)
        last = reader.finish()
        finish_reason: str = "length" if reply.finish_reason == "cancelled" else reply.finish_reason
        if reader.n_calls and (cut or finish_reason == "stop"):
            finish_reason = "tool_calls"
        yield AnswerEvent(index, last, reply=reply, finish_reason=finish_reason)

    def counting(self, endpoint: str) -> Counting:
        """Counts a request, and how it ends."""
        return Counting(self.metrics, endpoint)

    def check_open(self) -> None:
        """Refuse what comes while the server goes down."""
        if self.ending.is_set():
            raise stopping()


class Counting:
    """Counts one request when its block is left, by how it is left.

    Args:
        metrics: where.
        endpoint: what was asked for.
    """

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._started = time.monotonic()
        self._n_blocks = 1

    def later(self) -> Counting:
        """Another block is to follow, and only its end counts."""
        self._n_blocks += 1
        return self

    async def __aenter__(self) -> Counting:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._n_blocks -= 1
        if self._n_blocks:
            return
        outcome = "answered" if error is None else "cancelled"
        if isinstance(error, Exception) and not isinstance(error, ClientDisconnect):
            status = as_api_error(error).status
            outcome = "rejected" if status in (429, 503) else "invalid" if status < 500 else "failed"
        self._metrics.finished(self._endpoint, outcome, time.monotonic() - self._started)


def repeated(task: AnswerTask, n: int) -> list[AnswerTask]:
    """The same task n times; with a seed, each answer has a seed of its own."""
    seed = task.params.seed
    if seed is None:
        return [task] * n
    return [task, *(replace(task, params=replace(task.params, seed=(seed + i) % (1 << 63))) for i in range(1, n))]
