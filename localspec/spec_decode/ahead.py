"""Drafting while the target verifies: the next draft is made during the pass, for what the pass is likeliest to say.

In the ordinary order draft and target wait for each other. Where they run on different devices the drafters can go on:
a pass over k draft tokens ends in one of few likely ways, (i accepted, then token x). For the likeliest of them drafts
are prepared during the pass; when the verdict is one of them the next draft is there already, else it is made in the
ordinary order. (Speculative speculative decoding, Kumar, Dao and May 2026, whose algorithm is called Saguaro.)

With a_j the expected acceptance of draft token j and q(x) the drafter's own probability of x, the outcome (i, x) is
taken to have the probability a_1···a_i·(1 - a_(i+1))·q(x)/(1 - q(d_(i+1))), and (k, x) a_1···a_k·q(x). What would be
drafted then is drafted by the same drafters in the same way, so a draft is as honest as ever: its tokens are sampled
with noise of their own, before it is known whether they will be sent, and which are sent depends on the outcome, on
the time there was and on distributions, never on which tokens came out.
"""

from __future__ import annotations

import heapq
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from localspec.spec_decode.drafters.base import Alternatives, Plan
from localspec.spec_decode.drafters.group import DrafterGroup
from localspec.spec_decode.rounds import AheadCount, Draft, DraftToken

# A draft for one outcome, and what the drafter thought of in the place of each of its tokens.
Prepared = tuple[list[DraftToken], list[Alternatives]]

# Whether drafting while the target verifies saves time, measured while it is done.

# Rounds of a trial, over which drafting ahead must save time, and rounds without it where two in a row do not. After a
# pause comes one trial, and if that fails a pause twice as long.
N_TRIAL, N_PAUSE, LONGEST_PAUSE = 24, 96, 1536

# Passes alone and with drafting meanwhile that are compared; one of so many goes without, until there are enough
# and afterwards.
N_ALONE, N_OVERLAPPED, OFTEN, RARELY = 12, 48, 4, 24


def moved(mean_ms: float, ms: float, share: float) -> float:
    """A running mean, moved by a share of the way to one more time; 0 is none yet."""
    return mean_ms + share * (ms - mean_ms) if mean_ms else ms


class AheadBalance:
    """Whether drafting ahead saves time: the steps that it spares, less what it makes passes take longer.

    It may take time from a pass on another device after all: the driver's thread or the server that a pass needs can be
    on the cores that draft. So some passes go without it, and passes over equally many tokens are compared; not where
    ``cautious`` is false, for tests and benchmarks.
    """

    def __init__(self, *, cautious: bool = True) -> None:
        self._is_cautious = cautious
        self._alone: deque[tuple[int, float]] = deque(maxlen=N_ALONE)
        self._overlapped: deque[tuple[int, float]] = deque(maxlen=N_OVERLAPPED)
        self._step_ms = self._saved_ms = 0.0
        self._n_tried = self._n_overlapped = self._n_paused = 0
        self._pause = 0  # the first that fails is followed by another: these times are noisy

    @property
    def is_pausing(self) -> bool:
        return self._n_paused > 0

    def leaves_alone(self) -> bool:
        """Whether the pass that comes next goes without."""
        if not self._is_cautious:
            return False
        if self._n_paused:
            self._n_paused -= 1
            if not self._n_paused:  # times from before the pause may be of a machine that did other things
                self._alone.clear()
                self._overlapped.clear()
            return True
        if self._n_tried == N_TRIAL:
            self._judge()
            return self.leaves_alone()
        self._n_tried += 1
        return self._n_tried % (OFTEN if len(self._alone) < N_ALONE else RARELY) == 0

    def took_in_order(self, n_tokens: int, ms: float) -> None:
        if n_tokens:
            self._step_ms = moved(self._step_ms, ms / n_tokens, 0.2)

    def spared(self, n_tokens: int) -> None:
        self._saved_ms += n_tokens * self._step_ms

    def passed(self, n_tokens: int, ms: float, *, late_ms: float | None = None) -> None:
        """A pass is done; ``late_ms`` is how long the drafting was then waited for."""
        if late_ms is None:
            self._alone.append((n_tokens, ms))
        else:
            self._overlapped.append((n_tokens, ms))
            self._saved_ms -= late_ms
            self._n_overlapped += 1

    def _judge(self) -> None:
        if self._saved_ms < self._n_overlapped * self._longer_ms():
            self._n_paused, self._pause = self._pause, max(N_PAUSE, min(2 * self._pause, LONGEST_PAUSE))
        else:
            self._pause = 0
        self._n_tried, self._n_overlapped, self._saved_ms = 0, 0, 0.0

    def _longer_ms(self) -> float:
        by_tokens: defaultdict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for which, passes in enumerate((self._alone, self._overlapped)):
            for n_tokens, ms in passes:
                by_tokens[n_tokens][which].append(ms)
        longer: list[float] = []
        for alone, overlapped in by_tokens.values():
            if alone and overlapped:
                difference = statistics.median(overlapped) - statistics.median(alone)
                longer += [difference] * min(len(alone), len(overlapped))
        return statistics.median(longer) if longer else 0.0


# Outcomes less probable than this are not prepared for: a draft step in fifty that is of use costs more in heat.
LEAST = 0.02

# Share of the draft tokens that is expected to have been prepared, before any were (``benchmarks/ahead.py``). Too high
# tries a draft that does not pay, which the time budget bounds; too low never tries one that only pays so.
HIDDEN = 0.4


@dataclass(slots=True)
class _Clock:
    """How long a pass has left, and whether a step still fits in; or steps that are counted whatever the time."""

    n_steps: int | None
    n_taken: int = 0
    pass_ms: float = 0.0
    step_ms: float = 0.0
    started: float = 0.0
    stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self.stopped.clear()
        self.started, self.n_taken = time.perf_counter(), 0

    @property
    def ms(self) -> float:
        return (time.perf_counter() - self.started) * 1e3

    def fits(self, probability: float) -> bool:
        """Whether to begin a step for an outcome: it may end after the pass by as much as it is expected to save."""
        if self.n_steps is not None:
            return self.n_taken < self.n_steps
        if self.stopped.is_set():
            return False
        late = self.ms + self.step_ms - self.pass_ms
        return self.pass_ms == 0 or late <= probability * self.step_ms

    def took_step(self, ms: float) -> None:
        self.n_taken += 1
        self.step_ms = moved(self.step_ms, ms, 0.2)


class _AheadPlan(Plan):
    """Draft up to a number of tokens for one outcome, as long as there is time; none ``samples`` where only the
    likeliest are wanted."""

    def __init__(
        self, room: int, outer: Plan, clock: _Clock, probability: float, copying: Collection[str], samples: bool
    ) -> None:
        super().__init__(room, copying)  # what the controller would send of copies is not known yet
        self._outer, self._clock, self._probability, self._samples = outer, clock, probability, samples

    def more(self, source: str, pending: int = 0, held: float | None = None) -> int:
        return super().more(source, pending) if pending == 0 or self._clock.fits(self._probability) else 0

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        self._clock.took_step(ms)

    def samples(self, source: str, confidence: float) -> bool:
        return self._samples and self._outer.samples(source, confidence)


class DraftAhead:
    """Drafts with a group of drafters, beginning while the target is still at the draft before.

    While drafts are made round after round, everything of the drafters happens in one thread of their own: an engine
    keeps a pool of threads for each that calls it, and two are in each other's way. Drafts are chains.

    Args:
        cautious: pause where it takes more time than it saves.
        new_executor: makes what drafts while passes run.
        n_steps: draft steps a pass, which are waited for; None is as many as there is time for.
    """

    def __init__(
        self,
        *,
        cautious: bool = True,
        new_executor: Callable[[], Executor] = lambda: ThreadPoolExecutor(1, "localspec-ahead"),
        n_steps: int | None = None,
    ) -> None:
        self._new_executor = new_executor
        self._executor: Executor | None = None
        self._balance = AheadBalance(cautious=cautious)
        self._clock = _Clock(n_steps)
        self._cache: dict[tuple[int, ...], Prepared] = {}
        self.count = AheadCount()  # of the round under way
        self._n_before = self._depth = 0
        self._is_drafting = False
        self._was_left_alone = False
        self._share = HIDDEN

    def begin(self, group: DrafterGroup) -> None:
        self._group, self._end_tokens = group, group.end_tokens
        readers = [each.info for each in group.drafters if not each.info.taps]
        self._copying = frozenset(each.source for each in readers if each.copies)
        self._models = frozenset(each.source for each in readers if each.runs_model)
        self._cache.clear()
        self._others: dict[int, Alternatives] = {}
        self.close()
        self._executor = self._new_executor()  # its thread begins with the first work

    def draft(self, tokens: list[int], plan: Plan) -> Draft:
        """Draft what follows ``tokens``: what was prepared for them, as far as the plan wants it, and what follows."""
        self.count, self._plan, self._depth = AheadCount(), plan, plan.room
        self._others = self._group.proposer.alternatives = {}
        taken, is_cut = self._taken(tokens, plan)
        is_over = is_cut or plan.room <= 0 or bool(taken and taken[-1].id in self._end_tokens)
        rest = [] if is_over else self._in_order(tokens, taken, plan)
        self._is_drafting = bool(taken or rest)
        if self._is_drafting and not self._was_left_alone:
            self._share += 0.05 * (len(taken) / (len(taken) + len(rest)) - self._share)
        return Draft([*taken, *rest])

    def _in_order(self, tokens: Sequence[int], begun: Sequence[DraftToken], plan: Plan) -> Draft:
        draft = partial(self._group.draft, [*tokens, *(token.id for token in begun)], plan)
        assert self._executor is not None
        started = time.perf_counter()
        # Where little is drafted a change of threads would be most of what it takes.
        found = self._executor.submit(draft).result() if self._is_drafting else draft()
        self._balance.took_in_order(self._n_of_models(found), (time.perf_counter() - started) * 1e3)
        return found

    def _n_of_models(self, tokens: Sequence[DraftToken]) -> int:
        return sum(token.source in self._models for token in tokens)

    def _taken(self, tokens: Sequence[int], plan: Plan) -> tuple[list[DraftToken], bool]:
        """The prepared tokens that the plan wants, and whether it wants no more.

        Whether one is wanted depends on the distribution that it is from, not on what it is; see ``Plan.keep``.
        """
        prepared = self._cache.get(tuple(tokens[self._n_before :]))
        self._cache.clear()
        taken: list[DraftToken] = []
        if prepared is None:
            return taken, False
        self.count.hit = True
        for token, alternatives in zip(*prepared, strict=True):
            confidence = token.prob if token.dist is None else token.dist.top
            expected = plan.keep(token.source, confidence, sampled=token.dist is not None)
            if expected is None:
                break
            self._others[len(tokens) + len(taken)] = alternatives
            taken.append(DraftToken(token.id, token.source, token.prob, token.dist, expected))
        self.count.taken = len(taken)
        self._balance.spared(self._n_of_models(taken))
        return taken, len(taken) < len(prepared[0])

    @contextmanager
    def preparing(self, tokens: Sequence[int], draft: Draft) -> Iterator[None]:
        """Within the block, which runs the pass over the draft, the next draft is prepared."""
        self._n_before, clock, n_tokens = len(tokens), self._clock, len(draft) + 1
        self._was_left_alone = bool(draft) and self._balance.leaves_alone()
        if not draft:
            yield
            return
        clock.start()
        if self._was_left_alone:
            yield
            self._balance.passed(n_tokens, clock.ms)
            return
        assert self._executor is not None
        preparing = self._executor.submit(partial(self._prepare, list(tokens), draft))
        try:
            yield
        finally:
            ms = clock.ms
            clock.stopped.set()
            preparing.result()
            clock.pass_ms = moved(clock.pass_ms, ms, 0.3)
            self._balance.passed(n_tokens, ms, late_ms=clock.ms - ms)
            self.count.outcomes = len(self._cache)
            self.count.prepared = sum(len(found) for found, _ in self._cache.values())

    @property
    def hidden(self) -> dict[str, float]:
        """By drafter that runs a model, the share of its draft tokens that is lately there when the verdict is."""
        share = 0.0 if self._balance.is_pausing else self._share
        return dict.fromkeys(self._models, share)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _prepare(self, tokens: list[int], draft: Draft) -> None:
        depth = min(self._depth, len(draft) + 1)
        order = count()
        outcomes: list[tuple[float, int, tuple[int, ...] | None]] = []  # None: all accepted, and what then?

        def expect(probability: float, suffix: tuple[int, ...] | None) -> None:
            if probability >= LEAST and (suffix is None or suffix[-1] not in self._end_tokens):
                heapq.heappush(outcomes, (-probability, next(order), suffix))

        reach, ids = 1.0, draft.ids
        for i, token in enumerate(draft):
            for other, share in self._others.get(len(tokens) + i, ()):
                expect(reach * (1.0 - token.expected) * share, (*ids[:i], other))
            reach *= token.expected
        if ids[-1] not in self._end_tokens:
            expect(reach, None)
        while outcomes:
            negative, _, suffix = heapq.heappop(outcomes)
            if not self._clock.fits(-negative):
                break
            if suffix is None:
                found, alternatives = self._drafted(tokens, ids, 1, -negative, samples=False)
                if found:
                    expect(reach * found[0].prob, (*ids, found[0].id))
                    for other, share in alternatives[0]:
                        expect(reach * (1.0 - found[0].prob) * share, (*ids, other))
                continue
            found, alternatives = self._drafted(tokens, suffix, depth, -negative)
            if found:
                self._cache[suffix] = found, alternatives

    def _drafted(
        self, tokens: list[int], suffix: Sequence[int], n: int, probability: float, *, samples: bool = True
    ) -> Prepared:
        text = [*tokens, *suffix]
        plan = _AheadPlan(n, self._plan, self._clock, probability, self._copying, samples)
        others: dict[int, Alternatives] = {}
        self._group.proposer.alternatives = others
        draft = self._group.draft(text, plan, ahead=True)
        return draft, [others.get(len(text) + i, ()) for i in range(len(draft))]
