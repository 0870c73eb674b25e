"""The chat: a session on a screen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from localspec.commands.chat.saved_chat import AnswerRecord
from localspec.commands.chat.screen import ChatScreen, no_echo
from localspec.commands.chat.status import AnswerStatus
from localspec.commands.chat.style import Style
from localspec.errors import LocalspecError, line_of
from localspec.model_files.catalog import short_name
from localspec.sampling.sampling import SamplingParams
from localspec.system.interrupts import on_interrupt
from localspec.system.memory import process_bytes

if TYPE_CHECKING:
    from localspec.commands.chat.late_draft import LateDraft
    from localspec.llm import LLM


class Chat:
    """A conversation with a loaded pair on a screen.

    Attributes:
        session: the conversation.
        records: how each answer in it came about.
        view: how answers are shown: ``tokens``, ``rounds`` or ``plain``.
        last_question: also kept where no answer came about.
        races: how many races were run, so that plain and speculative take turns in going first.
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
        self.races = 0
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

    def ask(self, question: str) -> bool:
        """Ask, show the answer, and keep both; an error is reported and changes nothing.

        Returns:
            Whether an answer came about.

        Raises:
            KeyboardInterrupt: Ctrl-C without a terminal.
        """
        self.last_question = question
        status = AnswerStatus(self.llm.draft_names, self.llm.draft_length, self.llm.plain_tokens_per_second)
        view = self.screen.view(self.view, status)
        before = list(self.session.messages)
        record = AnswerRecord()
        pieces: list[str] = []
        try:
            stream = self.session.rounds(question)
            try:
                with no_echo(), stream, on_interrupt(stream.close):
                    view.wait("reading")
                    for round_ in stream:
                        status.add(round_)
                        record.rounds.append(round_.as_event())
                        pieces.append(round_.text)
                        view.round(round_)
                    reply = stream.reply
                    record.finish_reason, record.stats = reply.finish_reason, dict(reply.stats)
            except KeyboardInterrupt:  # a second Ctrl-C: the engine is busy, and we do not wait for it
                record.stats = status.stats.as_dict()
                self.session = self.llm.session(params=self.session.params)
                turn = [{"role": "user", "content": question}, {"role": "assistant", "content": "".join(pieces)}]
                self.session.messages = [*before, *(turn if any(pieces) else [])]
            finally:
                view.finish()
        except BrokenPipeError:
            raise
        except Exception as error:  # whatever it is, it must not cost the conversation
            self.screen.error(line_of(error))
            return False
        kept = len(self.session.messages) > len(before)
        self.status = status.line(record.stats)
        if kept:
            self.records.append(record)
        self._remark(record, kept)
        self.read_ahead()
        if self.screen.terminal and not self.screen.ansi:
            self.screen.note(f"({self.status})")
        return kept

    def _remark(self, record: AnswerRecord, kept: bool) -> None:
        """Say why the answer ends where it does, if that is not by itself."""
        if record.finish_reason == "cancelled":
            if not self.screen.interactive:
                raise KeyboardInterrupt
            said = "what was said is kept" if kept else "nothing was said yet"
            self.screen.note(f"[stopped; {said}; /retry asks again]")
        elif record.finish_reason == "length":
            self.screen.note(f"[cut short: {self._limit(record.stats)}]")

    def read_ahead(self) -> None:
        """While the person types, the models read what the next question will follow."""
        if self.screen.interactive:
            with suppress(LocalspecError):  # then it is read when it is asked
                self.llm.read_ahead(self.session.messages)

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
        drafters = "+".join(map(short_name, self.llm.draft_names)) or "no draft"
        return f"{coming}draft {self.llm.draft_length} · {drafters} · /help lists the commands"


def header(llm: LLM, screen: ChatScreen, *, follows: bool = False) -> None:
    """Say what was loaded, in three lines; ``follows`` if a draft model is still to come."""
    drafters = (" + ".join(llm.draft_names) or "no draft") + (", and a draft model as soon as it is there" * follows)
    memory = f" · {process_bytes() / 1e9:.1f} GB" if process_bytes() >= 5e7 else ""  # weights included
    screen.line(f"{llm.model_name} · {llm.backend_name} · context {llm.n_ctx}{memory}", Style.HEAD)
    screen.line(f"draft: {drafters}")
    print(screen.legend(llm.draft_names), file=screen.file)
    for warning in llm.warnings:
        screen.note(f"note: {warning}")
    screen.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
