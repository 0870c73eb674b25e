"""``doctor --rank``: the drafts that are on this disk, tried on a few prompts, plain decoding in between."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from localspec.commands.doctor.costs import Watch
from localspec.commands.doctor.report import RankedFacts, RankFacts
from localspec.commands.doctor.subject import Subject, on_disk
from localspec.commands.questions import own_questions
from localspec.errors import LocalspecError
from localspec.sampling.sampling import SamplingParams
from localspec.system.interrupts import on_interrupt

if TYPE_CHECKING:
    from localspec.llm import LLM
    from localspec.runtime.stream import Reply

SECONDS = 60.0
"""How long all candidates together may take, loading included."""

MOST_TOKENS, LEAST_TOKENS = 64, 32
"""Longest answers. A draft model is not asked before an answer has some tokens, so shorter ones would say nothing."""

_PROMPTS_WANTED = 3
_CATEGORIES = ("code", "chat", "edit", "extract", "summarise", "translate", "maths", "creative")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of the prompts that speed is tuned on."""

    id: str
    text: str


@dataclass(slots=True)
class Candidate:
    """Drafters, and what was measured with them: by prompt, tokens per second with them, and next to it plain."""

    drafters: list[str]
    specs: list[str]
    speed: dict[str, float] = field(default_factory=dict)
    plain: dict[str, list[float]] = field(default_factory=dict)
    n_draft: int = 0
    n_accepted: int = 0
    seconds_to_load: float = 0.0

    def ratios(self, prompts: Sequence[str]) -> list[float]:
        """Speed over plain, prompt by prompt."""
        return [self.speed[each] / statistics.fmean(self.plain[each]) for each in prompts if each in self.speed]


def tuning_prompts() -> list[Prompt]:
    """Single questions, a different kind each time, the shorter ones of a kind first."""
    rows = [row for row in own_questions("tuning") if len(row.turns) == 1]
    by_kind = {
        kind: sorted((row for row in rows if row.category == kind), key=lambda row: len(row.turns[0]))
        for kind in _CATEGORIES
    }
    deepest = max(map(len, by_kind.values()))
    chosen = [by_kind[kind][depth] for depth in range(deepest) for kind in _CATEGORIES if depth < len(by_kind[kind])]
    return [Prompt(row.id, row.turns[0]) for row in chosen]


def matching_drafts(target: Subject) -> list[Subject]:
    """Models on this disk that have the target's vocabulary and are smaller; the catalogue's picks first."""
    assert target.header is not None
    picks = target.entry.draft if target.entry is not None else ()
    found = [
        model
        for model in on_disk()
        if model.header is not None
        and model.path.resolve() != target.path.resolve()
        and model.bytes < target.bytes
        and target.header.vocab.difference(model.header.vocab) is None
    ]
    return sorted(found, key=lambda model: picks.index(model.name) if model.name in picks else len(picks))


def candidates(drafts: Sequence[Subject]) -> list[Candidate]:
    """N-grams, each draft model, and the first of these together with n-grams, as ``--draft auto`` has them."""
    found = [Candidate(["ngram"], ["ngram"])]
    found += [Candidate([draft.name], [str(draft.path)]) for draft in drafts]
    found += [Candidate(["ngram", draft.name], ["ngram", str(draft.path)]) for draft in drafts[:1]]
    return found


def rank(llm: LLM, tried: Sequence[Candidate], params: SamplingParams, watch: Watch, seconds: float) -> RankFacts:
    """Try every candidate on the same prompts, each answer next to a plain one.

    Args:
        llm: the target, with any drafter.
        tried: the candidates; a block of time each.
        params: how to sample; ``max_tokens`` is chosen here.
        watch: progress and interruption.
        seconds: for everything.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    started = time.monotonic()
    deadline = started + seconds
    block = seconds / max(1, len(tried))
    # An answer takes as long plain as drafted, or less, and reading the prompt about half as long as either.
    per_token = 2.5 * _PROMPTS_WANTED / llm.plain_tokens_per_second
    n_tokens = int(min(MOST_TOKENS, max(LEAST_TOKENS, 0.75 * block / per_token)))
    params = replace(params, max_tokens=n_tokens)
    prompts, took = tuning_prompts(), 0.0
    while prompts and (left := deadline - time.monotonic()) > took:
        began, batch = time.monotonic(), prompts
        for i, candidate in enumerate(tried):
            # The first candidate says how many prompts there is time for; the others get the same ones.
            until = time.monotonic() + left / len(tried) if i == 0 else deadline
            batch = batch[: _try(llm, candidate, batch, params, watch, (until, deadline), alone=len(tried) == 1)]
        if not batch:
            break
        prompts, took = prompts[len(batch) :], time.monotonic() - began
    return _facts(tried, time.monotonic() - started, n_tokens)


def _try(
    llm: LLM,
    candidate: Candidate,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    watch: Watch,
    until: tuple[float, float],
    *,
    alone: bool,
) -> int:
    """Measure one candidate.

    Args:
        until: when no other prompt is begun, and when even a begun one is given up.
        alone: there is no other candidate, next to which plain would be measured again to know the noise.

    Returns:
        On how many of the prompts; all where the engine cannot run it, so that the others go on.
    """
    name, (block_end, deadline) = " + ".join(candidate.drafters), until
    began = time.monotonic()
    if began + candidate.seconds_to_load >= deadline:
        return 0
    try:
        watch.call(llm, lambda pair: pair.set_draft(candidate.specs, watch.report))
    except LocalspecError:
        return len(prompts)
    candidate.seconds_to_load = time.monotonic() - began
    longest = 0.0
    for i, prompt in enumerate(prompts):
        began = time.monotonic()
        if i and began + longest > block_end:
            return i
        watch.report(f"trying {name} on {prompt.id}", None)
        order = (False, True) if i % 2 == 0 else (True, False)  # what drifts must not favour either
        speeds: dict[bool, list[float]] = {False: [], True: []}
        for speculate in (*order, False) if alone else order:
            reply = _answer(llm, prompt, params, speculate, watch, deadline)
            if reply is None:
                return i
            speeds[speculate].append(reply.stats["tokens_per_second"])
            if speculate:
                candidate.n_draft += reply.stats["num_draft_tokens"]
                candidate.n_accepted += reply.stats["num_accepted_tokens"]
        candidate.plain[prompt.id], candidate.speed[prompt.id] = speeds[False], speeds[True][0]
        longest = max(longest, time.monotonic() - began)
    return len(prompts)


def _answer(
    llm: LLM, prompt: Prompt, params: SamplingParams, speculate: bool, watch: Watch, deadline: float
) -> Reply | None:
    """One answer, or None if time ran out within it."""
    messages = [{"role": "user", "content": prompt.text}]
    with llm.rounds(messages, params, speculate=speculate) as stream:
        # Reading the prompt yields nothing that the clock could be looked at in between.
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


def _facts(tried: Sequence[Candidate], seconds: float, n_tokens: int) -> RankFacts:
    measured = [candidate for candidate in tried if candidate.speed]
    shared = [prompt for prompt in (measured[0].speed if measured else ()) if all(prompt in c.speed for c in measured)]
    plain = {prompt: [speed for candidate in measured for speed in candidate.plain[prompt]] for prompt in shared}
    usual = statistics.median(map(statistics.median, plain.values())) if plain else None
    rows = [_row(candidate, shared, usual) for candidate in tried]
    speed = round(usual, 2) if usual is not None else None
    rows.append(RankedFacts([], len(shared), 1.0 if plain else None, None, None, speed, None))
    rows.sort(key=lambda row: -(row.speedup or 0.0))
    return RankFacts(round(seconds, 1), n_tokens, shared, _noise(plain.values()), rows)


def _row(candidate: Candidate, prompts: Sequence[str], plain: float | None) -> RankedFacts:
    ratios = candidate.ratios(prompts)
    if not ratios or plain is None:
        return RankedFacts(candidate.drafters, 0, None, None, None, None, None)
    speedup = math.exp(statistics.fmean(map(math.log, ratios)))
    return RankedFacts(
        drafters=candidate.drafters,
        n_prompts=len(ratios),
        speedup=round(speedup, 4),
        lowest=round(min(ratios), 4),
        highest=round(max(ratios), 4),
        tokens_per_second=round(plain * speedup, 2),
        acceptance_rate=round(candidate.n_accepted / candidate.n_draft, 4) if candidate.n_draft else None,
    )


def _noise(plain: Iterable[Sequence[float]]) -> float | None:
    """Relative standard deviation of the speed of plain decoding of the same prompt, pooled over prompts."""
    squares = [(statistics.stdev(speeds) / statistics.fmean(speeds)) ** 2 for speeds in plain if len(speeds) > 1]
    return round(math.sqrt(statistics.fmean(squares)), 4) if squares else None


def remarks(rank: RankFacts) -> Iterator[str]:
    """The remarks under the table."""
    n = len(rank.prompts)
    if not n:
        return
    yield (
        f"{n} prompt{'s' * (n != 1)}, up to {rank.max_tokens} tokens each, {rank.seconds:.0f} s in all; × is speed "
        "over plain on the same prompt, the geometric mean and the extremes"
    )
    if rank.noise is None:
        yield "the noise is not known: plain was measured only once for each prompt"
    else:
        yield f"plain itself varied by {rank.noise:.1%} from run to run of the same prompt"
