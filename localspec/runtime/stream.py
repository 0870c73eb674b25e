"""What a request gives back: a ``RoundStream`` while it runs, a ``Reply`` when it is done."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from localspec.errors import Closed
from localspec.runtime.jobs import CancelledBy, Job, JobState, wait_for
from localspec.spec_decode.rounds import EmittedToken, FinishReason, Round, SpecStats
from localspec.system.forking import REFUSAL


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer.

    Attributes:
        text: verified text only; without the stop string that ended it, if one did.
        token_ids: the tokens behind it, an end token included.
        finish_reason: ``stop`` (end token or stop string), ``length`` (budget or context), or ``cancelled``.
        stats: see ``SpecStats``.
        model, draft, backend: what produced it.
        cancelled_by: ``caller`` (closed, dropped, its task cancelled) or ``deadline``, where it was cancelled.
        tokens: the tokens with their kinds, sources and, where asked for, log-probabilities.
        explanation: one sentence of the controller: why it drafted as it did.
        seconds_waited: from the call until the engine turned to it.
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

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of ``generate --format json``."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "model": self.model,
            "draft": self.draft,
            "backend": self.backend,
            "stats": self.stats.as_dict(),
        }


Submit = Callable[[Callable[[Any], Any]], Job]
"""Queues a request; takes what delivers its Rounds and then a Reply or an exception."""


class RoundStream(Iterator[Round]):
    """The rounds of one answer as they happen; after the last, ``reply`` holds the whole.

    Closing it, or dropping it, stops the engine within a round, and keeps a request that still waits from ever running.
    ``reply`` is then what was said until there, with ``finish_reason`` ``cancelled``.
    """

    def __init__(self, submit: Submit) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reply: Reply | None = None
        self._done = False
        self._job: Job | None = None
        self._job = submit(self._items.put)

    @property
    def state(self) -> JobState:
        """``waiting`` in the queue, ``running``, or ``done``."""
        assert self._job is not None
        return self._job.state

    def __iter__(self) -> RoundStream:
        return self

    def __next__(self) -> Round:
        if self._done:
            raise StopIteration
        item = wait_for(self._items, self._job)
        if isinstance(item, Round):
            return item
        self._done = True
        if isinstance(item, BaseException):
            raise item
        self._reply = item
        raise StopIteration

    @property
    def reply(self) -> Reply:
        """The answer; waits for the end of the stream.

        Raises:
            LocalspecError: the request failed.
        """
        for _ in self:
            pass
        if self._reply is None:
            raise Closed("the request ended without an answer")
        return self._reply

    def close(self) -> None:
        """Stop decoding; ``reply`` then has the text until here. Safe to call twice, and after the end."""
        assert self._job is not None
        self._job.cancel()

    def __enter__(self) -> RoundStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._job is not None:
            self._job.forget()


class AsyncRoundStream(AsyncIterator[Round]):
    """``RoundStream`` for asyncio. Made in a running loop, and read there.

    Leaving ``async with``, ``aclose``, cancelling the task that reads it, or dropping it stops the engine within a
    round.
    """

    def __init__(self, submit: Submit) -> None:
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Any] = asyncio.Queue()
        self._items = items
        self._reply: Reply | None = None
        self._done = False
        self._job: Job | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._job = submit(lambda item: loop.call_soon_threadsafe(items.put_nowait, item))
        if self._job.seconds_left is not None:
            self._timer = loop.call_later(max(0.0, self._job.seconds_left), self._job.expire)

    @property
    def state(self) -> JobState:
        """``waiting`` in the queue, ``running``, or ``done``."""
        assert self._job is not None
        return self._job.state

    def __aiter__(self) -> AsyncRoundStream:
        return self

    async def __anext__(self) -> Round:
        if self._done:
            raise StopAsyncIteration
        if self._job is not None and self._job.orphaned and self._items.empty():
            raise Closed(REFUSAL)
        try:
            item = await self._items.get()
        except BaseException:
            await self.aclose()  # the task that reads was cancelled
            raise
        if isinstance(item, Round):
            return item
        self._done = True
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(item, BaseException):
            raise item
        self._reply = item
        raise StopAsyncIteration

    async def reply(self) -> Reply:
        """The answer; waits for the end of the stream.

        Raises:
            LocalspecError: the request failed.
        """
        async for _ in self:
            pass
        if self._reply is None:
            raise Closed("the request ended without an answer")
        return self._reply

    async def aclose(self) -> None:
        """Stop decoding; ``reply`` then has the text until here. Safe to call twice, and after the end."""
        assert self._job is not None
        if self._timer is not None:
            self._timer.cancel()
        self._job.cancel()

    async def __aenter__(self) -> AsyncRoundStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._job is not None:
            self._job.forget()


def result_of(submit: Submit) -> Any:
    """Queue a job that delivers one thing, and wait for it.

    Raises:
        Whatever the job raised.
    """
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    job = submit(items.put)
    try:
        result = wait_for(items, job)
    finally:
        job.cancel()
    if isinstance(result, BaseException):
        raise result
    return result


async def aresult_of(submit: Submit) -> Any:
    """As ``result_of``, for asyncio."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[Any] = asyncio.Queue()
    job = submit(lambda item: loop.call_soon_threadsafe(items.put_nowait, item))
    timer = None if job.seconds_left is None else loop.call_later(max(0.0, job.seconds_left), job.expire)
    try:
        result = await items.get()
    finally:
        job.cancel()
        if timer is not None:
            timer.cancel()
    if isinstance(result, BaseException):
        raise result
    return result
