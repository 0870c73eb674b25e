"""What an engine gets wrong about tokens that branch is found before a draft branches, and drafts are chains then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.backends import trust as trust_module
from localspec.backends.base import Forward, Model
from localspec.backends.llama.ik_llama import IkLlamaBinding
from localspec.backends.llama.model import LeafSequences, LlamaContext
from localspec.backends.trust import MAX_KL, check_branches, why_no_branches
from localspec.errors import EngineError
from tests.conftest import Backend, TinyFiles, open_backend


@pytest.fixture(params=["llama-cpp", "ik-llama"])
def model(request: pytest.FixtureRequest, tiny: TinyFiles) -> Iterator[Model]:
    with open_backend(request.param).load(tiny.bpe, n_threads=1) as model:
        yield model


Patch = Callable[[pytest.MonkeyPatch], None]


def rows_of_others(patch: pytest.MonkeyPatch) -> None:
    decode = LlamaContext._decode_tree

    def swapped(self: Any, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        return Forward(decode(self, tokens, parents).logits[::-1])

    patch.setattr(LlamaContext, "_decode_tree", swapped)


def another_branch_is_kept(patch: pytest.MonkeyPatch) -> None:
    """One that is as long: the text is said to go on as it does not."""
    keep = LeafSequences.keep
    patch.setattr(LeafSequences, "keep", lambda self, path, n: keep(self, list(range(len(path))), n))


def wrong_in_such_contexts(n_rows: int) -> Patch:
    def patched(patch: pytest.MonkeyPatch) -> None:
        decode = LlamaContext._decode

        def wrong(self: Any, tokens: Any, logits: Any) -> Forward:
            found = decode(self, tokens, logits)
            return Forward(np.roll(found.logits, 7, axis=1)) if self._branches and len(tokens) == n_rows else found

        patch.setattr(LlamaContext, "_decode", wrong)

    return patched


@pytest.mark.parametrize(
    "defect",
    [rows_of_others, another_branch_is_kept, *map(wrong_in_such_contexts, (1, 5, 33))],
)
def test_defects_are_found(model: Model, defect: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_branches(model) < MAX_KL / 3
    defect(monkeypatch)
    assert check_branches(model) > MAX_KL


@pytest.mark.real
def test_flash_attention_of_ik_llama_is_found_out(
    real_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves out cells by what the last row alone sees; with heads as narrow as the tiny files' it does not."""
    options = IkLlamaBinding.set_context_options

    def with_flash_attention(self: Any, params: Any, n_sequences: int, branches: bool = False) -> None:
        options(self, params, n_sequences, branches)
        params.flash_attn = True

    monkeypatch.setattr(IkLlamaBinding, "set_context_options", with_flash_attention)
    with open_backend("ik-llama").load(real_model("qwen2.5-coder-0.5b")) as model:
        assert check_branches(model) > 10 * MAX_KL


def test_a_file_is_checked_once(model: Model, isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[Model] = []

    def counted(checked: Model) -> float:
        checks.append(checked)
        return check_branches(checked)

    monkeypatch.setattr(trust_module, "check_branches", counted)
    said: list[str] = []
    assert why_no_branches(model, say=said.append) is None
    assert why_no_branches(model, say=said.append) is None
    assert checks == [model]
    assert len(said) == 1


def test_a_verdict_against_it_stays(model: Model, isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        rows_of_others(patch)
        assert "gives wrong results for branching drafts" in str(why_no_branches(model))
    assert "gives wrong results for branching drafts" in str(why_no_branches(model))


def test_an_engine_that_fails_is_asked_again(
    model: Model, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> float:
        raise EngineError("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(trust_module, "check_branches", fails)
        assert why_no_branches(model) == "not enough memory"
    assert why_no_branches(model) is None


def test_where_all_contexts_are_alike_no_check_is_needed(
    reference: Backend, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust_module, "check_branches", None)
    with reference.load(tiny.quick.target) as model:
        assert why_no_branches(model) is None
    with open_backend("llama-cpp").load(tiny.hybrid, n_threads=1) as model:
        assert "a state of all that was read" in str(why_no_branches(model))


@pytest.mark.real
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "gemma3-270m"])
@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama"])
def test_real_models_branch_rightly(engine: str, name: str, real_model: Callable[[str], Path]) -> None:
    with open_backend(engine).load(real_model(name)) as model:
        assert check_branches(model) < MAX_KL
