"""Is this engine right about several sequences of this file in one pass? As ``trust``, before the first such pass.

Other kernels may compute them than a sequence alone (ik-llama's flash attention ends the process, or drops cells), and
rows of one could see another's. So what is done with several is done once with a fixed text: prompts of different
lengths, a prefix that two share, rows of drafts of which some are taken back, a piece of a prompt beside others' rows,
a sequence that leaves and one that comes. Every row is compared with that of a context, which ``trust`` has checked.
"""

from __future__ import annotations

import numpy as np

from localspec.backends.base import FloatArray, Model, Piece
from localspec.backends.trust import Agreement, agreement, check_tokens, fingerprint, verdict_key, verdicts
from localspec.errors import EngineMismatch

_PIECE = 33
"""Rows of a prompt that are fed beside others: from 32 on ik-llama has other kernels."""


def ensure_batches(model: Model, n_gpu_layers: int | None = None) -> None:
    """Check an engine's passes over several sequences of a file, unless that was done before.

    Args:
        model: the weights.
        n_gpu_layers: that it was loaded with.

    Raises:
        EngineMismatch: they differ from those over one.
    """
    if not model.capabilities.batches:
        return  # each sequence is a context, and those were checked
    store = verdicts()
    options = {"n_gpu_layers": n_gpu_layers, "placement": model.placement}
    key = verdict_key(model.backend, options, fingerprint(model.path)) | {"memory": "several"}
    verdict = store.get(key)
    if verdict is None:
        found = check_batch(model)
        verdict = {"holds": found.holds, "why": f"KL {found.mean_kl:.2g} nats"}
        store.put(key, verdict)
    if not verdict["holds"]:
        raise EngineMismatch(
            f"{model.engine} gives different results for batched conversations of {model.path.name} "
            f"({verdict['why']}); answer one at a time, or use another --backend"
        )


def check_batch(model: Model) -> Agreement:
    """Compare sequences fed side by side with each alone, in the time of about fifty single tokens.

    The worst pass counts.
    """
    tokens = check_tokens(model, 48)
    n = len(tokens)
    shared = n // 3
    texts = [tokens * 2, [*tokens[:shared], *tokens[::-1] * 2], [*tokens[n // 2 :], *tokens * 2]]
    passes: list[list[tuple[int, int, FloatArray]]] = []  # in each, sequences, where their rows begin, and the rows
    with model.new_batch(len(texts), sum(map(len, texts))) as batch:

        def feed(*widths: int) -> None:
            starts = [context.n_past for context in (batch[i] for i in range(len(texts)))]
            pieces = [
                Piece(i, texts[i][start : start + width])
                for i, (start, width) in enumerate(zip(starts, widths, strict=True))
                if width
            ]
            found = zip(pieces, batch.decode(pieces), strict=True)
            passes.append([(piece.sequence, starts[piece.sequence], forward.logits.copy()) for piece, forward in found])

        def take_back(*counts: int) -> None:
            for i, count in enumerate(counts):
                batch.truncate(i, batch[i].n_past - count)

        batch.decode([Piece(0, texts[0][: n // 2], "none"), Piece(2, texts[2][:n], "none")])
        batch.copy_prefix(0, 1, shared)
        feed(1, 1, 1)
        feed(5, 3, 2)
        take_back(3, 2, 0)
        feed(2, 1, _PIECE)
        take_back(batch[0].n_past, 0, 0)
        feed(0, 2, 1)
        feed(_PIECE, 1, 1)
    alone: list[tuple[int, FloatArray]] = []  # of each sequence where the rows that are compared begin, and the rows
    with model.new_context(max(map(len, texts))) as context:
        for i, text in enumerate(texts):
            places = [(start, start + len(rows)) for fed in passes for sequence, start, rows in fed if sequence == i]
            first, end = min(start for start, _ in places), max(end for _, end in places)
            context.truncate(0)
            if first:
                context.decode(text[:first], "none")
            alone.append((first, context.decode(text[first:end]).logits.copy()))
    found = [
        agreement(
            np.concatenate([alone[i][1][start - alone[i][0] :][: len(rows)] for i, start, rows in fed]),
            np.concatenate([rows for _, _, rows in fed]),
        )
        for fed in passes
    ]
    return max(found, key=lambda each: each.mean_kl)
