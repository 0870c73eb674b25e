"""uvicorn's HTTP/1.1 protocol, less patient: with clients that are slow to ask, slow to read, or too many."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from localspec.commands.serve.errors import ApiError

HEAD_SECONDS = 15.0
"""Longest time from a connection, or the end of an answer, to the end of the next request's head."""

STALL_SECONDS = 30.0
"""Longest time in which a client may take nothing of what is sent to it."""

MAX_CONNECTIONS = 256
"""A quarter of the 1,024 files that a process may commonly have open."""


class ServerProtocol(H11Protocol):
    """One connection."""

    head_seconds = HEAD_SECONDS
    stall_seconds = STALL_SECONDS
    max_connections = MAX_CONNECTIONS

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too many connections", "overloaded")
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._head_timer)

    def on_response_complete(self) -> None:
        _cancel(self._head_timer)
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, "the request did not arrive in time", "request_timeout")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stall_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in OpenAI's shape."""
        self._refuse(400, "that is no HTTP request", "bad_request")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer without the application, and close."""
        body = json.dumps(ApiError(status, message, code=code).as_dict()).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        response = h11.Response(status_code=status, headers=headers)
        try:
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # in the middle of an answer
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
