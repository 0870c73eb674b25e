"""How a pair is loaded: one set of options from the command line to the engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from localspec.backends import check_name
from localspec.backends.placement import Placement, check_engine
from localspec.engine.draft_sources import draft_source, is_free
from localspec.errors import KV_CACHE_TYPES, MAX_COUNT, MAX_THREADS, UsageError, checked_whole, is_whole, listed, shown
from localspec.spec_decode.drafters.names import AUTOMATIC, CORPUS, PARD, is_corpus
from localspec.spec_decode.drafters.pard import file_and_mask
from localspec.system.plugins import DRAFTERS, offered

PREFIX_CACHE_BYTES = 512 << 20
"""Memory that put-aside conversations may take: 18,000 tokens of Qwen2.5-1.5B at f16 (28 KiB each)."""

MAX_PARALLEL = 64
"""Most answers at a time: llama.cpp's engines take no more sequences."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The arguments of ``LLM`` that say how to load, checked; explained there. Raises ``UsageError``."""

    backend: str = "auto"
    draft_backend: str | None = None
    n_ctx: int | None = None
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    kv_cache_type: str = "f16"
    light_draft: bool = True
    remember: bool = True
    prefix_cache_bytes: int = PREFIX_CACHE_BYTES
    idle: bool = True
    placement: Placement = field(default_factory=Placement)
    parallel: int | str = 1
    prompt_cache_bytes: int = 0

    def __post_init__(self) -> None:
        check_name(self.backend)
        check_name("auto" if self.draft_backend is None else self.draft_backend)
        if not isinstance(self.placement, Placement):
            raise UsageError(f"placement must be a Placement, not {shown(self.placement)}")
        if self.backend != "auto":
            check_engine(self.placement, self.backend)
        if not isinstance(self.kv_cache_type, str) or self.kv_cache_type not in KV_CACHE_TYPES:
            raise UsageError(f"the KV cache type must be {', '.join(KV_CACHE_TYPES)}, not {shown(self.kv_cache_type)}")
        for name, least, most in (
            ("n_ctx", 1, MAX_COUNT),
            ("n_threads", 1, MAX_THREADS),
            ("n_gpu_layers", -1, MAX_COUNT),
            ("prefix_cache_bytes", 0, None),
            ("prompt_cache_bytes", 0, None),
        ):
            value = getattr(self, name)
            if value is not None or name.endswith("cache_bytes"):
                object.__setattr__(self, name, checked_whole(name, value, least, most))
        object.__setattr__(self, "parallel", checked_parallel(self.parallel))

    @property
    def engine(self) -> dict[str, Any]:
        return {"n_threads": self.n_threads, "n_gpu_layers": self.n_gpu_layers, "kv_type": self.kv_cache_type}

    @property
    def target(self) -> dict[str, Any]:
        return self.engine | ({"placement": self.placement} if self.placement else {})

    def as_arguments(self) -> dict[str, Any]:
        """The arguments of ``LLM`` that say the same."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def checked_parallel(value: Any) -> int | str:
    """How many answers at a time: ``auto``, or a number, as a text too."""
    if isinstance(value, str):
        if value == "auto":
            return value
        value = int(value) if value.isdecimal() and len(value) < 10 else value
    if not is_whole(value) or not 1 <= value <= MAX_PARALLEL:
        raise UsageError(f"parallel must be auto or a whole number in 1..{MAX_PARALLEL}, not {shown(value)}")
    return int(value)


# Arguments that callers of the Python API give; each check raises ``UsageError`` with one line.

MAX_CORPORA = 8
"""Each is searched apart: some 20 µs for a draft token."""

Spec = str | os.PathLike[str]
"""A model: a catalogue name, a path or a hub address."""


def checked_spec(name: str, value: Any) -> str:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise UsageError(f"{name} must be the name or the path of a model, not {shown(value)}")
    return text


def draft_words() -> tuple[str, ...]:
    """What stands for a draft and is no model."""
    return ("auto", "none", *offered(DRAFTERS), CORPUS, PARD)


def draft_specs(draft: Spec | Iterable[Spec] | None) -> list[str]:
    """The ``draft`` argument, or what ``--draft`` was given: names of drafters, each once, corpora last."""
    if draft is None:
        return []
    several = listed(draft)
    specs = [checked_spec("draft", each) for each in ([draft] if several is None else several)]
    for kind in {name.partition(":")[0] for name in specs}:
        source = draft_source(kind)
        if source and source.only_one and len({name for name in specs if name.partition(":")[0] == kind}) > 1:
            raise UsageError(f"--draft {kind} can be named once")
    others = [name for name in specs if not is_corpus(name)]
    if (len(others) > 1 and {"auto", "none"} & set(others)) or (len(specs) > 1 and "none" in specs):
        raise UsageError(
            "--draft auto and --draft none stand alone (auto goes with corpus:PATH); "
            "several drafters are named one by one"
        )
    specs.sort(key=is_corpus)
    for name in specs:
        kind, colon, rest = name.partition(":")
        if kind == CORPUS and not rest:
            raise UsageError(f"--draft {CORPUS}:PATH takes a file or a folder, or {CORPUS}:chats for the saved chats")
        if kind == PARD:
            file_and_mask(rest)
        if colon and (source := draft_source(kind)) is not None:
            source.check(rest)
        words = draft_words()
        close = get_close_matches(name, words, n=1) if name.isalpha() and name not in words else []
        if close:
            raise UsageError(f"no draft {name!r}: did you mean {close[0]}?")
    specs = list(dict.fromkeys(specs))
    if sum(map(is_corpus, specs)) > MAX_CORPORA:
        raise UsageError(f"--draft corpus:PATH can be named {MAX_CORPORA} times; name a folder that holds the others")
    return [] if specs == ["none"] else specs


def with_free(specs: list[str]) -> list[str]:
    """The drafters that were named, and where no free ones were, n-grams too: they cost nothing."""
    return [*AUTOMATIC, *specs] if specs and not any(name == "auto" or is_free(name) for name in specs) else specs


def checked_loading(progress: Any, cancel: Any) -> threading.Event:
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function, not {shown(progress)}")
    if cancel is not None and not isinstance(cancel, threading.Event):
        raise UsageError(f"cancel must be a threading.Event, not {shown(cancel)}")
    return threading.Event() if cancel is None else cancel


def checked_bound(value: Any) -> int | None:
    return None if value is None else checked_whole("max_queue", value, 0)
