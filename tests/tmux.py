"""A real terminal that a test types into and looks at."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest


class Tmux:
    """One program in one terminal window.

    Args:
        command: what to run; its exit status is printed as ``EXIT n`` when it ends.
        folder: where the server keeps its socket.
        env: environment to add; ``TERM`` replaces tmux's own.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, env: Mapping[str, str], columns: int = 80, lines: int = 40
    ) -> None:
        if not shutil.which("tmux"):
            pytest.skip("tmux is not installed")
        self._socket = str(folder / "tmux.sock")
        assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        script = f"env {assignments} {shlex.join(command)}; echo EXIT $?; exec sleep 600"
        self._run("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(lines), script)

    def _run(self, *arguments: str) -> str:
        clean = {name: value for name, value in os.environ.items() if name != "TMUX"}
        command = ["tmux", "-S", self._socket, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=clean).stdout

    def keys(self, *keys: str) -> None:
        """Press keys, in tmux's names (``Enter``, ``C-c``)."""
        self._run("send-keys", *keys)

    def type(self, line: str) -> None:
        """Type a line and press Enter."""
        self._run("send-keys", "-l", line)
        self._run("send-keys", "Enter")

    def screen(self, *, escapes: bool = False) -> str:
        """What is on the screen now, and what has scrolled off it."""
        return self._run("capture-pane", "-p", "-S", "-2000", *(["-e"] if escapes else []))

    def wait(self, what: str | Callable[[str], bool], seconds: float = 30.0, *, escapes: bool = False) -> str:
        """The screen, once a text is on it or a condition holds."""
        deadline = time.monotonic() + seconds
        while True:
            screen = self.screen(escapes=escapes)
            if what in screen if isinstance(what, str) else what(screen):
                return screen
            if time.monotonic() > deadline:
                pytest.fail(f"the screen never had {what!r}; it has:\n{screen.rstrip()}")
            time.sleep(0.05)

    def close(self) -> None:
        """End the program and its terminal."""
        self._run("kill-server")
