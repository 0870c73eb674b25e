"""``doctor --rank``: the drafts that are on this disk, tried on the same few questions, each next to plain decoding."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from localspec.commands.doctor.costs import Watch
from localspec.commands.doctor.facts import RankedFacts, RankFacts
from localspec.commands.doctor.fit import TIGHT
from localspec.commands.doctor.subject import Subject, on_disk
from localspec.commands.questions import Question, in_turns, own_questions
from localspec.errors import LocalspecError
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.names import NGRAM
from localspec.system.interrupts import on_interrupt
from localspec.system.memory import read_memory

if TYPE_CHECKING:
    from localspec.llm import LLM
    from localspec.runtime.pair import Pair
    from localspec.runtime.state import DecodingState
    from localspec.runtime.stream import Reply

SECONDS = 60.0
"""How long all candidates together may take, loading included."""

MOST_TOKENS, LEAST_TOKENS = 64, 32
"""Longest answers. A draft model is not asked before an answer has some tokens, so shorter ones would say nothing."""

_QUESTIONS_WANTED = 3


@dataclass(slots=True)
class Candidate:
    """A way to decode, and what was measured with it.

    Attributes:
        drafters: names of those that take part; none: plain decoding.
        state: their own knowledge of cost and acceptance, so that no candidate learns from another.
        speed: question -> tokens per second, of each answer.
    """

    drafters: list[str]
    state: DecodingState | None = None
    speed: dict[str, list[float]] = field(default_factory=dict)
    n_draft: int = 0
    n_accepted: int = 0


def tuning_questions() -> list[Question]:
    """Single questions, a different kind each time, the shorter ones of a kind first."""
    return in_turns((each for each in own_questions("tuning") if len(each.turns) == 1), short_first=True)


def matching_drafts(target: Subject) -> list[Subject]:
    """Models on this disk that have the target's vocabulary and are smaller; the catalogue's picks first."""
    assert target.header is not None
    picks = target.entry.draft if target.entry is not None else ()
    found = [
        model
        for model in on_disk()
        if model.header is not None
        and model.file.resolve() != target.file.resolve()
        and model.bytes < target.bytes
        and target.header.vocab.difference(model.header.vocab) is None
    ]
    return sorted(found, key=lambda model: picks.index(model.name) if model.name in picks else len(picks))


def rank(llm: LLM, drafts: Sequence[Subject], params: SamplingParams, watch: Watch, seconds: float) -> RankFacts:
    """Answer the same questions plainly, with n-grams, with each draft model, and with n-grams and the first of these.

    Args:
        llm: the target with n-grams; left with the draft models that were tried.
        drafts: the draft models.
        params: how to sample; ``max_tokens`` is chosen here.
        watch: progress and interruption.
        seconds: for everything.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    started = time.monotonic()
    deadline = started + seconds
    plain = Candidate([])
    tried = [Candidate([NGRAM]), *(Candidate([draft.name]) for draft in drafts)]
    tried += [Candidate([NGRAM, draft.name]) for draft in drafts[:1]]
    ready = _load(llm, drafts, [plain, *tried], watch, deadline)
    others = ready[1:]
    # Answers take as long drafted as plain, or less; a quarter of the time is for reading the questions.
    n_answers = _QUESTIONS_WANTED * (len(ready) + 1)
    n_tokens = int(0.75 * (deadline - time.monotonic()) / n_answers * llm.plain_tokens_per_second)
    n_tokens = min(MOST_TOKENS, max(LEAST_TOKENS, n_tokens))
    params = replace(params, max_tokens=n_tokens)
    before, took = llm.run(lambda pair: pair.state), 0.0
    try:
        for i, question in enumerate(tuning_questions()):
            began = time.monotonic()
            if began + took > deadline:
                break
            # What drifts must favour none: plain decoding is measured before and after, and the order shifts.
            first = i % len(others)
            for candidate in (plain, *others[first:], *others[:first], plain):
                watch.report(f"trying {' + '.join(candidate.drafters) or 'plain decoding'} on {question.id}", None)
                reply = _answer(llm, candidate, question, params, watch, deadline)
                if reply is None:
                    break
                candidate.speed.setdefault(question.id, []).append(reply.stats["tokens_per_second"])
                candidate.n_draft += reply.stats["num_draft_tokens"]
                candidate.n_accepted += reply.stats["num_accepted_tokens"]
            took = time.monotonic() - began
    finally:
        llm.run(lambda pair: pair.use(before))
    return _facts(plain, tried, time.monotonic() - started, n_tokens)


def _load(
    llm: LLM, drafts: Sequence[Subject], candidates: Sequence[Candidate], watch: Watch, deadline: float
) -> list[Candidate]:
    """Load the draft models side by side, while there is time and memory; the candidates that can be tried then."""
    sources, specs = {NGRAM: NGRAM}, [NGRAM]
    for draft in drafts:
        if time.monotonic() > deadline or draft.bytes > TIGHT * read_memory().available:
            break
        try:
            watch.call(llm, lambda pair, draft=draft: pair.set_draft([*specs, draft.path], watch.report))  # type: ignore[misc]
        except LocalspecError:
            continue  # this engine cannot run it
        specs.append(draft.path)
    state = llm.run(lambda pair: pair.state)
    sources |= dict(zip(specs[1:], (each.source for each in state.models), strict=True))
    paths = {draft.name: draft.path for draft in drafts} | {NGRAM: NGRAM}
    ready = [each for each in candidates if all(paths[name] in sources for name in each.drafters)]
    for each in ready:
        each.state = state.fork([sources[paths[name]] for name in each.drafters])
    return ready


def _answer(
    llm: LLM, candidate: Candidate, question: Question, params: SamplingParams, watch: Watch, deadline: float
) -> Reply | None:
    """One answer, or None if time ran out within it."""

    def prepare(pair: Pair) -> None:
        assert candidate.state is not None
        pair.use(candidate.state)
        for drafter in candidate.state.drafters:
            drafter.begin([])
        for draft in candidate.state.models:  # each reads the question itself; the target need not twice
            draft.context.truncate(0)

    watch.call(llm, prepare)
    messages = [{"role": "user", "content": question.turns[0]}]
    with llm.rounds(messages, params, speculate=bool(candidate.drafters)) as stream:
        # Reading the question yields nothing that the clock could be looked at in between.
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), stream.close)

        def stop() -> None:
            watch.stop()
            stream.close()

        timer.start()
        try:
            with on_interrupt(stop):
                reply = stream.reply
        finally:
            timer.cancel()
    watch.check()
    whole = reply.finish_reason != "cancelled" and reply.stats["tokens_per_second"]
    return reply if whole else None


def _facts(plain: Candidate, tried: Sequence[Candidate], seconds: float, n_tokens: int) -> RankFacts:
    measured = [each for each in tried if each.speed]
    shared = [name for name in (measured[0].speed if measured else ()) if all(name in each.speed for each in measured)]
    usual = statistics.median(statistics.fmean(plain.speed[name]) for name in shared) if shared else None
    rows = [_row(each, plain, shared, usual) for each in tried]
    rows.append(RankedFacts([], len(shared), 1.0 if shared else None, None, None, usual and round(usual, 2), None))
    rows.sort(key=lambda row: -(row.speedup or 0.0))
    return RankFacts(round(seconds, 1), n_tokens, shared, _noise([plain.speed[name] for name in shared]), rows)


def _row(candidate: Candidate, plain: Candidate, questions: Sequence[str], usual: float | None) -> RankedFacts:
    if usual is None or not candidate.speed:
        return RankedFacts(candidate.drafters, 0, None, None, None, None, None)
    ratios = [candidate.speed[name][0] / statistics.fmean(plain.speed[name]) for name in questions]
    speedup = statistics.geometric_mean(ratios)
    return RankedFacts(
        drafters=candidate.drafters,
        n_prompts=len(ratios),
        speedup=round(speedup, 4),
        lowest=round(min(ratios), 4),
        highest=round(max(ratios), 4),
        tokens_per_second=round(usual * speedup, 2),
        acceptance_rate=round(candidate.n_accepted / candidate.n_draft, 4) if candidate.n_draft else None,
    )


def _noise(plain: Sequence[Sequence[float]]) -> float | None:
    """Relative standard deviation of the speed of plain decoding of the same question, pooled over questions."""
    squares = [(statistics.stdev(speeds) / statistics.fmean(speeds)) ** 2 for speeds in plain if len(speeds) > 1]
    return round(math.sqrt(statistics.fmean(squares)), 4) if squares else None
