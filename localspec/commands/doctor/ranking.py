"""``doctor --rank``: the drafts that are on this disk, tried on the same few questions as plain decoding, in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from localspec.commands.doctor.costs import Watch
from localspec.commands.doctor.facts import RankedFacts, RankFacts
from localspec.commands.doctor.fit import TIGHT
from localspec.commands.doctor.models import ExaminedModel, on_disk
from localspec.errors import Cancelled, LocalspecError
from localspec.measuring.answer import Sample
from localspec.measuring.arms import PLAIN, Arm
from localspec.measuring.questions import Question, in_turns, own_questions
from localspec.measuring.schedule import Block
from localspec.measuring.subject import EngineUnderTest
from localspec.measuring.turns import SLICE_TOKENS, measure, places
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.names import HEAD, NGRAM
from localspec.system.interrupts import on_interrupt
from localspec.system.memory import read_memory

if TYPE_CHECKING:
    from localspec.llm import LLM

SECONDS = 60.0
"""How long all candidates together should take, loading included; one question that was begun is finished."""

MOST_TOKENS, LEAST_TOKENS = 64, 32
"""Longest answers. A draft model is not asked before an answer has some tokens, so shorter ones would say nothing."""

_QUESTIONS_WANTED = 3

_AGAIN = Arm("plain again", None, 0)
"""Plain decoding is measured twice: what differs between the two is noise."""


def tuning_questions() -> list[Question]:
    """Single questions, a different kind each time, the shorter ones of a kind first."""
    return in_turns((each for each in own_questions("tuning") if len(each.turns) == 1), short_first=True)


def matching_drafts(target: ExaminedModel) -> list[ExaminedModel]:
    """Models on this disk that have the target's vocabulary and are smaller; the catalogue's picks first."""
    assert target.sizes is not None
    picks = target.entry.draft if target.entry is not None else ()
    found = [
        model
        for model in on_disk()
        if model.sizes is not None
        and model.file.resolve() != target.file.resolve()
        and model.bytes < target.bytes
        and target.sizes.vocab.difference(model.sizes.vocab) is None
    ]
    return sorted(found, key=lambda model: picks.index(model.name) if model.name in picks else len(picks))


def called(at_hand: Iterable[str]) -> tuple[str, ...]:
    """Heads as ``at_hand`` finds them, by shorter names: the first file is what ``--draft head`` takes."""
    names = list(at_hand)
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
    """Answer the same questions plainly, with n-grams, with each head and draft model, and with several of these.

    Args:
        llm: the target with n-grams; left with what was tried.
        heads: what ``--draft`` calls heads and early exits.
        drafts: the draft models.
        params: how to sample; ``max_tokens`` is chosen here.
        watch: progress and interruption.
        seconds: for everything.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    started = time.monotonic()
    deadline = started + seconds
    sources = _load(llm, heads, drafts, watch, deadline)
    names = [*heads, *(draft.name for draft in drafts)]
    first = [*heads[:1], *(draft.name for draft in drafts[:1])]
    candidates = [[NGRAM], *([name] for name in names), *([NGRAM, name] for name in first)]
    candidates += [[NGRAM, *first]] if len(first) > 1 else []
    arms = [
        Arm(_called(names), tuple(sources[name] for name in names), "auto")
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
    with on_interrupt(watch.stop):
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
                samples += measure(block, places([subject], block), params, SLICE_TOKENS if subject.in_slices else 0)
                took = time.monotonic() - began
        except Cancelled:
            watch.check()
        finally:
            subject.restore()
    return _facts(samples, candidates, time.monotonic() - started, n_tokens)


def _load(
    llm: LLM, heads: Sequence[str], drafts: Sequence[ExaminedModel], watch: Watch, deadline: float
) -> dict[str, str]:
    """Load heads and draft models side by side, while there is time and memory; names of those that work -> source."""
    wanted = [(name, name, 0) for name in heads] + [(draft.name, draft.path, draft.bytes) for draft in drafts]
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
        own = answers.get(_called(names), {})
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
    return RankFacts(round(seconds, 1), n_tokens, list(plain), _noise(list(plain.values())), rows)


def _called(names: Sequence[str]) -> str:
    """The name of an arm."""
    return " + ".join(names)


def _noise(plain: Sequence[Sequence[float]]) -> float | None:
    """Relative standard deviation of the speed of plain decoding of the same question, pooled over questions."""
    squares = [(statistics.stdev(speeds) / statistics.fmean(speeds)) ** 2 for speeds in plain]
    return round(math.sqrt(statistics.fmean(squares)), 4) if squares else None
