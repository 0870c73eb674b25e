"""Published heads on llama.cpp: contexts that are fed with a state and a token a row, as ``common/speculative.cpp``
does.

The engine's graphs compute logits of all rows of a pass and return those of the first, so either all rows are wanted or
none; states come back for every row, in the order of the rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar, cast
from weakref import WeakSet

import numpy as np

from localspec.backends.base import Capabilities, Context, FloatArray, Forward, Model, TokenIds, Wanted
from localspec.backends.best_rows import best_pays, head_pass
from localspec.backends.llama.ggml import rows_at
from localspec.backends.llama.llama_cpp import binding, gpu_layers
from localspec.backends.llama.model import LlamaContext, LlamaModel
from localspec.backends.llama.passes import KV_TYPES, BestLogits, LlamaPasses
from localspec.backends.llama.staging import DECODE, ENCODE, staging
from localspec.backends.soundness import check_sound
from localspec.errors import EngineError, UnsupportedModel
from localspec.heads.base import STATE, HeadContext
from localspec.heads.kinds.base import PublishedHead
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab

ROWS = 64  # rows that are computed together. Room for the logits of each is set aside, 39 MB for 152k tokens.

Result = TypeVar("Result")


class LlamaHeadModel(Model):
    """The weights of a head.

    Args:
        head: its header.
        target: what it drafts for, loaded by the same engine where the head borrows from it.
        n_threads: that its passes use.
        n_gpu_layers: as for ``backends.load``.

    Raises:
        UnsupportedModel: the engine has no kernels for it, or cannot borrow what it borrows.
        ModelFileError: it is damaged.
        EngineError: the engine refuses it, or the installed version lacks what it takes.
    """

    def __init__(self, head: PublishedHead, target: Model, n_threads: int, n_gpu_layers: int | None = None) -> None:
        self.head, self.binding = head, binding()
        layers = gpu_layers(n_gpu_layers)
        self._own = not head.in_target
        self.staging = staging()
        self._anchor = 0
        with GGUFFile(head.path) as file:
            check_sound(file, head.vocab or Vocab.none(), self.binding.computes, self.binding.alignment)
            self.size_bytes, self.n_ctx_train = file.n_bytes, file.n_ctx_train
        self.path, self.architecture, self.chat_template = head.path, head.kind, None
        self.backend = self.binding.name
        self.engine = f"{self.binding.name} {self.binding.version}"
        self.vocab, self.n_embd, self.n_layers = Vocab.none(), head.row_width, 1
        self.n_threads, self.n_vocab = n_threads, len(head.ids)
        # A memory that it reads is of the target's type; its own never is.
        self.kv_type = target.kv_type if head.reads and isinstance(target, LlamaModel) else "f16"
        self._read: WeakSet[LlamaPasses] = WeakSet()
        self.capabilities = Capabilities(device=self.binding.device(layers), hidden=True, float_rows=True)
        lends = head.in_target or bool(head.borrows)
        self._lender_on_gpus = not lends or (isinstance(target, LlamaModel) and target.on_gpus)
        if head.in_target:
            self.engine += f" {head.title}"  # its passes are not those of the model in the same file
            self.handle = self._lender(target).handle
            if not target.capabilities.mtp:
                raise EngineError(f"{self.engine} could not load the {head.title} layer of {self.path.name}")
            return
        handle = self.binding.load_model(head.path, layers, None, mtp=head.has_zeroth)
        if not handle:
            raise EngineError(f"{self.engine} could not load {head.path.name}; use --verbose for engine output")
        self.handle = handle
        try:
            n_vocab = self.binding.n_vocab(handle)
            if n_vocab != head.n_vocab:
                raise UnsupportedModel(
                    f"{self.path.name} declares {head.n_vocab} tokens, but the engine finds {n_vocab}"
                )
            if head.borrows:
                lender = self._lender(target)
                # A small context that is never fed does for the engine to find matrices.
                self._anchor = 0 if head.reads else self.new_handle(lender.handle, 1, 1, 0)
        except BaseException:
            self.close()
            raise

    @cached_property
    def finds_best(self) -> bool:
        """As of a ``LlamaModel``. A head that scores candidates looks for the best itself."""
        scores = self.head.block is not None and self.head.block.n_candidates
        alone = not scores and not self.head.reads  # rows of several sequences take turns in a memory that it reads
        able = self.binding.finds_best and alone and self.capabilities.device == "gpu" and self._lender_on_gpus
        return able and best_pays(self, head_pass)

    def _lender(self, target: Model) -> LlamaModel:
        if not isinstance(target, LlamaModel) or target.binding is not self.binding:
            raise self.head.misplaced("llama-cpp", target)
        if target.reloads and not self.head.in_target:
            raise UnsupportedModel(f"{self.path.name} takes weights of its target, which cannot be on RPC servers then")
        return target

    def new_handle(self, model: int, n_ctx: int, n_rows: int, other: int) -> int:
        # Over another memory it has to take the sequences of that, and ends the process with fewer rows than those.
        n_sequences = self.binding.lib.llama_n_seq_max(other) if self.head.reads else 1
        n_rows = n_sequences if self.head.reads else n_rows
        fields: dict[str, Any] = {"n_ctx": -(-n_ctx // 256) * 256, "n_batch": n_rows, "n_ubatch": n_rows}
        fields |= dict.fromkeys(("type_k", "type_v"), KV_TYPES[self.kv_type])
        fields |= {"ctx_other": other} if other else {}
        fields |= {"ctx_type": self.staging.mtp} if self.head.has_zeroth or self.head.reads else {}
        handle = self.binding.new_context(model, self.n_threads, n_sequences, **fields)
        if not handle:
            raise EngineError(f"{self.engine} could not create a context of {n_ctx} rows for {self.path.name}")
        return handle

    def reader_of(self, passes: LlamaPasses) -> LlamaMemoryReader:
        """The context over a memory of the target, for all of its sequences."""

        def make(handle: int) -> LlamaMemoryReader:
            n_ctx = int(self.binding.lib.llama_n_ctx(handle))
            return LlamaMemoryReader(self, n_ctx, (STATE,), handle)

        self._read.add(passes)
        return cast(LlamaMemoryReader, passes.reader(self, make))

    def _new_context(self, n_ctx: int, hidden: tuple[str, ...]) -> HeadContext:
        if self.head.reads:
            return LlamaFollowingContext(self, n_ctx, hidden)
        kind = LlamaBlockContext if self.head.block else LlamaHeadContext
        return kind(self, n_ctx, hidden, self._anchor)

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        raise EngineError(f"{self.path.name} is a draft head and cannot tokenize text")

    def _close(self) -> None:
        for passes in list(self._read):
            passes.close_reader(self)
        if self._anchor:
            self.binding.free_context(self._anchor)
        if self._own:
            self.binding.free_model(self.handle)


class LlamaHeadContext(HeadContext):
    model: LlamaHeadModel
    sequence = 0  # where its rows go

    def __init__(self, model: LlamaHeadModel, n_ctx: int, hidden: tuple[str, ...], anchor: int) -> None:
        super().__init__(model, n_ctx, hidden)
        self._binding, self._functions = model.binding, model.staging
        self._handle = model.new_handle(model.handle, n_ctx, ROWS, anchor)
        self._batch = self._functions.batch_init(self._handle)
        self.finds_best, head = model.finds_best, model.head
        device = model.capabilities.device
        self._best = BestLogits(self._binding.lib, self._handle, head.n_vocab, device, len(head.ids))
        self._position = (ctypes.c_int32 * 4)()
        self._prepare()

    def _prepare(self) -> None:
        self._functions.set_nextn(self._handle, True, False)  # of every row, not only of those with logits

    def fuse(self, states: FloatArray) -> FloatArray:
        self._check_open()
        states = np.ascontiguousarray(states, dtype=np.float32)
        made: list[FloatArray] = []
        for start in range(0, len(states), ROWS):
            part = states[start : start + ROWS]
            # The engine insists on the next positions; what it computes does not depend on them.
            self._add_states(part, self.n_past, wanted=True)
            made.append(self._states(ENCODE, len(part)))
        return np.concatenate(made)

    def _add_states(self, rows: FloatArray, position: int, *, wanted: bool) -> None:
        self._functions.clear(self._batch)
        for i, row in enumerate(rows):
            at = self._functions.add_floats(self._batch, 0, self._functions.floats(row))
            self._place(at, position + i, wanted=wanted)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._decode_rows(rows, tokens, logits, 0)

    def _decode_best(self, tokens: Sequence[int], n_best: int, logits: Wanted, rows: FloatArray | None) -> Forward:
        assert rows is not None  # it reads no others
        return self._decode_rows(rows, tokens, logits, n_best)

    def _decode_rows(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted, n_best: int) -> Forward:
        self._check_tokens(tokens)
        n_before = len(tokens) - 1 if logits == "last" else len(tokens) * (logits == "none")
        if len(tokens) - n_before > ROWS:  # several passes, whose rows have to be alike
            n_best = 0
        found, states, ids = list[FloatArray](), list[FloatArray](), None
        chunks = [(start, min(start + ROWS, n_before)) for start in range(0, n_before, ROWS)]
        chunks += [(start, min(start + ROWS, len(tokens))) for start in range(n_before, len(tokens), ROWS)]
        for start, end in chunks:
            position, wanted = self.n_past + start, start >= n_before
            compute = partial(self._compute, rows[start:end], tokens[start:end], position, wanted)
            if wanted:
                state, values, ids = self._with_logits(compute, position, end - start, n_best)
                found.append(values)
            else:
                state = compute()
            states.append(state)
        values = np.concatenate(found) if found else np.empty((0, self.model.n_vocab), dtype=np.float32)
        return Forward(values, {STATE: np.concatenate(states)} if STATE in self.hidden else {}, ids)

    def _compute(self, rows: FloatArray, tokens: Sequence[int], position: int, wanted: bool) -> FloatArray:
        self._functions.clear(self._batch)
        for i, token in enumerate(tokens):
            at = self._functions.add_token(self._batch, self.sequence, token)
            if at < 0 or not self._functions.set_floats(self._batch, at, self._functions.floats(rows[i])):
                raise EngineError(
                    f"{self.model.engine} does not accept rows of width {rows.shape[1]} for {self.model.path.name}"
                )
            self._place(at, position + i, wanted=wanted or self.model.head.states_need_logits)
        return self._states(DECODE, len(tokens))

    def _with_logits(
        self, compute: Callable[[], Result], position: int, n: int, n_best: int
    ) -> tuple[Result, FloatArray, TokenIds | None]:
        """Run a pass of n rows from a position on, all with logits; again where the ``n_best`` largest logits do not
        do.

        Returns:
            What it returned, logits, and the columns that they are of where rows are not whole.
        """
        if n_best and self._best.enter(n_best, n):
            result = compute()
            if (best := self._columns(self._best.read(n, 0, n_best))) is not None:
                return result, *best
            self._truncate(position)
        self._best.leave()
        return compute(), self._logits(n), None

    def _columns(self, best: tuple[FloatArray, TokenIds] | None) -> tuple[FloatArray, TokenIds] | None:
        """Largest logits with their columns, which increase as their tokens do; None where one is of no column."""
        ids = self.model.head.ids
        if best is None or len(ids) == self.model.head.n_vocab:
            return best
        columns = np.searchsorted(ids, best[1])
        return (best[0], columns) if (ids.take(columns, mode="clip") == best[1]).all() else None

    def _place(self, at: int, position: int, *, wanted: bool) -> None:
        if at < 0:
            raise EngineError(f"{self.model.engine} takes no such row for {self.model.path.name}")
        self._position[:] = [position] * 4
        self._functions.set_position(self._batch, at, self._position)
        self._functions.set_output(self._batch, at, wanted)

    def _states(self, what: int, n: int) -> FloatArray:
        self._process(what, n)
        return self._functions.nextn(self._handle, n, self.model.n_embd)

    def _process(self, what: int, n: int) -> None:
        status = self._functions.process(self._handle, what, self._batch)
        if status != 0:
            raise EngineError(f"{self.model.engine} failed on {n} rows of {self.model.path.name} (status {status})")

    def _logits(self, n: int) -> FloatArray:
        """The logits of a pass, of the tokens that the head can guess [n, n_out], a copy."""
        width, ids = self.model.head.n_vocab, self.model.head.ids
        found = rows_at(self._binding.lib.llama_get_logits(self._handle), n, width)
        if found is None:
            raise EngineError(f"{self.model.engine} returned no logits")
        return found[:, ids] if len(ids) < width else found.copy()

    def _truncate(self, n: int) -> None:
        if not n or not self._binding.remove(self._handle, n):
            self._binding.clear(self._handle)
            if n:
                self.tokens = []
                raise EngineError(f"{self.model.engine} cannot take rows back out of {self.model.path.name}")

    def _close(self) -> None:
        self._functions.batch_free(self._batch)
        self._binding.free_context(self._handle)
        self._best.close()


class LlamaMemoryReader(LlamaHeadContext):
    """The engine's context over a memory of the target, which holds no rows; ``LlamaFollowingContext`` feeds it."""

    position = 0

    def _compute(self, rows: FloatArray, tokens: Sequence[int], position: int, wanted: bool) -> FloatArray:
        return super()._compute(rows, tokens, self.position, True)


class LlamaFollowingContext(HeadContext):
    """Rows over the memory of the target, one by one at the place of its next token (``common/speculative.cpp``).

    ``tokens`` name the rows since the last ``truncate``; nothing is kept of them.
    """

    model: LlamaHeadModel

    def __init__(self, model: LlamaHeadModel, n_ctx: int, hidden: tuple[str, ...]) -> None:
        super().__init__(model, n_ctx, hidden)
        self._target: Context | None = None

    def follow(self, target: Context) -> None:
        self._target = target

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        assert self._target is not None
        assert len(tokens) == 1
        assert isinstance(self._target, LlamaContext)
        reader = self.model.reader_of(self._target.passes)
        reader.sequence, reader.position = self._target.sequence, self._target.n_past
        return reader._decode_floats(rows, tokens, logits)

    def _truncate(self, n: int) -> None:
        pass

    def _close(self) -> None:
        self._target = None


class LlamaBlockContext(LlamaHeadContext):
    def _prepare(self) -> None:
        block = self.model.head.block
        assert block is not None
        self._block = block
        if block.n_candidates:
            super()._prepare()
        self._binding.lib.llama_set_causal_attn(self._handle, block.causal)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        for start in range(0, len(rows), ROWS):
            part = rows[start : start + ROWS]
            self._add_states(part, self.n_past + start, wanted=False)
            self._process(DECODE, len(part))
        return Forward(np.empty((0, self.model.n_vocab), dtype=np.float32), {})

    def guesses(self, token: int, n: int, n_best: int = 0) -> tuple[FloatArray, TokenIds | None]:
        logits, ids = super().guesses(token, n, n_best)
        return self._selected(logits) if self._block.n_candidates else (logits, ids)

    def _selected(self, lattice: FloatArray) -> tuple[FloatArray, TokenIds]:
        """The scores of candidates, each row's behind the best candidate of the row before, as llama.cpp's own program
        takes them."""
        k = self._block.n_candidates
        ids = lattice[:, :k].astype(np.int64)
        scores = lattice[:, k : k + k * k].reshape(-1, k, k)  # [n, before, candidate]
        found, before = np.empty((len(ids), k), dtype=np.float32), 0
        for row, of_row in enumerate(scores):
            found[row] = of_row[before]
            before = int(found[row].argmax())
        order = ids.argsort(axis=1)
        return np.take_along_axis(found, order, 1), np.take_along_axis(ids, order, 1)

    def _guess(self, block: Sequence[int], n_best: int) -> Forward:
        def compute() -> None:
            self._functions.clear(self._batch)
            for i, token in enumerate(block):
                at = self._functions.add_token(self._batch, 0, token)
                self._place(at, self.n_past + i, wanted=not self._block.n_candidates)
            self._process(DECODE, len(block))

        if self._block.n_candidates:
            compute()
            return Forward(self._functions.nextn(self._handle, len(block), self.model.head.n_embd))
        _, logits, ids = self._with_logits(compute, self.n_past, len(block), n_best)
        return Forward(logits, ids=ids)
