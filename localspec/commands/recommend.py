"""``localspec recommend``: which models of the catalogue would answer well here, and what fetching them takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from localspec.commands.files import fetch_minutes, print_columns
from localspec.controllers.calibration import curves
from localspec.engine.fit import TIGHT, USUAL_CTX, Sizes, need
from localspec.measuring.last_bench import last_bench
from localspec.model_files.catalog import ROOM, Catalog, Entry
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.sources.base import size_text
from localspec.system import machine
from localspec.system.terminal import Progress

ENOUGH = 8.0  # tokens a second at which a person reads along
REACHED = 0.65
"""Share of the measured bandwidth that one-token passes reach, where none was measured here: the 1.5B on two cores,
quiet, 27.4 of 40 ms."""

LEAST_BYTES = 400_000_000  # passes of smaller models take their time for other things than reading weights

LARGE_BYTES, LARGE_GAIN, SMALL_GAIN = 4_000_000_000, 1.4, 1.1
"""What drafting gains by class: over 4 GB with a draft model 1.4 (a 1.5B made as costly as a 7B: 1.48 on 16 questions,
95 % 1.16 to 1.66), else 1.1 (the default pair: 1.09 to 1.26). A mixture of experts gains less: it counts as small."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The share of the bandwidth that one-token passes reach, and the model that it was measured with here, if any."""

    share: float = REACHED
    measured_with: str | None = None

    @classmethod
    def here(cls, bandwidth: float | None) -> Reached:
        """By the largest model on this disk whose passes were timed on this machine with nothing else running."""
        present = [entry for entry in Catalog.load().values() if entry.present and entry.bytes >= LEAST_BYTES]
        for entry in sorted(present, key=lambda entry: entry.bytes * entry.active, reverse=True):
            if bandwidth is not None and (timed := curves().fastest(entry.path)) is not None:
                return cls(min(1.0, entry.bytes * entry.active / (timed[0] / 1e3) / bandwidth), entry.name)
        return cls()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that could answer here."""

    name: str
    bytes: int
    present: bool
    checked: bool  # whether this very file was fetched and run by the makers of localspec
    fits: bool
    tokens_per_second: float | None  # with what drafts for it; None: the bandwidth is unknown
    measured: bool  # whether that is by its own passes and bench on this machine; else expected
    draft: str | None
    minutes: float  # to fetch what is missing of both

    @property
    def answers(self) -> bool:
        return self.fits and (self.tokens_per_second or 0.0) >= ENOUGH


def candidates(memory: int, bandwidth: float | None, reached: Reached = Reached()) -> list[Candidate]:
    """Models of the catalogue that chat, the largest first.

    Args:
        memory: what may be taken [bytes].
        bandwidth: at which memory is read [bytes per second].
        reached: what passes make of it, for models that were not timed here.
    """
    catalog = Catalog.load()
    heads = {name for entry in catalog.values() for name in entry.heads}
    found = [entry for entry in catalog.values() if entry.bytes and not entry.base and entry.name not in heads]
    rows = (_candidate(entry, catalog, memory, bandwidth, reached) for entry in found)
    return sorted(rows, key=lambda row: row.bytes, reverse=True)


def _candidate(entry: Entry, catalog: Catalog, memory: int, bandwidth: float | None, reached: Reached) -> Candidate:
    draft = next((catalog[name] for name in entry.draft), None)
    both = [entry] if draft is None else [entry, draft]
    gain = LARGE_GAIN if entry.bytes >= LARGE_BYTES and draft is not None and entry.active == 1.0 else SMALL_GAIN
    timed, bench = curves().fastest(entry.path) if entry.present else None, None
    rate = None if bandwidth is None else gain * reached.share * bandwidth / (entry.bytes * entry.active)
    if timed is not None:
        bench = last_bench(entry.path, timed[1])
        rate = 1e3 / timed[0] * (gain if bench is None else bench.speedups["all"])
    return Candidate(
        entry.name, entry.bytes, entry.present, bool(entry.sha256), sum(map(_needed, both)) <= TIGHT * memory,
        None if rate is None else round(rate, 1), bench is not None, None if draft is None else draft.name,
        fetch_minutes(sum(each.bytes for each in both if not each.present)),
    )  # fmt: skip


def _needed(entry: Entry) -> int:
    """Memory of a model with the usual context [bytes]."""
    if not entry.present:
        return round(ROOM * entry.bytes)
    with GGUFFile(entry.path) as gguf:
        return need(Sizes.of(gguf), min(USUAL_CTX, gguf.n_ctx_train or USUAL_CTX), "f16", "ik-llama").total


def look() -> tuple[list[Candidate], Reached]:
    """``candidates`` for this machine, now."""
    memory = machine.read_memory().available
    threads = min(machine.default_threads(), machine.usable_cpus())
    with Progress() as progress:
        progress.report("measuring the memory's bandwidth", None)
        bandwidth = machine.measure_bandwidth(threads, available=memory)
    reached = Reached.here(bandwidth)
    return candidates(memory, bandwidth, reached), reached


def recommend_command(as_json: bool = False, everything: bool = False) -> int:
    """Print what would answer here, the largest first; with ``everything`` also what is too large or too slow."""
    busy = machine.busy_share()
    found, reached = look()
    shown = found if everything else [each for each in found if each.answers]
    if as_json:
        print(json.dumps({"models": [asdict(each) for each in shown]}, indent=2))
        return 0
    if shown:
        print_columns([("NAME", "SIZE", "FETCH", "TOK/S", "DRAFT", "", ""), *map(_row, shown)])
    else:
        print("no model of the catalogue would answer fast enough here; localspec recommend --all shows them all")
    print()
    for line in _explained(busy, found, reached):
        print(line)
    return 0


def _row(each: Candidate) -> tuple[str, ...]:
    size = f"{'' if each.checked or each.present else '~'}{size_text(each.bytes)}"
    fetch = "here" if each.present and not each.minutes else f"{max(1, round(each.minutes))} min"
    rate = "?" if each.tokens_per_second is None else f"{'' if each.measured else '~'}{each.tokens_per_second:.3g}"
    why = "" if each.answers else "too big" if not each.fits else "slow"
    return each.name, size, fetch, rate, each.draft or "", "" if each.checked else "unchecked", why


def _explained(busy: float, found: list[Candidate], reached: Reached) -> Iterator[str]:
    if any(each.tokens_per_second is None for each in found):
        yield "tok/s: not known, too little memory is free to measure its bandwidth"
    else:
        how = f"measured here with {reached.measured_with}" if reached.measured_with else "assumed"
        gains = f"{LARGE_GAIN} times over {size_text(LARGE_BYTES)} with a draft model, else {SMALL_GAIN}: assumed"
        yield f"tok/s: on the CPU; from {ENOUGH:g} on a model is recommended; without ~ measured here, by bench"
        yield f"~: expected by {reached.share:.0%} of the memory's bandwidth ({how}), or by the model's own passes"
        yield f"where they were timed here, and by what drafts gain ({gains})"
    if busy >= machine.BUSY:
        yield f"others use {busy:.0%} of the CPU: on a quiet machine it is more"
    yield "unchecked: never fetched by us; its size and digest are the hub's"
    yield "localspec chat NAME fetches and starts one"
