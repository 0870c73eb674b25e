"""Which requests are answered: those of programs on this computer, not of the web pages in its browser.

A page of any site can make a browser send requests to 127.0.0.1. It is kept out by what a browser does not lie about:
``Host`` (an attacker's name may point to this computer), ``Origin``, and the kinds of body that are sent without asking
first (see ``BodyReader``). ``access`` decides what the others may see.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Mount, Route, compile_path
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localspec.errors import LocalspecError
from localspec.server.access import ALL, SCOPE_KEY, Address, Client, Kind
from localspec.server.http import ApiError, ServerSettings, as_api_error, log_failure, on_error

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>\d{1,5}))?")
_PROXIED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers of a proxy: it may bring requests from another computer to a server that listens on this one alone."""


def application(settings: ServerSettings, addresses: Sequence[Address], page: Path) -> Starlette:
    """The application that answers at these addresses, and sends the files of a folder under ``/page``."""
    routes: list[BaseRoute] = [Route(each.path, each.endpoint, methods=each.methods) for each in addresses]
    kinds = [(compile_path(each.path)[0], each.kinds) for each in addresses]
    routes.append(Mount("/page", StaticFiles(directory=page, check_dir=False)))
    kinds.append((compile_path("/page/{path:path}")[0], ALL))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, settings=settings, kinds=kinds)],
        exception_handlers={HTTPException: on_error, ApiError: on_error, LocalspecError: on_error},
    )
    app.router.redirect_slashes = False
    return app


class Guard:
    """ASGI middleware for HTTP in front of everything; ``kinds``: the kinds of client that each address answers."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, kinds: Sequence[tuple[re.Pattern[str], Collection[Kind]]]
    ) -> None:
        self.app = app
        self._kinds = kinds
        self._key = settings.api_key.encode() if settings.api_key is not None else None
        ours = () if settings.local else (settings.host, socket.gethostname())
        self._hosts = {"localhost", *(host.lower() for host in (*settings.hosts, *ours))}
        self._local = settings.local
        self._origins = {each.rstrip("/") for origin in settings.origins for each in (origin, origin.lower())}
        # All headers that its client adds: none but the key shows more, and an allowed site may send the key.
        self._shared = CORSMiddleware(
            self._guarded,
            allow_origins=self._origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("Retry-After",),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_allowed = Headers(scope=scope).get("origin") in self._origins
        await (self._shared if is_allowed else self._guarded)(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        path = scope["path"]
        origin = headers.get("origin")
        allowed = origin if origin in self._origins else None
        started = False

        async def guarded_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _harden(MutableHeaders(scope=message), path, allowed)
            await send(message)

        try:
            name = self._checked_host(headers)
            self._check_origin(headers, scope["method"], path, allowed)
            kinds = next((kinds for pattern, kinds in self._kinds if pattern.match(path)), None)
            client = scope[SCOPE_KEY] = self._client(headers, name, kinds or (), allowed)
            _check(client, kinds)
            await self.app(scope, receive, guarded_send)
        except Exception as error:
            log_failure(error)
            if started:
                raise
            await as_api_error(error).response(path)(scope, receive, guarded_send)

    def _client(self, headers: Headers, name: str, kinds: Collection[Kind], allowed: str | None) -> Client:
        if self._key is not None and not hmac.compare_digest(_key_in(headers).encode("latin-1"), self._key):
            if Kind.KEYLESS not in kinds:
                needs = "this server needs an API key: send it as Authorization: Bearer KEY"
                raise ApiError(
                    401,
                    "the API key is wrong" if _key_in(headers) else needs,
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            return Client(Kind.KEYLESS)
        if allowed is not None:
            return Client(Kind.SITE, allowed)
        is_here = self._local and (name == "localhost" or self._is_ours(name)) and not any(map(headers.get, _PROXIED))
        return Client(Kind.LOCAL if is_here else Kind.REMOTE)

    def _checked_host(self, headers: Headers) -> str:
        """The name that the request is addressed to, which has to be one of ours."""
        hosts = headers.getlist("host")
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            raise ApiError(400, "the request needs one Host header", code="bad_host")
        name = match["name"].lower().rstrip(".")
        if name not in self._hosts and not self._is_ours(name):
            # The request may come from a page whose own name was made to point here (DNS rebinding).
            message = "this server does not answer to that name; localspec serve --allow-host NAME lets it"
            raise ApiError(403, message, kind="permission_error", code="host_not_allowed")
        return name

    def _is_ours(self, name: str) -> bool:
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return not self._local or address.is_loopback  # an address cannot be rebound, a name can

    def _check_origin(self, headers: Headers, method: str, path: str, allowed: str | None) -> None:
        origin = headers.get("origin")
        if origin is not None:
            parts = urlsplit(origin)
            if allowed or (parts.scheme in ("http", "https") and parts.netloc.lower() == headers["host"].lower()):
                return
        else:
            # Browsers send no Origin with some requests, but they say where those come from.
            site = headers.get("sec-fetch-site", "none")
            if site in ("none", "same-origin"):
                return
            if method == "GET" and path in ("/", "/health") and headers.get("sec-fetch-mode") == "navigate":
                return  # somebody followed a link to the page
        message = "pages of other sites may not use this server; localspec serve --allow-origin URL lets one"
        raise ApiError(403, message, kind="permission_error", code="origin_not_allowed")


def _check(client: Client, kinds: Collection[Kind] | None) -> None:
    """Refuse an address that does not answer a client: 403, or 404 where there is no such address."""
    if kinds is None:
        raise ApiError(404, "no such address here", code="not_found")
    if client.kind not in kinds:
        message = "this is given out on this computer only, by a server that listens there alone"
        code = "not_loopback"
        if client.kind is Kind.SITE:
            message = "pages of other sites may not use this, not even those of --allow-origin"
            code = "origin_not_allowed"
        raise ApiError(403, message, kind="permission_error", code=code)


def _key_in(headers: Headers) -> str:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return (given if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip(" \t")  # Anthropic's clients


def _harden(headers: MutableHeaders, path: str, allowed: str | None) -> None:
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "no-referrer"
    headers["Cross-Origin-Resource-Policy"] = "cross-origin" if allowed else "same-origin"
    if path == "/" or path.startswith("/page/"):
        headers["Content-Security-Policy"] = PAGE_POLICY
        headers["Cross-Origin-Opener-Policy"] = "same-origin"
    else:
        headers["Content-Security-Policy"] = "default-src 'none'; frame-ancestors 'none'"
        headers.setdefault("Cache-Control", "no-store")
