"""A head in training: it learns, it can be stopped at any moment, and goes on as if it had not been."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.heads.card import Kind
from localspec.heads.training.shards import Passage
from localspec.model_files.fingerprint import fingerprint
from localspec.model_files.gguf import GGUFFile, tensor_rows
from tests.conftest import TinyFiles
from tests.support.ggufs import Shape, write_llama
from tests.support.lessons import written_by

pytest.importorskip("jax", reason="the trainer needs jax: pip install 'localspec[distill]'")

from localspec.heads.training import start as start_module
from localspec.heads.training.lessons import Cursor, Packer, Reading, Size, first_lesson, n_lessons
from localspec.heads.training.run_folder import Recipe
from localspec.heads.training.start import Start, neighbours, new_card, start
from localspec.heads.training.trainer import CheckpointError, Trainer, TrainingProgress, TrainingSettings

TAPS = ("layer:0", "norm")
STEADY = TrainingSettings(size=Size(210, 64, 20), n_batches=2, learning_rate=3e-3, warm_up=1, final=1.0, half=False)
"""The rate of learning does not depend on the clock."""


def trainer(target: Path, checkpoint: Path, passages: list[Passage], kind: Kind = "chained") -> Trainer:
    file = GGUFFile(target)
    output = tensor_rows(file, "output.weight", slice(None))
    card = new_card(file, fingerprint(target), Recipe(kind, 2, d_ff=32), np.arange(len(output), dtype=np.int32))

    def embed(some: Any) -> Any:
        return tensor_rows(file, "token_embd.weight", some)

    def begin() -> Start:
        return start(file, card, output, embed, passages[1:], seed=0)

    return Trainer(card, begin, output, embed, passages[1:], passages[:1], checkpoint, STEADY)


class Stop:
    """Says stop from a given step of the optimiser on."""

    def __init__(self, step: int) -> None:
        self.step, self.reports = step, list[TrainingProgress]()

    def report(self, progress: TrainingProgress) -> None:
        self.reports.append(progress)

    def __call__(self) -> bool:
        return bool(self.reports) and self.reports[-1].step >= self.step


@pytest.mark.parametrize("kind", ["chained", "medusa"])  # test_network.py has what differs
def test_it_learns_and_goes_on_where_it_was(tiny: TinyFiles, tmp_path: Path, kind: Kind) -> None:
    taps = ("norm",) if kind == "medusa" else TAPS
    passages = written_by(tiny.quick.target, taps, [60, 90, 50, 70])
    whole, stop = trainer(tiny.quick.target, tmp_path / "whole", passages, kind), Stop(16)
    assert not whole.train(1e9, stop.report, stop)
    first, last = (np.array(stop.reports[i].losses) for i in (1, -1))
    assert last.mean() < 0.95 * first.mean()
    assert 16 * 2 * 40 < stop.reports[-1].tokens_seen <= 16 * 2 * 63

    for n in (7, 16):
        parts, stop = trainer(tiny.quick.target, tmp_path / "parts", passages, kind), Stop(n)
        assert not parts.train(1e9, stop.report, stop)
    assert parts.progress.losses == whole.progress.losses
    for name, value in whole.weights.items():
        np.testing.assert_array_equal(parts.weights[name], value, err_msg=name)


def test_a_stop_within_a_step_leaves_what_was_before_it(tiny: TinyFiles, tmp_path: Path) -> None:
    passages = written_by(tiny.quick.target, TAPS, [60, 90])
    one = trainer(tiny.quick.target, tmp_path / "one", passages)
    asked = 0

    def stopping() -> bool:
        nonlocal asked
        asked += 1
        return asked > 12

    class Unready:
        def is_ready(self) -> bool:
            return False

    gradients = one.network.gradients
    one.network.gradients = lambda *batch: (gradients(*batch)[0], Unready())  # type: ignore[method-assign, assignment, return-value]
    assert not one.train(1e9, lambda progress: None, stopping)
    before = trainer(tiny.quick.target, tmp_path / "none", passages)
    again = trainer(tiny.quick.target, tmp_path / "one", passages)
    assert again.progress.step == 0
    for found in (one, again):
        for name, value in before.weights.items():
            np.testing.assert_array_equal(found.weights[name], value)
    for each in (again, before):
        stop = Stop(2)
        each.train(1e9, stop.report, stop)
    assert again.progress.losses == before.progress.losses


def test_over_when_its_time_is_over(tiny: TinyFiles, tmp_path: Path) -> None:
    passages = written_by(tiny.quick.target, TAPS, [60, 90])
    one, stop = trainer(tiny.quick.target, tmp_path / "one", passages), Stop(10**9)
    assert one.train(0.05, stop.report, stop, test_every=1e9)
    curve = one.progress.curve
    assert len(curve) == 2  # at the beginning and at the end
    assert curve[0].tokens_seen == 0 < curve[1].tokens_seen == one.progress.tokens_seen
    assert one.train(0.05, stop.report, stop)  # and again: there is nothing more to do
    assert one.progress.curve == curve


def test_checkpoints_of_another_head_or_damaged_ones_are_refused(tiny: TinyFiles, tmp_path: Path) -> None:
    passages = written_by(tiny.quick.target, TAPS, [60, 90])
    path = tmp_path / "one"
    trainer(tiny.quick.target, path, passages).save()
    with pytest.raises(CheckpointError, match="another head"):
        trainer(tiny.quick.target, path, written_by(tiny.quick.target, ("norm",), [60, 90]), "medusa")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        trainer(tiny.quick.target, path, passages)


# Lessons.


def reading(passages: list[Passage], cursor: Cursor, size: Size) -> Reading:
    def embed(tokens: Any) -> Any:
        return np.repeat(tokens[:, None].astype(np.float32), passages[0].states.shape[2], axis=1)

    tokens = np.arange(300, dtype=np.int32)
    return Reading(passages, Packer(tokens, embed, size, steps=3), cursor)


def test_every_lesson_comes_once_in_an_epoch(tiny: TinyFiles) -> None:
    passages = written_by(tiny.quick.target, TAPS, [40, 7, 150, 3, 90, 64])
    total, size = sum(map(n_lessons, passages)), Size(210, 50, 16)
    found, seen = reading(passages, Cursor(seed=3), size), Counter[tuple[int, ...]]()
    n = 0
    while found.cursor.epoch == 0:
        batch, taught = found.batch()
        for row in batch.lessons[:taught]:
            # A lesson by what it knows and learns: the state, the next token, and what comes after it.
            state = batch.states[row].tobytes()
            seen[hash(state), int(batch.embeddings[row, 0]), int(batch.best[row])] += 1
        n += taught
        assert (batch.passage[batch.lessons[:taught]] >= 0).all()
        assert (batch.passage[batch.lessons[taught:]] == -1).all()
    assert n >= total
    wanted = Counter[tuple[int, ...]]()
    for passage in passages:
        for place in range(first_lesson(passage), len(passage) - 1):
            state = passage.states[place].tobytes()
            wanted[hash(state), int(passage.tokens[place + 1]), int(passage.top_ids[place + 1, 0])] += 1
    assert not wanted - seen
    assert max((seen - wanted).values(), default=0) <= 1  # the last batch reaches into the next epoch


def test_reading_goes_on_anywhere(tiny: TinyFiles) -> None:
    passages = written_by(tiny.quick.target, TAPS, [40, 7, 150, 90])
    size = Size(210, 50, 16)
    whole = reading(passages, Cursor(seed=3), size)
    for _ in range(11):
        cursor = replace(whole.cursor)
        expected, n = whole.batch()
        found, again = reading(passages, cursor, size).batch()
        assert n == again
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)


# Where it begins.


def test_queries_in_pairs_half_a_head_apart_score_as_neighbours_do() -> None:
    rng = np.random.default_rng(0)
    d_head, position = 8, np.array([3.0, 11.0])
    weights = rng.standard_normal((2, 2 * d_head, 5))  # of queries and of keys
    inputs = rng.standard_normal((2, 5))
    turns = np.exp(1j * position[:, None] * 100.0 ** (-np.arange(0, d_head, 2) / d_head))

    def score(apart: bool) -> Any:
        turned = []
        for matrix, x, turn in zip(weights, inputs, turns, strict=True):
            heads = ((matrix if apart else neighbours(matrix, d_head)) @ x).reshape(2, d_head)
            halves = (heads[:, :4], heads[:, 4:]) if apart else (heads[:, ::2], heads[:, 1::2])
            turned.append((halves[0] + 1j * halves[1]) * turn)
        return (turned[0] * turned[1].conj()).real.sum(1)

    np.testing.assert_allclose(score(True), score(False))


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
            Passage("p", "own", 2, 0.0, False, tokens.astype(np.int32), states.astype(np.float16), ids, logprobs)
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
        monkeypatch.setattr(start_module, "_whole", lambda file, name: norm)
        monkeypatch.setattr(start_module, "_last_block", lambda file, card: None)
        begun = start(file, card, np.eye(60, n, dtype=np.float32), lambda some: embeddings[some], passages, 0)
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
