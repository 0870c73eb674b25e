"""Which draft tokens the target accepts, and what it emits instead of a rejected one: pure functions on arrays.

Greedy (temperature 0): a draft token is accepted while it is the target's argmax.

Sampled: two exact rules, chosen per draft token.

* A token x drawn from a known q is accepted with probability min(1, p(x) / q(x)); on rejection one is drawn from
  normalise(max(p - q, 0)) (Leviathan et al. 2023; Chen et al. 2023). Expected acceptance: sum(min(p, q)).
* A token that does not depend on fresh randomness (an argmax, an n-gram match, or a token chosen with the very
  noise of the target's own draw) is compared with a draw from p: equal, it is accepted. The emitted token *is* that
  draw, so its law is p whatever the draft was. For a point mass this is the same law as rejection: acceptance p(x),
  and on rejection p with x removed. It also makes the text a function of the seed alone, however far the draft ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from localspec.sampling.sampling import Noise, Row, SamplingParams, distribution, greedy_token
from localspec.spec_decode.rounds import Draft, Verdict

# Noise streams: independent randomness for the draws that must not depend on one another at one position.
STREAM_TARGET = 0
STREAM_ACCEPT = 1
STREAM_RESIDUAL = 2
STREAM_DRAFT = 3


class Rows(Protocol):
    """Logits by position in the draft: an array [k + 1, n_vocab], or what masks its rows when they are asked for."""

    def __getitem__(self, index: int, /) -> Row: ...


def verify(draft: Draft, logits: Rows, tokens: Sequence[int], params: SamplingParams, noise: Noise) -> Verdict:
    """Compare a draft with the target's pass over it.

    Rows are looked at in order, and only as far as draft tokens are accepted.

    Args:
        draft: k draft tokens; may be empty.
        logits: [k + 1, n_vocab]; row i is the target's prediction after the first i draft tokens.
        tokens: everything settled, the last token included (penalties look at it; its length addresses the noise).
        params: the sampling parameters.
        noise: the request's randomness.

    Returns:
        The ``Verdict``.
    """
    history = list(tokens[-params.repeat_last_n :]) if params.edits_logits else []
    position = len(tokens)
    for i, token in enumerate(draft):
        if params.greedy:
            chosen = greedy_token(logits[i], history, params)
        else:
            p = distribution(logits[i], history, params)
            if token.dist is None:
                chosen = p.sample(noise, position + i, STREAM_TARGET)
            elif noise.uniform(position + i, STREAM_ACCEPT) * token.dist.prob(token.id) < p.prob(token.id):
                chosen = token.id
            else:
                chosen = p.minus(token.dist).sample(noise, position + i, STREAM_RESIDUAL)
                return Verdict(i, chosen, "recovered")
        if chosen != token.id:
            return Verdict(i, chosen, "recovered")
        if params.edits_logits:
            history.append(token.id)
    k = len(draft)
    if params.greedy:
        final = greedy_token(logits[k], history, params)
    else:
        final = distribution(logits[k], history, params).sample(noise, position + k, STREAM_TARGET)
    return Verdict(k, final, "bonus" if k else "plain")
