"""Which draft tokens the target accepts, and what it emits instead of a rejected one: pure functions on arrays.

Greedy (temperature 0): a draft token is accepted while it is the target's argmax.

Sampled: two exact rules, chosen per draft token.

* A token x drawn from a known q is accepted with probability min(1, p(x) / q(x)); on rejection one is drawn from
  normalise(max(p - q, 0)) (Leviathan et al. 2023; Chen et al. 2023). Expected acceptance: sum(min(p, q)).
* A token that does not depend on fresh randomness (an argmax, an n-gram match, or a token chosen with the very
  noise of the target's own draw) is compared with a draw from p: equal, it is accepted. The emitted token *is* that
  draw, so its law is p whatever the draft was. For a point mass this is the same law as rejection: acceptance p(x),
  and on rejection p with x removed. It also makes the text a function of the seed alone, however far the draft ran.

Where a draft branches, several draft tokens x_1, x_2, … are candidates for one position, and at most one of them is
accepted; the pass goes on behind it. Multi-candidate rejection without replacement (SpecInfer: Miao et al. 2024,
arXiv:2305.09781; Yang et al. 2024, arXiv:2401.06706; Jeon et al. 2024, arXiv:2402.14160): with p_1 = p, x_j, drawn from
q_j, is accepted with probability min(1, p_j(x_j) / q_j(x_j)), and else p_(j+1) = normalise(max(p_j - q_j, 0)) is what
the next is compared with; after the last one the token is drawn from it. Given that x_1 to x_(j-1) were rejected, what
is emitted follows p_j, whatever they were: so q_j may depend on them (a second sample of one distribution is drawn from
it without the first), and nothing may depend on x_j before it is judged, the order of the candidates least of all.
Tokens that do not depend on fresh randomness come after those: the draw from what is left of p is compared with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from localspec.sampling.sampling import Ids, Noise, Row, SamplingParams, distribution, greedy_token
from localspec.spec_decode.rounds import Draft, TokenKind, Verdict

# Noise streams: independent randomness for the draws that must not depend on one another at one position.
STREAM_TARGET = 0
STREAM_ACCEPT = 1
STREAM_RESIDUAL = 2
STREAM_DRAFT = 3
N_STREAMS = 4


class Rows(Protocol):
    """Logits by position in the draft: an array [k + 1, n_vocab], or what masks its rows when they are asked for."""

    def __getitem__(self, index: int, /) -> Row: ...


def verify(
    draft: Draft,
    logits: Rows,
    tokens: Sequence[int],
    params: SamplingParams,
    noise: Noise,
    ids: Ids | None = None,
) -> Verdict:
    """Compare a draft with the target's pass over it.

    Rows are looked at in order, and only as far as draft tokens are accepted.

    Args:
        draft: k draft tokens; may be empty.
        logits: [k + 1, n_vocab]; row 0 is the target's prediction after ``tokens``, row i + 1 after draft token i.
        tokens: everything settled, the last token included (penalties look at it; its length addresses the noise).
        ids: the tokens that the logits belong to [k + 1, n], where they are the ``params.n_best`` largest or more.
    """
    history = list(tokens[-params.repeat_last_n :]) if params.edits_logits else []
    at, path = -1, list[int]()
    while True:
        rivals = draft.children(at)
        row, of = logits[at + 1], None if ids is None else ids[at + 1]
        accepted, chosen = _judge(draft, rivals, row, of, history, len(tokens) + len(path), params, noise)
        if accepted is None:
            kind: TokenKind = "recovered" if rivals else "bonus" if path else "plain"
            return Verdict(len(path), chosen, kind, tuple(path) if draft.branches else None)
        at = accepted
        path.append(at)
        if params.edits_logits:
            history.append(chosen)


def _judge(
    draft: Draft,
    rivals: Sequence[int],
    row: Row,
    ids: Ids | None,
    history: Sequence[int],
    position: int,
    params: SamplingParams,
    noise: Noise,
) -> tuple[int | None, int]:
    """Which of the draft tokens at one position is accepted, if any, and the token that comes there in any case."""
    if params.greedy:
        chosen = greedy_token(row, history, params, ids)
    else:
        p, stream = distribution(row, history, params, ids), STREAM_TARGET
        sampled = [(rival, draft[rival].id, q) for rival in rivals if (q := draft[rival].dist) is not None]
        for nth, (rival, token, q) in enumerate(sampled):
            if noise.uniform(position, STREAM_ACCEPT + nth * N_STREAMS) * q.prob(token) < p.prob(token):
                return rival, token
            p, stream = p.minus(q), STREAM_RESIDUAL
        chosen = p.sample(noise, position, stream)
        rivals = [rival for rival in rivals if draft[rival].dist is None]
    return next((rival for rival in rivals if draft[rival].id == chosen), None), chosen
