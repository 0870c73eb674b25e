"""Whether a draft model should read what it has missed of a conversation: an investment, weighed before it is made.

Reading a prompt of 50 tokens takes a draft model as long as the target takes for 3 to 5 tokens, and it is lost if the
answer ends soon after or turns out hard to guess. How long an answer will be nobody knows; what is known is how long it
has gone on. Without any scale the best guess for the rest is as much again (a log-uniform law: half of all answers that
came to n tokens end before 2n). So an early reading has to pay soon, and a later one may take its time.
"""

from __future__ import annotations

PATIENCE_TOKENS = 16
"""An answer must have come this far before a draft model reads the prompt: many are shorter, and how certain the
target is of its first tokens predicts, for nothing, how the draft will fare."""

CAUTION = 1.0
"""What reading is expected to save must be this many times its cost."""

OUTLOOK_TOKENS = 24
"""Tokens over which a short stretch, decoded without the draft model, has to pay for its reading."""

LEAST_GAIN = 0.1
"""Share of a plain token's time that drafting must be expected to save of each: the prediction is not more exact."""


def expected_rest(n_emitted: int, room: int) -> int:
    """How many more tokens an answer of ``n_emitted`` so far is expected to have, if it may have ``room`` more."""
    return min(room, n_emitted)


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
    return gain_ms * expected_rest(n_emitted, room) > CAUTION * cost_ms


def stretch_pays(cost_ms: float, gain_ms: float, room: int) -> bool:
    """Whether a draft model should read a short stretch that was decoded without it: over the next few rounds."""
    return gain_ms * min(room, OUTLOOK_TOKENS) > cost_ms
