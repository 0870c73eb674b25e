"""What a process does that loads model files with one engine, so that an abort is its own.

A path's verdict is ``{"went": "well"}``, or the error's class and text; without one the process died.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

TEXT = "hello 😀 <|im_end|>\n  the of"
MAX_ADDRESSES = 24 << 30

SILENCE_S = 120  # Without a verdict for so long, the engine hangs: a load of these files takes milliseconds


def load_and_decode(backend: str, path: Path) -> None:
    """What the first request would do with the file."""
    from localspec.backends.registry import engine_module

    with engine_module(backend).load(path, n_threads=1) as model:
        tokens = model.tokenize(TEXT, add_special=True, parse_special=True)
        tokens = [token for token in tokens if 0 <= token < model.n_vocab]
        with model.new_context(64) as context:
            context.decode([0, model.n_vocab - 1, *tokens][:24])
            context.truncate(1)
            context.decode([model.n_vocab // 2])


def peak_kb() -> int:
    """The most memory that this process held. What the system counts elsewhere begins with what its parent held."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def begin(log: Path) -> None:
    """What engines print goes to a log."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESSES, MAX_ADDRESSES))


def verdict(backend: str, path: Path) -> dict[str, Any]:
    """How a file went; a process that hangs ends itself."""
    signal.alarm(SILENCE_S)
    answer: dict[str, Any] = {"went": "well"}
    try:
        load_and_decode(backend, path)
    except Exception as error:
        answer = {"error": str(error), "kinds": [kind.__name__ for kind in type(error).__mro__]}
    signal.alarm(0)
    return answer | {"peak_kb": peak_kb()}
