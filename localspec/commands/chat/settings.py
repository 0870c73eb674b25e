"""``config.toml`` in LOCALSPEC_HOME: what is set for all chats; people may edit it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from localspec.commands.chat.screen import FORMER_VIEWS, VIEWS
from localspec.errors import UsageError
from localspec.system.files import home, write_atomically


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """View and system prompt of later chats; None is the usual, an empty prompt none."""

    view: str | None = None
    system: str | None = None


_NAMES = tuple(field.name for field in fields(ChatSettings))


def settings_file() -> Path:
    return home() / "config.toml"


def read_settings() -> tuple[ChatSettings, list[str]]:
    """The settings, and a line for each thing in the file that cannot be used."""
    path = settings_file()
    try:
        found = tomllib.loads(_text(path))
    except UsageError as error:
        return ChatSettings(), [str(error)]
    except ValueError as error:
        return ChatSettings(), [f"{path} is not used, it is not TOML: {error}"]
    good: dict[str, Any] = {}
    problems = []
    for name, value in found.items():
        if name not in _NAMES:
            problems.append(f"{path}: there is no setting {name!r:.40}; there are {', '.join(_NAMES)}")
        elif not isinstance(value, str):
            problems.append(f"{path}: {name} must be a text, not {json.dumps(value, default=str):.40}")
        elif name == "view" and FORMER_VIEWS.get(value, value) not in VIEWS:
            problems.append(f"{path}: there is no view {value!r:.40}; there are {', '.join(VIEWS)}")
        else:
            good[name] = FORMER_VIEWS.get(value, value) if name == "view" else value
    return ChatSettings(**good), problems


def remember(name: str, value: str | None) -> None:
    """Write a setting into the file, or remove it (None); the rest stays as it is.

    Raises:
        UsageError: the file cannot be read, understood or written; it stays as it was.
    """
    path = settings_file()
    text = _text(path)
    try:
        wanted = tomllib.loads(text)
        wanted.pop(name, None)
        line = ""
        if value is not None:
            wanted[name] = value
            line = f"{name} = {json.dumps(value, ensure_ascii=False)}\n".replace("\x7f", "\\u007f")
        changed = _with_line(text, name, line)
        if tomllib.loads(changed) != wanted:
            raise ValueError(f"its line of {name} is not found; edit it by hand")
        data = changed.encode()
    except ValueError as error:
        raise UsageError(f"{path} cannot be changed: {error}") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path, private=True) as file:
            file.write(data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise UsageError(f"{path} is not UTF-8 text") from None


def _with_line(text: str, name: str, line: str) -> str:
    """TOML text with another line for a name outside of tables, added where there is none."""
    lines = text.splitlines(keepends=True)
    start = end = next((i for i, each in enumerate(lines) if each.lstrip().startswith("[")), len(lines))
    for i in range(start):
        if re.match(rf"\s*[\"']?{name}[\"']?\s*=", lines[i]):
            ends = (j for j in range(i + 1, len(lines) + 1) if _is_whole("".join(lines[i:j])))
            start, end = i, next(ends, i + 1)
            break
    if start and not lines[start - 1].endswith("\n"):
        lines[start - 1] += "\n"
    return "".join([*lines[:start], line, *lines[end:]])


def _is_whole(text: str) -> bool:
    """Whether a text is TOML by itself: values may go on over lines."""
    try:
        found: Mapping[str, Any] = tomllib.loads(text)
    except ValueError:
        return False
    return len(found) == 1
