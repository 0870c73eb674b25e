"""Tiny models of Gemma 4, and assistants that draft for them by the models' own keys and values.

As in ``mtp_ggufs`` layers add little to the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localspec.model_files.gguf import GGUFFile
from localspec.model_files.nextn import ASSISTANT
from tests.support.gguf_vocabs import bpe_vocab, vocab_metadata
from tests.support.ggufs import Weights, matrices, named, norms, sizes, write_gguf
from tests.support.published_heads import whole

N, N_FF, N_HEAD, WINDOW = 128, 128, 4, 32
D_WINDOW, D_FULL = 32, 64
KV_WINDOW, KV_FULL = 2, 1
N_OWN = 112  # Width of the assistant's own states


def write_gemma4(
    path: Path,
    *,
    pattern: Sequence[bool] = (True, False, True, False),  # of each layer whether it looks back over a window only
    n_shared: int = 0,  # how many of the last layers use keys and values of earlier ones, as E2B and E4B do
    n_each: int = 0,  # width of the embeddings that each layer has of its own, as theirs; 0 for none
    seed: int = 0,  # of the random weights
) -> Path:
    """A Gemma 4 in small."""
    vocab, rng = bpe_vocab(), np.random.default_rng(seed)
    matrix = matrices(rng)
    weights: Weights = {
        "token_embd.weight": matrix(len(vocab), N),
        "output.weight": matrix(len(vocab), N, 3.0),
        "output_norm.weight": np.ones(N, np.float32),
        "rope_freqs.weight": _proportional(),
    }
    for i, windowed in enumerate(pattern):
        layer = _layer(rng, N, 0.1, windowed=windowed)
        if i < len(pattern) - n_shared:
            d, n_kv = (D_WINDOW, KV_WINDOW) if windowed else (D_FULL, KV_FULL)
            layer |= {f"attn_{part}.weight": matrix(n_kv * d, N) for part in "kv"}
            layer["attn_k_norm.weight"] = np.ones(d, np.float32)
        if n_each:
            layer |= {"inp_gate.weight": matrix(n_each, N), "proj.weight": matrix(N, n_each)}
            layer["post_norm.weight"] = np.full(N, 0.1, np.float32)
        weights |= {f"blk.{i}.{name}": weight for name, weight in layer.items()}
    if n_each:
        weights["per_layer_token_embd.weight"] = matrix(len(vocab), n_each * len(pattern))
        weights["per_layer_model_proj.weight"] = matrix(n_each * len(pattern), N)
        weights["per_layer_proj_norm.weight"] = np.ones(n_each, np.float32)
    more = {"attention.shared_kv_layers": n_shared, "embedding_length_per_layer_input": n_each}
    settings = _settings(N, pattern) | more | {"final_logit_softcapping": 30.0}
    return write_gguf(path, "gemma4", named("gemma4", settings) | vocab_metadata(vocab), weights)


def write_assistant(
    target: Path,  # what it drafts for
    path: Path,  # where to write the assistant
    *,
    # of each of its layers whether it reads the keys and values of the model's last layer with a window, or those of
    # its last without
    pattern: Sequence[bool] = (True, True, False),
    # metadata that replaces the usual, by names without the architecture; None leaves a key out
    extra: Mapping[str, Any] | None = None,
    drop: Sequence[str] = (),  # tensors to leave out
    seed: int = 1,  # of the random weights
) -> Path:
    """An assistant for a file of ``write_gemma4``.

    It goes by the last token's embedding, as the target mostly does, in a narrower space; somewhat by the state, and by
    what its layers find in the target's keys and values.
    """
    vocab, rng = bpe_vocab(), np.random.default_rng(seed)
    with GGUFFile(target) as file:
        output = whole(file, "output.weight")
    narrow = np.linalg.qr(rng.standard_normal((N, N_OWN)))[0].T.astype(np.float32)  # [N_OWN, N], rows at right angles
    state = matrices(rng)(N_OWN, N, 0.3)
    weights: Weights = {
        "token_embd.weight": output @ narrow.T,
        "output_norm.weight": np.ones(N_OWN, np.float32),
        "nextn.pre_projection.weight": np.concatenate([narrow, state], axis=1),
        "nextn.post_projection.weight": narrow.T.copy(),
    }
    if not all(pattern):
        weights["rope_freqs.weight"] = _proportional()
    for i, windowed in enumerate(pattern):
        layer = _layer(rng, N_OWN, 0.12, windowed=windowed)
        weights |= {f"blk.{i}.{name}": weight for name, weight in layer.items()}
    usual = {
        "attention.shared_kv_layers": len(pattern),
        "embedding_length_per_layer_input": 0,
        "embedding_length_out": N,
        "nextn_predict_layers": len(pattern),
    }
    metadata = named(ASSISTANT, _settings(N_OWN, pattern) | usual | dict(extra or {})) | vocab_metadata(vocab)
    kept = {name: weight for name, weight in weights.items() if name not in drop}
    return write_gguf(path, ASSISTANT, metadata, kept)


def _layer(rng: np.random.Generator, n: int, residual: float, *, windowed: bool) -> Weights:
    """What layers of both have: all but keys and values."""
    matrix, d = matrices(rng), D_WINDOW if windowed else D_FULL
    return (
        norms("attn_norm", "ffn_norm", width=n)
        | norms("attn_q_norm", width=d, scale=0.5)
        | norms("post_attention_norm", "post_ffw_norm", width=n, scale=residual)
        | norms("layer_output_scale", width=1, scale=1.1)
        | {
            "attn_q.weight": matrix(N_HEAD * d, n),
            "attn_output.weight": matrix(n, N_HEAD * d),
            "ffn_gate.weight": matrix(N_FF, n),
            "ffn_up.weight": matrix(N_FF, n),
            "ffn_down.weight": matrix(n, N_FF),
        }
    )


def _settings(n: int, pattern: Sequence[bool]) -> dict[str, Any]:
    n_kv = [KV_WINDOW if windowed else KV_FULL for windowed in pattern]
    return sizes(len(pattern), n, N_FF, N_HEAD, n_kv, D_FULL) | {
        "attention.key_length_swa": D_WINDOW,
        "attention.value_length_swa": D_WINDOW,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": list(pattern),
        "rope.dimension_count": D_FULL,
        "rope.dimension_count_swa": D_WINDOW,
        "rope.freq_base": 1000000.0,
        "rope.freq_base_swa": 10000.0,
    }


def _proportional() -> Any:
    """Layers without a window turn a quarter of their channels."""
    n = D_FULL // 2
    return np.where(np.arange(n) < n // 4, 1.0, 1e30).astype(np.float32)
