"""A run: load the engines, ask the questions in all arms by turns, record the answers, until it is enough."""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from localspec._version import __version__
from localspec.backends.base import Context
from localspec.backends.placement import Placement
from localspec.backends.registry import check_name
from localspec.commands.bench.record import Ending, Engine, ModelFile, Record, Settings, Sitting, differences
from localspec.commands.bench.results import ratios, time_text
from localspec.commands.doctor import facts
from localspec.commands.options import RunOptions, Watch, ensure_model
from localspec.controllers.calibration import WHOLE, PassKind, calibrating
from localspec.controllers.cost_model import PassTimes
from localspec.engine.fit import USUAL_CTX
from localspec.engine.options import LoadOptions
from localspec.engine.pair import Pair
from localspec.errors import Cancelled, LocalspecError, UsageError, check_text
from localspec.llm import LLM
from localspec.measuring import subject as measuring
from localspec.measuring.passes import WIDTHS
from localspec.measuring.subject import Block, EngineUnderTest, TimedAnswer, parse_arms, split_names
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import GGUFFile, fingerprint, model_bytes, model_files
from localspec.model_files.sources.base import size_text
from localspec.prompts.questions import SETS, Question, digest, in_turns, of_categories, own_questions, read_questions
from localspec.sampling.sampling import SamplingParams
from localspec.system import machine
from localspec.system.files import JsonStore, home, remembered
from localspec.system.machine import peak_memory_bytes, read_memory
from localspec.system.process import on_interrupt
from localspec.system.steps import exhaust
from localspec.system.terminal import Progress

# What ran: engine, models, and costs of their passes.


def engine_facts(subject: EngineUnderTest, kv_type: str, watch: Watch, *, measure: bool) -> Engine:
    """What ran here. t(w) is measured now if ``measure``, else taken from the first load."""
    llm, own = subject.llm, subject.own
    parts = [("target", llm.model_name, own.context, own.target.path, WHOLE, own.times)]
    for draft in own.models:  # of a head the file that was trained, not what was made of it here
        path = draft.model.path if draft.drafter.info.is_draft_model else draft.path
        parts.append((draft.source, draft.name, draft.context, path, draft.passes, draft.times))
    models, times = list[ModelFile](), dict[str, PassTimes]()
    for source, name, context, path, passes, known in parts:
        size, kv = context.model.size_bytes, measuring.kv_bytes(context, kv_type)
        models.append(ModelFile(source, name, path.name, size, sha256(path, watch), kv))
        times[source] = known
        if measure:
            watch.report(f"measuring what a pass of {name} costs", None)
            times[source] = watch.call(llm, partial(_measured, context, passes, watch))
    return Engine(
        backend=llm.backend_name,
        version=llm.engine,
        device=own.target.capabilities.device,
        threads=own.target.n_threads,
        n_ctx=llm.n_ctx,
        models=models,
        sources=subject.sources,
        pass_ms={width: round(times["target"](width), 4) for width in WIDTHS},
        draft_ms={draft.source: round(times[draft.source](1), 4) for draft in own.models},
        passes_measured="now" if measure else "before",
        warnings=llm.warnings,
        one_pass=[draft.source for draft in own.models if draft.drafter.info.one_pass],
        block_ms={
            draft.source: {width: round(times[draft.source](width), 4) for width in WIDTHS}
            for draft in own.models
            if draft.drafter.info.rows_of_draft
        },
    )


def _measured(context: Context, passes: PassKind, watch: Watch, pair: Pair) -> PassTimes:
    return exhaust(calibrating(context.model, context.n_ctx, passes), tick=watch.check)


def sha256(path: Path, watch: Watch) -> str:
    """Digest of a model's parts in order; kept, as reading a large file takes seconds."""
    files = model_files(path)

    def read() -> dict[str, str]:
        found, done, size = hashlib.sha256(), 0, model_bytes(path) or 1
        for each in files:
            with each.open("rb") as file:
                while block := file.read(1 << 22):
                    found.update(block)
                    done += len(block)
                    watch.report(f"digest of {path.name}", done / size)
        return {"sha256": found.hexdigest()}

    changed = " ".join(str(file.stat().st_mtime_ns) for file in files)
    key = {"file": fingerprint(path), "changed": changed}
    return str(remembered(JsonStore(home() / "digests", 1), key, read)["sha256"])


# What to measure, and how thoroughly.


@dataclass(frozen=True, slots=True)
class Mode:
    """How thorough a run is."""

    name: str  # ``quick``, ``default`` or ``full``
    arms: tuple[str, ...]  # what is measured where no arm is named
    max_tokens: int  # longest answer
    minutes: float | None  # the time budget, loading included; None: none
    repeats: int  # most repeats of a question
    tolerance: float  # half-width of the overall interval of every speed-up, relative, that is narrow enough
    least_answers: int = 0  # how many questions a time budget should suffice for, if need be with shorter answers


QUICK = Mode("quick", ("plain", "auto"), 64, 2.0, 3, 0.05, least_answers=9)
DEFAULT = Mode("default", ("plain", "auto"), 128, 15.0, 3, 0.03)
FULL = Mode("full", ("plain", "auto", "1", "2", "4", "8"), 256, None, 5, 0.02)
LEAST_TOKENS = 24  # A draft model waits for some tokens of an answer, so shorter ones say nothing
READING = 0.8  # time to read a prompt before any was read, in times of a plain answer
TOP_K = 40  # default for sampling: the tail of a large vocabulary only costs time


def affordable_tokens(mode: Mode, seconds: float, n_answers: int, tokens_per_second: float) -> int:
    """Longest answers for which ``seconds`` suffice, at ``n_answers`` (arms times engines) a question and a plain
    speed."""
    if not mode.least_answers:
        return mode.max_tokens
    each = seconds / mode.least_answers / (n_answers + READING)
    return max(LEAST_TOKENS, min(mode.max_tokens, int(each * tokens_per_second)))


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The command line; None and empty leave a choice open, commas separate names."""

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


_LOADING = {
    "draft_backend": "draft_backend",
    "n_ctx": "ctx",
    "n_threads": "threads",
    "n_gpu_layers": "gpu_layers",
    "kv_cache_type": "kv_cache",
    "light_draft": "light_draft",
}
"""Fields of ``LoadOptions`` -> fields of ``Settings``."""


def _resumed(request: BenchRequest, then: Settings) -> BenchRequest:
    """The request for the rest of a run: the command line over its settings."""
    options, usual = request.options, LoadOptions()
    load = {
        name: getattr(then, setting)
        for name, setting in _LOADING.items()
        if getattr(options.load, name) == getattr(usual, name)
    }
    if not options.load.placement:
        load["placement"] = Placement(**then.placement)
    return replace(
        request,
        options=replace(
            options,
            model=options.model or then.model,
            draft=options.draft or then.draft,
            draft_only=options.draft_only or not options.draft,
            load=replace(options.load, **load),
            system=options.system or then.system,
            sampling=then.sampling | {"max_tokens": then.max_tokens} | dict(options.sampling),
        ),
        backends=request.backends or then.backends,
        arms=request.arms or then.arms,
        categories=request.categories or then.categories,
        prompts=request.prompts or (None if request.which else then.questions),
        quick=request.quick or (then.mode == "quick" and not request.full),
        full=request.full or (then.mode == "full" and not request.quick),
        slice_tokens=then.slice_tokens if request.slice_tokens is None else request.slice_tokens,
        ignore_eos=request.ignore_eos or then.ignore_eos,
    )


def _mode(request: BenchRequest) -> Mode:
    mode = QUICK if request.quick else FULL if request.full else DEFAULT
    if request.minutes is not None:
        if not 0 < request.minutes < 1e6:
            raise UsageError(f"--minutes must be over 0, not {request.minutes:g}")
        mode = replace(mode, minutes=request.minutes)
    if request.repeats is not None:
        if not 1 <= request.repeats <= 1000:
            raise UsageError(f"--repeats must be in 1..1000, not {request.repeats}")
        mode = replace(mode, repeats=request.repeats, tolerance=0.0)  # so many were asked for
    if longest := request.options.sampling.get("max_tokens"):
        mode = replace(mode, max_tokens=longest, least_answers=0)
    return mode


def _questions(source: str, categories: Sequence[str]) -> list[Question]:
    kind, _, name = source.partition(":")
    if kind == "own" and name:
        if name not in SETS:
            raise UsageError(f"--set must be {' or '.join(SETS)}, not {name!r}")
        return of_categories(own_questions(name), categories)
    check_text(source, "--prompts")
    return of_categories(read_questions(Path(source)), categories)


_CHANGES = ("memory_available_bytes", "busy_share", "on_battery", "throttled", "bandwidth_gb_per_s")
"""Facts of a machine that hold for a moment."""


class BenchRun:
    """A run as it was asked for; ``measure`` carries it out. ``UsageError``: the request makes no sense.

    Args:
        before: a run to go on with.
        save: called with the record after every question.
    """

    def __init__(
        self,
        request: BenchRequest,
        progress: Progress,
        before: Record | None = None,
        save: Callable[[Record], None] = lambda record: None,
    ) -> None:
        if request.quick and request.full:
            raise UsageError("--quick and --full cannot be combined")
        if request.prompts is not None and request.which is not None:
            raise UsageError("--set selects built-in questions and cannot be combined with --prompts")
        if before is not None:
            request = _resumed(request, before.settings)
        options, mode, categories = request.options, _mode(request), split_names(request.categories)
        slice_tokens = measuring.SLICE_TOKENS if request.slice_tokens is None else request.slice_tokens
        if not 0 <= slice_tokens <= 1000:
            raise UsageError(f"--slice must be in 0..1000, not {slice_tokens}")
        backends = split_names(request.backends) or ["auto"]
        for backend in backends:
            check_name(backend)
        source = request.prompts or f"own:{request.which or 'report'}"
        arms, questions = parse_arms(split_names(request.arms) or mode.arms), _questions(source, categories)
        sampling = {name: value for name, value in options.sampling.items() if name != "max_tokens"}
        if sampling.get("temperature"):
            sampling.setdefault("top_k", TOP_K)
        self.settings = Settings(
            model=options.model or "",
            draft=(options.drafters() or ["none"]) if options.draft else [],
            backends=backends,
            arms=[arm.name for arm in arms],
            questions=source,
            categories=categories,
            questions_sha256=digest(questions),
            max_tokens=mode.max_tokens,
            sampling={name: list(value) if isinstance(value, tuple) else value for name, value in sampling.items()},
            ignore_eos=request.ignore_eos,
            system=options.system,
            mode=mode.name,
            slice_tokens=slice_tokens,
            placement=options.load.placement.given(),
            **{setting: getattr(options.load, name) for name, setting in _LOADING.items()},
        )
        self.questions = in_turns(questions, short_first=mode.name == "quick")
        self.options, self.arms, self.mode, self.before = options, arms, mode, before
        self._save = save
        self._progress = progress
        self._watch = Watch(progress.report)
        self._began = time.monotonic()

    def measure(self) -> Record | None:
        """Measure until it is enough, time is up, or Ctrl-C; None where nothing was measured. ``LocalspecError``: a
        pair cannot be loaded, or a run cannot be resumed."""
        sitting = Sitting(
            started=round(time.time(), 1),
            seconds=0.0,
            localspec=__version__,
            python=platform.python_version(),
            command=shlex.join(["localspec", *sys.argv[1:]]),
            on_battery=machine.on_battery(),
            slow_clock=machine.slow_clock(),
        )
        throttle = machine.throttle_count()
        with ExitStack() as stack:
            in_slices, system = self.settings.slice_tokens > 0, self.options.system
            subjects = []
            for llm in self._load(stack):
                subjects.append(EngineUnderTest(llm, self.arms, self._watch.stopped, system, in_slices=in_slices))
                stack.callback(subjects[-1].restore)
            record = self._begun(subjects, sitting)
            with on_interrupt(self._watch.stopped.set):
                try:
                    record.ended = self._ask(subjects, record)
                except Cancelled:
                    record.ended = "interrupted"
            self._progress.clear()
        self._note_time(sitting)
        sitting.on_battery = sitting.on_battery or machine.on_battery()
        sitting.throttled = machine.throttled(throttle, machine.throttle_count())
        if not record.samples:
            return None
        self._save(record)
        return record

    def _note_time(self, sitting: Sitting) -> None:
        sitting.seconds = round(time.monotonic() - self._began, 1)
        sitting.peak_memory_bytes = peak_memory_bytes()

    def _load(self, stack: ExitStack) -> list[LLM]:
        """The engines, all loaded at once."""
        options, backends, loaded = self.options, self.settings.backends, list[LLM]()
        model = ensure_model(options.model, options.drafters(), yes=options.yes)
        self.settings = replace(self.settings, model=model)
        with GGUFFile(Catalog.load().resolve(model)) as gguf:  # every way of decoding has contexts of its own
            usual = min(USUAL_CTX, gguf.n_ctx_train or USUAL_CTX)
        for backend in backends:
            if loaded:
                self._check_room(loaded[0], len(backends) - len(loaded))
            self._progress.report(f"loading {model}" + (f" with {backend}" if len(backends) > 1 else ""), None)
            asked = replace(options, model=model).for_measuring(backend=backend, n_ctx=options.load.n_ctx or usual)
            loaded.append(stack.enter_context(asked.open(self._watch.report)))
        return loaded

    def _check_room(self, llm: LLM, n_more: int) -> None:
        """Refuse more engines than memory holds."""
        one = llm.run(lambda pair: sum(context.model.size_bytes for context in pair.state.contexts))
        need, free = round(1.2 * n_more * one), read_memory().available
        if free is not None and need > free:
            raise UsageError(
                f"{n_more} more engine{'s' * (n_more > 1)} beside {llm.backend_name} need about {size_text(need)} and "
                f"{size_text(free)} are free; measure one at a time with --json, then compare them with "
                "bench compare"
            )

    def _begun(self, subjects: Sequence[EngineUnderTest], sitting: Sitting) -> Record:
        """The record before the first question, with what is known once the engines are loaded."""
        names = [subject.llm.backend_name for subject in subjects]
        if len(set(names)) < len(names):
            raise UsageError(f"--backend names the same engine twice: {', '.join(names)}")
        mode, settings, before = self.mode, self.settings, self.before
        slowest = min(subject.llm.plain_tokens_per_second for subject in subjects)
        left = (mode.minutes or 0.0) * 60 - (time.monotonic() - self._began)
        tokens = affordable_tokens(mode, left, len(self.arms) * len(subjects), slowest)
        slices = settings.slice_tokens if all(subject.in_slices for subject in subjects) else 0
        settings = replace(settings, backends=names, max_tokens=tokens, slice_tokens=slices)
        anew = mode.name != "quick" and before is None
        engines = [engine_facts(each, settings.kv_cache, self._watch, measure=anew) for each in subjects]
        examined = asdict(facts.look_at_machine(settings.threads, measure=False))
        here = {key: value for key, value in examined.items() if key not in _CHANGES}
        record = Record(here, settings, engines, [sitting])
        if before is not None:
            for name, was, is_now in differences(before, record):
                if name not in ("localspec", "Python"):
                    raise LocalspecError(f"cannot resume: it was measured with {name} {was!r}, now {is_now!r}")
            record.sessions = [*before.sessions, sitting]
            record.samples, record.skipped, record.engines = before.samples, before.skipped, before.engines
        return record

    def _ask(self, subjects: Sequence[EngineUnderTest], record: Record) -> Ending:
        mode, settings, repeat = self.mode, record.settings, 0
        questions = self._that_fit(subjects, record)
        self._progress.report("warming up", None)
        for subject in subjects:
            subject.warm_up()
        todo = list(measuring.blocks(questions, mode.repeats))
        clock = measuring.Clock(self._began, None if mode.minutes is None else mode.minutes * 60, len(todo))
        done = {sample.key for sample in record.samples}
        others = [(backend, arm) for backend in settings.backends for arm in settings.arms if arm != "plain"]
        for number, block in enumerate(todo):
            if block.repeat != repeat:
                repeat = block.repeat
                for subject in subjects:
                    subject.forget()
            wanted = [
                (place, subject, arm)
                for place, subject, arm in measuring.places(subjects, block)
                if (block.question.id, subject.llm.backend_name, arm.name, block.repeat) not in done
            ]
            if wanted:
                began = time.monotonic()
                if not clock.has_time(began):
                    return "time"
                left = clock.left(began, number)
                about = f"{number + 1} of at most {len(todo)}: {block.question.id}"
                about += "" if left is None else f", {time_text(left)} left"
                self._progress.report(about, None)
                shown = partial(self._show, about, record, number, len(todo))
                params = _params(settings, block)
                record.samples += measuring.measure(block, wanted, params, settings.slice_tokens, shown)
                clock.add(time.monotonic() - began)
                self._note_time(record.sessions[-1])
                self._save(record)
            if block.ends_cycle:
                speedups = [ratios(record.samples, each, (each[0], "plain")) for each in others]
                if measuring.is_tight(speedups, mode.tolerance):
                    return "tight"
        return "complete"

    def _that_fit(self, subjects: Sequence[EngineUnderTest], record: Record) -> list[Question]:
        """Questions that leave room for the answer in every context."""
        longest = record.settings.max_tokens

        def fits(question: Question) -> bool:
            if self._watch.stopped.is_set():
                raise Cancelled("measuring was stopped")
            room = longest * len(question.turns)  # the answers to earlier turns are part of the prompt
            return all(subject.n_tokens(question) + room < subject.llm.n_ctx for subject in subjects)

        self._progress.report("counting tokens", None)
        fitting = list(filter(fits, self.questions))
        record.skipped = [question.id for question in self.questions if question not in fitting]
        if not fitting:
            n_ctx = min(subject.llm.n_ctx for subject in subjects)
            raise UsageError(
                f"no question fits into a context of {n_ctx} tokens together with an answer of {longest}: raise "
                "--ctx, or lower --max-tokens"
            )
        return fitting

    def _show(self, about: str, record: Record, number: int, n_blocks: int, answer: TimedAnswer, done: float) -> None:
        name = record.arm_name(answer.backend, answer.arm.name)
        self._progress.report(f"{about} · {name}", (number + done) / n_blocks)


def _params(settings: Settings, block: Block) -> SamplingParams:
    """How a question is sampled in a repeat: with a seed of its own, the same for all arms, where one was given."""
    given = dict(settings.sampling)
    if given.get("seed") is not None:
        name = f"{given['seed']}/{block.question.id}/{block.repeat}"
        given["seed"] = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    return SamplingParams(**given, max_tokens=settings.max_tokens, ignore_eos=settings.ignore_eos)
