"""``localspec verify``: is it lossless, here, with these kernels?"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from localspec.commands.options import RunOptions
from localspec.commands.verify.audit import Audit, AuditOptions
from localspec.commands.verify.screen import AuditScreen
from localspec.errors import UsageError
from localspec.sampling.sampling import SamplingParams
from localspec.system.interrupts import on_interrupt
from localspec.terminal.progress import Progress
from localspec.terminal.text import visible

if TYPE_CHECKING:
    from localspec.llm import LLM

PROMPTS, QUICK_PROMPTS = 8, 3
TOKENS, QUICK_TOKENS = 32, 24
LEAST_TOKENS = 16
DRAWS, QUICK_DRAWS = 1000, 400
TOP_K = 256
"""Sampled answers keep so many tokens unless told otherwise: the tail of a large vocabulary only costs time."""

CHECK_FAILED, INTERRUPTED = 1, 130
PENALTIES = ("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty")
FILTERS = ("temperature", "top_k", "top_p", "min_p", "seed")


def verify_command(
    options: RunOptions, *, prompts: int | None = None, quick: bool = False, as_json: bool = False
) -> int:
    """Audit a pair; the report on standard output.

    Args:
        options: the pair. ``--max-tokens`` is the longest answer; penalties apply to all answers, temperature and
            filters to the sampled ones; stop strings do not matter here.
        prompts: how many; None is 8, or 3 if ``quick``.
        quick: fewer and shorter answers, fewer draws.
        as_json: print one object (see ``report``) instead of a screen.

    Returns:
        0 lossless, 1 a defect was found, 130 interrupted before one was.

    Raises:
        UsageError: too few prompts or tokens.
        LocalspecError: the pair cannot be loaded, or does not work at all.
    """
    if prompts is not None and prompts < 1:
        raise UsageError(f"--prompts must be over 0, not {prompts}")
    if options.sampling.get("max_tokens", TOKENS) < LEAST_TOKENS:
        raise UsageError(f"--max-tokens must be at least {LEAST_TOKENS} here: shorter answers show too little")
    with Progress() as progress:
        llm = options.open(progress.report)
    with llm:
        for warning in llm.warnings:
            print(f"localspec: {warning}", file=sys.stderr)
        stop = threading.Event()
        with _Bar() as bar, on_interrupt(stop.set):
            audited = audit_options(options, llm, prompts, quick)
            report = llm.run(lambda pair: Audit(llm, pair, audited, bar.show, stop.is_set).run())
        if as_json:
            print(json.dumps(report.as_dict(), allow_nan=False))
        else:
            AuditScreen().report(report)
    if report.defects:
        return CHECK_FAILED
    return INTERRUPTED if report.interrupted else 0


def audit_options(options: RunOptions, llm: LLM, prompts: int | None, quick: bool) -> AuditOptions:
    """What the command line asks for, as the audit takes it."""
    defaults, given = llm.chat_defaults, options.sampling
    penalties = {name: value for name, value in (defaults | dict(given)).items() if name in PENALTIES}
    chain: dict[str, Any] = {"top_k": TOP_K} | {name: given[name] for name in FILTERS if name in given}
    if not chain.get("temperature"):
        chain["temperature"] = 1.0
    return AuditOptions(
        n_prompts=prompts or (QUICK_PROMPTS if quick else PROMPTS),
        n_tokens=given.get("max_tokens") or (QUICK_TOKENS if quick else TOKENS),
        greedy=SamplingParams(**penalties),
        sampled=SamplingParams(**penalties, **chain),
        draft_length=options.length(),
        n_draws=QUICK_DRAWS if quick else DRAWS,
        system=options.system,
    )


# -- progress ----------------------------------------------------------------------------------------------------------


class _Bar:
    """Progress on standard error: a bar where someone watches, else a line for each prompt."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._said = ""
        self._started = time.monotonic()

    def __enter__(self) -> _Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns: Sequence[Any] = (
                TextColumn("{task.description}", markup=False),
                BarColumn(20),
                TextColumn("{task.fields[left]}", markup=False),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("verifying", total=1.0, left="")
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, what: str, done: float) -> None:
        """Called from the worker thread."""
        elapsed = time.monotonic() - self._started
        left = f"about {elapsed * (1 - done) / done:.0f} s left" if done > 0.02 else ""
        if self._bar is not None:
            self._bar.update(self._task, description=visible(what), completed=done, left=left)
            return
        part = what.partition(":")[0]
        if part != self._said:
            self._said = part
            print(f"{part}{', ' + left if left else ''}", file=sys.stderr, flush=True)
