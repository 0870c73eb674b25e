"""A draft model with another vocabulary: the answer is the target's, and what it says is accepted.

Drafts are carried over as text, or where only special tokens differ, by number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from localspec import LLM, SamplingParams
from localspec.controllers.acceptance import MOST_PROBABLE
from localspec.controllers.auto import AutoController
from localspec.engine.request import Reply
from localspec.sampling.sampling import Noise
from localspec.spec_decode.drafters.base import Plan, Proposer
from tests.support.gguf_vocabs import TinyVocab, bpe_vocab, spm_vocab
from tests.support.ggufs import Pair, Shape, llama_weights, perturbed, write_llama

SHAPE = Shape(n_layer=2, residual=0.1)
PROMPTS = ["the cat is in the hat and", "she was here", "é and ü: 日本 for", "<|im_start|>"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
WAYS = [
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=7),
    replace(GREEDY, temperature=1.2, seed=8, top_k=20, min_p=0.02),
]


def spoken(vocab: TinyVocab) -> npt.NDArray[np.bool_]:
    """Of which tokens a model says something that is text by itself [n_vocab]."""
    texts = zip(vocab.tokens, vocab.types, strict=True)
    return np.array([(kind == 1 and text.isascii()) or text[:1] == "Ġ" for text, kind in texts])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A draft of the target's weights, nearly, whose vocabulary has the same tokens in another order."""
    folder, vocab = tmp_path_factory.mktemp("vocabularies"), bpe_vocab()
    weights = llama_weights(SHAPE, len(vocab))
    weights["output.weight"][~spoken(vocab)] = 0.0
    target = write_llama(folder / "target.gguf", SHAPE, vocab, weights=weights)
    order = np.random.default_rng(1).permutation(len(vocab))
    place = {int(old): new for new, old in enumerate(order)}
    other = replace(
        vocab,
        tokens=[vocab.tokens[i] for i in order],
        types=[vocab.types[i] for i in order],
        **{name: place[getattr(vocab, name)] for name in ("bos", "eos", "eot")},
    )
    near = perturbed(weights, 2, 0.01)
    for name in ("token_embd.weight", "output.weight"):
        near[name] = near[name][order]
    return Pair(target, write_llama(folder / "draft.gguf", SHAPE, other, weights=near))


@pytest.fixture(scope="module", params=["renamed", "exchanged", "fewer"])
def near_pair(pair: Pair, request: pytest.FixtureRequest) -> Pair:
    """A draft of the target's weights whose special tokens have other names or numbers, or are missing."""
    vocab = bpe_vocab()
    weights = llama_weights(SHAPE, len(vocab))
    weights["output.weight"][~spoken(vocab)] = 0.0
    target = write_llama(pair.target.parent / "special.gguf", SHAPE, vocab, weights=weights)
    near = perturbed(weights, 2, 0.01)
    end, start, text = (vocab.id(name) for name in ("<|im_end|>", "<|im_start|>", "<|endoftext|>"))
    if request.param == "renamed":
        names = {start: "<|User|>", end: "<|end_of_sentence|>", text: "<|begin|>"}
        other = replace(vocab, tokens=[names.get(i, name) for i, name in enumerate(vocab.tokens)])
    elif request.param == "exchanged":
        order = list(range(len(vocab)))
        order[end], order[start], order[text] = start, text, end
        other = replace(vocab, tokens=[vocab.tokens[i] for i in order], bos=end, eos=start, eot=start)
        for name in ("token_embd.weight", "output.weight"):
            near[name] = near[name][order]
    else:
        n = min(text, start, end)
        near |= {name: near[name][:n] for name in ("token_embd.weight", "output.weight")}
        other = replace(vocab, tokens=vocab.tokens[:n], types=vocab.types[:n], bos=None, eos=None, eot=None)
    return Pair(target, write_llama(pair.target.parent / f"{request.param}.gguf", SHAPE, other, weights=near))


def answers(target: Path, draft: Path | None, params: SamplingParams, **options: object) -> list[Reply]:
    drafts = None if draft is None else [str(draft)]
    with LLM(target, draft=drafts, backend="reference", n_ctx=256, idle=False, **options) as llm:
        return [llm.generate(prompt, params, draft_length=4 if draft else 0) for prompt in PROMPTS]


@pytest.mark.parametrize("params", WAYS, ids=["greedy", "seeded", "filtered"])
def test_the_answer_is_the_target_s_and_drafts_are_accepted(pair: Pair, params: SamplingParams) -> None:
    plain, drafted = answers(pair.target, None, params), answers(pair.target, pair.draft, params)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    if params is GREEDY:
        sent, right = (sum(each.stats[f"num_{what}_tokens"] for each in drafted) for what in ("draft", "accepted"))
        assert right > 0.7 * sent > 30


@pytest.mark.parametrize("params", [replace(each, ignore_eos=False) for each in WAYS], ids=["greedy", "seed", "filter"])
def test_special_tokens_that_differ_are_mapped(near_pair: Pair, params: SamplingParams) -> None:
    plain = answers(near_pair.target, None, params)
    with LLM(near_pair.target, draft=[str(near_pair.draft)], backend="reference", n_ctx=256, idle=False) as llm:
        assert any("other special tokens: they are mapped" in line for line in llm.warnings)
        drafted = [llm.generate(prompt, params, draft_length=4) for prompt in PROMPTS]
        again = [llm.generate(prompt, params).token_ids for prompt in PROMPTS]
        end = llm.vocab.eos
        assert end is not None
        ending = llm.rounds(PROMPTS[0], replace(GREEDY, ignore_eos=False, logit_bias={end: 50.0}), draft_length=2)
        assert any(end in round_.draft.ids for round_ in ending) == ("fewer" not in near_pair.draft.name)
        rounds = [round_ for prompt in PROMPTS for round_ in llm.rounds(prompt, params, draft_length=4)]
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain] == again
    sent = [token.id for round_ in rounds for token in round_.draft]
    accepted = sum(round_.verdict.n_accepted for round_ in rounds)
    assert accepted > (0.7 if params.greedy else 0.2) * len(sent) > 5


def test_of_another_kind_of_tokenizer(pair: Pair, tmp_path: Path) -> None:
    """Where hardly anything agrees the answer is still the target's."""
    draft = write_llama(tmp_path / "spm.gguf", SHAPE, spm_vocab())
    for params in WAYS:
        plain, drafted = answers(pair.target, None, params), answers(pair.target, draft, params)
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


def test_several_answers_at_a_time_and_a_conversation(pair: Pair) -> None:
    with (
        LLM(pair.target, draft=None, backend="reference", n_ctx=512) as plain,
        LLM(pair.target, draft=[str(pair.draft)], backend="reference", n_ctx=512, parallel=3, idle=False) as llm,
    ):
        streams = [llm.stream(prompt, GREEDY, draft_length=3) for prompt in PROMPTS]
        texts = ["".join(stream) for stream in streams]
        assert texts == [plain.generate(prompt, GREEDY).text for prompt in PROMPTS]
        one, other = llm.session(), plain.session()
        for question in PROMPTS:
            assert one.chat(question, GREEDY).text == other.chat(question, GREEDY).text
        assert sum(llm.generate(prompt, GREEDY, draft_length=3).stats["num_accepted_tokens"] for prompt in PROMPTS) > 20


def test_the_start_says_so_and_auto_stays_exact(pair: Pair) -> None:
    with LLM(pair.target, draft=[str(pair.draft)], backend="reference", n_ctx=256, idle=False) as llm:
        assert llm.draft_names == ["draft"]
        assert any("another vocabulary" in line for line in llm.warnings)
        drafted = [llm.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    assert drafted == [each.token_ids for each in answers(pair.target, None, GREEDY)]


class Stingy(Plan):
    """A plan that lets a drafter look for one token only, and writes down what is asked."""

    def __init__(self) -> None:
        super().__init__(room=8)
        self.held: list[float | None] = []

    def more(self, source: str, pending: int = 0, held: float | None = None) -> int:
        self.held.append(held)
        return pending if held is None else 0


def test_a_token_that_another_step_may_change_is_weighed_before_that_step(pair: Pair) -> None:
    with LLM(pair.target, draft=[str(pair.draft)], backend="reference", n_ctx=256, idle=False) as llm:
        (drafter,) = llm.inspect().state.drafters
        for prompt in PROMPTS[:2]:
            plan = Stingy()
            (token,) = drafter.draft(llm.encode(prompt), plan, Proposer(GREEDY, Noise(0)))
            assert plan.held == [None, token.prob]


def test_what_is_expected_of_it_is_measured_apart_and_it_never_samples(pair: Pair, near_pair: Pair) -> None:
    free = SamplingParams(temperature=0.8)
    for files, as_text in ((pair, True), (near_pair, False)):
        with LLM(files.target, draft=[str(files.draft)], backend="reference", n_ctx=256, idle=False) as llm:
            (info,) = (drafter.info for drafter in llm.inspect().state.drafters)
            controller = llm.inspect().state.controller("auto", free)
        assert isinstance(controller, AutoController)
        assert info.as_text == as_text
        assert (controller.acceptance["model"].prior == MOST_PROBABLE) == (not as_text)
        assert bool(controller.acceptance.sampled) == (not as_text)


@pytest.mark.real
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("qwen2.5-coder-0.5b", "smollm2-135m"),
        ("qwen2.5-coder-0.5b", "gemma3-270m"),
        ("gemma3-270m", "smollm2-135m"),
        ("smollm2-135m", "gemma3-270m"),
    ],
)
def test_real_models(real_model: Callable[[str], Path], target: str, draft: str) -> None:
    question = "Write a Python function that adds two numbers."
    with LLM(real_model(target), draft=[str(real_model(draft))], backend="llama-cpp", n_ctx=512, idle=False) as llm:
        stats = llm.chat([{"role": "user", "content": question}], replace(GREEDY, max_tokens=48), draft_length=3).stats
    assert stats["num_accepted_tokens"] >= 8


@pytest.mark.real
def test_a_real_file_with_other_special_tokens(real_model: Callable[[str], Path], tmp_path: Path) -> None:
    """As of a fine-tuned model whose turns are marked with other names: it drafts as if it were its target."""
    target, draft = real_model("smollm2-135m"), tmp_path / "renamed.gguf"
    data = target.read_bytes()
    for name, other in ((b"<|im_start|>", b"<|the_user|>"), (b"<|im_end|>", b"<|a_turn|>")):
        at = data.index(len(name).to_bytes(8, "little") + name) + 8
        data = data[:at] + other + data[at + len(name) :]
    draft.write_bytes(data)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(target, draft=[str(draft)], backend="llama-cpp", n_ctx=512, idle=False, light_draft=False) as llm:
        assert any("other special tokens" in line for line in llm.warnings)
        params = SamplingParams(temperature=0.0, max_tokens=48)
        drafted, plain = llm.chat(messages, params, draft_length=4), llm.chat(messages, params, speculate=False)
    assert drafted.text == plain.text
    assert drafted.stats["num_accepted_tokens"] > 0.8 * drafted.stats["num_draft_tokens"] > 3
