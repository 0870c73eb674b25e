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

def before(owner, name, then):
    called = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: (then(args), called(*args, **options))[1])

if kind in ("import", "open"):
    sys.addaudithook(lambda event, given: reached() if event == kind and given[0] == what else None)
elif kind == "said":
    before(sys.stderr, "write", lambda given: reached() if what in given[0] else None)
else:
    module, _, path = what.partition(":")
    owner, _, name = path.rpartition(".")
    before(getattr(importlib.import_module(module), owner), name, lambda given: reached())
signal.signal(getattr(signal, by), signal.getsignal(signal.SIGINT) if by == "SIGINT" else signal.SIG_DFL)  # not nohup's

from localspec.__main__ import main
main(arguments)
"""


def interrupted(
    at: str, arguments: Sequence[str | Path], *, count: int = 1, by: str = "SIGINT"
) -> tuple[bytes, list[str]]:
    """Standard output and the lines of standard error of ``localspec``, after a signal ended it.

    Args:
        at: ``import MODULE`` or ``open PATH`` is about to happen, ``call MODULE:CLASS.METHOD`` or ``said TEXT``, that
            is, on standard error, too.
        arguments: of the program.
        count: the how manyth time.
        by: the signal's name.
    """
    kind, _, what = at.partition(" ")
    command = [sys.executable, "-c", PROGRAM, kind, what, str(count), by, *map(str, arguments)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False)
    errors = done.stderr.decode()
    assert done.returncode == 130, errors
    assert "Traceback" not in errors
    return done.stdout, errors.splitlines()
