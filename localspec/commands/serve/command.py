"""``localspec serve``."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.commands.options import RunOptions, check_text
from localspec.errors import UsageError
from localspec.terminal.progress import Progress

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What ``serve`` has beyond the shared options.

    Attributes:
        host, port: where to listen; port 0 finds one.
        api_key: what clients must send; ``LOCALSPEC_API_KEY`` if None.
        queue: most requests that wait.
        prefix_cache: megabytes for conversations other than the present one.
        time_limit: seconds from a request to the end of its answer.
        alias: further names for the model.
        allow_origin, allow_host: web origins and host names let in.
    """

    host: str = "127.0.0.1"
    port: int = 8642
    api_key: str | None = None
    queue: int = 32
    prefix_cache: int = 512
    time_limit: float = 3600.0
    alias: Sequence[str] = ()
    allow_origin: Sequence[str] = ()
    allow_host: Sequence[str] = ()

    def __post_init__(self) -> None:
        for text in (self.host, self.api_key, *self.alias, *self.allow_origin, *self.allow_host):
            check_text(text, "an option")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port must be in 0..65535, not {self.port}")
        if not 0 <= self.queue <= 10_000:
            raise UsageError(f"--queue must be in 0..10000, not {self.queue}")
        if not 0 <= self.prefix_cache <= 1 << 20:
            raise UsageError(f"--prefix-cache must be in 0..1048576 megabytes, not {self.prefix_cache}")
        if not 1 <= self.time_limit <= 1e6:
            raise UsageError(f"--time-limit must be in 1..1000000 seconds, not {self.time_limit:g}")
        for origin in self.allow_origin:
            if "://" not in origin or origin.rstrip("/").count("/") != 2:
                raise UsageError(f"--allow-origin must be like http://localhost:3000, not {origin!r}")
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is empty")


def serve_command(options: RunOptions, serving: ServeOptions) -> int:
    """Serve until Ctrl-C or SIGTERM.

    The one line on standard output is the URL, once clients are answered.

    Returns:
        The exit status: 0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        LocalspecError: the port or the model cannot be had.
    """
    from localspec.commands.serve.runner import Runner, is_loopback, listen, url_of
    from localspec.commands.serve.service import Settings

    api_key = serving.api_key or os.environ.get("LOCALSPEC_API_KEY") or None
    local = is_loopback(serving.host)
    if not local and api_key is None:
        raise UsageError(
            f"--host {serving.host} can be reached from other computers: that needs --api-key KEY, or LOCALSPEC_API_KEY"
        )
    with listen(serving.host, serving.port) as sock:
        with Progress() as progress:
            llm = options.open(progress.report)
        with llm:
            for warning in llm.warnings:
                print(f"localspec: {warning}", file=sys.stderr)
            llm.prefix_cache_bytes = serving.prefix_cache << 20
            settings = Settings(
                params=options.params(llm.chat_defaults),
                system=options.system,
                api_key=api_key,
                hosts=[*serving.allow_host, *([] if local else [serving.host, socket.gethostname()])],
                any_address=not local,
                origins=serving.allow_origin,
                aliases=serving.alias,
                queue=serving.queue,
                seconds=serving.time_limit,
            )
            url = url_of(sock)
            draft = " + ".join(llm.draft_names) or "none"
            print(f"localspec: {llm.model_name} · {llm.backend_name} · draft: {draft}", file=sys.stderr)
            print(f"localspec: chat page at {url}/, OpenAI's API at {url}/v1 · Ctrl-C stops", file=sys.stderr)
            runner = Runner(llm, settings, verbose=options.verbose, on_start=lambda: print(url, flush=True))
            runner.run(sockets=[sock])
    print("localspec: stopped", file=sys.stderr)
    return INTERRUPTED if runner.signal == signal.SIGINT else 0
