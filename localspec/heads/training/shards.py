"""What a head learns from, on disk: texts of the target, and what it computed at every place of them.

A shard is one file: a line of JSON, then a record for each place, which are mapped and not read. It is written
atomically.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from localspec.backends.base import FloatArray
from localspec.sampling.sampling import top_k_ids
from localspec.system.files import private_folder, write_atomically

TOP_K = 16  # likeliest tokens whose probabilities are kept at every place: about 0.95 of the probability

_FORMAT = "localspec-shard 1"
_UNFINISHED = "unfinished.shard"
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class Passage:
    """One text that the target has read or written; a place is a token of it together with the state after it."""

    name: str  # unique within a run; says where the text came from
    category: str  # kind of text: own, text, chat, or a category of the user's questions
    start: int  # the first token that the target said itself; 0 of a text that was only read
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
            self.passages += self._passages_in(path)
        self.adopt_unfinished()

    def _passages_in(self, path: Path) -> list[Passage]:
        try:
            return _read(path, self.taps, self.n_embd)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.remarks.append(f"{path.name} is damaged and was left out ({error})")
            return []

    def adopt_unfinished(self) -> None:
        """Take unfinished passages as they are: every place of them is a lesson."""
        path, known = self.folder / _UNFINISHED, self.names
        if path.exists():
            cut = self._passages_in(path)
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


def _record(n_taps: int, n_embd: int, top_k: int) -> np.dtype[Any]:
    """What a file has of a place, for the fields of a passage."""
    likeliest = [("top_ids", "<i4", (top_k,)), ("top_logprobs", "<f2", (top_k,))]
    return np.dtype([("token", "<i4"), *likeliest, ("states", "<f2", (n_taps, n_embd))])


def _write(file: BinaryIO, taps: Sequence[str], n_embd: int, passages: Sequence[Passage]) -> None:
    facts = [
        [each.name, each.category, each.start, each.held_out, len(each), int(each.tokens[-1])] for each in passages
    ]
    top_k = passages[0].top_ids.shape[1]
    header = {"format": _FORMAT, "taps": list(taps), "n_embd": n_embd, "top_k": top_k, "passages": facts}
    file.write(json.dumps(header).encode() + b"\n")
    for each in passages:
        rows = np.empty(len(each), _record(len(taps), n_embd, top_k))
        rows["token"], rows["top_ids"], rows["top_logprobs"] = each.tokens[:-1], each.top_ids, each.top_logprobs
        rows["states"] = each.states
        file.write(rows.tobytes())


def _read(path: Path, taps: Sequence[str], n_embd: int) -> list[Passage]:
    """The passages of a file, their arrays mapped; ValueError, KeyError, TypeError or OSError if it holds none."""
    with path.open("rb") as file:
        header = json.loads(file.readline(1 << 26))
        begin = file.tell()
    if [header[name] for name in ("format", "taps", "n_embd")] != [_FORMAT, list(taps), n_embd]:
        raise ValueError("another format, or other states")
    n_places = sum(int(row[-2]) for row in header["passages"])
    places = np.memmap(path, _record(len(taps), n_embd, header["top_k"]), "r", begin, (n_places,))
    found, end = list[Passage](), 0
    for name, category, start, held_out, n, last in header["passages"]:
        rows, end = places[end : end + n], end + n
        tokens = np.append(rows["token"], np.int32(last))
        of = str(name), str(category), int(start), bool(held_out)
        found.append(Passage(*of, tokens, rows["states"], rows["top_ids"], rows["top_logprobs"]))
    return found
