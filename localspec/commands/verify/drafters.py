"""The audit's own drafters: one that sees every pass and never drafts, and four that draft to be rejected."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from localspec.backends.base import Context, FloatArray, Forward
from localspec.sampling.sampling import Distribution
from localspec.spec_decode.drafters.base import Drafter, DrafterInfo, Plan, Proposer
from localspec.spec_decode.rounds import DraftToken


class Recorder(Drafter):
    """Keeps the rows [k + 1, n_vocab] of the target's last pass over k draft tokens, and drafts nothing.

    Asked before the others, it also has their proposer note what is drawn for them.
    """

    info = DrafterInfo("recorder")

    def __init__(self) -> None:
        self.rows: FloatArray = np.empty((0, 0), dtype=np.float32)
        self._drawn: list[tuple[int, Distribution]] = []

    def process(self, tokens: Sequence[int], forward: Forward | None) -> None:
        if forward is not None:
            self.rows = forward.logits.copy()

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        proposer.drawn = self._drawn
        return []

    def drawn(self) -> list[tuple[int, Distribution]]:
        """Samples drawn since the last call, with their laws."""
        found = self._drawn.copy()
        self._drawn.clear()
        return found


class _Scripted(Drafter):
    """Sends a script as its draft, once a round."""

    _drafted = False

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        self._drafted = False

    def accept(self, emitted: Sequence[int]) -> None:
        self._drafted = False

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        draft: list[DraftToken] = []
        for token in [] if self._drafted else self._script(tokens):
            if not plan.more(self.info.source) or plan.keep(self.info.source, 1.0) is None:
                break
            draft.append(DraftToken(token, self.info.source, 1.0))
        self._drafted = True
        return draft

    def _script(self, tokens: Sequence[int]) -> list[int]:
        raise NotImplementedError


class Adversary(_Scripted):
    """Drafts a known answer for a while, then an error.

    The number of right tokens runs through 0 to ``reach``, so every position is rejected and all widths are sent. An
    error is the second best token with the answer going on as if it were right (what a lenient check would accept), or
    random tokens; every third draft has none.
    """

    info = DrafterInfo("adversary")

    def __init__(self, n_vocab: int, reach: int) -> None:
        self._rng = random.Random(1)
        self._n_vocab, self._reach = n_vocab, reach
        # A step that shares no factor with the number of positions visits each of them once in a cycle, and near
        # 0.62 n it spreads them.
        n = reach + 1
        step = next(step for step in range(max(1, int(n * 0.618)), 2 * n + 2) if gcd(step, n) == 1)
        self._n_right = [turn * step % n for turn in range(n)]
        self._round = 0
        self.know([], [], [])

    def know(self, prompt: Sequence[int], answer: Sequence[int], second_best: Sequence[int]) -> None:
        """The answer to come, and the second best token at each place; without an answer, earlier text stands in."""
        self._n_prompt, self._answer, self._second_best = len(prompt), list(answer), list(second_best)

    def _script(self, tokens: Sequence[int]) -> list[int]:
        turn, self._round = self._round, self._round + 1
        at = len(tokens) - self._n_prompt
        known = self._answer[at:] if self._answer else list(tokens[-self._reach :])
        n_right = min(self._n_right[turn % len(self._n_right)], len(known))
        draft, kind = known[:n_right], turn % 3
        if kind == 0:
            return draft
        if kind == 1 and at + n_right < len(self._second_best):
            draft += [self._second_best[at + n_right], *known[n_right + 1 :]]
        return draft[: self._reach] + [self._rng.randrange(self._n_vocab) for _ in range(self._reach - len(draft))]


class Beside(Adversary):
    """The adversary's drafts as branches next to those of others."""

    info = DrafterInfo("beside", copies=True)


class NearMisses(Adversary):
    """Drafts the second best token of a known answer, and then what follows the right one: at every gap that the answer
    has, a lenient check would accept it."""

    info = DrafterInfo("near misses")

    def _script(self, tokens: Sequence[int]) -> list[int]:
        at = len(tokens) - self._n_prompt
        return [*self._second_best[at : at + 1], *self._answer[at + 1 :]][: self._reach]


class Openers(_Scripted):
    """Drafts that a thinking block opens, again and again: where its budget is spent, nothing accepted behind the mark
    may be part of the answer."""

    info = DrafterInfo("openers")

    def __init__(self, mark: Sequence[int], reach: int) -> None:
        self._opening = (list(mark) * reach)[:reach]

    def _script(self, tokens: Sequence[int]) -> list[int]:
        return self._opening


class HeatedDrafter(Drafter):
    """A clone of a drafter that runs a model, at twice the temperature.

    A good draft's law is so near the target's that a broken rule of acceptance hardly shows; this one's is not.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter.clone(None)
        self._drafter.info = self.info = replace(drafter.info, source=f"hot {drafter.info.source}")
        self._proposer: Proposer | None = None

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        self._drafter.begin(tokens, prediction=prediction, target=target)

    def process(self, tokens: Sequence[int], forward: Forward) -> None:
        self._drafter.process(tokens, forward)

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        if proposer is not self._proposer:
            hot = replace(proposer.params, temperature=2 * proposer.params.temperature)
            # It counts its own samples: no other drafter may sample in such a request.
            self._proposer, self._hot = proposer, Proposer(hot, proposer.noise)
            self._hot.drawn = proposer.drawn
        return self._drafter.draft(tokens, plan, self._hot)

    def accept(self, emitted: Sequence[int]) -> None:
        self._drafter.accept(emitted)
