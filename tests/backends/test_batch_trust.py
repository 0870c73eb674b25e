"""What an engine gets wrong about several sequences in one pass is found before an answer is made so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.backends import trial
from localspec.backends import trust as trust_module
from localspec.backends.base import Forward, Model, Piece
from localspec.backends.llama.batch import LlamaSequences
from localspec.backends.llama.passes import PassRows
from localspec.backends.trust import check_batch, ensure_batches
from localspec.errors import EngineMismatch, UnsupportedModel
from tests.conftest import Backend, TinyFiles, open_backend


@pytest.fixture(params=["llama-cpp", "ik-llama"])
def model(request: pytest.FixtureRequest, tiny: TinyFiles) -> Iterator[Model]:
    with open_backend(request.param).load(tiny.bpe, n_threads=1) as model:
        yield model


Patch = Callable[[pytest.MonkeyPatch], None]


def rows_of_others(patch: pytest.MonkeyPatch) -> None:
    decode = LlamaSequences._decode

    def swapped(self: Any, pieces: Any) -> Any:
        found = decode(self, pieces)
        return found[::-1] if len({len(piece.tokens) for piece in pieces}) == 1 else found

    patch.setattr(LlamaSequences, "_decode", swapped)


def wrong_if(n: Callable[[Any], bool]) -> Patch:
    def patched(patch: pytest.MonkeyPatch) -> None:
        decode = LlamaSequences._decode

        def wrong(self: Any, pieces: Any) -> Any:
            found = decode(self, pieces)
            return [Forward(np.roll(each.logits, 7, axis=1)) for each in found] if n(pieces) else found

        patch.setattr(LlamaSequences, "_decode", wrong)

    return patched


def a_prefix_too_short(patch: pytest.MonkeyPatch) -> None:
    """The last of its tokens is one that the other sequence does not hold."""
    copy = LlamaSequences._copy_prefix

    def short(self: Any, source: int, target: int, n: int) -> None:
        copy(self, source, target, n - 8)
        self._run(PassRows.behind(n - 8, [7] * 8, "none", target))

    patch.setattr(LlamaSequences, "_copy_prefix", short)


def tokens_taken_back_that_stay(patch: pytest.MonkeyPatch) -> None:
    """Rejected draft tokens are still seen, by the ones that come in their place and after."""
    truncate = LlamaSequences._truncate

    def kept(self: Any, sequence: int, n: int) -> None:
        tokens = self._sequences[sequence].tokens[n:]
        truncate(self, sequence, n)
        if n and tokens:  # as if they had been moved to the front
            self._binding.remove(self._handle, 0, sequence)
            again = [*tokens, *self._sequences[sequence].tokens[: n - len(tokens)]]
            self._run(PassRows.behind(0, again, "none", sequence))

    patch.setattr(LlamaSequences, "_truncate", kept)


@pytest.mark.parametrize(
    "defect",
    [
        rows_of_others,
        wrong_if(lambda pieces: len(pieces) == 2),
        wrong_if(lambda pieces: any(len(piece.tokens) == 5 for piece in pieces)),
        wrong_if(lambda pieces: sum(len(piece.tokens) for piece in pieces) >= 32),
        a_prefix_too_short,
        tokens_taken_back_that_stay,
    ],
)
def test_defects_are_found(model: Model, defect: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = check_batch(model)
    assert sound.holds
    assert sound.mean_kl < 0.03
    defect(monkeypatch)
    assert not check_batch(model).holds


def test_a_file_is_checked_once(model: Model, isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[Model] = []

    def counted(checked: Model) -> Any:
        checks.append(checked)
        return check_batch(checked)

    monkeypatch.setattr(trust_module, "check_batch", counted)
    ensure_batches(model)
    ensure_batches(model)
    assert checks == [model]


def test_a_verdict_against_it_stays(model: Model, isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        rows_of_others(patch)
        with pytest.raises(
            EngineMismatch, match=r"different results for batched conversations of .* \(KL .*; answer one at a time"
        ):
            ensure_batches(model)
    with pytest.raises(EngineMismatch):
        ensure_batches(model)


def test_what_is_computed_in_turns_needs_no_check(
    reference: Backend, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust_module, "check_batch", None)
    with reference.load(tiny.quick.target) as model:
        ensure_batches(model)
    with open_backend("llama-cpp").load(tiny.hybrid, n_threads=1) as model:
        ensure_batches(model)


def test_an_unfamiliar_file_is_tried_elsewhere_first(
    isolated_home: Path, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and only when several sequences are asked for; what dies there is refused here."""
    tried: list[bool] = []
    run = trial._run

    def counted(path: Path, backend: str, kv_type: str, n_threads: int, progress: Any, several: bool) -> int:
        tried.append(several)
        return run(path, backend, kv_type, n_threads, progress, several)

    monkeypatch.setattr(trial, "_run", counted)
    load = open_backend("ik-llama").load
    for _ in range(2):
        with load(tiny.sliding, n_threads=1) as model:
            assert tried in ([False], [False, True])
            with model.new_batch(2, 64) as batch:
                batch.decode([Piece(0, [7, 8]), Piece(1, [7])])
    assert tried == [False, True]
    monkeypatch.setattr(trial, "_run", lambda *given: -6 if given[-1] else 0)
    with load(tiny.sliding, n_threads=2) as model:
        model.survives_several()  # remembered
    monkeypatch.setattr(trial, "fingerprint", lambda path: "another file")
    with load(tiny.sliding, n_threads=1) as model, pytest.raises(UnsupportedModel, match="several sequences of this"):
        model.new_batch(2, 64)


@pytest.mark.real
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "gemma3-270m"])
@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama"])
def test_real_models_are_right_side_by_side(engine: str, name: str, real_model: Callable[[str], Path]) -> None:
    with open_backend(engine).load(real_model(name)) as model:
        assert check_batch(model).mean_kl < 0.1
