"""Speculative decoding: one round, on one screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from localspec.backends.base import NORM, Context, Forward, layer_name
from localspec.errors import EngineError, LocalspecError, PromptTooLong, UsageError
from localspec.sampling.sampling import Noise, NotNumbers, SamplingParams, token_logprobs
from localspec.spec_decode.ahead import DraftAhead
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Controller, Drafter
from localspec.spec_decode.drafters.group import DrafterGroup
from localspec.spec_decode.passes import Drafting, Reading, Steps, TargetPass, overlapping, read_alone, rounds_alone
from localspec.spec_decode.proposer import SamplingProposer
from localspec.spec_decode.rounds import Draft, EmittedToken, FinishReason, Round, Span, TokenKind, Verdict
from localspec.spec_decode.verification import Rows, verify

if TYPE_CHECKING:
    from localspec.sampling.constraint import Constraint


VerifiedToken = tuple[int, TokenKind, str]
"""Token id, kind and source."""

PREFILL_CHUNK = 128
"""Prompt tokens fed between two looks at the cancel flag: about a second on a slow laptop."""


class SpeculativeDecoder:
    """Decodes with a target context and any number of drafters.

    Between calls the target context holds a prefix of all settled tokens, so a prompt that continues it costs only what
    is new. Plain decoding is the same loop with an empty draft.

    ``prefill`` and ``rounds`` run the target's passes themselves; ``reading`` and ``steps`` are the same, the passes
    left to the caller, who may run those of several answers as one.

    Args:
        target: the target's context.
        drafters: in the order they are asked.
        controller: decides how far to draft.
        lost: takes a drafter that failed, and why; the answer goes on without it.
        ahead: drafts while the target verifies; None drafts in the ordinary order. For one answer at a time.
        overlaps: whether what a round leaves to be done may be done while a device computes the next pass, see
            ``passes.overlapping``: for steps of one answer, run without a break.

    Raises:
        UsageError: the target's context does not return the hidden states that a drafter reads.
    """

    def __init__(
        self,
        target: Context,
        drafters: Sequence[Drafter],
        controller: Controller,
        lost: Callable[[Drafter, str], None] = lambda drafter, why: None,
        ahead: DraftAhead | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        self.ahead = ahead
        self.target = target
        self.drafters = DrafterGroup(drafters, self._without)
        if missing := self.drafters.taps.difference(target.hidden):
            raise UsageError(
                f"the target's context was not made to return {sorted(missing)[0]!r}, which a drafter reads"
            )
        self.drafters.attach(target)
        self.controller = controller
        self._lost = lost
        self._overlaps = overlaps and target.overlaps and ahead is None

    def _without(self, drafter: Drafter, why: str) -> None:
        self.controller.lose(drafter.source)
        self._lost(drafter, why)

    def prefill(self, prompt: Sequence[int], cancelled: Callable[[], bool]) -> int:
        """Bring the target up to all of the prompt but its last token.

        Returns:
            How many prompt tokens were in its memory already.

        Raises:
            UsageError: the prompt is empty.
            PromptTooLong: it leaves no room for an answer.
        """
        return read_alone(self.reading(prompt, cancelled), self.target)

    def reading(
        self, prompt: Sequence[int], cancelled: Callable[[], bool], n_chunk: int = PREFILL_CHUNK
    ) -> Reading[int]:
        """``prefill``, the passes left to the caller, over ``n_chunk`` tokens each."""
        if not prompt:
            raise UsageError("the prompt is empty: there is nothing to continue")
        if len(prompt) >= self.target.n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and the context holds {self.target.n_ctx}, "
                "answer included; shorten it, or take a larger context: --ctx N, in Python n_ctx=N"
            )
        n_read = len(prompt) - 1
        reused = self.target.reuse(prompt[:n_read])
        # These states come with logits only: of the prompt's last token there is one for the first draft to go on from.
        has_late_tap = not self.drafters.taps.isdisjoint((NORM, layer_name(self.target.model.n_layers - 1)))
        start = reused
        while start < n_read and not cancelled():
            chunk = prompt[start : min(start + n_chunk, n_read)]
            start += len(chunk)
            logits: Literal["last", "none"] = "last" if has_late_tap and start == n_read else "none"
            forward = yield TargetPass(chunk, logits, n_after=n_read - start)
            self.drafters.process(chunk, forward)
        return reused

    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        text: TextAssembler,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        n_logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> Iterator[Round]:
        """Decode round by round until an end token, a stop string, the budget or the cancel flag.

        Args:
            prompt: token ids, already prefilled.
            params: the sampling parameters.
            text: turns settled tokens into text and watches for stop strings.
            cancelled: polled once a round.
            n_logprobs: judge every emitted token by the target's row, naming that many alternatives; None does not.
            constraint: the grammar that the answer follows, at its beginning.

        Returns:
            One ``Round`` per target pass; the last one carries ``finish_reason``.
        """
        steps = self.steps(prompt, params, text, cancelled=cancelled, n_logprobs=n_logprobs, constraint=constraint)
        return rounds_alone(steps, self.target)

    def steps(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        text: TextAssembler,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        n_logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> Steps:
        """``rounds``, the passes left to the caller; after each comes its round."""
        steps = self._steps(prompt, params, text, cancelled, n_logprobs, constraint)
        if self._overlaps:
            return overlapping(steps, self.target, self._learn)
        return steps if self.ahead is None else self.ahead.during(steps)

    def _steps(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        text: TextAssembler,
        cancelled: Callable[[], bool],
        n_logprobs: int | None,
        constraint: Constraint | None,
    ) -> Steps:
        target, tokens, noise = self.target, list(prompt), Noise(params.seed)
        proposer = SamplingProposer(params, noise, constraint, target.model.n_vocab)
        end_tokens = frozenset() if params.ignore_eos else target.model.vocab.eog
        budget = min(params.max_tokens or target.n_ctx, target.n_ctx - len(tokens))
        emitter = _Emitter(text, end_tokens, budget, constraint, n_logprobs)
        draft_ends = end_tokens if text.thinking is None else end_tokens | text.thinking.draft_ends
        ahead = self.ahead if constraint is None else None  # a grammar's state follows one text only
        answer = _Answer(tokens, params, noise, proposer, emitter, draft_ends, ahead)
        self.drafters.begin(tokens)
        self.controller.begin(params, len(tokens))
        if ahead is not None:
            ahead.begin(self.drafters, proposer, draft_ends)
        index, finish = 0, None
        while not finish and not cancelled():
            try:
                round_ = yield from (self._force if emitter.forced else self._round)(answer, index)
            except BaseException:
                with suppress(LocalspecError):  # what a round that failed did not settle leaves the target's memory
                    target.truncate(min(target.n_past, len(tokens) - 1))
                raise
            yield round_
            index, finish = index + 1, round_.finish_reason

    def _round(self, answer: _Answer, index: int) -> Reading[Round]:
        """Draft, verify all of it in one pass of the target, take back what was rejected, emit the rest.

        Invariant, before and after: ``tokens`` is everything settled; the target's memory holds all but the last.
        """
        target, tokens, replays = self.target, answer.tokens, self.target.model.capabilities.rollback == "replay"
        started = time.perf_counter()
        draft = yield from self._draft(answer)
        drafted = time.perf_counter()
        forward = yield from self._verifying_pass(answer, draft)  # k + 1 rows
        verified = time.perf_counter()
        draft = draft.first(len(forward) - 1)  # the rest gave way to rows of other answers
        verdict = self._verify(answer, draft, forward)
        self.controller.watch(forward.logits[verdict.last_accepted + 1])
        read = [tokens[-1], *draft.ids]
        if draft.branches:  # what lies beside the accepted path is as if it had never been
            path = [0, *(i + 1 for i in verdict.accepted)]
            read, forward = [read[i] for i in path], forward.take(path)
            target.keep(path)
        self.drafters.process(read, forward)
        # A replay would overwrite the rows that log-probabilities are read from.
        rows = forward.logits.copy() if replays and answer.emitter.n_logprobs is not None else forward.logits
        rejecting = time.perf_counter()
        target.truncate(len(tokens) + verdict.n_accepted)  # rejected draft tokens leave the target's memory
        replayed = time.perf_counter() - rejecting if replays else 0.0  # by another pass, which the width cost too
        emitted, spans, finish = answer.emitter.emit(_verified(draft, verdict), rows)
        settled = [token.id for token in emitted]
        tokens += settled
        if target.n_past >= len(tokens):  # the answer ended within the draft
            target.truncate(len(tokens) - 1)
        self.drafters.accept(settled)
        round_ = Round(
            index=index,
            draft=draft,
            verdict=verdict,
            emitted=emitted,
            ms_draft=(drafted - started) * 1e3,
            ms_verify=(verified - drafted + replayed) * 1e3,
            n_past=len(tokens) - len(settled) - 1,
            spans=spans,
            finish_reason=finish,
            ahead=None if answer.ahead is None else answer.ahead.count,
        )
        self.controller.book(round_)
        if not self._overlaps:
            self._learn(round_)
        round_.ms_other = (time.perf_counter() - verified - replayed) * 1e3
        return round_

    def _learn(self, round_: Round) -> None:
        """What a finished round teaches; one of tokens that nobody chose teaches nothing."""
        if round_.verdict.kind != "forced":
            self.controller.update(round_)

    def _draft(self, answer: _Answer) -> Drafting[Draft]:
        """What the drafters propose, as far as the controller lets them; empty is plain decoding."""
        controller, emitter, ahead = self.controller, answer.emitter, answer.ahead
        controller.enter(thinks=emitter.thinks)
        if ahead is not None:
            controller.hide(ahead.hidden)
        plan = controller.plan(room=emitter.room, n_past=self.target.n_past)
        if ahead is not None:
            return ahead.draft(answer.tokens, plan)
        may_branch = self.target.can_branch and emitter.constraint is None
        branching = controller.branching() if may_branch else None
        return (yield from self.drafters.drafting(answer.tokens, plan, answer.proposer, answer.draft_ends, branching))

    def _verifying_pass(self, answer: _Answer, draft: Draft) -> Reading[Forward]:
        """One pass of the target over the last settled token and the draft. Row i judges draft token i."""
        wanted = TargetPass(
            [answer.tokens[-1], *draft.ids],
            parents=[-1, *(parent + 1 for parent in draft.parents)] if draft.branches else None,
            draft=draft if self.controller.gives_way and not draft.branches else None,
            n_best=answer.n_best,
        )
        with nullcontext() if answer.ahead is None else answer.ahead.preparing(answer.tokens, draft):
            return (yield wanted)

    def _verify(self, answer: _Answer, draft: Draft, forward: Forward) -> Verdict:
        """Accept or reject; see ``verification``."""
        params, constraint = answer.params, answer.emitter.constraint
        rows = constraint.rows(forward.logits, draft.ids, params) if constraint else forward.logits
        best = () if forward.ids is None else (forward.ids,)
        try:
            return verify(draft, rows, answer.tokens, params, answer.noise, *best)
        except NotNumbers:
            model = self.target.model
            raise EngineError(f"{model.engine} computes logits of {model.path.name} that are not numbers") from None

    def _force(self, answer: _Answer, index: int) -> Reading[Round]:
        """A round of tokens that nobody chose: target and drafters read them as they read what was accepted."""
        tokens, emitter = answer.tokens, answer.emitter
        forced, started = emitter.forced, time.perf_counter()
        read = [tokens[-1], *forced[:-1]]
        forward = yield TargetPass(read)
        verified = time.perf_counter()
        self.drafters.process(read, forward)
        verdict = Verdict(0, forced[-1], "forced")
        emitted, spans, finish = emitter.emit([(token, "forced", "target") for token in forced], forward.logits)
        if len(emitted) < len(forced):  # they completed a stop string
            self.target.truncate(len(tokens) + len(emitted) - 1)
        settled = [token.id for token in emitted]
        tokens += settled
        self.drafters.accept(settled)
        return Round(
            index=index,
            draft=Draft(),
            verdict=verdict,
            emitted=emitted,
            ms_draft=0.0,
            ms_verify=(verified - started) * 1e3,
            ms_other=(time.perf_counter() - verified) * 1e3,
            n_past=len(tokens) - len(settled) - 1,
            spans=spans,
            reason="the thinking budget was spent, so the block was closed",
            finish_reason=finish,
        )


@dataclass(slots=True)
class _Answer:
    """The answer under way.

    Attributes:
        tokens: everything settled, the prompt included.
        noise: what sampling draws from.
        proposer: draws draft tokens.
        draft_ends: tokens that no draft goes on behind.
        ahead: drafts while the target verifies; None: in the ordinary order.
    """

    tokens: list[int]
    params: SamplingParams
    noise: Noise
    proposer: SamplingProposer
    emitter: _Emitter
    draft_ends: frozenset[int]
    ahead: DraftAhead | None

    @property
    def n_best(self) -> int:
        """How many of the largest logits of a row do for verification; 0: it takes whole rows."""
        takes_rows = self.emitter.constraint is not None or self.emitter.n_logprobs is not None
        return 0 if takes_rows else self.params.n_best


@dataclass(slots=True)
class _Emitter:
    """Verified tokens -> emitted ones, with their text, up to the end of the answer.

    Attributes:
        budget: tokens that may still be emitted.
    """

    text: TextAssembler
    end_tokens: frozenset[int]
    budget: int
    constraint: Constraint | None
    n_logprobs: int | None

    @property
    def room(self) -> int:
        """Most tokens that a draft may have: no round may overrun the answer's budget, or that of thinking."""
        room = self.budget - 1
        return room if self.text.thinking is None else int(min(room, self.text.thinking.room))

    @property
    def thinks(self) -> bool:
        """Whether a thinking block is open."""
        return self.text.thinking is not None and self.text.thinking.inside

    @property
    def forced(self) -> list[int]:
        """The tokens that come next whatever the target says, as many as the answer's budget has room for."""
        return [] if self.text.thinking is None else self.text.thinking.forced[: self.budget]

    def emit(
        self, verified: Sequence[VerifiedToken], rows: Rows
    ) -> tuple[list[EmittedToken], list[Span], FinishReason | None]:
        """Verified tokens, each with its row: emitted, the text that may be shown, and why the answer ends."""
        emitted: list[EmittedToken] = []
        spans: list[Span] = []
        for i, (token, kind, source) in enumerate(verified):
            self.budget -= 1
            is_end = token in self.end_tokens
            if not is_end:
                spans += self.text.push(token, kind, source)
            is_whole = self.constraint.settle(token) if self.constraint and kind != "forced" else False
            logprobs = None if self.n_logprobs is None else token_logprobs(rows[i], token, self.n_logprobs)
            text, thinks = ("", False) if is_end else (self.text.token_text, self.text.token_thinks)
            emitted.append(EmittedToken(token, kind, source, text, logprobs, thinks))
            if is_end or is_whole or self.text.stopped or self.budget <= 0:
                spans += self.text.finish()
                # A stop string that was complete, while a longer one might still have come, ends the answer after all.
                return emitted, spans, "stop" if is_end or is_whole or self.text.stopped else "length"
            if kind != "forced" and self.forced:
                # A block was opened, which ends a draft. At most the target's own token is dropped here, and a forced
                # one takes its place: no position is judged twice, which without a seed would take the same noise.
                break
        return emitted, spans, None


def _verified(draft: Draft, verdict: Verdict) -> list[VerifiedToken]:
    """The accepted draft tokens and the target's own."""
    accepted: list[VerifiedToken] = [(draft[i].id, "accepted", draft[i].source) for i in verdict.accepted]
    return [*accepted, (verdict.next_token, verdict.kind, "target")]
