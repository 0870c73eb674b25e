"""What a pair decodes with, and what was learned of cost and acceptance: taken, copied, put in place, given back."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from localspec.backends.base import Context, Model
from localspec.controllers.acceptance_store import AcceptanceStore
from localspec.controllers.cost_model import PassTimes
from localspec.spec_decode.drafters.base import Drafter


@dataclass(eq=False, slots=True)
class DraftModel:
    """A loaded draft model.

    Attributes:
        name: what people call it.
        path: its file, as it was asked for; ``model.path`` is another where a lighter copy of it drafts.
        model: its weights.
        context: what it reads and drafts in.
        times: the cost model of its passes.
        drafter: what drafts with it.
    """

    name: str
    path: Path
    model: Model
    context: Context
    times: PassTimes
    drafter: Drafter

    @property
    def source(self) -> str:
        """What rounds and statistics call it."""
        return self.drafter.source

    def clone(self, context: Context) -> DraftModel:
        """The same weights with a copy of what was learned, in a context that may be another."""
        return DraftModel(self.name, self.path, self.model, context, deepcopy(self.times), self.drafter.clone(context))


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
        models: draft models, in the order in which they are asked.
        acceptance: how often draft tokens were accepted, and the time that drafting may cost.
    """

    context: Context
    times: PassTimes
    free: list[Drafter]
    models: list[DraftModel]
    acceptance: AcceptanceStore

    @property
    def target(self) -> Model:
        """The target's weights."""
        return self.context.model

    @property
    def contexts(self) -> list[Context]:
        """The target's, then the draft models'."""
        return [self.context, *(draft.context for draft in self.models)]

    @property
    def drafters(self) -> list[Drafter]:
        """All drafters, in the order in which they are asked."""
        return [*self.free, *(draft.drafter for draft in self.models)]

    @property
    def names(self) -> dict[str, str]:
        """Source -> what people call the drafter."""
        return {drafter.source: drafter.source for drafter in self.free} | {
            draft.source: draft.name for draft in self.models
        }

    def fork(self, sources: Collection[str] | None = None, *, own_contexts: bool = False) -> DecodingState:
        """Another state over the same weights: it learns apart from here on, and its drafters have read nothing.

        Args:
            sources: which drafters take part; None is all.
            own_contexts: whether both may be within an answer at once. Else they take turns in the same contexts.

        Raises:
            EngineError: there is no memory for more contexts.
        """
        made: list[Context] = []

        def context_like(context: Context) -> Context:
            if own_contexts:
                made.append(context.model.new_context(context.n_ctx))
            return made[-1] if own_contexts else context

        try:
            context = context_like(self.context)
            models = [
                each.clone(context_like(each.context))
                for each in self.models
                if sources is None or each.source in sources
            ]
        except BaseException:
            for each in made:
                each.close()
            raise
        free = [each.clone(None) for each in self.free if sources is None or each.source in sources]
        return DecodingState(context, deepcopy(self.times), free, models, deepcopy(self.acceptance))
