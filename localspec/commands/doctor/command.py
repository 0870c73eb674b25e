"""``localspec doctor``: looks, measures, and says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localspec import __version__
from localspec.backends.published_heads import computes_mtp
from localspec.commands.doctor import devices, engines, fit, machine, models, payoff, ranking, screen
from localspec.commands.doctor.advice import doubtful, recommend, recommend_ranked
from localspec.commands.doctor.costs import (
    Watch,
    branches_finding,
    compare_engines,
    copies_findings,
    cost_finding,
    measure_costs,
)
from localspec.commands.doctor.facts import BenchFacts, EngineFacts, Examination, PairFacts, Recommendation
from localspec.commands.doctor.models import ExaminedModel
from localspec.commands.options import RunOptions
from localspec.commands.report.model import Finding, Findings, Part
from localspec.commands.report.terminal import Screen
from localspec.errors import EngineError, LocalspecError, ModelFileError, UsageError
from localspec.measuring.last_bench import last_bench
from localspec.model_files.catalog import Catalog
from localspec.model_files.head_kinds import names_published_head
from localspec.model_files.sources.base import size_text
from localspec.runtime.at_hand import heads_at_hand, heads_of
from localspec.runtime.engine_choice import forget
from localspec.spec_decode.drafters.free import FREE_DRAFTERS
from localspec.spec_decode.drafters.names import CORPUS, FROM_STATES, HEAD, NGRAM, is_corpus
from localspec.system import power
from localspec.system.files import is_same_file
from localspec.system.usage import BUSY
from localspec.terminal.progress import Progress

if TYPE_CHECKING:
    from localspec.llm import LLM


@dataclass(frozen=True, slots=True)
class ExaminedPair:
    """The models that a command line asks about.

    Attributes:
        target: the model that answers.
        drafts: draft models, in the order in which they were named.
        ngram: whether n-grams draft as well.
        automatic: whether the drafts are ``--draft auto``'s.
        heads: what ``--draft`` calls the heads and early exits among them; ``corpora``: the corpora.
    """

    target: ExaminedModel
    drafts: tuple[ExaminedModel, ...]
    ngram: bool
    automatic: bool
    heads: tuple[str, ...] = ()
    corpora: tuple[str, ...] = ()

    @property
    def models(self) -> list[ExaminedModel]:
        return [self.target, *self.drafts]


def doctor_command(
    options: RunOptions, *, as_json: bool = False, calibrate: bool = False, rank: bool = False, details: bool = False
) -> int:
    """Examine the machine and a pair, and print what was found: the answer, then what is wrong, then, if asked, all.

    Args:
        options: the models and how they would run; without a model, the default pair if it is on this disk.
        as_json: print ``Examination.as_dict`` instead of a screen.
        calibrate: measure passes anew, and store what they cost.
        rank: try the drafts on this disk for a minute.
        details: print everything that was found.

    Returns:
        0, or 1 where something would not work.

    Raises:
        UsageError: the options make no sense.
        KeyboardInterrupt: Ctrl-C; what was stored stays valid.
    """
    options.set_up_logging()
    page = Screen()
    with Progress() as progress:
        doctor = Doctor(options, page, progress)
        try:
            found = doctor.examine(calibrate, rank)
        except KeyboardInterrupt:
            progress.clear()
            for part in doctor.parts if not as_json else ():
                page.show(part)
            raise
    if as_json:
        print(json.dumps(found.as_dict(), ensure_ascii=False, indent=2, allow_nan=False))
    else:
        for part in screen.pages(found, doctor.parts if details else None):
            page.show(part)
    return 0 if found.holds else 1


class Doctor:
    """One examination.

    Args:
        options: what was asked.
        page: where the parts will be shown.
        progress: what is being done meanwhile.

    Attributes:
        parts: everything that was found, for people.
    """

    def __init__(self, options: RunOptions, page: Screen, progress: Progress) -> None:
        self.options = options
        self.page = page
        self.progress = progress
        self.parts: list[Part] = []
        self.watch = Watch(progress.report)

    def examine(self, calibrate: bool, rank: bool) -> Examination:
        """Everything, in the order in which ``--details`` shows it."""
        options = self.options
        examined = self._examined()
        self.progress.report("measuring the memory's bandwidth", None)
        throttle = power.throttle_count()
        found = self.found = Examination(__version__, machine.look_at_machine(options.load.n_threads))
        self._find("Machine", "machine", machine.machine_findings(found.machine))
        found.engines = engines.look_at_engines()
        hardware = found.machine
        rows = list(engines.engine_findings(found.engines, hardware.gpus, options.load.backend, hardware.features))
        engine: EngineFacts | None = None
        try:
            engine = engines.preferred_engine(found.engines, options.load)
        except EngineError as error:
            if all(row.status != "fail" for row in rows):
                rows.append(Finding("fail", "GPU", str(error), "leave --gpu-layers out to use the CPU"))
        self._find("Engines", "engines", rows)
        on_disk = models.on_disk()
        found.models = [model.facts() for model in on_disk]
        self._find("Models", "models", models.model_findings(on_disk))
        if examined is None:
            found.recommendation = self._first_steps()
        else:
            if examined.automatic and examined.target.present and engine is not None:
                examined = replace(examined, heads=_heads_at_hand(examined.target, engine.name))
            self._examine_pair(examined, engine)
            found.recommendation = self._obstacle(examined) or self._measure(examined, calibrate, rank)
        slowed = power.throttled(throttle, power.throttle_count())
        found.machine = replace(found.machine, throttled=slowed)
        if slowed:
            self._find("", "machine", [machine.HEAT])
        if found.recommendation is not None:
            self.parts += screen.recommendation_parts(found.recommendation)
        return found

    # -- the models ----------------------------------------------------------------------------------------------

    def _examined(self) -> ExaminedPair | None:
        catalog, options = Catalog.load(), self.options
        default = catalog.default_pair()[0]
        if options.model is None and not options.draft and not default.present:
            return None
        target = models.find_model(default.name if options.model is None else options.model)
        names = options.drafters()
        corpora = tuple(name for name in names if is_corpus(name))
        if "auto" in names:
            found = catalog.draft_for(target.file)
            known = target.entry.draft[:1] if target.entry is not None else ()
            drafts = (models.of_path(found),) if found is not None else tuple(map(models.find_model, known))
            return ExaminedPair(target, drafts, True, True, (), corpora)
        named: list[ExaminedModel] = []
        names = [f"{HEAD}:{path}" if (path := _published(name)) is not None else name for name in names]
        heads = tuple(name for name in names if name.partition(":")[0] in FROM_STATES)
        for each in (models.find_model(name) for name in names if name not in (*FREE_DRAFTERS, *heads, *corpora)):
            if not any(is_same_file(each.file, other.file) for other in named):
                named.append(each)
        return ExaminedPair(target, tuple(named), NGRAM in names, False, heads, corpora)

    def _first_steps(self) -> Recommendation:
        pair = Catalog.load().default_pair()
        size = size_text(sum(entry.bytes for entry in pair if not entry.present))
        names = " with ".join(entry.name for entry in pair)
        text = f"The default model is not on this disk: {names} ({size}). Fetch it, then run doctor again."
        return Recommendation(None, text, "localspec pull")

    # -- the pair ------------------------------------------------------------------------------------------------

    def _examine_pair(self, examined: ExaminedPair, engine: EngineFacts | None) -> None:
        """All that is known of the pair before anything is loaded."""
        options, here = self.options, self.found.machine
        target, drafts = examined.target, examined.drafts
        rows = [models.broken("file", model) for model in examined.models if model.error is not None]
        rows += [models.missing(model) for model in examined.models if model.error is None and not model.present]
        differences = {
            draft.name: target.sizes.vocab.difference(draft.sizes.vocab)
            for draft in drafts
            if target.sizes is not None and draft.sizes is not None
        }
        rows += _vocabulary(examined, differences)
        usable = [draft for draft in drafts if draft.error is None and differences.get(draft.name) is None]
        room = fit.Room(
            engine,
            options.load.n_gpu_layers,
            here.memory_available_bytes,
            here.memory_limit_bytes or here.memory_total_bytes,
        )
        loaded = [target, *usable]
        n_ctx = fit.context_size(options.load.n_ctx, target)
        on_cpu: int | None = None
        if options.load.placement and engine is not None and target.present and target.error is None:
            spread = devices.spread(target, options.load, engine.name, n_ctx)
            rows, on_cpu = [*rows, *spread.rows], spread.on_cpu_bytes
        fitted = fit.fit(loaded, n_ctx, options.load.kv_cache_type, room, on_cpu)
        rows += fit.fit_findings(loaded, fitted, room)
        trained = target.n_ctx_train
        if options.load.n_ctx is not None and trained and options.load.n_ctx > trained:
            text = f"{options.load.n_ctx:,} tokens, but it was trained for {trained:,}"
            rows.append(Finding("note", "context", text, f"use --ctx {trained}"))
        if usable or examined.ngram or examined.heads or examined.corpora:
            rows += _rollback(loaded)
        self.found.pair = PairFacts(
            target.facts(), [draft.facts() for draft in drafts], examined.ngram, differences, fitted
        )
        free = [*([NGRAM] if examined.ngram else []), *examined.corpora]
        names = [target.name, *free, *examined.heads, *(draft.name for draft in drafts)]
        self._find(" + ".join(names), "pair", rows)

    def _obstacle(self, examined: ExaminedPair) -> Recommendation | None:
        """Why nothing can be measured yet; None where it can."""
        here, target = self.found.machine, examined.target
        failed = [check for check in self.found.checks if check.status == "fail" and check.section != "models"]
        if failed:
            names = " and ".join(dict.fromkeys(check.name for check in failed))
            return Recommendation(None, f"It would not work like this: see {names}.")
        if not target.present:
            missing = " ".join(model.spec for model in examined.models if not model.present)
            text = "Nothing speaks against it. What it costs and gains is measured once it is here."
            return Recommendation(None, text, f"localspec pull {missing}")
        if here.threads > here.cores:
            # They wait for each other at every barrier: single passes can take minutes.
            text = f"With {here.threads} threads on {here.cores} CPUs nothing was measured: it might take hours."
            return Recommendation(None, text, f"localspec doctor {target.spec} --threads {here.cores}")
        return None

    # -- measuring -----------------------------------------------------------------------------------------------

    def _measure(self, examined: ExaminedPair, calibrate: bool, rank: bool) -> Recommendation | None:
        """Load, measure, judge; what goes wrong becomes a row."""
        self.progress.report(f"loading {examined.target.name}", None)
        try:
            return (self._rank if rank else self._costs)(examined, calibrate)
        except UsageError:
            raise
        except LocalspecError as error:
            self._find("", "pair", [Finding("fail", "engine", str(error), "try another --backend, or another file")])
            return None

    def _costs(self, examined: ExaminedPair, calibrate: bool) -> Recommendation:
        found, watch = self.found, self.watch
        differences = found.pair.vocabulary if found.pair is not None else {}
        drafts = [draft for draft in examined.drafts if draft.present and differences.get(draft.name) is None]
        free = [*([NGRAM] if examined.ngram else []), *examined.corpora]
        specs = [*free, *examined.heads, *(draft.path for draft in drafts)]
        if examined.automatic:
            specs = ["auto", *examined.corpora]  # which goes on without what cannot be loaded
        bandwidth = found.machine.bandwidth_gb_per_s
        busy = found.machine.busy_share >= BUSY
        if calibrate:
            forget(examined.target.file, self.options.load.n_threads, self.options.load.kv_cache_type)
        with self._open(examined.target, specs) as llm:
            if calibrate:
                watch.call(llm, lambda pair: pair.recalibrate(watch.report))
            cost, times = measure_costs(llm, examined.target.name, [draft.name for draft in drafts], bandwidth, watch)
            loaded = llm.run(lambda pair: pair.state.models)
            one_pass = {each.name for each in loaded if each.drafter.one_pass}
            rows = [cost_finding(cost, bandwidth), *compare_engines(llm, watch, busy=busy), branches_finding(cost)]
            rows += copies_findings(llm)
            rows += [Finding("note", "engine", warning) for warning in llm.warnings if not _is_shown(warning)]
        drafters = [(name, 0.0) for name in free]
        drafters += [(draft.name, draft.ms[1]) for draft in cost.drafts]
        payoffs = [payoff.payoff(name, times, ms, one_pass=name in one_pass) for name, ms in drafters]
        assert found.pair is not None
        bench = last_bench(examined.target.file, cost.engine)
        found.pair = replace(
            found.pair, cost=cost, payoff=payoffs, bench=None if bench is None else BenchFacts(**asdict(bench))
        )
        found.add("cost", rows)
        self.parts += screen.cost_parts(cost, rows, self.page.width, self.page.unicode)
        self.parts += screen.payoff_parts(payoffs)
        names = {each.name: each.spec for each in loaded if not each.drafter.reads_text}
        if examined.automatic or HEAD in examined.heads:
            names[HEAD] = HEAD
        names |= {draft.name: draft.spec for draft in drafts}
        advice = recommend(cost, payoffs, examined.target.spec, names, automatic=examined.automatic)
        return self._with_doubt(advice) if payoffs else advice

    def _rank(self, examined: ExaminedPair, calibrate: bool) -> Recommendation:
        watch, target = self.watch, examined.target
        named = [draft for draft in examined.drafts if draft.present and not examined.automatic]
        drafts = list({draft.file.resolve(): draft for draft in [*named, *ranking.matching_drafts(target)]}.values())
        with self._open(target, [NGRAM]) as llm:
            if calibrate:
                watch.call(llm, lambda pair: pair.recalibrate(watch.report))
            chosen = () if examined.automatic else examined.heads
            heads = chosen or llm.run(lambda pair: ranking.called(heads_of(pair.target)))
            rank = self.found.rank = ranking.rank(llm, heads, drafts, self.options.params({}), watch, ranking.SECONDS)
        self.parts += screen.ranking_parts(rank)
        advice = recommend_ranked(rank, target.spec, {draft.name: draft.spec for draft in drafts})
        return self._with_doubt(advice) if rank.prompts else advice

    def _with_doubt(self, found: Recommendation) -> Recommendation:
        """What was timed on a busy machine, or another day, is no firm ground."""
        doubts = doubtful(self.found)
        if not doubts:
            return found
        return replace(found, text=f"{found.text} But this rests on timings that are in doubt (see {doubts[0]}).")

    def _open(self, target: ExaminedModel, specs: Sequence[str]) -> LLM:
        """Load the target with these drafters."""
        options = replace(self.options, model=str(target.path), draft=specs or ["none"])
        return options.for_measuring().open(self.watch.report)

    def _find(self, title: str, section: str, rows: Iterable[Finding]) -> None:
        """Note findings."""
        rows = list(rows)
        self.found.add(section, rows)
        self.parts.append(Findings(title, rows))


def _vocabulary(examined: ExaminedPair, differences: dict[str, str | None]) -> Iterator[Finding]:
    target = examined.target
    for name, difference in differences.items():
        if difference is None:
            yield Finding("ok", "vocabulary", f"{name} has the target's {target.n_vocab:,} tokens")
        elif examined.automatic:
            advice = "only n-grams guess; fetch target and draft from one publisher"
            yield Finding("note", "vocabulary", f"{name} does not match: {difference}", advice)
        else:
            advice = "take a draft of the target's family; doctor --rank finds those on this disk"
            yield Finding("fail", "vocabulary", f"{name} does not match: {difference}", advice)
    for draft in examined.drafts:
        if draft.bytes and draft.bytes > target.bytes > 0:
            text = f"{draft.name} is larger than its target"
            yield Finding("note", "draft", text, "swap the two: a guess must cost less than what it replaces")


def _rollback(models: Sequence[ExaminedModel]) -> Iterator[Finding]:
    known = [model for model in models if model.sizes is not None]
    replays = [model.name for model in known if model.rollback == "replay"]
    if replays:
        text = (
            f"the memory of {' and '.join(replays)} cannot forget single tokens: a rejected guess costs another pass, "
            "but where llama-cpp keeps snapshots of the states after the last tokens"
        )
        yield Finding("note", "rollback", text, "--backend llama-cpp, or a model of attention layers only")
    elif known:
        what = "both memories forget" if len(known) > 1 else "its memory forgets"
        yield Finding("ok", "rollback", f"{what} a rejected guess at no cost")


def _is_shown(warning: str) -> bool:
    """Whether a warning from loading says what the header has shown already."""
    shown = ("is larger than the target", " cannot draft for ")
    return any(part in warning for part in shown) or warning.startswith("--ctx ")


def _published(name: str) -> Path | None:
    """The file that a draft is where that is a published head, which has no vocabulary or memory to examine."""
    if name in FREE_DRAFTERS or name.partition(":")[0] in (*FROM_STATES, CORPUS):
        return None
    try:
        path = Catalog.load().resolve(name)
    except ModelFileError:
        return None
    return path if names_published_head(path) else None


def _heads_at_hand(target: ExaminedModel, backend: str) -> tuple[str, ...]:
    """What ``auto`` is going to load of heads, as far as files say it before the target is loaded."""
    return ranking.called(heads_at_hand(target.file, backend, mtp=computes_mtp(target.file, backend)))
