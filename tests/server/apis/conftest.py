"""A real server on loopback with a tiny pair, which the clients of all APIs talk to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from localspec import LLM
from tests.support.serving import Server, serve

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def says(text: str) -> dict[str, str]:
    """A grammar that lets a model say nothing but this."""
    return {"grammar": f"root ::= {json.dumps(text)}"}


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    with serve(llm, aliases=["claude-local"]) as running:
        yield running


@pytest.fixture(autouse=True)
def _everything_ends(server: Server) -> Iterator[None]:
    yield
    server.wait_idle()
