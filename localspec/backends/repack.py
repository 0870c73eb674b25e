"""Copies of a model file with some tensors in another type: where an engine's kernels for theirs are wrong, and to make
a draft model lighter.

ik-llama-cpp-python 0.1.5 computes batches over Q4_1 and Q5_1 wrongly when a row is not a whole number of 128-value
groups (SmolLM2's 576, for one). Q8_0 of the same rows is right, and near-exact: it moves a weight by at most 1/254 of
the largest in its block of 32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec.errors import EngineError
from localspec.model_files.gguf import GGUFFile, GGUFOutput, TensorInfo, as_type, dequantised, new_tensor
from localspec.system.files import home, write_atomically
from localspec.system.machine import default_threads
from localspec.system.steps import Steps, exhaust

Bytes = npt.NDArray[np.uint8]

_SUSPECT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
_GROUP = 128
_DEQUANTISABLE = ("F32", "F16", "BF16", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K")
PIECE = 1 << 20  # values converted at a time: some tens of milliseconds

MARK = "localspec.repacked_from"  # metadata key of a copy: the fingerprint of the file it was made from


def near_exact_copy(path: Path, source: str, say: Callable[[str], None]) -> Path | None:
    """An 8-bit copy of a file with the fingerprint ``source``, made once and kept; None where none is needed.

    Raises:
        EngineError: the copy cannot be written.
    """
    target = _place(path, source, "q8_0")
    if target.exists():
        return target
    with GGUFFile(path) as gguf:
        affected = [name for name, tensor in gguf.tensors.items() if _is_affected(tensor)]
        if not affected:
            return None
        say(f"repacking {len(affected)} tensors of {path.name} to Q8_0, near-exactly (once)")
        try:
            exhaust(writing_copy(gguf, target, dict.fromkeys(affected, "Q8_0"), {MARK: source}))
        except OSError as error:
            raise EngineError(f"cannot write a repacked copy of {path.name}: {error.strerror or error}") from None
    return target


def why_copied(path: Path, loaded: Path) -> str | None:
    """The types that an engine computes wrongly, if it has loaded a near-exact copy in place of a file."""
    if loaded == path or loaded.parent != home() / "repacked" or not loaded.name.endswith(".q8_0.gguf"):
        return None
    with GGUFFile(path) as gguf:
        return " and ".join(sorted({tensor.type_name for tensor in gguf.tensors.values() if _is_affected(tensor)}))


def _place(path: Path, source: str, suffix: str) -> Path:
    return home() / "repacked" / f"{path.stem}.{source[:12]}.{suffix}.gguf"


def lighter_copy(path: Path, source: str, say: Callable[[str], None]) -> Path | None:
    """The lighter copy of a draft model; see ``lightening``."""
    return exhaust(lightening(path, source, say))


def lightening(path: Path, source: str, say: Callable[[str], None]) -> Steps[Path | None]:
    """A copy of a draft model, of the fingerprint ``source``, with its heavier matrices in Q4_0; made once and kept.

    Published small models are heavier than their names say: rows of 896 do not fit the 256-value blocks of Q4_K, so a
    "Q4_K_M" of Qwen2.5-0.5B has most matrices in Q5_0 and its output head in Q8_0.

    Returns:
        None where that would save less than a tenth, or the copy cannot be written.
    """
    target = _place(path, source, "q4_0-draft")
    if target.exists():
        return target
    with GGUFFile(path) as gguf:
        heavy = [tensor for tensor in gguf.tensors.values() if _is_heavy(tensor, gguf)]
        saved = sum(tensor.n_bytes - tensor.n_elements * 18 // 32 for tensor in heavy)
        if saved < 0.1 * gguf.n_bytes:
            return None
        say(f"making a lighter copy of {path.name} to draft with (once)")
        try:
            yield from writing_copy(gguf, target, {tensor.name: "Q4_0" for tensor in heavy}, {MARK: source})
        except OSError:
            return None  # a full disk: the published file drafts as well, only slower
    return target


def _is_heavy(tensor: TensorInfo, gguf: GGUFFile) -> bool:
    if len(tensor.shape) != 2 or tensor.shape[0] % 32 or tensor.type_name not in _DEQUANTISABLE:
        return False
    # Of an input embedding one row a token is read, unless it is the output head too.
    is_lookup = tensor.name == "token_embd.weight" and "output.weight" in gguf.tensors
    return not is_lookup and tensor.n_bytes * 32 > tensor.n_elements * 18


def _is_affected(tensor: TensorInfo) -> bool:
    return tensor.type_name in _SUSPECT and tensor.shape[0] % _GROUP != 0


def writing_copy(gguf: GGUFFile, target: Path, types: dict[str, str], marks: dict[str, str]) -> Steps[None]:
    """Write a copy of a GGUF with some tensors in another type, piece by piece, and rename it into place.

    The metadata is copied byte by byte, but for what says that a model comes in parts: the copy is one file.

    Args:
        types: tensor name -> new type (Q8_0, Q4_0, F16, …: what gguf-py can quantise to).
        marks: metadata strings to add.
    """
    kept = [where for key, where in gguf.kv_ranges.items() if not key.startswith("split.") and key not in marks]
    tensors = [
        new_tensor(name, tensor.shape[::-1], types[name]) if name in types else tensor
        for name, tensor in gguf.tensors.items()
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(target) as file:
        metadata = [gguf.buffer[start:end] for start, end in kept]
        output = GGUFOutput(file, marks, tensors, encoded=metadata, alignment=gguf.alignment)
        for data in _converted(gguf, types):
            output.write(data)
            yield


def _converted(gguf: GGUFFile, types: dict[str, str]) -> Iterator[Bytes]:
    """The data of all tensors in order, in pieces, a few converted at a time."""
    n_threads = default_threads()
    with ThreadPoolExecutor(n_threads) as pool:
        coming: deque[Future[Bytes]] = deque()

        def due(n_left: int) -> Iterator[Bytes]:
            while len(coming) > n_left:
                yield coming.popleft().result()

        try:
            for tensor in gguf.tensors.values():
                rows = gguf.tensor_bytes(tensor.name).reshape(tensor.n_elements // tensor.shape[0], -1)
                step = max(1, PIECE // tensor.shape[0])
                for first in range(0, len(rows), step):
                    coming.append(pool.submit(_piece, rows[first : first + step], tensor, types.get(tensor.name)))
                    yield from due(n_threads)
            yield from due(0)
        finally:
            for future in coming:
                future.cancel()


def _piece(rows: Bytes, tensor: TensorInfo, type_name: str | None) -> Bytes:
    return rows if type_name is None else as_type(dequantised(rows, tensor), type_name)
