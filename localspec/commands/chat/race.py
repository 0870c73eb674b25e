"""``/race``: the last question again, plain and with guesses, and what the difference was."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from localspec.commands.chat.screen import no_echo
from localspec.errors import UsageError
from localspec.spec_decode.rounds import SpecStats
from localspec.system.interrupts import on_interrupt
from localspec.system.usage import CPUTimes, others_share
from localspec.terminal.progress import Progress
from localspec.terminal.text import on_one_line, visible

if TYPE_CHECKING:
    from localspec.commands.chat.chat import Chat
    from localspec.runtime.stream import Reply
    from localspec.sampling.sampling import SamplingParams

SEED_BITS = 32

_NAMES = {False: "plain", True: "with guesses"}

MENTIONED = 0.05
"""Others' share of the CPUs from which on it is said: less is what any system does by itself."""

NOISE = "Nothing was guessed, so both did the same work; the difference is noise."


@dataclass(frozen=True, slots=True)
class _Heat:
    """One race: both answers, and which was first."""

    plain: Reply
    guessed: Reply
    first: bool

    @property
    def ratio(self) -> float | None:
        """Speed with guesses over that of plain decoding; None where nothing was guessed, or nothing said."""
        plain, guessed = self.plain.stats["tokens_per_second"], self.guessed.stats["tokens_per_second"]
        return guessed / plain if plain and self.guessed.stats["num_draft_tokens"] else None


def race(chat: Chat) -> None:
    """Run the race, if there are guesses twice, and show both answers side by side. The conversation is not changed.

    Raises:
        UsageError: nothing was asked yet.
        LocalspecError: an answer failed.
    """
    if not chat.records:
        raise UsageError("there is no question to race yet: ask something first")
    params = chat.params
    if not params.greedy and params.seed is None:
        params = replace(params, seed=secrets.randbits(SEED_BITS))  # both sides get the same dice
    first = chat.races % 2 == 1
    chat.races += 1
    before = CPUTimes.now()
    heats: list[_Heat] = []
    while not heats or (len(heats) == 1 and heats[0].ratio is not None):  # the second in the other order
        heat = _run(chat, params, first != bool(heats), f"race {len(heats) + 1}, ")
        if heat is None:
            chat.screen.note("[race stopped]")
            return
        heats.append(heat)
    others = others_share([(before, CPUTimes.now())]) or 0.0
    _show(chat, heats[0])
    known = [heat for heat in heats if heat.ratio is not None] or heats
    chat.screen.line(verdict([heat.ratio for heat in heats], known[-1].guessed.stats, others))
    chat.screen.line(difference(chat, heats[0].plain, heats[0].guessed))


def _run(chat: Chat, params: SamplingParams, first: bool, what: str) -> _Heat | None:
    """Answer the last question both ways; None if that was stopped."""
    replies: dict[bool, Reply] = {}
    for speculate in (first, not first):
        stream = chat.llm.rounds(
            chat.session.messages[:-1],
            params,
            speculate=speculate,
            think=chat.think,
            thinking_budget=chat.thinking_budget,
        )
        status, said = SpecStats(), ""
        with Progress(chat.screen.file) as progress, no_echo(), stream, on_interrupt(stream.close):
            for round_ in stream:
                status.add(round_)
                said = (said + on_one_line(round_.text))[-40:]
                if chat.screen.ansi:
                    speed = f"{status.completion_tokens} tokens, {status['tokens_per_second']:.1f} tok/s"
                    progress.report(f"{what}{_NAMES[speculate]}: {speed}  …{said}", None)
            replies[speculate] = stream.reply
        if replies[speculate].finish_reason == "cancelled":
            return None
    return _Heat(replies[False], replies[True], first)


def _show(chat: Chat, heat: _Heat) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    for guesses, name in _NAMES.items():
        table.add_column(f"{name} (ran first)" if guesses == heat.first else name, ratio=1, overflow="fold")
    table.add_row(*(_figures(reply) for reply in (heat.plain, heat.guessed)))
    table.add_row("", "")
    table.add_row(*(Text(visible(reply.text).rstrip()) for reply in (heat.plain, heat.guessed)))
    chat.screen.print(table)
    chat.screen.line()


def _figures(reply: Reply) -> str:
    stats = reply.stats
    return f"{stats['completion_tokens']} tokens, {stats.seconds_decode:.2f} s, {stats['tokens_per_second']:.1f} tok/s"


def verdict(ratios: Sequence[float | None], stats: Mapping[str, Any], others: float) -> str:
    """What came of some races.

    Args:
        ratios: of each, see ``_Heat.ratio``.
        stats: of the last answer with guesses.
        others: share of the CPUs that other programs used.
    """
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
        f"first difference at token {at + 1}: plain {ours!r}, with guesses {theirs!r} "
        "(wide and narrow passes round differently, so near ties can fall either way)"
    )
