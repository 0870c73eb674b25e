"""The largest logits of each row, found on the device that computes them: only these and their tokens are copied.

Among equals at the end the device chooses: where that would matter whole rows are copied.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Context, FloatArray, Forward, Model, TokenIds

LEAST, MOST = 64, 256
"""How many logits of a row are looked for: enough to be nearly all of the probability of a sure row."""

_N_TRIED = 6


def n_looked_for(n_best: int, n_vocab: int) -> int:
    """How many of a row's logits to look for where ``n_best`` are enough; 0 where the row has to be whole."""
    k = LEAST
    while k < n_best + 1:  # one more, which shows whether there are equals at the end
        k *= 2
    return k if k <= min(MOST, n_vocab) else 0


def by_token(found: FloatArray, ids: npt.NDArray[Any], n_best: int) -> tuple[FloatArray, TokenIds] | None:
    """Logits ``found`` and their tokens, in any order, with tokens increasing [n_rows, k].

    None where whole rows are needed: the largest is no number, or the last of ``n_best``, fewer than k, has its equals,
    some of which may be missing.
    """
    n, k = found.shape
    at = ids.argsort(axis=1)
    if n > 1:
        at += np.arange(0, n * k, k)[:, None]
    logits = found.take(at)
    most = np.maximum.reduce(logits, axis=1).tolist()  # NaN is the largest
    lasts = most if n_best == 1 else np.partition(logits, k - n_best, axis=1)[:, k - n_best].tolist()
    for least, last, largest in zip(np.minimum.reduce(logits, axis=1).tolist(), lasts, most, strict=True):
        if not -math.inf < largest < math.inf or not (least < last or last == -math.inf):
            return None
    return logits, ids.take(at).astype(np.int64)


def head_pass(context: Any, n_best: int) -> Forward:
    """A pass of a published head, as it drafts a token, or with a block two."""
    head = context.model.head
    if head.block is not None:
        logits, ids = context.guesses(0, min(2, head.block.n_guesses), n_best)
        return Forward(logits, ids=ids)
    rows: FloatArray = np.ones((1, context.model.n_embd), dtype=np.float32)
    forward: Forward = context.decode_floats(rows, [0], "last", n_best)
    return forward


def best_pays(model: Model, run: Callable[[Context, int], Forward] | None = None) -> bool:
    """Whether a pass and a look at its rows take less time so, by a few passes of each kind.

    ``run`` is a pass in an empty context, of whose rows so many of the largest logits are enough; 0 is whole rows. None
    is one of five rows, as a short draft has verified.
    """
    times: dict[int, list[float]] = {0: [], LEAST // 2: []}
    model.__dict__["finds_best"] = True  # of this context, while it is tried
    try:
        with model.new_context(64) as context:
            for n_best in times:
                for nth in range(_N_TRIED + 2):
                    started = time.perf_counter()
                    forward = run(context, n_best) if run else context.decode([0] * 5, n_best=n_best)
                    forward.best()
                    if nth > 1:  # the first pass makes the graph
                        times[n_best].append(time.perf_counter() - started)
                    context.truncate(0)
            found = forward.ids is not None
    finally:
        del model.__dict__["finds_best"]
    whole, best = (median(each) for each in times.values())
    return found and best < whole
