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
from dataclasses import dataclass

from localspec.backends.base import ContextState, Forward, Piece, SequenceBatch
from localspec.backends.forward import joined_states
from localspec.controllers.shared_rows import SharedPasses, ShareOfPass
from localspec.errors import Cancelled, EngineError, LocalspecError
from localspec.prompts.prompts import PromptEncoder
from localspec.runtime.admission import SLACK, Admission
from localspec.runtime.answering import answering, never_ran
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


def serve_beside(pair: Pair, encoder: PromptEncoder, worker: Worker) -> None:
    """Have a worker answer as many requests side by side as the pair was loaded for."""
    if pair.parallel.n > 1:
        scheduler = Scheduler(pair, encoder, worker.queue, worker.running)
        worker.serve_beside(scheduler.run, pair.parallel.n)


@dataclass(slots=True)
class _Memory:
    """What answers share.

    Attributes:
        batch: the target's memory.
        seating: which conversation is where in it.
        admission: who fits.
        states: what an answer in a sequence is decoded with, by its number; ``Pair.state`` is that of the first.
        passes: what passes cost.
        steps: passes of draft models.
    """

    batch: SequenceBatch
    seating: Seating
    admission: Admission
    states: dict[int, DecodingState]
    passes: SharedPasses
    steps: DraftSteps

    @classmethod
    def of(cls, pair: Pair) -> _Memory:
        base = pair.state
        assert base.batch is not None
        beside = [draft.memory.batch for draft in base.models if draft.memory.batch is not None]
        seating = Seating(base.batch, pair.prefix_cache, beside)
        admission = Admission(seating, pair.parallel.n)
        passes = SharedPasses(base.times, base.target.capabilities.device)
        return cls(base.batch, seating, admission, {0: base}, passes, DraftSteps(base.models))


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
        self._prepared: list[Prepared] = []
        self._at = _Memory.of(pair)
        self._n_passes = 0

    def run(self, job: Job) -> None:
        """Answer a request, and those that come meanwhile; returns when none is left, or the next has to run alone."""
        try:
            if self._pair.state is not self._at.states[0]:  # it may be replaced between two answers
                self._at = _Memory.of(self._pair)
            self._prepare(job)
            while self._answers or self._prepared:
                self._drop_cancelled()
                self._at.steps.begin(len(self._there))
                self._draft()  # first, as only answers whose draft is made can make way
                self._let_in()
                self._pass()
        except BaseException as error:  # nobody may wait for ever for what goes wrong here
            for answer in list(self._answers):
                self._leave(answer, _raising(error))
            for left in list(self._running):
                self._end(left, _raising(error))
            self._prepared.clear()

    # -- joining and leaving ---------------------------------------------------------------------------------------

    @property
    def _there(self) -> list[OpenAnswer]:
        """The answers that are not put aside."""
        return [answer for answer in self._answers if answer.aside is None]

    def _prepare(self, job: Job) -> None:
        """A job's turn has come: it is claimed, and its prompt read; one that fails at that is over."""
        if job not in self._running:
            self._running.append(job)
        if not job.start():
            self._is_over(job)
            return
        try:
            self._prepared.append(Prepared(job, job.request.read(self._encoder, self._pair.context.n_ctx)))
        except BaseException as error:
            self._end(job, _raising(error))

    def _let_in(self) -> None:
        """As many of those that wait, or were put aside, as have a sequence and room, in the order of their rank."""
        while (first := self._first()) is not None:
            way = self._at.admission.make_way(first, self._there)
            if way is None:
                return
            for answer in way:
                self._put_aside(answer)
            if isinstance(first, Prepared):
                self._prepared.remove(first)
                self._begin(first)
            elif not self._bring_back(first):
                return

    def _first(self) -> OpenAnswer | Prepared | None:
        """Who is to begin, or go on, next; a request whose turn has come is prepared, if nothing outranks it."""
        while True:
            waiting: list[OpenAnswer | Prepared] = [answer for answer in self._answers if answer.aside is not None]
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
        prompt = prepared.asked[0]
        sequence = self._at.seating.take(prompt)
        try:
            self._at.seating.make_room_for(prompt, sequence, SLACK)
            seat = Seat(self._state_of(sequence), ShareOfPass(self._at.passes), self._at.steps.times())
            reading = answering(prepared.request, self._pair, prepared.job, prepared.asked, seat)
            wanted = next(reading)
            self._at.seating.put_idle_aside()  # not before: the answer may begin with what one of them holds
        except StopIteration as end:
            self._at.seating.leave(sequence)
            self._end(prepared.job, _returning(end.value))
        except BaseException as error:
            self._at.seating.leave(sequence)
            self._end(prepared.job, _raising(error))
        else:
            needs = self._at.admission.needs(prepared)
            self._answers.append(OpenAnswer(prepared.job, reading, sequence, needs, wanted))

    def _state_of(self, sequence: int) -> DecodingState:
        """What an answer in a sequence is decoded with: drafters of its own, which go on with what is said there."""
        if sequence not in self._at.states:
            self._at.states[sequence] = self._pair.state.beside(sequence)
        return self._at.states[sequence]

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
        self._at.seating.leave(answer.sequence)
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
        for waiting in [each for each in self._prepared if each.job.stopped()]:
            self._prepared.remove(waiting)
            self._end(waiting.job, _returning(never_ran(waiting.request, waiting.job, self._pair)))

    # -- room ------------------------------------------------------------------------------------------------------

    def _put_aside(self, answer: OpenAnswer) -> None:
        """Free what an answer holds; it goes on when there is room again."""
        context = self._at.batch[answer.sequence]
        answer.aside = list(context.tokens)
        if context.model.capabilities.saves_state:
            with suppress(EngineError, MemoryError):  # then it is read again
                answer.aside = context.export_state()
        context.truncate(0)

    def _bring_back(self, answer: OpenAnswer) -> bool:
        """Go on with an answer that was put aside; False if there is no room after all."""
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
            self._go_on(answer, error)
        return True

    # -- passes ----------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        """One pass over the rows of all that are under way, once what they draft is drafted."""
        self._draft()
        pieces = self._pieces()
        while not self._at.seating.make_room(sum(len(piece.tokens) for _, piece in pieces)):
            there = self._there
            if len(there) == 1:
                break  # what one alone may hold there is room for; if not, it is told so
            self._put_aside(max(there, key=rank))
            pieces = self._pieces()
        if not pieces:
            return
        self._n_passes += 1
        self._pair.shared.passes += 1
        for answer, piece in pieces:
            self._pair.shared.add(len(piece.tokens), decodes=answer.decodes)
        started = time.perf_counter()
        try:
            returned: Sequence[Forward | Exception] = self._at.batch.decode([piece for _, piece in pieces])
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
        while waiting := [answer for answer in self._answers if isinstance(answer.wanted, DraftPass)]:
            wanted = [answer.wanted for answer in waiting if isinstance(answer.wanted, DraftPass)]
            for answer, forward in zip(waiting, self._at.steps.take(wanted), strict=True):
                self._go_on(answer, forward)

    def _pieces(self) -> list[tuple[OpenAnswer, Piece]]:
        """What goes into the next pass."""
        there = self._there
        # Of one priority those first that have waited longest, so that those who have to wait take turns.
        decoding = sorted((a for a in there if a.decodes), key=lambda a: (-a.job.priority, a.served))
        reading = sorted((answer for answer in there if not answer.decodes), key=rank)
        passes = self._at.passes
        passes.n_answers, passes.n_under_way, passes.n_cells = len(decoding), len(there), self._cells(there)
        unread = [len(answer.target_pass.tokens) - answer.n_fed + answer.target_pass.n_after for answer in reading]
        priorities = [answer.job.priority for answer in reading]
        lengths = passes.prompts.divide(len(decoding), unread, priorities, PREFILL_CHUNK)
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
        lengths = passes.share([answer.reaches for answer in decoding], n_other)
        for answer, length in zip(decoding, lengths, strict=False):
            tokens = answer.target_pass.tokens[: answer.target_pass.n_needed + length]
            pieces.append((answer, Piece(answer.sequence, tokens)))
        return pieces

    def _alone(self, piece: Piece) -> Forward | Exception:
        """Where a pass of several failed, each finds out whether it was its own doing."""
        try:
            (forward,) = self._at.batch.decode([piece])
        except Exception as error:
            return error
        return _kept(forward)

    def _observe(self, pieces: Sequence[tuple[OpenAnswer, Piece]], ms: float) -> None:
        width = sum(len(piece.tokens) for _, piece in pieces)
        n_prompt = sum(len(piece.tokens) for answer, piece in pieces if not answer.decodes)
        self._at.passes.prompts.observe(width - n_prompt, n_prompt, ms)
        if not n_prompt:
            self._at.passes.observe(width, ms, self._cells([answer for answer, _ in pieces]))
            if len(pieces) == 1:
                self._pair.times.n_past = self._at.admission.held(pieces[0][0])
                self._pair.times.observe(width, ms)

    def _cells(self, answers: Sequence[OpenAnswer]) -> int:
        """Tokens that a row of one of these passes over: all in the memory, where one pass is over all of it."""
        capabilities = self._at.batch.model.capabilities
        if capabilities.batches and not capabilities.own_cells:
            return self._at.batch.n_cells - self._at.batch.free_cells
        return sum(self._at.admission.held(answer) for answer in answers) // max(1, len(answers))


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
