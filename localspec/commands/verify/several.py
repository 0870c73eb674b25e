"""Several answers at a time, as ``serve --parallel N`` makes them.

More are asked for than there are sequences, so that sequences end, start anew and are preempted. The target alone then
reads each answer: every token has to be the argmax of its row up to rounding, and rows with known logprobs have to
agree. Rounding is measured in fresh contexts of as many sequences, as engines compute such passes otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localspec.backends.base import Model, Piece
from localspec.commands.options import Watch
from localspec.commands.verify import rows
from localspec.engine.pair import Pair
from localspec.engine.request import Reply, RoundStream
from localspec.llm import LLM
from localspec.sampling.sampling import SamplingParams

SEQUENCES = 3
ARM = "several at a time"
N_TOP = 20
PIECE = 64  # tokens of each prompt in one pass


@dataclass(slots=True)
class SeveralFigures:
    """``several`` of the JSON: ``sequences`` is 1 and ``reason`` given where the engine takes no more; deviations in
    logits."""

    sequences: int = 1
    reason: str | None = None
    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    largest_deviation: float = 0.0
    bound: float | None = None


def enough(prompts: Sequence[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """One prompt more than there are sequences, with beginnings of prompts where they are too few."""
    found = list(prompts[: SEQUENCES + 1])
    for part in (0.6, 0.4, 0.8, 0.3):
        for label, tokens in prompts:
            if len(found) <= SEQUENCES and (n := int(part * len(tokens))) > 1:
                found.append((f"{label}, its first {n} tokens", tokens[:n]))
    return found


def audit_several(
    llm: LLM,
    prompts: Sequence[tuple[str, list[int]]],
    n_tokens: int,
    lengths: Sequence[int | str],
    watch: Watch,
) -> tuple[SeveralFigures, list[rows.Defect], list[rows.Observation]]:
    """Ask for more answers at a time than the pair has sequences, and compare them with the target alone; returns
    defects and ties too."""
    figures, log = SeveralFigures(sequences=llm.parallel_info()["parallel"]), rows.AuditLog()
    asked = [(label, prompt, length) for length in lengths for label, prompt in prompts]
    replies, ties = list[Reply](), list[rows.Observation]()

    def compare(pair: Pair) -> rows.Judge:
        target, texts = pair.target, list[rows.PlainAnswer]()
        for (label, prompt, _), reply in zip(asked, replies, strict=True):
            watch.report(f"reading answer {len(texts) + 1} of {len(replies)} alone", None)
            given = list(reply.token_ids)
            text = rows.plain_answer(target, label, prompt, SamplingParams(), len(given), watch.check, given)
            texts.append(text)
            for position, (token, row) in enumerate(zip(given, text.rows, strict=True)):
                known, deviation = reply.tokens[position].logprobs, rows.Deviation()
                if known is not None:
                    deviation = row.near(known.top, known.top[0][0])
                log.observations.append(rows.Observation(ARM, text, position, deviation, token))
            figures.answers += 1
            figures.tokens += len(given)
            figures.drafted += reply.stats["num_draft_tokens"]
            figures.accepted += reply.stats["num_accepted_tokens"]
        watch.report("passes of several sequences", None)
        figures.largest_deviation = max((seen.deviation.rms for seen in log.observations), default=0.0)
        noise = rows.WidthNoise(target.capabilities.batch_invariant)
        for at in range(0, len(texts), figures.sequences):
            noise.deviations += _deviations(target, texts[at : at + figures.sequences], watch.check)
        bounds = noise.bounds(len(log.observations))
        figures.bound = bounds and bounds[0]
        return rows.Judge(target, bounds).judge(log.observations)

    with log.noting(ARM, prompts[0][0], "decoding"):
        replies += _replies(llm, [(prompt, length) for _, prompt, length in asked], n_tokens, watch)
        figures.passes = (llm.parallel_info().get("passes") or {}).get("passes", 0)
        judge = llm.run(compare)
        log.defects += judge.defects
        ties += judge.ties
    return figures, log.defects, ties


def _replies(llm: LLM, asked: Sequence[tuple[list[int], int | str]], n_tokens: int, watch: Watch) -> list[Reply]:
    """All answers, asked for at once; every other with logprobs."""
    streams = list[RoundStream]()

    def ask(_: Pair) -> None:
        for number, (prompt, length) in enumerate(asked):
            # Of several lengths, so that sequences end one by one while others go on.
            params = SamplingParams(max_tokens=max(2, n_tokens - n_tokens * (number % 3) // 4), ignore_eos=True)
            logprobs = None if number % 2 else N_TOP
            streams.append(llm.rounds(prompt, params, draft_length=length, logprobs=logprobs))

    try:
        llm.run(ask)  # on the engine's thread: none is begun before all wait, or a fast model would answer them singly
        replies = list[Reply]()
        for stream in streams:
            watch.report(f"answer {len(replies) + 1} of {len(streams)}", None)
            for _ in stream:
                watch.check()
            replies.append(stream.reply)
        return replies
    finally:
        for stream in streams:
            stream.close()


def _deviations(model: Model, texts: Sequence[rows.PlainAnswer], check: rows.Check) -> list[rows.Deviation]:
    """Deviations from the texts' rows in a fresh context of several sequences, fed together and never rolled back."""
    found = list[rows.Deviation]()
    whole = [text.before(len(text.tokens) - 1) for text in texts]
    firsts = [len(text.prompt) - 1 for text in texts]
    with model.new_batch(len(texts), sum(map(len, whole)) + 8 * len(texts)) as batch:
        width = 1
        while True:
            check()
            pieces, ends = list[Piece](), list[int]()
            for i, tokens in enumerate(whole):
                at = batch[i].n_past
                end = min(at + PIECE, firsts[i]) if at < firsts[i] else min(at + 1 + (width + i) % 5, len(tokens))
                if end > at:
                    pieces.append(Piece(i, tokens[at:end], "all" if at >= firsts[i] else "none"))
                    ends.append(at)
            if not pieces:
                return found
            for piece, at, forward in zip(pieces, ends, batch.decode(pieces), strict=True):
                text, first = texts[piece.sequence], firsts[piece.sequence]
                if at >= first:
                    found += [text.compared(at - first + k, row) for k, row in enumerate(forward.logits)]
            width += 1
