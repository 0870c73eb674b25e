"""The audit of a loaded pair, from the first plain answer to the report; see the package's docstring."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from localspec.commands.verify import judgement, memory, verification_law
from localspec.commands.verify.answers import Arm, System
from localspec.commands.verify.betting import Bets
from localspec.commands.verify.drafters import Adversary, HotDraftModel, NearMisses
from localspec.commands.verify.findings import Defect, Path, Stopped
from localspec.commands.verify.paths import Prompt, cuts, plain_path, prompts, wide_rows
from localspec.commands.verify.report import Report
from localspec.commands.verify.verification_law import Window
from localspec.commands.verify.width_noise import MIN_ROWS, WidthNoise
from localspec.controllers.auto_controller import MAX_DRAFT
from localspec.controllers.fixed import FixedController
from localspec.errors import LocalspecError, UsageError
from localspec.llm import LLM
from localspec.runtime.pair import Pair
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.base import Drafter

Watch = Callable[[str, float], None]
"""Progress: what is being done, and the fraction of the expected work that is done."""

LENGTHS = (3, 8, 0, 1, 5)
"""Forced draft lengths, in turns; 0 stands for the longest."""

SAMPLED_LENGTH = 3

SAMPLED_ANSWER = 2
"""Sampled answers without a seed are so many times as long: what they show grows with every token."""

STEPS = 11
"""Steps of a prompt, for the progress."""

MS_A_DRAW = 0.5


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """How much is audited, and with which settings.

    Attributes:
        n_prompts: questions; each is answered some six times.
        n_tokens: longest answer.
        greedy: penalties and biases of the greedy answers.
        sampled: the chain of the sampled ones; its temperature is over 0.
        draft_length: as the pair is going to be used.
        n_windows, n_draws: drafts that verification is asked about, and how often for each kind of guess.
        system: system prompt.
    """

    n_prompts: int
    n_tokens: int
    greedy: SamplingParams
    sampled: SamplingParams
    draft_length: int | str = "auto"
    n_windows: int = 4
    n_draws: int = 1000
    system: str | None = None


class Audit:
    """One audit of one pair, made and run within ``LLM.run``.

    Args:
        llm: the loaded pair, as its users have it.
        pair: its inside.
        options: see there.
        watch: takes the progress.
        cancelled: whether to stop after the current pass.
    """

    def __init__(
        self, llm: LLM, pair: Pair, options: AuditOptions, watch: Watch, cancelled: Callable[[], bool]
    ) -> None:
        self.llm, self.pair, self.options, self.watch = llm, pair, options, watch
        self._cancelled = cancelled
        self.target = self.pair.target
        length = options.draft_length
        self.reach = MAX_DRAFT if length == "auto" else max(MAX_DRAFT, int(length))
        self.adversary = Adversary(self.target.n_vocab, self.reach)
        self.noise = WidthNoise(self.target.capabilities.batch_invariant)
        self.system = System(self.pair, self._check)
        self.bets = Bets()
        self.windows: list[Window] = []
        self.paths: list[Path] = []
        self._law_ms = MS_A_DRAW * options.n_windows * options.n_draws * len(verification_law.KINDS)
        self._done = self._share = self._total = 0.0

    def run(self) -> Report:
        """Audit, as far as it is not cancelled.

        Raises:
            UsageError: no prompt fits into the context.
            EngineError: not even a fresh memory works.
        """
        started = time.perf_counter()
        questions = self._questions()
        report = Report(
            model=self.llm.model_name,
            backend=self.target.backend,
            engine=self.target.engine,
            draft=self.pair.draft_names,
            exact=self.noise.exact,
            settings=self._settings(len(questions)),
        )
        self._total = sum(self._expected_ms(tokens) for _, tokens in questions) + self._law_ms
        widths = _cycle(range(2, self.reach + 2))
        try:
            for number, (prompt, tokens) in enumerate(questions):
                before, self._share = self._done, self._expected_ms(tokens) / STEPS
                self._question(number, prompt, tokens, widths, report, f"prompt {number + 1} of {len(questions)}")
                self._done = before + STEPS * self._share
            self._share = 0.0
            report.verification_law = self._verification_law()
        except Stopped:
            report.interrupted = True
        self._judge(report)
        report.seconds = time.perf_counter() - started
        return report

    # -- steps ---------------------------------------------------------------------------------------------------

    def _question(
        self, number: int, prompt: Prompt, tokens: list[int], widths: Iterator[int], report: Report, what: str
    ) -> None:
        """Everything that is done with one prompt."""
        options, system = self.options, self.system
        # Every other answer goes on behind its end, so that there is enough text even where answers are short.
        greedy = replace(options.greedy, ignore_eos=number % 2 == 0)
        self._step(f"{what}: alone, token by token")
        path = plain_path(self.target, prompt.name, tokens, greedy, options.n_tokens, self._check)
        self.paths.append(path)
        self._step(f"{what}: passes of many widths")
        # Long and short passes over the prompt, by turns: see ``paths.cuts``.
        for lengths in cuts(len(tokens))[number % 2 :: 2]:
            wide_rows(self.target, path, greedy, lengths, widths, self.noise, self._check)
        for arm in self._greedy_arms(number):
            self._step(f"{what}: {arm.name}")
            system.follow(path, arm, greedy)
        sampled = replace(options.sampled, max_tokens=SAMPLED_ANSWER * options.n_tokens)
        self.adversary.know(tokens, [], [])
        for arm, params in self._sampled_arms(number, sampled):
            self._step(f"{what}: {arm.name}")
            system.sample(path, arm, params, self.bets, self.windows)
        if number < 2 and len(path.answer) > 2:
            self._step(f"{what}: rollbacks")
            report.memory.append(memory.probe(self.pair.context, path, greedy, self.reach, self._check))
        if number == 0:
            try:
                report.sensitivity = memory.sensitivity(self.target, path, greedy, self._check)
            except LocalspecError as error:
                system.defects.append(Defect("engine", memory.ARM, f"a rollback broke off: {error}", prompt.name))

    def _greedy_arms(self, number: int) -> Iterator[Arm]:
        """Plain decoding, the pair as it is going to be used, one way of drafting by turns, and the adversary."""
        drafters, length = self.pair.state.drafters, self.options.draft_length
        yield Arm("plain", [], FixedController(0))
        if drafters:
            yield Arm(f"{_names(drafters)} ×{length}", drafters, self.pair.controller(length, self.options.greedy))
            groups = [[each] for each in drafters]
            if len(drafters) > 1:
                groups.append(drafters)
            chosen, forced = groups[number % len(groups)], LENGTHS[number % len(LENGTHS)] or self.reach
            yield Arm(f"{_names(chosen)} ×{forced}", chosen, FixedController(forced, drafters=chosen))
        for _ in range(2):  # its answers take few passes, and there are many places for a rejection
            yield Arm(f"adversary ×{self.reach}", [self.adversary], FixedController(self.reach))
        yield Arm("near misses ×2", [NearMisses(self.target.n_vocab)], FixedController(2))

    def _sampled_arms(self, number: int, params: SamplingParams) -> Iterator[tuple[Arm, SamplingParams]]:
        """Without a seed, where the law is at stake, and with one, where every draw is known."""
        drafters = self.pair.state.drafters
        everybody = [*drafters, self.adversary]
        models = self.pair.state.models
        fresh = replace(params, seed=None)
        if number % 3 == 2 and drafters:
            length = self.options.draft_length
            yield Arm(f"{_names(drafters)} ×{length}", drafters, self.pair.controller(length, fresh)), fresh
        else:
            # A draft model samples its guesses; everybody else guesses deterministically, as the adversary always does.
            asked: list[Drafter] = everybody
            if models:
                asked = [HotDraftModel(models[0].context) if number % 3 else models[0].drafter]
            yield Arm(f"{_names(asked)} ×{SAMPLED_LENGTH}", asked, FixedController(SAMPLED_LENGTH)), fresh
        seeded = replace(params, max_tokens=self.options.n_tokens, seed=((params.seed or 11) + number) % 2**63)
        arm = Arm(f"{_names(everybody)} ×{SAMPLED_LENGTH}, seeded", everybody, FixedController(SAMPLED_LENGTH))
        yield arm, seeded

    def _verification_law(self) -> verification_law.VerificationLaw | None:
        """On the windows that tell most."""
        params, n_draws = self.options.sampled, self.options.n_draws
        windows = sorted(self.windows, key=lambda window: -window.telling(params))[: self.options.n_windows]
        n_trials = max(1, len(windows) * len(verification_law.KINDS) * n_draws)

        def check() -> None:
            self._share = self._law_ms * verification_law.CHECKED_DRAWS / n_trials
            self._step("the law of verification")

        return verification_law.examine(windows, params, n_draws, check) if windows else None

    def _judge(self, report: Report) -> None:
        """Turn what was observed into ties and defects."""
        runs = self.system.runs
        every = [*runs, *(each.run for each in report.memory)]
        n_tested = max(1, sum(len(run.observations) for run in every))
        report.noise = self.noise.as_dict(n_tested)
        report.runs, report.decoding_law = runs, self.bets if self.bets.n_tokens else None
        report.defects = [*self.system.defects, *(defect for each in report.memory for defect in each.defects)]
        if self.noise.contradicts_itself:
            evidence = (
                f"passes over several tokens compute other logits than passes over one: {self.noise.mean_kl:.2g} nats "
                f"apart on average, where rounding stays under {report.noise['mean_kl_limit']:g}"
            )
            report.defects.append(Defect("kernel", "fresh memories", evidence, details={"kl": self.noise.mean_kl}))
        if self.noise.exact or len(self.noise.deviations) >= MIN_ROWS:
            found = judgement.judge(
                self.target, every, self.noise.bounds(n_tested), self.options.greedy, self.system.name, lambda: None
            )
            report.defects += found.defects
            report.ties, report.n_rechecked, report.n_explained = found.ties, found.n_rechecked, found.n_explained
            report.tie_texts = [tie.as_dict(self.pair.token_text) for tie in found.ties]
        report.defects += self._broken_laws(report)

    def _broken_laws(self, report: Report) -> Iterator[Defect]:
        law = report.verification_law
        if law is not None and law.rejected:
            nats = law.bets.evidence
            evidence = f"verification does not follow the target's law: {law.worst}; {nats:.3g} nats of evidence that "
            yield Defect("law", "verification", evidence + law.bets.strongest, details=law.as_dict())
        if self.bets.rejected:
            evidence = (
                f"{self.bets.n_tokens} tokens at a temperature do not follow the target's law: "
                f"{self.bets.evidence:.3g} nats of evidence that {self.bets.strongest}"
            )
            yield Defect("law", "decoding at a temperature", evidence, details=self.bets.as_dict())

    # -- prompts, progress ---------------------------------------------------------------------------------------

    def _questions(self) -> list[tuple[Prompt, list[int]]]:
        """The prompts that fit, as tokens."""
        room = self.pair.context.n_ctx - SAMPLED_ANSWER * self.options.n_tokens - self.reach - 2
        chosen: list[tuple[Prompt, list[int]]] = []
        for prompt in prompts():
            messages = [{"role": "user", "content": prompt.text}]
            if self.options.system:
                messages.insert(0, {"role": "system", "content": self.options.system})
            tokens = self.llm.encode(messages)
            if 1 < len(tokens) <= room:
                chosen.append((prompt, tokens))
            if len(chosen) == self.options.n_prompts:
                break
        if not chosen:
            raise UsageError(f"a context of {self.pair.context.n_ctx} tokens holds no prompt of the audit; raise --ctx")
        return chosen

    def _settings(self, n_prompts: int) -> dict[str, Any]:
        chain = asdict(self.options.sampled)
        kept = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
        return {
            "prompts": n_prompts,
            "tokens": self.options.n_tokens,
            "draft_length": self.options.draft_length,
            "longest_draft": self.reach,
            "sampling": {name: chain[name] for name in kept},
        }

    def _expected_ms(self, tokens: list[int]) -> float:
        """Rough time of all that is done with a prompt."""
        times, n = self.pair.times, self.options.n_tokens
        drafted = sum(draft.times(1) for draft in self.pair.state.models)
        reading = 4 * len(tokens) * times(24) / 24 + len(tokens) * drafted / 6
        rounds = n / 2 * (times(SAMPLED_LENGTH + 1) + SAMPLED_LENGTH * drafted)
        return reading + 3 * n * times(1) + n * times(3) + 5 * rounds + n / 4 * times(self.reach + 1)

    def _step(self, what: str) -> None:
        self._check()
        self.watch(what, min(1.0, self._done / self._total))
        self._done += self._share

    def _check(self) -> None:
        if self._cancelled():
            raise Stopped


def _names(drafters: Sequence[Drafter]) -> str:
    return "+".join(drafter.source for drafter in drafters)


def _cycle(widths: range) -> Iterator[int]:
    """Every width, in an order that alternates wide and narrow, again and again."""
    order = list(widths)
    random.Random(3).shuffle(order)
    return itertools.cycle(order)
