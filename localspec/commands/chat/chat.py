"""The chat: a session on a screen."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from localspec.commands.chat.screen import ChatScreen, guessing, no_echo, only_thought, status_line
from localspec.commands.chat.typesetter import Style
from localspec.commands.options import RunOptions, ThinkOptions, base_model_notes
from localspec.engine import saved
from localspec.engine.drafts import LEAST_GAIN, found_drafts, gain_of_size, plugin_drafts
from localspec.engine.loading import compiled_offer_once
from localspec.errors import Cancelled, Closed, LocalspecError, SessionFileError, UsageError, line_of
from localspec.llm import LLM, Message, Session, to_text
from localspec.model_files.catalog import Entry, short_name
from localspec.prompts import documents
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.names import NGRAM
from localspec.spec_decode.rounds import PromptProgress, SpecStats
from localspec.system.files import JsonStore, decoded, home, private_folder
from localspec.system.machine import BUSY, process_bytes
from localspec.system.process import on_interrupt
from localspec.system.terminal import on_one_line

# Files that go with the next message: part of its text, and drafted from by n-grams.

MAX_BYTES = 16 << 20  # more than the longest contexts hold: a million tokens of four bytes


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A text file as read when it was attached."""

    path: Path
    text: str

    def __str__(self) -> str:
        n_lines = self.text.count("\n") + (not self.text.endswith("\n"))
        return f"{self.path} ({n_lines:,} line{'s' if n_lines != 1 else ''})"


def read_file(path: Path) -> AttachedFile:
    """Read a file to attach, a text, PDF or Word document; ``UsageError``: it has no text, or too much of it."""
    most = documents.MAX_BYTES if documents.is_document(path.name) else MAX_BYTES
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if documents.is_document(path.name):
        return AttachedFile(path, documents.document_text(str(path), data))
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} has more than {MAX_BYTES >> 20} MiB, too large for any context")
    try:
        text = decoded(data)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{path} is not UTF-8 text")
    if not text.strip():
        raise UsageError(f"{path} is empty")
    return AttachedFile(path, text.replace("\r\n", "\n"))


def with_files(question: str, files: Sequence[AttachedFile]) -> str:
    """The question with the files before it, each in a fence that is longer than those in it."""
    parts = []
    for file in files:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", file.text)), default=0))
        end = "" if file.text.endswith("\n") else "\n"
        parts.append(f"{file.path}:\n{fence}{file.path.suffix[1:]}\n{file.text}{end}{fence}")
    return "\n\n".join([*parts, question])


_FILE = re.compile(r"(?P<path>[^\n]+):\n(?P<fence>`{3,})[^`\n]*\n.*?\n(?P=fence)\n\n", re.DOTALL)


def without_files(text: str) -> str:
    """Undo ``with_files``: the names of the files in place of their text."""
    names = []
    while found := _FILE.match(text):
        names.append(f"[{found['path']}] ")
        text = text[found.end() :]
    return "".join([*names, text])


# Conversations kept in LOCALSPEC_HOME as they go on.

MOST = 50  # conversations kept; the one unused for longest goes first


@dataclass(frozen=True, slots=True)
class KeptChat:
    """A conversation on disk."""

    path: Path
    when: str  # it was last changed, local time
    questions: list[str]  # each in a line
    model: str
    file: Path  # that the model was loaded from


def new_file() -> Path:
    return _folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}-{os.getpid()}.chat"


def _stamp(path: Path) -> int | None:
    """Modification time of a file, by which another chat's writing shows; None without a file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def shown_question(text: str) -> str:
    """A question in a line, with the names of its files."""
    return on_one_line(without_files(text))


def kept_chat(path: Path) -> KeptChat | None:
    """The conversation in a file; None if it cannot be read, or nothing was asked."""
    try:
        text = saved.read(path, memory=False)[0]
        questions = [message["content"] for message in text["messages"] if message["role"] == "user"]
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        lines = [shown_question(str(each)) for each in questions]  # or a list of parts
        return KeptChat(path, when, lines, text["model"], Path(text["notes"].get("file", ""))) if lines else None
    except (SessionFileError, OSError, LookupError, TypeError, AttributeError):
        return None


def kept_chats() -> Iterator[KeptChat]:
    """The readable ones, latest first."""
    return filter(None, map(kept_chat, _files()))


def forget_all() -> int:
    files = _files()
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def _folder() -> Path:
    return home() / "chats"


def _files() -> list[Path]:
    """The latest first; one that another chat removed meanwhile is the last."""
    return sorted(_folder().glob("*.chat"), key=lambda path: (_stamp(path) or 0, path.name), reverse=True)


# A chat in a file: a saved session with notes on how its answers came about.


@dataclass(slots=True)
class AnswerRecord:
    """How an answer came about: ``stop``, ``length`` or ``cancelled``; its ``Round.as_event``; its ``SpecStats``."""

    finish_reason: str = "cancelled"
    rounds: list[dict[str, Any]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


Turn = tuple[list[Message], AnswerRecord]  # A question with its answer, and the record of that


def load(llm: LLM, path: Path) -> tuple[Session, list[AnswerRecord]]:
    """Read a chat: its session, and the records of its answers; ``SessionFileError``: it is none, or damaged."""
    session = llm.load_session(path, memory=False)
    said = session.messages[session.system is not None :]
    try:
        if [message["role"] for message in said] != ["user", "assistant"] * (len(said) // 2):
            raise ValueError("it is not a chat of questions and answers")
        if not all(isinstance(message["content"], str) for message in session.messages):
            raise ValueError("a message is not text")
        records = [AnswerRecord(**answer) for answer in session.notes.get("answers", [{}] * (len(said) // 2))]
        if len(records) != len(said) // 2 or not all(map(_is_whole, records)):
            raise ValueError("its answers are not as they were saved")
    except (KeyError, TypeError, ValueError) as error:
        raise SessionFileError(f"{path} is damaged, or not a chat: {error}") from None
    return session, records


def _is_whole(record: AnswerRecord) -> bool:
    known = record.finish_reason in ("stop", "length", "cancelled") and isinstance(record.stats, dict)
    return known and isinstance(record.rounds, list) and all(isinstance(event, dict) for event in record.rounds)


class Chat:
    """A conversation with a loaded pair on a screen."""

    def __init__(
        self, llm: LLM, screen: ChatScreen, *, params: SamplingParams, system: str | None = None, view: str = "tokens"
    ) -> None:
        self.llm = llm
        self.screen = screen
        self.session = llm.session(system, params)
        self.records: list[AnswerRecord] = []  # how each answer in it came about
        self.view = view
        self.last_question: str | None = None  # also kept without an answer
        self.attached: list[AttachedFile] = []  # for the next message
        self.last_files: tuple[AttachedFile, ...] = ()  # of the last question
        self.prepared = ""  # what the next prompt's line holds already
        self.keep_in: Path | None = None  # file of the conversation, if it is kept, see ``keep_at``
        self._kept_at: int | None = None
        self.remembers = False  # whether changes of view and system prompt are kept for later chats
        self.asked: ThinkOptions = {"think": "auto", "thinking_budget": None}
        self.leaving = False  # set by ``/quit``
        self.status = ""
        self.late: LateDraft | None = None
        self.n_told = len(llm.warnings)
        self.loaded: Callable[[], None] = lambda: None  # clears the progress of a load that the chat asked for

    @property
    def params(self) -> SamplingParams:
        return self.session.params or SamplingParams()

    @params.setter
    def params(self, params: SamplingParams) -> None:
        self.session.params = params

    def leave(self) -> None:
        self.leaving = True

    def say(self, text: str) -> bool:
        """Ask with the attached files, which stay for the next message if there is no answer."""
        return self.ask(with_files(text, self.attached), tuple(self.attached))

    def ask(self, question: str, files: tuple[AttachedFile, ...] = (), instead: Turn | None = None) -> bool:
        """Ask, show the answer and keep both. An error is reported; what was said until then is kept.

        ``files`` are those in the question: n-grams draft from them. ``instead`` is a turn to replace; it stays if it
        was whole and the new answer is broken off. Returns whether an answer came about; ``KeyboardInterrupt``: Ctrl-C
        without a terminal.
        """
        self.last_question, self.last_files = question, files
        stats = SpecStats()
        view = self.screen.view(self.view, stats)
        before = list(self.session.messages)
        record = AnswerRecord()
        pieces: list[str] = []
        failed = False
        try:
            drafts_from = [file.text for file in files if NGRAM in self.llm.draft_names]
            stream = self.session.rounds(question, prediction="\n".join(drafts_from) or None, **self.asked)
            try:
                with no_echo(), stream, on_interrupt(stream.close):
                    self.screen.wait("reading")
                    for step in stream.steps():
                        if isinstance(step, PromptProgress):
                            if not record.rounds:  # later it is a draft model that reads, below text
                                self.screen.wait(f"reading {step}")
                            continue
                        stats.add(step)
                        record.rounds.append(step.as_event())
                        pieces.append(step.text)
                        view.round(step)
                    reply = stream.reply
                    record.finish_reason, record.stats = reply.finish_reason, dict(reply.stats)
            except KeyboardInterrupt:  # a second Ctrl-C: the engine is busy, and we do not wait for it
                self._keep_part(before, question, pieces, record, stats)
            finally:
                view.finish()
        except BrokenPipeError:
            raise
        except Exception as error:  # whatever it is, it must not cost the conversation
            failed = True
            self.screen.error(line_of(error))
            if any(pieces):
                self._keep_part(before, question, pieces, record, stats)
        kept = len(self.session.messages) > len(before)
        if record.stats:
            self.status = status_line(record.stats)
        broken_off = record.finish_reason == "cancelled"
        restored = instead is not None and broken_off and not (kept and instead[1].finish_reason == "cancelled")
        if instead is not None and restored:
            self.session.messages = [*before, *instead[0]]
            self.records.append(instead[1])
        elif kept:
            self.records.append(record)
            self.attached = [file for file in self.attached if file not in files]
        self.keep()
        if kept or not failed:
            self._remark(record, kept, "".join(pieces), failed=failed, restored=restored)
            self.read_ahead()
        if self.status and self.screen.terminal and not self.screen.ansi:
            self.screen.note(f"({self.status})")
        return kept and not failed

    def _keep_part(
        self, before: list[Message], question: str, pieces: list[str], record: AnswerRecord, stats: SpecStats
    ) -> None:
        """Put what was said of a broken-off answer into a new session: the engine may still use the old one."""
        record.stats = stats.as_dict()
        self.session = self.llm.session(params=self.session.params)
        turn = [{"role": "user", "content": question}, {"role": "assistant", "content": "".join(pieces)}]
        self.session.messages = [*before, *(turn if any(pieces) else [])]

    def begin(self) -> None:
        """Begin a new conversation with the same settings and attached files."""
        self.session = self.llm.session(self.session.system, self.session.params)
        self.records, self.last_question, self.last_files, self.status = [], None, (), ""
        self.keep_at(new_file())
        self.read_ahead()

    def save(self, path: Path, *, rounds: bool = True, **notes: Any) -> None:
        """Write the conversation with its records; ``SessionFileError``: that cannot be, or the file is another's."""
        llm = self.llm
        records = self.records if rounds else [replace(record, rounds=[]) for record in self.records]
        made_by = {"model": llm.model_name, "draft": llm.draft_names, "backend": llm.backend_name}
        shown = {"view": self.view, "draft_length": llm.draft_length, "answers": [asdict(record) for record in records]}
        self.session.notes = made_by | notes | shown
        # Without the models' memory of it: that takes megabytes, is read ahead again, and would wait for the engine.
        saved.write(path, to_text(self.session), [])

    def keep_at(self, path: Path) -> None:
        """From now on keep the conversation, if it is kept, in another file."""
        if self.keep_in is not None:
            self.keep_in, self._kept_at = path, _stamp(path)

    def keep(self) -> None:
        """Write the conversation to its file, or to a new one if another chat has changed that."""
        if self.keep_in is None:
            return
        if _stamp(self.keep_in) != self._kept_at:
            self.keep_at(new_file())
        try:
            if self.records:
                if self._kept_at is None:
                    private_folder(_folder())
                    for path in _files()[MOST - 1 :]:
                        with suppress(OSError):  # another program has it open
                            path.unlink()
                self.save(self.keep_in, rounds=False, file=str(self.llm.model_path.absolute()))
            else:
                self.keep_in.unlink(missing_ok=True)
            self._kept_at = _stamp(self.keep_in)
        except (OSError, SessionFileError) as error:
            self.keep_in = None
            self.screen.note(f"note: this conversation is not saved: {line_of(error)}")

    def _remark(self, record: AnswerRecord, kept: bool, text: str, *, failed: bool, restored: bool) -> None:
        """Say why an answer is cut short or missing."""
        if record.finish_reason == "cancelled":
            if not (failed or self.screen.interactive):
                raise KeyboardInterrupt
            how = "broken off" if failed else "stopped"
            said = "what was said is kept" if kept else "nothing was said yet"
            said = "the answer before stays" if restored else said
            self.screen.note(f"[{how}; {said}; /retry asks again]")
            return
        if said := only_thought(text, record.stats.get("thinking_tokens", 0)):
            shown = self.screen.terminal and not self.screen.folded
            self.screen.note(f"[{said}]" if shown else f"[{said}; /think show prints it]")
        if record.finish_reason == "length":
            budget, why = self.params.max_tokens, f"the context of {self.llm.n_ctx} tokens is full"
            why += "; /undo, or start with a larger --ctx"
            if budget is not None and record.stats.get("completion_tokens", 0) >= budget:
                why = f"max_tokens is {budget}; /set max_tokens none lifts it"
            self.screen.note(f"[cut short: {why}]")

    def read_ahead(self) -> None:
        """Have the models read, while the person types, what the next question follows."""
        if self.screen.interactive:
            with suppress(LocalspecError):  # then it is read when it is asked
                self.llm.read_ahead(self.session.messages, think=self.asked["think"])

    def show_news(self) -> None:
        """Show warnings and notes that came up in idle time."""
        warnings = self.llm.warnings
        news, self.n_told = warnings[self.n_told :], len(warnings)
        if self.late is not None:
            news += self.late.notes
            self.late.notes = []
        for line in news:
            self.screen.note(f"note: {line}")

    @property
    def toolbar(self) -> str:
        """Status line between answers."""
        coming = f"{self.late.status} · " if self.late is not None and self.late.status else ""
        if self.status:
            return coming + self.status
        who = "" if coming else guessing(self.llm.draft_names).removesuffix(".") + " · "
        return f"{coming}{who}/help"


def header(chat: Chat) -> None:
    """Say what was loaded, which drafters guess and what their text looks like."""
    llm, screen, follows = chat.llm, chat.screen, chat.late.status if chat.late is not None else ""
    memory = f" · {process_bytes() / 1e9:.1f} GB" if process_bytes() >= 5e7 else ""  # weights included
    screen.line(f"{llm.model_name} · {llm.backend_name} · context {llm.n_ctx}{memory}", Style.HEAD)
    screen.note(f"context: {llm.context_info()['reason']}")
    screen.line(guessing(llm.draft_names, follows))
    screen.legend(llm.draft_names, follows)
    offer = llm.run(lambda pair: compiled_offer_once(pair.target, pair.state.times))
    warnings = list(llm.warnings)
    chat.n_told = len(warnings)  # a draft model that is loaded meanwhile may add some
    for warning in [*warnings, *base_model_notes(llm), *filter(None, [offer])]:
        screen.note(f"note: {warning}")
    screen.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")


# A chat begins with the target and n-grams alone; head and draft model are loaded between requests. A missing draft
# model is fetched first, if passes measured here say that it will gain.

ASKED_S = (1, 2, 4, 8, 16, 32, 64)  # pauses in which better measurements than the first are awaited [s]
LOOKING = "looking whether a draft model would help"
LEAVING_S = 5.0  # how long leaving waits for downloads to stop [s]; what arrived is kept


class LateDraft(threading.Thread):
    """Brings head and draft model into an LLM loaded with n-grams alone; ``missing`` ones are fetched first, where they
    pay. ``corpora`` draft too."""

    def __init__(self, llm: LLM, missing: Sequence[Entry], *, corpora: Sequence[str] = ()) -> None:
        super().__init__(name="localspec draft", daemon=True)
        self.status = LOOKING if missing else "loading the draft model"  # in a few words; empty when it is done
        self.notes: list[str] = []  # for the person, when there is room for them
        self.changed: Callable[[], None] = lambda: None  # called from the thread when ``status`` changes
        self._llm, self._missing, self._corpora = llm, missing, corpora
        self._before = llm.draft_names
        self._leaving = threading.Event()
        self.start()

    def stop(self) -> None:
        self._leaving.set()
        self.join(LEAVING_S)

    def run(self) -> None:
        try:
            if self._missing and self._llm.run(lambda pair: next(plugin_drafts(pair.target), None)) is not None:
                self._load("the head")
            if not self._missing or self._would_gain():
                for entry in self._missing:
                    self._fetch(entry)
                self._load("the draft model")
        except (Cancelled, Closed):
            pass
        except Exception as error:  # whatever it is, the chat goes on
            self.notes.append(f"going on without a draft model: {line_of(error)}")
        self._say("")

    def _would_gain(self) -> bool:
        """Whether the draft model would make answers faster here; a no is noted."""
        self._say(LOOKING)
        for seconds in ASKED_S:  # the first figures are rough, and better ones come while nothing is asked
            if not self._llm.run(lambda pair: pair.times.quick) or self._leaving.wait(seconds):
                break
        names, size = " ".join(entry.name for entry in self._missing), sum(entry.bytes for entry in self._missing)
        gain, times = self._llm.run(lambda pair: (gain_of_size(pair.state, size), pair.times))
        if gain >= LEAST_GAIN:
            return True
        why = "would not make answers faster on this machine, so it was not downloaded."
        if times.noisy:
            when = "while other programs used the CPU" if times.others_share >= BUSY else "so far"
            why = f"was not downloaded: by what was measured {when} it would not help. The next start looks again."
        self.notes.append(f"The draft model ({size / 1e9:.1f} GB) {why} To get it anyway: localspec pull {names}")
        return False

    def _fetch(self, entry: Entry) -> None:
        from localspec.model_files import sources

        def watch(what: str, done: int, total: int) -> None:
            if self._leaving.is_set():
                raise Cancelled(f"{what}: stopped")
            self._say(f"fetching the draft model {short_name(entry.name)}" + (f" {done / total:.0%}" if total else ""))

        sources.pull(entry, watch=watch)

    def _load(self, what: str) -> None:
        """Load what ``auto`` finds on disk."""
        self._say(f"loading {what}")
        while not self._leaving.is_set() and self._llm.draft_names == self._before:
            with suppress(Cancelled):  # something was asked: try again when it is answered
                self._llm.set_draft(["auto", *self._corpora], gives_way=self._leaving.is_set)
                self._before = self._llm.draft_names
                break

    def _say(self, status: str) -> None:
        if status != self.status:
            self.status = status
            self.changed()


def may_be_drafted_for(llm: LLM) -> bool:
    """Whether ``auto`` would load a head or draft model for the target of an LLM."""
    return llm.run(lambda pair: next(found_drafts(pair.target), None) is not None)


# The project of a folder: what chats started there copy from.

NONE = "none"  # forgets the project


def kept_project() -> Path | None:
    path = (_store().get({"folder": str(Path.cwd())}) or {}).get("path")
    return Path(path) if isinstance(path, str) and path else None


def keep_project(path: Path | None) -> None:
    """Keep a project for the current folder; None forgets it."""
    _store().put({"folder": str(Path.cwd())}, {"path": "" if path is None else str(path)})


def _store() -> JsonStore:
    return JsonStore(home() / "projects", 1)


def named_project(named: str) -> Path | None:
    """Absolute path of a project; None for ``none``. ``UsageError``: there is no such path."""
    if named == NONE:
        return None
    try:
        return Path(named).expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"project {named}: {getattr(error, 'strerror', None) or 'no such path'}") from None


def with_project(options: RunOptions, named: str | None) -> RunOptions:
    """Options of a chat that copies from a project too: ``named`` and kept from now on, or the one kept."""
    if named is not None:
        project = named_project(named)
        keep_project(project)
    else:
        project = kept_project()
        if project is not None and not (project.exists() and options.drafters()):
            project = None
    return options if project is None else options.with_corpus(str(project))
