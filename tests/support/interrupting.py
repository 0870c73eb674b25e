"""Ctrl-C, or another signal, at a known point of the program, however slow a machine is: it sends it to itself."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

from tests.support.program import localspec
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
else:
    module, _, path = what.partition(":")
    owner, _, name = path.rpartition(".")
    owner = getattr(importlib.import_module(module), owner)
    called = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: (reached(), called(*args, **options))[1])
signal.signal(getattr(signal, by), signal.getsignal(signal.SIGINT) if by == "SIGINT" else signal.SIG_DFL)  # not nohup's

from localspec.__main__ import main
main(arguments)
"""


def _in_this_process(
    kind: str, what: str, arguments: Sequence[str | Path], count: int
) -> subprocess.CompletedProcess[bytes]:
    left, line = count, ""

    def reached() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGINT)

    def heard(text: str) -> None:
        nonlocal line
        line += text
        if what in line and "\n" in text:
            line = ""
            reached()

    if kind == "said":
        return localspec(*arguments, heard=heard)
    module, _, path = what.partition(":")
    owner, name = path.split(".")
    called: Callable[..., object] = getattr(getattr(importlib.import_module(module), owner), name)
    with patch(f"{module}.{path}", lambda *args, **options: (reached(), called(*args, **options))[1]):
        return localspec(*arguments)


def interrupted(
    at: str, arguments: Sequence[str | Path], *, count: int = 1, by: str = "SIGINT"
) -> tuple[bytes, list[str]]:
    """Standard output and the lines of standard error of ``localspec``, after a signal ended it.

    Args:
        at: ``import MODULE`` or ``open PATH`` is about to happen, ``call MODULE:CLASS.METHOD`` too; ``said TEXT``: it
            is written to standard error. The first two, and other signals than Ctrl-C, take a process of their own.
        arguments: of the program.
        count: the how manyth time.
        by: the signal's name.
    """
    kind, _, what = at.partition(" ")
    if by == "SIGINT" and kind in ("call", "said"):
        done = _in_this_process(kind, what, arguments, count)
    else:
        command = [sys.executable, "-c", PROGRAM, kind, what, str(count), by, *map(str, arguments)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False)
    errors = done.stderr.decode()
    assert done.returncode == 130, errors
    assert "Traceback" not in errors
    return done.stdout, errors.splitlines()
