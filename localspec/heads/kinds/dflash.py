"""Block-diffusion drafters as llama.cpp's converter writes them: DFlash, and DSpark and DFlash2 with more on top.

Some layers see the target's states as keys and values, and fill in a block of masks behind the last settled token, all
in one pass (Chen et al. 2026, arXiv:2602.06036). Of DSpark the logits of a row are corrected by which token the row
before it guesses; of DFlash2 some candidates of a row are scored by that, and every layer mixes a row with those before
it. Embeddings and output matrix may be the target's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localspec.errors import UnsupportedModel, is_whole, shown
from localspec.heads.card import block_shapes
from localspec.heads.kinds.base import (
    LLAMA_CPP,
    OWN_TENSORS,
    MaskBlock,
    PublishedHead,
    layers_read,
    token_map,
)
from localspec.model_files.gguf import GGUFFile, attention_sizes, check_shapes, damaged, whole
from localspec.model_files.vocab import Vocab

MAX_ROWS = 64  # rows of the widest block: one pass has to hold all of it
_BLOCK_SIZE = 16  # of a file that does not say


def read(file: GGUFFile) -> PublishedHead:
    """The header of an open file of a block drafter.

    Raises:
        UnsupportedModel: the engine, or what feeds it, cannot compute it.
        ModelFileError: it is damaged.
    """
    name = file.path.name
    if file.architecture == "dflash-draft":
        raise UnsupportedModel(
            f"{name} is a DFlash drafter in the format of a fork of llama.cpp; only files made by llama.cpp's own "
            "converter are supported"
        )
    vocab = Vocab.from_gguf(file)
    is_dspark = "markov_w1.weight" in file.tensors
    is_dflash2 = "selector_hidden.weight" in file.tensors
    if is_dspark and is_dflash2:
        raise UnsupportedModel(f"{name} is both a DSpark and a DFlash2 drafter, which localspec does not support")
    if file.field("hyper_connection.count", 0):
        raise UnsupportedModel(
            f"{name} is a DSpark drafter with layers of DeepSeek-V4, which localspec does not support"
        )
    layers = layers_read(file)
    n, n_layers, n_ff = whole(file, "embedding_length"), whole(file, "block_count"), whole(file, "feed_forward_length")
    n_head, n_head_kv, d_head = attention_sizes(file, n)
    if wrong := _wrong_sections(file, d_head) or _wrong_windows(file, n_layers):
        raise damaged(file, wrong)
    ids = token_map(file, vocab.n_tokens)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (n, len(layers) * n),
        "enc.output_norm.weight": (n,),
        "output_norm.weight": (n,),
        "output.weight": (len(ids), n),
        "token_embd.weight": (vocab.n_tokens, n),
    }
    for layer in range(n_layers):
        shapes |= block_shapes(f"blk.{layer}", n, n_head * d_head, n_head_kv * d_head, n_ff, n)
        shapes |= {f"blk.{layer}.attn_{part}_norm.weight": (d_head,) for part in "qk"}
    values = tuple(f"blk.{layer}.attn_v.weight" for layer in range(n_layers))
    if is_dspark:
        rank = file.tensors["markov_w1.weight"].shape[0]
        shapes |= {"markov_w1.weight": (vocab.n_tokens, rank), "markov_w2.weight": (len(ids), rank)}
    n_candidates = whole(file, "selector_top_k") if is_dflash2 else 0
    if is_dflash2:
        if n_candidates > len(ids) or n < n_candidates * (n_candidates + 1):
            raise damaged(file, f"{n_candidates} candidates do not fit its {len(ids)} tokens and rows of {n} channels")
        shapes |= _shapes_of_selector(file, vocab.n_tokens, n, n_layers)
    check_shapes(file, shapes, optional=(*OWN_TENSORS.values(), *values))
    borrows = [what for what, tensor in OWN_TENSORS.items() if tensor not in file.tensors]
    if "output" in borrows and "embeddings" not in borrows:
        borrows.remove("output")  # its embeddings serve as that, too
    if "output.weight" not in file.tensors and len(ids) < vocab.n_tokens:
        raise damaged(file, "it has a token map but no output matrix")
    return PublishedHead(
        kind="dflash",
        engines=LLAMA_CPP if is_dspark or is_dflash2 else LLAMA_CPP | {"mlx": "localspec.heads.kinds.mlx:load_dflash"},
        title="DSpark" if is_dspark else "DFlash2" if is_dflash2 else "DFlash",
        path=file.path,
        taps=tuple(f"layer:{layer - 1}" for layer in layers),  # what goes into a layer came out of the last
        n_target=n,
        n_embd=n,
        n_vocab=vocab.n_tokens,
        ids=np.sort(ids),
        borrows=tuple(borrows),
        vocab=vocab,
        block=_block(file, vocab.n_tokens, is_dspark, n_candidates),
    )


def _block(file: GGUFFile, n_vocab: int, is_dspark: bool, n_candidates: int) -> MaskBlock:
    size = whole(file, "block_size", None if is_dspark or n_candidates else _BLOCK_SIZE)
    mask: Any = file.metadata.get("tokenizer.ggml.mask_token_id")
    if not is_whole(mask) or not 0 <= mask < n_vocab:
        raise damaged(file, f"its mask token {shown(mask)} is no token of its vocabulary")
    n_skipped = 0 if is_dspark and _flag(file, "sample_from_anchor", True) else 1
    if size <= n_skipped:
        raise damaged(file, f"its blocks have {size} rows, too few to draft with")
    if size > MAX_ROWS:
        raise UnsupportedModel(f"{file.path.name} has blocks of {size} rows; the maximum is {MAX_ROWS}")
    return MaskBlock(size, int(mask), n_skipped, _flag(file, "attention.causal", False), n_candidates)


def _shapes_of_selector(file: GGUFFile, n_vocab: int, n: int, n_layers: int) -> dict[str, tuple[int, ...]]:
    rank, kernel = whole(file, "selector_rank"), whole(file, "conv_kernel_size")
    group = whole(file, "conv_group_size")
    if n % group:
        raise damaged(file, f"its {n} channels cannot be divided into groups of {group}")
    shapes: dict[str, tuple[int, ...]] = {
        "selector_predecessor.weight": (n_vocab, rank),
        "selector_successor.weight": (n_vocab, rank),
        "selector_hidden.weight": (rank, n),
    }
    for part in (f"blk.{layer}.{part}" for layer in range(n_layers) for part in ("attn", "ffn")):
        shapes[f"{part}_conv_base"] = (2, kernel, n)
        shapes[f"{part}_conv_proj.weight"] = (2 * kernel * (n // group), n)
        base = file.tensors.get(f"{part}_conv_base")
        if base is not None and base.type_name != "F32":  # the engine adds floats to it
            raise damaged(file, f"{part}_conv_base has the type {base.type_name}")
    return shapes


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.field(name, default)
    if not isinstance(value, bool):
        raise damaged(file, f"{file.architecture}.{name} is {shown(value)}")
    return value


def _wrong_sections(file: GGUFFile, d_head: int) -> str:
    sections: Any = file.field("rope.dimension_sections")
    if sections is None:
        return ""
    whole_ones = isinstance(sections, np.ndarray) and sections.dtype.kind in "iu" and 3 <= len(sections) <= 4
    if not whole_ones or int(sections.min()) < 0 or int(sections[0]) < 1 or int(sections.sum()) > d_head:
        return f"its rope.dimension_sections {shown(sections)} are invalid"
    return ""


def _wrong_windows(file: GGUFFile, n_layers: int) -> str:
    window, pattern = file.field("attention.sliding_window", 0), file.field("attention.sliding_window_pattern")
    if not is_whole(window) or not 0 <= window < 1 << 31:
        return f"its sliding window {shown(window)} is invalid"
    if window and (not isinstance(pattern, np.ndarray) or pattern.dtype != bool or len(pattern) != n_layers):
        return f"its attention.sliding_window_pattern {shown(pattern)} does not fit its {n_layers} layers"
    return ""
