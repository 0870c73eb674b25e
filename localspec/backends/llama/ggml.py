"""ggml, below the engines: devices, what a build was compiled for, the log, hidden states taken out of a pass."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.backends.base import NORM, FloatArray, layer_name
from localspec.errors import EngineError

CPU, GPU, INTEGRATED, ACCELERATOR = 0, 1, 2, 3
"""ggml's types of devices: GPUs with memory of their own, and with the machine's."""

_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "dev_count": ([], ctypes.c_size_t),
    "dev_get": ([ctypes.c_size_t], ctypes.c_void_p),
    "dev_name": ([ctypes.c_void_p], ctypes.c_char_p),
    "dev_description": ([ctypes.c_void_p], ctypes.c_char_p),
    "dev_type": ([ctypes.c_void_p], ctypes.c_int),
    "dev_memory": ([ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)], None),
    "dev_buffer_type": ([ctypes.c_void_p], ctypes.c_void_p),
    "dev_backend_reg": ([ctypes.c_void_p], ctypes.c_void_p),
    "buft_name": ([ctypes.c_void_p], ctypes.c_char_p),
    "reg_get_proc_address": ([ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgmlDevice:
    """What ggml computes on."""

    handle: int
    kind: int  # ``CPU``, ``GPU``, ``INTEGRATED`` or ``ACCELERATOR``
    name: str  # ggml's, e.g. CUDA0
    description: str  # its product name
    buffer: int  # the kind of memory that tensors get there
    splits_rows: bool  # whether matrices can be divided among it and others of its kind


class Ggml:
    """ggml's functions in llama-cpp-python's library.

    Raises:
        ImportError, OSError, AttributeError: another layout of the package, or none.
    """

    def __init__(self) -> None:
        import llama_cpp

        self._library = llama_cpp.llama_cpp._lib
        self._functions = {name: self.bind(f"ggml_backend_{name}", *types) for name, types in _FUNCTIONS.items()}

    def bind(self, name: str, arguments: list[Any], result: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)((name, exporting(self._library, name)))

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_functions"][name]

    def devices(self) -> list[GgmlDevice]:
        """The devices of this machine, the CPU too."""
        return [self.describe(self.dev_get(i)) for i in range(self.dev_count())]

    def gpus(self) -> list[GgmlDevice]:
        """Where there is a GPU with memory of its own, llama.cpp leaves the one in the processor alone."""
        found = self.devices()
        own = [each for each in found if each.kind == GPU]
        return own or [each for each in found if each.kind == INTEGRATED]

    def describe(self, handle: int) -> GgmlDevice:
        name, description = (_text(read(handle)) for read in (self.dev_name, self.dev_description))
        registry = self.dev_backend_reg(handle)
        splits = bool(registry and self.reg_get_proc_address(registry, b"ggml_backend_split_buffer_type"))
        return GgmlDevice(
            handle, int(self.dev_type(handle)), name, description, self.dev_buffer_type(handle) or 0, splits
        )

    def memory(self, handle: int) -> tuple[int, int]:
        """Free and total memory of a device [bytes]."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        return int(free.value), int(total.value)

    def buffer_name(self, buffer: int) -> str:
        return _text(self.buft_name(buffer))


def rows_at(pointer: Any, n: int, width: int, kind: Any = ctypes.c_float) -> npt.NDArray[Any] | None:
    """The memory that a pointer points to, as rows [n, width]; None where it is null."""
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    return np.ctypeslib.as_array((kind * width * n).from_address(address)) if address else None


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


def exporting(library: ctypes.CDLL, function: str) -> ctypes.CDLL:
    """The library that has one of ggml's functions: the engine's own, which on most systems shows what those have that
    it needs, or one of ggml's beside it. OSError where none has it."""
    folder = Path(library._name).parent
    beside = (path for name in ("ggml", "ggml-base") for path in folder.glob(f"*{name}.*"))
    others = (ctypes.CDLL(str(path)) for path in beside if path.suffix in (".so", ".dylib", ".dll"))  # loaded already
    for each in chain([library], others):
        if hasattr(each, function):
            return each
    raise OSError(f"no library in {folder} has {function}")


@dataclass(frozen=True, slots=True)
class Device:
    """What an engine can compute on, with its memory, for people."""

    name: str  # as the engine calls it, e.g. CUDA0
    description: str  # its product name
    free_bytes: int  # memory free now
    total_bytes: int  # memory it has
    shared: bool  # whether this is the machine's own memory


def metal_gpu() -> list[Device] | None:
    """The GPU that MLX computes on, whose memory is the machine's; None where it does not say."""
    try:
        import mlx.core as mx

        info = mx.device_info()
        free = int(info["max_recommended_working_set_size"]) - mx.get_active_memory()
        return [Device("Metal", str(info["device_name"]), max(0, free), int(info["memory_size"]), True)]
    except (ImportError, AttributeError, KeyError, RuntimeError):
        return None


def llama_gpus() -> list[Device] | None:
    """The GPUs that llama.cpp puts layers on; None where llama-cpp-python has another layout: they work, only their
    memory stays unknown."""
    found = []
    try:
        ggml = Ggml()
        for each in ggml.gpus():
            free, total = ggml.memory(each.handle)
            is_shared = each.kind == INTEGRATED or each.name.startswith("Metal") or sys.platform == "darwin"
            if total > 0:
                found.append(Device(each.name, each.description, free, total, is_shared))
        return found
    except (ImportError, OSError, AttributeError):
        return None


# -- builds of an engine -----------------------------------------------------------------------------------------------
#
# A wheel is compiled for the oldest CPU it is meant for; the same source compiled here may use all that this one has.
# Such builds bear one version and differ in their kernels: in what a pass costs, and in what may be wrong with it.

# Names in the engines' own words -> as people write them. SSE and the like every CPU has.
_FEATURES = {
    "AVX": "AVX", "AVX2": "AVX2", "FMA": "FMA", "F16C": "F16C", "AVX_VNNI": "AVX-VNNI", "AVX512": "AVX-512",
    "AVX512_VNNI": "AVX512-VNNI", "AVX512_BF16": "AVX512-BF16", "AMX_INT8": "AMX", "NEON": "NEON", "FP16_VA": "FP16",
    "DOTPROD": "DOTPROD", "MATMUL_INT8": "I8MM", "SVE": "SVE", "SME": "SME",
}  # fmt: skip

BEYOND_AVX2 = ("AVX512-VNNI", "AVX-VNNI", "AVX-512", "AVX512-BF16")
"""What ik_llama.cpp, or localspec, has kernels for and its x86-64 wheels are not compiled for."""

NATIVE_TIMES: dict[str, tuple[dict[int, float], ...]] = {
    "AVX512-VNNI": (
        {1: 0.90, 2: 0.82, 3: 0.62, 4: 0.53, 8: 0.56, 16: 0.57, 256: 0.63},
        {1: 0.81, 2: 0.65, 3: 0.60, 4: 0.50, 8: 0.56, 16: 0.57, 256: 0.62},
    ),
    "AVX2": (
        {1: 0.84, 2: 0.84, 3: 0.89, 4: 0.89, 8: 0.93, 16: 1.00, 256: 1.02},
        {1: 0.86, 2: 0.81, 3: 0.84, 4: 0.88, 8: 0.94, 16: 0.98, 256: 1.07},
    ),
}
"""An instruction set -> the time of passes of an ik-llama compiled for it, with our kernels for K-quants, over its
wheel's, by width: of a 1.5B, and with the costs of a 7B, on EPYCs with and without it (benchmarks/RESULTS.md)."""

NATIVE_COMMAND = "localspec engine build"
"""Compiles ik-llama for this CPU; see ``native_build``."""


def system_info(library: Any) -> str:
    """The line that llama.cpp prints about itself."""
    function = library.llama_print_system_info
    if isinstance(library, ctypes.CDLL):
        function.argtypes, function.restype = [], ctypes.c_char_p
    return _text(function())


def built_for(system_info: str) -> list[str]:
    """What llama.cpp's line on itself means, ``CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : AVX2 = 1 | …``, or in older
    versions ``AVX2 = 1 | …``: devices first, then instruction sets."""
    devices: list[str] = []
    features: list[str] = []
    for part in system_info.split("|"):
        device, colon, setting = part.rpartition(":")
        if colon and (name := device.strip()) != "CPU":
            devices.append(name)
        key, _, value = setting.partition("=")
        if key.strip() in _FEATURES and value.strip() == "1":
            features.append(_FEATURES[key.strip()])
    return [*dict.fromkeys(devices), *dict.fromkeys(features)]


def native_gain(built: Collection[str], cpu: Collection[str]) -> tuple[str, str] | None:
    """What ik-llama's wheel, ``built`` for so much, would gain if it were compiled for this CPU: the instruction set,
    and how much; None where that is nothing worth waiting for."""
    if any(feature in built for feature in BEYOND_AVX2):
        return None
    feature = next((feature for feature in NATIVE_TIMES if feature in cpu), None)
    if feature is None:
        return None
    ratios = NATIVE_TIMES[feature][0]
    return feature, ", ".join(f"t({width}) ×{ratios[width]:.2f}" for width in (1, 4, 8)) + " (EPYC)"


def foreign_features(built: Collection[str], cpu: Collection[str]) -> list[str]:
    """What a build needs and this CPU lacks, beyond what wheels need: it was compiled on another machine."""
    return [feature for feature in built if feature in BEYOND_AVX2 and feature not in cpu] if cpu else []


def digest(folder: Path) -> str:
    """Eight hexadecimal digits that tell a build from others, by sizes and samples of all libraries in its folder."""
    found = hashlib.sha256()
    names = {path for pattern in ("*ggml*", "*llama*") for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(names):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(32):
                file.seek(size * i // 32)
                found.update(file.read(4096))
    return found.hexdigest()[:8]


# -- the log, kept out of the user's terminal --------------------------------------------------------------------------


class EngineLog:
    """A sink for engine messages."""

    def __init__(self) -> None:
        self.verbose = False  # print messages to standard error
        self.recent: deque[str] = deque(maxlen=50)

    def write(self, text: bytes | None) -> None:
        """Called by an engine, from any of its threads; must never raise into C."""
        with suppress(Exception):  # the caller is C code, which cannot catch it
            message = _text(text)
            self.recent.append(message)
            if self.verbose:
                sys.stderr.write(message)


engine_log = EngineLog()


# -- hidden states taken out of a pass ---------------------------------------------------------------------------------
#
# An engine asks an evaluation callback (``cb_eval``) of every node of the graph whether its values are wanted; those it
# computes, hands over, and goes on if told so. Logits stay what they are without it, to the bit.
#
# Looking a node up by its address takes less than half as long as asking for its name. A graph of the same shape has
# the same addresses as a rule, not by any promise: where a state was missed, the caller repeats the pass with names.

Flags = npt.NDArray[np.bool_]


class TensorFunctions:
    """ggml's functions that say what a tensor is, in the engine's library; ``callback_type`` is ctypes' type of an
    evaluation callback: (tensor, whether it asks, data) -> bool."""

    def __init__(self, library: ctypes.CDLL, callback_type: Any) -> None:
        self.callback_type = callback_type
        self.library = library = exporting(library, "ggml_get_name")
        # They return at once: to let go of the GIL for them would cost more than they do.
        quick = ctypes.PyDLL(library._name, handle=library._handle)
        tensor = ctypes.c_void_p
        self.name: Any = quick.ggml_get_name
        self.n_bytes: Any = quick.ggml_nbytes
        self.copy: Any = quick.ggml_backend_tensor_get  # from any memory, a GPU's too
        self.name.argtypes, self.name.restype = [tensor], ctypes.c_char_p
        self.n_bytes.argtypes, self.n_bytes.restype = [tensor], ctypes.c_size_t
        self.copy.argtypes, self.copy.restype = [tensor, tensor, ctypes.c_size_t, ctypes.c_size_t], None


class StateTap:
    """The evaluation callback of one context; must live as long as it.

    The engine calls it for other graphs of the context too, such as one that moves keys and values together. So it
    copies states, and stops a graph, within ``armed`` only.
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
        self._addresses: set[int] | None = None  # of nodes that are asked for their names; None is all
        self._last: str | None = None
        self._is_armed = self._over = False

    @contextmanager
    def armed(self, *, search: bool, last: str | None = None) -> Iterator[None]:
        """Within the block the engine runs a pass, up to the state ``last``; its states are taken out, and then freed.

        ``search``: whether every node is asked for its name, or only those where a wanted one was found before.
        """
        self._found = {name: [] for name in self._order[: self._order.index(last) + 1 if last else None]}
        self._addresses = None if search else self._known
        self._last, self._over = last, False
        self._is_armed = True
        try:
            yield
        finally:
            self._is_armed, self._found = False, {}

    def check(self) -> None:
        """Raise what was raised in the callback, which must not reach the engine."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def states(self, wanted_rows: Flags, n_at_once: int) -> dict[str, FloatArray] | None:
        """What the pass left, by name [n, n_embd]; None if something is missing.

        ``wanted_rows`` says whether the logits of a row were wanted [n]; the engine computes ``n_at_once`` together.
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
                if self._addresses is not None and tensor not in self._addresses:
                    return False
                return self._over or self._functions.name(tensor) in self._wanted
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
        """Compute no more; an engine that divides a graph goes on with its next part, and is stopped there again."""
        self._over, self._addresses = True, None
