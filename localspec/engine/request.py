"""A request: what is asked of a pair, checked; and what it gives back, while it runs and when it is done."""

from __future__ import annotations

import asyncio
import os
import queue
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypedDict

from localspec.controllers.fixed import FixedController
from localspec.engine.worker import CancelledBy, Job, JobState
from localspec.errors import Closed, UsageError, checked_whole, did_you_mean, is_whole, listed, shown
from localspec.prompts.prompts import Prompt, PromptEncoder, is_messages
from localspec.sampling.sampling import SAMPLING, SamplingParams, checked_top
from localspec.spec_decode.detokenizer import ThinkingReader
from localspec.spec_decode.rounds import EmittedToken, FinishReason, PromptProgress, Round, SpecStats
from localspec.system.process import REFUSAL

DraftLength = int | str
"""``auto``, or a number of tokens."""


class SamplingOptions(TypedDict, total=False):
    """The fields of ``SamplingParams``, as keywords of a request."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    max_tokens: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    response_format: Mapping[str, Any] | None
    grammar: str | None


class RequestOptions(SamplingOptions, total=False):
    """The keywords of a request; ``Asking.rounds`` explains them."""

    speculate: bool
    draft_length: DraftLength | None
    drafters: str | Iterable[str] | None
    prediction: str | Sequence[int] | None
    think: str | None
    thinking_budget: int | None
    deadline: float | None
    conversation: Hashable | None
    priority: int
    logprobs: int | None
    keep_tokens: int | None


REQUEST_OPTIONS = tuple(RequestOptions.__annotations__)


def split_options(params: SamplingParams | None, options: Mapping[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """The sampling parameters of a request, those given by keyword over ``params``, and its other options.
    ``UsageError``: there is no such option, or a parameter makes no sense."""
    for name in options:
        if name not in REQUEST_OPTIONS:
            raise UsageError(f"there is no option {name!r}{did_you_mean(name, REQUEST_OPTIONS)}")
    if not isinstance(params, SamplingParams | None):
        raise UsageError(f"params must be SamplingParams, not {type(params).__name__}")
    params = params or SamplingParams()
    sampling: dict[str, Any] = {name: value for name, value in options.items() if name in SAMPLING}
    rest = {name: value for name, value in options.items() if name not in SAMPLING}
    return replace(params, **sampling) if sampling else params, rest


def checked_length(value: Any) -> DraftLength:
    if isinstance(value, str) and value == "auto":
        return value
    try:
        length = int(value) if isinstance(value, str) or is_whole(value) else None
    except ValueError:
        length = None
    if length is None:
        raise UsageError(f"the draft length must be auto or a number, not {shown(value)}")
    return FixedController(length).length


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a pair, with the options that ``Asking.rounds`` explains, checked: ``UsageError``.

    Attributes:
        prompt: text, messages or token ids; or what makes them when the request's turn comes.
        draft_length: ``auto``, or a number of tokens; 0, to which ``speculate=False`` sets it, decodes plainly.
        prediction: a text, or token ids, which it becomes.
    """

    encoder: PromptEncoder
    prompt: Prompt | Callable[[], Prompt]
    params: SamplingParams
    draft_length: DraftLength = "auto"
    speculate: bool = True
    drafters: Sequence[str] | None = None
    prediction: Sequence[int] | None = None
    think: str | None = None
    thinking_budget: int | None = None
    logprobs: int | None = None
    keep_tokens: int | None = None

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        length = checked_length(self.draft_length)
        put("draft_length", length if self.speculate else 0)
        if self.drafters is not None:
            several = listed(self.drafters)
            names: list[Any] = [self.drafters] if several is None else several
            for name in names:
                if not isinstance(name, str):
                    raise UsageError(f"drafters must be names of drafters, not {shown(name)}")
            put("drafters", names)
        if self.prediction is not None:
            put("prediction", self.encoder.ids("prediction", self.prediction))
        if self.think is not None:
            self.encoder.checked_think(self.think)
        if self.logprobs is not None:
            put("logprobs", checked_top(self.logprobs))
        for name in ("thinking_budget", "keep_tokens"):
            if getattr(self, name) is not None:
                put(name, checked_whole(name, getattr(self, name), 0))

    def read(self, room: int | None = None) -> tuple[list[int], ThinkingReader | None]:
        """The prompt's tokens, and what tells thinking and answer apart; None where the model is not known to think.
        ``room``: see ``PromptEncoder.encode``; ``UsageError``, ``TemplateError``: the prompt cannot be."""
        encoder, think = self.encoder, self.think or "auto"
        prompt = self.prompt() if callable(self.prompt) else self.prompt
        if self.params.constrained:
            if think not in ("auto", "off"):
                raise UsageError("constrained output cannot be combined with thinking: leave out one of them")
            think = "off"
        tokens = encoder.encode(prompt, think=think, room=room)
        if encoder.thinking is None or (self.think is None and not is_messages(prompt)):
            return tokens, None
        state = encoder.thinking_state(tokens)
        budget = 0 if think == "off" else self.thinking_budget
        return tokens, ThinkingReader(encoder.thinking, inside=state == "inside", over=state == "over", budget=budget)


# What a request gives back: a ``RoundStream`` while it runs, a ``Reply`` when it is done.


@dataclass(frozen=True, slots=True, repr=False)
class Reply:
    """A finished answer; printed, it is its text.

    Attributes:
        text: verified text of the answer only; without the stop string that ended it, if one did.
        token_ids: its tokens, an end token included.
        finish_reason: ``stop`` (end token or stop string), ``length`` (budget or context), or ``cancelled``.
        stats: see ``SpecStats``.
        model, draft, backend: what produced it.
        cancelled_by: ``caller`` (closed, dropped, its task cancelled) or ``deadline``, where it was cancelled.
        tokens: the tokens with their kinds, sources and, where asked for, log-probabilities.
        explanation: why there was drafting or not: sentences for people, a line for each drafter.
        seconds_waited: from the call until the engine turned to it.
        thinking: verified text of what the model thought before, its marks left out; ``text`` has none of it.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: SpecStats
    model: str
    draft: list[str]
    backend: str
    cancelled_by: CancelledBy | None = None
    tokens: list[EmittedToken] = field(default_factory=list)
    explanation: str = ""
    seconds_waited: float = 0.0
    thinking: str = ""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Reply {shown(self.text)}: {len(self.token_ids)} tokens, {self.finish_reason}>"

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of ``generate --format json``."""
        names = ("text", "thinking", "token_ids", "finish_reason", "model", "draft", "backend")
        values = {name: getattr(self, name) for name in names if name != "thinking" or self.thinking}
        return values | {"stats": self.stats.as_dict()}


class _Stream:
    """Reads a job, which it queues: that gives ``Round`` and ``PromptProgress``, if it makes any, and then itself."""

    _job: Job

    @property
    def state(self) -> JobState:
        """``waiting`` in the queue, ``running``, or ``done``."""
        return self._job.state

    def __del__(self) -> None:
        job: Job | None = getattr(self, "_job", None)  # None where there is no loop
        if job is not None and job.cancelled_by is None:
            job.cancelled_by = "caller"  # no more than that: it takes no lock


class RoundStream(_Stream, Iterator[Round]):
    """The rounds of one answer as they happen; after the last, ``reply`` holds the whole.

    Closing it, or dropping it, stops the engine within a round, and keeps a request that still waits from ever running.
    ``reply`` is then what was emitted until there, with ``finish_reason`` ``cancelled``.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._items = job, queue.SimpleQueue[Any]()
        job.deliver = self._items.put
        job.submit(job)

    def __next__(self) -> Round:
        for step in self.steps():
            if isinstance(step, Round):
                return step
        raise StopIteration

    def steps(self) -> Iterator[Round | PromptProgress]:
        """The rounds, and before them how far the prompt is read, where that takes a while.

        >>> for step in llm.rounds(messages).steps():
        ...     print(step if isinstance(step, PromptProgress) else step.text)
        """
        while isinstance(item := self._job.wait_for(self._items), Round | PromptProgress):
            yield item
        self._items.put(item)  # the end is still there when it is asked again
        self._job.reply()

    @property
    def reply(self) -> Reply:
        """The answer; waits for the end of the stream. ``LocalspecError``: the request failed."""
        for _ in self.steps():
            pass
        return self._job.reply()  # type: ignore[no-any-return] # what the job returned

    def close(self) -> None:
        """Stop decoding; ``reply`` then has the text until here. Safe to call twice, and after the end."""
        self._job.cancel()

    def __enter__(self) -> RoundStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self._job.cancel()


class AsyncRoundStream(_Stream, AsyncIterator[Round]):
    """``RoundStream`` for asyncio, made and read in a running loop. Leaving ``async with``, ``aclose``, cancelling the
    task that reads it, or dropping it stops the engine within a round."""

    def __init__(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        items = self._items = asyncio.Queue[Any]()
        self._job = job
        job.deliver = lambda item: loop.call_soon_threadsafe(items.put_nowait, item)
        job.submit(job)
        late = None if job.ends_at is None else max(0.0, job.ends_at - time.monotonic())
        self._timer = None if late is None else loop.call_later(late, job.cancel, "deadline")

    async def __anext__(self) -> Round:
        while (step := await self._step()) is not None:
            if isinstance(step, Round):
                return step
        raise StopAsyncIteration

    async def steps(self) -> AsyncIterator[Round | PromptProgress]:
        """As ``RoundStream.steps``, for asyncio."""
        while (step := await self._step()) is not None:
            yield step

    async def _step(self) -> Round | PromptProgress | None:
        if self._job.process != os.getpid() and self._items.empty():
            raise Closed(REFUSAL)
        try:
            item = await self._items.get()
        except BaseException:
            await self.aclose()  # the task that reads was cancelled
            raise
        if isinstance(item, Round | PromptProgress):
            return item
        self._items.put_nowait(item)  # the end is still there when it is asked again
        await self.aclose()
        self._job.reply()
        return None

    async def reply(self) -> Reply:
        """The answer; waits for the end of the stream. ``LocalspecError``: the request failed."""
        while await self._step() is not None:
            pass
        return self._job.reply()  # type: ignore[no-any-return] # what the job returned

    async def aclose(self) -> None:
        """Stop decoding; ``reply`` then has the text until here. Safe to call twice, and after the end."""
        if self._timer is not None:
            self._timer.cancel()
        self._job.cancel()

    async def __aenter__(self) -> AsyncRoundStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
