"""Passages that a tiny model has read, with its states and probabilities, as ``distill`` makes them of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from localspec.backends import reference
from localspec.heads.training.shards import Passage, as_states


def written_by(
    target: Path, taps: Sequence[str], lengths: Sequence[int], *, seed: int = 0, top_k: int = 8
) -> list[Passage]:
    """Texts that a model of the reference backend goes on with greedily after a random half; n tokens have n places."""
    rng, found = np.random.default_rng(seed), []
    with reference.load(target) as model:
        for number, n in enumerate(lengths):
            tokens = rng.integers(3, model.n_vocab, n // 2).tolist()
            logits, states = [], []
            with model.new_context(n, hidden=taps) as context:
                read = tokens
                while True:
                    forward = context.decode(read)
                    logits.append(forward.logits.copy())
                    states.append(np.stack([forward.hidden[tap] for tap in taps], axis=1))
                    tokens = [*tokens, int(forward.logits[-1].argmax())]
                    if context.n_past == n:
                        break
                    read = tokens[-1:]
            rows = np.concatenate(logits)
            logprobs = rows - np.log(np.exp(rows).sum(1, keepdims=True))
            top = np.argsort(-rows, axis=1, kind="stable")[:, :top_k]
            found.append(
                Passage(
                    name=f"passage {number}",
                    category=("chat", "code")[number % 2],
                    start=n // 2,
                    temperature=0.0,
                    held_out=False,
                    tokens=np.array(tokens, dtype=np.int32),
                    states=as_states(np.concatenate(states)),
                    top_ids=top.astype(np.int32),
                    top_logprobs=np.take_along_axis(logprobs, top, 1).astype(np.float16),
                )
            )
    return found
