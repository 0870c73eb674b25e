"""Heads as ``--draft`` takes them; the objects of the entry points of pyproject.toml."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np

from localspec.backends.base import Context, FloatArray, Model, Wanted
from localspec.controllers.calibration import WHOLE, PassKind
from localspec.engine.draft_sources import DraftSource, DraftWeights, FoundDraft
from localspec.errors import EngineError, LocalspecError, UnsupportedModel, UsageError, is_number, shown
from localspec.heads import EARLY_EXIT, HEAD, MTP
from localspec.heads.base import DraftHead, HeadContext
from localspec.heads.card import HeadCard, TargetFacts
from localspec.heads.drafters import HEAD_DRAFTERS
from localspec.heads.file import heads_folder, write_head
from localspec.heads.kinds import names_published_head
from localspec.heads.published import load_published, published_for
from localspec.heads.trained import Head, heads_for, load_head, target_facts
from localspec.model_files.gguf import GGUFFile, tensor_rows
from localspec.model_files.vocab import Vocab
from localspec.spec_decode.drafters.names import SHOWN
from localspec.system.files import is_same_file

SHOWN.update({HEAD: "head", EARLY_EXIT: "early exit", MTP: "the model's own MTP layer"})

# Share of the target's layers for early-exit without a number; set by hand, for models trained to be left early
EXIT_SHARE = 0.25

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
        return found_heads(target.path, target.backend, mtp=target.capabilities.mtp)

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
    """The heads on this disk that ``auto`` takes for a target's file: one trained here, and a published one.

    More of a kind would take memory for states and weights each, and read the same states. For ``backend`` see
    ``published_for``.
    """
    for find in (heads_for, lambda path: published_for(path, backend)):
        try:
            yield from find(target)[:1]
        except LocalspecError:  # of the target, whose loading says it
            continue


def found_heads(target: Path, backend: str | None, *, mtp: bool) -> Iterator[str]:
    """Names for ``--draft`` of what drafts from a target's states; ``mtp``: whether its own such layer is computed."""
    if mtp:
        yield MTP
    yield from (f"{HEAD}:{path}" for path in head_files(target, backend))


# Which passes of a head are timed.


@lru_cache(maxsize=32)
def _rows(n: int, n_embd: int) -> FloatArray:
    return np.random.default_rng(0).standard_normal((n, n_embd), dtype=np.float32)


def passes_of(head: DraftHead, context: Context, target: Model) -> PassKind:
    """Passes of a head as its drafter makes them; ``context`` is of the head."""
    model, hidden = head.model, context.hidden

    def rows(memory: Context, tokens: Sequence[int], logits: Wanted) -> None:
        memory.decode_floats(_rows(len(tokens), model.n_embd), tokens, logits)

    def true_rows(memory: Context, tokens: Sequence[int], logits: Wanted) -> None:
        states = _rows(len(tokens), len(head.taps) * target.n_embd)
        memory.decode_floats(head.true_rows(memory, states, tokens), tokens, "none" if logits == "none" else "last")

    def block(memory: Context, tokens: Sequence[int], logits: Wanted) -> None:
        n = memory.n_past + len(tokens)
        rows(memory, tokens, "none")
        if logits != "none":
            cast(HeadContext, memory).guesses(tokens[-1], head.steps)
            memory.truncate(n)

    def first_layers(memory: Context, tokens: Sequence[int], logits: Wanted) -> None:
        memory.decode_first_layers(tokens, int(head.taps[0].removeprefix("layer:")) + 1)
        if logits != "none":
            context.decode_floats(_rows(1, model.n_embd), [0])
            context.truncate(0)

    def following_row(memory: Context, tokens: Sequence[int], logits: Wanted) -> None:
        if logits == "none" or not memory.n_past:  # a step is over a text
            memory.decode(tokens, "none")
        if logits != "none":
            cast(HeadContext, context).follow(memory)
            context.decode_floats(_rows(1, model.n_embd), [0])
            context.truncate(0)

    if head.kind == "following":
        return PassKind(lambda _, n: target.new_context(n), lambda _: WHOLE.tokens(target), following_row)
    if head.kind == "exit":
        taps = head.taps
        return PassKind(lambda _, n: target.new_context(n, hidden=taps), lambda _: WHOLE.tokens(target), first_layers)
    # The names of rows do not matter.
    if head.kind == "block":
        return PassKind(lambda _, n: head.new_context(n), lambda _: [0], block)
    passes = true_rows if isinstance(head, Head) else rows
    return PassKind(lambda _, n: model.new_context(n, hidden=hidden), lambda _: [0], passes)


# An untrained head for states that leave the target early: its last norm, and rows of its output matrix.

# Tokens that it can guess: the first of the vocabulary, the commonest where it was made by merging, and those that end
# an answer
N_OUT = 32768


def exit_head(target: Path, facts: TargetFacts, n_layers: int) -> Path:
    """The file of such a head for a target and a number of layers, written once.

    Raises:
        UsageError: the target has not so many layers.
        UnsupportedModel: its last norm is not one that heads have.
    """
    if not 0 < n_layers < facts.n_layers:
        raise UsageError(f"{facts.name} can be left after 1 to {facts.n_layers - 1} layers, not after {n_layers}")
    digest = hashlib.sha256(facts.fingerprint.encode()).hexdigest()[:20]
    path = heads_folder() / "exits" / f"{target.stem[:60]}.{digest}.{n_layers}.gguf"
    if path.exists():
        return path
    with GGUFFile(target) as file:
        eps = file.field("attention.layer_norm_rms_epsilon")
        if not is_number(eps) or "output_norm.weight" not in file.tensors or "output_norm.bias" in file.tensors:
            raise UnsupportedModel(f"{target.name} cannot be left early: its last norm is not an RMS norm")
        ends = [token for token in Vocab.from_gguf(file).eog if token < facts.n_vocab]
        ids = np.union1d(np.arange(min(N_OUT, facts.n_vocab)), np.array(ends, dtype=np.int64))
        tap = f"layer:{n_layers - 1}"
        card = HeadCard("exit", (tap,), ids.astype(np.int32), steps=1, target=facts, norm_eps=float(eps))
        weights = {"output_norm.weight": tensor_rows(file, "output_norm.weight", [0])[0]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_head(path, card, weights)
    except OSError as error:
        raise EngineError(f"cannot write {path}: {error.strerror or error}") from None
