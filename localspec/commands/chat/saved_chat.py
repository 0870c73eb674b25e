"""A chat in a file: a saved session, whose notes say how its answers came about and how they were shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from localspec.errors import SessionFileError
from localspec.runtime import session_file
from localspec.session import Session, from_text, to_text

if TYPE_CHECKING:
    from localspec.llm import LLM

FORMER_FORMAT = "localspec-chat"
"""``format`` of the JSON documents that chats were saved as before they were sessions."""


@dataclass(slots=True)
class AnswerRecord:
    """How an answer came about; its text is in the session.

    Attributes:
        finish_reason: ``stop``, ``length``, or ``cancelled`` when the answer was stopped by hand.
        rounds: the rounds as events, see ``Round.as_event``.
        stats: see ``SpecStats``.
    """

    finish_reason: str = "cancelled"
    rounds: list[dict[str, Any]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


def save(path: Path, session: Session, records: Sequence[AnswerRecord], **notes: Any) -> None:
    """Write a chat.

    Args:
        path: the file.
        session: the conversation.
        records: of its answers.
        notes: what else belongs to the chat, as JSON has it.

    Raises:
        SessionFileError: it cannot be written, or the name belongs to a file that is no session.
    """
    session.notes = notes | {"answers": [asdict(record) for record in records]}
    # Without what the models hold of it: that is megabytes, is read ahead again, and would have to wait for the engine.
    session_file.write(path, to_text(session), [])


def load(llm: LLM, path: Path) -> tuple[Session, list[AnswerRecord]]:
    """Read a chat: the session, with the notes it was saved with, and the records of its answers.

    Raises:
        SessionFileError: it is missing, damaged, foreign, from a newer version, or no conversation of a chat.
    """
    try:
        with path.open("rb") as file:
            text = read_text(file, str(path))
    except (OSError, ValueError) as error:
        raise SessionFileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if text is None:
        raise SessionFileError(f"{path} is not a saved session")
    session = from_text(llm, text, str(path))
    said = session.messages[session.system is not None :]
    try:
        if [message["role"] for message in said] != ["user", "assistant"] * (len(said) // 2):
            raise ValueError("it is not a chat of questions and answers")
        if not all(isinstance(message["content"], str) for message in session.messages):
            raise ValueError("a message is not text")
        records = [AnswerRecord(**answer) for answer in session.notes.get("answers", [{}] * (len(said) // 2))]
        if len(records) != len(said) // 2 or not all(map(_is_whole, records)):
            raise ValueError("its answers are not as they were saved")
    except (KeyError, TypeError, ValueError) as error:
        raise SessionFileError(f"{path} is damaged, or not a chat: {error}") from None
    return session, records


def first_and_number(path: Path) -> tuple[str, int] | None:
    """The first question of a chat in a file, and how many it has; None where there is no such file, or no question."""
    try:
        with path.open("rb") as file:
            text = read_text(file, str(path)) or {}
        asked = [message["content"] for message in text["messages"] if message["role"] == "user"]
    except (SessionFileError, OSError, LookupError, TypeError, ValueError):  # what is no chat is not written over
        return None
    return (str(asked[0]), len(asked)) if asked else None


def _is_whole(record: AnswerRecord) -> bool:
    known = record.finish_reason in ("stop", "length", "cancelled") and isinstance(record.stats, dict)
    return known and isinstance(record.rounds, list) and all(isinstance(event, dict) for event in record.rounds)


def read_text(file: BinaryIO, name: str) -> dict[str, Any] | None:
    """The text part of a saved chat, see ``session_file.read_text``; None if the file is no such thing.

    Raises:
        SessionFileError: it is damaged or from a newer version; ``name`` is what it calls the file.
    """
    start = file.read(len(session_file.MAGIC))
    file.seek(0)
    if start == session_file.MAGIC:
        return session_file.read_text(file, name)
    try:
        document = json.load(file) if start.startswith(b"{") else None
    except (ValueError, RecursionError):
        return None
    if not (isinstance(document, dict) and document.get("format") == FORMER_FORMAT):
        return None
    if document.get("version") != 1:
        raise SessionFileError(f"{name} is a saved chat of format version {document.get('version')!r:.20}, not 1")
    try:
        settings, turns = dict(document.get("settings") or {}), document["turns"]
        system = document.get("system")
        messages = [{"role": "system", "content": system}] if system else []
        for turn in turns:
            messages += [{"role": role, "content": turn[role]} for role in ("user", "assistant")]
        answers = [{key: turn[key] for key in ("finish_reason", "rounds", "stats")} for turn in turns]
        made_by = {key: document[key] for key in ("model", "draft", "backend") if key in document}
    except (KeyError, TypeError, ValueError) as error:
        raise SessionFileError(f"{name} is a saved chat, but damaged: {error}") from None
    params = settings.pop("sampling", None)
    return {"messages": messages, "params": params, "notes": {**made_by, **settings, "answers": answers}}
