"""llama.cpp through llama-cpp-python: every device it was built for, and the newest architectures."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from localspec.backends.llama.binding import Binding, Place, Places
from localspec.backends.llama.ggml import GPU, INTEGRATED, Ggml, TensorFunctions, digest, engine_log
from localspec.backends.llama.model import LlamaModel
from localspec.backends.llama.rpc import rpc
from localspec.backends.llama.staging import staging
from localspec.backends.placement import Placement
from localspec.backends.soundness import has_usual_sizes
from localspec.errors import EngineError, EngineUnavailable
from localspec.model_files import nextn
from localspec.model_files.gguf import GGUFFile
from localspec.system.machine import prepare_threads

NAME = "llama-cpp"


class LlamaCppBinding(Binding):
    """llama-cpp-python's own ctypes table; its ``Llama`` class is not used."""

    name = NAME
    unshared = frozenset(("deepseek32", "deepseek4", "dots3note", "glm-dsa", "glm5-next", "hy_v4", "minimax-m3"))
    state_suffix = "_ext"
    saves_recurrent = True
    refusal = (
        "llama-cpp ended the process in which it was tried, so the sizes in the file do not fit together or this "
        "version does not compute them; fetch it again, or try another --backend"
    )
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
        usual = [devices[each] for each in ggml.gpus()]
        far, links = [], []
        for address in placement.rpc:
            link, lent = rpc().connect(address)
            links.append(link)
            for i, each in enumerate(lent):
                far.append(Place(each.name, each.handle, f"RPC{i}[{address}]", each.splits_rows))
                buffers[far[-1].buffer] = each.buffer
        # As in llama.cpp servers come first: what goes over the network is then least.
        return Places([*far, *devices.values()], [*far, *usual], buffers, int(self.lib.llama_max_devices()), links)

    def is_familiar(self, gguf: GGUFFile) -> bool:
        return has_usual_sizes(gguf) or gguf.has_rows_only

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


@cache
def binding() -> LlamaCppBinding:
    """The engine, loaded once per process; EngineUnavailable where it cannot be used here."""
    return LlamaCppBinding()


def gpu_layers(wanted: int | None, *, on_devices: bool = False) -> int:
    """Layers to put on a GPU: those asked for, else all where there is one, here or on a server."""
    return (-1 if binding().gpu or on_devices else 0) if wanted is None else wanted


def load(path: Path | str, *, n_gpu_layers: int | None = None, **options: Any) -> LlamaModel:
    """Load a GGUF with llama.cpp; see ``backends.registry``. The options are those of ``LlamaWeights``."""
    placement = options.get("placement")
    layers = gpu_layers(n_gpu_layers, on_devices=bool(placement and placement.rpc))
    return LlamaModel(binding(), Path(path), n_gpu_layers=layers, **options)
