"""How many bytes of weights a token reads, of a file and of what MLX makes of it: from headers alone, without MLX.

    python benchmarks/mlx_sizes.py FILE.gguf...

A pass over one token is bounded by that on any hardware. Prints the table of docs/engines.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from localspec.backends.mlx.weights import BLOCK_TYPES
from localspec.model_files.gguf import GGUFFile, TensorInfo

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def stored_bytes(info: TensorInfo, dtype: str) -> int:
    """Bytes of a tensor in memory: codes, and a scale and a bias for each group; plain numbers in ``dtype``."""
    kind = BLOCK_TYPES.get(info.type_name)
    if kind is None:
        return info.n_elements * _DTYPE_BYTES[dtype]
    return info.n_elements * kind.bits // 8 + info.n_elements // kind.group * 2 * _DTYPE_BYTES[dtype]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.gguf")
    files = parser.parse_args().files
    print("| file | bytes a token reads | in MLX, float16 | in MLX, float32 |\n|---|---|---|---|")
    for path in files:
        with GGUFFile(path) as file:
            own = bytes_per_token(file)
            made = [bytes_per_token(file, dtype) for dtype in ("float16", "float32")]
        cells = [f"{size / 1e6:.0f} MB (x{size / own:.2f})" for size in made]
        print(f"| {path.name} | {own / 1e6:.0f} MB | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
