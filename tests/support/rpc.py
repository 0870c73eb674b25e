"""llama.cpp's RPC servers for tests: the backend, compiled once, and processes that serve with it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

import pytest

from localspec.backends.llama.rpc import ask
from localspec.backends.registry import unavailable_reason
from localspec.errors import EngineError, EngineUnavailable


def built_library(home: Path) -> Path:
    """The backend for the llama-cpp-python that is installed; skips where it cannot be compiled.

    Args:
        home: LOCALSPEC_HOME to keep it in; LOCALSPEC_TEST_LLAMA_SOURCE names llama.cpp's source, else it is fetched.
    """
    if (reason := unavailable_reason("llama-cpp")) is not None:
        pytest.skip(reason)
    if not shutil.which("c++"):
        pytest.skip("there is no C++ compiler")
    from localspec.backends import rpc_build
    from localspec.backends.llama import rpc

    source = os.environ.get("LOCALSPEC_TEST_LLAMA_SOURCE")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as scratch:
        patch.setenv("LOCALSPEC_HOME", str(home))
        path = rpc.library_path()
        if not path.is_file():
            try:
                path = rpc_build.build(Path(source) if source else rpc_build.fetch_source(Path(scratch)))
            except EngineUnavailable as error:
                pytest.skip(str(error))
        return path


@contextmanager
def serving(port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in a process of its own; yields its address."""
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    command = [sys.executable, "-m", "localspec.backends.rpc_server", "--port", str(port), "--threads", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines = list(takewhile(lambda line: "unencrypted and unauthenticated" not in line, process.stderr))
            assert process.poll() is None, "".join(lines)
            address = f"127.0.0.1:{port}"
            for _ in range(100):  # it says so before it listens
                with suppress(EngineError):
                    ask(address)
                    break
                time.sleep(0.1)
            yield address, process
        finally:
            process.kill()
