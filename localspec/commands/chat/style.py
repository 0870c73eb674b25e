"""What each kind of text looks like. Every kind differs in more than its colour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from localspec.spec_decode.drafters.names import CORPUS, FROM_STATES, NGRAM, RECYCLED, kind_of
from localspec.spec_decode.rounds import TokenKind


class Style(Enum):
    """A kind of text: (attributes, colour), as the parameters of an SGR escape sequence."""

    TARGET = ("", "")
    """The target's own tokens."""
    MODEL = ("1", "32")
    """Accepted draft tokens of a model."""
    NGRAM = ("4", "36")
    """Accepted draft tokens that cost nothing: of n-grams, or recycled."""
    CORPUS = ("3;4", "33")
    """Accepted draft tokens that were copied from files the user named."""
    STATES = ("1;4", "35")
    """Accepted draft tokens of a head, or of the target's own first layers."""
    REJECTED = ("9", "91")
    """Rejected draft tokens: struck through, and in a red that can be read on dark and light."""
    NOTE = ("2", "")
    THINKING = ("2;3", "")
    """What is thought before an answer: dim and slanted."""
    HEAD = ("1", "")
    ERROR = ("", "31")
    PROMPT = ("1", "34")

    def sgr(self, colour: bool) -> str:
        """The escape sequence that turns this style on, from the default."""
        attributes, hue = self.value
        codes = ";".join(code for code in (attributes, hue if colour else "") if code)
        return f"\x1b[{codes}m" if codes else ""


@dataclass(frozen=True, slots=True)
class Painter:
    """Puts texts in a style, as far as escape sequences and colours are allowed."""

    ansi: bool
    colour: bool

    def __call__(self, text: str, style: Style) -> str:
        start = style.sgr(self.colour) if self.ansi else ""
        return f"{start}{text}\x1b[0m" if start else text


def token_style(kind: TokenKind, source: str) -> Style:
    """The style of a verified token."""
    if kind != "accepted":
        return Style.TARGET
    free, states = dict.fromkeys((NGRAM, RECYCLED), Style.NGRAM), dict.fromkeys(FROM_STATES, Style.STATES)
    return (free | states | {CORPUS: Style.CORPUS}).get(kind_of(source), Style.MODEL)
