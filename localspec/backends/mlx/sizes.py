"""How large a file becomes in MLX, and how much of that each token reads: from the header alone, without MLX."""

from __future__ import annotations

from localspec.backends.mlx.blocks import BLOCK_TYPES
from localspec.model_files.gguf_file import GGUFFile, TensorInfo

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def stored_bytes(info: TensorInfo, dtype: str) -> int:
    """Bytes of a tensor in memory: codes, and a scale and a bias for each group; plain numbers in ``dtype``."""
    kind = BLOCK_TYPES.get(info.type_name)
    if kind is None:
        return info.n_elements * _DTYPE_BYTES[dtype]
    return info.n_elements * kind.bits // 8 + info.n_elements // kind.group * 2 * _DTYPE_BYTES[dtype]


def model_bytes(file: GGUFFile, dtype: str) -> int:
    """Bytes of all weights in memory, when computing in ``dtype``."""
    return sum(stored_bytes(info, dtype) for info in file.tensors.values() if not info.name.startswith("rope_"))


def bytes_per_token(file: GGUFFile, dtype: str | None = None) -> int:
    """Bytes of weights that a pass over one token has to read, which bounds its speed on any hardware.

    All of them but the embedding, of which it reads a row (unless that is the output matrix too), and of a layer's
    experts the share that is used.

    Args:
        file: the model.
        dtype: what MLX computes in; None counts the file's own bytes, as an engine that reads those would.
    """
    n_used, n_experts = file.field("expert_used_count", 0), file.field("expert_count", 0)
    total = 0
    for name, info in file.tensors.items():
        n_bytes = info.n_bytes if dtype is None else stored_bytes(info, dtype)
        if name == "token_embd.weight" and "output.weight" in file.tensors:
            n_bytes //= info.shape[-1]
        elif "_exps." in name and n_experts:
            n_bytes = n_bytes * int(n_used) // int(n_experts)
        elif name.startswith("rope_"):
            n_bytes = 0  # part of no product
        total += n_bytes
    return total
