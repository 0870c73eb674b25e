"""The check that an engine computes a file rightly: wrong kernels never reach an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, EngineMismatch, SamplingParams, backends
from localspec.backends import ik_llama, llama_cpp, repack, trust
from localspec.backends.base import Forward
from localspec.gguf_file import GGUFFile
from tests.conftest import TinyFiles, open_backend


@pytest.fixture
def ik() -> None:
    open_backend("ik-llama")


def test_a_sound_file_passes_on_every_engine(fast_backend: Any, tiny: TinyFiles) -> None:
    with fast_backend.load(tiny.bpe) as model:
        assert trust.check_model(model).holds


def test_a_defective_batch_is_found(fast_backend: Any, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of wide passes that belong to the wrong token are far outside the noise."""
    with fast_backend.load(tiny.bpe) as model:
        kind = type(model.new_context(8))
        original = kind._decode

        def shifted(self: Any, tokens: Any, logits: Any) -> Any:
            forward = original(self, tokens, logits)
            if len(tokens) > 8:
                return Forward(np.roll(forward.logits, 1, axis=0))
            return forward

        monkeypatch.setattr(kind, "_decode", shifted)
        assert not trust.check_model(model).holds


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8, 40])
def test_a_defect_of_one_width_is_found(
    fast_backend: Any, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Kernels are chosen by width, so each that the check looks at is looked at for itself."""
    with fast_backend.load(tiny.bpe, n_threads=1) as model:
        kind = type(model.new_context(8))
        original = kind._decode

        def defective(self: Any, tokens: Any, logits: Any) -> Any:
            forward = original(self, tokens, logits)
            return Forward(np.roll(forward.logits, 7, axis=1)) if len(tokens) == width else forward

        monkeypatch.setattr(kind, "_decode", defective)
        assert not trust.check_model(model).holds


def test_a_doubt_is_settled_by_more_passes(fast_backend: Any, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    with fast_backend.load(tiny.bpe, n_threads=1) as model:
        kind = type(model.new_context(8))
        original = kind._decode

        def counted(self: Any, tokens: Any, logits: Any) -> Any:
            passes.append(len(tokens))
            return original(self, tokens, logits)

        monkeypatch.setattr(kind, "_decode", counted)
        assert trust.check_model(model).holds
        few = len(passes)
        monkeypatch.setattr(trust, "DOUBTFUL_KL", -1.0)
        assert trust.check_model(model).holds
    assert few < 25
    assert len(passes) > 2 * few + 20


@pytest.mark.usefixtures("ik")
def test_a_file_that_ik_llama_computes_wrongly_is_repacked_once(tiny: TinyFiles, isolated_home: Path) -> None:
    with ik_llama.load(tiny.trap) as wrong:
        assert not trust.check_model(wrong).holds
    said: list[str] = []
    warned: list[str] = []
    with backends.load(tiny.trap, "ik-llama", say=said.append, warn=warned.append) as model:
        assert model.path != tiny.trap
        assert trust.check_model(model).holds
        repacked = model.path
    assert any("repacking" in line for line in said)
    assert any("wrongly" in line for line in warned)
    with GGUFFile(repacked) as copy, GGUFFile(tiny.trap) as original:
        assert copy.metadata[repack.MARK] == trust.fingerprint(tiny.trap)
        assert set(copy.tensors) == set(original.tensors)
        for key, value in original.metadata.items():
            copied = copy.metadata[key]
            assert value == copied if isinstance(value, str | int | float) else list(value) == list(copied), key
    stamp = repacked.stat().st_mtime_ns
    said.clear()
    with backends.load(tiny.trap, "ik-llama", say=said.append) as again:
        assert again.path == repacked
    assert repacked.stat().st_mtime_ns == stamp
    assert not any("checking" in line or "repacking" in line for line in said)


@pytest.mark.usefixtures("ik")
def test_the_repacked_copy_says_what_the_file_says(tiny: TinyFiles) -> None:
    open_backend("llama-cpp")
    with llama_cpp.load(tiny.trap, n_gpu_layers=0) as truth, backends.load(tiny.trap, "ik-llama") as copy:
        found = trust.compare_models(truth, copy)
    assert found.mean_kl < 0.01


@pytest.mark.usefixtures("ik")
def test_the_engine_that_is_right_is_not_blamed_for_the_other(tiny: TinyFiles) -> None:
    open_backend("llama-cpp")
    with backends.load(tiny.trap, "llama-cpp") as model:
        assert model.path == tiny.trap


@pytest.mark.usefixtures("ik")
def test_auto_never_answers_with_wrong_kernels(tiny: TinyFiles) -> None:
    with LLM(tiny.trap, draft=None, n_ctx=256) as llm, backends.load(tiny.trap, "reference") as truth:
        text = "the quick brown fox jumps over the lazy dog " * 3
        reply = llm.generate(text, SamplingParams(max_tokens=1))
        with truth.new_context(256) as context:
            row = context.decode(truth.tokenize(text, add_special=True), "last").logits[0]
        assert row[reply.token_ids[0]] >= row.max() - 0.5


@pytest.mark.usefixtures("ik")
def test_where_no_copy_helps_the_engine_is_refused(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "copies", lambda *args: iter(()))
    with pytest.raises(EngineMismatch, match=r"computes .* wrongly"):
        backends.load(tiny.trap, "ik-llama")


def test_the_verdict_is_remembered_by_engine_and_file(
    fast_backend: Any, tiny: TinyFiles, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[str] = []
    original = trust.check_model
    monkeypatch.setattr(trust, "check_model", lambda model: (checks.append(model.engine), original(model))[1])
    for _ in range(2):
        backends.load(tiny.bpe, fast_backend.name).close()
    assert len(checks) == 1
    (stored,) = (json.loads(path.read_text()) for path in (isolated_home / "trust").iterdir())
    assert stored["value"]["holds"] is True
    assert fast_backend.name in stored["key"]["engine"]
    # A damaged entry is a missing one.
    next((isolated_home / "trust").iterdir()).write_text("{")
    backends.load(tiny.bpe, fast_backend.name).close()
    assert len(checks) == 2


def test_fingerprints_differ_where_files_do(tiny: TinyFiles, tmp_path: Path) -> None:
    data = bytearray(tiny.bpe.read_bytes())
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(data)
    assert trust.fingerprint(copy) == trust.fingerprint(tiny.bpe)
    data[-1] ^= 1
    copy.write_bytes(data)
    assert trust.fingerprint(copy) != trust.fingerprint(tiny.bpe) or len(data) > 1 << 20


@pytest.mark.real
@pytest.mark.usefixtures("ik")
def test_smollm2_is_right_on_ik_llama_after_all(real_model: Callable[[str], Path]) -> None:
    path = real_model("smollm2-135m")
    with ik_llama.load(path) as wrong:
        assert trust.check_model(wrong).mean_kl > 0.5
    with backends.load(path, "ik-llama") as model:
        assert trust.check_model(model).holds
