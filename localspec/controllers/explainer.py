"""Why there is drafting or not, in sentences for people: a line for each drafter."""

from __future__ import annotations

from collections.abc import Mapping

from localspec.controllers.auto_plan import share_of
from localspec.controllers.estimates import NEVER, Estimates
from localspec.spec_decode.drafters.names import CORPUS, EARLY_EXIT, HEAD, MTP, NGRAM, RECYCLED, kind_of

NAMES = {
    NGRAM: "Copying from the text",
    CORPUS: "Copying from your files",
    RECYCLED: "Guesses of earlier passes",
    HEAD: "Head",
    EARLY_EXIT: "Early exit",
    MTP: "The model's own MTP layer",
    "model": "Draft model",
    "grammar": "Grammar",
}
"""What people read for a kind of drafter; another one is called as it is."""

GAIN = 1.001
"""A drafter that alone, and at its best, is not expected to be faster than plain decoding by this factor is off."""

LEAST_SHOWN = 0.005
"""A smaller share is 0 %."""


def explain(estimates: Estimates, needs: Mapping[str, float], may_cost: float, *, has_begun: bool) -> str:
    """The state of every source, a line each.

    Args:
        estimates: what is known.
        needs: by source, the acceptance rate at which its best fixed length equals plain decoding; 1 where none does.
        may_cost: what a draft may cost now, were all of it rejected [plain tokens].
        has_begun: whether the answer has any tokens yet, so that a draft model that lags behind was weighed.
    """
    states = {source: _state(estimates, source, needed, may_cost, has_begun) for source, needed in needs.items()}
    return "\n".join(f"{_name(source)}: {state}." for source, state in states.items())


def _name(source: str) -> str:
    kind = kind_of(source)
    return NAMES.get(kind, kind) + (f" {source.removeprefix(kind)}" if source != kind else "")


def _state(estimates: Estimates, source: str, needed: float, may_cost: float, has_begun: bool) -> str:
    """On or off, and why.

    Figures stand only beside a verdict that they lead to: each guess is decided on by itself, and the mean over all of
    them can lie on the other side.
    """
    runs_model, acceptance = source in estimates.draft_times, estimates.acceptance[source]
    if needed > NEVER:
        why = "too slow" if runs_model else "checking a guess costs more than it saves"
        return f"off, {why} on this machine"
    mean = acceptance.mean()
    average = f"; on average {_percent(mean)} are" if acceptance.has_drafted else ""
    shares = f" ({_percent(needed)} must be right{average})"
    if estimates.solve(source).rate * estimates.ms_plain <= GAIN:
        return "off, too few guesses are right in this text" + shares * (mean < needed)
    if has_begun and source in estimates.lagging:
        return "off for this answer so far, reading the prompt would cost more than it is expected to save"
    if share_of(source) * may_cost * estimates.ms_plain < _cheapest(estimates, source):
        return "off for now, a wrong guess would cost more than may be lost"
    if needed < LEAST_SHOWN:
        return "on, as measured a wrong guess costs next to nothing here"
    if mean >= needed:
        return "on" + shares
    return f"on, only where {'it is sure' if runs_model else 'a repeat is likely'}{shares}"


def _cheapest(estimates: Estimates, source: str) -> float:
    """What the shortest draft costs if it is rejected [ms]."""
    times = estimates.times
    return min(times(w) for w in range(2, estimates.max_draft + 2)) - times(1) + estimates.step_ms(source)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
