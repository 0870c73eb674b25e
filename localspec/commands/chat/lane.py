"""A round in one line: ``  7  3/5 model    14+61 ms  ✓def✓ add✓(✗x✗, → a``."""

from __future__ import annotations

from localspec.commands.chat.ink import Ink, token_ink
from localspec.spec_decode.rounds import Round
from localspec.terminal.text import clip, on_one_line, width

_MARKS = {True: ("✓", "✗", "→", "+", "·"), False: ("+", "-", ">", "*", ".")}


def lane_line(round_: Round, columns: int, *, ansi: bool, colour: bool, unicode: bool = True) -> str:
    """One line for a round: number, accepted of drafted, who guessed, draft + verify time, each guess and its fate.

    Args:
        round_: the round.
        columns: cells the line may take.
        ansi: whether escape sequences are allowed; the marks say the same without.
        colour: whether colours are.
        unicode: False draws the marks in ASCII.
    """
    accepted_mark, rejected_mark, recovered_mark, bonus_mark, plain_mark = _MARKS[unicode]
    n_drafted, n_accepted = len(round_.draft), round_.verdict.n_accepted
    sources = "+".join(dict.fromkeys(guess.source for guess in round_.draft)) or "-"
    fate = f"{n_accepted}/{n_drafted}" if n_drafted else "plain"
    times = f"{round_.ms_draft:3.0f}+{round_.ms_verify:3.0f} ms"
    head = f"{round_.index + 1:4d} {fate:>5} {clip(sources, 11):<11} {times}  "
    pieces: list[tuple[str, Ink]] = []
    texts = round_.draft_texts or [""] * n_drafted
    for guess, text, accepted in zip(round_.draft, texts, round_.accepted, strict=True):
        if accepted:
            pieces.append((accepted_mark + on_one_line(text), token_ink("accepted", guess.source)))
        else:
            pieces.append((rejected_mark, Ink.TARGET))
            pieces.append((on_one_line(text), Ink.REJECTED))
    own = [token for token in round_.emitted if token.kind != "accepted"]
    if own:
        mark = {"recovered": recovered_mark, "bonus": bonus_mark}.get(own[-1].kind, plain_mark)
        gap = " " if pieces else ""
        pieces.append((f"{gap}{mark}{on_one_line(own[-1].text) or 'end'}", Ink.TARGET))
    elif round_.finish_reason:
        pieces.append((" end", Ink.NOTE))
    line, used = [Ink.NOTE.paint(head, ansi=ansi, colour=colour)], width(head)
    for text, ink in pieces:
        shown = clip(text, columns - used)
        used += width(shown)
        line.append(ink.paint(shown, ansi=ansi, colour=colour))
        if shown != text:
            break
    return "".join(line)
