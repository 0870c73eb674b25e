"""``localspec doctor``: looks, measures, and says what to do."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from localspec._version import __version__
from localspec.backends import backend_names
from localspec.backends.llama.ggml import NATIVE_COMMAND
from localspec.commands.doctor import facts, fit, ranking
from localspec.commands.doctor.facts import (
    CostFacts,
    EngineFacts,
    Examination,
    FitFacts,
    PairFacts,
    PayoffFacts,
    RankFacts,
    Recommendation,
)
from localspec.commands.doctor.fit import ExaminedModel
from localspec.commands.options import RunOptions, Watch, called, joined
from localspec.engine.draft_sources import is_free
from localspec.engine.fit import layers_for
from localspec.engine.loading import compiled_offer, forget
from localspec.engine.state import DraftModel
from localspec.errors import EngineError, LocalspecError, ModelFileError, UsageError
from localspec.heads import FROM_STATES, HEAD, MTP
from localspec.heads.kinds import names_published_head
from localspec.heads.published import computes_mtp
from localspec.heads.sources import FILE_HEADS, found_heads, head_files
from localspec.measuring.last_bench import last_bench
from localspec.measuring.passes import break_even_table, pass_table
from localspec.model_files.catalog import Catalog, short_name
from localspec.model_files.sources.base import size_text
from localspec.report.model import Finding, Findings, Part, Table, Text
from localspec.report.renderers import Screen
from localspec.spec_decode.drafters.names import CORPUS, NGRAM, PARD, is_corpus
from localspec.system import machine
from localspec.system.files import is_same_file
from localspec.system.machine import BUSY
from localspec.system.terminal import Progress

if TYPE_CHECKING:
    from localspec.llm import LLM


# The recommendation: speculate, with what, or not at all.

EASY = 0.55  # acceptance rate of a small draft model of the target's family, greedy, on free chat
TYPICAL, HIGH = 0.7, 0.9
"""Acceptance rates for which a speed-up is named: where drafting pays nearly everywhere, and on easy text only."""

_LEAST_NOISE = 0.03  # noise between two equal answers by turns (``SLICE_TOKENS``); few prompts may show less by chance
_LEAST_MARGIN = 0.02  # smaller gains are called none


_DOUBTS = ("load", "one token", "heat")  # findings that make timings doubtful
_SAID_OF_PAIRS = re.compile(r"^--ctx |is larger than the target| cannot draft for ")  # warnings that repeat findings


def doubtful(found: Examination) -> list[str]:
    return [each.name for each in found.checks if each.status == "note" and each.name in _DOUBTS]


def recommend(
    cost: CostFacts, payoffs: list[PayoffFacts], target: str, drafts: Mapping[str, str], *, automatic: bool = False
) -> Recommendation:
    """Recommendation by the speed-up formula from measured passes; ``target`` and ``drafts`` (by drafter) name them on
    a command line, ``automatic`` says that these drafters are taken where none is named."""
    chat = f"localspec chat {target}"
    if not payoffs:
        return Recommendation(None, "No drafter was asked about; guesses from the text itself need no model.",
                              f"{chat} --draft ngram")  # fmt: skip
    paying = [found for found in payoffs if found.pays]
    if not paying:
        best = min(payoffs, key=lambda found: found.least)
        return Recommendation(False, f"Do not speculate here: {_why_not(best, cost)}.", f"{chat} --draft none")
    chosen = _draft_options([found.drafter for found in paying], drafts)
    if automatic and len(paying) == len(payoffs):
        chosen = ""
    return Recommendation(True, " ".join(_sentence(found, cost) for found in payoffs), chat + chosen)


def _sentence(found: PayoffFacts, cost: CostFacts) -> str:
    need = found.least
    if not found.pays:
        return f"Do not draft with {found.drafter} here: {_why_not(found, cost)}."
    if found.drafter == NGRAM:
        return f"N-grams pay from {need:.0%} acceptance: where a text repeats itself or its prompt."
    if is_corpus(found.drafter):
        return f"Copies from {found.drafter} pay from {need:.0%} acceptance: where a text is like that one."
    share = TYPICAL if need <= EASY else HIGH
    gain = f"if {share:.0%} of the guesses are right, expect ×{found.speedup[share]:.2f}"
    if need <= EASY:
        return f"Speculate with {found.drafter}: it pays from {need:.0%} acceptance; {gain}."
    return (
        f"Speculate with {found.drafter} on code, editing and extraction: it pays from {need:.0%} acceptance, "
        f"which free chat seldom reaches; {gain}."
    )


def _why_not(found: PayoffFacts, cost: CostFacts) -> str:
    times = cost.target.ms
    price = f"a pass over 2 tokens takes {times[2] / times[1]:.2f} times as long as one over 1"
    if found.step_ms:
        price += f", and a guess {found.step_ms / times[1]:.2f} times"
    if math.isinf(found.least):
        return f"even guesses that are always right cost more than they save ({price})"
    return f"{found.least:.0%} of the guesses would have to be right ({price})"


def recommend_ranked(rank: RankFacts, target: str, drafts: Mapping[str, str]) -> Recommendation:
    """Recommendation by measured speed-ups; arguments as in ``recommend``."""
    chat = f"localspec chat {target}"
    measured = [each for each in rank.candidates if each.speedup is not None and each.drafters]
    if not measured:
        return Recommendation(
            None,
            "Nothing could be measured: no time, or no room in the context. Without --rank, doctor judges by costs.",
        )
    best = measured[0]
    # A ratio has √2 times the noise of an answer, a mean over n prompts 1/√n of that; at about two standard errors.
    noise = 2 * max(_LEAST_NOISE, rank.noise or 0.0) * (2 / max(1, len(rank.prompts))) ** 0.5
    top, margin = best.speedup or 0.0, max(_LEAST_MARGIN, noise)
    name = " + ".join(best.drafters)
    if top < 1 + _LEAST_MARGIN:
        text = f"Do not speculate here: nothing was faster than plain decoding; the best, {name}, reached ×{top:.2f}."
        return Recommendation(False, text, f"{chat} --draft none")
    if top < 1 + margin:
        text = (
            f"Inconclusive: the best, {name}, reached ×{top:.2f}, within the ±{margin:.0%} noise of this measurement. "
            "--draft auto drafts only while it pays off."
        )
        return Recommendation(None, text, chat)
    close = [" + ".join(each.drafters) for each in measured[1:] if (each.speedup or 0.0) > top - margin]
    text = f"{name} was the fastest, ×{top:.2f} of plain"
    text += f"; {' and '.join(close)} cannot be told apart from it." if close else "."
    return Recommendation(True, text, chat + _draft_options(best.drafters, drafts))


def _draft_options(drafters: Sequence[str], specs: Mapping[str, str]) -> str:
    """Options that draft with these and no others."""
    named = "".join(f" --draft {specs.get(drafter, drafter)}" for drafter in drafters)
    return named if any(map(is_free, drafters)) else f"{named} --draft-only"


# The findings as parts of a report.

_KINDS = ("edit", "code", "chat")  # kinds of question whose speed-up is shown


def pages(found: Examination, details: Sequence[Part] | None) -> Iterator[Part]:
    """The answer in three lines, then what is not as it should be, or ``details``."""
    pair, advice = found.pair, found.recommendation
    if pair is not None:
        faster = [_faster(pair)] if pair.target.present else []
        yield Findings(pair.target.name, [_fits(found, pair.fit), _guesses(found, pair), *faster])
    elif advice is not None:
        yield Findings("", [Finding("info", "model", advice.text)])
    if details is not None:
        yield from details
        return
    if found.rank is not None:
        yield from ranking_parts(found.rank)
    odd = [check for check in found.checks if check.status in ("fail", "note") or check.name == "copy"]
    if odd:
        yield Findings("To know", odd)
    if advice is not None and advice.command is not None:
        yield Text(advice.command, "strong")
    yield Text("localspec doctor --details shows everything that was looked at and measured", "muted")


def _fits(found: Examination, fit: FitFacts) -> Finding:
    need, free = size_text(fit.ram_needed_bytes), size_text(fit.ram_available_bytes)
    ram, gpu = "", ""
    if fit.gpu_needed_bytes is not None:
        ram, gpu = " of RAM", f", and {size_text(fit.gpu_needed_bytes)} on the GPU"
    text = f"it needs {need}{ram} of the {free} that are free, with {fit.n_ctx:,} tokens of context{gpu}"
    if fit.fits is None:
        return Finding("info", "fits", f"known once the file is here; at least {need}, and {free} are free")
    if not fit.fits:
        return Finding("fail", "fits", f"no: {text}")
    if broken := [check.name for check in found.checks if check.status == "fail" and check.section == "pair"]:
        return Finding("fail", "fits", f"it fits, but see {' and '.join(broken)}")
    return Finding("ok", "fits", f"yes: {text}")


def _guesses(found: Examination, pair: PairFacts) -> Finding:
    advice = found.recommendation
    if advice is None or (pair.cost is None and found.rank is None):
        return Finding("info", "guesses", "not known" if advice is None else advice.text)
    if doubts := doubtful(found):
        text = f"not known: what was timed is in doubt, see {doubts[0]}; --draft auto guesses only while it pays"
        return Finding("note", "guesses", text)
    if found.rank is not None or not pair.payoff:
        return Finding("ok" if advice.speculate else "info", "guesses", advice.text)
    useful = [called(each.drafter) for each in pair.payoff if each.pays]
    useless = [called(each.drafter) for each in pair.payoff if not each.pays]
    if not useful:
        return Finding("info", "guesses", f"no: {advice.text.removeprefix('Do not speculate here: ')}")
    text = f"yes, by {joined(useful)}"
    return Finding("ok", "guesses", text + (f"; not by {joined(useless)}" if useless else ""))


def _faster(pair: PairFacts) -> Finding:
    """Measured speed-up of answers."""
    bench, target = pair.bench, pair.target
    if bench is None:
        entry = Catalog.load().get(target.name)
        model = target.name if entry is not None and str(entry.path) == target.path else target.path
        return Finding("info", "faster", f"not measured yet; localspec bench {shlex.quote(model)} measures it")
    run = f"localspec bench, {bench.day}, {bench.n_questions} questions"
    if not bench.n_guesses:
        return Finding("info", "faster", f"no: nothing was guessed ({run})")
    gains = [f"{kind} ×{bench.speedups[kind]:.2f}" for kind in _KINDS if kind in bench.speedups]
    missing = ", ".join(kind for kind in _KINDS if kind not in bench.speedups)
    text = ", ".join(gains) + (f"; not measured: {missing}" if missing else "")
    if not gains:
        text = f"×{bench.speedups['all']:.2f} over all"
    return Finding("info", "faster", f"{text} ({run})")


def cost_parts(cost: CostFacts, findings: Sequence[Finding]) -> Iterator[Part]:
    """t(w), and the price of a draft token."""
    times, where = cost.target.ms, f" · {cost.engine}, {cost.device}"
    yield pass_table(where, list(times), {"ms": list(times.values())})
    guesses = []
    for draft in cost.drafts:
        price = f"{draft.ms[1]:.3g} ms = {draft.ms[1] / times[1]:.2f} of a target token"
        text = f"{price}, by {short_name(draft.name)} ({draft.file})"
        guesses.append(Finding("info", "a guess", text))
    yield Findings("", [*findings, *guesses])


def payoff_parts(payoffs: Sequence[PayoffFacts]) -> Iterator[Part]:
    if not payoffs:
        return
    names = [short_name(found.drafter) for found in payoffs]
    yield break_even_table({n: (found.step_ms, found.break_even) for n, found in zip(names, payoffs, strict=True)})
    rows = []
    for name, found in zip(names, payoffs, strict=True):
        gains = found.speedup.items()
        rows.append([name, *(f"×{gain:.2f}" if found.best_length[a] else "plain" for a, gain in gains)])
        rows.append(["  with k =", *(str(k or "") for k in found.best_length.values())])
    yield Table(
        "Predicted speed-up, by the share of guesses that are right",
        ["right", *(f"{share:.0%}" for share in payoffs[0].speedup)],
        rows,
        note="n-grams: at the places where they have a guess; elsewhere it is plain decoding" if NGRAM in names else "",
    )


def ranking_parts(rank: RankFacts) -> Iterator[Part]:
    """Candidates, the fastest first."""
    rows = []
    for each in rank.candidates:
        name = " + ".join(map(short_name, each.drafters)) or "plain"
        if each.speedup is None:
            rows.append([name, "not reached", "", "", ""])
            continue
        spread = "" if each.lowest is None else f"{each.lowest:.2f}–{each.highest:.2f}"
        rate = "no guesses" if each.acceptance_rate is None else f"{each.acceptance_rate:.0%}"
        rows.append([name, f"×{each.speedup:.2f}", spread, f"{each.tokens_per_second:.1f}", rate if spread else ""])
    head, n = ["", "speed", "extremes", "tok/s", "accepted"], len(rank.prompts)
    note = (
        f"{n} prompt{'s' * (n != 1)}, up to {rank.max_tokens} tokens each, {rank.seconds:.0f} s in all; × is speed "
        "over plain on the same prompt, the geometric mean and the extremes"
    )
    yield Table("Ranking: measured against plain decoding of the same prompts", head, rows, note if n else "")
    if rank.noise is not None:
        yield Text(f"plain itself varied by {rank.noise:.1%} from run to run of the same prompt", "muted")


@dataclass(frozen=True, slots=True)
class ExaminedPair:
    """Models that a command line asks about; ``free`` and ``heads`` are names for ``--draft``."""

    target: ExaminedModel
    drafts: Sequence[ExaminedModel]
    automatic: bool
    free: Sequence[str]  # drafters that run no model
    heads: Sequence[str] = ()

    @property
    def models(self) -> list[ExaminedModel]:
        return [self.target, *self.drafts]


def doctor_command(
    options: RunOptions, *, as_json: bool = False, calibrate: bool = False, rank: bool = False, details: bool = False
) -> int:
    """Examine machine and pair (the default one, if it is on this disk) and print what was found; returns 1 if
    something would not work. At Ctrl-C what was stored stays valid."""
    options.set_up_logging()
    page = Screen()
    with Progress() as progress:
        doctor = Doctor(options, progress)
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
        for part in pages(found, doctor.parts if details else None):
            page.show(part)
    return 0 if found.holds else 1


class Doctor:
    """One examination; ``parts`` is everything found, for people."""

    def __init__(self, options: RunOptions, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.parts: list[Part] = []
        self.watch = Watch(progress.report)

    def examine(self, calibrate: bool, rank: bool) -> Examination:
        """Examine everything, in the order of ``--details``."""
        options = self.options
        examined = self._examined()
        self.progress.report("measuring the memory's bandwidth", None)
        throttle = machine.throttle_count()
        found = self.found = Examination(__version__, facts.look_at_machine(options.load.n_threads))
        self._find("Machine", "machine", facts.machine_findings(found.machine))
        found.engines = [facts.look_at_engine(name) for name in backend_names()]
        here, wanted = found.machine, options.load.backend
        rows = list(facts.engine_findings(found.engines, here.gpus, wanted, here.features))
        engine: EngineFacts | None = None
        try:
            engine = facts.preferred_engine(found.engines, options.load)
        except EngineError as error:
            if all(row.status != "fail" for row in rows):
                rows.append(Finding("fail", "GPU", str(error), "leave --gpu-layers out to use the CPU"))
        self._find("Engines", "engines", rows)
        on_disk = fit.on_disk()
        found.models = [model.facts() for model in on_disk]
        self._find("Models", "models", fit.model_findings(on_disk))
        if examined is None:
            pair = Catalog.load().default_pair()
            names = " with ".join(each.name for each in pair)
            size = size_text(sum(each.bytes for each in pair if not each.present))
            text = f"The default model is not on this disk: {names} ({size}). Fetch it, then run doctor again."
            found.recommendation = Recommendation(None, text, "localspec pull")
        else:
            if examined.automatic and examined.target.present and engine is not None:
                file = examined.target.file
                heads = found_heads(file, engine.name, mtp=computes_mtp(file, engine.name))
                examined = replace(examined, heads=ranking.short_head_names(heads))
            self._examine_pair(examined, engine)
            found.recommendation = self._obstacle(examined) or self._measure(examined, calibrate, rank)
        slowed = machine.throttled(throttle, machine.throttle_count())
        found.machine = replace(found.machine, throttled=slowed)
        if slowed:
            self._find("", "machine", [facts.HEAT])
        if (advice := found.recommendation) is not None:
            self.parts.append(Text(advice.text, title="Recommendation"))
            self.parts += [Text(advice.command, "strong")] if advice.command is not None else []
        return found

    def _examined(self) -> ExaminedPair | None:
        catalog, options = Catalog.load(), self.options
        default = catalog.default_pair()[0]
        if options.model is None and not options.draft and not default.present:
            return None
        target = fit.find_model(default.name if options.model is None else options.model)
        names = options.drafters()
        if "auto" in names:
            found = catalog.draft_for(target.file)
            known = target.entry.draft[:1] if target.entry is not None else ()
            drafts = [fit.of_path(found)] if found is not None else list(map(fit.find_model, known))
            return ExaminedPair(target, drafts, True, [NGRAM, *options.corpora()])
        names = [f"{HEAD}:{path}" if (path := _published(name)) is not None else name for name in names]
        heads = [name for name in names if name.partition(":")[0] in FROM_STATES]
        free = [name for name in names if is_free(name) or is_corpus(name)]
        named: list[ExaminedModel] = []
        for each in (fit.find_draft(name) for name in names if name not in (*free, *heads)):
            if not any(is_same_file(each.file, other.file) for other in named):
                named.append(each)
        return ExaminedPair(target, named, False, free, heads)

    def _examine_pair(self, examined: ExaminedPair, engine: EngineFacts | None) -> None:
        """Everything known of the pair before it is loaded."""
        options, here = self.options, self.found.machine
        target, drafts = examined.target, examined.drafts
        rows = [fit.broken("file", model) for model in examined.models if model.error is not None]
        rows += [fit.missing(model) for model in examined.models if model.error is None and not model.present]
        differences = {
            draft.name: target.vocab.difference(draft.vocab, special=False)
            for draft in drafts
            if target.vocab is not None and draft.vocab is not None
        }
        rows += _vocabulary(examined, differences)
        usable = [draft for draft in drafts if draft.error is None]
        if examined.automatic:
            usable = [draft for draft in usable if differences.get(draft.name) is None]
        layers = options.load.n_gpu_layers
        backend = engine.name if engine is not None and target.present and target.error is None else None
        if backend == "llama-cpp" and layers is None and not options.load.placement:
            layers = layers_for(target.file, ["auto"] if examined.automatic else [], options.load, 1)
        total = here.memory_limit_bytes or here.memory_total_bytes
        room = fit.Room(engine, layers, here.memory_available_bytes, total)
        loaded = [target, *usable]
        heads = [target.file] * (MTP in examined.heads)
        for kind, _, name in (head.partition(":") for head in examined.heads):
            if kind == HEAD and engine is not None:
                heads += [Path(name).expanduser()] if name else islice(head_files(target.file, engine.name), 1)
        n_ctx, about = fit.chosen_context(target, usable, heads, options.load, room)
        on_cpu: int | None = None
        if backend is not None and options.load.placement:
            spread, on_cpu = fit.spread(target, options.load, backend, n_ctx)
            rows += spread
        fitted = fit.fit(loaded, n_ctx, options.load.kv_cache_type, room, on_cpu)
        rows += fit.fit_findings(loaded, fitted, room)
        rows += [about] if about is not None else []
        trained = target.n_ctx_train
        if options.load.n_ctx is not None and trained and options.load.n_ctx > trained:
            text = f"{options.load.n_ctx:,} tokens, but it was trained for {trained:,}"
            rows.append(Finding("note", "context", text, f"use --ctx {trained}"))
        if usable or examined.free or examined.heads:
            rows += _rollback(loaded)
        known = [model.facts() for model in examined.models]
        self.found.pair = PairFacts(known[0], known[1:], NGRAM in examined.free, differences, fitted)
        names = [target.name, *examined.free, *examined.heads, *(draft.name for draft in drafts)]
        self._find(" + ".join(names), "pair", rows)

    def _obstacle(self, examined: ExaminedPair) -> Recommendation | None:
        """Why nothing can be measured yet."""
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

    def _measure(self, examined: ExaminedPair, calibrate: bool, rank: bool) -> Recommendation | None:
        """Load, measure, judge; an error becomes a finding."""
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
        drafts = [draft for draft in examined.drafts if draft.present]
        specs = [*examined.free, *examined.heads, *(draft.for_draft for draft in drafts)]
        if examined.automatic:
            specs = ["auto", *self.options.corpora()]  # which goes on without what cannot be loaded
        bandwidth, busy = found.machine.bandwidth_gb_per_s, found.machine.busy_share >= BUSY
        if calibrate:
            forget(examined.target.file, self.options.load)
        with self._open(examined.target, specs) as llm:
            if calibrate:
                watch.call(llm, lambda pair: pair.recalibrate(watch.report))
            names = [draft.name for draft in drafts]
            cost, times = ranking.measure_costs(llm, examined.target.name, names, bandwidth, watch)
            loaded = llm.run(lambda pair: pair.state.models)
            passes = zip(cost.drafts, loaded, strict=True)
            blocks = {draft.name: partial(_draft_ms, each) for draft, each in passes if each.drafter.info.one_pass}
            rows = list(ranking.cost_findings(llm, cost, bandwidth, watch, busy=busy))
            if offer := llm.run(lambda pair: compiled_offer(pair.target, pair.state.times)):
                # What it gains with this file, instead of what it gains on other machines.
                found.checks = [check for check in found.checks if check.advice != NATIVE_COMMAND]
                rows.append(Finding("note", "this CPU", offer, NATIVE_COMMAND))
            warnings = [each for each in llm.warnings if not _SAID_OF_PAIRS.search(each)]
            rows += [Finding("note", "engine", warning) for warning in warnings]
        drafters = [(name, 0.0) for name in examined.free] + [(draft.name, draft.ms[1]) for draft in cost.drafts]
        payoffs = [facts.payoff(name, times, ms, blocks.get(name)) for name, ms in drafters]
        assert found.pair is not None
        bench = last_bench(examined.target.file, cost.engine)
        found.pair = replace(found.pair, cost=cost, payoff=payoffs, bench=bench)
        found.add("cost", rows)
        self.parts += cost_parts(cost, rows)
        self.parts += payoff_parts(payoffs)
        named = {each.name: each.spec for each in loaded if not each.drafter.info.is_draft_model}
        if examined.automatic or HEAD in examined.heads:
            named[HEAD] = HEAD
        named |= {draft.name: draft.spec for draft in drafts}
        advice = recommend(cost, payoffs, examined.target.spec, named, automatic=examined.automatic)
        return self._with_doubt(advice) if payoffs else advice

    def _rank(self, examined: ExaminedPair, calibrate: bool) -> Recommendation:
        watch, target = self.watch, examined.target
        named = [draft for draft in examined.drafts if draft.present and not examined.automatic]
        drafts = list({draft.file.resolve(): draft for draft in [*named, *ranking.drafts_on_disk(target)]}.values())
        with self._open(target, [NGRAM]) as llm:
            if calibrate:
                watch.call(llm, lambda pair: pair.recalibrate(watch.report))
            chosen = () if examined.automatic else examined.heads
            heads = chosen or llm.run(lambda pair: ranking.short_head_names(FILE_HEADS.automatic(pair.target)))
            rank = self.found.rank = ranking.rank(llm, heads, drafts, self.options.params({}), watch, ranking.SECONDS)
        self.parts += ranking_parts(rank)
        advice = recommend_ranked(rank, target.spec, {draft.name: draft.spec for draft in drafts})
        return self._with_doubt(advice) if rank.prompts else advice

    def _with_doubt(self, found: Recommendation) -> Recommendation:
        if doubts := doubtful(self.found):
            return replace(found, text=f"{found.text} But this rests on timings that are in doubt (see {doubts[0]}).")
        return found

    def _open(self, target: ExaminedModel, specs: Sequence[str]) -> LLM:
        options = replace(self.options, model=str(target.path), draft=specs or ["none"])
        return options.for_measuring().open(self.watch.report)

    def _find(self, title: str, section: str, rows: Iterable[Finding]) -> None:
        rows = list(rows)
        self.found.add(section, rows)
        self.parts.append(Findings(title, rows))


def _vocabulary(examined: ExaminedPair, differences: dict[str, str | None]) -> Iterator[Finding]:
    target = examined.target
    vocabs = {draft.name: draft.vocab for draft in examined.drafts if draft.vocab is not None}
    for name, difference in differences.items():
        if difference is None:
            exact = target.vocab is None or target.vocab.difference(vocabs[name]) is None
            but = "" if exact else ", but for special ones, which are mapped by name and meaning"
            yield Finding("ok", "vocabulary", f"{name} has the target's {target.n_vocab:,} tokens{but}")
        elif examined.automatic:
            advice = "only n-grams guess; fetch target and draft from one publisher"
            yield Finding("note", "vocabulary", f"{name} does not match: {difference}", advice)
        else:
            text = f"{name} has another vocabulary, drafts are carried over as text: {difference}"
            yield Finding("note", "vocabulary", text, "doctor --rank compares the drafts on this disk")
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


def _draft_ms(draft: DraftModel, n: int) -> float:
    """The time of a pass that drafts n tokens."""
    return draft.times(n if draft.drafter.info.rows_of_draft else 1)


def _published(name: str) -> Path | None:
    """File of a draft that is a published head, which has no vocabulary or memory to examine."""
    if is_free(name) or name.partition(":")[0] in (*FROM_STATES, CORPUS, PARD):
        return None
    try:
        path = Catalog.load().resolve(name)
    except ModelFileError:
        return None
    return path if names_published_head(path) else None
