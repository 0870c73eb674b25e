"""The network that is trained computes what an engine computes with the head file made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.heads.card import Kind
from localspec.heads.file import head_weights
from localspec.heads.trained import load_head
from localspec.model_files.gguf import GGUFFile, tensor_rows
from tests.conftest import TinyFiles
from tests.support.heads import write_random_head
from tests.support.lessons import written_by

jax = pytest.importorskip("jax", reason="the trainer needs jax: pip install 'localspec[distill]'")

from localspec.heads.training.export import check, engine_logits  # noqa: E402
from localspec.heads.training.lessons import Packer, Size, Stretch, first_lesson, n_lessons  # noqa: E402
from localspec.heads.training.network import HeadNetwork  # noqa: E402

TAPS = ("layer:0", "norm")


class Trained:
    """A head file for the quick tiny target, and the network that it would be made of."""

    def __init__(self, path: Path, target: Path, *, half: bool = False) -> None:
        self.path, self.target = path, target
        with GGUFFile(path) as file, load_head(path, target, "reference") as head:
            self.card = head.card
            self.weights = {name: jax.numpy.array(head_weights(file, name)) for name in file.tensors}
            with GGUFFile(head.model.path) as engine_file:  # whose output rows are rounded
                output = tensor_rows(engine_file, "token_embd.weight", slice(0, self.card.n_out))
        self._file = GGUFFile(target)
        self.network = HeadNetwork(self.card, output, half=half)

    def embed(self, tokens: Any) -> Any:
        return tensor_rows(self._file, "token_embd.weight", tokens)


@pytest.mark.parametrize(
    ("kind", "taps", "biases"),
    [("chained", TAPS, False), ("chained", ("norm",), True), ("parallel", TAPS, False), ("medusa", ("norm",), False)],
)
def test_every_step_guesses_as_the_engine_does(
    tiny: TinyFiles, tmp_path: Path, kind: Kind, taps: tuple[str, ...], biases: bool
) -> None:
    """True rows, and each chain's own rows and no other's, at the same positions: what the engine does one by one, with
    rows taken back after each chain, the network does at once, whatever stands beside them in the batch."""
    target = tiny.quick.target
    path = write_random_head(target, tmp_path / "head.gguf", kind, taps, 200, biases=biases, type_name="F32", steps=3)
    trained = Trained(path, target)
    one, other = written_by(target, taps, [90, 40])
    pieces = [Stretch(other, 18, 33), Stretch(one, 60, 89), Stretch(other, 30, 39)]
    packer = Packer(trained.card.token_map, trained.embed, Size(256, 64, 60), trained.card.steps)
    n = sum(piece.end - piece.begin for piece in pieces)
    batch = packer.pack(pieces, np.arange(n, dtype=np.int32))
    guessed, true = (np.asarray(rows)[:, :n] for rows in trained.network.guesses(trained.weights, batch))
    found = [
        np.asarray(states[:n] @ trained.network.output.T) for states in trained.network.steps(trained.weights, batch)
    ]
    with load_head(path, target, "reference") as head:
        expected = np.array([each for piece in pieces for each in engine_logits(head, piece, 3)]).swapaxes(0, 1)
    real = true != -2
    assert real.sum() > 2 * n
    np.testing.assert_allclose(np.array(found)[real], expected[real], atol=1e-3)  # float32 against float64
    assert (guessed == expected.argmax(2))[real].mean() > 0.99


def test_finished_heads_are_checked_place_by_place(tiny: TinyFiles, tmp_path: Path) -> None:
    target = tiny.quick.target
    trained = Trained(
        write_random_head(target, tmp_path / "head.gguf", "chained", TAPS, type_name="F32", steps=3), target
    )
    passages = written_by(target, TAPS, [80, 50, 60])
    with load_head(trained.path, target, "reference") as head:
        found = check(head, trained.network, trained.weights, trained.embed, passages)
        wrong = {name: value[::-1] for name, value in trained.weights.items()}
        assert min(found.agreement) > 0.99
        assert max(check(head, trained.network, wrong, trained.embed, passages).agreement) < 0.9
        # A category with few texts is not left out where many are chosen from.
        few = check(head, trained.network, trained.weights, trained.embed, [*passages[:1] * 3, passages[1]], 2)
        assert {"chat", "code"} <= set(few.acceptance)
        expected = []
        for passage in passages:
            piece = Stretch(passage, first_lesson(passage), first_lesson(passage) + n_lessons(passage))
            said = passage.top_ids[piece.begin + 1 :, 0]
            expected += [
                head.token_map[each[0].argmax()] == best
                for each, best in zip(engine_logits(head, piece, 3), said, strict=False)
            ]
    assert found.acceptance["all"][0] == pytest.approx(np.mean(expected))
    assert all(found.acceptance[name][0] >= found.acceptance[name][1] for name in ("all", "chat", "code"))


def test_half_precision_bends_gradients_little(tiny: TinyFiles, tmp_path: Path) -> None:
    target = tiny.quick.target
    path = write_random_head(target, tmp_path / "head.gguf", "chained", TAPS, type_name="F32", steps=3)
    piece = Stretch(written_by(target, TAPS, [80])[0], 38, 78)
    found = []
    for half in (False, True):
        trained = Trained(path, target, half=half)
        packer = Packer(trained.card.token_map, trained.embed, Size(210, 64, 32), trained.card.steps)
        batch = packer.pack([piece], np.arange(0, 40, 2, dtype=np.int32))
        zero = {name: jax.numpy.zeros_like(value) for name, value in trained.weights.items()}
        gradients, _ = trained.network.gradients(trained.weights, zero, batch)
        found.append(np.concatenate([np.asarray(gradients[name]).ravel() for name in sorted(gradients)]))
    exact, rounded = found
    assert np.linalg.norm(exact) > 0
    assert np.linalg.norm(rounded - exact) < 0.05 * np.linalg.norm(exact)


def test_gradients_are_those_of_finite_differences(tiny: TinyFiles, tmp_path: Path) -> None:
    """Along random directions, the loss rises as the gradient says: nothing on the way is left out or counted twice."""
    target = tiny.quick.target
    trained = Trained(
        write_random_head(target, tmp_path / "head.gguf", "chained", TAPS, 200, type_name="F32", steps=3), target
    )
    packer = Packer(trained.card.token_map, trained.embed, Size(210, 64, 32), trained.card.steps)
    batch = packer.pack([Stretch(written_by(target, TAPS, [80])[0], 38, 78)], np.arange(0, 40, 2, dtype=np.int32))
    network, weights, batch = trained.network, trained.weights, jax.tree.map(jax.numpy.asarray, batch)
    zero = {name: jax.numpy.zeros_like(value) for name, value in weights.items()}
    gradients, _ = network.gradients(weights, zero, batch)
    loss, rng = jax.jit(lambda changed: network.loss(changed, network.output, batch)[0]), np.random.default_rng(1)
    for name, value in weights.items():
        way = rng.standard_normal(value.shape).astype(np.float32)
        way /= np.linalg.norm(way)
        step = 0.02 * float(jax.numpy.linalg.norm(value)) / np.sqrt(value.size) + 1e-3
        there, back = (float(loss(weights | {name: value + sign * step * way})) for sign in (1, -1))
        along = float((gradients[name] * way).sum())
        assert (there - back) / (2 * step) == pytest.approx(along, rel=0.05, abs=2e-4), name


def test_a_sample_of_the_output_rows_gives_nearly_the_same_gradients(tiny: TinyFiles, tmp_path: Path) -> None:
    """Each unlikely row that was drawn stands for those that were not: what is left is noise of the draw."""
    target = tiny.quick.target
    trained = Trained(
        write_random_head(target, tmp_path / "head.gguf", "chained", TAPS, type_name="F32", steps=2), target
    )
    piece = Stretch(written_by(target, TAPS, [120], top_k=4)[0], 58, 118)
    found = []
    for n_candidates, n in ((0, 1), (200, 12)):
        size = Size(210, 64, 32, n_candidates)
        packer = Packer(trained.card.token_map, trained.embed, size, trained.card.steps)
        sums = {name: jax.numpy.zeros_like(value) for name, value in trained.weights.items()}
        for seed in range(n):
            batch = packer.pack([piece], np.arange(0, 40, 2, dtype=np.int32), np.random.default_rng(seed))
            assert len(batch.candidates) == (n_candidates or trained.card.n_out)
            sums, _ = trained.network.gradients(trained.weights, sums, batch)
        found.append(np.concatenate([np.asarray(sums[name]).ravel() / n for name in sorted(sums)]))
    whole, sampled = found
    assert np.linalg.norm(sampled - whole) < 0.1 * np.linalg.norm(whole)
