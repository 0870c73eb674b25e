"""What drafts: from the names that ``--draft`` takes to a state that decodes with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from localspec.backends.base import Context, Model, SequenceBatch
from localspec.controllers.calibration import curve_key
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.learned import AcceptanceStore
from localspec.engine.draft_sources import (
    DraftSource,
    DraftWeights,
    FoundDraft,
    draft_source,
    draft_sources,
    free_drafter,
    is_free,
)
from localspec.engine.loading import N_ANSWER, N_PROMPT, Loader, Report
from localspec.engine.saved import SavedChats
from localspec.engine.state import (
    DecodingState,
    DraftMemory,
    DraftModel,
    ahead_of,
    n_sequences,
    several,
    taps_of,
    target_memory,
)
from localspec.errors import Cancelled, EngineError, LocalspecError, VocabularyMismatch
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import fingerprint
from localspec.model_files.sources.base import size_text
from localspec.prompts.questions import own_questions
from localspec.spec_decode.drafters.base import Drafter, DrafterInfo
from localspec.spec_decode.drafters.corpus import BYTES_PER_BYTE, CorpusDrafter, CorpusIndex, PathSource
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.drafters.names import (
    AUTOMATIC,
    CHATS,
    CORPUS,
    PARD,
    is_corpus,
    kind_of,
    names_of_files,
    source_of,
)
from localspec.spec_decode.drafters.other_vocabulary import MappedTokensDrafter, OtherVocabularyDrafter
from localspec.spec_decode.drafters.pard import PardDrafter, file_and_mask, mask_token
from localspec.system.files import JsonStore, home, is_same_file
from localspec.system.steps import exhaust


def plugin_drafts(target: Model, warn: Callable[[str], None] = lambda line: None) -> Iterator[str]:
    """What ``auto`` loads of plugins for a loaded target, as ``--draft`` calls it."""
    for source in draft_sources(warn):
        yield from source.automatic(target)


def found_drafts(target: Model, warn: Callable[[str], None] = lambda line: None) -> Iterator[str]:
    """All that ``auto`` loads for a loaded target: plugins, and a draft model's path."""
    yield from plugin_drafts(target, warn)
    if draft := Catalog.load().draft_for(target.path):
        yield str(draft)


def _source_of(name: str, warn: Callable[[str], None]) -> tuple[DraftSource | None, str]:
    """The kind of drafter that a name stands for, None for a draft model; and its argument, or the path of its file."""
    kind, _, rest = name.partition(":")
    if kind == PARD:
        return None, str(Catalog.load().resolve(file_and_mask(rest)[0]))
    source = draft_source(kind)
    if source is None:
        path = Catalog.load().resolve(name)
        return next((each for each in draft_sources(warn) if each.takes(path)), None), str(path)
    return source, rest


def draft_files(names: Sequence[str], target: Model) -> Iterator[tuple[Path, bool]]:
    """Files that will be loaded for names of ``draft_specs``, and whether each is a draft model.

    Those of ``auto`` also where only n-grams are named: a chat loads the others later.
    """
    named = [name for name in names if not is_corpus(name) and not is_free(name)]
    if named == ["auto"] or (names and not named):
        named = list(found_drafts(target))
    for name in named:
        with suppress(LocalspecError):  # loading it says what is wrong
            source, rest = _source_of(name, lambda line: None)
            yield (Path(rest), True) if source is None else (source.find(rest, target).path, False)


# From ``corpus:PATH`` to an index that is up to date, or will be in idle time.


def open_corpus(where: str, target: Model, loader: Loader, report: Report) -> CorpusIndex:
    """The index of a corpus, a path or ``chats``, for the target's tokenizer; updated now where there is no idle time.
    ``UsageError``: there is no such path, it holds too much, or the index cannot be written."""
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
            loader.warnings.append(f"{said}, in idle time")
        else:
            report(said, None)
            exhaust(index.update(), lambda: report(f"indexing {where}", index.done))
    return index


LEAST_GAIN = 1.03
"""What ``auto`` expects of a drafter that runs a model, over those that cost nothing alone: with less it is not loaded,
and reads no prompt. Asked once calibration is undisturbed, and again where machine, engine or files are others."""

STEP_OF_SIZE = 0.75
"""A step of a draft model over a token of the target, by the sizes of their files: 0.28 to 0.31 where those are as 0.40
to 1 (Qwen2.5-Coder 1.5B with its 0.5B, two machines)."""


def gain_of_size(state: DecodingState, n_bytes: int) -> float:
    """What a draft model that is not here yet would add (``DecodingState.gain_with``), by the size of its file and by
    how often a small model of the target's family is right."""
    share = STEP_OF_SIZE * n_bytes / state.target.size_bytes
    times = PassTimes({width: share * ms for width, ms in state.times.curve.measured.items()})
    unlearned = replace(state, acceptance=AcceptanceStore(None, {}))
    return unlearned.gain_with(DrafterInfo("model", runs_model=True), times, N_PROMPT, N_ANSWER)


@dataclass(slots=True)
class DraftMaker:
    """Makes the drafters that names stand for; what is loaded already (in ``before``) is used again, but for ``renew``.
    ``undo`` takes what frees what was made, should that fail."""

    loader: Loader
    before: DecodingState
    report: Report
    undo: ExitStack
    renew: DraftModel | None = None

    def state(self, names: Sequence[str]) -> DecodingState:
        """The state that decodes with drafters of ``draft_specs``; its target's context holds what the one in use does.
        ``LocalspecError``: as when loading a model."""
        before = self.before
        before.acceptance.save()
        named = [name for name in names if not is_corpus(name)]
        is_automatic = named == ["auto"]
        free = [free_drafter(name) for name in (AUTOMATIC if is_automatic else filter(is_free, named))]
        models = self._automatic(free) if is_automatic else self._named([name for name in named if not is_free(name)])
        # By the names of their files, as short as tells them apart.
        taken = [*(drafter.info.source for drafter in free), *(draft.name for draft in models if draft.name)]
        called = iter(names_of_files([draft.path for draft in models if not draft.name], taken))
        models = [draft if draft.name else replace(draft, name=next(called)) for draft in models]
        free += self._corpora([name for name in names if is_corpus(name)])
        try:
            context, batch = self._context_for([*free, *(draft.drafter for draft in models)])
        except Cancelled:
            raise
        except LocalspecError as error:
            if not is_automatic or not any(draft.drafter.info.taps for draft in models):
                raise
            self.loader.warnings.append(f"{error}; drafting without it")
            for draft in models:
                if draft.drafter.info.taps:
                    draft.close()
            models = [draft for draft in models if not draft.drafter.info.taps]
            context, batch = self._context_for([])
        ahead = ahead_of(context.model, models)
        if ahead is not None and context is before.context:
            ahead = before.drafting_ahead or ahead  # which has learned whether it pays
        return DecodingState(context, before.times, free, models, self._acceptance_of(free, models), ahead, batch)

    # -- by name ---------------------------------------------------------------------------------------------------

    def _named(self, names: Sequence[str]) -> list[DraftModel]:
        models: list[DraftModel] = []
        for name in names:
            models += self._model(name, self._found(name), models)
        return models

    def _automatic(self, free: Sequence[Drafter]) -> list[DraftModel]:
        models: list[DraftModel] = []
        for name in found_drafts(self.before.target, self.loader.warnings.append):
            try:
                models += self._paying(name, free, models)
            except Cancelled:  # it gives way to a request, and is tried again
                raise
            except LocalspecError as error:
                from_plugin = draft_source(name.partition(":")[0]) is not None
                if not from_plugin and not isinstance(error, VocabularyMismatch):
                    raise
                self.loader.warnings.append(f"{error}; drafting without it")
        return models

    def _paying(self, name: str, free: Sequence[Drafter], others: Sequence[DraftModel]) -> list[DraftModel]:
        """What a name stands for, unless it was found to add too little to drafters that cost nothing here."""
        stands_for = self._found(name)
        path = stands_for[1].path
        if not self.loader.options.remember:
            return self._model(name, stands_for, others, any_vocabulary=False)
        options = self.loader.options
        of_target = curve_key(self.before.target, options.kv_cache_type)
        key = of_target | {"draft": fingerprint(path), "draft engine": options.draft_backend or ""}
        gains = JsonStore(home() / "gains", 1)
        gain = (gains.get(key) or {}).get("gain", math.inf)
        found = self._model(name, stands_for, others, any_vocabulary=False) if gain >= LEAST_GAIN else []
        if found and not self.before.times.noisy and not found[0].times.noisy:
            alone = replace(self.before, free=[*free], models=found, acceptance=self._acceptance_of(free, found))
            gain = alone.gain_with(found[0].drafter.info, found[0].times, N_PROMPT, N_ANSWER)
            gains.put(key, {"gain": round(gain, 3)})
        if gain >= LEAST_GAIN:
            return found
        adds = "saves nothing" if gain < 1.005 else f"saves {100 * (gain - 1):.0f} %"
        self.loader.warnings.append(
            f"{path.name} is left out: beyond copying from the text it {adds} of a typical answer's time here; "
            "--draft names it all the same"
        )
        for draft in found:
            if all(each.model is not draft.model for each in self.before.models):
                draft.close()
        return []

    def _corpora(self, names: Sequence[str]) -> Sequence[Drafter]:
        drafters: list[CorpusDrafter] = []
        for name in names:
            index = open_corpus(name.partition(":")[2], self.before.target, self.loader, self.report)
            if all(index.folder != other.index.folder for other in drafters):
                drafters.append(CorpusDrafter(index, source_of(CORPUS, len(drafters)), name))
        return drafters

    def _found(self, name: str) -> tuple[DraftSource | None, FoundDraft]:
        """The kind of drafter that a name stands for, None for a draft model; and its file."""
        source, rest = _source_of(name, self.loader.warnings.append)
        return source, FoundDraft(Path(rest), "") if source is None else source.find(rest, self.before.target)

    def _model(
        self,
        name: str,
        stands_for: tuple[DraftSource | None, FoundDraft],
        others: Sequence[DraftModel],
        *,
        any_vocabulary: bool = True,
    ) -> list[DraftModel]:
        """What a name stands for, as ``_found`` says; nothing if it is one of the others under another name."""
        source, found = stands_for
        if source is None:
            alike = [each for each in others if each.drafter.info.is_draft_model]
        else:
            alike = [each for each in others if kind_of(each.source) == source.name]
        if any(is_same_file(found.path, each.path) for each in alike):
            return []
        if source is None:
            return [self._draft_model(name, found.path, source_of("model", len(alike)), any_vocabulary)]
        return [self._from_plugin(source, source_of(source.name, len(alike)), found)]

    def _draft_model(self, name: str, path: Path, source: str, any_vocabulary: bool) -> DraftModel:
        known, spec = self._known(path, is_draft_model=True), str(path)
        kind, _, rest = name.partition(":")
        mask = mask_token(path, named=True, token=file_and_mask(rest)[1]) if kind == PARD else mask_token(path)
        if mask is not None:
            any_vocabulary, spec = False, f"{PARD}:{path}:{mask}"
        if known is not None and (mask is None or not known.drafter.info.own_tokens):
            drafter = self._drafter(known.context, source, mask)
            return replace(known, name="", spec=spec, path=path, drafter=drafter)
        model = self.loader.load_draft(path, self.before, self.report, any_vocabulary=any_vocabulary)
        weights = DraftWeights(
            model, model.new_context, lambda context, source: self._drafter(context, source, mask), model.close
        )
        draft = self._loaded(FoundDraft(path, spec), source, weights, is_draft_model=True)
        if isinstance(draft.drafter, MappedTokensDrafter):
            self.loader.warnings.append(f"{path.name} has other special tokens: they are mapped by name and meaning")
        elif draft.drafter.info.own_tokens:
            self.loader.warnings.append(f"{path.name} has another vocabulary: drafts are carried over as text")
        return draft

    def _drafter(self, context: Context, source: str, mask: int | None) -> Drafter:
        target, vocab = self.before.target, context.model.vocab
        if mask is not None:
            return PardDrafter(context, mask, source)
        if target.vocab.difference(vocab) is None:
            return DraftModelDrafter(context, source)
        if target.vocab.difference(vocab, special=False) is None:
            return MappedTokensDrafter(context, target, source)
        # How many of its tokens stand for one of the target's, in ordinary questions.
        text = "\n".join(turn for question in own_questions("tuning") for turn in question.turns)
        n_its, n_mine = (len(model.tokenize(text, add_special=False)) for model in (context.model, target))
        return OtherVocabularyDrafter(context, target, source, max(1.0, n_its / max(1, n_mine)))

    def _from_plugin(self, kind: DraftSource, source: str, found: FoundDraft) -> DraftModel:
        known = self._known(found.path, is_draft_model=False)
        if known is not None and known.source == source:
            return replace(known, drafter=known.drafter.clone(known.context))
        options = self.loader.options
        weights = kind.load(
            found.path,
            self.before.target,
            backend=options.draft_backend,
            n_threads=options.n_threads,
            n_gpu_layers=options.n_gpu_layers,
            say=lambda line: self.report(line, None),
            warn=self.loader.warnings.append,
        )
        return self._loaded(replace(found, name=found.name or source), source, weights, is_draft_model=False)

    def _known(self, path: Path, *, is_draft_model: bool) -> DraftModel | None:
        for draft in self.before.models:
            is_alike = draft is not self.renew and draft.drafter.info.is_draft_model == is_draft_model
            if is_alike and is_same_file(draft.path, path):
                return draft
        return None

    def _loaded(self, found: FoundDraft, source: str, weights: DraftWeights, *, is_draft_model: bool) -> DraftModel:
        """Weights with a memory, and what their passes cost; frees them where it fails."""
        n_ctx, parallel, layers = self.before.context.n_ctx, self.loader.parallel, self.loader.options.n_gpu_layers
        with ExitStack() as failed:
            failed.callback(weights.close)
            if is_draft_model and parallel > 1:
                memory = DraftMemory.shared(weights.model, n_ctx, parallel, layers)
            else:
                memory = DraftMemory(several(lambda: weights.new_context(n_ctx), n_sequences(parallel)))
            failed.callback(memory.close)
            context = memory.contexts[0]
            drafter, passes = weights.drafter(context, source), weights.passes(context)
            called = f"the {found.name}" if found.name else found.path.name
            times = self.loader.times(weights.model, context.n_ctx, self.report, passes, called)
            failed.pop_all()
        draft = DraftModel(
            found.name, found.spec, found.path, weights.model, memory, times, drafter, passes, weights.close
        )
        self.undo.callback(draft.close)
        return draft

    # -- the rest of the state -------------------------------------------------------------------------------------

    def _context_for(self, drafters: Sequence[Drafter]) -> tuple[Context, SequenceBatch | None]:
        """The target's context, or another that returns the hidden states that drafters want; and its memory."""
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
        files, names = [fingerprint(draft.path) for draft in models], [draft.name for draft in models]
        ways = [PARD for draft in models if draft.drafter.info.rows_of_draft]
        drafters = " ".join([*files, *(drafter.info.name for drafter in free), *names, *ways])
        key = {"target": fingerprint(self.before.target.path), "drafters": drafters}
        return AcceptanceStore(home() / "acceptance" if self.loader.options.remember else None, key)
