"""Heads of EAGLE-3's layout that are trained here: the engine computes them as the trainer does, and they draft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, SamplingParams, UsageError
from localspec.backends.base import Model
from localspec.errors import UnsupportedModel
from localspec.heads.card import HeadCard
from localspec.heads.kinds import read_published
from localspec.heads.kinds.eagle3 import write_eagle3
from localspec.heads.listing import described_heads, inspect
from localspec.heads.published import load_published
from localspec.model_files.fingerprint import fingerprint
from localspec.model_files.gguf import GGUFFile, n_rows, tensor_rows
from tests.conftest import open_backend
from tests.support import ggufs
from tests.support.lessons import written_by

jax = pytest.importorskip("jax", reason="the trainer needs jax: pip install 'localspec[distill]'")

from localspec.heads.training import eagle3_start  # noqa: E402
from localspec.heads.training.distill import distill  # noqa: E402
from localspec.heads.training.export import check, engine_logits  # noqa: E402
from localspec.heads.training.lessons import Packer, Size, Stretch, first_lesson, n_lessons  # noqa: E402
from localspec.heads.training.network import HeadNetwork  # noqa: E402
from localspec.heads.training.run_folder import Effort, Recipe  # noqa: E402
from localspec.heads.training.shards import Passage  # noqa: E402
from localspec.heads.training.warm_start import new_card, start  # noqa: E402

SHAPE = ggufs.Shape(n_layer=5, n_embd=64, n_head=4, n_head_kv=2, n_ff=96, residual=0.4)
RECIPE = Recipe(kind="eagle3", steps=3, n_out=200, d_ff=64, seed=3)
TAPS = RECIPE.taps(SHAPE.n_layer)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ggufs.write_llama(tmp_path_factory.mktemp("target") / "tiny-target.gguf", SHAPE, ggufs.bpe_vocab(300))


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
    facts: dict[str, Any] = {"kind": "eagle3", "taps": TAPS, "token_map": ids, "steps": 3, "d_ff": 64}
    return new_card(file, fingerprint(file.path), **facts)


def embedder(file: GGUFFile) -> Any:
    return lambda tokens: tensor_rows(file, "token_embd.weight", tokens)


def tapped(passages: list[Passage]) -> list[Passage]:
    return [replace(each, states=each.states[:, : len(TAPS)]) for each in passages]


def whole(file: GGUFFile, name: str) -> Any:
    rows = tensor_rows(file, name, slice(0, n_rows(file, name)))
    return rows if len(file.tensors[name].shape) > 1 else rows[0]


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
    found = [np.asarray(states[:n] @ network.output.T) for states in network.steps(weights, batch)]
    head = load_published(path, model, n_threads=1)
    try:
        expected = np.array(list(engine_logits(head, piece, card.steps))).swapaxes(0, 1)
        report = check(head, network, weights, embedder(file), passages)
    finally:
        head.close()
    assert np.abs(np.array(found) - expected).mean() < 0.02 * expected.std()  # the engine rounds to float16 and 8 bits
    assert min(report.agreement) > 0.9  # with random weights some guesses are nearly ties


def test_it_begins_with_what_a_linear_map_can_tell(target: Path, file: GGUFFile) -> None:
    """Its own heads look at their own rows alone, and so it guesses what the closed form does, better than chance."""
    passages = written_by(target, (*TAPS, "norm"), [120, 90, 100, 110, 80, 120, 90, 100])
    card = card_of(file, 300)
    output = tensor_rows(file, "output.weight", card.token_map)
    weights = start(file, card, output, embedder(file), passages, seed=0).weights
    network = HeadNetwork(card, output)
    right = places = 0
    for passage in tapped(passages):
        piece = Stretch(passage, first_lesson(passage), first_lesson(passage) + min(60, n_lessons(passage)))
        n = piece.end - piece.begin
        packer = Packer(card.token_map, embedder(file), Size(256, 64, 60), card.steps)
        batch = packer.pack([piece], np.arange(n, dtype=np.int32))
        rows = np.array(network.steps({name: jax.numpy.array(value) for name, value in weights.items()}, batch)[0][:n])
        at = slice(piece.begin, piece.end)
        states = passage.states[at].reshape(n, -1).astype(np.float32)
        token = embedder(file)(passage.tokens[piece.begin + 1 : piece.end + 1])
        linear = eagle3_start.guesses(card, weights, states, token)
        linear = linear / np.sqrt((linear**2).mean(1, keepdims=True)) * weights["output_norm.weight"]
        assert np.linalg.norm(rows - linear) < 0.05 * np.linalg.norm(linear)
        right += ((rows @ output.T).argmax(1) == passage.top_ids[piece.begin + 1 : piece.end + 1, 0]).sum()
        places += n
    assert right / places > 0.15


@pytest.fixture(scope="module", params=["llama-cpp", "mlx"])
def made(target: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A whole run, on each engine that computes such heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALSPEC_HOME", str(tmp_path_factory.mktemp("home")))
        open_backend(request.param)
        effort = Effort(1e4, n_places=800, n_steps=4, n_tests=3, n_questions=1, max_tokens=8, longest_answer=40)
        backend = "auto" if request.param == "llama-cpp" else request.param
        yield request.param, distill(str(target), recipe=RECIPE, effort=effort, n_threads=1, backend=backend)


def test_a_run_makes_a_head_that_drafts(target: Path, made: Any, isolated_home: Path) -> None:
    backend, made = made
    head = read_published(made.path)
    assert head.training == made.card.training
    assert made.card.training.acceptance["all"]
    assert head.borrows == ("embeddings",)
    assert head.taps == TAPS
    assert len(head.ids) == 200
    facts = inspect(made.path)
    assert facts["published_head"]["training"]["command"].startswith("localspec.distill(")
    folder = isolated_home / "heads"
    folder.mkdir(parents=True)
    (folder / "tiny.eagle3.gguf").write_bytes(made.path.read_bytes())
    assert [each["kind"] for each in described_heads()].count("eagle3") == 1
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"backend": backend, "idle": False, "n_threads": 1, "n_ctx": 512}
    with LLM(target, None, **options) as llm:
        plain = llm.generate("one two one two", params)
    # It is found where heads that were trained here lie.
    with LLM(target, "head", draft_length=3, **options) as llm:
        drafted = llm.generate("one two one two", params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats["num_draft_tokens"] > 40


def test_what_cannot_be_is_refused(target: Path, isolated_home: Path) -> None:
    with pytest.raises(UsageError, match="an EAGLE-3 head runs on llama-cpp or mlx"):
        distill(str(target), recipe=RECIPE, backend="reference")
    with pytest.raises(UnsupportedModel, match="four or more, not of 3"):
        RECIPE.taps(3)
    assert len(set(RECIPE.taps(4))) == 3
