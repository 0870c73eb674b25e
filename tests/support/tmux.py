"""A real terminal that a test types into and looks at."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE


class Tmux:
    """One program in one terminal window; its exit status is printed as ``EXIT n`` when it ends. ``TERM`` in ``env``
    replaces tmux's own."""

    def __init__(
        self, command: Sequence[str], folder: Path, env: dict[str, str], columns: int = 80, lines: int = 40
    ) -> None:
        if not shutil.which("tmux"):
            pytest.skip("tmux is not installed")
        self.folder, self._socket = folder, f"{len(list(folder.glob('*.sock')))}.sock"
        assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in ({"PYTHONUTF8": "1"} | env).items())
        script = f"env {assignments} {shlex.join(command)}; echo EXIT $?; exec sleep 600"
        size = ["-x", str(columns), "-y", str(lines)]
        # Programs may ask for a copy, as in most terminals.
        copying = ["set-option", "-s", "set-clipboard", "on"]
        self._run("-f", "/dev/null", *copying, ";", "new-session", "-d", "-c", os.getcwd(), *size, script)

    def _run(self, *arguments: str) -> str:
        clean = {name: value for name, value in os.environ.items() if name != "TMUX"}
        # By a relative path: the system allows a socket's no more than some 100 bytes. -u: whatever the locale is.
        command = ["tmux", "-u", "-S", self._socket, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", env=clean, cwd=self.folder)
        return done.stdout

    def keys(self, *keys: str) -> None:
        """Press keys, in tmux's names (``Enter``, ``C-c``)."""
        self._run("send-keys", *keys)

    def type(self, line: str, then: str | Callable[[str], bool] = "") -> str:
        """Type a line and press Enter; the screen, once ``then`` is on it or holds."""
        self._run("send-keys", "-l", line)
        self._run("send-keys", "Enter")
        return self.wait(then)

    def paste(self, text: str) -> None:
        """Paste a text; the program sees where it begins and ends if it has asked for that."""
        self._run("set-buffer", "-b", "pasted", text)
        self._run("paste-buffer", "-p", "-b", "pasted")

    def resize(self, columns: int) -> None:
        """Make the window narrower or wider."""
        self._run("resize-window", "-x", str(columns))

    def screen(self, *, escapes: bool = False) -> str:
        """What is on the screen now, and what has scrolled off it."""
        return self._run("capture-pane", "-p", "-S", "-2000", *(["-e"] if escapes else []))

    def wait(self, what: str | Callable[[str], bool], *, escapes: bool = False) -> str:
        """The screen, once a text is on it or a condition holds."""
        deadline = time.monotonic() + PATIENCE
        while True:
            screen = self.screen(escapes=escapes)
            if what in screen if isinstance(what, str) else what(screen):
                return screen
            if time.monotonic() > deadline:
                pytest.fail(f"the screen never had {what!r}; it has:\n{screen.rstrip()}")
            time.sleep(0.05)

    def buffer(self) -> str:
        """What was last copied, with tmux's own command or by a sequence that asks for it."""
        return self._run("show-buffer")

    def close(self) -> None:
        """End the program and its terminal."""
        self._run("kill-server")
