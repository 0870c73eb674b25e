"""What is said while loading."""

from __future__ import annotations

import io

import pytest

from localspec.system.terminal import Progress


def test_where_nobody_watches_each_remark_is_one_line() -> None:
    file = io.StringIO()
    with Progress(file) as progress:
        for fraction in (0.0, 0.5, 1.0):
            progress.report("loading x", fraction)
        progress.report("measuring what a pass of x costs here (once)", None)
        for _ in range(3):
            progress.report("measuring", None)
        progress.report("checking x\x1b[31m", None)
    assert file.getvalue() == "measuring what a pass of x costs here (once)\nchecking x␛[31m\n"


def test_on_a_terminal_it_is_one_line_that_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    file = io.StringIO()
    file.isatty = lambda: True  # type: ignore[method-assign]
    with Progress(file) as progress:
        progress.report("loading " + "x" * 50, 0.25)
        progress.report("loading " + "x" * 50, 1.0)
    first, second, last = (part.removeprefix("\x1b[K") for part in file.getvalue().split("\r")[1:])
    assert (len(first), len(second), last) == (19, 19, "")
    assert first.endswith("… 25%")
    assert second.endswith("… 100%")
    assert "\n" not in file.getvalue()
