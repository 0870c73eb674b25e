"""Who may come in: programs on this computer, not the web pages in its browser.

A page of any site can make a browser send requests to 127.0.0.1. It is kept out by what a browser cannot be made to
lie about: the ``Host`` it thinks it talks to (a name that an attacker let point to this computer is no name of ours),
the ``Origin`` it speaks for, and the kinds of body it may send without asking first (see ``body``).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localspec.commands.serve.errors import ApiError, as_api_error, log_failure
from localspec.commands.serve.settings import ServerSettings

OPEN_PATHS = ("/", "/health")
"""What needs no API key: the page, which asks for it, and its files under ``/page/``."""

PAGE_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>\d{1,5}))?")
_HEADER = re.compile(r"[a-z0-9-]{1,64}")
_CORS_HEADERS = ("authorization", "content-type", "idempotency-key", "user-agent", "x-api-key")
_CORS_FAMILIES = ("anthropic-", "openai-", "x-stainless-")
"""What pages of allowed origins may send: these headers, and those that begin so. OpenAI's and Anthropic's clients do;
a browser takes no pattern, so each that it asks for is answered by name."""


class Guard:
    """ASGI middleware in front of everything.

    Args:
        app: what it guards.
        settings: the server's: key, names, origins.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self._key = settings.api_key.encode() if settings.api_key is not None else None
        ours = () if settings.local else (settings.host, socket.gethostname())
        self._hosts = {"localhost", *(host.lower() for host in (*settings.hosts, *ours))}
        self._local = settings.local
        self._origins = {origin.lower().rstrip("/") for origin in settings.origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        origin = headers.get("origin")
        allowed = origin.lower() if origin is not None and origin.lower() in self._origins else None
        begun = False

        async def guarded_send(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                _harden(MutableHeaders(scope=message), path, allowed, headers.get("access-control-request-headers", ""))
            await send(message)

        try:
            self._check(headers, scope["method"], path, allowed)
            if allowed and scope["method"] == "OPTIONS":
                await Response(status_code=204)(scope, receive, guarded_send)
                return
            await self.app(scope, receive, guarded_send)
        except Exception as error:
            log_failure(error)
            if begun:
                raise
            await as_api_error(error).response(path)(scope, receive, guarded_send)

    def _check(self, headers: Headers, method: str, path: str, allowed: str | None) -> None:
        host = self._checked_host(headers)
        self._check_origin(headers, method, path, host, allowed)
        if method == "OPTIONS" and allowed:
            return  # a browser asks first, without the key
        if self._key is not None and path not in OPEN_PATHS and not path.startswith("/page/"):
            self._check_key(headers)

    def _checked_host(self, headers: Headers) -> str:
        hosts = headers.getlist("host")
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            raise ApiError(400, "the request needs one Host header", code="bad_host")
        name = match["name"].lower().rstrip(".")
        if name not in self._hosts and not self._is_ours(name):
            # The request may come from a page whose own name was made to point here (DNS rebinding).
            message = "this server does not answer to that name; localspec serve --allow-host NAME lets it"
            raise ApiError(403, message, kind="permission_error", code="host_not_allowed")
        return hosts[0].lower()

    def _is_ours(self, name: str) -> bool:
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return not self._local or address.is_loopback  # an address cannot be rebound, a name can

    def _check_origin(self, headers: Headers, method: str, path: str, host: str, allowed: str | None) -> None:
        origin = headers.get("origin")
        if origin is not None:
            parts = urlsplit(origin)
            if allowed or (parts.scheme in ("http", "https") and parts.netloc.lower() == host):
                return
        else:
            # Browsers send no Origin with some requests, but they say where those come from.
            site = headers.get("sec-fetch-site", "none")
            if site in ("none", "same-origin"):
                return
            if method == "GET" and path in OPEN_PATHS and headers.get("sec-fetch-mode") == "navigate":
                return  # somebody followed a link to the page
        message = "pages of other sites may not use this server; localspec serve --allow-origin URL lets one"
        raise ApiError(403, message, kind="permission_error", code="origin_not_allowed")

    def _check_key(self, headers: Headers) -> None:
        assert self._key is not None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")  # Anthropic's clients
        if hmac.compare_digest(given.strip(" \t").encode("latin-1"), self._key):
            return
        message = "this server needs an API key: send it as Authorization: Bearer KEY"
        if given:
            message = "the API key is wrong"
        raise ApiError(
            401,
            message,
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _harden(headers: MutableHeaders, path: str, allowed: str | None, asked_for: str) -> None:
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"
    headers["Cross-Origin-Resource-Policy"] = "cross-origin" if allowed else "same-origin"
    if path == "/" or path.startswith("/page/"):
        headers["Content-Security-Policy"] = PAGE_POLICY
        headers["Cross-Origin-Opener-Policy"] = "same-origin"
    else:
        headers["Content-Security-Policy"] = "default-src 'none'; frame-ancestors 'none'"
        headers.setdefault("Cache-Control", "no-store")
    if allowed:
        headers["Access-Control-Allow-Origin"] = allowed
        headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE"
        headers["Access-Control-Allow-Headers"] = ", ".join((*_CORS_HEADERS, *_of_a_family(asked_for)))
        headers["Access-Control-Max-Age"] = "600"
        headers.add_vary_header("Origin")
        headers.add_vary_header("Access-Control-Request-Headers")


def _of_a_family(asked_for: str) -> list[str]:
    names = (name.strip().lower() for name in asked_for.split(","))
    return [name for name in names if name.startswith(_CORS_FAMILIES) and _HEADER.fullmatch(name)]
