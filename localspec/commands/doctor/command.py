"""``localspec doctor``: looks, measures, and says what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localspec import __version__
from localspec.commands.doctor import engines, fit, machine, payoff, subject
from localspec.commands.doctor.advice import recommend, recommend_ranked
from localspec.commands.doctor.costs import Watch, compare_engines, cost_checks, measure_costs, recalibrate
from localspec.commands.doctor.report import Check, EngineFacts, PairFacts, Recommendation, Report
from localspec.commands.doctor.screen import DoctorScreen
from localspec.commands.doctor.subject import Subject
from localspec.commands.options import RunOptions
from localspec.errors import EngineError, LocalspecError, UsageError
from localspec.model_files.catalog import Catalog
from localspec.model_files.sources.base import size_text
from localspec.spec_decode.drafters.names import NGRAM, is_same_file
from localspec.system import power
from localspec.terminal.progress import Progress

if TYPE_CHECKING:
    from localspec.llm import LLM


@dataclass(frozen=True, slots=True)
class Asked:
    """The models a command line asks about.

    Attributes:
        target: the model that answers.
        drafts: draft models, in the order in which they were named.
        ngram: whether n-grams guess as well.
        automatic: whether the drafts are ``--draft auto``'s.
    """

    target: Subject
    drafts: tuple[Subject, ...]
    ngram: bool
    automatic: bool

    @property
    def models(self) -> list[Subject]:
        return [self.target, *self.drafts]


def doctor_command(options: RunOptions, *, as_json: bool = False, calibrate: bool = False, rank: bool = False) -> int:
    """Examine the machine and a pair, and print what was found.

    Args:
        options: the models and how they would run; without a model, the default pair if it is on this disk.
        as_json: print ``Report.as_dict`` instead of a screen.
        calibrate: measure passes anew, and store what they cost.
        rank: try the drafts on this disk for a minute.

    Returns:
        0, or 1 where something would not work.

    Raises:
        UsageError: the options make no sense.
        KeyboardInterrupt: Ctrl-C; what was stored stays valid.
    """
    if options.verbose:
        from localspec.backends.noise import engine_log

        engine_log.verbose = True
    with Progress() as progress:
        report = Doctor(options, None if as_json else DoctorScreen(), progress).examine(calibrate, rank)
    if as_json:
        print(json.dumps(report.as_dict(), ensure_ascii=False, indent=2, allow_nan=False))
    return 0 if report.holds else 1


class Doctor:
    """One examination.

    Args:
        options: what was asked.
        screen: where findings are shown as they come; None shows nothing.
        progress: what is being done meanwhile.
    """

    def __init__(self, options: RunOptions, screen: DoctorScreen | None, progress: Progress) -> None:
        self.options = options
        self.screen = screen
        self.progress = progress

    def examine(self, calibrate: bool, rank: bool) -> Report:
        """Everything, in the order in which it is shown."""
        options = self.options
        engines.check_backend(options.backend)  # what does not exist is said before anything takes time
        asked = self._asked()
        self.progress.report("measuring the memory's bandwidth", None)
        throttle = power.throttle_count()
        report = self.report = Report(__version__, machine.look_at_machine(options.threads))
        self._show("Machine", "machine", list(machine.machine_checks(report.machine)))
        report.engines = engines.look_at_engines()
        hardware = report.machine
        rows = list(engines.engine_checks(report.engines, hardware.gpus, options.backend, hardware.features))
        engine: EngineFacts | None = None
        try:
            engine = engines.preferred_engine(report.engines, options.backend, options.gpu_layers)
        except EngineError as error:
            if all(check.status != "fail" for check in rows):
                rows.append(Check("engines", "GPU", "fail", str(error), "leave --gpu-layers out to use the CPU"))
        self._show("Engines", "engines", rows)
        on_disk = subject.on_disk()
        report.models = [model.facts() for model in on_disk]
        self._show("Models", "models", list(subject.model_checks(on_disk)))
        if asked is None:
            report.recommendation = self._first_steps()
        else:
            self._examine_pair(asked, engine, calibrate, rank)
        slowed = power.throttled(throttle, power.throttle_count())
        report.machine = replace(report.machine, throttled=slowed)
        self._rows(list(machine.heat_check(report.machine)))
        if self.screen is not None and report.recommendation is not None:
            self.progress.clear()
            self.screen.recommendation(report.recommendation)
        return report

    # -- what was asked about ------------------------------------------------------------------------------------

    def _asked(self) -> Asked | None:
        catalog, options = Catalog.load(), self.options
        if options.model is None:
            default = catalog.default_pair()[0]
            if not default.present and not options.draft:
                return None
            target = subject.find_subject(default.name)
        else:
            target = subject.find_subject(options.model)
        spec = options.drafters()
        if spec == "auto":
            found = catalog.draft_for(target.path)
            known = target.entry.draft[:1] if target.entry is not None else ()
            drafts = (subject.of_path(found),) if found is not None else tuple(map(subject.find_subject, known))
            return Asked(target, drafts, True, True)
        names = list(dict.fromkeys([spec] if isinstance(spec, str) else spec or ()))
        models: list[Subject] = []
        for each in (subject.find_subject(name) for name in names if name != NGRAM):
            if not any(is_same_file(each.path, other.path) for other in models):
                models.append(each)
        return Asked(target, tuple(models), NGRAM in names, False)

    def _first_steps(self) -> Recommendation:
        pair = Catalog.load().default_pair()
        size = size_text(sum(entry.bytes for entry in pair if not entry.present))
        names = " with ".join(entry.name for entry in pair)
        text = f"The default model is not on this disk: {names} ({size}). Fetch it, then run doctor again."
        return Recommendation(None, text, "localspec pull")

    # -- the pair ------------------------------------------------------------------------------------------------

    def _examine_pair(self, asked: Asked, engine: EngineFacts | None, calibrate: bool, rank: bool) -> None:
        report, options = self.report, self.options
        drafts = [draft.name for draft in asked.drafts]
        title = " + ".join([asked.target.name, *([NGRAM] if asked.ngram else []), *drafts])
        checks: list[Check] = []
        for model in asked.models:
            if model.error is not None:
                checks.append(subject.broken_check("pair", model))
            elif not model.present:
                checks.append(subject.download_check(model))
        differences = self._vocabulary(asked, checks)
        refused = {name for name, difference in differences.items() if difference is not None}
        used = replace(asked, drafts=tuple(d for d in asked.drafts if d.name not in refused and d.error is None))
        room = fit.Room(
            engine, options.gpu_layers, report.machine.memory_available_bytes,
            report.machine.memory_limit_bytes or report.machine.memory_total_bytes,
        )  # fmt: skip
        found = fit.fit(used.models, fit.context_size(options.ctx, asked.target), options.kv_cache, room)
        checks += fit.fit_checks(used.models, found, room)
        checks += self._context(asked.target)
        checks += self._rollback(used)
        report.pair = PairFacts(
            asked.target.facts(), [draft.facts() for draft in asked.drafts], asked.ngram, differences, found
        )
        self._show(title, "pair", checks)
        report.recommendation = self._obstacle(used)
        if report.recommendation is None:
            self._measure(used, calibrate, rank)

    def _obstacle(self, asked: Asked) -> Recommendation | None:
        """Why nothing can be measured yet; None where it can."""
        machine = self.report.machine
        failed = [check for check in self.report.checks if check.status == "fail" and check.section != "models"]
        if failed:
            names = " and ".join(dict.fromkeys(check.name for check in failed))
            return Recommendation(None, f"It would not work like this: see {names}.")
        if not asked.target.present:
            missing = " ".join(model.spec for model in asked.models if not model.present)
            text = "Nothing speaks against it. What it costs and gains is measured once it is here."
            return Recommendation(None, text, f"localspec pull {missing}")
        if machine.threads > machine.cores:
            # They wait for each other at every barrier: single passes can take minutes.
            text = f"With {machine.threads} threads on {machine.cores} CPUs nothing was measured: it might take hours."
            return Recommendation(None, text, f"localspec doctor {asked.target.spec} --threads {machine.cores}")
        return None

    def _vocabulary(self, asked: Asked, checks: list[Check]) -> dict[str, str | None]:
        differences: dict[str, str | None] = {}
        target = asked.target.header
        for draft in asked.drafts:
            if target is None or draft.header is None:
                continue
            difference = differences[draft.name] = target.vocab.difference(draft.header.vocab)
            if difference is None:
                text = f"{draft.name} has the target's {target.vocab.n_tokens:,} tokens"
                checks.append(Check("pair", "vocabulary", "ok", text))
                continue
            text = f"{draft.name} does not match: {difference}"
            if asked.automatic:
                advice = "only n-grams guess; fetch target and draft from one publisher"
                checks.append(Check("pair", "vocabulary", "note", text, advice))
            else:
                advice = "take a draft of the target's family; doctor --rank finds those on this disk"
                checks.append(Check("pair", "vocabulary", "fail", text, advice))
        for draft in asked.drafts:
            if draft.bytes and draft.bytes > asked.target.bytes > 0:
                checks.append(Check("pair", "draft", "note", f"{draft.name} is larger than its target",
                                    "swap the two: a guess must cost less than what it replaces"))  # fmt: skip
        return differences

    def _context(self, target: Subject) -> list[Check]:
        trained = target.header.n_ctx_train if target.header is not None else 0
        asked = self.options.ctx
        if asked is None or not trained or asked <= trained:
            return []
        return [Check("pair", "context", "note", f"{asked:,} tokens, but it was trained for {trained:,}",
                      f"use --ctx {trained}")]  # fmt: skip

    def _rollback(self, asked: Asked) -> list[Check]:
        known = [model for model in asked.models if model.header is not None]
        replays = [model.name for model in known if model.header is not None and model.header.rollback == "replay"]
        if not known or not (asked.drafts or asked.ngram):
            return []
        if not replays:
            what = "both memories forget" if len(known) > 1 else "its memory forgets"
            return [Check("pair", "rollback", "ok", f"{what} a rejected guess at no cost")]
        text = f"the memory of {' and '.join(replays)} cannot forget single tokens: a rejected guess costs another pass"
        return [Check("pair", "rollback", "note", text, "take a model of attention layers only, or --draft none")]

    # -- measuring -----------------------------------------------------------------------------------------------

    def _measure(self, asked: Asked, calibrate: bool, rank: bool) -> None:
        """Load, measure, judge; what goes wrong becomes a row."""
        self.progress.report(f"loading {asked.target.name}", None)
        try:
            if rank:
                self._rank(asked, calibrate)
            else:
                self._costs(asked, calibrate)
        except UsageError:
            raise
        except LocalspecError as error:
            self._rows([Check("pair", "engine", "fail", str(error), "try another --backend, or another file")])

    def _costs(self, asked: Asked, calibrate: bool) -> None:
        report, watch = self.report, Watch(self.progress.report)
        drafts = [draft for draft in asked.drafts if draft.present]
        specs = [*([NGRAM] if asked.ngram else []), *(str(draft.path) for draft in drafts)]
        with self._open(asked.target, specs, watch) as llm:
            if calibrate:
                recalibrate(llm, watch)
            bandwidth = report.machine.bandwidth_gb_per_s
            cost, times = measure_costs(llm, asked.target.name, [draft.name for draft in drafts], bandwidth, watch)
            engine_rows = compare_engines(llm, watch)
            warnings = llm.warnings
        drafters = [(NGRAM, 0.0)] if asked.ngram else []
        drafters += [(draft.name, draft.ms[1]) for draft in cost.drafts]
        payoffs = [payoff.payoff(name, times, step_ms) for name, step_ms in drafters]
        assert report.pair is not None
        report.pair = replace(report.pair, cost=cost, payoff=payoffs)
        checks = cost_checks(cost, bandwidth) + engine_rows
        checks += [Check("cost", "engine", "info", warning) for warning in warnings if not _has_a_row(warning)]
        report.checks += checks
        found = recommend(cost, payoffs, asked.target.spec, _specs(asked.drafts), automatic=asked.automatic)
        report.recommendation = self._with_doubt(found)
        if self.screen is not None:
            self.progress.clear()
            self.screen.cost(cost, checks)
            self.screen.payoff(payoffs)

    def _rank(self, asked: Asked, calibrate: bool) -> None:
        from localspec.commands.doctor import ranking

        report, watch = self.report, Watch(self.progress.report)
        drafts = ranking.matching_drafts(asked.target)
        named = [draft for draft in asked.drafts if draft.present and not asked.automatic]
        drafts = list({str(draft.path.resolve()): draft for draft in [*named, *drafts]}.values())
        with self._open(asked.target, [], watch) as llm:
            if calibrate:
                recalibrate(llm, watch)
            tried, params = ranking.candidates(drafts), self.options.params({})
            report.rank = ranking.rank(llm, tried, params, watch, ranking.SECONDS)
        report.recommendation = self._with_doubt(recommend_ranked(report.rank, asked.target.spec, _specs(drafts)))
        if self.screen is not None:
            self.progress.clear()
            self.screen.ranking(report.rank)

    def _with_doubt(self, found: Recommendation) -> Recommendation:
        """What was timed on a busy machine, or another day, is no firm ground."""
        doubts = [
            check for check in self.report.checks if check.status == "note" and check.name in ("load", "one token")
        ]
        rank = self.report.rank
        nothing_timed = rank is not None and not rank.prompts
        if not doubts or nothing_timed:
            return found
        return replace(found, text=f"{found.text} But this rests on timings that are in doubt (see {doubts[0].name}).")

    def _open(self, target: Subject, specs: Sequence[str], watch: Watch) -> LLM:
        """Load the target with these drafters."""
        from localspec.llm import LLM

        options = self.options
        return LLM(
            target.path,
            specs or None,
            draft_length=options.length(),
            backend=options.backend,
            draft_backend=options.draft_backend,
            n_ctx=options.ctx,
            n_threads=options.threads,
            n_gpu_layers=options.gpu_layers,
            kv_cache_type=options.kv_cache,
            light_draft=options.light_draft,
            remember=False,  # an examination is no conversation to learn from
            prefix_cache_bytes=0,
            idle=False,  # nothing may run beside what is measured
            progress=watch.report,
        )

    # -- showing -------------------------------------------------------------------------------------------------

    def _show(self, title: str, section: str, checks: list[Check]) -> None:
        self.report.checks += checks
        if self.screen is not None:
            self.progress.clear()
            self.screen.section(title, checks)

    def _rows(self, checks: list[Check]) -> None:
        self.report.checks += checks
        if self.screen is not None and checks:
            self.progress.clear()
            self.screen.rows(checks)


def _has_a_row(warning: str) -> bool:
    """Whether a remark from loading says what the header has told already."""
    return "is larger than the target" in warning or warning.startswith("--ctx ")


def _specs(models: Sequence[Subject]) -> dict[str, str]:
    return {model.name: model.spec for model in models}
