"""A run: engines are loaded, questions asked in all arms in turns, answers recorded, until it is enough."""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from localspec import __version__
from localspec.commands.bench.facts import engine_facts
from localspec.commands.bench.plan import BenchPlan, affordable_tokens
from localspec.commands.bench.record import Ending, Record, Settings, Sitting, differences
from localspec.commands.bench.results import ratios
from localspec.commands.bench.storage import RecordError
from localspec.commands.bench.words import arm_name, time_text
from localspec.commands.doctor import machine
from localspec.commands.doctor.costs import Watch
from localspec.commands.options import ensure_model
from localspec.errors import Cancelled, UsageError
from localspec.llm import LLM
from localspec.measuring.answer import TimedAnswer
from localspec.measuring.questions import Question
from localspec.measuring.schedule import Block, Clock, blocks, is_tight
from localspec.measuring.statistics import Values
from localspec.measuring.subject import EngineUnderTest
from localspec.measuring.turns import Place, measure, places
from localspec.model_files.sources.base import size_text
from localspec.sampling.sampling import SamplingParams
from localspec.system import power
from localspec.system.interrupts import on_interrupt
from localspec.system.memory import read_memory
from localspec.system.usage import peak_memory_bytes
from localspec.terminal.progress import Progress

_CHANGES = ("memory_available_bytes", "busy_share", "on_battery", "throttled", "bandwidth_gb_per_s")
"""What is true of a machine at one moment only."""


class BenchRun:
    """Measures a plan.

    Args:
        plan: what to measure.
        progress: shows how far it is.
    """

    def __init__(self, plan: BenchPlan, progress: Progress) -> None:
        self.plan = plan
        self._progress = progress
        self._watch = Watch(progress.report)
        self._began = time.monotonic()

    def measure(self) -> Record | None:
        """Everything, until it is enough, time is up, or Ctrl-C.

        Returns:
            The record; None where it was stopped before anything was measured.

        Raises:
            LocalspecError: a pair cannot be loaded, or a run cannot be resumed.
        """
        sitting = Sitting(
            started=round(time.time(), 1),
            seconds=0.0,
            localspec=__version__,
            python=platform.python_version(),
            command=shlex.join(["localspec", *sys.argv[1:]]),
            on_battery=power.on_battery(),
            slow_clock=power.slow_clock(),
        )
        throttle = power.throttle_count()
        plan = self.plan
        with ExitStack() as stack:
            subjects = []
            for llm in self._load(stack):
                subject = EngineUnderTest(
                    llm,
                    plan.arms,
                    self._watch.stopped,
                    plan.options.system,
                    in_slices=plan.settings.slice_tokens > 0,
                )
                stack.callback(subject.restore)
                subjects.append(subject)
            settings = self._settled(subjects)
            anew = plan.mode.name != "quick" and plan.before is None
            facts = [engine_facts(each, settings.kv_cache, self._watch, measure=anew) for each in subjects]
            record = self._record(settings, facts, sitting)
            with on_interrupt(self._watch.stop):
                try:
                    record.ended = self._ask(subjects, record)
                except Cancelled:
                    record.ended = "interrupted"
            self._progress.clear()
        self._note_time(sitting)
        sitting.on_battery = sitting.on_battery or power.on_battery()
        sitting.throttled = power.throttled(throttle, power.throttle_count())
        if not record.samples:
            return None
        plan.save(record)
        return record

    def _note_time(self, sitting: Sitting) -> None:
        sitting.seconds = round(time.monotonic() - self._began, 1)
        sitting.peak_memory_bytes = peak_memory_bytes()

    # -- loading -------------------------------------------------------------------------------------------------

    def _load(self, stack: ExitStack) -> list[LLM]:
        """The engines, side by side."""
        options, backends = self.plan.options, self.plan.settings.backends
        self.plan.settings = replace(
            self.plan.settings, model=ensure_model(options.model, options.drafters(), yes=options.yes)
        )
        loaded: list[LLM] = []
        for backend in backends:
            if loaded:
                self._check_room(loaded[0], len(backends) - len(loaded))
            model = self.plan.settings.model
            self._progress.report(f"loading {model}" + (f" with {backend}" if len(backends) > 1 else ""), None)
            measuring = replace(options, model=model).for_measuring(backend=backend)
            loaded.append(stack.enter_context(measuring.open(self._watch.report)))
        return loaded

    def _check_room(self, llm: LLM, n_more: int) -> None:
        """Refuse to load more engines beside one where memory lacks for them."""
        one = llm.run(lambda pair: sum(context.model.size_bytes for context in pair.state.contexts))
        need, free = round(1.2 * n_more * one), read_memory().available
        if free is not None and need > free:
            raise UsageError(
                f"{n_more} more engine{'s' * (n_more > 1)} beside {llm.backend_name} need about {size_text(need)} and "
                f"{size_text(free)} are free; measure one at a time with --json, then compare them with "
                "bench compare"
            )

    def _settled(self, subjects: Sequence[EngineUnderTest]) -> Settings:
        """The settings with what is known once the engines are loaded."""
        names = [subject.llm.backend_name for subject in subjects]
        if len(set(names)) < len(names):
            raise UsageError(f"--backend names the same engine twice: {', '.join(names)}")
        slowest = min(subject.llm.plain_tokens_per_second for subject in subjects)
        mode, settings = self.plan.mode, self.plan.settings
        left = (mode.minutes or 0.0) * 60 - (time.monotonic() - self._began)
        tokens = affordable_tokens(mode, left, len(self.plan.arms) * len(subjects), slowest)
        slices = settings.slice_tokens if all(subject.in_slices for subject in subjects) else 0
        return replace(settings, backends=names, max_tokens=tokens, slice_tokens=slices)

    def _record(self, settings: Settings, engines: list[Any], sitting: Sitting) -> Record:
        facts = asdict(machine.look_at_machine(settings.threads, measure=False))
        here = {key: value for key, value in facts.items() if key not in _CHANGES}
        record = Record(here, settings, engines, [sitting])
        before = self.plan.before
        if before is not None:
            for name, was, is_now in differences(before, record):
                if name not in ("localspec", "Python"):
                    raise RecordError(f"cannot resume: it was measured with {name} {was!r}, now {is_now!r}")
            record.sessions = [*before.sessions, sitting]
            record.samples, record.skipped, record.engines = before.samples, before.skipped, before.engines
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
            if self._watch.stopped.is_set():
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
