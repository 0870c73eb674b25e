"""A loaded target with its drafters: everything that one worker thread owns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec import backends
from localspec.acceptance import SourceAcceptance
from localspec.backends.base import Context, Model
from localspec.backends.machine import cpu_name
from localspec.backends.trust import CHECK_TEXT, fingerprint
from localspec.catalog import Catalog
from localspec.controller import AutoController, Controller, FixedController
from localspec.cost_model import CalibrationCache, PassTimes, calibrate
from localspec.decoder import SpeculativeDecoder
from localspec.drafters.base import Drafter
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.ngram import NgramDrafter
from localspec.errors import LocalspecError, UsageError, VocabularyMismatch
from localspec.home import home
from localspec.rounds import Round
from localspec.sampling import SamplingParams
from localspec.text import TextAssembler

log = logging.getLogger("localspec")

DEFAULT_CTX = 8192
"""Context size where none is asked for, if the model was trained for as much."""

DraftLength = int | str
Report = Callable[[str, "float | None"], None]
"""Progress: what is being done, and the fraction done if it is known. Raising from it cancels."""


@dataclass(frozen=True, slots=True)
class PairOptions:
    """How to load; see ``LLM``."""

    backend: str = "auto"
    n_ctx: int | None = None
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    kv_type: str = "f16"


class Pair:
    """A target, its drafters, and what was learned about their cost and acceptance. Not thread-safe: one owner.

    Attributes:
        warnings: one-line remarks from loading that a user should see.
    """

    def __init__(self, path: Path, draft: Sequence[str] | str | None, options: PairOptions, report: Report) -> None:
        self.options = options
        self.warnings: list[str] = []
        self._models: dict[str, tuple[Model, Context]] = {}
        self._drafters: list[Drafter] = []
        self._acceptance: dict[str, SourceAcceptance] = {}
        self._draft_times: dict[str, PassTimes] = {}
        self._last: Controller | None = None
        self.target = self._load(path, report)
        try:
            n_ctx = options.n_ctx or min(DEFAULT_CTX, self.target.n_ctx_train or DEFAULT_CTX)
            if self.target.n_ctx_train and n_ctx > self.target.n_ctx_train:
                self.warnings.append(
                    f"--ctx {n_ctx} exceeds the {self.target.n_ctx_train} tokens this model was trained for; "
                    "answers far into the context may degrade"
                )
            self.context = self.target.new_context(n_ctx)
            self.times = self._calibrate(self.target, self.context, report)
            self.set_draft(draft, report)
        except BaseException:
            self.close()
            raise

    def _load(self, path: Path, report: Report) -> Model:
        cancel: list[BaseException] = []

        def progress(fraction: float) -> bool:
            try:
                report(f"loading {path.name}", fraction)
            except BaseException as error:  # carried around the C code that calls this
                cancel.append(error)
                return False
            return True

        try:
            return backends.load(
                path,
                self.options.backend,
                n_threads=self.options.n_threads,
                n_gpu_layers=self.options.n_gpu_layers,
                kv_type=self.options.kv_type,
                progress=progress,
                say=lambda line: report(line, None),
                warn=self.warnings.append,
            )
        except LocalspecError:
            if cancel:
                raise cancel[0] from None
            raise

    def _calibrate(self, model: Model, context: Context, report: Report) -> PassTimes:
        cache = CalibrationCache(home() / "calibration")
        key = {
            "machine": cpu_name(),
            "engine": model.engine,
            "device": model.capabilities.device,
            "file": fingerprint(model.path),
            "threads": str(model.n_threads),
            "kv": self.options.kv_type,
        }
        times = cache.get(key)
        if times is None:
            report(f"measuring what a pass of {model.path.name} costs here (once)", None)
            text = model.tokenize(CHECK_TEXT, add_special=True) or [0]
            times = calibrate(context, text, tick=lambda: report("measuring", None))
            cache.put(key, times)
        return times

    # -- drafters -----------------------------------------------------------------------------------------------

    def set_draft(self, spec: Sequence[str] | str | None, report: Report) -> None:
        """Replace the drafters; on an error the ones in use stay.

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
        n_models = 0
        try:
            for name in dict.fromkeys(names):
                if name == "ngram":
                    drafters.insert(0, NgramDrafter())  # free guesses are asked first
                    continue
                try:
                    path = Catalog.load().resolve(name)
                    key = str(path.resolve())
                    if key in self._models:
                        fresh[key] = self._models[key]
                    else:
                        fresh[key] = self._load_draft(path, report)
                except VocabularyMismatch as error:
                    if not automatic:
                        raise
                    self.warnings.append(f"{error}; drafting with n-grams only")
                    continue
                model, context = fresh[key]
                n_models += 1
                source = "model" if n_models == 1 else f"model{n_models}"
                times[source] = self._calibrate(model, context, report)
                drafters.append(DraftModelDrafter(context, source))
        except BaseException:
            for key, (model, context) in fresh.items():
                if key not in self._models:
                    _close(model, context)
            raise
        for key, (model, context) in self._models.items():
            if key not in fresh:
                _close(model, context)
        for drafter in self._drafters:
            if not isinstance(drafter, DraftModelDrafter):
                drafter.close()
        self._models, self._drafters, self._draft_times, self._last = fresh, drafters, times, None
        self._acceptance = {}

    def _load_draft(self, path: Path, report: Report) -> tuple[Model, Context]:
        model = self._load(path, report)
        try:
            self._check_draft(model)
            return model, model.new_context(self.context.n_ctx)
        except BaseException:
            model.close()
            raise

    def _check_draft(self, draft: Model) -> None:
        difference = self.target.vocab.difference(draft.vocab)
        if difference:
            raise VocabularyMismatch(f"{draft.path.name} cannot draft for {self.target.path.name}: {difference}")
        if draft.size_bytes > self.target.size_bytes:
            self.warnings.append(
                f"the draft {draft.path.name} is larger than the target {self.target.path.name}: "
                "it will cost more than it saves"
            )

    @property
    def draft_names(self) -> list[str]:
        """Names of the drafters in use, in the order they are asked."""
        files = iter([model.path.name.removesuffix(".gguf") for model, _ in self._models.values()])
        return [next(files) if isinstance(drafter, DraftModelDrafter) else drafter.source for drafter in self._drafters]

    # -- decoding -----------------------------------------------------------------------------------------------

    def controller(self, draft_length: DraftLength) -> Controller:
        """A controller for one request: ``auto``, or a fixed number of tokens (0: plain)."""
        if draft_length != "auto":
            return FixedController(int(draft_length), self.times, has_model=bool(self._models))
        if not self._drafters:
            return FixedController(0, self.times)
        auto = AutoController(self.times, self._draft_times, self._acceptance)
        for drafter in self._drafters:
            auto.register(drafter.source)
        return auto

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
    ) -> Iterator[Round]:
        """Prefill and decode; see ``SpeculativeDecoder``. ``on_prefilled`` gets the number of cached prompt tokens."""
        controller = self._last = self.controller(draft_length)
        plain = isinstance(controller, FixedController) and controller.length == 0
        decoder = SpeculativeDecoder(self.context, [] if plain else self._drafters, controller)
        on_prefilled(decoder.prefill(prompt, cancelled))
        text = TextAssembler(self.target.vocab, params.stop)
        for round_ in decoder.rounds(prompt, params, text, cancelled=cancelled):
            round_.draft_texts = [self.token_text(token) for token in round_.draft.ids]
            yield round_

    def token_text(self, token: int) -> str:
        """A token on its own, for display."""
        vocab = self.target.vocab
        if token >= vocab.n_tokens:
            return f"<{token}>"
        return vocab.token_bytes(token).decode("utf-8", "replace") or vocab.token_text(token)

    def close(self) -> None:
        """Free everything; safe to call twice."""
        for drafter in self._drafters:
            drafter.close()
        for model, context in self._models.values():
            _close(model, context)
        self._models, self._drafters = {}, []
        if hasattr(self, "context"):
            self.context.close()
        self.target.close()


def _close(model: Model, context: Context) -> None:
    context.close()
    model.close()
