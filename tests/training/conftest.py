"""What the runs of a training have in common."""

from __future__ import annotations

import pytest

from localspec.heads.training import head_maker as head_maker_module


@pytest.fixture
def four_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many texts are written side by side is measured, and what is begun depends on it: here it is always four."""
    monkeypatch.setattr(head_maker_module, "WIDTHS", (4,))
