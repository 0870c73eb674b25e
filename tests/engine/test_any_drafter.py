"""With every kind of drafter, alone and several at a time, on every engine, an answer is what the target alone says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ENGINES, open_backend
from tests.fuzz.answers import DRAFTS, PUBLISHED, WAYS, World, case_of

SOURCES = {"ngram", "model", "corpus", "early-exit", "head", "grammar"}
KINDS = (*DRAFTS, *PUBLISHED)
N_ALONE, N_TOGETHER = 3, 6
"""Questions to each, one and several at a time; ``make fuzz`` asks many more."""


@pytest.fixture(scope="module", params=ENGINES)
def world(
    request: pytest.FixtureRequest, module_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    open_backend(request.param)
    world = World(request.param, tmp_path_factory.mktemp("answers"))
    yield world
    world.close()


@pytest.mark.parametrize("number", range(len(KINDS)), ids=["+".join(drafts) for drafts in KINDS])
def test_answers_are_what_the_target_alone_says(world: World, number: int) -> None:
    if world.engine != "reference" and len(KINDS[number]) > 1:
        pytest.skip("what drafters do together has nothing to do with the engine")
    if KINDS[number] in PUBLISHED:
        open_backend("llama-cpp")
    rng, before = random.Random(f"{world.engine} {number}"), world.n_answers
    n_together = N_TOGETHER
    if world.engine == "mlx":  # which is slow on a CPU
        n_together -= 2
    else:
        world.check(case_of(rng, KINDS[number], 1, WAYS[number % len(WAYS)], N_ALONE))
    world.check(case_of(rng, KINDS[number], 2 + number % 2, "chain", n_together))
    assert world.n_answers - before >= n_together


def test_drafts_of_nearly_every_kind_were_accepted(world: World) -> None:
    """By the tests before: else they would say little."""
    if world.n_answers >= len(KINDS) * N_TOGETHER:
        assert len(world.accepted & SOURCES) >= len(SOURCES) - 2
