"""Speculative decoding: draft, verify all of it in one pass of the target, take back what was rejected, emit the rest.

``propose`` says what the next pass of the target is over, ``commit`` makes a round of what it returned. One answer is
a loop over the two; in ``engine.scheduler`` several answers share the passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localspec.backends.base import NORM, Context, Forward, Wanted, layer_name
from localspec.errors import EngineError, LocalspecError, PromptTooLong, UsageError
from localspec.sampling.sampling import Noise, NotNumbers, SamplingParams, token_logprobs
from localspec.spec_decode.ahead import DraftAhead
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Controller, Drafter, Proposer
from localspec.spec_decode.drafters.group import DrafterGroup
from localspec.spec_decode.overlapping import RoundOverlap
from localspec.spec_decode.rounds import Draft, EmittedToken, FinishReason, Round, Span, TokenKind, Verdict
from localspec.spec_decode.verification import Rows, verify

if TYPE_CHECKING:
    from localspec.sampling.constraint import Constraint


VerifiedToken = tuple[int, TokenKind, str]  # id, kind and source

PREFILL_CHUNK = 128  # prompt tokens fed between two looks at the cancel flag: about a second on a slow laptop


@dataclass(frozen=True, slots=True)
class TargetPass:
    """What the next pass of the target is over: ``tokens``, ``logits`` and ``n_best`` as for ``Context.decode``.

    The end of ``draft``, where there is one, may be left out: then the pass has fewer rows. A draft token that was
    sampled may not, nor what comes before it: see ``drafters.base``.
    """

    tokens: Sequence[int]
    logits: Wanted = "all"
    parents: Sequence[int] | None = None  # where they branch, see ``Context.decode_tree``
    draft: Draft | None = None  # that the tokens end with
    n_after: int = 0  # of a prompt, how many tokens are to be read after these
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
    is new. ``prefill`` and ``rounds`` run the target's passes themselves; ``read``, ``start``, ``propose`` and
    ``commit`` are what they are made of, for loops that run the passes of several answers as one.

    Args:
        drafters: in the order in which they were loaded.
        lost: takes a drafter that failed, and why; the answer goes on without it.
        ahead: drafts while the target verifies; None drafts in the ordinary order. For one answer at a time.
        overlap: holds rounds until the next pass has begun; who hands them on then has to ``learn`` from them too.

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
        overlap: RoundOverlap | None = None,
    ) -> None:
        self.ahead, self.overlap = ahead, overlap
        self.target = target
        self.drafters = list(drafters)  # those that have not failed
        self.taps = {tap for drafter in drafters for tap in drafter.info.taps}
        if missing := self.taps.difference(target.hidden):
            raise UsageError(
                f"the target's context was not made to return {sorted(missing)[0]!r}, which a drafter reads"
            )
        self.controller = controller
        self.unread: Sequence[int] = ()  # what the next passes read of the prompt
        self.tokens: list[int] = []  # everything settled, the prompt included
        self.budget = 0  # tokens that may still be emitted
        self.finish_reason: FinishReason | None = None
        self._lost, self._sources = lost, {drafter.info.source for drafter in drafters}
        self._n_chunk = PREFILL_CHUNK
        self._is_open = False
        self._ahead: DraftAhead | None = None  # of this answer: a grammar's state follows one text only
        # Of the round under way: what its pass verifies, if it does; else the tokens that close a thinking block.
        self._verified: Draft | None = None
        self._forced: Sequence[int] = ()
        self._started = self._drafted = self._s_begin = 0.0

    # -- one answer alone --------------------------------------------------------------------------------------------

    def prefill(self, prompt: Sequence[int], cancelled: Callable[[], bool]) -> int:
        """Read a prompt, see ``read``."""
        n_cached = self.read(prompt)
        while self.unread and not cancelled():
            self.commit(self.decode(self.propose()))
        return n_cached

    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        text: TextAssembler,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        constraint: Constraint | None = None,
    ) -> Iterator[Round]:
        """Decode round by round, a ``Round`` per target pass, until the answer ends or the cancel flag is set; see
        ``start``."""
        self.start(prompt, params, text, constraint=constraint)
        try:
            while self.finish_reason is None and not cancelled():
                round_ = self.commit(self.decode(self.propose()))
                assert round_ is not None  # the prompt was read
                yield round_
        finally:
            self.close()

    def decode(self, rows: TargetPass) -> Forward:
        """Run one pass of the target for this answer alone; meanwhile, where that is done, the next draft is made, or
        the round before is handed on."""
        with ExitStack() as stack:
            if self.overlap is not None:
                stack.callback(self.overlap.settle)
            elif self._ahead is not None and self._verified is not None:
                stack.enter_context(self._ahead.preparing(self.tokens, self._verified))
            if rows.parents is not None:
                return self.target.decode_tree(rows.tokens, rows.parents)
            return self.target.decode(rows.tokens, rows.logits, rows.n_best)

    def close(self) -> None:
        """The answer is over, or broken off: what is not settled leaves the target's memory. Safe to call twice."""
        if self.ahead is not None:
            self.ahead.close()
        if self._is_open:
            with suppress(LocalspecError):
                self.target.truncate(min(self.target.n_past, len(self.tokens) - 1))
            self._is_open = False

    # -- what any loop is made of ------------------------------------------------------------------------------------

    def read(self, prompt: Sequence[int], n_chunk: int = PREFILL_CHUNK) -> int:
        """Have ``propose`` and ``commit`` read a prompt, all but its last token, in chunks of so many tokens.

        Returns:
            How many of its tokens were in the target's memory already.

        Raises:
            UsageError: the prompt is empty.
            PromptTooLong: it leaves no room for an answer.
        """
        if not prompt:
            raise UsageError("the prompt is empty: there is nothing to continue")
        if len(prompt) >= self.target.n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and the context holds {self.target.n_ctx}, "
                "answer included; shorten it, or take a larger context: --ctx N, in Python n_ctx=N"
            )
        n_cached = self.target.reuse(prompt[:-1])
        self.unread, self._n_chunk = prompt[n_cached:-1], n_chunk
        self._is_open, self._verified = False, None
        return n_cached

    def start(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        text: TextAssembler,
        n_logprobs: int | None = None,
        constraint: Constraint | None = None,
        prediction: Sequence[int] = (),
    ) -> None:
        """Have ``propose`` and ``commit`` make an answer to a prompt that was read.

        Args:
            prompt, params: the request's.
            text: turns settled tokens into text and watches for stop strings.
            n_logprobs: judge every emitted token by the target's row, naming that many alternatives; None does not.
            constraint: the grammar that the answer follows, at its beginning.
            prediction: a text that the answer is likely to repeat.
        """
        target, self.tokens, self._noise = self.target, list(prompt), Noise(params.seed)
        self.unread, self.finish_reason, self._n_rounds = (), None, 0
        self.budget = min(params.max_tokens or target.n_ctx, target.n_ctx - len(prompt))
        self._is_open, self._verified, self._ahead = True, None, self.ahead if constraint is None else None
        self._params, self._text, self._n_logprobs, self._constraint = params, text, n_logprobs, constraint
        # How many of the largest logits of a row do for verification; 0: it takes whole rows.
        self._n_best = 0 if constraint is not None or n_logprobs is not None else params.n_best
        self._end_tokens: frozenset[int] = frozenset() if params.ignore_eos else target.model.vocab.eog
        draft_ends = self._end_tokens if text.thinking is None else self._end_tokens | text.thinking.draft_ends
        proposer = Proposer(params, self._noise, constraint, target.model.n_vocab)
        self._group = DrafterGroup(self.drafters, proposer, draft_ends, self._lost)
        began = time.perf_counter()
        for drafter in self.drafters:
            drafter.begin(self.tokens, prediction=prediction, target=target)
        if self._ahead is not None:
            self._ahead.begin(self._group)
        self._s_begin = time.perf_counter() - began

    def propose(self) -> TargetPass:
        """What the next pass is over: a chunk of the prompt, or the last settled token and the draft, whose token i is
        judged by row i. The draft is what the drafters propose, as far as the controller lets them; empty is plain
        decoding. Where the budget of a thinking block is spent, the tokens that close it come in its place."""
        if self.unread:
            n = min(self._n_chunk, len(self.unread))
            n_after = len(self.unread) - n
            # These states come with logits only: of the prompt's last token there is one for the first draft.
            late_taps = self.taps and self.taps & {NORM, layer_name(self.target.model.n_layers - 1)}
            return TargetPass(self.unread[:n], "last" if late_taps and not n_after else "none", n_after=n_after)
        thinking, last = self._text.thinking, self.tokens[-1]
        self._forced = [] if thinking is None else thinking.forced[: self.budget]
        # What the drafters did before the first round is a part of it: plain decoding does without.
        self._started, self._verified = time.perf_counter() - self._s_begin, None
        self._s_begin = 0.0
        if self._forced:
            self._drafted = time.perf_counter()
            return TargetPass([last, *self._forced[:-1]])
        target, ahead, room = self.target, self._ahead, self.budget - 1
        n_past, hidden = target.n_past, {} if ahead is None else ahead.hidden
        room = room if thinking is None else int(min(room, thinking.room))  # no round may overrun either budget
        lost = self._sources.difference(drafter.info.source for drafter in self.drafters)
        plan = self.controller.plan(room, n_past, hidden=hidden, lost=lost)
        try:
            if ahead is not None:
                draft = ahead.draft(self.tokens, plan)
            else:
                branching = plan.branching() if target.can_branch and self._constraint is None else None
                draft = self._group.draft(self.tokens, plan, branching)
        finally:
            if target.n_past > n_past:  # a drafter decoded in it
                target.truncate(n_past)
        self._verified, self._drafted = draft, time.perf_counter()
        return TargetPass(
            [last, *draft.ids],
            parents=[-1, *(parent + 1 for parent in draft.parents)] if draft.branches else None,
            draft=draft if plan.gives_way and not draft.branches else None,
            n_best=self._n_best,
        )

    def commit(self, forward: Forward) -> Round | None:
        """Make a round of what the pass returned; None where it was over a chunk of the prompt.

        Invariant, before and after: everything settled is in ``tokens``; the target's memory holds all but the last.
        Where anything fails, tokens and memory are as they were before the round. ``forward`` has fewer rows where the
        end of a draft was left out.
        """
        if self.unread:
            n_read = min(self._n_chunk, len(self.unread))
            chunk, self.unread = self.unread[:n_read], self.unread[n_read:]
            for drafter in self.drafters:
                drafter.process(chunk, forward)
            return None
        n_settled, budget = len(self.tokens), self.budget
        try:
            round_ = self._round(forward)
        except BaseException as error:
            del self.tokens[n_settled:]
            self.budget = budget
            with suppress(LocalspecError):
                self.target.truncate(min(self.target.n_past, n_settled - 1))
            if isinstance(error, NotNumbers):
                model = self.target.model
                raise EngineError(f"{model.engine} computes logits of {model.path.name} that are not numbers") from None
            raise
        self._n_rounds, self.finish_reason = self._n_rounds + 1, round_.finish_reason
        return round_

    def learn(self, round_: Round) -> None:
        if round_.verdict.kind != "forced":
            self.controller.learn(round_)

    # -- the parts of a round ----------------------------------------------------------------------------------------

    def _round(self, forward: Forward) -> Round:
        """Accept or reject the draft, take back what was rejected, emit the rest, learn.

        Tokens that close a thinking block are read as accepted ones, and teach nothing.
        """
        verified = time.perf_counter()
        target, tokens, forced = self.target, self.tokens, self._forced
        replays = target.model.capabilities.rollback == "replay"
        if forced:
            draft, verdict, read = Draft(), Verdict(0, forced[-1], "forced"), [tokens[-1], *forced[:-1]]
            judged: list[VerifiedToken] = [(token, "forced", "target") for token in forced]
        else:
            assert self._verified is not None
            draft = self._verified
            params, constraint, rows = self._params, self._constraint, forward.logits
            if len(rows) <= len(draft):  # the rest gave way to rows of other answers
                draft = Draft(draft[: len(rows) - 1])
            judging: Rows = rows if constraint is None else constraint.rows(rows, draft.ids, params)
            verdict = verify(draft, judging, tokens, params, self._noise, forward.ids)
            read = [tokens[-1], *draft.ids]
            judged = [(draft[i].id, "accepted", draft[i].source) for i in verdict.accepted]
            judged.append((verdict.next_token, verdict.kind, "target"))
        row = forward.logits[verdict.accepted[-1] + 1 if verdict.n_accepted else 0]
        row = row.copy() if replays else row  # which a replay would overwrite
        if draft.branches:  # what lies off the accepted path is as if it had never been
            path = [0, *(i + 1 for i in verdict.accepted)]
            read, forward = [read[i] for i in path], forward.take(path)
            target.keep(path)
        for drafter in self.drafters:
            drafter.process(read, forward)
        # A replay would overwrite the rows that log-probabilities are read from.
        rows = forward.logits.copy() if replays and self._n_logprobs is not None else forward.logits
        rejecting = time.perf_counter()
        target.truncate(len(tokens) + len(judged) - 1)  # rejected draft tokens leave the target's memory
        replayed = time.perf_counter() - rejecting if replays else 0.0  # by another pass, which the width cost too
        emitted, spans, finish = self._emit(judged, rows)
        settled = [token.id for token in emitted]
        tokens += settled
        if target.n_past >= len(tokens):  # the answer ended within the draft
            target.truncate(len(tokens) - 1)
        for drafter in self.drafters:
            drafter.accept(settled)
        round_ = Round(
            index=self._n_rounds,
            draft=draft,
            verdict=verdict,
            emitted=emitted,
            ms_draft=(self._drafted - self._started) * 1e3,
            ms_verify=(verified - self._drafted + replayed) * 1e3,
            n_past=len(tokens) - len(settled) - 1,
            spans=spans,
            reason="the thinking budget was spent, so the block was closed" if forced else "",
            finish_reason=finish,
            ahead=None if self._ahead is None or forced else self._ahead.count,
        )
        if not forced:
            self.controller.observe(round_, row)
            if self.overlap is None:
                self.controller.learn(round_)
        round_.ms_other = (time.perf_counter() - verified - replayed) * 1e3
        return round_

    def _emit(
        self, verified: Sequence[VerifiedToken], rows: Rows
    ) -> tuple[list[EmittedToken], list[Span], FinishReason | None]:
        """Verified tokens, each with its row: emitted, the text that may be shown, and why the answer ends."""
        emitted: list[EmittedToken] = []
        spans: list[Span] = []
        for i, (token, kind, source) in enumerate(verified):
            self.budget -= 1
            is_end = token in self._end_tokens
            if not is_end:
                spans += self._text.push(token, kind, source)
            is_whole = self._constraint.settle(token) if self._constraint and kind != "forced" else False
            logprobs = None if self._n_logprobs is None else token_logprobs(rows[i], token, self._n_logprobs)
            text, thinks = ("", False) if is_end else (self._text.token_text, self._text.token_thinks)
            emitted.append(EmittedToken(token, kind, source, text, logprobs, thinks))
            if is_end or is_whole or self._text.stopped or self.budget <= 0:
                spans += self._text.finish()
                # A stop string that was complete, while a longer one might still have come, ends the answer after all.
                return emitted, spans, "stop" if is_end or is_whole or self._text.stopped else "length"
            if kind != "forced" and self._text.thinking is not None and self._text.thinking.forced:
                # A block was opened, which ends a draft. At most the target's own token is dropped here, and a forced
                # one takes its place: no position is judged twice, which without a seed would take the same noise.
                break
        return emitted, spans, None
