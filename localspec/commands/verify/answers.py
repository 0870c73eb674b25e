"""Answers of the running system, round by round: its decisions, its rows and its context against what they should be.

Everything here runs the pair's own decoder, context and drafters; a ``Recorder`` among the drafters sees every pass of
the target. Decisions and the context are exact, and checked at once. Rows are right up to rounding: they are noted, and
judged when all is known (see ``rounding``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from localspec.backends.base import Context, FloatArray, shared_prefix
from localspec.commands.verify.betting import Bets
from localspec.commands.verify.drafters import Adversary, Recorder
from localspec.commands.verify.plain import Check, PlainAnswer
from localspec.commands.verify.result import ArmTally, AuditLog, Defect, DefectFound, Observation
from localspec.commands.verify.verification_law import Window, law_of
from localspec.sampling.sampling import Distribution, Noise, SamplingParams, distribution, edit_logits
from localspec.spec_decode.controller import Controller
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.rounds import Round
from localspec.spec_decode.verification import STREAM_TARGET


@dataclass(frozen=True, slots=True)
class AuditArm:
    """A way of drafting: its name, the drafters in the order they are asked, and a controller for one answer."""

    name: str
    drafters: Sequence[Drafter]
    controller: Controller


@dataclass(slots=True)
class RunningSystem:
    """The pair under audit, answering.

    Attributes:
        context: the target's.
        name: turns a token into words.
        log: takes what is found.
        check: see ``plain.Check``.
    """

    context: Context
    name: Callable[[int], str]
    log: AuditLog
    check: Check

    def follow(self, plain: PlainAnswer, arm: AuditArm) -> None:
        """Answer greedily and compare every row and token with the plain answer.

        Where the answer leaves the plain one, the difference is noted and the answer is put back on it, as an edited
        conversation would be: so every row of the plain answer is compared.
        """
        for drafter in arm.drafters:
            if isinstance(drafter, Adversary):
                drafter.know(plain.prompt, plain.tokens, [int(row.ids[1]) for row in plain.rows])
        with self.log.answering(arm.name, plain.name, sampled=False) as tally:
            position = 0
            while position < len(plain.tokens):
                position = self._follow_from(plain, position, arm, tally)

    def _follow_from(self, plain: PlainAnswer, start: int, arm: AuditArm, tally: ArmTally) -> int:
        """Go along the plain answer until it ends or is left; returns where to go on."""
        params, position = replace(plain.params, max_tokens=len(plain.tokens) - start), start
        for round_, settled, rows in self._rounds(plain, start, arm, params, tally):
            for i, token in enumerate(round_.emitted):
                row = edit_logits(rows[i], settled + [each.id for each in round_.emitted[:i]], params)
                best = int(np.argmax(row))
                if token.id != best:
                    margin = float(row[best]) - float(row[token.id])
                    evidence = (
                        f"token {position + i} is {self.name(token.id)} where the row computed for it says "
                        f"{self.name(best)}, {margin:.3g} logits above it ({_how(round_)})"
                    )
                    details = {"said": token.id, "argmax": best, "margin": margin, "drafted": len(round_.draft)}
                    raise DefectFound(Defect("decision", arm.name, plain.name, position + i, evidence, details))
            for row, token in zip(rows, round_.emitted, strict=False):
                if position == len(plain.tokens):
                    evidence = "the answer goes on where it had to end"
                    raise DefectFound(Defect("decision", arm.name, plain.name, None, evidence))
                seen = Observation(arm.name, plain, position, plain.compared(position, row), token.id)
                self.log.observations.append(seen)
                tally.largest_deviation = max(tally.largest_deviation or 0.0, seen.deviation.rms)
                tally.differences += seen.differs
                position += 1
                if seen.differs:
                    return position
        if position < len(plain.tokens):
            evidence = f"the answer ends after {position} tokens; plain decoding says {len(plain.tokens)}"
            raise DefectFound(Defect("decision", arm.name, plain.name, position, evidence))
        return position

    def sample(
        self, plain: PlainAnswer, arm: AuditArm, params: SamplingParams, bets: Bets, windows: list[Window]
    ) -> None:
        """Answer at a temperature: with a seed, every token must be the draw that the seed makes from the row at hand;
        without one, bets are made against the claim that the tokens follow the rows' distributions.

        Args:
            plain: the prompt comes from it; ``ignore_eos`` too.
            arm: the way of drafting.
            params: with the temperature, the longest answer and the seed.
            bets: the evidence so far; grows.
            windows: drafts with their rows, for ``verification_law``; grows.
        """
        params = replace(params, ignore_eos=plain.params.ignore_eos)
        before: Distribution | None = None
        with self.log.answering(arm.name, plain.name, sampled=True) as tally:
            for round_, settled, rows in self._rounds(plain, 0, arm, params, tally):
                history = list(settled)
                for i, token in enumerate(round_.emitted):
                    p = distribution(rows[i], history, params)
                    if params.seed is None:
                        q = law_of(round_.draft[i].id, round_.draft[i].dist) if i < len(round_.draft) else None
                        bets.observe(p, token.id, q, before)
                    elif (drawn := p.sample(Noise(params.seed), len(history), STREAM_TARGET)) != token.id:
                        position, p_said, p_drawn = len(history) - len(plain.prompt), p.prob(token.id), p.prob(drawn)
                        evidence = (
                            f"with a fixed seed token {position} is {self.name(token.id)} (p {p_said:.3g}) where the "
                            f"seed draws {self.name(drawn)} (p {p_drawn:.3g}) from the row at hand ({_how(round_)})"
                        )
                        details = {"said": token.id, "drawn": drawn, "p_said": p_said, "p_drawn": p_drawn}
                        raise DefectFound(Defect("decision", arm.name, plain.name, position, evidence, details))
                    before = p
                    history.append(token.id)
                if params.seed is None and len(round_.draft) > 1:
                    windows.append(Window.of(rows, round_.draft, settled, params))

    def _rounds(
        self, plain: PlainAnswer, start: int, arm: AuditArm, params: SamplingParams, tally: ArmTally
    ) -> Iterator[tuple[Round, list[int], FloatArray]]:
        """Rounds with what was settled before each and the target's rows for it [k + 1, n_vocab]."""
        recorder, settled = Recorder(), plain.before(start)
        decoder = SpeculativeDecoder(self.context, [*arm.drafters, recorder], arm.controller)
        decoder.prefill(settled, self.check)
        for round_ in decoder.rounds(settled, params, TextAssembler(self.context.model.vocab), cancelled=self.check):
            n_draft, n_accepted = len(round_.draft), round_.verdict.n_accepted
            tally.rounds += 1
            tally.tokens += len(round_.emitted)
            tally.drafted += n_draft
            tally.accepted += n_accepted
            tally.widths.add(n_draft + 1)
            if n_accepted < n_draft:
                tally.rejected_at.add(n_accepted + 1)
            before, settled = settled, settled + [token.id for token in round_.emitted]
            held, wanted = self.context.tokens, settled[:-1]
            if held != wanted:
                at = shared_prefix(held, wanted)
                evidence = (
                    f"after {_how(round_)} the context holds {len(held)} tokens where {len(wanted)} are settled and "
                    f"decoded; they part at token {at}"
                )
                details = {"held": len(held), "wanted": len(wanted), "first_difference": at}
                position = len(settled) - len(plain.prompt)
                raise DefectFound(Defect("memory", arm.name, plain.name, position, evidence, details))
            yield round_, before, recorder.rows


def _how(round_: Round) -> str:
    """What the round did, in words."""
    if not len(round_.draft):
        return "a plain round"
    return f"a round of {len(round_.draft)} guesses, {round_.verdict.n_accepted} accepted"
