"""Loading the models of a pair: with the right engine, and the copy of a draft that drafts faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localspec import backends, draft_choice
from localspec.backends.base import Context, Model
from localspec.backends.machine import cpu_name
from localspec.backends.repack import lighter_copy
from localspec.backends.trust import fingerprint
from localspec.cost_model import PassTimes
from localspec.errors import Cancelled, LocalspecError, VocabularyMismatch
from localspec.home import home
from localspec.ledger import Ledger

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
    light_draft: bool = True
    remember: bool = True
    draft_backend: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What a draft is loaded for.

    Attributes:
        model: the target.
        n_ctx: size of its context [tokens].
        times: what its passes cost.
    """

    model: Model
    n_ctx: int
    times: PassTimes


class Loader:
    """Loads models as the options say.

    Args:
        options: how to load.
        warnings: takes one-line remarks that a user should see.
    """

    def __init__(self, options: PairOptions, warnings: list[str]) -> None:
        self.options = options
        self.warnings = warnings
        self._choices = Ledger(home() / "drafts", 1)

    def load(self, path: Path, report: Report, *, backend: str | None = None, check: bool = True) -> Model:
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
                n_threads=self.options.n_threads,
                n_gpu_layers=self.options.n_gpu_layers,
                kv_type=self.options.kv_type,
                progress=progress,
                say=lambda line: report(line, None),
                warn=self.warnings.append,
                check=check,
            )
        except LocalspecError:
            if cancel:
                raise cancel[0] from None
            raise

    def load_draft(self, path: Path, target: Target, report: Report) -> tuple[Model, Context]:
        """Load a draft model: the copy of it that drafts faster here; see ``draft_choice``.

        Raises:
            VocabularyMismatch: it numbers its tokens differently from the target.
        """
        key = {
            "engine": target.model.engine,
            "machine": cpu_name(),
            "threads": str(target.model.n_threads),
            "target": fingerprint(target.model.path),
            "draft": fingerprint(path),
        }
        if self.options.draft_backend is not None:
            key["draft engine"] = self.options.draft_backend
        known = self._choices.get(key) if self.options.light_draft else None
        if known is not None and known.get("light"):
            light = lighter_copy(path, key["draft"], lambda line: report(line, None))
            if light is not None:
                return self._open_draft(light, target, report, check=False)
        published = self._open_draft(path, target, report)
        model = published[0]
        on_cpu = model.capabilities.device == "cpu" and not model.capabilities.batch_invariant
        if known is not None or not on_cpu or not self.options.light_draft:
            return published
        lighter: tuple[Model, Context] | None = None
        try:
            light = lighter_copy(path, key["draft"], lambda line: report(line, None))
            if light is None:
                return published
            lighter = self._open_draft(light, target, report, check=False)
            report(f"comparing {path.name} with its lighter copy (once)", None)
            tokens = draft_choice.tokens_of(target.model)
            tops = draft_choice.top_tokens(target.model, tokens)
            found = [
                draft_choice.candidate(each, tokens, tops, target.times, target.model.n_vocab)
                for each, _ in (published, lighter)
            ]
            prefers_light = found[1].rate > found[0].rate
            figures = {"published": found[0].as_dict(), "lighter": found[1].as_dict()}
            self._choices.put(key, {"light": prefers_light, **figures})
        except LocalspecError as error:
            if lighter is not None:
                close_both(*lighter)
            if isinstance(error, Cancelled):
                close_both(*published)
                raise
            # Not worth failing over: an engine that cannot run the copy drafts with the published file.
            return published
        except BaseException:
            for each in (published, lighter):
                if each is not None:
                    close_both(*each)
            raise
        close_both(*(published if prefers_light else lighter))
        return lighter if prefers_light else published

    def _open_draft(self, path: Path, target: Target, report: Report, *, check: bool = True) -> tuple[Model, Context]:
        model = self.load(path, report, backend=self.options.draft_backend, check=check)
        try:
            self._check_draft(model, target.model)
            return model, model.new_context(target.n_ctx)
        except BaseException:
            model.close()
            raise

    def _check_draft(self, draft: Model, target: Model) -> None:
        difference = target.vocab.difference(draft.vocab)
        if difference:
            raise VocabularyMismatch(f"{draft.path.name} cannot draft for {target.path.name}: {difference}")
        if draft.size_bytes > target.size_bytes:
            self.warnings.append(
                f"the draft {draft.path.name} is larger than the target {target.path.name}: "
                "it will cost more than it saves"
            )


def close_both(model: Model, context: Context) -> None:
    """Free a context, then its model."""
    context.close()
    model.close()
