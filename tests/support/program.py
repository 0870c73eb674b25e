"""The command line as a shell sees it, in this process; and Python in one of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from localspec.__main__ import run

PROGRAM = [sys.executable, "-m", "localspec"]


class Stream(io.TextIOWrapper):
    """A standard stream in memory."""

    def __init__(self, data: bytes = b"", encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(data), encoding, write_through=True)


def localspec(
    *arguments: str | Path, stdin: bytes = b"", encoding: str = "utf-8"
) -> subprocess.CompletedProcess[bytes]:
    """Run a command with its own standard streams, of this encoding: what it printed, and its exit status."""
    out, errors = Stream(encoding=encoding), Stream(encoding=encoding)
    with patch.object(sys, "stdin", Stream(stdin, encoding)), redirect_stdout(out), redirect_stderr(errors):
        status = run([*map(str, arguments)])
    printed = [stream.detach().getvalue() for stream in (out, errors)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(arguments, status, *printed)


def apart(code: str, *arguments: str | Path, **environment: str) -> str:
    """What a process of its own prints, which an engine may take with it."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def assert_one_line(result: subprocess.CompletedProcess[bytes], status: int, *parts: str) -> None:
    """It failed with a status and one readable line on standard error, and printed nothing else."""
    errors = result.stderr.decode()
    assert result.returncode == status, errors
    lines = [line for line in errors.splitlines() if line.startswith("localspec: ")]
    assert len(lines) == 1, errors
    assert "Traceback" not in errors
    assert "internal error" not in errors
    assert result.stdout == b""
    for part in parts:
        assert part in lines[0]
