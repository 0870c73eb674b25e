"""What a head learns from, on disk: texts of the target, and what it computed at every place of them.

A shard is one file: a line of JSON, then the arrays, which are mapped and not read. It is written atomically.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from localspec.backends.base import FloatArray
from localspec.errors import LocalspecError
from localspec.sampling.sampling import top_k_ids
from localspec.system.files import private_folder, write_atomically

TOP_K = 16  # likeliest tokens whose probabilities are kept at every place: about 0.95 of the probability

_FORMAT = "localspec-shard 1"
_ALIGNED = 64
_UNFINISHED = "unfinished.shard"
_LARGEST = float(np.finfo(np.float16).max)


class ShardError(LocalspecError):
    """The file is no shard, or one of another run."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One text that the target has read or written; a place is a token of it together with the state after it."""

    name: str  # unique within a run; says where the text came from
    category: str  # kind of text: own, text, chat, or a category of the user's questions
    start: int  # the first token that the target said itself; 0 of a text that was only read
    temperature: float  # at which its last turn was drawn; 0 for a text that was only read
    held_out: bool  # kept for testing, never trained on
    tokens: npt.NDArray[np.int32]  # [n + 1]: the last one is what follows the last place, and has no state
    states: npt.NDArray[np.float16]  # [n, n_taps, n_embd]: after each token but the last, in the order of the taps
    top_ids: npt.NDArray[np.int32]  # [n, top_k]: the likeliest next tokens at each place, the likeliest first
    top_logprobs: npt.NDArray[np.float16]  # [n, top_k]: the logarithms of their probabilities at temperature 1

    def __len__(self) -> int:
        return len(self.states)


def likeliest(logits: FloatArray) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
    """Ids and log-probabilities of the ``TOP_K`` likeliest tokens of each row [n, n_vocab], likeliest first."""
    k = min(TOP_K, logits.shape[1])
    ids = np.empty((len(logits), k), dtype=np.int32)
    logprobs = np.empty((len(logits), k), dtype=np.float16)
    for i, row in enumerate(logits):
        top = top_k_ids(row, k)
        ids[i] = top[np.argsort(-row[top], kind="stable")]
        largest = row[ids[i, 0]]
        logprobs[i] = row[ids[i]] - largest - np.log(np.exp(row - largest).sum())
    return ids, logprobs


def as_states(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """States as float16; a few models have single values beyond its range."""
    return np.clip(rows, -_LARGEST, _LARGEST).astype(np.float16)


class Shards:
    """The passages of one run, in a folder.

    Attributes:
        passages: all that were written, in order; their arrays are mapped files.
        remarks: what was wrong with files that were left out, a line each.

    Raises:
        ShardError: a file is of another run: other taps, or another width.
    """

    def __init__(self, folder: Path, taps: Sequence[str], n_embd: int) -> None:
        self.folder = folder
        self.taps = tuple(taps)
        self.n_embd = n_embd
        self.passages: list[Passage] = []
        self.remarks: list[str] = []
        private_folder(folder)
        self._next = 0
        for path in sorted(folder.glob("[0-9]*.shard")):
            self._next = int(path.stem) + 1
            self._take(path)
        self.adopt_unfinished()

    def _take(self, path: Path) -> None:
        try:
            self.passages += _read(path, self.taps, self.n_embd)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.remarks.append(f"{path.name} is damaged and was left out ({error})")

    def adopt_unfinished(self) -> None:
        """Take unfinished passages as they are: every place of them is a lesson."""
        path, known = self.folder / _UNFINISHED, self.names
        if path.exists():
            done, self.passages = self.passages, []
            self._take(path)
            cut, self.passages = self.passages, done
            self.append([passage for passage in cut if passage.name not in known])
            del cut
            path.unlink()

    @property
    def names(self) -> set[str]:
        return {passage.name for passage in self.passages}

    @property
    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.shard"))

    def append(self, finished: Sequence[Passage], unfinished: Sequence[Passage] = ()) -> None:
        """Write a shard, and replace the unfinished passages that were written last time."""
        if finished:
            path = self.folder / f"{self._next:05d}.shard"
            with write_atomically(path, private=True) as file:
                _write(file, self.taps, self.n_embd, finished)
            self._next += 1
            self.passages += _read(path, self.taps, self.n_embd)
        if unfinished:
            with write_atomically(self.folder / _UNFINISHED, private=True) as file:
                _write(file, self.taps, self.n_embd, unfinished)


def _layout(n_tokens: int, n_places: int, n_taps: int, n_embd: int, top_k: int) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and types of the arrays of a file, in order."""
    return [
        ((n_tokens,), np.int32),
        ((n_places, top_k), np.int32),
        ((n_places, top_k), np.float16),
        ((n_places, n_taps, n_embd), np.float16),
    ]


def _write(file: BinaryIO, taps: Sequence[str], n_embd: int, passages: Sequence[Passage]) -> None:
    facts = [[each.name, each.category, each.start, each.temperature, each.held_out, len(each)] for each in passages]
    top_k = passages[0].top_ids.shape[1]
    header = {"format": _FORMAT, "taps": list(taps), "n_embd": n_embd, "top_k": top_k, "passages": facts}
    file.write(json.dumps(header).encode() + b"\n")
    parts = [[getattr(each, name) for each in passages] for name in ("tokens", "top_ids", "top_logprobs", "states")]
    n_places = sum(map(len, passages))
    for arrays, (shape, dtype) in zip(
        parts, _layout(n_places + len(passages), n_places, len(taps), n_embd, top_k), strict=True
    ):
        file.write(b"\0" * (-file.tell() % _ALIGNED))
        for array in arrays:
            if array.shape[1:] != shape[1:]:
                raise ValueError(f"an array of shape {array.shape} where {shape} is wanted")
            file.write(np.ascontiguousarray(array, dtype=dtype).data)


def _read(path: Path, taps: Sequence[str], n_embd: int) -> list[Passage]:
    """The passages of a file, their arrays mapped.

    Raises:
        ShardError: it is of another run.
        ValueError, KeyError, TypeError, OSError: it cannot be read, or is not a file of passages.
    """
    with path.open("rb") as file:
        header = json.loads(file.readline(1 << 26))
        at = file.tell()
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError("another format")
    if header["taps"] != list(taps) or header["n_embd"] != n_embd:
        raise ShardError(
            f"{path} holds states {', '.join(header['taps'])} of width {header['n_embd']}, "
            f"not {', '.join(taps)} of width {n_embd}"
        )
    facts = header["passages"]
    lengths = [int(row[-1]) for row in facts]
    n_places = sum(lengths)
    arrays = []
    size = path.stat().st_size
    whole = np.memmap(path, np.uint8, "r")
    for shape, dtype in _layout(n_places + len(facts), n_places, len(taps), n_embd, int(header["top_k"])):
        at += -at % _ALIGNED
        end = at + int(np.prod(shape)) * np.dtype(dtype).itemsize
        if end > size:
            raise ValueError("cut short")
        arrays.append(whole[at:end].view(dtype).reshape(shape))
        at = end
    return list(_cut(facts, lengths, arrays))


def _cut(facts: Sequence[Any], lengths: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> Iterator[Passage]:
    tokens, top_ids, top_logprobs, states = arrays
    for i, (row, n, end) in enumerate(zip(facts, lengths, accumulate(lengths), strict=True)):
        name, category, start, temperature, held_out, _ = row
        begin, places = end - n + i, slice(end - n, end)
        yield Passage(
            str(name),
            str(category),
            int(start),
            float(temperature),
            bool(held_out),
            tokens[begin : begin + n + 1],
            states[places],
            top_ids[places],
            top_logprobs[places],
        )
