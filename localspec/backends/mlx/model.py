"""A model computed by MLX, the memory of one sequence, and passes over several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from localspec.backends.base import (
    N_UNINTERRUPTED,
    NORM,
    Capabilities,
    Context,
    ContextState,
    FloatArray,
    Forward,
    Model,
    Piece,
    Progress,
    SequenceBatch,
    SequencesInTurn,
    Wanted,
    layer_name,
    n_wanted,
)
from localspec.backends.mlx.cache import KV_BITS, LayerCaches, Tree
from localspec.backends.mlx.library import NAME, binding, owner
from localspec.backends.mlx.network import Network, load_network
from localspec.backends.mlx.tokenizer import ByteLevel
from localspec.backends.soundness import check_hyperparameters
from localspec.backends.tokenizer import Tokenizer
from localspec.errors import (
    Closed,
    EngineError,
    EngineUnavailable,
    LocalspecError,
    UnsupportedModel,
    UsageError,
)
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.kv_memory import check_kv_type
from localspec.model_files.nextn import has_layer

# -- one sequence ------------------------------------------------------------------------------------------------------


class MLXContext(Context):
    """A sequence's memory in MLX's arrays.

    A pass is one evaluation: the logits and the memory are computed together, and waited for once.
    """

    model: MLXModel

    def __init__(self, model: MLXModel, n_ctx: int, hidden: tuple[str, ...]) -> None:
        super().__init__(model, n_ctx, hidden)
        self._owner = model.owner
        self.memory = LayerCaches(model.network, model.kv_type)
        self._first_float: int | None = None  # from this position on, tokens do not tell what was fed

    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._pass(tokens, logits)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        if self._first_float is None:
            self._first_float = self.n_past
        return self._pass(tokens, logits, rows)

    def _decode_first_layers(self, tokens: Sequence[int], n_layers: int) -> Forward:
        return self._pass(tokens, "none", n_layers=n_layers)

    def _decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        self._catch_up()
        tree, memory, network = Tree(parents), self.memory, self.model.network

        def branched() -> Forward:
            memory.branch(tree)
            network.branch(tree.depths.tolist())
            try:
                return compute([(self, tokens, "all")])[0]
            finally:
                memory.branch(None)
                network.branch(None)
                memory.n_past = min(memory.n_past, self.n_past)  # none of them is kept yet

        return self._owner.run(branched)

    def _keep(self, path: Sequence[int]) -> None:
        self._owner.run(lambda: self.memory.keep(path))

    def _pass(
        self, tokens: Sequence[int], logits: Wanted, rows: FloatArray | None = None, n_layers: int | None = None
    ) -> Forward:
        self._catch_up()
        if self._partial is None:  # nothing ever goes on from rows of the first layers
            self.memory.checkpoint()
        return self._owner.run(lambda: compute([(self, tokens, logits)], rows=rows, n_layers=n_layers))[0]

    def lose_memory(self) -> None:
        """Half of the layers may have got their rows: start over, from the tokens, with the next pass."""
        self.memory.clear()
        if self._first_float is not None:
            del self.tokens[self._first_float :]

    def _catch_up(self) -> None:
        """Feed again what the memory lost in a rollback that it could only do in part."""
        while self.memory.n_past < self.n_past:
            part = self.tokens[self.memory.n_past :][:N_UNINTERRUPTED]
            self._owner.run(lambda part=part: compute([(self, part, "none")]))  # type: ignore[misc]

    def _truncate(self, n: int) -> None:
        if self._first_float is not None and n <= self._first_float:
            self._first_float = None
        self._owner.run(lambda: self.memory.rewind(n))

    def _export(self) -> Mapping[str, npt.NDArray[Any]]:
        self._catch_up()
        return self._owner.run(self.memory.export)

    def _state_bytes(self) -> int:
        self._catch_up()
        return self._owner.run(lambda: self.memory.n_bytes)

    def _import(self, state: ContextState) -> None:
        self._first_float = None

        def restored() -> None:
            sample = LayerCaches(self.model.network, self.model.kv_type)
            self.model.network.states(mx.array([[0]]), sample.layers, ())
            self.memory.restore(state.arrays, len(state.tokens), sample)

        self._owner.run(restored)

    def _close(self) -> None:
        with suppress(Closed):  # the end of the program frees it
            self._owner.run(self.memory.clear)


Fed = tuple[MLXContext, Sequence[int], Wanted]  # whose next tokens they are, and which rows to return


def compute(parts: Sequence[Fed], *, rows: FloatArray | None = None, n_layers: int | None = None) -> list[Forward]:
    """One pass over the next tokens of some sequences, and one evaluation; on the owner thread.

    Args:
        parts: at least one; the others are of a single sequence.
        rows: fed in the place of the tokens' embeddings [n, n_embd].
        n_layers: compute no further.

    Raises:
        EngineError: the engine failed; the memories are read again from their tokens.
    """
    contexts = [context for context, _, _ in parts]
    model, names = contexts[0].model, contexts[0].hidden
    network, memories, tokens = model.network, [context.memory for context in contexts], list[int]()
    last_names = {NORM, layer_name(model.n_layers - 1)}  # of these there is a row for each row of logits
    if n_layers is not None:
        names, last_names = tuple(name for name in map(layer_name, range(n_layers)) if name in names), set()
    places: list[tuple[slice, range]] = []  # of each part its rows in the pass, and those that have logits
    for _, fed, logits in parts:
        tokens += fed
        n = len(tokens)
        places.append((slice(n - len(fed), n), range(n - n_wanted(logits, len(fed)), n)))
    n, chosen = len(tokens), [row for _, wanted in places for row in wanted]
    mx.set_default_device(model.device)
    try:
        floats = None if rows is None else mx.array(rows[None]).astype(network.compute_dtype)
        ids = mx.array([tokens]) if rows is None or network.reads_tokens_too else mx.zeros((1, n), mx.int32)
        if len(parts) == 1:
            states = network.states(ids, memories[0].layers, names, rows=floats, n_layers=n_layers)
            of_chosen: Any = slice(n - len(chosen), n)
        else:
            with divided(network, [(rows, memory.layers) for (rows, _), memory in zip(places, memories, strict=True)]):
                states = network.states(ids, None, names)
            of_chosen = mx.array(chosen)
        # What only unwanted rows need, such as the last layer's feed-forward part, is never computed.
        found = {name: states[name][0] for name in names if name not in last_names}
        if chosen:
            found |= {name: states[name][0, of_chosen] for name in names if name in last_names}
            found["logits"] = network.logits(states[NORM][:, of_chosen])[0]
        found = {name: array.astype(mx.float32) for name, array in found.items()}
        mx.eval(found, [memory.arrays() for memory in memories])
    except (RuntimeError, ValueError, MemoryError) as error:
        for context in contexts:
            context.lose_memory()
        of = f" of {len(parts)} sequences" if len(parts) > 1 else ""
        raise EngineError(f"{model.engine} failed to decode {n} tokens{of}: {error}") from None
    for (_, fed, _), memory in zip(parts, memories, strict=True):
        memory.n_past += len(fed)
    # Nothing is copied: where CPU and GPU share their memory, these are views of MLX's arrays.
    arrays = {name: np.array(array, copy=False) for name, array in found.items()}
    logits_found = arrays.get("logits", np.empty((0, network.n_vocab), dtype=np.float32))
    nothing = np.empty((0, network.n_embd), dtype=np.float32)
    forwards, start = [], 0
    for of_all, wanted in places:
        of_wanted = slice(start, start := start + len(wanted))
        hidden = {name: arrays.get(name, nothing)[of_wanted if name in last_names else of_all] for name in names}
        forwards.append(Forward(logits_found[of_wanted], hidden))
    return forwards


# -- several sequences in one pass -------------------------------------------------------------------------------------
#
# Every linear layer is computed over the rows of all of them together, those within attention too, whose inputs' and
# output's projections are taken out of mlx-lm's module for the time of a pass. mlx-lm's own attention computes the
# rest, for one sequence after the other: the heads' norms, the rotary embedding, keys and values, and which of them a
# row sees. Nothing is padded.

_OUTPUT = "o_proj"
_INPUTS = ({"q_proj", "k_proj", "v_proj"}, {"qkv_proj"})
"""Names of the linear layers in mlx-lm's attention modules that read what the module is called with."""

Part = tuple[slice, list[Any]]  # rows of one sequence in a pass, and its memory: a cache for each layer


class MLXSequences(SequencesInTurn):
    """Contexts of one model that are fed in one pass; one that is fed alone as a context is."""

    model: MLXModel
    _sequences: Sequence[MLXContext]

    def _decode(self, pieces: Sequence[Piece]) -> list[Forward]:
        if len(pieces) == 1:
            return super()._decode(pieces)
        contexts = [self._sequences[piece.sequence] for piece in pieces]
        fed = [(context, piece.tokens, piece.logits) for context, piece in zip(contexts, pieces, strict=True)]
        try:
            for context in contexts:
                context._catch_up()
            forwards = self.model.owner.run(lambda: compute(fed))
        except BaseException:
            for context in contexts:
                context._truncate(context.n_past)
            raise
        for context, piece in zip(contexts, pieces, strict=True):
            context._add(piece.tokens)
        return forwards


def can_divide(network: Network) -> bool:
    """Whether ``divided`` is right about a network: only its attention looks at more than one row, by a known call."""
    for layer in network.module.layers:
        attention = layer.get("self_attn")
        if network.recurrent or not isinstance(attention, nn.Module):
            return False
        linear = {name for name, part in attention.items() if isinstance(part, nn.Linear | nn.QuantizedLinear)}
        call = [*signature(type(attention).__call__).parameters]
        if call != ["self", "x", "mask", "cache"] or _OUTPUT not in linear or linear - {_OUTPUT} not in _INPUTS:
            return False
    return True


@contextmanager
def divided(network: Network, parts: Sequence[Part]) -> Iterator[None]:
    """Within it, the rows of a pass are those of several sequences, in the order of ``parts``, and the cache that the
    network is given is not used. On the owner thread."""
    layers = network.module.layers
    originals = [layer["self_attn"] for layer in layers]
    masks: list[dict[int | None, Any]] = []  # of each sequence, one for all layers that see the same
    for rows, caches in parts:
        of_window = {cache.window: cache for cache in caches}
        masks.append({window: cache.make_mask(rows.stop - rows.start) for window, cache in of_window.items()})
    try:
        for i, (layer, attention) in enumerate(zip(layers, originals, strict=True)):
            own = [(rows, mask[caches[i].window], caches[i]) for (rows, caches), mask in zip(parts, masks, strict=True)]
            layer["self_attn"] = partial(_attend, attention, own)
        yield
    finally:
        for layer, attention in zip(layers, originals, strict=True):
            layer["self_attn"] = attention


def _attend(attention: nn.Module, parts: Sequence[tuple[slice, Any, Any]], x: mx.array, *_: Any, **__: Any) -> mx.array:
    """mlx-lm's attention over rows [1, n, n_embd] of several sequences, with a mask and a cache for each; those that
    the layer hands over are not looked at."""
    linear = {name: attention[name] for name in (_OUTPUT, *set.union(*_INPUTS)) if name in attention}
    projected = {name: layer(x) for name, layer in linear.items() if name != _OUTPUT}
    found = []
    try:
        attention[_OUTPUT] = lambda heads: heads
        for rows, mask, cache in parts:
            for name, array in projected.items():  # a layer that puts this out whatever is put in
                attention[name] = lambda _, part=array[:, rows]: part
            found.append(attention(x[:, rows], mask, cache))
    finally:
        for name, layer in linear.items():
            attention[name] = layer
    output: mx.array = linear[_OUTPUT](mx.concatenate(found, axis=1))
    return output


# -- the model ---------------------------------------------------------------------------------------------------------


class MLXModel(Model):
    """Weights in MLX's arrays, on one device."""

    def __init__(
        self, path: Path, *, n_gpu_layers: int | None = None, kv_type: str = "f16", progress: Progress | None = None
    ) -> None:
        engine = binding()
        self.owner = owner()  # the thread that everything of MLX is done on
        with GGUFFile(path) as file:
            self._read_header(file)
            check_hyperparameters(file)
            check_kv_type(file, kv_type)
            if KV_BITS[kv_type] is not None and "blk.0.attn_sinks.weight" in file.tensors:
                raise UsageError(
                    f"--kv-cache {kv_type}: MLX computes the attention sinks of {path.name} with unquantised keys and "
                    "values only; use f16 or --backend llama-cpp"
                )
            self.device = device_for(file, n_gpu_layers)
            self._tokenizer = Tokenizer(file, self.vocab, ByteLevel)
            nextn = has_layer(file)
            network = self.owner.run(lambda: building(path, self.device, lambda: load_network(file, progress)))
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
        """The loaded weights; only the owner thread may compute with them."""
        if self._network is None:
            raise Closed("this model was closed")
        return self._network

    def _new_context(self, n_ctx: int, hidden: tuple[str, ...]) -> MLXContext:
        most = self.network.max_context
        if most is not None and n_ctx > most:
            raise UsageError(
                f"the mlx backend supports at most {most} tokens of context for {self.path.name}; use --ctx {most} or "
                "--backend llama-cpp"
            )
        return MLXContext(self, n_ctx, hidden)

    def _new_batch(self, n_sequences: int, n_cells: int, n_ctx: int, hidden: tuple[str, ...]) -> SequenceBatch:
        if not self.capabilities.batches:
            return super()._new_batch(n_sequences, n_cells, n_ctx, hidden)
        # They take no memory before they are fed.
        return MLXSequences([self._new_context(n_ctx, hidden) for _ in range(n_sequences)], n_cells)

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special, parse_special)

    def _close(self) -> None:
        self._network = None
        with suppress(Closed):
            self.owner.run(mx.clear_cache)


def device_for(file: GGUFFile, n_gpu_layers: int | None) -> mx.Device:
    """Where a file is to be computed.

    Raises:
        EngineUnavailable: there is no GPU.
        UsageError: a part of it was asked for.
    """
    if not n_gpu_layers:
        return mx.Device(mx.gpu if binding().gpu and n_gpu_layers is None else mx.cpu)
    if not binding().gpu:
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
