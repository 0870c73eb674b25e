"""Does llama-cpp live through a published head? Tried in another process, once per version and kind of head.

The functions that heads are fed by move between versions (see ``llama_staging``). Those that are there by name may take
other arguments than they did, and then they end the whole process, or worse. So before this process calls them, a child
loads the head and takes steps with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from localspec.backends import trial
from localspec.backends.llama.staging import NEEDED
from localspec.backends.trust import fingerprint
from localspec.errors import EngineError
from localspec.model_files.head_kinds.base import PublishedHead
from localspec.system.files import JsonStore, home

_FORMAT = 1
_CHILD = "from localspec.backends import head_trial_child; head_trial_child.main()"


def lends(head: PublishedHead) -> bool:
    """Whether the child needs the target: for weights of it, or because the functions hand out its states too."""
    return bool(head.borrows or head.of_model)


def check_survives(
    head: PublishedHead, target: Path, engine: str, n_threads: int, tick: Callable[[], None] = lambda: None
) -> None:
    """See that the engine computes a kind of head without ending the process; remembered.

    That it does is taken to hold for all files of the kind. That it does not can be due to the file, so other files of
    the kind are tried too.

    Args:
        head: its header.
        target: the file of what it drafts for; loaded by the child where it ``lends``.
        engine: name and version of the engine.
        n_threads: CPU threads.
        tick: called now and then meanwhile; what it raises ends the trial.

    Raises:
        EngineError: it ends the process.
    """
    store = JsonStore(home() / "trials", _FORMAT)
    # What the layers of different architectures are made of differs more than heads of a kind do.
    kind = {"engine": engine, "head": f"{head.title} {head.of_model[0] if head.of_model else ''}".strip()}
    if store.get(kind) is not None:
        return
    file = kind | {"file": fingerprint(head.path)}
    died = store.get(file) is not None
    if not died:
        lent = str(target) if lends(head) else ""
        status = trial.run_child(_CHILD, [str(head.path), lent, str(n_threads)], tick)
        # An exception (1) will be raised here as well, in the engine's own words. Of a child that was stopped from
        # outside, short memory included, nothing is known: what it was to do needs less memory than what follows here.
        died = status not in (0, 1) and status not in trial.KILLED_FROM_OUTSIDE
        if status == 0:
            store.put(kind, {"survives": True})
        elif died:
            store.put(file, {"survives": False})
    if died:
        raise EngineError(
            f"{engine} ended the process in which {head.path.name} was tried, so it is not loaded here; "
            f"version {NEEDED} runs such heads"
        )
