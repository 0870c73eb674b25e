"""What was said, and its file format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError, UsageError
from localspec.sampling.sampling import CHAT_SETTINGS, SamplingParams
from localspec.system.files import write_atomically

FORMAT = "localspec-chat"
VERSION = 1
MAX_BYTES = 1 << 28


class ChatFileError(LocalspecError):
    """The file is not a saved chat, or cannot be read or written."""


@dataclass(slots=True)
class Turn:
    """A question and its answer.

    Attributes:
        finish_reason: ``stop``, ``length``, or ``cancelled`` when the answer was stopped by hand.
        rounds: the rounds as events, see ``Round.as_event``.
        stats: see ``SpecStats``.
    """

    user: str
    assistant: str
    finish_reason: str = "stop"
    rounds: list[dict[str, Any]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Conversation:
    """Turns, the system prompt, and the settings they are asked with."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """The conversation for the chat template, with a new question at its end if there is one."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        if question is not None:
            messages.append({"role": "user", "content": question})
        return messages


@dataclass(slots=True)
class SavedChat:
    """The contents of a chat file."""

    conversation: Conversation
    params: SamplingParams
    draft_length: int | str
    view: str
    model: str


def save(path: Path, chat: SavedChat, *, draft: list[str], backend: str) -> None:
    """Write a chat file: complete under its name, or not at all.

    Raises:
        ChatFileError: it cannot be written, or the name belongs to a file that is not a saved chat.
    """
    if path.exists() and path.stat().st_size:
        try:
            load(path)
        except ChatFileError:
            raise ChatFileError(f"{path} exists and is not a saved chat; choose another name") from None
    params = {name: getattr(chat.params, name) for name in CHAT_SETTINGS}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model": chat.model,
        "draft": draft,
        "backend": backend,
        "settings": {
            "sampling": params | {"stop": list(chat.params.stop)},
            "draft_length": chat.draft_length,
            "view": chat.view,
        },
        "system": chat.conversation.system,
        "turns": [asdict(turn) for turn in chat.conversation.turns],
    }
    try:
        with write_atomically(path, private=True) as file:
            file.write(json.dumps(document, ensure_ascii=False, indent=1).encode() + b"\n")
    except OSError as error:
        raise ChatFileError(f"cannot write {path}: {error.strerror or error}") from error


def load(path: Path) -> SavedChat:
    """Read a chat file.

    Raises:
        ChatFileError: it is missing, damaged, foreign or from a newer version.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ChatFileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_BYTES:
        raise ChatFileError(f"{path} is too large to be a saved chat")
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ChatFileError(f"{path} is not a saved chat, or damaged: it is not JSON") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ChatFileError(f"{path} is not a saved chat")
    version = document.get("version")
    if version != VERSION:
        raise ChatFileError(f"{path} has format version {version!r}; this localspec reads version {VERSION}")
    try:
        return _parse(document)
    except (KeyError, TypeError, ValueError) as error:
        raise ChatFileError(f"{path} is damaged: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _parse(document: Mapping[str, Any]) -> SavedChat:
    settings = _expect(document["settings"], dict, "settings")
    sampling = _expect(settings["sampling"], dict, "sampling")
    unknown = set(sampling) - set(CHAT_SETTINGS)
    if unknown:
        raise ValueError(f"unknown setting {min(unknown)!r}")
    turns = []
    for entry in _expect(document["turns"], list, "turns"):
        _expect(entry, dict, "turn")
        rounds = _expect(entry["rounds"], list, "rounds")
        for event in rounds:
            _expect(event, dict, "round")
        finish_reason = entry["finish_reason"]
        if finish_reason not in ("stop", "length", "cancelled"):
            raise ValueError(f"finish_reason is {finish_reason!r}")
        turns.append(
            Turn(
                _expect(entry["user"], str, "user"),
                _expect(entry["assistant"], str, "assistant"),
                finish_reason,
                rounds,
                _expect(entry["stats"], dict, "stats"),
            )
        )
    system = document["system"]
    if system is not None:
        _expect(system, str, "system")
    draft_length = settings["draft_length"]
    if draft_length != "auto" and type(draft_length) is not int:
        raise ValueError("draft_length is neither auto nor a number")
    params = SamplingParams()
    for name, value in sampling.items():
        params = set_parameter(params, name, value)
    return SavedChat(
        Conversation(system, turns),
        params,
        draft_length,
        _expect(settings["view"], str, "view"),
        _expect(document["model"], str, "model"),
    )


def _expect(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is not a {kind.__name__}")
    return value


def set_parameter(params: SamplingParams, name: str, value: Any) -> SamplingParams:
    """The parameters with one changed; a string is read as what the parameter holds, ``none`` and ``off`` included.

    Raises:
        UsageError: no such parameter, or not a value for it.
    """
    if name not in CHAT_SETTINGS:
        raise UsageError(f"no parameter {name!r}: there are {', '.join(CHAT_SETTINGS)}")
    default = getattr(SamplingParams(), name)
    empty = isinstance(value, str) and value.lower() in ("none", "off")
    try:
        if name == "stop":
            value = () if empty or not value else ((value,) if isinstance(value, str) else tuple(value))
        elif name in ("seed", "max_tokens"):
            value = None if empty or value is None else _whole(value)
        elif empty:
            value = default
        elif isinstance(default, int):
            value = _whole(value)
        else:
            value = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a number, not {value!r}") from None
    return replace(params, **{name: value})


def _whole(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)
