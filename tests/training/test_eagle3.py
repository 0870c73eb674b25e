"""Heads of EAGLE-3's layout that are trained here: the engine computes them as the trainer does, and they draft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, SamplingParams
from localspec.backends.base import Model
from localspec.errors import UnsupportedModel
from localspec.heads.card import HeadCard
from localspec.heads.file import heads_folder
from localspec.heads.kinds import read_published
from localspec.heads.kinds.eagle3 import write_eagle3
from localspec.heads.listing import described_heads, inspect
from localspec.heads.published import load_published
from localspec.model_files.fingerprint import fingerprint
from localspec.model_files.gguf import GGUFFile, tensor_rows
from tests.conftest import open_backend
from tests.support.lessons import written_by
from tests.support.published_heads import whole

jax = pytest.importorskip("jax", reason="the trainer needs jax: pip install 'localspec[distill]'")

from localspec.heads.training.distill import distill  # noqa: E402
from localspec.heads.training.lessons import Packer, Size, Stretch, first_lesson, n_lessons  # noqa: E402
from localspec.heads.training.network import HeadNetwork  # noqa: E402
from localspec.heads.training.run_folder import Effort, Recipe  # noqa: E402
from localspec.heads.training.shards import Passage  # noqa: E402
from localspec.heads.training.start import (  # noqa: E402
    eagle3_guesses,
    new_card,
    start,
)
from localspec.heads.training.trainer import check, engine_logits  # noqa: E402

RECIPE = Recipe(kind="eagle3", steps=2, n_out=200, d_ff=64, seed=3)
TAPS = RECIPE.taps(5)


@pytest.fixture(scope="module")
def model(target: Path) -> Iterator[Model]:
    with open_backend("llama-cpp").load(target, n_threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def file(target: Path) -> Iterator[GGUFFile]:
    with GGUFFile(target) as opened:
        yield opened


def card_of(file: GGUFFile, n_out: int = 200) -> HeadCard:
    ids = np.sort(np.random.default_rng(0).permutation(300)[:n_out]).astype(np.int32)
    return new_card(file, fingerprint(file.path), RECIPE, ids)


def embedder(file: GGUFFile) -> Any:
    return lambda tokens: tensor_rows(file, "token_embd.weight", tokens)


def tapped(passages: list[Passage]) -> list[Passage]:
    return [replace(each, states=each.states[:, : len(TAPS)]) for each in passages]


def test_every_step_guesses_as_the_engine_does(target: Path, model: Model, file: GGUFFile, tmp_path: Path) -> None:
    card, rng = card_of(file), np.random.default_rng(5)
    random = {
        name: rng.uniform(0.8, 1.2, shape) if "norm" in name else rng.standard_normal(shape) / np.sqrt(shape[-1])
        for name, shape in card.shapes().items()
    }
    path = write_eagle3(tmp_path / "head.gguf", card, random, file)
    with GGUFFile(path) as written:
        weights = {name: jax.numpy.array(whole(written, name)) for name in card.shapes()}
        network = HeadNetwork(card, whole(written, "output.weight"))
    passages = tapped(written_by(target, (*TAPS, "norm"), [90, 40]))
    piece = Stretch(passages[0], 60, 86)
    packer = Packer(card.token_map, embedder(file), Size(256, 64, 60), card.steps)
    n = piece.end - piece.begin
    batch = packer.pack([piece], np.arange(n, dtype=np.int32))
    found = [np.asarray(states[:n] @ network.output.T) for states in jax.jit(network.steps)(weights, batch)]
    head = load_published(path, model, n_threads=1)
    with closing(head):
        expected = np.array(list(engine_logits(head, piece, card.steps))).swapaxes(0, 1)
        report = check(head, network, weights, embedder(file), passages)
    assert np.abs(np.array(found) - expected).mean() < 0.02 * expected.std()  # the engine rounds to float16 and 8 bits
    assert min(report.agreement) > 0.9  # with random weights some guesses are nearly ties


def test_it_begins_with_what_a_linear_map_can_tell(target: Path, file: GGUFFile) -> None:
    """Its own heads look at their own rows alone, and so it guesses what the closed form does, better than chance."""
    passages = written_by(target, (*TAPS, "norm"), [120, 90, 100, 110, 80, 120, 90, 100])
    card = card_of(file, 300)
    output = tensor_rows(file, "output.weight", card.token_map)
    weights = start(file, card, output, embedder(file), passages, seed=0).weights
    steps = jax.jit(HeadNetwork(card, output).steps)
    right = places = 0
    for passage in tapped(passages):
        piece = Stretch(passage, first_lesson(passage), first_lesson(passage) + min(60, n_lessons(passage)))
        n = piece.end - piece.begin
        packer = Packer(card.token_map, embedder(file), Size(256, 64, 60), card.steps)
        rows = np.array(steps(weights, packer.pack([piece], np.arange(n, dtype=np.int32)))[0])[:n]
        at = slice(piece.begin, piece.end)
        states = passage.states[at].reshape(n, -1).astype(np.float32)
        token = embedder(file)(passage.tokens[piece.begin + 1 : piece.end + 1])
        linear = eagle3_guesses(card, weights, states, token)
        linear = linear / np.sqrt((linear**2).mean(1, keepdims=True)) * weights["output_norm.weight"]
        assert np.linalg.norm(rows - linear) < 0.05 * np.linalg.norm(linear)
        right += ((rows @ output.T).argmax(1) == passage.top_ids[piece.begin + 1 : piece.end + 1, 0]).sum()
        places += n
    assert right / places > 0.15


def test_a_run_makes_a_head_that_drafts(target: Path, isolated_home: Path, model: Model) -> None:
    """Found where heads that were trained here lie. On MLX only examples are made otherwise: see test_examples.py."""
    effort = Effort(1e4, n_places=800, n_steps=4, n_tests=3, n_questions=1, max_tokens=8, longest_answer=40)
    made = distill(str(target), recipe=RECIPE, effort=effort, n_threads=1)
    head = read_published(made.path)
    assert head.training == made.card.training
    assert made.card.training.acceptance["all"]
    assert (head.borrows, head.taps, len(head.ids)) == (("embeddings",), TAPS, 200)
    assert inspect(made.path)["published_head"]["training"]["command"].startswith("localspec.distill(")
    heads_folder().mkdir(parents=True, exist_ok=True)
    (heads_folder() / "tiny.eagle3.gguf").write_bytes(made.path.read_bytes())
    assert [each["kind"] for each in described_heads()].count("eagle3") == 1
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(target, "head", backend="llama-cpp", draft_length=3, idle=False, n_threads=1, n_ctx=512) as llm:
        plain = llm.generate("one two one two", params, speculate=False)
        drafted = llm.generate("one two one two", params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats["num_draft_tokens"] > 40


def test_it_reads_three_layers() -> None:
    with pytest.raises(UnsupportedModel, match="four or more, not of 3"):
        RECIPE.taps(3)
    assert len(set(RECIPE.taps(4))) == 3
