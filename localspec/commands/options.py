"""What a command line asks of a model, checked before anything is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.errors import UsageError
from localspec.values import KV_CACHE_TYPES, MAX_COUNT, MAX_THREADS

if TYPE_CHECKING:
    from localspec.llm import LLM
    from localspec.model_files.catalog import Entry
    from localspec.sampling.sampling import SamplingParams

Report = Callable[[str, "float | None"], None]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options that ``chat`` and ``generate`` share.

    Attributes:
        model: catalogue name, path or hub address; None takes the catalogue's default pair.
        draft: what ``--draft`` was given, in order; empty is ``auto``.
        sampling: what was given of temperature, top_k, top_p, min_p, repeat_penalty, seed, max_tokens and stop; the
            rest comes from the catalogue's chat defaults for the model.
    """

    model: str | None = None
    draft: Sequence[str] = ()
    draft_length: str = "auto"
    backend: str = "auto"
    draft_backend: str | None = None
    ctx: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    kv_cache: str = "f16"
    light_draft: bool = True
    idle: bool = True
    system: str | None = None
    verbose: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, text in (("MODEL", self.model), ("--system", self.system)):
            check_text(text, name)
        for text in (*self.draft, *self.sampling.get("stop", ())):
            check_text(text, "an option")
        for name, value, least, most in (
            ("--ctx", self.ctx, 1, MAX_COUNT),
            ("--threads", self.threads, 1, MAX_THREADS),
            ("--gpu-layers", self.gpu_layers, 0, MAX_COUNT),
            ("--max-tokens", self.sampling.get("max_tokens"), 1, MAX_COUNT),
            ("--top-k", self.sampling.get("top_k"), 0, MAX_COUNT),
        ):
            if value is not None and not least <= value <= most:
                raise UsageError(f"{name} must be in {least}..{most}, not {value}")
        if self.kv_cache not in KV_CACHE_TYPES:
            raise UsageError(f"--kv-cache must be {', '.join(KV_CACHE_TYPES)}, not {self.kv_cache!r}")
        self.length()
        self.drafters()
        self.params({})

    def length(self) -> int | str:
        """The draft length: ``auto`` or a number."""
        return draft_length(self.draft_length)

    def drafters(self) -> str | list[str] | None:
        """The draft in the form that ``LLM`` takes."""
        return draft_spec(self.draft)

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters: what was asked for, over the model's own defaults, over greedy."""
        from localspec.sampling.sampling import CHAT_SETTINGS, SamplingParams

        known = {name: value for name, value in defaults.items() if name in CHAT_SETTINGS}
        return SamplingParams(**(known | dict(self.sampling)))

    @property
    def draft_may_come_late(self) -> bool:
        """Whether nothing was asked for that takes a draft model from the first token on."""
        return self.drafters() == "auto" and self.length() == "auto" and self.idle

    def open(self, report: Report, *, late: list[Entry] | None = None) -> LLM:
        """Load the model and its drafters; see ``ensure_model`` for where no model was named.

        Args:
            report: takes progress.
            late: the draft model is left out, for ``LateDraft`` to bring it: takes what has to be fetched for that.

        Raises:
            LocalspecError: they cannot be had.
        """
        from localspec.llm import LLM
        from localspec.model_files.catalog import Catalog
        from localspec.system.home import offline

        if self.verbose:
            from localspec.backends.noise import engine_log

            engine_log.verbose = True
        if late is not None and self.model is None and not offline():
            late += [entry for entry in Catalog.load().default_pair()[1:] if not entry.present]
        model = ensure_model(self.model, self.draft if late is None else ["ngram"])
        return LLM(
            model,
            self.drafters() if late is None else "ngram",
            draft_length=self.length(),
            backend=self.backend,
            draft_backend=self.draft_backend,
            n_ctx=self.ctx,
            n_threads=self.threads,
            n_gpu_layers=self.gpu_layers,
            kv_cache_type=self.kv_cache,
            light_draft=self.light_draft,
            idle=self.idle,
            progress=report,
        )


def answer_form(json_schema: str | None, grammar: str | None) -> dict[str, Any]:
    """``--json-schema`` and ``--grammar`` as given -> the sampling parameters that say so.

    Raises:
        UsageError: a file cannot be read, or the schema in it is not JSON.
    """
    form: dict[str, Any] = {}
    if json_schema is not None:
        text = _read(json_schema, "--json-schema")
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--json-schema {json_schema} is not JSON: {error}") from None
        form["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if grammar is not None:
        form["grammar"] = _read(grammar, "--grammar")
    return form


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise UsageError(f"{option} {path} is not a text file in UTF-8") from None


def draft_length(text: str) -> int | str:
    """``auto``, or a number of tokens.

    Raises:
        UsageError: neither.
    """
    if text == "auto":
        return text
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"the draft length must be auto or a number, not {text!r}") from None
    from localspec.controllers.fixed import FixedController

    return FixedController(value).length


def draft_spec(names: Sequence[str]) -> str | list[str] | None:
    """``--draft`` as given -> the ``draft`` argument of ``LLM``.

    Raises:
        UsageError: ``auto`` or ``none`` together with others.
    """
    if not names:
        return "auto"
    if len(names) > 1 and {"auto", "none"} & set(names):
        raise UsageError("--draft auto and --draft none stand alone; several drafters are named one by one")
    for name in names:
        close = get_close_matches(name, ("auto", "none", "ngram"), n=1) if name.isalpha() else []
        if close and name != close[0]:
            raise UsageError(f"no draft {name!r}: did you mean {close[0]}?")
    if names[0] == "none":
        return None
    return names[0] if names[0] == "auto" else list(names)


def check_text(text: str | None, name: str) -> None:
    """Refuse text from the command line that was not valid UTF-8.

    Raises:
        UsageError: it was not.
    """
    if text is not None and any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError(f"{name} is not valid UTF-8")


def ensure_model(model: str | None, draft: Sequence[str]) -> str:
    """The model to load; without a name the default pair, which is fetched where it is not on the disk yet.

    Raises:
        ModelFileError: it is not there and may not be fetched.
        DownloadError: it cannot be fetched.
    """
    if model is not None:
        return model
    from localspec.errors import ModelFileError
    from localspec.model_files.catalog import Catalog
    from localspec.system.home import offline

    target, *drafts = Catalog.load().default_pair()
    wanted = [target, *(drafts if draft_spec(draft) == "auto" else [])]
    missing = [entry for entry in wanted if not entry.present]
    if missing and offline():
        if not target.present:
            raise ModelFileError(
                f"the default model {target.name} is not on this disk and LOCALSPEC_OFFLINE forbids fetching it; "
                "name a .gguf file, or pull it elsewhere and set LOCALSPEC_HOME"
            )
        return target.name
    if missing:
        _fetch(target, missing)
    return target.name


def _fetch(target: Entry, missing: Sequence[Entry]) -> None:
    from localspec.commands.files import pull
    from localspec.errors import DownloadError

    names = " and ".join(entry.name for entry in missing)
    size = sum(entry.bytes for entry in missing) / 1e9
    print(f"fetching {names} ({size:.1f} GB), once", file=sys.stderr, flush=True)
    for entry in missing:
        try:
            pull(entry.name)
        except DownloadError as error:
            if entry is target:
                raise
            print(f"going on without {entry.name}: {error}", file=sys.stderr, flush=True)
