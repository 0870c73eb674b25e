"""Tiny files of models that think before they answer: vocabularies and templates in the shapes of the families.

The templates are this project's own; what they have in common with the families' is where marks stand, what they call a
message's thinking, and which switches they know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.gguf_vocabs import TinyVocab, bpe_vocab, spm_vocab, with_tokens
from tests.support.ggufs import QUICK, Pair, correlated_pair, write_llama

_TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
_LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_BEGIN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"

QWEN = (
    _LAST_QUESTION
    + _TURNS
    + "{% if m.reasoning_content and loop.index0 > ns.last %}"
    + "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    + "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    + _BEGIN
    + "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
DEEPSEEK = (
    _TURNS
    + "{{ m.content.split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    + _BEGIN
    + "{{ '<think>\n' }}{% endif %}"
)
GRANITE = (
    "{% if thinking %}{{ 'Thoughts go between <think></think>, the answer between <response></response>.\n' }}"
    "{% endif %}" + _TURNS + "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + _BEGIN + "{% endif %}"
)
GRANITE_PROSE = (
    "{% if thinking %}{{ \"Begin with 'Here is my thought process:' and go on with 'Here is my response:'.\n\" }}"
    "{% endif %}" + _TURNS + "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + _BEGIN + "{% endif %}"
)
GPT_OSS = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{% for m in messages %}{{ '<|start|>' + m.role }}"
    "{% if m.thinking and m.tool_calls %}{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}{{ '<|message|>' + m.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
GEMMA = (
    "{% if enable_thinking %}{{ '<|turn>system\n<|think|>\n<turn|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|turn>' + m.role + '\n' + m.content + '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}"
    "{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """One family."""

    vocab: TinyVocab  # of its tiny files
    opening: str  # opening, closing: what stands around thinking in an answer
    closing: str
    spelled: bool = False  # whether the marks are text, rather than tokens


_THINK_TOKENS = ("<think>", "</think>")
_OSS_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
_GEMMA_TOKENS = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>")

FAMILIES = {
    "qwen": Family(with_tokens(bpe_vocab(300), QWEN, user_defined=_THINK_TOKENS), "<think>\n", "\n</think>\n\n"),
    "deepseek": Family(with_tokens(bpe_vocab(300), DEEPSEEK, control=_THINK_TOKENS), "<think>\n", "\n</think>\n\n"),
    "deepseek-text": Family(with_tokens(bpe_vocab(300), DEEPSEEK), "<think>\n", "\n</think>\n\n", spelled=True),
    "granite": Family(with_tokens(spm_vocab(), GRANITE), "<think>", "</think>\n<response>", spelled=True),
    "granite-prose": Family(
        with_tokens(bpe_vocab(300), GRANITE_PROSE), "Here is my thought process:\n", "\n\nHere is my response:\n", True
    ),
    "gpt-oss": Family(
        with_tokens(bpe_vocab(300), GPT_OSS, control=_OSS_TOKENS),
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "gemma": Family(with_tokens(bpe_vocab(300), GEMMA, control=_GEMMA_TOKENS), "<|channel>thought\n", "<channel|>"),
}


def write_thinker(folder: Path, family: str, template: str | None = None) -> Path:
    """A model of a family, for the reference engine; perhaps with a template of its own."""
    vocab = FAMILIES[family].vocab
    if template is not None:
        vocab = replace(vocab, chat_template=template)
    return write_llama(folder / f"{family}.gguf", QUICK, vocab)


def thinking_pair(folder: Path, family: str) -> Pair:
    """A model of a family, and a draft that is often right."""
    return correlated_pair(folder, FAMILIES[family].vocab, shape=QUICK, name=family)
