"""Reading a request's body: not too much of it, not for ever, only if it is JSON, and large ones in turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.requests import Request

from localspec.commands.serve.errors import ApiError, invalid
from localspec.values import parse_json

LARGE_BYTES, N_LARGE = 256 << 10, 2
"""Of bodies with more bytes than this, so many at a time are parsed and their requests prepared."""


class BodyReader:
    """Reads the bodies of all requests, within bounds that hold for all of them together.

    Args:
        max_bytes: of one body.
        max_bytes_together: of all that are being read, or wait for their turn, at a time.
        seconds: until a body must have arrived.
    """

    def __init__(self, max_bytes: int, max_bytes_together: int, seconds: float) -> None:
        self.max_bytes = max_bytes
        self.max_bytes_together = max_bytes_together
        self.seconds = seconds
        self._held = 0
        self._turns = asyncio.Semaphore(N_LARGE)

    @asynccontextmanager
    async def json(self, request: Request) -> AsyncGenerator[Any, None]:
        """The body, parsed. What takes long with a large one belongs into the block: it has its turn until its end.

        Raises:
            ApiError: too large (413), too slow (408), not JSON by its type (415) or by its text (400), or too much is
                being read already (503).
            ClientDisconnect: the client is gone.
        """
        _check_type(request.headers)
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self.seconds):
                    await self._read(request, body)
            except TimeoutError:
                message = f"the body did not arrive within {self.seconds:g} s"
                raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
            if len(body) <= LARGE_BYTES:
                yield await asyncio.to_thread(parse, bytes(body))
                return
            async with self._turns:
                value = await asyncio.to_thread(parse, bytes(body))
                self._held -= len(body)
                body.clear()
                yield value
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.max_bytes:
            self._too_large()
        async for chunk in request.stream():
            body += chunk
            self._held += len(chunk)
            if len(body) > self.max_bytes:
                self._too_large()
            if self._held > self.max_bytes_together:
                message = "too much is being sent at once"
                raise ApiError(503, message, code="overloaded", headers={"Retry-After": "2", "Connection": "close"})

    def _too_large(self) -> NoReturn:
        message = f"the body is larger than {self.max_bytes / 1e6:g} MB"
        raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def parse(body: bytes) -> Any:
    """JSON in UTF-8, strictly; see ``parse_json``.

    Raises:
        ApiError: it is not.
    """
    try:
        return parse_json(body)
    except ValueError as error:
        raise invalid(f"the body {error}") from None


def _check_type(headers: Headers) -> None:
    """Refuse a body that a page of another site could have a browser send without asking first.

    Such a page can post forms, plain text and bytes without a type, but not JSON. The guard has refused what has the
    ``Origin`` or ``Sec-Fetch-Site`` of another site, which today's browsers send with every post; an older browser is
    known by its name and other headers. Programs may leave the type out or send that of a form, as Ollama's clients
    and ``curl -d`` do.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    is_browser = "mozilla/" in headers.get("user-agent", "").lower() or any(
        name in headers for name in ("origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-dest")
    )
    if is_browser or kind not in ("", "application/x-www-form-urlencoded"):
        message = "the body must be sent as Content-Type: application/json"
        raise ApiError(415, message, code="unsupported_media_type")
