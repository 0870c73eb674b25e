"""Whether drafts branch on llama.cpp's engines: where rows are cheap, and the engine was checked; else it is said."""

from __future__ import annotations

import pytest

from localspec import LLM, SamplingParams
from localspec.backends import trust as trust_module
from localspec.engine import fit as fit_module
from tests.conftest import TinyFiles, open_backend

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(params=["llama-cpp", "ik-llama"])
def engine(request: pytest.FixtureRequest) -> str:
    return open_backend(request.param).name


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further rows cost nothing."""
    monkeypatch.setattr(fit_module, "row_ms", lambda times: 0.0)


def test_where_rows_are_cheap_drafts_branch(engine: str, tiny: TinyFiles, flat: None) -> None:
    """``test_any_drafter`` compares answers with branches with plain ones."""
    with LLM(tiny.quick.target, draft=None, backend=engine, n_ctx=128, n_threads=1) as llm:
        assert llm.run(lambda pair: pair.why_chains) is None
        assert llm.run(lambda pair: pair.context.can_branch)


def test_where_rows_are_dear_drafts_are_chains(engine: str, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is checked either, and contexts are as they ever were."""
    monkeypatch.setattr(trust_module, "check_branches", None)
    monkeypatch.setattr(fit_module, "row_ms", lambda times: times(1))
    with LLM(tiny.quick.target, draft=None, backend=engine, n_ctx=128, n_threads=1) as llm:
        assert "a further row of a pass costs 1.00 of a token" in str(llm.run(lambda pair: pair.why_chains))
        assert not llm.run(lambda pair: pair.context.can_branch)


def test_an_engine_that_is_wrong_drafts_chains_and_says_so(
    engine: str, tiny: TinyFiles, flat: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust_module, "check_branches", lambda model: trust_module.Agreement(0.5, 0.0))
    with LLM(tiny.quick.target, draft=["ngram"], backend=engine, n_ctx=128, n_threads=1) as llm:
        assert "gives wrong results for branching drafts" in str(llm.run(lambda pair: pair.why_chains))
        assert not llm.run(lambda pair: pair.context.can_branch)
        assert llm.generate("one two", PARAMS).token_ids
