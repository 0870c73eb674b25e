"""How many texts a target writes side by side: as many as memory allows and as make it quicker, which is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from localspec.backends.base import Model, Piece, SequenceBatch
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.kv_memory import KV_VALUE_BYTES, kv_shape

WIDTHS = (1, 2, 4, 8, 16, 24)
"""How many are best depends on how much they hold: where rows look at the cells of all sequences (ik-llama without
flash attention) 16 empty ones made 144 tokens per second and 8 made 134; with 300 tokens in each 76 and 102
(Qwen2.5-Coder 1.5B, two cores)."""

_WORTH = 1.05
"""Twice as many have to be this much quicker: each keeps an answer under way."""

_PASSES = 3


def sequence_bytes(model: Model, n_ctx: int) -> int:
    """Memory of one sequence's attention cache [bytes]; 0 where the file does not say."""
    with GGUFFile(model.path) as file:
        return kv_shape(file).bytes(n_ctx, model.kv_type if model.kv_type in KV_VALUE_BYTES else "f64")


def open_batch(
    model: Model,
    n_ctx: int,
    taps: Sequence[str],
    room: int,
    patience: float,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[SequenceBatch, float]:
    """A batch of the width at which the target writes quickest, measured with sequences that are half full.

    Args:
        model: the target.
        n_ctx: tokens of each sequence.
        taps: hidden states that passes return.
        room: memory that the batch may take [bytes].
        patience: seconds that ``n_ctx / 2`` tokens of one text may take: a short run needs some that are finished.
        stopped: ends measuring.

    Returns:
        The batch, empty; and the tokens per second that it was measured at.
    """
    each = max(1, sequence_bytes(model, n_ctx))
    possible = [width for width in WIDTHS if width == 1 or width * each <= room]
    best, rate, n_filled = 1, 0.0, 0
    with model.new_batch(possible[-1], possible[-1] * n_ctx, n_ctx=n_ctx, hidden=taps) as batch:
        for width in possible:
            if stopped():
                break
            for sequence in range(n_filled, width):
                _half_fill(batch, sequence)
            n_filled, seconds = width, []
            for _ in range(_PASSES):
                began = time.perf_counter()
                batch.decode([Piece(sequence, [0]) for sequence in range(width)])
                seconds.append(time.perf_counter() - began)
            found = width / min(seconds)
            if width > 1 and min(seconds) * n_ctx / 2 > patience:
                break
            if found > _WORTH * rate:
                best, rate = width, found
    return model.new_batch(best, best * n_ctx, n_ctx=n_ctx, hidden=taps), rate


def _half_fill(batch: SequenceBatch, sequence: int) -> None:
    """Let a sequence hold as much as one does on average; the first one's tokens are copied, which is quicker."""
    context = batch[sequence]
    if sequence and batch.model.capabilities.saves_state:
        context.import_state(batch[0].export_state())
        context.truncate(batch.n_ctx // 2)
    else:
        context.decode([0] * (batch.n_ctx // 2), "none")
