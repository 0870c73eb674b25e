"""Chats as ``/save`` writes them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from localspec.commands.chat.chat import AnswerRecord
from localspec.engine import saved as saved_module


def write_chat(
    path: Path, *turns: tuple[str, str, AnswerRecord], system: str | None = None, model: str = "m", **notes: Any
) -> Path:
    """Save a chat of these questions, answers and records."""
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer, _ in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    notes = {"answers": [asdict(record) for *_, record in turns]} | notes
    saved_module.write(path, {"model": model, "messages": messages, "params": None, "notes": notes}, [])
    return path


def saved_turns(path: Path) -> list[dict[str, Any]]:
    """The turns of a chat that ``/save`` wrote: ``user``, ``assistant`` and what its record holds."""
    text, _, _ = saved_module.read(path, memory=False)
    said = text["messages"][text["messages"][0]["role"] == "system" :]
    return [
        {"user": question["content"], "assistant": answer["content"], **record}
        for question, answer, record in zip(said[::2], said[1::2], text["notes"]["answers"], strict=True)
    ]
