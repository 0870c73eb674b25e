"""``localspec bench``: measure, show what was measured, and compare."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from localspec.commands import questions
from localspec.commands.bench.charts import speedup_plot
from localspec.commands.bench.compare import comparison, comparison_json, comparison_report
from localspec.commands.bench.modes import DEFAULT, FULL, QUICK, Mode
from localspec.commands.bench.record import Record
from localspec.commands.bench.report import bench_report
from localspec.commands.bench.results import analyse
from localspec.commands.bench.runner import Plan, Run
from localspec.commands.bench.storage import RecordError, read_record, to_json
from localspec.commands.options import RunOptions, check_text
from localspec.commands.report.html import html
from localspec.commands.report.markdown import markdown
from localspec.commands.report.output import STREAM, checked_output, is_same_file, write_output
from localspec.commands.report.terminal import Screen
from localspec.commands.timing.arms import parse_arms
from localspec.commands.timing.turns import SLICE_TOKENS
from localspec.errors import UsageError
from localspec.terminal.progress import Progress

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go besides the terminal.

    Attributes:
        json, markdown: a file, or ``-`` for standard output, which then gets nothing else.
        html, svg: a file: the page, and the plot of speed-ups.
        force: replace files that are there.
    """

    json: str | None = None
    markdown: str | None = None
    html: str | None = None
    svg: str | None = None
    force: bool = False

    def check(self, mine: str | None = None) -> None:
        """Refuse, before anything takes time, what could not be written in the end.

        Args:
            mine: a file that may be replaced, as it is gone on with.

        Raises:
            UsageError: a file is there, its folder is not, or two things go to one place.
        """
        named = [each for each in (self.json, self.markdown, self.html, self.svg) if each is not None]
        if len({each if each == STREAM else os.path.realpath(each) for each in named}) < len(named):
            raise UsageError("two outputs go to one place: name another file")
        for name, each in (("--html", self.html), ("--svg", self.svg)):
            if each == STREAM:
                raise UsageError(f"{name} needs a file")
        for each in named:
            check_text(each, "a file name")
            if each != STREAM:
                resumed = mine is not None and is_same_file(mine, each)
                otherwise = ", or --resume goes on with it" if each == self.json else ""
                checked_output(each, force=self.force or resumed, otherwise=otherwise)


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for; None and empty are what was not said.

    Attributes:
        options: models and how to run them; without a backend.
        backends, arms, categories: as given; commas separate several.
        prompts: a file of questions.
        which: our own set of questions.
        quick, full: the mode.
        minutes, repeats: in place of the mode's.
        slice_tokens: how far an arm goes before the next has its turn.
        ignore_eos: go on behind end tokens.
        resume: a file to go on with.
    """

    options: RunOptions
    backends: Sequence[str] = ()
    arms: Sequence[str] = ()
    categories: Sequence[str] = ()
    prompts: str | None = None
    which: str | None = None
    quick: bool = False
    full: bool = False
    minutes: float | None = None
    repeats: int | None = None
    slice_tokens: int | None = None
    ignore_eos: bool = False
    resume: str | None = None


def bench_command(words: Sequence[str], request: dict[str, Any], outputs: Outputs) -> int:
    """Measure a pair; or, where the first word is ``show`` or ``compare``, read what was measured before.

    Args:
        words: ``[MODEL]``, ``show FILE`` or ``compare A B``.
        request: the fields of ``Request``.
        outputs: where results go.

    Returns:
        The exit status.
    """
    if words[:1] == ["compare"]:
        return compare_command(words[1:], outputs)
    if words[:1] == ["show"]:
        return show_command(words[1:], outputs)
    if len(words) > 1:
        raise UsageError(f"one model at a time, not {len(words)}: measure each with --json, then bench compare A B")
    return measure_command(Request(**request), outputs)


def measure_command(request: Request, outputs: Outputs) -> int:
    """Measure, print, write. Ctrl-C ends it with what there is."""
    before = read_record(Path(request.resume)) if request.resume is not None else None
    if before is not None:
        outputs = replace(outputs, json=outputs.json or request.resume)
    outputs.check(request.resume)
    plan = _plan(request, before)
    path = Path(outputs.json) if outputs.json not in (None, STREAM) else None
    if path is not None:
        plan.save = lambda record: write_output(path, to_json(record))
    with Progress() as progress:
        record = Run(plan, progress).measure()
    if record is None:
        raise KeyboardInterrupt
    deliver(record, outputs)
    if record.ended == "interrupted":
        if path is not None:
            print(f"localspec: go on with: localspec bench --resume {path}", file=sys.stderr)
        return INTERRUPTED
    return 0


def show_command(words: Sequence[str], outputs: Outputs) -> int:
    """Print and write what a stored run says."""
    if len(words) != 1:
        raise UsageError("bench show takes one file of bench --json")
    outputs.check()
    deliver(read_record(Path(words[0])), outputs)
    return 0


def compare_command(words: Sequence[str], outputs: Outputs) -> int:
    """Set two stored runs against each other."""
    if len(words) != 2:
        raise UsageError("bench compare takes two files of bench --json: what was, and what is to be compared with it")
    if outputs.html or outputs.svg:
        raise UsageError("bench compare has --json and --markdown only")
    outputs.check()
    found = comparison(read_record(Path(words[0])), read_record(Path(words[1])), (words[0], words[1]))
    report = comparison_report(found)
    streamed = _written(outputs.json, lambda: comparison_json(found))
    streamed |= _written(outputs.markdown, lambda: markdown(report))
    if not streamed:
        Screen().report(report)
    return 0


def deliver(record: Record, outputs: Outputs) -> None:
    """Write the files that were asked for, and print the table unless one of them is standard output."""
    if not record.samples:
        raise RecordError("nothing was measured in this run")
    results = analyse(record)
    streamed = _written(outputs.json, lambda: to_json(record, asdict(results)))
    report = bench_report(record, results)
    streamed |= _written(outputs.markdown, lambda: markdown(report))
    _written(outputs.html, lambda: html(report))
    _written(outputs.svg, lambda: speedup_plot(record, results, heading=True).svg(alone=True) + "\n")
    if not streamed:
        Screen().report(report)


def _written(where: str | None, text: Callable[[], str]) -> bool:
    """Write a text to its place; returns whether that was standard output."""
    if where == STREAM:
        sys.stdout.write(text())
    elif where is not None:
        write_output(Path(where), text())
    return where == STREAM


# -- the plan --------------------------------------------------------------------------------------------------------


def _plan(request: Request, before: Record | None) -> Plan:
    """What to measure, from the command line and, where a run is resumed, from what that was."""
    options, then = request.options, before.settings if before is not None else None
    if request.quick and request.full:
        raise UsageError("--quick and --full exclude each other")
    if request.prompts is not None and request.which is not None:
        raise UsageError("--set chooses among our own questions, and --prompts brings others")
    modes = {mode.name: mode for mode in (QUICK, DEFAULT, FULL)}
    mode = QUICK if request.quick else FULL if request.full else DEFAULT
    backends, arms, categories = (_split(each) for each in (request.backends, request.arms, request.categories))
    source = request.prompts or (f"own:{request.which}" if request.which else None)
    if then is not None:
        mode = mode if request.quick or request.full else modes.get(then.mode, DEFAULT)
        options = _merged(options, then)
        backends, arms = backends or then.backends, arms or then.arms
        categories, source = categories or then.categories, source or then.questions
    mode = _adjusted(mode, request)
    slices = then.slice_tokens if then is not None else SLICE_TOKENS
    if request.slice_tokens is not None:
        slices = request.slice_tokens
        if not 0 <= slices <= 1000:
            raise UsageError(f"--slice must be in 0..1000, not {slices}")
    chosen = _questions(source or "own:report", categories)
    return Plan(
        options=options,
        backends=backends or ["auto"],
        arms=parse_arms(arms or mode.arms),
        questions=questions.in_turns(chosen, short_first=mode.name == "quick"),
        questions_name=source or "own:report",
        categories=categories,
        questions_sha256=questions.digest(chosen),
        mode=mode,
        max_tokens=options.sampling.get("max_tokens"),
        ignore_eos=request.ignore_eos or (then is not None and then.ignore_eos),
        slice_tokens=slices,
        before=before,
    )


def _adjusted(mode: Mode, request: Request) -> Mode:
    minutes, repeats = request.minutes, request.repeats
    if minutes is not None:
        if not 0 < minutes < 1e6:
            raise UsageError(f"--minutes must be over 0, not {minutes:g}")
        mode = replace(mode, minutes=minutes)
    if repeats is not None:
        if not 1 <= repeats <= 1000:
            raise UsageError(f"--repeats must be in 1..1000, not {repeats}")
        mode = replace(mode, repeats=repeats, tolerance=0.0)  # so many were asked for
    return mode


def _questions(source: str, categories: Sequence[str]) -> list[questions.Question]:
    kind, _, name = source.partition(":")
    if kind == "own" and name:
        if name not in questions.SETS:
            raise UsageError(f"--set must be {' or '.join(questions.SETS)}, not {name!r}")
        found = questions.own_questions(name)
    else:
        check_text(source, "--prompts")
        found = questions.read_questions(Path(source))
    return questions.of_categories(found, categories)


def _merged(options: RunOptions, then: Any) -> RunOptions:
    """The options of a run that is resumed, with what the command line says besides."""
    load = options.load
    sampling = {name: tuple(value) if isinstance(value, list) else value for name, value in then.sampling.items()}
    return replace(
        options,
        model=options.model or then.model,
        draft=options.draft or then.draft,
        load=replace(
            load,
            draft_backend=load.draft_backend or then.draft_backend,
            n_ctx=load.n_ctx or then.ctx,
            n_threads=load.n_threads or then.threads,
            n_gpu_layers=then.gpu_layers if load.n_gpu_layers is None else load.n_gpu_layers,
            kv_cache_type=then.kv_cache if load.kv_cache_type == "f16" else load.kv_cache_type,
            light_draft=load.light_draft and then.light_draft,
        ),
        system=options.system or then.system,
        sampling=sampling | dict(options.sampling),
    )


def _split(texts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))
