"""Ctrl-C, or another signal, at a known point of the program, however slow a machine is: it sends it to itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.waiting import PATIENCE

PROGRAM = """
import importlib, os, signal, sys

kind, what, count, by, *arguments = sys.argv[1:]
left = [int(count)]

def reached():
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), getattr(signal, by))

if kind in ("import", "open"):
    sys.addaudithook(lambda event, given: reached() if event == kind and given[0] == what else None)
elif kind == "call":
    module, _, path = what.partition(":")
    owner, _, name = path.rpartition(".")
    owner = getattr(importlib.import_module(module), owner)
    called = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: (reached(), called(*args, **options))[1])
else:
    class Heard(type(sys.stderr)):
        line = ""

        def write(self, text):
            written = super().write(text)
            self.flush()
            self.line += text
            if what in self.line and ("\\n" in text or self.isatty()):
                self.line = ""
                reached()
            return written

    sys.stderr = Heard(sys.stderr.buffer, sys.stderr.encoding, line_buffering=True)

signal.signal(getattr(signal, by), signal.getsignal(signal.SIGINT) if by == "SIGINT" else signal.SIG_DFL)  # not nohup's

from localspec.__main__ import main
main(arguments)
"""


def self_interrupting(at: str, arguments: Sequence[str | Path], *, count: int = 1, by: str = "SIGINT") -> list[str]:
    """The command line of ``localspec`` with some arguments, that interrupts itself.

    Args:
        at: ``import MODULE`` or ``open PATH`` is about to happen, ``call MODULE:CLASS.METHOD`` too; ``said TEXT``: it
            is written to standard error.
        arguments: of the program.
        count: the how manyth time.
        by: the signal's name.
    """
    kind, _, what = at.partition(" ")
    return [sys.executable, "-c", PROGRAM, kind, what, str(count), by, *map(str, arguments)]


def interrupted(
    at: str, arguments: Sequence[str | Path], *, count: int = 1, by: str = "SIGINT"
) -> tuple[bytes, list[str]]:
    """Standard output and the lines of standard error of ``localspec``, after a Ctrl-C ended it."""
    command = self_interrupting(at, arguments, count=count, by=by)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False)
    errors = done.stderr.decode()
    assert done.returncode == 130, errors
    assert "Traceback" not in errors
    return done.stdout, errors.splitlines()
