"""Tiny heads for the tiny models of ``ggufs``: random, or good enough that many of their guesses are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.heads.card import HeadCard, Kind, TargetFacts, Training
from localspec.heads.file import write_head
from localspec.model_files.gguf import GGUFFile, fingerprint
from tests.support.published_heads import whole

Weights = dict[str, npt.NDArray[np.float32]]


def write_random_head(
    target: Path,
    out: Path,
    kind: Kind = "chained",
    taps: tuple[str, ...] = ("norm",),  # the hidden states that it reads
    n_out: int | None = None,  # tokens that it can guess, chosen at random; None for all
    *,
    seed: int = 0,
    steps: int = 4,
    type_name: str = "Q8_0",  # of its matrices
    # of a llama file, take the first block as it is: the head then guesses what the target's first layer would, which
    # is right about two times in three where the layers add little (``correlated_pair``)
    copies_target: bool = True,
    training: Training | None = None,
) -> Path:
    """A head for a model file."""
    rng = np.random.default_rng(seed)
    with GGUFFile(target) as file:
        facts = TargetFacts.of(file, fingerprint(target))
        heads = [file.field(f"attention.{name}", 2) for name in ("head_count", "head_count_kv")]
        d_head = file.field("attention.key_length", facts.n_embd // heads[0])
        shape = {"n_head": heads[0], "n_head_kv": heads[1], "d_head": d_head}
        shape |= {"d_ff": file.field("feed_forward_length", 2 * facts.n_embd)}
        ids = np.arange(facts.n_vocab) if n_out is None else np.sort(rng.permutation(facts.n_vocab)[:n_out])
        card = HeadCard(
            kind=kind,
            taps=taps,
            token_map=ids.astype(np.int32),
            steps=steps,
            target=facts,
            rope_base=float(file.field("rope.freq_base", 10000.0)),
            norm_eps=float(file.field("attention.layer_norm_rms_epsilon", 1e-5)),
            training=training or Training(command="a test", seed=seed),
            **({} if kind == "exit" else shape),
        )
        weights = {name: _random(name, shape, rng) for name, shape in card.shapes().items()}
        if copies_target and kind != "exit" and file.architecture == "llama":
            copied = {name for name in weights if name.startswith(("blk.0.", "output_norm")) and name in file.tensors}
            weights |= {name: whole(file, name) for name in copied}
    return write_head(out, card, weights, type_name)


def _random(name: str, shape: tuple[int, ...], rng: Any) -> npt.NDArray[np.float32]:
    if "norm" in name:
        return rng.uniform(0.8, 1.2, shape).astype(np.float32)  # type: ignore[no-any-return]
    if name in ("head.embed.weight", "head.chain.weight"):
        return (np.eye(shape[0]) + 0.02 * rng.standard_normal(shape)).astype(np.float32)  # type: ignore[no-any-return]
    scale = 0.1 if name.startswith("head.") else 1.0  # what comes from the target's states only tints the embedding
    values = rng.standard_normal(shape) * scale / np.sqrt(shape[-1] if len(shape) > 1 else 4)
    return values.astype(np.float32)  # type: ignore[no-any-return]
