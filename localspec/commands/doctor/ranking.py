"""Passes of a loaded pair, measured; and ``doctor --rank``: the drafts on this disk tried against plain decoding by
turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from localspec.backends.base import Context, Model
from localspec.backends.repack import why_copied
from localspec.commands.doctor.facts import CostFacts, CurveFacts, RankedFacts, RankFacts
from localspec.commands.doctor.fit import ExaminedModel, on_disk
from localspec.commands.options import Watch
from localspec.controllers.stopping import Times
from localspec.engine.fit import TIGHT, count
from localspec.engine.loading import ENGINES, compared
from localspec.engine.pair import second_opinion
from localspec.errors import Cancelled, LocalspecError
from localspec.heads import HEAD
from localspec.measuring.passes import WIDTHS
from localspec.measuring.subject import PLAIN, SLICE_TOKENS, Arm, Block, EngineUnderTest, Sample, measure, places
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.sources.base import size_text
from localspec.prompts.questions import Question, in_turns, own_questions
from localspec.report.model import Finding
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.names import NGRAM
from localspec.system.machine import BUSY, read_memory
from localspec.system.process import on_interrupt
from localspec.system.steps import exhaust

if TYPE_CHECKING:
    from localspec.llm import LLM


_FILL, _PASSES = 64, 7
_STALE = 1.35  # ratio of a pass now to the calibrated one from which the calibration is doubted


def measure_costs(
    llm: LLM, target_name: str, draft_names: Sequence[str], bandwidth_gb_per_s: float | None, watch: Watch
) -> tuple[CostFacts, Times]:
    """Costs of passes here, and the target's t(w). Draft models are called ``draft_names`` in order."""
    state, names = llm.run(lambda pair: pair.state), iter(draft_names)
    target = state.target
    with GGUFFile(target.path) as gguf:
        read = bytes_per_token(gguf)
    on_cpu = target.capabilities.device == "cpu"
    facts = CostFacts(
        engine=target.engine,
        device=target.capabilities.device,
        target=_curve(target_name, target, state.times),
        drafts=[
            _curve(next(names) if each.drafter.info.is_draft_model else each.name, each.model, each.times)
            for each in state.models
        ],
        now_ms=round(watch.call(llm, lambda pair: single_pass_ms(target, pair.context, watch)), 4),
        bytes_per_token=read,
        bound_ms=round(read / (bandwidth_gb_per_s * 1e6), 4) if bandwidth_gb_per_s and on_cpu else None,
        why_chains=llm.run(lambda pair: pair.why_chains),
        provisional=state.times.noisy,
        others_share=state.times.others_share,
    )
    return facts, state.times


def bytes_per_token(gguf: GGUFFile) -> int:
    """Bytes of weights that a pass over one token reads: one row of the token embedding, unless it makes the logits
    too; of experts, those used."""
    used, experts = count(gguf, "expert_used_count"), count(gguf, "expert_count")
    share = used / experts if 0 < used <= experts else 1.0
    looked_up = {"per_layer_token_embd.weight"} | ({"token_embd.weight"} if "output.weight" in gguf.tensors else set())
    total = 0.0
    for tensor in gguf.tensors.values():
        if tensor.name not in looked_up:
            total += tensor.n_bytes * (share if "_exps." in tensor.name else 1.0)
    return round(total)


def _curve(name: str, model: Model, times: Times) -> CurveFacts:
    return CurveFacts(name, model.path.name, {width: round(times(width), 4) for width in WIDTHS})


def single_pass_ms(model: Model, context: Context, watch: Watch) -> float:
    """Median time of a one-token pass now."""
    fill = min(_FILL, context.n_ctx - 1)
    token = model.tokenize("a") or [0]
    context.truncate(0)
    context.decode((token * fill)[:fill], "none")
    samples = []
    for _ in range(_PASSES):
        watch.check()
        started = time.perf_counter()
        context.decode(token[:1])
        samples.append((time.perf_counter() - started) * 1e3)
        context.truncate(fill)
    context.truncate(0)
    return statistics.median(samples[1:])


def cost_findings(
    llm: LLM, cost: CostFacts, bandwidth_gb_per_s: float | None, watch: Watch, *, busy: bool
) -> Iterator[Finding]:
    """Findings on a loaded pair; ``busy`` says whether others use the CPUs."""
    yield _one_token(cost, bandwidth_gb_per_s)
    yield from _engines(llm, watch, busy)
    branches = f"drafts do not branch: {cost.why_chains}" if cost.why_chains else "drafts may branch"
    yield Finding("info", "branches", branches)
    state = llm.run(lambda pair: pair.state)
    for path, model in {llm.model_path: state.target, **{draft.path: draft.model for draft in state.models}}.items():
        if (types := why_copied(path, model.path)) is not None:
            text = f"{path.name} is run from an 8-bit copy: {model.backend} has a bug with {types} files."
            yield Finding("info", "copy", text)


_AGAIN_QUIETLY = "on an otherwise idle machine: localspec doctor --calibrate"


def _one_token(cost: CostFacts, bandwidth_gb_per_s: float | None) -> Finding:
    calibrated = cost.target.ms[1]
    text = f"t(1) {calibrated:.3g} ms"
    if abs(cost.now_ms / calibrated - 1) > 0.1:
        text += f", just now {cost.now_ms:.3g} ms"
    if cost.bound_ms is not None:
        weights = f"its {size_text(cost.bytes_per_token)} of weights"
        text += f"; reading {weights} at {bandwidth_gb_per_s:.1f} GB/s takes {cost.bound_ms:.3g} ms"
    if cost.provisional:
        others = f", others used {cost.others_share:.0%} of the CPU" if cost.others_share >= BUSY else ""
        text += f": provisional{others}, and measured again in idle time"
    elif 1 / _STALE < cost.now_ms / calibrated < _STALE:
        return Finding("ok", "one token", text)
    else:
        text += f": {'slower' if cost.now_ms > calibrated else 'faster'} than when it was calibrated"
    return Finding("note", "one token", text, _AGAIN_QUIETLY)


def _engines(llm: LLM, watch: Watch, busy: bool) -> Iterator[Finding]:
    """Which engine ``auto`` takes for this file; both are timed if they were not yet, unless others use the CPUs."""
    options = llm.run(lambda pair: pair.options)
    known = compared(llm.model_path, options)
    opinion = llm.run(lambda pair: second_opinion(pair, llm.model_path))
    if opinion.waits and (known is None or not busy):
        watch.report("timing passes of both engines", None)
        watch.call(llm, lambda pair: exhaust(opinion.steps(lambda: False), watch.check))
        known = compared(llm.model_path, options)
    if known is None:
        return
    took = ", ".join(f"{ms / 1e3:.1f} s on {name}" for name, ms in sorted(known.ms.items(), key=lambda each: each[1]))
    text = f"on {known.day} a nominal answer took {took}"
    if known.provisional:
        others = f", while others used {known.others_share:.0%} of the CPU" if known.others_share >= BUSY else ""
        text += f"{others}: nothing is chosen by that, auto keeps {ENGINES[0]} and measures again in idle time"
        yield Finding("note", "engines", text, _AGAIN_QUIETLY)
        return
    taken = ENGINES[1] if known.prefers(ENGINES[1], ENGINES[0]) else ENGINES[0]
    yield Finding("info" if busy else "ok", "engines", f"{text}: auto takes {taken}, and --backend overrides")


SECONDS = 60.0  # time for all candidates with loading; a question begun is finished
MOST_TOKENS, LEAST_TOKENS = 64, 32
"""Answer lengths. A draft model waits for some tokens of an answer, so shorter ones say nothing."""

_QUESTIONS_WANTED = 3
_AGAIN = Arm("plain again", None, 0)  # plain decoding is measured twice; the difference is noise


def tuning_questions() -> list[Question]:
    """Single questions, a different kind each time, the shorter ones of a kind first."""
    return in_turns((each for each in own_questions("tuning") if len(each.turns) == 1), short_first=True)


def drafts_on_disk(target: ExaminedModel) -> list[ExaminedModel]:
    """Smaller models on this disk: the catalogue's picks, those with the target's vocabulary, others."""
    vocab = target.vocab
    assert vocab is not None
    picks = target.entry.draft if target.entry is not None else ()
    found = [
        model
        for model in on_disk()
        if model.sizes is not None and model.file.resolve() != target.file.resolve() and model.bytes < target.bytes
    ]

    def place(model: ExaminedModel) -> tuple[int, bool]:
        assert model.vocab is not None
        rank = picks.index(model.name) if model.name in picks else len(picks)
        return rank, vocab.difference(model.vocab, special=False) is not None

    return sorted(found, key=place)


def short_head_names(found: Iterable[str]) -> tuple[str, ...]:
    """Shorter names of heads: the first file is what ``--draft head`` takes."""
    names = list(found)
    first = next((name for name in names if name.startswith(f"{HEAD}:")), None)
    return tuple(HEAD if name == first else name for name in names)


def rank(
    llm: LLM,
    heads: Sequence[str],
    drafts: Sequence[ExaminedModel],
    params: SamplingParams,
    watch: Watch,
    seconds: float,
) -> RankFacts:
    """Answer the same questions plainly, with n-grams, with each head and draft model, and with several of these."""
    started = time.monotonic()
    deadline = started + seconds
    sources = _load(llm, heads, drafts, watch, deadline)
    names = [*heads, *(draft.name for draft in drafts)]
    first = [*heads[:1], *(draft.name for draft in drafts[:1])]
    candidates = [[NGRAM], *([name] for name in names), *([NGRAM, name] for name in first)]
    candidates += [[NGRAM, *first]] if len(first) > 1 else []
    arms = [
        Arm(" + ".join(names), tuple(sources[name] for name in names), "auto")
        for names in candidates
        if all(name in sources for name in names)
    ]
    # Answers take as long drafted as plain, or less; a quarter of the time is for reading the questions.
    n_answers = _QUESTIONS_WANTED * (len(arms) + 2)
    n_tokens = int(0.75 * (deadline - time.monotonic()) / n_answers * llm.plain_tokens_per_second)
    n_tokens = min(MOST_TOKENS, max(LEAST_TOKENS, n_tokens))
    params = replace(params, max_tokens=n_tokens)
    samples: list[Sample] = []
    took = 0.0
    with on_interrupt(watch.stopped.set):
        subject = EngineUnderTest(llm, [_AGAIN, *arms], watch.stopped, in_slices=True)
        try:
            fitting = [each for each in tuning_questions() if subject.n_tokens(each) + n_tokens < llm.n_ctx]
            for i, question in enumerate(fitting):
                began = time.monotonic()
                if began + took > deadline:
                    break
                if not samples:
                    subject.warm_up()
                watch.report(f"trying {len(arms)} candidates on {question.id}", None)
                block = Block(0, i, question, ends_cycle=True)
                samples += measure(block, places([subject], block), params, SLICE_TOKENS)
                took = time.monotonic() - began
        except Cancelled:
            watch.check()
        finally:
            subject.restore()
    return _facts(samples, candidates, time.monotonic() - started, n_tokens)


def _load(
    llm: LLM, heads: Sequence[str], drafts: Sequence[ExaminedModel], watch: Watch, deadline: float
) -> dict[str, str]:
    """Load heads and draft models while there is time and memory; names of working ones -> source."""
    wanted = [(name, name, 0) for name in heads] + [(draft.name, draft.for_draft, draft.bytes) for draft in drafts]
    loaded: dict[str, str] = {}
    for name, spec, n_bytes in wanted:
        if time.monotonic() > deadline or n_bytes > TIGHT * read_memory().available:
            break
        specs = [NGRAM, *loaded.values(), spec]
        try:
            watch.call(llm, lambda pair, specs=specs: pair.set_draft(specs, watch.report))  # type: ignore[misc]
        except LocalspecError:
            continue  # this engine cannot run it
        loaded[name] = spec
    models = llm.run(lambda pair: pair.state.models)
    return {NGRAM: NGRAM} | {name: model.source for name, model in zip(loaded, models, strict=True)}


def _facts(samples: Sequence[Sample], candidates: Sequence[list[str]], seconds: float, n_tokens: int) -> RankFacts:
    answers: dict[str, dict[str, Sample]] = {}
    for sample in samples:
        answers.setdefault(sample.arm, {})[sample.question] = sample
    again = answers.get(_AGAIN.name, {})
    plain = {name: [each.speed, again[name].speed] for name, each in answers.get(PLAIN.name, {}).items()}
    usual = round(statistics.median(map(statistics.fmean, plain.values())), 2) if plain else None
    rows = [RankedFacts([], len(plain), 1.0 if plain else None, None, None, usual, None)]
    for names in candidates:
        own = answers.get(" + ".join(names), {})
        if not own or usual is None:
            rows.append(RankedFacts(names, 0, None, None, None, None, None))
            continue
        ratios = [each.speed / statistics.fmean(plain[name]) for name, each in own.items()]
        speedup, drafted = statistics.geometric_mean(ratios), sum(each.num_draft_tokens for each in own.values())
        accepted = sum(each.num_accepted_tokens for each in own.values())
        rows.append(
            RankedFacts(
                drafters=names,
                n_prompts=len(ratios),
                speedup=round(speedup, 4),
                lowest=round(min(ratios), 4),
                highest=round(max(ratios), 4),
                tokens_per_second=round(usual * speedup, 2),
                acceptance_rate=round(accepted / drafted, 4) if drafted else None,
            )
        )
    rows.sort(key=lambda row: -(row.speedup or 0.0))
    # Relative standard deviation of plain speed on one question, pooled over questions.
    squares = [(statistics.stdev(speeds) / statistics.fmean(speeds)) ** 2 for speeds in plain.values()]
    noise = round(math.sqrt(statistics.fmean(squares)), 4) if squares else None
    return RankFacts(round(seconds, 1), n_tokens, list(plain), noise, rows)
