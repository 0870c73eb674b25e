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
from localspec.values import shown


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
        return {
            "text": self.text,
            **({"thinking": self.thinking} if self.thinking else {}),
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "model": self.model,
            "draft": self.draft,
            "backend": self.backend,
            "stats": self.stats.as_dict(),
        }


Submit = Callable[[Callable[[Any], Any]], Job]
"""Queues a job; takes what delivers its Rounds, if it makes any, and then its result (a Reply) or an exception."""


class _Stream:
    """What the two kinds of streams share."""

    _job: Job | None = None
    _reply: Any = None
    _done = False

    @property
    def state(self) -> JobState:
        """``waiting`` in the queue, ``running``, or ``done``."""
        assert self._job is not None
        return self._job.state

    def _round(self, item: Any) -> Round | None:
        """The round that was delivered; None for the result, which ends the stream. An exception is raised."""
        if isinstance(item, Round):
            return item
        self._done = True
        if isinstance(item, BaseException):
            raise item
        self._reply = item
        return None

    def _result(self) -> Any:
        if self._reply is None:
            raise Closed("the request ended without an answer")
        return self._reply

    def __del__(self) -> None:
        if self._job is not None:
            self._job.forget()


class RoundStream(_Stream, Iterator[Round]):
    """The rounds of one answer as they happen; after the last, ``reply`` holds the whole.

    Closing it, or dropping it, stops the engine within a round, and keeps a request that still waits from ever running.
    ``reply`` is then what was emitted until there, with ``finish_reason`` ``cancelled``.
    """

    def __init__(self, submit: Submit) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._job = submit(self._items.put)

    def __iter__(self) -> RoundStream:
        return self

    def __next__(self) -> Round:
        round_ = None if self._done else self._round(wait_for(self._items, self._job))
        if round_ is None:
            raise StopIteration
        return round_

    @property
    def reply(self) -> Reply:
        """The answer; waits for the end of the stream.

        Raises:
            LocalspecError: the request failed.
        """
        for _ in self:
            pass
        return self._result()  # type: ignore[no-any-return] # what the job delivers last

    def close(self) -> None:
        """Stop decoding; ``reply`` then has the text until here. Safe to call twice, and after the end."""
        assert self._job is not None
        self._job.cancel()

    def __enter__(self) -> RoundStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncRoundStream(_Stream, AsyncIterator[Round]):
    """``RoundStream`` for asyncio. Made in a running loop, and read there.

    Leaving ``async with``, ``aclose``, cancelling the task that reads it, or dropping it stops the engine within a
    round.
    """

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, submit: Submit) -> None:
        loop = asyncio.get_running_loop()
        items = self._items = asyncio.Queue[Any]()
        self._job = submit(lambda item: loop.call_soon_threadsafe(items.put_nowait, item))
        if self._job.seconds_left is not None:
            self._timer = loop.call_later(max(0.0, self._job.seconds_left), self._job.expire)

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
        if (round_ := self._round(item)) is None:
            raise StopAsyncIteration
        return round_

    async def reply(self) -> Reply:
        """The answer; waits for the end of the stream.

        Raises:
            LocalspecError: the request failed.
        """
        async for _ in self:
            pass
        return self._result()  # type: ignore[no-any-return] # what the job delivers last

    def _round(self, item: Any) -> Round | None:
        if self._timer is not None and not isinstance(item, Round):
            self._timer.cancel()
        return super()._round(item)

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
