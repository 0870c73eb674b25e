"""Answers of the running system, round by round: its decisions, its rows and its context against what they should be.

Everything here runs the pair's own decoder, context and drafters; a ``Recorder`` among the drafters sees every pass of
the target. Decisions and the context are exact, and checked at once. Rows are right up to rounding: they are noted, and
judged when all is known (see ``rounding``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from localspec.backends.base import Context, FloatArray, shared_prefix
from localspec.commands.verify.betting import Bets
from localspec.commands.verify.drafters import Adversary, Recorder
from localspec.commands.verify.plain import Check, PlainAnswer
from localspec.commands.verify.result import ArmTally, AuditLog, Defect, DefectFound, Observation
from localspec.commands.verify.samples import DrawnSamples
from localspec.commands.verify.verification_law import Window, law_of
from localspec.sampling.sampling import Distribution, Noise, SamplingParams, distribution, edit_logits
from localspec.spec_decode.controller import Controller
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.rounds import Round
from localspec.spec_decode.thinking import ThinkingMarks, ThinkingReader
from localspec.spec_decode.verification import STREAM_TARGET


@dataclass(frozen=True, slots=True)
class AuditArm:
    """A way of drafting: its name, the drafters in the order they are asked, and a controller for one answer."""

    name: str
    drafters: Sequence[Drafter]
    controller: Controller


@dataclass(slots=True)
class BudgetedAnswer:
    """The tokens of an answer and the rows behind them [n_vocab]; None behind those that nobody chose."""

    tokens: list[int] = field(default_factory=list)
    rows: list[FloatArray | None] = field(default_factory=list)


@dataclass(slots=True)
class RunningSystem:
    """The pair under audit, answering in the target's ``context``; ``name`` turns a token into words, and ``samples``
    takes those that drafters drew."""

    context: Context
    name: Callable[[int], str]
    log: AuditLog
    check: Check
    samples: DrawnSamples

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
        for round_, rows, _ in self._rounds(plain, start, arm, params, tally):
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
        """Answer the same prompt at a temperature. Without a seed, bet against the claim that tokens follow their rows'
        distributions, and add the drafts and their rows to ``windows``."""
        params = replace(params, ignore_eos=plain.params.ignore_eos)
        before: Distribution | None = None
        with self.log.answering(arm.name, plain.name, sampled=True) as tally:
            for round_, rows, laws in self._rounds(plain, 0, arm, params, tally):
                if params.seed is not None:
                    continue
                draft = round_.draft
                for at, token, p in zip((-1, *round_.verdict.accepted), round_.emitted, laws, strict=False):
                    q = next((law_of(draft[i].id, draft[i].dist) for i in draft.children(at)), None)
                    bets.observe(p, token.id, q, before)
                    before = p
                if len(draft) > 1 and not draft.branches:
                    settled = self.context.tokens[: round_.n_past + 1]
                    windows.append(Window.of(rows, draft, settled, params))

    def think(
        self, plain: PlainAnswer, arm: AuditArm, params: SamplingParams, marks: ThinkingMarks, budget: int
    ) -> tuple[int, BudgetedAnswer]:
        """Answer the same prompt with a budget for thinking.

        Returns:
            How often a block was closed because its budget was spent, and the answer.
        """
        n_closed, answer = 0, BudgetedAnswer()
        reader = ThinkingReader(marks, budget=budget)
        with self.log.answering(arm.name, plain.name, sampled=not params.greedy) as tally:
            for round_, rows, _ in self._rounds(plain, 0, arm, params, tally, reader):
                forced = round_.verdict.kind == "forced"
                n_closed += forced
                answer.tokens += [token.id for token in round_.emitted]
                answer.rows += [None if forced else row.copy() for row, _ in zip(rows, round_.emitted, strict=False)]
        return n_closed, answer

    def _rounds(
        self,
        plain: PlainAnswer,
        start: int,
        arm: AuditArm,
        params: SamplingParams,
        tally: ArmTally,
        thinking: ThinkingReader | None = None,
    ) -> Iterator[tuple[Round, FloatArray, list[Distribution]]]:
        """Rounds whose decisions and context are right, with the target's rows [k + 1, n_vocab] and the laws of the
        tokens."""
        recorder, settled, n_prompt = Recorder(), plain.before(start), len(plain.prompt)
        decoder = SpeculativeDecoder(self.context, [recorder, *arm.drafters], arm.controller)
        decoder.prefill(settled, self.check)
        text = TextAssembler(self.context.model.vocab, (), thinking)
        for round_ in decoder.rounds(list(settled), params, text, cancelled=self.check):
            n_draft, n_accepted = len(round_.draft), round_.verdict.n_accepted
            tally.rounds += 1
            tally.tokens += len(round_.emitted)
            tally.drafted += n_draft
            tally.accepted += n_accepted
            tally.widths.add(n_draft + 1)
            if n_accepted < n_draft:
                tally.rejected_at.add(n_accepted + 1)
            how = f"a round of {n_draft} guesses, {n_accepted} accepted" if n_draft else "a plain round"
            laws = []
            self.samples.observe(recorder.drawn(), round_.draft)
            if round_.finish_reason is None and len(round_.emitted) < n_accepted:
                n_dropped, position = n_accepted - len(round_.emitted), len(settled) - n_prompt + len(round_.emitted)
                evidence = (
                    f"{n_dropped} accepted guesses behind token {position - 1} are not said, so their places are "
                    f"judged a second time with the same noise ({how})"
                )
                raise DefectFound(Defect("decision", arm.name, plain.name, position, evidence, {"dropped": n_dropped}))
            for row, token in zip(recorder.rows, round_.emitted, strict=False):
                if token.kind == "forced":  # the target was not asked
                    settled.append(token.id)
                    continue
                p = distribution(row, settled, params)
                right = token.id if params.seed is None else p.sample(Noise(params.seed), len(settled), STREAM_TARGET)
                right = p.argmax() if params.greedy else right
                if token.id != right:
                    rule = "the row computed for it says" if params.greedy else "the seed draws, from the row at hand,"
                    edited = edit_logits(row, settled, params)
                    margin, position = float(edited[right]) - float(edited[token.id]), len(settled) - n_prompt
                    evidence = (
                        f"token {position} is {self.name(token.id)} where {rule} {self.name(right)}, whose logit "
                        f"differs by {margin:+.3g} ({how})"
                    )
                    details = {"said": token.id, "right": right, "margin": margin, "drafted": n_draft}
                    raise DefectFound(Defect("decision", arm.name, plain.name, position, evidence, details))
                laws.append(p)
                settled.append(token.id)
            held, wanted = self.context.tokens, settled[:-1]
            if held != wanted:
                at = shared_prefix(held, wanted)
                evidence = (
                    f"after {how} the context holds {len(held)} tokens where {len(wanted)} are settled and decoded; "
                    f"they part at token {at}"
                )
                details = {"held": len(held), "wanted": len(wanted), "first_difference": at}
                position = len(settled) - n_prompt
                raise DefectFound(Defect("memory", arm.name, plain.name, position, evidence, details))
            yield round_, recorder.rows, laws
