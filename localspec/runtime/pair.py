"""A loaded target with its drafters: everything that one worker thread owns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from localspec.backends.base import Context, FloatArray
from localspec.controllers.acceptance_store import AcceptanceStore
from localspec.controllers.calibration import curve_key, curves
from localspec.controllers.cost_model import PassTimes
from localspec.errors import Cancelled, EngineMismatch
from localspec.runtime.arguments import DraftLength
from localspec.runtime.drafts import DraftMaker
from localspec.runtime.learned import keep
from localspec.runtime.load_options import LoadOptions
from localspec.runtime.model_loading import Loader, Remarks, Report
from localspec.runtime.parallel_choice import open_memory
from localspec.runtime.pass_counts import PassCounts
from localspec.runtime.prefix_cache import PrefixCache
from localspec.runtime.preparation import Preparation, ask_another_engine, prepare_draft, prepare_free, prepare_times
from localspec.runtime.request import AnswerRequest
from localspec.runtime.seat import Seat
from localspec.runtime.state import DecodingState, DraftModel
from localspec.sampling.sampling import SamplingParams
from localspec.sampling.structured.constraint import constraint_for
from localspec.spec_decode.controller import Controller
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.drafters.grammar import GrammarDrafter
from localspec.spec_decode.passes import Steps as RoundSteps
from localspec.spec_decode.passes import after, left_to_caller, rounds_alone
from localspec.spec_decode.rounds import Round
from localspec.spec_decode.thinking import ThinkingReader
from localspec.system.heap import trim_heap

log = logging.getLogger("localspec")

DEFAULT_CTX = 8192
"""Context size where none is asked for, if the model was trained for as much."""


class Pair:
    """A target, its drafters, and what was learned about their cost and acceptance. Not thread-safe: one owner.

    Commands that measure or audit a pair get it from ``LLM.run``.

    Attributes:
        target: the target's weights.
        options: how it was loaded.
        loader: what loads further models so.
        warnings: one-line remarks from loading, and from idle time, that a user should see.
        conversation: the one last worked on, prompt and answer.
        prefix_cache: other conversations, put aside.
        preparation: what is left to find out in idle time.
        why_chains: why drafts do not branch; None where they may.
        shared: what the rows of passes that answers shared were for.
        refused: why nothing is answered any more, where the engine turned out to be wrong; else None.
    """

    def __init__(self, path: Path, draft: Sequence[str], options: LoadOptions, report: Report) -> None:
        self.options = options
        self.warnings: list[str] = Remarks()
        self.loader = Loader(options, self.warnings)
        self.preparation = Preparation()
        self.prefix_cache = PrefixCache(options.prefix_cache_bytes)
        self.shared = PassCounts()
        self.refused: str | None = None
        self.conversation: Sequence[int] = ()
        self._last: tuple[DraftLength, Controller] | None = None
        with ExitStack() as undo:
            undo.callback(trim_heap)
            self.target = self.loader.load_target(path, report)
            undo.callback(self.target.close)
            n_ctx = self._context_size()
            times = self.loader.times(self.target, n_ctx, report)
            opened = open_memory(self.loader, self.target, times, n_ctx, report)
            self.parallel, self.why_chains, context, batch = opened
            self.loader.parallel = self.parallel.n
            undo.callback((batch or context).close)
            self._state = DecodingState(context, times, [], [], AcceptanceStore(None, {}), batch=batch)
            if batch is not None:
                self.prefix_cache.join(batch)
            self.set_draft(draft, report)
            undo.pop_all()
        if options.idle:
            prepare_times(self, "target curve", context, times)
            ask_another_engine(self, path)

    def _context_size(self) -> int:
        trained = self.target.n_ctx_train
        n_ctx = self.options.n_ctx or min(DEFAULT_CTX, trained or DEFAULT_CTX)
        if trained and n_ctx > trained:
            self.warnings.append(
                f"--ctx {n_ctx} exceeds the {trained} tokens this model was trained for; "
                "answers far into the context may degrade"
            )
        return n_ctx

    # -- what it decodes with ------------------------------------------------------------------------------------

    @property
    def state(self) -> DecodingState:
        """What answers are decoded with, and what was learned; ``use`` replaces it."""
        return self._state

    def use(self, state: DecodingState) -> None:
        """Decode with another state from the next answer on, such as a fork of this one, which is left as it is."""
        self._state, self._last = state, None

    def release(self, state: DecodingState) -> None:
        """Free the contexts of a fork that the state in use does not share."""
        for context in state.contexts:
            if context not in self.contexts:
                self.prefix_cache.forget(context)
                context.close()

    @property
    def context(self) -> Context:
        """The target's context."""
        return self.state.context

    @property
    def contexts(self) -> list[Context]:
        """The target's, then those of draft models and heads."""
        return self.state.contexts

    @property
    def times(self) -> PassTimes:
        """The cost model of the target's passes."""
        return self.state.times

    @property
    def draft_names(self) -> list[str]:
        """Names of the drafters in use, in the order they are asked; one that failed is not in use any more."""
        state = self.state  # once: another thread asks while the worker replaces it
        return [state.names[drafter.source] for drafter in state.drafters if not drafter.failed]

    @property
    def draft_specs(self) -> list[str]:
        """What ``set_draft`` takes to load the drafters in use."""
        return [*(drafter.name for drafter in self.state.free), *(draft.spec for draft in self.state.models)]

    def set_draft(self, names: Sequence[str], report: Report, *, renew: DraftModel | None = None) -> None:
        """Replace the drafters; on an error the ones in use stay.

        Args:
            names: what drafts, as ``arguments.draft_specs`` returns it.
            report: takes progress.
            renew: a draft model that is loaded again though it is in use.

        Raises:
            VocabularyMismatch: a draft model numbers its tokens differently.
            UnknownModel, ModelFileError, EngineError: as when loading a model.
        """
        self.preparation.drop("corpus", "draft curve", "draft check", "draft copy")
        before = self.state
        with ExitStack() as undo:
            after = DraftMaker(self.loader, before, report, undo, renew).state(names)
            undo.pop_all()
        for draft in before.models:
            if draft.context not in after.contexts:
                self._close_draft(draft)
        if before.context is not after.context:
            if after.batch is not None:
                self.prefix_cache.join(after.batch)
            self.prefix_cache.move(before.context, after.context)
            before.close_target()
        for drafter in before.free:
            drafter.close()
        for draft in after.models:
            if draft.memory.batch is not None:
                self.prefix_cache.join(draft.memory.batch)
        self.use(after)
        if self.options.idle:
            for draft in after.models:
                prepare_draft(self, draft)
            prepare_free(self, after.free)

    def reload_drafts(self, report: Report, *, drop: DraftModel | None = None, renew: DraftModel | None = None) -> None:
        """Load the drafters anew that are in use, but for a draft model that is dropped.

        Args:
            report: takes progress.
            drop: drafts no more.
            renew: is read again from its file, as it is known now which copy of it drafts faster.
        """
        dropped = "" if drop is None else drop.spec
        self.set_draft([spec for spec in self.draft_specs if spec != dropped], report, renew=renew)

    def recalibrate(self, report: Report) -> None:
        """Measure the passes of target and draft models anew; what is broken off is measured at the next load."""
        state = self.state
        n_ctx, kv_type = state.context.n_ctx, self.options.kv_cache_type
        curves().drop(curve_key(self.target, kv_type))
        for draft in state.models:
            curves().drop(curve_key(draft.model, kv_type))
        state.times = self.loader.times(self.target, n_ctx, report)
        for draft in state.models:
            draft.times = self.loader.times(draft.model, n_ctx, report, draft.passes)

    def _lost(self, drafter: Drafter, why: str) -> None:
        # The draft's file by its path: its name alone can be that of another, and of a lighter copy it says little.
        files = {draft.source: str(draft.path) for draft in self.state.models}
        line = f"the draft {files.get(drafter.source, drafter.source)} is not used any more: it {why}"
        if line not in self.warnings:  # each of several answers has a drafter of its own
            log.warning(line)
        self.warnings.append(line)

    # -- decoding ------------------------------------------------------------------------------------------------

    def controller(
        self,
        draft_length: DraftLength,
        params: SamplingParams | None = None,
        drafters: Sequence[Drafter] | None = None,
        *,
        predicted: bool = False,
        thinks: bool = False,
    ) -> Controller:
        """A controller for one request; see ``Seat.controller``."""
        return Seat(self.state).controller(draft_length, params, drafters, predicted=predicted, thinks=thinks)

    def explain(self, draft_length: DraftLength) -> str:
        """Why the last answer was, or the next one will be, drafted as it is: a line for each drafter."""
        if self._last is not None and self._last[0] == draft_length:
            return self._last[1].explain()
        return self.controller(draft_length).explain()

    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        draft_length: DraftLength,
        on_prefilled: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> Iterator[Round]:
        """Prefill and decode with all drafters; see ``steps`` and ``SpeculativeDecoder``."""
        request = AnswerRequest(prompt, params, draft_length, n_logprobs=None, model_name="")
        yield from rounds_alone(self.steps(Seat(self.state), prompt, request, on_prefilled, cancelled), self.context)

    def steps(
        self,
        seat: Seat,
        prompt: Sequence[int],
        request: AnswerRequest,
        on_prefilled: Callable[[int], None],
        cancelled: Callable[[], bool],
        thinking: ThinkingReader | None = None,
    ) -> RoundSteps:
        """The rounds of an answer, the passes left to the caller.

        Args:
            seat: where it is made.
            prompt: the tokens of the request's prompt.
            request: what was asked.
            on_prefilled: gets the number of cached prompt tokens.
            cancelled: whether to stop; also asked inside of long passes, such as a draft model's first reading.
            thinking: see ``TextAssembler``.
        """
        self._check_usable()
        chosen = seat.drafters_for(request.drafters, request.prediction)
        params = request.params
        constraint = constraint_for(params, self.target.vocab)
        if constraint is not None and chosen:
            chosen = [GrammarDrafter(constraint, self.target.tokenize), *chosen]
        controller = seat.controller(
            request.draft_length, params, chosen, predicted=bool(request.prediction), thinks=thinking is not None
        )
        seat.decides, last = controller, (request.draft_length, controller)
        if self.options.idle:
            prepare_free(self, chosen)
        chosen = [drafter for drafter in chosen if controller.may_use(drafter.source)]
        target = seat.state.context
        ahead = seat.drafting_ahead
        decoder = SpeculativeDecoder(target, chosen, controller, self._lost, ahead, overlaps=seat.overlaps)
        conversation = list(prompt)
        self.conversation, self._last = conversation, last
        named = self.target.vocab.named(params.stop) if params.stop else None
        text = TextAssembler(self.target.vocab, [*params.stop, *request.end_marks], thinking, named)
        n_rounds, ended = 0, False
        # A pass that is broken off leaves every context with what its `tokens` says.
        with self._working_on(target, conversation, chosen, cancelled), suppress(Cancelled):
            on_prefilled((yield from decoder.reading(prompt, cancelled, seat.n_chunk)))
            steps = decoder.steps(
                prompt, params, text, cancelled=cancelled, n_logprobs=request.n_logprobs, constraint=constraint
            )
            with closing(steps):
                step = after(steps)
                while step is not None:
                    if not isinstance(step, Round):
                        step = yield from left_to_caller(steps, step)
                        continue
                    conversation += [token.id for token in step.emitted]
                    step.draft_texts = [self.target.vocab.display(token) for token in step.draft.ids]
                    n_rounds, ended = step.index + 1, step.finish_reason is not None
                    yield step
                    step = after(steps)
        if not ended:
            # What was held back is verified too, and nothing follows any more that could make a stop string of it.
            spans = text.finish()
            if spans or text.stopped:
                yield Round.of_rest(n_rounds, spans, "stop" if text.stopped else "cancelled")
        if request.keep_tokens is not None:
            conversation = list(prompt[: request.keep_tokens])
            for context in (target, *(each.context for each in chosen if each.context and each.reads_text)):
                self.prefix_cache.cut(context, conversation)
        self.conversation, self._last = conversation, last  # others may have begun since this one did

    @contextmanager
    def _working_on(
        self, target: Context, conversation: Sequence[int], drafters: Sequence[Drafter], cancelled: Callable[[], bool]
    ) -> Iterator[None]:
        """Within the block target and drafters hold one conversation, and long passes can be broken off."""
        drafts = [drafter.context for drafter in drafters if drafter.context is not None and drafter.reads_text]
        contexts = [target, *drafts]
        with self.prefix_cache.conversation(target, drafts, conversation):
            for context in contexts:
                context.interrupted = cancelled
            try:
                yield
            finally:
                for context in contexts:
                    context.interrupted = None

    def read(self, tokens: Sequence[int], n_chunk: int) -> Iterator[tuple[int, FloatArray]]:
        """Take tokens through the target from the start, yielding (position, logits [n, n_vocab]) chunk by chunk."""
        self._check_usable()
        self.prefix_cache.put_aside(self.context)
        self.context.truncate(0)
        for start in range(0, len(tokens), n_chunk):
            yield start, self.context.decode(tokens[start : start + n_chunk]).logits

    def parallel_info(self) -> dict[str, Any]:
        """How many answers at a time, and what the passes were for that they shared."""
        return self.parallel.as_dict() | ({"passes": self.shared.as_dict()} if self.parallel.n > 1 else {})

    def refuse(self, reason: str) -> None:
        """Answer nothing any more."""
        self.refused = reason
        self.warnings.append(reason)

    def _check_usable(self) -> None:
        if self.refused is not None:
            raise EngineMismatch(self.refused)
        self.target.recover()

    def useful_drafts(self) -> list[Context]:
        """Contexts of the draft models that the next answer may use, going by the last one's controller."""
        models = [each for each in self.state.models if each.drafter.reads_text]
        return [each.context for each in models if self._last is None or self._last[1].may_use(each.source)]

    def close(self) -> None:
        """Free everything; safe to call twice."""
        state = self.state
        state.acceptance.save()
        if self.options.remember:
            keep(state)
        self.preparation.clear()
        self.prefix_cache.clear()
        for drafter in state.free:
            drafter.close()
        for draft in state.models:
            self._close_draft(draft)
        self.loader.forget_if_wrong(self.target, state.times)
        state.free, state.models = [], []
        state.close_target()
        self.target.close()
        trim_heap()

    def _close_draft(self, draft: DraftModel) -> None:
        self.loader.forget_if_wrong(draft.model, draft.times)
        self.prefix_cache.forget(draft.context)
        draft.close()
