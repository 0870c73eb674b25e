"""What is fuzzed: a strategy for cases, and the check that each of them has to pass."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from localspec.errors import LocalspecError

MAX_CPU_S = 20.0  # CPU time that one case may take: hundreds of times what any honest one needs, on any machine

Check = Callable[[Any], None]


@dataclass(frozen=True)
class Target:
    """One surface."""

    name: str  # for the report
    cases: st.SearchStrategy[Any]  # a strategy; the repr of a case must say all that is needed to build it again
    # makes the check, given a folder for files; closed when the run is over
    opened: Callable[[Path], AbstractContextManager[Check]]
    in_suite: int  # how many cases ``test_fuzz`` tries; 0 where another test does
    missing: Callable[[], str | None] = lambda: None  # why the target cannot be run here, or None


def one_line(error: BaseException, kind: type[BaseException] = LocalspecError) -> str:
    """The error's line; fails if it is of another kind, or not one readable line."""
    if not isinstance(error, kind):
        raise AssertionError(f"{type(error).__name__} where {kind.__name__} was due: {error}") from error
    line = str(error)
    assert line.strip(), f"{type(error).__name__} says nothing"
    assert len(line.splitlines()) == 1, f"not one line: {line!r}"
    assert len(line) < 2000, f"too long a line: {line[:200]!r}…"
    return line


@contextmanager
def timed(what: str, seconds: float = MAX_CPU_S) -> Iterator[None]:
    """Fails if its block takes an unreasonable CPU time."""
    started = time.process_time()
    try:
        yield
    finally:
        took = time.process_time() - started
        assert took < seconds, f"{what} took {took:.1f} s of CPU time"


def peak_bytes() -> int:
    """The most memory that this process ever held, so that a case can be seen to raise it; 0 where nobody knows."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def strict_json(text: str | bytes) -> Any:
    """What a text says that is JSON; Python reads NaN and Infinity, too."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def table(module: str, name: str) -> list[Any]:
    """A list of names or values, from ``tables.json``."""
    found: list[Any] = json.loads(Path(__file__).with_name("tables.json").read_bytes())[module][name]
    return found
