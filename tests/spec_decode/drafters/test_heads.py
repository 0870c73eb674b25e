"""Heads and early exits: what is said does not depend on them, and they read just what they should.

All on the reference engine, to the bit, with random heads that are right often enough. That every engine computes the
same rows is at the end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.backends.heads import Head, load_head, target_facts
from localspec.model_files.exit_head import exit_head
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.drafters.parallel import HEAD_DRAFTERS
from localspec.spec_decode.rounds import Round
from tests.conftest import TinyFiles
from tests.spec_decode.test_exactness import SAMPLING
from tests.spec_decode.test_lossless import N_CTX, World
from tests.support.heads import write_random_head

STEPS = 4
KINDS = ("chained", "parallel", "medusa", "exit")


def open_head(target: Path, folder: Path, kind: str, backend: str = "reference", **options: Any) -> Head:
    """A random head, or an exit after the first layer."""
    if kind == "exit":
        path = exit_head(target, target_facts(target), 1)
    else:
        path = folder / f"{kind}-{len(list(folder.iterdir()))}.gguf"
        write_random_head(target, path, kind, steps=STEPS, **options)  # type: ignore[arg-type]
    return load_head(path, target, backend)


def drafter_of(head: Head, n_ctx: int = N_CTX) -> Any:
    return HEAD_DRAFTERS[head.kind](head, head.new_context(n_ctx))


# -- what is said ------------------------------------------------------------------------------------------------------


class HeadWorld(World):
    """Answers with heads of all kinds, alone and among other drafters."""

    def __init__(self, pair_files: Any, rng: random.Random, folder: Path) -> None:
        self.folder = folder

        def head(kind: str, **options: Any) -> Drafter:
            return drafter_of(open_head(pair_files.target, folder, kind, **options))  # type: ignore[no-any-return]

        self.head = head
        super().__init__(pair_files, rng)

    def groups(self) -> list[list[Drafter]]:
        head, model = self.head, DraftModelDrafter(self.small.new_context(N_CTX))
        return [
            [head("chained", taps=("layer:0", "norm"), n_out=200)],
            [NgramDrafter(), head("chained", taps=("layer:0",))],
            [head("parallel", taps=("layer:0",), n_out=200)],
            [NgramDrafter(), head("medusa")],
            [head("exit")],
            [self.random, head("chained", taps=("layer:1", "layer:0")), head("exit")],
            [NgramDrafter(min_match=2), model, head("parallel", taps=("norm",))],
        ]


@pytest.fixture
def world(tiny: TinyFiles, tmp_path: Path, request: pytest.FixtureRequest) -> HeadWorld:
    return HeadWorld(tiny.quick, random.Random(request.node.name), tmp_path)


def accepted(rounds: Sequence[Round]) -> dict[str, float]:
    """By source, the share of the draft tokens judged that were accepted."""
    fates: dict[str, list[bool]] = {}
    for round_ in rounds:
        for token, fate in list(zip(round_.draft, round_.accepted, strict=True))[: round_.verdict.n_accepted + 1]:
            fates.setdefault(token.source, []).append(fate)
    return {source: sum(each) / len(each) for source, each in fates.items() if len(each) > 100}


def test_greedy_answers_equal_plain_ones(world: HeadWorld) -> None:
    """500 answers."""
    rounds = [round_ for _ in range(500) for round_ in world.compare(SamplingParams())]
    shares = accepted(rounds)
    assert shares["head"] > 0.1
    assert shares["early-exit"] > 0.3


def test_seeded_answers_equal_plain_ones(world: HeadWorld) -> None:
    """300 answers."""
    rounds: list[Round] = []
    for seed in range(300):
        chain = world.rng.choice([SAMPLING, replace(SAMPLING, temperature=0.6, top_k=20), replace(SAMPLING, top_p=0.8)])
        rounds += world.compare(replace(chain, seed=seed))
    shares = accepted(rounds)
    assert shares["head"] > 0.1
    assert shares["early-exit"] > 0.3
