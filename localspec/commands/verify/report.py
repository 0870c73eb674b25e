"""What an audit says: figures, ties, defects, a verdict in one sentence, and all of it as one JSON object.

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
                          (nats), ``argmax_flips, false_alarm``
``arms[]``                ``arm, sampled, answers, complete, tokens, rounds, drafted, accepted, widths, rejected_at,
                          differences, largest_deviation``: one for each way of drafting
``memory``                ``rollbacks, restored, pairs, bitwise, largest_deviation`` or null
``sensitivity``           ``tries, median, smallest, found``: rows of memories that are wrong on purpose, and the share
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

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localspec.commands.verify.betting import Bets
from localspec.commands.verify.findings import Defect, Run, Tie
from localspec.commands.verify.memory import MemoryCheck
from localspec.commands.verify.rows import Deviation
from localspec.commands.verify.verification_law import VerificationLaw

FORMAT, VERSION = "localspec-audit", 1


@dataclass(slots=True)
class Report:
    """See the module's docstring."""

    model: str
    backend: str
    engine: str
    draft: list[str]
    exact: bool
    settings: dict[str, Any]
    interrupted: bool = False
    seconds: float = 0.0
    noise: dict[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    memory: list[MemoryCheck] = field(default_factory=list)
    sensitivity: list[Deviation] = field(default_factory=list)
    verification_law: VerificationLaw | None = None
    decoding_law: Bets | None = None
    ties: list[Tie] = field(default_factory=list)
    tie_texts: list[dict[str, Any]] = field(default_factory=list)
    n_rechecked: int = 0
    n_explained: int = 0
    defects: list[Defect] = field(default_factory=list)

    @property
    def lossless(self) -> bool | None:
        """Whether the check held; None where it was not finished."""
        if self.defects:
            return False
        return None if self.interrupted else True

    @property
    def answers(self) -> list[Run]:
        """Speculative answers; without the plain ones and the probes."""
        return [run for run in self.runs if run.n_drafted]

    @property
    def largest_deviation(self) -> float:
        """Of any row, in logits."""
        runs = [*self.runs, *(check.run for check in self.memory)]
        return max((run.largest for run in runs), default=0.0)

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
        said = (
            f"{len(self.answers)} answers, {len(self.ties)} float tie{'' if len(self.ties) == 1 else 's'}, "
            f"largest deviation {self.largest_deviation:.2g} logits, {noise}"
        )
        return f"interrupted; no defect so far: {said}" if self.interrupted else f"lossless here: {said}"

    def arms(self) -> list[dict[str, Any]]:
        """The runs, added up by who drafted."""
        groups: dict[tuple[str, bool], list[Run]] = {}
        for run in self.runs:
            groups.setdefault((run.arm, run.sampled), []).append(run)
        return [
            {
                "arm": arm,
                "sampled": sampled,
                "answers": len(runs),
                "complete": sum(run.complete for run in runs),
                "tokens": sum(run.n_tokens for run in runs),
                "rounds": sum(run.n_rounds for run in runs),
                "drafted": sum(run.n_drafted for run in runs),
                "accepted": sum(run.n_accepted for run in runs),
                "widths": sorted(set().union(*(run.widths for run in runs))),
                "rejected_at": sorted(set().union(*(run.rejected_at for run in runs))),
                "differences": sum(len(run.differences) for run in runs),
                "largest_deviation": None if sampled else max(run.largest for run in runs),
            }
            for (arm, sampled), runs in sorted(groups.items(), key=_order)
        ]

    def sensitivity_dict(self) -> dict[str, Any] | None:
        """How a memory that is wrong on purpose shows."""
        rms = [each.rms for each in self.sensitivity]
        if not rms:
            return None
        bound = self.noise.get("bound")
        found = None if bound is None else float(np.mean([value > bound for value in rms]))
        return {"tries": len(rms), "median": float(np.median(rms)), "smallest": min(rms), "found": found}

    def memory_dict(self) -> dict[str, Any] | None:
        """The probes, added up."""
        if not self.memory:
            return None
        return {
            "rollbacks": sum(each.n_rollbacks for each in self.memory),
            "restored": sum(each.n_restored for each in self.memory),
            "pairs": sum(each.n_pairs for each in self.memory),
            "bitwise": all(each.bitwise for each in self.memory),
            "largest_deviation": max(each.run.largest for each in self.memory),
        }

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "lossless": self.lossless,
            "verdict": self.verdict,
            "interrupted": self.interrupted,
            "model": self.model,
            "backend": self.backend,
            "engine": self.engine,
            "draft": self.draft,
            "exact": self.exact,
            "settings": self.settings,
            "seconds": round(self.seconds, 2),
            "noise": self.noise,
            "arms": self.arms(),
            "memory": self.memory_dict(),
            "sensitivity": self.sensitivity_dict(),
            "verification_law": self.verification_law and self.verification_law.as_dict(),
            "decoding_law": self.decoding_law and self.decoding_law.as_dict(),
            "ties": self.tie_texts,
            "rechecked": {"rows": self.n_rechecked, "explained": self.n_explained},
            "defects": [defect.as_dict() for defect in self.defects],
        }


def _order(item: tuple[tuple[str, bool], list[Run]]) -> tuple[bool, bool]:
    """Greedy answers before sampled ones, the adversary's last."""
    (arm, sampled), _ = item
    return sampled, arm.startswith(("adversary", "near misses"))
