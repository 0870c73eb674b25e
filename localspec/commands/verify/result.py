"""What an audit found: figures, ties, defects, a verdict in one sentence, and all of it as one JSON object.

The object of ``verify --json`` (``"format": "localspec-audit", "version": 1``; a field is never renamed or removed
without another version):

========================= =============================================================================================
``lossless``              true, false, or null where the audit was interrupted before it found a defect
``verdict``               the sentence that the table ends with
``interrupted``           Ctrl-C ended the audit early: everything below is what was checked until then
``model, backend``        what was audited; ``engine`` and ``draft`` (the names) with it
``settings``              ``prompts, tokens`` (longest answer), ``draft_length, longest_draft``, ``sampling`` (the chain
                          of the laws)
``seconds``               wall time of the audit, without loading
``exact``                 whether the engine claims that the width of a pass changes nothing, so that the bound is 0
``noise``                 ``rows, widths, median, largest, bound, gap_bound`` (logits), ``mean_kl, mean_kl_limit``
                          (nats), ``argmax_flips, false_alarm``; ``tested``: rows held against the bound
``arms[]``                ``arm, sampled, answers, complete, tokens, rounds, drafted, accepted, widths, rejected_at,
                          differences, largest_deviation``: one for each way of drafting
``memory``                ``rollbacks, restored, pairs, bitwise, largest_deviation`` or null
``sensitivity``           ``tries, median, smallest, found``: rows of contexts that are wrong on purpose, and the share
                          of them over the bound; or null
``verification_law``      ``draws, largest_excess, worst_cell, detectable_error`` and the fields of ``decoding_law``; or
                          null
``decoding_law``          ``tokens, impossible_tokens, evidence_nats, threshold_nats, strongest_suspicion, false_alarm,
                          power`` (by suspicion), or null
``ties[]``                ``arm, prompt, position, plain, speculative`` (``id, text``), ``gap, deviation``
``rechecked``             ``rows, explained``: suspicious rows that were computed again from nothing
``defects[]``             ``kind`` (``kernel, row, decision, memory, law, engine``), ``arm, prompt, position, evidence,
                          details``
========================= =============================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from localspec.commands.verify.log import ArmTally, Defect
from localspec.commands.verify.rollbacks import Rollbacks

FORMAT, VERSION = "localspec-audit", 1

Figures = Mapping[str, Any]


@dataclass(slots=True)
class AuditResult:
    """See the module's docstring."""

    interrupted: bool
    model: str
    backend: str
    engine: str
    draft: list[str]
    exact: bool
    settings: Figures
    seconds: float
    noise: Figures
    arms: list[ArmTally]
    memory: Rollbacks | None
    sensitivity: Figures | None
    verification_law: Figures | None
    decoding_law: Figures | None
    ties: list[Figures]
    rechecked: Figures
    defects: list[Defect]

    @property
    def lossless(self) -> bool | None:
        """Whether the check held; None where it was not finished."""
        if self.defects:
            return False
        return None if self.interrupted else True

    @property
    def largest_deviation(self) -> float:
        """Of any row, in logits."""
        deviations = [arm.largest_deviation or 0.0 for arm in self.arms]
        return max([*deviations, self.memory.largest_deviation if self.memory else 0.0])

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.defects:
            first = self.defects[0]
            where = f"{first.arm}" + (f", prompt {first.prompt}" if first.prompt else "")
            where += f", token {first.position}" if first.position is not None else ""
            more = f" ({len(self.defects) - 1} more)" if len(self.defects) > 1 else ""
            return f"NOT lossless here: {where}: {first.evidence}{more}"
        bound = self.noise.get("bound")
        noise = f"noise bound {bound:.2g}" if bound else "equality to the bit" if bound == 0 else "noise not measured"
        n_answers = sum(arm.answers for arm in self.arms if arm.drafted)
        checked = (
            f"{n_answers} answers, {counted(len(self.ties), 'float tie')}, "
            f"largest deviation {self.largest_deviation:.2g} logits, {noise}"
        )
        return f"interrupted; no defect so far: {checked}" if self.interrupted else f"lossless here: {checked}"

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        found = {"format": FORMAT, "version": VERSION, "lossless": self.lossless, "verdict": self.verdict}
        return found | asdict(self, dict_factory=_with_lists)


def _with_lists(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: sorted(value) if isinstance(value, set) else value for name, value in items}


def counted(n: int, noun: str) -> str:
    """``1 answer``, ``2 answers``."""
    return f"{n} {noun}" + ("" if n == 1 else "s")
