"""The lighter copy of a draft model: made once, compared with the published file, used only where it drafts faster."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.backends import repack
from localspec.controllers.cost_model import PassTimes
from localspec.engine import loading as loading_module
from localspec.engine.loading import MAX_TOKENS, DraftCopy, reading
from localspec.model_files.gguf import GGUFFile, fingerprint
from localspec.system.steps import Steps, exhaust
from tests.conftest import ENGINES_ONCE_PER_FILE, TinyFiles, share
from tests.support import ggufs

GREEDY = SamplingParams(max_tokens=12)


@pytest.fixture(autouse=True)
def known_engines(isolated_home: Path, shared_home: Path) -> None:
    """A home where the engines are measured and checked once, and copies made and chosen by each test."""
    share(isolated_home, shared_home, ENGINES_ONCE_PER_FILE)


def test_the_copy_is_lighter_and_says_nearly_the_same(fast_backend: Any, tiny: TinyFiles) -> None:
    path = tiny.pair.draft
    copy = repack.lighter_copy(path, fingerprint(path), lambda line: None)
    assert copy.stat().st_size < path.stat().st_size
    with GGUFFile(path) as ours, GGUFFile(copy) as theirs:
        assert {name: tensor.shape for name, tensor in ours.tensors.items()} == {
            name: tensor.shape for name, tensor in theirs.tensors.items()
        }
        changed = {name for name in ours.tensors if ours.tensors[name].type_name != theirs.tensors[name].type_name}
        assert {theirs.tensors[name].type_name for name in changed} == {"Q4_0"}
        assert not any("norm" in name for name in changed)
        if "output.weight" in ours.tensors:
            assert "token_embd.weight" not in changed  # one row of it is read per token
        tokens = list(range(20, 60))
        with fast_backend.load(path, n_threads=1) as one, fast_backend.load(copy, n_threads=1) as two:
            agreement = (exhaust(reading(one, tokens)) == exhaust(reading(two, tokens))).mean()
    assert agreement > 0.6


def test_a_file_with_nothing_to_save_is_not_copied(tiny: TinyFiles, tmp_path: Path, isolated_home: Path) -> None:
    light = ggufs.write_llama(tmp_path / "light.gguf", vocab=ggufs.bpe_vocab(), tensor_type="Q4_0")
    assert repack.lighter_copy(light, fingerprint(light), lambda line: None) is None
    assert not list(isolated_home.glob("repacked/*"))


@pytest.mark.parametrize(("in_idle_time", "light_is_faster"), [(True, False), (False, True)])
def test_the_faster_copy_drafts_and_the_choice_is_kept(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, light_is_faster: bool, in_idle_time: bool
) -> None:
    compared: list[str] = []

    def measuring(copies: Any, *args: Any) -> Steps[list[DraftCopy]]:
        yield
        names = [model.path.name for model in copies]
        compared.extend(names)
        return [DraftCopy(0.5, 1.0, 2.0 if ("q4_0-draft" in name) == light_is_faster else 1.0) for name in names]

    monkeypatch.setattr(loading_module, "measuring", measuring)
    for _ in range(2):
        with LLM(
            tiny.pair.target, tiny.pair.draft, backend="ik-llama", n_ctx=256, n_threads=1, idle=in_idle_time
        ) as llm:
            assert llm.wait_idle(200)
            model = llm.inspect().state.models[0].model
            assert ("q4_0-draft" in model.path.name) == light_is_faster
            assert llm.draft_names == [tiny.pair.draft.stem]
            assert llm.generate("the cat", GREEDY, draft_length=3).stats["num_draft_tokens"] > 0
    assert len(compared) == 2
    with LLM(tiny.pair.target, tiny.pair.draft, backend="ik-llama", n_ctx=256, n_threads=1, light_draft=False) as llm:
        model = llm.inspect().state.models[0].model
        assert model.path == tiny.pair.draft


def test_copies_are_timed_in_turns(fast_backend: Any, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a program that comes while they are timed makes both as slow; here every pass takes twice the last one's."""
    now, steps = [0.0], list[str]()
    monkeypatch.setattr(loading_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with fast_backend.load(tiny.pair.draft) as one, fast_backend.load(tiny.pair.draft) as two:
        with one.new_context(8) as context:
            kind = type(context)
        original = kind.decode

        def decode(self: Any, tokens: Any, logits: Any = "all") -> Any:
            if len(tokens) == 1:
                steps.append("one" if self.model is one else "two")
                now[0] += 2.0 ** len(steps)
            return original(self, tokens, logits)

        monkeypatch.setattr(kind, "decode", decode)
        tokens = one.tokenize(loading_module.TEXT.read_text(encoding="utf-8"), add_special=True)[:MAX_TOKENS]
        tops = exhaust(reading(one, tokens))
        times = PassTimes({1: 10.0, 2: 11.0, 8: 20.0})
        first, second = exhaust(loading_module.measuring([one, two], tokens, tops, times, one.n_vocab))
    assert steps == ["one", "two"] * loading_module.N_STEPS
    assert second.step_ms == pytest.approx(2 * first.step_ms)


@pytest.mark.parametrize(("in_idle_time", "what"), [(True, "no room"), (False, "broken")])
def test_a_copy_that_cannot_be_made_or_read_is_no_error(
    tiny: TinyFiles, isolated_home: Path, monkeypatch: pytest.MonkeyPatch, what: str, in_idle_time: bool
) -> None:
    broken = isolated_home / "broken.gguf"
    broken.write_bytes(tiny.pair.draft.read_bytes()[:5000])

    def full(*args: Any) -> Steps[None]:
        yield
        raise OSError(28, "No space left on device")

    def lightening(*args: Any) -> Steps[Path]:
        yield
        return broken

    if what == "no room":
        monkeypatch.setattr(repack, "writing_copy", full)
    else:
        monkeypatch.setattr(loading_module, "lightening", lightening)
    with LLM(tiny.pair.target, tiny.pair.draft, backend="ik-llama", n_ctx=256, n_threads=1, idle=in_idle_time) as llm:
        assert llm.wait_idle(200)
        assert llm.inspect().state.models[0].model.path == tiny.pair.draft
    assert not list(isolated_home.glob("repacked/*.gguf"))


@pytest.mark.parametrize("step", ["loading .*", "measuring", "making a lighter copy.*", "comparing .* copy .*"])
def test_an_error_of_whoever_is_told_of_a_step_ends_the_load(tiny: TinyFiles, tmp_path: Path, step: str) -> None:
    target = ggufs.write_llama(tmp_path / "new.gguf", vocab=ggufs.bpe_vocab(), seed=41)  # it is not known yet

    class Enough(Exception):
        pass

    def progress(what: str, fraction: float | None) -> None:
        if re.fullmatch(step, what):
            raise Enough

    draft = tiny.pair.draft if "copy" in step else None
    with pytest.raises(Enough):
        LLM(target, draft, backend="ik-llama", n_ctx=256, n_threads=1, progress=progress, idle=False)
