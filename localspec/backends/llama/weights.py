"""Weights in a llama.cpp engine: loading them, the devices they are on, and their tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from localspec.backends import trial
from localspec.backends.base import Capabilities, Model, Progress
from localspec.backends.llama.binding import Binding, Placed
from localspec.backends.placement import Placement
from localspec.backends.soundness import check_sound
from localspec.errors import EngineError, UnsupportedModel
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.kv_memory import check_kv_type
from localspec.system.machine import default_threads
from localspec.system.process import SharedLock

FLOAT_ROWS = frozenset(("llama", "qwen2"))
"""Architectures whose first block reads the embeddings as they are; some others scale them, and engines differ in
whether they scale rows of floats."""


class LlamaWeights(Model):
    """Weights that a llama.cpp engine loaded, and the devices that they are on.

    Args:
        n_threads: None takes the physical cores.
        is_trial: load it whatever that may do to the process, which does nothing else; see ``trial``.

    Raises:
        UnsupportedModel: it would end the process.
    """

    def __init__(
        self,
        binding: Binding,
        path: Path,
        *,
        n_threads: int | None = None,
        n_gpu_layers: int,
        kv_type: str = "f16",
        placement: Placement | None = None,
        progress: Progress | None = None,
        is_trial: bool = False,
    ) -> None:
        self.binding, self.backend, self.engine = binding, binding.name, f"{binding.name} {binding.version}"
        self.n_threads, self.kv_type = n_threads or default_threads(), kv_type
        self.placed: Placed | None = None
        with GGUFFile(path) as gguf:
            self._read_header(gguf)
            check_kv_type(gguf, kv_type)
            check_sound(gguf, self.vocab, binding.computes, binding.alignment)
            if placement:
                self.placed = Placed(placement, binding.places(placement), gguf, binding.name)
                self.placement = str(placement)
            has_mtp, is_familiar = binding.has_mtp(gguf), is_trial or binding.is_familiar(gguf)
        survives = partial(trial.survives, path, self.engine, kv_type, self.n_threads)
        # Weights on other machines may be more than this one can hold.
        if not (is_familiar or (placement and placement.rpc) or survives(progress)):
            raise UnsupportedModel(f"{path.name}: {binding.refusal.format(architecture=self.architecture)}")
        self._n_gpu_layers, self._in_use = n_gpu_layers, SharedLock()
        self._mtp = has_mtp and not self.reloads  # what is made of the weights of its layer does not outlive them
        handle = self._handle = self._load(path, progress)
        self.n_vocab = binding.n_vocab(handle)
        rewinds = not binding.is_recurrent(handle)
        self.capabilities = Capabilities(
            rollback="exact" if rewinds else "replay",
            device=binding.device(n_gpu_layers, self.placed, self.n_layers),
            saves_state=True,
            keeps_rows=binding.keeps_rows,
            hidden=True,
            nextn=self._mtp or (binding.has_nextn(self.architecture) and not self.reloads),
            mtp=self._mtp,
            float_rows=rewinds and self.architecture in FLOAT_ROWS,
            first_layers=rewinds,
            trees=rewinds and self.architecture not in binding.unshared and binding.takes_several(kv_type),
            trees_apart=True,
            batches=rewinds,
            keeps_kv_type=binding.takes_several(kv_type),
        )
        # Whether the process lives through passes over several sequences; for files where that is not known.
        is_known = is_familiar or not binding.tries_several
        self.survives_several: Callable[[], bool] = (lambda: True) if is_known else partial(survives, several=True)

    def _load(self, path: Path, progress: Progress | None = None) -> int:
        load = partial(self.binding.load_model, path, self._n_gpu_layers, progress, self.placed)
        handle = load(mtp=True) if self._mtp else None
        if not handle:
            self._mtp, handle = False, load()
        if handle and self.lost is not None:
            self.binding.free_model(handle)
            handle = None
        if not handle:
            raise EngineError(
                self.lost
                or f"{self.engine} could not load {path.name} (architecture {self.architecture!r}); "
                "try another --backend, or use --verbose for engine output"
            )
        return handle

    @property
    def reloads(self) -> bool:
        """Whether the weights may be loaded again while contexts are open, those on servers; see ``recover``."""
        return self.placed is not None and bool(self.placed.links)

    @property
    def lost(self) -> str | None:
        """Why a device with weights is gone; None while all are there."""
        return None if self.placed is None else self.placed.lost

    def check_devices(self) -> None:
        """Raise EngineError where what was computed is wrong because a device is gone."""
        if self.placed is not None and (lost := self.placed.lost) is not None:
            raise EngineError(f"{lost}; the conversation is kept: ask again once the server is back")

    @property
    def handle(self) -> int:
        self._check_open()
        return self._handle

    @property
    def on_gpus(self) -> bool:
        """Whether all is on GPUs, placed by the engine."""
        return self.placed is None and self.capabilities.device == "gpu"

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        with self._in_use.shared():  # the engine only reads its tables
            if not self._handle:
                raise EngineError(f"{self.path.name} is not loaded: {self.lost or 'loading it again failed'}")
            return self.binding.tokenize(self._handle, text.encode(), add_special, parse_special)

    def _close(self) -> None:
        if self._handle:
            self.binding.free_model(self._handle)
