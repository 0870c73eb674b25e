"""What a loaded pair still has to find out or make, done in idle time: nothing of it is needed to be right.

Calibration, the check of a draft model, the choice between a draft and its lighter copy, another engine's opinion. Each
is work in steps; a request that comes waits for one step at most, and finds what was known before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.backends.second_opinion import SecondOpinion
from localspec.backends.trust import checking, fingerprint, verdict_key, verdicts
from localspec.controllers.calibration import calibrating, curve_key, curves
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.passes import WHOLE, PassKind
from localspec.errors import Cancelled, LocalspecError
from localspec.runtime.engine_choice import compared, engines_comparing
from localspec.runtime.idle import Stopped
from localspec.runtime.model_loading import giving_way
from localspec.system.steps import Steps
from localspec.system.usage import BUSY, CPUTimes, others_share

if TYPE_CHECKING:
    from localspec.backends.base import Context
    from localspec.runtime.pair import Pair
    from localspec.runtime.state import DraftModel
    from localspec.spec_decode.drafters.base import Drafter

log = logging.getLogger("localspec")

Work = Callable[[Stopped], Steps[None]]

ORDER = ("draft", "target curve", "draft curve", "draft check", "corpus", "other engine", "draft copy")
"""What is done first: what brings most, and quickly."""


AGAIN_S = 600.0
"""How long what was measured beside other programs stands before it is tried again, if they are gone by then."""


@dataclass(slots=True)
class _Item:
    kind: str
    work: Work
    due: float = 0.0
    steps: Steps[None] | None = None


class Preparation:
    """An idle task made of several; see ``idle.IdleTask``. Used by one thread."""

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._at_work: _Item | None = None
        self._stopped: Stopped = lambda: False

    def add(self, kind: str, work: Work, *, after: float = 0.0) -> None:
        """Have work done.

        Args:
            kind: one of ``ORDER``.
            work: makes the steps, given what says that they are to stop; made again after a step raised ``Cancelled``.
            after: not before so many seconds have passed.
        """
        self._items.append(_Item(kind, work, time.monotonic() + after))
        self._items.sort(key=lambda item: ORDER.index(item.kind))

    def drop(self, *kinds: str) -> None:
        """Forget work, and free what it holds."""
        for item in [item for item in self._items if item.kind in kinds]:
            self._end(item)

    def clear(self) -> None:
        """Forget all work."""
        self.drop(*ORDER)

    def __call__(self, stopped: Stopped) -> bool:
        item, self._stopped = self._next(), stopped
        if item is None:
            return False
        self._at_work = item
        try:
            if item.steps is None:
                item.steps = item.work(lambda: self._stopped())
            next(item.steps)
        except StopIteration:
            self._end(item)
        except Cancelled:
            item.steps = None
            raise
        except LocalspecError as error:
            log.debug("idle work %r failed: %s", item.kind, error)
            self._end(item)
        finally:
            self._at_work = None
        return self._next() is not None

    def _next(self) -> _Item | None:
        now = time.monotonic()
        return next((item for item in self._items if item.due <= now), None)

    def _end(self, item: _Item) -> None:
        if item in self._items:
            self._items.remove(item)
        if item.steps is not None and item is not self._at_work:
            item.steps.close()  # within its own steps, as when a draft is replaced, it ends by itself


def prepare_times(pair: Pair, kind: str, context: Context, times: PassTimes, passes: PassKind = WHOLE) -> None:
    """Queue the measurement of a cost model of which there is only a provisional one; it is used from then on."""

    def measuring(stopped: Stopped) -> Steps[None]:
        measured = yield from calibrating(context.model, context.n_ctx, passes)
        curves().put(curve_key(context.model, pair.options.kv_cache_type), measured)
        times.replace(measured)

    if times.noisy:
        _prepare_until_settled(pair, kind, measuring, lambda: times.noisy, once=times.quick)


def _prepare_until_settled(pair: Pair, kind: str, work: Work, provisional: Callable[[], bool], *, once: bool) -> None:
    """Queue a measurement, and again after a while, as long as what it finds is provisional.

    Args:
        pair: for whom.
        kind: one of ``ORDER``.
        work: the measurement.
        provisional: whether what was found is that.
        once: whether it is made now in any case; else, and again, only while nobody else uses the CPUs.
    """

    def measuring(stopped: Stopped, *, in_any_case: bool = once) -> Steps[None]:
        if in_any_case or (yield from _is_quiet()):
            yield from work(stopped)
        if provisional():
            pair.preparation.add(kind, partial(measuring, in_any_case=False), after=AGAIN_S)

    pair.preparation.add(kind, measuring)


def _is_quiet() -> Steps[bool]:
    """Whether others leave the CPUs alone, for a moment."""
    before = CPUTimes.now()
    for _ in range(5):
        time.sleep(0.06)
        yield
    return (others_share([(before, CPUTimes.now())]) or 0.0) < BUSY


def checking_draft(pair: Pair, draft: DraftModel) -> Steps[None]:
    """Check a draft model; one that its engine computes wrongly only costs time, so it drafts no more."""
    model, options = draft.model, pair.options.engine
    key = verdict_key(model.backend, options, fingerprint(model.path))
    if model.capabilities.batch_invariant or verdicts().get(key) is not None:
        return
    found = yield from checking(model)
    why = "" if found.holds else "its batches differ from its single tokens, "
    verdicts().put(key, {"holds": found.holds, "why": f"{why}KL {found.mean_kl:.2g} nats"})
    if not found.holds:
        pair.warnings.append(
            f"{model.engine} computes the draft {model.path.name} wrongly in batches: it is not drafted with now; the "
            "next start finds another way"
        )
        pair.reload_drafts(lambda what, fraction: None, drop=draft)


def prepare_draft(pair: Pair, draft: DraftModel) -> None:
    """Queue what is to be found out about a draft model in use; a head was checked when it was loaded."""
    prepare_times(pair, "draft curve", draft.context, draft.times, draft.passes)
    if not draft.drafter.reads_text:
        return
    pair.preparation.add("draft check", lambda stopped: checking_draft(pair, draft))
    if pair.loader.may_be_lighter(draft.path, draft.model, pair.state):

        def choosing(stopped: Stopped) -> Steps[None]:
            report = giving_way(stopped)
            if (yield from pair.loader.choosing(draft.path, draft.model, pair.state, report)):
                pair.reload_drafts(report, renew=draft)

        pair.preparation.add("draft copy", choosing)


def prepare_free(pair: Pair, drafters: Sequence[Drafter]) -> None:
    """Queue what drafters have to do that cost nothing, such as reading files that changed."""
    for drafter in drafters:
        steps = drafter.idle_work()
        if steps is not None:
            pair.preparation.add("corpus", partial(_telling, pair, steps))


def _telling(pair: Pair, steps: Steps[str], stopped: Stopped) -> Steps[None]:
    """The same steps; what they have to say, or why they ended early, is for the user to see, once."""
    try:
        remark = yield from steps
    except Cancelled:
        raise
    except LocalspecError as error:
        remark = str(error)
    if remark:
        pair.warnings.append(remark)


def ask_another_engine(pair: Pair, path: Path) -> None:
    """Queue the comparison with another engine, of results and of times, where there is one and it was not made."""
    options = pair.options

    def provisional() -> bool:
        found = compared(path, options.n_threads, options.kv_cache_type)
        return found is not None and found.provisional

    def asking(stopped: Stopped) -> Steps[None]:
        yield from second_opinion(pair, path).steps(stopped)

    if second_opinion(pair, path).waits:
        _prepare_until_settled(pair, "other engine", asking, provisional, once=not provisional())


def second_opinion(pair: Pair, path: Path) -> SecondOpinion:
    """What another engine has to say of a pair's target, a file as the user named it."""
    target, options = pair.target, pair.options
    known = compared(path, options.n_threads, options.kv_cache_type)
    comparable = target.capabilities.device == "cpu" and options.backend == "auto" and not options.placement
    return SecondOpinion(
        target,
        path,
        pair.options.target,
        pair.refuse,
        engines_comparing(pair.context.n_ctx, options.kv_cache_type),
        compared=not comparable or (known is not None and not known.provisional),
    )
