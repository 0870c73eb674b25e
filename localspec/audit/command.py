"""``localspec verify``: is it lossless, here, with these kernels?"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from localspec.audit.audit import Audit, AuditOptions
from localspec.audit.betting import Bets
from localspec.audit.findings import numbers_text
from localspec.audit.report import Report
from localspec.errors import UsageError
from localspec.interrupts import on_interrupt
from localspec.options import RunOptions
from localspec.progress import Progress
from localspec.repl.text import visible
from localspec.sampling import SamplingParams

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
        as_json: print one object (see ``report``) instead of tables.

    Returns:
        0 lossless, 1 a defect was found, 130 interrupted.

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
            audit = Audit(llm, audit_options(options, llm, prompts, quick), bar.show, stop.is_set)
            report: Report = llm._call(audit.run)
        print(json.dumps(report.as_dict(), allow_nan=False)) if as_json else print_report(report)
    if report.interrupted:
        return INTERRUPTED
    return CHECK_FAILED if report.defects else 0


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


# -- what is printed ---------------------------------------------------------------------------------------------------


def print_report(report: Report) -> None:
    """Tables, ties, defects, and the verdict as the last line."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    pair = f"{report.model} · {report.engine} · draft: {' + '.join(report.draft) or 'none'}"
    settings = report.settings
    console.print(f"{pair} · {settings['prompts']} prompts, up to {settings['tokens']} tokens each\n")
    console.print(_answers_table(report))
    console.print()
    console.print(_checks_table(report))
    console.print()
    for tie in report.tie_texts:
        console.print(visible(_tie_line(tie)).replace("\n", "↵"), soft_wrap=True)
    for defect in report.defects:
        where = ", ".join(str(part) for part in (defect.arm, defect.prompt) if part)
        console.print(visible(f"DEFECT ({defect.kind}) {where}: {defect.evidence}"), soft_wrap=True)
    if report.ties or report.defects:
        console.print()
    console.print(visible(report.verdict), style="bold", soft_wrap=True)


def _answers_table(report: Report) -> Any:
    columns = "who drafted,answers,tokens,guesses,accepted,widths,rejected at,ties,deviation"
    table = _table(*columns.split(","))
    ties: dict[str, int] = {}
    for tie in report.ties:
        ties[tie.run.arm] = ties.get(tie.run.arm, 0) + 1
    for arm in report.arms():
        share = f"{arm['accepted'] / arm['drafted']:.0%}" if arm["drafted"] else ""
        table.add_row(
            arm["arm"],
            str(arm["answers"]),
            str(arm["tokens"]),
            str(arm["drafted"] or ""),
            share,
            numbers_text(arm["widths"]),
            numbers_text(arm["rejected_at"]),
            "" if arm["sampled"] else str(ties.get(arm["arm"], 0)),
            "" if arm["sampled"] else f"{arm['largest_deviation']:.2g}",
        )
    return table


def _checks_table(report: Report) -> Any:
    table = _table("check", "of what", "found")
    noise = report.noise
    if noise.get("rows"):
        bound = "none allowed" if noise["bound"] == 0 else f"bound {noise['bound'] or float('nan'):.2g} logits"
        table.add_row(
            "width noise",
            f"{noise['rows']} rows, width 1 against {numbers_text(noise['widths'])}, fresh memories",
            f"median {noise['median']:.2g}, largest {noise['largest']:.2g}, {bound}; "
            f"{noise['mean_kl']:.2g} nats, {noise['argmax_flips']} argmax flips",
        )
    if memory := report.memory_dict():
        same = f"; {memory['pairs']} pairs equal to the bit" if memory["bitwise"] else ""
        broken = any(each.defects for each in report.memory)
        found = "BROKEN" if broken else f"largest deviation {memory['largest_deviation']:.2g}{same}"
        table.add_row("rollbacks", f"{memory['rollbacks']}, against fresh memories", found)
    if made := report.sensitivity_dict():
        share = "" if made["found"] is None else f"; {made['found']:.0%} over the bound"
        table.add_row(
            "wrong on purpose",
            f"{made['tries']} memories without their last token, or with another one",
            f"median deviation {made['median']:.2g}{share}",
        )
    if law := report.verification_law:
        found = f"{_evidence(law.bets)}; an error over {law.detectable:.2f} anywhere would be found"
        table.add_row("law of verification", f"{law.n_draws} drafts drawn on real distributions", found)
    if bets := report.decoding_law:
        temperature = report.settings["sampling"]["temperature"]
        table.add_row("law of decoding", f"{bets.n_tokens} tokens at temperature {temperature:g}", _evidence(bets))
    if report.n_rechecked:
        found = f"{report.n_explained} are rounding"
        table.add_row("second look", f"{report.n_rechecked} suspicious rows, computed anew at several widths", found)
    return table


def _evidence(bets: Bets) -> str:
    """How much speaks against a law, and how many of the suspected defects would have shown."""
    power = bets.power().values()
    sure = sum(value > 0.99 for value in power)
    against = f"{max(0.0, bets.evidence):.1f} of {bets.threshold:.1f} nats against it"
    return f"{against}; {sure} of {len(power)} suspected defects would be found with 99%"


def _tie_line(tie: dict[str, Any]) -> str:
    plain, said = tie["plain"]["text"], tie["speculative"]["text"]
    return (
        f"float tie: {tie['arm']}, {tie['prompt']}, token {tie['position']}: plain {plain!r}, speculative {said!r}, "
        f"{tie['gap']:.2g} logits apart at width 1"
    )


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        number = column in ("answers", "tokens", "guesses", "accepted", "ties", "deviation")
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


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
