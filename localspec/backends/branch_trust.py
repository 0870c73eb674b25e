"""Is this engine right about tokens of this file that branch? As ``trust``, before the first context made for them.

Such a context may compute everything otherwise than others do: prompts and drafts that are chains, too. So all that
answers use of it is compared with a context that branches nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localspec.backends.base import Context, FloatArray, Model
from localspec.backends.trust import agreement, check_tokens, fingerprint, verdict_key, verdicts
from localspec.errors import EngineError

MAX_KL = 0.03
"""Largest mean KL divergence of a pass [nats] that counts as noise: 0.003 and 0.005 on llama-cpp and ik-llama
(Qwen2.5-Coder 0.5B); ik-llama with flash attention 0.5. Stricter than ``trust``: chains are there."""

_N_BEFORE = 244
"""Tokens before the first tree, which then lies on both sides of the 256th place: engines leave out what lies behind
the last place in use, in steps of 32 to 256."""

_SIDE = [*range(-1, 7)]
"""A side branch as long as drafts are at most times, before the chain itself."""

_TREES: tuple[tuple[list[int], list[int]], ...] = (
    ([*_SIDE, -1, 8, 9, 10, 8, 9], [0, 1, 2, 3, 4]),  # a side branch goes on, from among what is dropped
    ([-1, 0, 1, 2, 0, 1, 5], [0, 1, 5, 6]),
    ([-1, -1, -1, 0, 1, 2, 2], [2]),
    ([*_SIDE, -1, -1, 9], [9, 10]),
)
"""The parents of trees fed one after another, and the path that is kept of each."""


def why_no_branches(
    model: Model, n_gpu_layers: int | None = None, say: Callable[[str], None] = lambda line: None
) -> str | None:
    """Why drafts may not branch; None where they may. Checked once for an engine and a file.

    Args:
        model: the weights.
        n_gpu_layers: that it was loaded with.
        say: takes a line if it is checked now.
    """
    reason = model.why_no_trees()
    if reason is not None or not model.capabilities.trees_apart:
        return reason  # where contexts are all alike, ``trust`` looked at trees too
    store = verdicts()
    options = {"n_gpu_layers": n_gpu_layers, "placement": model.placement}
    key = verdict_key(model.backend, options, fingerprint(model.path)) | {
        "memory": "branches",
        "cache": model.kv_type,
    }
    verdict = store.get(key)
    if verdict is None:
        say(f"checking that {model.engine} computes branching drafts of {model.path.name} correctly (once)")
        try:
            kl = check_branches(model)
        except EngineError as error:  # for want of memory, it may be: not so for ever
            return str(error)
        verdict = {"holds": kl <= MAX_KL, "why": f"KL {kl:.2g} nats"}
        store.put(key, verdict)
    if verdict["holds"]:
        return None
    what = f"{model.engine} gives wrong results for branching drafts of {model.path.name}"
    return f"{what} ({verdict['why']})"


def check_branches(model: Model) -> float:
    """Compare a context made for tokens that branch with one that is not, pass by pass, in the time of reading some
    hundred tokens twice; the largest mean KL divergence of a pass [nats]."""
    words = check_tokens(model, 48)
    text = [words[i % len(words)] for i in range(_N_BEFORE)]
    room = _N_BEFORE + 128
    worst = 0.0
    with model.new_context(room, branches=True) as context, model.new_context(room) as alone:

        def compare(rows: FloatArray, before: Sequence[int], path: Sequence[int]) -> None:
            nonlocal worst
            _read(alone, before)
            worst = max(worst, agreement(rows, alone.decode(path).logits).mean_kl)

        def feed(n: int) -> None:
            before, tokens = list(context.tokens), [words[(context.n_past + i) % len(words)] for i in range(n)]
            compare(context.decode(tokens).logits.copy(), before, tokens)

        context.decode(text[:150], "none")
        for width in (1, 2, 5, 40, 1):
            feed(width)
        _read(context, text[:60])
        _read(context, text)
        for parents, kept in _TREES:
            before = list(context.tokens)
            # What follows a token differs from path to path, as it does in drafts.
            tokens = [words[(3 * at + 1) % len(words)] for at in range(len(parents))]
            rows = context.decode_tree(tokens, parents).logits.copy()
            for leaf in set(range(len(parents))) - set(parents):
                path = _path(parents, leaf)
                compare(rows[path], before, [tokens[at] for at in path])
            context.keep(kept)
            feed(1)
        feed(33)
        context.truncate(_N_BEFORE + 1)
        feed(3)
    return worst


def _path(parents: Sequence[int], at: int) -> list[int]:
    path: list[int] = []
    while at >= 0:
        path.append(at)
        at = parents[at]
    return path[::-1]


def _read(context: Context, text: Sequence[int]) -> None:
    """Hold a text."""
    if (n := context.reuse(text)) < len(text):
        context.decode(text[n:], "none")
