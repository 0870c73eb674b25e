"""A chat window with the model in the same process, which never waits for the model.

    pip install 'localspec[desktop]'
    python examples/desktop_chat.py                                  # the default pair
    python examples/desktop_chat.py smollm2-135m --draft ngram

``Engine`` owns the ``LLM``: it loads and answers on threads, and speaks in signals, which Qt delivers on the window's
thread. ``ChatWindow`` is everything one sees; the text is drawn by ``desktop_transcript.py``.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from desktop_transcript import STYLES, Legend, Transcript, is_dark, pieces
from PySide6 import QtCore, QtGui, QtWidgets
from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QLabel, QWidget

from localspec import LLM, LocalspecError, Reply, Round, RoundStream, SamplingParams, SpecStats

FRAME = 1 / 30
"""Seconds between two deliveries of rounds; a tiny model makes a thousand rounds a second, and no eye follows those."""

ANSWER = SamplingParams(temperature=0.0, max_tokens=1024)


class Engine(QObject):
    """The model, on threads of its own."""

    progress = Signal(str, object)  # what is being done; the fraction done, or None
    ready = Signal()
    rounds = Signal(object)  # list[Round], in order
    answered = Signal(object)  # Reply
    failed = Signal(str)  # one line

    def __init__(self) -> None:
        super().__init__()
        self.llm: LLM | None = None
        self._stream: RoundStream | None = None
        self._thread = threading.Thread()
        self._stopped = threading.Event()
        self._closing = threading.Event()

    def load(self, model: str, draft: Any, **options: Any) -> None:
        """Load a pair; ends with ``ready`` or ``failed``."""

        def work() -> None:
            self.llm = LLM(model, draft, progress=self.progress.emit, cancel=self._closing, **options)
            self.ready.emit()

        self._start(work)

    def ask(self, messages: Sequence[dict[str, str]], **options: Any) -> None:
        """Answer a conversation: ``rounds``, again and again, then ``answered`` or ``failed``."""
        messages = list(messages)
        self._stopped.clear()

        def work() -> None:
            stream = self._stream = self.llm.rounds(messages, ANSWER, **options)
            if self._stopped.is_set():
                stream.close()
            batch: list[Round] = []
            delivered = 0.0
            for round_ in stream:
                batch.append(round_)
                if time.monotonic() - delivered >= FRAME:
                    self.rounds.emit(batch)
                    batch, delivered = [], time.monotonic()
            self.rounds.emit(batch)
            self.answered.emit(stream.reply)

        self._start(work)

    def stop(self) -> None:
        """End the answer within a round; ``answered`` brings what was said until then."""
        self._stopped.set()
        if self._stream is not None:
            self._stream.close()

    def close(self) -> None:
        """Stop whatever runs, and give the memory back."""
        self._closing.set()
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
        if self.llm is not None:
            self.llm.close(cancel=True)

    def _start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # a thread's exception is nobody's; the window must hear of it
                line = str(error) if isinstance(error, LocalspecError) else f"{type(error).__name__}: {error}"
                self.failed.emit(line)

        self._thread = threading.Thread(target=guarded, name="desktop-chat", daemon=True)
        self._thread.start()


class Question(QtWidgets.QPlainTextEdit):
    """Where one types: Enter sends, Shift+Enter makes a new line."""

    submitted = Signal()

    def keyPressEvent(self, event: QtGui.QKeyEvent) -> None:
        shift = event.modifiers() & Qt.KeyboardModifier.ShiftModifier
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and not shift:
            self.submitted.emit()
        else:
            super().keyPressEvent(event)


class ChatWindow(QWidget):
    """The window. ``state`` is loading, idle, answering or broken."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.messages: list[dict[str, str]] = []
        self.stats = SpecStats()
        self.setWindowTitle("localspec")
        self.resize(900, 680)

        self.transcript = Transcript()
        self.speculate = QtWidgets.QCheckBox("&Speculate", checked=True)
        self.draft_length = QtWidgets.QComboBox(accessibleName="Draft length")
        self.draft_length.addItems(["auto", *map(str, range(1, 17))])
        self.draft_length.setToolTip("Guesses a round; auto weighs their cost against their chance, token by token")
        self.rejected = QtWidgets.QCheckBox("Show &rejected guesses", checked=True)
        self.new_chat = QtWidgets.QPushButton("&New chat")
        self.question = Question(
            placeholderText="Ask something (Enter sends, Shift+Enter: new line)", tabChangesFocus=True
        )
        self.question.setAccessibleName("Question")
        self.question.setFixedHeight(64)
        self.send = QtWidgets.QPushButton("Send")
        self.stop = QtWidgets.QPushButton("Stop (Esc)")
        self.progress = QtWidgets.QProgressBar(accessibleName="Loading", maximum=0)
        self.error = _plain_label(f"color: {STYLES['rejected'].colours(is_dark(self))[0]}; font-weight: 600;")
        self.status = _plain_label()
        self.status.setText("loading …")
        legend = Legend()
        length_label = QLabel("Draft &length")
        length_label.setBuddy(self.draft_length)

        bar = QtWidgets.QHBoxLayout()
        for widget in (self.speculate, length_label, self.draft_length, self.rejected):
            bar.addWidget(widget)
        bar.addStretch()
        bar.addWidget(self.new_chat)
        ask = QtWidgets.QGridLayout()
        ask.addWidget(self.question, 0, 0, 2, 1)
        ask.addWidget(self.send, 0, 1)
        ask.addWidget(self.stop, 1, 1)
        page = QtWidgets.QVBoxLayout(self)
        page.addLayout(bar)
        page.addWidget(self.transcript, 1)
        for widget in (legend, self.progress, self.error):
            page.addWidget(widget)
        page.addLayout(ask)
        page.addWidget(self.status)

        self.question.submitted.connect(self.ask)
        self.send.clicked.connect(self.ask)
        self.stop.clicked.connect(engine.stop)
        QtGui.QShortcut("Esc", self, activated=engine.stop)
        self.new_chat.clicked.connect(self.start_over)
        self.rejected.toggled.connect(self.transcript.show_rejected)
        self.speculate.toggled.connect(self.draft_length.setEnabled)
        engine.progress.connect(self.on_progress)
        engine.ready.connect(self.on_ready)
        engine.rounds.connect(self.on_rounds)
        engine.answered.connect(self.on_answered)
        engine.failed.connect(self.on_failed)
        self.enter("loading")
        self.question.setFocus()

    def enter(self, state: str, error: str = "") -> None:
        """Make what can be clicked, and what is shown, fit the state."""
        self.state = state
        self.send.setEnabled(state == "idle")
        self.new_chat.setEnabled(state == "idle")
        self.stop.setEnabled(state == "answering")
        self.progress.setVisible(state == "loading")
        self.error.setVisible(bool(error))
        self.error.setText(" ".join(error.split()))

    def ask(self) -> None:
        text = self.question.toPlainText().strip()
        if self.state != "idle" or not text:
            return
        self.question.clear()
        self.stats = SpecStats()
        self.transcript.write([("\n\n" if self.messages else "", "plain"), (text, "user"), ("\n", "plain")])
        self.messages.append({"role": "user", "content": text})
        self.enter("answering")
        self.status.setText("reading the question …")
        length = self.draft_length.currentText()
        self.engine.ask(
            self.messages,
            speculate=self.speculate.isChecked(),
            draft_length=length if length == "auto" else int(length),
        )

    def start_over(self) -> None:
        self.messages.clear()
        self.transcript.clear()
        self.enter("idle")
        self.question.setFocus()

    def on_progress(self, what: str, fraction: float | None) -> None:
        self.progress.setRange(0, 100 if fraction is not None else 0)  # 0 to 0 is "busy"
        self.progress.setValue(round(100 * (fraction or 0)))
        self.status.setText(what)

    def on_ready(self) -> None:
        llm = self.engine.llm
        self.setWindowTitle(f"{llm.model_name} · localspec")
        draft = " + ".join(llm.draft_names) or "none"
        self.status.setText(
            " · ".join([llm.model_name, llm.engine, f"draft: {draft}", f"context {llm.n_ctx}", *llm.warnings])
        )
        self.enter("idle")

    def on_rounds(self, rounds: list[Round]) -> None:
        for round_ in rounds:
            self.stats.add(round_)
        self.transcript.write([piece for round_ in rounds for piece in pieces(round_)])
        if rounds:
            self.status.setText(figures(self.stats))

    def on_answered(self, reply: Reply) -> None:
        self.messages.append({"role": "assistant", "content": reply.text})
        if reply.finish_reason != "stop":
            why = {"cancelled": " [stopped]", "length": " [the answer reached its limit]"}[reply.finish_reason]
            self.transcript.write([(why, "note")])
        self.enter("idle")

    def on_failed(self, error: str) -> None:
        if self.state == "loading":
            self.status.clear()
            self.enter("broken", error)
            return
        question = self.messages.pop()  # it was not answered: back to where it can be changed
        self.question.setPlainText("\n".join(filter(None, (question["content"], self.question.toPlainText()))))
        self.transcript.write([("[not answered]", "note")])
        self.enter("idle", error)

    def closeEvent(self, event: QtGui.QCloseEvent) -> None:
        self.hide()  # the engine may need a round, or a pass over a long prompt, to stop
        self.engine.close()
        super().closeEvent(event)


def figures(stats: SpecStats) -> str:
    """Speed, and how many guesses were right, in a line."""
    speed = f"{stats['tokens_per_second']:.1f} tok/s"
    if not stats.num_draft_tokens:
        return f"{speed} · nothing guessed (plain decoding)"
    faster = f" · ×{stats['estimated_speedup']:.1f}" if stats["estimated_speedup"] else ""
    return f"{speed}{faster} · {stats.num_accepted_tokens} of {stats.num_draft_tokens} guesses right"


def _plain_label(style: str = "") -> QLabel:
    label = QLabel(textFormat=Qt.TextFormat.PlainText, wordWrap=True, styleSheet=style)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


def main() -> int:
    parser = argparse.ArgumentParser(description="A chat window with a model of its own.")
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b", help="catalogue name, path, or hf: address")
    parser.add_argument("--draft", action="append", help="auto, none, ngram or a model; repeat for several")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--ctx", type=int, default=None, metavar="N")
    options = parser.parse_args()
    draft = None if options.draft == ["none"] else options.draft or "auto"
    app = QtWidgets.QApplication(sys.argv[:1])
    engine = Engine()
    window = ChatWindow(engine)
    window.show()
    engine.load(options.model, draft, backend=options.backend, n_ctx=options.ctx)
    signal.signal(signal.SIGINT, lambda *_: window.close())
    wake = QtCore.QTimer(interval=200)  # Python handles a signal only when it gets to run
    wake.timeout.connect(lambda: None)
    wake.start()
    return app.exec()


if __name__ == "__main__":
    sys.exit(main())
