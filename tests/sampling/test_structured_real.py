"""Structured output on real models and engines: always valid, drafted as plain, and what it costs.

Greedy answers of a fast engine are compared as everywhere: every token that came out is fed again, one a pass, and must
lie within the measured noise of the best token that the grammar allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from localspec import LLM, Reply, SamplingParams
from localspec.backends.base import FloatArray
from localspec.sampling.constraint import constraint_for
from tests.conftest import open_backend
from tests.support.grammars import thing
from tests.support.replaying import margins, rows_at_width, width_noise

pytestmark = pytest.mark.real

ARTICLE = (
    "Maria Keller, 41, who runs the bakery Goldähre in Bern with three employees, said on 12 May 2024 that the price "
    'of flour had risen by 18.5 percent. "We are not giving up," she said. Her shop opens at 06:30.'
)


TEXT = {"type": "string", "maxLength": 80}
AGE = {"type": "integer", "minimum": 0, "maximum": 150}
SHARE = {"type": "number", "minimum": 0, "maximum": 100, "multipleOf": 0.5}
NODE = thing(
    {"label": {"type": "string", "maxLength": 20}, "child": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}
)
SCHEMAS: dict[str, Any] = {
    "list": {"type": "array", "items": thing({"fact": TEXT, "sure": {"type": "boolean"}}), "maxItems": 3},
    "numbers": thing({"percent": SHARE, "staff": {"type": "integer", "multipleOf": 3, "maximum": 99, "minimum": -9}}),
    "formats": thing({"day": {"type": "string", "format": "date"}, "opens": {"pattern": "^[0-2][0-9]:[0-5][0-9]$"}}),
    "recursive": {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
    "letters of the world": thing({"größe": TEXT, "名前": TEXT, "emoji 😀": {"enum": ["😀", "👍🏽"]}}),
    "spread": thing({"name": TEXT, "age": AGE}) | {"x-guidance": {"whitespace_pattern": "[ \\n]{1,4}"}},
}
SCHEMAS["formats"]["properties"]["opens"]["type"] = "string"


QUESTION = [{"role": "user", "content": f"{ARTICLE}\n\nExtract what fits from this text, as JSON."}]


def params(name: str, **more: Any) -> SamplingParams:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[name]}}
    return SamplingParams(response_format=form, **({"max_tokens": budget(name)} | more))


def budget(name: str) -> int:
    """Tokens for an answer: nodes within nodes often have no end, which a few of them show."""
    return 64 if name == "recursive" else 200


def is_whole(name: str, reply: Reply) -> bool:
    """Checks an answer, and says whether it came to its end; only nodes within nodes may go on beyond the budget."""
    if reply.finish_reason == "length" and name == "recursive":
        assert len(reply.token_ids) == budget(name)
        return False
    assert reply.finish_reason == "stop", reply.text
    jsonschema.validate(json.loads(reply.text), SCHEMAS[name])
    return True


@pytest.fixture(scope="module", params=["smollm2-135m", "qwen2.5-coder-0.5b"])
def llm(request: pytest.FixtureRequest, real_model: Callable[[str], Path]) -> Iterator[LLM]:
    """Two vocabularies. Qwen also drafts for itself: what a grammar forbids is masked in both models' rows."""
    path, draft = real_model(request.param), ["ngram"]
    if request.param.startswith("qwen"):
        draft.append(str(path))
    open_backend("ik-llama")
    with LLM(path, draft=draft, n_ctx=1024, idle=False, light_draft=False) as loaded:
        yield loaded


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_valid_and_drafted_ones_hold_when_replayed(llm: LLM, name: str) -> None:
    replies = [llm.chat(QUESTION, params(name), draft_length=length) for length in (6, "auto")]
    sampled = [
        params(name, temperature=temperature, seed=seed, top_p=0.95) for temperature, seed in ((1, 7), (1.5, None))
    ]
    for reply in [*replies, *(llm.chat(QUESTION, each) for each in sampled)]:
        is_whole(name, reply)
    prompt = llm.encode(QUESTION)
    for answer in map(list, {tuple(reply.token_ids) for reply in replies}):
        single = rows_at_width(1, llm, prompt, answer)
        off = margins(allowed(llm, params(name), single, answer), answer)
        assert off.max() <= 2 * width_noise(llm, prompt, answer, single), (
            f"token {off.argmax()} is {off.max():.2f} from the best allowed"
        )


def allowed(llm: LLM, params: SamplingParams, rows: FloatArray, answer: list[int]) -> FloatArray:
    """The rows of an answer with all that its grammar forbids masked."""
    constraint = constraint_for(params, llm.inspect().target.vocab)
    assert constraint is not None
    masked = []
    for row, token in zip(rows, answer, strict=True):
        masked.append(constraint.masked(row))
        constraint.settle(token)
    return np.stack(masked)
