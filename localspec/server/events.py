"""Streamed answers: server-sent events, or a line of JSON for each piece.

sse-starlette does not fit: it sends status 200 before the first event, so that a refusal cannot have its own, cuts
streams without a last event where the server ends, replaces uvicorn's signal handler, and has no lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localspec.server.http import ApiError, as_api_error, log_failure, stopping

Result = TypeVar("Result")


async def while_connected(receive: Receive, ending: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of the work, which a client that leaves (``ClientDisconnect``), or a server that ends (``ApiError``),
    cancels."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    ended = asyncio.ensure_future(ending.wait())
    try:
        await asyncio.wait((task, gone, ended), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if ended.done():
            raise stopping()
        raise ClientDisconnect
    finally:
        for each in (task, gone, ended):
            each.cancel()
        # The engine is free when this returns.
        await asyncio.gather(task, gone, ended, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


KEEP_ALIVE_SECONDS = 10.0  # longest silence: proxies commonly give up a connection after 30 to 60 s without a byte

_HEADERS = {"Cache-Control": "no-cache, no-store", "X-Accel-Buffering": "no"}


def event(value: Any, name: str | None = None) -> bytes:
    """One event; escaped to ASCII, so no text in it can end it."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, allow_nan=False, separators=(',', ':'))}\n\n".encode()


@dataclass(frozen=True, slots=True)
class Wire:
    """How an API sends events."""

    media_type: str
    failed: Callable[[ApiError, int], bytes]  # says that the answer broke off, after so many events
    keep_alive: bytes = b""  # a sign of life, between events
    end: bytes = b""  # what follows the last event


OPENAI = Wire("text/event-stream", lambda error, n: event(error.as_dict()), b": waiting\n\n", b"data: [DONE]\n\n")
LLAMA_SERVER = replace(OPENAI, end=b"")
"""Of llama-server's own addresses: the last event says ``"stop": true``."""


class EventStream(Response):
    """A response made of encoded events, which are closed when the client leaves.

    Nothing is sent before the first event or sign of life, so that what fails until then has its own status. At the
    end ``over`` is called, also of a stream whose client left before it began.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        ending: asyncio.Event,
        wire: Wire = OPENAI,
        over: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(headers=_HEADERS, media_type=wire.media_type)
        del self.headers["content-length"]
        self._events = events
        self._ending = ending
        self._wire = wire
        self._over = over
        self._n_sent = 0
        self._started = False
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._ending, self._send_all(send))
        except ClientDisconnect:
            return
        except Exception as error:
            log_failure(error)
            refusal = as_api_error(error)
            if not self._started:
                await refusal.response(scope["path"])(scope, receive, send)
            elif not self._ended:
                await self._send(send, self._wire.failed(refusal, self._n_sent), last=True)
        finally:
            if self._over is not None:
                await self._over()

    async def _send(self, send: Send, body: bytes, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._ended = last
        await send({"type": "http.response.body", "body": body, "more_body": not last})

    async def _send_all(self, send: Send) -> None:
        queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        # Read apart from sending: a client that reads slowly must not hold the engine.
        reader = asyncio.ensure_future(self._read_into(queue))
        try:
            while True:
                try:
                    # Not wait_for: in Python 3.11 it swallows a cancellation when an item is there as well.
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        item = await queue.get()
                except TimeoutError:
                    if self._wire.keep_alive:
                        await self._send(send, self._wire.keep_alive)
                    continue
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    await self._send(send, self._wire.end, last=True)
                    return
                await self._send(send, item)
                self._n_sent += 1
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read_into(self, queue: asyncio.Queue[bytes | Exception | None]) -> None:
        try:
            async with aclosing(self._events) as encoded:
                async for item in encoded:
                    queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
