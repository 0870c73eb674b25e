"""What a pair decodes with, and what was learned of cost and acceptance: taken, copied, put in place, given back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from localspec.backends.base import FEW_ROWS, Context, Model, SequenceBatch, SequencesInTurn
from localspec.backends.trust import ensure_batches
from localspec.controllers.auto import MAX_DRAFT, AutoController
from localspec.controllers.batching import ShareOfPass
from localspec.controllers.calibration import PassKind
from localspec.controllers.cost_model import PassCost, PassTimes
from localspec.controllers.fixed import FixedController
from localspec.controllers.learned import AcceptanceStore
from localspec.engine.options import MAX_PARALLEL
from localspec.engine.request import DraftLength
from localspec.errors import EngineMismatch, UnsupportedModel, UsageError
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.ahead import DraftAhead
from localspec.spec_decode.drafters.base import Controller, Drafter, DrafterInfo
from localspec.spec_decode.drafters.names import NGRAM
from localspec.spec_decode.drafters.ngram import NgramDrafter

FULL_CONTEXTS = 2
"""A memory for several answers has room for so many that fill their context: most never do."""

SPARE = 2
"""Sequences besides those of the answers that have rows: so many answers of a lower priority can be put aside for
others. What an answer drafts with reads in its sequence, so it keeps that."""


def n_sequences(parallel: int) -> int:
    return parallel if parallel == 1 else min(parallel + SPARE, MAX_PARALLEL)


@dataclass(eq=False, slots=True)
class DraftMemory:
    """What a draft model or head drafts in: a context for each answer, sequences of ``batch`` where there is one."""

    contexts: Sequence[Context]
    batch: SequenceBatch | None = None

    @classmethod
    def shared(cls, model: Model, n_ctx: int, parallel: int, n_gpu_layers: int | None) -> DraftMemory:
        """As much room as ``target_memory``; contexts of their own where the engine cannot share passes."""
        n_cells = FULL_CONTEXTS * n_ctx
        try:
            ensure_batches(model, n_gpu_layers)
            batch = model.new_batch(n_sequences(parallel), n_cells, n_ctx=n_ctx)
        except (EngineMismatch, UnsupportedModel):
            batch = SequencesInTurn(several(lambda: model.new_context(n_ctx), n_sequences(parallel)), n_cells)
        return cls([batch[i] for i in range(batch.n_sequences)], batch)

    def close(self) -> None:
        for each in self.contexts if self.batch is None else [self.batch]:
            each.close()


def several(new_context: Callable[[], Context], n: int) -> list[Context]:
    with ExitStack() as made:
        contexts = [made.enter_context(new_context()) for _ in range(n)]
        made.pop_all()
    return contexts


@dataclass(eq=False, slots=True)
class DraftModel:
    """A loaded draft model or head: what drafts by passes that take time.

    Attributes:
        name: what people call it; ``spec``: what ``--draft`` calls it.
        path: its file, as it was asked for; ``model.path`` is another where a lighter copy of it drafts.
        times: the cost model of its passes, of the kind ``passes``.
    """

    name: str
    spec: str
    path: Path
    model: Model
    memory: DraftMemory
    times: PassTimes
    drafter: Drafter
    passes: PassKind
    free_weights: Callable[[], None]
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        self.context = self.memory.contexts[0]  # where several answers share passes, that of the first

    @property
    def source(self) -> str:
        return self.drafter.info.source

    def clone(self, context: Context) -> DraftModel:
        """The same weights with a copy of what was learned, in another context."""
        memory = DraftMemory([context])
        return replace(self, memory=memory, times=deepcopy(self.times), drafter=self.drafter.clone(context))

    def close(self) -> None:
        self.memory.close()
        self.free_weights()


@dataclass(eq=False, slots=True)
class DecodingState:
    """All that changes from one answer to the next; ``Pair.state`` is the one in use.

    What compares ways to decode on one loaded pair decodes with forks of it (``Pair.use``) and puts it back.

    Attributes:
        free: drafters that cost nothing; they are asked first.
        acceptance: how often draft tokens were accepted, and the time that drafting may cost.
        drafting_ahead: drafts while the target verifies; None where that is not done.
        batch: the memory that the context is a sequence of, where several answers share passes.
        failed: sources of drafters that are not asked any more.
        names: source -> what people call the drafter.
    """

    context: Context
    times: PassTimes
    free: list[Drafter]
    models: list[DraftModel]
    acceptance: AcceptanceStore
    drafting_ahead: DraftAhead | None = None
    batch: SequenceBatch | None = None
    failed: set[str] = field(default_factory=set)
    names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {each.info.source: each.info.name for each in self.free}
        self.names |= {each.source: each.name for each in self.models}

    @property
    def target(self) -> Model:
        return self.context.model

    @property
    def contexts(self) -> list[Context]:
        return [self.context, *(draft.context for draft in self.models)]

    @property
    def text_contexts(self) -> list[Context]:
        """Contexts that hold a text, which can be put aside: the target's, draft models'."""
        return [self.context, *(draft.context for draft in self.models if draft.drafter.info.reads_text)]

    @property
    def drafters(self) -> list[Drafter]:
        """All drafters, in the order in which they were loaded."""
        return [*self.free, *(draft.drafter for draft in self.models)]

    @property
    def draft_names(self) -> list[str]:
        """What people call the drafters in use, in the order in which they are asked."""
        return [self.names[each.info.source] for each in self.drafters_for(None)]

    def drafters_for(self, names: Sequence[str] | None, *, predicted: bool = False) -> list[Drafter]:
        """The drafters of one request that have not failed: of these names, or all; n-grams too where the answer is
        ``predicted``.
        ``UsageError``: no such drafter is loaded."""
        known = list(self.names.values())
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise UsageError(f"no drafter {unknown[0]!r} is loaded; there is {', '.join(known) or 'none'}")
        loaded = [*self.free, *(draft.drafter for draft in self.models)]
        usable = [each for each in loaded if each.info.source not in self.failed]
        chosen = [each for each in usable if names is None or self.names[each.info.source] in names]
        if predicted and not any(drafter.info.source == NGRAM for drafter in chosen) and (chosen or names is None):
            chosen.insert(0, NgramDrafter())
        return chosen

    def controller(
        self,
        draft_length: DraftLength,
        params: SamplingParams | None = None,
        drafters: Sequence[Drafter] | None = None,
        *,
        shared: ShareOfPass | None = None,
        predicted: bool = False,
    ) -> Controller:
        """A controller for one request: ``auto``, or a fixed number of tokens (0: plain); ``drafters``: those that take
        part, None is all. ``predicted``: whether the answer is likely to repeat a text that came with the request."""
        target_times = shared or self.times
        drafters = self.drafters_for(None) if drafters is None else drafters
        if draft_length != "auto" or not drafters:
            return FixedController(0 if draft_length == "auto" else int(draft_length), target_times, drafters)
        infos = [drafter.info for drafter in drafters]
        draft_times: dict[str, PassCost] = {draft.source: draft.times for draft in self.models}
        return self._auto(infos, draft_times, params or SamplingParams(), target_times, predicted)

    def _auto(
        self,
        drafters: Iterable[DrafterInfo],
        draft_times: Mapping[str, PassCost],
        params: SamplingParams,
        target_times: PassCost,
        predicted: bool = False,
    ) -> AutoController:
        infos = {info.source: info for info in drafters}
        samplers = {source: info for source, info in infos.items() if info.runs_model and not info.as_text}
        learned = partial(self.acceptance.source, params)
        # What longer copies gain where text repeats itself is less than they would cost all text after it.
        longest = FEW_ROWS - 1 if self.target.capabilities.keeps_rows else MAX_DRAFT
        return AutoController(
            target_times,
            {source: draft_times[source] for source, info in infos.items() if info.runs_model},
            {source: learned(info) for source, info in infos.items()},
            {source: learned(info, sampled=True) for source, info in samplers.items()},
            longest,
            self.acceptance.budget,
            predicted=predicted,
            one_pass=frozenset(source for source, info in infos.items() if info.one_pass),
            rows_of_draft=frozenset(source for source, info in infos.items() if info.rows_of_draft),
            passes={source: info.passes for source, info in infos.items() if info.as_text},
            params=params,
        )

    def gain_with(self, drafter: DrafterInfo, times: PassTimes, n_prompt: int, n_answer: int) -> float:
        """What a drafter that runs a model adds to those that cost nothing, greedy or sampled, whichever is more: the
        expected time of an answer of so many tokens without it, over that with it."""
        infos = [*(each.info for each in self.free), drafter]
        n_prompt = n_prompt if drafter.reads_text else 0
        gains = []
        for temperature in (0.0, 0.8):
            auto = self._auto(infos, {drafter.source: times}, SamplingParams(temperature=temperature), self.times)
            gains.append(auto.stopping.gain_over_copies(drafter.source, n_prompt, n_answer))
        return max(gains)

    def fork(self, sources: Collection[str] | None = None, *, own_contexts: bool = False) -> DecodingState:
        """Another state over the same weights: it learns apart from here on, and its drafters have read nothing.

        Args:
            sources: which drafters take part; None is all.
            own_contexts: whether both may be within an answer at once; the target's context then returns the hidden
                states that these drafters want. Else they take turns in the same contexts.
        """
        free = [each.clone(None) for each in self.free if sources is None or each.info.source in sources]
        chosen = [each for each in self.models if sources is None or each.source in sources]
        with ExitStack() as made:

            def context_like(context: Context, hidden: Sequence[str]) -> Context:
                if not own_contexts:
                    return context
                like = context.model.new_context(context.n_ctx, hidden=hidden, branches=context.can_branch)
                return made.enter_context(like)

            context = context_like(self.context, taps_of([*free, *(each.drafter for each in chosen)]))
            models = [each.clone(context_like(each.context, each.context.hidden)) for each in chosen]
            made.pop_all()
        batch = None if own_contexts else self.batch
        learned = deepcopy(self.times), free, models, deepcopy(self.acceptance)
        return DecodingState(context, *learned, ahead_of(context.model, models), batch)

    def beside(self, sequence: int) -> DecodingState:
        """A fork for another sequence of the same memories."""
        fork = self.fork()
        assert self.batch is not None
        fork.context = self.batch[sequence]
        fork.models = [each.clone(each.memory.contexts[sequence]) for each in self.models]
        return fork

    def close_target(self) -> None:
        (self.context if self.batch is None else self.batch).close()


def ahead_of(target: Model, drafts: Iterable[DraftModel]) -> DraftAhead | None:
    """Drafts ahead of the verdict, where draft model and target do not take each other's time: one on the CPU alone,
    the other on a GPU alone.

    RPC servers count as a GPU, those on this machine as its CPU (``ServerFacts.is_near``). The devices of a Mac read
    their weights from one memory, which is what their passes wait for.
    """
    devices = [
        {target.capabilities.device, draft.model.capabilities.device}
        for draft in drafts
        if draft.drafter.info.reads_text
    ]
    return DraftAhead() if {"cpu", "gpu"} in devices and sys.platform != "darwin" else None


def target_memory(
    model: Model, n_ctx: int, parallel: int, hidden: Sequence[str] = (), *, branches: bool = False
) -> tuple[Context, SequenceBatch | None]:
    """The target's context; where several answers share passes, the first sequence of the memory that comes with it.
    ``EngineError``: there is no memory for it; ``UsageError``: the engine takes fewer sequences."""
    if parallel == 1:
        return model.new_context(n_ctx, hidden=hidden, branches=branches), None
    batch = model.new_batch(n_sequences(parallel), FULL_CONTEXTS * n_ctx, n_ctx=n_ctx, hidden=hidden)
    return batch[0], batch


def taps_of(drafters: Iterable[Drafter]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.info.taps))
