"""A real server in a thread, for tests: uvicorn, a socket, an ``LLM``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from localspec import LLM
from localspec.server.runner import Runner, listen, url_of
from localspec.server.service import Service, Settings


class Server:
    """A server that runs.

    Attributes:
        url: without a slash at its end.
        port: on 127.0.0.1.
    """

    def __init__(self, runner: Runner, url: str) -> None:
        self.runner = runner
        self.url = url
        self.port = int(url.rpartition(":")[2])

    @property
    def service(self) -> Service:
        return self.runner.service

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Until nothing runs and nobody waits, in the server and in the engine."""
        turns, llm = self.service.turns, self.service.llm
        end = time.monotonic() + seconds
        while turns.running or turns.waiting or llm.busy or llm.queue_length:
            assert time.monotonic() < end, "a request is stuck"
            time.sleep(0.005)


@contextmanager
def serve(llm: LLM, **settings: Any) -> Iterator[Server]:
    """Serve a model on a free port of 127.0.0.1; settings as in ``Settings``."""
    with listen("127.0.0.1", 0) as sock:
        runner = Runner(llm, Settings(**settings))
        thread = threading.Thread(target=runner.run, args=([sock],), daemon=True)
        thread.start()
        while not runner.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        try:
            yield Server(runner, url_of(sock))
        finally:
            runner.stop()
            thread.join(20)
            assert not thread.is_alive(), "the server did not stop"
