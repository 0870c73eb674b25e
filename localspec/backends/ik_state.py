"""ik_llama.cpp's record of a sequence, with values by token or by channel.

Without flash attention, as with several sequences, the engine keeps its values transposed, and its record of a sequence
says them so: ``by_rows`` makes of that one what a context with flash attention writes and reads, with the tokens in
order, and ``by_columns`` undoes it. Integers are little-endian, and the record is (``llama_data_write`` of its
``src/llama.cpp``):

- the number of tokens, and of each its position and a zero (int32);
- 1 if values are transposed, else 0; the number of layers (int32);
- for each layer the type of its keys (int32), bytes of a row (int64), the rows [n_tokens, row];
- for each layer the type of its values (int32), then either bytes of a row (int64) and the rows, or, transposed, bytes
  of an element, number of channels (int32), the elements [n_channels, n_tokens];
- what follows is copied.

A layer that keeps nothing has the type -1, and sizes of 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localspec.backends.llama_binding import Bytes
from localspec.errors import EngineError

_ELEMENT = 2
"""Bytes of a value: a memory of several sequences is of 16 bits."""


class _Reader:
    def __init__(self, state: Bytes) -> None:
        self._state, self._at = state, 0

    def bytes(self, n: int) -> Bytes:
        if not 0 <= n <= len(self._state) - self._at:
            raise EngineError("the saved state is cut short")
        self._at += n
        return self._state[self._at - n : self._at]

    def number(self, dtype: str = "<i4") -> int:
        return int(self.bytes(np.dtype(dtype).itemsize).view(dtype)[0])

    def rest(self) -> Bytes:
        return self._state[self._at :]


def by_rows(state: Bytes) -> Bytes:
    """Values by token, and tokens in the order of their positions.

    Raises:
        EngineError: it is no such record.
    """
    return _rewritten(state, transposed=True)


def by_columns(state: Bytes) -> Bytes:
    """Values by channel.

    Raises:
        EngineError: it is no such record, or one of quantised values.
    """
    return _rewritten(state, transposed=False)


def _rewritten(state: Bytes, *, transposed: bool) -> Bytes:
    reader, found = _Reader(state), list[Bytes]()

    def say(*numbers: int, dtype: str = "<i4") -> None:
        found.append(np.array(numbers, dtype=dtype).view(np.uint8))

    n = reader.number()
    cells = reader.bytes(8 * n).reshape(n, 8)
    order = np.argsort(np.ascontiguousarray(cells[:, :4]).view("<i4")[:, 0], kind="stable")
    if reader.number() != transposed:
        raise EngineError("the saved state stores its values in another order")
    n_layers = reader.number()
    say(n)
    found.append(cells[order].reshape(-1))
    say(not transposed, n_layers)
    for _ in range(n_layers):
        say(reader.number())
        row = reader.number("<i8")
        say(row, dtype="<i8")
        found.append(_bytes(reader.bytes(n * row).reshape(n, row)[order]))
    for _ in range(n_layers):
        kind = reader.number()
        say(kind)
        if transposed:
            element, n_channels = reader.number(), reader.number()
            say(element * n_channels, dtype="<i8")
            columns = reader.bytes(element * n_channels * n).view(f"V{max(1, element)}").reshape(n_channels, n)
            found.append(_bytes(columns.T[order]))
        else:
            row = reader.number("<i8")
            if kind not in (-1, 1) or row % _ELEMENT:
                raise EngineError("a state with quantised values does not fit a memory of several sequences")
            say(_ELEMENT if row else 0, row // _ELEMENT)
            rows = reader.bytes(n * row).view(f"V{_ELEMENT}").reshape(n, row // _ELEMENT)
            found.append(_bytes(rows[order].T))
    return np.concatenate([*found, reader.rest()])


def _bytes(array: Any) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
