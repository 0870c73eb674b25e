"""What goes wrong, in the shape that the clients of each API read; OpenAI's where no other is due."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
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

    @property
    def message(self) -> str:
        """The message as it is sent: it may quote the client, so controls are made visible, and it stays short."""
        return " ".join(visible(str(self)).split())[:600]

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's form: ``{"error": {message, type, param, code}}``."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def as_anthropic(self) -> dict[str, Any]:
        """Anthropic's form; it has a word for each status."""
        kind = _ANTHROPIC.get(self.status, INVALID if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def as_ollama(self) -> dict[str, Any]:
        """Ollama's form."""
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
    return as_api_error(error).response(request.url.path)
