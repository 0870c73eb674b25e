"""Heads that were trained here: the layer on an engine, the fusing of states and the embeddings in this module.

With s_p the tapped states of the target after token x_p, E its token embedding and Out its output matrix (EAGLE: Li et
al. 2024, arXiv:2401.15077; EAGLE-3's several taps, arXiv:2503.01840):

    row          z_p = fc · s_p + W · E[x_(p+1)] + b
    state        g_p = block(z_0 … z_p), what the engine returns as "layer:0"
    guess        x_(p+2) ~ softmax(Out[token_map] · norm(g_p))
    chained      z_(p+1) = C · g_p + W · E[x_(p+2)] + b, where the true state is not known yet
    exit         x_(p+1) ~ softmax(Out[token_map] · norm(s_p)) for a tap "layer:i", with the target's norm
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Context, FloatArray, Model
from localspec.backends.registry import engine_module
from localspec.backends.repack import MARK
from localspec.errors import LocalspecError, UsageError
from localspec.heads.assembly import assemble, engine_file
from localspec.heads.base import STATE, DraftHead, check_alike, row_by_row
from localspec.heads.card import Kind, TargetFacts
from localspec.heads.file import check_head, find_heads, head_weights, read_card
from localspec.heads.products import products
from localspec.model_files.gguf import GGUFFile, fingerprint, model_files, tensor_rows

MAX_STATES = 16  # most states that wait to be read. More make a head a little better and its first step slower.
_CACHED_BYTES = 32 << 20  # tokens' shares of rows that are kept. One takes about a millisecond.

# Rows of the passes that are compared with one of all these, 40: ik-llama has other kernels from 32 on
_TIMED_WIDTHS = (1, 1, 1, 1, 2, 3, 4, 5, 6, 8, 8)

_FC, _EMBED, _CHAIN = range(3)


class Head(DraftHead):
    """A head that was trained here, or an early exit."""

    token_map: npt.NDArray[np.int32]

    def __init__(self, path: Path, target: Path, model: Model) -> None:
        self.model = model
        self._cache: OrderedDict[int, FloatArray] = OrderedDict()
        with GGUFFile(path) as file:
            self.card = card = check_head(file)
            self.kind: Kind = card.kind
            self.taps, self.token_map, self.steps = card.taps, card.token_map, card.steps
            self.rate = card.training.first_rate
            matrices = list[FloatArray]()
            if card.kind == "chained":
                matrices = [head_weights(file, f"head.{part}.weight") for part in ("fc", "embed", "chain")]
                self._bias = head_weights(file, "head.embed.bias")
        self._target = GGUFFile(target)
        self._times = products(model, matrices)

    def new_context(self, n_ctx: int) -> Context:
        hidden = (STATE,) if self.kind == "chained" else ()
        return self.model.new_context(n_ctx, hidden=hidden)

    def window(self, n_ctx: int) -> int:
        return min(MAX_STATES, n_ctx // 2)

    def true_rows(self, context: Context, states: FloatArray, tokens: Sequence[int]) -> FloatArray:
        return self._times(_FC, states) + self.embed(tokens)

    def chained_rows(self, state: FloatArray, tokens: Sequence[int]) -> FloatArray:
        return self._times(_CHAIN, state) + self.embed(tokens)

    def embed(self, tokens: Sequence[int]) -> FloatArray:
        """``W · E[token] + b`` [n, n_embd]; UsageError for an id outside the target's vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.card.target.n_vocab:
            raise UsageError(f"token ids must lie in 0..{self.card.target.n_vocab - 1}")
        new = [token for token in dict.fromkeys(tokens) if token not in self._cache]
        if new:
            rows = self._times(_EMBED, tensor_rows(self._target, "token_embd.weight", new)) + self._bias
            self._cache.update(zip(new, rows, strict=True))
        found: FloatArray = np.empty((len(tokens), self.card.n_embd), dtype=np.float32)
        for row, token in zip(found, tokens, strict=True):
            row[:] = self._cache[token]
            self._cache.move_to_end(token)
        while len(self._cache) * 4 * self.card.n_embd > _CACHED_BYTES:
            self._cache.popitem(last=False)
        return found

    def close(self) -> None:
        self._times.close()
        self._target.close()
        super().close()

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def target_facts(target: Path) -> TargetFacts:
    """The facts of a target's file, read once as long as it is unchanged; of a repacked copy, those of its original."""
    try:
        found = [file.stat() for file in model_files(target)]
    except OSError:
        found = []  # opening it says what is wrong
    return _read_facts(target, tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in found))


@lru_cache(maxsize=8)
def _read_facts(target: Path, stamp: tuple[tuple[int, ...], ...]) -> TargetFacts:
    with GGUFFile(target) as file:
        source = file.metadata.get(MARK)
        return TargetFacts.of(file, source if isinstance(source, str) else fingerprint(target))


def heads_for(target: Path) -> list[Path]:
    """Heads on this disk that fit a target: those trained for that very file first. Damaged ones are left out."""
    paths, fitting = find_heads(), list[tuple[bool, Path]]()
    if not paths:
        return []
    facts = target_facts(target)
    for path in paths:
        try:
            card = read_card(path)
        except LocalspecError:
            continue
        if not card.misfit(facts):
            fitting.append((card.target.fingerprint != facts.fingerprint, path))
    return [path for _, path in sorted(fitting, key=lambda each: each[0])]


def load_head(
    path: Path,
    target: Path,
    backend: str,
    *,
    n_threads: int | None = None,
    n_gpu_layers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    warn: Callable[[str], None] = lambda line: None,
) -> Head:
    """Load a head for a target, with its output rows from the target's file; see ``assembly``.

    Once for each engine and file rows in one pass are compared with rows in several.

    Args:
        n_threads, n_gpu_layers: as for ``backends.load``.
        say: takes a line before long work.
        warn: takes remarks that a user should keep.

    Raises:
        UsageError: it is for another model.
        ModelFileError: a file is damaged.
        EngineError: the engine is not usable, wrong about it, or the disk refuses.
    """
    card, facts = read_card(path), target_facts(target)
    if why := card.misfit(facts):
        raise UsageError(f"{path.name} does not fit: {why}")
    if card.target.fingerprint != facts.fingerprint:
        made_for = card.target.name
        warn(f"{path.name}: it was trained for another file of this shape ({made_for}), so it may guess worse")
    place = engine_file(path, target, facts.fingerprint)
    if not place.exists():
        say(f"putting {path.name} together with rows of {target.name} (once)")
    assemble(place, path, target)
    model: Model = engine_module(backend).load(place, n_threads=n_threads, n_gpu_layers=n_gpu_layers)
    try:
        head = Head(path, target, model)
    except BaseException:
        model.close()
        raise
    try:
        check_alike(model, path, place.name, n_gpu_layers, lambda: _disagreement(head), say)
    except BaseException:
        head.close()
        raise
    return head


def _disagreement(head: Head) -> float:
    """The worst mean KL divergence [nats] between rows in one pass and the same rows in narrow ones."""
    rng, n = np.random.default_rng(0), sum(_TIMED_WIDTHS)
    rows = rng.standard_normal((n, head.card.n_embd)).astype(np.float32)
    if head.kind == "chained":
        tokens = rng.choice(head.token_map, n).tolist()
        rows = head.chained_rows(rows, tokens)
    with head.new_context(n) as context:
        return row_by_row(context, rows, range(n), _TIMED_WIDTHS)
