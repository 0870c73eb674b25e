"""Loading the models of a pair: with the right engine, and the copy of a draft that drafts faster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from localspec import backends
from localspec.backends.base import Model
from localspec.backends.draft_head import DraftHead
from localspec.backends.heads import load_head
from localspec.backends.published_heads import load_published
from localspec.backends.repack import lightening, lighter_copy
from localspec.backends.trust import fingerprint, verdict_key, verdicts
from localspec.controllers.calibration import calibrating, calibrating_quickly, curve_key, curves, growth
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.passes import WHOLE, PassKind
from localspec.errors import Cancelled, LocalspecError, VocabularyMismatch
from localspec.model_files.head_kinds import names_published_head
from localspec.runtime import draft_choice
from localspec.runtime.engine_choice import ordered
from localspec.runtime.load_options import LoadOptions
from localspec.runtime.state import DecodingState
from localspec.system.files import is_same_file
from localspec.system.home import home
from localspec.system.json_store import JsonStore
from localspec.system.machine import cpu_name
from localspec.system.steps import Steps, exhaust

Report = Callable[[str, "float | None"], None]
"""Progress: what is being done, and the fraction done if it is known. Raising from it cancels."""


class Remarks(list[str]):
    """One-line remarks that a user should see, each once, however often a model is loaded."""

    def append(self, line: str) -> None:
        if line not in self:
            super().append(line)


class Loader:
    """Loads models as the options say.

    Args:
        options: how to load.
        warnings: takes one-line remarks that a user should see.
    """

    def __init__(self, options: LoadOptions, warnings: list[str]) -> None:
        self.options = options
        self.parallel = 1
        self.warnings = warnings
        self._choices = JsonStore(home() / "drafts", 2)

    def load_target(self, path: Path, report: Report) -> Model:
        """Load the target, which alone is placed on devices as the options say."""
        return self.load(path, report, engine=self.options.target)

    def load(
        self,
        path: Path,
        report: Report,
        *,
        backend: str | None = None,
        check: bool = True,
        engine: dict[str, Any] | None = None,
    ) -> Model:
        """Load a file; see ``backends.load``. An exception from ``report`` cancels, and is raised here."""
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
                backend or self.options.backend,
                **(engine or self.options.engine),
                progress=progress,
                say=lambda line: report(line, None),
                warn=self.warnings.append,
                check=check,
                put_off=self.options.idle,
                order=partial(self._in_order, path),
            )
        except LocalspecError:
            if cancel:
                raise cancel[0] from None
            raise

    def times(
        self, model: Model, n_ctx: int, report: Report, passes: PassKind = WHOLE, called: str | None = None
    ) -> PassTimes:
        """The cost model of a model's passes: as measured at an earlier load, or measured now.

        Where there will be idle time a first, rough one is enough.
        ``called``: the model's name for people; None is that of its file.
        """
        idle, key = self.options.idle, curve_key(model, self.options.kv_cache_type)
        times = curves().get(key)
        if times is None or (times.noisy and not idle and curves().is_worth_waiting_for(key)):
            how = "a first time, briefly" if idle else "once" if times is None else "again"
            report(f"measuring what a pass of {called or model.path.name} costs here ({how})", None)
            measuring = calibrating_quickly if idle else calibrating
            times = exhaust(measuring(model, n_ctx, passes), tick=lambda: report("measuring", None))
            curves().put(key, times)  # which keeps the best of what it knows
        times.growth = growth(model, self.options.kv_cache_type)
        return times

    def forget_if_wrong(self, model: Model, times: PassTimes) -> None:
        """Have a cost model measured again at the next load that hundreds of passes contradicted."""
        if not times.fits:
            with suppress(OSError):  # the file is gone
                curves().drop(curve_key(model, self.options.kv_cache_type))

    def _in_order(self, path: Path, names: list[str], on_gpu: bool) -> list[str]:
        threads, kv_type = self.options.n_threads, self.options.kv_cache_type
        return ordered(names, path, n_threads=threads, kv_type=kv_type, on_gpu=on_gpu, warn=self.warnings.append)

    def load_draft(self, path: Path, state: DecodingState, report: Report) -> Model:
        """Load a draft model: the copy of it that drafts faster here; see ``draft_choice``.

        Raises:
            VocabularyMismatch: it numbers its tokens differently from the target.
        """
        known = self._choices.get(self._choice_key(path, state)) if self.options.light_draft else None
        if known is not None and known.get("light") and (lighter := self._open_lighter(path, state, report)):
            return lighter
        published = self._open_draft(path, state, report, check=not self.options.idle or self._is_known_wrong(path))
        if self.options.idle or not self.may_be_lighter(path, published, state):
            return published
        try:
            prefers_light = exhaust(self.choosing(path, published, state, report), lambda: report("measuring", None))
            lighter = self._open_lighter(path, state, report) if prefers_light else None
        except BaseException:
            published.close()
            raise
        if lighter is None:
            return published
        published.close()
        return lighter

    def load_head(self, path: Path, target: Model, report: Report) -> DraftHead:
        """Load a head on the engine of draft models, or else of its target; a published one on one that computes those.

        Raises:
            UsageError: it is for another model.
            ModelFileError, EngineError: as when loading a model.
        """
        wanted = self.options.draft_backend
        if is_same_file(path, target.path) or names_published_head(path):
            return load_published(
                path,
                target,
                engine=wanted,
                n_threads=self.options.n_threads,
                n_gpu_layers=self.options.n_gpu_layers,
                say=lambda line: report(line, None),
            )
        return load_head(
            path,
            target.path,
            target.backend if wanted in (None, "auto") else wanted,
            n_threads=self.options.n_threads,
            n_gpu_layers=self.options.n_gpu_layers,
            say=lambda line: report(line, None),
            warn=self.warnings.append,
        )

    def _is_known_wrong(self, path: Path) -> bool:
        """Whether an engine was found to compute a draft wrongly: then one, or a copy, that is right is looked for."""
        backend, digest = self.options.draft_backend or self.options.backend, fingerprint(path)
        names = backends.candidates(self.options.n_gpu_layers) if backend == "auto" else [backend]
        found = (verdicts().get(verdict_key(name, self.options.engine, digest)) for name in names)
        return any(verdict is not None and not verdict["holds"] for verdict in found)

    def may_be_lighter(self, path: Path, model: Model, state: DecodingState) -> bool:
        """Whether it is not known yet if a lighter copy of a draft would draft faster."""
        on_cpu = model.capabilities.device == "cpu" and not model.capabilities.batch_invariant
        known = self._choices.get(self._choice_key(path, state)) is not None
        return self.options.light_draft and on_cpu and model.path == path and not known

    def choosing(self, path: Path, published: Model, state: DecodingState, report: Report) -> Steps[bool]:
        """Make the lighter copy of a draft, compare it with the published file, and remember which drafts faster.

        Returns:
            Whether the copy does.
        """
        key = self._choice_key(path, state)
        lighter: Model | None = None
        try:
            light = yield from lightening(path, key["draft"], lambda line: report(line, None))
            if light is None:
                return False
            lighter = self._open_draft(light, state, report, check=False)
            report(f"comparing {path.name} with its lighter copy (once)", None)
            tokens = draft_choice.tokens_of(state.target)
            tops = yield from draft_choice.reading(state.target, tokens)
            copies = (published, lighter)
            one, two = yield from draft_choice.measuring(copies, tokens, tops, state.times, state.target.n_vocab)
        except Cancelled:
            raise
        except LocalspecError:
            return False  # not worth failing over: an engine that cannot run the copy drafts with the published file
        finally:
            if lighter is not None:
                lighter.close()
        light_is_faster = two.speedup > one.speedup
        self._choices.put(key, {"light": light_is_faster, "published": one.as_dict(), "lighter": two.as_dict()})
        return light_is_faster

    def _open_lighter(self, path: Path, state: DecodingState, report: Report) -> Model | None:
        light = lighter_copy(path, fingerprint(path), lambda line: report(line, None))
        return None if light is None else self._open_draft(light, state, report, check=False)

    def _choice_key(self, path: Path, state: DecodingState) -> dict[str, str]:
        key = {
            "engine": state.target.engine,
            "machine": cpu_name(),
            "threads": str(state.target.n_threads),
            "target": fingerprint(state.target.path),
            "draft": fingerprint(path),
        }
        if self.options.draft_backend is not None:
            key["draft engine"] = self.options.draft_backend
        return key

    def _open_draft(self, path: Path, state: DecodingState, report: Report, *, check: bool = True) -> Model:
        model = self.load(path, report, backend=self.options.draft_backend, check=check)
        try:
            self._check_draft(model, state.target)
        except BaseException:
            model.close()
            raise
        return model

    def _check_draft(self, draft: Model, target: Model) -> None:
        difference = target.vocab.difference(draft.vocab)
        if difference:
            raise VocabularyMismatch(f"{draft.path.name} cannot draft for {target.path.name}: {difference}")
        if draft.size_bytes > target.size_bytes:
            self.warnings.append(
                f"the draft {draft.path.name} is larger than the target {target.path.name}: "
                "it will cost more than it saves"
            )


def giving_way(stopped: Callable[[], bool]) -> Report:
    """What makes a load end with ``Cancelled`` once it is to stop."""

    def report(what: str, fraction: float | None) -> None:
        if stopped():
            raise Cancelled(f"{what}: stopped")

    return report
