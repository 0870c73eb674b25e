from __future__ import annotations

from collections.abc import Iterator

import pytest

from localspec.backends import reference
from tests.conftest import TinyFiles
from tests.spec_decode.test_exactness import Predictions


@pytest.fixture(scope="module")
def target(tiny: TinyFiles) -> Iterator[Predictions]:
    with reference.load(tiny.micro) as model:
        yield Predictions(model)


@pytest.fixture(scope="module")
def small(tiny: TinyFiles) -> Iterator[Predictions]:
    with reference.load(tiny.micro_draft) as model:
        yield Predictions(model)
