"""``localspec chat``: from a command line to a conversation."""

from __future__ import annotations

import sys
from dataclasses import replace

from localspec.commands.chat.chat import (
    Chat,
    KeptChat,
    LateDraft,
    header,
    kept_chats,
    may_be_drafted_for,
    new_file,
    with_project,
)
from localspec.commands.chat.commands import LEAVING, go_on_with, is_command, run_command
from localspec.commands.chat.prompt import LineEditor, PlainPrompt
from localspec.commands.chat.screen import VIEWS, ChatScreen
from localspec.commands.options import RunOptions, base_model_notes
from localspec.model_files.catalog import Catalog, Entry
from localspec.system.terminal import Progress, decode


def chat_command(options: RunOptions, project: str | None, *, view: str | None, resume: bool, keep: bool) -> int:
    """Chat until the person leaves or the input ends; returns the exit status.

    Args:
        options: what to load, and how to sample.
        project: what to copy from too; None is what was kept for this folder, where someone sits at a terminal.
        view: how answers are shown; one of config.toml holds for terminals alone.
        resume: go on with the conversation that was kept last.
        keep: keep the conversation: of a person at a terminal, or one that is resumed.
    """
    interactive = sys.stdin is not None and sys.stdin.isatty()
    if interactive or project is not None:
        options = with_project(options, project)
    latest = next(kept_chats(), None) if resume else None
    if latest is not None and (options.model is None or "model" in options.from_file):
        options = replace(options, model=_model_of(latest, options.model))
    missing: list[Entry] | None = [] if interactive and options.draft_may_come_late else None
    screen = ChatScreen(plain=not interactive)
    with screen.held() as hold, Progress() as progress:

        def report(what: str, fraction: float | None) -> None:
            hold()  # not earlier: a question may be asked before anything is loaded
            progress.report(what, fraction)

        llm = options.open(report, late=missing)
        hold()
        with llm:
            defaults = llm.chat_defaults
            system = options.system if options.system is not None else defaults.get("system")
            if view is None or ("view" in options.from_file and not interactive):
                view = VIEWS[0]
            chat = Chat(llm, screen, params=options.params(defaults), system=system, view=view)
            chat.loaded, chat.remembers = progress.clear, interactive
            chat.asked = options.asked
            chat.keep_in = new_file() if keep and (interactive or resume) else None
            progress.clear()
            if missing is not None and (missing or may_be_drafted_for(llm)):
                chat.late = LateDraft(llm, missing, corpora=options.corpora())
            try:
                if interactive:
                    header(chat)
                    if "system" in options.from_file:
                        screen.note(f"note: system prompt, as remembered: {options.system or 'none'}")
                if latest is not None:
                    _resume(chat, options, latest)
                elif resume:
                    screen.note("note: no saved conversation yet; starting a new one")
                return converse(chat) if interactive else answer_lines(chat)
            finally:
                if chat.late is not None:
                    chat.late.stop()


def _model_of(kept: KeptChat, usual: str | None) -> str | None:
    """Model for a kept conversation where none is named: its own if still there; None is the catalogue's default."""
    catalog = Catalog.load()
    if kept.model in catalog:
        if not catalog[kept.model].present:
            return usual
        return kept.model if kept.model != catalog.default_pair()[0].name else None
    return str(kept.file) if kept.file.is_file() else usual


def _resume(chat: Chat, options: RunOptions, latest: KeptChat) -> None:
    """Continue a kept conversation; the command line's options go before what was kept."""
    go_on_with(chat, latest.path)
    chat.keep_at(latest.path)
    named = {name: value for name, value in options.sampling.items() if name not in options.from_file}
    chat.params = replace(chat.params, **named)
    if options.system is not None and "system" not in options.from_file:
        chat.session.system = options.system
    if options.length() != "auto" and "draft_length" not in options.from_file:
        chat.llm.draft_length = options.length()


def answer_lines(chat: Chat) -> int:
    """Each line of standard input is a turn or a command."""
    for warning in [*chat.llm.warnings, *base_model_notes(chat.llm)]:
        chat.screen.note(f"note: {warning}")
    good = True
    for number, data in enumerate(sys.stdin.buffer if sys.stdin is not None else (), 1):
        line = decode(data, f"line {number} of standard input").rstrip("\r\n")
        if is_command(line):
            good = run_command(chat, line) and good
        elif line.strip():
            good = chat.say(line) and good
        if chat.leaving:
            break
    return 0 if good else 1


def converse(chat: Chat) -> int:
    """Ask a person for lines, in the best way that there is here, until they leave."""
    screen = chat.screen
    prompt: PlainPrompt | LineEditor = LineEditor(chat) if screen.ansi else PlainPrompt(screen.errors)
    if chat.late is not None:
        chat.late.changed = prompt.redraw
    chat.read_ahead()
    while not chat.leaving:
        chat.show_news()
        try:
            text, chat.prepared = chat.prepared, ""
            line = prompt.ask(text)
        except EOFError:
            break
        except KeyboardInterrupt:
            if not prompt.had_text:
                screen.note("Ctrl-D or /quit leaves; /help lists the commands")
            continue
        try:
            if line.startswith("/") or line.rstrip() in LEAVING:
                run_command(chat, line.rstrip())
            elif line.strip():
                chat.say(line.strip())
        except KeyboardInterrupt:  # in a command, or twice during an answer
            chat.loaded()
            screen.note("[stopped]")
    return 0
