"""Whether drafts branch on llama.cpp's engines: where rows are cheap, and the engine was checked; else it is said."""

from __future__ import annotations

from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.backends import trust as trust_module
from localspec.engine import fit as fit_module
from tests.conftest import TinyFiles, open_backend

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(params=["llama-cpp", "ik-llama"])
def engine(request: pytest.FixtureRequest) -> str:
    return open_backend(request.param).name


@pytest.mark.parametrize(
    ("row", "check", "why"),
    [
        (0.0, trust_module.check_branches, None),
        (1.0, None, "a further row of a pass costs 1.00 of a token"),  # then nothing is checked either
        (0.0, lambda model: trust_module.Agreement(0.5, 0.0), "gives wrong results for branching drafts"),
    ],
)
def test_drafts_branch_where_rows_are_cheap_and_the_engine_is_right(
    engine: str, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, row: float, check: Any, why: str | None
) -> None:
    """``test_any_drafter`` compares answers with branches with plain ones."""
    monkeypatch.setattr(trust_module, "check_branches", check)
    monkeypatch.setattr(fit_module, "row_ms", lambda times: row * times(1))
    with LLM(tiny.quick.target, draft=["ngram"], backend=engine, n_ctx=128, n_threads=1) as llm:
        found = llm.run(lambda pair: pair.why_chains)
        assert found is None if why is None else why in found
        assert llm.run(lambda pair: pair.context.can_branch) == (why is None)
        assert llm.generate("one two", PARAMS).token_ids
