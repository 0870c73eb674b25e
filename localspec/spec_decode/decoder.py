"""Speculative decoding: draft, verify all of it in one pass of the target, take back what was rejected, emit the rest.

``propose`` says what the next pass of the target is over, ``commit`` makes a round of what it returned. One answer is
a loop over the two; in ``engine.scheduler`` several answers share the passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from localspec.backends.base import NORM, Context, Forward, Wanted, layer_name
from localspec.errors import EngineError, LocalspecError, PromptTooLong, UsageError
from localspec.sampling.sampling import Noise, NotNumbers, SamplingParams, token_logprobs
from localspec.spec_decode.ahead import DraftAhead
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Controller, Drafter
from localspec.spec_decode.drafters.group import DrafterGroup
from localspec.spec_decode.proposer import Proposer
from localspec.spec_decode.rounds import Draft, EmittedToken, FinishReason, Round, Span, TokenKind, Verdict
from localspec.spec_decode.verification import Rows, verify

if TYPE_CHECKING:
    from localspec.sampling.constraint import Constraint


VerifiedToken = tuple[int, TokenKind, str]
"""Token id, kind and source."""

PREFILL_CHUNK = 128
"""Prompt tokens fed between two looks at the cancel flag: about a second on a slow laptop."""


@dataclass(frozen=True, slots=True)
class TargetPass:
    """What the next pass of the target is over.

    Attributes:
        tokens: what comes next in the target's memory.
        logits: which rows are wanted, see ``Context.decode``.
        parents: where they branch, which of them each follows, see ``Context.decode_tree``; all rows are wanted then.
        draft: the draft that the tokens end with, if the last ones of it may be left out: then the pass has fewer rows.
            A draft token that was sampled may not, nor what comes before it: see ``drafters.base``.
        n_after: of a prompt, how many tokens are to be read after these.
        n_best: how many of the largest logits of each row are enough, see ``Context.decode_best``; 0 wants whole rows.
    """

    tokens: Sequence[int]
    logits: Wanted = "all"
    parents: Sequence[int] | None = None
    draft: Draft | None = None
    n_after: int = 0
    n_best: int = 0

    @property
    def n_needed(self) -> int:
        """How many of the tokens, from the first, cannot be left out."""
        if self.draft is None:
            return len(self.tokens)
        sampled = [i for i, token in enumerate(self.draft) if token.dist is not None]
        return len(self.tokens) - len(self.draft) + (sampled[-1] + 1 if sampled else 0)


class SpeculativeDecoder:
    """Decodes with a target context and any number of drafters, one answer at a time.

    Between calls the target context holds a prefix of all settled tokens, so a prompt that continues it costs only what
    is new. Plain decoding is the same loop with an empty draft.

    ``prefill`` and ``rounds`` run the target's passes themselves. ``read``, ``start``, ``propose`` and ``commit`` are
    what they are made of, for loops that run the passes of several answers as one.

    Args:
        target: the target's context.
        drafters: in the order they are asked.
        controller: decides how far to draft.
        lost: takes a drafter that failed, and why; the answer goes on without it.
        ahead: drafts while the target verifies; None drafts in the ordinary order. For one answer at a time.
        learns_later: leaves it to the caller to ``learn`` from each round.

    Attributes:
        finish_reason: why the answer ended; None until it does.

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
        learns_later: bool = False,
    ) -> None:
        self.ahead = ahead
        self.target = target
        self.drafters = DrafterGroup(drafters, self._without)
        if missing := self.drafters.taps.difference(target.hidden):
            raise UsageError(
                f"the target's context was not made to return {sorted(missing)[0]!r}, which a drafter reads"
            )
        self.controller = controller
        self.finish_reason: FinishReason | None = None
        self._lost = lost
        self._learns_later = learns_later
        self._failed: set[str] = set()
        self._unread: Sequence[int] = ()
        self._n_chunk = PREFILL_CHUNK
        self._answer: _Answer | None = None

    def _without(self, drafter: Drafter, why: str) -> None:
        self._failed.add(drafter.info.source)
        self._lost(drafter, why)

    # -- one answer alone --------------------------------------------------------------------------------------------

    def prefill(self, prompt: Sequence[int], cancelled: Callable[[], bool]) -> int:
        """Bring the target up to all of the prompt but its last token.

        Returns:
            How many prompt tokens were in its memory already.

        Raises:
            UsageError: the prompt is empty.
            PromptTooLong: it leaves no room for an answer.
        """
        n_cached = self.read(prompt)
        while self.is_reading and not cancelled():
            self.commit(self.decode(self.propose()))
        return n_cached

    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        text: TextAssembler,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        n_logprobs: int | None = None,
        constraint: Constraint | None = None,
        prediction: Sequence[int] = (),
    ) -> Iterator[Round]:
        """Decode round by round until an end token, a stop string, the budget or the cancel flag.

        Args:
            prompt: token ids, already prefilled.
            params: the sampling parameters.
            text: turns settled tokens into text and watches for stop strings.
            cancelled: polled once a round.
            n_logprobs: judge every emitted token by the target's row, naming that many alternatives; None does not.
            constraint: the grammar that the answer follows, at its beginning.
            prediction: a text that the answer is likely to repeat.

        Returns:
            One ``Round`` per target pass; the last one carries ``finish_reason``.
        """
        self.start(prompt, params, text, n_logprobs, constraint, prediction)
        try:
            while self.finish_reason is None and not cancelled():
                round_ = self.commit(self.decode(self.propose()))
                assert round_ is not None  # the prompt was read
                yield round_
        finally:
            self.close()

    def decode(self, rows: TargetPass) -> Forward:
        """Run one pass of the target for this answer alone; beside it, where that is done, the next draft is made."""
        answer, target = self._answer, self.target
        draft = None if answer is None else answer.draft
        beside = answer.ahead.preparing(answer.tokens, draft) if answer and answer.ahead and draft is not None else None
        with beside or nullcontext():
            if rows.parents is not None:
                return target.decode_tree(rows.tokens, rows.parents)
            if rows.n_best:
                return target.decode_best(rows.tokens, rows.n_best)
            return target.decode(rows.tokens, rows.logits)

    def close(self) -> None:
        """The answer is over, or broken off: what is not settled leaves the target's memory. Safe to call twice."""
        if self.ahead is not None:
            self.ahead.close()
        if self._answer is not None:
            with suppress(LocalspecError):
                self.target.truncate(min(self.target.n_past, len(self._answer.tokens) - 1))
            self._answer = None

    # -- what any loop is made of ------------------------------------------------------------------------------------

    def read(self, prompt: Sequence[int], n_chunk: int = PREFILL_CHUNK) -> int:
        """Have ``propose`` and ``commit`` read a prompt, all but its last token, in chunks of so many tokens.

        Returns, Raises: as ``prefill``.
        """
        if not prompt:
            raise UsageError("the prompt is empty: there is nothing to continue")
        if len(prompt) >= self.target.n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and the context holds {self.target.n_ctx}, "
                "answer included; shorten it, or take a larger context: --ctx N, in Python n_ctx=N"
            )
        n_cached = self.target.reuse(prompt[:-1])
        self._unread, self._n_chunk, self._answer = prompt[n_cached:-1], n_chunk, None
        return n_cached

    @property
    def is_reading(self) -> bool:
        """Whether the next pass reads a chunk of the prompt."""
        return len(self._unread) > 0

    def start(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        text: TextAssembler,
        n_logprobs: int | None = None,
        constraint: Constraint | None = None,
        prediction: Sequence[int] = (),
    ) -> None:
        """Have ``propose`` and ``commit`` make an answer to a prompt that was read; arguments as for ``rounds``."""
        target, tokens, noise = self.target, list(prompt), Noise(params.seed)
        proposer = Proposer(params, noise, constraint, target.model.n_vocab)
        end_tokens = frozenset() if params.ignore_eos else target.model.vocab.eog
        budget = min(params.max_tokens or target.n_ctx, target.n_ctx - len(tokens))
        emitter = _Emitter(text, end_tokens, budget, constraint, n_logprobs)
        draft_ends = end_tokens if text.thinking is None else end_tokens | text.thinking.draft_ends
        ahead = self.ahead if constraint is None else None  # a grammar's state follows one text only
        self._answer = _Answer(tokens, params, noise, proposer, emitter, draft_ends, ahead)
        self._unread, self.finish_reason = (), None
        self.drafters.begin(tokens, prediction, target)
        if ahead is not None:
            ahead.begin(self.drafters, proposer, draft_ends)

    def propose(self) -> TargetPass:
        """What the next pass is over: a chunk of the prompt, or the last settled token and what is to be verified.

        Of an answer, row i judges draft token i. Where the budget of a thinking block is spent, the tokens that close
        it come in the draft's place.
        """
        if self._unread:
            return self._chunk()
        answer = self._answer
        assert answer is not None
        answer.started, answer.draft, answer.forced = time.perf_counter(), None, answer.emitter.forced
        if answer.forced:
            answer.drafted = answer.started
            return TargetPass([answer.tokens[-1], *answer.forced[:-1]])
        draft = answer.draft = self._draft(answer)
        answer.drafted = time.perf_counter()
        return TargetPass(
            [answer.tokens[-1], *draft.ids],
            parents=[-1, *(parent + 1 for parent in draft.parents)] if draft.branches else None,
            draft=draft if answer.gives_way and not draft.branches else None,
            n_best=answer.n_best,
        )

    def commit(self, forward: Forward) -> Round | None:
        """Make a round of what the pass over ``propose`` returned; None where it was over a chunk of the prompt.

        Invariant, before and after: everything settled is in ``tokens``; the target's memory holds all but the last.
        Where anything fails, tokens and memory are as they were before the round.

        Args:
            forward: a row for each token; fewer where the end of a draft was left out, see ``TargetPass.draft``.
        """
        if self._unread:
            n_read = min(self._n_chunk, len(self._unread))
            chunk, self._unread = self._unread[:n_read], self._unread[n_read:]
            self.drafters.process(chunk, forward)
            return None
        answer = self._answer
        assert answer is not None
        n_settled, budget = len(answer.tokens), answer.emitter.budget
        try:
            round_ = self._forced(answer, forward) if answer.forced else self._verified(answer, forward)
        except BaseException:
            del answer.tokens[n_settled:]
            answer.emitter.budget = budget
            with suppress(LocalspecError):
                self.target.truncate(min(self.target.n_past, n_settled - 1))
            raise
        answer.n_rounds, self.finish_reason = answer.n_rounds + 1, round_.finish_reason
        return round_

    def learn(self, round_: Round) -> None:
        """What a finished round teaches the controller; forced tokens teach nothing. ``commit`` does it, or it is left
        to the caller."""
        if round_.verdict.kind != "forced":
            self.controller.learn(round_)

    # -- the parts of a round ----------------------------------------------------------------------------------------

    def _chunk(self) -> TargetPass:
        n = min(self._n_chunk, len(self._unread))
        n_after = len(self._unread) - n
        # These states come with logits only: of the prompt's last token there is one for the first draft to go on from.
        has_late_tap = not self.drafters.taps.isdisjoint((NORM, layer_name(self.target.model.n_layers - 1)))
        logits: Literal["last", "none"] = "last" if has_late_tap and not n_after else "none"
        return TargetPass(self._unread[:n], logits, n_after=n_after)

    def _draft(self, answer: _Answer) -> Draft:
        """What the drafters propose, as far as the controller lets them; empty is plain decoding."""
        emitter, ahead = answer.emitter, answer.ahead
        hidden = {} if ahead is None else ahead.hidden
        plan = self.controller.plan(
            emitter.room, self.target.n_past, thinks=emitter.thinks, hidden=hidden, lost=self._failed
        )
        answer.gives_way = plan.gives_way
        n_past = self.target.n_past
        try:
            if ahead is not None:
                return ahead.draft(answer.tokens, plan)
            may_branch = self.target.can_branch and emitter.constraint is None
            branching = plan.branching() if may_branch else None
            return self.drafters.draft(answer.tokens, plan, answer.proposer, answer.draft_ends, branching)
        finally:
            if self.target.n_past > n_past:  # a drafter decoded in it
                self.target.truncate(n_past)

    def _verified(self, answer: _Answer, forward: Forward) -> Round:
        """Accept or reject the draft, take back what was rejected, emit the rest, learn."""
        verified = time.perf_counter()
        target, tokens, replays = self.target, answer.tokens, self.target.model.capabilities.rollback == "replay"
        assert answer.draft is not None
        draft = answer.draft.first(len(forward) - 1)  # the rest gave way to rows of other answers
        verdict = self._verify(answer, draft, forward)
        row = forward.logits[verdict.last_accepted + 1]
        row = row.copy() if replays else row  # which a replay would overwrite
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
        emitted, spans, finish = answer.emitter.emit(_judged(draft, verdict), rows)
        settled = [token.id for token in emitted]
        tokens += settled
        if target.n_past >= len(tokens):  # the answer ended within the draft
            target.truncate(len(tokens) - 1)
        self.drafters.accept(settled)
        round_ = Round(
            index=answer.n_rounds,
            draft=draft,
            verdict=verdict,
            emitted=emitted,
            ms_draft=(answer.drafted - answer.started) * 1e3,
            ms_verify=(verified - answer.drafted + replayed) * 1e3,
            n_past=len(tokens) - len(settled) - 1,
            spans=spans,
            finish_reason=finish,
            ahead=None if answer.ahead is None else answer.ahead.count,
        )
        self.controller.observe(round_, row)
        if not self._learns_later:
            self.learn(round_)
        round_.ms_other = (time.perf_counter() - verified - replayed) * 1e3
        return round_

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

    def _forced(self, answer: _Answer, forward: Forward) -> Round:
        """A round of tokens that close a thinking block: target and drafters read them as accepted ones."""
        verified = time.perf_counter()
        tokens, forced = answer.tokens, answer.forced
        self.drafters.process([tokens[-1], *forced[:-1]], forward)
        verdict = Verdict(0, forced[-1], "forced")
        emitted, spans, finish = answer.emitter.emit([(token, "forced", "target") for token in forced], forward.logits)
        if len(emitted) < len(forced):  # they completed a stop string
            self.target.truncate(len(tokens) + len(emitted) - 1)
        settled = [token.id for token in emitted]
        tokens += settled
        self.drafters.accept(settled)
        return Round(
            index=answer.n_rounds,
            draft=Draft(),
            verdict=verdict,
            emitted=emitted,
            ms_draft=0.0,
            ms_verify=(verified - answer.started) * 1e3,
            ms_other=(time.perf_counter() - verified) * 1e3,
            n_past=len(tokens) - len(settled) - 1,
            spans=spans,
            reason="the thinking budget was spent, so the block was closed",
            finish_reason=finish,
        )


@dataclass(slots=True)
class _Answer:
    """The answer that is being made.

    Attributes:
        tokens: everything settled, the prompt included.
        noise: what sampling draws from.
        proposer: draws draft tokens.
        draft_ends: tokens that no draft goes on behind.
        ahead: drafts while the target verifies; None: in the ordinary order.
        n_rounds: rounds so far.
        draft: what the round's pass verifies; None where it is over tokens that are not verified.
        gives_way: whether its end may be left out, see ``Plan``.
        forced: the tokens that close a thinking block, where that is this round's pass.
        started, drafted: when ``propose`` began and ended.
    """

    tokens: list[int]
    params: SamplingParams
    noise: Noise
    proposer: Proposer
    emitter: _Emitter
    draft_ends: frozenset[int]
    ahead: DraftAhead | None
    n_rounds: int = 0
    draft: Draft | None = None
    gives_way: bool = False
    forced: Sequence[int] = ()
    started: float = 0.0
    drafted: float = 0.0

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


def _judged(draft: Draft, verdict: Verdict) -> list[VerifiedToken]:
    """The accepted draft tokens and the target's own."""
    accepted: list[VerifiedToken] = [(draft[i].id, "accepted", draft[i].source) for i in verdict.accepted]
    return [*accepted, (verdict.next_token, verdict.kind, "target")]
