"""A drafter that cannot pay on this machine is not even begun: decided before the first answer, by measured costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.replay_traces import CURVES
from localspec import LLM
from localspec.controllers.calibration import curve_key, curves
from localspec.controllers.cost_model import PassTimes
from localspec.engine import loading
from localspec.engine.drafts import LEAST_GAIN, gain_of_size
from localspec.model_files.catalog import Catalog
from tests.conftest import TinyFiles

TARGET = {1: 100.0, 2: 110.0, 4: 130.0, 8: 170.0, 16: 250.0, 64: 730.0}
WIDTHS = (1, 2, 4, 8, 16, 64)
CHEAP = {width: 5.0 + width for width in WIDTHS}
DEAR = {width: 60.0 + 20.0 * width for width in WIDTHS}


@pytest.fixture
def loads(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the draft files that were loaded; the catalogue has one for the target."""
    monkeypatch.setattr(Catalog, "draft_for", lambda self, path: tiny.quick.draft)
    loaded, real = [], loading.Loader.load_draft

    def load(self: Any, path: Any, *args: Any, **options: Any) -> Any:
        loaded.append(path.name)
        return real(self, path, *args, **options)

    monkeypatch.setattr(loading.Loader, "load_draft", load)
    return loaded


def calibrate(tiny: TinyFiles, draft: dict[int, float], *, noisy: bool = False) -> None:
    """Have it known what passes cost here."""
    for path, curve in ((tiny.quick.target, TARGET), (tiny.quick.draft, draft)):
        with LLM(path, [], backend="reference", idle=False, remember=False) as llm:
            key = llm.run(lambda pair: curve_key(pair.target, "f16"))
        curves().drop(key)
        curves().put(key, PassTimes(curve, noisy=noisy, quick=noisy))


def open_with(tiny: TinyFiles, draft: str = "auto", **options: Any) -> tuple[list[str], list[str]]:
    """Names of the drafters that were loaded, and what was said about those that were left out."""
    with LLM(tiny.quick.target, draft, backend="reference", **options) as llm:
        said = [line for line in llm.warnings if "left out" in line]
        return llm.draft_names, said


def test_a_draft_model_that_cannot_pay_is_left_out_and_then_not_even_loaded(tiny: TinyFiles, loads: list[str]) -> None:
    calibrate(tiny, DEAR)
    name = tiny.quick.draft.name
    left_out = f"{name} is left out: beyond copying from the text it saves nothing of a typical answer's time here; "
    for times_loaded in (1, 1):
        assert open_with(tiny) == (["ngram"], [f"{left_out}--draft names it all the same"])
        assert loads == [name] * times_loaded
    assert open_with(tiny, remember=False)[0] == ["ngram", tiny.quick.draft.stem]  # what measures leaves nothing out
    assert open_with(tiny, str(tiny.quick.draft)) == ([tiny.quick.draft.stem], [])


def test_one_that_pays_is_used_and_one_of_which_too_little_is_known_here(
    tiny: TinyFiles, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(tiny, CHEAP)
    assert open_with(tiny) == (["ngram", tiny.quick.draft.stem], [])
    calibrate(tiny, DEAR, noisy=True)  # beside other programs, or of a few passes
    assert open_with(tiny, idle=True) == (["ngram", tiny.quick.draft.stem], [])
    calibrate(tiny, DEAR)
    assert open_with(tiny)[0] == ["ngram"]
    monkeypatch.setattr("localspec.controllers.calibration.cpu_name", lambda: "another CPU")
    calibrate(tiny, CHEAP)
    assert open_with(tiny)[0] == ["ngram", tiny.quick.draft.stem]


@pytest.mark.parametrize(
    ("curve", "share", "pays"),
    [
        (dict(CURVES["avx2"][0]), 0.4, True),  # as measured on two machines, with the default pair
        (dict(CURVES["avx512"][0]), 0.4, False),
        ({1: 100.0, 64: 100.0}, 0.4, True),  # further rows cost nothing, or as much as the first
        ({1: 100.0, 64: 6400.0}, 0.4, False),
        (dict(CURVES["avx512"][0]), 0.1, True),
    ],
)
def test_what_a_draft_model_would_add_follows_from_the_targets_passes_and_the_files_sizes(
    tiny: TinyFiles, curve: dict[int, float], share: float, pays: bool
) -> None:
    """The same estimate before it is fetched as once it is loaded: what is left out is not fetched."""
    with LLM(tiny.quick.target, backend="reference", idle=False) as llm:

        def gain(pair: Any) -> float:
            state = replace(pair.state, times=PassTimes(curve))
            return gain_of_size(state, round(share * pair.target.size_bytes))

        assert (llm.run(gain) >= LEAST_GAIN) is pays
