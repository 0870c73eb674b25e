"""``localspec replay``: a recording as a web page."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from localspec.engine import saved
from localspec.errors import LocalspecError, SessionFileError, UsageError, first_problem, parse_json
from localspec.report.renderers import STREAM, checked_output, write_output
from localspec.report.svg import asset, policy, render
from localspec.spec_decode.rounds import FinishReason, SpecStats, TokenKind
from localspec.system.files import is_same_file
from localspec.system.terminal import on_one_line, visible

# What an untrusted file may hold, field by field; a field that is null counts as missing.

LARGEST = 10**12  # limit of figures: sums of these stay finite
FOREIGN = "it is neither the output of generate --format events nor a saved chat"

Shown = Annotated[str, AfterValidator(visible)]
OneLine = Annotated[str, AfterValidator(on_one_line)]
Figure = Annotated[float, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Stored(BaseModel):
    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class _DraftToken(_Stored):
    id: int | None = None
    text: Shown
    source: OneLine
    prob: Share | None = None
    expected: Share | None = None
    accepted: bool
    parent: int | None = None  # index of the draft token before it, -1 for none; None: the one before it in the list


class _Emitted(_Stored):
    id: int | None = None
    text: str
    kind: TokenKind
    source: OneLine = ""


class _Round(_Stored):
    type: Literal["round"]
    draft: list[_DraftToken]
    emitted: list[_Emitted]
    ms_draft: Figure = 0.0
    ms_verify: Figure = 0.0
    ms_other: Figure = 0.0
    ms_verify_expected: Figure | None = None
    tokens_expected: Figure | None = None
    reason: Shown = ""

    @model_validator(mode="after")
    def _parents_come_first(self) -> Self:
        for i, token in enumerate(self.draft):
            if token.parent is not None and not -1 <= token.parent < i:
                raise ValueError(f"draft token {i} comes after {token.parent}, which is not before it")
        return self

    def shown(self) -> dict[str, Any]:
        """What the page draws."""
        times = ("ms_draft", "ms_verify", "ms_other")
        return self.model_dump(exclude={"type", *times}) | {"ms": [getattr(self, name) for name in times]}


class _Engine(_Stored):
    model: OneLine = ""
    draft: list[OneLine] = []
    backend: OneLine = ""


_ENGINE = {*_Engine.model_fields}


class _End(_Stored):
    finish_reason: FinishReason
    stats: dict[str, Any] = {}


class _Reply(_Engine, _End):
    text: str
    token_ids: Any


class _Message(_Stored):
    role: str = ""
    content: str


class _Record(_End):
    rounds: list[_Round]


class _Notes(_Engine):
    answers: list[_Record] = []


class _Chat(_Stored):
    model: OneLine = ""
    messages: list[_Message]
    notes: _Notes = _Notes()


# Recordings: answers with their rounds, from a file that may be cut short, damaged or foreign.


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


def _answer(rounds: Iterable[_Round], text: str | None, stats: Mapping[str, Any], **more: Any) -> Answer:
    """An answer of those rounds that have anything to show; ``text`` is None where the recording ends before it."""
    shown = [each.shown() for each in rounds if each.draft or each.emitted]
    return Answer(shown, _settle(shown, text), stats=_stats(shown, stats), **more)


def read(data: bytes) -> Recording:
    """Read ``generate --format events``, also several runs, or a chat from ``/save``.

    Events after the first damage are left out; a damaged chat, or no round to show, is a ``RecordingError``.
    """
    if not data.strip():
        raise RecordingError("it is empty")
    try:
        is_chat = data.startswith(saved.MAGIC)
        recording = _chat(saved.read_text(BytesIO(data), "it")) if is_chat else _read_events(data)
    except SessionFileError as error:
        raise RecordingError(str(error)) from None
    if not any(answer.rounds for answer in recording.answers):
        raise RecordingError("it has no rounds (generate --format events records them, --format json does not)")
    return recording


def _read_events(data: bytes) -> Recording:
    # PowerShell 5 writes `command > file` in UTF-16. Bytes that are no text become U+FFFD, which a string can hold.
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    answers: list[Answer] = []
    rounds: list[_Round] = []
    damage = ""
    lines = data.decode(encoding, "replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
            kind = value.get("type", "reply") if isinstance(value, dict) else None
            if kind == "reply" and {"text", "token_ids"} <= value.keys():
                reply = _Reply.model_validate(value)
                more = reply.model_dump(include={"finish_reason", *_ENGINE})
                answers.append(_answer(rounds, reply.text, reply.stats, **more))
                rounds = []
            elif kind != "prompt":
                rounds.append(_Round.model_validate(value))
        except ValueError as error:  # pydantic's are too
            why = first_problem(error) if isinstance(error, ValidationError) else f"it {error}"
            if not (rounds or answers):
                raise RecordingError(f"{FOREIGN}: {why}") from None
            is_cut = number == len(lines) and not isinstance(error, ValidationError)
            damage = f"it ends in the middle of line {number}" if is_cut else f"line {number} is damaged: {why}"
            break
    if rounds:
        damage = damage or "it ends before the answer does"
        answers.append(_answer(rounds, None, {}))
    return Recording(answers, damage)


def _chat(text: Mapping[str, Any]) -> Recording:
    try:
        chat, answers = _Chat.model_validate(text), []
        system = chat.messages.pop(0).content if chat.messages and chat.messages[0].role == "system" else ""
        known = {"model": chat.model, "system": visible(system) or None}
        known |= chat.notes.model_dump(include=_ENGINE, exclude_defaults=True)
        for question, answer, record in zip(chat.messages[::2], chat.messages[1::2], chat.notes.answers, strict=False):
            known |= {"prompt": visible(question.content), "finish_reason": record.finish_reason}
            answers.append(_answer(record.rounds, answer.content, record.stats, **known))
    except ValidationError as error:
        raise RecordingError(f"it is a saved chat, but damaged: {first_problem(error)}") from None
    if not answers:
        raise RecordingError("it is a saved conversation without the rounds of an answer")
    return Recording(answers)


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

_FIGURES = TypeAdapter(dict[str, Figure], config=ConfigDict(strict=True))


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
    stated = _FIGURES.validate_python({name: given[name] for name in figures if given.get(name) is not None})
    return figures | stated


# The page: one HTML file without outside resources. The untrusted recording is in it as JSON with every ``<`` escaped;
# scripts show it as text nodes, and the content security policy holds even if they did not.

SCRIPTS = ("timeline", "words", "answer", "round", "strip", "summary", "tip", "player", "main")
"""In the order in which they build on each other, in one scope."""


def replay_page(recording: Recording, name: str) -> str:
    style, scripts = asset("style.css", __package__), [asset(f"{script}.js", __package__) for script in SCRIPTS]
    text = json.dumps({"name": name, **asdict(recording)}, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # JSON in ASCII that cannot end its element
    values = {"policy": policy([style], scripts), "style": style, "recording": text, "scripts": scripts}
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
