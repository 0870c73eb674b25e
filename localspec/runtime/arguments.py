"""Arguments that callers of the Python API give; each check raises ``UsageError`` with one line."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

from localspec.backends import check_name
from localspec.controllers.fixed import FixedController
from localspec.errors import UsageError
from localspec.runtime.model_loading import PairOptions
from localspec.sampling.sampling import SamplingParams
from localspec.values import (
    KV_CACHE_TYPES,
    MAX_COUNT,
    MAX_THREADS,
    as_float,
    checked_whole,
    is_number,
    is_whole,
    listed,
    shown,
)

DraftLength = int | str
"""``auto``, or a number of tokens."""

Spec = str | os.PathLike[str]
"""A model: a catalogue name, a path or a hub address."""


def checked_bound(value: int | None) -> int | None:
    """A bound of the queue; None is none."""
    return None if value is None else checked_whole("max_queue", value, 0)


def checked_bytes(value: int) -> int:
    """A size of the prefix cache."""
    return checked_whole("prefix_cache_bytes", value, 0)


def checked_spec(name: str, value: Any) -> str:
    """A model as text."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise UsageError(f"{name} must be the name or the path of a model, not {shown(value)}")
    return text


def draft_specs(draft: Spec | Iterable[Spec] | None) -> list[str]:
    """The ``draft`` argument as a list of names."""
    if draft is None:
        return []
    specs = listed(draft)
    return [checked_spec("draft", each) for each in ([draft] if specs is None else specs)]


def checked_length(value: Any) -> DraftLength:
    """A draft length."""
    if isinstance(value, str) and value == "auto":
        return value
    try:
        length = int(value) if isinstance(value, str) or is_whole(value) else None
    except ValueError:
        length = None
    if length is None:
        raise UsageError(f"the draft length must be auto or a number, not {shown(value)}")
    return FixedController(length).length


def checked_options(
    backend: str,
    n_ctx: int | None,
    n_threads: int | None,
    n_gpu_layers: int | None,
    kv_type: str,
    light_draft: bool,
    remember: bool,
    draft_backend: str | None,
    idle: bool,
) -> PairOptions:
    """How to load; see ``LLM``."""
    check_name(backend)
    check_name("auto" if draft_backend is None else draft_backend)
    if not isinstance(kv_type, str) or kv_type not in KV_CACHE_TYPES:
        raise UsageError(f"kv_cache_type must be {', '.join(KV_CACHE_TYPES)}, not {shown(kv_type)}")
    return PairOptions(
        backend,
        None if n_ctx is None else checked_whole("n_ctx", n_ctx, 1, MAX_COUNT),
        None if n_threads is None else checked_whole("n_threads", n_threads, 1, MAX_THREADS),
        None if n_gpu_layers is None else checked_whole("n_gpu_layers", n_gpu_layers, -1, MAX_COUNT),
        kv_type,
        bool(light_draft),
        bool(remember),
        draft_backend,
        bool(idle),
    )


def checked_loading(progress: Any, cancel: Any) -> threading.Event:
    """What follows and stops a load."""
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function, not {shown(progress)}")
    if cancel is not None and not isinstance(cancel, threading.Event):
        raise UsageError(f"cancel must be a threading.Event, not {shown(cancel)}")
    return threading.Event() if cancel is None else cancel


# -- of a request ------------------------------------------------------------------------------------------------


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """Sampling parameters as they are now; None is greedy."""
    if params is not None and not isinstance(params, SamplingParams):
        raise UsageError(f"params must be SamplingParams, not {type(params).__name__}")
    return SamplingParams() if params is None else replace(params)


def checked_turn(deadline: float | None, conversation: Hashable | None) -> tuple[float | None, Hashable | None]:
    """When a request has to be done, and after which others."""
    try:
        hash(conversation)
    except TypeError:
        kind = type(conversation).__name__
        raise UsageError(f"conversation must be hashable, such as a number or a text; a {kind} is not") from None
    if deadline is None:
        return None, conversation
    seconds = as_float(deadline) if is_number(deadline) else math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"the deadline must be a number of seconds over 0, not {shown(deadline)}")
    return seconds, conversation


def drafter_names(names: str | Iterable[str] | None) -> list[str] | None:
    """Which drafters take part."""
    if names is None:
        return None
    several = listed(names)
    several = [names] if several is None else several
    for name in several:
        if not isinstance(name, str):
            raise UsageError(f"drafters must be names of drafters, not {shown(name)}")
    return several
