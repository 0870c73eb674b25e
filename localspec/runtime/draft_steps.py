"""Steps of draft models that several answers take together: a step of four costs little more than one of one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from localspec.backends.base import FEW_ROWS, Piece, SequenceBatch
from localspec.backends.forward import Forward
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.shared_rows import SharedPasses, ShareOfPass
from localspec.runtime.state import DraftModel
from localspec.spec_decode.passes import DraftPass

LEARNED = 0.1
"""Share of how many took a step together that is believed of the next one."""

FORGOTTEN = 0.02
"""In a round, of what was learned so: where nobody drafts beside others, it may be as that would cost too much."""


class DraftSteps:
    """The draft models whose memories hold a sequence for each answer.

    Args:
        models: as they are loaded.
    """

    def __init__(self, models: Sequence[DraftModel]) -> None:
        self._memories = [
            _Memory(draft.source, draft.memory.batch, draft.times) for draft in models if draft.memory.batch is not None
        ]

    def times(self) -> Mapping[str, ShareOfPass]:
        """What steps cost an answer, by source, for its controller: of those that answers share."""
        return {each.source: ShareOfPass(each.passes) for each in self._memories if each.is_one_pass}

    def begin(self, n_answers: int) -> None:
        """A round of so many answers begins."""
        for memory in self._memories:
            memory.n_together += FORGOTTEN * (n_answers - memory.n_together)
            memory.passes.n_answers = max(1, min(n_answers, round(memory.n_together)))

    def take(self, wanted: Sequence[DraftPass]) -> list[Forward | Exception]:
        """Run passes that different answers wait for; what they return, or how they fail."""
        returned: dict[int, Forward | Exception] = {}
        for memory in self._memories:
            returned |= memory.take([each for each in wanted if memory.sequence_of(each) is not None])
        return [returned[id(each)] if id(each) in returned else _alone(each) for each in wanted]


class _Memory:
    """One of them.

    Attributes:
        n_together: how many take a step together, of late.
        passes: what passes in it cost.
    """

    def __init__(self, source: str, batch: SequenceBatch, times: PassTimes) -> None:
        self.source = source
        self._batch = batch
        self._sequences = {id(batch[i]): i for i in range(batch.n_sequences)}
        self.n_together = float(batch.n_sequences)
        self.passes = SharedPasses(times, batch.model.capabilities.device)

    @property
    def is_one_pass(self) -> bool:
        """Whether what several take is one pass, and not one for each."""
        return self._batch.model.capabilities.batches

    def sequence_of(self, wanted: DraftPass) -> int | None:
        return self._sequences.get(id(wanted.context))

    def take(self, wanted: Sequence[DraftPass]) -> dict[int, Forward | Exception]:
        # What reads for long is bound by arithmetic, and can be broken off alone.
        short = [each for each in wanted if len(each.tokens) <= FEW_ROWS]
        returned: dict[int, Forward | Exception] = {}
        for group in self._groups(short):
            returned |= self._together(group)
        for each in wanted:
            if id(each) not in returned:
                returned[id(each)] = forward = _alone(each)
                if isinstance(forward, Forward):
                    self._observe([each], each.ms)
        if short:
            self.n_together += LEARNED * (len(short) - self.n_together)
        return returned

    def _groups(self, wanted: Sequence[DraftPass]) -> list[list[DraftPass]]:
        """Those of one pass each: all, but that some engines pay for ever for many rows of logits."""
        most = FEW_ROWS if self._batch.model.capabilities.keeps_rows else len(wanted) * FEW_ROWS
        groups: list[list[DraftPass]] = []
        n_rows = 0
        for each in wanted:
            n = len(each.tokens) if each.logits == "all" else int(each.logits == "last")
            if n_rows + n > most or not groups:
                groups.append([])
                n_rows = 0
            groups[-1].append(each)
            n_rows += n
        return groups

    def _together(self, wanted: Sequence[DraftPass]) -> dict[int, Forward | Exception]:
        fit = list(wanted)
        while sum(len(each.tokens) for each in fit) > self._batch.free_cells:
            fit.pop()
        if len(fit) < 2:
            return {}
        pieces = [Piece(self._sequences[id(each.context)], each.tokens, each.logits) for each in fit]
        started = time.perf_counter()
        try:
            forwards = self._batch.decode(pieces)
        except Exception:  # each finds out by itself whose doing that was
            return {}
        ms, width = (time.perf_counter() - started) * 1e3, sum(len(each.tokens) for each in fit)
        self._observe(fit, ms)
        for each in fit:
            each.ms = ms * len(each.tokens) / width
        # They are looked at one after the other, and whoever is first may make another pass in this memory.
        return {id(each): Forward(forward.logits.copy()) for each, forward in zip(fit, forwards, strict=True)}

    def _observe(self, taken: Sequence[DraftPass], ms: float) -> None:
        if not self.is_one_pass:
            return
        n_cells = self._batch.n_cells - self._batch.free_cells
        if self._batch.model.capabilities.own_cells:
            n_cells = sum(each.context.n_past for each in taken) // len(taken)
        self.passes.observe(sum(len(each.tokens) for each in taken), ms, n_cells)


def _alone(wanted: DraftPass) -> Forward | Exception:
    try:
        forward = wanted.run()
    except Exception as error:
        return error
    return Forward(forward.logits.copy(), ids=forward.ids)
