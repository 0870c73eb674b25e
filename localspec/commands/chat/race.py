"""``/race``: the last question again, plain and speculative, and what the difference was."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from localspec.commands.chat.screen import no_echo
from localspec.errors import UsageError
from localspec.spec_decode.rounds import SpecStats
from localspec.system.interrupts import on_interrupt
from localspec.terminal.progress import Progress
from localspec.terminal.text import on_one_line, visible

if TYPE_CHECKING:
    from localspec.commands.chat.chat import Chat
    from localspec.runtime.stream import Reply

SEED_BITS = 32


_NAMES = {False: "plain", True: "speculative"}


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
    first = chat.races % 2 == 1
    chat.races += 1
    replies: dict[bool, Reply] = {}
    for speculate in (first, not first):
        stream = chat.llm.rounds(
            messages, params, speculate=speculate, think=chat.think, thinking_budget=chat.thinking_budget
        )
        status, said = SpecStats(), ""
        with Progress(chat.screen.file) as progress, no_echo(), stream, on_interrupt(stream.close):
            for round_ in stream:
                status.add(round_)
                said = (said + on_one_line(round_.text))[-40:]
                if chat.screen.ansi:
                    speed = f"{status.completion_tokens} tokens, {status['tokens_per_second']:.1f} tok/s"
                    progress.report(f"{_NAMES[speculate]}: {speed}  …{said}", None)
            replies[speculate] = stream.reply
        if replies[speculate].finish_reason == "cancelled":
            chat.screen.note("[race stopped]")
            return
    _show(chat, replies[False], replies[True], _NAMES[first])


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
