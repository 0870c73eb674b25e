"""What goes wrong, in the shape that OpenAI's clients read: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from localspec import errors
from localspec.terminal.text import visible

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """A refusal, ready to be sent.

    Args:
        status: the HTTP status.
        message: one line for the person who reads the client's log.
        kind: OpenAI's ``type``; by the status if None.
        param: the field of the request that is wrong, as a path such as ``messages[0].role``.
        code: a word for programs.
        headers: to be sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or (INVALID if status < 500 else SERVER)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def as_dict(self) -> dict[str, Any]:
        # A message may quote what the client sent: controls are made visible, and it stays short.
        message = " ".join(visible(str(self)).split())[:600]
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.as_dict(), self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request makes no sense."""
    return ApiError(400, message, param=param, code=code)


def too_busy(message: str, retry_after_s: float) -> ApiError:
    """429: come back later."""
    after = str(min(60, max(1, math.ceil(retry_after_s))))
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": after})


def too_late(seconds: float) -> ApiError:
    """503: the queue was too long."""
    message = f"the request waited for {seconds:g} s and its turn did not come"
    return ApiError(503, message, code="timeout", headers={"Retry-After": "10"})


def stopping() -> ApiError:
    """503: the server is going down."""
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


_KNOWN: tuple[tuple[type[Exception], int, str | None, str | None, str | None], ...] = (
    (errors.PromptTooLong, 400, "messages", "context_length_exceeded", None),
    (errors.ContextFull, 400, "messages", "context_length_exceeded", None),
    (errors.UnknownModel, 404, "model", "model_not_found", "no such model here"),
    (errors.UsageError, 400, None, None, None),
    (errors.TemplateError, 422, "messages", "template_error", None),
    (RecursionError, 400, None, None, "the request is nested too deeply"),
    (errors.LocalspecError, 500, None, "engine_error", "the engine failed; the server's own output says more"),
    (Exception, 500, None, "internal_error", "an internal error; the server's own output says more"),
)
"""Exception -> status, field, code and message (None: its own), the first that fits."""

_HTTP = {
    404: ("not_found", "no such address here"),
    405: ("method_not_allowed", "this address does not know that method"),
}


def as_api_error(error: Exception) -> ApiError:
    """Any exception as a refusal; nothing of our insides gets into it."""
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
    """Say on standard error what failed in here; a wrong request is no failure."""
    if as_api_error(error).status < 500 or isinstance(error, ApiError | errors.Closed):
        return
    line = " ".join(visible(errors.line_of(error)).split())
    print(f"localspec: a request failed: {line}", file=sys.stderr, flush=True)
    if os.environ.get("LOCALSPEC_DEBUG"):
        traceback.print_exception(error)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's hook for what an endpoint raised."""
    log_failure(error)
    return as_api_error(error).response()
