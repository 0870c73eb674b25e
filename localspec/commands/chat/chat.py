"""The chat: asks, answers, and keeps what was said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from localspec.commands.chat.conversation import Conversation, Turn
from localspec.commands.chat.ink import Ink
from localspec.commands.chat.screen import Screen, no_echo
from localspec.commands.chat.status import Status
from localspec.errors import LocalspecError, line_of
from localspec.model_files.catalog import short_name
from localspec.sampling.sampling import SamplingParams
from localspec.system.interrupts import on_interrupt

if TYPE_CHECKING:
    from localspec.commands.chat.late_draft import LateDraft
    from localspec.llm import LLM


class Chat:
    """A conversation with a loaded pair on a screen.

    Attributes:
        conversation: what was said; only answers that came about are in it.
        params: how answers are sampled.
        view: how they are shown: ``tokens``, ``lane`` or ``plain``.
        last_stats: figures of the last answer.
        last_question: also kept where no answer came about.
        races: how many races were run, so that plain and speculative take turns in going first.
        leaving: set by ``/quit``.
        late: what brings the draft model after the prompt, if anything does.
        loaded: called when a load that the chat asked for is over, to clear its progress from the screen.
    """

    def __init__(
        self, llm: LLM, screen: Screen, *, params: SamplingParams, system: str | None = None, view: str = "tokens"
    ) -> None:
        self.llm = llm
        self.screen = screen
        self.params = params
        self.view = view
        self.conversation = Conversation(system)
        self.last_stats: dict[str, Any] = {}
        self.last_question: str | None = None
        self.races = 0
        self.leaving = False
        self.status = ""
        self.late: LateDraft | None = None
        self._n_told = len(llm.warnings)
        self.loaded: Callable[[], None] = lambda: None

    def ask(self, question: str) -> bool:
        """Ask, show the answer, and keep both; an error is reported and changes nothing.

        Returns:
            Whether an answer came about.

        Raises:
            KeyboardInterrupt: Ctrl-C where nobody sits at a terminal.
        """
        self.last_question = question
        status = Status(self.llm.draft_names, self.llm.draft_length, self.plain_speed)
        view = self.screen.view(self.view, status)
        turn = Turn(question, "", "cancelled")
        pieces: list[str] = []
        try:
            stream = self.llm.rounds(self.conversation.messages(question), self.params)
            try:
                with no_echo(), stream, on_interrupt(stream.close):
                    view.wait("reading")
                    for round_ in stream:
                        status.add(round_)
                        turn.rounds.append(round_.as_event())
                        pieces.append(round_.text)
                        view.round(round_)
                    reply = stream.reply
                    turn.assistant, turn.finish_reason, turn.stats = reply.text, reply.finish_reason, dict(reply.stats)
            except KeyboardInterrupt:  # a second Ctrl-C: the engine is busy, and we do not wait for it
                turn.assistant, turn.stats = "".join(pieces), status.stats.as_dict()
            finally:
                view.finish()
        except BrokenPipeError:
            raise
        except Exception as error:  # whatever it is, it must not cost the conversation
            self.screen.error(line_of(error))
            return False
        self._keep(turn, status)
        return bool(turn.assistant) or turn.finish_reason != "cancelled"

    def _keep(self, turn: Turn, status: Status) -> None:
        self.last_stats = turn.stats
        self.status = status.final(turn.stats)
        if turn.finish_reason != "cancelled" or turn.assistant:
            self.conversation.turns.append(turn)
        if turn.finish_reason == "cancelled":
            if not self.screen.interactive:
                raise KeyboardInterrupt
            kept = "what was said is kept" if turn.assistant else "nothing was said yet"
            self.screen.note(f"[stopped; {kept}; /retry asks again]")
        elif turn.finish_reason == "length":
            self.screen.note(f"[cut short: {self._limit(turn)}]")
        self.read_ahead()
        if self.screen.terminal and not self.screen.ansi:
            self.screen.note(f"({self.status})")

    def read_ahead(self) -> None:
        """While the person types, the models read what the next question will follow."""
        if self.screen.interactive:
            with suppress(LocalspecError):  # then it is read when it is asked
                self.llm.read_ahead(self.conversation.messages())

    def _limit(self, turn: Turn) -> str:
        budget = self.params.max_tokens
        if budget is not None and turn.stats.get("completion_tokens", 0) >= budget:
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
    def plain_speed(self) -> float:
        """Expected tokens per second of plain decoding."""
        return self.llm.plain_tokens_per_second

    @property
    def toolbar(self) -> str:
        """The status line while nothing is being said."""
        coming = f"{self.late.status} · " if self.late is not None and self.late.status else ""
        if self.status:
            return coming + self.status
        drafters = "+".join(map(short_name, self.llm.draft_names)) or "no draft"
        return f"{coming}draft {self.llm.draft_length} · {drafters} · /help lists the commands"


def header(llm: LLM, screen: Screen, *, follows: bool = False) -> None:
    """Say what was loaded, in three lines; ``follows`` if a draft model is still to come."""
    drafters = (" + ".join(llm.draft_names) or "no draft") + (", and a draft model as soon as it is there" * follows)
    memory = f" · {memory_in_use() / 1e9:.1f} GB" if memory_in_use() >= 5e7 else ""
    screen.line(f"{llm.model_name} · {llm.backend_name} · context {llm.n_ctx}{memory}", Ink.HEAD)
    screen.line(f"draft: {drafters}")
    print(screen.legend(), file=screen.file)
    for warning in llm.warnings:
        screen.note(f"note: {warning}")
    screen.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")


def memory_in_use() -> int:
    """Bytes this process keeps in memory, weights included; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        import resource

        return pages * resource.getpagesize()
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0
