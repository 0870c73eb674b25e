"""The audit of a loaded pair, from the first plain answer to the result."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from localspec.backends.base import FloatArray, shared_prefix
from localspec.backends.tokenizer import NAMED
from localspec.backends.trust import MAX_MEAN_KL
from localspec.commands.options import Watch
from localspec.commands.verify.drafters import Adversary, Beside, HeatedDrafter, NearMisses, Openers, Recorder
from localspec.commands.verify.law import CHECKED_DRAWS, KINDS, Bets, DrawnSamples, VerificationLaw, Window, law_of
from localspec.commands.verify.rows import (
    ARM,
    ArmTally,
    AuditLog,
    AuditResult,
    Defect,
    DefectKind,
    Judge,
    Observation,
    PlainAnswer,
    Rollbacks,
    WidthNoise,
    in_words,
    plain_answer,
    prompt_cuts,
    sensitivity,
    wide_passes,
)
from localspec.controllers.auto import MAX_DRAFT
from localspec.controllers.fixed import FixedController
from localspec.engine.pair import Pair
from localspec.errors import UsageError
from localspec.llm import LLM
from localspec.measuring.subject import row_behind
from localspec.prompts.questions import in_turns, own_questions
from localspec.sampling.sampling import HUGE, Distribution, Noise, SamplingParams, distribution, edit_logits
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler, ThinkingMarks, ThinkingReader
from localspec.spec_decode.drafters.base import Controller, Drafter
from localspec.spec_decode.rounds import Round
from localspec.spec_decode.verification import STREAM_TARGET


@dataclass(frozen=True, slots=True)
class AuditArm:
    """Drafters in the order they are asked, and a controller for one answer."""

    name: str
    drafters: Sequence[Drafter]
    controller: Controller


LENGTHS = (3, 8, 0, 1, 5)  # forced draft lengths by turns; 0 is the longest
SAMPLED_LENGTH = 3
SAMPLED_ANSWER = 2  # length factor of sampled answers without a seed: evidence grows with every token
STEPS = 11  # steps of a prompt, for the progress; the law of verification counts as one more prompt


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """How much is audited, and with which settings."""

    n_prompts: int  # questions; each is answered some six times
    n_tokens: int  # longest answer
    greedy: SamplingParams  # penalties and biases of the greedy answers
    sampled: SamplingParams  # the chain of the sampled ones; its temperature is over 0
    draft_length: int | str = "auto"  # as the pair is going to be used
    n_windows: int = 4  # drafts that verification is asked about
    n_draws: int = 1000  # how often, for each kind of draft
    system: str | None = None  # system prompt
    is_quick: bool = False  # as little as tells something: fewer ways of drafting, rollbacks with one prompt alone


class Audit:
    """One audit of one pair, made and run within ``LLM.run``."""

    def __init__(self, llm: LLM, pair: Pair, options: AuditOptions, watch: Watch) -> None:
        self.llm, self.pair, self.options = llm, pair, options
        self._watch, self._check = watch, watch.check
        self.target, self.context, self.drafters = pair.target, pair.context, pair.state.drafters
        self.reach = MAX_DRAFT if options.draft_length == "auto" else max(MAX_DRAFT, int(options.draft_length))
        self.adversary = Adversary(self.target.n_vocab, self.reach)
        self.beside = Beside(self.target.n_vocab, self.reach)
        # Every width, in an order that alternates wide and narrow, again and again.
        widths = list(range(2, self.reach + 2))
        random.Random(3).shuffle(widths)
        self.widths = itertools.cycle(widths)
        self.log = AuditLog()
        self.noise = WidthNoise(self.target.capabilities.batch_invariant)
        self.bets = Bets()
        self.windows: list[Window] = []
        self.law = VerificationLaw()
        self.samples = DrawnSamples()
        self.thinking = {"answers": 0, "closed": 0}  # answers with a budget, blocks closed because it was spent
        self.prompts: list[tuple[str, list[int]]] = []
        self.rollbacks = Rollbacks()
        self.spoiled: list[float] = []
        self._done = self._total = 0.0

    def run(self) -> AuditResult:
        """Audit until done or interrupted. ``UsageError``: no prompt fits into the context; ``EngineError``: not even a
        fresh context works."""
        started = time.perf_counter()
        questions = self.prompts = self._questions()
        self._total = len(questions) + 1
        interrupted = False
        try:
            for number, (name, prompt) in enumerate(questions):
                self._done = number
                self._question(number, name, prompt, f"prompt {number + 1} of {len(questions)}")
            self._done = len(questions)
            self._draw_from_verification()
        except KeyboardInterrupt:
            interrupted = True
        return self._result(len(questions), interrupted, time.perf_counter() - started)

    def _question(self, number: int, name: str, prompt: list[int], what: str) -> None:
        # Every other answer goes on behind its end, so that there is enough text even where answers are short.
        greedy = replace(self.options.greedy, ignore_eos=number % 2 == 0)
        self._step(f"{what}: alone, token by token")
        plain = plain_answer(self.target, name, prompt, greedy, self.options.n_tokens, self._check)
        self._step(f"{what}: passes of many widths")
        for lengths in prompt_cuts(len(prompt))[number % 2 :: 2]:  # long and short passes over the prompt, by turns
            n_rows = len(plain.tokens)
            passes = wide_passes(
                self.target, plain, n_rows, lengths, self.widths, self._check, branches=self.context.can_branch
            )
            for deviations in passes:
                self.noise.widths.add(len(deviations))
                self.noise.deviations += deviations
        for arm in self._greedy_arms(number):
            self._step(f"{what}: {arm.name}")
            self._follow(plain, arm)
        self.adversary.know(prompt, [], [])
        for arm, params in self._sampled_arms(number):
            self._step(f"{what}: {arm.name}")
            self._sample(plain, arm, params)
        n_thorough = 1 if self.options.is_quick else 2
        if number < n_thorough and self.llm.thinking is not None:
            self._step(f"{what}: thinking budgets")
            self._think(plain, self.llm.thinking)
        if number < n_thorough and len(plain.tokens) > 2:
            self._step(f"{what}: rollbacks")
            with self.log.noting(ARM, name, "a rollback"):
                self.rollbacks.probe(self.context, plain, self.reach, self.log, self._check)
        if number == 0:
            with self.log.noting(ARM, name, "a rollback"):
                self.spoiled = [each.rms for each in sensitivity(self.target, plain, self._check)]

    def _arm(
        self, drafters: Sequence[Drafter], length: int | str, params: SamplingParams | None = None, note: str = ""
    ) -> AuditArm:
        name = "+".join(drafter.info.source for drafter in drafters)
        name = f"{name} ×{length}{note}" if drafters else "plain"
        return AuditArm(name, drafters, self.pair.state.controller(length, params, drafters))

    def _greedy_arms(self, number: int) -> Iterator[AuditArm]:
        """Plain decoding, the pair as configured, one way of drafting by turns, and the adversary."""
        drafters, is_quick = self.drafters, self.options.is_quick
        yield self._arm([], 0)
        if drafters:
            yield self._arm(drafters, self.options.draft_length, self.options.greedy)
            groups = [[each] for each in drafters] + [drafters] * (len(drafters) > 1)
            yield self._arm(groups[number % len(groups)], LENGTHS[number % len(LENGTHS)] or self.reach)
        for _ in range(1 if is_quick else 2):  # its answers take few passes, and there are many places for a rejection
            yield self._arm([self.adversary], self.reach)
        yield self._arm([NearMisses(self.target.n_vocab, 2)], 2)
        if self.context.can_branch and not (is_quick and number):
            # What is accepted lies in the branch; the chain is always wrong.
            beside = [NearMisses(self.target.n_vocab, 2), self.beside]
            yield AuditArm("branches", beside, FixedController(2, branches=self.reach))

    def _sampled_arms(self, number: int) -> Iterator[tuple[AuditArm, SamplingParams]]:
        """Without a seed, where the law is at stake, and with one, where every draw is known."""
        options, all_drafters = self.options, [*self.drafters, self.adversary]
        fresh = replace(options.sampled, max_tokens=SAMPLED_ANSWER * options.n_tokens, seed=None)
        if number % 3 == 2 and self.drafters:
            yield self._arm(self.drafters, options.draft_length, fresh), fresh
        else:
            # Models sample, one by turns; all others draft deterministically, as the adversary always does.
            sampling = all_drafters
            if models := self.pair.state.models:
                drafter = models[number % len(models)].drafter
                sampling = [HeatedDrafter(drafter) if number % 3 else drafter]
            yield self._arm(sampling, SAMPLED_LENGTH), fresh
        seed = ((options.sampled.seed or 11) + number) % 2**63
        seeded = replace(options.sampled, max_tokens=options.n_tokens, seed=seed)
        yield self._arm(all_drafters, SAMPLED_LENGTH, note=", seeded"), seeded

    def _think(self, plain: PlainAnswer, marks: ThinkingMarks) -> None:
        """Answers with a budget for thinking that is spent at once or soon; a bias opens the blocks."""
        mark = self.target.tokenize(marks.opening[0].replace(NAMED, ""), parse_special=True)
        with self.target.new_context(len(plain.prompt) + 1) as context:
            first = row_behind(context, plain.prompt, self._check)
        # Greedily the mark always comes, and at a temperature often: as often as the most probable token there.
        nearly = float(first.max() - first[mark[0]])
        openers = Openers(mark, self.reach)
        n_tokens = max(16, self.options.n_tokens // 2)
        for params, more, budget in (
            (self.options.greedy, 50.0, 0),
            (replace(self.options.sampled, seed=None), 0.0, 0),
            (replace(self.options.sampled, seed=None), 0.0, 3),
        ):
            bias = {**params.logit_bias, **dict.fromkeys(mark, min(nearly + more, HUGE))}
            params = replace(params, logit_bias=bias, max_tokens=n_tokens, ignore_eos=True)
            arm = self._arm([*self.drafters, openers], SAMPLED_LENGTH, note=f", {budget} tokens of thinking")
            self.thinking["answers"] += 1
            answer, reader = list[tuple[int, FloatArray | None]](), ThinkingReader(marks, budget=budget)
            with self.log.answering(arm.name, plain.name, sampled=not params.greedy) as tally:
                for round_, rows, _ in self._rounds(plain, 0, arm, params, tally, reader):
                    forced = round_.verdict.kind == "forced"  # the budget closes the block
                    self.thinking["closed"] += forced
                    seen = [None] * len(round_.emitted) if forced else list(rows)
                    answer += zip((token.id for token in round_.emitted), seen, strict=False)
            if params.greedy and answer:
                given = [token for token, _ in answer]
                text = plain_answer(self.target, plain.name, plain.prompt, params, len(given), self._check, given)
                for position, (token, row) in enumerate(answer):
                    if row is not None:
                        deviation = text.compared(position, row)
                        self.log.observations.append(Observation(arm.name, text, position, deviation, token))

    def _draw_from_verification(self) -> None:
        """Test the law of verification on the most telling windows."""
        chain, n_draws = self.options.sampled, self.options.n_draws
        params = SamplingParams(chain.temperature, chain.top_k, chain.top_p, chain.min_p)  # rows are edited already
        windows = sorted(self.windows, key=lambda window: -window.telling(params))[: self.options.n_windows]
        n_looks = len(windows) * len(KINDS) * n_draws / CHECKED_DRAWS
        self.law.examine(windows, params, n_draws, lambda: self._step("the law of verification", 1 / n_looks))

    # Answers of the running system: the pair's own decoder, context and drafters, with a ``Recorder`` that sees every
    # pass of the target. Decisions and the context are exact, and checked at once; rows are noted, and judged when all
    # is known.

    def _follow(self, plain: PlainAnswer, arm: AuditArm) -> None:
        """Answer greedily and compare every row and token with the plain answer; where the answer leaves that, it is
        put back on it, so every row is compared."""
        for drafter in arm.drafters:
            if isinstance(drafter, Adversary):
                drafter.know(plain.prompt, plain.tokens, [int(row.ids[1]) for row in plain.rows])
        with self.log.answering(arm.name, plain.name, sampled=False) as tally:
            position = 0
            while position < len(plain.tokens):
                position = self._follow_from(plain, position, arm, tally)

    def _follow_from(self, plain: PlainAnswer, start: int, arm: AuditArm, tally: ArmTally) -> int:
        """Follow the plain answer until it ends or is left; returns where to go on."""
        params, position = replace(plain.params, max_tokens=len(plain.tokens) - start), start
        for round_, rows, _ in self._rounds(plain, start, arm, params, tally):
            for row, token in zip(rows, round_.emitted, strict=False):
                if position == len(plain.tokens):
                    raise Defect("decision", arm.name, plain.name, None, "the answer goes on where it had to end")
                seen = Observation(arm.name, plain, position, plain.compared(position, row), token.id)
                self.log.observations.append(seen)
                tally.largest_deviation = max(tally.largest_deviation or 0.0, seen.deviation.rms)
                tally.differences += seen.differs
                position += 1
                if seen.differs:
                    return position
        if position < len(plain.tokens):
            evidence = f"the answer ends after {position} tokens; plain decoding says {len(plain.tokens)}"
            raise Defect("decision", arm.name, plain.name, position, evidence)
        return position

    def _sample(self, plain: PlainAnswer, arm: AuditArm, params: SamplingParams) -> None:
        """Answer the prompt at a temperature. Without a seed, bet that tokens follow their rows' distributions, and
        keep drafts and rows."""
        params = replace(params, ignore_eos=plain.params.ignore_eos)
        before: Distribution | None = None
        with self.log.answering(arm.name, plain.name, sampled=True) as tally:
            for round_, rows, laws in self._rounds(plain, 0, arm, params, tally):
                if params.seed is not None:
                    continue
                draft = round_.draft
                for at, token, p in zip((-1, *round_.verdict.accepted), round_.emitted, laws, strict=False):
                    q = next((law_of(draft[i].id, draft[i].dist) for i in draft.children(at)), None)
                    self.bets.observe(p, token.id, q, before)
                    before = p
                if len(draft) > 1 and not draft.branches:
                    settled = self.context.tokens[: round_.n_past + 1]
                    self.windows.append(Window.of(rows, draft, settled, params))

    def _rounds(
        self,
        plain: PlainAnswer,
        start: int,
        arm: AuditArm,
        params: SamplingParams,
        tally: ArmTally,
        thinking: ThinkingReader | None = None,
    ) -> Iterator[tuple[Round, FloatArray, list[Distribution]]]:
        """Rounds with checked decisions and context, the target's rows [k + 1, n_vocab], and the laws of the tokens."""
        recorder, settled, n_prompt = Recorder(), plain.before(start), len(plain.prompt)
        model = self.context.model

        def defect(kind: DefectKind, position: int, evidence: str, **details: float) -> Defect:
            return Defect(kind, arm.name, plain.name, position, evidence, details)

        decoder = SpeculativeDecoder(self.context, [recorder, *arm.drafters], arm.controller)
        decoder.prefill(settled, self._check)
        text = TextAssembler(model.vocab, (), thinking)
        for round_ in decoder.rounds(list(settled), params, text, cancelled=self._check):
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
                raise defect("decision", position, evidence, dropped=n_dropped)
            for row, token in zip(recorder.rows, round_.emitted, strict=False):
                if token.kind == "forced":  # the target was not asked
                    settled.append(token.id)
                    continue
                p = distribution(row, settled, params)
                right = token.id if params.seed is None else p.sample(Noise(params.seed), len(settled), STREAM_TARGET)
                right = p.argmax() if params.greedy else right
                if token.id != right:
                    rule = "the row computed for it says" if params.greedy else "the seed draws, from this row,"
                    edited = edit_logits(row, settled, params)
                    margin, position = float(edited[right]) - float(edited[token.id]), len(settled) - n_prompt
                    evidence = (
                        f"token {position} is {in_words(model, token.id)} where {rule} {in_words(model, right)}, whose "
                        f"logit differs by {margin:+.3g} ({how})"
                    )
                    raise defect("decision", position, evidence, said=token.id, right=right, margin=margin,
                                 drafted=n_draft)  # fmt: skip
                laws.append(p)
                settled.append(token.id)
            held, wanted = self.context.tokens, settled[:-1]
            if held != wanted:
                at = shared_prefix(held, wanted)
                evidence = (
                    f"after {how} the context holds {len(held)} tokens where {len(wanted)} are settled and decoded; "
                    f"they part at token {at}"
                )
                position = len(settled) - n_prompt
                raise defect("memory", position, evidence, held=len(held), wanted=len(wanted), first_difference=at)
            yield round_, recorder.rows, laws

    def _result(self, n_prompts: int, interrupted: bool, seconds: float) -> AuditResult:
        observations, noise, options = self.log.observations, self.noise, self.options
        bounds = noise.bounds(len(observations))
        judge = Judge(self.target, bounds, self.context.can_branch).judge(observations)
        spoiled = self.spoiled and {
            "tries": len(self.spoiled),
            "median": float(np.median(self.spoiled)),
            "smallest": min(self.spoiled),
            "found": bounds and float(np.mean([rms > bounds[0] for rms in self.spoiled])),
        }
        kept = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
        return AuditResult(
            interrupted=interrupted,
            model=self.llm.model_name,
            backend=self.target.backend,
            engine=self.target.engine,
            draft=self.pair.state.draft_names,
            exact=noise.exact,
            settings={
                "prompts": n_prompts,
                "tokens": options.n_tokens,
                "draft_length": options.draft_length,
                "longest_draft": self.reach,
                "sampling": {name: getattr(options.sampled, name) for name in kept},
            },
            seconds=round(seconds, 2),
            noise=noise.figures(len(observations)),
            # Greedy answers before sampled ones, the adversary's last.
            arms=sorted(
                self.log.arms.values(), key=lambda arm: (arm.sampled, arm.arm.startswith(("adversary", "near misses")))
            ),
            memory=asdict(self.rollbacks) if self.rollbacks.rollbacks else None,
            sensitivity=spoiled or None,
            verification_law=self.law.figures() if self.law.n_draws else None,
            decoding_law=self.bets.figures() if self.bets.n_tokens else None,
            samples=self.samples.figures() if self.samples.drawn or self.samples.sent else None,
            thinking=self.thinking if self.thinking["answers"] else None,
            several=None,
            ties=[tie_of(seen, self.target.vocab.display) for seen in judge.ties],
            rechecked={"rows": judge.n_rechecked, "explained": judge.n_explained},
            defects=[*self.log.defects, *self._general_defects(), *judge.defects],
        )

    def _general_defects(self) -> Iterator[Defect]:
        noise, samples, law, bets = self.noise, self.samples, self.law, self.bets
        if noise.contradicts_itself:
            evidence = (
                f"passes over several tokens compute other logits than passes over one: {noise.mean_kl:.2g} nats "
                f"apart on average, where rounding stays under {MAX_MEAN_KL:g}"
            )
            yield Defect("kernel", "fresh memories", None, None, evidence, {"kl": noise.mean_kl})
        for arm, tested, evidence in (
            ("samples of drafters", samples,
             f"what drafters send depends on what they drew: {samples.worst} ({samples.evidence:.3g} nats)"),
            ("verification", law,
             f"verification does not follow the target's law: {law.worst}; {law.bets.evidence:.3g} nats of evidence "
             f"that {law.bets.strongest}"),
            ("decoding at a temperature", bets,
             f"{bets.n_tokens} tokens at a temperature do not follow the target's law: {bets.evidence:.3g} nats of "
             f"evidence that {bets.strongest}"),
        ):  # fmt: skip
            if tested.rejected:
                yield Defect("law", arm, None, None, evidence, tested.figures())

    def _questions(self) -> list[tuple[str, list[int]]]:
        """Prompts that fit, name and tokens: the shortest of each category, the next of each, and so on."""
        room = self.context.n_ctx - SAMPLED_ANSWER * self.options.n_tokens - self.reach - 2
        before = [{"role": "system", "content": self.options.system}] if self.options.system else []
        chosen: list[tuple[str, list[int]]] = []
        questions = in_turns(own_questions(), short_first=True)
        n_categories = len({question.category for question in questions})
        order = sorted(range(len(questions)), key=lambda i: (i // n_categories, len(questions[i].turns[0])))
        for question in (questions[i] for i in order):
            tokens = self.llm.encode([*before, {"role": "user", "content": question.turns[0]}])
            if 1 < len(tokens) <= room:
                chosen.append((question.id, tokens))
            if len(chosen) == self.options.n_prompts:
                break
        if not chosen:
            raise UsageError(f"a context of {self.context.n_ctx} tokens is too small for the audit; raise --ctx")
        return chosen

    def _step(self, what: str, share: float = 1 / STEPS) -> Literal[False]:
        self._watch.report(what, min(1.0, self._done / self._total))
        self._done += share
        return False


def tie_of(seen: Observation, display: Callable[[int], str]) -> dict[str, Any]:
    ids = {"plain": seen.plain.rows[seen.position].best, "speculative": seen.token}
    return {
        "arm": seen.arm,
        "prompt": seen.plain.name,
        "position": seen.position,
        **{name: {"id": token, "text": display(token)} for name, token in ids.items()},
        "gap": seen.gap,
        "deviation": seen.deviation.rms,
    }
