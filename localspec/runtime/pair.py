"""A loaded target with its drafters: everything that one worker thread owns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from localspec import backends
from localspec.backends.base import FEW_ROWS, Context, FloatArray, Model
from localspec.backends.trust import fingerprint
from localspec.controllers.auto_controller import MAX_DRAFT, AutoController
from localspec.controllers.cost_model import PassTimes, calibrate_model, calibrate_quickly, curve_key, curves, growth
from localspec.controllers.experience import Experience
from localspec.controllers.fixed import FixedController
from localspec.errors import Cancelled, EngineMismatch, UsageError, VocabularyMismatch
from localspec.model_files.catalog import Catalog
from localspec.runtime.arguments import DraftLength
from localspec.runtime.model_loading import Loader, PairOptions, Report, Target, close_both
from localspec.runtime.prefix_cache import PrefixCache
from localspec.runtime.preparation import Preparation, ask_another_engine, calibrating_into, prepare_draft
from localspec.sampling.sampling import SamplingParams
from localspec.sampling.structured.constraint import constraint_for
from localspec.spec_decode.controller import Controller
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.drafters.grammar import GrammarDrafter
from localspec.spec_decode.drafters.names import names_of_files, same_file
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.rounds import Round
from localspec.system.heap import trim_heap
from localspec.system.home import home

log = logging.getLogger("localspec")

DEFAULT_CTX = 8192
"""Context size where none is asked for, if the model was trained for as much."""


class Pair:
    """A target, its drafters, and what was learned about their cost and acceptance. Not thread-safe: one owner.

    Attributes:
        warnings: one-line remarks from loading, and from idle time, that a user should see.
        said: the conversation last worked on, prompt and answer.
        preparation: what is left to find out in idle time.
        refused: why nothing is answered any more, where the engine turned out to be wrong; else None.
    """

    def __init__(self, path: Path, draft: Sequence[str] | str | None, options: PairOptions, report: Report) -> None:
        self.options = options
        self.warnings: list[str] = []
        self._models: dict[str, tuple[Model, Context]] = {}
        self._drafters: list[Drafter] = []
        self._experience = Experience(None, {})
        self._calibrations: list[tuple[dict[str, str], PassTimes]] = []
        self.loader = Loader(options, self.warnings)
        self.preparation = Preparation()
        self.refused: str | None = None
        self._names: list[str] = []
        self._draft_times: dict[str, PassTimes] = {}
        self._last: Controller | None = None
        self.said: Sequence[int] = ()
        self.prefix_cache = PrefixCache()
        backends.check_name(options.draft_backend or "auto")
        self.target = self.loader.load(path, report)
        try:
            n_ctx = options.n_ctx or min(DEFAULT_CTX, self.target.n_ctx_train or DEFAULT_CTX)
            if self.target.n_ctx_train and n_ctx > self.target.n_ctx_train:
                self.warnings.append(
                    f"--ctx {n_ctx} exceeds the {self.target.n_ctx_train} tokens this model was trained for; "
                    "answers far into the context may degrade"
                )
            self.context = self.target.new_context(n_ctx)
            self.times = self._calibrate(self.target, n_ctx, report)
            self.set_draft(draft, report)
            if options.idle:
                ask_another_engine(self, path)
        except BaseException:
            self.close()
            raise

    def _calibrate(self, model: Model, n_ctx: int, report: Report, kind: str = "target curve") -> PassTimes:
        cache, key = curves(), curve_key(model, self.options.kv_type)
        times = cache.get(key)
        if times is None and self.options.idle:
            report(f"measuring what a pass of {model.path.name} costs here (a first time, briefly)", None)
            times = calibrate_quickly(model, n_ctx, tick=lambda: report("measuring", None))
            cache.put(key, times)
        elif times is None or (times.noisy and not self.options.idle):
            report(f"measuring what a pass of {model.path.name} costs here (once)", None)
            times = calibrate_model(model, n_ctx, tick=lambda: report("measuring", None))
            cache.put(key, times)
        if times.noisy and self.options.idle:
            self.preparation.add(kind, lambda stopped: calibrating_into(times, model, n_ctx, key))
        times.growth = growth(model, self.options.kv_type)
        self._calibrations.append((key, times))
        return times

    # -- drafters -----------------------------------------------------------------------------------------------

    @property
    def as_target(self) -> Target:
        """The target, as draft models are loaded for it."""
        return Target(self.target, self.context.n_ctx, self.times)

    def set_draft(self, spec: Sequence[str] | str | None, report: Report, *, renew: str | None = None) -> None:
        """Replace the drafters; on an error the ones in use stay.

        Args:
            spec: what drafts; see ``LLM``.
            report: takes progress.
            renew: path of a draft model that is loaded again even if it is in use.

        Raises:
            VocabularyMismatch: a draft model numbers its tokens differently.
            UnknownModel, ModelFileError, EngineError: as when loading a model.
        """
        names = [spec] if isinstance(spec, str) else list(spec or [])
        if len(names) > 1 and ("none" in names or "auto" in names):
            raise UsageError("--draft auto and none stand alone")
        automatic = names == ["auto"]
        if automatic:
            found = Catalog.load().draft_for(self.target.path)
            names = ["ngram", *([str(found)] if found else [])]
        elif names == ["none"]:
            names = []
        fresh: dict[str, tuple[Model, Context]] = {}
        drafters: list[Drafter] = []
        times: dict[str, PassTimes] = {}
        paths: list[Path] = []
        self.preparation.drop("draft curve", "draft check", "draft copy")
        try:
            for name in dict.fromkeys(names):
                if name == "ngram":
                    drafters.insert(0, NgramDrafter())  # free guesses are asked first
                    continue
                try:
                    path = Catalog.load().resolve(name)
                    if same_file(path, fresh) is not None:
                        continue
                    key = same_file(path, self._models) or str(path.resolve())
                    if key in self._models and key != renew:
                        fresh[key] = self._models[key]
                    else:
                        fresh[key] = self.loader.load_draft(path, self.as_target, report)
                except VocabularyMismatch as error:
                    if not automatic:
                        raise
                    self.warnings.append(f"{error}; drafting with n-grams only")
                    continue
                model, context = fresh[key]
                source = f"model{len(paths) + 1}" if paths else "model"
                times[source] = self._calibrate(model, context.n_ctx, report, "draft curve")
                drafters.append(DraftModelDrafter(context, source))
                paths.append(path)
        except BaseException:
            for key, each in fresh.items():
                if each is not self._models.get(key):
                    close_both(*each)
            raise
        for key, (model, context) in self._models.items():
            if fresh.get(key) is not self._models[key]:
                self.prefix_cache.forget(context)
                close_both(model, context)
        for drafter in self._drafters:
            if not isinstance(drafter, DraftModelDrafter):
                drafter.close()
        models = [each for each in drafters if isinstance(each, DraftModelDrafter)]
        taken = {each.source for each in drafters if each not in models}
        for drafter, name in zip(models, names_of_files(paths, taken), strict=True):
            drafter.name = name
        self._models, self._drafters, self._draft_times, self._last = fresh, drafters, times, None
        self._names = names
        if self.options.idle:
            for key, each in fresh.items():
                prepare_draft(self, key, *each)
        self._experience.save()
        self._experience = self._new_experience()

    def drop_draft(self, model: Model) -> None:
        """Draft with a model no more."""
        keys = {key for key, (each, _) in self._models.items() if each is model}
        resolve = Catalog.load().resolve
        names = [name for name in self._names if name == "ngram" or str(resolve(name).resolve()) not in keys]
        self.set_draft(names, lambda what, fraction: None)

    def reload_draft(self, path: str, report: Report) -> None:
        """Load a draft model again, since it is known now which copy of it drafts faster."""
        self.set_draft(self._names, report, renew=path)

    def _new_experience(self) -> Experience:
        drafts = [fingerprint(Path(path)) for path in self._models]
        key = {"target": fingerprint(self.target.path), "drafters": " ".join([*drafts, *self.draft_names])}
        return Experience(home() / "acceptance" if self.options.remember else None, key)

    @property
    def draft_names(self) -> list[str]:
        """Names of the drafters in use, in the order they are asked; one that failed is not in use any more."""
        return [drafter.name for drafter in self._drafters if not drafter.failed]

    def _lost(self, drafter: Drafter, why: str) -> None:
        # The draft's file by its path: its name alone can be that of another, and of a lighter copy it says little.
        files = {context: path for path, (_, context) in self._models.items()}
        file = files.get(drafter.context, drafter.name) if isinstance(drafter, DraftModelDrafter) else drafter.name
        line = f"the draft {file} is not used any more: it {why}"
        self.warnings.append(line)
        log.warning(line)

    # -- decoding -----------------------------------------------------------------------------------------------

    def controller(
        self,
        draft_length: DraftLength,
        params: SamplingParams | None = None,
        drafters: Sequence[Drafter] | None = None,
        *,
        predicted: bool = False,
    ) -> Controller:
        """A controller for one request: ``auto``, or a fixed number of tokens (0: plain).

        Args:
            draft_length: ``auto`` or a number.
            params: the request's.
            drafters: those that take part; None is all.
            predicted: whether the answer is likely to repeat a text that came with the request.
        """
        drafters = [each for each in self._drafters if not each.failed] if drafters is None else drafters
        if draft_length != "auto":
            has_model = any(isinstance(drafter, DraftModelDrafter) for drafter in drafters)
            return FixedController(int(draft_length), self.times, has_model=has_model)
        if not drafters:
            return FixedController(0, self.times)
        params = params or SamplingParams()
        sources, sampled = {}, {}
        for source in (drafter.source for drafter in drafters):
            is_model = source in self._draft_times
            sources[source] = self._experience.source(params, source, copies=not is_model)
            if is_model:
                sampled[source] = self._experience.source(params, source, copies=False, sampled=True)
        draft_times = {source: times for source, times in self._draft_times.items() if source in sources}
        # What longer copies gain where text repeats itself is less than they would cost all text after it.
        longest = FEW_ROWS - 1 if self.target.capabilities.keeps_rows else MAX_DRAFT
        return AutoController(
            self.times, draft_times, sources, sampled, longest, self._experience.budget, predicted=predicted
        )

    def explain(self, draft_length: DraftLength) -> str:
        """Why the last answer was, or the next one will be, drafted as it is: one sentence."""
        if draft_length == "auto" and isinstance(self._last, AutoController):
            return self._last.explain()
        return self.controller(draft_length).explain()

    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        draft_length: DraftLength,
        on_prefilled: Callable[[int], None],
        cancelled: Callable[[], bool],
        *,
        n_logprobs: int | None = None,
        drafters: Sequence[str] | None = None,
        prediction: Sequence[int] = (),
    ) -> Iterator[Round]:
        """Prefill and decode; see ``SpeculativeDecoder``. ``on_prefilled`` gets the number of cached prompt tokens.

        ``cancelled`` is also asked inside of long passes, such as a draft model's first reading of a prompt.
        ``drafters`` and ``prediction``: see ``drafters_for``.
        """
        self._check_not_refused()
        chosen = self.drafters_for(drafters, prediction)
        constraint = constraint_for(params, self.target.vocab)
        forced = [GrammarDrafter(constraint, self.target.tokenize)] if constraint is not None and chosen else []
        controller = self._last = self.controller(draft_length, params, [*chosen, *forced], predicted=bool(prediction))
        plain = isinstance(controller, FixedController) and controller.length == 0
        decoder = SpeculativeDecoder(self.context, [] if plain else [*forced, *chosen], controller, self._lost)
        reading = [] if plain else [each.context for each in chosen if isinstance(each, DraftModelDrafter)]
        said = self.said = list(prompt)
        text = TextAssembler(self.target.vocab, params.stop)
        n_rounds, ended = 0, False
        # A pass that is broken off leaves every context with what its `tokens` says.
        with self._working_on(said, reading, cancelled), suppress(Cancelled):
            on_prefilled(decoder.prefill(prompt, cancelled))
            for round_ in decoder.rounds(
                prompt, params, text, cancelled=cancelled, n_logprobs=n_logprobs, constraint=constraint
            ):
                said += [token.id for token in round_.emitted]
                round_.draft_texts = [self.token_text(token) for token in round_.draft.ids]
                n_rounds, ended = round_.index + 1, round_.finish_reason is not None
                yield round_
        if not ended:
            # What was held back is verified too, and nothing follows any more that could make a stop string of it.
            spans = text.finish()
            if spans or text.stopped:
                yield Round.of_rest(n_rounds, spans, "stop" if text.stopped else "cancelled")

    @contextmanager
    def _working_on(
        self, said: Sequence[int], drafts: Sequence[Context], cancelled: Callable[[], bool]
    ) -> Iterator[None]:
        """Within the block target and drafts hold one conversation, and long passes can be broken off."""
        contexts = [self.context, *drafts]
        with self.prefix_cache.conversation(self.context, drafts, said):
            for context in contexts:
                context.interrupted = cancelled
            try:
                yield
            finally:
                for context in contexts:
                    context.interrupted = None

    def drafters_for(self, names: Sequence[str] | None, prediction: Sequence[int]) -> list[Drafter]:
        """The drafters of one request.

        Args:
            names: which of ``draft_names`` take part; None is all.
            prediction: a text that the answer is likely to repeat, for n-grams to copy from; where no n-gram drafter
                takes part, one does for this request.

        Raises:
            UsageError: no such drafter is loaded.
        """
        known = {drafter.name: drafter for drafter in self._drafters}
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise UsageError(f"no drafter {unknown[0]!r} is loaded; there is {', '.join(known) or 'none'}")
        chosen = [d for name, d in known.items() if (names is None or name in names) and not d.failed]
        copying = [drafter for drafter in chosen if isinstance(drafter, NgramDrafter)]
        if prediction and not copying and (chosen or names is None):
            copying = [NgramDrafter()]
            chosen = [*copying, *chosen]
        for drafter in copying:
            drafter.expect(prediction)
        return chosen

    def read(self, tokens: Sequence[int], n_chunk: int) -> Iterator[tuple[int, FloatArray]]:
        """Take tokens through the target from the start, yielding (position, logits [n, n_vocab]) chunk by chunk."""
        self._check_not_refused()
        self.prefix_cache.put_aside(self.context)
        self.context.truncate(0)
        for start in range(0, len(tokens), n_chunk):
            yield start, self.context.decode(tokens[start : start + n_chunk]).logits

    def refuse(self, reason: str) -> None:
        """Answer nothing any more."""
        self.refused = reason
        self.warnings.append(reason)

    def _check_not_refused(self) -> None:
        if self.refused is not None:
            raise EngineMismatch(self.refused)

    def useful_drafts(self) -> list[Context]:
        """Contexts of the draft models that the next answer may use, as far as the last one told."""
        drafts = [each for each in self._drafters if isinstance(each, DraftModelDrafter)]
        return [each.context for each in drafts if self._last is None or self._last.may_use(each.source)]

    @property
    def contexts(self) -> list[Context]:
        """The target's, then the draft models'."""
        return [self.context, *(context for _, context in self._models.values())]

    def token_text(self, token: int) -> str:
        """A token on its own, for display."""
        vocab = self.target.vocab
        if token >= vocab.n_tokens:
            return f"<{token}>"
        return vocab.token_bytes(token).decode("utf-8", "replace") or vocab.token_text(token)

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self._experience.save()
        self.preparation.clear()
        cache = curves()
        for key, times in self._calibrations:
            if not times.fits:
                cache.drop(key)
        self._calibrations = []
        for drafter in self._drafters:
            drafter.close()
        self.prefix_cache.clear()
        for model, context in self._models.values():
            close_both(model, context)
        self._models, self._drafters = {}, []
        if hasattr(self, "context"):
            self.context.close()
        self.target.close()
        trim_heap()
