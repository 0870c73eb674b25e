"""Drafts copied from earlier text: how sure a copy is, drafting copy by copy, and the n-gram drafter.

``corpus`` copies from files in the same way.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from typing import Generic, NamedTuple, Protocol, TypeVar

from localspec.backends.base import Context, shared_prefix
from localspec.spec_decode.drafters.base import Drafter, DrafterInfo, Plan, Proposer
from localspec.spec_decode.drafters.names import NGRAM
from localspec.spec_decode.rounds import DraftToken

Kind = TypeVar("Kind", bound=Hashable)
Place = TypeVar("Place")


class HitRates(Generic[Kind]):
    """Shares of draft tokens that were right, by kind: what drafters without probabilities are confident by.

    Old evidence fades, a prior stands in for missing evidence: ``prior_weight`` and ``memory`` are the draft tokens
    that a prior, and in the long run the evidence, count as.
    """

    def __init__(self, priors: Mapping[Kind, float], prior_weight: float, memory: float) -> None:
        self._fade = 1.0 - 1.0 / memory
        self._right = {kind: prior * prior_weight for kind, prior in priors.items()}
        self._total = dict.fromkeys(priors, prior_weight)
        self.rates = {kind: right / prior_weight for kind, right in self._right.items()}

    def learn(self, kind: Kind, right: bool) -> None:
        self._right[kind] = self._right[kind] * self._fade + right
        self._total[kind] = self._total[kind] * self._fade + 1.0
        self.rates[kind] = self._right[kind] / self._total[kind]


# Lower ends of the ranges of match lengths, and how often a continuation was right for each on 59,000 tokens of code
# and prose (Qwen2.5 tokens): seen once; seen several times, always the same; in at least half of the cases; in fewer.
_LENGTHS = (1, 2, 3, 4, 5, 6, 9, 13, 21)
_SHARES = (
    (0.20, 0.28, 0.38, 0.48, 0.54, 0.65, 0.71, 0.79, 0.90),
    (0.58, 0.67, 0.75, 0.78, 0.85, 0.90, 0.92, 0.95, 0.96),
    (0.29, 0.30, 0.30, 0.32, 0.30, 0.35, 0.35, 0.35, 0.40),
    (0.12, 0.14, 0.15, 0.15, 0.16, 0.18, 0.18, 0.20, 0.20),
)
PRIORS = {(i, j): share for i, shares in enumerate(_SHARES) for j, share in enumerate(shares)}
PRIOR_WEIGHT = 12.0  # this and MEMORY were set by hand; nothing was tuned
MEMORY = 100.0


class Copy(NamedTuple):
    """What followed a context most: a token, ``times`` of ``total``; ``length`` is that of the context."""

    token: int
    times: int
    total: int
    length: int

    @property
    def kind(self) -> tuple[int, int]:
        """The cell of ``PRIORS``."""
        if self.total == 1:
            row = 0
        elif self.times == self.total:
            row = 1
        else:
            row = 2 if 2 * self.times >= self.total else 3
        return row, bisect_right(_LENGTHS, self.length) - 1


class _Texts(Protocol[Place]):
    """A text, or several, to copy from; a ``Place`` is where a context stands in it."""

    def step(self, place: Place, token: int, /) -> Place:
        """The place one token on."""

    def continuation(self, place: Place, /) -> Copy | None:
        """What followed there, if anything."""


class CopyingDrafter(Drafter, Generic[Place]):
    """Copies what followed the longest recent suffix where it occurred before; a token costs no pass of a model.

    Each carries an estimate of being right: how often those with such a match were, in this conversation and in fading
    part before it, on top of a prior. Every settled token is compared with the draft token for it, sent or not. So the
    estimate is learned even while the controller does not draft. Of several such drafters the group asks the one with
    most ``confidence`` first.
    """

    _texts: _Texts[Place]
    _settled: Place  # of the settled text, which has so many tokens
    _n_settled = 0

    def __init__(self, info: DrafterInfo) -> None:
        self.info = info
        self._hits = HitRates(PRIORS, PRIOR_WEIGHT, MEMORY)

    @abstractmethod
    def _settle(self, token: int) -> Place:
        """Take up one more settled token; the place behind it."""

    def _place(self, tokens: Sequence[int]) -> Place:
        """The place of a text that goes on from the settled one."""
        place = self._settled
        for token in tokens[self._n_settled :]:
            place = self._texts.step(place, token)
        return place

    def confidence(self, tokens: Sequence[int]) -> float:
        """The confidence [0, 1] in what it would propose next; 0 where it has nothing. ``tokens`` as for ``draft``."""
        found = self._texts.continuation(self._place(tokens))
        return 0.0 if found is None else self._hits.rates[found.kind]

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        source, place, draft = self.info.source, self._place(tokens), list[DraftToken]()
        while plan.room > 0 and plan.more(source):
            found = self._texts.continuation(place)
            if found is None or proposer.n_legal([*(each.id for each in draft), found.token]) <= len(draft):
                plan.nothing(source)
                break
            confidence = self._hits.rates[found.kind]
            expected = plan.keep(source, confidence)
            if expected is None:
                break
            draft.append(DraftToken(found.token, source, confidence, None, expected))
            place = self._texts.step(place, found.token)
        return draft

    def accept(self, emitted: Sequence[int]) -> None:
        for token in emitted:
            found = self._texts.continuation(self._settled)
            if found is not None:
                self._hits.learn(found.kind, found.token == token)
            self._settled = self._settle(token)
        self._n_settled += len(emitted)


# Every context that a text has had, and what followed it: a suffix automaton that grows token by token, and shrinks.
#
# A suffix automaton (Blumer et al. 1985) is the smallest machine that reads exactly the substrings of a text. A state
# stands for the substrings that end at the same set of places; its *link* leads to the longest shorter suffix that
# also ends elsewhere. So the link of the state of the whole text is the longest recent suffix that occurred before:
# the match is known at any time, without a search. A token is added in amortised constant time; there are at most
# two states a token.
#
# On top of it every state knows how often it was followed by a token at all, and its best continuation: a token takes
# the place of a more frequent one when it is seen at least half as often, for what came last counts double (measured
# on code and prose: right more often than the most frequent, and no less often than the most recent). Keeping that
# takes a walk over the suffixes of the text that are states, a handful in prose; text that repeats itself endlessly
# has more, and the walk stops after ``MAX_WALK`` of them.
#
# Measured on 32,000 tokens of Python source (one core of a shared 2-core machine, CPython 3.11): 4 µs to add a token,
# 3 µs to take one back, 43,500 states, 16 MB with the log; at worst (two tokens at random) 7 µs.
#
# ``pop`` undoes ``push`` exactly: the structure is undone from the links themselves, the continuations from a log.

MAX_WALK = 32
UNDO_DEPTH = 8192  # tokens that can be taken back; for more, what is left is read anew
BREAK = 1 << 40  # stands between a predicted text and the prompt; no vocabulary has such a token
_ROOT, _NONE = 0, -1

Suffix = tuple[int, int]  # a suffix of some text that occurs in the text read: its state, and its length in tokens


class SuffixAutomaton:
    """The automaton of a growing sequence of tokens (integers, not negative)."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [_NONE]
        self._size = [0]
        self._followed = [0]
        self._best = [_NONE]
        self._last = _ROOT
        # One entry a token: the token, the state that was last, the state that was split (or none), and the best
        # continuations that changed, as state, old, state, old, …
        self._log: deque[tuple[int, int, int, tuple[int, ...]]] = deque(maxlen=UNDO_DEPTH)

    @property
    def n_undoable(self) -> int:
        return len(self._log)

    def push(self, token: int) -> None:
        """Add a token at the end."""
        next_, link, size, followed, best = self._next, self._link, self._size, self._followed, self._best
        last, split = self._last, _NONE
        state = self._new_state({}, _ROOT, size[last] + 1, 0, _NONE)
        p = last
        while p != _NONE and token not in next_[p]:
            next_[p][token] = state
            p = link[p]
        if p != _NONE:
            q = next_[p][token]
            if size[q] == size[p] + 1:
                link[state] = q
            else:
                split = q
                clone = self._new_state(dict(next_[q]), link[q], size[p] + 1, followed[q], best[q])
                while p != _NONE and next_[p].get(token) == q:
                    next_[p][token] = clone
                    p = link[p]
                link[q] = link[state] = clone
        changes: list[int] = []
        p = last
        for _ in range(MAX_WALK):  # it followed this text: count that for its suffixes
            if p == _NONE:
                break
            followed[p] += 1
            rival = best[p]
            # followed[next] lacks the occurrence at the very end, which nothing has followed yet: that of `token`.
            if rival != token and (rival == _NONE or 2 * (followed[next_[p][token]] + 1) >= followed[next_[p][rival]]):
                changes += (p, rival)
                best[p] = token
            p = link[p]
        self._log.append((token, last, split, tuple(changes)))
        self._last = state

    def _new_state(self, next_: dict[int, int], link: int, size: int, followed: int, best: int) -> int:
        self._next.append(next_)
        self._link.append(link)
        self._size.append(size)
        self._followed.append(followed)
        self._best.append(best)
        return len(self._next) - 1

    def pop(self) -> None:
        """Take the last token back.

        Raises:
            IndexError: more tokens were taken back than are remembered (``n_undoable``).
        """
        token, last, split, changes = self._log.pop()
        next_, link = self._next, self._link
        p = last
        for _ in range(MAX_WALK):
            if p == _NONE:
                break
            self._followed[p] -= 1
            p = link[p]
        for i in range(0, len(changes), 2):
            self._best[changes[i]] = changes[i + 1]
        state = self._last
        if split != _NONE:
            clone = state + 1
            link[split] = link[clone]
        p = last
        while p != _NONE and next_[p].get(token) == state:
            del next_[p][token]
            p = link[p]
        if split != _NONE:
            while p != _NONE and next_[p].get(token) == clone:
                next_[p][token] = split
                p = link[p]
        del self._next[state:], link[state:], self._size[state:], self._followed[state:], self._best[state:]
        self._last = last

    def match(self) -> Suffix:
        """The longest suffix of the text that occurred in it before."""
        state = max(self._link[self._last], _ROOT)
        return state, self._size[state]

    def step(self, place: Suffix, token: int) -> Suffix:
        """The longest suffix of (a context of the text, then ``token``) that occurs in the text."""
        state, length = place
        while state != _NONE and token not in self._next[state]:
            state = self._link[state]
            length = self._size[state] if state != _NONE else 0
        return (_ROOT, 0) if state == _NONE else (self._next[state][token], length + 1)

    def continuation(self, place: Suffix) -> Copy | None:
        """What followed a context most, the recent counting double; None without one, or before ``BREAK``.

        A context that only occurs at the end of the text is shortened until something followed it.
        """
        state, length = place
        while state > _ROOT and self._best[state] == _NONE:
            state = self._link[state]
            length = self._size[state]
        token = self._best[state]
        if state <= _ROOT or token == BREAK:
            return None
        total = self._followed[state]
        times = min(max(self._followed[self._next[state][token]], 1), total)
        return Copy(token, times, total, length)


# Tokens of the prompt's end that are put in front of a predicted text: what follows them is then its beginning, with a
# match in the last range but one of ``PRIORS``.
LEAD = 16


class NgramDrafter(CopyingDrafter[Suffix]):
    """Copies from prompt and conversation (prompt-lookup decoding), by a suffix automaton of the text.

    That has the match at any time, so a token costs no search (about 5 µs).
    """

    _texts: SuffixAutomaton

    def __init__(self) -> None:
        super().__init__(DrafterInfo(NGRAM, copies=True))
        self._texts = SuffixAutomaton()
        self._settled = self._texts.match()
        self._tokens: list[int] = []  # what the automaton has read

    def clone(self, context: Context | None) -> Drafter:
        clone = NgramDrafter()
        clone._hits = deepcopy(self._hits)
        return clone

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        """Read a prompt, and before it a prediction, as if that had once followed the prompt's end.

        What both share with what was read before stays; only the rest is undone and read.
        """
        self._n_settled = len(tokens)
        tokens = [*tokens[-LEAD:], *prediction, BREAK, *tokens] if prediction else list(tokens)
        shared = shared_prefix(self._tokens, tokens)
        n_stale = len(self._tokens) - shared
        # Taking a token back costs about as much as adding it.
        if n_stale > shared or n_stale > self._texts.n_undoable:
            self._texts, shared = SuffixAutomaton(), 0
        else:
            for _ in range(n_stale):
                self._texts.pop()
        for token in tokens[shared:]:
            self._texts.push(token)
        self._tokens, self._settled = tokens, self._texts.match()

    def _settle(self, token: int) -> Suffix:
        self._texts.push(token)
        self._tokens.append(token)
        return self._texts.match()
