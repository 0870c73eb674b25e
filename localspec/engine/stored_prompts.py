"""What models held of long prompts, kept on the disk: after a restart they read only what is new.

A conversation and a model have one file, written as saved sessions are (``saved``), which this user alone may read. It
is used by the model file, engine build, machine, kind of memory and settings that it was made by, and by no other; one
that is damaged is deleted, and its prompt read anew. Several processes may use the folder: files come and go whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from localspec.backends.base import Context, ContextState, Model, shared_prefix
from localspec.backends.trust import why_not_restored
from localspec.engine import saved
from localspec.engine.prefix_cache import PrefixCache, can_be_cut, usable
from localspec.engine.saved import SavedContext, maker_of
from localspec.errors import LocalspecError, SessionFileError
from localspec.model_files.gguf import GGUFFile
from localspec.system.files import home, private_folder
from localspec.system.machine import cpu_name, read_memory
from localspec.system.steps import Steps

log = logging.getLogger("localspec")

MIN_STORED = 512
"""Tokens under which a conversation is not kept, and read again: some seconds on a slow laptop."""

MIN_GAIN = 128
"""Tokens that a file has to spare over what is in memory, and that a last writing has to add to it."""

GROWTH = 512
"""Tokens by which a conversation has to grow to be written again in idle time, all of it: a disk wears."""

MEMORY_SHARE = 0.5
"""Of the memory that is free, what a copy that is to be written may take."""

MOST_TRIED = 256

Conversation = tuple[Sequence[int], ContextState]
"""What a context stands for, and what it held of it."""

_STALE_S = 3600.0

SUFFIX = ".prompt"

LONG_ROPE = "rope_factors_long.weight"
"""Tensor of models with two ropes, between which the size of the context decides."""


def folder() -> Path:
    return home() / "prompts"


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A file of the folder: what its header says.

    Attributes:
        tokens: the conversation that it stands for; ``n_held``: those in the memory, which of a draft model may be
            others.
        used: when it was last of use, in seconds since 1970.
    """

    path: Path
    maker: Mapping[str, str]
    tokens: Sequence[int]
    n_held: int
    n_bytes: int
    used: float


def stored_prompts() -> list[StoredPrompt]:
    """The readable files, last used first."""
    found = [prompt for path in _files() if (prompt := _header(path)) is not None]
    return sorted(found, key=lambda prompt: prompt.used, reverse=True)


def clear() -> int:
    """Delete all files; how many there were."""
    return sum(_delete(path) for path in _files())


def _files() -> list[Path]:
    with suppress(OSError):
        return [Path(entry.path) for entry in os.scandir(folder()) if entry.name.endswith(SUFFIX)]
    return []


def _header(path: Path) -> StoredPrompt | None:
    try:
        with path.open("rb") as file:
            (memory,) = saved.read_text(file, path.name)["memories"]
            facts = os.fstat(file.fileno())
        tokens, held = [int(token) for token in memory["tokens"]], memory["held"]
        n_held = len(tokens if held is None else held)
        return StoredPrompt(path, dict(memory["maker"]), tokens, n_held, facts.st_size, facts.st_mtime)
    except (OSError, LocalspecError, KeyError, TypeError, ValueError):
        return None


def _delete(path: Path) -> bool:
    with suppress(OSError):  # another process did, or has it open where that forbids it
        path.unlink()
        return True
    return False


class PromptStore:
    """The files that the contexts of one pair can use, for the worker's thread; writes conversations that have grown,
    in idle time and at the end.

    Args:
        max_bytes: of all files of the folder, other models' too; 0 keeps none, and looks for none.
        contexts: those of the pair that hold texts.
        failed: takes a line where nothing can be written; then nothing more is.

    Attributes:
        steps: write, each for some milliseconds; yield False while there is nothing to write.
    """

    def __init__(
        self,
        max_bytes: int,
        n_gpu_layers: int | None,
        cache: PrefixCache,
        contexts: Callable[[], Sequence[Context]],
        failed: Callable[[str], None],
    ) -> None:
        self.max_bytes = max_bytes
        self._n_gpu_layers, self._cache, self._contexts, self._failed = n_gpu_layers, cache, contexts, failed
        self._makers: WeakKeyDictionary[Model, dict[str, str]] = WeakKeyDictionary()
        self._headers: dict[str, StoredPrompt] = {}
        self._least = GROWTH
        self._tried: set[tuple[Context, int]] = set()  # conversations, which may not have been written
        self.steps = self._writing()

    def know(self, model: Model) -> None:
        """Note what a model is made of while its file is the one that was loaded."""
        if model not in self._makers and self.max_bytes:
            maker = maker_of(model) | {"machine": cpu_name(), "gpu layers": str(self._n_gpu_layers)}
            self._makers[model] = maker | {"placement": model.placement}

    def maker(self, context: Context) -> dict[str, str]:
        """What a file has to be made by to be used in a context."""
        self.know(context.model)
        maker = self._makers[context.model] | {"memory": self._cache.kind_of(context)}
        with suppress(LocalspecError, OSError), GGUFFile(context.model.path) as file:
            if LONG_ROPE in file.tensors:
                maker["n_ctx"] = str(context.n_ctx)
        return maker

    def find(self, context: Context, prompt: Sequence[int], n_known: int) -> Conversation | None:
        """The conversation that has most of a prompt, and its state; None where that spares too little reading over the
        ``n_known`` tokens that are in memory."""
        if not self.max_bytes or len(prompt) < max(MIN_STORED, n_known + MIN_GAIN):
            return None
        maker = self.maker(context)
        fitting = [stored for stored in self._of(maker) if stored.n_held <= context.n_ctx]
        fitting.sort(key=lambda stored: usable(context, stored.tokens, prompt), reverse=True)
        for stored in fitting:
            if usable(context, stored.tokens, prompt) < max(MIN_STORED, n_known + MIN_GAIN):
                return None
            if self._why_not(context) is not None:
                return None
            memory = self._read(stored, maker)
            if memory is not None:
                return memory.tokens, memory.state
        return None

    def _growth(self, context: Context, tokens: Sequence[int]) -> int:
        """Tokens by which a conversation is longer than what is kept of it; 0 where it is not to be kept."""
        if not self.max_bytes or len(tokens) < MIN_STORED or not context.model.capabilities.saves_state:
            return 0
        kept = max((usable(context, stored.tokens, tokens) for stored in self._of(self.maker(context))), default=0)
        return len(tokens) - kept

    def _storing(self, context: Context, tokens: Sequence[int], state: ContextState | None) -> Steps[None]:
        """Write a state; None: what a context holds then. ``SessionFileError``: it cannot be written."""
        if self._why_not(context) is not None:
            return
        yield
        found = self._copied(context, tokens) if state is None else (tokens, state)
        if found is None or len(found[0]) < MIN_STORED:
            return
        tokens, copied = found
        maker = self.maker(context)
        earlier = [stored for stored in self._of(maker) if shared_prefix(stored.tokens, tokens) == len(stored.tokens)]
        earlier = earlier if can_be_cut(context) else []
        path = folder() / f"{_digest(maker)}-{_digest(list(tokens))}{SUFFIX}"
        try:
            private_folder(folder())
        except OSError as error:
            raise SessionFileError(f"cannot make {folder()}: {error.strerror or error}") from error
        self._make_room(copied.n_bytes, [path, *(stored.path for stored in earlier)])
        yield from saved.writing(path, {}, [SavedContext(maker, tokens, copied)], durable=False)
        for stored in earlier:  # all of it is in the new one
            if stored.path != path:
                _delete(stored.path)

    def _why_not(self, context: Context) -> str | None:
        return why_not_restored(context.model, self._cache.kind_of(context), self._n_gpu_layers)

    def _of(self, maker: Mapping[str, str]) -> list[StoredPrompt]:
        """The files of a maker; a header is read once."""
        names = {path.name: path for path in _files() if path.name.startswith(_digest(maker))}
        self._headers = {name: stored for name, stored in self._headers.items() if stored.path.exists()}
        for name, path in names.items():
            if name not in self._headers:
                if (stored := _header(path)) is not None and stored.maker == maker:
                    self._headers[name] = stored
                else:
                    _delete(path)  # damaged, or it has a name that it should not have
        return [self._headers[name] for name in names if name in self._headers]

    def _read(self, stored: StoredPrompt, maker: Mapping[str, str]) -> SavedContext | None:
        """What is in a file, checked against its digests; None, and no file, where it is damaged."""
        try:
            _, (memory,), damage = saved.read(stored.path)
            if damage is None and memory.maker == maker:
                os.utime(stored.path)
                return memory
        except (OSError, ValueError, LocalspecError) as error:
            log.debug("a prompt on the disk cannot be read: %s", error)
        except MemoryError:
            return None
        _delete(stored.path)
        return None

    def _make_room(self, n_bytes: int, replaced: Sequence[Path]) -> None:
        """Delete files, those first that were used least recently, until so many bytes more are within the bound."""
        facts = []
        for path in _files():
            with suppress(OSError):
                facts.append((path.stat().st_mtime, path.stat().st_size, path))
        for left in folder().glob(".*.tmp"):  # of a process that was killed
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    left.unlink()
        total = n_bytes + sum(size for _, size, path in facts if path not in replaced)
        for _, size, path in sorted(facts):
            if total <= self.max_bytes:
                return
            if path not in replaced and _delete(path):
                total -= size

    # -- idle time -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Before the contexts are closed: write what was not written yet."""
        self._least = MIN_GAIN
        while next(self.steps, False) is not False:
            pass

    def _writing(self) -> Iterator[bool | None]:
        while True:
            writing = self._next()
            if writing is None:
                yield False
                continue
            try:
                yield from writing
            except SessionFileError as error:
                self.max_bytes = 0
                self._failed(f"prompts are not kept on the disk any more: {error}")
            except LocalspecError as error:  # of an engine, or a context that was closed meanwhile
                log.debug("a prompt is not kept on the disk: %s", error)
            yield None

    def _next(self) -> Steps[None] | None:
        """The writing of a conversation that is ``_least`` tokens longer than what is kept of it."""
        kept: list[tuple[Context, Sequence[int], ContextState | None]] = []
        kept += [(context, self._cache.held(context), None) for context in self._contexts()]
        kept += [(entry.context, entry.tokens, entry.state) for entry in self._cache.entries]
        for context, held, state in kept:
            tokens = list(held)
            if self._growth(context, tokens) < self._least or (context, hash(tuple(tokens))) in self._tried:
                continue
            n_bytes = context.state_bytes if state is None else state.n_bytes
            if n_bytes <= min(self.max_bytes, MEMORY_SHARE * read_memory().available):
                self._tried = {*(self._tried if len(self._tried) < MOST_TRIED else ()), (context, hash(tuple(tokens)))}
                return self._storing(context, tokens, state)
        return None

    def _copied(self, context: Context, tokens: Sequence[int]) -> Conversation | None:
        if list(self._cache.held(context)) != tokens:
            return None  # a request came in between; the next look finds what there is then
        with suppress(MemoryError):
            return self._cache.export(context, tokens)
        return None


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
