"""A loaded target with its drafters: everything that one worker thread owns."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from localspec.backends.base import Context, shared_prefix
from localspec.backends.trust import SecondOpinion, checking, verdict_key, verdicts
from localspec.controllers.calibration import WHOLE, PassKind, calibrating, curve_key, curves
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.learned import AcceptanceStore
from localspec.engine.drafts import DraftMaker
from localspec.engine.fit import context_of, layers_for, most_answers, open_memory
from localspec.engine.loading import Loader, Remarks, Report, compared, comparing_engines, giving_way
from localspec.engine.options import LoadOptions
from localspec.engine.prefix_cache import PrefixCache
from localspec.engine.request import DraftLength
from localspec.engine.state import DecodingState, DraftModel
from localspec.engine.stored_prompts import PromptStore
from localspec.engine.worker import IdleTask, Stopped, Worker
from localspec.errors import Cancelled, ContextFull, LocalspecError
from localspec.model_files.gguf import fingerprint
from localspec.prompts.prompts import PromptEncoder
from localspec.prompts.templates import ChatTemplate
from localspec.spec_decode.drafters.base import Controller, Drafter
from localspec.spec_decode.drafters.corpus import CorpusDrafter
from localspec.system.machine import BUSY, CPUTimes, others_share, read_memory, trim_heap
from localspec.system.steps import Steps

log = logging.getLogger("localspec")

# What a loaded pair still has to find out or make, done in idle time: nothing of it is needed to be right. A request
# that comes waits for one step at most, and finds what was known before.

ORDER = ("reading", "storing", "target curve", "draft curve", "draft check", "corpus", "other engine", "draft copy")
"""What is done first: what readies the next answer of a conversation, then what spares reading after a restart, then
what brings most, and quickly."""

AGAIN_S = 600.0
"""How long what was measured while other programs ran stands before it is tried again, if they are gone by then."""

Work = Callable[[Stopped], Steps[None]]


def prepare_times(pair: Pair, kind: str, context: Context, times: PassTimes, passes: PassKind = WHOLE) -> None:
    """Queue the measurement of a cost model that is only provisional; it is used from then on."""

    def measuring(stopped: Stopped) -> Steps[None]:
        measured = yield from calibrating(context.model, context.n_ctx, passes)
        curves().put(curve_key(context.model, pair.options.kv_cache_type), measured)
        times.replace(measured)

    if times.noisy:
        _prepare_until_settled(pair, kind, measuring, lambda: times.noisy, once=times.quick)


def _prepare_until_settled(pair: Pair, kind: str, work: Work, provisional: Callable[[], bool], *, once: bool) -> None:
    """Queue a measurement, again after ``AGAIN_S`` while its result is ``provisional``; ``once``: now in any case."""

    def measuring(stopped: Stopped, *, in_any_case: bool = once) -> Steps[None]:
        before = CPUTimes.now()
        for _ in range(0 if in_any_case else 5):
            time.sleep(0.06)
            yield
        if in_any_case or (others_share([(before, CPUTimes.now())]) or 0.0) < BUSY:
            yield from work(stopped)
        if provisional():
            pair.when_idle(kind, partial(measuring, in_any_case=False), after=AGAIN_S)

    pair.when_idle(kind, measuring)


def prepare_draft(pair: Pair, draft: DraftModel) -> None:
    """Queue what is to be found out about a draft model in use; a head was checked when it was loaded."""
    prepare_times(pair, "draft curve", draft.context, draft.times, draft.passes)
    if not draft.drafter.info.is_draft_model:
        return
    pair.when_idle("draft check", lambda stopped: _checking(pair, draft))
    if pair.loader.may_be_lighter(draft.path, draft.model, pair.state):

        def choosing(stopped: Stopped) -> Steps[None]:
            report = giving_way(stopped)
            if (yield from pair.loader.choosing(draft.path, draft.model, pair.state, report)):
                pair.set_draft(pair.draft_specs, report, renew=draft)

        pair.when_idle("draft copy", choosing)


def _checking(pair: Pair, draft: DraftModel) -> Steps[None]:
    """Check a draft model; one that its engine computes wrongly is not drafted with any more."""
    model = draft.model
    key = verdict_key(model.backend, pair.options.engine, fingerprint(model.path))
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
        others = [spec for spec in pair.draft_specs if spec != draft.spec]
        pair.set_draft(others, lambda what, fraction: None)


def prepare_corpora(pair: Pair, drafters: Sequence[Drafter]) -> None:
    """Queue the reading of files that drafters copy from, where these may have changed."""

    def indexing(drafter: CorpusDrafter, steps: Steps[None], stopped: Stopped) -> Steps[None]:
        index = drafter.index
        was_empty = not index.n_tokens
        try:
            yield from steps
            if was_empty and index.n_tokens:
                pair.warnings.append(f"{drafter.info.name}: {index.n_tokens:,} tokens are indexed")
        except Cancelled:
            raise
        except LocalspecError as error:
            pair.warnings.append(str(error))

    for drafter in drafters:
        if isinstance(drafter, CorpusDrafter) and (steps := drafter.index.idle_work()) is not None:
            pair.when_idle("corpus", partial(indexing, drafter, steps))


def ask_another_engine(pair: Pair, path: Path) -> None:
    """Queue the comparison with another engine, of results and of times."""

    def provisional() -> bool:
        found = compared(path, pair.options)
        return found is not None and found.provisional

    if second_opinion(pair, path).waits:
        _prepare_until_settled(
            pair,
            "other engine",
            lambda stopped: second_opinion(pair, path).steps(stopped),
            provisional,
            once=not provisional(),
        )


def second_opinion(pair: Pair, path: Path) -> SecondOpinion:
    """The comparison of a target with another engine."""
    target, options = pair.target, pair.options
    known = compared(path, options)
    comparable = target.capabilities.device == "cpu" and options.backend == "auto" and not options.placement
    return SecondOpinion(
        target,
        path,
        options.target,
        pair.refuse,
        partial(comparing_engines, pair.context.n_ctx, options),
        compared=not comparable or (known is not None and not known.provisional),
    )


class Pair:
    """A target, its drafters, and what was learned about their cost and acceptance; owned by ``worker``'s thread.

    Attributes:
        name: what replies call the target.
        warnings: one-line remarks from loading, and from idle time, that a user should see.
        state: what answers are decoded with, and what was learned; ``use`` replaces it.
        conversation: the one last worked on, prompt and answer.
        last: how far the last answer was asked to draft, and what decided that.
        encoder: makes prompts of messages and texts; its methods may be called from any thread.
        why_chains: why drafts do not branch; None where they may.
        rows: of passes that answers shared: of next tokens (``own``), ``drafts`` and ``prompts``; ``passes``, and the
            ``answers`` in each, added up.
        refused: why no more requests are answered, where the engine turned out to be wrong; else None.
    """

    def __init__(self, path: Path, draft: Sequence[str], options: LoadOptions, report: Report, worker: Worker) -> None:
        self.name, self.options = path.name, options
        self.worker = worker
        self.warnings: list[str] = Remarks()
        self.loader = Loader(options, self.warnings)
        self.prefix_cache = PrefixCache(options.prefix_cache_bytes)
        self.prompts = PromptStore(
            options.prompt_cache_bytes,
            options.n_gpu_layers,
            self.prefix_cache,
            self._all_text_contexts,
            self.warnings.append,
        )
        if options.prompt_cache_bytes:
            self.prefix_cache.on_disk = self.prompts.find
        self.rows = Counter[str]()
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
            self.context_choice = context_of(self.target, draft, self.options, free, self.warnings.append)
            n_ctx = self.context_choice.n_ctx
            times = self.loader.times(self.target, n_ctx, report)
            opened = open_memory(self.options, self.target, times, n_ctx, report)
            self.parallel, self.why_chains, context, batch = opened
            self.loader.parallel = self.parallel.n
            undo.callback((batch or context).close)
            self.state = DecodingState(context, times, [], [], AcceptanceStore(None, {}), batch=batch)
            if batch is not None:
                self.prefix_cache.join(batch)
            self.set_draft(draft, report)
            undo.pop_all()
        self.read_ahead = ReadAhead(self)
        self.when_idle("reading", self.read_ahead.steps)
        if options.prompt_cache_bytes:
            # Of these steps ``finish`` takes the rest, so that they are not closed with the task.
            self.when_idle("storing", lambda stopped: (each for each in self.prompts.steps))
            if not self.target.capabilities.saves_state:
                self.warnings.append(f"prompts are not kept on the disk: {self.target.engine} cannot save its memory")
        if options.idle:
            prepare_times(self, "target curve", context, times)
            ask_another_engine(self, path)

    def when_idle(self, kind: str, task: IdleTask, *, after: float = 0.0) -> None:
        """Have a task of a kind of ``ORDER`` done in idle time, not before ``after`` seconds."""
        self.worker.when_idle(task, priority=ORDER.index(kind), after=after)

    def _layers(self, path: Path, draft: Sequence[str], engine: str) -> int | None:
        """Layers of the target for a GPU where none were asked for; what is chosen counts as asked for from then on."""
        if engine != "llama-cpp" or self.options.placement or self.options.n_gpu_layers is not None:
            return None
        n = layers_for(path, draft, self.options, most_answers(self.options))
        if n is not None:
            self.options = self.loader.options = replace(self.options, n_gpu_layers=n)
            self.warnings.append(
                f"{n} layers go to the GPU, more do not fit into its free memory; --gpu-layers overrides"
            )
        return n

    def _all_text_contexts(self) -> list[Context]:
        """Those of all answers that there may be at a time."""
        state = self.state
        batch = state.batch
        contexts = [state.context] if batch is None else [batch[i] for i in range(batch.n_sequences)]
        for draft in state.models:
            contexts += draft.memory.contexts if draft.drafter.info.reads_text else ()
        return contexts

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
    def draft_specs(self) -> list[str]:
        """What ``set_draft`` takes to load the drafters in use."""
        return [*(drafter.info.name for drafter in self.state.free), *(draft.spec for draft in self.state.models)]

    def set_draft(self, names: Sequence[str], report: Report, *, renew: DraftModel | None = None) -> None:
        """Replace the drafters by those of ``draft_specs``; on an error (as when loading a model) the ones in use stay.
        ``renew`` is a draft model that is loaded again though it is in use."""
        before = self.state
        with ExitStack() as undo:
            after = DraftMaker(self.loader, before, report, undo, renew).state(names)
            undo.pop_all()
        self.worker.idle.drop(*map(ORDER.index, ("corpus", "draft curve", "draft check", "draft copy")))
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

    def parallel_info(self) -> dict[str, Any]:
        """As ``/v1/localspec/stats`` says it."""
        told: dict[str, Any] = {"parallel": self.parallel.n, "reason": self.parallel.reason}
        rows = self.rows
        if self.parallel.n > 1:
            mean = round(rows["answers"] / max(1, rows["passes"]), 3)
            kinds = {"answers": rows["own"], "drafts": rows["drafts"], "prompts": rows["prompts"]}
            told["passes"] = {"passes": rows["passes"], "mean_answers": mean, "rows": kinds}
        return told

    def refuse(self, reason: str) -> None:
        self.refused = reason
        self.warnings.append(reason)

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self.encoder.close()
        state = self.state
        state.acceptance.save()
        self.prompts.finish()
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

    def steps(self, stopped: Stopped) -> Generator[bool, None, None]:
        while True:
            yield self._read(stopped)

    def _read(self, stopped: Stopped) -> bool:
        """One pass of one model; whether there is more to read."""
        pair = self._pair
        expected, present = self._expected, pair.conversation
        # A next turn begins with nearly all of the conversation, whose end a template may change.
        n_same = len(present) - len(present) // 8 - 1
        if expected and present is not self._instead_of and shared_prefix(expected, present) < n_same:
            expected = self._expected = ()
        work: list[tuple[Context, Sequence[int], int]] = [(pair.context, expected, TARGET_PIECE)]
        for draft in pair.state.models:  # those that the next answer may use, by the last one's controller
            usable = draft.drafter.info.reads_text and draft.source not in pair.state.failed
            if usable and (pair.last is None or pair.last[1].may_use(draft.source)):
                work.append((draft.context, expected or present, DRAFT_PIECE))
        for context, text, piece in work:
            n_vocab = context.model.n_vocab
            readable = next((i for i, token in enumerate(text) if token >= n_vocab), len(text))
            readable = min(readable, context.n_ctx - 1)
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
