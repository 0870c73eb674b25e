"""A home that the tests of one module share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def warm_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is measured and checked once per file and engine is kept between the tests of a module."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def in_warm_home(warm_home: Path, isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the place of the test's own home."""
    monkeypatch.setenv("LOCALSPEC_HOME", str(warm_home))
