"""What a pass returns: logits, and hidden states by name.

A hidden state is what the residual stream holds for one token somewhere inside of the model [n_embd]. ``layer:i`` is
the stream after block i, counted from 0; ``norm`` is what the output matrix multiplies, after the last norm; ``nextn``
what a model's own layer for multi-token prediction goes on from, where it has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from localspec.errors import UsageError

FloatArray = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]
Wanted = Literal["all", "last", "none"]
"""Which rows of logits a pass returns."""

NORM, NEXTN = "norm", "nextn"
_NOTHING: Mapping[str, FloatArray] = MappingProxyType({})


class Forward:
    """The logits of one pass, and the hidden states that its context was made to return.

    Attributes:
        logits: float array [n_rows, n_vocab]; row i predicts the token that follows the i-th row asked for. Usually a
            view of the engine's memory: valid until the next decode on the same context; copy what must outlive it.
        ids: the tokens that logits belong to, increasing, int64 [n_rows, k], where these are the k largest of each row
            (``Context.decode_best``); ``logits`` is [n_rows, k] then. None: rows are whole.
        hidden: by name, float32 [n, n_embd], copies that stay valid; empty where nothing was asked for. A ``layer:i``
            before the last layer, and ``nextn``, have a row for every token of the call, whatever logits were wanted;
            ``norm`` and the last layer have a row for each row of logits, because engines compute no more there.
    """

    __slots__ = ("hidden", "ids", "logits")

    def __init__(
        self, logits: FloatArray, hidden: Mapping[str, FloatArray] = _NOTHING, ids: TokenIds | None = None
    ) -> None:
        self.logits = logits
        self.hidden = hidden
        self.ids = ids

    def __len__(self) -> int:
        return len(self.logits)

    def take(self, rows: Sequence[int]) -> Forward:
        """Some of the rows, copied; of a pass that returned one of everything for every token."""
        hidden = {name: states[list(rows)] for name, states in self.hidden.items()}
        return Forward(self.logits[list(rows)], hidden, None if self.ids is None else self.ids[list(rows)])

    def best(self) -> list[int]:
        """The most probable token of each row (the lowest id among equals)."""
        at = self.logits.argmax(axis=1)
        best: list[int] = (at if self.ids is None else self.ids[np.arange(len(at)), at]).tolist()
        return best


def layer_name(layer: int) -> str:
    """The name of the state after a layer, counted from 0."""
    return f"layer:{layer}"


def checked_names(names: Iterable[str], n_layers: int) -> tuple[str, ...]:
    """The names of hidden states without repetitions.

    Raises:
        UsageError: a model of ``n_layers`` has no such state.
    """
    known = {NORM, NEXTN, *map(layer_name, range(n_layers))}
    for name in names:
        if name not in known:
            raise UsageError(f"no hidden state is called {name!r}: it is {NORM!r} or layer:0 to layer:{n_layers - 1}")
    return tuple(dict.fromkeys(names))


def n_wanted(logits: Wanted, n: int) -> int:
    """How many rows of logits a pass over n tokens returns."""
    return {"all": n, "last": 1, "none": 0}[logits]


def joined(forwards: Sequence[Forward]) -> Forward:
    """What passes that continued each other returned, as of one pass."""
    if len(forwards) == 1:
        return forwards[0]
    return Forward(np.concatenate([forward.logits for forward in forwards]), joined_states(forwards))


def joined_states(forwards: Sequence[Forward]) -> dict[str, FloatArray]:
    """The hidden states of passes that continued each other, as of one pass."""
    return {name: np.concatenate([forward.hidden[name] for forward in forwards]) for name in forwards[0].hidden}
