"""Head files: what is written is read back, and whatever is wrong with one is said in a line."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.errors import ModelFileError, UnsupportedModel, UsageError
from localspec.heads.card import CurvePoint, HeadCard, Kind, TargetFacts, Training
from localspec.heads.file import check_head, head_weights, read_card, write_head
from localspec.model_files.gguf import GGUFFile
from tests.conftest import TinyFiles
from tests.fuzz.gguf_cases import take_apart
from tests.support.heads import write_random_head

TARGET = TargetFacts("f" * 32, "a target", "qwen2", 64, 4, 300, "0123456789abcdef")
CARD = HeadCard("chained", ("norm", "layer:1"), np.arange(0, 300, 3, dtype=np.int32), 3, TARGET, 4, 2, 16, 96)
IDLE: dict[str, Any] = {name: 0 for name in ("n_head", "n_head_kv", "d_head", "d_ff")}
TRAINING = Training(
    command="localspec distill target.gguf --minutes 3",
    seed=7,
    data_tokens=6300,
    tokens_seen=20_000,
    minutes=3.5,
    machine="a CPU with 2 cores",
    versions={"localspec": "0.1.0"},
    curve=(CurvePoint(10_000, 1.5, {"code": (0.4, 0.2)}), CurvePoint(20_000, 3.5, {"code": (0.5, 0.25)})),
    acceptance={"code": (0.5, 0.25, 0.1), "chat": (0.33,)},
)


def random_weights(card: HeadCard) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in card.shapes().items()}


@pytest.mark.parametrize("kind", ["chained", "exit"])
def test_a_card_comes_back_as_it_was(tmp_path: Path, kind: Kind) -> None:
    sizes = IDLE | {"taps": ("layer:1",)} if kind == "exit" else {}
    card = replace(CARD, kind=kind, training=TRAINING, license="Apache-2.0", **sizes)
    found = read_card(write_head(tmp_path / "head.gguf", card, random_weights(card)))
    assert found.token_map.tolist() == card.token_map.tolist()
    for each in fields(card):
        if each.name not in ("token_map", "norm_eps"):
            assert getattr(found, each.name) == getattr(card, each.name), each.name
    assert found.norm_eps == pytest.approx(card.norm_eps)


@pytest.mark.parametrize(("type_name", "error"), [("Q8_0", 0.01), ("F16", 1e-3), ("F32", 0.0)])
def test_weights_come_back_as_exact_as_their_type(tmp_path: Path, type_name: str, error: float) -> None:
    weights = random_weights(CARD)
    with GGUFFile(write_head(tmp_path / "head.gguf", CARD, weights, type_name)) as file:
        check_head(file)
        for name, weight in weights.items():
            found = head_weights(file, name)
            assert found.shape == weight.shape
            tolerance = error * np.sqrt(np.mean(weight**2)) if weight.ndim > 1 else 0.0
            assert np.sqrt(np.mean((found - weight) ** 2)) <= tolerance, name
        assert type_name in file.bytes_by_type


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blk.0.attn_q.weight": np.zeros((64, 63))}, "blk.0.attn_q.weight must be"),
        ({"head.mask.weight": np.zeros((2, 64))}, "head.mask.weight must be no part of it"),
        ({"head.embed.bias": np.full(64, np.nan)}, "finite"),
    ],
)
def test_weights_that_make_no_head_are_not_written(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        write_head(tmp_path / "head.gguf", CARD, random_weights(CARD) | change)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "eagle"}, "kind"),
        ({"taps": ()}, "0 hidden states"),
        ({"taps": ("norm", "norm")}, "twice"),
        ({"taps": ("layer:4",)}, "'layer:4' in a model of 4 layers"),
        ({"taps": ("layer:01",)}, "no hidden state"),
        ({"steps": 0}, "0 tokens ahead"),
        ({"token_map": np.array([3, 3], np.int32)}, "ascend"),
        ({"token_map": np.array([-1, 3], np.int32)}, "ascend"),
        ({"token_map": np.array([1, 2, -(1 << 31)], np.int32)}, "ascend"),
        ({"token_map": np.array([0, 300], np.int32)}, "ascend"),
        ({"token_map": np.arange(301, dtype=np.int32)}, "301 entries for 300 tokens"),
        ({"n_head_kv": 3}, "4 heads, 3 of keys"),
        ({"d_head": 20}, "a multiple of 8"),
        ({"d_ff": 33}, "a multiple of 32"),
        ({"kind": "exit"}, "an exit reads the state after one layer"),
        ({"kind": "exit", "taps": ("layer:3",), **IDLE}, "an exit reads the state after one layer before the last"),
        ({"rope_base": float("nan")}, "base nan"),
        ({"norm_eps": 0.0}, "epsilon 0"),
    ],
)
def test_a_card_that_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        replace(CARD, **change)


def test_which_targets_a_head_fits() -> None:
    other = replace(TARGET, fingerprint="0" * 32)
    assert CARD.misfit(TARGET) == CARD.misfit(other) == ""
    for change, words in (
        ({"n_embd": 32}, "a width of 64 where a target has 32"),
        ({"n_layers": 5}, "layers"),
        ({"architecture": "llama"}, "architecture qwen2"),
        ({"n_vocab": 301}, "rows"),
        ({"vocab": "0" * 16}, "vocabulary"),
    ):
        assert words in CARD.misfit(replace(other, **change))


def test_tensors_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    path = write_head(tmp_path / "head.gguf", CARD, random_weights(CARD))
    header = take_apart(path)
    for name in (b"", b"other", b"blk.1.attn_q.weight", b"head.fc.bias"):
        header.tensors[0].name = name
        path.write_bytes(header.encode())
        with pytest.raises(ModelFileError, match=f"lacks 'head.[a-z]+.weight'|no use, '{name.decode()}'"):
            read_card(path)


def test_models_and_heads_are_not_mistaken_for_each_other(tiny: TinyFiles, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="is not a head: its architecture is 'llama'"):
        read_card(tiny.bpe)
    card = read_card(write_random_head(tiny.pair.target, tmp_path / "head.gguf", n_out=40))
    with GGUFFile(tiny.pair.target) as file, GGUFFile(tiny.pair.draft) as other:
        assert card.misfit(TargetFacts.of(file, "another")) == ""
        assert "layers" in card.misfit(TargetFacts.of(other, "another"))
