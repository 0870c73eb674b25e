"""Heads as ``--draft`` takes them; the objects of the entry points of pyproject.toml."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from localspec.backends.base import Context, FloatArray, Model, Wanted
from localspec.controllers.calibration import WHOLE, PassKind
from localspec.engine.draft_sources import DraftSource, DraftWeights, FoundDraft
from localspec.errors import LocalspecError, UsageError, shown
from localspec.heads import EARLY_EXIT, HEAD, MTP
from localspec.heads.base import DraftHead
from localspec.heads.drafters import HEAD_DRAFTERS
from localspec.heads.kinds import names_published_head
from localspec.heads.kinds.exit import exit_head
from localspec.heads.published import EngineHead, load_published, published_for
from localspec.heads.trained import Head, heads_for, load_head, target_facts
from localspec.spec_decode.drafters.names import SHOWN
from localspec.system.files import is_same_file

SHOWN.update({HEAD: "head", EARLY_EXIT: "early exit", MTP: "the model's own MTP layer"})

EXIT_SHARE = 0.25
"""Share of the target's layers for ``early-exit`` without a number; set by hand, for models trained to be left
early."""

MAX_LAYERS = 9999


class _Heads(DraftSource):
    def load(
        self,
        path: Path,
        target: Model,
        *,
        backend: str | None,
        n_threads: int | None,
        n_gpu_layers: int | None,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> DraftWeights:
        """On the engine of draft models, or else of its target; a published one on an engine that computes its kind."""
        head: DraftHead
        if is_same_file(path, target.path) or names_published_head(path):
            head = load_published(path, target, engine=backend, n_threads=n_threads, n_gpu_layers=n_gpu_layers, say=say)
        else:
            engine = target.backend if backend in (None, "auto") else backend
            head = load_head(
                path, target.path, engine, n_threads=n_threads, n_gpu_layers=n_gpu_layers, say=say, warn=warn
            )
        return DraftWeights(
            head.model,
            head.new_context,
            lambda context, source: HEAD_DRAFTERS[head.kind](head, context, source),
            head.close,
            lambda context: passes_of(head, context, target),
        )


class FileHeads(_Heads):
    """``head``, ``head:FILE``, and files of published heads."""

    name = HEAD

    def check(self, argument: str) -> None:
        if not argument:
            raise UsageError(f"--draft {HEAD}:FILE names a head file; {HEAD} alone takes the one for the model")

    def takes(self, path: Path) -> bool:
        return names_published_head(path)

    def automatic(self, target: Model) -> Iterator[str]:
        return heads_of(target)

    def find(self, argument: str, target: Model) -> FoundDraft:
        path = Path(argument).expanduser() if argument else next(head_files(target.path, target.backend), None)
        if path is None:
            raise UsageError(f"there is no head for {target.path.name} on this disk; localspec distill trains one")
        return FoundDraft(path, f"{HEAD}:{path}")


class EarlyExit(_Heads):
    """``early-exit`` and ``early-exit:N``."""

    name = EARLY_EXIT
    only_one = True

    def check(self, argument: str) -> None:
        if not (argument.isascii() and argument.isdigit() and 0 < int(argument[:5]) <= MAX_LAYERS):
            raise UsageError(
                f"--draft {EARLY_EXIT}:N takes a number of layers in 1..{MAX_LAYERS}, not {shown(argument)}"
            )

    def find(self, argument: str, target: Model) -> FoundDraft:
        n_layers = int(argument) if argument else max(1, round(EXIT_SHARE * target.n_layers))
        name = f"{EARLY_EXIT}:{n_layers}"
        return FoundDraft(exit_head(target.path, target_facts(target.path), n_layers), name, name)


class OwnLayer(_Heads):
    """``mtp``."""

    name = MTP

    def find(self, argument: str, target: Model) -> FoundDraft:
        return FoundDraft(target.path, MTP)


FILE_HEADS, EARLY_EXITS, OWN_LAYER = FileHeads(), EarlyExit(), OwnLayer()


def head_files(target: Path, backend: str | None) -> Iterator[Path]:
    """The heads on this disk that ``auto`` takes for a target: one trained here or shipped, and a published one.

    More of a kind would take memory for states and weights each, and read the same states.

    Args:
        target: its file.
        backend: the engine that it runs on; see ``published_for``.
    """
    for find in (heads_for, lambda path: published_for(path, backend)):
        try:
            yield from find(target)[:1]
        except LocalspecError:  # of the target, whose loading says it
            continue


def found_heads(target: Path, backend: str | None, *, mtp: bool) -> Iterator[str]:
    """Names for ``--draft`` of what drafts from a target's states, found one by one.

    Args:
        target, backend: as for ``head_files``.
        mtp: whether the target's own layer for multi-token prediction is computed.
    """
    if mtp:
        yield MTP
    yield from (f"{HEAD}:{path}" for path in head_files(target, backend))


def heads_of(target: Model) -> Iterator[str]:
    """The same for a loaded target."""
    return found_heads(target.path, target.backend, mtp=target.capabilities.mtp)


# Which passes of a head are timed.


@dataclass(frozen=True, slots=True)
class HeadPasses(PassKind):
    """Passes of a head over rows of floats, which return the states ``hidden``."""

    hidden: tuple[str, ...]

    def context(self, model: Model, n_ctx: int) -> Context:
        return model.new_context(n_ctx, hidden=self.hidden)

    def tokens(self, model: Model) -> list[int]:
        return [0]  # names of rows; which does not matter

    def feed(self, context: Context, tokens: Sequence[int], logits: Wanted = "all") -> None:
        context.decode_floats(_rows(len(tokens), context.model.n_embd), tokens, logits)


@dataclass(frozen=True, slots=True)
class BlockPasses(PassKind):
    """Passes of a block drafter: over a number of target states, then over a whole block."""

    head: EngineHead

    def context(self, model: Model, n_ctx: int) -> Context:
        return self.head.new_context(n_ctx)

    def tokens(self, model: Model) -> list[int]:
        return [0]  # names of rows; which does not matter

    def feed(self, context: Context, tokens: Sequence[int], logits: Wanted = "all") -> None:
        n = context.n_past + len(tokens)
        context.decode_floats(_rows(len(tokens), context.model.n_embd), tokens, "none")
        if logits != "none":
            self.head.block_logits(context, tokens[-1], self.head.steps)
            context.truncate(n)


@dataclass(frozen=True, slots=True)
class ChainedPasses(HeadPasses):
    """Passes over true rows: making them of states [n, n_taps * n_embd], computing them, and the last row's logits."""

    head: Head
    n_embd: int

    def feed(self, context: Context, tokens: Sequence[int], logits: Wanted = "all") -> None:
        states = _rows(len(tokens), len(self.head.taps) * self.n_embd)
        rows = self.head.true_rows(context, states, tokens)
        context.decode_floats(rows, tokens, "none" if logits == "none" else "last")


@dataclass(frozen=True, slots=True)
class EarlyExits(PassKind):
    """Passes of a target's first layers, up to the state ``tap``, then of ``output``, a context of the output
    matrix."""

    target: Model
    tap: str
    output: Context

    def context(self, model: Model, n_ctx: int) -> Context:
        return self.target.new_context(n_ctx, hidden=(self.tap,))

    def tokens(self, model: Model) -> list[int]:
        return WHOLE.tokens(self.target)

    def feed(self, context: Context, tokens: Sequence[int], logits: Wanted = "all") -> None:
        context.decode_first_layers(tokens, int(self.tap.removeprefix("layer:")) + 1)
        if logits != "none":
            self.output.decode_floats(_rows(1, self.output.model.n_embd), [0])
            self.output.truncate(0)


@lru_cache(maxsize=32)
def _rows(n: int, n_embd: int) -> FloatArray:
    return np.random.default_rng(0).standard_normal((n, n_embd), dtype=np.float32)


def passes_of(head: DraftHead, context: Context, target: Model) -> PassKind:
    if isinstance(head, EngineHead) and head.facts.block:
        return BlockPasses(head)
    if head.kind == "exit":
        return EarlyExits(target, head.taps[0], context)
    if isinstance(head, Head) and head.kind == "chained":
        return ChainedPasses(context.hidden, head, target.n_embd)
    return HeadPasses(context.hidden)
