"""Thinking and answer are told apart however the text is cut, and a spent budget closes a block without a trace in how
the rest is decoded."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from localspec import LLM, SamplingParams
from localspec.backends.base import Model
from localspec.backends.reference import load
from localspec.controllers.fixed import FixedController
from localspec.prompts.prompts import PromptEncoder
from localspec.prompts.templates import ChatTemplate
from localspec.spec_decode.detokenizer import TextAssembler, ThinkingReader
from localspec.spec_decode.rounds import Round, Span
from tests.support.thinkers import FAMILIES, thinking_pair, write_thinker

ASKED = [{"role": "user", "content": "in the and"}]
THOUGHT, ANSWER = "the man <thin and\n\nthe <|end hat </thin", "an <answer> the\n\nend < of it"


def assembler(model: Model, *, inside: bool = False, stop: tuple[str, ...] = ()) -> TextAssembler:
    thinking = PromptEncoder(model, ChatTemplate.for_vocab(model.chat_template, model.vocab)).thinking
    assert thinking is not None
    return TextAssembler(model.vocab, stop, ThinkingReader(thinking, inside=inside))


def parts(text: TextAssembler, tokens: list[int]) -> dict[str, str]:
    spans: list[Span] = []
    for token in tokens:
        spans += text.push(token, "plain", "target")
    spans += text.finish()
    return {part: "".join(span.text for span in spans if span.part == part) for part in ("thinking", "answer", "mark")}


def cut(model: Model, text: str, seed: int) -> list[int]:
    """Tokens of a text; its ordinary stretches in pieces of random lengths, as a model may write them."""
    if seed == 0 or model.vocab.kind == "llama":  # SentencePiece puts a blank before every piece of text
        return model.tokenize(text, parse_special=True)
    rng, tokens = random.Random(seed), list[int]()
    for token in model.tokenize(text, parse_special=True):
        raw = model.vocab.token_bytes(token).decode("utf-8", "replace")
        if model.vocab.types[token] != 1 or rng.random() < 0.5:
            tokens.append(token)
        else:
            tokens += [piece for character in raw for piece in model.tokenize(character)]
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_thinking_and_answer_are_told_apart_however_they_are_cut(tmp_path: Path, family: str) -> None:
    """Nothing is shown that becomes a mark, and nothing is lost."""
    model, form = load(write_thinker(tmp_path, family)), FAMILIES[family]
    for seed in range(6):
        tokens = cut(model, f"{form.opening}{THOUGHT}{form.closing}{ANSWER}", seed)
        found = parts(assembler(model), tokens)
        assert (found["thinking"], found["answer"]) == (THOUGHT, ANSWER)
        inside = parts(assembler(model, inside=True), cut(model, f"{THOUGHT}{form.closing}", seed))
        assert (inside["thinking"].strip(), inside["answer"].strip()) == (THOUGHT, "")
    for n in range(len(tokens) + 1):
        text, shown = assembler(model), ""
        for token in tokens[:n]:
            for span in text.push(token, "plain", "target"):
                shown += span.text
                assert span.part == "mark" or form.opening.strip() not in span.text
        assert "".join(map(model.vocab.display, tokens)).startswith(shown)
        assert "".join(map(model.vocab.display, tokens[:n])) == shown + "".join(s.text for s in text.finish())


SPELLED = "<|channel|>analysis<|message|>the"


@pytest.mark.parametrize(
    ("family", "text", "stop", "thinking", "answer"),
    [
        ("qwen", "the <think> in </think> an", (), "", "the <think> in </think> an"),  # only where an answer begins
        ("qwen", "<think>\nin the </thi", (), "in the </thi", ""),  # cut short
        ("qwen", "<think>in the man</think>an the end", ("the",), "in the man", "an "),  # these are of the answer
        ("gpt-oss", SPELLED, (), "", SPELLED),  # a text that spells a control token is no mark
    ],
)
def test_where_a_block_is(
    tmp_path: Path, family: str, text: str, stop: tuple[str, ...], thinking: str, answer: str
) -> None:
    model = load(write_thinker(tmp_path, family))
    said, spelled = assembler(model, stop=stop), [piece for each in text for piece in model.tokenize(each)]
    found = parts(said, spelled if family == "gpt-oss" else model.tokenize(text))
    assert (found["thinking"], found["answer"], said.stopped) == (thinking, answer, bool(stop))


SETTINGS = (SamplingParams(max_tokens=40), SamplingParams(temperature=1.0, seed=3, max_tokens=40))


def open_llm(folder: Path, family: str) -> LLM:
    pair = thinking_pair(folder, family)
    return LLM(pair.target, draft=[pair.draft, "ngram"], backend="reference", n_ctx=512, idle=False)


@pytest.mark.parametrize("family", ["deepseek", "deepseek-text", "qwen"])
def test_the_text_does_not_depend_on_drafts_and_the_budget_is_exact(tmp_path: Path, family: str) -> None:
    """Of the last family the model opens the block itself."""
    with open_llm(tmp_path, family) as llm:
        assert llm.thinking is not None
        forced, n_opening = list(llm.thinking.forced), int(family == "qwen")
        prompt, bias = llm.encode(ASKED), {FAMILIES["qwen"].vocab.id("<think>"): 14.0} if n_opening else {}
        for params in (replace(each, logit_bias=bias) for each in SETTINGS):
            for budget in (0, 1, 7, 20, None):
                plain = llm.chat(ASKED, params, speculate=False, thinking_budget=budget)
                drafted = [llm.chat(ASKED, params, draft_length=n, thinking_budget=budget) for n in (1, 4, 8, "auto")]
                assert {tuple(reply.token_ids) for reply in drafted} == {tuple(plain.token_ids)}
                assert {(reply.thinking, reply.text) for reply in drafted} == {(plain.thinking, plain.text)}
                if budget is None:
                    assert plain.text == ""
                    assert plain.thinking
                    assert drafted[1].stats["num_accepted_tokens"] > 0
                    continue
                start = n_opening + budget
                n = start + len(forced)
                assert plain.token_ids[start:n] == forced
                kinds = [token.kind == "forced" for token in drafted[2].tokens]
                assert [i for i, is_forced in enumerate(kinds) if is_forced] == [*range(start, n)]
                assert sum(token.thinking for token in plain.tokens[n_opening:start]) == budget
                assert plain.stats["num_forced_tokens"] == len(forced)
                # What comes behind the block is what comes behind it when it is read as a prompt.
                if params.greedy:
                    rest = llm.generate([*prompt, *plain.token_ids[:n]], replace(params, max_tokens=40 - n))
                    assert rest.token_ids == plain.token_ids[n:]


def test_answer_and_thinking_are_apart_in_all_that_is_given_back(tmp_path: Path) -> None:
    path = write_thinker(tmp_path, "deepseek")
    with LLM(path, draft="ngram", backend="reference", n_ctx=512, idle=False) as llm:
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=40)
        with llm.rounds(ASKED, params, thinking_budget=10) as stream:
            rounds = list(stream)
        reply = stream.reply
        said, as_json = (reply.thinking, reply.text), reply.as_dict()
        assert all(said)
        assert (as_json["thinking"], as_json["text"]) == said
        assert "".join(each.as_event().get("thinking", "") for each in rounds) == reply.thinking
        assert "".join(llm.stream(ASKED, params, thinking_budget=10)) == reply.text
        whole = llm.generate(llm.encode(ASKED), params)
        assert "thinking" not in whole.as_dict()  # token ids are a text like any other
        session = llm.session(params=params)
        session.chat("in the and", thinking_budget=10)
        kept = {"role": "assistant", "content": reply.text, "reasoning_content": reply.thinking}
        assert session.messages[-1] == kept


def test_without_thinking_an_answer_begins_at_once(tmp_path: Path) -> None:
    with LLM(write_thinker(tmp_path, "deepseek"), draft=None, backend="reference", n_ctx=512, idle=False) as llm:
        reply = llm.chat(ASKED, SamplingParams(max_tokens=10), think="off")
        assert (reply.thinking, reply.stats["thinking_tokens"]) == ("", 0)
        form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["in", "an"]}}}
        held = llm.chat(ASKED, SamplingParams(response_format=form))
        assert held.text in ('"in"', '"an"')
        assert held.thinking == ""


def test_the_controller_learns_from_what_the_model_said_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not from what it was made to say."""
    learned: list[Round] = []
    monkeypatch.setattr(FixedController, "learn", lambda self, round_: learned.append(round_))
    with open_llm(tmp_path, "deepseek") as llm:  # the prompt opens a block
        rounds = [*llm.rounds(ASKED, SETTINGS[0], draft_length=4, thinking_budget=13)]
    decided = [round_ for round_ in rounds if round_.emitted and round_.verdict.kind != "forced"]
    assert learned == decided != rounds
