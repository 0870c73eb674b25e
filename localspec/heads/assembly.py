"""A head as engines compute it: a model of one layer with rows of the target's output matrix, in a file of its own.

The file is made once on the user's machine. Every engine loads it: architecture ``llama``, no tokenizer, rows of
floats.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from localspec.errors import EngineError
from localspec.heads.card import NARROW, HeadCard, block_shapes
from localspec.heads.file import check_head, engine_folder, matrix_type, output_pieces
from localspec.model_files.gguf import ROWS_ONLY, GGUFFile, GGUFOutput, TensorInfo, as_type, new_tensor
from localspec.system.files import write_atomically

_OUTPUT_TYPE = "Q4_0"  # of the output rows, the quickest to compute
_FORMAT = 1
_MOST_KEPT = 12


def engine_file(head: Path, target: Path, fingerprint: str) -> Path:
    """The path of the file for engines; its name is a digest of all that goes into it.

    EngineError if the head cannot be read.
    """
    try:
        with head.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise EngineError(f"cannot read {head}: {error.strerror or error}") from None
    digest.update(f"{fingerprint} {_OUTPUT_TYPE} {_FORMAT}".encode())
    return engine_folder() / f"{target.stem[:60]}.{digest.hexdigest()[:20]}.gguf"


def engine_files(target: Path) -> list[Path]:
    return sorted(engine_folder().glob(f"{target.stem[:60]}.*.gguf"))


def assemble(place: Path, head: Path, target: Path) -> None:
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
            _write(place, file, check_head(file), model)
        _remove_oldest(place.parent)
    except OSError as error:
        raise EngineError(f"cannot write {place}: {error.strerror or error}") from None


def _write(place: Path, head: GGUFFile, card: HeadCard, target: GGUFFile) -> None:
    output = new_tensor("token_embd.weight", (card.n_out, card.n_embd), matrix_type(_OUTPUT_TYPE, card.n_embd))
    own = [tensor for name, tensor in head.tensors.items() if not name.startswith("head.")]
    idle = [] if card.kind == "chained" else _idle_block(card.n_embd)
    listed = [new_tensor(each.name, each.shape[::-1], each.type_name) for each in own]
    with write_atomically(place) as file:
        writer = GGUFOutput(file, _metadata(card), [output, *listed, *idle])
        for rows in output_pieces(target, card):
            writer.write(as_type(rows, output.type_name))
        for tensor in own:
            writer.write(head.tensor_bytes(tensor.name))
        for tensor in idle:
            values = np.full(tensor.shape[::-1], len(tensor.shape) == 1, dtype=np.float32)
            writer.write(as_type(values, tensor.type_name))


def _metadata(card: HeadCard) -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "general.name": f"head for {card.target.name}",
        ROWS_ONLY: card.kind,
        "tokenizer.ggml.model": "none",
        "llama.vocab_size": card.n_out,
        **card.layer_metadata(),
    }


def _idle_block(n: int) -> list[TensorInfo]:
    """A block of n channels that adds nothing: rows go straight to the last norm and the output matrix."""
    shapes = block_shapes("blk.0", n, NARROW, NARROW, NARROW, n).items()
    return [
        new_tensor(name, shape, "F32" if len(shape) == 1 else matrix_type("Q8_0", shape[1])) for name, shape in shapes
    ]


def _remove_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.gguf"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[_MOST_KEPT:]:
        with suppress(OSError):  # in use, on systems where that matters
            path.unlink()
