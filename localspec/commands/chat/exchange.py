"""The slash commands that exchange something with the rest of the desk: files, editor, clipboard, earlier chats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from localspec.commands.chat.attached import read_file, without_files
from localspec.commands.chat.clipboard import copy
from localspec.commands.chat.editor import edit
from localspec.commands.chat.kept_chats import forget_all, kept_chats, new_file
from localspec.commands.chat.saved_chat import first_and_number, load
from localspec.commands.chat.views import FORMER_VIEWS, VIEWS
from localspec.errors import UsageError
from localspec.terminal.text import clip, on_one_line, terminal_size

if TYPE_CHECKING:
    from localspec.commands.chat.chat import Chat


def save_to(chat: Chat, argument: str) -> None:
    path = _path(argument, "save")
    before = first_and_number(path)
    ours = next((message["content"] for message in chat.session.messages if message["role"] == "user"), None)
    if before is not None and before[0] != ours:
        question = clip(on_one_line(without_files(before[0])), 40)
        raise UsageError(f"{path} holds another conversation ({question}): choose another name")
    chat.save(path)
    turns = "" if before is None else f", in place of what was saved there before ({_turns(before[1])})"
    chat.screen.note(f"saved to {path}{turns}")


def _turns(n: int) -> str:
    return f"{n} turn{'s' if n != 1 else ''}"


def load_from(chat: Chat, argument: str) -> None:
    go_on_with(chat, _path(argument, "load"))
    chat.keep_at(new_file())


def go_on_with(chat: Chat, path: Path) -> None:
    """Make a saved conversation the chat's, and show its last turn.

    Raises:
        SessionFileError, UsageError: it cannot be read; the chat stays as it was.
    """
    session, records = load(chat.llm, path)
    view = FORMER_VIEWS.get(name := session.notes.get("view", chat.view), name)
    if view not in VIEWS:
        raise UsageError(f"{path} is damaged: there is no view {view!r}")
    chat.llm.draft_length = session.notes.get("draft_length", chat.llm.draft_length)
    chat.session, chat.records, chat.view = session, records, view
    chat.last_question, chat.last_files, chat.status = None, (), ""
    model = session.notes.get("model", chat.llm.model_name)
    others = "" if model == chat.llm.model_name else f", said with {model}"
    chat.screen.note(f"loaded {_turns(len(records))}{others}")
    if records:
        question, answer = (message["content"] for message in session.messages[-2:])
        chat.last_question = question
        if chat.screen.terminal:
            chat.screen.question(without_files(question))
            chat.screen.answer(answer, chat.view)
            if records[-1].stats and records[-1].finish_reason == "cancelled":
                chat.screen.note("[broken off; /retry asks again]")
    chat.read_ahead()


def sessions(chat: Chat, argument: str) -> None:
    if argument == "forget":
        chat.screen.note(f"deleted {forget_all()} saved conversations")
        return
    kept = list(kept_chats())
    if not kept:
        raise UsageError("no conversation is saved yet")
    if argument:
        if not (argument.isascii() and argument.isdigit() and 1 <= int(argument) <= len(kept)):
            raise UsageError(f"/sessions takes a number from 1 to {len(kept)}, or forget")
        path = kept[int(argument) - 1].path
        go_on_with(chat, path)
        chat.keep_at(path)
        return
    columns, _ = terminal_size()
    for i, each in enumerate(kept, 1):
        turns = _turns(each.n_turns)
        head = f"{'*' if each.path == chat.keep_in else ' '}{i:>3}  "
        facts = f"{each.when}  {turns:>9}  "
        if columns >= 2 * len(head + facts):
            head += facts
        chat.screen.line(clip(head + each.question, columns - 1))


def attach(chat: Chat, argument: str) -> None:
    if argument == "none":
        chat.attached.clear()
    elif argument:
        file = read_file(_path(argument, "file"))
        n_tokens, n_ctx = len(chat.llm.tokenize(file.text)), chat.llm.n_ctx
        if n_tokens >= n_ctx:
            raise UsageError(f"{file.path} has {n_tokens:,} tokens, and the context is {n_ctx:,}")
        chat.attached = [other for other in chat.attached if other.path != file.path] + [file]
    going = ", ".join(map(str, chat.attached))
    chat.screen.note(f"with the next message: {going or 'no file'}")


def copy_answer(chat: Chat, argument: str) -> None:
    said = [message["content"] for message in chat.session.messages if message["role"] == "assistant"]
    if not any(said[-1:]):  # none, or one that was stopped while it thought
        raise UsageError("there is no answer to copy yet")
    text, what = said[-1], "the answer"
    if argument:
        from localspec.commands.chat.markdown import code_blocks

        found = code_blocks(text)
        if not found:
            raise UsageError("the last answer has no code block; /copy without a number copies all of it")
        if not (argument.isascii() and argument.isdigit() and 1 <= int(argument) <= len(found)):
            n_blocks = f"{len(found)} code block{'s' * (len(found) > 1)}"
            raise UsageError(f"/copy takes a number from 1 to {len(found)}: the last answer has {n_blocks}")
        text, what = found[int(argument) - 1], f"code block {int(argument)}"
    how = copy(text, chat.screen.file if chat.screen.ansi else None)
    chat.screen.note(f"copied {what} ({len(text):,} characters) {how}")


def edit_message(chat: Chat, argument: str) -> None:
    if not chat.screen.terminal:
        raise UsageError("/edit needs a terminal")
    chat.prepared = argument  # not lost if there is no editor
    with chat.screen.lent():
        chat.prepared, problem = edit(argument)
    if problem:
        chat.screen.error(problem)
    if not chat.screen.ansi:  # there is no line that could hold it
        text, chat.prepared = chat.prepared.strip(), ""
        if problem:
            chat.screen.line(text)
        elif text:
            chat.say(text)


def _path(argument: str, name: str) -> Path:
    if not argument:
        raise UsageError(f"/{name} needs a file name")
    return Path(argument.strip("\"'")).expanduser()
