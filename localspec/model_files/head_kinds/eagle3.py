"""EAGLE-3 heads as llama.cpp's converter writes them: a file of their own (Li et al. 2025, arXiv:2503.01840).

One layer reads, side by side, the embedding of a token and a state made of three states of the target by the matrix
``fc``. It may guess only some of the target's tokens, those in ``d2t``, and borrow the target's embeddings and output
matrix.
"""

from __future__ import annotations

import numpy as np

from localspec.errors import UnsupportedModel, shown
from localspec.model_files.eagle3_file import TRAINING
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.head_card import Training
from localspec.model_files.head_kinds.base import (
    PublishedHead,
    attention_sizes,
    check_shapes,
    damaged,
    layers_read,
    token_map,
    whole,
)
from localspec.model_files.vocab import Vocab

N_TAPS = 3
"""States that are fused: llama.cpp takes this many, as the paper has it."""


def read(file: GGUFFile) -> PublishedHead:
    """The header of an open EAGLE-3 file.

    Raises:
        UnsupportedModel: the engine cannot compute it.
        ModelFileError: it is damaged.
    """
    name = file.path.name
    if whole(file, "block_count") != 1:
        raise UnsupportedModel(f"{name} is an EAGLE-3 head with several layers, which llama.cpp does not support")
    layers = layers_read(file)
    if len(layers) != N_TAPS:
        raise damaged(file, f"eagle3.target_layers is {shown(layers)}")
    n, n_target = whole(file, "embedding_length"), whole(file, "target_hidden_size")
    n_ff, (n_head, n_head_kv, d_head) = whole(file, "feed_forward_length"), attention_sizes(file, n)
    has_tokens = "tokenizer.ggml.tokens" in file.metadata
    vocab = Vocab.from_gguf(file) if has_tokens else None
    n_vocab = vocab.n_tokens if vocab is not None else whole(file, "vocab_size")
    ids = token_map(file, n_vocab)
    borrows = [what for what, tensor in _OWN.items() if tensor not in file.tensors]
    if "output" in borrows and "d2t" in file.tensors:
        raise damaged(file, "it has a token map but no output matrix")
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (n, N_TAPS * n_target),
        "output_norm.weight": (n,),
        "output.weight": (len(ids), n),
        "token_embd.weight": (n_vocab, n),
        "blk.0.attn_norm.weight": (n,),
        "blk.0.attn_norm_2.weight": (n,),
        "blk.0.attn_q.weight": (n_head * d_head, 2 * n),
        "blk.0.attn_k.weight": (n_head_kv * d_head, 2 * n),
        "blk.0.attn_v.weight": (n_head_kv * d_head, 2 * n),
        "blk.0.attn_output.weight": (n, n_head * d_head),
        "blk.0.ffn_norm.weight": (n,),
        "blk.0.ffn_gate.weight": (n_ff, n),
        "blk.0.ffn_up.weight": (n_ff, n),
        "blk.0.ffn_down.weight": (n, n_ff),
    }
    if file.field("norm_before_fc", False):
        shapes["enc.output_norm.weight"] = (N_TAPS * n_target,)
    check_shapes(file, shapes, optional=tuple(_OWN.values()))
    return PublishedHead(
        kind="eagle3",
        title="EAGLE-3",
        engines=("llama-cpp", "mlx", "reference"),
        path=file.path,
        taps=tuple(f"layer:{layer - 1}" for layer in layers),  # what goes into a layer came out of the last
        n_target=n_target,
        n_embd=n,
        n_vocab=n_vocab,
        ids=np.sort(ids),
        fuses=True,
        borrows=tuple(borrows),
        vocab=vocab,
        training=_training(file),
    )


_OWN = {"embeddings": "token_embd.weight", "output": "output.weight"}


def _training(file: GGUFFile) -> Training | None:
    """How it was made, in the words of ``eagle3_file``."""
    text = file.metadata.get(TRAINING)
    try:
        return None if text is None else Training.from_json(str(text))
    except ValueError as error:
        raise damaged(file, f"{TRAINING}: {error}") from None
