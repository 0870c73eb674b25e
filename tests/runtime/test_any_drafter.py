"""With every kind of drafter, alone and several at a time, on every engine, an answer is what the target alone says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ENGINES, open_backend
from tests.fuzz.answers import DRAFTS, WAYS, World, case_of

SOURCES = {"ngram", "model", "recycled", "corpus", "early-exit", "head", "grammar"}
N_ASKS = 6


@pytest.fixture(scope="module", params=ENGINES)
def world(
    request: pytest.FixtureRequest, module_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    open_backend(request.param)
    world = World(request.param, tmp_path_factory.mktemp("answers"))
    yield world
    world.close()


@pytest.mark.parametrize("drafts", DRAFTS, ids="+".join)
def test_answers_are_what_the_target_alone_says(world: World, drafts: tuple[str, ...]) -> None:
    rng = random.Random(f"{world.engine} {drafts}")
    before = world.n_answers
    for way in WAYS:
        world.check(case_of(rng, drafts, 1, way, N_ASKS // 2))
    for parallel in (2, 3):
        world.check(case_of(rng, drafts, parallel, n_asks=N_ASKS))
    assert world.n_answers - before == len(WAYS) * (N_ASKS // 2) + 2 * N_ASKS


def test_drafts_of_every_kind_were_accepted(world: World) -> None:
    """Asked last: else the comparison would say little."""
    if world.n_answers > 200:
        assert world.accepted >= SOURCES
