"""What drafts that branch are worth, by what a row of the target's pass costs: simulated clocks, real decoding.

    python -m benchmarks.branching [--answers 12] [--tokens 120] [--curve NAME ...] [--temperature T ...]

Tiny models decode on the reference backend with the decoder, the draft model, the n-grams and the controller as they
are; only the clock is simulated: a pass takes what the curve says. Each answer is made plainly, with chains alone, and
with drafts that may branch, and the three texts must be the same (greedy; when sampling, the laws are). ``ik`` and
``avx512`` are curves measured on CPUs, ``flat`` is like a GPU's. The tiny draft model's first token is right two times
in three, as good drafts of real models are; how often its second is where the first is not depends on the models, and
is printed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import localspec.spec_decode.decoder
import localspec.spec_decode.drafters.draft_model
from benchmarks.replay_traces import CURVES as MEASURED
from localspec.backends import reference
from localspec.backends.base import Context
from localspec.controllers.acceptance import COPIED, GREEDY, MOST_PROBABLE, SAMPLE, SourceAcceptance
from localspec.controllers.auto import AutoController
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.fixed import FixedController
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Controller, Plan
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.rounds import Round
from tests.support import ggufs
from tests.support.simulator import GPU_LIKE, IK_LLAMA

CURVES: dict[str, Mapping[int, float]] = {"flat": GPU_LIKE, "ik": IK_LLAMA, "avx512": MEASURED["avx512"][0]}
N_CTX = 512


@dataclass
class Clock:
    """Stands in for ``time``: passes move it."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


def timed(context: Context, clock: Clock, times: Callable[[int], float]) -> Context:
    """The context, whose passes take what the curve says [ms] and no time else."""
    for name in ("_decode", "_decode_tree"):
        real = getattr(context, name)

        def run(tokens: Sequence[int], *rest: Any, real: Any = real) -> Any:
            clock.now += times(len(tokens)) / 1e3
            return real(tokens, *rest)

        setattr(context, name, run)
    return context


class Chains(AutoController):
    """As ``auto``, but that no draft branches."""

    def plan(self, room: int, n_past: int, **situation: Any) -> Plan:
        plan = super().plan(room, n_past, **situation)
        plan.branching = lambda: None  # type: ignore[method-assign]
        return plan


@dataclass
class Tally:
    """What an arm's answers came to."""

    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    @property
    def n_drafted(self) -> int:
        return sum(bool(round_.draft) for round_ in self.rounds)

    def share_branched(self) -> float:
        return sum(round_.draft.branches for round_ in self.rounds) / max(1, self.n_drafted)

    def length(self) -> float:
        return statistics.fmean(len(round_.emitted) for round_ in self.rounds)

    def beside(self) -> tuple[int, int, int]:
        """Tokens beside others; those whose turn came, the others being rejected; those accepted."""
        sent = judged = accepted = 0
        for round_ in self.rounds:
            draft, path = round_.draft, round_.verdict.accepted
            for at in range(-1, len(draft)):
                for rival in draft.children(at)[1:]:
                    sent += 1
                    reached = at == -1 or at in path
                    judged += reached and draft.children(at)[0] not in path
                    accepted += rival in path
        return sent, judged, accepted


class Pair:
    """The two tiny models, and what the arms have learned of them on one curve."""

    def __init__(self, files: ggufs.Pair, curve: Mapping[int, float], share: float) -> None:
        self.target, self.small = reference.load(files.target), reference.load(files.draft)
        self.curve, self.share = dict(curve), share
        self.clock = Clock()
        self.tables = {arm: self._tables() for arm in ("chains", "branches")}

    @staticmethod
    def _tables() -> dict[bool, tuple[dict[str, SourceAcceptance], dict[str, SourceAcceptance]]]:
        return {
            greedy: (
                {
                    "model": SourceAcceptance(GREEDY if greedy else MOST_PROBABLE),
                    "ngram": SourceAcceptance(COPIED),
                },
                {"model": SourceAcceptance(SAMPLE)},
            )
            for greedy in (True, False)
        }

    def _draft_ms(self, width: int) -> float:
        return self.curve[1] * self.share * (1 + 0.05 * (width - 1))

    def answer(self, arm: str, prompt: list[int], params: SamplingParams, tally: Tally) -> None:
        controller: Controller = FixedController(0)
        if arm != "plain":
            acceptance, sampled = self.tables[arm][params.greedy]
            draft_times = {"model": PassTimes({w: self._draft_ms(w) for w in (1, 2, 4, 8, 16, 64, 256)})}
            kind = Chains if arm == "chains" else AutoController
            controller = kind(PassTimes(dict(self.curve)), draft_times, acceptance, sampled)
        times = PassTimes(dict(self.curve))
        target = timed(self.target.new_context(N_CTX), self.clock, times)
        small = timed(self.small.new_context(N_CTX), self.clock, self._draft_ms)
        with target, small:
            decoder = SpeculativeDecoder(target, [NgramDrafter(), DraftModelDrafter(small)], controller)
            decoder.prefill(prompt, lambda: False)
            started = self.clock.now
            rounds = list(decoder.rounds(prompt, params, TextAssembler(self.target.vocab)))
            tally.seconds.append(self.clock.now - started)
            tally.rounds += rounds
            tally.texts.append([token.id for round_ in rounds for token in round_.emitted])


def measure(files: ggufs.Pair, curve: str, share: float, temperature: float, n_answers: int, n: int) -> str:
    """A line of the table: one curve, one cost of a draft token, one temperature."""
    pair, rng = Pair(files, CURVES[curve], share), np.random.default_rng(0)
    localspec.spec_decode.decoder.time = pair.clock  # type: ignore[assignment]
    localspec.spec_decode.drafters.draft_model.time = pair.clock  # type: ignore[assignment]
    params = SamplingParams(temperature=temperature, top_k=40, max_tokens=n, ignore_eos=True)
    tallies = {arm: Tally() for arm in ("plain", "chains", "branches")}
    for _ in range(n_answers):
        prompt = [int(token) for token in rng.integers(5, pair.target.n_vocab, 24)]
        for arm, tally in tallies.items():
            pair.answer(arm, prompt, params, tally)
    plain, chains, branches = tallies.values()
    if params.greedy:
        assert plain.texts == chains.texts == branches.texts, "the answers differ"
    speeds = [sum(plain.seconds) / sum(arm.seconds) for arm in (chains, branches)]
    sent, judged, accepted = branches.beside()
    return (
        f"| {curve} | {share:.2f} | {temperature:g} | {speeds[0]:.2f} | {speeds[1]:.2f} "
        f"| {speeds[1] / speeds[0]:.2f} | "
        f"{branches.share_branched():.0%} | {sent / max(1, branches.n_drafted):.2f} | "
        f"{accepted / max(1, judged):.2f} | {chains.length():.2f} | {branches.length():.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--curve", nargs="+", default=list(CURVES), choices=list(CURVES))
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    args = parser.parse_args()
    print(
        "| curve | draft token / t(1) | temperature | chains / plain | branches / plain | branches / chains "
        "| rounds that branch | tokens beside, a draft | right where the first is not | tokens a round | branching |"
    )
    print("|---" * 11 + "|")
    with tempfile.TemporaryDirectory() as folder:
        shape = ggufs.Shape(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.4)
        files = ggufs.correlated_pair(Path(folder), ggufs.bpe_vocab(300), shape=shape, name="quick")
        for curve in args.curve:
            for share in (0.06, 0.3):
                for temperature in args.temperature:
                    print(measure(files, curve, share, temperature, args.answers, args.tokens), flush=True)


if __name__ == "__main__":
    main()
