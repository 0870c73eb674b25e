"""ik_llama.cpp through ik-llama-cpp-python: ready wheels, and much cheaper wide passes on a CPU.

The bindings declare the C structs by hand, so they fit one version only: any other is refused, and so is a library
whose default parameters do not read back as that version's.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import numpy as np

from localspec.backends.llama.binding import Binding, Bytes, Place, Places
from localspec.backends.llama.ggml import (
    TensorFunctions,
    built_for,
    digest,
    engine_log,
    exporting,
    foreign_features,
    system_info,
)
from localspec.backends.llama.model import LlamaModel
from localspec.backends.placement import Placement
from localspec.backends.soundness import has_usual_sizes
from localspec.errors import EngineError, EngineUnavailable, UsageError
from localspec.model_files.gguf import GGUFFile, TensorInfo
from localspec.system.files import home
from localspec.system.machine import (
    cpu_features,
    cpu_flags,
    missing_cpu_features,
    prepare_threads,
)

# -- the record of a sequence, with values by token or by channel ------------------------------------------------------
#
# Without flash attention, as with several sequences, the engine keeps its values transposed, and so does its record of
# a sequence. ``by_rows`` makes of that one what a context with flash attention writes and reads, with the tokens in
# order; ``by_columns`` undoes it. The record is, in little-endian integers (``llama_data_write``, ``src/llama.cpp``):
#
# - the number of tokens, and of each its position and a zero (int32);
# - 1 if values are transposed, else 0; the number of layers (int32);
# - for each layer the type of its keys (int32), bytes of a row (int64), the rows [n_tokens, row];
# - for each layer the type of its values (int32), then either bytes of a row (int64) and the rows, or, transposed,
#   bytes of an element, number of channels (int32), the elements [n_channels, n_tokens];
# - what follows is copied.
#
# A layer that keeps nothing has the type -1, and sizes of 0.

_ELEMENT = 2  # bytes of a value: a memory of several sequences is of 16 bits


def _rewritten(state: Bytes, *, transposed: bool) -> Bytes:
    """The other one of a record with values ``transposed`` or not; EngineError where it is none, or quantised."""
    at, found = 0, list[Bytes]()

    def read(n: int) -> Bytes:
        nonlocal at
        if not 0 <= n <= len(state) - at:
            raise EngineError("the saved state is cut short")
        at += n
        return state[at - n : at]

    def number(dtype: str = "<i4") -> int:
        return int(read(np.dtype(dtype).itemsize).view(dtype)[0])

    def say(*numbers: int, dtype: str = "<i4") -> None:
        found.append(np.array(numbers, dtype=dtype).view(np.uint8))

    n = number()
    cells = read(8 * n).reshape(n, 8)
    order = np.argsort(np.ascontiguousarray(cells[:, :4]).view("<i4")[:, 0], kind="stable")
    if number() != transposed:
        raise EngineError("the saved state stores its values in another order")
    n_layers = number()
    say(n)
    found.append(cells[order].reshape(-1))
    say(not transposed, n_layers)
    for _ in range(n_layers):
        say(number())
        row = number("<i8")
        say(row, dtype="<i8")
        found.append(_bytes(read(n * row).reshape(n, row)[order]))
    for _ in range(n_layers):
        kind = number()
        say(kind)
        if transposed:
            element, n_channels = number(), number()
            say(element * n_channels, dtype="<i8")
            columns = read(element * n_channels * n).view(f"V{max(1, element)}").reshape(n_channels, n)
            found.append(_bytes(columns.T[order]))
        else:
            row = number("<i8")
            if kind not in (-1, 1) or row % _ELEMENT:
                raise EngineError("a state with quantised values does not fit a memory of several sequences")
            say(_ELEMENT if row else 0, row // _ELEMENT)
            rows = read(n * row).view(f"V{_ELEMENT}").reshape(n, row // _ELEMENT)
            found.append(_bytes(rows[order].T))
    return np.concatenate([*found, state[at:]])


def _bytes(array: Any) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


NAME = "ik-llama"
VERSION = "0.1.5"

FAMILIAR = {
    "command-r", "deci", "falcon", "gemma", "gptneox", "internlm2", "llama", "minicpm", "olmo", "phi2", "qwen", "qwen2",
    "qwen2moe", "qwen3", "qwen3moe", "refact", "stablelm", "xverse",
}  # fmt: skip
"""Architectures that were run on files of many sizes; others are tried in another process first (see ``trial``)."""

_FAMILIAR_TYPES = {
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS",
}  # fmt: skip

_N_TYPES = 400  # size of its table of tensor types; beyond it, functions return whatever lies there

_INTERLEAVED_IN_FILES = (31, 32, 33)
"""Q4_0 with its rows interleaved for some CPUs: llama.cpp dropped them from its files, and ik_llama.cpp crashes."""

_ROWS_OF = {36: 128, 134: 512, 219: 256, 229: 256}
"""Rows must be multiples of this in kernels of I2_S, IQ1_BN, IQ1_S_R4 and IQ1_M_R4, which have smaller blocks."""


# -- which library -----------------------------------------------------------------------------------------------------

LIBRARY = "IK_LLAMA_CPP_LIB_PATH"  # the variable by which ik-llama-cpp-python loads another library than its own

GGML, LLAMA = {"darwin": ("libggml.dylib", "libllama.dylib"), "win32": ("ggml.dll", "llama.dll")}.get(
    sys.platform, ("libggml.so", "libllama.so")
)


def compiled_folder() -> Path:
    """Where ``localspec engine build`` compiles this version: ``lib`` has the libraries once they were checked."""
    return home() / "build" / f"{NAME}-{VERSION}"


def compiled_record() -> dict[str, Any] | None:
    """What is known of the libraries that were compiled, see ``native_build``; None where there are none."""
    try:
        record = json.loads((compiled_folder() / "lib" / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


RECORD = "build.json"
KERNELS = ("k_quants.h", "attention_of_one.h")  # in this folder: ours, which are compiled into it


def compiled_kernels(folder: Path | None = None) -> str | None:
    """Digest of our kernels in a folder of ik-llama's source, by default of those here; None where there are none."""
    try:
        parts = [(folder or Path(__file__).parent).joinpath(name).read_bytes() for name in KERNELS]
        return sha256(b"".join(parts)).hexdigest()[:8]
    except OSError:
        return None


EARLIER = "the engine compiled for this CPU has an earlier version's kernels; compiled again it may be faster"


def compiled_earlier() -> bool:
    """Whether the compiled library in use has other kernels than ``engine build`` compiles in now."""
    return compiled_library() is not None and (compiled_record() or {}).get("kernels") != compiled_kernels()


def compiled_library() -> Path | None:
    """The library that was compiled for this CPU, complete and checked; None where there is none."""
    record, path = compiled_record(), compiled_folder() / "lib" / LLAMA
    if record is None or not path.is_file() or record.get("digest") != digest(path.parent):
        return None
    flags = record.get("flags")
    return path if isinstance(flags, list) and cpu_flags().issuperset(flags) else None


def package_library() -> Path | None:
    """The library of the installed package; None where it has none."""
    spec = find_spec("ik_llama_cpp")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders if (path := Path(folder, "lib", LLAMA)).is_file()), None)


def _loaded_ggml(library: Path | None) -> ctypes.CDLL | None:
    base = (library or Path()).with_name(GGML)
    return ctypes.CDLL(str(base)) if base.is_file() else None


def _imported() -> tuple[Any, ctypes.CDLL | None]:
    """The package's module with its library loaded, and libggml."""
    chosen = os.environ.get(LIBRARY)
    path = Path(chosen) if chosen else compiled_library()
    # libggml is loaded ahead: a library that was compiled elsewhere does not know where to look for it.
    try:
        loaded = _loaded_ggml(path or package_library())
    except OSError:  # what it needs of the compiler's is gone since
        if chosen or path is None:
            raise
        path = None
        loaded = _loaded_ggml(package_library())
    if path is not None:
        os.environ[LIBRARY] = str(path)
    try:
        import ik_llama_cpp._ctypes_api as api
    finally:
        if path is not None and not chosen:
            del os.environ[LIBRARY]
    return api, loaded


_ALL_LAYERS = 9999  # of its GPU layers there is no number that stands for all

_MOVED_AT_ONCE = 100  # rows that one round of its defragmentation moves at least; of a model of 28 layers it moves 390

_N_OBJECTS = 64  # GGML_MAX_CONTEXTS: weights and contexts take two to four each, a pass two more while it runs
_N_SPARE = 8  # of them stay free: an engine that gets none while it loads ends the process

_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class _InitParams(ctypes.Structure):
    _fields_: ClassVar = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class IkLlamaBinding(Binding):
    """The older llama.cpp API that ik_llama.cpp keeps, with the functions its ctypes table lacks bound here."""

    name = NAME
    keeps_rows = True
    repacks = True  # False maps a file instead of reading and repacking all of it
    tries_several = True
    refusal = (
        f"{NAME} {VERSION} does not compute this {{architecture!r}} model; use --backend llama-cpp "
        "(pip install 'localspec[llama-cpp]')"
    )
    token_before_floats = True  # of its first pass of one row it looks at the token, which floats have none of
    batches_kv_types = False  # without flash attention the values are not quantised

    def __init__(self) -> None:
        try:
            found = metadata.version("ik-llama-cpp-python")
        except metadata.PackageNotFoundError:
            raise EngineUnavailable(
                f"ik-llama-cpp-python is not installed; install it with: pip install ik-llama-cpp-python=={VERSION}"
            ) from None
        if found != VERSION:
            raise EngineUnavailable(f"ik-llama-cpp-python {found} is installed, but exactly {VERSION} is needed")
        missing = missing_cpu_features()
        if missing:
            # Its wheels are compiled for these; without one, the first call would kill the process.
            raise EngineUnavailable(
                f"ik-llama-cpp-python needs a CPU with {' and '.join(missing)}, which this one lacks"
            )
        prepare_threads()
        try:
            api, self._base = _imported()
            lib, ggml = api._lib, exporting(api._lib, "ggml_init")
        except (OSError, ImportError, AttributeError) as error:
            hint = "; it needs Microsoft's Visual C++ Redistributable (x64)" if sys.platform == "win32" else ""
            raise EngineUnavailable(f"ik-llama-cpp-python cannot load its library: {error}{hint}") from None
        self.api, self.lib = api, lib
        # Only Linux says what the CPU has.
        foreign = foreign_features(built_for(system_info(lib)), cpu_features()) if sys.platform == "linux" else []
        if foreign:
            raise EngineUnavailable(
                f"ik-llama-cpp-python was compiled for a CPU with {' and '.join(foreign)}, which this one lacks; put "
                f"its wheel back: pip install --no-cache-dir --force-reinstall --no-deps ik-llama-cpp-python=={VERSION}"
            )
        self.version = f"{VERSION}+{digest(Path(lib._name).parent)}"
        pointer, i32, u32, size_t = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t
        for name, argtypes, restype in (
            ("llama_kv_cache_seq_rm", [pointer, i32, i32, i32], ctypes.c_bool),
            ("llama_kv_cache_seq_cp", [pointer, i32, i32, i32, i32], None),
            ("llama_kv_cache_defrag", [pointer], None),
            ("llama_kv_cache_update", [pointer], i32),
            ("llama_synchronize", [pointer], None),
            ("llama_get_logits", [pointer], pointer),
            ("llama_n_vocab", [pointer], i32),
            ("ggml_init", [_InitParams], pointer),
            ("ggml_free", [pointer], None),
            ("ggml_blck_size", [ctypes.c_int], ctypes.c_int64),
            ("llama_max_devices", [], size_t),
            ("ggml_backend_reg_get_count", [], size_t),
            ("ggml_backend_reg_get_default_buffer_type", [size_t], pointer),
            ("ggml_backend_buft_name", [pointer], ctypes.c_char_p),
            ("llama_log_set", [_LOG_CALLBACK, pointer], None),
            ("llama_model_has_recurrent", [pointer], ctypes.c_bool),
            ("llama_state_seq_get_size", [pointer, i32, u32], size_t),
            ("llama_state_seq_get_data", [pointer, pointer, size_t, i32, u32], size_t),
            ("llama_state_seq_set_data", [pointer, pointer, size_t, i32, u32], size_t),
        ):
            function = getattr(ggml if name.startswith("ggml") else lib, name)
            setattr(lib, name, function)  # on Windows that of another library
            function.argtypes, function.restype = argtypes, restype
        self._counting = Lock()
        self._check_structs()
        self.gpu = lib.ggml_backend_reg_get_count() > 1  # never in a wheel
        self.tensors = TensorFunctions(lib, api.ggml_backend_sched_eval_callback)
        self._log = _LOG_CALLBACK(lambda _level, text, _data: engine_log.write(text))
        lib.llama_log_set(self._log, None)
        lib.llama_backend_init()

    def _check_structs(self) -> None:
        model, context = self.api.llama_model_default_params(), self.api.llama_context_default_params()
        # Values spread over both structs: one field too many or too few anywhere shifts some of them.
        seen = [model.n_gpu_layers, model.n_ubatch, model.use_mmap, model.repack_tensors]
        seen += [context.n_ctx, context.n_batch, context.n_ubatch, context.yarn_ext_factor]
        seen += [context.type_k, context.type_v, context.flash_attn]
        if seen != [0, 512, True, False, 512, 2048, 512, -1.0, 1, 1, True]:
            raise EngineUnavailable(
                f"the library in ik-llama-cpp-python {VERSION} has another layout than its bindings; reinstall it"
            )

    def is_familiar(self, gguf: GGUFFile) -> bool:
        window, types = gguf.field("attention.sliding_window", 0), {each.type_name for each in gguf.tensors.values()}
        if not has_usual_sizes(gguf) or not types <= _FAMILIAR_TYPES or not isinstance(window, int):
            return False
        return gguf.architecture == "gemma3" if window else gguf.architecture in FAMILIAR  # a usual one is wide

    def set_model_options(self, params: Any) -> None:
        # Repacked rows are what makes wide passes cheap; they cannot be shared with the file's pages.
        params.use_mmap = not self.repacks
        params.repack_tensors = self.repacks

    def check_room(self) -> None:
        with self._counting:
            made = [self.lib.ggml_init(_InitParams(1024, None, True)) for _ in range(_N_SPARE)]
            for each in filter(None, made):
                self.lib.ggml_free(each)
        if not all(made):
            raise EngineError(
                f"ik-llama can hold no more models and contexts in one process (its limit is {_N_OBJECTS} ggml "
                "contexts): close some, use fewer drafters or a smaller --parallel, or --backend llama-cpp"
            )

    def places(self, placement: Placement) -> Places:
        # Its registry names kinds of memory, the CPU's first; a wheel has no other.
        buffers, devices = {}, []
        for i in range(self.lib.ggml_backend_reg_get_count()):
            buffer = self.lib.ggml_backend_reg_get_default_buffer_type(i)
            name = (self.lib.ggml_backend_buft_name(buffer) or b"").decode("utf-8", "replace")
            buffers["CPU" if i == 0 else name] = buffer
            if i:
                devices.append(Place(name, 0, name, name.startswith("CUDA")))
        return Places(devices, devices, buffers, int(self.lib.llama_max_devices()))

    def set_context_options(self, params: Any, n_sequences: int, branches: bool = False) -> None:
        params.n_seq_max = n_sequences  # it takes others too: this is how many rows of logits it keeps room for
        # With it, rows of several sequences in one pass abort the process, or come out wrong.
        params.flash_attn = n_sequences == 1 and not branches

    def free_model(self, model: int) -> None:
        self.api.llama_free_model(model)

    def remove(self, ctx: int, start: int, sequence: int = 0) -> bool:
        return bool(self.lib.llama_kv_cache_seq_rm(ctx, sequence, start, -1))

    def copy(self, ctx: int, source: int, target: int, n: int, start: int = 0) -> None:
        self.lib.llama_kv_cache_seq_cp(ctx, source, target, start, n)

    def window(self, ctx: int) -> int:
        return 0  # it gives nothing away

    def by_rows(self, state: Bytes) -> Bytes:
        return _rewritten(state, transposed=True)

    def by_columns(self, state: Bytes) -> Bytes:
        return _rewritten(state, transposed=False)

    def clear(self, ctx: int) -> None:
        self.api.llama_kv_cache_clear(ctx)

    def defragment(self, ctx: int) -> bool:
        self.lib.llama_kv_cache_defrag(ctx)
        return True

    def close_gaps(self, ctx: int, n: int) -> None:
        # It finds the last cell in use by looking at every 32nd: behind a gap there, cells are left out of a pass.
        for _ in range(1 + n // _MOVED_AT_ONCE):
            self.lib.llama_kv_cache_defrag(ctx)
            self.lib.llama_kv_cache_update(ctx)

    def is_recurrent(self, model: int) -> bool:
        return bool(self.lib.llama_model_has_recurrent(model))

    def tokenizer(self, model: int) -> int:
        return model

    def n_vocab(self, model: int) -> int:
        return int(self.lib.llama_n_vocab(model))

    def computes(self, tensor: TensorInfo) -> bool:
        # It asserts that a type is in its table, divides by the block size of types that have none, and asserts in its
        # kernels that rows are whole blocks.
        kind = tensor.ggml_type
        if kind >= _N_TYPES or kind in _INTERLEAVED_IN_FILES:
            return False
        if len(tensor.shape) == 1 and kind and tensor.name.endswith(("norm.weight", ".bias")):
            return False  # asserted to be F32
        block = max(self.lib.ggml_blck_size(kind), _ROWS_OF.get(kind, 0))
        return bool(block > 0 and tensor.shape[0] % block == 0)


@cache
def binding() -> IkLlamaBinding:
    """The engine, loaded once per process; EngineUnavailable where it cannot be used here."""
    return IkLlamaBinding()


def load(path: Path | str, *, n_gpu_layers: int | None = None, **options: Any) -> LlamaModel:
    """Load a GGUF with ik_llama.cpp, its rows repacked for wide passes; see ``backends.registry``.

    The options are those of ``LlamaWeights``.

    Raises:
        UsageError: layers on a GPU are asked for, which its wheels do not have.
    """
    engine = binding()
    if n_gpu_layers and not engine.gpu:
        raise UsageError("ik-llama's wheels run on the CPU only; use --backend llama-cpp for --gpu-layers")
    if options.get("kv_type") == "f32":
        # Its flash attention aborts the whole process on a KV cache of F32.
        raise UsageError("ik-llama has no KV cache of type f32; use f16, q8_0 or q4_0")
    if options.get("is_trial"):
        engine.repacks = False  # which takes longer than what is tried
    layers = (_ALL_LAYERS if engine.gpu else 0) if n_gpu_layers is None else n_gpu_layers
    return LlamaModel(engine, Path(path), n_gpu_layers=_ALL_LAYERS if layers < 0 else layers, **options)
