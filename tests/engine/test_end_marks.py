"""Where a template's marks are no tokens of the model, as in a base model asked in ChatML, their text ends a turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec import LLM, SamplingParams
from localspec.commands.options import base_model_notes
from localspec.model_files.catalog import Catalog
from localspec.prompts.templates import ChatTemplate
from tests.conftest import TinyFiles
from tests.support import ggufs

pytestmark = pytest.mark.usefixtures("measured_home")

pytest.importorskip("llguidance")

TEMPLATE = (
    "{% for m in messages %}{{ '<|my_start|>' + m.role + '\n' + m.content + '<|my_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|my_start|>assistant\n' }}{% endif %}"
)
QUESTION = [{"role": "user", "content": "x"}]


def saying(text: str) -> SamplingParams:
    """What makes a model say that."""
    return SamplingParams(grammar=f'root ::= "{text}"', max_tokens=60)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    extra = {"tokenizer.chat_template": TEMPLATE}
    path = ggufs.write_llama(tmp_path / "base.gguf", vocab=ggufs.bpe_vocab(), extra=extra)
    return LLM(path, "ngram", backend="reference", n_ctx=256, idle=False)


@pytest.mark.parametrize("mark", ["<|my_end|>", "<|my_start|>"])
def test_text_that_spells_a_mark_ends_an_answer(llm: LLM, mark: str) -> None:
    with llm:
        reply = llm.chat(QUESTION, saying(f"Hello{mark} and so on"))
        assert (reply.text, reply.finish_reason) == ("Hello", "stop")
        assert "".join(llm.stream(QUESTION, saying(f"Hello{mark} and so on"))) == "Hello"
        assert llm.session().chat("x", saying(f"Hello{mark} and so on")).text == "Hello"
        reply = llm.chat(QUESTION, saying("Hello<|my_other|>."))
        assert reply.text == "Hello<|my_other|>."
        said = f"Hello{mark} more"  # a text that is continued has no turns
        assert llm.generate("x", saying(said)).text == said


def test_where_marks_are_tokens_their_names_are_text(tiny: TinyFiles) -> None:
    with LLM(tiny.bpe, None, backend="reference", n_ctx=256, idle=False) as llm:
        assert llm.chat(QUESTION, saying("<|im_END|> <|im")).text == "<|im_END|> <|im"
        assert llm.inspect().encoder.end_marks == []


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        (None, ["<|im_end|>", "<|im_start|>"]),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", []),
        ("{{ raise_exception('no system role, no turns') }}", []),
        ("{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}",
         ["<end_of_turn>", "<start_of_turn>"]),
        ("{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}", []),
    ],
)  # fmt: skip
def test_the_marks_of_a_template(source: str | None, marks: list[str]) -> None:
    assert ChatTemplate(source).turn_marks() == marks


def test_a_base_model_says_so(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny.bpe, None, backend="reference", n_ctx=64, idle=False) as llm:
        assert base_model_notes(llm) == []
        monkeypatch.setattr(Catalog, "of_path", lambda self, path: self["gemma3-270m"])
        assert base_model_notes(llm) == [
            "gemma3-270m is a base model: it continues text and was not trained to chat; "
            "localspec generate --raw continues text"
        ]
