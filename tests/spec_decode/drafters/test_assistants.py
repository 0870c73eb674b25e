"""Gemma 4's assistants: refused with the reason, and in nobody's way beside their model."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec import LLM, LocalspecError, SamplingParams
from tests.conftest import open_backend
from tests.support.gemma4_ggufs import write_assistant, write_gemma4


@pytest.mark.parametrize("shares", [False, True])
def test_an_assistant_is_refused_and_auto_goes_on_without_it(tmp_path: Path, shares: bool) -> None:
    open_backend("llama-cpp")
    pattern = (True, False) * (3 if shares else 2)
    target = write_gemma4(tmp_path / "t.gguf", pattern=pattern, n_shared=2 * shares, n_each=32 * shares)
    assistant = write_assistant(tmp_path / "assistant.gguf")
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    said = []
    for draft in (None, "auto"):
        with LLM(target, draft, backend="llama-cpp", n_ctx=128, idle=False, remember=False) as llm:
            said.append(llm.generate("one two one two", sampling).text)
    assert said[0]
    assert said[0] == said[1]
    with pytest.raises(LocalspecError, match="read the keys and values of their target; this is not supported"):
        LLM(target, assistant, backend="llama-cpp", n_ctx=128, idle=False, remember=False).close()
