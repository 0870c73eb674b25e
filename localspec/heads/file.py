"""Head files: a GGUF of the architecture ``localspec-head`` with the tensors of ``HeadCard.shapes``; and where they
lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec.errors import ModelFileError, UsageError
from localspec.heads.card import HeadCard
from localspec.model_files.gguf import GGUFFile, GGUFOutput, as_type, n_rows, new_tensor, tensor_rows
from localspec.system.files import home, write_atomically

Floats = npt.NDArray[np.float32]

_PIECE = 1 << 20  # values that are read at a time

TYPES = ("Q8_0", "F32", "F16")  # of a head's matrices


def write_head(
    path: Path, card: HeadCard, weights: Mapping[str, npt.NDArray[np.floating]], type_name: str = "Q8_0"
) -> Path:
    """Write a head file atomically.

    Args:
        weights: name -> array, of the shapes that the card says; a matrix is [rows out, columns in].
        type_name: of the matrices, one of ``TYPES``; F16 where their rows are no whole blocks.

    Raises:
        UsageError: weights that are missing, unknown, of another shape or not finite.
    """
    shapes = card.shapes()
    wrong = [name for name, shape in shapes.items() if name not in weights or weights[name].shape != shape]
    wrong += [name for name in weights if name not in shapes]
    wrong = wrong or [name for name in shapes if not np.isfinite(weights[name]).all()]
    if wrong:
        expected = shapes.get(wrong[0])
        what = f"a finite array of the shape {expected}" if expected else "no part of it"
        raise UsageError(f"{wrong[0]} must be {what} in a {card.kind} head of these sizes")
    tensors = [
        new_tensor(name, shape, "F32" if len(shape) == 1 else matrix_type(type_name, shape[-1]))
        for name, shape in shapes.items()
    ]
    with write_atomically(path) as file:
        output = GGUFOutput(file, card.metadata(), tensors)
        for tensor in tensors:
            output.write(as_type(np.asarray(weights[tensor.name], dtype=np.float32), tensor.type_name))
    return path


def read_card(path: Path) -> HeadCard:
    with GGUFFile(path) as file:
        return check_head(file)


def check_head(file: GGUFFile) -> HeadCard:
    """The card of an open head file whose tensors are what the card says; else ModelFileError says what is wrong."""
    card, name = HeadCard.from_gguf(file), file.path.name
    shapes = card.shapes()
    for odd in sorted(file.tensors.keys() ^ shapes.keys()):
        what = "lacks" if odd in shapes else "has a tensor of no use,"
        raise ModelFileError(f"{name} is damaged: it {what} {odd[:60]!r}; make it again")
    for tensor, shape in shapes.items():
        info = file.tensors[tensor]
        if info.shape != shape[::-1]:
            found = list(info.shape[::-1])
            raise ModelFileError(
                f"{name} is damaged: {tensor} is {found} where the card says {list(shape)}; make it again"
            )
        if info.type_name not in TYPES or (len(shape) == 1 and info.type_name != "F32"):
            raise ModelFileError(f"{name} is damaged: {tensor} is {info.type_name}; make it again")
    return card


def head_weights(file: GGUFFile, name: str) -> Floats:
    """A tensor of a checked head file, dequantised; ModelFileError if it holds what is no number."""
    rows = tensor_rows(file, name, slice(0, n_rows(file, name)))
    if not np.isfinite(rows).all():
        raise ModelFileError(f"{file.path.name} is damaged: {name} holds numbers that are not finite; make it again")
    return rows[0] if len(file.tensors[name].shape) == 1 else rows


def output_rows(target: GGUFFile) -> str:
    """The name of a target's output matrix, which may be that of its embeddings."""
    return "output.weight" if "output.weight" in target.tensors else "token_embd.weight"


def output_pieces(target: GGUFFile, card: HeadCard) -> Iterator[Floats]:
    """The target's output rows for the tokens that a head can guess [n, n_embd], some at a time."""
    step = max(1, _PIECE // card.n_embd)
    for first in range(0, card.n_out, step):
        yield tensor_rows(target, output_rows(target), card.token_map[first : first + step])


def matrix_type(wanted: str, n_columns: int) -> str:
    """Rows that fill no blocks are F16."""
    return "F16" if n_columns % 32 and wanted != "F32" else wanted


# Where heads lie that were trained here.


def heads_folder() -> Path:
    return home() / "heads"


def engine_folder() -> Path:
    return heads_folder() / "engine"


def find_heads() -> list[Path]:
    """The heads that were trained here, the newest first."""
    return sorted(heads_folder().glob("*.gguf"), key=lambda path: (-path.stat().st_mtime, path.name))
