"""The conversation of ``desktop_chat.py``: every token in the style of its origin, rejected ones struck through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6 import QtCore, QtGui, QtWidgets
from PySide6.QtGui import QTextCharFormat, QTextCursor

from localspec import Round, Span

Underline = QTextCharFormat.UnderlineStyle


@dataclass(frozen=True)
class Style:
    """What tokens of one origin look like; never by colour alone."""

    name: str
    light: tuple[str, str] | None = None  # text and ground, contrast 4.5 or more
    dark: tuple[str, str] | None = None
    line: Underline = Underline.NoUnderline
    struck: bool = False
    bold: bool = False

    def colours(self, dark: bool) -> tuple[str, str]:
        return (self.dark if dark else self.light) or ("", "")


STYLES = {
    "model": Style(
        "accepted: draft model's", ("#0b5328", "#daf3e2"), ("#94e6ad", "#12361f"), Underline.SingleUnderline
    ),
    "ngram": Style("accepted: n-gram's", ("#0a4a58", "#d7f0f6"), ("#8fdeed", "#0d3540"), Underline.DotLine),
    "grammar": Style("accepted: grammar's", ("#54219f", "#ebe3fb"), ("#cfbcff", "#2e2152"), Underline.DashUnderline),
    "rejected": Style("rejected", ("#b3261e", ""), ("#ff9d94", ""), struck=True),
    "recovered": Style("target's instead", ("#634000", "#fcedc8"), ("#f7d283", "#402f0b")),
    "bonus": Style("target's on top", ("#1b3f9c", "#e0e9fd"), ("#afc8ff", "#1b2d59")),
    "plain": Style("plain"),
    "user": Style("question", bold=True),
    "note": Style("note", ("#57606a", ""), ("#9ba6b4", "")),
}
ORIGINS = ("model", "ngram", "grammar", "rejected", "recovered", "bonus", "plain")
Piece = tuple[str, str]
"""A text and the name of its style."""


def is_dark(widget: QtWidgets.QWidget) -> bool:
    return widget.palette().base().color().lightness() < 128


def pieces(round_: Round) -> list[Piece]:
    """What a round looks like: accepted draft tokens, rejected ones, the target's own token."""
    spoken = [(span.text, _ink_of(span)) for span in round_.spans if span.part == "answer"]
    rejected = [(text, "rejected") for text in round_.draft_texts[round_.verdict.n_accepted :]]
    own = 1 if spoken and spoken[-1][1] == "recovered" else 0
    return [*spoken[: len(spoken) - own], *rejected, *spoken[len(spoken) - own :]]


def _ink_of(span: Span) -> str:
    if span.kind != "accepted":
        return span.kind
    return span.source if span.source in STYLES else "model"  # a second draft model is called model2


class Transcript(QtWidgets.QTextEdit):
    """The conversation. Text is inserted as text: nothing that a model says is read as markup."""

    REJECTED = QTextCharFormat.Property.UserProperty + 1

    def __init__(self) -> None:
        super().__init__(readOnly=True)
        self.setAccessibleName("Conversation")
        self.document().setDocumentMargin(12)
        self.document().setDefaultFont(QtGui.QFontDatabase.systemFont(QtGui.QFontDatabase.SystemFont.FixedFont))
        self._pieces: list[Piece] = []
        self._shows_rejected = True
        self._lines = QtGui.QTextBlockFormat()
        self._lines.setLineHeight(125, QtGui.QTextBlockFormat.LineHeightTypes.ProportionalHeight.value)
        self._mix_inks()

    def _mix_inks(self) -> None:
        dark = is_dark(self)
        self.formats = {name: self._format(style, dark) for name, style in STYLES.items()}

    def changeEvent(self, event: QtCore.QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QtCore.QEvent.Type.PaletteChange:  # the desktop turned dark, or light
            self._mix_inks()
            self.show_rejected(self._shows_rejected)

    def _format(self, style: Style, dark: bool) -> QTextCharFormat:
        made = QTextCharFormat()
        text, ground = style.colours(dark)
        if text:
            made.setForeground(QtGui.QColor(text))
        if ground:
            made.setBackground(QtGui.QColor(ground))
        made.setUnderlineStyle(style.line)
        made.setFontStrikeOut(style.struck)
        made.setFontWeight(QtGui.QFont.Weight.DemiBold if style.bold else QtGui.QFont.Weight.Normal)
        made.setProperty(self.REJECTED, style.struck)
        return made

    def write(self, added: Sequence[Piece]) -> None:
        """Add text, and follow it where the end was in sight."""
        self._pieces += added
        bar = self.verticalScrollBar()
        follows = bar.value() >= bar.maximum() - 4
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.beginEditBlock()
        cursor.setBlockFormat(self._lines)
        for text, style in added:
            if style != "rejected":
                cursor.insertText(text, self.formats[style])
            elif self._shows_rejected:
                cursor.insertText(text.replace("\n", "↵"), self.formats[style])
        cursor.endEditBlock()
        if follows:
            bar.setValue(bar.maximum())

    def show_rejected(self, shown: bool) -> None:
        """Draw it all again with rejected draft tokens, or without."""
        self._shows_rejected = shown
        written, self._pieces = self._pieces, []
        super().clear()
        self.write(written)

    def clear(self) -> None:
        self._pieces = []
        super().clear()

    def createMimeDataFromSelection(self) -> QtCore.QMimeData:
        """What is copied is the text, without rejected draft tokens."""
        chosen = QtGui.QTextDocument()
        QTextCursor(chosen).insertFragment(self.textCursor().selection())
        lines, block = [], chosen.begin()
        while block.isValid():
            fragments = [item.fragment() for item in block]
            lines.append("".join(f.text() for f in fragments if not f.charFormat().property(self.REJECTED)))
            block = block.next()
        data = QtCore.QMimeData()
        data.setText("\n".join(lines).replace("\u2028", "\n"))
        return data


class Legend(Transcript):
    """One line that says which style is which."""

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("Legend")
        self.setFocusPolicy(QtCore.Qt.FocusPolicy.NoFocus)
        self.setFrameShape(QtWidgets.QTextEdit.Shape.NoFrame)
        self.setVerticalScrollBarPolicy(QtCore.Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.viewport().setAutoFillBackground(False)
        self.document().setDocumentMargin(2)
        self.document().setDefaultFont(self.font())
        self.write([piece for name in ORIGINS for piece in ((STYLES[name].name, name), ("   ", "plain"))])

    def resizeEvent(self, event: QtGui.QResizeEvent) -> None:
        super().resizeEvent(event)
        self.setFixedHeight(round(self.document().size().height()))  # two lines where the window is narrow
