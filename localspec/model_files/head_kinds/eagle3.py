"""EAGLE-3 heads as llama.cpp's converter writes them: a file of their own (Li et al. 2025, arXiv:2503.01840).

One layer reads, side by side, the embedding of a token and a state made of three states of the target by the matrix
``fc``. It may guess only some of the target's tokens, those in ``d2t``, and borrow the target's embeddings and output
matrix.
"""

from __future__ import annotations

import numpy as np

from localspec.errors import UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.gguf_types import TENSOR_TYPES
from localspec.model_files.head_kinds.base import PublishedHead, check_heads, check_shapes, damaged, whole
from localspec.model_files.vocab import Vocab
from localspec.values import shown

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
        raise UnsupportedModel(f"{name} is an EAGLE-3 head of several layers, which llama.cpp does not compute")
    layers = file.field("target_layers")
    if not isinstance(layers, np.ndarray) or layers.dtype.kind not in "iu" or len(layers) != N_TAPS:
        raise damaged(file, f"eagle3.target_layers is {shown(layers)}")
    if int(layers.min()) < 1:
        raise UnsupportedModel(f"{name} reads the target's embeddings among its states, which is not supported")
    n, n_target = whole(file, "embedding_length"), whole(file, "target_hidden_size")
    n_head, n_ff = whole(file, "attention.head_count"), whole(file, "feed_forward_length")
    n_head_kv = whole(file, "attention.head_count_kv", n_head)
    d_head = whole(file, "attention.key_length", n // n_head)
    wrong = check_heads(n_head, n_head_kv, d_head, whole(file, "rope.dimension_count", d_head))
    if whole(file, "attention.value_length", n // n_head) != d_head:
        wrong = "its keys and values differ in width"
    if wrong:
        raise damaged(file, wrong)
    has_tokens = "tokenizer.ggml.tokens" in file.metadata
    vocab = Vocab.from_gguf(file) if has_tokens else None
    n_vocab = vocab.n_tokens if vocab is not None else whole(file, "vocab_size")
    ids = _ids(file, n_vocab)
    borrows = [what for what, tensor in _OWN.items() if tensor not in file.tensors]
    if "output" in borrows and "d2t" in file.tensors:
        raise damaged(file, "it has a token map, and no output matrix for it")
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
    check_shapes(file, shapes, optional=tuple(_OWN.values()))
    return PublishedHead(
        kind="eagle3",
        title="EAGLE-3",
        path=file.path,
        taps=tuple(f"layer:{layer - 1}" for layer in layers.tolist()),  # what goes into a layer came out of the last
        n_target=n_target,
        n_embd=n,
        n_vocab=n_vocab,
        ids=np.sort(ids),
        fuses=True,
        borrows=tuple(borrows),
        vocab=vocab,
    )


_OWN = {"embeddings": "token_embd.weight", "output": "output.weight"}


def _ids(file: GGUFFile, n_vocab: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The target's token of each row of the output matrix [n_out], in the file's order."""
    info = file.tensors.get("d2t")
    if info is None:
        return np.arange(n_vocab)
    if TENSOR_TYPES.get(info.ggml_type, ("",))[0] != "I64" or len(info.shape) != 1:
        raise damaged(file, "its token map d2t is no list of 64-bit numbers")
    ids = file.tensor_bytes("d2t").view("<i8").astype(np.int64)
    if len(ids) < 2 or int(ids.min()) < 0 or int(ids.max()) >= n_vocab or len(np.unique(ids)) < len(ids):
        raise damaged(file, f"its token map d2t names tokens twice, or outside 0..{n_vocab - 1}")
    return ids
