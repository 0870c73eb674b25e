"""Published heads on engines.

With s_p the tapped states of the target after token x_p, and the layer and its norms in the engine:

    EAGLE-3      g_p = fc · s_p, and row p is (g_p, x_(p+1)); its own state before the last norm is the next g
    MTP          row p is (s_p, x_(p+1)) for the tap "nextn", after a first row (0, x_0); its own state after the last
                 norm is the next s. An assistant of Gemma 4 reads the target's keys and values up to p in the place of
                 earlier rows, and has a matrix that makes its state one of the target's
    DFlash       row p is s_p alone, and behind them a block of x_n, the last token, and masks, each of which but the
                 first becomes a token, in one pass. DSpark's first guesses too. DFlash2 returns some candidates for
                 each row, scored by the one taken of the row before
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import cast

import numpy as np

from localspec.backends import trial
from localspec.backends.base import NEXTN, Context, FloatArray, Model
from localspec.backends.llama import llama_cpp
from localspec.backends.llama.model import LlamaModel
from localspec.backends.llama.staging import NEEDED
from localspec.backends.trust import agreement
from localspec.errors import (
    EngineError,
    ModelFileError,
    UnsupportedModel,
    UsageError,
    VocabularyMismatch,
)
from localspec.heads.base import STATE, DraftHead, HeadContext, check_alike, row_by_row
from localspec.heads.card import TargetFacts
from localspec.heads.file import heads_folder
from localspec.heads.kinds import names_published_head, read_mtp, read_published
from localspec.heads.kinds.base import LoadHeadModel, PublishedHead
from localspec.heads.llama import LlamaHeadModel
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import GGUFFile, fingerprint
from localspec.model_files.nextn import readable
from localspec.model_files.vocab import Vocab
from localspec.system.files import JsonStore, home, is_same_file, remembered
from localspec.system.machine import default_threads

# Does llama-cpp live through a published head? The functions that feed heads change between versions of it, and with
# other arguments end the process. So a child loads the head and takes steps first: once per version and kind of head.

_FORMAT = 1
_CHILD = "from localspec.heads.published import try_head; try_head()"


def _lends(head: PublishedHead) -> bool:
    """Whether the child needs the target: for its weights, or because the functions return its states too."""
    return bool(head.borrows or head.of_model)


def check_survives(
    head: PublishedHead, target: Path, engine: str, n_threads: int, tick: Callable[[], None] = lambda: None
) -> None:
    """See that the engine computes a kind of head without ending the process (EngineError); remembered.

    Success counts for all files of the kind, failure for the file. What ``tick`` raises ends the trial.
    """
    store = JsonStore(home() / "trials", _FORMAT)
    # What the layers of different architectures are made of differs more than heads of a kind do.
    kind = {"engine": engine, "head": f"{head.title} {head.of_model[0] if head.of_model else ''}".strip()}

    def examine() -> dict[str, bool] | None:
        status = trial.run_child(_CHILD, [str(head.path), str(target) if _lends(head) else "", str(n_threads)], tick)
        if status == 0:
            store.put(kind, {"survives": True})
        # An exception (1) will be raised here as well, in the engine's own words. Of a child that was stopped from
        # outside, short memory included, nothing is known: what it was to do needs less memory than what follows here.
        return None if status in (0, 1) or status in trial.KILLED_FROM_OUTSIDE else {"survives": False}

    if store.get(kind) is None and remembered(store, kind | {"file": fingerprint(head.path)}, examine) is not None:
        raise EngineError(
            f"{engine} ended the process in which {head.path.name} was tried, so it is not loaded here; "
            f"version {NEEDED} runs such heads"
        )


# Most tokens that a chained head drafts; how far it pays is for the controller. llama.cpp's own default is 3.
STEPS = 16

_WINDOW_BYTES = 64 << 20  # states of the target that are kept for a head
_MOST_BESIDE = 256  # files of a folder whose headers are looked at
_WIDTHS = (1, 1, 2, 3, 4, 5, 8)  # rows of the passes that are compared with one of all these together


class EngineHead(DraftHead):
    """A published head on an engine."""

    def __init__(self, facts: PublishedHead, model: Model) -> None:
        self.facts, self.model = facts, model
        self.kind = "block" if facts.block else "following" if facts.reads else "chained"
        self.taps, self.token_map = facts.taps, facts.ids
        self.steps = facts.block.n_guesses if facts.block else STEPS
        self.has_zeroth = facts.has_zeroth

    def new_context(self, n_ctx: int) -> Context:
        hidden = () if self.facts.block else (STATE,)
        return self.model.new_context(n_ctx + self.steps + 1, hidden=hidden)

    def window(self, n_ctx: int) -> int:
        if self.facts.reads:
            return 1
        return min(n_ctx, max(64, _WINDOW_BYTES // (4 * self.facts.n_target * len(self.taps))))

    def true_rows(self, context: Context, states: FloatArray, tokens: Sequence[int]) -> FloatArray:
        if not self.facts.fuses:
            return states
        return cast(HeadContext, context).fuse(states)


def published_for(target: Path, backend: str | None) -> list[Path]:
    """Published heads that fit a target's file, in the folder of heads and beside the file: the catalogue's first.

    ``backend`` is the engine that it runs on; None where that is open: then heads that borrow from it are left out.
    """
    found: list[Path] = []
    with GGUFFile(target) as file:
        facts, vocab, kept = TargetFacts.of(file, ""), Vocab.from_gguf(file), readable(file)
    folders = (heads_folder(), target.parent, target.parent / "MTP")  # where repositories have heads
    for path in [path for folder in folders for path in sorted(folder.glob("*.gguf"))[:_MOST_BESIDE]]:
        if names_published_head(path):
            try:
                head = read_published(path)
            except ModelFileError:
                continue
            is_lent = not head.borrows or (backend is not None and _engine_for(head, backend, None) == backend)
            if is_lent and not head.misfit(facts, vocab, kept):
                found.append(path)
    return Catalog.load().sort_heads(found, target)


def computes_mtp(target: Path, backend: str) -> bool:
    """Whether an engine computes the MTP layer in a model's file, as far as its header says."""
    try:
        return backend in read_mtp(target).engines
    except ModelFileError:
        return False


def _engine_for(head: PublishedHead, backend: str, wanted: str | None) -> str:
    if wanted and wanted in head.engines and not head.borrows and not head.in_target:
        return wanted
    return backend if backend in head.engines else next(iter(head.engines))


def load_published(
    path: Path,
    target: Model,
    *,
    engine: str | None = None,
    n_threads: int | None = None,
    n_gpu_layers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> EngineHead:
    """Load a published head for a target.

    Once for each file rows in one pass are compared with rows in several.

    Args:
        path: the head's file; the target's own for its layer for multi-token prediction.
        engine: takes its place where it computes the kind and nothing is borrowed; else the target's does, if it can.
        n_threads, n_gpu_layers: as for ``backends.load``.
        say: takes a line before long work.

    Raises:
        UnsupportedModel: there is no head in the file.
        VocabularyMismatch: it is for a model with other tokens.
        UsageError: it is for another model.
        ModelFileError: the file is damaged, or the engine cannot compute it.
        EngineError: the engine is not there, is too old, would end the process, refuses the file, or is wrong about it.
    """
    facts = read_mtp(path) if is_same_file(path, target.path) else read_published(path)
    with GGUFFile(target.path) as file:
        why = facts.misfit(TargetFacts.of(file, ""), target.vocab, readable(file))
    if why:
        wrong = VocabularyMismatch if "vocabulary" in why else UsageError
        raise wrong(f"{path.name} does not fit: {why}")
    if NEXTN in facts.taps and not facts.in_target and not target.capabilities.nextn:
        raise UnsupportedModel(
            f"{path.name} reads states of {target.path.name} that {target.backend} does not hand out; "
            "use --backend llama-cpp"
        )
    name, threads = _engine_for(facts, target.backend, engine), n_threads or default_threads()
    if name == "llama-cpp" and (not _lends(facts) or (isinstance(target, LlamaModel) and not target.reloads)):
        version = f"{name} {llama_cpp.binding().version}"
        check_survives(facts, target.path, version, threads, lambda: say(f"trying {path.name} with {version} (once)"))
    load: LoadHeadModel = EntryPoint(name, facts.engines[name], "").load()
    head = EngineHead(facts, load(facts, target, threads, n_gpu_layers))
    try:
        digest = f"{fingerprint(path)} for {fingerprint(target.path)}"
        check_alike(head.model, path, digest, n_gpu_layers, lambda: disagreement(head, target), say)
    except BaseException:
        head.close()
        raise
    return head


def disagreement(head: EngineHead, target: Model) -> float:
    """The worst mean KL divergence [nats] between rows in one pass and the same rows in narrow ones; of a head that
    reads the target's memory, between rows over one from which tokens were taken back and over one that never had any.
    """
    rng, n = np.random.default_rng(0), sum(_WIDTHS)
    tokens = rng.integers(0, head.facts.n_vocab, n).tolist()
    states = rng.standard_normal((n, len(head.taps) * head.facts.n_target)).astype(np.float32)
    with head.new_context(n) as context:
        if head.facts.block:
            return _block_disagreement(head, cast(HeadContext, context), states, tokens)
        if head.facts.reads:
            return _following_disagreement(cast(HeadContext, context), target, states, tokens)
        return row_by_row(context, head.true_rows(context, states, tokens), tokens, _WIDTHS)


def _block_disagreement(head: EngineHead, context: HeadContext, states: FloatArray, tokens: Sequence[int]) -> float:
    context.decode_floats(states, tokens, "none")
    wide, wide_ids = context.guesses(tokens[0], head.steps)
    context.truncate(0)
    for width in _WIDTHS:
        part = slice(context.n_past, context.n_past + width)
        context.decode_floats(states[part], tokens[part], "none")
        context.guesses(tokens[0], 1)  # which has to leave nothing behind
        context.truncate(part.stop)
    narrow, ids = context.guesses(tokens[0], head.steps)
    if ids is None or wide_ids is None:
        return agreement(narrow, wide).mean_kl
    # What is no candidate anywhere can differ by a hair; the first rows' candidates cannot all.
    return 0.0 if np.array_equal(ids[0], wide_ids[0]) and np.allclose(narrow[0], wide[0], atol=0.05) else math.inf


def _following_disagreement(context: HeadContext, target: Model, states: FloatArray, tokens: Sequence[int]) -> float:
    n, found = len(tokens) // 2, []
    for taken_back in ([], tokens[n:]):
        with target.new_context(len(tokens) + 1, branches=bool(taken_back)) as memory:
            memory.decode(tokens[:n], "none")
            context.follow(memory)
            for _ in taken_back:
                context.decode_floats(states[:1], tokens[:1])
            memory.decode([*taken_back, 0], "none")
            memory.truncate(n)
            context.truncate(0)
            rows = [context.decode_floats(states[i : i + 1], [tokens[i]]).logits for i in range(3)]
            found.append(np.concatenate(rows))
            context.truncate(0)
    return agreement(*found).mean_kl


def try_head() -> None:
    """Load a head, read states, draft, reject: in the child of ``check_survives``, on the CPU."""
    path, lent, n_threads = sys.argv[1:]
    head = read_mtp(Path(path)) if path == lent else read_published(Path(path))
    target = llama_cpp.load(lent, n_threads=int(n_threads), n_gpu_layers=0) if lent else None
    if target is not None:
        with target.new_context(64, hidden=head.taps) as context:
            context.decode([1, 2, 3])
            context.truncate(1)
            context.decode([2, 3])
    # A head to which nothing is lent does not look at its target.
    model = LlamaHeadModel(head, cast(Model, target), int(n_threads), 0)
    disagreement(EngineHead(head, model), cast(Model, target))
    if head.reads:
        return
    with model.new_context(8) as context:
        context.decode_floats(np.zeros((3, head.row_width), dtype=np.float32), [1, 2, 3], "none")
