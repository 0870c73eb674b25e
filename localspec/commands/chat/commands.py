"""The slash commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localspec.commands.chat.attached import without_files
from localspec.commands.chat.exchange import attach, copy_answer, edit_message, load_from, save_to, sessions
from localspec.commands.chat.project import drafters_with, keep_project, kept_project, named_project
from localspec.commands.chat.settings import remember
from localspec.commands.chat.style import Style
from localspec.commands.chat.views import FORMER_VIEWS, VIEWS, guessing
from localspec.errors import UsageError, line_of
from localspec.runtime.arguments import THINK, draft_specs, with_free
from localspec.sampling.sampling import CHAT_SETTINGS, SamplingParams
from localspec.spec_decode.drafters.names import is_corpus
from localspec.terminal.text import clip, on_one_line
from localspec.values import nearest

if TYPE_CHECKING:
    from localspec.commands.chat.chat import Chat


ONLY = "only"
"""Among the names that ``/draft`` takes, what ``--draft-only`` is among options."""


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command.

    Attributes:
        usage: its arguments, as ``/help`` shows them.
        help: what it does, in a few words.
        run: does it; an error is raised.
        words: what can be typed as its argument.
        several: whether it takes several of them.
        takes_path: whether its argument is a path.
    """

    usage: str
    help: str
    run: Callable[[Chat, str], None]
    words: Callable[[], Iterable[str]] = tuple
    several: bool = False
    takes_path: bool = False


def is_command(line: str) -> bool:
    """Whether a line names a command that exists, or is a word that leaves."""
    name = (line[1:].split() or [""])[0]
    return line in LEAVING or (line.startswith("/") and (name in COMMANDS or name in ALIASES))


def run_command(chat: Chat, line: str) -> bool:
    """Run a line that starts with a slash, or leaves; what goes wrong is reported in one line.

    Returns:
        Whether it worked.
    """
    name, _, argument = line.removeprefix("/").strip().partition(" ")
    try:
        COMMANDS[named(name)].run(chat, argument.strip())
    except BrokenPipeError:
        raise
    except Exception as error:  # whatever it is, it must not cost the conversation
        chat.screen.error(line_of(error))
        return False
    return True


def named(name: str) -> str:
    """The command of a name, of one of its other names, or of the beginning of one.

    Raises:
        UsageError: there is none, or there are several.
    """
    if name in COMMANDS or name in ALIASES:
        return ALIASES.get(name, name)
    begun = [each for each in (*COMMANDS, *ALIASES) if name and each.startswith(name)]
    if len({ALIASES.get(each, each) for each in begun}) == 1:
        return ALIASES.get(begun[0], begun[0])
    near = " or /".join(begun) or nearest(name, (*COMMANDS, *ALIASES))
    hint = f"did you mean /{near}?" if near else "/help lists the commands"
    raise UsageError(f"no command /{name}: {hint} (start the line with a space to send it as text)")


def complete(before: list[str]) -> Iterable[str]:
    """The words that can follow the words of a command so far."""
    if not before:
        return [f"/{name}" for name in COMMANDS]
    name = before[0][1:]
    command = COMMANDS.get(ALIASES.get(name, name))
    return command.words() if command and (len(before) == 1 or command.several) else ()


def takes_path(name: str) -> bool:
    """Whether a path follows a command, which is named with its slash."""
    return name[1:] in COMMANDS and COMMANDS[name[1:]].takes_path


# -- looking ---------------------------------------------------------------------------------------------------------


def _help(chat: Chat, argument: str) -> None:
    """The commands of a group, in the order in which they are used, or one; no group fills a small screen."""
    for name in GROUPS.get(argument) or [named(argument.removeprefix("/"))]:
        usage, help = f"/{name} {COMMANDS[name].usage}", COMMANDS[name].help
        chat.screen.line(f"  {usage:<34}  {help}")
    if argument:
        return
    chat.screen.line('Alt-Enter, a backslash at the end, or """ around all of them: several lines.')
    chat.screen.line("Tab completes, Ctrl-R searches what was typed before.")
    if legend := chat.screen.legend(chat.llm.draft_names):
        print(legend, file=chat.screen.file)
    chat.screen.line("/help guessing: how answers are guessed, and what it gains")


def _view(chat: Chat, argument: str) -> None:
    argument = FORMER_VIEWS.get(argument, argument)
    if argument and argument not in VIEWS:
        raise UsageError(f"no view {argument!r}: there are {', '.join(VIEWS)}")
    chat.view = argument or chat.view
    chat.screen.note(f"view: {chat.view}{_remembered(chat, 'view', argument) if argument else ''}")


def _remembered(chat: Chat, name: str, value: str | None) -> str:
    """Remember a setting for later chats; what to say of that."""
    if not chat.remembers:
        return ""
    try:
        remember(name, value)
    except UsageError as error:
        chat.screen.error(f"only for this chat: {error}")
        return ""
    return " (also in later chats)"


def _stats(chat: Chat, argument: str) -> None:
    from localspec.commands.chat.figures import stats_parts
    from localspec.commands.report.terminal import Screen

    answers = [record.stats for record in chat.records if record.stats]
    if not answers:
        raise UsageError("there are no figures yet: ask something first")
    screen = Screen(chat.screen.file)
    for part in stats_parts(answers, unicode=screen.unicode):
        screen.show(part)


def _why(chat: Chat, argument: str) -> None:
    chat.screen.line(chat.llm.explain())


def _race(chat: Chat, argument: str) -> None:
    from localspec.commands.chat.race import race

    race(chat)


# -- changing --------------------------------------------------------------------------------------------------------


def _draft(chat: Chat, argument: str) -> None:
    if argument:
        if chat.late is not None:
            chat.late.stop()
        try:
            words = _split(argument)
            specs = draft_specs([word for word in words if word != ONLY] or "auto")
            chat.llm.set_draft(specs if ONLY in words else with_free(specs))
        finally:
            chat.loaded()
        chat.show_news()
    chat.status = ""
    chat.screen.note(guessing(chat.llm.draft_names))


def _project(chat: Chat, argument: str) -> None:
    if argument:
        project = named_project(argument.strip("\"'"))
        follows = chat.late is not None and bool(chat.late.status)
        if chat.late is not None:
            chat.late.stop()
        try:
            names = chat.llm.run(lambda pair: pair.draft_specs)
            corpora = [name for name in names if is_corpus(name)]
            chat.llm.set_draft(drafters_with(["auto", *corpora] if follows else names, project))
            keep_project(project)
        finally:
            chat.loaded()
        chat.show_news()
    kept = kept_project()
    chat.screen.note(f"project: {kept or 'none'}. {guessing(chat.llm.draft_names)}")


def _length(chat: Chat, argument: str) -> None:
    if argument:
        chat.llm.draft_length = argument
    chat.status = ""
    chat.screen.note(f"guesses at a time: {chat.llm.draft_length}")


def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if value:
        chat.params = set_parameter(chat.params, name, value)
    for each in [name] if name else CHAT_SETTINGS:
        chat.screen.note(f"{each} {_value(getattr(chat.params, _known(each)))}")


def _value(value: Any) -> str:
    """A parameter's value as it is typed."""
    return " ".join(map(repr, value)) or "none" if isinstance(value, tuple) else "none" if value is None else str(value)


def set_parameter(params: SamplingParams, name: str, value: str) -> SamplingParams:
    """The parameters with one changed; ``none`` and ``off`` are what it is by itself.

    Raises:
        UsageError: no such parameter, or not a value for it.
    """
    default = getattr(SamplingParams(), _known(name))
    if value.strip().lower() in ("none", "off"):
        return replace(params, **{name: default})
    if name == "stop":
        text = value.strip("\"'").replace("\\n", "\n").replace("\\t", "\t")
        return replace(params, stop=(text,))
    try:
        number: Any = float(value) if isinstance(default, float) else int(value)
    except ValueError:
        kind = "number" if isinstance(default, float) else "whole number"
        raise UsageError(f"{name} must be a {kind}, not {value!r}") from None
    return replace(params, **{name: number})


def _known(name: str) -> str:
    if name not in CHAT_SETTINGS:
        near = nearest(name, CHAT_SETTINGS)
        hint = f"did you mean {near}?" if near else ", ".join(CHAT_SETTINGS)
        raise UsageError(f"no parameter {name!r}: {hint}")
    return name


_THINK = (*THINK, "show", "hide")


def _think(chat: Chat, argument: str) -> None:
    if chat.llm.thinking is None:
        raise UsageError(f"{chat.llm.model_name} does not support thinking")
    if argument.isdecimal() or argument == "none":
        chat.thinking_budget = None if argument == "none" else int(argument)
    elif argument in ("show", "hide"):
        chat.screen.folded = argument == "hide"
        thoughts = [message["reasoning_content"] for message in chat.session.messages if "reasoning_content" in message]
        if argument == "show" and thoughts:
            chat.screen.line(thoughts[-1], Style.THINKING)
    elif argument in THINK:
        chat.think = argument
    elif argument:
        raise UsageError(f"/think takes a number of tokens, none, or one of {', '.join(_THINK)}")
    budget = "any number of" if chat.thinking_budget is None else f"at most {chat.thinking_budget}"
    chat.screen.note(f"think: {chat.think}, {budget} tokens, {'hidden' if chat.screen.folded else 'shown'}")


def _system(chat: Chat, argument: str) -> None:
    word, kept = argument.lower(), ""
    if argument:
        text = chat.llm.chat_defaults.get("system") if word == "default" else "" if word == "none" else argument
        chat.session.system = text
        kept = _remembered(chat, "system", None if word == "default" else text)
    chat.screen.note(f"system prompt: {chat.session.system or 'none'}{kept}")


def _new(chat: Chat, argument: str) -> None:
    said = bool(chat.records)
    chat.begin()
    before = "; /sessions lists the one before" if said and chat.keep_in is not None else ""
    chat.screen.note(f"a new conversation begins{before}")


def _undo(chat: Chat, argument: str) -> None:
    if not chat.records:
        raise UsageError("there is nothing to undo")
    question = chat.session.messages[-2]["content"]
    chat.session.undo()
    chat.records.pop()
    chat.keep()
    chat.screen.note(f"undone: {clip(on_one_line(without_files(question)), 60)}")


def _retry(chat: Chat, argument: str) -> None:
    question = chat.last_question
    if question is None:
        raise UsageError("there is no question to ask again")
    turn, record = chat.session.messages[-2:], chat.records[-1:]
    if not record or turn[0]["content"] != question:
        chat.ask(question, chat.last_files)
        return
    chat.session.undo()
    chat.records.pop()
    chat.ask(question, chat.last_files, instead=(turn, record[0]))


def _quit(chat: Chat, argument: str) -> None:
    chat.leaving = True


def _split(argument: str) -> list[str]:
    try:
        return shlex.split(argument)
    except ValueError as error:
        raise UsageError(f"cannot read {argument!r}: {error}") from None


def _models() -> Iterable[str]:
    from localspec.model_files.catalog import Catalog

    return ["auto", "none", "ngram", "head", "mtp", "early-exit", ONLY, *Catalog.load()]


COMMANDS: dict[str, Command] = {
    "new": Command("", "begin a new conversation", _new),
    "retry": Command("", "ask the last question again", _retry),
    "undo": Command("", "take the last turn back", _undo),
    "view": Command("|".join(VIEWS), "how answers are shown", _view, lambda: VIEWS),
    "file": Command("[PATH|none]", "a file for the next message", attach, takes_path=True),
    "edit": Command("[TEXT]", "write in $EDITOR (or Ctrl-X Ctrl-E)", edit_message),
    "copy": Command("[N]", "copy the answer, or its Nth code block", copy_answer),
    "system": Command("[TEXT|none|default]", "the system prompt", _system, lambda: ("none", "default")),
    "set": Command("[NAME [VALUE]]", "sampling parameters", _set, lambda: CHAT_SETTINGS),
    "think": Command("[on|off|auto|show|hide|N]", "thinking before answers", _think, lambda: _THINK),
    "sessions": Command("[N|forget]", "the kept chats; go on with the Nth", sessions, lambda: ("forget",)),
    "save": Command("FILE", "keep the chat in a file", save_to, takes_path=True),
    "load": Command("FILE", "go on with a saved chat", load_from, takes_path=True),
    "help": Command("[NAME|guessing]", "this list", _help, lambda: ("guessing", *COMMANDS)),
    "quit": Command("", "leave (Ctrl-D does too)", _quit),
    "draft": Command(
        "auto|none|ngram|MODEL … [only]", "who guesses, with n-grams unless only", _draft, _models, several=True
    ),
    "length": Command("auto|N", "how many tokens are guessed at a time", _length, lambda: ("auto",)),
    "project": Command("[PATH|none]", "a folder to copy guesses from, kept", _project, takes_path=True),
    "stats": Command("", "figures, and how far guesses reached", _stats),
    "why": Command("", "who guesses now, and why not", _why),
    "race": Command("", "the last question, plain and with guesses", _race),
}

ALIASES = {"clear": "new", "reset": "new", "exit": "quit", "bye": "quit", "q": "quit", "?": "help"}
"""Other names of commands, which other programs have for them."""

LEAVING = ("exit", "quit")
"""Lines that leave without a slash."""

_GUESSING = ("draft", "length", "project", "stats", "why", "race")

GROUPS = {"": tuple(name for name in COMMANDS if name not in _GUESSING), "guessing": _GUESSING}
"""Names of commands as ``/help`` shows them together, by what follows it."""
