"""Which observations rounding explains, and which it does not.

A row is suspicious when it lies further from the path's row than the bound of the width noise, or when the token said
lies further under the argmax than the bound for that. A suspicious row is computed again from nothing, in fresh
memories and passes of several widths: some texts have rows that rounding moves far. Only where none of them moves half
as far is it a defect. With an exact engine there is nothing to explain: any deviation is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec.backends.base import Model
from localspec.commands.verify.findings import Defect, Observation, Run, Tie
from localspec.commands.verify.paths import Check, cuts, feed
from localspec.commands.verify.rows import Deviation
from localspec.commands.verify.width_noise import Bounds
from localspec.sampling.sampling import SamplingParams, edit_logits

MOST_RECHECKS = 3
"""So many rows that nothing explains, and there is no doubt left about the next suspicious one."""

WIDTHS = (2, 5, 9, 16)
EXPLAINED = 2.0
"""A row counts as explained if fresh memories move it at least 1 / EXPLAINED as far."""


@dataclass(slots=True)
class Judgement:
    """What became of the observations.

    Attributes:
        ties: differences that rounding explains.
        defects: the first unexplained row of each run.
        n_rechecked: suspicious rows that were computed again.
        n_explained: those that fresh memories move as well.
    """

    ties: list[Tie] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)
    n_rechecked: int = 0
    n_explained: int = 0


def judge(
    model: Model, runs: Sequence[Run], bounds: Bounds, params: SamplingParams, name: Callable[[int], str], check: Check
) -> Judgement:
    """Judge all runs.

    Args:
        model: the target, to compute suspicious rows again.
        runs: with their observations.
        bounds: of the width noise.
        params: penalties and biases.
        name: turns a token into words.
        check: see ``paths.Check``.
    """
    found = Judgement()
    for run in runs:
        broken = False
        for seen in run.observations:
            suspicious = seen.deviation.rms > bounds.rms or seen.gap > bounds.gap
            if suspicious and not broken and not _explained(model, seen, bounds, params, found, check):
                found.defects.append(_defect(run, seen, bounds, name))
                broken = True
            elif seen.differs and not broken:
                found.ties.append(Tie(run, seen))
    return found


def _explained(
    model: Model, seen: Observation, bounds: Bounds, params: SamplingParams, found: Judgement, check: Check
) -> bool:
    if model.capabilities.batch_invariant or found.n_rechecked - found.n_explained >= MOST_RECHECKS:
        return False
    found.n_rechecked += 1
    again = recomputed(model, seen, params, check)
    rms, swing = max(each.rms for each in again), max(each.swing for each in again)
    good = seen.deviation.rms <= max(bounds.rms, EXPLAINED * rms) and seen.gap <= max(bounds.gap, EXPLAINED * swing)
    found.n_explained += good
    return good


def recomputed(model: Model, seen: Observation, params: SamplingParams, check: Check) -> list[Deviation]:
    """The deviations of a row in fresh memories, one for each of ``WIDTHS``, with the prompt cut in as many ways."""
    text, n_prompt = seen.path.before(seen.position), len(seen.path.prompt)
    found = []
    for width, lengths in zip(WIDTHS, cuts(n_prompt - 1), strict=True):
        with model.new_context(len(text)) as context:
            feed(context, text[: n_prompt - 1], check, lengths)
            rows = None
            for start in range(n_prompt - 1, len(text), width):
                check()
                rows = context.decode(text[start : start + width]).logits
            assert rows is not None
            found.append(seen.path.rows[seen.position].compared(edit_logits(rows[-1], text, params)))
    return found


def _defect(run: Run, seen: Observation, bounds: Bounds, name: Callable[[int], str]) -> Defect:
    details: dict[str, Any] = {"deviation": seen.deviation.rms, "bound": bounds.rms}
    details |= {"gap": seen.gap, "gap_bound": bounds.gap}
    parts = []
    if seen.differs and seen.token is not None:
        plain, said = seen.path.answer[seen.position], seen.token
        parts.append(f"{name(said)} is said where plain decoding says {name(plain)}, {seen.gap:.3g} logits above it")
        details |= {"plain": plain, "said": said}
    parts.append(
        f"the row computed for it lies {seen.deviation.rms:.3g} logits from that of the same text in a fresh memory "
        f"(rounding explains {bounds.rms:.3g})"
    )
    return Defect("row", run.arm, "; ".join(parts), run.prompt, seen.position, details)
