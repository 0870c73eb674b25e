"""Block drafters (DFlash, DSpark) on llama.cpp: what is said does not depend on them, and their memory is exact."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, LocalspecError, SamplingParams
from localspec.backends.base import Context, FloatArray
from localspec.commands.doctor.facts import payoff
from localspec.commands.files import inspect_command, list_command
from localspec.controllers.acceptance import GREEDY as TYPICAL
from localspec.controllers.acceptance import SourceAcceptance
from localspec.controllers.auto import AutoController
from localspec.controllers.cost_model import PassTimes
from localspec.engine.pair import Pair
from localspec.errors import ModelFileError
from localspec.heads.drafters import BlockHead
from localspec.heads.listing import inspect
from localspec.heads.published import EngineHead, load_published
from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.rounds import Round
from localspec.system.files import models_dir
from tests.conftest import TinyFiles, open_backend
from tests.spec_decode.drafters.test_heads import accepted
from tests.spec_decode.drafters.test_published_heads import (
    GREEDY,
    PROMPT,
    SEEDED,
    drafts_as_a_fresh_one,
    fail_after,
    open_llm,
)
from tests.spec_decode.test_exactness import SAMPLING
from tests.spec_decode.test_lossless import N_CTX, World
from tests.support import ggufs
from tests.support.gguf_vocabs import spm_vocab
from tests.support.published_heads import write_dflash

pytestmark = pytest.mark.usefixtures("llama_cpp")

OWN = {"own_embeddings": True, "own_output": True}
DSPARK = {"markov": True, "confidence": True}
SELECTOR = {"selector": 4, "block_size": 8}


def write_block(tiny: TinyFiles, folder: Path, **options: Any) -> Path:
    return write_dflash(tiny.pair.target, folder / "block.gguf", **options)


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {**OWN, "windows": [True, False], "n_out": 250}], ids=["borrows", "windows"])
def test_the_text_does_not_depend_on_it_on_mlx(tiny: TinyFiles, tmp_path: Path, options: dict[str, Any]) -> None:
    open_backend("mlx")
    with open_llm(tiny, write_block(tiny, tmp_path, **options), "mlx") as llm:
        assert (llm.draft_names, llm.warnings) == (["head"], [])
        assert llm.run(lambda pair: pair.state.models[0].model.backend) == "mlx"
        for params in (GREEDY, SEEDED):
            reply = llm.generate(PROMPT, params)
            assert reply.token_ids == llm.generate(PROMPT, params, speculate=False).token_ids
            counts = reply.stats["by_source"]["head"]
            assert counts["num_accepted_tokens"] > 0.02 * counts["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_out": 250, "block_size": 16},
        {**OWN, "windows": [True, False]},
        {"causal": True, "extra": {"dflash.rope.dimension_sections": [64, 0, 0, 0]}},
        {"markov": True, "n_out": 250},
        {**DSPARK, "from_anchor": False},
        {"selector": 8, "n_out": 250},
    ],
    ids=["borrows-both", "token-map", "own", "sections", "dspark", "dspark-behind-the-anchor", "dflash2"],
)
def test_the_text_does_not_depend_on_it(tiny: TinyFiles, tmp_path: Path, options: dict[str, Any]) -> None:
    with open_llm(tiny, write_block(tiny, tmp_path, **options)) as llm:
        assert (llm.draft_names, llm.warnings) == (["head"], [])
        for params in (GREEDY, SEEDED):
            reply = llm.generate(PROMPT, params)
            assert reply.token_ids == llm.generate(PROMPT, params, speculate=False).token_ids
            counts = reply.stats["by_source"]["head"]
            assert counts["num_accepted_tokens"] > 0.02 * counts["num_draft_tokens"] > 0


class BlockWorld(World):
    """Answers of a target on the reference engine, with block drafters alone and among other drafters."""

    def __init__(self, pair_files: Any, rng: random.Random, folder: Path, engine: str) -> None:
        self.path, self.folder, self.engine = pair_files.target, folder, engine
        super().__init__(pair_files, rng, folder)

    def head(self, **options: Any) -> BlockHead:
        path = write_dflash(self.path, self.folder / f"{len(list(self.folder.iterdir()))}.gguf", **(OWN | options))
        head = load_published(path, self.target, engine=self.engine)
        assert head.model.backend == self.engine
        return BlockHead(head, head.new_context(N_CTX))

    def groups(self) -> list[list[Drafter]]:
        found: list[list[Drafter]] = [[self.head()], [NgramDrafter(), self.head(n_out=200)]]
        if self.engine == "mlx":  # which computes DFlash alone
            return [*found, [self.random, NgramDrafter(), self.head(block_size=16)]]
        return [
            *found,
            [self.random, self.head(**DSPARK)],
            [NgramDrafter(), self.head(block_size=16), self.head(markov=True, from_anchor=False)],
            [self.head(**SELECTOR)],
        ]


@pytest.mark.parametrize("engine", ["llama-cpp", "mlx"])
def test_answers_equal_plain_ones_to_the_bit(quick: ggufs.Pair, tmp_path: Path, engine: str) -> None:
    """120 answers, 60 with MLX, greedy, and sampled with a seed."""
    open_backend(engine)
    world, rounds = BlockWorld(quick, random.Random(0), tmp_path, engine), list[Round]()
    for seed in range(60 if engine == "mlx" else 120):
        rounds += world.compare(replace(SAMPLING, seed=seed) if seed % 2 else SamplingParams())
    assert accepted(rounds)["head"] > 0.05


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("llama-cpp", {"block_size": 8}),
        ("llama-cpp", DSPARK),
        ("llama-cpp", {"windows": [True, True]}),
        ("llama-cpp", SELECTOR),
        ("mlx", {"block_size": 8}),
        ("mlx", {"windows": [True, True]}),
    ],
)
def test_what_is_drafted_after_rejections_is_what_a_fresh_one_drafts(
    quick: ggufs.Pair, tmp_path: Path, engine: str, options: dict[str, Any]
) -> None:
    """Its memory holds the target's true states of all that was settled, and nothing of blocks or what was rejected."""
    open_backend(engine)
    world = BlockWorld(quick, random.Random(1), tmp_path, engine)
    n_more = 2 + ("markov" not in options)
    drafts_as_a_fresh_one(world, world.head(**options), world.head(**options), n_answers=15, n_more=n_more)


def test_a_pass_fills_in_as_many_masks_as_may_be_drafted(tiny: TinyFiles, tmp_path: Path) -> None:
    def widths(pair: Pair) -> list[int]:
        (draft,) = pair.state.models
        head, found = draft.drafter.head, list[int]()  # type: ignore[attr-defined]
        real = head.block_logits

        def counted(context: Context, token: int, n: int, n_best: int) -> FloatArray:
            found.append(n)
            return real(context, token, n, n_best)  # type: ignore[no-any-return]

        head.block_logits = counted
        list(pair.rounds(pair.target.tokenize(PROMPT), GREEDY, 3, lambda n_cached: None, lambda: False))
        list(pair.rounds(pair.target.tokenize(PROMPT), GREEDY, 20, lambda n_cached: None, lambda: False))
        return found

    with open_llm(tiny, write_block(tiny, tmp_path, block_size=8)) as llm:
        found = llm.run(widths)
    assert set(found) <= set(range(1, 8))
    assert found.count(3) > 10
    assert found.count(7) > 10


def test_a_block_that_fails_is_done_without(tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(tiny, write_block(tiny, tmp_path)) as llm:
        plain = llm.generate(PROMPT, GREEDY, speculate=False).token_ids
        fail_after(5, monkeypatch)
        assert llm.generate(PROMPT, GREEDY).token_ids == plain
        (warning,) = llm.warnings
        assert "block.gguf is not used any more: it failed" in warning


# -- what it costs -----------------------------------------------------------------------------------------------------


def planned(one_pass: frozenset[str], step_ms: float) -> int:
    """How many tokens the controller takes of a drafter that is right four times in five, as it says."""
    times = PassTimes({w: 10.0 + 0.2 * w for w in range(1, 20)})
    controller = AutoController(
        times, {"head": PassTimes({1: step_ms})}, {"head": SourceAcceptance(TYPICAL)}, one_pass=one_pass
    )
    plan, n = controller.plan(16, 20), 0
    while plan.more("head", 0 if n and one_pass else 1) and plan.keep("head", 0.8) is not None:
        n += 1
    return n


def test_what_a_block_costs_does_not_depend_on_how_deep_is_drafted() -> None:
    """Where a step is dear a chain ends early, or does not begin; a block of the same price is used to its end."""
    assert planned(frozenset(), 2.0) < planned(frozenset({"head"}), 2.0)
    assert planned(frozenset(), 4.0) <= 2 < planned(frozenset({"head"}), 4.0)
    assert planned(frozenset({"head"}), 60.0) == 0


def test_what_a_block_needs_to_pay_falls_with_its_length() -> None:
    chain, block = (payoff("head", lambda width: 10.0, 8.0, one_pass=one_pass) for one_pass in (False, True))
    needed = [[share or 1.0 for share in each.break_even.values()] for each in (chain, block)]
    assert needed[0][0] == needed[1][0]
    assert needed[1] == sorted(needed[1], reverse=True)
    assert needed[1][5] < 0.7 * needed[0][5]
    assert block.speedup[0.8] > chain.speedup[0.8]


def test_a_block_is_what_is_timed(tiny: TinyFiles, tmp_path: Path) -> None:
    """Whole blocks behind states of the target, by how many states are new."""

    def passes(pair: Pair) -> list[tuple[int, int]]:
        (draft,) = pair.state.models
        assert draft.drafter.info.one_pass
        found: list[tuple[int, int]] = []
        with draft.passes.context(draft.model, 64) as context:
            for n, logits in ((20, "none"), (1, "all"), (3, "last")):
                draft.passes.feed(context, [0] * n, logits)  # type: ignore[arg-type]
                found.append((n, context.n_past))
        return found

    with open_llm(tiny, write_block(tiny, tmp_path)) as llm:
        assert llm.run(passes) == [(20, 20), (1, 21), (3, 24)]


# -- found without being named -----------------------------------------------------------------------------------------


def test_auto_takes_one_that_lies_beside_its_target(tiny: TinyFiles, tmp_path: Path, quick: ggufs.Pair) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    target = folder / "target.gguf"
    target.write_bytes(tiny.pair.target.read_bytes())
    write_dflash(quick.target, folder / "a-of-another.gguf")
    own = write_dflash(target, folder / "b-its-own.gguf", markov=True)
    with LLM(target, "auto", backend="llama-cpp", n_ctx=256, idle=False, remember=False) as llm:
        assert llm.warnings == []
        assert [draft.path for draft in llm.run(lambda pair: pair.state.models)] == [own]
        reply = llm.generate(PROMPT, GREEDY)
        assert reply.token_ids == llm.generate(PROMPT, GREEDY, speculate=False).token_ids


def test_inspect_and_list_know_it(tiny: TinyFiles, capsys: pytest.CaptureFixture[str]) -> None:
    models_dir().mkdir(parents=True)
    path = write_dflash(tiny.pair.target, models_dir() / "block.gguf", n_out=200, block_size=16)
    assert inspect_command(str(path)) == 0
    out = capsys.readouterr().out
    assert "DFlash, reads layer:0, layer:1, layer:2" in out
    assert "15 tokens in a pass" in out
    facts = inspect(path)["published_head"]
    assert (facts["kind"], facts["n_out"], facts["block"]) == ("dflash", 200, {"rows": 16, "guesses": 15})
    spark = write_dflash(tiny.pair.target, models_dir() / "spark.gguf", markov=True)
    facts = inspect(spark)["published_head"]
    assert (facts["title"], facts["block"]) == ("DSpark", {"rows": 5, "guesses": 5})
    assert list_command() == 0
    assert re.search(r"block\.gguf +\S+ \w+ +dflash +a model with 384 tokens", capsys.readouterr().out)


# -- files that do not fit, or are damaged ----------------------------------------------------------------------------


def test_one_of_another_model_is_refused_with_the_reason(tiny: TinyFiles, tmp_path: Path, quick: ggufs.Pair) -> None:
    narrow = write_dflash(quick.target, tmp_path / "narrow.gguf")
    deep = write_dflash(tiny.pair.target, tmp_path / "deep.gguf", (1, 2, 4))
    other = ggufs.write_llama(tmp_path / "other.gguf", ggufs.Shape(n_layer=4), spm_vocab())
    foreign = write_dflash(other, tmp_path / "foreign.gguf")
    for path, why in (
        (narrow, "does not fit: it needs a target with states of 32 channels, but tiny llama has 128"),
        (deep, "does not fit: it reads the state after layer 4, but tiny llama has 4 layers"),
        (foreign, "does not fit: "),
    ):
        with pytest.raises(LocalspecError, match=why) as caught:
            open_llm(tiny, path)
        assert "\n" not in str(caught.value)


def test_one_that_borrows_needs_its_target_on_the_same_engine(tiny: TinyFiles, tmp_path: Path) -> None:
    with pytest.raises(LocalspecError, match=r"takes its embeddings and output from its target, .*--backend llama-cpp"):
        open_llm(tiny, write_block(tiny, tmp_path), "reference")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"extra": {"dflash.target_layers": None}}, r"target_layers is None"),
        ({"layers": (0, 1, 2)}, "reads the target's embeddings as one of its states"),
        ({"block_size": 1}, "its blocks have 1 rows, too few to draft with"),
        ({"block_size": 65}, "has blocks of 65 rows; the maximum is 64"),
        ({"extra": {"dflash.block_size": None}, "markov": True}, "block_size is None"),
        ({"extra": {"tokenizer.ggml.mask_token_id": None}}, "its mask token None is no token"),
        ({"extra": {"tokenizer.ggml.mask_token_id": 384}}, "its mask token 384 is no token"),
        ({"extra": {"dflash.attention.causal": 1}}, "attention.causal is 1"),
        ({"extra": {"dflash.attention.head_count_kv": 3}}, "attention heads cannot share"),
        ({"extra": {"dflash.attention.value_length": 64}}, "keys and values differ"),
        ({"extra": {"dflash.rope.dimension_count": 127}}, "it rotates 127 of 128 channels"),
        ({"extra": {"dflash.rope.dimension_sections": [0, 0, 0, 0]}}, "rope.dimension_sections"),
        ({"extra": {"dflash.rope.dimension_sections": [100, 100, 0, 0]}}, "rope.dimension_sections"),
        ({"extra": {"dflash.attention.sliding_window": 8}}, "sliding_window_pattern None does not fit its 2 layers"),
        ({"windows": [True]}, "does not fit its 2 layers"),
        ({"extra": {"dflash.hyper_connection.count": 4}}, "DSpark drafter with layers of DeepSeek-V4"),
        ({"drop": ("fc.weight",)}, "lacks fc.weight"),
        ({"drop": ("enc.output_norm.weight",)}, "lacks enc.output_norm.weight"),
        ({"drop": ("blk.1.ffn_up.weight",)}, "lacks blk.1.ffn_up.weight"),
        ({"drop": ("markov_w2.weight",), "markov": True}, "lacks markov_w2.weight"),
        ({"drop": ("selector_successor.weight",), "selector": 8}, "lacks selector_successor.weight"),
        ({"drop": ("blk.1.ffn_conv_base",), "selector": 8}, "lacks blk.1.ffn_conv_base"),
        ({"selector": 11}, "11 candidates do not fit its 384 tokens and rows of 128 channels"),
        (
            {"selector": 8, "extra": {"dflash.conv_group_size": 48}},
            "its 128 channels cannot be divided into groups of 48",
        ),
        ({"selector": 8, "extra": {"dflash.selector_rank": None}}, "selector_rank is None"),
        ({"selector": 8, "markov": True}, "both a DSpark and a DFlash2 drafter"),
        ({"drop": ("output.weight",), "n_out": 100}, "a token map but no output matrix"),
        ({"n_layers": 2, "extra": {"dflash.block_count": 3}}, "lacks blk.2.attn_norm.weight"),
    ],
)
def test_what_the_engine_would_end_the_process_over_is_refused(
    tiny: TinyFiles, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    path = write_block(tiny, tmp_path, **options)
    with pytest.raises(ModelFileError, match=why) as caught:
        open_llm(tiny, path)
    assert "\n" not in str(caught.value)


def test_no_block_is_asked_of_the_engine_that_it_cannot_take(tiny: TinyFiles, tmp_path: Path) -> None:
    def ask(pair: Pair) -> None:
        (draft,) = pair.state.models
        head = draft.drafter.head  # type: ignore[attr-defined]
        assert isinstance(head, EngineHead)
        with head.new_context(4) as context:
            for token, n in ((0, 0), (0, 5), (-1, 2), (384, 2)):
                with pytest.raises(LocalspecError, match="cannot decode a block"):
                    head.block_logits(context, token, n)
            for _ in range(4):  # no state before it is needed, and what was guessed can stay
                context.truncate(0)
                logits, ids = head.block_logits(context, 0, 4)
                assert (logits.shape, ids) == ((4, 384), None)
            with pytest.raises(LocalspecError, match="do not fit"):
                head.block_logits(context, 0, 4)
            context.truncate(0)

    with open_llm(tiny, write_block(tiny, tmp_path)) as llm:
        llm.run(ask)


def test_the_kinds_that_are_not_run_are_refused_by_name(tiny: TinyFiles, tmp_path: Path) -> None:
    fork = ggufs.write_gguf(tmp_path / "fork.gguf", "dflash-draft", {}, {"fc.weight": np.eye(32)})
    with pytest.raises(LocalspecError, match=r"fork\.gguf is a DFlash drafter in the format of a fork of llama\.cpp"):
        open_llm(tiny, fork)
    assert "DFlash" in inspect(fork)["cannot_generate_text"]
