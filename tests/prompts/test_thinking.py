"""How a model marks what it thinks: found in its file, asked for in its template's words, seen at a prompt's end."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.backends.reference import load
from localspec.errors import UsageError
from localspec.prompts.prompts import PromptEncoder
from localspec.prompts.templates import ChatTemplate
from tests.conftest import TinyFiles
from tests.support.thinkers import FAMILIES, write_thinker

ASKED = [{"role": "user", "content": "in the and"}]


def encoder_of(path: Path) -> PromptEncoder:
    model = load(path)
    return PromptEncoder(model, ChatTemplate.for_vocab(model.chat_template, model.vocab))


def prompt(encoder: PromptEncoder, think: str = "auto", **message: str) -> str:
    messages = [*ASKED, {"role": "assistant", "content": "said"} | message, *ASKED] if message else ASKED
    return "".join(map(encoder.vocab.display, encoder.encode(messages, think=think)))


def test_other_models_are_not_taken_for_thinkers(tiny: TinyFiles) -> None:
    for path in (tiny.bpe, tiny.spm):
        encoder = encoder_of(path)
        assert encoder.thinking is None
        assert encoder.encode(ASKED, think="off") == encoder.encode(ASKED)
        with pytest.raises(UsageError, match="not known to think"):
            encoder.encode(ASKED, think="on")


@pytest.mark.parametrize(
    ("family", "auto", "off"),
    [
        ("qwen", "before", "over"),
        ("deepseek", "inside", "over"),
        ("deepseek-text", "inside", "over"),
        ("granite", "before", "before"),
        ("gpt-oss", "before", "before"),
        ("gemma", "over", "over"),
    ],
)
def test_where_a_prompt_leaves_a_model_of_a_known_family(tmp_path: Path, family: str, auto: str, off: str) -> None:
    encoder = encoder_of(write_thinker(tmp_path, family))
    assert bool(encoder.thinking.names) == (family in ("deepseek", "gpt-oss", "gemma"))  # it has tokens for its marks
    assert encoder.thinking_state(encoder.encode(ASKED)) == auto
    assert encoder.thinking_state(encoder.encode(ASKED, think="off")) == off


def test_the_switches_are_the_templates_own(tmp_path: Path) -> None:
    assert "<|think|>" in prompt(encoder_of(write_thinker(tmp_path, "gemma")), "on")
    granite = encoder_of(write_thinker(tmp_path, "granite"))
    assert "Thoughts" in prompt(granite, "on")
    assert "Thoughts" not in prompt(granite, "off")
    oss = encoder_of(write_thinker(tmp_path, "gpt-oss"))
    said = {think: prompt(oss, think).partition("<|end|>")[0].rpartition(" ")[2] for think in ("on", "off", "high")}
    assert said == {"on": "medium", "off": "low", "high": "high"}
    with pytest.raises(UsageError, match="must be one of auto, on, off"):
        oss.encode(ASKED, think="maybe")


@pytest.mark.parametrize("family", FAMILIES)
def test_thinking_goes_back_only_where_the_template_says_so(tmp_path: Path, family: str) -> None:
    encoder = encoder_of(write_thinker(tmp_path, family))
    assert "musing" not in prompt(encoder, reasoning_content="musing")
    last = [*ASKED, {"role": "assistant", "content": "said", "reasoning_content": "musing"}]
    text = "".join(map(encoder.vocab.display, encoder.encode(last, add_generation_prompt=False)))
    assert ("musing" in text) == (family == "qwen")


def test_a_message_may_carry_its_thinking_under_another_name(tmp_path: Path) -> None:
    encoder = encoder_of(write_thinker(tmp_path, "gpt-oss"))
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    called = [*ASKED, {"role": "assistant", "content": "", "reasoning_content": "musing", "tool_calls": [call]}]
    assert "musing" in encoder.template.render(called)
