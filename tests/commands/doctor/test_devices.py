"""What doctor says of a target on several devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec import Placement
from localspec.backends.llama import llama_cpp
from localspec.backends.llama.binding import Place, Places
from localspec.backends.placement import Target, layout
from localspec.commands.doctor import fit
from localspec.commands.doctor.fit import of_path
from localspec.engine.options import LoadOptions
from localspec.model_files.gguf import GGUFFile
from tests.conftest import TinyFiles, open_backend

CARD, OTHER = Place("CUDA0", 1, "CUDA0", True), Place("CUDA1", 2, "CUDA1", True)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, of 1 GB and of 100 kB."""
    open_backend("llama-cpp")
    places = Places([CARD, OTHER], [CARD, OTHER], {"CPU": 3, "CUDA0": 1, "CUDA1": 2}, 16)
    monkeypatch.setattr(llama_cpp.LlamaCppBinding, "places", lambda self, placement: places)
    monkeypatch.setattr(fit, "_free", lambda place, engine: 10**9 if place is CARD else 10**5)


def test_what_goes_where_and_does_not_fit(tiny: TinyFiles, cards: None) -> None:
    load = LoadOptions(placement=Placement(tensor_split=(2, 1), cpu_moe=True))
    (cpu, first, second), on_cpu = fit.spread(of_path(tiny.experts), load, "llama-cpp", 256)
    assert [(row.name, row.status) for row in (cpu, first, second)] == [
        ("CPU", "info"),
        ("CUDA0", "ok"),
        ("CUDA1", "fail"),
    ]
    assert "no layers" in cpu.text  # but experts and input
    assert "layers 0 to 1" in first.text
    assert "--tensor-split" in str(second.advice)
    with GGUFFile(tiny.experts) as gguf:
        kept = [each for name, each in gguf.tensors.items() if "exps" in name or name == "token_embd.weight"]
        assert on_cpu == sum(each.n_bytes for each in kept)


def test_an_obstacle_is_a_row(tiny: TinyFiles) -> None:
    open_backend("llama-cpp")
    for placement, said in (
        (Placement(device="CUDA9"), "--device CUDA9"),
        (Placement(rpc="127.0.0.1:9"), "no RPC server answers at 127.0.0.1:9"),
    ):
        (row,), _ = fit.spread(of_path(tiny.spm), LoadOptions(placement=placement), "llama-cpp", 256)
        assert (row.status, row.name, said in row.text) == ("fail", "devices", True)


def test_what_is_elsewhere_needs_no_memory_here(tiny: TinyFiles) -> None:
    models, room = [of_path(tiny.spm), of_path(tiny.bpe)], fit.Room(None, None, 10**9, 10**9)
    here, spread = (fit.fit(models, 256, "f16", room, on_cpu) for on_cpu in (None, 0))
    target = here.models[0]
    assert here.ram_needed_bytes - spread.ram_needed_bytes == target.weights_bytes + (target.kv_bytes or 0)


def test_layers_follow_free_memory(tiny: TinyFiles, tmp_path: Path) -> None:
    used = [Target("A", "A", 3 << 30), Target("B", "B", 1 << 30)]
    with GGUFFile(tiny.spm) as gguf:
        shares = layout(gguf, Placement(device="A,B"), used, -1, 256, "f16")
        assert [share.layers for share in shares] == [(), (0, 1, 2), ()]
        assert [share.layers for share in layout(gguf, Placement(), [], -1, 256, "f16")] == [(0, 1, 2)]
        shares = layout(gguf, Placement(tensor_split=(0, 1)), used, 2, 256, "f16")
        assert [share.layers for share in shares] == [(0,), (), (1, 2)]
        assert shares[0].cache_bytes == shares[2].cache_bytes > 0
