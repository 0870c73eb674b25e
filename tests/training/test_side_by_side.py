"""As many texts are written side by side as memory and time allow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localspec.backends.base import Model, Piece
from localspec.heads.training import head_maker as head_maker_module
from localspec.heads.training.head_maker import open_batch, sequence_bytes
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.kv_memory import kv_shape
from tests.conftest import Backend, TinyFiles


@pytest.fixture
def seconds_per_token() -> list[float]:
    return [0.0]


@pytest.fixture
def model(
    reference: Backend, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, seconds_per_token: list[float]
) -> Iterator[Model]:
    """On a machine where a pass takes a second for the first sequence and a tenth more for each other one.

    ``seconds_per_token`` is what it takes besides for each token that is held, by any of them.
    """
    seconds = 0.0

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return seconds

    with reference.load(tiny.quick.target) as loaded:
        new_batch = loaded.new_batch

        def slow(*given: int, **options: tuple[str, ...]) -> object:
            batch = new_batch(*given, **options)
            decode = batch.decode

            def timed(pieces: list[Piece]) -> object:
                nonlocal seconds
                held = sum(batch[i].n_past for i in range(batch.n_sequences))
                seconds += 1 + 0.1 * (len(pieces) - 1) + seconds_per_token[0] * len(pieces) * held
                return decode(pieces)

            batch.decode = timed  # type: ignore[method-assign, assignment]
            return batch

        monkeypatch.setattr(head_maker_module, "time", Clock)
        monkeypatch.setattr(loaded, "new_batch", slow)
        yield loaded


@pytest.mark.parametrize(
    ("sequences", "patience", "width", "rate"),
    [
        (100, 1e9, 24, 24 / 3.3),
        (9, 1e9, 8, 8 / 1.7),
        (100, 32 * 1.35, 4, 4 / 1.3),  # four take 1.3 s a token, 32 tokens of each
        (0, 0.0, 1, 1.0),
    ],
)
def test_the_width_is_what_memory_and_time_allow(
    model: Model, sequences: int, patience: float, width: int, rate: float
) -> None:
    room = sequences * sequence_bytes(model, 64)
    batch, measured = open_batch(model, 64, ("norm",), room, patience)
    assert batch.n_sequences == width
    assert measured == pytest.approx(rate)
    assert all(batch[i].n_past == 0 for i in range(width))
    batch.close()


def test_the_width_is_measured_with_sequences_that_hold_something(model: Model, seconds_per_token: list[float]) -> None:
    seconds_per_token[0] = 0.0005  # each row looks at what all of them hold
    batch, _ = open_batch(model, 64, ("norm",), 100 * sequence_bytes(model, 64), 1e9)
    assert batch.n_sequences == 8
    batch.close()


def test_a_sequences_memory_is_what_its_file_says(model: Model) -> None:
    with GGUFFile(model.path) as file:
        assert sequence_bytes(model, 64) == kv_shape(file).bytes(64, "f64") > 0
