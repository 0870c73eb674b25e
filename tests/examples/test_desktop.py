"""``examples/desktop_chat.py``: the window, with a model in it, driven by clicks and keys.

On Qt's off-screen platform. PySide6 wants these packages of Debian: libegl1 libfontconfig1 libdbus-1-3.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM
from tests.conftest import TinyFiles
from tests.report.test_report import contrast
from tests.support.endless import write_endless
from tests.support.scripted_llm import make_round
from tests.support.waiting import PATIENCE, wait_until

pytest.importorskip("PySide6.QtWidgets", reason="PySide6 (the extra 'desktop') is not here", exc_type=ImportError)

from PySide6 import QtCore, QtGui, QtTest, QtWidgets
from PySide6.QtCore import Qt

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    """The application; there can be one in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QT_QPA_PLATFORM", "offscreen")
        application = QtWidgets.QApplication.instance() or QtWidgets.QApplication(["desktop_chat"])
        application.setQuitOnLastWindowClosed(False)
        yield application
        application.closeAllWindows()
        application.clipboard().clear()  # or it frees what Python made after Python's end, and crashes
        application.processEvents()
        application.shutdown()


@pytest.fixture(scope="module")
def chat(app: Any) -> Iterator[Any]:
    """The example as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import desktop_chat

        yield desktop_chat


def until(condition: Callable[[], Any], what: str = "") -> None:
    """Let the window live until something is so."""
    # QTest.qWait keeps the GIL while it waits, and the model's threads from running.
    wait_until(lambda: QtWidgets.QApplication.processEvents() or condition(), what)


@pytest.fixture
def window(chat: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Opens windows; at the end each is closed, and its engine with it."""
    opened: list[Any] = []
    errors: list[BaseException] = []

    def new(model: Any, draft: Any = "ngram", *, wait: bool = True, **options: Any) -> Any:
        made = chat.ChatWindow(chat.Engine())
        opened.append(made)
        made.show()
        made.activateWindow()  # no window manager does that here
        assert QtTest.QTest.qWaitForWindowActive(made, int(1000 * PATIENCE))
        made.engine.load(str(model), draft, **({"backend": "reference"} | options))
        if wait:
            until(lambda: made.state != "loading", "loaded")
        return made

    # PySide6 prints what a slot raises, and goes on.
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: errors.append(error))
    yield new
    for each in opened:
        each.close()
        each.deleteLater()
        assert not each.engine._thread.is_alive()
    QtCore.QCoreApplication.sendPostedEvents(None, QtCore.QEvent.Type.DeferredDelete)
    assert errors == []


def say(it: Any, text: str) -> None:
    """Type a question and press Enter."""
    QtTest.QTest.keyClicks(it.question, text)
    QtTest.QTest.keyClick(it.question, Qt.Key.Key_Return)


def click(button: Any) -> None:
    assert button.isEnabled()
    QtTest.QTest.mouseClick(button, Qt.MouseButton.LeftButton)


def ask(it: Any, text: str) -> Any:
    """Ask, and wait for the whole answer; its reply."""
    replies: list[Any] = []
    it.engine.answered.connect(replies.append)
    say(it, text)
    until(lambda: replies and it.state == "idle", "answered")
    it.engine.answered.disconnect(replies.append)
    return replies[0]


def fragments(it: Any) -> list[tuple[str, Any]]:
    """The text on the screen with its format, newlines included."""
    found, block = [], it.transcript.document().begin()
    while block.isValid():
        found += [(item.fragment().text(), item.fragment().charFormat()) for item in block]
        block = block.next()
        if block.isValid():
            found.append(("\n", None))
    return found


def text_of(it: Any, *, rejected: bool) -> str:
    return "".join(text for text, look in fragments(it) if rejected or look is None or not look.fontStrikeOut())


def test_an_answer_streams_in_the_inks_of_its_origins(chat: Any, window: Any, tiny: TinyFiles) -> None:
    it = window(tiny.quick.target, ["ngram", str(tiny.quick.draft)])
    assert it.windowTitle().startswith("quick-target")
    it.draft_length.setFocus()
    QtTest.QTest.keyClicks(it.draft_length, "4")
    batches: list[Any] = []
    it.engine.rounds.connect(batches.append)
    reply = ask(it, "a")
    rounds = [round_ for batch in batches for round_ in batch]
    assert {len(round_.draft) for round_ in rounds} == {4} | {len(rounds[-1].draft)}
    # What is on the screen is what the rounds say, character by character.
    pieces = [piece for round_ in rounds for piece in chat.pieces(round_)]
    assert {style for text, style in pieces if text} >= {"model", "rejected", "recovered", "bonus"}
    texts = [(text.replace("\n", "↵") if style == "rejected" else text, style) for text, style in pieces]
    expected = [(char, style) for text, style in texts for char in text]
    shown = [(char, look) for text, look in fragments(it) for char in text]
    assert text_of(it, rejected=False).startswith(f"a\n{reply.text}")
    for (seen, look), (char, style) in zip(shown[2 : 2 + len(expected)], expected, strict=True):
        assert seen == char
        assert look is None or look.foreground() == it.transcript.formats[style].foreground(), (char, style)
        assert look is None or look.fontStrikeOut() == (style == "rejected")
    # Rejected guesses can be hidden, and are never copied.
    everything, said = text_of(it, rejected=True), text_of(it, rejected=False)
    it.transcript.selectAll()
    it.transcript.copy()
    assert QtGui.QGuiApplication.clipboard().text() == said
    for whole in (False, True):
        click(it.rejected)
        assert text_of(it, rejected=True) == (everything if whole else said)
    assert f"{reply.stats['num_accepted_tokens']} of {reply.stats['num_draft_tokens']} " in it.status.text()


def test_the_switch_decodes_plainly(window: Any, tiny: TinyFiles) -> None:
    it = window(tiny.quick.target, [str(tiny.quick.draft)])
    QtTest.QTest.mouseClick(it.speculate, Qt.MouseButton.LeftButton, pos=QtCore.QPoint(8, it.speculate.height() // 2))
    assert not it.draft_length.isEnabled()
    plain = ask(it, "hello")
    assert plain.stats["num_draft_tokens"] == 0
    click(it.new_chat)
    assert it.transcript.toPlainText() == ""
    QtTest.QTest.keyClick(it.speculate, Qt.Key.Key_Space)
    it.draft_length.setCurrentText("3")
    speculative = ask(it, "hello")
    assert speculative.stats["num_draft_tokens"] > 0
    assert speculative.token_ids == plain.token_ids  # the reference engine is exact


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless(tmp_path_factory.mktemp("endless") / "endless.gguf")


def test_stop_by_click_and_key_keeps_what_was_said(window: Any, endless: Path) -> None:
    it = window(endless, None)
    for stop in (lambda: click(it.stop), lambda: QtTest.QTest.keyClick(it, Qt.Key.Key_Escape)):
        before = len(it.transcript.toPlainText())
        say(it, "go on")
        until(lambda before=before: len(it.transcript.toPlainText()) > before + 40, "text")
        assert (it.state, it.send.isEnabled()) == ("answering", False)
        # While the engine decodes, what is typed and clicked arrives, and is kept for the next question.
        QtTest.QTest.keyClicks(it.question, "meanwhile")
        QtTest.QTest.keyClick(it.question, Qt.Key.Key_Return)
        assert it.question.toPlainText() == "meanwhile"
        it.question.clear()
        stop()
        until(lambda: it.state == "idle", "stopped")
        shown, last = it.transcript.toPlainText(), it.messages[-1]
        assert (shown.endswith(" [stopped]"), last["role"], last["content"] in shown) == (True, "assistant", True)


def test_questions_that_do_not_fit_and_models_that_are_not_there(window: Any, tiny: TinyFiles, tmp_path: Path) -> None:
    it = window(tiny.quick.target, n_ctx=64)
    say(it, "word " * 100)
    until(lambda: it.error.isVisible(), "an error")
    assert (it.state, it.messages, it.question.toPlainText()) == ("idle", [], ("word " * 100).strip())
    it.question.clear()
    say(it, "")  # nothing was typed: nothing is asked
    assert it.state == "idle"
    QtTest.QTest.keyClicks(it.question, "one")
    QtTest.QTest.keyClick(it.question, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    ask(it, "two")
    assert it.messages[0]["content"] == "one\ntwo"
    assert not it.error.isVisible()
    before = len(text_of(it, rejected=True))
    it.on_rounds([make_round(0, [("<i>guess</i>", "model", False)], "<img src=x><b>bold</b>\x00&lt;\u202e</p>")])
    shown = text_of(it, rejected=True)[before:]
    assert shown.startswith("<i>guess</i><img src=x><b>bold</b>")  # markup in an answer is text
    assert shown.endswith("&lt;\u202e</p>")
    missing = window(tmp_path / "<b>no</b> such.gguf")
    assert (missing.state, missing.error.isVisible(), missing.send.isEnabled()) == ("broken", True, False)
    assert ("<b>no</b> such.gguf" in missing.error.text(), "\n" in missing.error.text()) == (True, False)
    assert missing.error.textFormat() == Qt.TextFormat.PlainText


def test_loading_shows_progress_and_can_be_left(chat: Any, window: Any, endless: Path, monkeypatch: Any) -> None:

    def slow(model: str, draft: Any, *, progress: Any, cancel: threading.Event, **options: Any) -> LLM:
        progress("half of it", 0.5)
        assert cancel.wait(PATIENCE), "nobody told it to stop"
        return LLM(model, draft, progress=progress, cancel=cancel, **options)

    monkeypatch.setattr(chat, "LLM", slow)
    it = window(endless, wait=False)
    until(lambda: it.progress.value() == 50, "progress")
    assert (it.progress.isVisible(), it.status.text(), it.send.isEnabled()) == (True, "half of it", False)
    it.close()  # waits for the thread, which gives up
    assert (it.engine.llm, it.isVisible()) == (None, False)


def test_inks_can_be_read_in_both_schemes(chat: Any) -> None:
    from desktop_transcript import STYLES

    for name, style in STYLES.items():
        for colours, paper in ((style.light, "#ffffff"), (style.dark, "#2d2d2d")):
            if colours:
                assert contrast(colours[0], colours[1] or paper) >= 4.5, (name, colours)


OFF_SCREEN = "This plugin does not support propagateSizeHints()\n"
"""Qt's off-screen platform says so of every window."""

INTERRUPTED = """
import os, signal, sys
import desktop_chat

class Window(desktop_chat.ChatWindow):
    def on_ready(self):
        super().on_ready()
        os.kill(os.getpid(), signal.SIGINT)

desktop_chat.ChatWindow = Window
sys.exit(desktop_chat.main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent otherwise there")
def test_the_program_ends_with_ctrl_c(app: Any, tiny: TinyFiles) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tiny.quick.target), "--draft", "none", "--backend", "reference"]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr.replace(OFF_SCREEN, "")) == (0, "", "")
