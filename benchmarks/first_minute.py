"""The first minute: from ``localspec chat`` to a prompt, and to the first token of the first answer.

Each row is a process of its own on a pseudo terminal. The first has a home that holds nothing but the model files; the
others find what the ones before them left: right after the first, and after one that had idle time.

    python benchmarks/first_minute.py [MODEL] [--models FOLDER] [--idle SECONDS] [-- OPTIONS OF CHAT]

CPU seconds (all threads, on Linux) are printed beside the wall clock's: on a busy machine they say more.
"""

from __future__ import annotations

import argparse
import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from localspec.system.files import models_dir

QUESTION = "Name three rivers."
PROMPT = b"> "
PATIENCE_S = 900.0


class Chat:
    """A chat on a pseudo terminal that cannot move its cursor, so that what it prints is text."""

    def __init__(self, arguments: list[str], home: Path) -> None:
        self._terminal, end = pty.openpty()
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "localspec", "chat", *arguments],
            stdin=end,
            stdout=end,
            stderr=end,
            env={**os.environ, "LOCALSPEC_HOME": str(home), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(end)
        self.seen = b""

    def read_until(self, wanted: bytes) -> tuple[float, float]:
        """Wait for something to be printed behind what was seen; seconds and CPU seconds since the start."""
        start = len(self.seen)
        while self.seen.find(wanted, start) < 0 or not self.seen[start:].strip():
            if not select.select([self._terminal], [], [], PATIENCE_S)[0]:
                sys.exit(f"nothing was printed for {PATIENCE_S:.0f} s; the end of it: {self.seen[-300:]!r}")
            self.seen += os.read(self._terminal, 4096)
        return time.perf_counter() - self.started, self._cpu_seconds()

    def say(self, line: str) -> None:
        os.write(self._terminal, line.encode() + b"\n")
        self.read_until(line.encode()[-6:])  # the terminal's echo

    def leave(self) -> None:
        os.write(self._terminal, b"\x03")
        self._process.terminate()
        self._process.wait()
        os.close(self._terminal)

    def _cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return float("nan")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, arguments: list[str], home: Path, idle: float = 0.0) -> None:
    chat = Chat(arguments, home)
    prompt = chat.read_until(PROMPT)
    if idle:
        time.sleep(idle)  # a person reads, thinks, types
    asked = time.perf_counter() - chat.started, chat._cpu_seconds()
    chat.say(QUESTION)
    first = chat.read_until(b"")
    chat.leave()
    figures = [*prompt, first[0] - asked[0], first[1] - asked[1], prompt[0] + first[0] - asked[0]]
    print(f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--models", type=Path, default=models_dir(), help="folder that holds the model files")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds at the prompt of the third row")
    parser.add_argument("rest", nargs="*", help="options for chat, after --")
    given = parser.parse_args()
    arguments = [given.model, *given.rest]
    print("| start | s to the prompt | CPU s | s from the question to the first token | CPU s | s in all |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(given.models.resolve())
        measure("first, empty home", arguments, Path(folder))
        measure("second", arguments, Path(folder))
        measure(f"third, {given.idle:.0f} s at the prompt", arguments, Path(folder), given.idle)
        measure("fourth", arguments, Path(folder))


if __name__ == "__main__":
    main()
