"""Why there is drafting or not, in a sentence for people."""

from __future__ import annotations

NEVER = 0.995
"""Where a larger share of the draft tokens must be accepted, drafting does not pay whatever the text."""


def reason(source: str, needed: float, mean: float, *, gains: bool, is_lagging: bool) -> str:
    """Why there is drafting with a source or not.

    Args:
        source: its name.
        needed: acceptance rate at which its best fixed length equals plain decoding; 1 where none does.
        mean: acceptance rate expected of its next draft token.
        gains: whether it is expected to make this text faster, alone and at its best.
        is_lagging: whether it would have to read too much first.
    """
    if needed > NEVER:
        return f"not drafting with {source}: here even guesses that are always right cost more than they save"
    if not gains:
        needs = f"needs {needed:.0%} acceptance to break even here, this text gives {mean:.0%}"
        return f"not drafting with {source}: {needs}"
    if is_lagging:
        return f"not drafting with {source}: reading the text so far would cost more than it is expected to save"
    return f"drafting with {source}: {needed:.0%} acceptance breaks even here, this text gives {mean:.0%}"
