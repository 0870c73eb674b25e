"""The line where a person types: history, several lines, completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_done, is_searching
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import ConditionalContainer, FormattedTextControl, HSplit, Layout, Window
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from localspec.commands.chat.chat import Chat
from localspec.commands.chat.commands import ALIASES, COMMANDS
from localspec.system.files import home
from localspec.system.terminal import clip, decode

# Asking for a line where the terminal can only print.

QUOTES = '"""'  # around a message of several lines


def is_open(text: str) -> bool:
    text = text.strip()
    return text.startswith(QUOTES) and not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES))


def unquoted(text: str) -> str:
    """A message without quotes around it, behind a space so that it is no command."""
    if is_open(text) or not text.strip().startswith(QUOTES):
        return text
    return " " + text.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


class PlainPrompt:
    """Reads standard input as it is; the prompt goes to ``file``."""

    had_text = False

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def redraw(self) -> None:
        pass

    def ask(self, text: str = "") -> str:
        """The next message, over several lines while quotes are open or a line ends with a backslash; ``EOFError``: the
        input has ended."""
        lines: list[str] = []
        while True:
            print(". " if lines else "> ", end="", file=self._file, flush=True)
            try:
                data = sys.stdin.buffer.readline()
            except KeyboardInterrupt:
                print(file=self._file, flush=True)
                raise
            if not data:
                raise EOFError
            line = decode(data, "the line").rstrip("\r\n")
            going_on = line.endswith("\\")
            lines.append(line[:-1] if going_on else line)
            if not going_on and not is_open("\n".join(lines)):
                return unquoted("\n".join(lines))


PROMPT = "> "
EDIT = "/edit"  # result of Ctrl-X Ctrl-E


class CommandCompleter(Completer):
    """Completes the last word of a command, or the path that follows it."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, space, rest = text.partition(" ")
        command = COMMANDS.get(ALIASES.get(name[1:], name[1:])) if space else None
        if not text.startswith("/") or "\n" in text or (space and command is None):
            return
        if command is not None and command.takes_path:
            yield from PathCompleter(expanduser=True).get_completions(Document(rest.lstrip()), complete_event)
            return
        current = text.rpartition(" ")[2]
        for word in [f"/{each}" for each in COMMANDS] if command is None else command.words():
            if word.startswith(current):
                yield Completion(word, start_position=-len(current))


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter", filter=~is_searching)  # Ctrl-R, where it takes what was found
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        elif is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @bindings.add("c-x", "c-e")
    def _(event: KeyPressEvent) -> None:
        event.app.exit(result=f"{EDIT} {event.current_buffer.text}")

    return bindings


class _SavedHistory(FileHistory):
    """What cannot be written, as on a full disk, stays in memory."""

    def store_string(self, string: str) -> None:
        with suppress(OSError, ValueError):  # ValueError: no text in UTF-8
            super().store_string(string)


def open_history(path: Path) -> History:
    """The history file, readable by its owner only; else in memory."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return _SavedHistory(path)


class LineEditor:
    """Asks for a line in a terminal that moves the cursor, with the chat's status line below.

    A complete line is shown on the screen: wrapped between words, which the editor cannot do.
    """

    def __init__(self, chat: Chat) -> None:
        # The answer to a cursor position request arrives as input, where it ends up in the text if we are not reading.
        os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")

        self._screen = chat.screen
        self._session: PromptSession[str] = PromptSession(
            erase_when_done=True,
            history=open_history(home() / "history"),
            completer=CommandCompleter(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            multiline=True,
            key_bindings=_bindings(),
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else ". ",
            style=Style.from_dict({"status": "dim", "prompt": "bold ansiblue"}),
            color_depth=None if chat.screen.colour else ColorDepth.DEPTH_1_BIT,
        )

        def status() -> StyleAndTextTuples:
            columns = self._session.app.output.get_size().columns
            return [("class:status", clip(chat.toolbar, columns - 1))]

        # Right below the input, where it also is while an answer streams. (The library's own toolbar waits for the
        # terminal to report the cursor's position.)
        below = ConditionalContainer(Window(FormattedTextControl(status), height=1), filter=~is_done)
        self._session.app.layout = Layout(
            HSplit([self._session.layout.container, below]), focused_element=self._session.default_buffer
        )

    def ask(self, text: str = "") -> str:
        """The next message; ``text`` stands in the line already. ``EOFError``: Ctrl-D on an empty line;
        ``KeyboardInterrupt``: Ctrl-C, ``had_text`` tells whether it threw something away."""
        message: Any = [("class:prompt", PROMPT)]
        try:
            line = self._session.prompt(message, default=text)
        except KeyboardInterrupt:
            if self.had_text:
                self._screen.question(self._session.default_buffer.text)
            raise
        finally:
            self._screen.mark_pastes()  # the editor has just ended that
        self._screen.question(line)
        return unquoted(line)

    def redraw(self) -> None:
        """Redraw the status line; thread-safe."""
        self._session.app.invalidate()

    @property
    def had_text(self) -> bool:
        return bool(self._session.default_buffer.text)
