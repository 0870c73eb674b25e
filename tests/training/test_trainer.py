"""The network computes what an engine computes with the head file made of it; a head in training learns, can be stopped
at any moment, and goes on as if it had not been."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.heads.file import head_weights
from localspec.heads.trained import load_head
from localspec.heads.training.shards import Passage
from localspec.model_files.gguf import GGUFFile, fingerprint, tensor_rows
from tests.conftest import TinyFiles
from tests.support.ggufs import Shape, write_llama
from tests.support.heads import write_random_head
from tests.support.lessons import engine_logits, written_by

jax = pytest.importorskip("jax", reason="the trainer needs jax: pip install 'localspec[distill]'")

from localspec.heads.training import start as start_module  # noqa: E402
from localspec.heads.training.lessons import (  # noqa: E402
    NOWHERE,
    Packer,
    Reading,
    Size,
    Stretch,
    first_lesson,
    n_lessons,
)
from localspec.heads.training.network import HeadNetwork  # noqa: E402
from localspec.heads.training.run_folder import Recipe  # noqa: E402
from localspec.heads.training.start import Start, new_card, start  # noqa: E402
from localspec.heads.training.trainer import (  # noqa: E402
    CheckpointError,
    Trainer,
    TrainingSettings,
)

TAPS = ("layer:0", "norm")
STARTS = np.arange(0, 40, 2, dtype=np.int32)


class Trained:
    """A head file for the quick tiny target, and the network that it would be made of."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self.target = path, target
        with GGUFFile(path) as file, load_head(path, target, "reference") as head:
            self.card = head.card
            self.weights = {name: jax.numpy.array(head_weights(file, name)) for name in file.tensors}
            with GGUFFile(head.model.path) as engine_file:  # whose output rows are rounded
                self.output = tensor_rows(engine_file, "token_embd.weight", slice(0, self.card.n_out))
        self._file = GGUFFile(target)
        self.network = HeadNetwork(self.card, self.output)

    def embed(self, tokens: Any) -> Any:
        return tensor_rows(self._file, "token_embd.weight", tokens)

    def packer(self, size: Size) -> Packer:
        return Packer(self.card.token_map, self.embed, size, self.card.steps)

    def gradients(self, network: HeadNetwork, batches: list[Any]) -> dict[str, Any]:
        sums = {name: jax.numpy.zeros_like(value) for name, value in self.weights.items()}
        for batch in batches:
            sums = network.gradients(self.weights, sums, batch)
        return {name: np.asarray(value) / len(batches) for name, value in sums.items()}


def flat(gradients: dict[str, Any]) -> Any:
    return np.concatenate([gradients[name].ravel() for name in sorted(gradients)])


@pytest.fixture
def trained(tiny: TinyFiles, tmp_path: Path) -> Trained:
    target = tiny.quick.target
    path = write_random_head(target, tmp_path / "head.gguf", "chained", TAPS, type_name="F32", steps=2)
    return Trained(path, target)


@pytest.mark.parametrize("taps", [TAPS, ("norm",)])
def test_every_step_guesses_as_the_engine_does(tiny: TinyFiles, tmp_path: Path, taps: tuple[str, ...]) -> None:
    """True rows, and each chain's own rows and no other's, at the same positions: what the engine does one by one, with
    rows taken back after each chain, the network does at once, whatever stands beside them in the batch."""
    target = tiny.quick.target
    path = write_random_head(target, tmp_path / "head.gguf", "chained", taps, 200, type_name="F32", steps=3)
    trained = Trained(path, target)
    one, other = written_by(target, taps, [90, 40])
    pieces = [Stretch(other, 18, 33), Stretch(one, 60, 89), Stretch(other, 30, 39)]
    n = sum(piece.end - piece.begin for piece in pieces)
    batch = trained.packer(Size(256, 64, 60)).pack(pieces, np.arange(n, dtype=np.int32))
    guessed, true = (np.asarray(rows)[:, :n] for rows in trained.network.guesses(trained.weights, batch))
    steps = jax.jit(trained.network.steps)(trained.weights, batch)
    found = np.array([np.asarray(states[:n]) @ trained.output.T for states in steps])
    with load_head(path, target, "reference") as head:
        expected = np.array([each for piece in pieces for each in engine_logits(head, piece)]).swapaxes(0, 1)
    real = true != NOWHERE
    assert real.sum() > 2 * n
    np.testing.assert_allclose(found[real], expected[real], atol=1e-3)  # float32 against float64
    assert (guessed == expected.argmax(2))[real].mean() > 0.99


def test_a_head_is_tested_place_by_place(trained: Trained, tmp_path: Path) -> None:
    """And is right as often as an engine with the same weights."""
    passages, expected = written_by(trained.target, TAPS, [80, 50, 60]), list[bool]()
    weights = {name: np.asarray(value) for name, value in trained.weights.items()}
    options: Any = (passages, passages, tmp_path / "checkpoint", STEADY)
    one = Trainer(trained.card, lambda: Start(weights, {}), trained.output, trained.embed, *options)
    found = one.rates()
    assert found is not None
    with load_head(trained.path, trained.target, "reference") as head:
        for passage in passages:
            piece = Stretch(passage, first_lesson(passage), first_lesson(passage) + n_lessons(passage))
            said = passage.top_ids[piece.begin + 1 :, 0]
            guesses = (head.token_map[each[0].argmax()] for each in engine_logits(head, piece))
            expected += [guess == best for guess, best in zip(guesses, said, strict=False)]
    assert found["all"][0] == pytest.approx(np.mean(expected), abs=0.02)  # of some 90 places, one
    assert found.keys() == {"all", "chat", "code"}
    assert all(rates[0] >= rates[1] for rates in found.values())


def test_gradients_are_those_of_finite_differences(trained: Trained) -> None:
    """Along random directions, the loss rises as the gradient says: nothing on the way is left out or counted twice.

    In half precision they bend little.
    """
    piece = Stretch(written_by(trained.target, TAPS, [80])[0], 38, 78)
    batch = jax.tree.map(jax.numpy.asarray, trained.packer(Size(210, 64, 32)).pack([piece], STARTS))
    network, weights = trained.network, trained.weights
    gradients = trained.gradients(network, [batch])
    loss, rng = jax.jit(lambda changed: network.loss(changed, network.output, batch)), np.random.default_rng(1)
    for name, value in weights.items():
        way = rng.standard_normal(value.shape).astype(np.float32)
        way /= np.linalg.norm(way)
        step = 0.02 * float(jax.numpy.linalg.norm(value)) / np.sqrt(value.size) + 1e-3
        there, back = (float(loss(weights | {name: value + sign * step * way})) for sign in (1, -1))
        along = float((gradients[name] * way).sum())
        assert (there - back) / (2 * step) == pytest.approx(along, rel=0.05, abs=2e-4), name
    exact, rounded = (
        flat(each)
        for each in (gradients, trained.gradients(HeadNetwork(trained.card, trained.output, half=True), [batch]))
    )
    assert 0 < np.linalg.norm(rounded - exact) < 0.05 * np.linalg.norm(exact)


def test_a_sample_of_the_output_rows_gives_nearly_the_same_gradients(trained: Trained) -> None:
    """Each unlikely row that was drawn stands for those that were not: what is left is noise of the draw."""
    piece = Stretch(written_by(trained.target, TAPS, [120], top_k=4)[0], 58, 118)
    found = []
    for n_candidates, n in ((0, 1), (200, 12)):
        packer = trained.packer(Size(210, 64, 32, n_candidates))
        batches = [packer.pack([piece], STARTS, np.random.default_rng(seed)) for seed in range(n)]
        assert all(len(batch.candidates) == (n_candidates or trained.card.n_out) for batch in batches)
        found.append(flat(trained.gradients(trained.network, batches)))
    whole, sampled = found
    assert np.linalg.norm(sampled - whole) < 0.1 * np.linalg.norm(whole)


# The trainer.

STEADY = TrainingSettings(size=Size(210, 64, 20), n_batches=2, learning_rate=3e-3, warm_up=1, final=1.0, half=False)
"""The rate of learning does not depend on the clock."""


def embedder(file: GGUFFile) -> Any:
    return lambda tokens: tensor_rows(file, "token_embd.weight", tokens)


def trainer(tiny: TinyFiles, checkpoint: Path, passages: list[Passage], n_out: int | None = None) -> Trainer:
    target = tiny.quick.target
    file = GGUFFile(target)
    output = tensor_rows(file, "output.weight", slice(n_out))
    card = new_card(file, fingerprint(target), Recipe(steps=2, d_ff=32), np.arange(len(output), dtype=np.int32))
    embed = embedder(file)

    def begin() -> Start:
        return start(file, card, embed, passages[1:], seed=0)

    return Trainer(card, begin, output, embed, passages[1:], passages[:1], checkpoint, STEADY)


def train_to(one: Trainer, step: int) -> None:
    one.train(1e9, lambda: None, lambda: one.step >= step)


def test_it_learns_and_goes_on_where_it_was(tiny: TinyFiles, tmp_path: Path) -> None:
    target = tiny.quick.target
    passages = written_by(target, TAPS, [60, 90, 50, 70])
    whole = trainer(tiny, tmp_path / "whole", passages)
    before = whole.weights
    train_to(whole, 16)
    with GGUFFile(target) as file:
        packer = Packer(whole.card.token_map, embedder(file), STEADY.size, 2)
        batch = jax.tree.map(jax.numpy.asarray, Reading(passages[1:], packer, 0).batch()[0])
    loss = jax.jit(lambda weights: whole.network.loss(weights, whole.network.output, batch))
    first, last = (float(loss(each)) for each in (before, whole.weights))
    assert last < 0.95 * first
    assert 16 * 2 * 40 < whole.tokens_seen <= 16 * 2 * 63

    for n in (7, 16):
        parts = trainer(tiny, tmp_path / "parts", passages)
        train_to(parts, n)
    assert parts.tokens_seen == whole.tokens_seen
    for name, value in whole.weights.items():
        np.testing.assert_array_equal(parts.weights[name], value, err_msg=name)


def test_a_stop_within_a_step_leaves_what_was_before_it(tiny: TinyFiles, tmp_path: Path) -> None:
    passages = written_by(tiny.quick.target, TAPS, [60, 90])
    one = trainer(tiny, tmp_path / "one", passages)
    asked = 0

    def stopping() -> bool:
        nonlocal asked
        asked += 1
        return asked > 12

    class Unready:
        def is_ready(self) -> bool:
            return False

    gradients = one.network.gradients
    one.network.gradients = lambda *batch: dict.fromkeys(gradients(*batch), Unready())  # type: ignore[method-assign, assignment, return-value, arg-type]
    one.train(1e9, lambda: None, stopping)
    before = trainer(tiny, tmp_path / "none", passages)
    again = trainer(tiny, tmp_path / "one", passages)
    assert again.step == 0
    for found in (one, again):
        for name, value in before.weights.items():
            np.testing.assert_array_equal(found.weights[name], value)
    for each in (again, before):
        train_to(each, 2)
    for name, value in before.weights.items():
        np.testing.assert_array_equal(again.weights[name], value)


def test_over_when_its_time_is_over(tiny: TinyFiles, tmp_path: Path) -> None:
    passages = written_by(tiny.quick.target, TAPS, [60, 90])
    one = trainer(tiny, tmp_path / "one", passages)
    one.train(0.05, lambda: None, lambda: False, test_every=1e9)
    curve = list(one.curve)
    assert len(curve) == 2  # at the beginning and at the end
    assert curve[0].tokens_seen == 0 < curve[1].tokens_seen == one.tokens_seen
    one.train(0.05, lambda: None, lambda: False)  # and again: there is nothing more to do
    assert one.curve == curve


def test_checkpoints_of_another_head_or_damaged_ones_are_refused(tiny: TinyFiles, tmp_path: Path) -> None:
    passages = written_by(tiny.quick.target, TAPS, [60, 90])
    path = tmp_path / "one"
    trainer(tiny, path, passages).save()
    with pytest.raises(CheckpointError, match="another head"):
        trainer(tiny, path, passages, n_out=100)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        trainer(tiny, path, passages)


# Lessons.


def reading(passages: list[Passage], size: Size, place: tuple[int, int] = (0, 0)) -> Reading:
    def embed(tokens: Any) -> Any:
        return np.repeat(tokens[:, None].astype(np.float32), passages[0].states.shape[2], axis=1)

    tokens = np.arange(300, dtype=np.int32)
    return Reading(passages, Packer(tokens, embed, size, steps=3), 3, place)


def test_every_lesson_comes_once_in_an_epoch(tiny: TinyFiles) -> None:
    passages = written_by(tiny.quick.target, TAPS, [40, 7, 150, 3, 90, 64])
    total, size = sum(map(n_lessons, passages)), Size(210, 50, 16)
    found, seen = reading(passages, size), Counter[tuple[int, ...]]()
    n = 0
    while n < total:
        batch, taught = found.batch()
        for row in batch.lessons[:taught]:
            # A lesson by what it knows and learns: the state, the next token, and what comes after it.
            state = batch.states[row].tobytes()
            seen[hash(state), int(batch.embeddings[row, 0]), int(batch.best[row])] += 1
        n += taught
        assert (batch.passage[batch.lessons[:taught]] >= 0).all()
        assert (batch.passage[batch.lessons[taught:]] == -1).all()
    assert n == total
    assert found.batch()[1] > 0
    assert found.place == (1, 1)
    wanted = Counter[tuple[int, ...]]()
    for passage in passages:
        for place in range(first_lesson(passage), len(passage) - 1):
            state = passage.states[place].tobytes()
            wanted[hash(state), int(passage.tokens[place + 1]), int(passage.top_ids[place + 1, 0])] += 1
    assert seen == wanted


def test_reading_goes_on_anywhere(tiny: TinyFiles) -> None:
    passages = written_by(tiny.quick.target, TAPS, [40, 7, 150, 90])
    size = Size(210, 50, 16)
    whole = reading(passages, size)
    for _ in range(11):
        place = whole.place
        expected, n = whole.batch()
        found, again = reading(passages, size, place).batch()
        assert n == again
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)


# Where it begins.


def linear_passages(n: int, lengths: Sequence[int], seed: int) -> tuple[list[Passage], Any, Any]:
    """Texts of a target whose last state is a linear function of the one before and of the token between."""
    rng = np.random.default_rng(seed)
    n_vocab, embeddings = 60, 0.05 * np.random.default_rng(0).standard_normal((60, n))
    norm = np.random.default_rng(1).uniform(0.5, 2, n)
    forward = np.random.default_rng(2).standard_normal((n, n)) / n**0.5
    inward, passages = np.random.default_rng(3).standard_normal((n, n)) * 15 / n**0.5, []
    for length in lengths:
        tokens, u = rng.integers(0, n_vocab, length + 1), [rng.standard_normal(n)]
        for token in tokens[1:-1]:
            u.append(0.6 * forward @ u[-1] + inward @ embeddings[token] + 0.3)
        states = np.stack([100.0 * np.roll(u, 1, axis=1), np.array(u) * norm], axis=1)
        states[0] *= 50  # as the first token's are
        ids, logprobs = np.zeros((length, 1), np.int32), np.zeros((length, 1), np.float16)
        passages.append(
            Passage("p", "own", 2, False, tokens.astype(np.int32), states.astype(np.float16), ids, logprobs)
        )
    return passages, embeddings.astype(np.float32), norm.astype(np.float32)


def test_it_begins_as_the_best_linear_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are the target's next states before the last norm's weight, and its chain goes on from its own."""
    n = 32
    monkeypatch.setattr(start_module, "RIDGE", 1e-3)
    target = write_llama(tmp_path / "target.gguf", Shape(n_layer=3, n_embd=n, n_head=2, n_head_kv=1, n_ff=64))
    passages, embeddings, norm = linear_passages(n, [90, 200, 150, 120], 4)
    ids = np.arange(60, dtype=np.int32)
    with GGUFFile(target) as file:
        card = replace(new_card(file, "f", Recipe(steps=2, d_ff=32), ids), taps=("layer:1", "norm"))
        monkeypatch.setattr(start_module, "tensor_rows", lambda file, name, rows: norm[None])
        begun = start(file, card, lambda some: embeddings[some], passages, 0)
    w = begun.weights
    (passage,) = linear_passages(n, [80], 5)[0]
    places = np.arange(4, 70)
    states = passage.states[places].reshape(len(places), -1).astype(np.float32)

    def embedded(at: Any) -> Any:
        return embeddings[passage.tokens[at]] @ w["head.embed.weight"].T + w["head.embed.bias"]

    rows = states @ w["head.fc.weight"].T + embedded(places + 1)
    chained = rows @ w["head.chain.weight"].T + embedded(places + 2)
    for guess, ahead in ((rows, 1), (chained, 2)):
        true = passage.states[places + ahead, 1] / norm
        assert ((guess - true) ** 2).mean() < 1e-3 * (true**2).mean()
    assert not w["blk.0.attn_output.weight"].any()
    assert not w["blk.0.ffn_down.weight"].any()
    assert begun.sizes["head.fc.weight"].shape == (2 * n,)
