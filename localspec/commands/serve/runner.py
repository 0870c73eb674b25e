"""Sockets and signals around the application."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from localspec.commands.serve.app import build
from localspec.commands.serve.protocol import MAX_CONNECTIONS, ServerProtocol
from localspec.commands.serve.service import Service
from localspec.commands.serve.settings import ServerSettings
from localspec.errors import LocalspecError, UsageError
from localspec.llm import LLM

BACKLOG = 256
GRACE_SECONDS = 5
"""How long clients have, once the server ends, to take what is left for them."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens: from here on the port is ours, and clients wait until they are answered.

    Raises:
        UsageError: no such address.
        LocalspecError: the port is in use, or not to be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError, OverflowError):
        raise UsageError(f"--host {host}: there is no such address") from None
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LocalspecError(
                f"port {port} of {host} is in use: stop what uses it, or take another with --port (0 finds one)"
            ) from None
        if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES):
            raise LocalspecError(f"cannot listen on port {port} of {host}: {error.strerror}") from None
        raise


def url_of(sock: socket.socket) -> str:
    """The address of a listening socket, for a browser."""
    name, port = sock.getsockname()[:2]
    if name in ("0.0.0.0", "::"):
        name = "127.0.0.1" if name == "0.0.0.0" else "::1"
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def ending_signals() -> list[int]:
    """What ends a server. On Windows no program can send another one SIGTERM, but Ctrl-Break."""
    names = ("SIGINT", "SIGTERM", "SIGBREAK")
    return [int(getattr(signal, name)) for name in names if hasattr(signal, name)]


class AppRunner(uvicorn.Server):
    """Serves an application until a signal stops it, or ``stop`` from any thread.

    Args:
        app: what is served.
        ending: is set once the server goes down.
        verbose: log every request to standard error.
        on_start: called once clients are answered, and signals heeded.

    Attributes:
        signal: the signal that ended it, or None.
    """

    def __init__(
        self,
        app: Starlette,
        ending: asyncio.Event,
        *,
        verbose: bool = False,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        if verbose:
            _log_requests()
        self._ending = ending
        self._on_start = on_start
        self.signal: int | None = None
        super().__init__(
            uvicorn.Config(
                app,
                http=ServerProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="info" if verbose else "critical",
                access_log=verbose,
                server_header=False,
                date_header=True,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=GRACE_SECONDS,
                backlog=BACKLOG,
            )
        )

    def stop(self) -> None:
        """End: requests that run or wait are ended too."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # A thread for each client, made when first needed: what one asks for, such as a long text to be cut into
        # tokens, keeps nobody's waiting.
        threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="localspec-request")
        asyncio.get_running_loop().set_default_executor(threads)
        await super().startup(sockets)
        if self._on_start is not None:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending.set()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal that ended the server is kept in ``signal`` instead of raised again."""
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in ending_signals()}
        except ValueError:  # not the main thread
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # asked twice
        self.should_exit = True
        self.signal = sig


class Runner(AppRunner):
    """Serves an ``LLM``; options as above.

    Args:
        llm: the loaded pair; it is not closed here.
        settings: how to behave.
    """

    def __init__(self, llm: LLM, settings: ServerSettings, **options: Any) -> None:
        self.service = Service(llm, settings)
        super().__init__(build(self.service), self.service.ending, **options)


def _log_requests() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("localspec: %(message)s"))
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate = [handler], False
