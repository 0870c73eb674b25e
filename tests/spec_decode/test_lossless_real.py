"""Losslessness of a real pair on real engines, where the width of a pass changes the arithmetic.

It is audited as ``localspec verify`` does: each token of greedy and sampled answers is looked up in rows of passes over
one token, within noise that is measured there; drafts of every width are rejected at every place; and verification
draws from the distributions of the target. That a wrong law is found, and on a real model too a wrong rollback:
``tests/commands/verify/test_audit.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localspec import LLM
from tests.commands.verify.test_audit import SMALL, audit, found
from tests.conftest import open_backend


@pytest.mark.real
@pytest.mark.parametrize("engine", ["ik-llama", "llama-cpp"])
def test_a_target_and_its_draft_model_are_lossless(
    engine: str, real_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.sampling.sampling.secrets.randbits", random.Random(5).getrandbits)
    open_backend(engine)
    target, draft = real_model("qwen2.5-coder-1.5b"), real_model("qwen2.5-coder-0.5b")
    with LLM(target, draft=["ngram", draft], backend=engine, n_ctx=1024, idle=False) as llm:
        report = audit(llm, replace(SMALL, n_prompts=2, n_tokens=32, n_draws=1000))
    assert found(report) == set(), report.verdict
    assert report.largest_deviation > 0
