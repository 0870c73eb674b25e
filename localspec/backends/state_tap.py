"""Hidden states taken out of a pass while a llama.cpp engine computes it.

An engine that was given an evaluation callback (``cb_eval``) asks it of every node of the graph whether its values are
wanted; those that are wanted it computes, hands over, and goes on if told so. Logits stay what they are without it, to
the bit: the same nodes are computed in the same order.

Asking the 705 nodes of 28 layers costs a pass 0.4 ms if each is asked for its name, and 0.15 to 0.2 ms if it is looked
up by its address (ik-llama, CPython 3.11; ``benchmarks/hidden_states.py``). A graph of the same shape lies at the same
addresses as a rule, not by any promise: so a state that was missed is an answer too, on which the caller repeats the
pass with names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.backends.forward import NORM, FloatArray, layer_name
from localspec.errors import EngineError

Flags = npt.NDArray[np.bool_]


def ggml_library(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library that has ggml's functions: the engine's own, except on Windows.

    Elsewhere a library shows what the libraries that it needs have too. The wheels of ik-llama have all of ggml in
    ``ggml.dll``; llama-cpp-python has what is asked for here in ``ggml-base.dll``.

    Raises:
        OSError: there is none beside it.
    """
    if hasattr(library, "ggml_get_name"):
        return library
    folder = Path(library._name).parent
    for name in ("ggml-base.dll", "ggml.dll"):
        if (folder / name).is_file() and hasattr(found := ctypes.CDLL(str(folder / name)), "ggml_get_name"):
            return found
    raise OSError(f"no library in {folder} exports ggml's functions")


class TensorFunctions:
    """ggml's functions that say what a tensor is.

    Args:
        library: the engine's.
        callback_type: ctypes' type of an evaluation callback: (tensor, whether it asks, data) -> bool.

    Attributes:
        library: the one that has ggml's functions.
    """

    def __init__(self, library: ctypes.CDLL, callback_type: Any) -> None:
        self.callback_type = callback_type
        self.library = library = ggml_library(library)
        # They return at once: to let go of the GIL for them would cost more than they do.
        quick = ctypes.PyDLL(library._name, handle=library._handle)
        tensor = ctypes.c_void_p
        self.name: Any = quick.ggml_get_name
        self.n_bytes: Any = quick.ggml_nbytes
        self.copy: Any = quick.ggml_backend_tensor_get  # from wherever it lies: a GPU's memory too
        self.name.argtypes, self.name.restype = [tensor], ctypes.c_char_p
        self.n_bytes.argtypes, self.n_bytes.restype = [tensor], ctypes.c_size_t
        self.copy.argtypes, self.copy.restype = [tensor, tensor, ctypes.c_size_t, ctypes.c_size_t], None


class _Everywhere:
    def __contains__(self, address: int) -> bool:
        return True


_EVERYWHERE = _Everywhere()


class StateTap:
    """The evaluation callback of one context; must live as long as it.

    The engine calls it for other graphs of the context too, such as one that moves keys and values together. So it
    copies states, and stops a graph, within ``armed`` only.

    Attributes:
        callback: for the engine.
    """

    def __init__(self, functions: TensorFunctions, names: Sequence[str], n_layers: int, n_embd: int) -> None:
        self.callback = functions.callback_type(self._evaluate)
        self._order = [name for name in (*map(layer_name, range(n_layers)), NORM) if name in names]
        self._error: BaseException | None = None
        self._functions = functions
        self._n_embd = n_embd
        self._cropped = {NORM, layer_name(n_layers - 1)}
        nodes = {f"l_out-{i}".encode(): layer_name(i) for i in range(n_layers)} | {b"result_norm": NORM}
        self._wanted = {node: name for node, name in nodes.items() if name in names}
        self._found: dict[str, list[FloatArray]] = {}
        self._known: set[int] = set()
        self._addresses: set[int] | _Everywhere = _EVERYWHERE
        self._last: str | None = None
        self._is_armed = self._over = False

    @contextmanager
    def armed(self, *, search: bool, last: str | None = None) -> Iterator[None]:
        """Within the block the engine runs a pass, whose states are taken out; what it left is freed at the end.

        Args:
            search: whether every node is asked for its name, or only those where a wanted one was found before.
            last: the state after which the pass ends; None computes all of it.
        """
        self._found = {name: [] for name in self._order[: self._order.index(last) + 1 if last else None]}
        self._addresses = _EVERYWHERE if search else self._known
        self._last, self._over = last, False
        self._is_armed = True
        try:
            yield
        finally:
            self._is_armed, self._found = False, {}

    def check(self) -> None:
        """Raise what was raised in the callback: it must not reach the engine."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def states(self, wanted_rows: Flags, n_at_once: int) -> dict[str, FloatArray] | None:
        """What the pass left, by name [n, n_embd]: up to ``last``; None if something is missing.

        Args:
            wanted_rows: of which rows logits were wanted [n].
            n_at_once: rows that the engine computes together.
        """
        states: dict[str, FloatArray] = {}
        everything = np.ones(len(wanted_rows), dtype=bool)
        for name, pieces in self._found.items():
            rows = wanted_rows if name in self._cropped else everything
            # The last layer is computed for the wanted rows only, or not: engines differ.
            parts = [rows[start : start + n_at_once] for start in range(0, len(rows), n_at_once)]
            whole = [
                piece[part] if len(piece) == len(part) else piece for piece, part in zip(pieces, parts, strict=False)
            ]
            states[name] = np.concatenate([np.empty((0, self._n_embd), dtype=np.float32), *whole])
            if len(states[name]) != np.count_nonzero(rows):
                return None
        return states

    def _evaluate(self, tensor: int, asks: bool, _data: int | None) -> bool:
        try:
            if not self._is_armed:
                return not asks  # computed to its end, and handed over nowhere
            if asks:
                return tensor in self._addresses and (self._over or self._functions.name(tensor) in self._wanted)
            return self._take(tensor)
        except BaseException as error:  # Ctrl-C is one
            self._error = error
            self._end()
            return not (asks or self._is_armed)

    def _take(self, tensor: int) -> bool:
        """Copy a state; whether to go on."""
        if self._over:
            return False
        name = self._wanted[self._functions.name(tensor)]
        self._known.add(tensor)
        n_bytes = self._functions.n_bytes(tensor)
        if n_bytes % (4 * self._n_embd):
            raise EngineError(f"the hidden state {name} has {n_bytes} bytes, which are no rows of {self._n_embd}")
        rows: FloatArray = np.empty((n_bytes // (4 * self._n_embd), self._n_embd), dtype=np.float32)
        if n_bytes:
            self._functions.copy(tensor, rows.ctypes.data, 0, n_bytes)
        self._found[name].append(rows)
        if name == self._last:
            self._end()
        return not self._over

    def _end(self) -> None:
        """Compute no more: an engine that divides a graph goes on with its next part, and is stopped there again."""
        self._over, self._addresses = True, _EVERYWHERE
