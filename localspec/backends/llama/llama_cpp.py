"""llama.cpp through llama-cpp-python: every device it was built for, and the newest architectures."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from localspec.backends import trial
from localspec.backends.base import Progress
from localspec.backends.llama.binding import MAX_SEQUENCES, Binding, Place, Places
from localspec.backends.llama.ggml import GPU, INTEGRATED, Ggml, TensorFunctions, digest, engine_log
from localspec.backends.llama.model import LlamaModel
from localspec.backends.llama.passes import MOST_ROWS
from localspec.backends.llama.rpc import rpc
from localspec.backends.llama.staging import staging
from localspec.backends.placement import Placement
from localspec.backends.soundness import has_usual_sizes
from localspec.errors import EngineError, EngineUnavailable, UnsupportedModel
from localspec.model_files import nextn
from localspec.model_files.gguf import GGUFFile
from localspec.system.machine import default_threads, prepare_threads

NAME = "llama-cpp"


class LlamaCppBinding(Binding):
    """llama-cpp-python's own ctypes table; its ``Llama`` class is not used."""

    name = NAME
    unshared = frozenset(("deepseek32", "deepseek4", "dots3note", "glm-dsa", "glm5-next", "hy_v4", "minimax-m3"))
    state_suffix = "_ext"
    saves_recurrent = True
    alignment = 32  # of its CPU buffers; it asserts that a mapped file has it

    def __init__(self) -> None:
        prepare_threads()
        try:
            import llama_cpp
        except ImportError as error:
            raise EngineUnavailable(
                f"llama-cpp-python is not installed ({error}); install it with: pip install 'localspec[llama-cpp]'"
            ) from None
        except (OSError, RuntimeError) as error:
            raise EngineUnavailable(f"llama-cpp-python cannot load its library: {error}") from None
        self.version = f"{llama_cpp.__version__}+{digest(Path(llama_cpp.llama_cpp._lib._name).parent)}"
        lib: Any = llama_cpp
        self.lib = self.api = lib
        self.tensors = TensorFunctions(lib.llama_cpp._lib, lib.llama_cpp.ggml_backend_sched_eval_callback)
        self._log = lib.llama_log_callback(lambda _level, text, _data: engine_log.write(text))
        lib.llama_log_set(self._log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.gpu = bool(lib.llama_supports_gpu_offload())
        self.finds_best = hasattr(lib, "llama_get_sampled_candidates_ith")

    def set_model_options(self, params: Any) -> None:
        pass

    def places(self, placement: Placement) -> Places:
        try:
            ggml = Ggml()
        except (OSError, AttributeError) as error:
            raise EngineUnavailable(f"llama-cpp-python does not show its devices: {error}") from None
        found = ggml.devices()
        buffers = {ggml.buffer_name(each.buffer): each.buffer for each in found if each.buffer}
        devices = {
            each: Place(each.name, each.handle, ggml.buffer_name(each.buffer), each.splits_rows)
            for each in found
            if each.kind in (GPU, INTEGRATED)
        }
        usual = [place for each, place in devices.items() if each.kind == GPU] or list(devices.values())
        far, links = [], []
        for address in placement.rpc:
            link, lent, _ = rpc().connect(address)
            links.append(link)
            for i, each in enumerate(lent):
                far.append(Place(each.name, each.handle, f"RPC{i}[{address}]", each.splits_rows))
                buffers[far[-1].buffer] = each.buffer
        # As in llama.cpp servers come first: what goes over the network is then least.
        return Places([*far, *devices.values()], [*far, *usual], buffers, int(self.lib.llama_max_devices()), links)

    def has_mtp(self, gguf: GGUFFile) -> bool:
        return nextn.has_layer(gguf) and self.has_nextn(gguf.architecture)

    def has_nextn(self, architecture: str) -> bool:
        if architecture not in nextn.GIVES_STATES:
            return False
        try:
            staging()
        except EngineError:  # the model works without; what asks for the layer says why there is none
            return False
        return hasattr(self.lib.llama_model_default_params(), "load_mtp")

    def set_context_options(self, params: Any, n_sequences: int, branches: bool = False) -> None:
        params.n_seq_max = MAX_SEQUENCES if branches else n_sequences
        # Else rows are computed in another order than they are fed in, and no sequence may have the room of another.
        params.kv_unified = n_sequences > 1 or branches
        params.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_AUTO
        # A sliding-window cache that keeps only its window cannot take rejected tokens back out.
        params.swa_full = True
        params.no_perf = True
        if self.finds_best and n_sequences == 1:
            params.n_outputs_max_per_seq = MOST_ROWS

    def free_model(self, model: int) -> None:
        self.lib.llama_model_free(model)

    def remove(self, ctx: int, start: int, sequence: int = 0) -> bool:
        removed = self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(ctx), sequence, start, -1)
        return bool(removed) and self.holds(ctx, start, sequence)

    def copy(self, ctx: int, source: int, target: int, n: int, start: int = 0) -> None:
        self.lib.llama_memory_seq_cp(self.lib.llama_get_memory(ctx), source, target, start, n)

    def holds(self, ctx: int, n: int, sequence: int = 0) -> bool:
        # Layers with a window leave out of a saved state what lies before it, and give such cells to other sequences.
        window = self.window(ctx)
        if not window or not n:
            return True
        first = self.lib.llama_memory_seq_pos_min(self.lib.llama_get_memory(ctx), sequence)
        return bool(0 <= first <= max(0, n - window))

    def window(self, ctx: int) -> int:
        return int(self.lib.llama_model_n_swa(self.lib.llama_get_model(ctx)))

    def n_snapshots(self, ctx: int) -> int:
        return int(self.lib.llama_n_rs_seq(ctx))

    def clear(self, ctx: int) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(ctx), True)

    def is_recurrent(self, model: int) -> bool:
        return bool(self.lib.llama_model_is_recurrent(model) or self.lib.llama_model_is_hybrid(model))

    def tokenizer(self, model: int) -> int:
        return int(self.lib.llama_model_get_vocab(model))

    def n_vocab(self, model: int) -> int:
        return int(self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(model)))


@cache
def binding() -> LlamaCppBinding:
    """The engine, loaded once per process; EngineUnavailable where it cannot be used here."""
    return LlamaCppBinding()


def gpu_layers(wanted: int | None, *, on_devices: bool = False) -> int:
    """Layers to put on a GPU: those asked for, else all where there is one, here or on a server."""
    return (-1 if binding().gpu or on_devices else 0) if wanted is None else wanted


def load(
    path: Path | str,
    *,
    n_threads: int | None = None,
    n_gpu_layers: int | None = None,
    kv_type: str = "f16",
    progress: Progress | None = None,
    placement: Placement | None = None,
) -> LlamaModel:
    """Load a GGUF with llama.cpp; see ``backends.registry``.

    Raises:
        UnsupportedModel: it would end the process; see ``trial``.
    """
    path, n_threads, engine = Path(path), n_threads or default_threads(), binding()
    on_devices = placement is not None and bool(placement.rpc)
    with GGUFFile(path) as gguf:
        usual = has_usual_sizes(gguf) or gguf.has_rows_only
    # Weights on other machines may be more than this one can hold.
    if not (usual or on_devices or trial.survives(path, f"{NAME} {engine.version}", kv_type, n_threads, progress)):
        raise UnsupportedModel(
            f"{path.name}: {NAME} ended the process in which it was tried, so the sizes in the file do not fit "
            "together or this version does not compute them; fetch it again, or try another --backend"
        )
    return LlamaModel(
        engine,
        path,
        n_threads=n_threads,
        n_gpu_layers=gpu_layers(n_gpu_layers, on_devices=on_devices),
        kv_type=kv_type,
        placement=placement,
        progress=progress,
    )


def open_untried(path: Path, *, n_threads: int, kv_type: str) -> LlamaModel:
    """Load a file, on the CPU, whatever that may do to the process."""
    return LlamaModel(binding(), path, n_threads=n_threads, kv_type=kv_type)
