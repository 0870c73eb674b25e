"""What a server is given and refuses: settings, bodies as JSON, errors in the form of each API."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import re
import socket
import sys
import traceback
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from localspec import errors
from localspec.engine.options import checked_parallel
from localspec.errors import UsageError, check_text, parse_json
from localspec.sampling.sampling import SamplingParams
from localspec.system.terminal import visible

INVALID = "invalid_request_error"
SERVER = "server_error"


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal."""

    status: int  # of HTTP
    said: str  # one line for the person who reads the client's log
    _: KW_ONLY
    kind: str = ""  # OpenAI's ``type``; by the status if empty
    param: str | None = None  # the field of the request that is wrong, such as ``messages[0].role``
    code: str | None = None  # a word for programs
    headers: Mapping[str, str] | None = None  # further ones

    def __post_init__(self) -> None:
        super().__init__(self.said)
        self.kind = self.kind or (INVALID if self.status < 500 else SERVER)

    @property
    def message(self) -> str:
        """The message as it is sent: short, with visible controls, as it may quote the client."""
        return " ".join(visible(self.said).split())[:600]

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's form: ``{"error": {message, type, param, code}}``."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def as_anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC.get(self.status, INVALID if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def as_ollama(self) -> dict[str, Any]:
        return {"error": self.message}

    def response(self, path: str) -> JSONResponse:
        """The refusal in the form of the API that the path belongs to."""
        form = next((form for prefix, form in _FORMS if path.startswith(prefix)), ApiError.as_dict)
        return JSONResponse(form(self), self.status, self.headers)


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FORMS = (("/v1/messages", ApiError.as_anthropic), ("/api/", ApiError.as_ollama))


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def too_busy(message: str, retry_after_s: float) -> ApiError:
    after = str(min(60, max(1, math.ceil(retry_after_s))))
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": after})


def too_late(seconds: float) -> ApiError:
    message = f"the request waited for {seconds:g} s and its turn did not come"
    return ApiError(503, message, code="timeout", headers={"Retry-After": "10"})


def stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


_KNOWN: tuple[tuple[type[Exception], int, str | None, str | None, str | None], ...] = (
    (ClientDisconnect, 499, None, None, "the client has gone"),
    (errors.PromptTooLong, 400, "messages", "context_length_exceeded", None),
    (errors.ContextFull, 400, "messages", "context_length_exceeded", None),
    (errors.UnknownModel, 404, "model", "model_not_found", "no such model here"),
    (errors.UsageError, 400, None, None, None),
    (errors.TemplateError, 422, "messages", "template_error", None),
    (RecursionError, 400, None, None, "the request is nested too deeply"),
    (errors.EngineUnavailable, 501, None, "not_installed", None),
    (errors.LocalspecError, 500, None, "engine_error", "the engine failed; the server's own output says more"),
    (Exception, 500, None, "internal_error", "an internal error; the server's own output says more"),
)
"""Exception -> status, field, code and message (None: its own), the first that fits."""

_HTTP = {
    404: ("not_found", "no such address here"),
    405: ("method_not_allowed", "this address does not know that method"),
}


def as_api_error(error: Exception) -> ApiError:
    """Any exception as a refusal, without anything internal."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, errors.Closed):
        return stopping()
    if isinstance(error, HTTPException):
        code, message = _HTTP.get(error.status_code, (None, error.detail))
        return ApiError(error.status_code, message, code=code, headers=error.headers)
    _, status, param, code, text = next(known for known in _KNOWN if isinstance(error, known[0]))
    return ApiError(status, text or str(error), param=param, code=code)


def log_failure(error: Exception) -> None:
    """Print what failed here; a wrong request is no failure."""
    if as_api_error(error).status < 500 or isinstance(error, ApiError | errors.Closed):
        return
    line = " ".join(visible(errors.line_of(error)).split())
    print(f"localspec: a request failed: {line}", file=sys.stderr, flush=True)
    if os.environ.get("LOCALSPEC_DEBUG"):
        traceback.print_exception(error)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's hook for what an endpoint raised."""
    log_failure(error)
    return as_api_error(error).response(request.url.path)


LARGE_BYTES, N_LARGE = 256 << 10, 2
"""Of bodies with more bytes than this, so many at a time are parsed and their requests prepared."""


class BodyReader:
    """Reads the bodies of all requests, large ones in turns."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.n_held = 0  # bytes that are being read, or wait for their turn, now
        self._turns = asyncio.Semaphore(N_LARGE)

    @asynccontextmanager
    async def json(self, request: Request) -> AsyncGenerator[Any, None]:
        """The body, parsed. A large one keeps its turn until the end of the block.

        Raises:
            ApiError: too large (413), too slow (408), not JSON by its type (415) or by its text (400), or too much is
                being read already (503).
            ClientDisconnect: the client is gone.
        """
        _check_type(request.headers)
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self._settings.body_seconds):
                    await self._read(request, body)
            except TimeoutError:
                message = f"the body did not arrive within {self._settings.body_seconds:g} s"
                raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
            if len(body) <= LARGE_BYTES:
                yield await asyncio.to_thread(parse, bytes(body))
                return
            async with self._turns:
                value = await asyncio.to_thread(parse, bytes(body))
                self.n_held -= len(body)
                body.clear()
                yield value
        finally:
            self.n_held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._settings.body_bytes:
            self._too_large()
        async for chunk in request.stream():
            body += chunk
            self.n_held += len(chunk)
            if len(body) > self._settings.body_bytes:
                self._too_large()
            if self.n_held > self._settings.bodies_bytes:
                message = "too much is being sent at once"
                raise ApiError(503, message, code="overloaded", headers={"Retry-After": "2", "Connection": "close"})

    def _too_large(self) -> NoReturn:
        message = f"the body is larger than {self._settings.body_bytes / 1e6:g} MB"
        raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def parse(body: bytes) -> Any:
    """Strict JSON, see ``parse_json``; an ``ApiError`` if it is none."""
    try:
        return parse_json(body)
    except ValueError as error:
        raise invalid(f"the body {error}") from None


def _check_type(headers: Headers) -> None:
    """Refuse a body that a page of another site could have a browser send without asking first.

    Such a page can post forms, plain text and bytes without a type, but not JSON. Programs may leave the type out or
    send that of a form, as Ollama's clients and ``curl -d`` do. The guard knows browsers by ``Origin`` and
    ``Sec-Fetch-Site``; older ones are known here by other headers.
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


KeepAlive = float | None  # seconds for which a model that is idle stays loaded; None: for ever

KEEP_ALIVE_S = 300.0  # where nothing is said; Ollama's

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# A part can be read in one way only: with three ways each, a row of n parts that ends wrongly takes 3**n steps.
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"([+-]?)(?:(\d{{1,20}}(?:\.\d{{0,20}})?)|((?:{_PART.pattern})+))")
_FOR_EVER_S = 10 * 365 * 24 * 3600.0


def read_keep_alive(value: Any) -> KeepAlive:
    """What Ollama's ``keep_alive`` says: seconds, as a number or a text, or a duration of Go's (``1h30m``, ``500ms``);
    less than 0 is for ever. A ``ValueError`` if it is none of these."""
    if isinstance(value, str) and len(value) < 100 and (match := _DURATION.fullmatch(value.strip())):
        parts = _PART.findall(match[3] or "")
        seconds = float(match[2]) if match[2] else sum(float(number) * _UNITS[unit] for number, unit in parts)
        value = -seconds if match[1] == "-" else seconds
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError("no duration")
    return None if value < 0 or value > _FOR_EVER_S else float(value)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server behaves.

    Raises:
        UsageError: a value makes no sense, or a server that other computers reach has no key.
    """

    host: str = "127.0.0.1"
    port: int = 8642  # 0 finds one
    api_key: str | None = None  # what ``Authorization: Bearer`` must carry; None asks for none
    queue: int = 32  # most requests that wait
    parallel: int | str = "auto"  # most requests that are answered at a time; ``auto``: as many as gain throughput
    prefix_cache: int = 512  # megabytes for conversations other than the present one
    time_limit: float = 3600.0  # longest time from a request to the end of its answer [s]
    aliases: Sequence[str] = ()  # further names that requests may call the model by
    origins: Sequence[str] = ()  # web origins, apart from the server's own, whose pages may use it
    hosts: Sequence[str] = ()  # names that requests may be addressed to, apart from those of loopback
    corpora: Sequence[str] = ()  # what requests may have copied from, as ``--draft`` calls it; the others do without
    params: SamplingParams = field(default_factory=SamplingParams)  # where a request says nothing
    system: str | None = None  # system prompt of chats that bring none
    body_bytes: int = 8 << 20  # largest body
    bodies_bytes: int = 64 << 20  # of all that are being read at a time
    body_seconds: float = 20.0  # longest time until a body has arrived

    def __post_init__(self) -> None:
        object.__setattr__(self, "parallel", checked_parallel(self.parallel))
        for text in (self.host, self.api_key, *self.aliases, *self.corpora, *self.origins, *self.hosts):
            check_text(text, "an option")
        for origin in self.origins:
            if "://" not in origin or origin.rstrip("/").count("/") != 2:
                raise UsageError(f"--allow-origin must be like http://localhost:3000, not {origin!r}")
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is empty")
        if not self.local and self.api_key is None:
            raise UsageError(
                f"--host {self.host} can be reached from other computers: that needs --api-key KEY, "
                "or LOCALSPEC_API_KEY"
            )

    @property
    def local(self) -> bool:
        """Whether only programs on this computer can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only programs on this computer can reach the address; a ``UsageError`` if there is no such address."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host}: there is no such address") from None
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
