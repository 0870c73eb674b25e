"""What to measure, and how thoroughly: from the command line and, where a run is resumed, from what that was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localspec.backends.placement import Placement
from localspec.commands.bench.record import Record, Settings
from localspec.commands.options import RunOptions, check_text
from localspec.errors import UsageError
from localspec.measuring.arms import Arm, parse_arms
from localspec.measuring.questions import SETS, Question, digest, in_turns, of_categories, own_questions, read_questions
from localspec.measuring.turns import SLICE_TOKENS
from localspec.runtime.load_options import LoadOptions


@dataclass(frozen=True, slots=True)
class Mode:
    """How thorough a run is.

    Attributes:
        name: ``quick``, ``default`` or ``full``.
        arms: what is measured where no arm is named.
        max_tokens: longest answer.
        minutes: the time budget, loading included; None: none.
        repeats: most repeats of a question.
        tolerance: half-width of the overall interval of every speed-up, relative, that is narrow enough.
        least_answers: how many questions a time budget should suffice for, if need be with shorter answers.
    """

    name: str
    arms: tuple[str, ...]
    max_tokens: int
    minutes: float | None
    repeats: int
    tolerance: float
    least_answers: int = 0


QUICK = Mode("quick", ("plain", "auto"), 64, 2.0, 3, 0.05, least_answers=9)
DEFAULT = Mode("default", ("plain", "auto"), 128, 15.0, 3, 0.03)
FULL = Mode("full", ("plain", "auto", "1", "2", "4", "8"), 256, None, 5, 0.02)

LEAST_TOKENS = 24
"""A draft model is not asked before an answer has some tokens, so shorter answers would say nothing."""

READING = 0.8
"""Time to read a prompt, guessed before any was read, as a share of the time that an answer takes plainly."""

TOP_K = 40
"""Samples are drawn from so many tokens unless told otherwise: the tail of a large vocabulary only costs time."""


def affordable_tokens(mode: Mode, seconds: float, n_answers: int, tokens_per_second: float) -> int:
    """The longest answers for which a time budget suffices.

    Args:
        mode: says for how many questions it should.
        seconds: what is left.
        n_answers: arms times engines.
        tokens_per_second: expected speed of plain decoding.
    """
    if not mode.least_answers:
        return mode.max_tokens
    each = seconds / mode.least_answers / (n_answers + READING)
    return max(LEAST_TOKENS, min(mode.max_tokens, int(each * tokens_per_second)))


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What the command line asks for; None and empty leave it open, and commas separate several names."""

    options: RunOptions  # without a backend
    backends: Sequence[str] = ()
    arms: Sequence[str] = ()
    categories: Sequence[str] = ()
    prompts: str | None = None  # a file of questions
    which: str | None = None  # our own set of questions
    quick: bool = False
    full: bool = False
    minutes: float | None = None
    repeats: int | None = None
    slice_tokens: int | None = None
    ignore_eos: bool = False
    resume: str | None = None  # a file to go on with


@dataclass(slots=True)
class BenchPlan:
    """What to measure.

    Attributes:
        options: models and how to run them; its ``backend`` is not used.
        settings: as asked; once the engines are loaded, their own names, whether there is memory to answer in slices,
            and in a quick run the length of answers are filled in.
        arms: ``plain`` first.
        questions: in the order to ask them.
        mode: how thorough, with the command line's changes in it.
        before: a run to go on with.
        save: called with the record after every question.
    """

    options: RunOptions
    settings: Settings
    arms: list[Arm]
    questions: list[Question]
    mode: Mode
    before: Record | None = None
    save: Callable[[Record], None] = field(default=lambda record: None)


_LOADING = {
    "draft_backend": "draft_backend",
    "n_ctx": "ctx",
    "n_threads": "threads",
    "n_gpu_layers": "gpu_layers",
    "kv_cache_type": "kv_cache",
    "light_draft": "light_draft",
}
"""Options of loading -> what ``Settings`` calls them."""


def make_plan(request: BenchRequest, before: Record | None = None) -> BenchPlan:
    """Check what is asked for, and read the questions.

    Raises:
        UsageError: it makes no sense.
    """
    then = before.settings if before is not None else None
    options = request.options if then is None else _resumed(request.options, then)
    mode = _mode(request, then)
    if request.prompts is not None and request.which is not None:
        raise UsageError("--set selects built-in questions and cannot be combined with --prompts")
    backends, names, categories = (_split(each) for each in (request.backends, request.arms, request.categories))
    source = request.prompts or (f"own:{request.which}" if request.which else None)
    slice_tokens, ignore_eos = request.slice_tokens, request.ignore_eos
    if then is not None:
        backends, names, categories = backends or then.backends, names or then.arms, categories or then.categories
        source, ignore_eos = source or then.questions, ignore_eos or then.ignore_eos
        slice_tokens = then.slice_tokens if slice_tokens is None else slice_tokens
    source, slice_tokens = source or "own:report", SLICE_TOKENS if slice_tokens is None else slice_tokens
    if not 0 <= slice_tokens <= 1000:
        raise UsageError(f"--slice must be in 0..1000, not {slice_tokens}")
    arms, questions = parse_arms(names or mode.arms), _questions(source, categories)
    sampling = {name: value for name, value in options.sampling.items() if name != "max_tokens"}
    if sampling.get("temperature"):
        sampling.setdefault("top_k", TOP_K)
    settings = Settings(
        model=options.model or "",
        draft=(options.drafters() or ["none"]) if options.draft else [],
        backends=backends or ["auto"],
        arms=[arm.name for arm in arms],
        questions=source,
        categories=categories,
        questions_sha256=digest(questions),
        max_tokens=mode.max_tokens,
        sampling={name: list(value) if isinstance(value, tuple) else value for name, value in sampling.items()},
        ignore_eos=ignore_eos,
        system=options.system,
        mode=mode.name,
        slice_tokens=slice_tokens,
        placement=options.load.placement.given(),
        **{setting: getattr(options.load, name) for name, setting in _LOADING.items()},
    )
    in_order = in_turns(questions, short_first=mode.name == "quick")
    return BenchPlan(options, settings, arms, in_order, mode, before)


def _mode(request: BenchRequest, then: Settings | None) -> Mode:
    if request.quick and request.full:
        raise UsageError("--quick and --full cannot be combined")
    name = "quick" if request.quick else "full" if request.full else then.mode if then is not None else "default"
    mode = {"quick": QUICK, "full": FULL}.get(name, DEFAULT)
    changes: dict[str, Any] = {}
    if request.minutes is not None:
        if not 0 < request.minutes < 1e6:
            raise UsageError(f"--minutes must be over 0, not {request.minutes:g}")
        changes["minutes"] = request.minutes
    if request.repeats is not None:
        if not 1 <= request.repeats <= 1000:
            raise UsageError(f"--repeats must be in 1..1000, not {request.repeats}")
        changes |= {"repeats": request.repeats, "tolerance": 0.0}  # so many were asked for
    longest = request.options.sampling.get("max_tokens") or (then.max_tokens if then is not None else None)
    if longest is not None:
        changes |= {"max_tokens": longest, "least_answers": 0}
    return replace(mode, **changes)


def _questions(source: str, categories: Sequence[str]) -> list[Question]:
    kind, _, name = source.partition(":")
    if kind == "own" and name:
        if name not in SETS:
            raise UsageError(f"--set must be {' or '.join(SETS)}, not {name!r}")
        return of_categories(own_questions(name), categories)
    check_text(source, "--prompts")
    return of_categories(read_questions(Path(source)), categories)


def _resumed(options: RunOptions, then: Settings) -> RunOptions:
    """The options of a run that is resumed, with what the command line says besides."""
    usual = LoadOptions()
    load = {
        name: getattr(then, setting)
        for name, setting in _LOADING.items()
        if getattr(options.load, name) == getattr(usual, name)
    }
    if not options.load.placement:
        load["placement"] = Placement(**then.placement)
    sampling = {name: tuple(value) if isinstance(value, list) else value for name, value in then.sampling.items()}
    return replace(
        options,
        model=options.model or then.model,
        draft=options.draft or then.draft,
        draft_only=options.draft_only or not options.draft,
        load=replace(options.load, **load),
        system=options.system or then.system,
        sampling=sampling | dict(options.sampling),
    )


def _split(texts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))
