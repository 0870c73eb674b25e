"""Does an engine in C++ live through a file? Tried in another process, once per file.

ik-llama knows the names of 70 architectures and computes fewer. With a Mamba, a GPT-2, a BLOOM, a Gemma 2 of an unusual
size or a narrow sliding window it aborts the whole process (GGML_ASSERT) when the first context is made or the first
tokens are decoded. llama.cpp computes more, and asserts in some 130 architectures that the sizes in the file fit
together. No list of names can say which do. So whatever is not of the kinds that are run all the time is first run by a
child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from localspec.backends.base import Progress
from localspec.backends.trust import fingerprint
from localspec.errors import Cancelled
from localspec.system.files import JsonStore, home

_FORMAT = 1
_POLL_S = 0.1

KILLED_FROM_OUTSIDE = {-int(each) for each in (signal.SIGINT, signal.SIGTERM)} | {-9, 0xC000013A}
"""Says nothing about the file: the user stopped it (the last is Windows' Ctrl-C), or the machine ran out of memory."""


def survives(
    path: Path, engine: str, kv_type: str, n_threads: int, progress: Progress | None = None, *, several: bool = False
) -> bool:
    """Whether a process that loads a file and decodes with it comes to its end; remembered.

    Args:
        path: the file.
        engine: name and version of the engine, which has ``open_untried``.
        kv_type: type of the KV cache.
        n_threads: CPU threads.
        progress: see ``backends.base.Progress``.
        several: whether it decodes several sequences in one pass, and tokens that branch, for which the engine has
            other kernels.

    Raises:
        Cancelled: ``progress`` returned False.
    """
    store, key = JsonStore(home() / "trials", _FORMAT), {"engine": engine, "file": fingerprint(path), "kv": kv_type}
    if several:
        key["memory"] = "several, and trees"
    known = (store.get(key) or {}).get("survives")
    if isinstance(known, bool):
        return known
    status = _run(path, engine.partition(" ")[0], kv_type, n_threads, progress, several)
    # An exception (1) is no reason to refuse: the same one will be raised here, in the engine's own words.
    found = status in (0, 1)
    if status not in KILLED_FROM_OUTSIDE:
        store.put(key, {"survives": found})
    return found


def _run(path: Path, backend: str, kv_type: str, n_threads: int, progress: Progress | None, several: bool) -> int:
    def tick() -> None:
        if progress is not None and not progress(0.0):
            raise Cancelled(f"loading {path.name} was stopped")

    arguments = [str(path), backend, kv_type, str(n_threads), "several" if several else "one"]
    return run_child("from localspec.backends import trial_child; trial_child.main()", arguments, tick)


def run_child(code: str, arguments: Sequence[str], tick: Callable[[], None]) -> int:
    """Run some of our code in another process, and wait for its end.

    Args:
        code: what it runs.
        arguments: its ``sys.argv`` from 1 on.
        tick: called while it runs; what it raises ends the process, and is raised here.

    Returns:
        Its exit status; negative where a signal ended it.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if sys.platform == "linux":
        environment["PATH"] = os.devnull  # an abort would call a debugger first, which takes seconds
    command = [sys.executable, "-c", code, *arguments]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet) as child:
        try:
            while True:
                try:
                    return child.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            child.kill()
