"""Every error that localspec raises on purpose, its exit status, and checks of what callers give.

Each class below stands under its base; the CLI prints ``str(error)``, one readable line.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, NoReturn


class LocalspecError(Exception):
    """Base class: ``str(error)`` is one line, without control characters, that says what is wrong and what to do."""

    def __str__(self) -> str:
        text = super().__str__()
        if text.isprintable():
            return text
        text = " ".join(text.split())
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class UsageError(LocalspecError, ValueError):
    """The request itself is wrong: a value out of range, an impossible combination."""


class PromptTooLong(UsageError):
    """The prompt leaves no room in the context."""


class UnknownModel(UsageError):
    """The name is neither in the catalogue nor a file nor a hub address."""


class ModelFileError(LocalspecError):
    """The file cannot be used as a model."""


class NotGGUF(ModelFileError):
    """Empty, truncated, or another format."""


class UnsupportedModel(ModelFileError):
    """A valid GGUF that cannot generate text here."""


class VocabularyMismatch(LocalspecError):
    """Draft and target number their tokens differently."""


class TemplateError(LocalspecError):
    """The model's chat template could not be rendered."""


class DownloadError(LocalspecError):
    """No source could deliver the file."""


class DigestMismatch(DownloadError):
    """The bytes that arrived are not the ones the catalogue names."""


class NotEnoughSpace(DownloadError):
    """The disk has too little room."""


class EngineError(LocalspecError):
    """An inference engine failed."""


class EngineUnavailable(EngineError):
    """The engine is not installed or cannot run on this machine."""


class EngineMismatch(EngineError):
    """The engine's batched passes disagree with its single-token passes on this file."""


class ContextFull(EngineError):
    """The tokens do not fit into the context."""


class QueueFull(LocalspecError):
    """As many requests are waiting as may: ask again later."""


class PluginError(LocalspecError):
    """A drafter or backend that another package offers cannot be imported, or is none."""


class Cancelled(LocalspecError):
    """The work was stopped, by its caller or its deadline, before it had a result."""


class SessionFileError(LocalspecError):
    """The file is not a saved session, or its text is damaged."""


class Closed(LocalspecError):
    """The object was used after it was closed."""


def status_of(error: Exception) -> int:
    return 2 if isinstance(error, UsageError) else 1


def line_of(error: Exception) -> str:
    if isinstance(error, LocalspecError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    if isinstance(error, MemoryError):
        return "out of memory: take a smaller model or a smaller --ctx"
    kind = type(error).__name__
    return f"internal error, please report it: {kind}: {error} (LOCALSPEC_DEBUG=1 shows where)"


def first_problem(error: Any) -> str:
    """The first error of a pydantic ``ValidationError`` in one line: ``accepted of 0 of draft: …``."""
    first = error.errors(include_url=False)[0]
    where = " of ".join(map(str, reversed(first["loc"])))
    message = first["msg"].partition(" or instance of ")[0]  # which names a class of ours
    return " ".join(f"{where}: {message}".removeprefix(": ").split())


MAX_COUNT = 1 << 31
MAX_THREADS = 4096
# JSON that is taken: how deep it is nested, how many objects and lists it has, how many digits a whole number has.
MAX_DEPTH, MAX_CONTAINERS, MAX_DIGITS = 200, 500_000, 308

KV_CACHE_TYPES = ("f16", "f32", "q8_0", "q4_0")


def shown(value: object) -> str:
    """A value in an error message: one line, not long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not spell out numbers of thousands of digits
        text = f"a number of {type(value).__name__} that is too large"
    return text if len(text) <= 120 else f"{text[:80]}…{text[-30:]}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that begins with an unknown one, or is most like it; None: none is like it."""
    names = list(known)
    longer = [each for each in names if name and each.startswith(name)]
    return next(iter(longer or get_close_matches(name, names, n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a real number, NaN and infinity included; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def as_float(value: Any) -> float:
    """A number in Python's own type; one too large for it is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def listed(values: Any) -> list[Any] | None:
    """Anything that yields values, as a list; None for other values, and for texts, bytes and mappings."""
    if isinstance(values, str | bytes | bytearray | memoryview | Mapping):
        return None
    try:
        return list(values)
    except TypeError:
        return None


def checked_whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number within bounds, in Python's own type; ``UsageError``: it is none, or out of bounds."""
    if not is_whole(value) or value < least or (most is not None and value > most):
        bounds = f"a whole number, {least} or more" if most is None else f"a whole number in {least}..{most}"
        raise UsageError(f"{name} must be {bounds}, not {shown(value)}")
    return int(value)


def check_text(text: str | None, name: str) -> None:
    if text is not None and any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError(f"{name} is not valid UTF-8")


def token_ids(what: str, ids: Any, n_vocab: int | None = None) -> list[int]:
    """Token ids in 0..n_vocab - 1 (None: any), from anything that yields whole numbers; else ``UsageError``."""
    tokens = listed(ids)
    if tokens is None:
        raise UsageError(f"{what} must be token ids, not {type(ids).__name__}")
    for token in tokens:
        if not is_whole(token):
            raise UsageError(f"{what} must be token ids, which are whole numbers, not {shown(token)}")
        if n_vocab is not None and not 0 <= token < n_vocab:
            raise UsageError(f"{what} must be token ids of this model, in 0..{n_vocab - 1}, not {shown(token)}")
    return [int(token) for token in tokens]


# -- JSON ----------------------------------------------------------------------------------------------------------

_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEPS))
_STRING = re.compile(rb'"[^"]*"')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes) -> Any:
    """JSON in UTF-8 without numbers that are not finite, a key twice in an object, half of a surrogate pair; within
    ``MAX_DEPTH``, ``MAX_CONTAINERS`` and ``MAX_DIGITS``. Else ``ValueError``, with a clause that says what is wrong."""
    try:
        body = text.encode() if isinstance(text, str) else text
        decoded = body.decode("utf-8-sig")
        _check_nesting(body)
        value = json.loads(
            decoded, parse_float=_finite, parse_int=_whole, parse_constant=_no_constant, object_pairs_hook=_object
        )
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair in a string") from None
    return value


def written_json(text: str) -> Any:
    """JSON as a model may have written it: a number that others refuse stays text, half of a surrogate pair is
    replaced; ``ValueError``: it is not JSON."""
    try:
        value = json.loads(text, parse_float=_number, parse_constant=str)
        return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _number(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def _check_nesting(body: bytes) -> None:
    brackets = _STRING.sub(b"", body.replace(b"\\\\", b"").replace(b'\\"', b"")).translate(None, _NO_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise ValueError(f"has more than {MAX_CONTAINERS} objects and lists")
    depth = 0
    for bracket in brackets:
        depth += _STEPS[bracket]
        if depth > MAX_DEPTH:
            raise ValueError(f"is nested more than {MAX_DEPTH} deep")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"has a number that is too large: {text:.40}")
    return value


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"has a number of {len(text)} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"has {name}, which is no number in JSON")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"has an object with {twice!r:.60} twice")
    return found
