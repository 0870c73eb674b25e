"""Tiny heads of the kinds that models are published with, for the tiny models of ``ggufs``.

Their weights are made, not trained: they go by the last token's embedding, as the targets of ``correlated_pair`` mostly
do, so that many of their guesses are right; and by the states that they are fed with, so that a wrong row shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localspec.model_files.gguf import GGUFFile, n_rows, tensor_rows
from tests.support.ggufs import Weights, metadata_of, named, norms, sizes, write_gguf

GAIN = 8.0  # How much larger the states of a tiny EAGLE-3 head are than embeddings


def whole(file: GGUFFile, name: str) -> Any:
    """A tensor of a model's file as floats."""
    rows = tensor_rows(file, name, slice(0, n_rows(file, name)))
    return rows if len(file.tensors[name].shape) > 1 else rows[0]


def write_eagle3(
    target: Path,
    out: Path,
    layers: tuple[int, ...] = (1, 2, 3),  # of the target, whose inputs are fused
    # tokens that it can guess, chosen at random and in no order; None for all, without a token map
    n_out: int | None = None,
    *,
    own_embeddings: bool = False,  # own_embeddings, own_output: whether it has these matrices, or takes the target's
    own_output: bool = True,
    tokens: bool = True,  # whether its file names the target's tokens
    seed: int = 0,
    noise: float = 0.02,  # relative to the weights
    extra: Mapping[str, Any] | None = None,  # metadata that replaces or adds to the usual; None leaves a key out
    drop: tuple[str, ...] = (),  # tensors to leave out
    ids: Sequence[int] | None = None,  # the token map as it is to be in the file, right or wrong
    n_head_kv: int = 4,
    tensor_type: str = "F32",
) -> Path:
    """An EAGLE-3 head for a model file.

    Its state is GAIN times the embedding of the token before; its attention looks at the last token and puts that
    token's embedding in the place of the older one.
    """
    rng, of = np.random.default_rng(seed), _Target(target)
    embedding, name = of.embedding, of.name
    n_vocab, n = embedding.shape
    n_head, one = 4, np.eye(n)

    def matrix(values: Any) -> Any:
        return _noisy(values, noise, rng)

    weights: Weights = {
        "fc.weight": matrix(np.concatenate([one * GAIN * share for share in (0.5, 0.25, 0.25)], axis=1)),
        "output_norm.weight": of.norm,
        "blk.0.attn_q.weight": matrix(np.concatenate([1.6 * one, 0 * one], axis=1)),
        "blk.0.attn_k.weight": matrix(np.concatenate([1.6 * one, 0 * one], axis=1)),
        "blk.0.attn_v.weight": matrix(np.concatenate([GAIN * one, -GAIN * one], axis=1)),
        "blk.0.attn_output.weight": matrix(one),
    } | norms(*(f"blk.0.{part}_norm" for part in ("attn", "ffn")), "blk.0.attn_norm_2", width=n)
    for part in ("k", "v"):
        name_of = f"blk.0.attn_{part}.weight"
        weights[name_of] = weights[name_of][: n // n_head * n_head_kv]
    if (extra or {}).get("eagle3.norm_before_fc"):
        weights["enc.output_norm.weight"] = rng.uniform(0.5, 1.5, 3 * n).astype(np.float32)
    for part in ("gate", "up", "down"):
        weights[f"blk.0.ffn_{part}.weight"] = (rng.standard_normal((n, n)) / np.sqrt(n)).astype(np.float32)
    if own_embeddings:
        weights["token_embd.weight"] = embedding
    if own_output:
        chosen = np.arange(n_vocab) if n_out is None else rng.permutation(n_vocab)[:n_out]
        chosen = chosen if ids is None else np.array(ids)
        weights["output.weight"] = of.output[chosen % n_vocab]
        if n_out is not None or ids is not None:
            weights["d2t"] = chosen.astype(np.int64)
    settings = sizes(1, n, n, n_head, n_head_kv) | {
        "rope.dimension_count": n // n_head,
        "rope.freq_base": of.base,
        "target_hidden_size": n,
        "target_layers": [int(layer) for layer in layers],
    }
    metadata = named("eagle3", settings)
    metadata |= of.vocabulary if tokens else {"tokenizer.ggml.model": "none", "eagle3.vocab_size": n_vocab}
    metadata |= {"general.basename": f"for {name}"} | dict(extra or {})
    return _write(out, "eagle3", metadata, weights, drop, tensor_type)


def write_dflash(
    target: Path,
    out: Path,
    layers: Sequence[int] = (1, 2, 3),
    n_out: int | None = None,
    *,
    block_size: int = 5,
    own_embeddings: bool = False,
    own_output: bool = False,
    markov: bool = False,  # DSpark: with matrices that correct a row by the guess before it
    from_anchor: bool = True,  # of DSpark, whether the row of the last token guesses the next one
    confidence: bool = False,  # of DSpark, whether it estimates how sure it is
    selector: int = 0,  # DFlash2: how many candidates of a row are scored by that of the row before
    causal: bool | None = None,  # whether rows see those before them only; None leaves that to the engine
    windows: Sequence[bool] | None = None,  # which of its layers look back a few rows only; None for all of them far
    n_layers: int = 2,  # those after the first have small random weights
    seed: int = 0,
    noise: float = 0.02,
    extra: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """A block drafter for a model file: DFlash, or DSpark.

    Its masks look at the token before the block's first one, which most keys are made to allow, and somewhat at the
    states before it; and take over its embedding, so that the first guess is often right and others are at times.
    """
    rng, of = np.random.default_rng(seed), _Target(target)
    n_vocab, n = of.embedding.shape
    n_head, d_head, mask = 2, n, n_vocab - 1

    def small(*shape: int) -> Any:
        return (0.1 * rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    query, key = _turned_to_the_token_before(d_head, of.base)
    normed = of.embedding / np.sqrt((of.embedding**2).mean(axis=1, keepdims=True))
    allowed = np.linalg.lstsq(normed, np.where(np.arange(n_vocab) == mask, -10.0, 1.0), rcond=None)[0]
    weights: Weights = {
        "fc.weight": _noisy(np.concatenate([np.eye(n) / len(layers)] * len(layers), axis=1), noise, rng),
        "enc.output_norm.weight": np.ones(n, np.float32),
        "output_norm.weight": of.norm,
    }
    for layer in range(n_layers):
        block = f"blk.{layer}"
        weights |= norms(f"{block}.attn_norm", f"{block}.ffn_norm", width=n)
        weights |= norms(f"{block}.attn_q_norm", f"{block}.attn_k_norm", width=d_head)
        for part in "qkv":
            weights[f"{block}.attn_{part}.weight"] = small(n_head * d_head, n)
        weights[f"{block}.attn_output.weight"] = small(n, n_head * d_head)
        for part in ("gate", "up", "down"):
            weights[f"{block}.ffn_{part}.weight"] = small(n, n)
    weights |= {
        "blk.0.attn_q.weight": _noisy(np.tile(np.outer(query, normed[mask]), (n_head, 1)), noise, rng),
        "blk.0.attn_k.weight": _noisy(np.tile(np.outer(key, allowed), (n_head, 1)), noise, rng),
        "blk.0.attn_v.weight": _noisy(np.tile(GAIN * np.eye(n), (n_head, 1)), noise, rng),
        "blk.0.attn_output.weight": _noisy(np.tile(np.eye(n), (1, n_head)) / n_head, noise, rng),
    }
    chosen = np.arange(n_vocab) if n_out is None else rng.permutation(n_vocab)[:n_out]
    if own_embeddings:
        weights["token_embd.weight"] = of.embedding
    if own_output or n_out is not None:
        weights["output.weight"] = of.output[chosen]
    if n_out is not None:
        weights["d2t"] = chosen.astype(np.int64)
    if markov:
        weights["markov_w1.weight"] = _noisy(normed, noise, rng)
        weights["markov_w2.weight"] = _noisy(2.0 * of.output[chosen], noise, rng)
    if confidence:
        weights["conf_proj.weight"] = small(1, 2 * n)
    if selector:
        # What a state is multiplied with to about the same number for most tokens; by that the pairs' scores count.
        alike = 3.0 * np.linalg.lstsq(normed, np.ones(n_vocab), rcond=None)[0]
        weights["selector_predecessor.weight"] = _noisy(normed, noise, rng)
        weights["selector_successor.weight"] = _noisy(2.0 * of.output, noise, rng)
        weights["selector_hidden.weight"] = _noisy(np.tile(alike, (n, 1)), noise, rng)
        kernel, group = 3, 8
        for part in (f"blk.{layer}.{part}" for layer in range(n_layers) for part in ("attn", "ffn")):
            base = 0.05 * rng.standard_normal((2, kernel, n)).astype(np.float32)
            base[:, 0] += 1.0
            weights[f"{part}_conv_base"] = base
            weights[f"{part}_conv_proj.weight"] = small(2 * kernel * (n // group), n)
    settings = sizes(n_layers, n, n, n_head, n_head, d_head) | {
        "rope.dimension_count": d_head,
        "rope.freq_base": of.base,
        "block_size": block_size,
        "target_layers": [int(layer) for layer in layers],
        "attention.causal": causal,
    }
    if markov:
        settings |= {"sample_from_anchor": from_anchor, "has_confidence_head": confidence}
    if selector:
        settings |= {"selector_top_k": selector, "selector_rank": n, "conv_kernel_size": 3, "conv_group_size": 8}
    if windows is not None:
        settings |= {"attention.sliding_window": 8, "attention.sliding_window_pattern": list(windows)}
    metadata = (
        named("dflash", settings)
        | of.vocabulary
        | {"tokenizer.ggml.mask_token_id": mask, "general.basename": f"for {of.name}"}
    )
    metadata |= dict(extra or {})
    return _write(out, "dflash", metadata, weights, drop)


def _write(
    out: Path, kind: str, metadata: Mapping[str, Any], weights: Weights, drop: Sequence[str], tensor_type: str = "F32"
) -> Path:
    kept = {tensor: weight for tensor, weight in weights.items() if tensor not in drop}
    return write_gguf(
        out, kind, {key: value for key, value in metadata.items() if value is not None}, kept, tensor_type
    )


def _turned_to_the_token_before(d_head: int, base: float) -> tuple[Any, Any]:
    """A query and a key whose product is largest one place apart, by the channels that turn fast [d_head]."""
    angles = base ** (-2.0 * np.arange(d_head // 16) / d_head)
    query, key = np.zeros(d_head), np.zeros(d_head)
    query[: len(angles)], query[d_head // 2 : d_head // 2 + len(angles)] = np.cos(angles), -np.sin(angles)
    key[: len(angles)] = 1.0
    return query, key


class _Target:
    """What a head takes over from its target."""

    def __init__(self, path: Path) -> None:
        with GGUFFile(path) as file:
            self.embedding, self.name = whole(file, "token_embd.weight"), file.architecture
            self.output = whole(file, "output.weight" if "output.weight" in file.tensors else "token_embd.weight")
            self.norm = whole(file, "output_norm.weight")
            metadata = metadata_of(file).items()
            self.vocabulary = {key: value for key, value in metadata if key.startswith("tokenizer.")}
            self.base = float(file.field("rope.freq_base", 10000.0))


def _noisy(values: Any, noise: float, rng: np.random.Generator) -> Any:
    scale = noise * values.std()
    return (values + scale * rng.standard_normal(values.shape)).astype(np.float32)
