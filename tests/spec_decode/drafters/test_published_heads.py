"""Heads that models are published with: what is said does not depend on them, and their memory is exact.

Beside other drafters, several answers at a time and on all engines they are in ``tests/engine/test_any_drafter.py``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, LocalspecError, SamplingParams
from localspec.backends import trial
from localspec.backends.base import Forward
from localspec.backends.llama import llama_cpp
from localspec.backends.llama import staging as staging_module
from localspec.commands.files import inspect_command, list_command
from localspec.engine.pair import Pair
from localspec.errors import Cancelled, EngineError, ModelFileError
from localspec.heads.kinds import read_published
from localspec.heads.listing import inspect
from localspec.heads.published import load_published
from localspec.sampling.sampling import Noise
from localspec.spec_decode.drafters.base import Drafter, Plan, Proposer
from localspec.system.files import models_dir
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs
from tests.support.gemma4_ggufs import write_assistant, write_gemma4
from tests.support.mtp_ggufs import FAMILIES, write_apart
from tests.support.published_heads import write_dflash, write_eagle3

pytestmark = pytest.mark.usefixtures("llama_cpp")

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=32, ignore_eos=True)
PROMPT = "one two one two"

Write = Callable[..., Path]
WHOLE = {"own_embeddings": True, "own_output": True}
DSPARK = {"markov": True, "confidence": True}


@pytest.fixture(params=["llama-cpp", "mlx", "reference"])
def engine(request: pytest.FixtureRequest) -> str:
    return open_backend(request.param).name


def write_head(tiny: TinyFiles, folder: Path, **options: Any) -> Path:
    return write_eagle3(tiny.pair.target, folder / "head.gguf", **options)


def open_llm(tiny: TinyFiles, draft: Any, engine: str = "llama-cpp", **options: Any) -> LLM:
    return open_mtp(tiny.pair.target, draft, backend=engine, **options)


# What is said.


@pytest.mark.parametrize(
    ("write", "engine", "options"),
    [
        (write_eagle3, "llama-cpp", {"own_output": False}),
        (write_eagle3, "mlx", {"n_out": 200}),
        (write_eagle3, "reference", {"own_output": False}),
        (write_dflash, "llama-cpp", {**WHOLE, "windows": [True, False]}),
        (write_dflash, "llama-cpp", {"causal": True, "extra": {"dflash.rope.dimension_sections": [64, 0, 0, 0]}}),
        (write_dflash, "llama-cpp", {"markov": True, "n_out": 250}),
        (write_dflash, "llama-cpp", {"selector": 8, "n_out": 250}),
        (write_dflash, "mlx", {**WHOLE, "windows": [True, False], "n_out": 250}),
    ],
)
def test_the_text_does_not_depend_on_it(
    tiny: TinyFiles, tmp_path: Path, write: Write, engine: str, options: dict[str, Any]
) -> None:
    open_backend(engine)
    with open_llm(tiny, write(tiny.pair.target, tmp_path / "head.gguf", **options), engine) as llm:
        assert (llm.draft_names, llm.warnings) == (["head"], [])
        assert llm.run(lambda pair: pair.state.models[0].model.backend) == engine
        says_what_it_says_without(llm, "head", 0.1 if write is write_eagle3 else 0.02)
        drafts_as_a_fresh_one(llm)


def says_what_it_says_without(llm: LLM, source: str, least: float) -> None:
    """Greedily and with a seed; at least so large a share of its draft tokens is accepted."""
    for params in (GREEDY, SEEDED):
        reply = llm.generate(PROMPT, params)
        assert reply.token_ids == llm.generate(PROMPT, params, speculate=False).token_ids
        counts = reply.stats["by_source"][source]
        assert counts["num_accepted_tokens"] > least * counts["num_draft_tokens"] > 0


def drafts_as_a_fresh_one(llm: LLM) -> None:
    """After rejections a head drafts what one drafts that has read the same text and states, and nothing else.

    Texts that are longer than its target's window, which go on, and which go back; its memory holds nothing of blocks
    or of what was rejected. Of a target's memories one may branch, the other not.
    """
    text, n_different = PROMPT, 0

    def check(pair: Pair) -> bool:
        (draft,) = pair.state.models
        used: Any = draft.drafter
        tokens, taps, found = used._text, used.info.taps, [proposed(used, used._text)]
        with (
            pair.target.new_context(256, hidden=taps, branches=not pair.context.can_branch) as target,
            used.head.new_context(256) as context,
        ):
            forward = target.decode(tokens[:-1])
            elsewhere = Forward(forward.logits, {name: np.roll(rows, 1, 0) for name, rows in forward.hidden.items()})
            for states in (forward, elsewhere):
                reader = type(used)(used.head, context, used.info.source)
                reader.process(tokens[:-1], states)
                reader.begin(tokens, target=target)
                found.append(proposed(reader, tokens))
                assert context.n_past == used.context.n_past
        mine, expected, other = found
        assert [token for token, _ in mine] == [token for token, _ in expected]
        assert [prob for _, prob in mine] == pytest.approx([prob for _, prob in expected], rel=0.02)
        return [prob for _, prob in other] != pytest.approx([prob for _, prob in expected], rel=0.02)

    for n in (9, 16, 3, 30):
        text += llm.generate(text, replace(GREEDY, max_tokens=n)).text
        n_different += llm.run(check)
    llm.generate(PROMPT + " two", GREEDY)
    assert n_different + llm.run(check) > 3


def proposed(drafter: Drafter, tokens: list[int], n: int = 3) -> list[tuple[int, float]]:
    """What it drafts next, with its confidence."""
    proposer, plan, found = Proposer(SamplingParams(), Noise(None)), Plan(n), list[tuple[int, float]]()
    text = list(tokens)
    for _ in range(n):
        for token in drafter.draft(text, plan, proposer):
            assert token.prob is not None
            found.append((token.id, token.prob))
            text.append(token.id)
    return found


def test_a_head_reads_all_of_a_prompt(tiny: TinyFiles, tmp_path: Path, engine: str) -> None:
    prompt = np.random.default_rng(2).integers(20, 280, 400).tolist()
    with open_llm(tiny, write_head(tiny, tmp_path), engine, n_ctx=512) as llm:
        llm.generate(prompt, GREEDY, max_tokens=4)
        assert llm.run(lambda pair: list(pair.state.drafters[0].context.tokens[:399])) == prompt[1:]


# Multi-token prediction.


def write_mtp(name: str, folder: Path) -> Path:
    path = folder / f"{name}.gguf"
    if name in FAMILIES:
        return FAMILIES[name](path)
    return ggufs.write_glm(path) if name == "glm" else ggufs.write_hybrid(path, residual=0.3, mtp=1)


FAMILIES_ON = ("glm on llama-cpp", "qwen35 on llama-cpp", "glm on mlx", "qwen of experts on mlx")


@pytest.fixture(params=[*FAMILIES_ON, *FAMILIES])
def family_on(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A model with a layer for multi-token prediction, of every family whose layer is computed, and an engine."""
    name, _, engine = request.param.partition(" on ")
    return write_mtp(name, tmp_path), open_backend(engine or "llama-cpp").name


def open_mtp(target: Path, draft: Any = "mtp", **options: Any) -> LLM:
    defaults: dict[str, Any] = {"n_ctx": 256, "idle": False, "draft_length": 4, "remember": False, "n_threads": 1}
    return LLM(target, draft, **({"backend": "llama-cpp"} | defaults | options))


def test_the_text_does_not_depend_on_an_mtp_layer_which_goes_on_after_rejections_as_a_fresh_one(
    family_on: tuple[Path, str],
) -> None:
    path, engine = family_on
    with open_mtp(path, backend=engine) as llm:
        assert (llm.draft_names, llm.warnings) == (["mtp"], [])
        says_what_it_says_without(llm, "mtp", 0.05)
        drafts_as_a_fresh_one(llm)


@pytest.mark.parametrize("name", ["glm", "qwen35"])
def test_what_a_rejection_costs_counts_where_memory_cannot_be_rewound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As a part of the pass: so the controller learns what drafts of each length cost."""
    with open_mtp(write_mtp(name, tmp_path)) as llm:
        context = llm.run(lambda pair: pair.context)
        real = context._truncate
        monkeypatch.setattr(context, "_truncate", lambda n: (real(n), time.sleep(0.02)))
        rejected = [each for each in llm.rounds(PROMPT, GREEDY) if each.verdict.n_accepted < len(each.draft)]
        assert len(rejected) > 10
        assert all((each.ms_verify if name == "qwen35" else each.ms_other) >= 20 for each in rejected)


def test_an_mtp_layer_in_a_file_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It drafts what it drafts within its model's file; auto takes it where it lies beside the model."""
    whole, folder = write_mtp("qwen35", tmp_path), tmp_path / "apart"
    folder.mkdir()
    trunk, layer = write_apart(whole, folder / "trunk.gguf", folder / "mtp.gguf")
    with open_mtp(whole) as llm:
        within = llm.generate(PROMPT, GREEDY)
    with open_mtp(trunk, layer) as llm:
        assert (llm.draft_names, llm.warnings) == (["head"], [])
        apart = llm.generate(PROMPT, GREEDY)
        says_what_it_says_without(llm, "head", 0.05)
    assert apart.token_ids == within.token_ids
    assert apart.stats["by_source"]["head"] == within.stats["by_source"]["mtp"]
    with open_mtp(trunk, "auto") as llm:
        assert llm.draft_names == ["ngram", "head"]
    assert inspect_command(str(layer)) == 0
    assert "MTP" in capsys.readouterr().out


def test_an_mtp_layer_in_a_file_of_its_own_is_for_its_model_and_none(tmp_path: Path) -> None:
    whole = ggufs.write_glm(tmp_path / "glm.gguf")
    _, layer = write_apart(write_mtp("qwen35", tmp_path), tmp_path / "trunk.gguf", tmp_path / "mtp.gguf")
    with pytest.raises(LocalspecError, match=r"is for a qwen35 model with 4 layers, but .* is a glm4moe model with 3"):
        open_mtp(whole, layer)
    with pytest.raises(LocalspecError, match="has no layers of a whole model"):
        open_mtp(layer, None)
    none_left = ggufs.write_llama(tmp_path / "llama.gguf", extra={"llama.nextn_predict_layers": 9})
    with pytest.raises(LocalspecError, match="has no layers of a whole model"):
        LLM(none_left, None, backend="reference")


def test_a_model_without_a_usable_mtp_layer_answers_and_says_why_it_has_none(tmp_path: Path) -> None:
    for path, why in (
        (ggufs.write_glm(tmp_path / "none.gguf", mtp=0), "none.gguf has no layer for multi-token prediction"),
        (
            ggufs.write_glm(tmp_path / "two.gguf", mtp=2),
            "two.gguf has 2 MTP layers; only models with one are supported",
        ),
        (ggufs.write_glm(tmp_path / "cut.gguf", drop="nextn"), "cut.gguf lacks the MTP layer"),
    ):
        with pytest.raises(LocalspecError, match=why):
            open_mtp(path)
        with open_mtp(path, None) as llm:
            assert len(llm.generate(PROMPT, GREEDY, max_tokens=3).token_ids) == 3


def test_an_mtp_layer_is_of_llama_cpp(tmp_path: Path) -> None:
    open_backend("ik-llama")
    path = ggufs.write_glm(tmp_path / "glm.gguf")
    with pytest.raises(LocalspecError, match=r"its MTP layer .* on llama-cpp for that and is on ik-llama; use"):
        open_mtp(path, backend="ik-llama")


# What goes wrong.


@pytest.mark.parametrize(
    ("write", "engine"), [(write_eagle3, "llama-cpp"), (write_dflash, "llama-cpp"), (write_eagle3, "mlx")]
)
def test_a_head_whose_engine_fails_is_done_without(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write, engine: str
) -> None:
    """It computes some passes, and then none."""
    open_backend(engine)
    left = iter(range(6))
    with open_llm(tiny, write(tiny.pair.target, tmp_path / "head.gguf"), engine) as llm:
        plain = llm.generate(PROMPT, GREEDY, speculate=False).token_ids
        owner, name = staging_module.staging(), "process"
        if engine == "mlx":
            from localspec.heads.kinds.mlx import Eagle3Trunk as owner

            name = "__call__"
        real = getattr(owner, name)

        def failing(*given: Any) -> Any:
            if next(left, None) is not None:
                return real(*given)
            if engine == "mlx":
                raise RuntimeError("out of memory")
            return 1

        monkeypatch.setattr(owner, name, failing)
        assert llm.generate(PROMPT, GREEDY).token_ids == plain
        assert llm.draft_names == []
        (warning,) = llm.warnings
        assert "head.gguf is not used any more: it failed" in warning


# Found without being named.


@pytest.mark.parametrize(("write", "engine"), [(write_eagle3, "reference"), (write_dflash, "llama-cpp")])
def test_auto_takes_a_head_that_lies_beside_its_target(
    tiny: TinyFiles, tmp_path: Path, quick: ggufs.Pair, write: Write, engine: str
) -> None:
    open_backend(engine)
    folder = tmp_path / "models"
    folder.mkdir()
    target = folder / "target.gguf"
    target.write_bytes(tiny.pair.target.read_bytes())
    (folder / "a-damaged.gguf").write_bytes(write(target, tmp_path / "a.gguf").read_bytes()[:9000])
    write(quick.target, folder / "b-of-another.gguf")
    write(target, folder / "c-damaged.gguf", drop=("fc.weight",))
    own = write(target, folder / "d-its-own.gguf")
    for draft in ("auto", "head"):
        with LLM(target, draft, backend=engine, n_ctx=256, idle=False, remember=False) as llm:
            assert llm.warnings == []
            assert [draft.path for draft in llm.run(lambda pair: pair.state.models)] == [own]
            assert llm.run(lambda pair: pair.state.models[0].model.backend) == engine


def test_auto_takes_no_head_that_borrows_from_a_target_elsewhere(tiny: TinyFiles, tmp_path: Path) -> None:
    open_backend("ik-llama")
    target = tmp_path / "target.gguf"
    target.write_bytes(tiny.pair.target.read_bytes())
    head = write_eagle3(target, tmp_path / "head.gguf")
    with LLM(target, "auto", backend="ik-llama", n_ctx=256, idle=False, remember=False) as llm:
        assert llm.run(lambda pair: pair.state.models) == []
    for engine, path, borrowed in (
        ("ik-llama", head, "embeddings"),
        ("reference", write_dflash(target, tmp_path / "block.gguf"), "embeddings and output"),
    ):
        with pytest.raises(LocalspecError, match=rf"takes its {borrowed} from its target, .*--backend llama-cpp"):
            open_llm(tiny, path, engine)


@pytest.mark.parametrize(("name", "engine"), [("glm", "llama-cpp"), ("qwen35", "mlx")])
def test_auto_takes_the_mtp_layer(tmp_path: Path, name: str, engine: str) -> None:
    open_backend(engine)
    with open_mtp(write_mtp(name, tmp_path), "auto", backend=engine) as llm:
        assert (llm.draft_names, llm.warnings) == (["ngram", "mtp"], [])
        reply = llm.generate(PROMPT, GREEDY)
        assert reply.token_ids == llm.generate(PROMPT, GREEDY, speculate=False).token_ids
        assert reply.stats["by_source"]["mtp"]["num_draft_tokens"] > 0


def test_inspect_and_list_know_them(tiny: TinyFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models_dir().mkdir(parents=True)
    head = write_eagle3(tiny.pair.target, models_dir() / "head.gguf", n_out=200)
    block = write_dflash(tiny.pair.target, models_dir() / "block.gguf", n_out=200, block_size=16)
    spark = write_dflash(tiny.pair.target, models_dir() / "spark.gguf", markov=True)
    found = [inspect(path)["published_head"] for path in (head, block, spark)]
    assert [(each["kind"], each["title"], each["n_out"]) for each in found] == [
        ("eagle3", "EAGLE-3", 200),
        ("dflash", "DFlash", 200),
        ("dflash", "DSpark", 384),
    ]
    assert [each["block"] for each in found[1:]] == [{"rows": 16, "guesses": 15}, {"rows": 5, "guesses": 5}]
    two = inspect(ggufs.write_glm(tmp_path / "two.gguf", mtp=2))["mtp"]
    assert two == {"layers": 2, "unusable": "two.gguf has 2 MTP layers; only models with one are supported"}
    assert inspect(tiny.bpe)["mtp"] is None
    for path, fact in ((head, "EAGLE-3, reads layer:0, layer:1, layer:2"), (block, "15 tokens in a pass")):
        assert inspect_command(str(path)) == 0
        assert fact in capsys.readouterr().out
    assert list_command() == 0
    out = capsys.readouterr().out
    for name, kind in (("head", "eagle3"), ("block", "dflash")):
        assert re.search(rf"{name}\.gguf +\S+ \w+ +{kind} +a model with 384 tokens", out)


# Files that do not fit, or are damaged.


@pytest.mark.parametrize("write", [write_eagle3, write_dflash])
def test_a_head_of_another_model_is_refused_with_the_reason(
    tiny: TinyFiles, tmp_path: Path, quick: ggufs.Pair, write: Write
) -> None:
    other = ggufs.write_llama(tmp_path / "other.gguf", ggufs.Shape(n_layer=4), ggufs.spm_vocab())
    for path, why in (
        (write(quick.target, tmp_path / "narrow.gguf"), "a target with states of 32 channels, but tiny llama has 128"),
        (write(tiny.pair.target, tmp_path / "deep.gguf", (1, 2, 4)), "after layer 4, but tiny llama has 4 layers"),
        (write(other, tmp_path / "foreign.gguf"), "s vocabulary differs"),
    ):
        with pytest.raises(LocalspecError, match=f"does not fit: it.*{why}") as caught:
            open_llm(tiny, path)
        assert "\n" not in str(caught.value)


DAMAGED_EAGLE3: list[tuple[dict[str, Any], str]] = [
    ({"extra": {"eagle3.target_layers": [1, 2]}}, r"target_layers is \[1, 2\]"),
    ({"extra": {"eagle3.target_layers": None}}, r"target_layers is None"),
    ({"layers": (0, 1, 2)}, "reads the target's embeddings as one of its states"),
    ({"extra": {"eagle3.block_count": 2}}, "several layers"),
    ({"extra": {"eagle3.target_hidden_size": 64}}, r"fc.weight is \[128, 384\] and should be \[128, 192\]"),
    ({"extra": {"eagle3.target_hidden_size": None}}, "target_hidden_size is None"),
    ({"extra": {"eagle3.attention.head_count": 3}}, "attention heads cannot share"),
    ({"extra": {"eagle3.rope.dimension_count": 31}}, "it rotates 31 of 32 channels"),
    ({"extra": {"eagle3.rope.dimension_count": 64}}, "it rotates 64 of 32 channels"),
    ({"extra": {"eagle3.attention.value_length": 16}}, "keys and values differ"),
    ({"extra": {"eagle3.vocab_size": 0}, "tokens": False}, "vocab_size is 0"),
    ({"drop": ("fc.weight",)}, "lacks fc.weight"),
    ({"drop": ("blk.0.attn_norm_2.weight",)}, "lacks blk.0.attn_norm_2.weight"),
    ({"drop": ("output.weight",), "n_out": 100}, "a token map but no output matrix"),
    ({"ids": [5, 5, 7]}, "has a token twice"),
    ({"ids": [5, 6, 99999]}, "or one outside 0..383"),
    ({"ids": [-1, 6, 7]}, "or one outside 0..383"),
]
# What both kinds have in common is in the first table.
DAMAGED_BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 1}, "its blocks have 1 rows, too few to draft with"),
    ({"block_size": 65}, "has blocks of 65 rows; the maximum is 64"),
    ({"extra": {"dflash.block_size": None}, "markov": True}, "block_size is None"),
    ({"extra": {"tokenizer.ggml.mask_token_id": None}}, "its mask token None is no token"),
    ({"extra": {"tokenizer.ggml.mask_token_id": 384}}, "its mask token 384 is no token"),
    ({"extra": {"dflash.attention.causal": 1}}, "attention.causal is 1"),
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
]


@pytest.mark.parametrize(
    ("write", "options", "why"),
    [*((write_eagle3, *row) for row in DAMAGED_EAGLE3), *((write_dflash, *row) for row in DAMAGED_BLOCKS)],
)
def test_what_the_engine_would_end_the_process_over_is_refused(
    tiny: TinyFiles, tmp_path: Path, write: Write, options: dict[str, Any], why: str
) -> None:
    """Its header is read before anything is loaded."""
    with pytest.raises(ModelFileError, match=why) as caught:
        read_published(write(tiny.pair.target, tmp_path / "head.gguf", **options))
    assert "\n" not in str(caught.value)


def test_a_version_without_the_functions_is_named(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_cpp

    staging_module.staging.cache_clear()
    monkeypatch.delattr(llama_cpp, "llama_process")
    try:
        with pytest.raises(EngineError, match=r"cannot run published heads, as version 0\.3\.36"):
            open_llm(tiny, write_head(tiny, tmp_path))
    finally:
        staging_module.staging.cache_clear()


CRASH = """
import os
import llama_cpp
llama_cpp.llama_process = lambda *arguments: os.abort()
"""


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Statuses of the children that try heads, from a home on where nothing was tried."""
    statuses, run_child = list[int](), trial.run_child

    def counted(*arguments: Any) -> int:
        status = run_child(*arguments)
        statuses.extend([status] * ("try_head" in arguments[0]))  # ik-llama tries files too
        return status

    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "fresh"))
    monkeypatch.setattr(trial, "run_child", counted)
    return statuses


def test_a_version_that_ends_the_process_is_refused(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: list[int]
) -> None:
    """By a child, so this process goes on; the verdict is kept, and holds for that file only."""

    def refused(path: Path) -> None:
        with pytest.raises(EngineError, match=r"llama-cpp \d\S* ended the process in which .* was tried") as caught:
            open_llm(tiny, path)
        assert "\n" not in str(caught.value)

    head, other = write_head(tiny, tmp_path), write_eagle3(tiny.pair.target, tmp_path / "other.gguf", seed=1)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(CRASH)
    with monkeypatch.context() as crashing:
        crashing.syspath_prepend(tmp_path / "site")
        refused(head)
        refused(head)
        assert len(trials) == 1  # the second time it is known
        refused(other)
        assert len(trials) == 2
    refused(head)
    third = write_eagle3(tiny.pair.target, tmp_path / "third.gguf", seed=2)
    for path in (third, other, head):  # what one file shows holds for its kind
        with open_llm(tiny, path) as llm:
            assert llm.generate(PROMPT, GREEDY).stats["num_draft_tokens"] > 0
    assert trials[2:] == [0]
    monkeypatch.setattr(llama_cpp.binding(), "version", "0.3.99")
    with open_llm(tiny, head):
        assert trials[2:] == [0, 0]  # another version is tried again


@pytest.mark.parametrize("kind", ["MTP", "MTP apart", "assistant", "DFlash"])
def test_every_kind_is_tried_once(tiny: TinyFiles, tmp_path: Path, trials: list[int], kind: str) -> None:
    target, draft = tiny.pair.target, Path("mtp")
    if kind == "DFlash":
        draft = write_dflash(target, tmp_path / "block.gguf")
    elif kind == "MTP":
        target = write_mtp("glm", tmp_path)
    elif kind == "assistant":
        target = write_gemma4(tmp_path / "gemma4.gguf")
        draft = write_assistant(target, tmp_path / "assistant.gguf")
    else:
        target, draft = write_apart(write_mtp("qwen35", tmp_path), tmp_path / "trunk.gguf", tmp_path / "apart.gguf")
    for _ in range(2):
        with open_mtp(target, str(draft)) as llm:
            assert (llm.warnings, trials) == ([], [0])


def test_a_trial_of_a_head_can_be_broken_off(tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "fresh"))
    monkeypatch.setattr(trial, "_POLL_S", 0.0)
    head = write_head(tiny, tmp_path)

    def say(line: str) -> None:
        raise Cancelled("stopped")

    with llama_cpp.load(tiny.pair.target) as target:
        with pytest.raises(Cancelled):
            load_published(head, target, say=say)
        assert not list((tmp_path / "fresh/trials").glob("*"))


def test_a_head_gives_its_memory_back(tiny: TinyFiles, tmp_path: Path, engine: str) -> None:
    with open_llm(tiny, write_head(tiny, tmp_path), engine) as llm:
        (draft,) = llm.run(lambda pair: pair.state.models)
        llm.set_draft(None)
        for closed in (lambda: draft.model.new_context(8), lambda: draft.context.truncate(0)):
            with pytest.raises(LocalspecError, match="was closed"):
                closed()
        assert len(llm.generate(PROMPT, GREEDY).token_ids) == GREEDY.max_tokens
