"""The commands on files: ``pull``, ``list``, ``rm``, ``cache``, ``inspect``. Remarks go to standard error."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from localspec.errors import DownloadError, ModelFileError
from localspec.model_files.catalog import ROOM, Catalog, Entry
from localspec.model_files.local_files import known_entries, remove
from localspec.model_files.sources.base import size_text
from localspec.system.files import JsonStore, home, models_dir, offline
from localspec.system.machine import read_memory
from localspec.system.terminal import Progress, clip, on_one_line, terminal_size


def pull(name: str) -> Path:
    """Have a model on disk, with progress on standard error; see ``sources.pull`` for errors."""
    from localspec.model_files import sources

    entry = Catalog.load().entry(name)
    was_here, started = entry.present, time.monotonic()
    kept = sum(path.stat().st_size for path in sources.parts_folder(entry).rglob("*") if path.is_file())
    with PullProgress() as progress:
        path = sources.pull(entry, watch=progress.watch, say=progress.say)
    seconds, n_bytes = time.monotonic() - started, entry.bytes_on_disk - kept
    if not was_here and seconds > 1 and n_bytes > _TELLING_BYTES:
        _speeds().put(_SPEED, {"bytes_per_second": n_bytes / seconds})
    return path


_SPEED = {"of": "fetching"}
_TELLING_BYTES = 20_000_000  # smaller files say more of delays than of speed
USUAL_SPEED = 10_000_000  # bytes per second, until something was fetched


def _speeds() -> JsonStore:
    return JsonStore(home() / "fetching", 1)


def fetch_minutes(n_bytes: int) -> float:
    """How long fetching so much takes, as fast as the last time."""
    known = (_speeds().get(_SPEED) or {}).get("bytes_per_second")
    return n_bytes / (known if isinstance(known, int | float) and known > 0 else USUAL_SPEED) / 60


def pull_command(names: Sequence[str] = ()) -> int:
    """Fetch models, by default the default pair, and print their paths."""
    catalog = Catalog.load()
    entries = [catalog.find(name) for name in names] or list(catalog.default_pair())
    for name, entry in zip(names, entries, strict=False):
        if name != entry.name:
            note(f"{name} is {entry.name} ({size_text(entry.bytes)})")
    for entry in entries:
        try:
            print(pull(entry.name), flush=True)
        except KeyboardInterrupt:
            note(f"interrupted; what arrived is kept, and localspec pull {entry.name} goes on from there")
            return 130
    remarks = {"draft": "its draft model can make answers faster", "heads": "a head was published for it"}
    for kind, remark in remarks.items():
        for name in dict.fromkeys(name for entry in entries for name in getattr(entry, kind)[:1]):
            if not catalog[name].present:
                note(f"{remark}: localspec pull {name} ({size_text(catalog[name].bytes)})")
    return 0


SIZE_TOLERANCE = 0.05  # relative error allowed in the size of an entry that was never fetched; some are rounded


def check_command(names: Sequence[str] = ()) -> int:
    """Ask the hub whether entries, by default all, are as the catalogue has them; returns 1 if not."""
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
            except DownloadError as error:
                if offline() or isinstance(error, Unreachable):
                    raise
                found, good = f"does not hold: {error}", False
            progress.clear()
            print(f"{entry.name:<{width}}  {on_one_line(found)}", flush=True)
    return 0 if good else 1


def _comparison(entry: Entry, n_bytes: int | None) -> str:
    """What the hub's size says of an entry."""
    if n_bytes is None:
        return "is not on the hub: it comes from data wheels"
    if entry.sha256:
        return f"holds: {size_text(n_bytes)}, the file that was checked"
    if entry.bytes and abs(n_bytes - entry.bytes) > SIZE_TOLERANCE * entry.bytes:
        raise DownloadError(f"the hub has {n_bytes:,} bytes, the catalogue about {entry.bytes:,}")
    return f"holds: {size_text(n_bytes)}; never fetched by us"


def asked(entries: Sequence[Entry], more: str = "", larger: str = "") -> str:
    """Ask whether models that are not on this disk are to be fetched: ``y``, ``n``, or ``l``. ``more`` names what else
    may be, ``larger`` a model that can be taken instead, by one key."""
    names, size = " and ".join(entry.name for entry in entries), sum(entry.bytes for entry in entries)
    one = len(entries) == 1
    minutes = f", {minutes_text(fetch_minutes(size))}"
    what = f"{names} {'is' if one else 'are'} not here" + (f": {size_text(size)}{minutes}" if size else "") + more
    if larger:
        note(f"l takes {larger}")
    while True:
        keys = "[Y/n/l]" if larger else "[Y/n]"
        print(f"{what}. Fetch {'it' if one else 'them'}? {keys} ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            return "n"
        answer = line.strip().lower() or "y"
        if answer in ("y", "yes", "n", "no") or (larger and answer in ("l", "larger")):
            return answer[0]


def minutes_text(minutes: float) -> str:
    return f"about {max(1, round(minutes))} min"


DECLINED_S = 7 * 24 * 3600.0  # how long a draft model that was declined is not offered again [s]


def wants_draft(entries: Sequence[Entry]) -> bool:
    """``asked`` for draft models; a no is remembered for a week."""
    store, key = JsonStore(home() / "declined", 1), {"models": " ".join(entry.name for entry in entries)}
    declined = (store.get(key) or {}).get("when")
    if isinstance(declined, int | float) and 0 <= time.time() - declined < DECLINED_S:
        return False
    if asked(entries) == "y":
        return True
    store.put(key, {"when": time.time()})
    note(f"not asked again for a week: localspec pull {key['models']} fetches it, deleting {store.folder} asks again")
    return False


def list_command(as_json: bool = False, everything: bool = False) -> int:
    """Print the models on this disk, with ``everything`` the whole catalogue, each with its heads."""
    from localspec.heads.listing import described_heads
    from localspec.model_files.gguf import fingerprint

    entries, heads = known_entries(), described_heads()
    if as_json:
        listing = {"models": [_described(entry) for entry in entries], "heads": heads}
        print(json.dumps(listing, ensure_ascii=False, indent=2))
        return 0
    by_name, memory = {entry.name: entry for entry in entries}, read_memory().usable

    def row(entry: Entry, name: str, note: str) -> Sequence[str]:
        size = ("" if entry.sha256 or entry.present else "~") + size_text(entry.bytes_on_disk or entry.bytes)
        here = ["yes" if entry.present else ""] * everything
        fits = "" if note == "head" or not entry.bytes else "fits" if ROOM * entry.bytes <= memory else "too big"
        return (name, size, *here, fits, note)

    files = {str(entry.path) for entry in entries}
    others = [head for head in heads if head["path"] not in files]  # those without an entry
    shown = sorted((entry for entry in entries if everything or entry.present), key=lambda entry: not entry.present)
    under_models = {name for entry in shown for name in entry.heads}
    rows: list[Sequence[str]] = []
    for entry in shown:
        if entry.name in under_models:
            continue
        rows.append(row(entry, entry.name, entry.note))
        known = [by_name[name] for name in entry.heads]
        rows += [row(head, f"  {head.name}", "head") for head in known if everything or head.present]
        digest = fingerprint(entry.path) if entry.present and others else None
        for head in [head for head in others if digest and head.get("target_fingerprint") == digest]:
            others.remove(head)
            name, here = on_one_line(Path(head["path"]).name), ["yes"] * everything
            rows.append((f"  {name}", size_text(head["bytes"]), *here, "", f"head, {head['kind']}"))
    if rows:
        print_columns([("NAME", "SIZE", *(["HERE"] * everything), "FITS", ""), *rows])
    else:
        print("no model is here yet: localspec pull fetches the default pair")
    left: list[Sequence[str]] = []
    for head in others:
        path = Path(head["path"])
        if everything or path.is_relative_to(home()):
            cells = (path.name, size_text(head["bytes"]), head["kind"] or "damaged", head["target"] or "")
            left.append([on_one_line(cell) for cell in cells])
    if left:
        print()
        print_columns([("HEAD OF ANOTHER MODEL", "SIZE", "KIND", "FOR"), *left])
    print(f"\nfits: this machine's memory holds {ROOM:g} times its size" if rows else "")
    if everything:
        print("~: never fetched by us; localspec pull --check asks the hub for the size")
    else:
        n = sum(not entry.present for entry in entries)
        print(f"{n} more can be fetched: localspec list --all, then localspec pull NAME")
    print(f"folder: {models_dir()}")
    return 0


def cache_command(*, clear: bool = False, as_json: bool = False) -> int:
    """Print, or delete, what was kept of prompts."""
    from localspec.engine import stored_prompts

    if clear:
        kept = sum(each.n_bytes for each in stored_prompts.stored_prompts())
        print(f"deleted {_prompts(stored_prompts.clear())} ({size_text(kept)})")
        return 0
    found = stored_prompts.stored_prompts()
    if as_json:
        rows = [
            {"path": str(each.path), "model": each.maker.get("name", ""), "engine": each.maker.get("engine", "")}
            | {"tokens": len(each.tokens), "bytes": each.n_bytes, "used": each.used}
            for each in found
        ]
        print(json.dumps({"folder": str(stored_prompts.folder()), "prompts": rows}, ensure_ascii=False, indent=2))
        return 0
    table: list[Sequence[str]] = []
    for each in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used))
        names = (on_one_line(each.maker.get(key, "?")) for key in ("name", "engine"))
        table.append((f"{len(each.tokens):,}", size_text(each.n_bytes), used, *names))
    if table:
        print_columns([("TOKENS", "SIZE", "USED", "MODEL", "ENGINE"), *table])
        print()
    total = size_text(sum(each.n_bytes for each in found))
    print(f"{_prompts(len(found))}, {total}" + ("; localspec cache --clear deletes them" if found else ""))
    print(f"folder: {stored_prompts.folder()}")
    return 0


def _prompts(n: int) -> str:
    return "1 prompt" if n == 1 else f"{n} prompts"


def rm_command(names: Sequence[str]) -> int:
    """Remove models, and what an interrupted pull left of them."""
    from localspec.heads.assembly import engine_files

    catalog = Catalog.load()
    entries = [catalog.entry(name) for name in names]
    for entry in entries:
        freed = remove(entry, engine_files(entry.path))
        if not freed:
            raise ModelFileError(f"{entry.name} is not on this disk, so there is nothing to remove")
        print(f"removed {entry.name} ({size_text(freed)})")
    return 0


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


def note(line: str) -> None:
    """Print a remark to standard error."""
    print(line, file=sys.stderr, flush=True)


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """A table that awk can cut."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 16
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(line if len(line) <= limit else line[: limit - 1] + "…")


class PullProgress(Progress):
    """Progress of a pull: a line redrawn on a terminal, else one every tenth or minute. ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._now = ""
        self._tenth = -1
        self._told = 0.0
        self._recent: deque[tuple[float, int]] = deque()

    def say(self, line: str) -> None:
        self.clear()
        note(line)

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
        """Speed over the last seconds, and the time left."""
        recent = self._recent
        if not recent or now - recent[-1][0] >= _WINDOW_S / 20:
            recent.append((now, done))
        while len(recent) > 1 and now - recent[0][0] > _WINDOW_S:
            recent.popleft()
        seconds, n_bytes = now - recent[0][0], done - recent[0][1]
        if seconds < 0.2 or n_bytes <= 0:
            return ""
        left = left_text((total - done) * seconds / n_bytes)
        return f", {size_text(n_bytes / seconds)}/s" + (f", {left}" if left else "")


_MINUTE = 60.0
_WINDOW_S = 20.0  # the speed is averaged over this time


def left_text(seconds: float) -> str:
    if seconds < 0.5:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min left"


# ``localspec inspect``: what a file says of itself.

_CURVE_ROWS = 12  # points of a learning curve that are printed; ``--json`` has all


def inspect_command(model: str, as_json: bool = False) -> int:
    """Print what the header of a model file says."""
    from localspec.heads.listing import inspect

    facts = inspect(Catalog.load().resolve(model))
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        _print_facts(facts)
    return 0


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
    if "head" in facts:
        rows += _head_rows(facts["head"])
    elif "published_head" in facts:
        rows += _published_rows(facts["published_head"])
    else:
        rows += _model_rows(facts)
    if facts["cannot_generate_text"] and not facts.keys() & {"head", "published_head"}:
        rows.append(("note", facts["cannot_generate_text"]))
    for label, text in rows:
        # What a file says of itself must not be able to steer the terminal.
        print(f"{label:<13} {on_one_line(text)}".rstrip())


def _model_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("context", f"{facts['context_length']:,} tokens" if facts["context_length"] else "not told")]
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
    if mtp := facts["mtp"]:
        engines = "llama-cpp or mlx" if facts["architecture"] == "glm4moe" else "llama-cpp"
        usable = mtp["unusable"] or f"--draft mtp drafts with it, on {engines}"
        rows.append(("MTP", f"{mtp['layers']} for multi-token prediction; {usable}"))
    return rows + _memory_rows(facts["memory"])


def _published_rows(head: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("head", f"{head['title']}, reads {', '.join(head['taps'])}")]
    rows.append(("for", f"a model with {head['n_vocab']:,} tokens and states of {head['target_embedding_length']:,}"))
    at_once = f", {block['guesses']} tokens in a pass" if (block := head["block"]) else ""
    rows.append(("guesses", f"{head['n_out']:,} of them{at_once}"))
    borrowed = " and ".join(head["borrows"])
    engines = " or ".join(each for each in head["engines"] if each != "reference")
    own = f"{borrowed} of the target, on {engines}" if borrowed else "nothing of the target's weights"
    return [*rows, ("takes", own)]


def _head_rows(head: dict[str, Any]) -> list[tuple[str, str]]:
    target, training = head["target"], head["training"]
    sizes = f"{target['n_layers']} layers of {target['n_embd']:,} channels"
    rows = [("head for", f"{target['name']} ({target['architecture']}, {sizes})")]
    rows.append(("", f"its file's fingerprint {target['fingerprint']}, its vocabulary's {target['vocab']}"))
    vocabulary = f"among {head['n_out']:,} of {target['n_vocab']:,} tokens"
    rows.append(("kind", f"{head['kind']}: reads {', '.join(head['taps'])}; {head['steps']} ahead, {vocabulary}"))
    if head["n_head"]:
        heads = f"{head['n_head']} heads, {head['n_head_kv']} of keys, of {head['d_head']} channels"
        rows.append(("block", f"{heads}; MLP of {head['d_ff']:,}"))
    return rows + _training_rows(training)


def _training_rows(training: dict[str, Any]) -> list[tuple[str, str]]:
    if not training["command"]:
        return [("training", "none")]
    rows = [("made by", training["command"])]
    versions = ", ".join(f"{name} {version}" for name, version in training["versions"].items())
    rows.append(("", "; ".join(filter(None, [f"seed {training['seed']}", training["machine"], versions]))))
    rows += [("went on from" * (not i), line) for i, line in enumerate(training["earlier"])]
    data, seen = training["data_tokens"], training["tokens_seen"]
    rows.append(("training", f"{data:,} tokens of data, {seen:,} seen, {training['minutes']:,.0f} minutes"))
    return rows + _rate_rows(training["acceptance"]) + _curve_rows(training["curve"])


def _rate_rows(acceptance: dict[str, Sequence[float]]) -> list[tuple[str, str]]:
    """Acceptance by category and position."""
    steps = max(map(len, acceptance.values()), default=0)
    rows = [[name, *(f"{rate:.2f}" for rate in rates)] for name, rates in acceptance.items()]
    return _table("right at", [["", *map(str, range(1, steps + 1))], *rows]) if rows else []


def _curve_rows(curve: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Learning curve: acceptance of the first tokens ahead in all texts, and of the first in each category."""
    from localspec.heads.card import ALL_TEXTS

    rates = {name: point["acceptance"][name] for point in curve for name in point["acceptance"]}
    columns = [(name, k) for name in rates for k in range(len(rates[name]) if name == ALL_TEXTS else 1)]
    rows = [["tokens seen", "minutes", *(str(k + 1) if k else name for name, k in columns)]]
    for point in [*reversed(curve[:: -max(1, -(-len(curve) // _CURVE_ROWS))])]:
        found = [point["acceptance"].get(name, ())[k : k + 1] for name, k in columns]
        cells = [f"{rate[0]:.2f}" if rate else "" for rate in found]
        rows.append([f"{point['tokens_seen']:,}", f"{point['minutes']:,.0f}", *cells])
    return _table("curve", rows) if curve else []


def _table(label: str, rows: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Rows under a label, the first column to the left and figures to the right."""
    first, *widths = (max(map(len, column)) for column in zip_longest(*rows, fillvalue=""))
    lines: list[tuple[str, str]] = []
    for name, *cells in rows:
        figures = (f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=False))
        lines.append((label * (not lines), name.ljust(first) + "".join(figures)))
    return lines


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
