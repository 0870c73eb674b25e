"""What the engine's thread does for one request: answer it, or score a given text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial

from localspec.backends.base import Context, Forward
from localspec.controllers.batching import ShareOfPass
from localspec.engine.pair import Pair, prepare_corpora
from localspec.engine.request import DraftLength, Reply, Request
from localspec.engine.state import DecodingState
from localspec.engine.worker import Job
from localspec.errors import Cancelled, EngineMismatch, PromptTooLong, UsageError
from localspec.prompts.prompts import is_messages
from localspec.sampling.constraint import constraint_for
from localspec.sampling.sampling import SamplingParams, ScoredToken, token_logprobs
from localspec.spec_decode.decoder import PREFILL_CHUNK, SpeculativeDecoder, TargetPass
from localspec.spec_decode.detokenizer import TextAssembler, ThinkingReader
from localspec.spec_decode.drafters.grammar import GrammarDrafter
from localspec.spec_decode.overlapping import RoundOverlap
from localspec.spec_decode.rounds import FinishReason, PromptProgress, Round, SpecStats

SHARED_CHUNK = 1024
"""Tokens of a prompt proposed at once where passes are shared, which take pieces of any length: the hidden states of
all are kept for a head until they are read."""

LONG_PROMPT = 256
"""Tokens to read from which on an answer says how far it is: a few seconds on a slow laptop."""


class OpenAnswer:
    """An answer that is being made: ``propose``, a pass of the target, ``commit``, again and again; then ``reply``.

    Until ``close`` target and drafters hold its conversation; after it, whatever happened, every context holds what its
    ``tokens`` says. ``Cancelled`` from any of the three ends the answer early; after another error the pair is ready
    for the next one.

    Args:
        job: has the request; is given every round, and how far a long prompt is read: before them, by draft models
            later too. It is asked whether to stop, also inside of long passes.
        asked: what ``Request.read`` returned.
        shared: what its share of a pass costs; None: it has passes of its own.
        overlaps: whether rounds may be handed on within the next pass, see ``RoundOverlap``.
        on_prefilled: gets the number of cached prompt tokens, once the prompt is read.
    """

    def __init__(
        self,
        pair: Pair,
        state: DecodingState,
        job: Job,
        asked: tuple[list[int], ThinkingReader | None],
        *,
        shared: ShareOfPass | None = None,
        overlaps: bool = False,
        on_prefilled: Callable[[int], None] = lambda n_cached: None,
    ) -> None:
        if pair.refused is not None:
            raise EngineMismatch(pair.refused)
        pair.target.recover()  # after a device was lost
        request: Request = job.request
        self._pair, self._job, self._request, self._shared = pair, job, request, shared
        (self._prompt, thinking), self._on_prefilled = asked, on_prefilled
        params, vocab, predicted = request.params, pair.target.vocab, bool(request.prediction)
        chosen = state.drafters_for(request.drafters, predicted=predicted)
        self._constraint = constraint_for(params, vocab) if params.constrained else None
        if self._constraint is not None and chosen:
            chosen = [GrammarDrafter(self._constraint, pair.target.tokenize), *chosen]
        self._controller = state.controller(request.draft_length, params, chosen, shared=shared, predicted=predicted)
        if pair.options.idle:
            prepare_corpora(pair, chosen)
        chosen = [drafter for drafter in chosen if self._controller.may_use(drafter.info.source)]
        # No drafting ahead where passes are shared, as ends of drafts may be left out.
        target, ahead = state.context, state.drafting_ahead if shared is None else None
        overlaps = overlaps and target.overlaps and ahead is None
        models = [each for each in state.models if each.drafter in chosen]
        self._drafts = [each.context for each in models if each.drafter.info.reads_text]
        overlap = RoundOverlap([target, *self._drafts], self._hand_on) if overlaps else None
        lost = partial(pair.lose_drafter, state)
        self.decoder = SpeculativeDecoder(target, chosen, self._controller, lost, ahead, overlap)
        self._conversation = list(self._prompt)
        self._last = request.draft_length, self._controller
        pair.conversation, pair.last = self._conversation, self._last
        named = vocab.named(params.stop) if params.stop else None
        # A function makes a session's messages.
        is_chat = request.think is not None or callable(request.prompt) or is_messages(request.prompt)
        end_marks = request.encoder.end_marks if is_chat else ()
        self._text = TextAssembler(vocab, [*params.stop, *end_marks], thinking, named)
        self._stats, self._rounds, self._is_open = SpecStats(), list[Round](), False
        self._stats.prompt_tokens = len(self._prompt)
        self._stack = ExitStack()
        with ExitStack() as stack:
            stack.enter_context(pair.prefix_cache.conversation(target, self._drafts, self._conversation))
            target.interrupted = job.stopped  # long passes can be broken off
            for context in self._drafts:
                context.interrupted = self._watched(context)
            for context in (target, *self._drafts):
                stack.callback(setattr, context, "interrupted", None)
            self._stats.cached_tokens = self.decoder.read(
                self._prompt, PREFILL_CHUNK if shared is None else SHARED_CHUNK
            )
            self._tells = len(self.decoder.unread) >= LONG_PROMPT
            self._reading_since = time.perf_counter()
            self.tell_read()
            self._stack = stack.pop_all()

    def propose(self) -> TargetPass | None:
        """The rows of its next pass of the target; None where it has ended, or is cancelled."""
        decoder = self.decoder
        if not self._is_open:
            if decoder.unread and not self._job.stopped():
                return decoder.propose()
            self._is_open = True
            self._stats.seconds_prompt = time.perf_counter() - self._job.started
            self._on_prefilled(self._stats.cached_tokens)
            asked, prediction = self._request, self._request.prediction or ()
            decoder.start(self._prompt, asked.params, self._text, asked.logprobs, self._constraint, prediction)
        if decoder.finish_reason is not None or self._job.stopped():
            return None
        return decoder.propose()

    def tell_read(self, n_fed: int = 0) -> None:
        """Say how far a long prompt is read; ``n_fed``: tokens of the proposed pass that the target has had already."""
        if self._tells:
            left = len(self.decoder.unread) - n_fed
            read = len(self._prompt) - left - bool(left)  # the last token is read by the answer's first pass
            seconds = time.perf_counter() - self._reading_since
            self._job.give(PromptProgress(len(self._prompt), self._stats.cached_tokens, read, seconds))

    def _watched(self, draft: Context) -> Callable[[], bool]:
        """What a draft model asks between pieces of a long text: whether to stop. It tells how far it has read."""
        first: PromptProgress | None = None
        since = 0.0

        def interrupted() -> bool:
            nonlocal first, since
            n, total = draft.n_past, len(self._conversation)
            if first is None or first.total != total or n <= first.processed:  # another reading
                since, first = time.perf_counter(), PromptProgress(total, n, n, 0.0, "draft")
            self._job.give(PromptProgress(total, first.cached, n, time.perf_counter() - since, "draft"))
            return self._job.stopped()

        return interrupted

    def commit(self, forward: Forward) -> None:
        """Take what the pass returned; its round is delivered, where passes overlap within the next one."""
        round_ = self.decoder.commit(forward)
        if round_ is None:
            self.tell_read()
            return
        self._conversation += [token.id for token in round_.emitted]
        if self.decoder.overlap is not None:
            self.decoder.overlap.hold(round_)
        else:
            self._show(round_)

    def _hand_on(self, round_: Round) -> None:
        self.decoder.learn(round_)
        self._show(round_)

    def _show(self, round_: Round) -> None:
        if self._stats.time_to_first_token_s is None:
            self._stats.time_to_first_token_s = time.perf_counter() - self._job.started
        round_.draft_texts = [self._pair.target.vocab.display(token) for token in round_.draft.ids]
        self._stats.add(round_)
        self._rounds.append(round_)
        self._job.give(round_)

    def close(self) -> None:
        """Leave the contexts; safe to call twice."""
        try:
            if self.decoder.overlap is not None:
                self.decoder.overlap.settle()
        finally:
            self.decoder.close()
            self._stack.close()

    def reply(self) -> Reply:
        """The whole, after ``close``, of an answer that did not fail; what was held back of its text is delivered
        first."""
        stats, pair, job, shared, rounds = self._stats, self._pair, self._job, self._shared, self._rounds
        if self.decoder.finish_reason is None:
            # What was held back is verified too, and nothing follows any more that could make a stop string of it.
            spans = self._text.finish()
            if spans or self._text.stopped:
                self._show(Round.of_rest(len(rounds), spans, "stop" if self._text.stopped else "cancelled"))
        if self._request.keep_tokens is not None:
            self._conversation = list(self._prompt[: self._request.keep_tokens])
            for context in (self.decoder.target, *self._drafts):
                pair.prefix_cache.cut(context, self._conversation)
        pair.conversation, pair.last = self._conversation, self._last  # others may have begun since this one did
        times = pair.state.times
        widths = [
            len(round_.emitted) if round_.verdict.kind == "forced" else len(round_.draft) + 1
            for round_ in rounds
            if round_.emitted
        ]
        if shared is not None and shared.has_company:
            stats.seconds_one_token = None  # its passes were those of others too
        elif widths and not times.noisy:
            # As this answer's own passes went: the machine may have been slower, or faster, than in the long view.
            expected = sum(times(width) for width in widths)
            stats.seconds_plain_token = times(1) / expected * stats.seconds_verify
        explanation = self._controller.explain()
        if shared is not None and shared.mean_answers > 1.0:
            explanation += f"\nShared with other answers: on average {shared.mean_answers:.1f} at once."
        tokens = [token for round_ in rounds for token in round_.emitted]
        finish: FinishReason = rounds[-1].finish_reason or "cancelled" if rounds else "cancelled"
        return Reply(
            "".join(round_.text for round_ in rounds),
            [token.id for token in tokens],
            finish,
            stats,
            pair.name,
            pair.state.draft_names,
            pair.target.backend,
            cancelled_by=job.cancelled_by if finish == "cancelled" else None,
            tokens=tokens,
            explanation=explanation,
            seconds_waited=job.seconds_waited,
            thinking="".join(round_.thinking for round_ in rounds),
        )


def never_ran(pair: Pair, job: Job) -> Reply:
    """Of a request that was cancelled, or late, before its turn."""
    of_pair = pair.name, pair.state.draft_names, pair.target.backend
    waited = time.monotonic() - job.submitted
    return Reply("", [], "cancelled", SpecStats(), *of_pair, job.cancelled_by, seconds_waited=waited)


def rounds(
    pair: Pair,
    prompt: Sequence[int],
    params: SamplingParams,
    draft_length: DraftLength,
    on_prefilled: Callable[[int], None],
    cancelled: Callable[[], bool],
) -> Iterator[Round]:
    """Prefill and decode with all drafters; see ``OpenAnswer``."""
    made: list[Round] = []
    request = Request(pair.encoder, prompt, params, draft_length)
    job = Job(
        lambda job: None,
        lambda step: made.append(step) if isinstance(step, Round) else None,
        request=request,
        told_to_stop=cancelled,
    )
    answer = OpenAnswer(pair, pair.state, job, (list(prompt), None), on_prefilled=on_prefilled)
    with closing(answer), suppress(Cancelled):
        while (rows := answer.propose()) is not None:
            answer.commit(answer.decoder.decode(rows))
            yield from made
            made.clear()
    answer.reply()
    yield from made


SCORING_CHUNK = 64
"""Tokens scored in one pass; a row of logits each, up to a megabyte for the largest vocabularies."""


def answer(pair: Pair, job: Job) -> Reply:
    """Answer a job's request alone, giving it every Round as it happens."""
    asked = job.request.read(pair.state.context.n_ctx)
    making = OpenAnswer(pair, pair.state, job, asked, overlaps=True)
    with closing(making), suppress(Cancelled):
        while True:
            with pair.worker.turns.one():
                rows = making.propose()
                if rows is None:
                    break
                making.commit(making.decoder.decode(rows))
    return making.reply()


def score(pair: Pair, tokens: Sequence[int], n_top: int, job: Job) -> list[ScoredToken]:
    """How probable the target finds each token after those before it. ``UsageError``: there are none, or more than the
    context holds."""
    if not tokens:
        raise UsageError("there is no text to score")
    if len(tokens) > pair.context.n_ctx:
        raise PromptTooLong(f"the text has {len(tokens)} tokens and the context holds {pair.context.n_ctx}")
    scored = [ScoredToken(tokens[0], pair.encoder.token_text(tokens[0]), None)]
    if pair.refused is not None:
        raise EngineMismatch(pair.refused)
    pair.target.recover()
    pair.prefix_cache.empty(pair.context)
    for start in range(0, len(tokens) - 1, SCORING_CHUNK):
        following = tokens[start + 1 : start + 1 + SCORING_CHUNK]
        rows = pair.context.decode(tokens[start : start + len(following)]).logits
        for token, row in zip(following, rows, strict=True):
            found = token_logprobs(row, token, n_top)
            scored.append(ScoredToken(token, pair.encoder.token_text(token), found.logprob, found.top))
        if job.stopped():
            raise Cancelled(f"scoring was stopped by its {job.cancelled_by} after {len(scored)} tokens")
    return scored
