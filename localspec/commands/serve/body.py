"""Reading a request's body: not too much of it, not for ever, and only if it is JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from localspec.commands.serve.errors import ApiError, invalid


class BodyReader:
    """Reads the bodies of all requests, within bounds that hold for all of them together.

    Args:
        max_bytes: of one body.
        max_bytes_together: of all that are being read at a time.
        seconds: until a body must have arrived.
    """

    def __init__(self, max_bytes: int, max_bytes_together: int, seconds: float) -> None:
        self.max_bytes = max_bytes
        self.max_bytes_together = max_bytes_together
        self.seconds = seconds
        self._held = 0

    async def json(self, request: Request) -> Any:
        """The body, parsed.

        Raises:
            ApiError: too large (413), too slow (408), not JSON by its type (415) or by its text (400), or too much is
                being read already (503).
            ClientDisconnect: the client is gone.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Not a formality: a page of another site may post text/plain and forms without asking, but not this.
            raise ApiError(
                415, "the body must be sent as Content-Type: application/json", code="unsupported_media_type"
            )
        try:
            async with asyncio.timeout(self.seconds):
                return parse(await self._read(request))
        except TimeoutError:
            message = f"the body did not arrive within {self.seconds:g} s"
            raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None

    async def _read(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.max_bytes:
            self._too_large()
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                self._held += len(chunk)
                if len(body) > self.max_bytes:
                    self._too_large()
                if self._held > self.max_bytes_together:
                    message = "too much is being sent at once"
                    raise ApiError(503, message, code="overloaded", headers={"Retry-After": "2", "Connection": "close"})
            return bytes(body)
        finally:
            self._held -= len(body)

    def _too_large(self) -> NoReturn:
        message = f"the body is larger than {self.max_bytes / 1e6:g} MB"
        raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def parse(body: bytes) -> Any:
    """JSON in UTF-8, strictly.

    Raises:
        ApiError: it is not.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode()  # halves of surrogate pairs are no text
    except UnicodeDecodeError:
        raise invalid("the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise invalid("the body has half of a surrogate pair in a string") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
