"""The commands on model files: ``pull``, ``list``, ``rm``. Remarks and progress go to standard error."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from localspec.errors import DownloadError, ModelFileError
from localspec.model_files.catalog import Catalog, Entry
from localspec.model_files.local_files import known_entries, remove
from localspec.model_files.sources.base import size_text
from localspec.system.home import models_dir, offline
from localspec.terminal.progress import Progress
from localspec.terminal.text import clip, on_one_line, terminal_size


def pull(name: str) -> Path:
    """Have a model on disk, with its progress on standard error; see ``sources.pull`` for what is raised.

    Args:
        name: a catalogue name or ``hf:OWNER/REPO/FILE.gguf``.
    """
    from localspec.model_files import sources

    entry = Catalog.load().entry(name)
    with _PullProgress() as progress:
        return sources.pull(entry, watch=progress.watch, say=progress.say)


def pull_command(names: Sequence[str] = ()) -> int:
    """Fetch models, the default pair if none is named; prints the path of each.

    Raises:
        UnknownModel: before anything is fetched.
        DownloadError: a model cannot be had.
    """
    catalog = Catalog.load()
    entries = [catalog.entry(name) for name in names] or list(catalog.default_pair())
    for entry in entries:
        try:
            print(pull(entry.name), flush=True)
        except KeyboardInterrupt:
            _note(f"interrupted; what arrived is kept, and localspec pull {entry.name} goes on from there")
            return 130
    drafts = [draft for entry in entries for draft in entry.draft[:1] if not catalog[draft].present]
    for draft in dict.fromkeys(drafts):
        _note(f"its draft model makes it faster: localspec pull {draft} ({size_text(catalog[draft].bytes)})")
    heads = [head for entry in entries for head in entry.heads[:1] if not catalog[head].present]
    for head in dict.fromkeys(heads):
        _note(f"a head was published for it: localspec pull {head} ({size_text(catalog[head].bytes)})")
    return 0


SIZE_TOLERANCE = 0.05
"""Share by which the size of an entry that was never fetched may be off: some were taken from rounded figures."""


def check_command(names: Sequence[str] = ()) -> int:
    """Ask the hub whether entries, the whole catalogue if none is named, are still as the catalogue has them.

    Returns:
        1 if one is not.

    Raises:
        UnknownModel: before anything is asked.
        DownloadError: the hub cannot be asked.
    """
    from localspec.model_files.sources import check
    from localspec.model_files.sources.hub import Unreachable

    catalog = Catalog.load()
    entries = [catalog.entry(name) for name in names] or list(catalog.values())
    width, good = max(len(entry.name) for entry in entries), True
    with Progress() as progress:
        for i, entry in enumerate(entries):
            progress.report("asking the hub", i / len(entries))
            try:
                found = _comparison(entry, check(entry))
            except Unreachable:
                raise
            except DownloadError as error:
                if offline():
                    raise
                found, good = f"does not hold: {error}", False
            progress.clear()
            print(f"{entry.name:<{width}}  {on_one_line(found)}", flush=True)
    return 0 if good else 1


def _comparison(entry: Entry, n_bytes: int | None) -> str:
    """What the hub's size says of an entry, which is of the file that was checked if there is such."""
    if n_bytes is None:
        return "is not on the hub: it comes from data wheels"
    if entry.sha256:
        return f"holds: {size_text(n_bytes)}, the file that was checked"
    if entry.bytes and abs(n_bytes - entry.bytes) > SIZE_TOLERANCE * entry.bytes:
        raise DownloadError(f"the hub has {n_bytes:,} bytes, the catalogue about {entry.bytes:,}")
    return f"holds: {size_text(n_bytes)}; never fetched by us"


def list_command(as_json: bool = False) -> int:
    """Print the catalogue, what was pulled from the hub besides, and the heads on this disk."""
    from localspec.model_files.head_list import described_heads

    entries, heads = known_entries(), described_heads()
    if as_json:
        listing = {"models": [_described(entry) for entry in entries], "heads": heads}
        print(json.dumps(listing, ensure_ascii=False, indent=2))
        return 0
    rows = [("NAME", "SIZE", "ON DISK", "CHECKED", "LICENCE", "DRAFT", "")]
    for entry in entries:
        size = ("" if entry.sha256 or entry.present else "~") + size_text(entry.bytes_on_disk or entry.bytes)
        draft = ", ".join((*entry.draft[:1], *entry.heads[:1]))
        marks = ("yes" if entry.present else "", "yes" if entry.sha256 else "")
        rows.append((entry.name, size, *marks, entry.license, draft, entry.note))
    _print_columns(rows)
    print("\nchecked: downloaded and run by us; localspec pull --check verifies that the hub still has all of them")
    print(f"folder: {models_dir()}")
    if heads:
        print()
        head_rows = [("HEAD", "SIZE", "KIND", "FOR")]
        for head in heads:
            cells = (head["path"], size_text(head["bytes"]), head["kind"] or "damaged", head["target"] or "")
            head_rows.append(cells)
        _print_columns([[on_one_line(cell) for cell in row] for row in head_rows])
    return 0


def rm_command(names: Sequence[str]) -> int:
    """Remove models, and what an interrupted pull left of them.

    Raises:
        UnknownModel: before anything is removed.
        ModelFileError: a model is not on the disk, or is being fetched right now.
    """
    catalog = Catalog.load()
    entries = [catalog.entry(name) for name in names]
    for entry in entries:
        freed = remove(entry)
        if not freed:
            raise ModelFileError(f"{entry.name} is not on this disk, so there is nothing to remove")
        print(f"removed {entry.name} ({size_text(freed)})")
    return 0


# -- entries ----------------------------------------------------------------------------------------------------------


def _described(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "path": str(entry.path),
        "bytes": entry.bytes_on_disk if entry.present else entry.bytes,
        "present": entry.present,
        "checked": bool(entry.sha256),
        "bytes_exact": entry.present or bool(entry.sha256),
        "sha256": entry.sha256 or None,
        "license": entry.license,
        "draft": list(entry.draft),
        "heads": list(entry.heads),
        "sources": [place["kind"] for place in entry.sources],
        "note": entry.note,
    }


# -- showing ----------------------------------------------------------------------------------------------------------


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    """A table without lines: easy to read, and to cut apart with awk."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 16
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(line if len(line) <= limit else line[: limit - 1] + "…")


class _PullProgress(Progress):
    """A pull's progress: a line that is gone afterwards where someone watches, else a line every tenth or minute.

    Args:
        clock: the time [s].
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._now = ""
        self._tenth = -1
        self._told = 0.0
        self._recent: deque[tuple[float, int]] = deque()

    def say(self, line: str) -> None:
        """A remark that stays."""
        self.clear()
        _note(line)

    def watch(self, what: str, done: int, total: int) -> None:
        """See ``sources.base.Watch``."""
        now = self._clock()
        if what != self._now:
            self._now, self._tenth = what, -1
            self._recent.clear()
        if not total:
            self.report(what, None)
            return
        figures = f"{size_text(done)} of {size_text(total)}{self._speed(now, done, total)}"
        if self.live:
            columns, _ = terminal_size()
            room = columns - len(figures) - len(": ") - len(" 100%") - 1
            self.report(f"{clip(what, max(room, 12))}: {figures}", done / total)
            return
        tenth = done * 10 // total
        if tenth > self._tenth or now - self._told >= _MINUTE:
            self._tenth, self._told = tenth, now
            self.report(f"{what}: {done * 100 // total} %, {figures}", None)

    def _speed(self, now: float, done: int, total: int) -> str:
        """What the last seconds say of the rest."""
        recent = self._recent
        if not recent or now - recent[-1][0] >= _WINDOW_S / 20:
            recent.append((now, done))
        while len(recent) > 1 and now - recent[0][0] > _WINDOW_S:
            recent.popleft()
        seconds, n_bytes = now - recent[0][0], done - recent[0][1]
        if seconds < 0.2 or n_bytes <= 0:
            return ""
        return f", {size_text(n_bytes / seconds)}/s" + _left((total - done) * seconds / n_bytes)


_MINUTE = 60.0
_WINDOW_S = 20.0
"""Seconds over which the speed is averaged: long enough to be read, short enough to show that a line got slow."""


def _left(seconds: float) -> str:
    """The time that is left, no finer than one would say it."""
    if seconds < 0.5:
        return ""
    if seconds < 100:
        return f", {seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f", {minutes} min left" if minutes < 100 else f", {minutes // 60} h {minutes % 60:02d} min left"
