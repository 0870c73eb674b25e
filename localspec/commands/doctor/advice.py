"""The recommendation: speculate, with what, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localspec.commands.doctor.facts import CostFacts, Examination, PayoffFacts, RankFacts, Recommendation
from localspec.spec_decode.drafters.free import FREE_DRAFTERS
from localspec.spec_decode.drafters.names import NGRAM, is_corpus

EASY, HARD = 0.55, 0.85
"""Acceptance rate of the draft tokens of a small model of the target's family: what it is on free chat, and on code.
(Qwen2.5-Coder 0.5B for 1.5B, greedy: chat 0.55, translation 0.70, code 0.85, more on editing and extraction.)"""

TYPICAL, HIGH = 0.7, 0.9
"""Acceptance rates for which a speed-up is named: where drafting pays nearly everywhere, and on easy text only."""

_LEAST_NOISE = 0.03
"""What two equal answers in turns differ by on a busy machine, see ``timing.turns.SLICE_TOKENS``; few prompts may show
less by chance."""

_LEAST_MARGIN = 0.02
"""Gains below this are called none: nobody would notice them."""


_DOUBTS = ("load", "one token", "heat")
"""Rows that make timings doubtful."""


def doubtful(found: Examination) -> list[str]:
    """Names of the rows that make what was timed doubtful: what was timed on a busy machine, or another day."""
    return [each.name for each in found.checks if each.status == "note" and each.name in _DOUBTS]


def pays(found: PayoffFacts) -> bool:
    """Whether a drafter is worth trying here, by what passes cost."""
    need = found.lowest_break_even
    return need is not None and need <= HARD


def recommend(
    cost: CostFacts, payoffs: list[PayoffFacts], target: str, drafts: Mapping[str, str], *, automatic: bool = False
) -> Recommendation:
    """By the speed-up formula, from measured passes.

    Args:
        cost: the passes.
        payoffs: what they mean, by drafter.
        target: what names the target on a command line.
        drafts: name of a drafter -> what names it on a command line.
        automatic: whether the drafters are those that are taken where none is named.
    """
    chat = f"localspec chat {target}"
    if not payoffs:
        return Recommendation(None, "No drafter was asked about; guesses from the text itself need no model.",
                              f"{chat} --draft ngram")  # fmt: skip
    paying = [found for found in payoffs if pays(found)]
    if not paying:
        best = min(payoffs, key=lambda found: 2.0 if found.lowest_break_even is None else found.lowest_break_even)
        return Recommendation(False, f"Do not speculate here: {_why_not(best, cost)}.", f"{chat} --draft none")
    chosen = _draft_options([found.drafter for found in paying], drafts)
    if automatic and len(paying) == len(payoffs):
        chosen = ""
    return Recommendation(True, " ".join(_sentence(found, cost) for found in payoffs), chat + chosen)


def _sentence(found: PayoffFacts, cost: CostFacts) -> str:
    need = found.lowest_break_even
    if need is None or not pays(found):
        return f"Do not draft with {found.drafter} here: {_why_not(found, cost)}."
    if found.drafter == NGRAM:
        return f"N-grams pay from {need:.0%} acceptance: where a text repeats itself or its prompt."
    if is_corpus(found.drafter):
        return f"Copies from {found.drafter} pay from {need:.0%} acceptance: where a text is like that one."
    share = TYPICAL if need <= EASY else HIGH
    gain = f"if {share:.0%} of the guesses are right, expect ×{found.speedup[share]:.2f}"
    if need <= EASY:
        return f"Speculate with {found.drafter}: it pays from {need:.0%} acceptance; {gain}."
    return (
        f"Speculate with {found.drafter} on code, editing and extraction: it pays from {need:.0%} acceptance, "
        f"which free chat seldom reaches; {gain}."
    )


def _why_not(found: PayoffFacts, cost: CostFacts) -> str:
    times, need = cost.target.ms, found.lowest_break_even
    price = f"a pass over 2 tokens takes {times[2] / times[1]:.2f} times as long as one over 1"
    if found.step_ms:
        price += f", and a guess {found.step_ms / times[1]:.2f} times"
    if need is None:
        return f"even guesses that are always right cost more than they save ({price})"
    return f"{need:.0%} of the guesses would have to be right ({price})"


def recommend_ranked(rank: RankFacts, target: str, drafts: Mapping[str, str]) -> Recommendation:
    """By what was measured just now; arguments as in ``recommend``."""
    chat = f"localspec chat {target}"
    measured = [each for each in rank.candidates if each.speedup is not None and each.drafters]
    if not measured:
        return Recommendation(
            None,
            "Nothing could be measured: no time, or no room in the context. Without --rank, doctor judges by costs.",
        )
    best = measured[0]
    top, margin = best.speedup or 0.0, noise_margin(rank)
    name = " + ".join(best.drafters)
    if top < 1 + _LEAST_MARGIN:
        text = f"Do not speculate here: nothing was faster than plain decoding; the best, {name}, reached ×{top:.2f}."
        return Recommendation(False, text, f"{chat} --draft none")
    if top < 1 + margin:
        text = (
            f"Inconclusive: the best, {name}, reached ×{top:.2f}, within the ±{margin:.0%} noise of this measurement. "
            "--draft auto drafts only while it pays off."
        )
        return Recommendation(None, text, chat)
    close = [" + ".join(each.drafters) for each in measured[1:] if (each.speedup or 0.0) > top - margin]
    text = f"{name} was the fastest, ×{top:.2f} of plain"
    text += f"; {' and '.join(close)} cannot be told apart from it." if close else "."
    return Recommendation(True, text, chat + _draft_options(best.drafters, drafts))


def _draft_options(drafters: Sequence[str], specs: Mapping[str, str]) -> str:
    """What makes a command line draft with these and no others."""
    named = "".join(f" --draft {specs.get(drafter, drafter)}" for drafter in drafters)
    return named if set(drafters) & set(FREE_DRAFTERS) else f"{named} --draft-only"


def noise_margin(rank: RankFacts) -> float:
    """Difference of two speed-ups that noise alone may make, at about two standard errors.

    A ratio of two answers has √2 times the noise of one, and a mean over n prompts 1/√n of that.
    """
    noise = max(_LEAST_NOISE, rank.noise or 0.0)
    return float(max(_LEAST_MARGIN, 2 * noise * 2**0.5 / max(1, len(rank.prompts)) ** 0.5))
