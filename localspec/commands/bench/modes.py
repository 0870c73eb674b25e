"""How thorough a run is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mode:
    """How thorough a run is.

    Attributes:
        name: ``quick``, ``default`` or ``full``.
        arms: what is measured where no arm is named.
        max_tokens: longest answer.
        minutes: the time budget, loading included; None: none.
        repeats: most repeats of a question.
        tolerance: half-width of the overall interval of every speed-up, relative, that is narrow enough.
        least_answers: how many questions a time budget should suffice for, if need be with shorter answers.
    """

    name: str
    arms: tuple[str, ...]
    max_tokens: int
    minutes: float | None
    repeats: int
    tolerance: float
    least_answers: int = 0


QUICK = Mode("quick", ("plain", "auto"), 64, 2.0, 3, 0.05, least_answers=9)
DEFAULT = Mode("default", ("plain", "auto"), 128, 15.0, 3, 0.03)
FULL = Mode("full", ("plain", "auto", "1", "2", "4", "8"), 256, None, 5, 0.02)

LEAST_TOKENS = 24
"""A draft model is not asked before an answer has some tokens, so shorter answers would say nothing."""

READING = 0.8
"""Time to read a prompt, guessed before any was read, as a share of the time that an answer takes plainly."""


def affordable_tokens(mode: Mode, seconds: float, n_answers: int, tokens_per_second: float) -> int:
    """The longest answers for which a time budget suffices.

    Args:
        mode: says for how many questions it should.
        seconds: what is left.
        n_answers: arms times engines.
        tokens_per_second: expected speed of plain decoding.
    """
    if not mode.least_answers:
        return mode.max_tokens
    each = seconds / mode.least_answers / (n_answers + READING)
    return max(LEAST_TOKENS, min(mode.max_tokens, int(each * tokens_per_second)))
