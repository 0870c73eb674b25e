"""What a backend must provide: a ``Model`` (weights), a ``Context`` (one sequence's memory), a ``Forward`` (one pass).

A backend is a module of this folder with a function ``load`` (see ``registry.LoadEngine``), and ``binding`` where the
engine may be missing; ``localspec.backends`` knows which exist and chooses one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from localspec.errors import Cancelled, Closed, ContextFull, UsageError
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.vocab import Vocab

FloatArray = npt.NDArray[np.float32]
N_UNINTERRUPTED = 256
"""Tokens decoded between two looks at ``Context.interrupted``: what the engines compute together anyway."""

FEW_ROWS = 8
"""Rows of logits that may be asked for at no lasting cost.

ik-llama keeps room for the most that a context was ever asked for, and every later pass pays for it: after 17 rows of
152k logits a pass of a 1.5B model takes 2 % longer, after 64 rows 3.5 %, and one of a 0.5B draft 6 % after 24 and 9 %
after 64 (AVX2, 2 cores); after 8 it is 1 %.
"""

Progress = Callable[[float], bool]
"""Called with the loaded fraction in [0, 1]; returning False cancels the load."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model's memory and engine can do.

    Attributes:
        rollback: ``exact`` drops rows from the KV cache; ``replay`` restores a checkpoint and decodes again
            (recurrent memories, wrapped windows): a rejected token then costs another pass.
        batch_invariant: logits do not depend on how many tokens share a pass. False for every fast kernel; the
            reference backend is True, and only there can exactness be asserted to the bit.
        device: where the weights live: ``cpu``, ``gpu`` or ``mixed``.
        saves_state: contexts can hand out what they hold and take it back; see ``ContextState``.
        keeps_rows: once a pass was asked for more than ``FEW_ROWS`` rows of logits, every later one takes longer.
    """

    rollback: Literal["exact", "replay"] = "exact"
    batch_invariant: bool = False
    device: str = "cpu"
    saves_state: bool = False
    keeps_rows: bool = False


@dataclass(frozen=True, slots=True)
class ContextState:
    """What a context held at some moment, copied out of the engine.

    Attributes:
        tokens: what was in the memory, in order.
        arrays: the memory itself, in whatever arrays the engine needs; opaque to everyone else. Contiguous, of dtypes
            that NumPy has, so that they can be written to a file (view what it lacks, such as bfloat16, as integers).
    """

    tokens: tuple[int, ...]
    arrays: Mapping[str, npt.NDArray[Any]]

    @property
    def n_bytes(self) -> int:
        """Size of the arrays [bytes]."""
        return sum(array.nbytes for array in self.arrays.values())


class Forward:
    """The logits of one pass.

    Attributes:
        logits: float array [n_rows, n_vocab]; row i predicts the token that follows the i-th row asked for. Usually a
            view of the engine's memory: valid until the next decode on the same context; copy what must outlive it.
    """

    __slots__ = ("logits",)

    def __init__(self, logits: FloatArray) -> None:
        self.logits = logits

    def __len__(self) -> int:
        return len(self.logits)


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two texts in tokens."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


class Context(ABC):
    """The memory of one sequence.

    ``tokens`` is what the memory holds, in order. Subclasses implement ``_decode`` and ``_truncate``, and where their
    model ``saves_state`` also ``_export``, ``_state_bytes`` and ``_import``; arguments are checked here, so that every
    backend refuses the same things with the same words.

    Attributes:
        interrupted: asked between the pieces of a long input; a true answer ends the decode with ``Cancelled``.
    """

    def __init__(self, model: Model, n_ctx: int) -> None:
        self.model = model
        self.n_ctx = n_ctx
        self.tokens: list[int] = []
        self.interrupted: Callable[[], bool] | None = None
        self._closed = False

    @property
    def n_past(self) -> int:
        """Tokens in the memory."""
        return len(self.tokens)

    def decode(self, tokens: Sequence[int], logits: Literal["all", "last", "none"] = "all") -> Forward:
        """Feed tokens after those already in the memory.

        Args:
            tokens: at least one token id.
            logits: which rows to return: one per token, the last one only, or none (prefill).

        Raises:
            ContextFull: they do not fit; the memory is unchanged.
            UsageError: no tokens, or an id outside the vocabulary.
            Cancelled: ``interrupted`` was true; the memory holds the pieces that were done.
            Closed: the context was closed.
        """
        self._check_open()
        if not tokens:
            raise UsageError("decode needs at least one token")
        if self.n_past + len(tokens) > self.n_ctx:
            raise ContextFull(
                f"the context holds {self.n_ctx} tokens; {self.n_past} are used and {len(tokens)} more do not fit"
            )
        if min(tokens) < 0 or max(tokens) >= self.model.n_vocab:
            raise UsageError(f"token ids must lie in 0..{self.model.n_vocab - 1}")
        if logits != "all":
            while len(tokens) > N_UNINTERRUPTED and self.interrupted is not None:
                self._feed(tokens[:N_UNINTERRUPTED], "none")
                tokens = tokens[N_UNINTERRUPTED:]
                if self.interrupted():
                    raise Cancelled("decoding was stopped")
        return self._feed(tokens, logits)

    def _feed(self, tokens: Sequence[int], logits: Literal["all", "last", "none"]) -> Forward:
        n_before = self.n_past
        try:
            forward = self._decode(tokens, logits)
        except BaseException:
            # A pass that broke off (Ctrl-C lands between chunks) must not leave rows that `tokens` does not name.
            self._truncate(n_before)
            raise
        self.tokens.extend(tokens)
        return forward

    def truncate(self, n: int) -> None:
        """Forget all but the first n tokens; afterwards the context behaves as a fresh one that was fed just those.

        Raises:
            UsageError: n is negative or larger than ``n_past``.
            Closed: the context was closed.
        """
        self._check_open()
        if not 0 <= n <= self.n_past:
            raise UsageError(f"cannot truncate {self.n_past} tokens to {n}")
        if n < self.n_past:
            self._truncate(n)
            del self.tokens[n:]

    def reuse(self, tokens: Sequence[int]) -> int:
        """Keep the longest common prefix of the memory and ``tokens``, drop the rest, and return its length."""
        n = shared_prefix(self.tokens, tokens)
        self.truncate(n)
        return n

    def export_state(self) -> ContextState:
        """A copy of what the memory holds, to be given back to this context, or to one like it, later.

        Raises:
            UsageError: the model's engine cannot; see ``Capabilities.saves_state``.
            EngineError: the engine failed.
            Closed: the context was closed.
        """
        self._check_saves_state()
        return ContextState(tuple(self.tokens), self._export() if self.tokens else {})

    @property
    def state_bytes(self) -> int:
        """Size of what ``export_state`` would give now, or an upper bound of it [bytes]."""
        self._check_saves_state()
        return self._state_bytes() if self.tokens else 0

    def import_state(self, state: ContextState) -> None:
        """Hold what was exported: afterwards the context behaves as the exporting one did.

        The state must come from a context of the same file on the same engine and version, with the same type of cache,
        which the caller has to see to; the size of the context may differ.

        Raises:
            ContextFull: more tokens than this context has room for; it is left as it was.
            UsageError: the model's engine cannot.
            EngineError: the engine refuses the state; the context is then empty.
            Closed: the context was closed.
        """
        self._check_saves_state()
        if len(state.tokens) > self.n_ctx:
            raise ContextFull(f"the state holds {len(state.tokens)} tokens and the context has room for {self.n_ctx}")
        try:
            if state.tokens:
                self._import(state)
            else:  # engines abort the whole process on the state of an empty memory
                self._truncate_all()
        except BaseException:
            self._truncate_all()
            raise
        self.tokens = list(state.tokens)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this context was closed")

    def _truncate_all(self) -> None:
        self.tokens = []
        self._truncate(0)

    def _check_saves_state(self) -> None:
        self._check_open()
        if not self.model.capabilities.saves_state:
            raise UsageError(f"{self.model.engine} cannot save the state of a context")

    def close(self) -> None:
        """Free the memory; safe to call twice."""
        if not self._closed:
            self._closed = True
            self.tokens = []
            self._close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def _decode(self, tokens: Sequence[int], logits: Literal["all", "last", "none"]) -> Forward: ...

    @abstractmethod
    def _truncate(self, n: int) -> None:
        """Drop all rows from position n on, rows of a broken-off pass included.

        If that fails, ``tokens`` must be left naming no more than what is still there.
        """

    def _export(self) -> Mapping[str, npt.NDArray[Any]]:
        raise NotImplementedError

    def _state_bytes(self) -> int:
        raise NotImplementedError

    def _import(self, state: ContextState) -> None:
        """Replace what the memory holds. Must refuse, with EngineError, arrays that cannot be right."""
        raise NotImplementedError

    @abstractmethod
    def _close(self) -> None: ...


class Model(ABC):
    """Immutable weights, loaded by one engine.

    Subclasses fill in the attributes, those that the file tells with ``_read_header``, and implement ``_new_context``,
    ``_tokenize`` and ``_close``; arguments are checked here.

    Attributes:
        path: the GGUF file; of a model in parts, the first.
        backend: the engine's catalogue name, e.g. ``ik-llama``.
        engine: the engine's name, version and build, part of every cache key and report.
        vocab: tokens, types and special ids, read from the file and so the same for every engine.
        architecture: the file's name for it.
        chat_template: the file's Jinja template, or None.
        n_ctx_train: the context length the model was trained for.
        size_bytes: size of the file; of a model in parts, of all of them.
        capabilities: see ``Capabilities``.
        kv_type: type of the attention cache, where the engine has several: part of what a saved state has to match.
    """

    path: Path
    backend: str
    engine: str
    vocab: Vocab
    architecture: str
    chat_template: str | None
    n_ctx_train: int
    size_bytes: int
    capabilities: Capabilities
    kv_type: str = ""
    n_threads: int
    n_vocab: int
    """Width of a logits row. Can exceed the number of named tokens by padding rows."""
    _closed = False

    def _read_header(self, gguf: GGUFFile) -> None:
        """Fill in what the file says, whatever the engine.

        Raises:
            UnsupportedModel: it cannot generate text.
        """
        gguf.check_generates_text()
        self.path = gguf.path
        self.vocab = Vocab.from_gguf(gguf)
        self.architecture = gguf.architecture
        template = gguf.metadata.get("tokenizer.chat_template")
        self.chat_template = str(template) if template is not None else None
        self.n_ctx_train = gguf.n_ctx_train
        self.size_bytes = gguf.n_bytes

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this model was closed")

    def new_context(self, n_ctx: int, *, n_threads: int | None = None) -> Context:
        """An empty memory for n_ctx tokens. Contexts of one model are independent.

        Raises:
            UsageError: n_ctx is not positive.
            EngineError: not enough memory.
            Closed: the model was closed.
        """
        self._check_open()
        if n_ctx <= 0:
            raise UsageError(f"the context size must be over 0, not {n_ctx}")
        return self._new_context(n_ctx, n_threads or self.n_threads)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any Unicode text.
            add_special: put the begin-of-text token in front if the model wants one.
            parse_special: read ``<|im_end|>`` and the like as the special tokens they name. Only for text that comes
                from a chat template: a user's own text must not be able to forge a turn.

        Raises:
            UsageError: the text holds half a character.
            Closed: the model was closed.
        """
        self._check_open()
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("the text holds a lone surrogate, which is not valid Unicode") from None
        return self._tokenize(text, add_special, parse_special)

    def close(self) -> None:
        """Free the weights; safe to call twice. Contexts must be closed first."""
        if not self._closed:
            self._closed = True
            self._close()

    @abstractmethod
    def _new_context(self, n_ctx: int, n_threads: int) -> Context: ...

    @abstractmethod
    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...

    @abstractmethod
    def _close(self) -> None: ...

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
