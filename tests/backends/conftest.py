"""Fixtures of the tests of engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localspec.backends.base import Model
from tests.conftest import Backend, TinyFiles
from tests.support.contexts import three_layers


@pytest.fixture(scope="module")
def model(backend: Backend, tiny: TinyFiles) -> Iterator[Model]:
    """Every engine in turn, with a file of three layers."""
    with backend.load(three_layers(tiny.folder), n_threads=1) as model:
        yield model
