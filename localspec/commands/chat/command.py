"""``localspec chat``: from a command line to a conversation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from localspec.commands.chat.chat import Chat, header
from localspec.commands.chat.commands import complete, is_command, run_command
from localspec.commands.chat.late_draft import LateDraft, may_be_drafted_for
from localspec.commands.chat.line_prompt import PlainPrompt
from localspec.commands.chat.screen import ChatScreen, no_echo
from localspec.commands.options import RunOptions
from localspec.system.home import home
from localspec.terminal.progress import Progress
from localspec.terminal.stdin import decode

if TYPE_CHECKING:
    from localspec.commands.chat.prompt import LineEditor
    from localspec.model_files.catalog import Entry


def chat_command(options: RunOptions) -> int:
    """Chat until the person leaves or the input ends.

    Returns:
        The exit status.
    """
    interactive = sys.stdin is not None and sys.stdin.isatty()
    missing: list[Entry] | None = [] if interactive and options.draft_may_come_late else None
    with Progress() as progress:
        llm = options.open(progress.report, late=missing)
    with llm, progress:
        screen = ChatScreen(plain=not interactive)
        defaults = llm.chat_defaults
        system = options.system if options.system is not None else defaults.get("system")
        chat = Chat(llm, screen, params=options.params(defaults), system=system)
        chat.loaded = progress.clear
        if not interactive:
            return _answer_lines(chat)
        # A terminal that is asked through prompt_toolkit never needs the system's echo: what is typed while the program
        # is busy would be printed into its output, and again at the prompt.
        with no_echo() if screen.ansi else nullcontext():
            if missing is None or not (missing or may_be_drafted_for(llm)):
                return _converse(chat)
            chat.late = LateDraft(llm, missing)
            try:
                return _converse(chat)
            finally:
                chat.late.stop()


def _answer_lines(chat: Chat) -> int:
    """Each line of standard input is a turn; commands are understood, anything else is text."""
    for warning in chat.llm.warnings:
        chat.screen.note(f"note: {warning}")
    good = True
    for line in _lines():
        if is_command(line):
            good = run_command(chat, line) and good
        elif line.strip():
            good = chat.ask(line) and good
        if chat.leaving:
            break
    return 0 if good else 1


def _lines() -> Iterator[str]:
    if sys.stdin is None:
        return
    for number, line in enumerate(sys.stdin.buffer, 1):
        yield decode(line, f"line {number} of standard input").rstrip("\r\n")


def _converse(chat: Chat) -> int:
    """Prompt, answer, repeat."""
    ask = _asker(chat)
    header(chat.llm, chat.screen, follows=chat.late is not None)
    chat.read_ahead()
    while not chat.leaving:
        chat.show_news()
        try:
            line = ask()
        except EOFError:
            break
        try:
            if line.startswith("/"):
                run_command(chat, line)
            elif line.strip():
                chat.ask(line.strip())
        except KeyboardInterrupt:  # in a command, or twice during an answer
            chat.loaded()
            chat.screen.note("[stopped]")
    return 0


def _asker(chat: Chat) -> Callable[[], str]:
    """The best way to ask for a line here; it raises ``EOFError`` when the person leaves."""
    screen = chat.screen
    prompt: PlainPrompt | LineEditor = PlainPrompt(screen.errors)
    if screen.ansi:
        from localspec.commands.chat.prompt import LineEditor

        prompt = LineEditor(home() / "history", complete, lambda: chat.toolbar, colour=screen.colour)
        if chat.late is not None:
            chat.late.changed = prompt.redraw

    def ask() -> str:
        while True:
            try:
                return prompt.ask()
            except KeyboardInterrupt:
                if not prompt.had_text:
                    screen.note("Ctrl-D or /quit leaves; /help lists the commands")

    return ask
