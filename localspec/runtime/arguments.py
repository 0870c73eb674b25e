"""Arguments that callers of the Python API give; each check raises ``UsageError`` with one line."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, TypedDict, Unpack

from localspec.controllers.fixed import FixedController
from localspec.errors import UsageError
from localspec.prompts.thinking import THINK as THINK  # for those above who may not look into prompts
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.free import FREE_DRAFTERS
from localspec.spec_decode.drafters.names import AUTOMATIC, CORPUS, EARLY_EXIT, FROM_STATES, HEAD, is_corpus
from localspec.values import checked_whole, did_you_mean, is_whole, listed, shown

DraftLength = int | str
"""``auto``, or a number of tokens."""

WORDS = ("auto", "none", *FREE_DRAFTERS, *FROM_STATES, CORPUS)
"""What stands for a draft and is no model."""

MAX_LAYERS = 9999

MAX_CORPORA = 8
"""Each is searched apart: some 20 µs for a draft token."""

Spec = str | os.PathLike[str]
"""A model: a catalogue name, a path or a hub address."""


def checked_spec(name: str, value: Any) -> str:
    """A model as text."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise UsageError(f"{name} must be the name or the path of a model, not {shown(value)}")
    return text


def draft_specs(draft: Spec | Iterable[Spec] | None) -> list[str]:
    """The ``draft`` argument, or what ``--draft`` was given: names of drafters, each once; ``auto`` the first of all.

    Beside ``auto`` there are only corpora.
    """
    if draft is None:
        return []
    several = listed(draft)
    specs = [checked_spec("draft", each) for each in ([draft] if several is None else several)]
    if len({name for name in specs if name.partition(":")[0] == EARLY_EXIT}) > 1:
        raise UsageError(f"--draft {EARLY_EXIT} can be named once")
    others = [name for name in specs if not is_corpus(name)]
    if (len(others) > 1 and {"auto", "none"} & set(others)) or (len(specs) > 1 and "none" in specs):
        raise UsageError(
            "--draft auto and --draft none stand alone (auto goes with corpus:PATH); "
            "several drafters are named one by one"
        )
    specs.sort(key=is_corpus)
    for name in specs:
        _check_parts(name)
        close = get_close_matches(name, WORDS, n=1) if name.isalpha() and name not in WORDS else []
        if close:
            raise UsageError(f"no draft {name!r}: did you mean {close[0]}?")
    specs = list(dict.fromkeys(specs))
    if sum(map(is_corpus, specs)) > MAX_CORPORA:
        raise UsageError(f"--draft corpus:PATH can be named {MAX_CORPORA} times; name a folder that holds the others")
    return [] if specs == ["none"] else specs


def with_free(specs: list[str]) -> list[str]:
    """The drafters that were named, and where no free ones were, n-grams too: they cost nothing."""
    return [*AUTOMATIC, *specs] if specs and not set(specs) & {"auto", *FREE_DRAFTERS} else specs


def _check_parts(name: str) -> None:
    kind, colon, rest = name.partition(":")
    if kind == EARLY_EXIT and colon and not (rest.isascii() and rest.isdigit() and 0 < int(rest[:5]) <= MAX_LAYERS):
        raise UsageError(f"--draft {EARLY_EXIT}:N takes a number of layers in 1..{MAX_LAYERS}, not {shown(rest)}")
    if kind == CORPUS and not rest:
        raise UsageError(f"--draft {CORPUS}:PATH takes a file or a folder, or {CORPUS}:chats for the saved chats")
    if kind == HEAD and colon and not rest:
        raise UsageError(f"--draft {HEAD}:FILE names a head file; {HEAD} alone takes the one for the model")


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


def checked_loading(progress: Any, cancel: Any) -> threading.Event:
    """What follows and stops a load."""
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function, not {shown(progress)}")
    if cancel is not None and not isinstance(cancel, threading.Event):
        raise UsageError(f"cancel must be a threading.Event, not {shown(cancel)}")
    return threading.Event() if cancel is None else cancel


def checked_bound(value: Any) -> int | None:
    """A bound of the queue; None means unbounded."""
    return None if value is None else checked_whole("max_queue", value, 0)


# -- of a request ------------------------------------------------------------------------------------------------


class SamplingOptions(TypedDict, total=False):
    """The fields of ``SamplingParams``, as keywords of a request."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    max_tokens: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    response_format: Mapping[str, Any] | None
    grammar: str | None


class RequestOptions(SamplingOptions, total=False):
    """The keywords of a request; ``Asking.rounds`` explains them."""

    speculate: bool
    draft_length: DraftLength | None
    drafters: str | Iterable[str] | None
    prediction: str | Sequence[int] | None
    think: str | None
    thinking_budget: int | None
    deadline: float | None
    conversation: Hashable | None
    priority: int
    logprobs: int | None
    keep_tokens: int | None


def split_options(
    params: SamplingParams | None, **options: Unpack[RequestOptions]
) -> tuple[SamplingParams, dict[str, Any]]:
    """The sampling parameters of a request, those given by keyword over ``params``, and its other options."""
    for name in options:
        if name not in REQUEST_OPTIONS:
            raise UsageError(f"there is no option {name!r}{did_you_mean(name, REQUEST_OPTIONS)}")
    sampling: dict[str, Any] = {name: value for name, value in options.items() if name in SAMPLING}
    rest = {name: value for name, value in options.items() if name not in SAMPLING}
    return replace(checked_params(params), **sampling), rest


REQUEST_OPTIONS = tuple(RequestOptions.__annotations__)
SAMPLING = frozenset(field.name for field in fields(SamplingParams))


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """Sampling parameters as they are now; None is greedy."""
    if params is not None and not isinstance(params, SamplingParams):
        raise UsageError(f"params must be SamplingParams, not {type(params).__name__}")
    return SamplingParams() if params is None else replace(params)


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
