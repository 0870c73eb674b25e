"""The reference backend computes what llama.cpp computes, and computes it alike whatever the width of the pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from localspec.backends import reference
from localspec.backends.base import FloatArray, Forward
from localspec.backends.llama.llama_cpp import LlamaCppBinding
from localspec.errors import NotGGUF, UnsupportedModel, UsageError
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs
from tests.support.contexts import fresh, fresh_rows, some_tokens


def reference_logits(path: Path, tokens: list[int]) -> FloatArray:
    with reference.load(path) as model:
        return fresh_rows(model, tokens)


def llama_cpp_rows(path: Path, tokens: list[int], hidden: Sequence[str] = ()) -> Forward:
    """llama.cpp at its most exact: keys and values in float32, no flash attention (which rounds them to 16 bits)."""
    backend, options = open_backend("llama-cpp"), LlamaCppBinding.set_context_options

    def exact(self: LlamaCppBinding, params: Any, *arguments: Any) -> None:
        options(self, params, *arguments)
        params.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaCppBinding, "set_context_options", exact)
        with backend.load(path, n_threads=1, n_gpu_layers=0, kv_type="f32") as model:
            return fresh(model, tokens, 0, hidden)


VARIANTS: dict[str, tuple[ggufs.Shape, dict[str, Any]]] = {
    "grouped": (ggufs.Shape(), {}),
    "one key head": (ggufs.Shape(n_head_kv=1), {}),
    "all key heads": (ggufs.Shape(n_head_kv=4), {}),
    "tied": (ggufs.Shape(tied=True), {}),
    "rope base": (ggufs.Shape(rope_base=500000.0), {}),
    "linear scaling": (ggufs.Shape(), {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
    "norm epsilon": (ggufs.Shape(), {"llama.attention.layer_norm_rms_epsilon": 0.5}),
    "deep": (ggufs.Shape(n_layer=6), {}),
    "rope factors": (ggufs.Shape(), {}),
}


def written(folder: Path, variant: str) -> Path:
    shape, extra = VARIANTS[variant]
    weights = ggufs.llama_weights(shape, 384)
    if variant == "rope factors":
        weights["rope_freqs.weight"] = np.linspace(1, 8, 16).astype(np.float32)
    return ggufs.write_llama(folder / f"{variant}.gguf", shape, extra=extra, weights=weights)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_llama_cpp(tmp_path: Path, variant: str) -> None:
    """To 1e-3 of a standard deviation of 3: what float32 leaves of float64. And as the plain model each variant that
    turns or scales otherwise would be far off."""
    path, tokens = written(tmp_path, variant), some_tokens(60)
    ours = reference_logits(path, tokens)
    assert np.abs(ours - llama_cpp_rows(path, tokens).logits).max() < 1e-3
    if variant.startswith(("rope", "linear", "norm")):
        assert np.abs(ours - reference_logits(written(tmp_path, "grouped"), tokens)).max() > 0.1


@pytest.mark.parametrize("tensor_type", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_are_read_exactly(tmp_path: Path, tensor_type: str) -> None:
    """A quantised file and an F32 file of its unpacked values give equal logits, to the bit."""
    kind = gguf.GGMLQuantizationType[tensor_type]
    weights = ggufs.llama_weights(ggufs.Shape(), 384)
    unpacked = {
        name: gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind).reshape(w.shape) if w.ndim > 1 else w
        for name, w in weights.items()
    }
    packed = ggufs.write_llama(tmp_path / "packed.gguf", weights=weights, tensor_type=tensor_type)
    plain = ggufs.write_llama(tmp_path / "plain.gguf", weights=unpacked)
    tokens = some_tokens(20)
    assert np.array_equal(reference_logits(packed, tokens), reference_logits(plain, tokens))


# Refusals.


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"llama.expert_count": 4}, "mixture of experts"),
        ({"llama.rope.dimension_count": 16}, "rotation of some channels only"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.scaling.factor": -2.0}, "a rope scaled by -2"),
        ({"llama.attention.head_count_kv": [2, 2]}, "layers of different widths"),
        ({"tokenizer.ggml.model": "t5"}, "of the kind 't5'"),
    ],
)
def test_what_it_does_not_compute_is_refused(tmp_path: Path, extra: dict[str, Any], words: str) -> None:
    path = ggufs.write_llama(tmp_path / "model.gguf", extra=extra)
    with pytest.raises(UnsupportedModel, match=words) as error:
        reference.load(path)
    assert "--backend" in str(error.value)


def test_other_files_are_refused(tiny: TinyFiles, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="architecture 'gemma3'"):
        reference.load(tiny.sliding)
    with pytest.raises(UnsupportedModel, match="word split 'tekken'"):
        reference.load(ggufs.write_llama(tmp_path / "pre.gguf", vocab=ggufs.bpe_vocab(pre="tekken")))
    weights = ggufs.llama_weights(ggufs.Shape(), 384)
    del weights["blk.1.ffn_up.weight"]
    with pytest.raises(UnsupportedModel, match=r"lacks the tensor blk\.1\.ffn_up\.weight"):
        reference.load(ggufs.write_llama(tmp_path / "lacking.gguf", weights=weights))
    weights = ggufs.llama_weights(ggufs.Shape(), 384) | {"blk.1.attn_output.bias": np.ones(128)}
    with pytest.raises(UnsupportedModel, match=r"does not compute blk\.1\.attn_output\.bias"):
        reference.load(ggufs.write_llama(tmp_path / "biased.gguf", weights=weights))
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(NotGGUF):
        reference.load(tmp_path / "empty.gguf")
    with pytest.raises(UsageError, match="--gpu-layers"):
        reference.load(tiny.spm, n_gpu_layers=1)


SMALL = ggufs.Shape(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, n_ff=32)


def test_tensors_whose_sizes_contradict_each_other_are_refused(tmp_path: Path) -> None:
    vocab = ggufs.bpe_vocab(300)
    weights = ggufs.llama_weights(SMALL, len(vocab))
    for name, weight in weights.items():
        for wrong in (weight[:-1], weight[..., :-2], weight[None]):
            if wrong.shape[0] < 2 and weight.ndim > 1:
                wrong = np.concatenate([wrong, wrong])
            path = ggufs.write_llama(tmp_path / "odd.gguf", SMALL, vocab, weights=weights | {name: wrong})
            # Of the rows of the gate, the other matrices of the block are the ones that are wrong.
            named = "ffn_up" if "ffn_gate" in name and len(wrong) == len(weight) - 1 else name
            with pytest.raises(UnsupportedModel, match=rf"odd.gguf: \S*{named}\S* is .* where the header says"):
                reference.load(path)
    factors = {"rope_freqs.weight": np.ones(3, np.float32)}
    path = ggufs.write_llama(tmp_path / "odd.gguf", SMALL, vocab, weights=weights | factors)
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        reference.load(path)
