"""Many conversations on one loaded pair: what a context held for others is put aside, and brought back.

A context holds one conversation. When a prompt continues another, the memory is copied out of the engine to ordinary
memory, and the best match among what was put aside earlier is copied in. Copying 1,500 tokens takes some tens of
milliseconds, reading them again tens of seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

from localspec.backends.base import Context, ContextState, SequenceBatch, shared_prefix
from localspec.errors import EngineError, LocalspecError

MIN_TOKENS = 16
"""Fewer tokens than this are read again rather than copied: one short pass, see ``pair.TARGET_PIECE``."""


@dataclass(slots=True)
class CachedContext:
    """One conversation as a context held it: ``tokens`` are what it stands for, while a draft's context may hold
    others. ``used``: when it was last of use, on a clock that counts uses."""

    context: Context
    tokens: Sequence[int]
    state: ContextState
    used: int


class PrefixCache:
    """Conversations put aside, least recently used out first.

    Several contexts (target and drafts) share the bound [bytes], which holds at every moment: room is made before a
    state is copied, and one that is larger is not kept.

    Attributes:
        on_disk: looks there for a conversation that has more of a prompt than so many tokens, and its state.
        hits, restored: how often a conversation was brought back from memory, and from the disk.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.on_disk: Callable[[Context, Sequence[int], int], tuple[Sequence[int], ContextState] | None]
        self.on_disk = lambda context, prompt, n_known: None
        self.entries: list[CachedContext] = []
        self._drafted: dict[Context, list[int]] = {}
        self._open: dict[Context, Sequence[int]] = {}
        self._batches: dict[Context, tuple[SequenceBatch, int]] = {}
        self._clock = count()
        self.hits = self.restored = self.stored = self.evictions = 0

    def bound(self, max_bytes: int) -> None:
        """Change what may be kept [bytes]; what is too much is dropped at once."""
        self.max_bytes = max_bytes
        self._make_room(0)

    def join(self, batch: SequenceBatch) -> None:
        """Let each sequence of a memory go on from what another holds, or has put aside."""
        self._batches |= {batch[i]: (batch, i) for i in range(batch.n_sequences)}

    @contextmanager
    def conversation(self, target: Context, drafts: Sequence[Context], tokens: Sequence[int]) -> Iterator[None]:
        """Within the block contexts work on one conversation; the caller adds to ``tokens`` what is settled."""
        self.switch(target, tokens)
        for draft in drafts:
            self.switch(draft, tokens)
        before = [list(draft.tokens) for draft in drafts]
        self._open |= dict.fromkeys((target, *drafts), tokens)
        try:
            yield
        finally:
            for context in (target, *drafts):
                self._open.pop(context, None)
            for draft, read in zip(drafts, before, strict=True):
                if draft.tokens != read:
                    self._drafted[draft] = list(tokens)

    def switch(self, context: Context, prompt: Sequence[int]) -> None:
        """Make a context hold the longest beginning of a prompt that is known: its own, or one put aside.

        What the context held is put aside if the prompt does not continue it. Where the conversation that it holds now
        differs from the prompt, the caller has to cut it, see ``Context.reuse``.
        """
        if context in self._batches and (shared := self.shareable(context, prompt)) is not None:
            # What another sequence of its memory holds takes no copying, and no cells.
            batch, number = self._batches[context]
            if len(context.tokens) - shared_prefix(context.tokens, prompt) >= MIN_TOKENS:
                self.put_aside(context)
            batch.copy_prefix(shared[0], number, shared[1])
            self.hits += 1
        if not context.model.capabilities.saves_state:
            return
        n_held, n_best, best = self._known(context, prompt)
        found = self.on_disk(context, prompt, max(n_held, n_best))
        if found is not None:
            self.put_aside(context)
            with suppress(LocalspecError):  # no room in a memory that others share, or the engine refuses it
                self.restore(context, *found)
                self.restored += 1
                return
            n_held, n_best, best = self._known(context, prompt)  # what it held may be an entry now
        if best is None or n_best < n_held + MIN_TOKENS:
            if len(self.held(context)) - n_held >= MIN_TOKENS:
                self.put_aside(context)
            return
        best.used = next(self._clock)
        self.put_aside(context)
        if len(best.tokens) - n_best < MIN_TOKENS:
            self._remove(best)  # the context will hold it, and more
        try:
            self.restore(context, best.tokens, best.state)
        except LocalspecError:
            self._remove(best)
        else:
            self.hits += 1

    def _known(self, context: Context, prompt: Sequence[int]) -> tuple[int, int, CachedContext | None]:
        """Tokens of a prompt that a context holds, and the most that an entry has, which is the third."""
        n_held = shared_prefix(self.held(context), prompt)
        best = max(self._of(context), key=lambda entry: usable(entry.context, entry.tokens, prompt), default=None)
        return n_held, 0 if best is None else usable(best.context, best.tokens, prompt), best

    def kind_of(self, context: Context) -> str:
        """The kind of memory that a context is, see ``why_not_restored``."""
        if context in self._batches:  # one of several sequences
            return "several"
        return "branches" if context.can_branch and context.model.capabilities.trees_apart else "one"

    def shareable(self, context: Context, prompt: Sequence[int]) -> tuple[int, int] | None:
        """The sequence of its memory that ``switch`` would have a context share, and how many tokens; None: nothing.
        Draft tokens and rows of an early exit are not shared."""
        batch, number = self._batches.get(context, (None, 0))
        if batch is None or not batch.shares_prefix:
            return None
        shared = [self._n_settled(batch[i], prompt) for i in range(batch.n_sequences)]
        best = max(range(batch.n_sequences), key=shared.__getitem__)
        aside = max((usable(entry.context, entry.tokens, prompt) for entry in self._of(context)), default=0)
        is_most = shared[best] >= shared[number] + MIN_TOKENS and shared[best] + MIN_TOKENS > aside
        return (best, shared[best]) if is_most else None

    def _n_settled(self, context: Context, prompt: Sequence[int]) -> int:
        n = min(shared_prefix(context.tokens, prompt), context.n_whole)
        settled = self._open.get(context, self._drafted.get(context))
        return n if settled is None else shared_prefix(settled[:n], prompt)

    def put_aside(self, context: Context) -> None:
        """Keep a copy of what a context holds."""
        held = list(self.held(context))
        if len(held) < MIN_TOKENS or not context.model.capabilities.saves_state:
            return
        for entry in self._of(context):
            if len(held) - usable(entry.context, entry.tokens, held) < MIN_TOKENS:
                entry.used = next(self._clock)  # all but a few tokens of it are here already
                return
        if not self.max_bytes or (n_bytes := context.state_bytes) > self.max_bytes:
            return
        for entry in self._of(context):
            # What a longer one begins with need not be kept, unless a memory that cannot be cut would need just that.
            if shared_prefix(entry.tokens, held) == len(entry.tokens) and can_be_cut(context):
                self._remove(entry)
        self._make_room(n_bytes)
        try:
            state = context.export_state()
        except (EngineError, MemoryError):
            return  # then it will be read again: no reason for this request to fail
        self.entries.append(CachedContext(context, held, state, next(self._clock)))
        self.stored += 1

    def would_keep(self, context: Context) -> bool:
        """Whether ``put_aside`` can keep what a context holds, or there is nothing to speak of."""
        if len(context.tokens) < MIN_TOKENS:
            return True
        return context.model.capabilities.saves_state and context.state_bytes <= self.max_bytes

    def empty(self, context: Context) -> None:
        """Put aside what a context holds, and have it hold nothing."""
        self.put_aside(context)
        context.truncate(0)
        self._drafted.pop(context, None)

    def cut(self, context: Context, beginning: Sequence[int]) -> None:
        """Cut a context to the beginning of its conversation, where that costs nothing: so much less to put aside."""
        if can_be_cut(context):
            context.reuse(beginning)
            self._drafted.pop(context, None)

    def export(self, context: Context, tokens: Sequence[int]) -> tuple[list[int], ContextState] | None:
        """The known beginning of a conversation and its state, nothing of any other; None if there is little."""
        if not context.model.capabilities.saves_state:
            return None
        self.switch(context, tokens)
        held = self.held(context)
        n = shared_prefix(held, tokens)
        if n < len(held):
            # It goes on differently. What is foreign is cut off, where that can be.
            n = shared_prefix(context.tokens, tokens)
            if n < MIN_TOKENS or not can_be_cut(context):
                return None
            context.truncate(n)
            self._drafted.pop(context, None)
        if n < MIN_TOKENS:
            return None
        n_read = shared_prefix(context.tokens, tokens)
        if MIN_TOKENS <= n_read < len(context.tokens) and can_be_cut(context):
            context.truncate(n_read)  # draft tokens that were not accepted
        return list(tokens[:n]), context.export_state()

    def restore(self, context: Context, tokens: Sequence[int], state: ContextState) -> None:
        """Make a context hold a state, which stands for a conversation. Raises ``EngineError``."""
        self._drafted.pop(context, None)
        context.import_state(state)
        if len(tokens) != len(state.tokens):
            self._drafted[context] = list(tokens)

    def held(self, context: Context) -> Sequence[int]:
        """The conversation that a context stands for; a draft's context may hold other tokens."""
        return self._drafted.get(context) or context.tokens

    def move(self, context: Context, other: Context) -> None:
        """Hand what belongs to a context to the one that takes its place."""
        if context in self._drafted:
            self._drafted[other] = self._drafted.pop(context)
        for entry in self._of(context):
            entry.context = other
        for each in self._alike(context):
            self._batches.pop(each, None)

    def forget(self, context: Context) -> None:
        """Drop what belongs to a context that is to be closed, and to all sequences of its memory."""
        for entry in self._of(context):
            self._remove(entry)
        for each in self._alike(context):
            self._drafted.pop(each, None)
            self._batches.pop(each, None)

    def clear(self) -> None:
        self.entries.clear()
        self._drafted.clear()

    def info(self) -> dict[str, int]:
        counts = ("max_bytes", "hits", "restored", "stored", "evictions")
        kept = {"entries": len(self.entries), "bytes": sum(entry.state.n_bytes for entry in self.entries)}
        return kept | {name: getattr(self, name) for name in counts}

    def _make_room(self, n_bytes: int) -> None:
        while self.entries and n_bytes + sum(entry.state.n_bytes for entry in self.entries) > self.max_bytes:
            self._remove(min(self.entries, key=lambda entry: entry.used))
            self.evictions += 1

    def _alike(self, context: Context) -> list[Context]:
        """A context, and with it all sequences of its memory: what one of them put aside any of them takes up."""
        batch, _ = self._batches.get(context, (None, 0))
        return [context] if batch is None else [batch[i] for i in range(batch.n_sequences)]

    def _of(self, context: Context) -> list[CachedContext]:
        alike = self._alike(context) if context in self._batches else [context]
        return [entry for entry in self.entries if entry.context in alike]

    def _remove(self, entry: CachedContext) -> None:
        self.entries = [each for each in self.entries if each is not entry]


def usable(context: Context, tokens: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens of a prompt that need not be read once a context holds what was kept of a conversation."""
    shared = shared_prefix(tokens, prompt)
    return shared if shared == len(tokens) or can_be_cut(context) else 0


def can_be_cut(context: Context) -> bool:
    return context.model.capabilities.rollback == "exact"
