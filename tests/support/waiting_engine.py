"""An engine whose passes wait for a given time instead of computing: what else a round takes is our own doing.

Real threads and the real clock; a wait leaves the processor alone, as a pass on another device does, or keeps it busy,
as a driver does that asks again and again whether the device is done. A device computes while its caller goes on: what
is done beside a pass takes no time but what it takes longer. The logits follow from the position alone: at every place
the target has one token it is nearly certain of, and a draft names it first with a given probability, each place for
itself; so what a draft is worth is known. Files lend their vocabulary only.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from localspec.backends.base import Capabilities, Context, FloatArray, Forward, Model, Wanted, n_wanted
from localspec.backends.best_rows import MOST, by_token, n_looked_for
from localspec.backends.tokenizer import PythonByteLevel, Tokenizer
from localspec.engine.loading import Loader
from localspec.model_files.gguf import GGUFFile
from localspec.sampling.sampling import largest_ids

T = TypeVar("T")

_HASHED = bytes(12_000)  # Hashing it takes some ten microseconds

N_BASE = 16  # Rows that all others are made of: more than a processor's cache holds, of 152k logits

CERTAIN = 0.97  # Probability that the target gives to its most probable token


@dataclass(frozen=True, slots=True)
class Timing:
    """What passes take, and what a draft knows."""

    ms: float  # of a pass over one token
    ms_row: float = 0.0  # of each further token
    device: str = "gpu"  # what ``Capabilities.device`` says
    right: float | None = None  # probability that the most probable token is the target's; None is the target itself
    second: float = 0.5  # where it is not, the probability that the second is
    n_vocab: int = 0  # width of a row of logits; 0 is that of the file
    best: bool = False  # whether it hands out only the largest logits of a row where these are enough, as a device can
    spins: bool = False  # whether a wait keeps the processor busy, other threads of the process left alone

    def wait(self, seconds: float) -> None:
        """So long, or a little less."""
        if not self.spins:
            time.sleep(seconds)
            return
        ends = time.perf_counter() + seconds - 1e-5
        while time.perf_counter() < ends:
            hashlib.sha256(_HASHED)  # in C, without the lock that Python code needs


class WaitingModel(Model):
    """See the module's docstring."""

    def __init__(self, path: Path, timing: Timing) -> None:
        with GGUFFile(path) as file:
            self._read_header(file)
            self._tokenizer = Tokenizer(file, self.vocab, PythonByteLevel)
        self.timing = timing
        self.backend, self.engine, self.n_threads = "reference", f"waiting {timing.ms:g} ms", 1
        self.capabilities = Capabilities(batch_invariant=True, device=timing.device)
        self.n_vocab = max(timing.n_vocab, self.vocab.n_tokens)
        self.seconds = self.cpu_seconds = 0.0  # spent in passes so far, and of these, time of the processor
        self.nominal_ms = 0.0  # what these passes should have lasted
        self.named = [token for token in range(self.vocab.n_tokens) if token < 256 and token not in self.vocab.eog]
        noise = np.random.default_rng(0).standard_normal((N_BASE, self.n_vocab), dtype=np.float32)
        self.base = 2.0 * noise
        self.masses: list[float] = np.exp(self.base.astype(np.float64)).sum(axis=1).tolist()
        self.largest = [largest_ids(row, MOST + 8).tolist() for row in self.base] if timing.best else []

    def spent(self, started: float, busy: float) -> None:
        """Something since these times, of the clock and of the processor, was a pass."""
        self.cpu_seconds += time.thread_time() - busy
        self.seconds += time.perf_counter() - started  # the last thing, as asking for the time takes some

    def truth(self, position: int) -> int:
        """The token that the target says at a position."""
        return self.named[_mixed(position, 1) % len(self.named)]

    def ranks(self, position: int) -> dict[int, float]:
        """The most probable tokens at a position, with their probabilities."""
        truth, timing = self.truth(position), self.timing
        other = self.named[(self.named.index(truth) + 1) % len(self.named)]
        third = self.named[(self.named.index(truth) + 2) % len(self.named)]
        if timing.right is None:
            return {truth: CERTAIN, other: (1 - CERTAIN) / 2}
        first = min(max(timing.right, 0.01), 0.98)
        probs = first, max((1 - first) * timing.second, 0.002)
        if _chance(position, 2) < timing.right:
            return dict(zip((truth, other), probs, strict=True))
        near = _chance(position, 3) < timing.second
        return dict(zip((other, truth if near else third), probs, strict=True))

    def fill(self, row: FloatArray, position: int) -> None:
        """The logits after the token at ``position`` - 1."""
        which, named = self._at(position)
        row[:] = self.base[which]
        for token, logit in named.items():
            row[token] = logit

    def best(self, position: int, k: int) -> tuple[list[float], list[int]]:
        """The k largest of these logits and their tokens, the largest first, as a device finds them."""
        which, named = self._at(position)
        ids = self.largest[which][: k + len(named)]
        others = [(float(self.base[which, token]), token) for token in ids if token not in named]
        both = sorted([*others, *((logit, token) for token, logit in named.items())], reverse=True)[:k]
        return [logit for logit, _ in both], [token for _, token in both]

    def _at(self, position: int) -> tuple[int, dict[int, float]]:
        """Which of the rows that all are made of, and the logits that differ."""
        which = _mixed(position, 4) % N_BASE
        ranks = self.ranks(position)
        mass = self.masses[which] / max(1.0 - sum(ranks.values()), 1e-3)
        return which, {token: math.log(probability * mass) for token, probability in ranks.items()}

    def _new_context(self, n_ctx: int, hidden: tuple[str, ...]) -> Context:
        return WaitingContext(self, n_ctx, hidden)

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special, parse_special)

    def _close(self) -> None:
        pass


class WaitingContext(Context):
    """Nothing but the tokens; the rows of a pass are valid until the next, as those of fast engines are."""

    model: WaitingModel

    def __init__(self, model: WaitingModel, n_ctx: int, hidden: tuple[str, ...]) -> None:
        super().__init__(model, n_ctx, hidden)
        self._rows: FloatArray = np.empty((0, model.n_vocab), dtype=np.float32)
        self.finds_best = model.timing.best
        self.overlaps = model.timing.device == "gpu"

    def _decode_best(
        self, tokens: Sequence[int], n_best: int, logits: Literal["all", "last", "none"], rows: FloatArray | None
    ) -> Forward:
        k = n_looked_for(n_best, self.model.n_vocab)

        def found(positions: Sequence[int]) -> tuple[FloatArray, npt.NDArray[np.int32]]:
            values, ids = zip(*(self.model.best(position, k) for position in positions), strict=True)
            return np.array(values, dtype=np.float32), np.array(ids, dtype=np.int32)

        best = by_token(*self._pass(tokens, logits, found), n_best)
        assert best is not None
        return Forward(best[0], ids=best[1])

    def _decode(self, tokens: Sequence[int], logits: Literal["all", "last", "none"]) -> Forward:
        return Forward(self._pass(tokens, logits, self._fill))

    def _fill(self, positions: Sequence[int]) -> FloatArray:
        if len(positions) > len(self._rows):
            self._rows = np.empty((len(positions), self.model.n_vocab), dtype=np.float32)
        rows = self._rows[: len(positions)]
        for row, position in zip(rows, positions, strict=True):
            self.model.fill(row, position)
        return rows

    def _pass(self, tokens: Sequence[int], logits: Wanted, result: Callable[[Sequence[int]], T]) -> T:
        """Wait as long as a pass takes; what it returns for the positions of its rows is made within that time."""
        model, timing, started = self.model, self.model.timing, time.perf_counter()
        nominal = timing.ms + timing.ms_row * (len(tokens) - 1)
        ends = started + nominal / 1e3
        if self.meanwhile is not None:
            self.meanwhile()
        # Where what was done beside the pass takes longer than that, the rest is our own time.
        late, busy = max(0.0, time.perf_counter() - ends), time.thread_time()
        n = self.n_past + len(tokens) + 1
        found = result(range(n - n_wanted(logits, len(tokens)), n))
        while (left := ends - time.perf_counter()) > 0:
            timing.wait(left)
        model.nominal_ms += nominal
        model.spent(started + late, busy)
        return found

    def _truncate(self, n: int) -> None:
        pass

    def _close(self) -> None:
        self._rows = self._rows[:0]


@contextmanager
def waiting(timings: Mapping[Path, Timing]) -> Iterator[None]:
    """Within the block these files are loaded as waiting models, whatever engine is asked for."""

    def load(self: Loader, path: Path, *args: Any, **options: Any) -> Model:
        return WaitingModel(path, timings[path])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "load", load)
        yield


def _mixed(position: int, stream: int) -> int:
    x = (position * 0x9E3779B97F4A7C15 + stream * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _chance(position: int, stream: int) -> float:
    """A number in [0, 1) that belongs to a position."""
    return (_mixed(position, stream) >> 11) * 2.0**-53
