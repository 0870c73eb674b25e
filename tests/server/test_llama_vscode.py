"""What llama.vscode sends, written down from its source (``src/llama-server.ts`` at 009e5b7), to a real server.

Its setting ``ai_model`` is empty here, as ``docs/editors.md`` says; else chats name that model. Its request for
embeddings is in ``apis/test_embeddings.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM
from tests.conftest import TinyFiles
from tests.support.serving import Server, serve

CHUNKS = [{"text": "def one():\n    return 1\n\n", "time": 1731000000000, "filename": "/projects/one.py"}]
LINES = [f"    total += {i * i}  # the area in an on\n" for i in range(60)]
SAMPLING: dict[str, Any] = {
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
}
BEHIND = "\n    return total\n"
EXPERT = {"role": "system", "content": "You are an expert coder."}


def completion(prefix: str, prompt: str, **changes: Any) -> dict[str, Any]:
    """After a key stroke. No slot is named, and no model."""
    body = {"input_prefix": prefix, "input_suffix": BEHIND, "input_extra": CHUNKS, "prompt": prompt, "n_predict": 16}
    return body | SAMPLING | {"n_indent": 4, "t_max_prompt_ms": 500, "t_max_predict_ms": 2500} | changes


READING = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": CHUNKS,
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
"""New chunks, to be read while nobody asks."""

EDITING = {
    "messages": [EXPERT, {"role": "user", "content": "Instructions: rename f.\nOriginal code:\ndef f(): pass\n"}],
    "stream": False,
    "cache_prompt": True,
    "samplers": "edkypmxt",
    "temperature": 0.8,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "repeat_last_n": 64,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "max_tokens": -1,
    "timings_per_token": False,
}

ASKING = {"messages": [EXPERT, {"role": "user", "content": "Why?"}], "stream": False, "temperature": 0.8}

AGENT = {
    "messages": [EXPERT, {"role": "user", "content": "What is in one.py?"}],
    "stream": False,
    "temperature": 0.8,
    "top_p": 0.95,
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "read_file",
                "description": "Read a file",
                "parameters": {
                    "type": "object",
                    "properties": {"file_path": {"type": "string"}},
                    "required": ["file_path"],
                },
                "strict": True,
            },
        }
    ],
    "tool_choice": "auto",
}


@pytest.fixture(scope="module")
def server(tiny: TinyFiles, module_home: Path) -> Iterator[Server]:
    llm = LLM(tiny.fim.target, draft=["ngram"], backend="reference", n_ctx=2048)
    with llm, serve(llm) as running:
        yield running


def ask(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, _, answer = server.ask("POST", path, body)
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer)
    return found


def test_a_suggestion_comes(server: Server) -> None:
    found = ask(server, "/infill", completion("".join(LINES[:20]), "    "))
    assert found["content"]
    assert found["timings"]["predicted_n"] > 0
    assert found["truncated"] is False


def test_new_chunks_are_read_ahead(server: Server) -> None:
    assert ask(server, "/infill", READING)["content"] == ""


def test_a_new_line_does_not_have_the_whole_window_read_anew(server: Server) -> None:
    def n_read(last: int) -> int:
        found = ask(server, "/infill", completion("".join(LINES[last - 30 : last]), "    "))
        return int(found["timings"]["prompt_n"])

    window = n_read(30)
    assert window > 200
    assert all(n_read(last) < window / 3 for last in range(31, 50))


@pytest.mark.parametrize("body", [EDITING, ASKING, AGENT])
def test_chats_are_answered(server: Server, body: dict[str, Any]) -> None:
    bounded = {"grammar": 'root ::= "the an in on"'}  # a tiny model would talk until its context is full
    found = ask(server, "/v1/chat/completions", body | bounded if "tools" not in body else body)
    assert found["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
    if "tools" not in body:
        assert found["choices"][0]["message"]["content"] == "the an in on"
