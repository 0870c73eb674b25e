"""A message written in the person's own editor."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from localspec.errors import UsageError
from localspec.system.interrupts import interrupts_left_to_others


def edit(text: str) -> tuple[str, str | None]:
    """Let the person edit a text.

    Returns:
        The text as the editor left it, and, if the editor failed, a line that says so.

    Raises:
        UsageError: there is no editor, or what it left cannot be read; then the file is kept.
    """
    command = _editor()
    handle, name = tempfile.mkstemp(prefix="localspec-", suffix=".md")
    path = Path(name)
    with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    try:
        with interrupts_left_to_others():
            status = subprocess.call([*command, name])
    except OSError as error:
        path.unlink()
        return text, f"cannot run {command[0]}: {error.strerror or error}"
    try:
        edited = path.read_text(encoding="utf-8-sig").rstrip("\n")
    except (OSError, ValueError):
        raise UsageError(f"{command[0]} did not write UTF-8 text; its output is in {path}") from None
    path.unlink()
    return edited, f"{command[0]} ended with status {status}; the text is as it left it" if status else None


def split_command(command: str, *, windows: bool) -> list[str]:
    """A command and its arguments; on Windows a backslash is part of a path, and quotes only hold it together.

    Raises:
        ValueError: a quote is never closed.
    """
    parts = shlex.split(command, posix=not windows)
    return [part.strip('"') for part in parts] if windows else parts


def _editor() -> list[str]:
    for variable in ("VISUAL", "EDITOR"):
        if command := os.environ.get(variable, "").strip():
            try:
                return split_command(command, windows=sys.platform == "win32")
            except ValueError as error:
                raise UsageError(f"cannot read ${variable}: {error}") from None
    found = next(filter(shutil.which, ("editor", "nano", "vim", "vi", "notepad")), None)
    if found is None:
        raise UsageError("no editor was found; set EDITOR to its command")
    return [found]
