"""The chat: a session on a screen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.commands.chat.attached import AttachedFile, with_files
from localspec.commands.chat.kept_chats import make_room, new_file, stamp
from localspec.commands.chat.saved_chat import AnswerRecord, save
from localspec.commands.chat.screen import ChatScreen, no_echo
from localspec.commands.chat.status import status_line
from localspec.commands.chat.style import Style
from localspec.commands.chat.views import guessing, only_thought
from localspec.commands.options import base_model_notes
from localspec.errors import LocalspecError, SessionFileError, line_of
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.names import NGRAM
from localspec.spec_decode.rounds import SpecStats
from localspec.system.interrupts import on_interrupt
from localspec.system.memory import process_bytes

if TYPE_CHECKING:
    from localspec.commands.chat.late_draft import LateDraft
    from localspec.llm import LLM
    from localspec.session import Message

    Turn = tuple[list[Message], AnswerRecord]
    """A question with its answer, and how that came about."""


class Chat:
    """A conversation with a loaded pair on a screen.

    Attributes:
        session: the conversation.
        records: how each answer in it came about.
        view: how answers are shown: ``tokens``, ``reading``, ``rounds`` or ``plain``.
        last_question: also kept where no answer came about.
        attached: files that go with the next message.
        last_files: those that went with the last question.
        prepared: what the next prompt's line holds already.
        keep_in: where the conversation is kept as it goes on; None if it is not. See ``keep_at``.
        remembers: whether view and system prompt are remembered for later chats when they are changed.
        races: how many races were run, so that plain and speculative take turns in going first.
        think, thinking_budget: how questions are asked, see ``LLM.rounds``.
        leaving: set by ``/quit``.
        late: what brings the draft model after the prompt, if anything does.
        loaded: called when a load that the chat asked for is over, to clear its progress from the screen.
    """

    def __init__(
        self, llm: LLM, screen: ChatScreen, *, params: SamplingParams, system: str | None = None, view: str = "tokens"
    ) -> None:
        self.llm = llm
        self.screen = screen
        self.session = llm.session(system, params)
        self.records: list[AnswerRecord] = []
        self.view = view
        self.last_question: str | None = None
        self.attached: list[AttachedFile] = []
        self.last_files: tuple[AttachedFile, ...] = ()
        self.prepared = ""
        self.keep_in: Path | None = None
        self._kept_at: int | None = None
        self.remembers = False
        self.races = 0
        self.think = "auto"
        self.thinking_budget: int | None = None
        self.leaving = False
        self.status = ""
        self.late: LateDraft | None = None
        self._n_told = len(llm.warnings)
        self.loaded: Callable[[], None] = lambda: None

    @property
    def params(self) -> SamplingParams:
        """How answers are sampled."""
        return self.session.params or SamplingParams()

    @params.setter
    def params(self, params: SamplingParams) -> None:
        self.session.params = params

    def say(self, text: str) -> bool:
        """``ask`` with the attached files, which stay for the next message if no answer comes about."""
        return self.ask(with_files(text, self.attached), tuple(self.attached))

    def ask(self, question: str, files: tuple[AttachedFile, ...] = (), instead: Turn | None = None) -> bool:
        """Ask, show the answer, and keep both; an error is reported, and what was said until then is kept.

        Args:
            question: what is asked.
            files: those whose text is in it; n-grams draft from them as from the beginning of the answer.
            instead: a turn that the answer takes the place of; one that is whole stays if the answer is broken off.

        Returns:
            Whether an answer came about.

        Raises:
            KeyboardInterrupt: Ctrl-C without a terminal.
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
            stream = self.session.rounds(
                question,
                prediction="\n".join(drafts_from) or None,
                think=self.think,
                thinking_budget=self.thinking_budget,
            )
            try:
                with no_echo(), stream, on_interrupt(stream.close):
                    view.wait("reading")
                    for round_ in stream:
                        stats.add(round_)
                        record.rounds.append(round_.as_event())
                        pieces.append(round_.text)
                        view.round(round_)
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
        """Put what was said of a broken-off answer into a new session: the engine may still go on with the old one."""
        record.stats = stats.as_dict()
        self.session = self.llm.session(params=self.session.params)
        turn = [{"role": "user", "content": question}, {"role": "assistant", "content": "".join(pieces)}]
        self.session.messages = [*before, *(turn if any(pieces) else [])]

    def begin(self) -> None:
        """A new conversation, asked in the same way; what is attached stays for its first message."""
        self.session = self.llm.session(self.session.system, self.session.params)
        self.records, self.last_question, self.last_files, self.status = [], None, (), ""
        self.keep_at(new_file())
        self.read_ahead()

    def save(self, path: Path, *, rounds: bool = True, **notes: Any) -> None:
        """Write the conversation, with how its answers came about.

        Args:
            path: the file.
            rounds: False leaves the single rounds out, which are most of it.
            notes: what else to write, as JSON has it.

        Raises:
            SessionFileError: it cannot be written, or the name belongs to something else.
        """
        llm = self.llm
        records = self.records if rounds else [replace(record, rounds=[]) for record in self.records]
        made_by = {"model": llm.model_name, "draft": llm.draft_names, "backend": llm.backend_name}
        save(path, self.session, records, **made_by, view=self.view, draft_length=llm.draft_length, **notes)

    def keep_at(self, path: Path) -> None:
        """From now on keep the conversation in another file, if it is kept."""
        if self.keep_in is not None:
            self.keep_in, self._kept_at = path, stamp(path)

    def keep(self) -> None:
        """Have the conversation on the disk as it is now; what another chat made of it meanwhile stays too."""
        if self.keep_in is None:
            return
        if stamp(self.keep_in) != self._kept_at:
            self.keep_at(new_file())
        try:
            if self.records:
                if self._kept_at is None:
                    make_room()
                self.save(self.keep_in, rounds=False, file=str(self.llm.model_path.absolute()))
            else:
                self.keep_in.unlink(missing_ok=True)
            self._kept_at = stamp(self.keep_in)
        except (OSError, SessionFileError) as error:
            self.keep_in = None
            self.screen.note(f"note: this conversation is not saved: {line_of(error)}")

    def _remark(self, record: AnswerRecord, kept: bool, text: str, *, failed: bool, restored: bool) -> None:
        """Say why the answer ends where it does, if that is not by itself, or why there is none."""
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
            self.screen.note(f"[cut short: {self._limit(record.stats)}]")

    def read_ahead(self) -> None:
        """While the person types, the models read what the next question will follow."""
        if self.screen.interactive:
            with suppress(LocalspecError):  # then it is read when it is asked
                self.llm.read_ahead(self.session.messages, think=self.think)

    def _limit(self, stats: dict[str, Any]) -> str:
        budget = self.params.max_tokens
        if budget is not None and stats.get("completion_tokens", 0) >= budget:
            return f"max_tokens is {budget}; /set max_tokens none lifts it"
        return f"the context of {self.llm.n_ctx} tokens is full; /undo, or start with a larger --ctx"

    def show_news(self) -> None:
        """Say what came up in idle time."""
        warnings = self.llm.warnings
        news, self._n_told = warnings[self._n_told :], len(warnings)
        if self.late is not None:
            news += self.late.notes
            self.late.notes = []
        for line in news:
            self.screen.note(f"note: {line}")

    @property
    def toolbar(self) -> str:
        """The status line while nothing is being said."""
        coming = f"{self.late.status} · " if self.late is not None and self.late.status else ""
        if self.status:
            return coming + self.status
        who = "" if coming else guessing(self.llm.draft_names).removesuffix(".") + " · "
        return f"{coming}{who}/help"


def header(llm: LLM, screen: ChatScreen, *, follows: bool = False) -> None:
    """Say what was loaded, who guesses and what its text looks like; ``follows`` if a draft model may still come."""
    memory = f" · {process_bytes() / 1e9:.1f} GB" if process_bytes() >= 5e7 else ""  # weights included
    screen.line(f"{llm.model_name} · {llm.backend_name} · context {llm.n_ctx}{memory}", Style.HEAD)
    screen.line(guessing(llm.draft_names, follows=follows))
    if legend := screen.legend(llm.draft_names, follows=follows):
        print(legend, file=screen.file)
    for warning in [*llm.warnings, *base_model_notes(llm)]:
        screen.note(f"note: {warning}")
    screen.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
