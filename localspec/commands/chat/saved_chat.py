"""A chat in a file: a saved session, whose notes say how its answers came about and how they were shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.errors import SessionFileError
from localspec.runtime import session_file
from localspec.sampling.sampling import SamplingParams

if TYPE_CHECKING:
    from localspec.llm import LLM
    from localspec.session import Session

FORMER_FORMAT, FORMER_VERSION = "localspec-chat", 1
"""``format`` and ``version`` of the JSON documents that chats were saved as before they were sessions."""


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
    session.save(path, memory=False)  # read ahead again when it is loaded, and smaller by megabytes


def load(llm: LLM, path: Path) -> tuple[Session, list[AnswerRecord]]:
    """Read a chat: the session, with the notes it was saved with, and the records of its answers.

    Raises:
        SessionFileError: it is missing, damaged, foreign, from a newer version, or no conversation of a chat.
        UsageError: a sampling parameter in it makes no sense.
    """
    former = _former(path)
    session = _session_of(llm, former, path) if former is not None else llm.load_session(path, memory=False)
    said = session.messages[session.system is not None :]
    try:
        if [message["role"] for message in said] != ["user", "assistant"] * (len(said) // 2):
            raise ValueError("it is no chat of questions and answers")
        if not all(isinstance(message["content"], str) for message in session.messages):
            raise ValueError("a message is not text")
        records = [AnswerRecord(**answer) for answer in session.notes.get("answers", [{}] * (len(said) // 2))]
        if len(records) != len(said) // 2 or not all(map(_is_whole, records)):
            raise ValueError("its answers are not as they were saved")
    except (KeyError, TypeError, ValueError) as error:
        raise SessionFileError(f"{path} is damaged, or not a chat: {error}") from None
    return session, records


def _is_whole(record: AnswerRecord) -> bool:
    known = record.finish_reason in ("stop", "length", "cancelled") and isinstance(record.stats, dict)
    return known and isinstance(record.rounds, list) and all(isinstance(event, dict) for event in record.rounds)


def as_document(data: bytes) -> dict[str, Any] | None:
    """A saved chat as the document that chats were saved as before: ``system``, ``turns`` and notes.

    Returns:
        None where the file is no session.

    Raises:
        ValueError: it is damaged, or no conversation of a chat.
    """
    if not data.startswith(session_file.MAGIC):
        return None
    try:
        text = session_file.read_text(BytesIO(data), "it")
        said = list(text["messages"])
        system = said.pop(0)["content"] if said and said[0]["role"] == "system" else None
        notes = dict(text.get("notes", {}))
        answers = notes.pop("answers", [{"finish_reason": "stop", "rounds": []}] * (len(said) // 2))
        turns = [
            {"user": question["content"], "assistant": answer["content"], **record}
            for question, answer, record in zip(said[::2], said[1::2], answers, strict=True)
        ]
        return {"model": text["model"]} | notes | {"system": system, "turns": turns}
    except SessionFileError as error:
        raise ValueError(str(error)) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no chat: {error}") from None


def _former(path: Path) -> dict[str, Any] | None:
    """The document of a chat that was saved before chats were sessions; None if the file is none."""
    try:
        with path.open("rb") as file:
            if not file.read(64).lstrip().startswith(b"{"):
                return None
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    known = (document.get("format"), document.get("version")) == (FORMER_FORMAT, FORMER_VERSION)
    return document if known else None


def _session_of(llm: LLM, document: Mapping[str, Any], path: Path) -> Session:
    try:
        settings, turns = document["settings"], document["turns"]
        session = llm.session(document["system"], SamplingParams(**settings["sampling"]))
        for turn in turns:
            session.messages += [{"role": role, "content": turn[role]} for role in ("user", "assistant")]
        answers = [{name: turn[name] for name in ("finish_reason", "rounds", "stats")} for turn in turns]
        shown = {name: settings[name] for name in ("view", "draft_length")}
        session.notes = {"model": document["model"], **shown, "answers": answers}
    except (KeyError, TypeError) as error:
        raise SessionFileError(f"{path} is damaged: {error}") from None
    return session
