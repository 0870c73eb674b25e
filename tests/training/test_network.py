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

from localspec.heads.training.lessons import NOWHERE, Packer, Size, Stretch, first_lesson, n_lessons  # noqa: E402
from localspec.heads.training.network import HeadNetwork  # noqa: E402
from localspec.heads.training.trainer import check, engine_logits  # noqa: E402

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
        """Their mean."""
        sums = {name: jax.numpy.zeros_like(value) for name, value in self.weights.items()}
        for batch in batches:
            sums, _ = network.gradients(self.weights, sums, batch)
        return {name: np.asarray(value) / len(batches) for name, value in sums.items()}


def flat(gradients: dict[str, Any]) -> Any:
    return np.concatenate([gradients[name].ravel() for name in sorted(gradients)])


@pytest.fixture
def trained(tiny: TinyFiles, tmp_path: Path) -> Trained:
    """A chained head that guesses two tokens."""
    target = tiny.quick.target
    path = write_random_head(target, tmp_path / "head.gguf", "chained", TAPS, type_name="F32", steps=2)
    return Trained(path, target)


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
    n = sum(piece.end - piece.begin for piece in pieces)
    batch = trained.packer(Size(256, 64, 60)).pack(pieces, np.arange(n, dtype=np.int32))
    guessed, true = (np.asarray(rows)[:, :n] for rows in trained.network.guesses(trained.weights, batch))
    steps = jax.jit(trained.network.steps)(trained.weights, batch)
    found = np.array([np.asarray(states[:n]) @ trained.output.T for states in steps])
    with load_head(path, target, "reference") as head:
        expected = np.array([each for piece in pieces for each in engine_logits(head, piece, 3)]).swapaxes(0, 1)
    real = true != NOWHERE
    assert real.sum() > 2 * n
    np.testing.assert_allclose(found[real], expected[real], atol=1e-3)  # float32 against float64
    assert (guessed == expected.argmax(2))[real].mean() > 0.99


def test_finished_heads_are_checked_place_by_place(trained: Trained) -> None:
    passages = written_by(trained.target, TAPS, [80, 50, 60])
    with load_head(trained.path, trained.target, "reference") as head:
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
            guesses = (head.token_map[each[0].argmax()] for each in engine_logits(head, piece, 2))
            expected += [guess == best for guess, best in zip(guesses, said, strict=False)]
    assert found.acceptance["all"][0] == pytest.approx(np.mean(expected))
    assert all(found.acceptance[name][0] >= found.acceptance[name][1] for name in ("all", "chat", "code"))


def test_gradients_are_those_of_finite_differences(trained: Trained) -> None:
    """Along random directions, the loss rises as the gradient says: nothing on the way is left out or counted twice.

    In half precision they bend little.
    """
    piece = Stretch(written_by(trained.target, TAPS, [80])[0], 38, 78)
    batch = jax.tree.map(jax.numpy.asarray, trained.packer(Size(210, 64, 32)).pack([piece], STARTS))
    network, weights = trained.network, trained.weights
    gradients = trained.gradients(network, [batch])
    loss, rng = jax.jit(lambda changed: network.loss(changed, network.output, batch)[0]), np.random.default_rng(1)
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
