"""Tiny embedding models, and what they compute, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.ggufs import Weights, named, sizes, write_gguf

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁the", "▁cat", "▁sat", "▁on", "▁mat", "▁a", "▁dog", "s", "▁.")
PAD, UNK, CLS, SEP, MASK = range(5)
N_CTX, N_EMBD, N_FF, N_HEAD, N_LAYER = 32, 64, 128, 2, 2
MEAN, FIRST, LAST, RANK = 1, 2, 3, 4  # ggml's numbers for how the states of a text become one


def bert_weights(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)

    def drawn(*shape: int) -> Any:
        return rng.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32)

    weights: Weights = {
        "token_embd.weight": drawn(len(WORDS), N_EMBD) * 8,
        "token_types.weight": drawn(2, N_EMBD),
        "position_embd.weight": drawn(N_CTX, N_EMBD) * 4,
    }
    norms = ["token_embd_norm"]
    for i in range(N_LAYER):
        sizes = {"attn_q": (N_EMBD, N_EMBD), "attn_k": (N_EMBD, N_EMBD), "attn_v": (N_EMBD, N_EMBD)}
        sizes |= {"attn_output": (N_EMBD, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)}
        for name, (n_out, n_in) in sizes.items():
            weights[f"blk.{i}.{name}.weight"] = drawn(n_out, n_in)
            weights[f"blk.{i}.{name}.bias"] = drawn(n_out)
        norms += [f"blk.{i}.attn_output_norm", f"blk.{i}.layer_output_norm"]
    for name in norms:
        weights[f"{name}.weight"] = 1 + drawn(N_EMBD)
        weights[f"{name}.bias"] = drawn(N_EMBD)
    return weights


def write_bert(path: Path, pooling: int = MEAN, seed: int = 0) -> Path:
    """A model of BERT's kind, as sentence encoders are."""
    settings = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
    settings |= {"context_length": N_CTX, "attention.causal": False, "pooling_type": pooling}
    ids = {"unknown": UNK, "seperator": SEP, "padding": PAD, "cls": CLS, "bos": CLS, "eos": SEP, "mask": MASK}
    metadata = named("bert", sizes(N_LAYER, N_EMBD, N_FF, N_HEAD) | settings)
    metadata |= {"tokenizer.ggml.model": "bert", "tokenizer.ggml.pre": "jina-v2-en"}
    metadata |= {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    metadata |= {"tokenizer.ggml.tokens": WORDS, "tokenizer.ggml.token_type_count": 2}
    metadata["tokenizer.ggml.token_type"] = [3 if i < 5 else 1 for i in range(len(WORDS))]
    return write_gguf(path, "bert", metadata, bert_weights(seed))


def bert_states(tokens: Sequence[int], weights: Weights) -> Any:
    """The last hidden states of a text [n, n_embd]."""

    def norm(x: Any, name: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    n = len(tokens)
    x = weights["token_embd.weight"][list(tokens)] + weights["token_types.weight"][0]
    x = norm(x + weights["position_embd.weight"][:n], "token_embd_norm")
    for i in range(N_LAYER):
        q, k, v = (
            linear(x, f"blk.{i}.attn_{name}").reshape(n, N_HEAD, -1).transpose(1, 0, 2) for name in ("q", "k", "v")
        )
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(N_EMBD // N_HEAD)  # every token sees all others
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ v
        x = norm(
            x + linear(mixed.transpose(1, 0, 2).reshape(n, -1), f"blk.{i}.attn_output"), f"blk.{i}.attn_output_norm"
        )
        up = linear(x, f"blk.{i}.ffn_up")
        gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = norm(x + linear(gelu, f"blk.{i}.ffn_down"), f"blk.{i}.layer_output_norm")
    return x


def pooled(states: Any, pooling: int) -> Any:
    """One row of length 1 for a text [n_embd]."""
    row = {MEAN: states.mean(0), FIRST: states[0], LAST: states[-1]}[pooling]
    return row / np.linalg.norm(row)
