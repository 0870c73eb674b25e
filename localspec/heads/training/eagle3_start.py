"""Start of an EAGLE-3 head: a linear head in closed form, though its layout has no place for one.

With e the embedding of a token and g a row's state, each divided by its root mean square, and u as in ``warm_start``,

    g_p = fc · s_p ≈ u_p,    g_p + B · (e_(p+1), g_p) ≈ u_(p+1),

so that what comes out is fit to be the next g: its chain has no matrix of its own. Only the attention reads e. So it
begins with heads that look at their own row alone, whose values and output matrix are B: their queries and keys are one
random projection of the whitened row, which matches nothing as well as itself. The other heads begin at random and add
nothing yet, nor does the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from localspec.heads.card import HeadCard
from localspec.heads.training.lessons import (
    RIDGE,
    ROWS_AT_ONCE,
    ROWS_PER_INPUT,
    Examples,
    Floats,
    groups_of,
    lengths_of,
)

D_HEAD = 128  # channels of a head, whatever the target's have: fewer tell rows apart worse
FREE_HEADS = 2  # heads that may look at other rows from the beginning
_SURE = 30.0  # score of a head's own row; those of others lie about 0 [nats]
_LEAST = 0.05  # least share of the usual variance of a direction of the rows, so that none is amplified at will


def n_heads(n_embd: int) -> int:
    """Heads of the attention: as many as B takes, and the free ones."""
    return -(-n_embd // D_HEAD) + FREE_HEADS


def fitted(card: HeadCard, examples: Examples, cold: dict[str, Floats]) -> dict[str, Floats]:
    """fc, and the attention's matrices.

    Args:
        examples: whose states are the taps' and then the last one.
        cold: all its matrices as they begin without examples.
    """
    n, n_taps = card.n_embd, len(card.taps) * card.n_embd
    gram, cross = np.zeros((n_taps, n_taps)), np.zeros((n_taps, n))
    for x, now, *_ in _rows(examples, n_taps, n):
        gram += x.T @ x
        cross += x.T @ now
    fc = np.linalg.solve(gram + RIDGE * np.eye(n_taps), cross)  # [n_taps, n]
    gram, cross = np.zeros((2 * n, 2 * n)), np.zeros((2 * n, n))

    def add(state: Floats, token: Floats, wanted: Floats, weight: float) -> None:
        read = np.concatenate([_normed(token), _normed(state)], axis=1)
        nonlocal gram, cross
        gram += weight * read.T @ read
        cross += weight * read.T @ (wanted - state)

    def solved() -> Floats:
        found: Floats = np.linalg.solve(gram + RIDGE * np.eye(2 * n), cross)
        return found

    for x, _, token, u, *_ in _rows(examples, n_taps, n):
        add(x @ fc, token, u, 1.0)
    guess = solved()
    for x, _, token, _, after, u_after in _rows(examples, n_taps, n):
        state = x @ fc
        state = state + np.concatenate([_normed(token), _normed(state)], axis=1) @ guess
        add(state, after, u_after, 0.5)
    parts = [(part, cold[f"blk.0.attn_{part}.weight"].copy()) for part in ("q", "k", "v", "output")]
    weights = {f"blk.0.attn_{part}.weight": matrix for part, matrix in parts}
    _fill(card, [matrix for _, matrix in parts], solved().T, gram)
    return weights | {"fc.weight": np.ascontiguousarray(fc.T / examples.sizes[:n_taps], dtype=np.float32)}


def _fill(card: HeadCard, matrices: list[Floats], linear: Floats, gram: npt.NDArray[np.float64]) -> None:
    """Make heads that look at their own row a ``linear`` map of it [n_embd, 2 n_embd]; ``gram`` is the sum of the
    products of rows with themselves [2 n_embd, 2 n_embd]."""
    queries, keys, values, outputs = matrices
    n, d, own = card.n_embd, card.d_head, _own(card)
    variances, directions = np.linalg.eigh(gram)
    whitening = directions / np.sqrt(np.maximum(variances / variances.mean(), _LEAST))
    # A row's projection is then about as long as it has channels.
    random = np.random.default_rng(0).standard_normal((own, 2 * n)) / np.sqrt(2 * n)
    queries[:own] = keys[:own] = np.sqrt(_SURE / np.sqrt(d)) * random @ whitening.T
    values[:own] = 0
    values[:n], outputs[:, :n] = linear, np.eye(n)


def _own(card: HeadCard) -> int:
    return (card.n_head - FREE_HEADS) * card.d_head


def guesses(card: HeadCard, weights: dict[str, Floats], states: Floats, token: Floats) -> Floats:
    """Rows before the last norm, while only the fitted heads add to them [n, n_embd]."""
    own = _own(card)
    state: Floats = states[:, : len(card.taps) * card.n_embd] @ weights["fc.weight"].T
    read = np.concatenate([_normed(token), _normed(state)], axis=1) @ weights["blk.0.attn_v.weight"][:own].T
    return state + read @ weights["blk.0.attn_output.weight"][:, :own].T


def _rows(examples: Examples, n_taps: int, n: int) -> Iterator[list[Floats]]:
    """Tapped states in their usual sizes, u, the token's embedding, the next u; the next token's, and the u after."""
    rows = 0
    for x, u, after, u_after in groups_of(examples, ROWS_AT_ONCE):
        now = x[:, n_taps : n_taps + n] * examples.sizes[n_taps : n_taps + n] * examples.weight
        yield [x[:, :n_taps], now, x[:, -n:], u, after, u_after]
        rows += len(x)
        if rows > ROWS_PER_INPUT * n_taps:
            break


def _normed(rows: Floats) -> Floats:
    normed: Floats = rows / (lengths_of(rows)[:, None] + 1e-9)
    return normed
