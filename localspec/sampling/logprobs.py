"""How probable the target finds tokens: the logarithms that OpenAI's API calls ``logprobs``.

They come from the target's own verified rows and from its raw logits: before logit bias, penalties, temperature,
truncation and any grammar. So they say what the model thinks, not what the sampler did with it, and a greedy answer has
the same ones as a sampled answer with the same tokens. Drafting changes them by the noise of the engine's kernels only
(on the reference backend not at all).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localspec.sampling.rows import Row, top_k_ids
from localspec.values import checked_whole

MAX_TOP = 20
"""Most alternatives a request may ask for, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the target thought of one token.

    Attributes:
        logprob: natural logarithm of its probability.
        top: the most probable tokens at its place, best first: (token id, logprob).
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of a given text; see ``LLM.logprobs``.

    Attributes:
        id: token id.
        text: the token on its own.
        logprob: of this token after all before it; None for the first, which nothing predicts.
        top: the most probable tokens at its place, best first: (token id, logprob).
    """

    id: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(row: Row, token: int, n_top: int) -> TokenLogprobs:
    """Judge a token by the row that predicts it.

    Args:
        row: raw logits [n_vocab].
        token: the id to judge.
        n_top: how many of the most probable tokens to name.
    """
    shifted = row - row.max()
    log_total = float(np.log(np.exp(shifted, dtype=np.float64).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        ids = top_k_ids(row, n_top)
        best = ids[np.argsort(-shifted[ids], kind="stable")]
        top = tuple((int(i), float(shifted[i]) - log_total) for i in best)
    return TokenLogprobs(float(shifted[token]) - log_total, top)


def checked_top(n_top: int) -> int:
    """The number of alternatives, if it is one that may be asked for.

    Raises:
        UsageError: it is not.
    """
    return checked_whole("the number of most probable tokens", n_top, 0, MAX_TOP)
