"""Several answers side by side: their rounds become one pass of the target.

Between two passes answers join, end and are cancelled. In every pass each answer has a row for its next token and as
many for draft tokens as they are worth (``controllers.shared_rows``); prompts are read in pieces beside them, so that
nobody's text stalls (``controllers.prompt_pieces``). The memory is one: an answer is let in if what it may
need fits, and one that turns out longer than was reckoned with can be put aside until there is room, and goes on where
it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from localspec.backends.base import ContextState, Forward, Piece, SequenceBatch
from localspec.backends.forward import joined_states
from localspec.controllers.auto_controller import MAX_DRAFT
from localspec.controllers.shared_rows import SharedPasses, ShareOfPass
from localspec.errors import Cancelled, EngineError, LocalspecError
from localspec.prompts.prompts import PromptEncoder
from localspec.runtime.answering import answering
from localspec.runtime.draft_steps import DraftSteps
from localspec.runtime.jobs import FairQueue, Job
from localspec.runtime.pair import Pair
from localspec.runtime.seat import Seat
from localspec.runtime.seating import Seating
from localspec.runtime.state import DecodingState
from localspec.runtime.stream import Reply
from localspec.runtime.under_way import OpenAnswer, Prepared, rank
from localspec.runtime.worker import Worker
from localspec.spec_decode.decoder import PREFILL_CHUNK
from localspec.spec_decode.passes import DraftPass

RECKONED = 1024
"""Tokens that an answer is reckoned with when it is let in, if it may be longer: most are not. With room for two full
contexts, 8 answers to prompts of 1,000 tokens begin at once; one that goes on for longer may have to wait midway."""

SLACK = MAX_DRAFT + 1
"""Room for the rows of a pass, of which those of rejected draft tokens are given back."""


def serve_beside(pair: Pair, encoder: PromptEncoder, worker: Worker) -> None:
    """Have a worker answer as many requests side by side as the pair was loaded for."""
    if pair.parallel.n > 1:
        scheduler = Scheduler(pair, encoder, worker.queue, worker.running)
        worker.serve_beside(scheduler.run, pair.parallel.n)


class Scheduler:
    """Answers requests side by side, on the worker's thread.

    Args:
        pair: what they are answered with.
        encoder: reads prompts.
        queue: where further requests come from.
        running: is kept up to date.
    """

    def __init__(self, pair: Pair, encoder: PromptEncoder, queue: FairQueue, running: list[Job]) -> None:
        self._pair = pair
        self._encoder = encoder
        self._queue = queue
        self._running = running
        self._answers: list[OpenAnswer] = []
        self._next: Prepared | None = None
        self._base: DecodingState | None = None
        self._n_passes = 0

    def run(self, job: Job) -> None:
        """Answer a request, and those that come meanwhile; returns when none is left, or the next has to run alone."""
        try:
            self._look_at_state()
            self._prepare(job)
            while self._answers or self._next:
                self._drop_cancelled()
                self._bring_back()
                self._let_in()
                self._pass()
        except BaseException as error:  # nobody may wait for ever for what goes wrong here
            for answer in list(self._answers):
                self._leave(answer, _raising(error))
            for left in list(self._running):
                self._end(left, _raising(error))
            self._next = None

    def _look_at_state(self) -> None:
        """Between two answers what they are decoded with may have been replaced."""
        base = self._pair.state
        if base is self._base:
            return
        assert base.batch is not None
        self._base = base
        self._batch: SequenceBatch = base.batch
        beside = [draft.memory.batch for draft in base.models if draft.memory.batch is not None]
        self._seating = Seating(self._batch, self._pair.prefix_cache, beside)
        self._states = {0: base}
        self._passes = SharedPasses(base.times, base.target.capabilities.device)
        self._steps = DraftSteps(base.models)

    # -- joining and leaving ---------------------------------------------------------------------------------------

    def _prepare(self, job: Job) -> None:
        """A job's turn has come: it is claimed, and its prompt read; one that fails at that is over."""
        if job not in self._running:
            self._running.append(job)
        if not job.start():
            self._is_over(job)
            return
        try:
            self._next = Prepared(job, job.request.read(self._encoder))
        except BaseException as error:
            self._end(job, _raising(error))

    def _let_in(self) -> None:
        """As many of those that wait as have a sequence and room, in their order."""
        while self._seating.has_free:
            if self._next is None:
                job = self._queue.take()
                if job is None:
                    return
                self._prepare(job)
            elif any(answer.aside is not None for answer in self._answers) or not self._fits(self._next):
                return
            else:
                prepared, self._next = self._next, None
                self._begin(prepared)

    def _needs(self, prepared: Prepared) -> int:
        n_prompt, most = len(prepared.asked[0]), prepared.request.params.max_tokens or RECKONED
        return min(self._batch.n_ctx, n_prompt + min(most, RECKONED) + SLACK)

    def _fits(self, prepared: Prepared) -> bool:
        return not self._answers or self._taken() + self._needs(prepared) <= self._batch.n_cells

    def _taken(self) -> int:
        """Room that is taken, or reckoned with, by the answers that are not put aside."""
        return sum(max(each.needs, self._held(each) + SLACK) for each in self._answers if each.aside is None)

    def _held(self, answer: OpenAnswer) -> int:
        return self._batch[answer.sequence].n_past

    def _begin(self, prepared: Prepared) -> None:
        prompt = prepared.asked[0]
        sequence = self._seating.take(prompt)
        try:
            self._seating.make_room(len(prompt) + SLACK - self._batch[sequence].n_past)
            seat = Seat(self._state_of(sequence), ShareOfPass(self._passes), self._steps.times())
            reading = answering(prepared.request, self._pair, prepared.job, prepared.asked, seat)
            wanted = next(reading)
        except StopIteration as end:
            self._seating.leave(sequence)
            self._end(prepared.job, _returning(end.value))
        except BaseException as error:
            self._seating.leave(sequence)
            self._end(prepared.job, _raising(error))
        else:
            needs = self._needs(prepared)
            self._answers.append(OpenAnswer(prepared.job, reading, sequence, needs, wanted))

    def _state_of(self, sequence: int) -> DecodingState:
        """What an answer in a sequence is decoded with: drafters of its own, which go on with what is said there."""
        if sequence not in self._states:
            self._states[sequence] = self._pair.state.beside(sequence)
        return self._states[sequence]

    def _go_on(self, answer: OpenAnswer, forward: Forward | Exception) -> None:
        """Take an answer to its next pass, or to its end."""
        try:
            answer.forwards, answer.n_fed = [], 0
            if isinstance(forward, Exception):
                answer.wanted = answer.reading.throw(forward)
            else:
                answer.wanted = answer.reading.send(forward)
        except StopIteration as end:
            self._leave(answer, _returning(end.value))
        except BaseException as error:
            self._leave(answer, _raising(error))

    def _leave(self, answer: OpenAnswer, make: Callable[[], Reply]) -> None:
        self._answers.remove(answer)
        self._seating.leave(answer.sequence)
        self._end(answer.job, make)

    def _end(self, job: Job, make: Callable[[], Reply]) -> None:
        job.end(make)
        self._is_over(job)

    def _is_over(self, job: Job) -> None:
        self._running.remove(job)
        self._queue.release(job)

    def _drop_cancelled(self) -> None:
        for answer in list(self._answers):
            if answer.job.stopped():
                self._go_on(answer, Cancelled("the answer was stopped"))
        waiting = self._next
        if waiting is not None and waiting.job.stopped():
            self._next = None
            self._end(waiting.job, lambda: waiting.request.never_ran(waiting.job, self._pair))

    # -- room ------------------------------------------------------------------------------------------------------

    def _put_aside(self, answer: OpenAnswer) -> None:
        """Free what an answer holds; it goes on when there is room again."""
        context = self._batch[answer.sequence]
        answer.aside = list(context.tokens)
        if context.model.capabilities.saves_state:
            with suppress(EngineError, MemoryError):  # then it is read again
                answer.aside = context.export_state()
        context.truncate(0)

    def _bring_back(self) -> None:
        """Go on with answers that were put aside, first come first, where there is room."""
        for answer in sorted(self._answers, key=rank):
            state = answer.aside
            if state is None:
                continue
            n = len(state.tokens if isinstance(state, ContextState) else state)
            alone = all(each.aside is not None for each in self._answers)
            if not alone and self._taken() + min(n + RECKONED, self._batch.n_ctx) > self._batch.n_cells:
                return
            if not self._seating.make_room(n + SLACK):
                return
            answer.aside = None
            context = self._batch[answer.sequence]
            try:
                if isinstance(state, ContextState):
                    context.import_state(state)
                elif state:
                    context.decode(state, "none")
            except LocalspecError as error:
                self._go_on(answer, error)

    # -- passes ----------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        """One pass over the rows of all that are under way, once what they draft is drafted."""
        self._draft()
        pieces = self._pieces()
        while not self._seating.make_room(sum(len(piece.tokens) for _, piece in pieces)):
            there = [answer for answer in self._answers if answer.aside is None]
            if len(there) == 1:
                break  # what one alone may hold there is room for; if not, it is told so
            self._put_aside(max(there, key=rank))
            pieces = self._pieces()
        if not pieces:
            return
        self._n_passes += 1
        started = time.perf_counter()
        try:
            returned: Sequence[Forward | Exception] = self._batch.decode([piece for _, piece in pieces])
        except Exception as error:
            returned = [error] if len(pieces) == 1 else [self._alone(piece) for _, piece in pieces]
        else:
            self._observe(pieces, (time.perf_counter() - started) * 1e3)
        # The logits of all are overwritten by the next pass in this memory, such as one that a drafter runs.
        kept = [_kept(each) if len(pieces) > 1 else each for each in returned]
        for (answer, piece), forward in zip(pieces, kept, strict=True):
            answer.served = self._n_passes
            if isinstance(forward, Exception):
                self._go_on(answer, forward)
                continue
            answer.forwards.append(forward)
            answer.n_fed += len(piece.tokens)
            if answer.decodes or answer.n_fed == len(answer.target_pass.tokens):
                self._go_on(answer, _joined(answer.forwards))

    def _draft(self) -> None:
        """Take the steps of draft models that answers wait for, those of several as one, until none does."""
        self._steps.begin(sum(answer.aside is None for answer in self._answers))
        while waiting := [answer for answer in self._answers if isinstance(answer.wanted, DraftPass)]:
            wanted = [answer.wanted for answer in waiting if isinstance(answer.wanted, DraftPass)]
            for answer, forward in zip(waiting, self._steps.take(wanted), strict=True):
                self._go_on(answer, forward)

    def _pieces(self) -> list[tuple[OpenAnswer, Piece]]:
        """What goes into the next pass."""
        there = [answer for answer in self._answers if answer.aside is None]
        # Those first that have waited longest, so that those who have to wait take turns.
        decoding = sorted((answer for answer in there if answer.decodes), key=lambda answer: answer.served)
        reading = sorted((answer for answer in there if not answer.decodes), key=rank)
        self._passes.n_answers, self._passes.n_cells = len(decoding), self._cells(there)
        unread = [len(answer.target_pass.tokens) - answer.n_fed + answer.target_pass.n_after for answer in reading]
        priorities = [answer.job.priority for answer in reading]
        lengths = self._passes.prompts.divide(len(decoding), unread, priorities, PREFILL_CHUNK)
        pieces: list[tuple[OpenAnswer, Piece]] = []
        for answer, length in zip(reading, lengths, strict=True):
            if not length:
                continue
            wanted, start = answer.target_pass, answer.n_fed
            tokens = wanted.tokens[start : start + length]
            is_end = start + len(tokens) == len(wanted.tokens)
            pieces.append((answer, Piece(answer.sequence, tokens, wanted.logits if is_end else "none")))
        n_other = sum(len(piece.tokens) for _, piece in pieces)
        n_other += sum(answer.target_pass.n_needed - 1 for answer in decoding)
        lengths = self._passes.share([answer.reaches for answer in decoding], n_other)
        for answer, length in zip(decoding, lengths, strict=False):
            tokens = answer.target_pass.tokens[: answer.target_pass.n_needed + length]
            pieces.append((answer, Piece(answer.sequence, tokens)))
        return pieces

    def _alone(self, piece: Piece) -> Forward | Exception:
        """Where a pass of several failed, each finds out whether it was its own doing."""
        try:
            (forward,) = self._batch.decode([piece])
        except Exception as error:
            return error
        return _kept(forward)

    def _observe(self, pieces: Sequence[tuple[OpenAnswer, Piece]], ms: float) -> None:
        width = sum(len(piece.tokens) for _, piece in pieces)
        n_prompt = sum(len(piece.tokens) for answer, piece in pieces if not answer.decodes)
        self._passes.prompts.observe(width - n_prompt, n_prompt, ms)
        if not n_prompt:
            self._passes.observe(width, ms, self._cells([answer for answer, _ in pieces]))
            if len(pieces) == 1:
                self._pair.times.n_past = self._held(pieces[0][0])
                self._pair.times.observe(width, ms)

    def _cells(self, answers: Sequence[OpenAnswer]) -> int:
        """Tokens that a row of one of these passes over: all in the memory, where one pass is over several."""
        if self._batch.model.capabilities.batches:
            return self._batch.n_cells - self._batch.free_cells
        return sum(self._held(answer) for answer in answers) // max(1, len(answers))


def _kept(forward: Forward | Exception) -> Forward | Exception:
    return forward if isinstance(forward, Exception) else Forward(forward.logits.copy(), forward.hidden)


def _joined(forwards: Sequence[Forward]) -> Forward:
    """What several parts of a pass returned, as of one."""
    return forwards[0] if len(forwards) == 1 else Forward(forwards[-1].logits, joined_states(forwards))


def _returning(reply: Reply) -> Callable[[], Reply]:
    return lambda: reply


def _raising(error: BaseException) -> Callable[[], Reply]:
    def make() -> Reply:
        raise error

    return make
