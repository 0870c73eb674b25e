"""What each kind of text looks like. Every kind differs in more than its colour."""

from __future__ import annotations

from enum import Enum

from localspec.spec_decode.rounds import TokenKind


class Style(Enum):
    """A kind of text: (attributes, colour), as the parameters of an SGR escape sequence."""

    TARGET = ("", "")
    """The target's own tokens."""
    MODEL = ("1", "32")
    """Accepted draft tokens of a model."""
    NGRAM = ("4", "36")
    """Accepted draft tokens of the n-gram drafter."""
    REJECTED = ("2;9", "31")
    """Rejected draft tokens: dim and struck through."""
    NOTE = ("2", "")
    HEAD = ("1", "")
    ERROR = ("", "31")
    PROMPT = ("1", "34")

    def sgr(self, colour: bool) -> str:
        """The escape sequence that turns this style on, from the default."""
        attributes, hue = self.value
        codes = ";".join(code for code in (attributes, hue if colour else "") if code)
        return f"\x1b[{codes}m" if codes else ""

    def paint(self, text: str, *, ansi: bool, colour: bool) -> str:
        """The text in this style, where escape sequences are allowed."""
        start = self.sgr(colour) if ansi else ""
        return f"{start}{text}\x1b[0m" if start else text


def token_style(kind: TokenKind, source: str) -> Style:
    """The style of a verified token."""
    if kind != "accepted":
        return Style.TARGET
    return Style.NGRAM if source == "ngram" else Style.MODEL
