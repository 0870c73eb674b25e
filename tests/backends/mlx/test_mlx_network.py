"""GGUF files as mlx-lm models: every architecture's logits against llama.cpp's, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
mx = pytest.importorskip("mlx.core")

from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from localspec.backends.base import NORM, layer_name  # noqa: E402
from localspec.backends.mlx import network as network_module  # noqa: E402
from localspec.backends.mlx.architecture import ARCHITECTURES  # noqa: E402
from localspec.backends.mlx.network import Network  # noqa: E402
from localspec.backends.trust import agreement  # noqa: E402
from localspec.errors import UnsupportedModel  # noqa: E402
from localspec.heads.trained import load_head  # noqa: E402
from localspec.model_files.gguf import GGUFFile  # noqa: E402
from tests.backends.test_reference import llama_cpp_rows  # noqa: E402
from tests.conftest import open_backend  # noqa: E402
from tests.support.contexts import fresh_rows  # noqa: E402
from tests.support.ggufs import write_unpacked  # noqa: E402
from tests.support.heads import write_random_head  # noqa: E402
from tests.support.mlx_ggufs import Sizes, TinyFile  # noqa: E402
from tests.support.program import apart  # noqa: E402

FACTORS = np.linspace(1, 8, 32).astype(np.float32)
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}
BIASES = {
    f"blk.{i}.{part}.bias": np.linspace(-0.5, 0.5, 256 if part in ("attn_q", "attn_output") else 128, dtype=np.float32)
    for i in range(4)
    for part in ("attn_q", "attn_k", "attn_v", "attn_output")
}
QUANTISED = {
    "token_embd.weight": "Q4_K",
    "output.weight": "Q6_K",
    "attn_q.weight": "Q5_0",
    "attn_k.weight": "IQ4_NL",
    "attn_v.weight": "Q6_K",
    "attn_output.weight": "IQ4_XS",
    "ffn_gate.weight": "Q3_K",
    "ffn_up.weight": "Q5_K",
    "ffn_down.weight": "Q2_K",
}
OLD_TYPES = {
    "token_embd.weight": "Q4_1",
    "output.weight": "Q8_0",
    "attn_q.weight": "Q4_0",
    "attn_k.weight": "Q5_1",
    "attn_v.weight": "F16",
    "attn_output.weight": "BF16",
    "ffn_gate.weight": "Q4_1",
    "ffn_down.weight": "Q8_0",
}
EXPERTS = {"ffn_gate_exps.weight": "Q4_K", "ffn_up_exps.weight": "Q5_0", "ffn_down_exps.weight": "Q4_1"}
QWEN35_TYPES = {
    "attn_qkv.weight": "Q8_0",
    "attn_gate.weight": "Q5_0",
    "ssm_alpha.weight": "Q8_0",
    "ssm_beta.weight": "F16",
    "ssm_out.weight": "Q6_K",
    "ffn_down.weight": "Q4_K",
}

LLAMA = TinyFile("llama")
FILES = {name: TinyFile(name) for name in ARCHITECTURES} | {
    "llama, linear scaling": TinyFile("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "llama, Llama 3's factors": TinyFile("llama", extra={"rope_freqs.weight": FACTORS}),
    "llama, YaRN": TinyFile("llama", YARN | {"rope.scaling.attn_factor": 1.3}),
    "llama, tied": TinyFile("llama", omit=("output.weight",)),
    "llama, biases": TinyFile("llama", extra=BIASES),
    "llama, types of 32": TinyFile("llama", types=OLD_TYPES),
    "llama, types of 256": TinyFile("llama", types=QUANTISED),
    "qwen2, YaRN": TinyFile("qwen2", YARN),
    "qwen3moe, quantised": TinyFile("qwen3moe", types=EXPERTS, sizes=Sizes(n_ff=256)),
    "qwen3moe, MXFP4": TinyFile("qwen3moe", types=dict.fromkeys(EXPERTS, "MXFP4") | {"attn_q.weight": "MXFP4"}),
    "gpt-oss, MXFP4": TinyFile("gpt-oss", types=dict.fromkeys(EXPERTS, "MXFP4") | {"attn_q.weight": "Q8_0"}),
    "gpt-oss, every third layer": TinyFile("gpt-oss", {"attention.sliding_window_pattern": 3}),
    "qwen35, quantised": TinyFile("qwen35", types=QWEN35_TYPES),
    "qwen35, YaRN": TinyFile("qwen35", YARN),
    "gemma3, linear scaling": TinyFile("gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    "gemma3, no window": TinyFile("gemma3", {"attention.sliding_window": 0}),
    "phi3, long and short factors": TinyFile(
        "phi3",
        {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.2},
        extra={"rope_factors_long.weight": FACTORS[:24], "rope_factors_short.weight": FACTORS[8:]},
    ),
}


def load_network(path: Path) -> Network:
    with GGUFFile(path) as file:
        return network_module.load_network(file)


def tokens_for(n_vocab: int, n: int = 40) -> list[int]:
    return [int(token) for token in np.random.default_rng(1).integers(5, n_vocab, n)]


def logits_of(network: Network, tokens: list[int]) -> np.ndarray:
    return np.array(network.module(mx.array([tokens])).astype(mx.float32))[0]


@pytest.mark.parametrize("name", FILES)
def test_logits_and_states_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Of float32 numbers but for tables of halves (its GELU) and experts that change places. llama.cpp rounds what it
    multiplies with quantised weights, so these are compared with the same ones unpacked, rounded ones (Q6_K) nearly.
    A head that was trained on one engine reads the states of another."""
    path = FILES[name].write(tmp_path / "model.gguf")
    network = load_network(path)
    tokens = tokens_for(network.n_vocab)
    ours = logits_of(network, tokens)
    if FILES[name].types:
        assert agreement(llama_cpp_rows(path, tokens).logits, ours).mean_kl < 0.05
        path = write_unpacked(path, tmp_path / "unpacked.gguf")
        assert agreement(logits_of(load_network(path), tokens), ours).mean_kl < 1e-3
        ours = logits_of(load_network(path), tokens)
    names = [*map(layer_name, range(len(network.module.layers))), NORM] if name in ARCHITECTURES else []
    theirs = llama_cpp_rows(path, tokens, names)
    assert agreement(theirs.logits, ours).mean_kl < 5e-5
    found = network.states(mx.array([tokens]), make_prompt_cache(network.module), names) if names else {}
    for layer in names:
        states = np.array(found[layer].astype(mx.float32))[0]
        assert np.abs(states - theirs.hidden[layer]).max() < 0.01 * np.abs(states).max(), layer


@pytest.mark.parametrize(
    ("dtype", "name", "limit"),
    [
        ("float16", "llama, types of 256", 0.02),
        ("bfloat16", "llama", 0.1),
        ("float16", "lfm2", 0.02),
        ("float16", "gpt-oss, MXFP4", 0.02),
        ("bfloat16", "qwen35, quantised", 0.1),
    ],
)
def test_half_precision(dtype: str, name: str, limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, kind = FILES[name], getattr(mx, dtype)
    if tiny.architecture == "llama":
        tiny = replace(tiny, sizes=Sizes(n_layer=1))  # a CPU takes seconds for more
    path = tiny.write(tmp_path / "model.gguf")
    exact = load_network(path)
    monkeypatch.setattr(network_module, "default_dtype", lambda file: kind)
    half = load_network(path)
    tokens = tokens_for(exact.n_vocab, 12)
    logits = half.module(mx.array([tokens]))
    assert logits.dtype == kind
    assert agreement(np.array(logits.astype(mx.float32))[0], logits_of(exact, tokens)).mean_kl < limit
    kept = {str(array.dtype) for name, array in tree_flatten(half.module.parameters()) if "A_log" in name}
    assert kept <= {"mlx.core.float32"}
    sizes = [sum(array.nbytes for _, array in tree_flatten(each.module.parameters())) for each in (half, exact)]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_put_in_for_embeddings_are_all_that_it_knows_of_tokens(name: str, tmp_path: Path) -> None:
    network = load_network(FILES[name].write(tmp_path / "model.gguf"))
    tokens = mx.array([tokens_for(network.n_vocab, 8)])
    rows = mx.random.normal((1, 8, network.n_embd), key=mx.random.key(0))
    own = network.states(tokens, make_prompt_cache(network.module), [layer_name(0)])
    fed = network.states(tokens, make_prompt_cache(network.module), [layer_name(0)], rows=rows)
    others = network.states(tokens[:, ::-1], make_prompt_cache(network.module), [], rows=rows)
    assert mx.array_equal(fed[NORM], others[NORM])
    assert not mx.array_equal(fed[layer_name(0)], own[layer_name(0)])


def test_the_default_precision_depends_on_the_device_the_file_and_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = FILES["llama, types of 32"].write(tmp_path / "usual.gguf")
    modest = replace(LLAMA, types={"ffn_up.weight": "Q4_0"}).write(tmp_path / "modest.gguf")
    # Norms this large make states of 10^5, which float16 does not hold.
    large = replace(LLAMA, extra={f"blk.{i}.ffn_norm.weight": np.full(256, 3e2, np.float32) for i in range(4)})
    gemma, huge = FILES["gemma3"].write(tmp_path / "gemma3.gguf"), large.write(tmp_path / "huge.gguf")
    beyond = replace(LLAMA, extra={"blk.2.ffn_norm.weight": np.full(256, 1e5, np.float32)})  # itself no float16
    files = (usual, modest, huge, gemma, beyond.write(tmp_path / "beyond.gguf"))
    assert [load_network(path).compute_dtype for path in files] == [mx.float32] * 5
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    dtypes = [load_network(path).compute_dtype for path in files]
    assert dtypes == [mx.bfloat16, mx.float16, mx.float32, mx.float32, mx.float32]
    with load_head(write_random_head(usual, tmp_path / "head.gguf"), usual, "reference") as head:
        assert load_network(head.model.path).compute_dtype == mx.float32, "its rows come from outside"


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED: list[tuple[TinyFile, str]] = [
    (TinyFile("starcoder2"), r"'starcoder2' \(it knows gemma, gemma3, glm4moe, gpt-oss, granite, lfm2, .*qwen3"),
    (replace(LLAMA, settings={"block_count": 3}), r"does not use blk\.3\.attn_k\.weight, .* and 6 more tensors"),
    (replace(LLAMA, omit=("blk.2.ffn_up.weight",)), r"lacks blk\.2\.ffn_up\.weight$"),
    (
        replace(LLAMA, settings={"feed_forward_length": 1024}),
        r"blk\.\d\.ffn_\w+\.weight has the shape \w+, but \w+ is needed",
    ),
    (
        replace(LLAMA, settings={"attention.temperature_scale": 0.1}),
        r"does not know the llama setting attention\.temperature_scale",
    ),
    (replace(LLAMA, settings={"expert_count": 8}), r"llama\.expert_count = 8 is not handled"),
    (replace(LLAMA, settings={"rope.scaling.type": "su"}), r"unknown rope scaling 'su'"),
    (replace(LLAMA, settings=YARN | {"rope.scaling.yarn_beta_fast": 64.0}), r"yarn_beta_fast = 64\.0 is not handled"),
    (replace(LLAMA, extra={"rope_freqs.weight": FACTORS[:20]}), r"rope factors do not fit 64 rotating channels"),
    (
        TinyFile("qwen2", {"attention.key_length": 96, "attention.value_length": 96}),
        r"4 heads of 96 channels are not the 256",
    ),
    (replace(LLAMA, settings={"attention.head_count_kv": 3}), r"do not fit together"),
    (
        TinyFile("gemma3", {"attention.sliding_window_pattern": [True, False, True, True, False, True]}),
        r"in an order that mlx-lm cannot compute",
    ),
    (
        TinyFile("gpt-oss", {"attention.sliding_window_pattern": [True] * 4}),
        r"needs layers with a sliding window and others without",
    ),
    (TinyFile("gpt-oss", {"rope.freq_base_swa": 500.0}), r"gpt-oss\.rope\.freq_base_swa = 500\.0 is not handled"),
    (
        TinyFile("qwen35", {"rope.dimension_sections": [4, 4, 4, 0]}),
        r"rope sections \[4, 4, 4, 0\] do not cover 16 pairs of channels",
    ),
    (TinyFile("qwen35", types={"ssm_out.weight": "Q3_K"}), r"ssm_out\.weight cannot be cut into 4 heads as Q3_K"),
    (TinyFile("lfm2", {"attention.head_count_kv": [2, 2, 2, 2]}), r"4 of 4 layers have attention"),
    (replace(LLAMA, settings={"attention.head_count": "many"}), r"is 'many', not a number"),
    (
        replace(LLAMA, types={"ffn_down.weight": "TQ2_0"}),
        r"cannot read blk\.0\.ffn_down\.weight as TQ2_0, only as Q4_0, .*BF16",
    ),
    (replace(LLAMA, types={"attn_norm.weight": "Q8_0"}), r"blk\.0\.attn_norm\.weight as Q8_0, only as F32, F16, BF16"),
]


@pytest.mark.parametrize(("tiny", "message"), REFUSED)
def test_a_file_that_would_be_computed_wrongly_is_refused_by_name(tiny: TinyFile, message: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModel, match=message) as caught:
        load_network(path)
    assert "\n" not in str(caught.value)


def test_model_classes_are_imported_without_the_rest_of_mlx_lm(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from localspec.backends import mlx\n"
        f"mlx.load({str(LLAMA.write(tmp_path / 'model.gguf'))!r})\n"
        "assert 'transformers' not in sys.modules\n"
        "import mlx_lm\n"
        "assert mlx_lm.models.llama.Model and mlx_lm.__name__ == 'mlx_lm' and not hasattr(mlx_lm, '__nothing__')\n"
        "from mlx_lm import stream_generate\n"
        "assert callable(mlx_lm.load)\n"
    )
    apart(code)


# -- real models -------------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"])
def test_real_logits_are_those_of_llama_cpp(name: str, real_model: Callable[[str], Path]) -> None:
    """But for what llama.cpp rounds. The larger Qwen has no other architecture or type."""
    with (
        open_backend("mlx").load(real_model(name)) as model,
        open_backend("llama-cpp").load(real_model(name), n_gpu_layers=0) as other,
    ):
        text = (Path(__file__).parents[2] / "data/text_1000_tokens.txt").read_text(encoding="utf-8")
        tokens = model.tokenize(text, add_special=True)[:48]
        found = agreement(fresh_rows(other, tokens), fresh_rows(model, tokens))
    assert found.mean_kl < 0.05
    assert found.top1 > 0.8
