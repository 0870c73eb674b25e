"""A head as engines compute it: a model of one layer with rows of the target's output matrix, in a file of its own.

The file is made once on the user's machine. Every engine loads it: architecture ``llama``, no tokenizer, rows of
floats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec.errors import EngineError
from localspec.heads.card import NARROW, HeadCard, block_shapes
from localspec.heads.file import check_head, engine_folder, output_pieces
from localspec.model_files.gguf import (
    ROWS_ONLY,
    GGUFFile,
    GGUFOutput,
    TensorInfo,
    as_type,
    n_rows,
    new_tensor,
    tensor_rows,
)
from localspec.system.files import write_atomically

OUTPUT_TYPES = ("Q4_0", "Q8_0", "F16")  # types of the output rows, the quickest to compute first

# Types of matrices that are kept; others become Q8_0. ik-llama computes Q4_1 and Q5_1 wrongly where rows are no
# multiple of 128.
_AS_THEY_ARE = ("Q4_0", "Q8_0", "F16", "F32")

_FORMAT = 1
_PIECE = 1 << 20

_MOST_KEPT = 12


def engine_file(head: Path, target: Path, fingerprint: str, output_type: str = "Q4_0") -> Path:
    """The path of the file for engines; its name is a digest of all that goes into it.

    ``output_type`` is one of ``OUTPUT_TYPES``: rows that fill no blocks are F16, and F16 holds for the head's matrices
    too. EngineError if the head cannot be read.
    """
    try:
        with head.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise EngineError(f"cannot read {head}: {error.strerror or error}") from None
    digest.update(f"{fingerprint} {output_type} {_FORMAT}".encode())
    return engine_folder() / f"{target.stem[:60]}.{digest.hexdigest()[:20]}.gguf"


def engine_files(target: Path) -> list[Path]:
    return sorted(engine_folder().glob(f"{target.stem[:60]}.*.gguf"))


def assemble(place: Path, head: Path, target: Path, output_type: str = "Q4_0") -> None:
    """Make the file for engines, of ``engine_file``, where it is missing; the head has to ``fit`` the target.

    Raises:
        ModelFileError: the head is damaged, or the target has rows that cannot be unpacked.
        EngineError: the disk refuses.
    """
    try:
        if place.exists():
            place.touch()
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        with GGUFFile(head) as file, GGUFFile(target) as model:
            _write(place, file, check_head(file), model, output_type)
        _remove_oldest(place.parent)
    except OSError as error:
        raise EngineError(f"cannot write {place}: {error.strerror or error}") from None


def _write(place: Path, head: GGUFFile, card: HeadCard, target: GGUFFile, output_type: str) -> None:
    output = new_tensor("token_embd.weight", (card.n_out, card.n_embd), _engine_type(output_type, card.n_embd))
    block = list(_block(head, output_type) if card.has_block else _idle_block(card))
    with write_atomically(place) as file:
        writer = GGUFOutput(file, _metadata(card), [output, *block])
        for rows in output_pieces(target, card):
            writer.write(as_type(rows, output.type_name))
        for tensor in block:
            for piece in _pieces(head, tensor) if tensor.name in head.tensors else _idle(tensor):
                writer.write(piece)


def _metadata(card: HeadCard) -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "general.name": f"head for {card.target.name}",
        ROWS_ONLY: card.kind,
        "tokenizer.ggml.model": "none",
        "llama.vocab_size": card.n_out,
        **card.layer_metadata("llama"),
    }


def _engine_type(type_name: str, n_columns: int) -> str:
    if n_columns % 32 and type_name != "F32":
        return "F16"
    return type_name if type_name in _AS_THEY_ARE else "Q8_0"


def _block(head: GGUFFile, output_type: str) -> Iterator[TensorInfo]:
    for tensor in head.tensors.values():
        if not tensor.name.startswith("head."):
            wanted = "F16" if output_type == "F16" else tensor.type_name
            kind = tensor.type_name if len(tensor.shape) == 1 else _engine_type(wanted, tensor.shape[0])
            yield new_tensor(tensor.name, tensor.shape[::-1], kind)


def _idle_block(card: HeadCard) -> Iterator[TensorInfo]:
    """A block that adds nothing: rows go straight to the last norm, which is the target's, and the output matrix."""
    n = card.n_embd
    for name, shape in (block_shapes("blk.0", n, NARROW, NARROW, NARROW, n) | {"output_norm.weight": (n,)}).items():
        yield new_tensor(name, shape, "F32" if len(shape) == 1 else _engine_type("Q8_0", shape[1]))


def _idle(tensor: TensorInfo) -> Iterator[npt.NDArray[np.uint8]]:
    values = np.full(tensor.shape[::-1], len(tensor.shape) == 1, dtype=np.float32)
    yield as_type(values, tensor.type_name)


def _pieces(head: GGUFFile, tensor: TensorInfo) -> Iterator[npt.NDArray[np.uint8]]:
    stored = head.tensors[tensor.name]
    if stored.ggml_type == tensor.ggml_type:
        yield head.tensor_bytes(tensor.name)
        return
    step = max(1, _PIECE // tensor.shape[0])
    for first in range(0, n_rows(head, tensor.name), step):
        yield as_type(tensor_rows(head, tensor.name, slice(first, first + step)), tensor.type_name)


def _remove_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.gguf"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[_MOST_KEPT:]:
        with suppress(OSError):  # in use, on systems where that matters
            path.unlink()
