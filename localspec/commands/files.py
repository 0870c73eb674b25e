"""The commands on model files: ``pull``, ``list``, ``rm``, ``inspect``. Remarks and progress go to standard error."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localspec.errors import ModelFileError
from localspec.model_files.catalog import Catalog, Entry
from localspec.model_files.local_files import known_entries, remove
from localspec.model_files.sources.base import size_text
from localspec.system.home import models_dir
from localspec.terminal.progress import Progress
from localspec.terminal.text import on_one_line


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
    return 0


def list_command(as_json: bool = False) -> int:
    """Print the catalogue and what was pulled from the hub besides."""
    entries = known_entries()
    if as_json:
        print(json.dumps({"models": [_described(entry) for entry in entries]}, ensure_ascii=False, indent=2))
        return 0
    rows = [("NAME", "SIZE", "ON DISK", "LICENCE", "DRAFT", "")]
    for entry in entries:
        size = ("" if entry.sha256 or entry.present else "~") + size_text(entry.bytes_on_disk or entry.bytes)
        draft = entry.draft[0] if entry.draft else ""
        rows.append((entry.name, size, "yes" if entry.present else "", entry.license, draft, entry.note))
    _print_columns(rows)
    print(f"\nfolder: {models_dir()}")
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


def inspect_command(model: str, as_json: bool = False) -> int:
    """Print what a model file says of itself; only its header is read.

    Raises:
        UnknownModel: no such name or file.
        ModelFileError: it is not a readable GGUF.
    """
    from localspec.model_files.inspection import inspect

    facts = inspect(Catalog.load().resolve(model))
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        _print_facts(facts)
    return 0


# -- entries ----------------------------------------------------------------------------------------------------------


def _described(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "path": str(entry.path),
        "bytes": entry.bytes_on_disk if entry.present else entry.bytes,
        "present": entry.present,
        "bytes_exact": entry.present or bool(entry.sha256),
        "sha256": entry.sha256 or None,
        "license": entry.license,
        "draft": list(entry.draft),
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


def _print_facts(facts: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = [("file", facts["path"])]
    rows.append(("name", f"{facts['name']} ({facts['architecture'] or 'no architecture'})"))
    if facts["license"]:
        rows.append(("licence", facts["license"]))
    parts = f" in {facts['files']} files" if facts["files"] > 1 else ""
    rows.append(("size", f"{size_text(facts['bytes'])}{parts}, {facts['n_params'] / 1e6:,.0f} M parameters"))
    rows.append(("quantisation", facts["quantization"]))
    total = max(1, sum(facts["bytes_by_tensor_type"].values()))
    for kind, n_bytes in facts["bytes_by_tensor_type"].items():
        rows.append(("", f"{kind:<8} {size_text(n_bytes):>8}  {n_bytes / total:4.0%}"))
    rows.append(("context", f"{facts['context_length']:,} tokens" if facts["context_length"] else "not told"))
    if vocabulary := facts["vocabulary"]:
        pre = f", {vocabulary['pre']}" if vocabulary["pre"] else ""
        rows.append(("vocabulary", f"{vocabulary['n_tokens']:,} tokens ({vocabulary['kind']}{pre})"))
        named = [f"{k} {t['id']} {t['text']!r}" for k, t in vocabulary["special"].items() if t]
        rows.append(("special", ", ".join(named) or "none"))
        ends = ", ".join(f"{t['id']} {t['text']!r}" for t in vocabulary["ends_generation"][:8])
        rows.append(("ends with", ends or "nothing"))
    if template := facts["chat_template"]:
        extras = [name for name in ("system", "tools", "thinking") if template[name]]
        rows.append(("template", f"{template['format']}, {template['characters']:,} characters; {', '.join(extras)}"))
    else:
        rows.append(("template", "none: a base model, or one that was stripped"))
    rows += _memory_rows(facts["memory"])
    if facts["cannot_generate_text"]:
        rows.append(("note", facts["cannot_generate_text"]))
    for label, text in rows:
        # What a file says of itself must not be able to steer the terminal.
        print(f"{label:<13} {on_one_line(text)}".rstrip())


def _memory_rows(memory: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("memory", f"{size_text(memory['kv_bytes_per_token'])} of cache per token ({memory['kv_type']})")]
    if memory["sliding_window"]:
        rows.append(
            ("", f"{memory['windowed_layers']} layers look at the last {memory['sliding_window']:,} tokens only")
        )
    if memory["recurrent"]:
        rows.append(("", "some layers keep a state of fixed size, not counted here"))
    for at in memory["contexts"]:
        line = f"{at['n_ctx']:>9,} tokens: {size_text(at['kv_bytes']):>8} + weights = {size_text(at['total_bytes'])}"
        if at["kv_bytes_window_only"] != at["kv_bytes"]:
            line += f"  ({size_text(at['kv_bytes_window_only'])} if only the window is kept)"
        rows.append(("", line))
    return rows


class _PullProgress(Progress):
    """A pull's progress: a line that is gone afterwards where someone watches, else a line every tenth."""

    def __init__(self) -> None:
        super().__init__()
        self._now = ""
        self._tenth = -1
        self._since = (0.0, 0)

    def say(self, line: str) -> None:
        """A remark that stays."""
        self.clear()
        _note(line)

    def watch(self, what: str, done: int, total: int) -> None:
        """See ``sources.base.Watch``."""
        if what != self._now:
            self._now, self._tenth, self._since = what, -1, (time.monotonic(), done)
        tenth = done * 10 // total if total else -1
        if not total:
            self.report(what, None)
        elif self.live:
            self.report(f"{what}: {size_text(done)} of {size_text(total)}{self._speed(done, total)}", done / total)
        elif tenth > self._tenth:
            self._tenth = tenth
            self.report(f"{what}: {tenth * 10} % of {size_text(total)}{self._speed(done, total)}", None)

    def _speed(self, done: int, total: int) -> str:
        seconds, n_bytes = time.monotonic() - self._since[0], done - self._since[1]
        if seconds < 0.2 or n_bytes <= 0:
            return ""
        left = (total - done) * seconds / n_bytes
        return f", {size_text(n_bytes / seconds)}/s" + (f", {left:.0f} s left" if left >= 0.5 else "")
