"""``localspec replay``: a recording as a web page."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, get_args

from localspec.commands.chat.chat import read_text
from localspec.errors import LocalspecError, SessionFileError, UsageError
from localspec.report.renderers import STREAM, checked_output, write_output
from localspec.report.svg import asset, policy, render
from localspec.spec_decode.rounds import FinishReason, SpecStats, TokenKind
from localspec.system.files import is_same_file
from localspec.system.terminal import on_one_line, visible

# JSON from an untrusted file, with the type of each field checked.

T = TypeVar("T")
LARGEST = 10**12  # limit of figures: sums of these stay finite
_REQUIRED: Any = object()
_SPACE = re.compile(r"\s*")
_KIND_NAMES = {str: "text", dict: "an object", list: "a list", bool: "true or false", int: "a whole number"}


class Values(Iterator[Any]):
    """The JSON values of a text, up to the first that cannot be read; ``line`` is the last one's, ``damage`` what ended
    it early."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._decode = json.JSONDecoder(parse_constant=_no_constant).raw_decode
        self._at = 0
        self._counted = 0
        self.line = 1
        self.damage = ""

    def __next__(self) -> Any:
        self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr] # it matches nothing too
        self.line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        if self._at == len(self._text):
            raise StopIteration
        try:
            value, self._at = self._decode(self._text, self._at)
        except (ValueError, RecursionError):
            whole = "\n" in self._text[self._at :]
            self.damage = f"line {self.line} is damaged" if whole else f"it ends in the middle of line {self.line}"
            raise StopIteration from None
        return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Each of the following raises ValueError; the message names the field.


def check(value: Any, kind: type, name: str) -> None:
    # To Python, true is an int.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name} is not {_KIND_NAMES[kind]}")


def get(value: Mapping[str, Any], name: str, kind: type[T], default: Any = _REQUIRED) -> T:
    """A field of an object; ``default`` stands for a missing or null one."""
    found = value.get(name)
    if found is None:
        if default is _REQUIRED:
            raise ValueError(f"{name} is missing")
        return default  # type: ignore[no-any-return]
    check(found, kind, name)
    return found  # type: ignore[no-any-return]


def entries(value: Mapping[str, Any], name: str, kind: type[T], default: Any = _REQUIRED) -> list[T]:
    """A field that is a list of values of one type."""
    found: list[T] = get(value, name, list, default)
    for each in found:
        check(each, kind, f"an entry of {name}")
    return found


def one_of(known: Sequence[str], value: Mapping[str, Any], name: str) -> str:
    """A field that is one of a few words."""
    found = get(value, name, str)
    if found not in known:
        raise ValueError(f"{name} is not one of {', '.join(known)}")
    return found


def number(value: Mapping[str, Any], name: str, largest: float = LARGEST) -> float | None:
    """A count, a share or a time; None if missing or null."""
    found = value.get(name)
    if found is None:
        return None
    # The comparison is false for NaN as well.
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found <= largest:
        raise ValueError(f"{name} is not a number from 0 to {largest:g}")
    return found


# Recordings: answers with their rounds, from a file that may be cut short, damaged or foreign.

KINDS = get_args(TokenKind)
FINISH_REASONS = get_args(FinishReason)
FOREIGN = "it is neither the output of generate --format events nor a saved chat"


class RecordingError(LocalspecError):
    """A file is no recording, or cannot be read."""


@dataclass(slots=True)
class Answer:
    """One answer and its rounds; every text is made visible (``terminal.visible``).

    ``rounds`` are as ``Round.as_event`` has them, the three times in one list ``ms``; an emitted token that reaches
    into the stop string has that part of its text in ``cut``. ``stats`` has the names of ``SpecStats``.
    """

    rounds: list[dict[str, Any]]
    text: str = ""  # behind the last round's tokens
    finish_reason: str | None = None  # None when the recording ends before the answer does
    model: str = ""
    draft: list[str] = field(default_factory=list)
    backend: str = ""
    prompt: str | None = None  # the question; a file of events does not have it
    system: str | None = None
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Recording:
    """At least one answer with rounds; ``damage`` says why the file could only be read in part."""

    answers: list[Answer]
    damage: str = ""


def read(data: bytes) -> Recording:
    """Read ``generate --format events``, also several runs, or a chat from ``/save``.

    Events after the first damage are left out; a damaged chat, or no round to show, is a ``RecordingError``.
    """
    if not data.strip():
        raise RecordingError("it is empty")
    try:
        text = read_text(BytesIO(data), "it")
    except SessionFileError as error:
        raise RecordingError(str(error)) from None
    recording = _chat(text) if text is not None else _read_events(data)
    if not any(answer.rounds for answer in recording.answers):
        raise RecordingError("it has no rounds (generate --format events records them, --format json does not)")
    return recording


def _read_events(data: bytes) -> Recording:
    # PowerShell 5 writes `command > file` in UTF-16. Bytes that are no text become U+FFFD, which a string can hold.
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    values = Values(data.decode(encoding, "replace"))
    answers: list[Answer] = []
    rounds: list[dict[str, Any]] = []
    damage = ""
    for value in values:
        try:
            if isinstance(value, dict) and "type" not in value and {"text", "token_ids"} <= value.keys():
                answers.append(_reply(value, rounds))
                rounds = []
            elif _is_progress(value):
                continue
            elif _happened(round_ := _round(value)):
                rounds.append(round_)
        except ValueError as error:
            if not (rounds or answers):
                raise RecordingError(f"{FOREIGN}: {error}") from None
            damage = f"line {values.line} is damaged: {error}"
            break
    damage = damage or values.damage
    if damage and not (rounds or answers):
        raise RecordingError(f"{FOREIGN}: it is not JSON")
    if rounds:
        damage = damage or "it ends before the answer does"
        answers.append(Answer(rounds, text=_settle(rounds, None), stats=_stats(rounds, {})))
    return Recording(answers, damage)


def _reply(value: Mapping[str, Any], rounds: list[dict[str, Any]]) -> Answer:
    text = get(value, "text", str)
    return Answer(
        rounds,
        text=_settle(rounds, text),
        finish_reason=one_of(FINISH_REASONS, value, "finish_reason"),
        stats=_stats(rounds, get(value, "stats", dict, {})),
        **_engine(value),
    )


def _chat(text: Mapping[str, Any]) -> Recording:
    try:
        said, notes = entries(text, "messages", dict), get(text, "notes", dict, {})
        system = get(said.pop(0), "content", str) if said and said[0].get("role") == "system" else ""
        engine = _engine({"model": text.get("model")} | notes)
        answers = []
        for question, answer, record in zip(said[::2], said[1::2], entries(notes, "answers", dict, []), strict=False):
            rounds = [round_ for event in get(record, "rounds", list) if _happened(round_ := _round(event))]
            answers.append(
                Answer(
                    rounds,
                    text=_settle(rounds, get(answer, "content", str)),
                    finish_reason=one_of(FINISH_REASONS, record, "finish_reason"),
                    prompt=visible(get(question, "content", str)),
                    system=visible(system) if system else None,
                    stats=_stats(rounds, get(record, "stats", dict, {})),
                    **engine,
                )
            )
    except ValueError as error:
        raise RecordingError(f"it is a saved chat, but damaged: {error}") from None
    if not answers:
        raise RecordingError("it is a saved chat without a turn")
    return Recording(answers)


def _engine(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": on_one_line(get(value, "model", str, "")),
        "draft": [on_one_line(name) for name in entries(value, "draft", str, [])],
        "backend": on_one_line(get(value, "backend", str, "")),
    }


def _is_progress(event: Any) -> bool:
    return isinstance(event, dict) and event.get("type") == "prompt"


def _round(event: Any) -> dict[str, Any]:
    """A checked copy of a round with what is shown of it; ``ValueError``: it is not a round."""
    check(event, dict, "the value")
    if event.get("type") != "round":
        raise ValueError("it is not a round")
    drafted = entries(event, "draft", dict)
    return {
        "draft": [
            {
                "id": get(token, "id", int, None),
                "text": visible(get(token, "text", str)),
                "source": on_one_line(get(token, "source", str)),
                "prob": number(token, "prob", 1),
                "expected": number(token, "expected", 1),
                "accepted": get(token, "accepted", bool),
                **({"parent": _parent(token, index)} if "parent" in token else {}),
            }
            for index, token in enumerate(drafted)
        ],
        "emitted": [
            {
                "id": get(token, "id", int, None),
                "text": get(token, "text", str),
                "kind": one_of(KINDS, token, "kind"),
                "source": on_one_line(get(token, "source", str, "")),
            }
            for token in entries(event, "emitted", dict)
        ],
        "ms": [number(event, f"ms_{part}") or 0.0 for part in ("draft", "verify", "other")],
        "ms_verify_expected": number(event, "ms_verify_expected"),
        "tokens_expected": number(event, "tokens_expected"),
        "reason": visible(get(event, "reason", str, "")),
    }


def _parent(token: Mapping[str, Any], index: int) -> int:
    """Index of the draft token before this one."""
    parent = get(token, "parent", int)
    if not -1 <= parent < index:
        raise ValueError(f"draft token {index} comes after {parent}, which is not before it")
    return parent


def _happened(round_: Mapping[str, Any]) -> bool:
    """Whether a round has anything to show."""
    return bool(round_["draft"] or round_["emitted"])


def _settle(rounds: Sequence[Mapping[str, Any]], text: str | None) -> str:
    """Split the tokens' texts, in place, where the answer ends, before its stop string, and make them visible; returns
    the answer's text behind the tokens', a last character that no token completed."""
    tokens = [token for round_ in rounds for token in round_["emitted"]]
    whole = "".join(token["text"] for token in tokens)
    left = len(text) if text is not None and whole.startswith(text) else len(whole)
    for token in tokens:
        kept, cut = token["text"][:left], token["text"][left:]
        left -= len(kept)
        token["text"] = visible(kept)
        if cut:
            token["cut"] = visible(cut)
    return visible(text[len(whole) :]) if text is not None and text.startswith(whole) else ""


_UNCOUNTED = ("prompt_tokens", "cached_tokens", "time_to_first_token_s", "seconds_prompt",
              "estimated_plain_tokens_per_second", "estimated_speedup")  # fmt: skip
"""Figures that rounds do not have."""


def _stats(rounds: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the page, counted from rounds if not given; see ``SpecStats``."""
    drafted = [token for round_ in rounds for token in round_["draft"]]
    counted = SpecStats()
    counted.completion_tokens = sum(len(round_["emitted"]) for round_ in rounds)
    counted.num_rounds = len(rounds)
    counted.num_draft_tokens = len(drafted)
    counted.num_accepted_tokens = sum(token["accepted"] for token in drafted)
    seconds = [sum(round_["ms"][part] for round_ in rounds) / 1e3 for part in range(3)]
    counted.seconds_draft, counted.seconds_verify, counted.seconds_other = seconds
    figures: dict[str, Any] = {
        name: value for name, value in counted.as_dict().items() if value is None or isinstance(value, int | float)
    }
    figures |= dict.fromkeys(_UNCOUNTED)
    figures |= {name: stated for name in figures if (stated := number(given, name)) is not None}
    if not figures["num_draft_tokens"]:  # plain decoding: older recordings compare it with an estimate of itself
        figures["estimated_plain_tokens_per_second"] = figures["estimated_speedup"] = None
    return figures


# The page: one HTML file without outside resources. The untrusted recording is in it as JSON with every ``<`` escaped;
# scripts show it as text nodes, and the content security policy holds even if they did not.

SCRIPTS = ("timeline", "words", "answer", "round", "strip", "summary", "tip", "player", "main")
"""In the order in which they build on each other, in one scope."""


def replay_page(recording: Recording, name: str) -> str:
    style, scripts = asset("style.css", __package__), [asset(f"{script}.js", __package__) for script in SCRIPTS]
    values = {
        "policy": policy([style], scripts),
        "style": style,
        # JSON in ASCII that cannot end its element
        "recording": json.dumps({"name": name, **asdict(recording)}, allow_nan=False, separators=(",", ":")).replace(
            "<", "\\u003c"
        ),
        "scripts": scripts,
    }
    return render("page.html", values, __package__)


MAX_BYTES = 1 << 28


def replay_command(file: str, html: str | None = None, *, force: bool = False) -> int:
    """Write the page and print its path, or the page itself if ``html`` is ``-``."""
    try:
        recording = read(_bytes(file))
    except RecordingError as error:
        raise RecordingError(f"cannot replay {_called(file)}: {error}") from None
    out = _destination(file, html, force)
    if recording.damage:
        print(f"localspec: {_called(file)} is shown only in part: {recording.damage}", file=sys.stderr)
    page = replay_page(recording, Path(file).name if file != STREAM else "")
    if out is None:
        sys.stdout.buffer.write(page.encode())
        sys.stdout.buffer.flush()
    else:
        write_output(out, page)
        print(out)
    return 0


def _called(file: str) -> str:
    return "standard input" if file == STREAM else file


def _bytes(file: str) -> bytes:
    if file == STREAM:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if sys.stdin is not None else b""
    else:
        try:
            with open(file, "rb") as opened:
                data = opened.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a name with a null character
            raise RecordingError(str(getattr(error, "strerror", None) or error)) from None
    if len(data) > MAX_BYTES:
        raise RecordingError(f"it is larger than {MAX_BYTES >> 20} MB")
    return data


def _destination(file: str, html: str | None, force: bool) -> Path | None:
    """Where the page goes; None is standard output."""
    if html == STREAM or (html is None and file == STREAM):
        return None
    wanted = html or str(Path(file).with_suffix(".html"))
    if file != STREAM and is_same_file(wanted, file):
        raise UsageError(f"{wanted} is the recording itself: choose another name with --html")
    out = checked_output(wanted, force=force, otherwise=", --html OUT chooses another name")
    return Path(os.path.realpath(out))  # a link keeps pointing where it does
