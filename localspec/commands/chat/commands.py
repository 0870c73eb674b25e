"""The slash commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.commands.chat.saved_chat import load, save
from localspec.commands.chat.style import Style
from localspec.commands.chat.views import FORMER_VIEWS, VIEWS
from localspec.errors import UsageError, line_of
from localspec.sampling.sampling import CHAT_SETTINGS, SamplingParams
from localspec.terminal.text import clip, on_one_line

if TYPE_CHECKING:
    from localspec.commands.chat.chat import Chat


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command.

    Attributes:
        usage: its arguments, as ``/help`` shows them.
        help: what it does, in a few words.
        run: does it; an error is raised.
        words: what can be typed as its argument.
        several: whether it takes several of them.
    """

    usage: str
    help: str
    run: Callable[[Chat, str], None]
    words: Callable[[], Iterable[str]] = tuple
    several: bool = False


def is_command(line: str) -> bool:
    """Whether a line names a command that exists."""
    return line.startswith("/") and (line[1:].split() or [""])[0] in COMMANDS


def run_command(chat: Chat, line: str) -> bool:
    """Run a line that starts with a slash; what goes wrong is reported in one line.

    Returns:
        Whether it worked.
    """
    name, _, argument = line[1:].strip().partition(" ")
    try:
        if name not in COMMANDS:
            close = get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean /{close[0]}?" if close else "/help lists the commands"
            raise UsageError(f"no command /{name}: {hint} (a space in front sends the line as text)")
        COMMANDS[name].run(chat, argument.strip())
    except BrokenPipeError:
        raise
    except Exception as error:  # whatever it is, it must not cost the conversation
        chat.screen.error(line_of(error))
        return False
    return True


def complete(before: list[str]) -> Iterable[str]:
    """The words that can follow the words of a command so far."""
    if not before:
        return [f"/{name}" for name in COMMANDS]
    command = COMMANDS.get(before[0][1:])
    return command.words() if command and (len(before) == 1 or command.several) else ()


# -- looking ---------------------------------------------------------------------------------------------------------


def _help(chat: Chat, argument: str) -> None:
    for name, command in COMMANDS.items():
        chat.screen.line(f"  {f'/{name} {command.usage}':<31} {command.help}")
    chat.screen.line("Alt-Enter, or a backslash at the end, starts another line; Tab completes.")
    print(chat.screen.legend(chat.llm.draft_names), file=chat.screen.file)


def _view(chat: Chat, argument: str) -> None:
    argument = FORMER_VIEWS.get(argument, argument)
    if argument and argument not in VIEWS:
        raise UsageError(f"no view {argument!r}: there are {', '.join(VIEWS)}")
    chat.view = argument or chat.view
    chat.screen.note(f"view: {chat.view}")


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
    chat.screen.prose(chat.llm.explain())


def _race(chat: Chat, argument: str) -> None:
    from localspec.commands.chat.race import race

    race(chat)


# -- changing --------------------------------------------------------------------------------------------------------


def _draft(chat: Chat, argument: str) -> None:
    if argument:
        if chat.late is not None:
            chat.late.stop()
        try:
            chat.llm.set_draft(_split(argument) or "auto")
        finally:
            chat.loaded()
        chat.show_news()
    chat.status = ""
    chat.screen.note(f"draft: {' + '.join(chat.llm.draft_names) or 'none'}")


def _length(chat: Chat, argument: str) -> None:
    if argument:
        chat.llm.draft_length = argument
    chat.status = ""
    chat.screen.note(f"draft length: {chat.llm.draft_length}")


def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if value:
        chat.params = set_parameter(chat.params, name, value)
    for each in [name] if name else CHAT_SETTINGS:
        chat.screen.note(f"{each} {getattr(chat.params, _known(each))!r}")


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
        close = get_close_matches(name, CHAT_SETTINGS, n=1)
        hint = f"did you mean {close[0]}?" if close else ", ".join(CHAT_SETTINGS)
        raise UsageError(f"no parameter {name!r}: {hint}")
    return name


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.session.system = None if argument.lower() == "none" else argument
    chat.screen.note(f"system prompt: {chat.session.system or 'none'}")


def _undo(chat: Chat, argument: str) -> None:
    if not chat.records:
        raise UsageError("there is nothing to undo")
    question = chat.session.messages[-2]["content"]
    chat.session.undo()
    chat.records.pop()
    chat.screen.note(f"taken back: {clip(on_one_line(question), 60)}")


def _retry(chat: Chat, argument: str) -> None:
    question = chat.last_question
    if question is None:
        raise UsageError("there is no question to ask again")
    before, record = chat.session.messages[-2:], chat.records[-1:]
    if not record or before[0]["content"] != question:
        chat.ask(question)
        return
    chat.session.undo()
    chat.records.pop()
    if not chat.ask(question):  # the answer that there was is better than none
        chat.session.messages += before
        chat.records += record


# -- files -----------------------------------------------------------------------------------------------------------


def _save(chat: Chat, argument: str) -> None:
    path, llm = _path(argument, "save"), chat.llm
    save(
        path,
        chat.session,
        chat.records,
        model=llm.model_name,
        draft=llm.draft_names,
        backend=llm.backend_name,
        view=chat.view,
        draft_length=llm.draft_length,
    )
    chat.screen.note(f"saved to {path}")


def _load(chat: Chat, argument: str) -> None:
    path = _path(argument, "load")
    session, records = load(chat.llm, path)
    view = FORMER_VIEWS.get(name := session.notes.get("view", chat.view), name)
    if view not in VIEWS:
        raise UsageError(f"{path} is damaged: there is no view {view!r}")
    chat.llm.draft_length = session.notes.get("draft_length", chat.llm.draft_length)
    chat.session, chat.records, chat.view = session, records, view
    chat.last_question, chat.status = None, ""
    model = session.notes.get("model", chat.llm.model_name)
    others = "" if model == chat.llm.model_name else f", said with {model}"
    chat.screen.note(f"loaded {len(records)} turn{'s' if len(records) != 1 else ''}{others}")
    if records:
        question, answer = (message["content"] for message in session.messages[-2:])
        chat.last_question = question
        if chat.screen.terminal:
            chat.screen.line(f"> {question}", Style.PROMPT)
            chat.screen.line(answer)
    chat.read_ahead()


def _quit(chat: Chat, argument: str) -> None:
    chat.leaving = True


def _split(argument: str) -> list[str]:
    try:
        return shlex.split(argument)
    except ValueError as error:
        raise UsageError(f"cannot read {argument!r}: {error}") from None


def _path(argument: str, name: str) -> Path:
    if not argument:
        raise UsageError(f"/{name} needs a file name")
    return Path(argument.strip("\"'")).expanduser()


def _files() -> Iterable[str]:
    with suppress(OSError):
        return sorted(entry.name for entry in Path().iterdir() if entry.suffix in (".chat", ".session", ".json"))
    return ()


def _models() -> Iterable[str]:
    from localspec.model_files.catalog import Catalog

    return ["auto", "none", "ngram", "head", "early-exit", *Catalog.load()]


COMMANDS = {
    "view": Command("|".join(VIEWS), "how answers are shown", _view, lambda: VIEWS),
    "draft": Command("auto|none|ngram|MODEL …", "who guesses", _draft, _models, several=True),
    "length": Command("auto|N", "how many tokens a draft has", _length, lambda: ("auto",)),
    "set": Command("[NAME [VALUE]]", "sampling parameters", _set, lambda: CHAT_SETTINGS),
    "stats": Command("", "figures, and how far guesses reached", _stats),
    "why": Command("", "why it is, or is not, drafting", _why),
    "race": Command("", "the last question plain and speculative", _race),
    "system": Command("[TEXT|none]", "the system prompt", _system),
    "undo": Command("", "take the last turn back", _undo),
    "retry": Command("", "ask the last question again", _retry),
    "save": Command("FILE", "keep the chat in a file", _save, _files),
    "load": Command("FILE", "go on with a saved chat", _load, _files),
    "help": Command("", "this list", _help),
    "quit": Command("", "leave (Ctrl-D does too)", _quit),
}
