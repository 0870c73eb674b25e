"""The slash commands."""

from __future__ import annotations

import base64
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TextIO, TypeVar

from rich.table import Table
from rich.text import Text

from localspec.commands import config
from localspec.commands.chat.chat import (
    Chat,
    forget_all,
    keep_project,
    kept_chat,
    kept_chats,
    kept_project,
    load,
    named_project,
    new_file,
    read_file,
    shown_question,
    without_files,
)
from localspec.commands.chat.screen import VIEWS, guessing, no_echo
from localspec.commands.chat.typesetter import Style, code_blocks
from localspec.engine.options import draft_specs, with_free
from localspec.engine.request import Reply
from localspec.errors import LocalspecError, UsageError, line_of, nearest
from localspec.model_files.catalog import Catalog
from localspec.prompts.thinking import THINK
from localspec.report.model import Table as Grid
from localspec.report.renderers import Screen
from localspec.sampling.sampling import CHAT_SETTINGS, SamplingParams
from localspec.spec_decode.drafters.names import CORPUS, is_corpus
from localspec.spec_decode.rounds import PromptProgress, SpecStats
from localspec.system.machine import CPUTimes, others_share
from localspec.system.process import interrupts_left_to_others, on_interrupt
from localspec.system.terminal import Progress, clip, on_one_line, visible

_Thing = TypeVar("_Thing")

# A message written in the person's own editor.


def edit(text: str) -> tuple[str, str | None]:
    """Let the person edit a text: how the editor left it, and, if that failed, a line that says so. ``UsageError``:
    there is no editor, or what it left cannot be read."""
    named = (os.environ.get(variable, "").strip() for variable in ("VISUAL", "EDITOR"))
    usual = filter(shutil.which, ("editor", "nano", "vim", "vi", "notepad"))
    command = next(filter(None, (*named, *usual)), None)
    if command is None:
        raise UsageError("no editor was found; set EDITOR to its command")
    with NamedTemporaryFile(
        "w", encoding="utf-8", errors="replace", prefix="localspec-", suffix=".md", delete=False
    ) as file:
        file.write(text)
    path = Path(file.name)
    with interrupts_left_to_others():
        quoted = f'"{path}"' if sys.platform == "win32" else shlex.quote(str(path))
        status = subprocess.call(f"{command} {quoted}", shell=True)  # the variables hold command lines
    try:
        edited = path.read_text(encoding="utf-8-sig").rstrip("\n")
    except (OSError, ValueError):
        raise UsageError(f"{command} did not write UTF-8 text; its output is in {path}") from None
    path.unlink()
    return edited, f"{command} ended with status {status}; the text is as it left it" if status else None


# Copying to the clipboard: with the platform's tool, or by asking the terminal (OSC 52).

SECONDS = 5.0  # A tool waiting for a display that is gone would wait forever
MAX_OSC_52 = 74_994  # bytes that every terminal takes: xterm's limit of 100,000 bytes a sequence, in base64


def copy(text: str, terminal: TextIO | None) -> str:
    """Put a text on the clipboard, with a tool or by ``terminal``; returns how, in words. ``UsageError``: it cannot."""
    tool = _tool()
    if tool is not None:
        encoding = "utf-16-le" if tool[0].startswith("clip") else "utf-8"
        try:
            # Not captured: some tools stay, to hand the text out, and would keep a pipe open.
            subprocess.run(
                tool, input=text.encode(encoding, "replace"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                timeout=SECONDS, check=True,
            )  # fmt: skip
            return f"with {tool[0]}"
        except (OSError, subprocess.SubprocessError):
            pass  # the terminal may do it
    data = text.encode("utf-8", "replace")
    failed = f"{tool[0]} failed" if tool else "no tool for it was found (wl-copy, xclip, xsel, pbcopy, clip, tmux)"
    if terminal is None:
        raise UsageError(f"cannot copy: {failed}, and no terminal is available")
    if len(data) > MAX_OSC_52:
        raise UsageError(f"cannot copy {len(data):,} bytes: {failed}, and terminals take {MAX_OSC_52:,} at most")
    terminal.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")
    terminal.flush()
    return f"by asking the terminal (OSC 52), which does not say whether it took it; {failed}"


def _tool() -> list[str] | None:
    desk = not os.environ.get("SSH_CONNECTION")  # else the tools are another computer's
    candidates = [
        (desk and sys.platform == "darwin", ["pbcopy"]),
        (desk and bool(os.environ.get("WAYLAND_DISPLAY")), ["wl-copy"]),
        (desk and bool(os.environ.get("DISPLAY")), ["xclip", "-selection", "clipboard"]),
        (desk and bool(os.environ.get("DISPLAY")), ["xsel", "--clipboard", "--input"]),
        (desk, ["clip.exe"]),  # Windows, and Linux inside it
        (bool(os.environ.get("TMUX")), ["tmux", "load-buffer", "-w", "-"]),  # which asks the terminal around it
    ]
    return next((command for fits, command in candidates if fits and shutil.which(command[0])), None)


# Commands that exchange something: files, editor, clipboard, earlier chats.


def save_to(chat: Chat, argument: str) -> None:
    path = _path(argument, "save")
    before = kept_chat(path)
    there = [] if before is None else before.questions
    ours = [shown_question(message["content"]) for message in chat.session.messages if message["role"] == "user"]
    for saved, own in zip(there, ours or [""], strict=False):
        if saved != own:
            raise UsageError(f"{path} holds another conversation ({clip(saved, 40)}): choose another name")
    chat.save(path)
    turns = f", in place of what was saved there before ({_turns(len(there))})" if there else ""
    chat.screen.note(f"saved to {path}{turns}")


def _turns(n: int) -> str:
    return f"{n} turn{'s' if n != 1 else ''}"


def load_from(chat: Chat, argument: str) -> None:
    go_on_with(chat, _path(argument, "load"))
    chat.keep_at(new_file())


def go_on_with(chat: Chat, path: Path) -> None:
    """Make a saved conversation the chat's, and show its last turn; on an error the chat stays as it was."""
    session, records = load(chat.llm, path)
    if (view := session.notes.get("view", chat.view)) not in VIEWS:
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
        path = _nth(kept, argument, f"/sessions takes a number from 1 to {len(kept)}, or forget").path
        go_on_with(chat, path)
        chat.keep_at(path)
        return
    columns = chat.screen.columns
    for i, each in enumerate(kept, 1):
        head = f"{'*' if each.path == chat.keep_in else ' '}{i:>3}  "
        facts = f"{each.when}  {_turns(len(each.questions)):>9}  "
        shown = head + facts if columns >= 2 * len(head + facts) else head
        chat.screen.line(clip(shown + each.questions[0], columns - 1))


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
        found = code_blocks(text)
        if not found:
            raise UsageError("the last answer has no code block; /copy without a number copies all of it")
        n_blocks = f"{len(found)} code block{'s' * (len(found) > 1)}"
        wrong = f"/copy takes a number from 1 to {len(found)}: the last answer has {n_blocks}"
        text, what = _nth(found, argument, wrong), f"code block {argument}"
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


def _nth(things: Sequence[_Thing], number: str, wrong: str) -> _Thing:
    """The nth thing, from 1; ``UsageError``: there is none, in the words of ``wrong``."""
    if not (number.isascii() and number.isdigit() and 1 <= int(number) <= len(things)):
        raise UsageError(wrong)
    return things[int(number) - 1]


def _path(argument: str, name: str) -> Path:
    if not argument:
        raise UsageError(f"/{name} needs a file name")
    return Path(argument.strip("\"'")).expanduser()


ONLY = "only"  # ``--draft-only`` among the names that ``/draft`` takes


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command."""

    usage: str  # its arguments, as ``/help`` shows them
    help: str  # what it does, in a few words
    run: Callable[[Chat, str], None]  # does it; an error is raised
    words: Callable[[], Iterable[str]] = tuple  # what can be typed as its argument
    takes_path: bool = False  # whether its argument is a path


def is_command(line: str) -> bool:
    """Whether a line names a command, or is a word that leaves."""
    name = (line[1:].split() or [""])[0]
    return line in LEAVING or (line.startswith("/") and (name in COMMANDS or name in ALIASES))


def run_command(chat: Chat, line: str) -> bool:
    """Run a line with a command; an error is reported in one line. Returns whether it worked."""
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
    """The command of a name, an alias, or the beginning of one; ``UsageError``: there is none, or there are several."""
    if name in COMMANDS or name in ALIASES:
        return ALIASES.get(name, name)
    starting = [each for each in (*COMMANDS, *ALIASES) if name and each.startswith(name)]
    if len({ALIASES.get(each, each) for each in starting}) == 1:
        return ALIASES.get(starting[0], starting[0])
    near = " or /".join(starting) or nearest(name, (*COMMANDS, *ALIASES))
    hint = f"did you mean /{near}?" if near else "/help lists the commands"
    raise UsageError(f"no command /{name}: {hint} (start the line with a space to send it as text)")


def _help(chat: Chat, argument: str) -> None:
    """Commands of a group in the order of use, or one; a group fits a small screen."""
    for name in GROUPS.get(argument) or [named(argument.removeprefix("/"))]:
        usage, help = f"/{name} {COMMANDS[name].usage}", COMMANDS[name].help
        chat.screen.line(f"  {usage:<34}  {help}")
    if argument:
        return
    chat.screen.line('Alt-Enter, a backslash at the end, or """ around all of them: several lines.')
    chat.screen.line("Tab completes, Ctrl-R searches what was typed before.")
    chat.screen.legend(chat.llm.draft_names)
    chat.screen.line("/help guessing: how answers are guessed, and what it gains")


def _view(chat: Chat, argument: str) -> None:
    if argument and argument not in VIEWS:
        raise UsageError(f"no view {argument!r}: there are {', '.join(VIEWS)}")
    chat.view = argument or chat.view
    chat.screen.note(f"view: {chat.view}{_remembered(chat, 'view', argument) if argument else ''}")


def _remembered(chat: Chat, name: str, value: str | None) -> str:
    """Remember a setting for later chats; returns what to say of that."""
    if not chat.remembers:
        return ""
    try:
        config.write(f"chat.{name}", value)
    except LocalspecError as error:
        chat.screen.error(f"only for this chat: {error}")
        return ""
    return " (also in later chats)"


def _stats(chat: Chat, argument: str) -> None:
    answers = [record.stats for record in chat.records if record.stats]
    if not answers:
        raise UsageError("there are no figures yet: ask something first")
    screen = Screen(chat.screen.file)
    for part in stats_parts(answers):
        screen.show(part)


def _draft(chat: Chat, argument: str) -> None:
    if argument:
        try:
            words = shlex.split(argument)
        except ValueError as error:
            raise UsageError(f"cannot read {argument!r}: {error}") from None
        specs = draft_specs([word for word in words if word != ONLY] or "auto")
        _set_draft(chat, specs if ONLY in words else with_free(specs))
    chat.status = ""
    chat.screen.note(guessing(chat.llm.draft_names))


def _set_draft(chat: Chat, specs: Sequence[str]) -> None:
    """Replace the drafters; what was coming is left out."""
    if chat.late is not None:
        chat.late.stop()
    try:
        chat.llm.set_draft(specs)
    finally:
        chat.loaded()
    chat.show_news()


def _project(chat: Chat, argument: str) -> None:
    project = kept_project()
    if argument:
        before, project = project, named_project(argument.strip("\"'"))
        follows = chat.late is not None and chat.late.status
        if chat.late is not None:
            chat.late.stop()
        names = chat.llm.run(lambda pair: pair.draft_specs)
        if follows:
            names = ["auto", *filter(is_corpus, names)]
        added = [] if project is None else [f"{CORPUS}:{project}"]
        _set_draft(chat, list(dict.fromkeys([*(name for name in names if name != f"{CORPUS}:{before}"), *added])))
        keep_project(project)
    chat.screen.note(f"project: {project or 'none'}. {guessing(chat.llm.draft_names)}")


def _length(chat: Chat, argument: str) -> None:
    chat.llm.draft_length = argument or chat.llm.draft_length
    chat.status = ""
    chat.screen.note(f"guesses at a time: {chat.llm.draft_length}")


def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if name and name not in CHAT_SETTINGS:
        near = nearest(name, CHAT_SETTINGS)
        raise UsageError(f"no parameter {name!r}: {f'did you mean {near}?' if near else ', '.join(CHAT_SETTINGS)}")
    if value:
        chat.params = replace(chat.params, **{name: _parameter(name, value)})
    for each in [name] if name else CHAT_SETTINGS:
        shown = getattr(chat.params, each)
        shown = " ".join(map(repr, shown)) if isinstance(shown, tuple) else shown
        chat.screen.note(f"{each} {'none' if shown in (None, '') else shown}")


def _parameter(name: str, text: str) -> Any:
    """The value of a parameter; ``none`` and ``off`` are its default. ``UsageError``: not a value for it."""
    default = getattr(SamplingParams(), name)
    if text.strip().lower() in ("none", "off"):
        return default
    if name == "stop":
        return (text.strip("\"'").replace("\\n", "\n").replace("\\t", "\t"),)
    kind, called = (float, "number") if isinstance(default, float) else (int, "whole number")
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{name} must be a {called}, not {text!r}") from None


_THINK = (*THINK, "show", "hide")


def _think(chat: Chat, argument: str) -> None:
    if chat.llm.thinking is None:
        raise UsageError(f"{chat.llm.model_name} does not support thinking")
    if argument.isdecimal() or argument == "none":
        chat.asked["thinking_budget"] = None if argument == "none" else int(argument)
    elif argument in ("show", "hide"):
        chat.screen.folded = argument == "hide"
        thoughts = [message["reasoning_content"] for message in chat.session.messages if "reasoning_content" in message]
        if argument == "show" and thoughts:
            chat.screen.line(thoughts[-1], Style.THINKING)
    elif argument in THINK:
        chat.asked["think"] = argument
    elif argument:
        raise UsageError(f"/think takes a number of tokens, none, or one of {', '.join(_THINK)}")
    most, shown = chat.asked["thinking_budget"], "hidden" if chat.screen.folded else "shown"
    budget = "any number of" if most is None else f"at most {most}"
    chat.screen.note(f"think: {chat.asked['think']}, {budget} tokens, {shown}")


def _system(chat: Chat, argument: str) -> None:
    word, kept = argument.lower(), ""
    if argument:
        text = None if word == "default" else "" if word == "none" else argument
        kept = _remembered(chat, "system", text)
        if text is None:  # that of config.toml for all commands, else the model's own
            with suppress(UsageError):
                text = config.read().get("system")
            text = text if isinstance(text, str) else chat.llm.chat_defaults.get("system")
        chat.session.system = text
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
    chat.screen.note(f"undone: {clip(shown_question(question), 60)}")


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


def _models() -> Iterable[str]:
    return ["auto", "none", "ngram", "head", "mtp", "early-exit", ONLY, *Catalog.load()]


# ``/stats``: figures of the last answer and of the conversation, and acceptance by position.

BAR = 30
_PHASES = ("prompt", "draft", "verify", "other")
Stats = Mapping[str, Any]


def stats_parts(answers: Sequence[Stats]) -> list[Grid]:
    """Tables of a report on answers: figures, and a bar for each position in a round where something was drafted."""
    everything = SpecStats.total(answers)
    rows: list[tuple[str, Callable[[Stats], str]]] = [
        ("tokens per second", lambda s: f"{s['tokens_per_second']:.1f}"),
        ("estimated plain tokens per second", lambda s: _number("{:.1f}", s["estimated_plain_tokens_per_second"])),
        ("estimated speed-up", lambda s: _number("×{:.2f}", s["estimated_speedup"])),
        ("answer tokens", lambda s: str(s["completion_tokens"])),
        ("rounds (passes of the model)", lambda s: str(s["num_rounds"])),
        ("tokens per round (plain is 1)", lambda s: f"{s['mean_acceptance_length']:.2f}"),
        ("guesses right", _right),
        *((f"  {name}", lambda s, name=name: _right(s["by_source"].get(name))) for name in everything["by_source"]),
        *((f"seconds: {name}", lambda s, name=name: f"{s[f'seconds_{name}']:.2f}") for name in _PHASES),
    ]
    last = SpecStats.total(answers[-1:])
    cells = [(name, show(last), show(everything)) for name, show in rows]
    tables = [Grid("", ("", "last answer", "conversation"), cells)]
    counts = zip(everything["drafted_per_position"], everything["accepted_per_position"], strict=True)
    if bars := [_bar(i, drafted, accepted) for i, (drafted, accepted) in enumerate(counts, 1) if drafted]:
        tables.append(Grid("right, by place in a round", ("", "", "share", "count"), bars, left=2))
    return tables


def _bar(position: int, drafted: int, accepted: int) -> list[str]:
    filled = round(BAR * accepted / drafted)
    bar = "█" * filled + "░" * (BAR - filled)
    return [f"guess {position}", bar, f"{accepted / drafted:.0%}", f"{accepted}/{drafted}"]


def _number(form: str, value: float | None) -> str:
    return form.format(value) if value else "-"


def _right(counts: Stats | None) -> str:
    if counts is None:
        return "-"
    part, whole = counts["num_accepted_tokens"], counts["num_draft_tokens"]
    return f"{part / whole:.0%} ({part}/{whole})" if whole else "none made"


# ``/race``: the last question again, plain and with guesses.

SEED_BITS = 32
_NAMES = {False: "plain", True: "with guesses"}
MENTIONED = 0.05  # CPU share of other programs from which it is mentioned
NOISE = "Nothing was guessed, so both did the same work; the difference is noise."


def race(chat: Chat, argument: str = "") -> None:
    """Race twice, in both orders, if there are guesses; show the first answers. The conversation stays as it is."""
    if not chat.records:
        raise UsageError("there is no question to race yet: ask something first")
    params = chat.params
    if not params.greedy and params.seed is None:
        params = replace(params, seed=secrets.randbits(SEED_BITS))  # both sides get the same dice
    before = CPUTimes.now()
    races: list[dict[bool, Reply]] = []
    for order in ((False, True), (True, False)):
        races.append({})
        for speculate in order:
            reply = _run(chat, params, speculate, f"race {len(races)}, {_NAMES[speculate]}")
            if reply.finish_reason == "cancelled":
                chat.screen.note("[race stopped]")
                return
            races[-1][speculate] = reply
        if _ratio(races[-1]) is None:
            break
    others = others_share([(before, CPUTimes.now())]) or 0.0
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    for name in _NAMES.values():
        table.add_column(name, ratio=1, overflow="fold")
    replies = [races[0][guesses] for guesses in _NAMES]
    table.add_row(*map(_figures, replies))
    table.add_row("", "")
    table.add_row(*(Text(visible(reply.text).rstrip()) for reply in replies))
    chat.screen.console(chat.screen.columns if chat.screen.terminal else 80).print(table)
    chat.screen.line()
    chat.screen.line(verdict([_ratio(race) for race in races], races[0][True].stats, others))
    chat.screen.line(difference(chat, *replies))


def _run(chat: Chat, params: SamplingParams, speculate: bool, what: str) -> Reply:
    """Answer the last question; ``what`` says on a terminal what runs."""
    stream = chat.llm.rounds(chat.session.messages[:-1], params, speculate=speculate, **chat.asked)
    status, said = SpecStats(), ""
    with Progress(chat.screen.file) as progress, no_echo(), stream, on_interrupt(stream.close):
        for step in stream.steps():
            if isinstance(step, PromptProgress):
                progress.report(f"{what}: reading {step}", step.fraction)
                continue
            status.add(step)
            said = (said + on_one_line(step.text))[-40:]
            if chat.screen.ansi:
                speed = f"{status.completion_tokens} tokens, {status['tokens_per_second']:.1f} tok/s"
                progress.report(f"{what}: {speed}  …{said}", None)
        return stream.reply


def _ratio(replies: Mapping[bool, Reply]) -> float | None:
    """Speed with guesses over plain; None if nothing was guessed or said."""
    plain, guessed = (replies[guesses].stats for guesses in _NAMES)
    if not (plain["tokens_per_second"] and guessed["num_draft_tokens"]):
        return None
    return float(guessed["tokens_per_second"] / plain["tokens_per_second"])


def _figures(reply: Reply) -> str:
    stats = reply.stats
    return f"{stats['completion_tokens']} tokens, {stats.seconds_decode:.2f} s, {stats['tokens_per_second']:.1f} tok/s"


def verdict(ratios: Sequence[float | None], stats: Mapping[str, Any], others: float) -> str:
    """Outcome of races with these ratios (``_ratio``), the statistics of an answer with guesses, and the CPU
    share of other programs."""
    if not stats["completion_tokens"]:
        return "There are no tokens to compare."
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return NOISE
    right = f"{stats['num_accepted_tokens']:,} of {stats['num_draft_tokens']:,} guesses right"
    spread = f"×{min(known):.2f} to ×{max(known):.2f} of plain" if len(known) > 1 else f"×{known[0]:.2f} of plain, once"
    lines = [f"With guesses: {spread}; {right}."]
    if len(known) > 1 and min(known) <= 1 <= max(known):
        lines = [f"No verdict: two races, in both orders, gave {spread} with guesses; {right}."]
    if others > MENTIONED:
        lines.append(f"Other programs used {100 * others:.0f} % of the CPUs meanwhile, which moves both.")
    return " ".join(lines)


def difference(chat: Chat, plain: Reply, speculative: Reply) -> str:
    """Where two answers part, in one sentence."""
    pairs = zip(plain.token_ids, speculative.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        shorter = min(len(plain.token_ids), len(speculative.token_ids))
        if len(plain.token_ids) == len(speculative.token_ids):
            return f"same text: all {shorter} tokens are equal"
        return f"equal for {shorter} tokens, then one of them ended"
    ours, theirs = (on_one_line(chat.llm.detokenize([reply.token_ids[at]])) or "end" for reply in (plain, speculative))
    return (
        f"first difference at token {at + 1}: plain {ours!r}, with guesses {theirs!r} "
        "(wide and narrow passes round differently, so near ties can fall either way)"
    )


# The table.

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
    "quit": Command("", "leave (Ctrl-D does too)", lambda chat, _: chat.leave()),
    "draft": Command("auto|none|ngram|MODEL … [only]", "who guesses, with n-grams unless only", _draft, _models),
    "length": Command("auto|N", "how many tokens are guessed at a time", _length, lambda: ("auto",)),
    "project": Command("[PATH|none]", "a folder to copy guesses from, kept", _project, takes_path=True),
    "stats": Command("", "figures, and how far guesses reached", _stats),
    "why": Command("", "who guesses now, and why not", lambda chat, _: chat.screen.line(chat.llm.explain())),
    "race": Command("", "the last question, plain and with guesses", race),
}

# Names from other programs.
ALIASES = {"clear": "new", "reset": "new", "exit": "quit", "bye": "quit", "q": "quit", "?": "help"}
LEAVING = ("exit", "quit")  # lines that leave without a slash
_GUESSING = ("draft", "length", "project", "stats", "why", "race")
# What follows ``/help`` -> the commands it shows.
GROUPS = {"": tuple(name for name in COMMANDS if name not in _GUESSING), "guessing": _GUESSING}
