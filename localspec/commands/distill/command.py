"""``localspec distill``: train a head, show how it comes along, say what it is worth."""

from __future__ import annotations

import shlex
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from localspec.backends.noise import engine_log
from localspec.commands.distill.page import finished_report, unfinished_report
from localspec.commands.distill.progress import RunDisplay
from localspec.commands.options import check_text, ensure_model
from localspec.commands.report.html import html
from localspec.commands.report.output import STREAM, checked_output, write_output
from localspec.commands.report.terminal import Screen
from localspec.errors import Cancelled, UsageError
from localspec.system.interrupts import on_interrupt
from localspec.system.usage import lower_priority
from localspec.training.distill import distill
from localspec.training.recipe import Effort, Recipe
from localspec.training.standing import Standing

INTERRUPTED = 130
COMMAND = "localspec distill"


@dataclass(frozen=True, slots=True)
class DistillRequest:
    """What was asked for; see ``training.distill.distill``.

    Attributes:
        model: None is the catalogue's default target.
        minutes: None is 60, or those of the run that is gone on with.
        html: where the page goes.
        verbose: whether to show what the engine logs.
    """

    model: str | None
    minutes: float | None
    kind: str
    seed: int | None
    begin_with: str | None
    resume: bool
    force: bool
    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    chats: bool
    html: str | None
    backend: str
    n_threads: int | None
    verbose: bool

    def __post_init__(self) -> None:
        for name, text in (
            ("MODEL", self.model),
            ("--begin-with", self.begin_with),
            ("--html", self.html),
        ):
            check_text(text, name)
        for option, paths in (("--prompts", self.prompts), ("--text", self.texts)):
            for path in paths:
                check_text(path, option)
        for prompts in self.prompts:
            if not Path(prompts).is_file():
                raise UsageError(f"--prompts {prompts}: there is no such file")
        for text in self.texts:
            if not Path(text).exists():
                raise UsageError(f"--text {text}: there is no such file or folder")
        if self.html == STREAM:
            raise UsageError("--html needs a file")
        Recipe(kind=self.kind, seed=self.seed or 0)  # type: ignore[arg-type]
        if self.minutes is not None:
            Effort(self.minutes)


def distill_command(request: DistillRequest) -> int:
    """Train, print, write. Ctrl-C ends it, and so does a request to end; it can be gone on with.

    Returns:
        The exit status: also 0 where the head turned out not to pay here.

    Raises:
        LocalspecError: see ``training.distill.distill``.
    """
    page = None if request.html is None else checked_output(request.html, force=request.force or request.resume)
    engine_log.verbose = engine_log.verbose or request.verbose
    model = ensure_model(request.model, [])
    lower_priority()
    stop, n_points = threading.Event(), 0
    with RunDisplay() as watch, on_interrupt(stop.set, ended_too=True):

        def report(standing: Standing) -> None:
            nonlocal n_points
            watch.show(standing)
            if page is not None and len(standing.curve) > n_points:
                n_points = len(standing.curve)
                write_output(page, html(unfinished_report(model, standing)))

        try:
            made = distill(
                model,
                minutes=request.minutes,
                kind=request.kind,
                seed=request.seed,
                begin_with=request.begin_with,
                resume=request.resume,
                force=request.force,
                prompts=request.prompts,
                texts=request.texts,
                chats=request.chats,
                backend=request.backend,
                n_threads=request.n_threads,
                command=COMMAND,
                report=report,
                say=watch.say,
                cancel=stop,
            )
        except Cancelled:
            watch.clear()
            print(f"localspec: stopped; resume with: {_resume(request, model)}", file=sys.stderr)
            return INTERRUPTED
    found = finished_report(model, made)
    if page is not None:
        write_output(page, html(found))
    Screen().report(found)
    return 0


def _resume(request: DistillRequest, model: str) -> str:
    kind = [] if request.kind == "chained" else ["--kind", request.kind]
    minutes = [] if request.minutes is None else ["--minutes", f"{request.minutes:g}"]
    rest = [] if request.html is None else ["--html", request.html]
    rest += [] if request.backend == "auto" else ["--backend", request.backend]
    rest += [] if request.n_threads is None else ["--threads", str(request.n_threads)]
    named = [] if request.model is None else [model]
    return shlex.join(["localspec", "distill", *named, *kind, *minutes, *rest, "--resume"])
