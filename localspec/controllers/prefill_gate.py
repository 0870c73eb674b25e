"""Whether a draft model should read what it has missed of a conversation: an investment, weighed before it is made.

Reading a prompt of 50 tokens takes a draft model as long as the target takes for 3 to 5 tokens, and it is lost if the
answer ends soon after or turns out hard to draft for. How long an answer will be nobody knows; what is known is how far
it has come. It is taken to go on for twice as long again, so an early reading has to pay soon, and a later one may take
its time. The constants were chosen on recorded answers to the tuning prompts and to 27 short questions, with the
costs of two machines (``benchmarks/replay_traces.py``): no whole answer fell below 0.97 of plain there.
"""

from __future__ import annotations

PATIENCE_TOKENS = 16
"""An answer must have come this far before a draft model reads the prompt: many are shorter, and how certain the
target is of its first tokens predicts, for nothing, how the draft will fare. With 24: 2 % slower on code and maths."""

OUTLOOK = 2
"""An answer is expected to go on for this many times what it has said. With 1 or 8 the replay differs by 1 %."""

LEAST_GAIN = 0.2
"""Share of a plain token's time that drafting must be expected to save of each. What is predicted from 16 tokens is not
more exact: with 0.15 two to four of 48 answers fell below 0.97 of plain, with 0.1 four to eight, to 0.86."""

STRETCH_TOKENS = 24
"""Tokens over which a short stretch, decoded without the draft model, has to pay for its reading."""


def prompt_pays(cost_ms: float, gain_ms: float, plain_ms: float, n_emitted: int, room: int) -> bool:
    """Whether a draft model should read a prompt, or another long stretch.

    Args:
        cost_ms: what reading takes.
        gain_ms: what drafting with the model is expected to save, per token.
        plain_ms: what a token of plain decoding takes.
        n_emitted: tokens of the answer so far.
        room: most tokens that it may still have.
    """
    if n_emitted < PATIENCE_TOKENS or gain_ms < LEAST_GAIN * plain_ms:
        return False
    return gain_ms * min(room, OUTLOOK * n_emitted) > cost_ms


def stretch_pays(cost_ms: float, gain_ms: float, room: int) -> bool:
    """Whether a draft model should read a short stretch that was decoded without it: over the next few rounds."""
    return gain_ms * min(room, STRETCH_TOKENS) > cost_ms
