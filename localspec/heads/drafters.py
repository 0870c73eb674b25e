"""Drafters of heads, which read states of the target instead of its prompt; for the formulas see ``trained``.

Row p is made of the target's state after the token at position p and of the token after that; it leads to a guess for
position p + 2. A row is *true* where the target computed that state. Rows of a draft's own tokens are not, and leave
the memory before the next true ones.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Context, FloatArray, Forward, Wanted, shared_prefix
from localspec.heads.base import STATE, DraftHead, HeadContext
from localspec.heads.trained import Head
from localspec.sampling.sampling import Ids, Row
from localspec.spec_decode.drafters.base import Drafter, DrafterFailed, DrafterInfo, Plan, Proposer, proposed
from localspec.spec_decode.rounds import DraftToken

# The target's hidden states at the end of a text, for drafters that go on from them.


class StateWindow:
    """States after the last tokens of a text by position, from ``start`` on: without gaps, and at most ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.start = 0
        self._rows: list[FloatArray] = []

    @property
    def end(self) -> int:
        return self.start + len(self._rows)

    def put(self, position: int, rows: Iterable[FloatArray]) -> None:
        """Add states from a position on [n, width], for any known from there on; states before a gap are dropped."""
        if self.start <= position <= self.end:
            self.cut(position)
        else:
            self._rows, self.start = [], position
        self._rows.extend(rows)
        n_old = max(0, len(self._rows) - self.size)
        del self._rows[:n_old]
        self.start += n_old

    def cut(self, end: int) -> None:
        del self._rows[max(0, end - self.start) :]
        self.start = min(self.start, end)

    def between(self, first: int, end: int) -> FloatArray:
        return np.stack(self._rows[first - self.start : end - self.start])


LONGEST_PASS = 65


def tokens_of(forward: Forward, row: int, ids: Ids) -> Ids:
    """The target's tokens that a row of a head's logits is of, increasing; ``ids`` are all that the head can guess."""
    tokens: Ids = ids if forward.ids is None else ids[forward.ids[row]]
    return tokens


def _check_finite(states: FloatArray) -> None:
    if not np.isfinite(states).all():
        raise DrafterFailed("computed states that are not numbers")


class HeadDrafter(Drafter):
    """Collects the target's states after settled tokens, and keeps a memory of the rows made of them.

    Where states are missing (a prompt longer than ``DraftHead.window``, a conversation from a file), the memory begins
    anew.
    """

    one_pass = False

    def __init__(self, head: DraftHead, context: Context, source: str = "head") -> None:
        window = head.window(context.n_ctx)
        self.info = DrafterInfo(
            source, runs_model=True, one_pass=self.one_pass, taps=head.taps, n_states=window, rate=head.rate
        )
        self.head = head
        self.context = context
        self._ids = head.token_map.astype(np.int64)
        self._text: list[int] = []  # all that is settled
        self._states = StateWindow(window)
        self._seen: deque[tuple[int, FloatArray]] = deque(maxlen=window + LONGEST_PASS)  # not yet placed
        self._first = self._n_true = 0  # the memory holds true rows for positions from _first on

    @property
    def held(self) -> range:
        """The positions whose true rows the memory holds."""
        return range(self._first, self._first + self._n_true)

    def clone(self, context: Context | None) -> Drafter:
        return type(self)(self.head, context or self.context, self.info.source)

    def process(self, tokens: Sequence[int], forward: Forward) -> None:
        states = [forward.hidden[tap] for tap in self.info.taps]
        n = min(map(len, states))  # a last layer's state comes with logits only
        if n < len(tokens):
            self._seen.clear()
        rows = np.concatenate([state[len(state) - n :] for state in states], axis=1)  # [n, n_taps * n_embd]
        self._seen.extend(zip(tokens[len(tokens) - n :], rows, strict=True))

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        shared = shared_prefix(self._text, tokens)
        self._text = list(tokens)
        self._states.cut(shared)
        self._n_true = max(0, min(self._n_true, shared - 1 - self._first))  # the last row has a token after it
        first = len(tokens) - 1 - len(self._seen)
        if first >= 0 and [token for token, _ in self._seen] == self._text[first:-1]:  # else a prefill was broken off
            states = [state for _, state in self._seen]
            if self.head.has_zeroth and first == 0 < len(states):
                states, first = [np.zeros_like(states[0]), *states], -1
            self._states.put(first, states)
        self._seen.clear()
        self._begin_round()

    def accept(self, emitted: Sequence[int]) -> None:
        self._states.put(len(self._text) - 1, [state for _, state in self._seen][: len(emitted)])
        self._seen.clear()
        self._text += emitted
        self._begin_round()

    @abstractmethod
    def _begin_round(self) -> None:
        pass

    def _unread(self) -> range | None:
        """The positions of the true rows to read next, the last one always among them; None if its state is missing."""
        end = len(self._text) - 1
        if self._states.end < end or self._states.start >= end:
            return None
        held = self.held.stop
        # Clones take turns in one context; the rows' names tell whose they are.
        is_mine = self.context.tokens[: self._n_true] == self._text[self._first + 1 : held + 1]
        first = min(held, end - 1)
        fits = end - self._first + self.head.steps <= self.context.n_ctx
        if not (self._n_true and is_mine and fits and first >= self._states.start):
            first = self._first = self._states.start
        self._n_true = first - self._first
        return range(first, end)

    def _read(self, positions: range, logits: Wanted = "last", n_best: int = 0) -> Forward:
        """Put true rows into the memory, in the place of those after the true ones it has."""
        names = self._text[positions.start + 1 : positions.stop + 1]
        states = self._states.between(positions.start, positions.stop)
        rows = self.head.true_rows(self.context, states, names)
        self.context.truncate(self._n_true)  # rows of drafts are after the true ones
        forward = self._decode(rows, names, logits, n_best)
        self._n_true += len(names)
        return forward

    def _decode(self, rows: FloatArray, names: Sequence[int], logits: Wanted, n_best: int = 0) -> Forward:
        _check_finite(rows)
        return self.context.decode_floats(rows, names, logits, n_best)


class ChainedHead(HeadDrafter):
    """A head that continues its own states, a pass for each draft token (EAGLE: Li et al. 2024, arXiv:2401.15077).

    New true rows are read in one pass first. It drafts no further than it was trained for.
    """

    def _begin_round(self) -> None:
        self._n_drafted: int | None = None  # draft tokens in the memory; None before the true rows were read

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        drafted = tokens[len(self._text) :]
        unread = self._unread() if self._n_drafted is None else range(0)
        if unread is None or len(drafted) >= self.head.steps:
            return []
        n_rows = len(unread) + len(drafted) - (self._n_drafted or 0)
        if not n_rows or not plan.more(self.info.source, n_rows):
            return []
        started, n_pass = time.perf_counter(), len(unread)
        if self._n_drafted is None:
            row, ids = self._keep(self._read(unread, "last", proposer.n_best))
            self._n_drafted = 0
        for token in drafted[self._n_drafted :]:
            if n_pass:
                plan.spent(self.info.source, n_pass, (time.perf_counter() - started) * 1e3)
            started, n_pass = time.perf_counter(), 1
            row, ids = self._keep(
                self._decode(self.head.chained_rows(self._state, [token]), [token], "last", proposer.n_best)
            )
            self._n_drafted += 1
        confidence = proposer.confidence(row, tokens, ids=ids)
        plan.spent(self.info.source, n_pass, (time.perf_counter() - started) * 1e3)
        return proposed(self.info.source, confidence, len(tokens), plan, proposer)

    def _keep(self, forward: Forward) -> tuple[Row, Ids]:
        self._state = forward.hidden[STATE][-1:]
        return forward.logits[-1], tokens_of(forward, -1, self._ids)


class FollowingHead(ChainedHead):
    """One that reads the keys and values of its target, and so no true row but the last (``PublishedHead.reads``)."""

    context: HeadContext

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        super().begin(tokens, prediction=prediction, target=target)
        self._target = target

    def _unread(self) -> range | None:
        target, end = self._target, len(self._text) - 1
        assert target is not None
        if not self._states.start < end == self._states.end or target.n_past != end or not target.n_free:
            return None
        self.context.follow(target)
        self._n_true = 0
        return range(end - 1, end)


# Drafts from the target's own first layers: no second model, no training (LayerSkip: Elhoushi et al. 2024).


class EarlyExitDrafter(Drafter):
    """Ends the target's pass after some layers and reads the output matrix there (LayerSkip, arXiv:2404.16710).

    Draft tokens are decoded in the target's own context, and removed before the target verifies them.

    Args:
        head: of the kind ``exit``: the layer, the target's last norm, and some rows of its output matrix.
        context: of the head.
        source: see ``DrafterInfo``.
    """

    def __init__(self, head: Head, context: Context, source: str = "early-exit") -> None:
        self.info = DrafterInfo(source, runs_model=True, taps=head.taps)
        self.head = head
        self.context = context
        self._ids = head.token_map.astype(np.int64)
        self._n_layers = int(head.taps[0].removeprefix("layer:")) + 1
        self._target: Context | None = None

    def clone(self, context: Context | None) -> Drafter:
        return EarlyExitDrafter(self.head, context or self.context, self.info.source)

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        self._target = target

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        target = self._target
        assert target is not None
        unread = tokens[target.n_past :]
        if not unread or len(unread) > target.n_free or not plan.more(self.info.source, len(unread)):
            return []
        started = time.perf_counter()
        row, ids = self._row(target, unread, proposer.n_best)
        confidence = proposer.confidence(row, tokens, ids=ids)
        plan.spent(self.info.source, len(unread), (time.perf_counter() - started) * 1e3)
        return proposed(self.info.source, confidence, len(tokens), plan, proposer)

    def _row(self, target: Context, tokens: Sequence[int], n_best: int) -> tuple[Row, Ids]:
        state = target.decode_first_layers(tokens, self._n_layers).hidden[self.info.taps[0]][-1:]
        _check_finite(state)
        self.context.truncate(0)
        forward = self.context.decode_floats(state, [0], "all", n_best)
        return forward.logits[0], tokens_of(forward, 0, self._ids)


class BlockHead(HeadDrafter):
    """A block of masks behind the last token, filled in by one pass (DFlash: Chen et al. 2026, arXiv:2602.06036).

    No guess depends on the draft before it: one pass a round serves all positions. Its memory holds rows of the
    target's states alone. The block is as wide as the draft may become.
    """

    context: HeadContext
    one_pass = True

    def _begin_round(self) -> None:
        self._rows: FloatArray | None = None  # logits by position ahead, valid until the next pass
        self._candidates: npt.NDArray[np.int64] | None = None  # which tokens they are of, where rows differ

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        n_drafted = len(tokens) - len(self._text)
        if n_drafted >= self.head.steps:
            return []
        started, n_pass = time.perf_counter(), 0
        if self._rows is None:
            unread = self._unread()
            # The block is the same whatever there is to read.
            if unread is None or not plan.more(self.info.source, n_pass := len(unread)):
                return []
            self._read(unread, "none")
            n_wanted = min(n_drafted + plan.room, self.head.steps)
            last = self._text[-1]
            self._rows, self._candidates = self.context.guesses(last, n_wanted, proposer.n_best)
        elif n_drafted >= len(self._rows) or not plan.more(self.info.source):
            return []
        ids = self._ids if self._candidates is None else self._candidates[n_drafted]
        confidence = proposer.confidence(self._rows[n_drafted], tokens, ids=ids)
        if n_pass:
            plan.spent(self.info.source, n_pass, (time.perf_counter() - started) * 1e3)
        return proposed(self.info.source, confidence, len(tokens), plan, proposer)


HEAD_DRAFTERS: Mapping[str, Callable[[Any, Context, str], Drafter]] = {
    "chained": ChainedHead,
    "block": BlockHead,
    "following": FollowingHead,
    "exit": EarlyExitDrafter,
}
"""``DraftHead.kind`` -> what makes its drafter of the head, a context and a source."""
