"""A fixed number of fuzzed cases of every surface, the same on every machine; ``make fuzz`` tries many more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.target import Check
from tests.fuzz.targets import TARGETS


@pytest.fixture
def check(name: str, tmp_path: Path) -> Iterator[Check]:
    target = TARGETS[name]
    if (reason := target.missing()) is not None:
        pytest.skip(reason)
    with target.opened(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.in_suite])
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_cases_hold(name: str, check: Check) -> None:
    @settings(
        max_examples=TARGETS[name].in_suite,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(TARGETS[name].cases)
    def run(case: Any) -> None:
        check(case)

    run()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gguf headers", [("number", "llama.nextn_predict_layers", 1)]),  # no layer is left of the one there is
        ("gguf headers", [("set", "tokenizer.ggml.bos_token_id", (7, b"\x00"))]),  # a truth value
        ("gguf headers", [("set", "tokenizer.ggml.add_bos_token", (9, b"\x04" + b"\x00" * 11))]),  # an empty list
        ("gguf in mlx", [("patch", 0.8125, b"\x00")]),  # a merge of what is no token
        ("gguf in llama-cpp", [("type", 0.5, 26)]),  # a norm of integers
        ("gguf in ik-llama", [("type", 0.5, 26)]),
        ("gguf in llama-cpp", [("set", "llama.rope.scaling.type", (8, b"\x00" * 8))]),  # no name of any
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_fuzzing_found_holds(name: str, changes: list[Any], check: Check) -> None:
    check(("bpe", changes))
