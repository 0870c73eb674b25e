"""Answers of the running system, round by round: its memory, its rows and its decisions against what they should be.

Everything here runs the pair's own decoder, context and drafters. A ``Recorder`` among the drafters sees every pass of
the target, so three things can be told apart:

* *decision*: the token is what the row that the engine computed says. No rounding is involved: it is exact.
* *row*: that row is the row of that text, up to rounding; judged when all is known (see ``judgement``).
* *memory*: after every round the context holds exactly what was settled, but for the last token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from localspec.backends.base import FloatArray
from localspec.commands.verify.betting import Bets
from localspec.commands.verify.drafters import Adversary, Recorder
from localspec.commands.verify.findings import Defect, Found, Observation, Path, Run, Stopped
from localspec.commands.verify.paths import Check
from localspec.commands.verify.verification_law import Window, law_of
from localspec.errors import line_of
from localspec.runtime.pair import Pair
from localspec.sampling.sampling import Distribution, Noise, SamplingParams, distribution, edit_logits
from localspec.spec_decode.controller import Controller
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.rounds import Round
from localspec.spec_decode.verification import STREAM_TARGET


@dataclass(frozen=True, slots=True)
class Arm:
    """Who drafts, and how far.

    Attributes:
        name: in words.
        drafters: in the order they are asked; none: plain decoding.
        controller: a new one for each answer.
    """

    name: str
    drafters: Sequence[Drafter]
    controller: Controller


@dataclass(slots=True)
class System:
    """The pair under audit.

    Attributes:
        pair: it; the audit runs on the thread that owns it.
        check: raises ``Stopped`` when the audit is to end.
        runs, defects: what was done and found so far.
    """

    pair: Pair
    check: Check
    runs: list[Run] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)

    def follow(self, path: Path, arm: Arm, params: SamplingParams) -> None:
        """Answer greedily and compare every row and token with the path.

        Where the answer leaves the path, the difference is noted and the answer is put back on it, as an edited
        conversation would be: so every row of the path is compared.
        """
        run = Run(arm.name, path.name)
        self.runs.append(run)
        for drafter in arm.drafters:
            if isinstance(drafter, Adversary):
                drafter.know(path.prompt, path.answer, path.second_best)
        position = 0
        try:
            while position < len(path.answer):
                position = self._follow_from(path, position, run, arm, params)
            run.complete = True
        except Found as found:
            self.defects.append(found.defect)

    def _follow_from(self, path: Path, position: int, run: Run, arm: Arm, params: SamplingParams) -> int:
        """Go along the path from a position until it ends or is left; returns where to go on."""
        params = replace(params, max_tokens=len(path.answer) - position, ignore_eos=path.ignore_eos)
        for round_, settled, rows in self._rounds(run, arm, path.before(position), params):
            history = list(settled)
            edited = []
            for i, token in enumerate(round_.emitted):
                row = edit_logits(rows[i], history, params)
                chosen = int(np.argmax(row))
                if chosen != token.id:
                    raise Found(self._wrong_choice(run, position + i, row, chosen, token.id, round_))
                edited.append(row)
                history.append(token.id)
            for row, token in zip(edited, round_.emitted, strict=True):
                if position == len(path.answer):
                    raise Found(Defect("decision", run.arm, "the answer goes on where it had to end", run.prompt))
                seen = Observation(path, position, path.rows[position].compared(row), token.id)
                run.observations.append(seen)
                position += 1
                if seen.differs:
                    return position
        if position < len(path.answer):
            evidence = f"the answer ends after {position} tokens; plain decoding says {len(path.answer)}"
            raise Found(Defect("decision", run.arm, evidence, run.prompt, position))
        return position

    def sample(self, path: Path, arm: Arm, params: SamplingParams, bets: Bets, windows: list[Window]) -> None:
        """Answer at a temperature: with a seed, every token must be the draw that the seed makes from the row at hand;
        without one, bets are made against the claim that the tokens follow the rows' distributions.

        Args:
            path: the prompt comes from it; ``ignore_eos`` too.
            arm: who drafts.
            params: with the temperature, the longest answer and the seed.
            bets: the evidence so far; grows.
            windows: drafts with their rows, for ``verification_law``; grows.
        """
        run = Run(arm.name, path.name, sampled=True)
        self.runs.append(run)
        params = replace(params, ignore_eos=path.ignore_eos)
        before: Distribution | None = None
        try:
            for round_, settled, rows in self._rounds(run, arm, path.prompt, params):
                history = list(settled)
                for i, token in enumerate(round_.emitted):
                    p = distribution(rows[i], history, params)
                    if params.seed is not None:
                        chosen = p.sample(Noise(params.seed), len(history), STREAM_TARGET)
                        if chosen != token.id:
                            raise Found(self._wrong_draw(run, p, chosen, token.id, round_))
                    else:
                        guess = law_of(round_.draft[i].id, round_.draft[i].dist) if i < len(round_.draft) else None
                        bets.observe(p, token.id, guess, before)
                    before = p
                    history.append(token.id)
                if params.seed is None and len(round_.draft) > 1:
                    windows.append(Window.of(rows, round_.draft, settled, params))
            run.complete = True
        except Found as found:
            self.defects.append(found.defect)

    def _rounds(
        self, run: Run, arm: Arm, prompt: list[int], params: SamplingParams
    ) -> Iterator[tuple[Round, list[int], FloatArray]]:
        """Rounds with what was settled before each and the target's rows for it [k + 1, n_vocab]."""
        recorder, context = Recorder(), self.pair.context
        decoder = SpeculativeDecoder(context, [*arm.drafters, recorder], arm.controller)
        settled = list(prompt)
        try:
            decoder.prefill(prompt, self._stopping)
            self.check()
            rounds = decoder.rounds(prompt, params, TextAssembler(self.pair.target.vocab), cancelled=self._stopping)
            while (round_ := next(rounds, None)) is not None:
                run.n_rounds += 1
                run.n_tokens += len(round_.emitted)
                run.n_drafted += len(round_.draft)
                run.n_accepted += round_.verdict.n_accepted
                run.widths.add(len(round_.draft) + 1)
                if round_.verdict.n_accepted < len(round_.draft):
                    run.rejected_at.add(round_.verdict.n_accepted + 1)
                before, settled = settled, settled + [token.id for token in round_.emitted]
                if context.tokens != settled[:-1]:
                    raise Found(self._wrong_memory(run, context.tokens, settled[:-1], round_))
                yield round_, before, recorder.rows
            self.check()
        except (Found, Stopped):
            raise
        except Exception as error:
            evidence = f"decoding broke off: {line_of(error)}"
            raise Found(Defect("engine", run.arm, evidence, run.prompt, len(settled) - len(prompt))) from error

    def _stopping(self) -> bool:
        try:
            self.check()
        except Stopped:
            return True
        return False

    def _wrong_choice(self, run: Run, position: int, row: FloatArray, chosen: int, said: int, round_: Round) -> Defect:
        margin = float(row[chosen]) - float(row[said])
        evidence = (
            f"token {position} is {self.name(said)} where the row computed for it says {self.name(chosen)}, "
            f"{margin:.3g} logits above it ({_how(round_)})"
        )
        details = {"said": said, "argmax": chosen, "margin": margin, "drafted": len(round_.draft)}
        return Defect("decision", run.arm, evidence, run.prompt, position, details)

    def _wrong_draw(self, run: Run, p: Distribution, chosen: int, said: int, round_: Round) -> Defect:
        position = run.n_tokens - len(round_.emitted)
        evidence = (
            f"with a fixed seed the token near {position} is {self.name(said)} (p {p.prob(said):.3g}) where the seed "
            f"draws {self.name(chosen)} (p {p.prob(chosen):.3g}) from the row at hand ({_how(round_)})"
        )
        details = {"said": said, "drawn": chosen, "p_said": p.prob(said), "p_drawn": p.prob(chosen)}
        return Defect("decision", run.arm, evidence, run.prompt, position, details)

    def _wrong_memory(self, run: Run, held: Sequence[int], wanted: Sequence[int], round_: Round) -> Defect:
        pairs = zip(held, wanted, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(wanted)))
        evidence = (
            f"after {_how(round_)} the context holds {len(held)} tokens where {len(wanted)} are settled and decoded; "
            f"they part at token {at}"
        )
        details = {"held": len(held), "wanted": len(wanted), "first_difference": at}
        return Defect("memory", run.arm, evidence, run.prompt, run.n_tokens, details)

    def name(self, token: int) -> str:
        """A token for a sentence."""
        return f"{self.pair.token_text(token)!r} ({token})"


def _how(round_: Round) -> str:
    """What the round did, in words."""
    if not len(round_.draft):
        return "a plain round"
    return f"a round of {len(round_.draft)} guesses, {round_.verdict.n_accepted} accepted"
