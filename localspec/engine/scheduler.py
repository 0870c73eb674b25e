"""Several answers share passes of the target.

Between two passes answers join, end and are cancelled. In every pass each answer has a row for its next token and as
many for draft tokens as they are worth (``controllers.batching``); prompts are read in pieces with them, small enough
to keep other answers streaming (``controllers.batching``). The memory is one: an answer is admitted if the tokens
reserved for it fit; one that grows longer can be put aside until there is room, and goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, count
from operator import mul

from localspec.backends.base import ContextState, Forward, Piece, SequenceBatch, joined, shared_prefix
from localspec.controllers.auto import MAX_DRAFT
from localspec.controllers.batching import SharedPasses, ShareOfPass
from localspec.engine.answer import OpenAnswer, never_ran
from localspec.engine.pair import Pair
from localspec.engine.prefix_cache import MIN_TOKENS
from localspec.engine.request import Reply
from localspec.engine.state import DecodingState
from localspec.engine.worker import Job
from localspec.errors import Cancelled, EngineError, LocalspecError
from localspec.spec_decode.decoder import PREFILL_CHUNK, TargetPass
from localspec.spec_decode.detokenizer import ThinkingReader

# Requests whose turn has come, and the memory that their answers share.

RESERVED = 1024
"""Tokens reserved at admission for an answer that may be longer, as most are not. With room for two full contexts, 8
answers to prompts of 1,000 tokens begin at once; one that goes on for longer may have to wait midway."""

SLACK = MAX_DRAFT + 1
"""Room for the rows of a pass; those of rejected draft tokens are given back."""


@dataclass(eq=False, slots=True)
class Slot:
    """A request from when its turn has come to its reply.

    Attributes:
        asked: what ``Request.read`` returned.
        needs: tokens reserved for it, its prompt included.
        making: its answer, once it has begun; in ``sequence`` of the memory.
        aside: what its sequence held, where that had to make room; else None.
        rows: what its next pass is over; None between ``commit`` and ``propose``.
        n_fed: of the pass's tokens, how many it has had already; ``forwards``: what they returned.
        served: number of the pass that it last had rows in.
    """

    job: Job
    asked: tuple[list[int], ThinkingReader | None]
    needs: int
    making: OpenAnswer = None  # type: ignore[assignment]
    sequence: int = -1
    aside: ContextState | list[int] | None = None
    rows: TargetPass | None = None
    n_fed: int = 0
    forwards: list[Forward] = field(default_factory=list)
    served: int = 0

    @property
    def rank(self) -> tuple[int, float]:
        """Sorts first what is to go on, or begin, first."""
        return -self.job.priority, self.job.started

    @property
    def n_tokens(self) -> int:
        """Tokens that it begins, or goes on, with."""
        if self.making is None:
            return len(self.asked[0])
        return len(self.aside.tokens if isinstance(self.aside, ContextState) else self.aside or ())

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
        reaches = accumulate((token.expected for token in rows.draft or ()), mul)
        return list(reaches)[max(0, rows.n_needed - 1) :]


class SharedMemory:
    """Which conversation is in which sequence of the target's memory, and whether another one fits.

    ``base`` is the pair's state, which is that of the first sequence; ``passes``: what passes over several answers
    cost.
    """

    def __init__(self, pair: Pair) -> None:
        self.base = pair.state
        assert self.base.batch is not None
        self.batch = self.base.batch
        self.passes = SharedPasses(self.base.times, self.base.target.capabilities.device)
        self._at_once, self._cache = pair.parallel.n, pair.prefix_cache
        # Memories of draft models, with the same conversations in theirs.
        self._others = [draft.memory.batch for draft in self.base.models if draft.memory.batch is not None]
        self._states = {0: self.base}
        self._taken: set[int] = set()
        self._used = [0] * self.batch.n_sequences
        self._clock = count(1)

    def state_of(self, sequence: int) -> DecodingState:
        if sequence not in self._states:
            self._states[sequence] = self.base.beside(sequence)
        return self._states[sequence]

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

    def leave(self, sequence: int) -> None:
        """An answer is over; its conversation stays until the room is needed."""
        self._taken.discard(sequence)
        self._used[sequence] = next(self._clock)

    # -- room ------------------------------------------------------------------------------------------------------

    def preempt(self, one: Slot, there: Sequence[Slot]) -> list[Slot] | None:
        """Which answers of lower priority to put aside so that another can go on; None where it has to wait."""
        if one.making is None and not self.has_free:
            return None
        lower = sorted((slot for slot in there if slot.job.priority < one.job.priority), key=lambda slot: slot.rank)
        staying = list(there)
        while len(staying) >= self._at_once or not self._fits(one, staying):
            if not lower:
                return None
            staying.remove(lower.pop())
        return [slot for slot in there if slot not in staying]

    def _fits(self, one: Slot, there: Sequence[Slot]) -> bool:
        if not there:
            return True
        n = one.n_tokens  # more is reserved than before for an answer that has outgrown it
        n = one.needs if one.needs >= n + SLACK else min(n + RESERVED, self.batch.n_ctx)
        growth = sum(max(each.needs - self.batch[each.sequence].n_past, SLACK) for each in there)
        sequences, cells = [each.sequence for each in there], self.batch.cells
        if cells.n_held(sequences) + growth + n <= self.batch.n_cells:
            return True
        prompt = one.asked[0]
        best = self.batch[self._best_for(prompt)] if one.making is None else None
        shared = None if best is None else self._cache.shareable(best, prompt)
        return shared is not None and (cells.n_held(sequences, *shared) + growth + n - shared[1] <= self.batch.n_cells)

    def make_room_for(self, prompt: Sequence[int], sequence: int) -> None:
        """Have room for a prompt in the sequence taken for it; what it can begin with stays, if it can."""
        shared = self._cache.shareable(self.batch[sequence], prompt)
        if shared is not None:
            source, n = shared  # what the sequence holds makes way for it
            needed = len(prompt) + SLACK - n - self.batch.cells.n_own(sequence)
            if self.make_room(needed, keep=[source]):
                return
        self.make_room(len(prompt) + SLACK - self.batch[sequence].n_past)

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

    def put_aside(self, slot: Slot) -> None:
        context = self.batch[slot.sequence]
        slot.aside = list(context.tokens)
        if context.model.capabilities.saves_state:
            with suppress(EngineError, MemoryError):  # then it is read again
                slot.aside = context.export_state()
        context.truncate(0)

    def bring_back(self, slot: Slot) -> bool:
        """Have an answer where it was before it was put aside; False where there is no room. ``LocalspecError``."""
        if not self.make_room(slot.n_tokens + SLACK):
            return False
        state, slot.aside, context = slot.aside, None, self.batch[slot.sequence]
        if isinstance(state, ContextState):
            context.import_state(state)
        elif state:
            context.decode(state, "none")
        return True

    def cells(self, slots: Sequence[Slot]) -> int:
        """Tokens that a row of one of these passes over: all in the memory, where one pass is over all of it."""
        capabilities = self.batch.model.capabilities
        if capabilities.batches and not capabilities.own_cells:
            return self.batch.n_cells - self.batch.free_cells
        return sum(self.batch[slot.sequence].n_past for slot in slots) // max(1, len(slots))


class Scheduler:
    """Answers several requests at a time, on the worker's thread."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._queue, self._running = pair.worker.queue, pair.worker.running
        self._slots: list[Slot] = []
        self._memory = SharedMemory(pair)

    def run(self, job: Job) -> None:
        """Answer a request, and those that come meanwhile, until none is left or the next has to run alone."""
        try:
            if self._pair.state is not self._memory.base:  # it may be replaced between two answers
                self._memory = SharedMemory(self._pair)
            self._prepare(job)
            while self._slots:
                with self._pair.worker.turns.one():
                    self._drop_cancelled()
                    self._admit()
                    self._propose()
                    pieces = self._pieces_that_fit()
                    for (slot, _), forward in zip(pieces, self._decode(pieces), strict=True):
                        self._commit(slot, forward)
        except BaseException as error:  # no caller may wait for ever for what goes wrong here
            for slot in list(self._slots):
                self._leave(slot, error)
            for left in list(self._running):
                self._end(left, error)

    # -- joining and leaving ---------------------------------------------------------------------------------------

    @property
    def _there(self) -> list[Slot]:
        """Those with an answer in the memory; the others wait for room."""
        return [slot for slot in self._slots if slot.making is not None and slot.aside is None]

    def _prepare(self, job: Job) -> None:
        if job not in self._running:
            self._running.append(job)
        try:
            if job.start():
                n_ctx = self._pair.context.n_ctx
                asked = job.request.read(n_ctx)
                answer = min(job.request.params.max_tokens or RESERVED, RESERVED)
                self._slots.append(Slot(job, asked, min(n_ctx, len(asked[0]) + answer + SLACK)))
            else:
                self._end(job, None)  # cancelled, or too late
        except BaseException as error:
            self._end(job, error)

    def _admit(self) -> None:
        """Begin, or bring back, as many as have a sequence and room, in the order of their rank."""
        while (first := self._first()) is not None:
            way = self._memory.preempt(first, self._there)
            if way is None:
                return
            for slot in way:
                self._memory.put_aside(slot)
            if first.making is None:
                self._begin(first)
                continue
            try:
                if not self._memory.bring_back(first):
                    return
            except LocalspecError as error:
                self._fail(first, error)

    def _first(self) -> Slot | None:
        """What begins, or goes on, next; a request whose turn has come is prepared, if nothing outranks it."""
        while True:
            there = self._there
            first = min((slot for slot in self._slots if slot not in there), key=lambda slot: slot.rank, default=None)
            outranked = [] if first is None else [first.job.priority]
            if len(there) >= self._pair.parallel.n:
                outranked.append(min(slot.job.priority for slot in there))
            job = self._queue.take(above=max(outranked, default=None)) if self._memory.has_free else None
            if job is None:
                return first
            self._prepare(job)

    def _begin(self, slot: Slot) -> None:
        memory, prompt = self._memory, slot.asked[0]
        slot.sequence = memory.take(prompt)
        self._slots.remove(slot)
        self._slots.append(slot)  # they take their turns in the order in which they began
        try:
            memory.make_room_for(prompt, slot.sequence)
            state, shared = memory.state_of(slot.sequence), ShareOfPass(memory.passes)
            slot.making = OpenAnswer(self._pair, state, slot.job, slot.asked, shared=shared)
            memory.put_idle_aside()  # not before: the answer may begin with what one of them holds
        except BaseException as error:
            self._leave(slot, error)

    def _finish(self, slot: Slot) -> None:
        try:
            slot.making.close()
            reply = slot.making.reply()
        except BaseException as error:
            self._leave(slot, error)
        else:
            self._leave(slot, reply)

    def _leave(self, slot: Slot, result: Reply | BaseException) -> None:
        self._slots.remove(slot)
        if slot.making is not None:
            slot.making.close()
        if slot.sequence >= 0:
            self._memory.leave(slot.sequence)
        self._end(slot.job, result)

    def _end(self, job: Job, result: Reply | BaseException | None) -> None:
        if result is not None:
            job.end(result)
        self._running.remove(job)
        self._queue.release(job.conversation)

    def _drop_cancelled(self) -> None:
        for slot in [slot for slot in self._slots if slot.job.stopped()]:
            if slot.making is None:
                self._leave(slot, never_ran(self._pair, slot.job))
            else:
                self._finish(slot)

    # -- passes ----------------------------------------------------------------------------------------------------

    def _propose(self) -> None:
        """Have every answer draft and propose its next pass; one that has no more passes is over."""
        for slot in [each for each in self._there if each.rows is None]:
            try:
                slot.rows = slot.making.propose()
            except BaseException as error:
                self._fail(slot, error)
            else:
                if slot.rows is None:
                    self._finish(slot)

    def _commit(self, slot: Slot, forward: Forward | Exception) -> None:
        """Give an answer its part of a pass; with all of its rows it makes a round."""
        if isinstance(forward, Exception):
            self._fail(slot, forward)
            return
        rows = slot.next_pass
        slot.forwards.append(forward)
        if not slot.decodes and slot.n_fed < len(rows.tokens):
            slot.making.tell_read(slot.n_fed)
            return
        whole = joined(slot.forwards)
        slot.rows, slot.forwards, slot.n_fed = None, [], 0
        try:
            slot.making.commit(whole)
        except BaseException as error:
            self._fail(slot, error)

    def _fail(self, slot: Slot, error: BaseException) -> None:
        """End an answer that raised: as it is where it was cancelled in the middle of a pass, else with the error."""
        if isinstance(error, Cancelled):
            self._finish(slot)
        else:
            self._leave(slot, error)

    def _pieces_that_fit(self) -> list[tuple[Slot, Piece]]:
        """What goes into the next pass; the last in rank are put aside until there is room for it."""
        pieces = self._pieces()
        while not self._memory.make_room(sum(len(piece.tokens) for _, piece in pieces)):
            there = self._there
            if len(there) == 1:
                break  # there is room for what one may hold alone; if not, its pass says so
            self._memory.put_aside(max(there, key=lambda slot: slot.rank))
            pieces = self._pieces()
        return pieces

    def _decode(self, pieces: Sequence[tuple[Slot, Piece]]) -> Sequence[Forward | Exception]:
        if not pieces:
            return []
        counts = self._pair.rows
        counts["passes"] += 1
        for slot, piece in pieces:
            slot.served = counts["passes"]
            counts["answers"] += 1
            counts["own"] += slot.decodes
            counts["drafts" if slot.decodes else "prompts"] += len(piece.tokens) - slot.decodes
        started = time.perf_counter()
        try:
            returned: Sequence[Forward | Exception] = self._memory.batch.decode([piece for _, piece in pieces])
        except Exception as error:
            returned = [error] if len(pieces) == 1 else [self._alone(piece) for _, piece in pieces]
        else:
            self._observe(pieces, (time.perf_counter() - started) * 1e3)
        for slot, piece in pieces:
            slot.n_fed += len(piece.tokens)
        # The logits of all are overwritten by the next pass in this memory, such as one that a drafter runs.
        return [_kept(each) if len(pieces) > 1 else each for each in returned]

    def _pieces(self) -> list[tuple[Slot, Piece]]:
        there = self._there
        # Of one priority those first that have waited longest, so that they take turns.
        decoding = sorted((a for a in there if a.decodes), key=lambda a: (-a.job.priority, a.served))
        reading = sorted((slot for slot in there if not slot.decodes), key=lambda slot: slot.rank)
        passes = self._memory.passes
        passes.n_answers, passes.n_open, passes.n_cells = len(decoding), len(there), self._memory.cells(there)
        unread = [len(slot.next_pass.tokens) - slot.n_fed + slot.next_pass.n_after for slot in reading]
        priorities = [slot.job.priority for slot in reading]
        lengths = passes.prompts.divide(len(decoding), unread, priorities, PREFILL_CHUNK)
        pieces: list[tuple[Slot, Piece]] = []
        for slot, length in zip(reading, lengths, strict=True):
            if not length:
                continue
            rows, start = slot.next_pass, slot.n_fed
            tokens = rows.tokens[start : start + length]
            is_end = start + len(tokens) == len(rows.tokens)
            pieces.append((slot, Piece(slot.sequence, tokens, rows.logits if is_end else "none")))
        n_other = sum(len(piece.tokens) for _, piece in pieces)
        n_other += sum(slot.next_pass.n_needed - 1 for slot in decoding)
        lengths = passes.share([slot.reaches for slot in decoding], n_other)
        for slot, length in zip(decoding, lengths, strict=False):
            tokens = slot.next_pass.tokens[: slot.next_pass.n_needed + length]
            pieces.append((slot, Piece(slot.sequence, tokens)))
        return pieces

    def _alone(self, piece: Piece) -> Forward | Exception:
        """What a piece returns, or how it fails, in a pass of its own after one of several failed."""
        try:
            (forward,) = self._memory.batch.decode([piece])
        except Exception as error:
            return error
        return _kept(forward)

    def _observe(self, pieces: Sequence[tuple[Slot, Piece]], ms: float) -> None:
        width = sum(len(piece.tokens) for _, piece in pieces)
        n_prompt = sum(len(piece.tokens) for slot, piece in pieces if not slot.decodes)
        self._memory.passes.prompts.observe(width - n_prompt, n_prompt, ms)
        if not n_prompt:
            self._memory.passes.observe(width, ms, self._memory.cells([slot for slot, _ in pieces]))
            if len(pieces) == 1:
                self._pair.times.n_past = self._memory.batch[pieces[0][0].sequence].n_past
                self._pair.times.observe(width, ms)


def _kept(forward: Forward | Exception) -> Forward | Exception:
    return forward if isinstance(forward, Exception) else Forward(forward.logits.copy(), forward.hidden)
