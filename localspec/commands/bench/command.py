"""``localspec bench``: measure, show what was measured, and compare."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from localspec.commands.bench.compare import comparison, comparison_json, comparison_report
from localspec.commands.bench.record import Record, read_record, to_json
from localspec.commands.bench.report import bench_report, speedup_plot
from localspec.commands.bench.results import ALL, Results, analyse
from localspec.commands.bench.runner import BenchRequest, BenchRun
from localspec.errors import LocalspecError, UsageError, check_text
from localspec.measuring.last_bench import remember
from localspec.model_files.catalog import Catalog
from localspec.report.model import Report
from localspec.report.renderers import STREAM, Screen, checked_output, html, markdown, write_output
from localspec.system.files import is_same_file
from localspec.system.terminal import Progress

INTERRUPTED = 130
AUTO = "auto"  # the arm that decodes as chat and serve do


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go besides the terminal: files, or ``-`` (standard output, which then gets nothing else) for
    ``json`` and ``markdown``. ``force`` overwrites."""

    json: str | None = None
    markdown: str | None = None
    html: str | None = None
    svg: str | None = None
    force: bool = False

    def check(self, mine: str | None = None) -> None:
        """Refuse what could not be written in the end (``UsageError``): a file is there, its folder is not, or two
        things go to one place. ``mine`` is the resumed file, which may be replaced."""
        named = [each for each in (self.json, self.markdown, self.html, self.svg) if each is not None]
        if len({each if each == STREAM else os.path.realpath(each) for each in named}) < len(named):
            raise UsageError("two outputs have the same path: choose another file")
        for name, each in (("--html", self.html), ("--svg", self.svg)):
            if each == STREAM:
                raise UsageError(f"{name} needs a file")
        for each in named:
            check_text(each, "a file name")
            if each != STREAM:
                resumed = mine is not None and is_same_file(mine, each)
                otherwise = ", or --resume goes on with it" if each == self.json else ""
                checked_output(each, force=self.force or resumed, otherwise=otherwise)


def bench_command(words: Sequence[str], request: BenchRequest, outputs: Outputs) -> int:
    """``bench [MODEL]``, ``bench show FILE`` or ``bench compare A B``."""
    if words[:1] == ["compare"]:
        return compare_command(words[1:], outputs)
    if words[:1] == ["show"]:
        if len(words) != 2:
            raise UsageError("bench show takes one bench --json file")
        outputs.check()
        deliver(read_record(Path(words[1])), outputs)
        return 0
    if len(words) > 1:
        raise UsageError(f"one model at a time, not {len(words)}: measure each with --json, then bench compare A B")
    return measure_command(request, outputs)


def measure_command(request: BenchRequest, outputs: Outputs) -> int:
    """Measure, print, write. Ctrl-C ends it with what there is."""
    before = read_record(Path(request.resume)) if request.resume is not None else None
    if before is not None:
        outputs = replace(outputs, json=outputs.json or request.resume)
    outputs.check(request.resume)
    path = Path(outputs.json) if outputs.json not in (None, STREAM) else None

    def save(record: Record) -> None:
        if path is not None:
            write_output(path, to_json(record))

    with Progress() as progress:
        record = BenchRun(request, progress, before, save).measure()
    if record is None:
        raise KeyboardInterrupt
    _remember(record, deliver(record, outputs))
    if record.ended == "interrupted":
        if path is not None:
            print(f"localspec: resume with: localspec bench --resume {path}", file=sys.stderr)
        return INTERRUPTED
    return 0


def compare_command(words: Sequence[str], outputs: Outputs) -> int:
    if len(words) != 2:
        raise UsageError("bench compare takes two bench --json files: the baseline, then the run to compare with it")
    if outputs.html or outputs.svg:
        raise UsageError("bench compare writes --json and --markdown only")
    outputs.check()
    found = comparison(read_record(Path(words[0])), read_record(Path(words[1])), (words[0], words[1]))
    _deliver(comparison_report(found), outputs, lambda: comparison_json(found))
    return 0


def deliver(record: Record, outputs: Outputs) -> Results:
    """Write the files that were asked for, and print the report unless one of them is standard output."""
    if not record.samples:
        raise LocalspecError("nothing was measured in this run")
    results = analyse(record)
    _deliver(bench_report(record, results), outputs, lambda: to_json(record, asdict(results)))
    if outputs.svg is not None:
        drawn = speedup_plot(record, results, heading=True).svg(alone=True)
        write_output(Path(outputs.svg), drawn + "\n")
    return results


def _deliver(report: Report, outputs: Outputs, json: Callable[[], str]) -> None:
    texts: dict[str | None, Callable[[], str]] = {
        outputs.json: json,
        outputs.markdown: partial(markdown, report),
        outputs.html: partial(html, report),
    }
    for where, text in texts.items():
        if where == STREAM:
            sys.stdout.write(text())
        elif where is not None:
            write_output(Path(where), text())
    if STREAM not in texts:
        Screen().report(report)


def _remember(record: Record, results: Results) -> None:
    """Keep the speed-ups of ``auto`` for doctor, see ``last_bench``."""
    for engine in record.engines:
        own = [row for row in results.rows if (row.backend, row.arm) == (engine.backend, AUTO)]
        speedups = {row.category: round(row.speedup.median, 3) for row in own if row.speedup is not None}
        if not speedups:
            continue
        found = {
            "drafters": engine.sources,
            "speedups": speedups,
            "n_questions": max(row.n_questions for row in own),
            "n_guesses": next(row.drafted for row in own if row.category == ALL),
        }
        with suppress(LocalspecError, OSError):  # the file has gone meanwhile
            remember(Catalog.load().resolve(record.settings.model), engine.version, found)
