"""Drafting while the target verifies: the next draft is made during the pass, for what the pass is likeliest to say.

In the ordinary order draft and target wait for each other. Where they run on different devices the drafters can go on:
a pass over k draft tokens ends in one of few likely ways, (i accepted, then token x). For the likeliest of them drafts
are prepared beside the pass; when the verdict is one of them the next draft is there already, else it is made in the
ordinary order. (Speculative speculative decoding, Kumar, Dao and May 2026, whose algorithm is called Saguaro.)

With a_j the expected acceptance of draft token j and q(x) the drafter's own probability of x, the outcome (i, x) is
taken to have the probability a_1···a_i·(1 - a_(i+1))·q(x)/(1 - q(d_(i+1))), and (k, x) a_1···a_k·q(x). What would be
drafted then is drafted by the same drafters in the same way, so a draft is as honest as ever: its tokens are sampled
with noise of their own, before anybody knows whether they will be sent, and which are sent depends on the outcome, on
the time there was and on distributions, never on which tokens came out.
"""

from __future__ import annotations

import heapq
import queue
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from localspec.spec_decode.drafters.base import SURE_COPY, Plan
from localspec.spec_decode.drafters.group import DrafterGroup
from localspec.spec_decode.proposer import Alternatives, Proposer
from localspec.spec_decode.rounds import AheadCount, Draft, DraftToken

# Whether drafting while the target verifies saves time, measured while it is done.

N_TRIAL, N_PAUSE, LONGEST_PAUSE = 24, 96, 1536
"""Rounds of a trial, over which drafting ahead must save time, and rounds without it where two in a row do not. After a
pause comes one trial, and if that fails a pause twice as long."""

N_ALONE, N_BESIDE, OFTEN, RARELY = 12, 48, 4, 24
"""Passes without drafting beside them and with it that are compared; one of so many goes without, until there are
enough and afterwards."""


def moved(mean_ms: float, ms: float, share: float) -> float:
    """A running mean, moved by a share of the way to one more time; 0 is none yet."""
    return mean_ms + share * (ms - mean_ms) if mean_ms else ms


class AheadBalance:
    """Whether drafting ahead saves time: the steps that it spares, less what it makes passes take longer.

    It may take time from a pass on another device after all: the driver's thread or the server that a pass needs can be
    on the cores that draft. So some passes go without it, and passes over equally many tokens are compared.

    Args:
        cautious: False is for tests and benchmarks: no pass goes without, whatever it costs.
    """

    def __init__(self, *, cautious: bool = True) -> None:
        self._is_cautious = cautious
        self._alone: deque[tuple[int, float]] = deque(maxlen=N_ALONE)
        self._beside: deque[tuple[int, float]] = deque(maxlen=N_BESIDE)
        self._step_ms = self._saved_ms = 0.0
        self._n_tried = self._n_beside = self._n_paused = 0
        self._pause = 0  # the first that fails is followed by another: these times are noisy

    @property
    def is_pausing(self) -> bool:
        """Whether it did not pay lately."""
        return self._n_paused > 0

    def leaves_alone(self) -> bool:
        """Whether the pass that comes next goes without."""
        if not self._is_cautious:
            return False
        if self._n_paused:
            self._n_paused -= 1
            if not self._n_paused:  # times from before the pause may be of a machine that did other things
                self._alone.clear()
                self._beside.clear()
            return True
        if self._n_tried == N_TRIAL:
            self._judge()
            return self.leaves_alone()
        self._n_tried += 1
        return self._n_tried % (OFTEN if len(self._alone) < N_ALONE else RARELY) == 0

    def took_in_order(self, n_tokens: int, ms: float) -> None:
        """So many tokens of draft models were drafted in the ordinary order."""
        if n_tokens:
            self._step_ms = moved(self._step_ms, ms / n_tokens, 0.2)

    def spared(self, n_tokens: int) -> None:
        """So many tokens of draft models were there when the verdict was."""
        self._saved_ms += n_tokens * self._step_ms

    def passed(self, n_tokens: int, ms: float, *, late_ms: float | None = None) -> None:
        """A pass is done; ``late_ms`` is how long the drafting beside it was then waited for."""
        if late_ms is None:
            self._alone.append((n_tokens, ms))
        else:
            self._beside.append((n_tokens, ms))
            self._saved_ms -= late_ms
            self._n_beside += 1

    def _judge(self) -> None:
        if self._saved_ms < self._n_beside * self._longer_ms():
            self._n_paused, self._pause = self._pause, max(N_PAUSE, min(2 * self._pause, LONGEST_PAUSE))
        else:
            self._pause = 0
        self._n_tried, self._n_beside, self._saved_ms = 0, 0, 0.0

    def _longer_ms(self) -> float:
        """How much longer a pass usually takes with drafting beside it."""
        by_tokens: defaultdict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for which, passes in enumerate((self._alone, self._beside)):
            for n_tokens, ms in passes:
                by_tokens[n_tokens][which].append(ms)
        longer: list[float] = []
        for alone, beside in by_tokens.values():
            if alone and beside:
                difference = statistics.median(beside) - statistics.median(alone)
                longer += [difference] * min(len(alone), len(beside))
        return statistics.median(longer) if longer else 0.0


LEAST = 0.02
"""Outcomes less probable than this are not prepared for: a draft step in fifty that is of use costs more in heat."""

HIDDEN = 0.4
"""Share of the draft tokens that is expected to have been prepared, before any were: what 8 steps a pass made of drafts
of 4 that are right four times in five (``benchmarks/ahead.py``). Too high tries a draft that does not pay, which the
time budget bounds; too low never tries one that only pays so."""


@dataclass(slots=True)
class _Prepared:
    """A draft for one outcome, and what the drafter thought of in the place of each of its tokens."""

    tokens: list[DraftToken]
    alternatives: list[Alternatives]


class _AheadPlan(Plan):
    """Draft up to a number of tokens for one outcome, as long as there is time."""

    def __init__(
        self,
        room: int,
        outer: Plan,
        goes_on: Callable[[], bool],
        took: Callable[[float], None],
        copying: frozenset[str],
        samples_any: bool,
    ) -> None:
        super().__init__(room)
        self.outer, self.goes_on, self.took = outer, goes_on, took
        self.copying, self.samples_any = copying, samples_any

    def order(self, sources: Sequence[str]) -> Sequence[str]:
        return self.outer.order(sources)

    def more(self, source: str, pending: int = 0) -> bool:
        return self.room > 0 and (pending == 0 or self.goes_on())

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        self.took(ms)

    def samples(self, source: str, confidence: float) -> bool:
        return self.samples_any and self.outer.samples(source, confidence)

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        if source in self.copying and confidence < SURE_COPY:  # what the controller would send is not known yet
            return None
        return super().keep(source, confidence)


class SideThread:
    """A thread that does one thing at a time while its owner does another."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_busy = False

    def start(self, work: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="localspec-ahead", daemon=True)
            self._thread.start()
        self._is_busy = True
        self._work.put(work)

    def wait(self) -> None:
        """Until what was started is done; what it raised is raised here."""
        if self._is_busy:
            error = self._done.get()
            self._is_busy = False
            if error is not None:
                raise error

    def close(self) -> None:
        """End the thread, once it has done what it is doing."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._work.put(None)
                self._thread.join()
                self._thread = None

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
                error = None
            except BaseException as raised:
                error = raised
            del work  # it holds the conversation
            self._done.put(error)
            del error


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
        """Since the pass began."""
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

    def took_pass(self, ms: float) -> None:
        self.pass_ms = moved(self.pass_ms, ms, 0.3)


class DraftAhead:
    """Drafts with a group of drafters, beginning while the target is still at the draft before.

    While drafts are made round after round, everything of the drafters happens in one thread of their own: an engine
    keeps a pool of threads for each that calls it, and two are in each other's way. Drafts are chains.

    Args:
        cautious: pause where it takes more time than it saves.
        beside: what runs beside the pass.
        n_steps: draft steps a pass, which are waited for; None is as many as there is time for.
    """

    def __init__(self, *, cautious: bool = True, beside: SideThread | None = None, n_steps: int | None = None) -> None:
        self._beside = beside or SideThread()
        self._balance = AheadBalance(cautious=cautious)
        self._clock = _Clock(n_steps)
        self._cache: dict[tuple[int, ...], _Prepared] = {}
        self._count = AheadCount()
        self._n_before = self._depth = 0
        self._is_drafting = False
        self._was_left_alone = False
        self._share = HIDDEN

    def begin(self, drafters: DrafterGroup, proposer: Proposer, end_tokens: frozenset[int]) -> None:
        """A new answer begins."""
        self._drafters, self._proposer, self._end_tokens = drafters, proposer, end_tokens
        readers = [each.info for each in drafters.drafters if not each.info.taps]
        self._copying = frozenset(each.source for each in readers if each.copies)
        self._models = frozenset(each.source for each in readers if each.runs_model)
        self._cache.clear()
        self._others: dict[int, Alternatives] = {}

    def draft(self, tokens: list[int], plan: Plan) -> Draft:
        """Draft what follows ``tokens``: what was prepared for them, as far as the plan wants it, and what follows."""
        self._count, self._plan, self._depth = AheadCount(), plan, plan.room
        self._others = self._proposer.alternatives = {}
        taken, is_cut = self._taken(tokens, plan)
        draft, rest = Draft(taken), Draft()
        if not (is_cut or (taken and taken[-1].id in self._end_tokens) or plan.room <= 0):
            rest = self._in_order(tokens, draft, plan)
        self._is_drafting = bool(taken or rest)
        if self._is_drafting and not self._was_left_alone:
            self._share += 0.05 * (len(taken) / (len(taken) + len(rest)) - self._share)
        return Draft([*taken, *rest])

    def _in_order(self, tokens: list[int], begun: Draft, plan: Plan) -> Draft:
        """What follows the beginning of a draft, in the ordinary order."""
        work = partial(self._drafters.draft, tokens, plan, self._proposer, self._end_tokens)
        settled, started = len(tokens), time.perf_counter()
        tokens += begun.ids
        found: list[Draft] = []
        try:
            if self._is_drafting:
                self._beside.start(lambda: found.append(work()))
                self._beside.wait()
            else:  # where little is drafted a change of threads would be most of what it takes
                found.append(work())
        finally:
            del tokens[settled:]
        self._balance.took_in_order(self._n_of_models(found[0]), (time.perf_counter() - started) * 1e3)
        return found[0]

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
        self._count.hit = True
        for token, alternatives in zip(prepared.tokens, prepared.alternatives, strict=True):
            confidence = token.prob if token.dist is None else token.dist.top
            expected = plan.keep(token.source, confidence, sampled=token.dist is not None)
            if expected is None:
                break
            self._others[len(tokens) + len(taken)] = alternatives
            taken.append(DraftToken(token.id, token.source, token.prob, token.dist, expected))
        self._count.taken = len(taken)
        self._balance.spared(self._n_of_models(taken))
        return taken, len(taken) < len(prepared.tokens)

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
        self._beside.start(partial(self._prepare, list(tokens), draft))
        try:
            yield
        finally:
            ms = clock.ms
            clock.stopped.set()
            self._beside.wait()
            clock.took_pass(ms)
            self._balance.passed(n_tokens, ms, late_ms=clock.ms - ms)
            self._count.outcomes = len(self._cache)
            self._count.prepared = sum(len(each.tokens) for each in self._cache.values())

    @property
    def hidden(self) -> dict[str, float]:
        """By drafter that runs a model, the share of its draft tokens that is lately there when the verdict is."""
        share = 0.0 if self._balance.is_pausing else self._share
        return dict.fromkeys(self._models, share)

    @property
    def count(self) -> AheadCount:
        """Of the round under way."""
        return self._count

    def close(self) -> None:
        """The answer is over: end the thread."""
        self._beside.close()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _prepare(self, tokens: list[int], draft: Draft) -> None:
        """Draft for one outcome after the other, the likeliest first."""
        depth = min(self._depth, len(draft) + 1)
        order = 0
        outcomes: list[tuple[float, int, tuple[int, ...] | None]] = []  # None: all accepted, and what then?

        def expect(probability: float, suffix: tuple[int, ...] | None) -> None:
            nonlocal order
            if probability >= LEAST and (suffix is None or suffix[-1] not in self._end_tokens):
                heapq.heappush(outcomes, (-probability, order, suffix))
                order += 1

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
                self._cache[suffix] = _Prepared(found, alternatives)

    def _drafted(
        self, tokens: list[int], suffix: Sequence[int], n: int, probability: float, *, samples: bool = True
    ) -> tuple[list[DraftToken], list[Alternatives]]:
        """What the drafters draft after one outcome, up to n tokens."""
        clock, text = self._clock, [*tokens, *suffix]
        plan = _AheadPlan(n, self._plan, lambda: clock.fits(probability), clock.took_step, self._copying, samples)
        others: dict[int, Alternatives] = {}
        self._proposer.alternatives = others
        draft = list(self._drafters.draft(text, plan, self._proposer, self._end_tokens, ahead=True))
        return draft, [others.get(len(text) + i, ()) for i in range(len(draft))]
