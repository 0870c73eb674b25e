"""A model loaded by MLX; see ``backends.base.Model``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import mlx.core as mx

from localspec.backends.base import Capabilities, Model, Progress
from localspec.backends.best_rows import best_pays
from localspec.backends.mlx.context import MLXContext
from localspec.backends.mlx.library import NAME, binding
from localspec.backends.mlx.network import Network, load_network
from localspec.backends.mlx.owner import owner
from localspec.backends.mlx.sequences import MLXSequences, can_divide
from localspec.backends.mlx.tokenizer import ByteLevel
from localspec.backends.sequence_batch import SequenceBatch
from localspec.backends.soundness import check_hyperparameters
from localspec.backends.tokenizer import Tokenizer
from localspec.errors import Closed, EngineUnavailable, LocalspecError, UnsupportedModel, UsageError
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.head_kinds.mtp import has_layer
from localspec.model_files.kv_memory import check_kv_type


class MLXModel(Model):
    """Weights in MLX's arrays, on one device.

    Attributes:
        device: where it computes.
        owner: the thread that everything of MLX is done on.
    """

    def __init__(
        self, path: Path, *, n_gpu_layers: int | None = None, kv_type: str = "f16", progress: Progress | None = None
    ) -> None:
        engine = binding()
        self.owner = owner()
        with GGUFFile(path) as file:
            self._read_header(file)
            check_hyperparameters(file)
            check_kv_type(file, kv_type)
            self.device = device_for(file, n_gpu_layers)
            self._tokenizer = Tokenizer(file, self.vocab, ByteLevel)
            nextn = has_layer(file)
            network = self.owner.run(lambda: building(path, self.device, lambda: load_network(file, progress=progress)))
        self._network: Network | None = network
        self.backend = NAME
        self.engine = f"{NAME} {engine.version}"
        self.kv_type = kv_type
        self.n_threads = 1  # MLX has no setting for it
        self.n_vocab = network.n_vocab
        self.capabilities = Capabilities(
            rollback="replay" if network.recurrent else "exact",
            device="gpu" if self.device == mx.Device(mx.gpu) else "cpu",
            saves_state=True,
            hidden=True,
            float_rows=not network.recurrent,  # what is fed again after a rollback are tokens
            first_layers=True,
            trees=not network.recurrent,
            nextn=nextn,
            mtp=nextn,
            batches=can_divide(network),
            own_cells=True,
        )

    @property
    def network(self) -> Network:
        """The loaded weights; only the owner thread may compute with them.

        Raises:
            Closed: the model was closed.
        """
        if self._network is None:
            raise Closed("this model was closed")
        return self._network

    @cached_property
    def finds_best(self) -> bool:
        """Whether ``Context.decode_best`` looks for the largest logits on the device: where that takes less time."""
        return self.capabilities.device == "gpu" and best_pays(self)

    def _new_context(self, n_ctx: int, n_threads: int, hidden: tuple[str, ...]) -> MLXContext:
        most = self.network.max_context
        if most is not None and n_ctx > most:
            raise UsageError(
                f"the mlx backend supports at most {most} tokens of context for {self.path.name}; use --ctx {most} or "
                "--backend llama-cpp"
            )
        return MLXContext(self, n_ctx, hidden)

    def _new_batch(
        self, n_sequences: int, n_cells: int, n_ctx: int, n_threads: int, hidden: tuple[str, ...]
    ) -> SequenceBatch:
        if not self.capabilities.batches:
            return super()._new_batch(n_sequences, n_cells, n_ctx, n_threads, hidden)
        # They take no memory before they are fed.
        return MLXSequences([self._new_context(n_ctx, n_threads, hidden) for _ in range(n_sequences)], n_cells)

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special, parse_special)

    def _close(self) -> None:
        self._network = None
        self.owner.run(mx.clear_cache)


def device_for(file: GGUFFile, n_gpu_layers: int | None) -> mx.Device:
    """Where a file is to be computed.

    Raises:
        EngineUnavailable: there is no GPU.
        UsageError: a part of it was asked for.
    """
    gpu = binding().gpu
    if not n_gpu_layers:
        return mx.Device(mx.gpu if gpu and n_gpu_layers is None else mx.cpu)
    if not gpu:
        raise EngineUnavailable("MLX has no GPU here; omit --gpu-layers, or use --backend llama-cpp")
    n_layer = file.field("block_count", 0)
    if 0 < n_gpu_layers < n_layer:
        raise UsageError(f"MLX cannot split a model: use --gpu-layers 0 or {n_layer}, or --backend llama-cpp")
    return mx.Device(mx.gpu)


def building(path: Path, device: mx.Device, load: Callable[[], Network]) -> Network:
    """What ``load`` makes, on a device; on the owner thread.

    Raises:
        UnsupportedModel: it cannot be built by its header.
    """
    # The default belongs to the thread, and everything that loading makes goes there.
    mx.set_default_device(device)
    if device == mx.Device(mx.gpu):
        # Weights that macOS may page out are read from the disk again; as mlx-lm does.
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    try:
        return load()
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        # mlx-lm's classes are built from the header's numbers, and look at few of them.
        if isinstance(error, LocalspecError):
            raise
        raise UnsupportedModel(
            f"MLX cannot build a model from the header of {path.name} ({type(error).__name__}: {error}); "
            "use --backend llama-cpp"
        ) from error
