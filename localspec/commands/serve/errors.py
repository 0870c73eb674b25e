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


def stopping() -> ApiError:
    """503: the server is going down."""
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def as_api_error(error: BaseException) -> ApiError:
    """Any exception as a refusal; nothing of our insides gets into it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        words = {404: "no such address here", 405: "this address does not know that method"}
        codes = {404: "not_found", 405: "method_not_allowed"}
        message = words.get(error.status_code, error.detail)
        return ApiError(error.status_code, message, code=codes.get(error.status_code), headers=error.headers)
    if isinstance(error, errors.PromptTooLong):
        return invalid(str(error), "messages", "context_length_exceeded")
    if isinstance(error, errors.UnknownModel):
        return ApiError(404, "no such model here", param="model", code="model_not_found")
    if isinstance(error, errors.UsageError):
        return invalid(str(error))
    if isinstance(error, errors.TemplateError):
        return ApiError(422, str(error), param="messages", code="template_error")
    if isinstance(error, errors.ContextFull):
        return invalid(str(error), "messages", "context_length_exceeded")
    if isinstance(error, errors.Closed):
        return stopping()
    if isinstance(error, RecursionError):
        return invalid("the request is nested too deeply")
    if isinstance(error, errors.LocalspecError):
        return ApiError(500, "the engine failed; the server's own output says more", code="engine_error")
    return ApiError(500, "an internal error; the server's own output says more", code="internal_error")


def status_of(error: BaseException) -> int:
    """The status that an exception comes to."""
    return as_api_error(error).status


def log_failure(error: BaseException) -> None:
    """Say on standard error what failed in here; a wrong request is no failure."""
    if status_of(error) < 500 or isinstance(error, ApiError | errors.Closed):
        return
    line = " ".join(visible(errors.line_of(error) if isinstance(error, Exception) else repr(error)).split())
    print(f"localspec: a request failed: {line}", file=sys.stderr, flush=True)
    if os.environ.get("LOCALSPEC_DEBUG"):
        traceback.print_exception(error)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's hook for what an endpoint raised."""
    log_failure(error)
    return as_api_error(error).response()
