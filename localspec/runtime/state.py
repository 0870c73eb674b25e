"""What a pair decodes with, and what was learned of cost and acceptance: taken, copied, put in place, given back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

from localspec.backends.base import Context, Model, SequenceBatch
from localspec.backends.batch_trust import ensure_batches
from localspec.backends.sequence_batch import SequencesInTurn
from localspec.controllers.acceptance_store import AcceptanceStore
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.passes import PassKind
from localspec.errors import EngineMismatch, UnsupportedModel
from localspec.runtime.draft_ahead import AheadChoice
from localspec.runtime.load_options import MAX_PARALLEL
from localspec.spec_decode.ahead import DraftAhead
from localspec.spec_decode.drafters.base import Drafter

FULL_CONTEXTS = 2
"""A memory for several answers has room for so many that fill their context: most never do."""

SPARE = 2
"""Sequences besides those of the answers that have rows: so many answers of a lower priority can be put aside for
others. What an answer drafts with reads in its sequence, so it keeps that."""


def n_sequences(parallel: int) -> int:
    """Of a memory for so many answers at a time."""
    return parallel if parallel == 1 else min(parallel + SPARE, MAX_PARALLEL)


@dataclass(eq=False, slots=True)
class DraftMemory:
    """What a draft model or head reads and drafts in.

    Attributes:
        contexts: one for each answer that can be under way.
        batch: the memory that they are sequences of; None where each is a memory of its own.
    """

    contexts: Sequence[Context]
    batch: SequenceBatch | None = None

    @classmethod
    def of_model(cls, model: Model, n_ctx: int, parallel: int, n_gpu_layers: int | None = None) -> DraftMemory:
        """That of a draft model: as much room as the target's memory has, see ``target_memory``.

        Where its engine computes several sequences of it wrongly, or not at all, each has a context of its own.

        Raises:
            EngineError: there is no memory for it.
        """
        if parallel == 1:
            return cls([model.new_context(n_ctx)])
        n_cells = FULL_CONTEXTS * n_ctx
        try:
            ensure_batches(model, n_gpu_layers)
            batch = model.new_batch(n_sequences(parallel), n_cells, n_ctx=n_ctx)
        except (EngineMismatch, UnsupportedModel):
            batch = SequencesInTurn(_several(lambda: model.new_context(n_ctx), n_sequences(parallel)), n_cells)
        return cls([batch[i] for i in range(batch.n_sequences)], batch)

    @classmethod
    def of_head(cls, new_context: Callable[[], Context], parallel: int) -> DraftMemory:
        """That of a head: a layer's keys and values for each answer.

        Raises:
            EngineError: there is no memory for it.
        """
        return cls(_several(new_context, n_sequences(parallel)))

    def close(self) -> None:
        """Free it; safe to call twice."""
        for each in self.contexts if self.batch is None else [self.batch]:
            each.close()


def _several(new_context: Callable[[], Context], n: int) -> list[Context]:
    made: list[Context] = []
    try:
        while len(made) < n:
            made.append(new_context())
    except BaseException:
        for each in made:
            each.close()
        raise
    return made


@dataclass(eq=False, slots=True)
class DraftModel:
    """A loaded draft model or head: what drafts by passes that take time.

    Attributes:
        name: what people call it.
        spec: what ``--draft`` calls it.
        path: its file, as it was asked for; ``model.path`` is another where a lighter copy of it drafts.
        model: its weights.
        memory: what it reads and drafts in.
        times: the cost model of its passes.
        drafter: what drafts with it.
        passes: which passes ``times`` is of.
        free_weights: frees what it holds besides the context.
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

    @property
    def context(self) -> Context:
        """What it reads and drafts in; where several answers share passes, for the first of them."""
        return self.memory.contexts[0]

    @property
    def source(self) -> str:
        """What rounds and statistics call it."""
        return self.drafter.source

    def clone(self, context: Context) -> DraftModel:
        """The same weights with a copy of what was learned, in a context that may be another."""
        memory = DraftMemory([context])
        return replace(self, memory=memory, times=deepcopy(self.times), drafter=self.drafter.clone(context))

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self.memory.close()
        self.free_weights()


@dataclass(eq=False, slots=True)
class DecodingState:
    """All that changes from one answer to the next; ``Pair.state`` is the one in use.

    What compares ways to decode on one loaded pair takes it, decodes with forks of it (``Pair.use``), one or several at
    a time, and puts it back: then nothing of the comparison stays.

    >>> def compare(pair: Pair) -> None:
    ...     before = pair.state
    ...     pair.use(before.fork(["model"]))  # only the draft model, from the same knowledge
    ...     ...
    ...     pair.use(before)

    Attributes:
        context: the target's.
        times: the cost model of the target's passes.
        free: drafters that cost nothing; they are asked first.
        models: draft models and heads.
        acceptance: how often draft tokens were accepted, and the time that drafting may cost.
        ahead: whether drafters go on while the target verifies.
        batch: the memory that the context is a sequence of, where several answers share passes.
    """

    context: Context
    times: PassTimes
    free: list[Drafter]
    models: list[DraftModel]
    acceptance: AcceptanceStore
    ahead: AheadChoice = field(default_factory=AheadChoice)
    batch: SequenceBatch | None = None

    @property
    def drafting_ahead(self) -> DraftAhead | None:
        """What drafts while the target verifies; None where that is not done."""
        return self.ahead.of(self.context, [draft.model for draft in self.models if draft.drafter.reads_text])

    @property
    def target(self) -> Model:
        """The target's weights."""
        return self.context.model

    @property
    def contexts(self) -> list[Context]:
        """The target's, then those of draft models and heads."""
        return [self.context, *(draft.context for draft in self.models)]

    @property
    def text_contexts(self) -> list[Context]:
        """Of these, those that hold a text, which can be put aside and brought back: the target's, draft models'."""
        return [self.context, *(draft.context for draft in self.models if draft.drafter.reads_text)]

    @property
    def drafters(self) -> list[Drafter]:
        """All drafters, in the order in which they were loaded."""
        return [*self.free, *(draft.drafter for draft in self.models)]

    @property
    def names(self) -> dict[str, str]:
        """Source -> what people call the drafter."""
        return {drafter.source: drafter.name for drafter in self.free} | {
            draft.source: draft.name for draft in self.models
        }

    def fork(self, sources: Collection[str] | None = None, *, own_contexts: bool = False) -> DecodingState:
        """Another state over the same weights: it learns apart from here on, and its drafters have read nothing.

        Args:
            sources: which drafters take part; None is all.
            own_contexts: whether both may be within an answer at once; the target's context then returns no hidden
                states but those that the drafters taking part want. Else they take turns in the same contexts.

        Raises:
            EngineError: there is no memory for more contexts.
        """
        free = [each.clone(None) for each in self.free if sources is None or each.source in sources]
        chosen = [each for each in self.models if sources is None or each.source in sources]
        made: list[Context] = []

        def context_like(context: Context, hidden: Sequence[str]) -> Context:
            if own_contexts:
                made.append(context.model.new_context(context.n_ctx, hidden=hidden, branches=context.can_branch))
            return made[-1] if own_contexts else context

        try:
            context = context_like(self.context, taps_of([*free, *(each.drafter for each in chosen)]))
            models = [each.clone(context_like(each.context, each.context.hidden)) for each in chosen]
        except BaseException:
            for each in made:
                each.close()
            raise
        batch = None if own_contexts else self.batch
        learned = deepcopy(self.times), free, models, deepcopy(self.acceptance)
        return DecodingState(context, *learned, AheadChoice(), batch)

    def beside(self, sequence: int) -> DecodingState:
        """A fork to be within an answer while this one is, in another sequence of the memories; it takes no more room.

        Args:
            sequence: its number.
        """
        fork = self.fork()
        assert self.batch is not None
        fork.context = self.batch[sequence]
        fork.models = [each.clone(each.memory.contexts[sequence]) for each in self.models]
        return fork

    def close_target(self) -> None:
        """Free the target's context, and what it is a part of; safe to call twice."""
        (self.context if self.batch is None else self.batch).close()


def target_memory(
    model: Model, n_ctx: int, parallel: int, hidden: Sequence[str] = (), *, branches: bool = False
) -> tuple[Context, SequenceBatch | None]:
    """The target's context; where several answers share passes, the memory that it is the first sequence of too.

    Args:
        model, n_ctx, hidden, branches: as for ``Model.new_context``.
        parallel: how many answers share passes.

    Raises:
        EngineError: there is no memory for it.
        UsageError: the engine takes fewer sequences.
    """
    if parallel == 1:
        return model.new_context(n_ctx, hidden=hidden, branches=branches), None
    batch = model.new_batch(n_sequences(parallel), FULL_CONTEXTS * n_ctx, n_ctx=n_ctx, hidden=hidden)
    return batch[0], batch


def taps_of(drafters: Iterable[Drafter]) -> tuple[str, ...]:
    """The hidden states of the target that drafters want, each once."""
    return tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))
