"""What a command line asks of a model, checked before anything is loaded."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from localspec.backends.llama.ggml import engine_log
from localspec.backends.placement import Placement
from localspec.commands import files, recommend
from localspec.engine.loading import Report
from localspec.engine.options import LoadOptions, draft_specs, with_free
from localspec.engine.request import DraftLength, checked_length
from localspec.errors import MAX_COUNT, DownloadError, ModelFileError, UsageError, check_text, checked_whole
from localspec.heads.sources import found_heads
from localspec.model_files.catalog import Catalog, Entry, short_name
from localspec.model_files.sources.base import size_text
from localspec.sampling.sampling import CHAT_SETTINGS, SamplingParams
from localspec.spec_decode.drafters.names import AUTOMATIC, CORPUS, is_corpus, shown
from localspec.system.files import decoded, offline
from localspec.system.process import on_interrupt
from localspec.system.terminal import Progress

if TYPE_CHECKING:
    from localspec.engine.pair import Pair
    from localspec.llm import LLM

_Result = TypeVar("_Result")


class ThinkOptions(TypedDict):
    """Arguments of ``LLM.rounds`` that the chat can change."""

    think: str
    thinking_budget: int | None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a command that runs a model."""

    model: str | None = None  # catalogue name, path or hub address; None takes the catalogue's default pair
    draft: Sequence[str] = ()  # what ``--draft`` was given, in order; empty is ``auto``
    draft_only: bool = False  # whether n-grams are left out where models were named
    draft_length: str = "auto"  # ``auto`` or a number of tokens
    load: LoadOptions = field(default_factory=LoadOptions)  # how to load
    system: str | None = None  # the system prompt; None is the model's own
    yes: bool = False  # whether models that are not here are fetched without asking
    verbose: bool = False  # whether to show what the engine logs
    sampling: Mapping[str, Any] = field(default_factory=dict)  # as given; the rest is the catalogue's for the model
    think: str = "auto"  # how questions are asked; see ``LLM.rounds``
    think_budget: int | None = None  # most tokens of thinking
    from_file: Mapping[str, Any] = field(default_factory=dict)  # options above that are config.toml's, by their name

    @classmethod
    def read(cls, model: str | None, given: Mapping[str, Any], sampling: Mapping[str, Any]) -> RunOptions:
        """The shared options as a command line gives them; ``UsageError``: a value makes no sense."""
        rest: dict[str, Any] = {"idle": False, **given}
        for name, option, least in (("n_ctx", "--ctx", 1), ("n_gpu_layers", "--gpu-layers", 0)):
            if name in rest:
                rest[name] = _whole_or_auto(option, rest[name], least)
        if "prompt_cache" in rest:
            rest["prompt_cache_bytes"] = read_size("--prompt-cache", rest.pop("prompt_cache"), 0)
        from_file = dict(rest.pop("from_file", {}))
        usual = from_file.pop("model", None)
        if model is None and usual is not None:
            model = from_file["model"] = usual

        def taken(options: type[Any]) -> dict[str, Any]:
            found = {field.name: rest.pop(field.name) for field in fields(options) if field.name in rest}
            return {name: value for name, value in found.items() if value is not None and value != []}

        placement = {name: value for name, value in taken(Placement).items() if value is not False}
        load = LoadOptions(placement=Placement(**placement), **taken(LoadOptions))
        sampling = {**sampling, **taken(SamplingParams)}
        if "stop" in sampling:
            sampling["stop"] = tuple(sampling["stop"])
        draft = rest.pop("draft", None) or ()
        return cls(model=model, draft=draft, load=load, sampling=sampling, from_file=from_file, **rest)

    def __post_init__(self) -> None:
        for name, text in (("MODEL", self.model), ("--system", self.system)):
            check_text(text, name)
        for text in (*self.draft, *self.sampling.get("stop", ())):
            check_text(text, "an option")
        self.length()
        self.drafters()
        self.params({})

    def length(self) -> DraftLength:
        return checked_length(self.draft_length)

    def drafters(self) -> list[str]:
        """``["auto"]`` or names of drafters, [] for none; corpora can stand with ``auto``."""
        named = draft_specs(self.draft or "auto")
        return named if self.draft_only else with_free(named)

    def corpora(self) -> list[str]:
        return [name for name in self.drafters() if is_corpus(name)]

    def with_corpus(self, path: str) -> RunOptions:
        """The same with one corpus more."""
        spec = f"{CORPUS}:{path}"
        return replace(self, draft=tuple(dict.fromkeys([*self.drafters(), spec])))

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters as asked, over the model's defaults, over greedy."""
        known = {name: value for name, value in defaults.items() if name in CHAT_SETTINGS}
        return SamplingParams(**(known | dict(self.sampling)))

    @property
    def asked(self) -> ThinkOptions:
        return {"think": self.think, "thinking_budget": self.think_budget}

    @property
    def draft_may_come_late(self) -> bool:
        """Whether no option needs a draft model from the first token on."""
        return self.drafters() == ["auto", *self.corpora()] and self.length() == "auto" and self.load.idle

    def for_measuring(self, **load: Any) -> RunOptions:
        """The same with other options of loading, no idle work and nothing that earlier runs learned."""
        return replace(self, load=replace(self.load, remember=False, prefix_cache_bytes=0, idle=False, **load))

    def open(self, report: Report, *, late: list[Entry] | None = None) -> LLM:
        """Load the model and its drafters; ``late`` leaves head and draft model to ``LateDraft`` and takes the entries
        it has to fetch."""
        from localspec.llm import LLM

        self.set_up_logging()
        corpora = self.corpora()
        drafters = self.drafters() if late is None else [*AUTOMATIC, *corpora]
        model = ensure_model(self.model, drafters, late=late is not None, yes=self.yes)
        if late is not None and self.model is None and not offline():
            catalog = Catalog.load()
            late += [catalog[name] for name in catalog[model].draft[:1] if not catalog[name].present]
        return LLM(model, drafters, draft_length=self.length(), progress=report, **self.load.as_arguments())

    @contextmanager
    def opened(self, *, chats: bool = True, tell: bool = False) -> Iterator[LLM]:
        """The loaded pair, with progress and remarks on standard error; closed when the block ends.

        ``tell``: say what was chosen even without a terminal.
        """
        with Progress() as progress:
            llm = self.open(progress.report)
        with llm:
            about = llm.context_info()
            if self.load.n_ctx is None and (tell or about["short"] or sys.stderr.isatty()):
                print(f"localspec: context {about['n_ctx']:,} tokens: {about['reason']}", file=sys.stderr)
            for warning in [*llm.warnings, *(base_model_notes(llm) if chats else ())]:
                print(f"localspec: {warning}", file=sys.stderr)
            yield llm

    def set_up_logging(self) -> None:
        if self.verbose:
            engine_log.verbose = True


class Watch:
    """Progress, and a Ctrl-C that stops the work at the next report."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.stopped = threading.Event()

    def report(self, what: str, fraction: float | None) -> None:
        """Show progress; raise ``KeyboardInterrupt`` once ``stopped`` is set."""
        self.check()
        self._report(what, fraction)

    def check(self) -> Literal[False]:
        """Raise ``KeyboardInterrupt`` once ``stopped`` is set."""
        if self.stopped.is_set():
            raise KeyboardInterrupt
        return False

    def call(self, llm: LLM, work: Callable[[Pair], _Result]) -> _Result:
        """``LLM.run`` that Ctrl-C ends between two passes."""
        with on_interrupt(self.stopped.set):
            result = llm.run(work)
        self.check()
        return result


def answer_form(json_schema: str | None, grammar: str | None) -> dict[str, Any]:
    """``--json-schema`` and ``--grammar`` as sampling parameters; ``UsageError``: a file is not to be read."""
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
        return decoded(Path(path).read_bytes()).replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise UsageError(f"{option} {path} is not a UTF-8 text file") from None


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def read_size(option: str, text: str, least: int = 1) -> int:
    """A size such as ``8GB``, ``512MiB`` or a number of bytes; a ``UsageError`` if it is none."""
    match = _SIZE.fullmatch(text.strip())
    size = (
        round(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ")) if match else -1
    )
    if not least <= size < 1 << 60:
        raise UsageError(f"{option} must be a size such as 8GB or 512MB, not {text!r:.40}")
    return size


def _whole_or_auto(option: str, text: str, least: int) -> int | None:
    """``auto|N`` as typed; None is auto. ``UsageError``: neither."""
    if text == "auto":
        return None
    try:
        return checked_whole(option, int(text), least, MAX_COUNT)
    except ValueError:
        raise UsageError(f"{option} must be auto or a whole number, not {text[:40]!r}") from None


def called(drafter: str) -> str:
    """A drafter as people read it, a model by its short name."""
    name = shown(drafter)
    return short_name(drafter) if name == drafter else name


def joined(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def base_model_notes(llm: LLM) -> list[str]:
    """A remark on a model that was not trained to chat."""
    entry = Catalog.load().of_path(llm.model_path)
    if entry is None or not entry.base:
        return []
    return [f"{entry.name} is {entry.note}; localspec generate --raw continues text"]


def ensure_model(model: str | None, drafters: Sequence[str], *, late: bool = False, yes: bool = False) -> str:
    """The model to load. What is not on disk is fetched, after a question at a terminal; without one, the default pair
    is fetched, no draft model where a head is on disk, and a named model is not (``ModelFileError``).

    ``late``: the draft model is left to ``LateDraft``. ``yes``: nothing is asked.
    """
    at_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    asks = at_terminal and not yes and not offline()
    named = [entry for name in dict.fromkeys([model, *drafters]) if name is not None and (entry := _known(name))]
    missing = [entry for entry in named if not entry.present]
    if missing and not offline() and (asks or yes):
        if asks and files.asked(missing) == "n":
            raise ModelFileError(f"{missing[0].name} is not on this disk; run: localspec pull {missing[0].name}")
        _fetch(missing[0], missing)
    if model is not None:
        return model
    target, *drafts = Catalog.load().default_pair()
    others = [entry for entry in drafts if not entry.present and (late or "auto" in drafters)]
    if target.present:
        if others and not (late or offline() or _has_head(target)) and (not asks or files.wants_draft(others)):
            _fetch(target, others)
        return target.name
    if offline():
        raise ModelFileError(
            f"the default model {target.name} is not on this disk and LOCALSPEC_OFFLINE forbids fetching it; "
            "name a .gguf file, or pull it elsewhere and set LOCALSPEC_HOME"
        )
    if asks:
        later = size_text(sum(entry.bytes for entry in others))
        more = f" ({later} more for a draft model, if that makes answers faster here)" if others else ""
        larger = larger_choice(target) if late else None
        answer = files.asked([target], more, larger[1] if larger else "")
        if answer == "n":
            raise ModelFileError(f"{target.name} was not fetched; localspec list --all shows smaller models")
        if larger and answer == "l":
            _fetch(larger[0], [larger[0]])
            files.note(f"from now on: localspec chat {larger[0].name}")
            return larger[0].name
    _fetch(target, [target])
    if others and not late:
        if _has_head(target):
            names, size = " ".join(entry.name for entry in others), sum(entry.bytes for entry in others) / 1e9
            files.note(f"a head guesses for it; localspec pull {names} fetches the draft model ({size:.1f} GB) as well")
        else:
            _fetch(target, others)
    return target.name


def larger_choice(target: Entry) -> tuple[Entry, str] | None:
    """What else would fit at a first chat: the largest model that answers fast enough, one that was checked if there is
    one, and a line on it."""
    larger = [each for each in recommend.look()[0] if each.answers and each.bytes > target.bytes]
    if not larger:
        return None
    best = next((each for each in larger if each.checked), larger[0])
    size, rate = size_text(best.bytes), best.tokens_per_second or 0.0
    known = "" if best.checked else "; never run by us, its size and digest are the hub's"
    line = f"{best.name} instead ({size}, {files.minutes_text(best.minutes)}, some {rate:.0f} tok/s{known})"
    return Catalog.load()[best.name], line


def _known(name: str) -> Entry | None:
    """The entry of a catalogue name or hub address; None for other specs."""
    catalog = Catalog.load()
    return catalog.entry(name) if name in catalog or name.startswith("hf:") else None


def _has_head(target: Entry) -> bool:
    """Whether a head on this disk drafts for a model on any engine."""
    return next(found_heads(target.path, None, mtp=False), None) is not None


def _fetch(target: Entry, missing: Sequence[Entry]) -> None:
    names = " and ".join(entry.name for entry in missing)
    size = sum(entry.bytes for entry in missing) / 1e9
    files.note(f"fetching {names} ({size:.1f} GB), once")
    for entry in missing:
        try:
            files.pull(entry.name)
        except DownloadError as error:
            if entry is target:
                raise
            files.note(f"continuing without {entry.name}: {error}")
