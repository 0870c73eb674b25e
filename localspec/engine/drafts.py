"""What drafts: from the names that ``--draft`` takes to a state that decodes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from localspec.backends.base import Context, Model, SequenceBatch
from localspec.backends.heads import Head, heads_for, target_facts
from localspec.backends.published_heads import EngineHead, heads_beside
from localspec.backends.trust import fingerprint
from localspec.controllers.calibration import WHOLE, BlockPasses, ChainedPasses, EarlyExits, HeadPasses, PassKind
from localspec.controllers.learned import AcceptanceStore
from localspec.engine.loading import Loader, Report
from localspec.engine.saved_chats import SavedChats
from localspec.engine.state import DecodingState, DraftMemory, DraftModel, taps_of, target_memory
from localspec.errors import Cancelled, EngineError, LocalspecError, UsageError, VocabularyMismatch
from localspec.model_files.catalog import Catalog
from localspec.model_files.exit_head import exit_head
from localspec.model_files.head_kinds import names_published_head
from localspec.model_files.sources.base import size_text
from localspec.spec_decode.drafters import FREE_DRAFTERS
from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.drafters.corpus import CorpusDrafter
from localspec.spec_decode.drafters.corpus_index import BYTES_PER_BYTE, CorpusIndex, PathSource
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.drafters.head import HEAD_DRAFTERS
from localspec.spec_decode.drafters.names import (
    AUTOMATIC,
    CHATS,
    CORPUS,
    EARLY_EXIT,
    FROM_STATES,
    HEAD,
    MTP,
    is_corpus,
    kind_of,
    names_of_files,
    source_of,
)
from localspec.system.files import home, is_same_file
from localspec.system.steps import exhaust

# What ``--draft auto`` loads besides what is free: asked here by whatever has to know it, loaded or not.


def head_files(target: Path, backend: str | None) -> Iterator[Path]:
    """The heads on this disk that ``auto`` takes for a target: one that was trained here or ships, and a published one.

    Of either kind the first: those trained for that very file, and those that the catalogue has for it, come first.
    Which of the two pays is for the controller to find out; more of a kind would take memory for states and weights
    each, and read the same states.

    Args:
        target: its file.
        backend: the engine that it runs on; see ``heads_beside``.
    """
    for find in (heads_for, lambda path: heads_beside(path, backend)):
        try:
            yield from find(target)[:1]
        except LocalspecError:  # of the target, whose loading says it
            continue


def heads_at_hand(target: Path, backend: str | None, *, mtp: bool) -> Iterator[str]:
    """What drafts from the target's states, as ``--draft`` takes it, found one by one.

    Args:
        target, backend: as for ``head_files``.
        mtp: whether the target's own layer for multi-token prediction is computed.
    """
    if mtp:
        yield MTP
    yield from (f"{HEAD}:{path}" for path in head_files(target, backend))


def heads_of(target: Model) -> Iterator[str]:
    """The same for a loaded target."""
    return heads_at_hand(target.path, target.backend, mtp=target.capabilities.mtp)


def drafts_at_hand(target: Model) -> Iterator[str]:
    """All that ``auto`` loads for a loaded target, found one by one: heads as above, and a draft model's path."""
    yield from heads_of(target)
    draft = Catalog.load().draft_for(target.path)
    if draft is not None:
        yield str(draft)


# From ``corpus:PATH`` to an index that is up to date, or will be when nobody waits.


def open_corpus(where: str, target: Model, loader: Loader, report: Report) -> CorpusIndex:
    """The index of a corpus for the target's tokenizer.

    What is new in it is read now, with progress, where there will be no idle time; else then. How much that is is said
    first.

    Args:
        where: a path, or ``chats``.
        target: the model whose tokens it is made of.
        loader: says whether there will be idle time, and takes remarks.
        report: takes progress; raising from it leaves what was indexed so far.

    Raises:
        UsageError: there is no such path, it holds too much, or the index cannot be written.
    """
    source = SavedChats() if where == CHATS else PathSource(Path(where))
    index = CorpusIndex(source, home() / "corpora", target.vocab.fingerprint, target.tokenize)
    survey = exhaust(index.survey(), lambda: report(f"looking at {where}", None))
    if not survey.n_files:
        loader.warnings.append(f"corpus {where} holds no text: nothing is copied from it")
    if survey.n_new:
        n_bytes, new_bytes = size_text(survey.n_bytes), size_text(survey.new_bytes)
        said = f"corpus {where}: {survey.n_files:,} files, {n_bytes}; indexing {new_bytes} of it"
        said += f", in at most {size_text(round(BYTES_PER_BYTE * survey.new_bytes))} of {index.folder.parent}"
        if loader.options.idle:
            loader.warnings.append(f"{said}, while nobody waits")
        else:
            report(said, None)
            exhaust(index.update(), lambda: report(f"indexing {where}", index.done))
    return index


EXIT_SHARE = 0.25
"""Of the target's layers, how many ``early-exit`` drafts with where no number is given: set by hand, for models that
were trained to be left early. Of others no share pays: after 7, 14, 21, 24 and 26 of the 28 layers of Qwen2.5-Coder
1.5B 0.01, 0.07, 0.34, 0.54 and 0.71 of the most probable tokens are the whole model's (256 places of
``draft_choice.TEXT``)."""


@dataclass(slots=True)
class DraftMaker:
    """Makes the drafters that names stand for; what is loaded already is used again.

    Attributes:
        loader: loads models.
        before: the state in use.
        report: takes progress.
        undo: takes what frees what was made, should that fail.
        renew: a draft model that is loaded again though it is in use.
    """

    loader: Loader
    before: DecodingState
    report: Report
    undo: ExitStack
    renew: DraftModel | None = None

    def state(self, names: Sequence[str]) -> DecodingState:
        """The state that decodes with drafters; its target's context holds what the one in use does, or is that.

        Args:
            names: as ``arguments.draft_specs`` returns them.

        Raises:
            VocabularyMismatch: a draft model numbers its tokens differently.
            LocalspecError: as when loading a model.
        """
        before = self.before
        before.acceptance.save()
        named = [name for name in names if not is_corpus(name)]
        is_automatic = named == ["auto"]
        free, models = self._automatic() if is_automatic else self._drafters(named)
        free += self._corpora([name for name in names if is_corpus(name)])
        try:
            context, batch = self._context_for([*free, *(draft.drafter for draft in models)])
        except Cancelled:
            raise
        except LocalspecError as error:
            if not is_automatic or not any(draft.drafter.taps for draft in models):
                raise
            self._go_without(error)
            for draft in models:
                if draft.drafter.taps:
                    draft.close()
            models = [draft for draft in models if not draft.drafter.taps]
            context, batch = self._context_for([])
        acceptance = self._acceptance_of(free, models)
        return DecodingState(context, before.times, free, models, acceptance, before.ahead, batch)

    # -- by name ---------------------------------------------------------------------------------------------------

    def _drafters(self, names: Sequence[str]) -> tuple[list[Drafter], list[DraftModel]]:
        free = [self._free(name) for name in names if name in FREE_DRAFTERS]
        models: list[DraftModel] = []
        for name in names:
            if name not in FREE_DRAFTERS:
                models += self._model(name, models)
        return free, _named(models, free)

    def _automatic(self) -> tuple[list[Drafter], list[DraftModel]]:
        """What costs nothing, and what is at hand for the target."""
        target, free = self.before.target, [self._free(name) for name in AUTOMATIC]
        models: list[DraftModel] = []
        for name in drafts_at_hand(target):
            try:
                models += self._model(name, models)
            except Cancelled:  # it gives way to a request, and is tried again
                raise
            except LocalspecError as error:
                is_head = name.partition(":")[0] in FROM_STATES
                if not is_head and not isinstance(error, VocabularyMismatch):
                    raise
                self._go_without(error)
        return free, _named(models, free)

    def _free(self, name: str) -> Drafter:
        return FREE_DRAFTERS[name]()

    def _corpora(self, names: Sequence[str]) -> Sequence[Drafter]:
        drafters: list[CorpusDrafter] = []
        for name in names:
            index = open_corpus(name.partition(":")[2], self.before.target, self.loader, self.report)
            if all(index.folder != other.index.folder for other in drafters):
                drafters.append(CorpusDrafter(index, source_of(CORPUS, len(drafters)), name))
        return drafters

    def _go_without(self, error: LocalspecError) -> None:
        self.loader.warnings.append(f"{error}; drafting without it")

    def _model(self, name: str, others: Sequence[DraftModel]) -> list[DraftModel]:
        """What a name stands for; nothing if it is one of the others under another name."""
        kind, _, rest = name.partition(":")
        if name == MTP:
            return [self._head(MTP, MTP, MTP, self.before.target.path)]
        path = None if kind in (HEAD, EARLY_EXIT) else Catalog.load().resolve(name)
        if kind == HEAD or (path is not None and names_published_head(path)):
            path = path or self._head_file(rest)
            heads = [each for each in others if kind_of(each.source) == HEAD]
            if any(is_same_file(path, each.path) for each in heads):
                return []
            source = source_of(HEAD, len(heads))
            return [self._head(source, source, f"{HEAD}:{path}", path)]
        if kind == EARLY_EXIT:
            target = self.before.target
            n_layers = int(rest) if rest else max(1, round(EXIT_SHARE * target.n_layers))
            name = f"{EARLY_EXIT}:{n_layers}"
            return [self._head(EARLY_EXIT, name, name, exit_head(target.path, target_facts(target.path), n_layers))]
        assert path is not None
        draft_models = [each for each in others if each.drafter.reads_text]
        if any(is_same_file(path, each.path) for each in draft_models):
            return []
        return [self._draft_model(path, source_of("model", len(draft_models)))]

    def _head_file(self, named: str) -> Path:
        if named:
            return Path(named).expanduser()
        target = self.before.target
        found = next(head_files(target.path, target.backend), None)
        if found is None:
            raise UsageError(f"there is no head for {target.path.name} on this disk; localspec distill trains one")
        return found

    def _draft_model(self, path: Path, source: str) -> DraftModel:
        known = self._known(path, reads_text=True)
        if known is not None:
            drafter: Drafter = DraftModelDrafter(known.context, source)
            return replace(known, name="", spec=str(path), path=path, drafter=drafter)
        model = self.loader.load_draft(path, self.before, self.report)
        options, n_ctx = self.loader.options, self.before.context.n_ctx
        try:
            memory = DraftMemory.of_model(model, n_ctx, self.loader.parallel, options.n_gpu_layers)
        except BaseException:
            model.close()
            raise
        drafter = DraftModelDrafter(memory.contexts[0], source)
        return self._loaded("", str(path), path, model, memory, drafter, WHOLE, model.close)

    def _head(self, source: str, name: str, spec: str, path: Path) -> DraftModel:
        known = self._known(path, reads_text=False)
        if known is not None and known.source == source:
            return replace(known, drafter=known.drafter.clone(known.context))
        target = self.before.target
        head = self.loader.load_head(path, target, self.report)
        try:
            n_ctx = self.before.context.n_ctx
            memory = DraftMemory.of_head(lambda: head.new_context(n_ctx), self.loader.parallel)
        except BaseException:
            head.close()
            raise
        context = memory.contexts[0]
        passes: PassKind = HeadPasses(context.hidden)
        if isinstance(head, EngineHead) and head.facts.block:
            passes = BlockPasses(head)
        elif isinstance(head, Head) and head.kind == "chained":
            passes = ChainedPasses(context.hidden, head, target.n_embd)
        if head.kind == "exit":
            passes = EarlyExits(target, head.taps[0], context)
        drafter = HEAD_DRAFTERS[head.kind](head, context, source)
        return self._loaded(name, spec, path, head.model, memory, drafter, passes, head.close)

    def _known(self, path: Path, *, reads_text: bool) -> DraftModel | None:
        for draft in self.before.models:
            if draft is not self.renew and draft.drafter.reads_text == reads_text and is_same_file(draft.path, path):
                return draft
        return None

    def _loaded(
        self,
        name: str,
        spec: str,
        path: Path,
        model: Model,
        memory: DraftMemory,
        drafter: Drafter,
        passes: PassKind,
        free_weights: Callable[[], None],
    ) -> DraftModel:
        try:
            times = self.loader.times(
                model, memory.contexts[0].n_ctx, self.report, passes, f"the {name}" if name else path.name
            )
        except BaseException:
            memory.close()
            free_weights()
            raise
        draft = DraftModel(name, spec, path, model, memory, times, drafter, passes, free_weights)
        self.undo.callback(draft.close)
        return draft

    # -- the rest of the state -------------------------------------------------------------------------------------

    def _context_for(self, drafters: Sequence[Drafter]) -> tuple[Context, SequenceBatch | None]:
        """The target's context, or one like it that returns the hidden states that drafters want, and no others.

        Beside it the memory that it is a part of, see ``DecodingState``.
        """
        context, taps = self.before.context, taps_of(drafters)
        if set(taps) == set(context.hidden):
            return context, self.before.batch
        parallel = self.loader.parallel
        other, batch = target_memory(context.model, context.n_ctx, parallel, taps, branches=context.can_branch)
        self.undo.callback((batch or other).close)
        if context.tokens and context.model.capabilities.saves_state:
            with suppress(EngineError, MemoryError):  # then the conversation is read again
                other.import_state(context.export_state())
        return other, batch

    def _acceptance_of(self, free: Sequence[Drafter], models: Sequence[DraftModel]) -> AcceptanceStore:
        """What earlier runs learned of these drafters for this target."""
        files, names = [fingerprint(draft.path) for draft in models], [draft.name for draft in models]
        drafters = " ".join([*files, *(drafter.name for drafter in free), *names])
        key = {"target": fingerprint(self.before.target.path), "drafters": drafters}
        return AcceptanceStore(home() / "acceptance" if self.loader.options.remember else None, key)


def _named(models: Sequence[DraftModel], free: Sequence[Drafter]) -> list[DraftModel]:
    """Draft models by the names of their files, as short as tells them apart."""
    taken = [*(drafter.source for drafter in free), *(draft.name for draft in models if draft.name)]
    called = iter(names_of_files([draft.path for draft in models if not draft.name], taken))
    return [draft if draft.name else replace(draft, name=next(called)) for draft in models]
