"""``localspec verify``: is it lossless, here, with these kernels?"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal

from localspec.commands.options import RunOptions
from localspec.commands.report.terminal import Screen
from localspec.commands.verify.audit import SAMPLED_LENGTH, Audit, AuditOptions, tie_of
from localspec.commands.verify.plain import AuditStopped
from localspec.commands.verify.report import report_of
from localspec.commands.verify.result import AuditLog, AuditResult, in_words
from localspec.commands.verify.several import SEQUENCES, SeveralFigures, audit_several, enough
from localspec.errors import EngineError, EngineMismatch, UnsupportedModel, UsageError
from localspec.sampling.sampling import SamplingParams
from localspec.system.interrupts import on_interrupt
from localspec.terminal.progress import Progress

if TYPE_CHECKING:
    from localspec.llm import LLM

PROMPTS, QUICK_PROMPTS = 8, 2
TOKENS, QUICK_TOKENS = 32, 16
LEAST_TOKENS = 16
DRAWS, QUICK_DRAWS = 1000, 200
WINDOWS, QUICK_WINDOWS = 4, 2
LONG = 8
"""Draft tokens of several answers at a time, where they are asked for a second time."""
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
        prompts: how many; None is 8, or 2 if ``quick``.
        quick: fewer and shorter answers, fewer draws.
        as_json: print one object (see ``result``) instead of a screen.

    Returns:
        0 lossless, 1 a defect was found, 130 interrupted before one was.

    Raises:
        UsageError: too few prompts or tokens.
        LocalspecError: the pair cannot be loaded, or does not work at all.
    """
    if prompts is not None and prompts < 1:
        raise UsageError(f"--prompts must be at least 1, not {prompts}")
    if options.sampling.get("max_tokens", TOKENS) < LEAST_TOKENS:
        raise UsageError(f"--max-tokens must be at least {LEAST_TOKENS} for verify")
    stop = threading.Event()
    with options.opened(chats=False) as llm, Progress() as progress, on_interrupt(stop.set):
        audited, show = audit_options(options, llm, prompts, quick), _shown_on(progress)
        audit = llm.run(lambda pair: Audit(llm, pair, audited, show, stop.is_set))
        result = llm.run(lambda pair: audit.run())
    if not result.interrupted:
        with Progress() as progress, on_interrupt(stop.set):
            _several(options, audited, audit.prompts, result, progress, stop)
    if as_json:
        print(json.dumps(result.as_dict(), allow_nan=False))
    else:
        screen = Screen()
        screen.sentence(result.verdict)
        screen.report(report_of(result))
    if result.defects:
        return CHECK_FAILED
    return INTERRUPTED if result.interrupted else 0


def _several(
    options: RunOptions,
    audited: AuditOptions,
    prompts: Sequence[tuple[str, list[int]]],
    result: AuditResult,
    progress: Progress,
    stop: threading.Event,
) -> None:
    """Load the pair anew, for several answers at a time, and add what they show to the result."""
    log = AuditLog()

    def check() -> Literal[False]:
        if stop.is_set():
            raise AuditStopped
        return False

    def watch(what: str) -> None:
        progress.report(f"{SEQUENCES} answers at a time: {what}", None)

    try:
        load = replace(options.load, parallel=SEQUENCES, idle=False, remember=False)
        with replace(options, load=load).open(progress.report) as llm:
            lengths = [SAMPLED_LENGTH] if audited.is_quick else [audited.draft_length, LONG]
            lengths = lengths if llm.draft_names else [0]
            figures, judge = audit_several(
                llm, enough(prompts), audited.n_tokens, lengths, log, check, watch, in_words(llm.vocab.display)
            )
    except AuditStopped:
        result.interrupted = True
        return
    except (EngineError, UnsupportedModel, EngineMismatch, UsageError) as error:
        result.several = asdict(SeveralFigures(reason=str(error)))
        return
    result.several = asdict(figures)
    result.defects += [*log.defects, *(judge.defects if judge else [])]
    if judge is not None:
        result.ties = [*result.ties, *(tie_of(seen, llm.vocab.display) for seen in judge.ties)]


def audit_options(options: RunOptions, llm: LLM, prompts: int | None, quick: bool) -> AuditOptions:
    """What the command line asks for, as the audit takes it."""
    defaults, given = llm.chat_defaults, options.sampling
    penalties = {name: value for name, value in (defaults | dict(given)).items() if name in PENALTIES}
    chain: dict[str, Any] = {"top_k": TOP_K} | {name: given[name] for name in FILTERS if name in given}
    chain["temperature"] = chain.get("temperature") or 1.0
    return AuditOptions(
        n_prompts=prompts or (QUICK_PROMPTS if quick else PROMPTS),
        n_tokens=given.get("max_tokens") or (QUICK_TOKENS if quick else TOKENS),
        greedy=SamplingParams(**penalties),
        sampled=SamplingParams(**penalties, **chain),
        draft_length=options.length(),
        n_draws=QUICK_DRAWS if quick else DRAWS,
        system=options.system,
        is_quick=quick,
        n_windows=QUICK_WINDOWS if quick else WINDOWS,
    )


def _shown_on(progress: Progress) -> Callable[[str, float], None]:
    """Shows an audit's progress with the time that is left; without a terminal, a line for each prompt."""
    started, shown = time.monotonic(), ""

    def show(what: str, done: float) -> None:
        nonlocal shown
        seconds = (time.monotonic() - started) * (1 - done) / max(done, 1e-9)
        left = f", about {seconds:.0f} s left" if done > 0.02 else ""
        part = what.partition(":")[0]
        if part != shown:
            shown = part
            progress.report(part + left, None)
        else:
            progress.report(what + left, done)

    return show
