"""A fixed number of fuzzed cases of every surface, the same on every machine; ``make fuzz`` tries many more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.in_suite])
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_cases_hold(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    reason = target.missing()
    if reason is not None:
        pytest.skip(reason)
    with target.opened(tmp_path) as check:

        @settings(
            derandomize=True,
            max_examples=target.in_suite,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        @given(target.cases)
        def run(case: Any) -> None:
            check(case)

        run()
