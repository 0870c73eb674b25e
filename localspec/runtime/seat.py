"""Where an answer is made: the state that it is decoded with, and what depends on whether others are made beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localspec.backends.base import FEW_ROWS
from localspec.controllers.acceptance import SourceAcceptance
from localspec.controllers.auto_controller import MAX_DRAFT, AutoController
from localspec.controllers.cost_model import PassCost
from localspec.controllers.estimates import Tables
from localspec.controllers.fixed import FixedController
from localspec.controllers.shared_rows import ShareOfPass
from localspec.errors import UsageError
from localspec.runtime.arguments import DraftLength
from localspec.runtime.state import DecodingState
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.ahead import DraftAhead
from localspec.spec_decode.controller import Controller
from localspec.spec_decode.decoder import PREFILL_CHUNK
from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.drafters.names import NGRAM
from localspec.spec_decode.drafters.ngram import NgramDrafter

SHARED_CHUNK = 1024
"""Where pieces can be of any length: so many, as the hidden states of all are kept for a head until they are read."""


@dataclass(slots=True)
class Seat:
    """What one answer is made with.

    Attributes:
        state: its context is the target's for this answer.
        times: what a pass costs this answer; None: as the state says, which is for passes of its own.
        step_times: what steps of draft models cost it, by source, where it is not as the state says.
        decides: the controller of the answer that is made in it; None until that begins.
        overlaps: see ``SpeculativeDecoder``.
    """

    state: DecodingState
    times: ShareOfPass | None = None
    step_times: Mapping[str, PassCost] = field(default_factory=dict)
    decides: Controller | None = None
    overlaps: bool = False

    @property
    def n_chunk(self) -> int:
        """Tokens of a prompt that one pass is asked for; a pass that is shared is given pieces of them."""
        return PREFILL_CHUNK if self.times is None else SHARED_CHUNK

    @property
    def drafting_ahead(self) -> DraftAhead | None:
        """What drafts while the target verifies; nothing where passes are shared, as ends of drafts may be left out."""
        return self.state.drafting_ahead if self.times is None else None

    def drafters_for(self, names: Sequence[str] | None, prediction: Sequence[int]) -> list[Drafter]:
        """The drafters of one request.

        Args:
            names: which take part, as people call them; None is all.
            prediction: a text that the answer is likely to repeat, for n-grams to copy from; where no n-gram drafter
                takes part, one does for this request.

        Raises:
            UsageError: no such drafter is loaded.
        """
        called = self.state.names
        unknown = [name for name in names or () if name not in called.values()]
        if unknown:
            raise UsageError(f"no drafter {unknown[0]!r} is loaded; there is {', '.join(called.values()) or 'none'}")
        chosen = [d for d in self.state.drafters if not d.failed and (names is None or called[d.source] in names)]
        if prediction and not any(drafter.source == NGRAM for drafter in chosen) and (chosen or names is None):
            chosen.insert(0, NgramDrafter())
        for drafter in chosen:
            drafter.expect(prediction)
        return chosen

    def controller(
        self,
        draft_length: DraftLength,
        params: SamplingParams | None = None,
        drafters: Sequence[Drafter] | None = None,
        *,
        predicted: bool = False,
        thinks: bool = False,
    ) -> Controller:
        """A controller for one request: ``auto``, or a fixed number of tokens (0: plain).

        Args:
            draft_length: ``auto`` or a number.
            params: the request's.
            drafters: those that take part; None is all.
            predicted: whether the answer is likely to repeat a text that came with the request.
            thinks: whether the model is known to think before it answers.
        """
        state, target_times = self.state, self.times or self.state.times
        drafters = [each for each in state.drafters if not each.failed] if drafters is None else drafters
        if draft_length != "auto" or not drafters:
            return FixedController(0 if draft_length == "auto" else int(draft_length), target_times, drafters)
        params = params or SamplingParams()
        times: dict[str, PassCost] = {draft.source: draft.times for draft in state.models}
        times.update(self.step_times)

        def table(drafter: Drafter, *, sampled: bool, thinks: bool) -> SourceAcceptance:
            return state.acceptance.source(
                params,
                drafter.source,
                copies=not drafter.runs_model,
                sampled=sampled,
                reads_target=drafter.reads_target,
                thinks=thinks,
                rate=drafter.rate,
            )

        def tables(*, thinks: bool) -> Tables:
            return (
                {drafter.source: table(drafter, sampled=False, thinks=thinks) for drafter in drafters},
                {each.source: table(each, sampled=True, thinks=thinks) for each in drafters if each.runs_model},
            )

        # What longer copies gain where text repeats itself is less than they would cost all text after it.
        longest = FEW_ROWS - 1 if state.target.capabilities.keeps_rows else MAX_DRAFT
        return AutoController(
            target_times,
            {drafter.source: times[drafter.source] for drafter in drafters if drafter.runs_model},
            *tables(thinks=False),
            longest,
            state.acceptance.budget,
            predicted=predicted,
            thinking=tables(thinks=True) if thinks else None,
            one_pass=frozenset(drafter.source for drafter in drafters if drafter.one_pass),
        )
