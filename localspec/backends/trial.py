"""Does an engine in C++ live through a file? Tried in another process, once per file.

ik-llama knows the names of 70 architectures and computes fewer: with the others, or with unusual sizes, it aborts the
whole process (GGML_ASSERT) when the first context is made or the first tokens are decoded. llama.cpp computes more, and
asserts in some 130 architectures that the sizes in the file fit together. No list of names can say which do, so files
of kinds that are not run all the time are first run by a child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from localspec.backends import trust
from localspec.backends.base import Progress
from localspec.backends.registry import engine_module
from localspec.errors import Cancelled
from localspec.model_files.gguf import fingerprint
from localspec.system.files import JsonStore, home, remembered

_FORMAT = 1
_POLL_S = 0.1

KILLED_FROM_OUTSIDE = {-int(each) for each in (signal.SIGINT, signal.SIGTERM)} | {-9, 0xC000013A}
"""Says nothing about the file: the user stopped it (the last is Windows' Ctrl-C), or the machine ran out of memory."""


def survives(
    path: Path, engine: str, kv_type: str, n_threads: int, progress: Progress | None = None, *, several: bool = False
) -> bool:
    """Whether a process that loads a file and decodes with it comes to its end; remembered. Cancelled by ``progress``.

    Args:
        engine: name and version of the engine, whose ``load`` takes ``is_trial``.
        several: whether it decodes several sequences in one pass, and tokens that branch.
    """

    def tick() -> None:
        if progress is not None and not progress(0.0):
            raise Cancelled(f"loading {path.name} was stopped")

    def examine() -> dict[str, bool] | None:
        arguments = [str(path), engine.partition(" ")[0], kv_type, str(n_threads), key["memory"]]
        status = run_child("from localspec.backends import trial; trial.main()", arguments, tick)
        # An exception (1) is no reason to refuse: the same one will be raised here, in the engine's own words.
        return None if status in KILLED_FROM_OUTSIDE else {"survives": status in (0, 1)}

    key = {"engine": engine, "file": fingerprint(path), "kv": kv_type, "memory": "several" if several else "one"}
    found = remembered(JsonStore(home() / "trials", _FORMAT), key, examine)
    return bool(found and found["survives"])


def run_child(code: str, arguments: Sequence[str], tick: Callable[[], None]) -> int:
    """Run code in another process, with ``arguments`` as ``sys.argv[1:]``, and wait for its end.

    ``tick`` is called meanwhile; what it raises ends the process, and is raised here.

    Returns:
        The exit status; negative where a signal ended it.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if sys.platform == "linux":
        environment["PATH"] = os.devnull  # an abort would call a debugger first, which takes seconds
    command = [sys.executable, "-c", code, *arguments]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet) as child:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return child.wait(_POLL_S)
                tick()
        finally:
            child.kill()


# -- what the child does -----------------------------------------------------------------------------------------------

N_TOKENS = 280  # more than ik-llama computes together, so that windows and masks are met by a second piece


def main() -> None:
    path, backend, kv_type, n_threads, memory = sys.argv[1:]
    options = {"n_threads": int(n_threads), "n_gpu_layers": 0, "kv_type": kv_type}
    with engine_module(backend).load(path, **options, is_trial=True) as model:
        if memory == "several":
            trust.check_batch(model)
            trust.check_branches(model)
            return
        tokens = [i % model.n_vocab for i in range(1, N_TOKENS + 1)]
        with model.new_context(N_TOKENS + 8) as context:
            context.decode(tokens, "last")
            context.decode(tokens[:5])
        trust.check_model(model)
