"""Greedy answers of a real engine, fed again a token a pass: how far each token was from the likeliest."""

from __future__ import annotations

import numpy as np

from localspec import LLM
from localspec.backends.base import FloatArray


def rows_at_width(width: int, llm: LLM, prompt: list[int], answer: list[int]) -> FloatArray:
    """The rows [n_answer, n_vocab] that an answer is chosen from, in passes of so many tokens.

    They are computed in a context of the kind that the answers have: one for branches has no flash attention.
    """
    fed = [prompt[-1], *answer[:-1]]
    with llm.inspect().target.new_context(1024, branches=llm.inspect().context.can_branch) as context:
        context.decode(prompt[:-1], "none")
        passes = [context.decode(fed[at : at + width]).logits.copy() for at in range(0, len(fed), width)]
    return np.concatenate(passes)


def width_noise(llm: LLM, prompt: list[int], answer: list[int], single: FloatArray) -> float:
    """Largest change of a top-20 logit against the best one between width 1, the rows given, and width 8."""
    top = np.argpartition(single, -20, axis=1)[:, -20:]
    behind = [
        np.take_along_axis(rows, top, axis=1) - rows.max(axis=1, keepdims=True)
        for rows in (single, rows_at_width(8, llm, prompt, answer))
    ]
    return float(np.abs(behind[0] - behind[1]).max())


def margins(rows: FloatArray, tokens: list[int]) -> FloatArray:
    """By how much each token's logit is behind the best of its row [n]."""
    behind: FloatArray = rows.max(axis=1) - rows[np.arange(len(tokens)), tokens]
    return behind
