"""A loaded target with its drafters: everything that one worker thread owns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from localspec.backends.base import Context, FloatArray, Forward, Model, SequenceBatch, shared_prefix
from localspec.backends.trust import SecondOpinion, checking, ensure_batches, verdict_key, verdicts, why_no_branches
from localspec.controllers.auto import FLAT_ROW
from localspec.controllers.batching import LEAST_GAIN, SharedPasses, ShareOfPass
from localspec.controllers.calibration import WHOLE, PassKind, calibrating, curve_key, curves
from localspec.controllers.cost_model import PassTimes, row_ms
from localspec.controllers.learned import AcceptanceStore
from localspec.engine.drafts import DraftMaker
from localspec.engine.fit import ContextChoice, context_of, layers_for
from localspec.engine.loading import Loader, Remarks, Report, compared, engines_comparing, giving_way
from localspec.engine.options import DraftLength, LoadOptions
from localspec.engine.prefix_cache import PassCounts, PrefixCache
from localspec.engine.request import AnswerRequest, Reply
from localspec.engine.state import FULL_CONTEXTS, DecodingState, DraftModel, target_memory
from localspec.engine.stored_prompts import PromptStore, StoringPrompts
from localspec.engine.worker import PREPARATION, STORING, Job, Stopped, Worker
from localspec.errors import Cancelled, ContextFull, EngineError, EngineMismatch, LocalspecError, UnsupportedModel
from localspec.model_files.fingerprint import fingerprint
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.kv_memory import KV_VALUE_BYTES, kv_shape
from localspec.prompts.prompts import PromptEncoder
from localspec.prompts.templates import ChatTemplate
from localspec.sampling.constraint import constraint_for
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.decoder import PREFILL_CHUNK, SpeculativeDecoder, TargetPass
from localspec.spec_decode.detokenizer import TextAssembler, ThinkingReader
from localspec.spec_decode.drafters.base import Controller, Drafter
from localspec.spec_decode.drafters.corpus import CorpusDrafter
from localspec.spec_decode.drafters.grammar import GrammarDrafter
from localspec.spec_decode.overlapping import RoundOverlap, before_pass
from localspec.spec_decode.rounds import FinishReason, PromptProgress, Round, SpecStats
from localspec.system.machine import BUSY, CPUTimes, others_share, read_memory, trim_heap
from localspec.system.steps import Steps

# What a loaded pair still has to find out or make, done in idle time: nothing of it is needed to be right.
#
# Calibration, the check of a draft model, the choice between a draft and its lighter copy, another engine's opinion.
# Each is work in steps; a request that comes waits for one step at most, and finds what was known before.

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
    """A task of idle work, made of several that are done in the order of ``ORDER``."""

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._at_work: _Item | None = None
        self._stopped: Stopped = lambda: False

    def add(self, kind: str, work: Work, *, after: float = 0.0) -> None:
        """Have work done, not before ``after`` seconds; made again after one of its steps raised ``Cancelled``."""
        self._items.append(_Item(kind, work, time.monotonic() + after))
        self._items.sort(key=lambda item: ORDER.index(item.kind))

    def drop(self, *kinds: str) -> None:
        """Forget work, and free what it holds."""
        for item in [item for item in self._items if item.kind in kinds]:
            self._end(item)

    def clear(self) -> None:
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
    """Queue a measurement, again after ``AGAIN_S`` while its result is ``provisional``; ``once``: now in any case."""

    def measuring(stopped: Stopped, *, in_any_case: bool = once) -> Steps[None]:
        if in_any_case or (yield from _is_quiet()):
            yield from work(stopped)
        if provisional():
            pair.preparation.add(kind, partial(measuring, in_any_case=False), after=AGAIN_S)

    pair.preparation.add(kind, measuring)


def _is_quiet() -> Steps[bool]:
    before = CPUTimes.now()
    for _ in range(5):
        time.sleep(0.06)
        yield
    return (others_share([(before, CPUTimes.now())]) or 0.0) < BUSY


def checking_draft(pair: Pair, draft: DraftModel) -> Steps[None]:
    """Check a draft model; one that its engine computes wrongly is not drafted with any more."""
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
    if not draft.drafter.info.is_draft_model:
        return
    pair.preparation.add("draft check", lambda stopped: checking_draft(pair, draft))
    if pair.loader.may_be_lighter(draft.path, draft.model, pair.state):

        def choosing(stopped: Stopped) -> Steps[None]:
            report = giving_way(stopped)
            if (yield from pair.loader.choosing(draft.path, draft.model, pair.state, report)):
                pair.reload_drafts(report, renew=draft)

        pair.preparation.add("draft copy", choosing)


def prepare_corpora(pair: Pair, drafters: Sequence[Drafter]) -> None:
    """Queue the reading of files that drafters copy from, where these may have changed."""
    for drafter in drafters:
        steps = drafter.index.idle_work(drafter.info.name) if isinstance(drafter, CorpusDrafter) else None
        if steps is not None:
            pair.preparation.add("corpus", partial(_telling, pair, steps))


def _telling(pair: Pair, steps: Steps[str], stopped: Stopped) -> Steps[None]:
    """The same steps; what they return, or why they ended early, becomes a warning."""
    try:
        remark = yield from steps
    except Cancelled:
        raise
    except LocalspecError as error:
        remark = str(error)
    if remark:
        pair.warnings.append(remark)


def ask_another_engine(pair: Pair, path: Path) -> None:
    """Queue the comparison with another engine, of results and of times."""
    options = pair.options

    def provisional() -> bool:
        found = compared(path, options)
        return found is not None and found.provisional

    def asking(stopped: Stopped) -> Steps[None]:
        yield from second_opinion(pair, path).steps(stopped)

    if second_opinion(pair, path).waits:
        _prepare_until_settled(pair, "other engine", asking, provisional, once=not provisional())


def second_opinion(pair: Pair, path: Path) -> SecondOpinion:
    """The comparison of a target with another engine."""
    target, options = pair.target, pair.options
    known = compared(path, options)
    comparable = target.capabilities.device == "cpu" and options.backend == "auto" and not options.placement
    return SecondOpinion(
        target,
        path,
        pair.options.target,
        pair.refuse,
        engines_comparing(pair.context.n_ctx, options),
        compared=not comparable or (known is not None and not known.provisional),
    )


# Whether drafts may branch, which on some engines has to be known when the target's context is made.


def why_chains(model: Model, times: PassTimes, options: LoadOptions, parallel: int, report: Report) -> str | None:
    """Why drafts are chains, as part of a sentence; None where they may branch. The first call checks the engine."""
    if parallel > 1:
        return "answers share passes"
    if not model.capabilities.trees or not model.capabilities.trees_apart:
        return model.why_no_trees()
    row = row_ms(times) / times(1)
    if row >= FLAT_ROW:
        return f"a further row of a pass costs {row:.2f} of a token here, and branches pay under {FLAT_ROW}"
    return why_no_branches(model, options.n_gpu_layers, lambda line: report(line, None))


# How many answers at a time: as many as make more tokens together, which t(w) says, and as there is memory for.

MOST = 16
"""t(w) is measured to 24 rows, and draft tokens need some of them."""

CELLS_EACH = 512
"""Tokens that an answer under way is reckoned to hold, its prompt included: every row passes over those of all, or
over those of its own (``Capabilities.own_cells``)."""

LEAST_CELLS = 1024
"""Room for each answer at least; see ``scheduler.RESERVED``."""

ENOUGH = 0.95
"""Of the most tokens per millisecond that any number makes; with more answers each becomes slower for little."""

N_CONTEXTS = FULL_CONTEXTS + 1
"""What memory is reckoned with: room for all answers, and a context in which some engines compute one that is alone."""

MEMORY_SHARE = 0.5
"""Of the memory that is free, what they may take: drafts and buffers come after them."""


@dataclass(frozen=True, slots=True)
class ParallelChoice:
    n: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {"parallel": self.n, "reason": self.reason}


def open_memory(
    loader: Loader, target: Model, times: PassTimes, n_ctx: int, report: Report
) -> tuple[ParallelChoice, str | None, Context, SequenceBatch | None]:
    """The target's memory: the number of answers, why drafts are chains, and what ``target_memory`` returns.

    Raises:
        EngineError: there is no memory for it.
        EngineMismatch, UnsupportedModel: the engine cannot do what was asked for with this file.
    """
    options = loader.options

    def opened(choice: ParallelChoice) -> tuple[ParallelChoice, str | None, Context, SequenceBatch | None]:
        if choice.n > 1:
            ensure_batches(target, options.n_gpu_layers)
        chains = why_chains(target, times, options, choice.n, report)
        return choice, chains, *target_memory(target, n_ctx, choice.n, branches=chains is None)

    if options.parallel != "auto":
        return opened(ParallelChoice(int(options.parallel), "as asked for"))
    if options.placement.rpc:
        return opened(ParallelChoice(1, "if a server is lost, one answer at a time can go on when it is back"))
    available = read_memory().available if target.capabilities.device == "cpu" else None
    choice = choose_parallel(target, times, n_ctx, available)
    try:
        return opened(choice)
    except (EngineError, UnsupportedModel) as error:
        if choice.n == 1:
            raise
        return opened(ParallelChoice(1, str(error)))


def choose_parallel(model: Model, times: PassTimes, n_ctx: int, available: int | None) -> ParallelChoice:
    """How many answers at a time; ``available`` is memory that can be taken now [bytes], None if unknown."""
    if not model.capabilities.batches:
        return ParallelChoice(1, f"{model.backend} computes one conversation of this model at a time")
    if not model.capabilities.keeps_kv_type:
        kept = f"{model.backend} keeps values of several conversations in 16 bits"
        return ParallelChoice(1, f"{kept}, and a {model.kv_type} cache was asked for")
    needed = _batch_bytes(model, n_ctx)
    if available is not None and needed > MEMORY_SHARE * available:
        room = f"{N_CONTEXTS} contexts of {n_ctx:,} tokens take {needed / 1e9:.2f} GB"
        return ParallelChoice(1, f"{room}, over half of the {available / 1e9:.2f} GB that are free")
    most = max(1, min(MOST, FULL_CONTEXTS * n_ctx // min(n_ctx, LEAST_CELLS)))
    rates = [_rate(times, model, n) for n in range(1, most + 1)]
    if max(rates) < LEAST_GAIN * rates[0]:
        return ParallelChoice(1, "a pass over several takes as long here as theirs one after the other")
    n = next(i for i, rate in enumerate(rates, 1) if rate >= ENOUGH * max(rates))
    bound = f", and there is room for no more than {n}" if n == most < MOST else ""
    gain = rates[n - 1] / rates[0]
    return ParallelChoice(n, f"{n} together are expected to make {gain:.1f} times the tokens of one{bound}")


def _rate(times: PassTimes, model: Model, n: int) -> float:
    """Tokens per millisecond of n answers that draft nothing."""
    shared = SharedPasses(times, model.capabilities.device)
    shared.n_cells = CELLS_EACH if model.capabilities.own_cells else n * CELLS_EACH
    return n / shared.with_overhead(n, n)


def _batch_bytes(model: Model, n_ctx: int) -> int:
    with GGUFFile(model.path) as file:
        return kv_shape(file).bytes(N_CONTEXTS * n_ctx, model.kv_type if model.kv_type in KV_VALUE_BYTES else "f16")


class Pair:
    """A target, its drafters, and what was learned about their cost and acceptance; owned by ``worker``'s thread.

    Attributes:
        loader: loads further models with the same options.
        warnings: one-line remarks from loading, and from idle time, that a user should see.
        context_choice: the context's size, and why.
        state: what answers are decoded with, and what was learned; ``use`` replaces it.
        conversation: the one last worked on, prompt and answer.
        last: how far the last answer was asked to draft, and what decided that.
        encoder: makes prompts of messages and texts; its methods may be called from any thread.
        preparation: what is left to find out in idle time.
        why_chains: why drafts do not branch; None where they may.
        shared: what the rows of shared passes were for.
        refused: why no more requests are answered, where the engine turned out to be wrong; else None.
    """

    def __init__(self, path: Path, draft: Sequence[str], options: LoadOptions, report: Report, worker: Worker) -> None:
        self.options = options
        self.worker = worker
        self.warnings: list[str] = Remarks()
        self.loader = Loader(options, self.warnings)
        self.preparation = Preparation()
        self.prompts = PromptStore(options.prompt_cache_bytes, options.n_gpu_layers, self._kind_of)
        find = self.prompts.find if options.prompt_cache_bytes else None
        self.prefix_cache = PrefixCache(options.prefix_cache_bytes, find)
        self.shared = PassCounts()
        self.refused: str | None = None
        self.conversation: Sequence[int] = ()
        self.last: tuple[DraftLength, Controller] | None = None
        with ExitStack() as undo:
            undo.callback(trim_heap)
            free = read_memory().available
            self.target = self.loader.load(
                path, report, engine=options.target, layers=partial(self._layers, path, draft)
            )
            undo.callback(self.target.close)
            self.encoder = PromptEncoder(
                self.target, ChatTemplate.for_vocab(self.target.chat_template, self.target.vocab)
            )
            self.context_choice = self._context_choice(draft, free)
            n_ctx = self.context_choice.n_ctx
            times = self.loader.times(self.target, n_ctx, report)
            opened = open_memory(self.loader, self.target, times, n_ctx, report)
            self.parallel, self.why_chains, context, batch = opened
            self.loader.parallel = self.parallel.n
            undo.callback((batch or context).close)
            self.state = DecodingState(context, times, [], [], AcceptanceStore(None, {}), batch=batch)
            if batch is not None:
                self.prefix_cache.join(batch)
            self.set_draft(draft, report)
            undo.pop_all()
        self.read_ahead = ReadAhead(self)
        worker.when_idle(self.read_ahead)
        self.storing = StoringPrompts(self.prompts, self.prefix_cache, self._all_text_contexts, self.warnings.append)
        if options.prompt_cache_bytes:
            worker.when_idle(self.storing, priority=STORING)
            if not self.target.capabilities.saves_state:
                self.warnings.append(f"prompts are not kept on the disk: {self.target.engine} cannot save its memory")
        worker.when_idle(self.preparation, priority=PREPARATION)
        if options.idle:
            prepare_times(self, "target curve", context, times)
            ask_another_engine(self, path)

    def _layers(self, path: Path, draft: Sequence[str], engine: str) -> int | None:
        """Layers of the target for a GPU where none were asked for; what is chosen counts as asked for from then on."""
        if engine != "llama-cpp" or self.options.placement or self.options.n_gpu_layers is not None:
            return None
        n = layers_for(path, draft, self.options, self._most_answers)
        if n is not None:
            self.options = self.loader.options = replace(self.options, n_gpu_layers=n)
            self.warnings.append(
                f"{n} layers go to the GPU, more do not fit into its free memory; --gpu-layers overrides"
            )
        return n

    @property
    def _most_answers(self) -> int:
        return MOST if self.options.parallel == "auto" else int(self.options.parallel)

    def _kind_of(self, context: Context) -> str:
        """The kind of memory that a context is, see ``why_not_restored``."""
        if self.prefix_cache.is_shared(context):
            return "several"
        return "branches" if context.can_branch and context.model.capabilities.trees_apart else "one"

    def _all_text_contexts(self) -> list[Context]:
        """Those of all answers that there may be at a time."""
        state = self.state
        batch = state.batch
        contexts = [state.context] if batch is None else [batch[i] for i in range(batch.n_sequences)]
        for draft in state.models:
            contexts += draft.memory.contexts if draft.drafter.info.reads_text else ()
        return contexts

    def _context_choice(self, draft: Sequence[str], free: int) -> ContextChoice:
        """The context size; ``free`` is memory before the target was loaded [bytes]."""
        trained, n_ctx = self.target.n_ctx_train, self.options.n_ctx
        if n_ctx is None:
            return context_of(self.target, draft, self.options, free, self._most_answers)
        if trained and n_ctx > trained:
            self.warnings.append(
                f"--ctx {n_ctx} exceeds the {trained} tokens this model was trained for; "
                "answers far into the context may degrade"
            )
        return ContextChoice(n_ctx, "as asked for")

    # -- what it decodes with ------------------------------------------------------------------------------------

    def use(self, state: DecodingState) -> None:
        """Decode with another state from the next answer on, such as a fork of this one, which is left as it is."""
        self.state, self.last = state, None

    def release(self, state: DecodingState) -> None:
        """Free the contexts of a fork that the state in use does not share."""
        for context in state.contexts:
            if context not in self.contexts:
                self.prefix_cache.forget(context)
                context.close()

    @property
    def context(self) -> Context:
        return self.state.context

    @property
    def contexts(self) -> list[Context]:
        return self.state.contexts

    @property
    def times(self) -> PassTimes:
        return self.state.times

    @property
    def draft_names(self) -> list[str]:
        """Names of the drafters in use, in the order they are asked."""
        state = self.state  # once: another thread asks while the worker replaces it
        return [state.names[drafter.info.source] for drafter in state.usable]

    @property
    def draft_specs(self) -> list[str]:
        """What ``set_draft`` takes to load the drafters in use."""
        return [*(drafter.info.name for drafter in self.state.free), *(draft.spec for draft in self.state.models)]

    def set_draft(self, names: Sequence[str], report: Report, *, renew: DraftModel | None = None) -> None:
        """Replace the drafters by those of ``draft_specs``; on an error the ones in use stay.

        ``renew`` is a draft model that is loaded again though it is in use.

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
        for draft in after.models:
            if draft.memory.batch is not None:
                self.prefix_cache.join(draft.memory.batch)
        self.use(after)
        for context in after.text_contexts:
            self.prompts.know(context.model)
        if self.options.idle:
            for draft in after.models:
                prepare_draft(self, draft)
            prepare_corpora(self, after.free)

    def reload_drafts(self, report: Report, *, drop: DraftModel | None = None, renew: DraftModel | None = None) -> None:
        """Load the drafters in use anew: without ``drop``, and with ``renew`` read again from its file."""
        dropped = "" if drop is None else drop.spec
        self.set_draft([spec for spec in self.draft_specs if spec != dropped], report, renew=renew)

    def recalibrate(self, report: Report) -> None:
        """Measure the passes of target and draft models anew."""
        state = self.state
        n_ctx, kv_type = state.context.n_ctx, self.options.kv_cache_type
        curves().drop(curve_key(self.target, kv_type))
        for draft in state.models:
            curves().drop(curve_key(draft.model, kv_type))
        state.times = self.loader.times(self.target, n_ctx, report)
        for draft in state.models:
            draft.times = self.loader.times(draft.model, n_ctx, report, draft.passes)

    def lose_drafter(self, state: DecodingState, drafter: Drafter, why: str) -> None:
        """Note and say that a drafter of a state failed."""
        state.failed.add(drafter.info.source)
        # The draft's file by its path: its name alone can be that of another, and of a lighter copy it says little.
        files = {draft.source: str(draft.path) for draft in self.state.models}
        line = f"the draft {files.get(drafter.info.source, drafter.info.source)} is not used any more: it {why}"
        if line not in self.warnings:  # each of several answers has a drafter of its own
            log.warning(line)
        self.warnings.append(line)

    # -- decoding ------------------------------------------------------------------------------------------------

    def explain(self, draft_length: DraftLength) -> str:
        """Why the last answer was, or the next one will be, drafted as it is: a line for each drafter."""
        if self.last is not None and self.last[0] == draft_length:
            return self.last[1].explain()
        return self.state.controller(draft_length).explain()

    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        draft_length: DraftLength,
        on_prefilled: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> Iterator[Round]:
        """Prefill and decode with all drafters; see ``OpenAnswer``."""
        request = AnswerRequest(prompt, params, draft_length, n_logprobs=None, model_name="")
        rounds: list[Round] = []
        asked = (list(prompt), None)
        answer = OpenAnswer(self, self.state, request, asked, rounds.append, cancelled, on_prefilled=on_prefilled)
        with closing(answer), suppress(Cancelled):
            while (rows := answer.propose()) is not None:
                answer.commit(answer.decode(rows))
                yield from rounds
                rounds.clear()
        answer.finish()
        yield from rounds

    def read(self, tokens: Sequence[int], n_chunk: int) -> Iterator[tuple[int, FloatArray]]:
        """Take tokens through the target from the start, yielding (position, logits [n, n_vocab]) chunk by chunk."""
        self.check_usable()
        self.prefix_cache.put_aside(self.context)
        self.context.truncate(0)
        for start in range(0, len(tokens), n_chunk):
            yield start, self.context.decode(tokens[start : start + n_chunk]).logits

    def parallel_info(self) -> dict[str, Any]:
        return self.parallel.as_dict() | ({"passes": self.shared.as_dict()} if self.parallel.n > 1 else {})

    def refuse(self, reason: str) -> None:
        self.refused = reason
        self.warnings.append(reason)

    def check_usable(self) -> None:
        """Raises ``EngineMismatch`` where nothing is answered any more."""
        if self.refused is not None:
            raise EngineMismatch(self.refused)
        self.target.recover()

    def useful_drafts(self) -> list[Context]:
        """Contexts of draft models that the next answer may use, by the last one's controller."""
        models = [
            each for each in self.state.models if each.drafter.info.reads_text and each.source not in self.state.failed
        ]
        return [each.context for each in models if self.last is None or self.last[1].may_use(each.source)]

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self.encoder.close()
        state = self.state
        state.acceptance.save()
        self.storing.finish()
        self.preparation.clear()
        self.prefix_cache.clear()
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


SHARED_CHUNK = 1024
"""Tokens of a prompt proposed at once where passes are shared, which take pieces of any length: the hidden states of
all are kept for a head until they are read."""

LONG_PROMPT = 256
"""Tokens to read from which on an answer says how far it is: a few seconds on a slow laptop."""


class OpenAnswer:
    """An answer that is being made: ``propose``, a pass of the target, ``commit``, again and again; then ``reply``.

    Until ``close`` target and drafters hold its conversation; after it, whatever happened, every context holds what its
    ``tokens`` says. ``Cancelled`` from any of the three ends the answer early.

    Args:
        asked: what ``AnswerRequest.read`` returned.
        deliver: takes every round.
        cancelled: whether to stop; also asked inside of long passes, such as a draft model's first reading.
        started: when its turn came, by ``time.perf_counter``.
        on_prefilled: gets the number of cached prompt tokens, once the prompt is read.
        on_read: takes how far a long prompt is read, by the target and by draft models, which may read it later.
        shared: what its share of a pass costs; None: it has passes of its own.
        overlaps: whether rounds may be handed on within the next pass, see ``RoundOverlap``.

    Raises:
        LocalspecError: it cannot be begun; the pair is ready for the next one.
    """

    def __init__(
        self,
        pair: Pair,
        state: DecodingState,
        request: AnswerRequest,
        asked: tuple[list[int], ThinkingReader | None],
        deliver: Callable[[Round], None],
        cancelled: Callable[[], bool],
        started: float = 0.0,
        on_prefilled: Callable[[int], None] = lambda n_cached: None,
        on_read: Callable[[PromptProgress], None] = lambda progress: None,
        shared: ShareOfPass | None = None,
        overlaps: bool = False,
    ) -> None:
        pair.check_usable()
        self._pair, self._shared, self._request, (self._prompt, thinking) = pair, shared, request, asked
        self._deliver, self._cancelled, self._on_prefilled, self._started = deliver, cancelled, on_prefilled, started
        chosen = state.drafters_for(request.drafters, request.prediction)
        params, vocab, predicted = request.params, pair.target.vocab, bool(request.prediction)
        self._constraint = constraint_for(params, vocab)
        if self._constraint is not None and chosen:
            chosen = [GrammarDrafter(self._constraint, pair.target.tokenize), *chosen]
        self._controller = state.controller(
            request.draft_length, params, chosen, shared=shared, predicted=predicted, thinks=thinking is not None
        )
        if pair.options.idle:
            prepare_corpora(pair, chosen)
        chosen = [drafter for drafter in chosen if self._controller.may_use(drafter.info.source)]
        # No drafting ahead where passes are shared, as ends of drafts may be left out.
        target, ahead = state.context, state.drafting_ahead if shared is None else None
        overlaps = overlaps and target.overlaps and ahead is None
        lost = partial(pair.lose_drafter, state)
        self._decoder = SpeculativeDecoder(target, chosen, self._controller, lost, ahead, learns_later=overlaps)
        models = [each for each in state.models if each.drafter in chosen]
        self._drafts = [each.context for each in models if each.drafter.info.reads_text]
        self._overlap = RoundOverlap([target, *self._drafts], self._hand_on) if overlaps else None
        self._conversation = list(self._prompt)
        self._last = request.draft_length, self._controller
        pair.conversation, pair.last = self._conversation, self._last
        named = vocab.named(params.stop) if params.stop else None
        self._text = TextAssembler(vocab, [*params.stop, *request.end_marks], thinking, named)
        self._stats, self._rounds, self._is_open = SpecStats(), list[Round](), False
        self._stats.prompt_tokens = len(self._prompt)
        self._stack = ExitStack()
        with ExitStack() as stack:
            stack.enter_context(pair.prefix_cache.conversation(target, self._drafts, self._conversation))
            self._tell = on_read
            target.interrupted = cancelled  # long passes can be broken off
            for context in self._drafts:
                context.interrupted = self._watched(context)
            for context in (target, *self._drafts):
                stack.callback(setattr, context, "interrupted", None)
            self._stats.cached_tokens = self._decoder.read(
                self._prompt, PREFILL_CHUNK if shared is None else SHARED_CHUNK
            )
            self._on_read = on_read if len(self._decoder.unread) >= LONG_PROMPT else None
            self._reading_since = time.perf_counter()
            self.tell_read()
            self._stack = stack.pop_all()

    def propose(self) -> TargetPass | None:
        """The rows of its next pass of the target; None where it has ended, or is cancelled."""
        decoder = self._decoder
        if not self._is_open:
            if decoder.unread and not self._cancelled():
                return decoder.propose()
            self._is_open = True
            self._stats.seconds_prompt = time.perf_counter() - self._started
            self._on_prefilled(self._stats.cached_tokens)
            asked = self._request
            decoder.start(self._prompt, asked.params, self._text, asked.n_logprobs, self._constraint, asked.prediction)
        if decoder.finish_reason is not None or self._cancelled():
            return None
        return decoder.propose()

    def tell_read(self, n_fed: int = 0) -> None:
        """Say how far a long prompt is read; ``n_fed``: tokens of the proposed pass that the target has had already."""
        if self._on_read is not None:
            left = len(self._decoder.unread) - n_fed
            read = len(self._prompt) - left - bool(left)  # the last token is read by the answer's first pass
            seconds = time.perf_counter() - self._reading_since
            self._on_read(PromptProgress(len(self._prompt), self._stats.cached_tokens, read, seconds))

    def _watched(self, draft: Context) -> Callable[[], bool]:
        """What a draft model asks between pieces of a long text: whether to stop. It tells how far it has read."""
        first: PromptProgress | None = None
        since = 0.0

        def interrupted() -> bool:
            nonlocal first, since
            n, total = draft.n_past, len(self._conversation)
            if first is None or first.total != total or n <= first.processed:  # another reading
                since, first = time.perf_counter(), PromptProgress(total, n, n, 0.0, "draft")
            self._tell(PromptProgress(total, first.cached, n, time.perf_counter() - since, "draft"))
            return self._cancelled()

        return interrupted

    def decode(self, rows: TargetPass) -> Forward:
        """Run its next pass for it alone."""
        if self._overlap is None:
            return self._decoder.decode(rows)
        before_pass(self._decoder.target)
        try:
            return self._decoder.decode(rows)
        finally:
            self._overlap.settle()

    def commit(self, forward: Forward) -> None:
        """Take what the pass returned; its round is delivered, where passes overlap within the next one."""
        round_ = self._decoder.commit(forward)
        if round_ is None:
            self.tell_read()
            return
        self._conversation += [token.id for token in round_.emitted]
        if self._overlap is not None:
            self._overlap.hold(round_)
        else:
            self._show(round_)

    def _hand_on(self, round_: Round) -> None:
        self._decoder.learn(round_)
        self._show(round_)

    def _show(self, round_: Round) -> None:
        if self._stats.time_to_first_token_s is None:
            self._stats.time_to_first_token_s = time.perf_counter() - self._started
        round_.draft_texts = [self._pair.target.vocab.display(token) for token in round_.draft.ids]
        self._stats.add(round_)
        self._rounds.append(round_)
        self._deliver(round_)

    def close(self) -> None:
        """Leave the contexts; safe to call twice."""
        try:
            if self._overlap is not None:
                self._overlap.settle()
        finally:
            self._decoder.close()
            self._stack.close()

    def finish(self) -> None:
        """After ``close``, of an answer that did not fail: deliver what was held back of its text."""
        if self._decoder.finish_reason is None:
            # What was held back is verified too, and nothing follows any more that could make a stop string of it.
            spans = self._text.finish()
            if spans or self._text.stopped:
                self._show(Round.of_rest(len(self._rounds), spans, "stop" if self._text.stopped else "cancelled"))
        if self._request.keep_tokens is not None:
            self._conversation = list(self._prompt[: self._request.keep_tokens])
            for context in (self._decoder.target, *self._drafts):
                self._pair.prefix_cache.cut(context, self._conversation)
        # Others may have begun since this one did.
        self._pair.conversation, self._pair.last = self._conversation, self._last

    def reply(self, job: Job) -> Reply:
        """The whole, after ``close``; what was held back is delivered first."""
        self.finish()
        stats, pair, shared, rounds = self._stats, self._pair, self._shared, self._rounds
        times = pair.state.times
        widths = [round_.width for round_ in rounds if round_.emitted]
        if shared is not None and shared.has_company:
            stats.seconds_one_token = None  # its passes were those of others too
        elif widths and not times.noisy:
            # As this answer's own passes went: the machine may have been slower, or faster, than in the long view.
            expected = sum(times(width) for width in widths)
            stats.seconds_plain_token = times(1) / expected * stats.seconds_verify
        explanation = self._controller.explain()
        if shared is not None and shared.mean_answers > 1.0:
            explanation += f"\nShared with other answers: on average {shared.mean_answers:.1f} at once."
        tokens = [token for round_ in rounds for token in round_.emitted]
        finish: FinishReason = rounds[-1].finish_reason or "cancelled" if rounds else "cancelled"
        return Reply(
            "".join(round_.text for round_ in rounds),
            [token.id for token in tokens],
            finish,
            stats,
            self._request.model_name,
            pair.draft_names,
            pair.target.backend,
            cancelled_by=job.cancelled_by if finish == "cancelled" else None,
            tokens=tokens,
            explanation=explanation,
            seconds_waited=job.seconds_waited,
            thinking="".join(round_.thinking for round_ in rounds),
        )


# Reading in idle time: the conversation, for draft models, and what the next prompt will begin with, for all.
#
# A draft model that pays has to have read the conversation, and its reading of a long answer that was copied or decoded
# plainly takes as long as several tokens. Between two turns that costs nothing. So does reading a system prompt
# while a person types the first question.

TARGET_PIECE = 16
DRAFT_PIECE = 32
"""Tokens in a pass: about 0.2 and 0.1 s on a laptop, which is how long a request that comes meanwhile may wait."""


class ReadAhead:
    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._expected: Sequence[int] = ()
        self._instead_of: Sequence[int] | None = None

    def expect(self, tokens: Sequence[int], *, anew: bool = False) -> None:
        """Read what the next prompt will begin with, from any thread; ``anew``: it is another conversation."""
        self._instead_of = self._pair.conversation if anew else None
        self._expected = tuple(tokens)

    def __call__(self, stopped: Stopped) -> bool:
        """One pass of one model; whether there is more to read."""
        pair = self._pair
        expected = self._expected
        present = pair.conversation
        if expected and present is not self._instead_of and not _continues(expected, present):
            expected = self._expected = ()
        work: list[tuple[Context, Sequence[int], int]] = [(pair.context, expected, TARGET_PIECE)]
        work += [(context, expected or pair.conversation, DRAFT_PIECE) for context in pair.useful_drafts()]
        for context, text, piece in work:
            readable = _readable(context, text)
            if shared_prefix(context.tokens, text) >= readable:
                continue
            if stopped():
                return True
            drafts = [context] if context is not pair.context else []
            try:
                with pair.prefix_cache.conversation(pair.context, drafts, text):
                    known = context.reuse(text)
                    context.decode(list(text[known : min(known + piece, readable)]), "none")
            except ContextFull:  # of a memory that holds other conversations too
                continue
            return True
        return False


def _continues(expected: Sequence[int], conversation: Sequence[int]) -> bool:
    """Whether a next turn could begin so: with nearly all of the conversation, whose end a template may change."""
    return shared_prefix(expected, conversation) >= len(conversation) - len(conversation) // 8 - 1


def _readable(context: Context, text: Sequence[int]) -> int:
    """Tokens that a model can read: up to its context, and to a token that it does not have."""
    n_vocab = context.model.n_vocab
    end = next((i for i, token in enumerate(text) if token >= n_vocab), len(text))
    return min(end, context.n_ctx - 1)
