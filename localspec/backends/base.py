"""What a backend must provide: a ``Model`` (weights), a ``Context`` (one sequence's memory), a ``Forward`` (one pass).

``Context`` is in ``context``, ``Forward`` in ``forward``; both can be imported from here.

A backend is a module of this folder with a function ``load`` (see ``registry.LoadEngine``), and ``binding`` where the
engine may be missing; ``localspec.backends`` knows which exist and chooses one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localspec.backends.context import Context
from localspec.backends.context_state import ContextState
from localspec.backends.forward import NEXTN, FloatArray, Forward, checked_names
from localspec.backends.prefix import shared_prefix
from localspec.backends.sequence_batch import Piece, SequenceBatch, SequencesInTurn
from localspec.errors import Closed, UsageError
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.head_card import is_engine_file
from localspec.model_files.vocab import Vocab

__all__ = [
    "FEW_ROWS",
    "Capabilities",
    "Context",
    "ContextState",
    "FloatArray",
    "Forward",
    "Model",
    "Piece",
    "Progress",
    "SequenceBatch",
    "shared_prefix",
]

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
        device: where the weights live: ``cpu``, ``gpu`` (whatever is not this machine's processor), or ``mixed``.
        saves_state: contexts can hand out what they hold and take it back; see ``ContextState``.
        keeps_rows: once a pass was asked for more than ``FEW_ROWS`` rows of logits, every later one takes longer.
        hidden: contexts can return hidden states; see ``Forward.hidden``.
        nextn: contexts can return the state ``nextn``.
        mtp: its own layer for multi-token prediction is loaded.
        float_rows: ``Context.decode_floats`` works.
        first_layers: ``Context.decode_first_layers`` works, in a context that returns hidden states.
        trees: ``Context.decode_tree`` works, in a context that was made for it (``branches``).
        trees_apart: such a context computes otherwise than others do, and is to be asked for only where trees pay.
        batches: a pass over several sequences is one, see ``Model.new_batch``; else there is one for each.
        own_cells: a row of such a pass goes over the cells of its own sequence only, and not over those of all.
        keeps_kv_type: a memory of several sequences is of the model's ``kv_type`` too; else its values are of 16 bits.
    """

    rollback: Literal["exact", "replay"] = "exact"
    batch_invariant: bool = False
    device: str = "cpu"
    saves_state: bool = False
    keeps_rows: bool = False
    hidden: bool = False
    nextn: bool = False
    mtp: bool = False
    float_rows: bool = False
    first_layers: bool = False
    trees: bool = False
    trees_apart: bool = False
    batches: bool = False
    own_cells: bool = False
    keeps_kv_type: bool = True


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
        n_embd: width of the residual stream, of hidden states and of rows of floats.
        n_layers: number of blocks; those for multi-token prediction, which are no part of a pass, are not counted.
        capabilities: see ``Capabilities``.
        kv_type: type of the attention cache, where the engine has several: part of what a saved state has to match.
        placement: where the weights go, as text; empty where nothing was asked: passes may cost something else then.
    """

    path: Path
    backend: str
    engine: str
    vocab: Vocab
    architecture: str
    chat_template: str | None
    n_ctx_train: int
    size_bytes: int
    n_embd: int
    n_layers: int
    capabilities: Capabilities
    kv_type: str = ""
    placement: str = ""
    n_threads: int
    n_vocab: int
    """Width of a logits row. Can exceed the number of named tokens by padding rows."""
    _closed = False

    def _read_header(self, gguf: GGUFFile) -> None:
        """Fill in what the file says, whatever the engine.

        Raises:
            UnsupportedModel: it cannot generate text, and is no head for engines either.
        """
        if is_engine_file(gguf):
            self.vocab = Vocab.none()
        else:
            gguf.check_generates_text()
            self.vocab = Vocab.from_gguf(gguf)
        self.path = gguf.path
        self.architecture = gguf.architecture
        template = gguf.metadata.get("tokenizer.chat_template")
        self.chat_template = str(template) if template is not None else None
        self.n_ctx_train = gguf.n_ctx_train
        self.size_bytes = gguf.n_bytes
        self.n_embd = _number(gguf, "embedding_length")
        self.n_layers = _number(gguf, "block_count") - _number(gguf, "nextn_predict_layers")

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this model was closed")

    def new_context(
        self, n_ctx: int, *, n_threads: int | None = None, hidden: Sequence[str] = (), branches: bool = False
    ) -> Context:
        """An empty memory for n_ctx tokens. Contexts of one model are independent.

        Args:
            n_ctx: its room [tokens].
            n_threads: that passes use; those of the model by default.
            hidden: hidden states that every pass is to return: ``norm``, ``layer:i``; see ``forward``.
            branches: whether ``Context.decode_tree`` is to work, if it can (``why_no_trees``): with some engines it
                does only in a context made for it, of which other passes may take longer.

        Raises:
            UsageError: n_ctx is not positive, there is no such state, or the engine returns none.
            EngineError: not enough memory.
            Closed: the model was closed.
        """
        self._check_open()
        make = self._new_branching_context if branches else self._new_context
        return make(n_ctx, n_threads or self.n_threads, self._check_memory(n_ctx, hidden))

    def why_no_trees(self) -> str | None:
        """Why contexts cannot be made for tokens that branch; None where they can."""
        if self.capabilities.trees:
            return None
        return f"{self.engine} does not take tokens that branch for {self.path.name}"

    def new_batch(
        self,
        n_sequences: int,
        n_cells: int,
        *,
        n_ctx: int | None = None,
        n_threads: int | None = None,
        hidden: Sequence[str] = (),
    ) -> SequenceBatch:
        """An empty memory of several sequences that are fed together; see ``SequenceBatch``.

        Args:
            n_sequences: how many.
            n_cells: room of all together [tokens].
            n_ctx: most tokens of one; ``n_cells`` by default.
            n_threads, hidden: as for ``new_context``.

        Raises:
            UsageError: a number is not positive, there is no such state, or the engine returns none, or takes fewer
                sequences.
            EngineError: not enough memory.
            Closed: the model was closed.
        """
        self._check_open()
        if n_sequences <= 0:
            raise UsageError(f"the number of sequences must be at least 1, not {n_sequences}")
        names = self._check_memory(n_cells, hidden)
        n_ctx = n_cells if n_ctx is None else min(n_ctx, n_cells)
        if n_ctx <= 0:
            raise UsageError(f"the context size must be at least 1, not {n_ctx}")
        return self._new_batch(n_sequences, n_cells, n_ctx, n_threads or self.n_threads, names)

    def _check_memory(self, n_ctx: int, hidden: Sequence[str]) -> tuple[str, ...]:
        if n_ctx <= 0:
            raise UsageError(f"the context size must be at least 1, not {n_ctx}")
        if hidden and not self.capabilities.hidden:
            raise UsageError(f"{self.engine} returns no hidden states for {self.path.name}")
        if NEXTN in hidden and not self.capabilities.nextn:
            raise UsageError(f"{self.engine} returns no states of {self.path.name} for an MTP layer")
        return checked_names(hidden, self.n_layers)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any Unicode text.
            add_special: put the begin-of-text token in front if the model wants one.
            parse_special: read ``<|im_end|>`` and the like as the special tokens they name. Only for text that comes
                from a chat template: a user's own text must not be able to forge a turn.

        Raises:
            UsageError: the text holds half a character, or the model has no tokens.
            Closed: the model was closed.
        """
        self._check_open()
        if not self.vocab.n_tokens:
            raise UsageError(f"{self.path.name} is a draft head and cannot tokenize text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("the text holds a lone surrogate, which is not valid Unicode") from None
        return self._tokenize(text, add_special, parse_special)

    def recover(self) -> None:  # noqa: B027
        """Be usable again after a device was gone, with empty contexts; nothing where none was.

        Raises:
            EngineError: it is still gone.
        """

    def close(self) -> None:
        """Free the weights; safe to call twice. Contexts must be closed first."""
        if not self._closed:
            self._closed = True
            self._close()

    @abstractmethod
    def _new_context(self, n_ctx: int, n_threads: int, hidden: tuple[str, ...]) -> Context: ...

    def _new_branching_context(self, n_ctx: int, n_threads: int, hidden: tuple[str, ...]) -> Context:
        return self._new_context(n_ctx, n_threads, hidden)

    def _new_batch(
        self, n_sequences: int, n_cells: int, n_ctx: int, n_threads: int, hidden: tuple[str, ...]
    ) -> SequenceBatch:
        contexts: list[Context] = []
        try:
            while len(contexts) < n_sequences:
                contexts.append(self._new_context(n_ctx, n_threads, hidden))
        except BaseException:
            for context in contexts:
                context.close()
            raise
        return SequencesInTurn(contexts, n_cells)

    @abstractmethod
    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...

    @abstractmethod
    def _close(self) -> None: ...

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _number(gguf: GGUFFile, name: str) -> int:
    """A number of the header; 0 where it has none, or a list."""
    value = gguf.field(name, 0)
    return value if isinstance(value, int) else 0
