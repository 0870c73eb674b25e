"""The slash commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from localspec.commands.chat.attached import without_files
from localspec.commands.chat.exchange import attach, copy_answer, edit_message, load_from, save_to, sessions
from localspec.commands.chat.project import drafters_with, keep_project, kept_project, named_project
from localspec.commands.chat.style import Style
from localspec.commands.chat.views import FORMER_VIEWS, VIEWS
from localspec.errors import UsageError, line_of
from localspec.runtime.arguments import THINK, draft_specs, with_free
from localspec.sampling.sampling import CHAT_SETTINGS, SamplingParams
from localspec.spec_decode.drafters.names import is_corpus
from localspec.terminal.text import clip, on_one_line

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
            raise UsageError(f"no command /{name}: {hint} (start the line with a space to send it as text)")
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


def takes_path(name: str) -> bool:
    """Whether a path follows a command, which is named with its slash."""
    return name[1:] in COMMANDS and COMMANDS[name[1:]].takes_path


# -- looking ---------------------------------------------------------------------------------------------------------


def _help(chat: Chat, argument: str) -> None:
    for name, command in COMMANDS.items():
        chat.screen.line(f"  {f'/{name} {command.usage}':<37} {command.help}")
    chat.screen.line('Alt-Enter, a backslash at the end, or """ around all of them: several lines.')
    chat.screen.line("Tab completes, Ctrl-R searches what was typed before.")
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
    explanation = chat.llm.explain()
    chains = chat.llm.run(lambda pair: pair.why_chains)
    chat.screen.prose(f"{explanation}; drafts do not branch: {chains}" if chains else explanation)


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
    chat.screen.note(f"draft: {' + '.join(chat.llm.draft_names) or 'none'}")


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
    chat.screen.note(f"project: {kept or 'none'}; draft: {' + '.join(chat.llm.draft_names) or 'none'}")


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
    if argument:
        chat.session.system = None if argument.lower() == "none" else argument
    chat.screen.note(f"system prompt: {chat.session.system or 'none'}")


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
    before, record = chat.session.messages[-2:], chat.records[-1:]
    if not record or before[0]["content"] != question:
        chat.ask(question, chat.last_files)
        return
    chat.session.undo()
    chat.records.pop()
    if not chat.ask(question, chat.last_files):  # the answer that there was is better than none
        chat.session.messages += before
        chat.records += record
        chat.keep()


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


COMMANDS = {
    "view": Command("|".join(VIEWS), "how answers are shown", _view, lambda: VIEWS),
    "draft": Command(
        "auto|none|ngram|MODEL … [only]", "who guesses; n-grams too, unless only", _draft, _models, several=True
    ),
    "project": Command("[PATH|none]", "a folder to copy guesses from, kept", _project, takes_path=True),
    "length": Command("auto|N", "how many tokens a draft has", _length, lambda: ("auto",)),
    "set": Command("[NAME [VALUE]]", "sampling parameters", _set, lambda: CHAT_SETTINGS),
    "stats": Command("", "figures, and how far guesses reached", _stats),
    "why": Command("", "why it is, or is not, drafting", _why),
    "race": Command("", "the last question plain and speculative", _race),
    "think": Command("[on|off|auto|show|hide|N]", "thinking before answers", _think, lambda: _THINK),
    "system": Command("[TEXT|none]", "the system prompt", _system),
    "undo": Command("", "take the last turn back", _undo),
    "retry": Command("", "ask the last question again", _retry),
    "file": Command("[PATH|none]", "a file for the next message", attach, takes_path=True),
    "edit": Command("[TEXT]", "write in $EDITOR (Ctrl-X Ctrl-E too)", edit_message),
    "copy": Command("[N]", "copy the answer, or its Nth code block", copy_answer),
    "save": Command("FILE", "keep the chat in a file", save_to, takes_path=True),
    "load": Command("FILE", "go on with a saved chat", load_from, takes_path=True),
    "sessions": Command("[N|forget]", "the kept chats; go on with the Nth", sessions, lambda: ("forget",)),
    "help": Command("", "this list", _help),
    "quit": Command("", "leave (Ctrl-D does too)", _quit),
}
