"""What the engine's thread does for a request: answer it, or score a given text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localspec.errors import Cancelled, PromptTooLong, UsageError
from localspec.prompts.prompts import Prompt, PromptEncoder, is_messages
from localspec.runtime.arguments import DraftLength, checked_length, checked_params, drafter_names
from localspec.runtime.jobs import Job
from localspec.runtime.pair import Pair
from localspec.runtime.seat import Seat
from localspec.runtime.stream import Reply
from localspec.sampling.logprobs import ScoredToken, checked_top, token_logprobs
from localspec.sampling.sampling import SamplingParams
from localspec.sampling.structured.request import grammar_of
from localspec.spec_decode.passes import Reading, given, read_alone
from localspec.spec_decode.rounds import EmittedToken, FinishReason, Round, SpecStats
from localspec.spec_decode.thinking import ThinkingReader
from localspec.values import checked_whole

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
        drafters, prediction: see ``Seat.drafters_for``.
        keep_tokens: see ``Pair.rounds``.
        think: ``auto``, ``on``, ``off`` or an effort, see ``prompts.thinking``; None: only messages are asked so.
        thinking_budget: tokens until a thinking block is closed; None is any number.
    """

    prompt: Prompt | Callable[[], Prompt]
    params: SamplingParams
    draft_length: DraftLength
    n_logprobs: int | None
    model_name: str
    drafters: Sequence[str] | None = None
    prediction: Sequence[int] = ()
    keep_tokens: int | None = None
    think: str | None = None
    thinking_budget: int | None = None

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
        keep_tokens: int | None = None,
        think: str | None = None,
        thinking_budget: int | None = None,
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
            None if keep_tokens is None else checked_whole("keep_tokens", keep_tokens, 0),
            None if think is None else encoder.checked_think(think),
            None if thinking_budget is None else checked_whole("thinking_budget", thinking_budget, 0),
        )

    def read(self, encoder: PromptEncoder) -> tuple[list[int], ThinkingReader | None]:
        """The prompt's tokens, and what tells thinking and answer apart; None where the model is not known to think.

        Raises:
            UsageError, TemplateError: the prompt cannot be.
        """
        prompt = self.prompt() if callable(self.prompt) else self.prompt
        think = self.think or "auto"
        if grammar_of(self.params.response_format, self.params.grammar) is not None:
            if think not in ("auto", "off"):
                raise UsageError("an answer in a given form begins at once: leave out response_format, or think")
            think = "off"
        tokens = encoder.encode(prompt, think=think)
        if encoder.thinking is None or (self.think is None and not is_messages(prompt)):
            return tokens, None
        state = encoder.thinking_state(tokens)
        budget = 0 if think == "off" else self.thinking_budget
        return tokens, ThinkingReader(encoder.thinking, inside=state == "inside", over=state == "over", budget=budget)

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
    asked = request.read(encoder)
    return read_alone(answering(request, pair, job, asked, Seat(pair.state)), pair.context)


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
        request.params,
        request.draft_length,
        prefilled,
        job.stopped,
        n_logprobs=request.n_logprobs,
        drafters=request.drafters,
        prediction=request.prediction,
        keep_tokens=request.keep_tokens,
        thinking=thinking,
    )
    yield from given(steps, take)
    if widths and seat.times is None:  # else its passes were those of others too
        # As this answer's own passes went: the machine may have been slower, or faster, than in the long view.
        expected = sum(pair.times(width) for width in widths)
        stats.seconds_plain_token = pair.times(1) / expected * stats.seconds_verify
    explanation = pair.explain(request.draft_length)
    if seat.times is not None and seat.times.mean_answers > 1.0:
        explanation += f"; passes were shared by {seat.times.mean_answers:.1f} answers"
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
