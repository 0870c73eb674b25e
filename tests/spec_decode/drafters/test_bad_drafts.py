"""Draft models that are not what they should be: wider than the target, or broken. The answer must not notice."""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, EngineError, SamplingParams, UsageError
from localspec.backends import reference
from localspec.backends.trust import CHECK_TEXT
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.fixed import FixedController
from localspec.engine.loading import DraftCopy, measuring, reading
from localspec.spec_decode.drafters.base import Plan
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.system.steps import exhaust
from tests.conftest import open_backend
from tests.support import ggufs
from tests.support.gguf_vocabs import UNUSED, bpe_vocab

N_VOCAB, N_PADDING = 384, 64
PROMPT = [5, 6, 7, 80, 81, 5, 6, 7]
SHAPE = ggufs.Shape(n_layer=2, n_embd=64, n_head=2, n_head_kv=1, n_ff=64, residual=0.2)

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=1.0),
    "seeded": replace(GREEDY, temperature=1.0, seed=3),
    "biased to padding": replace(GREEDY, logit_bias={N_VOCAB + 16: 80.0}),
    "sampled, biased to padding": replace(GREEDY, temperature=1.0, logit_bias={N_VOCAB + 16: 80.0}),
    "penalties": replace(GREEDY, temperature=0.7, repeat_penalty=1.3, frequency_penalty=0.2),
}


@pytest.fixture(params=["reference", "ik-llama", "llama-cpp"])
def engine(request: pytest.FixtureRequest) -> str:
    open_backend(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad-drafts")


@pytest.fixture(scope="module")
def wide(folder: Path) -> ggufs.Pair:
    """A draft with rows for tokens that the target has none for, and rather fond of them."""
    vocab = bpe_vocab(N_VOCAB)
    tokens = [*vocab.tokens, *(f"<pad{N_VOCAB + i}>" for i in range(N_PADDING))]
    padded = replace(vocab, tokens=tokens, types=[*vocab.types, *[UNUSED] * N_PADDING])
    weights = ggufs.llama_weights(SHAPE, N_VOCAB)
    small, rng = ggufs.perturbed(weights, 1, 0.02), np.random.default_rng(3)
    for name in ("token_embd.weight", "output.weight"):
        more = rng.standard_normal((N_PADDING, SHAPE.n_embd)) * small[name].std()
        small[name] = np.concatenate([small[name], more.astype(np.float32)])
    target = ggufs.write_llama(folder / "target.gguf", SHAPE, vocab, weights=weights)
    return ggufs.Pair(target, ggufs.write_llama(folder / "wide.gguf", SHAPE, padded, weights=small))


def write_draft(path: Path, **rows: tuple[int, float]) -> Path:
    """A good draft for the target, but for some rows of its tensors."""
    weights = ggufs.perturbed(ggufs.llama_weights(SHAPE, N_VOCAB), 1, 0.02)
    for name, (row, value) in rows.items():
        weights[f"{name}.weight"][row] = value
    return ggufs.write_llama(path, SHAPE, bpe_vocab(N_VOCAB), weights=weights)


@pytest.mark.parametrize("length", [4, "auto"])
def test_a_wider_draft_guesses_only_what_the_target_has(engine: str, wide: ggufs.Pair, length: int | str) -> None:
    with LLM(wide.target, draft=wide.draft, backend=engine, n_ctx=128, draft_length=length) as llm:
        assert llm.inspect().target.n_vocab == N_VOCAB
        for params in KINDS.values():
            with llm.rounds(PROMPT, params) as rounds:
                seen = list(rounds)
            assert sum(len(round_.emitted) for round_ in seen) == 40
            guesses = [guess for round_ in seen for guess in round_.draft]
            assert all(guess.id < N_VOCAB for guess in guesses)
            assert all(guess.dist is None or guess.dist.ids[-1] < N_VOCAB for guess in guesses)
            assert length == "auto" or len(guesses) >= 32  # eight rounds of four, where all are accepted
            if engine == "reference" and (params.greedy or params.seed is not None):
                assert rounds.reply.token_ids == llm.generate(PROMPT, params, speculate=False).token_ids
        assert not llm.warnings


def test_padding_does_not_count_against_a_copy(wide: ggufs.Pair) -> None:
    """Which of two copies of a draft is the faster is judged by what would be drafted."""
    times = PassTimes({1: 1.0, 8: 2.0})
    with reference.load(wide.target) as target, reference.load(wide.draft) as draft:
        tokens = target.tokenize(CHECK_TEXT)[:64]
        tops = exhaust(reading(target, tokens))

        def over(n_vocab: int) -> DraftCopy:
            return exhaust(measuring([draft], tokens, tops, times, n_vocab))[0]

        assert over(target.n_vocab).agreement > over(draft.n_vocab).agreement + 0.02


def test_a_prediction_is_made_of_the_targets_tokens(wide: ggufs.Pair) -> None:
    with LLM(wide.target, draft="ngram", backend="reference", n_ctx=128, draft_length=4) as llm:
        for wrong in ([N_VOCAB], [-1], [5, 10**30], [1.5], b"abc", 5):
            with pytest.raises(UsageError, match="prediction must be token ids"):
                llm.generate(PROMPT, GREEDY, prediction=wrong)
        plain = llm.generate(PROMPT, GREEDY, speculate=False).token_ids
        assert llm.generate(PROMPT, GREEDY, prediction=np.array(plain)).token_ids == plain


@pytest.mark.parametrize("kind", ["greedy", "sampled", "seeded"])
def test_a_draft_that_turns_bad_is_dropped_with_one_warning(
    engine: str, wide: ggufs.Pair, folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its logits are no numbers once it has read a token that no check of an engine reads."""
    with reference.load(wide.target) as model:
        seen = {*model.tokenize(CHECK_TEXT, add_special=True), *PROMPT}
    bad = next(token for token in range(100, N_VOCAB) if token not in seen)
    turns_bad = write_draft(folder / "turns-bad.gguf", token_embd=(bad, np.nan))
    prompt = [*PROMPT, bad, *PROMPT]
    params = replace(KINDS[kind], logit_bias={bad: -np.inf})  # only the prompt says it
    with LLM(wide.target, draft=turns_bad, backend=engine, n_ctx=256, draft_length=3) as llm:
        assert llm.generate(PROMPT, params).stats["num_draft_tokens"] > 20
        assert llm.draft_names == ["turns-bad"]
        assert not llm.warnings
        with caplog.at_level(logging.WARNING, "localspec"):
            replies = [llm.generate(prompt, params), llm.generate(prompt, params, draft_length="auto")]
            replies.append(llm.generate(prompt, params, drafters=["turns-bad"]))
        (warning,) = llm.warnings
        assert "turns-bad.gguf is not used any more" in warning
        assert "not numbers" in warning
        assert [record.getMessage() for record in caplog.records if record.name == "localspec"] == [warning]
        assert [len(reply.token_ids) for reply in replies] == [40] * 3
        assert [reply.stats["num_draft_tokens"] for reply in replies] == [0] * 3
        assert llm.draft_names == [] == replies[0].draft
        if engine == "reference" and kind != "sampled":
            plain = llm.generate(prompt, params, speculate=False)
            assert all(reply.token_ids == plain.token_ids for reply in replies)
        llm.set_draft(["ngram", wide.draft])  # another one is not held to be broken
        assert llm.generate(PROMPT, params).stats["by_source"]["model"]["num_draft_tokens"] > 0


def test_the_other_drafters_go_on(wide: ggufs.Pair, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_sound = write_draft(folder / "never-sound.gguf", output=(17, np.nan))  # one of its logits is never a number
    asked, told = list[str](), list[set[str]]()
    draft, plan = DraftModelDrafter.draft, FixedController.plan

    def noted(self: DraftModelDrafter, *args: Any) -> Any:
        asked.append(self.info.source)
        return draft(self, *args)

    def planned(self: FixedController, *args: Any, lost: Set[str], **options: Any) -> Plan:
        told.append(set(lost))
        return plan(self, *args, lost=lost, **options)

    monkeypatch.setattr(DraftModelDrafter, "draft", noted)
    monkeypatch.setattr(FixedController, "plan", planned)
    with LLM(wide.target, draft=["ngram", never_sound, wide.draft], backend="reference", n_ctx=256) as llm:
        reply = llm.generate(PROMPT, GREEDY, draft_length=4)
        assert llm.draft_names == ["ngram", "wide"]
        assert (told[0], told[-1]) == (set(), {"model"})  # then more copies are taken
        sources = reply.stats["by_source"]
        assert sources["model2"]["num_draft_tokens"] > 0
        assert "model" not in sources
        assert asked.count("model") == 1
        assert reply.token_ids == llm.generate(PROMPT, GREEDY, speculate=False).token_ids
        assert len(llm.warnings) == 1
        longer = replace(GREEDY, max_tokens=100)
        adaptive = llm.generate(PROMPT, longer, draft_length="auto")
        assert adaptive.token_ids == llm.generate(PROMPT, longer, speculate=False).token_ids


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "seeded"])
def test_a_target_that_is_broken_is_an_error_that_names_its_engine_and_file(
    folder: Path, wide: ggufs.Pair, kind: str, value: float
) -> None:
    weights = ggufs.llama_weights(SHAPE, N_VOCAB)
    weights["output.weight"][17] = value
    target = ggufs.write_llama(folder / "broken-target.gguf", SHAPE, bpe_vocab(N_VOCAB), weights=weights)
    with LLM(target, draft=["ngram", wide.draft], backend="reference", n_ctx=128, draft_length=3) as llm:
        with pytest.raises(EngineError, match=r"^reference.* logits of broken-target\.gguf that are not numbers"):
            llm.generate(PROMPT, KINDS[kind])
        assert (llm.draft_names, llm.warnings) == (["ngram", "wide"], [])


def test_banning_every_token_is_the_requests_mistake(wide: ggufs.Pair) -> None:
    with LLM(wide.target, draft=wide.draft, backend="reference", n_ctx=128, draft_length=3) as llm:
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, logit_bias={i: -np.inf for i in range(N_VOCAB)})
            with pytest.raises(UsageError, match="logit_bias bans every token"):
                llm.generate(PROMPT, params)
        assert (llm.draft_names, llm.warnings) == (["wide"], [])
