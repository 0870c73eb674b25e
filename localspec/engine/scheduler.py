"""Several answers share passes of the target.

Between two passes answers join, end and are cancelled. In every pass each answer has a row for its next token and as
many for draft tokens as they are worth (``controllers.batching``); prompts are read in pieces with them, small enough
to keep other answers streaming (``controllers.batching``). The memory is one: an answer is admitted if the tokens
reserved for it fit; one that grows longer can be put aside until there is room, and goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import count

from localspec.backends.base import ContextState, Forward, Piece, SequenceBatch, joined_states, shared_prefix
from localspec.controllers.auto import MAX_DRAFT
from localspec.controllers.batching import SharedPasses, ShareOfPass
from localspec.engine.pair import OpenAnswer, Pair
from localspec.engine.prefix_cache import MIN_TOKENS, PrefixCache
from localspec.engine.request import AnswerRequest, Reply
from localspec.engine.state import DecodingState
from localspec.engine.worker import Job
from localspec.errors import Cancelled, EngineError, LocalspecError, PromptTooLong, UsageError
from localspec.sampling.sampling import ScoredToken, token_logprobs
from localspec.spec_decode.decoder import PREFILL_CHUNK, TargetPass
from localspec.spec_decode.detokenizer import ThinkingReader
from localspec.spec_decode.rounds import SpecStats

# What the engine's thread does for a request: answer it, or score a given text.

SCORING_CHUNK = 64
"""Tokens scored in one pass; a row of logits each, up to a megabyte for the largest vocabularies."""


def never_ran(request: AnswerRequest, job: Job, pair: Pair) -> Reply:
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


def answer(request: AnswerRequest, pair: Pair, job: Job) -> Reply:
    """Answer a request alone, giving every Round to the job as it happens."""
    asked = request.read(pair.encoder, pair.state.context.n_ctx)
    making = OpenAnswer(
        pair, pair.state, request, asked, job.give, job.stopped, job.started, on_read=job.give, overlaps=True
    )
    with closing(making), suppress(Cancelled):
        while True:
            with pair.worker.turns.one():
                rows = making.propose()
                if rows is None:
                    break
                making.commit(making.decode(rows))
    return making.reply(job)


def score(tokens: Sequence[int], n_top: int, pair: Pair, job: Job) -> list[ScoredToken]:
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
    scored = [ScoredToken(tokens[0], pair.encoder.token_text(tokens[0]), None)]
    for start, logits in pair.read(tokens[:-1], SCORING_CHUNK):
        for i, row in enumerate(logits):
            token = tokens[start + i + 1]
            found = token_logprobs(row, token, n_top)
            scored.append(ScoredToken(token, pair.encoder.token_text(token), found.logprob, found.top))
        if job.stopped():
            raise Cancelled(f"scoring was stopped by its {job.cancelled_by} after {len(scored)} tokens")
    return scored


# Which conversation is in which sequence of a memory that several answers share, and whether another one fits.


class Seating:
    """The sequences of a memory; ``others`` are memories of draft models with the same conversations in theirs."""

    def __init__(self, batch: SequenceBatch, cache: PrefixCache, others: Sequence[SequenceBatch] = ()) -> None:
        self.batch = batch
        self._others = others
        self._cache = cache
        self._taken: set[int] = set()
        self._used = [0] * batch.n_sequences
        self._clock = count(1)

    @property
    def has_free(self) -> bool:
        return len(self._taken) < self.batch.n_sequences

    def take(self, prompt: Sequence[int]) -> int:
        """A sequence for an answer: the one whose conversation the prompt continues, or the first with none to keep.

        What drafts in a sequence learns apart: so requests that come one at a time learn from each other, and for the
        next load. If all hold conversations that stay there, the one least recently used.
        """
        best = self._best_for(prompt)
        self._taken.add(best)
        self._used[best] = next(self._clock)
        return best

    def _best_for(self, prompt: Sequence[int]) -> int:
        free = [i for i in range(self.batch.n_sequences) if i not in self._taken]
        shared = {i: shared_prefix(self.batch[i].tokens, prompt) for i in free}
        best = max(free, key=lambda i: shared[i])
        # What another begins with can be had from there; only what goes on from it is better in its place.
        if shared[best] < max(MIN_TOKENS, len(self.batch[best].tokens) - MIN_TOKENS):
            best = min(free, key=lambda i: self._used[i] if self._stays(self.batch, i) else i - self.batch.n_sequences)
        return best

    def shareable(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """The sequence whose beginning an answer to a prompt would share, and how many tokens; None: nothing."""
        return self._cache.shareable(self.batch[self._best_for(prompt)], prompt)

    def make_room_for(self, prompt: Sequence[int], sequence: int, slack: int) -> None:
        """Have room for a prompt in the sequence taken for it; what it can begin with stays, if it can."""
        needed = len(prompt) + slack - self.batch[sequence].n_past
        shared = self._cache.shareable(self.batch[sequence], prompt)
        if shared is not None:
            source, n = shared  # what the sequence holds makes way for it
            needed = len(prompt) + slack - n - self.batch.cells.n_own(sequence)
            if self.make_room(needed, keep=[source]):
                return
        self.make_room(needed)

    def leave(self, sequence: int) -> None:
        """An answer is over; its conversation stays until the room is needed."""
        self._taken.discard(sequence)
        self._used[sequence] = next(self._clock)

    def put_idle_aside(self) -> None:
        """Put idle conversations aside where the rows of each pass would go over their cells.

        On a CPU copying a token out and in takes as long as going over its cell 10 to 35 times (1.5B on ik-llama), and
        a row does so in every pass. Elsewhere cells are read faster than copied, and what the cache would drop stays.
        """
        for memory in (self.batch, *self._others):
            for i in self._idle():
                if memory[i].tokens and not self._stays(memory, i):
                    self._cache.empty(memory[i])

    def make_room(self, n: int, keep: Iterable[int] = ()) -> bool:
        """Put idle conversations aside, but those in ``keep``, until n more tokens have room; whether they have."""
        idle = [i for i in self._idle() if i not in keep]
        self._empty(self.batch, idle, n)
        # A draft model that has no room drafts nothing, so these need not be asked whether there is enough.
        for memory in self._others:
            unread = sum(max(0, self.batch[i].n_past - memory[i].n_past) for i in self._taken)
            self._empty(memory, idle, unread + n)
        return self.batch.free_cells >= n

    def _stays(self, memory: SequenceBatch, i: int) -> bool:
        """Whether a sequence holds a conversation, and goes on to when another answer begins."""
        costs = memory.shares_prefix and memory.model.capabilities.device == "cpu"
        return bool(memory[i].tokens) and not (costs and self._cache.would_keep(memory[i]))

    def _idle(self) -> list[int]:
        """Sequences without an answer, least recently used first."""
        return sorted(set(range(self.batch.n_sequences)) - self._taken, key=self._used.__getitem__)

    def _empty(self, memory: SequenceBatch, idle: Sequence[int], n: int) -> None:
        for i in idle:
            if memory.free_cells >= n:
                break
            self._cache.empty(memory[i])


# Open answers that share passes, and requests whose turn has come.


@dataclass(eq=False, slots=True)
class SeatedAnswer:
    """An answer that has a sequence.

    Attributes:
        needs: tokens reserved for it.
        rows: what its next pass is over; None between ``commit`` and ``propose``.
        n_fed: of the pass's tokens, how many it has had already.
        forwards: what they returned.
        served: number of the pass that it last had rows in.
        aside: what its sequence held, where that had to make room; else None.
    """

    job: Job
    making: OpenAnswer
    sequence: int
    needs: int
    rows: TargetPass | None = None
    n_fed: int = 0
    forwards: list[Forward] = field(default_factory=list)
    served: int = 0
    aside: ContextState | list[int] | None = None

    @property
    def decodes(self) -> bool:
        """Whether its next pass makes tokens of the answer; else it reads its prompt."""
        return self.next_pass.logits == "all"

    @property
    def next_pass(self) -> TargetPass:
        assert self.rows is not None
        return self.rows

    @property
    def reaches(self) -> list[float]:
        """For each draft token that may be left out, how likely it and those before it are accepted."""
        rows = self.next_pass
        reaches: list[float] = []
        reach = 1.0
        for i, token in enumerate(rows.draft or ()):
            reach *= token.expected
            if 1 + i >= rows.n_needed:
                reaches.append(reach)
        return reaches


@dataclass(eq=False, slots=True)
class Prepared:
    job: Job
    asked: tuple[list[int], ThinkingReader | None]


def rank(answer: SeatedAnswer | Prepared) -> tuple[int, float]:
    """Sorts first what is to go on, or begin, first."""
    return -answer.job.priority, answer.job.started


# Which requests fit into the memory that answers share, and which answers are put aside for them.

RESERVED = 1024
"""Tokens reserved at admission for an answer that may be longer, as most are not. With room for two full contexts, 8
answers to prompts of 1,000 tokens begin at once; one that goes on for longer may have to wait midway."""

SLACK = MAX_DRAFT + 1
"""Room for the rows of a pass, of which those of rejected draft tokens are given back."""


class Admission:
    """Decides which requests have room, by what answers hold and what is reserved for them."""

    def __init__(self, seating: Seating, at_once: int) -> None:
        self._seating = seating
        self._batch = seating.batch
        self._at_once = at_once

    def needs(self, prepared: Prepared) -> int:
        """Tokens to reserve for a request, its prompt included."""
        n_prompt, most = len(prepared.asked[0]), prepared.job.request.params.max_tokens or RESERVED
        return min(self._batch.n_ctx, n_prompt + min(most, RESERVED) + SLACK)

    def preempt(self, one: SeatedAnswer | Prepared, there: Sequence[SeatedAnswer]) -> list[SeatedAnswer] | None:
        """Which answers of lower priority to put aside so that another can go on; None where it has to wait."""
        if isinstance(one, Prepared) and not self._seating.has_free:
            return None
        lower = [a for a in there if a.job.priority < one.job.priority]
        lower.sort(key=rank)
        staying = list(there)
        while len(staying) >= self._at_once or not self._fits(one, staying):
            if not lower:
                return None
            staying.remove(lower.pop())
        return [answer for answer in there if answer not in staying]

    def _fits(self, one: SeatedAnswer | Prepared, there: Sequence[SeatedAnswer]) -> bool:
        if not there:
            return True
        n = self._needs_again(one) if isinstance(one, SeatedAnswer) else self.needs(one)
        growth = sum(max(each.needs - self.held(each), SLACK) for each in there)
        sequences, cells = [each.sequence for each in there], self._batch.cells
        if cells.n_held(sequences) + growth + n <= self._batch.n_cells:
            return True
        shared = self._seating.shareable(one.asked[0]) if isinstance(one, Prepared) else None
        return shared is not None and (cells.n_held(sequences, *shared) + growth + n - shared[1] <= self._batch.n_cells)

    def _needs_again(self, answer: SeatedAnswer) -> int:
        """Tokens to reserve for an answer that was put aside; more than before where it has outgrown them."""
        state = answer.aside or []
        n = len(state.tokens if isinstance(state, ContextState) else state)
        return answer.needs if answer.needs >= n + SLACK else min(n + RESERVED, self._batch.n_ctx)

    def held(self, answer: SeatedAnswer) -> int:
        return self._batch[answer.sequence].n_past


def serve_batch(pair: Pair) -> None:
    if pair.parallel.n > 1:
        pair.worker.batch, pair.worker.queue.at_once = Scheduler(pair).run, pair.parallel.n


@dataclass(slots=True)
class _TargetMemory:
    """What answers share; ``states`` by sequence, of which ``Pair.state`` is the first."""

    batch: SequenceBatch
    seating: Seating
    admission: Admission
    states: dict[int, DecodingState]
    passes: SharedPasses

    @classmethod
    def of(cls, pair: Pair) -> _TargetMemory:
        base = pair.state
        assert base.batch is not None
        others = [draft.memory.batch for draft in base.models if draft.memory.batch is not None]
        seating = Seating(base.batch, pair.prefix_cache, others)
        admission = Admission(seating, pair.parallel.n)
        passes = SharedPasses(base.times, base.target.capabilities.device)
        return cls(base.batch, seating, admission, {0: base}, passes)


class Scheduler:
    """Answers several requests at a time, on the worker's thread."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._queue, self._running = pair.worker.queue, pair.worker.running
        self._answers: list[SeatedAnswer] = []
        self._prepared: list[Prepared] = []
        self._at = _TargetMemory.of(pair)
        self._n_passes = 0

    def run(self, job: Job) -> None:
        """Answer a request, and those that come meanwhile, until none is left or the next has to run alone."""
        try:
            if self._pair.state is not self._at.states[0]:  # it may be replaced between two answers
                self._at = _TargetMemory.of(self._pair)
            self._prepare(job)
            while self._answers or self._prepared:
                with self._pair.worker.turns.one():
                    self._drop_cancelled()
                    self._admit()
                    self._propose()
                    pieces = self._pieces_that_fit()
                    for (answer, _), forward in zip(pieces, self._decode(pieces), strict=True):
                        self._commit(answer, forward)
        except BaseException as error:  # no caller may wait for ever for what goes wrong here
            for answer in list(self._answers):
                self._leave(answer, error)
            for left in list(self._running):
                self._end(left, error)
            self._prepared.clear()

    # -- joining and leaving ---------------------------------------------------------------------------------------

    @property
    def _there(self) -> list[SeatedAnswer]:
        return [answer for answer in self._answers if answer.aside is None]

    def _prepare(self, job: Job) -> None:
        if job not in self._running:
            self._running.append(job)
        try:
            if job.start():
                self._prepared.append(Prepared(job, job.request.read(self._pair.encoder, self._pair.context.n_ctx)))
            else:
                self._end(job, None)  # cancelled, or too late
        except BaseException as error:
            self._end(job, error)

    def _admit(self) -> None:
        """Begin, or bring back, as many as have a sequence and room, in the order of their rank."""
        while (first := self._first()) is not None:
            way = self._at.admission.preempt(first, self._there)
            if way is None:
                return
            for answer in way:
                self._put_aside(answer)
            if isinstance(first, Prepared):
                self._prepared.remove(first)
                self._begin(first)
            elif not self._bring_back(first):
                return

    def _first(self) -> SeatedAnswer | Prepared | None:
        """What begins, or goes on, next; a request whose turn has come is prepared, if nothing outranks it."""
        while True:
            waiting: list[SeatedAnswer | Prepared] = [answer for answer in self._answers if answer.aside is not None]
            waiting += self._prepared
            first = min(waiting, key=rank, default=None)
            outranked = [] if first is None else [first.job.priority]
            if len(self._there) >= self._pair.parallel.n:
                outranked.append(min(answer.job.priority for answer in self._there))
            job = self._queue.take(above=max(outranked, default=None)) if self._at.seating.has_free else None
            if job is None:
                return first
            self._prepare(job)

    def _begin(self, prepared: Prepared) -> None:
        job, asked, seating = prepared.job, prepared.asked, self._at.seating
        sequence = seating.take(asked[0])
        with ExitStack() as undo:
            try:
                seating.make_room_for(asked[0], sequence, SLACK)
                state, shared = self._state_of(sequence), ShareOfPass(self._at.passes)
                making = OpenAnswer(
                    self._pair,
                    state,
                    job.request,
                    asked,
                    job.give,
                    job.stopped,
                    job.started,
                    on_read=job.give,
                    shared=shared,
                )
                undo.callback(making.close)
                seating.put_idle_aside()  # not before: the answer may begin with what one of them holds
            except BaseException as error:
                undo.close()
                seating.leave(sequence)
                self._end(job, error)
            else:
                undo.pop_all()  # it is closed when it is over
                self._answers.append(SeatedAnswer(job, making, sequence, self._at.admission.needs(prepared)))

    def _state_of(self, sequence: int) -> DecodingState:
        if sequence not in self._at.states:
            self._at.states[sequence] = self._pair.state.beside(sequence)
        return self._at.states[sequence]

    def _finish(self, answer: SeatedAnswer) -> None:
        try:
            answer.making.close()
            reply = answer.making.reply(answer.job)
        except BaseException as error:
            self._leave(answer, error)
        else:
            self._leave(answer, reply)

    def _leave(self, answer: SeatedAnswer, result: Reply | BaseException) -> None:
        self._answers.remove(answer)
        answer.making.close()
        self._at.seating.leave(answer.sequence)
        self._end(answer.job, result)

    def _end(self, job: Job, result: Reply | BaseException | None) -> None:
        if isinstance(result, BaseException):
            job.fail(result)
        elif result is not None:
            job.finish(result)
        self._running.remove(job)
        self._queue.release(job)

    def _drop_cancelled(self) -> None:
        for answer in list(self._answers):
            if answer.job.stopped():
                self._finish(answer)
        for waiting in [each for each in self._prepared if each.job.stopped()]:
            self._prepared.remove(waiting)
            self._end(waiting.job, never_ran(waiting.job.request, waiting.job, self._pair))

    # -- room ------------------------------------------------------------------------------------------------------

    def _put_aside(self, answer: SeatedAnswer) -> None:
        context = self._at.batch[answer.sequence]
        answer.aside = list(context.tokens)
        if context.model.capabilities.saves_state:
            with suppress(EngineError, MemoryError):  # then it is read again
                answer.aside = context.export_state()
        context.truncate(0)

    def _bring_back(self, answer: SeatedAnswer) -> bool:
        state = answer.aside or []
        if not self._at.seating.make_room(len(state.tokens if isinstance(state, ContextState) else state) + SLACK):
            return False
        answer.aside = None
        context = self._at.batch[answer.sequence]
        try:
            if isinstance(state, ContextState):
                context.import_state(state)
            elif state:
                context.decode(state, "none")
        except LocalspecError as error:
            self._fail(answer, error)
        return True

    # -- passes ----------------------------------------------------------------------------------------------------

    def _propose(self) -> None:
        """Have every answer draft and propose its next pass; one that has no more passes is over."""
        for answer in [each for each in self._there if each.rows is None]:
            try:
                answer.rows = answer.making.propose()
            except BaseException as error:
                self._fail(answer, error)
            else:
                if answer.rows is None:
                    self._finish(answer)

    def _commit(self, answer: SeatedAnswer, forward: Forward | Exception) -> None:
        """Give an answer its part of a pass; with all of its rows it makes a round."""
        if isinstance(forward, Exception):
            self._fail(answer, forward)
            return
        rows = answer.next_pass
        answer.forwards.append(forward)
        if not answer.decodes and answer.n_fed < len(rows.tokens):
            answer.making.tell_read(answer.n_fed)
            return
        whole = _joined(answer.forwards)
        answer.rows, answer.forwards, answer.n_fed = None, [], 0
        try:
            answer.making.commit(whole)
        except BaseException as error:
            self._fail(answer, error)

    def _fail(self, answer: SeatedAnswer, error: BaseException) -> None:
        """End an answer that raised: as it is where it was cancelled in the middle of a pass, else with the error."""
        if isinstance(error, Cancelled):
            self._finish(answer)
        else:
            self._leave(answer, error)

    def _pieces_that_fit(self) -> list[tuple[SeatedAnswer, Piece]]:
        """What goes into the next pass; the last in rank are put aside until there is room for it."""
        pieces = self._pieces()
        while not self._at.seating.make_room(sum(len(piece.tokens) for _, piece in pieces)):
            there = self._there
            if len(there) == 1:
                break  # there is room for what one may hold alone; if not, its pass says so
            self._put_aside(max(there, key=rank))
            pieces = self._pieces()
        return pieces

    def _decode(self, pieces: Sequence[tuple[SeatedAnswer, Piece]]) -> Sequence[Forward | Exception]:
        if not pieces:
            return []
        self._n_passes += 1
        self._pair.shared.passes += 1
        for answer, piece in pieces:
            answer.served = self._n_passes
            self._pair.shared.add(len(piece.tokens), decodes=answer.decodes)
        started = time.perf_counter()
        try:
            returned: Sequence[Forward | Exception] = self._at.batch.decode([piece for _, piece in pieces])
        except Exception as error:
            returned = [error] if len(pieces) == 1 else [self._alone(piece) for _, piece in pieces]
        else:
            self._observe(pieces, (time.perf_counter() - started) * 1e3)
        for answer, piece in pieces:
            answer.n_fed += len(piece.tokens)
        # The logits of all are overwritten by the next pass in this memory, such as one that a drafter runs.
        return [_kept(each) if len(pieces) > 1 else each for each in returned]

    def _pieces(self) -> list[tuple[SeatedAnswer, Piece]]:
        there = self._there
        # Of one priority those first that have waited longest, so that they take turns.
        decoding = sorted((a for a in there if a.decodes), key=lambda a: (-a.job.priority, a.served))
        reading = sorted((answer for answer in there if not answer.decodes), key=rank)
        passes = self._at.passes
        passes.n_answers, passes.n_open, passes.n_cells = len(decoding), len(there), self._cells(there)
        unread = [len(answer.next_pass.tokens) - answer.n_fed + answer.next_pass.n_after for answer in reading]
        priorities = [answer.job.priority for answer in reading]
        lengths = passes.prompts.divide(len(decoding), unread, priorities, PREFILL_CHUNK)
        pieces: list[tuple[SeatedAnswer, Piece]] = []
        for answer, length in zip(reading, lengths, strict=True):
            if not length:
                continue
            rows, start = answer.next_pass, answer.n_fed
            tokens = rows.tokens[start : start + length]
            is_end = start + len(tokens) == len(rows.tokens)
            pieces.append((answer, Piece(answer.sequence, tokens, rows.logits if is_end else "none")))
        n_other = sum(len(piece.tokens) for _, piece in pieces)
        n_other += sum(answer.next_pass.n_needed - 1 for answer in decoding)
        lengths = passes.share([answer.reaches for answer in decoding], n_other)
        for answer, length in zip(decoding, lengths, strict=False):
            tokens = answer.next_pass.tokens[: answer.next_pass.n_needed + length]
            pieces.append((answer, Piece(answer.sequence, tokens)))
        return pieces

    def _alone(self, piece: Piece) -> Forward | Exception:
        """What a piece returns, or how it fails, in a pass of its own after one of several failed."""
        try:
            (forward,) = self._at.batch.decode([piece])
        except Exception as error:
            return error
        return _kept(forward)

    def _observe(self, pieces: Sequence[tuple[SeatedAnswer, Piece]], ms: float) -> None:
        width = sum(len(piece.tokens) for _, piece in pieces)
        n_prompt = sum(len(piece.tokens) for answer, piece in pieces if not answer.decodes)
        self._at.passes.prompts.observe(width - n_prompt, n_prompt, ms)
        if not n_prompt:
            self._at.passes.observe(width, ms, self._cells([answer for answer, _ in pieces]))
            if len(pieces) == 1:
                self._pair.times.n_past = self._at.admission.held(pieces[0][0])
                self._pair.times.observe(width, ms)

    def _cells(self, answers: Sequence[SeatedAnswer]) -> int:
        """Tokens that a row of one of these passes over: all in the memory, where one pass is over all of it."""
        capabilities = self._at.batch.model.capabilities
        if capabilities.batches and not capabilities.own_cells:
            return self._at.batch.n_cells - self._at.batch.free_cells
        return sum(self._at.admission.held(answer) for answer in answers) // max(1, len(answers))


def _kept(forward: Forward | Exception) -> Forward | Exception:
    return forward if isinstance(forward, Exception) else Forward(forward.logits.copy(), forward.hidden)


def _joined(forwards: Sequence[Forward]) -> Forward:
    return forwards[0] if len(forwards) == 1 else Forward(forwards[-1].logits, joined_states(forwards))
