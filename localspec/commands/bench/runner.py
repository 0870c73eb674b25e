"""A run: engines are loaded, questions asked in all arms in turns, answers recorded, until it is enough."""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from localspec import __version__
from localspec.commands.bench.facts import engine_facts
from localspec.commands.bench.modes import Mode, affordable_tokens
from localspec.commands.bench.record import Ending, Record, Settings, Sitting, differences
from localspec.commands.bench.results import ratios
from localspec.commands.bench.storage import RecordError
from localspec.commands.bench.words import arm_name, time_text
from localspec.commands.doctor import machine
from localspec.commands.doctor.costs import Watch
from localspec.commands.options import RunOptions, ensure_model
from localspec.commands.questions import Question
from localspec.commands.timing.answer import TimedAnswer
from localspec.commands.timing.arms import Arm
from localspec.commands.timing.schedule import Block, Clock, blocks, is_tight
from localspec.commands.timing.statistics import Values
from localspec.commands.timing.subject import EngineUnderTest
from localspec.commands.timing.turns import SLICE_TOKENS, Place, measure, places
from localspec.errors import Cancelled, UsageError
from localspec.llm import LLM
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf_parts import model_bytes
from localspec.model_files.sources.base import size_text
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.free import FREE_DRAFTERS
from localspec.spec_decode.drafters.names import NGRAM
from localspec.system import power
from localspec.system.interrupts import on_interrupt
from localspec.system.memory import read_memory
from localspec.system.usage import peak_memory_bytes
from localspec.terminal.progress import Progress

_CHANGES = ("memory_available_bytes", "busy_share", "on_battery", "throttled", "bandwidth_gb_per_s")
"""What is true of a machine at one moment only."""

_TOP_K = 40
"""Samples are drawn from so many tokens unless told otherwise: the tail of a large vocabulary only costs time."""


@dataclass(slots=True)
class Plan:
    """What to measure.

    Attributes:
        options: models and how to run them; its ``backend`` is not used.
        backends: the engines.
        arms: ``plain`` first.
        questions: in the order to ask them.
        questions_name: where they came from; see ``Settings``.
        categories: those that were named; empty: all.
        questions_sha256: their digest.
        mode: how thorough, with the command line's changes in it.
        max_tokens: longest answer as asked for; None leaves it to the mode.
        ignore_eos: whether answers go on behind an end token.
        slice_tokens: the arms of a question take turns after so many tokens, where there is memory for it; 0: after
            whole answers.
        before: a run to go on with.
        save: called with the record after every question.
    """

    options: RunOptions
    backends: list[str]
    arms: list[Arm]
    questions: list[Question]
    questions_name: str
    categories: list[str]
    questions_sha256: str
    mode: Mode
    max_tokens: int | None = None
    ignore_eos: bool = False
    slice_tokens: int = SLICE_TOKENS
    before: Record | None = None
    save: Callable[[Record], None] = field(default=lambda record: None)


class Run:
    """Measures a plan; ``record`` holds what was measured so far.

    Args:
        plan: what to measure.
        progress: where it is said how far it is.
    """

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self.plan = plan
        self.record: Record | None = None
        self._progress = progress
        self._stop = threading.Event()
        self._watch = Watch(progress.report)
        self._began = time.monotonic()
        self._model = ""

    def measure(self) -> Record | None:
        """Everything, until it is enough, time is up, or somebody stops it.

        Returns:
            The record; None where it was stopped before anything was measured.

        Raises:
            LocalspecError: a pair cannot be loaded, or a run cannot be resumed.
        """
        session = Sitting(
            started=round(time.time(), 1),
            seconds=0.0,
            localspec=__version__,
            python=platform.python_version(),
            command=shlex.join(["localspec", *sys.argv[1:]]),
            on_battery=power.on_battery(),
            slow_clock=power.slow_clock(),
        )
        throttle = power.throttle_count()
        self._check_room()
        with ExitStack() as stack:
            engines = [stack.enter_context(self._open(backend)) for backend in self.plan.backends]
            subjects = []
            for llm in engines:
                subject = EngineUnderTest(
                    llm, self.plan.arms, self._stop, self.plan.options.system, in_slices=self.plan.slice_tokens > 0
                )
                stack.callback(subject.restore)
                subjects.append(subject)
            settings = self._settings(subjects)
            anew = self.plan.mode.name != "quick" and self.plan.before is None
            facts = [engine_facts(each, settings.kv_cache, self._watch, measure=anew) for each in subjects]
            record = self._record(settings, facts, session)
            with on_interrupt(self._stop_now):
                try:
                    record.ended = self._ask(subjects, record)
                except Cancelled:
                    record.ended = "interrupted"
            self._progress.clear()
        self._note_time(session)
        session.on_battery = session.on_battery or power.on_battery()
        session.throttled = power.throttled(throttle, power.throttle_count())
        if not record.samples:
            return None
        self.plan.save(record)
        return record

    def _note_time(self, session: Sitting) -> None:
        session.seconds = round(time.monotonic() - self._began, 1)
        session.peak_memory_bytes = peak_memory_bytes()

    def _stop_now(self) -> None:
        self._stop.set()
        self._watch.stop()

    # -- loading -------------------------------------------------------------------------------------------------

    def _open(self, backend: str) -> LLM:
        options = self.plan.options
        model = self._model = ensure_model(options.model, options.drafters())
        self._progress.report(f"loading {model}" + (f" with {backend}" if len(self.plan.backends) > 1 else ""), None)
        return replace(options, model=model).for_measuring(backend=backend).open(self._watch.report)

    def _check_room(self) -> None:
        """Refuse to load several engines side by side where memory lacks for it."""
        options, n = self.plan.options, len(self.plan.backends)
        if n == 1:
            return
        catalog = Catalog.load()
        path = catalog.resolve(ensure_model(options.model, options.drafters()))
        names = options.drafters()
        if names == ["auto"]:
            names = [str(catalog.draft_for(path) or NGRAM)]
        paths = [path, *(catalog.resolve(name) for name in names if name not in FREE_DRAFTERS)]
        need, free = round(1.2 * n * sum(map(model_bytes, paths))), read_memory().available
        if free is not None and need > free:
            raise UsageError(
                f"{n} engines side by side need about {size_text(need)} and {size_text(free)} are free; measure one at "
                "a time with --json, and set them against each other with bench compare"
            )

    def _settings(self, subjects: Sequence[EngineUnderTest]) -> Settings:
        plan, options = self.plan, self.plan.options
        names = [subject.llm.backend_name for subject in subjects]
        if len(set(names)) < len(names):
            raise UsageError(f"--backend names the same engine twice: {', '.join(names)}")
        tokens = plan.max_tokens
        if tokens is None and plan.before is not None:
            tokens = plan.before.settings.max_tokens
        if tokens is None:
            slowest = min(subject.llm.plain_tokens_per_second for subject in subjects)
            left = (plan.mode.minutes or 0.0) * 60 - (time.monotonic() - self._began)
            tokens = affordable_tokens(plan.mode, left, len(plan.arms) * len(subjects), slowest)
        sampling = dict(options.sampling)
        sampling.pop("max_tokens", None)
        if sampling.get("temperature"):
            sampling.setdefault("top_k", _TOP_K)
        return Settings(
            model=self._model,
            draft=list(options.draft),
            backends=names,
            draft_backend=options.load.draft_backend,
            arms=[arm.name for arm in plan.arms],
            questions=plan.questions_name,
            categories=list(plan.categories),
            questions_sha256=plan.questions_sha256,
            max_tokens=tokens,
            sampling={name: list(value) if isinstance(value, tuple) else value for name, value in sampling.items()},
            ignore_eos=plan.ignore_eos,
            system=options.system,
            ctx=options.load.n_ctx,
            threads=options.load.n_threads,
            gpu_layers=options.load.n_gpu_layers,
            kv_cache=options.load.kv_cache_type,
            light_draft=options.load.light_draft,
            mode=plan.mode.name,
            slice_tokens=plan.slice_tokens if all(subject.in_slices for subject in subjects) else 0,
        )

    def _record(self, settings: Settings, engines: list[Any], session: Sitting) -> Record:
        facts = asdict(machine.look_at_machine(settings.threads, measure=False))
        here = {key: value for key, value in facts.items() if key not in _CHANGES}
        record = Record(here, settings, engines, [session])
        before = self.plan.before
        if before is not None:
            for name, was, is_now in differences(before, record):
                if name not in ("localspec", "Python"):
                    raise RecordError(
                        f"cannot resume: it was measured with {name} {was!r}, and this would be {is_now!r}"
                    )
            record.sessions = [*before.sessions, session]
            record.samples, record.skipped, record.engines = before.samples, before.skipped, before.engines
        self.record = record
        return record

    # -- asking --------------------------------------------------------------------------------------------------

    def _ask(self, subjects: Sequence[EngineUnderTest], record: Record) -> Ending:
        mode = self.plan.mode
        questions = self._that_fit(subjects, record)
        self._progress.report("warming up", None)
        for subject in subjects:
            subject.warm_up()
        todo = list(blocks(questions, mode.repeats))
        clock = Clock(self._began, None if mode.minutes is None else mode.minutes * 60, len(todo))
        done = {sample.key for sample in record.samples}
        repeat = 0
        for number, block in enumerate(todo):
            if block.repeat != repeat:
                repeat = block.repeat
                for subject in subjects:
                    subject.forget()
            wanted = [
                (place, subject, arm)
                for place, subject, arm in places(subjects, block)
                if (block.question.id, subject.llm.backend_name, arm.name, block.repeat) not in done
            ]
            if wanted:
                began = time.monotonic()
                if not clock.has_time(began):
                    return "time"
                self._block(block, wanted, record, clock, number)
                clock.add(time.monotonic() - began)
                self._note_time(record.sessions[-1])
                self.plan.save(record)
            if block.ends_cycle and is_tight(self._speedups(record), mode.tolerance):
                return "tight"
        return "complete"

    @staticmethod
    def _speedups(record: Record) -> list[Values]:
        backends, arms = record.settings.backends, record.settings.arms
        pairs = [(backend, arm) for backend in backends for arm in arms if arm != "plain"]
        return [ratios(record.samples, pair, (pair[0], "plain")) for pair in pairs]

    def _that_fit(self, subjects: Sequence[EngineUnderTest], record: Record) -> list[Question]:
        """The questions that leave room for the answer in every context."""
        fitting: list[Question] = []
        skipped: list[Question] = []
        for number, question in enumerate(self.plan.questions):
            if self._stop.is_set():
                raise Cancelled("measuring was stopped")
            self._progress.report("counting tokens", number / len(self.plan.questions))
            # The answers to earlier turns are part of the prompt.
            room = record.settings.max_tokens * len(question.turns)
            fits = all(subject.n_tokens(question) + room < subject.llm.n_ctx for subject in subjects)
            (fitting if fits else skipped).append(question)
        record.skipped = [question.id for question in skipped]
        if not fitting:
            n_ctx = min(subject.llm.n_ctx for subject in subjects)
            raise UsageError(
                f"no question fits into a context of {n_ctx} tokens together with an answer of "
                f"{record.settings.max_tokens}: raise --ctx, or lower --max-tokens"
            )
        return fitting

    def _block(self, block: Block, wanted: Sequence[Place], record: Record, clock: Clock, number: int) -> None:
        question, settings = block.question, record.settings
        left = clock.left(time.monotonic(), number)
        about = f"{number + 1} of at most {clock.n_blocks}: {question.id}"
        if left is not None:
            about += f", {time_text(left)} left"

        def report(answer: TimedAnswer, fraction: float) -> None:
            name = arm_name(record, answer.backend, answer.arm.name)
            self._progress.report(f"{about} · {name}", (number + fraction) / clock.n_blocks)

        self._progress.report(about, None)
        params = self._params(settings, question, block.repeat)
        record.samples += measure(block, wanted, params, settings.slice_tokens, report)

    def _params(self, settings: Settings, question: Question, repeat: int) -> SamplingParams:
        given = dict(settings.sampling)
        seed = given.pop("seed", None)
        if seed is not None:
            # Of its own for each question and repeat, the same for all arms.
            name = f"{seed}/{question.id}/{repeat}"
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
        if "stop" in given:
            given["stop"] = tuple(given["stop"])
        params = SamplingParams(**given, seed=seed, max_tokens=settings.max_tokens)
        return replace(params, ignore_eos=settings.ignore_eos)
