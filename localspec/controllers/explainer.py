"""Why there is drafting or not, in a sentence for people."""

from __future__ import annotations

from collections.abc import Mapping

from localspec.controllers.estimates import NEVER, Estimates


def explain(estimates: Estimates, needs: Mapping[str, float], *, has_begun: bool) -> str:
    """The state of every source.

    Args:
        estimates: what is known.
        needs: by source, the acceptance rate at which its best fixed length equals plain decoding; 1 where none does.
        has_begun: whether the answer has any tokens yet, so that a draft model that lags behind was weighed.
    """
    return "; ".join(_state(estimates, source, needed, has_begun) for source, needed in needs.items())


def _state(estimates: Estimates, source: str, needed: float, has_begun: bool) -> str:
    if needed > NEVER:
        return f"not drafting with {source}: even perfect drafts would cost more than they save"
    mean = estimates.acceptance[source].mean()
    if estimates.solve(source).rate * estimates.ms_plain <= 1.001:  # alone, and at its best
        needs = f"break-even is {needed:.0%} acceptance; this text has {mean:.0%}"
        return f"not drafting with {source}: {needs}"
    if has_begun and source in estimates.lagging:
        return f"not drafting with {source}: reading the text so far would cost more than it is expected to save"
    return f"drafting with {source}: break-even is {needed:.0%} acceptance; this text has {mean:.0%}"
