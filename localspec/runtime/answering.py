"""What the engine's thread does for a request: answer it, or score a given text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localspec.errors import Cancelled, PromptTooLong, UsageError
from localspec.prompts.prompts import Prompt, PromptEncoder
from localspec.runtime.arguments import DraftLength, checked_length, checked_params, drafter_names
from localspec.runtime.jobs import Job
from localspec.runtime.pair import Pair
from localspec.runtime.stream import Reply
from localspec.sampling.logprobs import ScoredToken, checked_top, token_logprobs
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.rounds import EmittedToken, FinishReason, SpecStats

SCORING_CHUNK = 64
"""Tokens scored in one pass; a row of logits each, up to a megabyte for the largest vocabularies."""


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """What is asked of a pair.

    Attributes:
        prompt: text, messages or token ids; or what makes them when the request's turn comes.
        params: the sampling parameters.
        draft_length: ``auto``, or a number of tokens; 0 decodes plainly.
        n_logprobs: alternatives to name for every token; None names none and judges none.
        model_name: what the reply calls the target.
        drafters, prediction: see ``Pair.drafters_for``.
    """

    prompt: Prompt | Callable[[], Prompt]
    params: SamplingParams
    draft_length: DraftLength
    n_logprobs: int | None
    model_name: str
    drafters: Sequence[str] | None = None
    prediction: Sequence[int] = ()

    @classmethod
    def checked(
        cls,
        prompt: Prompt | Callable[[], Prompt],
        params: SamplingParams | None,
        encoder: PromptEncoder,
        default_length: DraftLength,
        model_name: str,
        *,
        speculate: bool = True,
        draft_length: DraftLength | None = None,
        logprobs: int | None = None,
        drafters: Sequence[str] | None = None,
        prediction: str | Sequence[int] | None = None,
    ) -> AnswerRequest:
        """A request of the options that ``Asking.rounds`` explains.

        Raises:
            UsageError: one makes no sense.
        """
        length = default_length if draft_length is None else checked_length(draft_length)
        return cls(
            prompt,
            checked_params(params),
            length if speculate else 0,
            None if logprobs is None else checked_top(logprobs),
            model_name,
            drafter_names(drafters),
            encoder.ids("prediction", () if prediction is None else prediction),
        )

    def never_ran(self, job: Job, pair: Pair) -> Reply:
        """The reply to a request that was cancelled, or too late, while it waited."""
        return Reply(
            "",
            [],
            "cancelled",
            SpecStats(),
            self.model_name,
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
    waited = time.monotonic() - job.submitted
    started = time.perf_counter()
    stats = SpecStats()
    tokens = encoder.encode(request.prompt() if callable(request.prompt) else request.prompt)
    stats.prompt_tokens = len(tokens)
    text: list[str] = []
    emitted: list[EmittedToken] = []
    widths: list[int] = []
    finish: FinishReason = "cancelled"

    def prefilled(cached: int) -> None:
        stats.cached_tokens = cached
        stats.seconds_prompt = time.perf_counter() - started

    for round_ in pair.rounds(
        tokens,
        request.params,
        request.draft_length,
        prefilled,
        job.stopped,
        n_logprobs=request.n_logprobs,
        drafters=request.drafters,
        prediction=request.prediction,
    ):
        if stats.time_to_first_token_s is None:
            stats.time_to_first_token_s = time.perf_counter() - started
        stats.add(round_)
        text.append(round_.text)
        emitted += round_.emitted
        if round_.emitted:
            widths.append(len(round_.draft) + 1)
        finish = round_.finish_reason or finish
        job.give(round_)
    if widths:
        # As this answer's own passes went: the machine may have been slower, or faster, than in the long view.
        expected = sum(pair.times(width) for width in widths)
        stats.seconds_plain_token = pair.times(1) / expected * stats.seconds_verify
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
        explanation=pair.explain(request.draft_length),
        seconds_waited=waited,
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
