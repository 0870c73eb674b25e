"""What llama.cpp and its forks have in common: a model and a context over a table of C functions.

The two engines differ in names and in a few semantics; each fills in a ``Binding`` and everything else is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from localspec.backends.base import Capabilities, Context, ContextState, FloatArray, Forward, Model, Progress
from localspec.backends.best_rows import best_pays
from localspec.backends.forward import Wanted, layer_name
from localspec.backends.llama_apart import SequencesOrOne
from localspec.backends.llama_binding import Binding, Bytes
from localspec.backends.llama_passes import LlamaPasses
from localspec.backends.llama_placement import Placed
from localspec.backends.llama_rollback import Rollback, n_snapshots
from localspec.backends.llama_sequences import LlamaSequences
from localspec.backends.llama_state import restore, save, saved_sequence, state_bytes
from localspec.backends.llama_trees import LeafSequences
from localspec.backends.placement import Placement
from localspec.backends.rpc_link import ask
from localspec.backends.sequence_batch import SequenceBatch
from localspec.backends.soundness import check_sound
from localspec.backends.state_tap import Flags
from localspec.errors import EngineError, UnsupportedModel, UsageError
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.kv_memory import check_kv_type
from localspec.system.shared_lock import SharedLock

FLOAT_ROWS = frozenset(("llama", "qwen2"))
"""Architectures whose first block reads the embeddings as they are; some others scale them, and engines differ in
whether they scale rows of floats."""


class LlamaModel(Model):
    """Weights loaded by a llama.cpp engine; see ``backends.base.Model``."""

    def __init__(
        self,
        binding: Binding,
        path: Path,
        *,
        n_threads: int,
        n_gpu_layers: int = 0,
        kv_type: str = "f16",
        placement: Placement | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._placed: Placed | None = None
        with GGUFFile(path) as gguf:
            self._read_header(gguf)
            check_kv_type(gguf, kv_type)
            check_sound(gguf, self.vocab, binding.computes, binding.alignment)
            if placement:
                self._placed = Placed(placement, binding.places(placement), gguf, binding.name)
                self.placement = str(placement)
            has_mtp = binding.has_mtp(gguf)
        self.binding = binding
        self.backend = binding.name
        self.engine = f"{binding.name} {binding.version}"
        self.n_threads = n_threads
        self.kv_type = kv_type
        self._n_gpu_layers, self._in_use = n_gpu_layers, SharedLock()
        self._contexts, self._batches = WeakSet[LlamaContext](), WeakSet[LlamaSequences]()
        self._mtp = has_mtp and not self.reloads  # what is made of the weights of its layer does not outlive them
        handle = self._handle = self._load(path, progress)
        self.n_vocab = binding.n_vocab(handle)
        rewinds = not binding.is_recurrent(handle)
        self.capabilities = Capabilities(
            rollback="exact" if rewinds else "replay",
            device=binding.device(n_gpu_layers, self._placed, self.n_layers),
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
        self._known_states: set[str] = set()
        self.survives_several: Callable[[], bool] = lambda: True
        """Whether the process lives through passes over several sequences; for files where that is not known."""

    def _load(self, path: Path, progress: Progress | None = None) -> int:
        load = partial(self.binding.load_model, path, self._n_gpu_layers, progress, self._placed)
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
        """Whether the weights may be loaded again while contexts are open: those on servers, see ``recover``."""
        return self._placed is not None and bool(self._placed.links)

    @property
    def lost(self) -> str | None:
        """Why a device with weights is gone; None while all are there."""
        return None if self._placed is None else self._placed.lost

    def check_devices(self) -> None:
        """Refuse what was computed while a device was gone.

        Raises:
            EngineError: one is.
        """
        if self._placed is not None and (lost := self._placed.lost) is not None:
            raise EngineError(f"{lost}; the conversation is kept: ask again once the server is back")

    def recover(self) -> None:
        """Load the weights again where a device that had some was gone, and is back; contexts are empty then.

        Raises:
            EngineError: it is still gone.
        """
        if self._placed is None or (self._handle and self._placed.lost is None):
            return
        for link in self._placed.links:
            if link.lost is not None:
                ask(link.address)
        for batch in list(self._batches):
            batch.close()
        for context in list(self._contexts):
            context.let_go()
        with self._in_use.alone():  # other threads tokenize
            self._close()
            self._handle = 0
            self._handle = self._load(self.path)
        for context in list(self._contexts):
            context.begin_anew()

    @property
    def handle(self) -> int:
        self._check_open()
        return self._handle

    @property
    def on_gpus(self) -> bool:
        """Whether all of it lies on GPUs, as the engine would have it."""
        return self._placed is None and self.capabilities.device == "gpu"

    @cached_property
    def finds_best(self) -> bool:
        """Whether ``Context.decode_best`` has the engine look for the largest logits: where that takes less time."""
        return self.binding.finds_best and self.on_gpus and self.capabilities.rollback == "exact" and best_pays(self)

    @cached_property
    def n_snapshots(self) -> int:
        """How many tokens of a pass a context takes back without a replay, though its memory cannot be rewound."""
        return 0 if self.capabilities.rollback == "exact" else n_snapshots(self)

    def _new_context(self, n_ctx: int, n_threads: int, hidden: tuple[str, ...]) -> LlamaContext:
        self._check_states(hidden)
        return LlamaContext(self, n_ctx, n_threads, hidden)

    def _new_branching_context(self, n_ctx: int, n_threads: int, hidden: tuple[str, ...]) -> LlamaContext:
        self._check_states(hidden)
        return LlamaContext(self, n_ctx, n_threads, hidden, branches=self.why_no_trees() is None)

    def why_no_trees(self) -> str | None:
        what = f"{self.engine} does not take tokens that branch for {self.path.name}"
        if self.capabilities.rollback == "replay":
            return f"{what}: its memory is a state of all that was read, and of one text"
        if self.architecture in self.binding.unshared:
            return f"{what}: texts cannot share rows of a memory of {self.architecture!r} models"
        if not self.binding.takes_several(self.kv_type):
            return f"{what}: a {self.kv_type} cache needs flash attention, with which they come out wrong"
        if not self.survives_several():
            return f"{what}: another process that tried did not live through it"
        return None

    def _new_batch(
        self, n_sequences: int, n_cells: int, n_ctx: int, n_threads: int, hidden: tuple[str, ...]
    ) -> SequenceBatch:
        if not self.capabilities.batches:
            return super()._new_batch(n_sequences, n_cells, n_ctx, n_threads, hidden)
        if not self.survives_several():
            raise UnsupportedModel(
                f"{self.path.name}: {self.engine} does not compute several sequences of this {self.architecture!r} "
                "model in one pass; answer one at a time, or use --backend llama-cpp"
            )
        self._check_states(hidden)
        # A context of one sequence takes what a memory of several holds only if both are of one type.
        lies_apart = not self.binding.batches_kv_types and self.capabilities.keeps_kv_type and n_sequences > 1
        make = SequencesOrOne if lies_apart else LlamaSequences
        batch = make(self, n_sequences, n_cells, n_ctx, n_threads, hidden)
        self._batches.add(batch)
        return batch

    def _check_states(self, hidden: tuple[str, ...]) -> None:
        """Refuse states that this architecture's graph does not name in this engine."""
        if self._known_states.issuperset(hidden):
            return
        with LlamaContext(self, 2, self.n_threads, hidden) as context:
            try:
                context.decode([0, 0])
            except EngineError as error:
                raise UsageError(
                    f"{self.engine} returns not all of {', '.join(hidden)} for {self.path.name}: {error}"
                ) from None
        self._known_states.update(hidden)

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        with self._in_use.shared():  # the engine only reads its tables
            if not self._handle:
                raise EngineError(f"{self.path.name} is not loaded: {self.lost or 'loading it again failed'}")
            return self.binding.tokenize(self._handle, text.encode(), add_special, parse_special)

    def _close(self) -> None:
        if self._handle:
            self.binding.free_model(self._handle)


class LlamaContext(Context):
    """One sequence's KV cache (or recurrent state) in a llama.cpp engine."""

    model: LlamaModel

    def __init__(
        self, model: LlamaModel, n_ctx: int, n_threads: int, hidden: tuple[str, ...] = (), *, branches: bool = False
    ) -> None:
        super().__init__(model, n_ctx, hidden)
        self._binding = model.binding
        self._n_threads, self._branches = n_threads, branches
        self._leaves: LeafSequences | None = None
        self.finds_best = not branches and model.finds_best
        self.begin_anew()
        model._contexts.add(self)

    @property
    def can_branch(self) -> bool:
        return self._branches

    def let_go(self) -> None:
        """Give the engine's memory back before its model is freed."""
        self._passes.close()
        self.tokens, self._partial, self._tree, self._leaves = [], None, None, None

    def begin_anew(self) -> None:
        """Be empty, in a model that was loaded, perhaps again."""
        model = self.model
        options: dict[str, Any] = {"branches": self._branches, "n_snapshots": model.n_snapshots}
        self._passes = LlamaPasses(model, self.n_ctx, self._n_threads, model.kv_type, self.hidden, **options)
        self._rollback = Rollback(model, self._passes) if model.capabilities.rollback == "replay" else None
        self._set_leaves()

    def _set_leaves(self) -> None:
        self._leaves = LeafSequences(self._binding, self._handle) if self._branches else None

    @property
    def _handle(self) -> int:
        if not self._passes.handle:
            raise EngineError(f"{self.model.path.name} is not loaded: {self.model.lost or 'loading it again failed'}")
        return self._passes.handle

    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward:
        if self._rollback is not None:
            self._rollback.begin_pass(self.n_past, len(tokens))
        forward = self._compute(tokens, self.n_past, logits)
        if self._rollback is not None:
            self._rollback.end_pass()
        return forward

    def _decode_best(self, tokens: Sequence[int], n_best: int, logits: Wanted, rows: FloatArray | None) -> Forward:
        return self._compute(tokens if rows is None else rows, self.n_past, logits, n_best=n_best)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._compute(rows, self.n_past, logits)

    def _decode_first_layers(self, tokens: Sequence[int], n_layers: int) -> Forward:
        return self._compute(tokens, self.n_past, "none", last=layer_name(n_layers - 1))

    def _compute(
        self, rows: Sequence[int] | FloatArray, n_past: int, logits: Wanted, last: str | None = None, n_best: int = 0
    ) -> Forward:
        """Feed rows after the first ``n_past`` of the memory."""
        if self._leaves is not None:
            self._leaves.close_gaps()
        wanted_rows = np.full(len(rows), logits == "all")
        wanted_rows[-1] = logits != "none"
        return self._run(rows, range(n_past, n_past + len(rows)), wanted_rows, last=last, n_best=n_best)

    def _run(
        self, rows: Sequence[int] | FloatArray, positions: Sequence[int], wanted_rows: Flags, **options: Any
    ) -> Forward:
        """See ``LlamaPasses.run``."""
        forward = self._passes.run(rows, positions, wanted_rows, begun=self.meanwhile, **options)
        self.overlaps = self._passes.begins_soon
        return forward

    def _decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        if self._leaves is None:
            self._set_leaves()  # which says what was lost
        assert self._leaves is not None
        self._leaves.close_gaps()
        sequences = self._leaves.begin(parents, self.n_past)
        positions: list[int] = []
        for parent in parents:
            positions.append(self.n_past if parent < 0 else positions[parent] + 1)
        return self._run(tokens, positions, np.ones(len(tokens), dtype=bool), sequences=sequences)

    def _keep(self, path: Sequence[int]) -> None:
        assert self._leaves is not None
        assert self._tree is not None
        if not self._leaves.keep(path, self.n_past):
            tokens = self._tree[0]
            self._truncate(self.n_past)  # which reads again what a window let go of
            self._compute([tokens[at] for at in path], self.n_past, "none")

    def _truncate(self, n: int) -> None:
        if self._leaves is not None:
            self._leaves.cut(n, self.n_past)
        if self._rollback is None and self._binding.remove(self._handle, n):
            return
        if self._rollback is not None and self._rollback.take_back(self.n_past, n):
            return
        # Nothing else can be taken out of this memory: go back to a state it had, and feed the rest again.
        try:
            start = 0 if self._rollback is None else self._rollback.go_back()
            if not start:
                self._clear()
            if start < n:
                self._compute(self.tokens[start:n], start, "none")
        except BaseException:
            # How far it came is unknown. What `tokens` names must be in the memory, so it names nothing.
            self._clear()
            self._forget()
            self.tokens = []
            raise

    def _forget(self) -> None:
        if self._rollback is not None:
            self._rollback.forget()

    def _clear(self) -> None:
        self._binding.clear(self._handle)
        self._set_leaves()

    def _export(self) -> dict[str, Bytes]:
        state = save(self.model, self._handle)
        return {"sequence": self._binding.by_rows(state) if self._branches else state}

    def _state_bytes(self) -> int:
        return state_bytes(self._binding, self._handle)

    def _import(self, state: ContextState) -> None:
        self._forget()
        self._clear()
        sequence = saved_sequence(state, self.model.path)
        restore(self.model, self._handle, self._binding.by_columns(sequence) if self._branches else sequence)

    def _close(self) -> None:
        self.model._contexts.discard(self)
        self._passes.close()
        self._forget()
