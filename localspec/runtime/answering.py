"""What the engine's thread does for a request: answer it, or score a given text."""

from __future__ import annotations

import time
from collections.abc import Sequence

from localspec.errors import Cancelled, PromptTooLong, UsageError
from localspec.prompts.prompts import PromptEncoder
from localspec.runtime.jobs import Job
from localspec.runtime.pair import Pair
from localspec.runtime.request import AnswerRequest
from localspec.runtime.seat import Seat
from localspec.runtime.stream import Reply
from localspec.sampling.logprobs import ScoredToken, token_logprobs
from localspec.spec_decode.passes import Reading, given, read_alone
from localspec.spec_decode.rounds import EmittedToken, FinishReason, Round, SpecStats
from localspec.spec_decode.thinking import ThinkingReader

SCORING_CHUNK = 64
"""Tokens scored in one pass; a row of logits each, up to a megabyte for the largest vocabularies."""


def never_ran(request: AnswerRequest, job: Job, pair: Pair) -> Reply:
    """The reply to a request that was cancelled, or too late, while it waited."""
    return Reply(
        "",
        [],
        "cancelled",
        SpecStats(),
        request.model_name,
        pair.draft_names,
        pair.target.backend,
        cancelled_by=job.cancelled_by,
        seconds_waited=time.monotonic() - job.submitted,
    )


def answer(request: AnswerRequest, pair: Pair, encoder: PromptEncoder, job: Job) -> Reply:
    """Answer a request, giving every Round to the job as it happens.

    Raises:
        UsageError, TemplateError, EngineError: the request failed; the pair is ready for the next one.
    """
    asked = request.read(encoder, pair.context.n_ctx)
    seat = Seat(pair.state, overlaps=True)
    return read_alone(answering(request, pair, job, asked, seat), pair.context)


def answering(
    request: AnswerRequest,
    pair: Pair,
    job: Job,
    asked: tuple[list[int], ThinkingReader | None],
    seat: Seat,
) -> Reading[Reply]:
    """``answer``, the passes left to the caller.

    Args:
        request, pair, job: see there.
        asked: what ``AnswerRequest.read`` returned.
        seat: where the answer is made.
    """
    started = job.started
    stats = SpecStats()
    tokens, thinking = asked
    stats.prompt_tokens = len(tokens)
    text: list[str] = []
    thoughts: list[str] = []
    emitted: list[EmittedToken] = []
    widths: list[int] = []
    finish: FinishReason = "cancelled"

    def prefilled(cached: int) -> None:
        stats.cached_tokens = cached
        stats.seconds_prompt = time.perf_counter() - started

    def take(round_: Round) -> None:
        nonlocal finish
        if stats.time_to_first_token_s is None:
            stats.time_to_first_token_s = time.perf_counter() - started
        stats.add(round_)
        text.append(round_.text)
        thoughts.append(round_.thinking)
        emitted.extend(round_.emitted)
        if round_.emitted:
            widths.append(round_.width)
        finish = round_.finish_reason or finish
        job.give(round_)

    steps = pair.steps(
        seat,
        tokens,
        request,
        prefilled,
        job.stopped,
        thinking,
    )
    yield from given(steps, take)
    if seat.times is not None and seat.times.has_company:
        stats.seconds_one_token = None  # its passes were those of others too
    elif widths and not pair.times.noisy:
        # As this answer's own passes went: the machine may have been slower, or faster, than in the long view.
        expected = sum(pair.times(width) for width in widths)
        stats.seconds_plain_token = pair.times(1) / expected * stats.seconds_verify
    assert seat.decides is not None  # the pair's last answer may be another one that shares its passes
    explanation = seat.decides.explain()
    if seat.times is not None and seat.times.mean_answers > 1.0:
        explanation += f"\nShared with other answers: on average {seat.times.mean_answers:.1f} at once."
    return Reply(
        "".join(text),
        [token.id for token in emitted],
        finish,
        stats,
        request.model_name,
        pair.draft_names,
        pair.target.backend,
        cancelled_by=job.cancelled_by if finish == "cancelled" else None,
        tokens=emitted,
        explanation=explanation,
        seconds_waited=job.seconds_waited,
        thinking="".join(thoughts),
    )


def score(tokens: Sequence[int], n_top: int, pair: Pair, encoder: PromptEncoder, job: Job) -> list[ScoredToken]:
    """How probable the target finds each token after those before it.

    Raises:
        UsageError: there are no tokens.
        PromptTooLong: there are more than the context holds.
        Cancelled: by the caller or the deadline.
    """
    if not tokens:
        raise UsageError("there is no text to score")
    if len(tokens) > pair.context.n_ctx:
        raise PromptTooLong(f"the text has {len(tokens)} tokens and the context holds {pair.context.n_ctx}")
    scored = [ScoredToken(tokens[0], encoder.token_text(tokens[0]), None)]
    for start, logits in pair.read(tokens[:-1], SCORING_CHUNK):
        for i, row in enumerate(logits):
            token = tokens[start + i + 1]
            found = token_logprobs(row, token, n_top)
            scored.append(ScoredToken(token, encoder.token_text(token), found.logprob, found.top))
        if job.stopped():
            raise Cancelled(f"scoring was stopped by its {job.cancelled_by} after {len(scored)} tokens")
    return scored
