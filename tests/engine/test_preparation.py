"""What is left for idle time after a load, and that answers neither wait for it nor depend on it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, EngineMismatch, SamplingParams, backends
from localspec.backends import trust
from localspec.backends.base import Forward
from localspec.controllers import calibration
from localspec.controllers.cost_model import PassTimes
from localspec.engine import loading as loading_module
from localspec.engine import pair as pair_module
from localspec.engine.options import LoadOptions
from localspec.errors import LocalspecError
from localspec.model_files.gguf import fingerprint
from localspec.system.steps import Steps
from tests.conftest import TinyFiles, open_backend
from tests.support.heads import write_random_head

SOON = 120.0
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def ik(path: Path, draft: Any = None, **options: Any) -> LLM:
    return LLM(path, draft, backend=open_backend("ik-llama").name, n_ctx=256, n_threads=1, **options)


def test_a_load_measures_little_and_idle_time_finds_out_the_rest(
    tiny: TinyFiles, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("localspec.engine.worker.on_battery", lambda: True)
        for _ in range(2):  # measured, and from the disk
            with ik(tiny.pair.target, tiny.pair.draft) as llm:
                assert llm.wait_idle(SOON)
                assert llm.inspect().times.quick
                assert llm.inspect().state.models[0].times.quick
                assert llm.generate("the cat", GREEDY).stats["completion_tokens"] == 24
                assert not list(isolated_home.glob("repacked/*"))
            checked = {json.loads(path.read_text())["key"]["file"] for path in (isolated_home / "trust").iterdir()}
            assert checked == {fingerprint(tiny.pair.target)}
    with ik(tiny.pair.target, tiny.pair.draft) as llm:
        times = llm.inspect().times
        assert llm.wait_idle(SOON)
        assert llm.inspect().times is times  # who holds on to it sees the new curve
        assert not times.quick
        assert not llm.inspect().state.models[0].times.quick
        assert list(isolated_home.glob("repacked/*q4_0-draft.gguf"))
        assert llm.generate("the cat", GREEDY, draft_length=3).stats["num_draft_tokens"] > 0
    assert len(list((isolated_home / "drafts").iterdir())) == 1
    with ik(tiny.pair.target, tiny.pair.draft) as llm:
        assert not llm.inspect().times.quick  # at once


def test_idle_time_measures_heads_too(tiny: TinyFiles, isolated_home: Path) -> None:
    head = write_random_head(tiny.pair.target, tiny.folder / "idle-head.gguf", taps=("layer:0",))
    drafts = [f"head:{head}", "early-exit:1"]
    with ik(tiny.pair.target, drafts) as llm:
        assert llm.wait_idle(SOON)
        assert [draft.times.quick for draft in llm.inspect().state.models] == [False, False]
        assert all(len(draft.times.curve.measured) > 8 for draft in llm.inspect().state.models)
        assert llm.warnings == []
        assert llm.generate("the cat", GREEDY, draft_length=3).stats["num_draft_tokens"] > 0
    assert not list(isolated_home.glob("repacked/*"))


def test_without_idle_time_a_load_finds_out_everything(tiny: TinyFiles, isolated_home: Path) -> None:
    with ik(tiny.pair.target, tiny.pair.draft, idle=False) as llm:
        assert not llm.inspect().times.quick
        assert not llm.inspect().state.models[0].times.quick
        assert len(list((isolated_home / "drafts").iterdir())) == 1
        assert llm.inspect().worker.idle.pause() == (None, True)


def test_answers_between_idle_steps_are_the_same(
    tiny: TinyFiles, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the reference engine, to the bit; calibration uses contexts of its own."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = ["one", "two three", "four"]
    with LLM(tiny.quick.target, tiny.quick.draft, backend="reference", n_ctx=256, n_threads=1, idle=False) as llm:
        expected = [llm.generate(prompt, params).token_ids for prompt in prompts]
    stepped, go_on = threading.Semaphore(0), threading.Semaphore(0)
    original = pair_module.calibrating

    def gated(*args: Any) -> Steps[PassTimes]:
        steps = original(*args)
        while True:
            stepped.release()
            assert go_on.acquire(timeout=SOON)
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            yield

    monkeypatch.setattr(pair_module, "calibrating", gated)
    monkeypatch.setenv("LOCALSPEC_HOME", str(isolated_home / "without curves"))
    with LLM(tiny.quick.target, tiny.quick.draft, backend="reference", n_ctx=256, n_threads=1) as llm:
        found = []
        for prompt in prompts:
            assert stepped.acquire(timeout=SOON)
            stream = llm.rounds(prompt, params)
            go_on.release()
            found.append(stream.reply.token_ids)
        for _ in range(1000):
            go_on.release()
    assert found == expected


def test_a_draft_that_its_engine_computes_wrongly_drafts_no_more(tiny: TinyFiles) -> None:
    with ik(tiny.trap, ["ngram", tiny.trap], light_draft=False, idle=False) as llm:
        target = llm.inspect().target.path
        assert "repacked" in str(target)
    # The check of the target has found it out; here it is the draft's that does.
    for path in trust.verdicts().folder.iterdir():
        path.unlink()
    with ik(target, ["ngram", tiny.trap], light_draft=False) as llm:
        assert llm.draft_names == ["ngram", tiny.trap.stem]
        assert llm.wait_idle(SOON)
        assert llm.draft_names == ["ngram"]
        assert any("wrongly" in warning for warning in llm.warnings)
        assert llm.generate("the cat", GREEDY).stats["completion_tokens"] == 24
    with ik(target, ["ngram", tiny.trap], light_draft=False) as llm:
        assert llm.wait_idle(SOON)
        assert llm.draft_names == ["ngram", tiny.trap.stem]  # a copy that comes out right


# Another engine is asked when there is time. The reference engine stands for it: there is one everywhere.


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> None:
    open_backend("ik-llama")
    monkeypatch.setattr(trust, "other_engines", lambda model: ["reference"] if model.backend == "ik-llama" else [])


def stored() -> dict[str, Any]:
    """The verdict on the file. Where its curve is flat there is one more, on drafts that branch."""
    found = [json.loads(path.read_text()) for path in trust.verdicts().folder.iterdir()]
    (verdict,) = (each["value"] for each in found if "memory" not in each["key"])
    return dict(verdict)


@pytest.mark.usefixtures("another")
def test_where_idle_time_never_comes_it_is_asked_at_the_fourth_load(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.engine.worker.on_battery", lambda: True)
    for times in range(1, trust.MAX_PUT_OFF + 1):
        ik(tiny.bpe).close()
        assert stored()["waits"] == times
    ik(tiny.bpe).close()
    assert "waits" not in stored()
    for path in trust.verdicts().folder.iterdir():
        path.unlink()
    ik(tiny.bpe, idle=False).close()  # at the load, as there is none
    assert "waits" not in stored()


@pytest.mark.usefixtures("another")
def test_an_engine_that_is_contradicted_answers_no_more(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is wrong in all its kernels alike agrees with itself."""
    with backends.load(tiny.bpe, "ik-llama") as model:
        kind = type(model.new_context(8))
    for path in trust.verdicts().folder.iterdir():
        path.unlink()
    original = kind._decode

    def mirrored(self: Any, tokens: Any, logits: Any) -> Any:
        return Forward(np.ascontiguousarray(original(self, tokens, logits).logits[:, ::-1]))

    monkeypatch.setattr(kind, "_decode", mirrored)
    with ik(tiny.bpe) as llm:
        assert llm.wait_idle(SOON)
        with pytest.raises(EngineMismatch, match="differs from reference"):
            llm.generate("the cat", GREEDY)
        with pytest.raises(EngineMismatch):
            llm.logprobs("the cat")
        assert any("Start again" in warning for warning in llm.warnings)
    assert stored()["holds"] is False


@pytest.mark.usefixtures("another")
def test_what_was_measured_beside_other_programs_is_measured_again_once_they_are_gone(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the idle time of the same run, and not before a while has passed."""
    busy = [0.5]
    monkeypatch.setattr(calibration, "others_share", lambda spans: busy[0])
    monkeypatch.setattr(calibration, "SPAN_S", 0.0)
    monkeypatch.setattr(pair_module, "others_share", lambda spans: busy[0])
    with ik(tiny.bpe) as llm:
        assert llm.wait_idle(SOON)
        assert llm.inspect().times.noisy
        assert not llm.inspect().times.quick
        monkeypatch.setattr(pair_module, "AGAIN_S", 0.0)
        due = {pair_module.ORDER[item.priority]: item for item in llm.inspect().worker.idle._entries}
        assert set(due) == {"reading", "target curve"}
        busy[0] = 0.0
        assert llm.generate("the cat", GREEDY).stats["completion_tokens"] == 24
        assert llm.wait_idle(SOON)
        assert llm.inspect().times.noisy  # not so soon
        due["target curve"].due = 0.0
        assert llm.generate("the cat", GREEDY).stats["completion_tokens"] == 24
        assert llm.wait_idle(SOON)
        assert llm.inspect().times.others_share == 0.0


def test_both_engines_are_measured_in_idle_time(tiny: TinyFiles) -> None:
    for name in loading_module.ENGINES:
        open_backend(name)
    with LLM(tiny.bpe, None, n_ctx=256, n_threads=1, n_gpu_layers=0) as llm:
        assert llm.wait_idle(SOON)
    found = loading_module.compared(tiny.bpe, LoadOptions(n_threads=1))
    assert set(found.ms) == set(loading_module.ENGINES)


def test_a_load_that_gives_way_blames_no_engine_and_tries_no_other(tiny: TinyFiles) -> None:
    """As when a question comes while the chat's draft model is being loaded."""
    seen: list[str] = []

    def stop(fraction: float) -> bool:
        seen.append("asked")
        return False

    warnings: list[str] = []
    with pytest.raises(LocalspecError):
        backends.load(tiny.pair.draft, "auto", progress=stop, warn=warnings.append, check=False)
    assert seen
    assert warnings == []
