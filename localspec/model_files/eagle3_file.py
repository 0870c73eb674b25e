"""EAGLE-3 heads that were trained here, as GGUF files of llama.cpp's layout: its own programs draft with them too.

The file has the target's tokens, since the engine compares them, and output rows for those that the head can guess. The
embeddings are the target's, which the engine looks up there. How the head was made is in a key of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.model_files.gguf import GGUFFile, GGUFOutput, as_type, new_tensor, tensor_rows
from localspec.model_files.head_card import HeadCard
from localspec.system.files import write_atomically

TRAINING = "localspec.head.training"
"""Metadata key: how it was made, as ``head_card.Training`` writes it."""

_N_CTX = 1 << 17
"""Context that the file declares [tokens]."""

_PIECE = 1 << 20
"""Values converted at a time."""


def write_eagle3(path: Path, card: HeadCard, weights: Mapping[str, npt.NDArray[np.floating]], target: GGUFFile) -> Path:
    """Write a head, in the place of an older one once it is complete: its matrices as Q8_0, its output rows as Q4_0.

    Args:
        path: its name; the folder must exist.
        card: what it is; of the kind ``eagle3``.
        weights: of the shapes that the card says.
        target: the target's file, open.

    Raises:
        OSError: the disk refuses.
        UnsupportedModel: the target has rows that cannot be unpacked.
    """
    rows = "output.weight" if "output.weight" in target.tensors else "token_embd.weight"
    tensors = [new_tensor(name, shape, _type(shape, "Q8_0")) for name, shape in card.shapes().items()]
    output = new_tensor("output.weight", (card.n_out, card.n_embd), _type((card.n_out, card.n_embd), "Q4_0"))
    token_map = new_tensor("d2t", (card.n_out,), "I64")
    tokens = [where for key, where in target.kv_ranges.items() if key.startswith("tokenizer.ggml.")]
    with write_atomically(path) as file:
        encoded = [target.buffer[start:end] for start, end in tokens]
        writer = GGUFOutput(file, _metadata(card), [*tensors, output, token_map], encoded=encoded)
        for tensor in tensors:
            writer.write(as_type(np.asarray(weights[tensor.name], dtype=np.float32), tensor.type_name))
        step = max(1, _PIECE // card.n_embd)
        for first in range(0, card.n_out, step):
            values = tensor_rows(target, rows, card.token_map[first : first + step])
            writer.write(as_type(values, output.type_name))
        writer.write(card.token_map.astype("<i8"))
    return path


def _type(shape: tuple[int, ...], wanted: str) -> str:
    if len(shape) == 1:
        return "F32"
    return wanted if shape[-1] % 32 == 0 else "F16"


def _metadata(card: HeadCard) -> dict[str, Any]:
    sizes = {
        "block_count": 1,
        "context_length": _N_CTX,
        "embedding_length": card.n_embd,
        "feed_forward_length": card.d_ff,
        "attention.head_count": card.n_head,
        "attention.head_count_kv": card.n_head_kv,
        "attention.key_length": card.d_head,
        "attention.value_length": card.d_head,
        "attention.layer_norm_rms_epsilon": float(card.norm_eps),
        "rope.dimension_count": card.d_head,
        "rope.freq_base": float(card.rope_base),
        "target_hidden_size": card.target.n_embd,
        # What goes into a layer came out of the one before.
        "target_layers": np.array([int(tap.removeprefix("layer:")) + 1 for tap in card.taps], dtype=np.int32),
    }
    return {
        "general.architecture": "eagle3",
        "general.name": f"EAGLE-3 head for {card.target.name}",
        **({"general.license": card.license} if card.license else {}),
        TRAINING: card.training.to_json(),
        **{f"eagle3.{name}": value for name, value in sizes.items()},
    }
