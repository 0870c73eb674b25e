"""Tiny heads of the kinds that models are published with, for the tiny models of ``ggufs``.

Their weights are made, not trained: they go by the last token's embedding, as the targets of ``correlated_pair`` mostly
do, so that many of their guesses are right; and by the states that they are fed with, so that a wrong row shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.tensor_rows import n_rows, tensor_rows
from tests.support.ggufs import Weights, write_gguf

GAIN = 8.0
"""How much larger the states of a tiny EAGLE-3 head are than embeddings."""


def whole(file: GGUFFile, name: str) -> Any:
    """A tensor of a model's file as floats."""
    rows = tensor_rows(file, name, slice(0, n_rows(file, name)))
    return rows if len(file.tensors[name].shape) > 1 else rows[0]


def write_eagle3(
    target: Path,
    out: Path,
    layers: tuple[int, ...] = (1, 2, 3),
    n_out: int | None = None,
    *,
    own_embeddings: bool = False,
    own_output: bool = True,
    tokens: bool = True,
    seed: int = 0,
    noise: float = 0.02,
    extra: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    ids: Sequence[int] | None = None,
) -> Path:
    """An EAGLE-3 head for a model file.

    Its state is GAIN times the embedding of the token before; its attention looks at the last token and puts that
    token's embedding in the place of the older one.

    Args:
        target: a model whose vocabulary is in its file.
        out: where to write the head.
        layers: of the target, whose inputs are fused.
        n_out: tokens that it can guess, chosen at random and in no order; None for all, without a token map.
        own_embeddings: whether it has embeddings, or takes the target's.
        own_output: whether it has an output matrix, or takes the target's.
        tokens: whether its file names the target's tokens.
        seed: of the random weights.
        noise: relative to the weights.
        extra: metadata that replaces or adds to the usual; None leaves a key out.
        drop: tensors to leave out.
        ids: the token map as it is to be in the file, right or wrong.
    """
    rng = np.random.default_rng(seed)
    with GGUFFile(target) as file:
        embedding, name = whole(file, "token_embd.weight"), file.architecture
        output = whole(file, "output.weight" if "output.weight" in file.tensors else "token_embd.weight")
        norm = whole(file, "output_norm.weight")
        keys = [key for key in file.metadata if key.startswith("tokenizer.")]
        vocabulary = {key: _plain(file.metadata[key]) for key in keys}
        base = float(file.field("rope.freq_base", 10000.0))
    n_vocab, n = embedding.shape
    n_head, n_ff, one = 4, n, np.eye(n)

    def matrix(values: Any) -> Any:
        scale = noise * values.std()
        return (values + scale * rng.standard_normal(values.shape)).astype(np.float32)

    weights: Weights = {
        "fc.weight": matrix(np.concatenate([one * GAIN * share for share in (0.5, 0.25, 0.25)], axis=1)),
        "output_norm.weight": norm,
        "blk.0.attn_norm.weight": np.ones(n, np.float32),
        "blk.0.attn_norm_2.weight": np.ones(n, np.float32),
        "blk.0.ffn_norm.weight": np.ones(n, np.float32),
        "blk.0.attn_q.weight": matrix(np.concatenate([1.6 * one, 0 * one], axis=1)),
        "blk.0.attn_k.weight": matrix(np.concatenate([1.6 * one, 0 * one], axis=1)),
        "blk.0.attn_v.weight": matrix(np.concatenate([GAIN * one, -GAIN * one], axis=1)),
        "blk.0.attn_output.weight": matrix(one),
    }
    for part in ("gate", "up", "down"):
        weights[f"blk.0.ffn_{part}.weight"] = (rng.standard_normal((n, n)) / np.sqrt(n)).astype(np.float32)
    if own_embeddings:
        weights["token_embd.weight"] = embedding
    if own_output:
        chosen = np.arange(n_vocab) if n_out is None else rng.permutation(n_vocab)[:n_out]
        chosen = chosen if ids is None else np.array(ids)
        weights["output.weight"] = output[chosen % n_vocab]
        if n_out is not None or ids is not None:
            weights["d2t"] = chosen.astype(np.int64)
    metadata: dict[str, Any] = {
        "eagle3.block_count": 1,
        "eagle3.context_length": 2048,
        "eagle3.embedding_length": n,
        "eagle3.feed_forward_length": n_ff,
        "eagle3.attention.head_count": n_head,
        "eagle3.attention.head_count_kv": n_head,
        "eagle3.attention.layer_norm_rms_epsilon": 1e-5,
        "eagle3.rope.dimension_count": n // n_head,
        "eagle3.rope.freq_base": base,
        "eagle3.target_hidden_size": n,
        "eagle3.target_layers": [int(layer) for layer in layers],
    }
    metadata |= vocabulary if tokens else {"tokenizer.ggml.model": "none", "eagle3.vocab_size": n_vocab}
    metadata |= {"general.basename": f"for {name}"} | dict(extra or {})
    kept = {tensor: weight for tensor, weight in weights.items() if tensor not in drop}
    return write_gguf(out, "eagle3", {key: value for key, value in metadata.items() if value is not None}, kept)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
