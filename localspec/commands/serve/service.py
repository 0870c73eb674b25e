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
from localspec.commands.serve.choice import Choice, Delta
from localspec.commands.serve.errors import status_of, stopping
from localspec.commands.serve.metrics import Metrics
from localspec.commands.serve.requests import Asked, Served
from localspec.commands.serve.tool_calls import MARKERS
from localspec.commands.serve.tools import ToolUse, forced_call, messages_for
from localspec.commands.serve.turns import Turns
from localspec.errors import PromptTooLong, UsageError
from localspec.llm import LLM
from localspec.runtime.stream import Reply
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.rounds import Round


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server behaves.

    Attributes:
        params: sampling parameters where a request says nothing; None takes the catalogue's for the model.
        system: system prompt of chats that bring none.
        api_key: what ``Authorization: Bearer`` must carry; None asks for none.
        hosts: names that requests may be addressed to, besides ``localhost`` and the loopback addresses.
        any_address: whether they may be addressed to any IP address.
        origins: web origins, besides the server's own, whose pages may use it.
        aliases: further names that requests may call the model by.
        queue: most requests that wait.
        seconds: longest time from a request to the end of its answer.
        body_bytes: largest body; ``bodies_bytes``: of all that are being read at a time.
        body_seconds: longest time until a body has arrived.
    """

    params: SamplingParams | None = None
    system: str | None = None
    api_key: str | None = None
    hosts: Sequence[str] = ()
    any_address: bool = False
    origins: Sequence[str] = ()
    aliases: Sequence[str] = ()
    queue: int = 32
    seconds: float = 3600.0
    body_bytes: int = 8 << 20
    bodies_bytes: int = 64 << 20
    body_seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class Job:
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


@dataclass(slots=True)
class Happening:
    """Something that happened to answer ``index``: a round, the delta that came of it, or its end."""

    index: int
    round: Round | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    reply: Reply | None = None


class Service:
    """What the endpoints share.

    Args:
        llm: the loaded pair; it is not closed here.
        settings: how to behave.

    Attributes:
        ending: set once the server goes down; whatever runs then ends.
    """

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self.llm = llm
        self.settings = settings
        self.params = settings.params or SamplingParams()
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

    def served(self) -> Served:
        return Served(self.params, self.llm.draft_names, self.llm.vocab.n_tokens)

    # -- prompts -------------------------------------------------------------------------------------------------------

    def chat_job(self, messages: Sequence[Any], tools: ToolUse, asked: Asked) -> Job:
        """Messages through the chat template. It may take a while: not for the event loop.

        Raises:
            UsageError, TemplateError: they cannot be.
        """
        llm, params = self.llm, asked.params
        prepared = messages_for(llm.template, messages, tools, self.settings.system)
        begun = ""
        if tools.required:
            forced = forced_call(llm.template, tools, params)
            begun, params = forced.prefix, forced.params
        tokens = llm.encode(prepared, tools=list(tools.tools) or None)
        if begun:
            tokens += llm.tokenize(begun, parse_special=True)
        return Job(self._fitting(tokens), params, tools, self._prediction(asked), begun)

    def text_job(self, prompt: str | list[int], asked: Asked) -> Job:
        """A text to continue as it is, or token ids. It may take a while: not for the event loop.

        Raises:
            UsageError: it is empty, or too long.
        """
        tokens = prompt if isinstance(prompt, list) else self.llm.encode(prompt)
        return Job(self._fitting(tokens), asked.params, prediction=self._prediction(asked))

    def _prediction(self, asked: Asked) -> list[int]:
        # No answer is longer than the context, so what lies behind cannot be copied.
        return self.llm.tokenize(asked.prediction)[: self.llm.n_ctx] if asked.prediction else []

    def _fitting(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise UsageError("the prompt is empty: there is nothing to continue")
        if len(tokens) >= self.llm.n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens and the context holds {self.llm.n_ctx}, answer included"
            )
        return tokens

    # -- answers -------------------------------------------------------------------------------------------------------

    async def answers(self, asked: Asked, jobs: Sequence[Job]) -> AsyncGenerator[Happening, None]:
        """Answer every job, one after the other, in one turn. To be closed by whoever does not read to the end.

        Raises:
            ApiError: the line is full, the wait was too long, or the server ends.
            LocalspecError: the engine could not.
        """
        deadline = time.monotonic() + self.settings.seconds
        async with self.turns.turn(self.settings.seconds):
            for index, job in enumerate(jobs):
                async with aclosing(self._answer(asked, job, index, deadline)) as happenings:
                    async for happening in happenings:
                        yield happening

    async def _answer(self, asked: Asked, job: Job, index: int, deadline: float) -> AsyncGenerator[Happening, None]:
        choice = Choice(job.tools.tools, job.begun, wants_tokens=asked.logprobs is not None)
        left = max(0.001, deadline - time.monotonic())
        cut = False
        stream = self.llm.arounds(
            job.prompt,
            job.params,
            speculate=asked.speculate,
            draft_length=asked.draft_length,
            deadline=left,
            logprobs=asked.logprobs,
            drafters=asked.drafters or None,
            prediction=job.prediction,
        )
        async with stream:
            async for round_ in stream:
                yield Happening(index, round=round_)
                if delta := choice.read(round_):
                    yield Happening(index, delta=delta)
                if choice.n_done and not job.tools.parallel:
                    cut = True
                    await stream.aclose()
                    break
            reply = await stream.reply()
        self.metrics.count(reply)
        if delta := choice.finish():
            yield Happening(index, delta=delta)
        finish = reply.finish_reason
        if choice.n_calls and (cut or finish == "stop"):
            finish_reason = "tool_calls"
        else:
            finish_reason = "length" if finish == "cancelled" else finish
        yield Happening(index, finish_reason=finish_reason, reply=reply)

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
            status = status_of(error)
            outcome = "rejected" if status in (429, 503) else "invalid" if status < 500 else "failed"
        self._metrics.finished(self._endpoint, outcome, time.monotonic() - self._started)


def numbered(job: Job, n: int) -> list[Job]:
    """The same job n times; with a seed, each answer has a seed of its own."""
    seed = job.params.seed
    if n == 1:
        return [job]
    return [
        job if seed is None else replace(job, params=replace(job.params, seed=(seed + i) % (1 << 63))) for i in range(n)
    ]
