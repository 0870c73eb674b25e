"""``/race``: the last question again, plain and speculative, and what the difference was."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from localspec.commands.chat.screen import no_echo
from localspec.commands.chat.style import Style
from localspec.commands.chat.typesetter import Typesetter
from localspec.errors import UsageError
from localspec.spec_decode.rounds import SpecStats
from localspec.system.interrupts import on_interrupt
from localspec.terminal.text import on_one_line, visible

if TYPE_CHECKING:
    from localspec.commands.chat.chat import Chat
    from localspec.runtime.stream import Reply

SEED_BITS = 32


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a race."""

    name: str
    speculate: bool


PLAIN, SPECULATIVE = Side("plain", False), Side("speculative", True)


def race(chat: Chat) -> None:
    """Run the race and show both answers side by side. The conversation is not changed.

    Raises:
        UsageError: nothing was asked yet.
        LocalspecError: an answer failed.
    """
    if not chat.records:
        raise UsageError("there is no question to race yet: ask something first")
    messages = chat.session.messages[:-1]
    params = chat.params
    if not params.greedy and params.seed is None:
        params = replace(params, seed=secrets.randbits(SEED_BITS))  # both sides get the same dice
    order = (PLAIN, SPECULATIVE) if chat.races % 2 == 0 else (SPECULATIVE, PLAIN)
    chat.races += 1
    replies: dict[Side, Reply] = {}
    for side in order:
        progress = _ProgressLine(chat, side.name)
        stream = chat.llm.rounds(messages, params, speculate=side.speculate)
        try:
            with no_echo(), stream, on_interrupt(stream.close):
                for round_ in stream:
                    progress.add(round_.text, len(round_.emitted), round_.ms_draft + round_.ms_verify + round_.ms_other)
                reply = stream.reply
        finally:
            progress.close()
        if reply.finish_reason == "cancelled":
            chat.screen.note("[race stopped]")
            return
        replies[side] = reply
    _show(chat, replies[PLAIN], replies[SPECULATIVE], order[0].name)


class _ProgressLine:
    """A line that is gone when the run is over."""

    def __init__(self, chat: Chat, name: str) -> None:
        self._who = name
        self._tokens = 0
        self._ms = 0.0
        self._text = ""
        self._paper = Typesetter(chat.screen.file, colour=chat.screen.colour) if chat.screen.ansi else None

    def add(self, text: str, n_tokens: int, ms: float) -> None:
        self._tokens += n_tokens
        self._ms += ms
        self._text = (self._text + on_one_line(text))[-40:]
        if self._paper:
            speed = self._tokens / self._ms * 1e3 if self._ms else 0.0
            self._paper.tail(
                [(f"{self._who}: {self._tokens} tokens, {speed:.1f} tok/s  …{self._text}", Style.NOTE)], ""
            )
            self._paper.flush()

    def close(self) -> None:
        if self._paper:
            self._paper.finish()


def _show(chat: Chat, plain: Reply, speculative: Reply, first: str) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    for name in ("plain", "speculative"):
        table.add_column(f"{name} (ran first)" if name == first else name, ratio=1, overflow="fold")
    table.add_row(*(_figures(reply) for reply in (plain, speculative)))
    table.add_row("", "")
    table.add_row(*(Text(visible(reply.text).rstrip()) for reply in (plain, speculative)))
    chat.screen.print(table)
    chat.screen.line()
    chat.screen.prose(_verdict(plain.stats, speculative.stats))
    chat.screen.prose(difference(chat, plain, speculative))


def _figures(reply: Reply) -> str:
    stats = reply.stats
    return f"{stats['completion_tokens']} tokens, {stats.seconds_decode:.2f} s, {stats['tokens_per_second']:.1f} tok/s"


def _verdict(plain: SpecStats, speculative: SpecStats) -> str:
    if not plain["tokens_per_second"]:
        return "no tokens to compare"
    ratio = speculative["tokens_per_second"] / plain["tokens_per_second"]
    return f"speculative ran at ×{ratio:.2f} of plain, {speculative['acceptance_rate']:.0%} of its guesses accepted"


def difference(chat: Chat, plain: Reply, speculative: Reply) -> str:
    """Where the two answers part, in one sentence."""
    pairs = zip(plain.token_ids, speculative.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        shorter = min(len(plain.token_ids), len(speculative.token_ids))
        if len(plain.token_ids) == len(speculative.token_ids):
            return f"same text: all {shorter} tokens are equal"
        return f"equal for {shorter} tokens, then one of them ended"
    ours, theirs = (on_one_line(chat.llm.detokenize([reply.token_ids[at]])) or "end" for reply in (plain, speculative))
    return (
        f"first difference at token {at + 1}: plain {ours!r}, speculative {theirs!r} "
        "(wide and narrow passes round differently, so near ties can fall either way)"
    )
