"""A draft model with another vocabulary: the answer is the target's, and what it says is accepted.

Drafts are carried over as text, or where only special tokens differ, by number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, permutations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec import LLM, SamplingParams
from localspec.backends.tokenizer import PythonByteLevel, Tokenizer
from localspec.controllers.acceptance import MOST_PROBABLE
from localspec.controllers.auto import AutoController
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab
from localspec.sampling.sampling import Noise
from localspec.spec_decode.drafters import other_vocabulary as module
from localspec.spec_decode.drafters.base import Plan, Proposer
from localspec.spec_decode.drafters.carried_text import CarriedText, Side
from tests.support.gguf_vocabs import TinyVocab, bpe_vocab, spm_vocab
from tests.support.ggufs import Pair, Shape, llama_weights, perturbed, write_llama, write_tokenizer_only

SHAPE = Shape(n_layer=2, residual=0.1)
PROMPTS = ["the cat is in the hat and", "she was here", "é and ü: 日本 for", "<|im_start|>"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
WAYS = [
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=7),
    replace(GREEDY, temperature=1.2, seed=8, top_k=20, min_p=0.02),
]
NUMBERS = ("draft", "accepted")


def weights_of(vocab: TinyVocab) -> dict[str, npt.NDArray[np.float32]]:
    """Of a model that says only what is text by itself."""
    weights = llama_weights(SHAPE, len(vocab))
    texts = zip(vocab.tokens, vocab.types, strict=True)
    spoken = np.array([(kind == 1 and text.isascii()) or text[:1] == "Ġ" for text, kind in texts])
    weights["output.weight"][~spoken] = 0.0
    return weights


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A draft of the target's weights, nearly, whose vocabulary has the same tokens in another order."""
    folder, vocab = tmp_path_factory.mktemp("vocabularies"), bpe_vocab()
    weights = weights_of(vocab)
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


@pytest.fixture(scope="module", params=["reordered", "renamed", "exchanged", "fewer"])
def any_pair(pair: Pair, request: pytest.FixtureRequest) -> Pair:
    """That, or a draft of the target's weights whose special tokens have other names or numbers, or are missing."""
    if request.param == "reordered":
        return pair
    vocab = bpe_vocab()
    near = perturbed(weights_of(vocab), 2, 0.01)
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
    return Pair(pair.target, write_llama(pair.target.parent / f"{request.param}.gguf", SHAPE, other, weights=near))


def open_llm(pair: Pair, **options: object) -> LLM:
    return LLM(pair.target, str(pair.draft), backend="reference", n_ctx=256, idle=False, remember=False, **options)


def test_the_answer_is_the_target_s_and_drafts_are_accepted(any_pair: Pair) -> None:
    """On every engine, several at a time, and of another kind of tokenizer: ``tests/engine/test_any_drafter.py``."""
    as_text = any_pair.draft.stem == "draft"
    with open_llm(any_pair) as llm:
        assert llm.draft_names == [any_pair.draft.stem]
        remark = "another vocabulary" if as_text else "other special tokens: they are mapped"
        assert any(remark in line for line in llm.warnings)
        for params in (replace(each, ignore_eos=as_text) for each in WAYS):
            drafted = [llm.generate(prompt, params, draft_length=4) for prompt in PROMPTS]
            expected = [llm.generate(prompt, params, speculate=False).token_ids for prompt in PROMPTS]
            assert [each.token_ids for each in drafted] == expected
            assert [llm.generate(prompt, params).token_ids for prompt in PROMPTS] == expected
            sent, right = (sum(each.stats[f"num_{what}_tokens"] for each in drafted) for what in NUMBERS)
            if params.greedy:
                assert right > 0.7 * sent > (30 if as_text else 5)
            else:
                assert as_text or right > 0.2 * sent > 5
        end = llm.vocab.eos
        assert end is not None
        ending = llm.rounds(PROMPTS[0], replace(GREEDY, ignore_eos=False, logit_bias={end: 50.0}), draft_length=2)
        sent_end = any(end in round_.draft.ids for round_ in ending)
        assert as_text or sent_end == (any_pair.draft.stem != "fewer")


class Stingy(Plan):
    """A plan that lets a drafter look for one token only, and writes down what is asked."""

    def __init__(self) -> None:
        super().__init__(room=8)
        self.held: list[float | None] = []

    def more(self, source: str, pending: int = 0, held: float | None = None) -> int:
        self.held.append(held)
        return pending if held is None else 0


def test_a_token_that_another_step_may_change_is_weighed_before_that_step(pair: Pair) -> None:
    with open_llm(pair) as llm:
        (drafter,) = llm.inspect().state.drafters
        for prompt in PROMPTS[:2]:
            plan = Stingy()
            (token,) = drafter.draft(llm.encode(prompt), plan, Proposer(GREEDY, Noise(0)))
            assert plan.held == [None, token.prob]


def test_what_cannot_be_carried_over_is_given_up_soon(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows half a character, and what is no text, though the plan allows steps without end."""
    with open_llm(pair) as llm:
        (drafter,), text = llm.inspect().state.drafters, llm.tokenize("the 🎉")
        context, proposer = drafter.context, Proposer(GREEDY, Noise(0))
        vocab = context.model.vocab
        no_text = next(i for i in range(vocab.n_tokens) if vocab.token_bytes(i) == b"\xff")
        mark = next(i for i in vocab.marks if i not in vocab.eog)
        for said, n, most, n_drafted in (
            (no_text, len(text) - 1, 0, 0),
            (no_text, len(text), len(text) + 4, 0),
            (mark, len(text), len(text) + 1, 1),  # what is said behind one is not known any more
        ):
            monkeypatch.setattr(module, "best_and_certainty", lambda row, said=said: (said, 1.0))
            assert len(drafter.draft(text[:n], Plan(8), proposer)) == n_drafted
            assert context.n_past <= most


def test_what_is_expected_of_it_is_measured_apart_and_it_never_samples(any_pair: Pair) -> None:
    with open_llm(any_pair) as llm:
        (info,) = (drafter.info for drafter in llm.inspect().state.drafters)
        controller = llm.inspect().state.controller("auto", SamplingParams(temperature=0.8))
    assert isinstance(controller, AutoController)
    assert info.as_text == (any_pair.draft.stem == "draft")
    assert (controller.acceptance["model"].prior == MOST_PROBABLE) == (not info.as_text)
    assert bool(controller.acceptance.sampled) == (not info.as_text)


@pytest.mark.real
@pytest.mark.parametrize(("target", "draft"), [("qwen2.5-coder-0.5b", "gemma3-270m"), ("gemma3-270m", "smollm2-135m")])
def test_real_models(real_model: Callable[[str], Path], target: str, draft: str) -> None:
    question = "Write a Python function that adds two numbers."
    with LLM(real_model(target), draft=[str(real_model(draft))], backend="llama-cpp", n_ctx=512, idle=False) as llm:
        stats = llm.chat([{"role": "user", "content": question}], replace(GREEDY, max_tokens=48), draft_length=3).stats
    assert stats["num_accepted_tokens"] >= 8


# A text carried from one vocabulary to the other and back: the same bytes, whatever it is and wherever it is cut.

VOCABS = {
    "bpe": bpe_vocab(300),
    "wide bpe": bpe_vocab(384, "llama-bpe"),
    "spm": spm_vocab(),
    "spm without prefix": replace(spm_vocab(320), add_space_prefix=False),
}
PAIRS = list(permutations(VOCABS, 2))
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=40),  # SentencePiece reads that as a space
    st.lists(st.sampled_from([" the", " and", "\n", "  ", "é", "ü", " an", "東", "🎉", "x1", ".", "\t"])).map("".join),
)


@cache
def side(name: str) -> Side:
    with TemporaryDirectory() as folder, GGUFFile(write_tokenizer_only(Path(folder) / "v.gguf", VOCABS[name])) as gguf:
        vocab = Vocab.from_gguf(gguf)
        return Side(vocab, Tokenizer(gguf, vocab, PythonByteLevel).encode)


def bytes_of(side: Side, tokens: Sequence[int]) -> bytes:
    return b"".join(map(side.vocab.token_bytes, tokens))


def without_bos(side: Side, ids: Sequence[int]) -> Sequence[int]:
    return ids[1:] if side.vocab.add_bos else ids


@pytest.mark.parametrize(("one", "other"), PAIRS)
@given(text=TEXTS, data=st.data())
def test_any_text_grown_and_cut_anywhere(one: str, other: str, text: str, data: st.DataObject) -> None:
    """After any changes what the draft model reads spells the text up to its last whole character."""
    target, draft = side(one), side(other)
    tokens = target.tokens_of(text.encode())
    if tokens is None:
        return
    carried = CarriedText(target, draft)
    for n in [*data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)), len(tokens)]:
        ids = carried.follow(tokens[:n])
        so_far = bytes_of(target, tokens[:n])
        assert bytes_of(draft, without_bos(draft, ids)) + carried.pending == so_far
        assert carried.pending == b"" or so_far.decode("utf-8", "ignore").encode() + carried.pending == so_far
    assert list(ids) == list(CarriedText(target, draft).follow(tokens))


@pytest.mark.parametrize(("one", "other"), PAIRS)
@given(text=TEXTS, more=TEXTS, cut=st.integers(0, 80))
def test_what_the_draft_says_comes_back_as_it_is(one: str, other: str, text: str, more: str, cut: int) -> None:
    """Byte for byte, but for half a character at its end, and each token says what it was made of."""
    target, draft = side(one), side(other)
    tokens, said = target.tokens_of(text.encode()), draft.tokens_of(more.encode())
    if tokens is None or said is None:
        return
    carried = CarriedText(target, draft)
    carried.follow(tokens)
    drafted = list(said[:cut])
    back = carried.continuation(drafted)
    spelled = bytes_of(draft, drafted)
    whole = spelled.decode("utf-8", "ignore").encode() if cut < len(said) else spelled
    assert bytes_of(target, [token for token, _ in back]) == whole
    ends = list(accumulate(len(draft.vocab.token_bytes(token)) for token in drafted))
    at = 0
    for token, n in back:
        at += len(target.vocab.token_bytes(token))
        assert ends[n - 1] >= at
        assert n == 1 or ends[n - 2] < at


def test_special_tokens_are_carried_over_by_name_and_meaning() -> None:
    target, draft = side("bpe"), side("spm")
    marks = ({each.vocab.token_text(i): i for i in each.vocab.marks} for each in (target, draft))
    start, end, its_start, its_end = (of[f"<|im_{name}|>"] for of in marks for name in ("start", "end"))
    text = target.tokens_of(b" the") or []
    carried = CarriedText(target, draft)
    ids = without_bos(draft, carried.follow([start, *text, end, *text]))
    assert ids[0] == its_start
    assert its_end in ids
    assert bytes_of(draft, ids) == b" the the"
    assert [token for token, _ in carried.continuation([*(draft.tokens_of(b" and") or []), its_end])][-1] == end
