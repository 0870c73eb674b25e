"""``localspec chat`` in a real terminal, on tiny models or over a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyFiles
from tests.support.program import PROGRAM
from tests.support.saved_chats import saved_turns
from tests.support.tmux import Tmux


class ChatTerminal(Tmux):
    def ready(self) -> str:
        return self.wait("· /help")

    def answered(self, line: str, n: int) -> str:
        """Type a question; the screen once so many answers were cut at the token budget, as the short ones here are."""
        return self.type(line, lambda screen: screen.count("[cut short: max_tokens is ") == n)

    def at_empty_prompt(self) -> str:
        """The screen, once the chat waits for a line and none of it was typed yet."""
        return self.wait(is_at_empty_prompt)

    def leave(self) -> str:
        """Press Ctrl-D at a prompt; between two of them it would be lost."""
        self.at_empty_prompt()
        self.keys("C-d")
        return self.wait("EXIT 0")

    def saved(self) -> list[dict[str, Any]]:
        """What ``/save`` writes now."""
        path = self.folder / "a.chat"
        path.unlink(missing_ok=True)
        before = self.screen().count("saved to")
        self.type(f"/save {path}", lambda screen: screen.count("saved to") > before)
        return saved_turns(path)


def is_at_empty_prompt(screen: str) -> bool:
    return screen.rstrip().splitlines()[-2] == ">"


Open = Callable[..., ChatTerminal]


@pytest.fixture
def open_chat(tmp_path: Path, tiny: TinyFiles) -> Iterator[Open]:
    """Opens ``localspec chat`` in a terminal: short greedy answers, three guesses a round, reference engine.

    ``scripted`` opens it over prepared answers instead, at that pace in seconds a round: every other round has a guess
    ``WRONG`` that is rejected. With a ``gate`` the answer stops behind the first of these until that file is there.
    """
    terminals: list[ChatTerminal] = []

    def start(
        *options: str, model: Path | None = None, draft: Path | None = None, env: dict[str, str] | None = None,
        columns: int = 80, lines: int = 40, command: list[str] | None = None, scripted: float | None = None,
        gate: Path | None = None,
    ) -> ChatTerminal:  # fmt: skip
        arguments = [
            "chat", str(model or tiny.pair.target), "--draft", str(draft or tiny.pair.draft), "--draft-only",
            "--draft-length", "3", "--backend", "reference", "--temperature", "0", "--max-tokens", "30", *options,
        ]  # fmt: skip
        if scripted is not None:
            pace = [str(scripted), *([str(gate)] if gate else [])]
            command = [sys.executable, "-m", "tests.support.scripted_llm", *pace]
        environment = {"PYTHONPATH": str(Path(__file__).parents[3]), **(env or {})}
        terminals.append(ChatTerminal(command or [*PROGRAM, *arguments], tmp_path, environment, columns, lines))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()
