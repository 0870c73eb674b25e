"""Replay the policy on recorded texts, with any machine's costs, in milliseconds: what every constant was chosen with.

    python benchmarks/replay_traces.py TRACES.json ... [--curve NAME ...] [--lengths 48 64 96 128 256] [--busy]
        [--learning] [--draft ngram head model] [--model-cost SHARE SHARE]

TRACES come from ``record_traces.py`` (with ``--prompts benchmarks/short_questions.jsonl``: 30 to 256 tokens each):
real texts, what each drafter would have guessed, and what became of it. Only the clock is simulated. An answer may end
anywhere, so each is cut at several lengths, and the ratio of its time to that of plain decoding is taken at each.
``--busy``: the machine is slower than calibrated, the target 2.2 times, a draft model 3.1 times, as measured beside a
program that takes 40 % of the CPUs. ``--learning`` keeps what was learned and saved from one answer to the next, in a
fixed random order; otherwise nothing is known before any answer. ``--draft`` names the drafters, in the order in which
they are asked. ``head`` is in traces recorded with ``--head``, ``model2`` in those with two draft models:
``--model-cost`` is what a pass of it over one token takes of the first one's time, and over more. "sent" are draft
tokens in all answers, "accepted" those of them that were.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from localspec.controllers.acceptance import SourceAcceptance, prior_of
from localspec.controllers.auto import AutoController
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.learned import TimeBudget
from localspec.heads.trained import MAX_STATES
from localspec.sampling.sampling import Distribution, SamplingParams
from localspec.spec_decode.drafters.base import DrafterInfo, Plan
from localspec.spec_decode.rounds import Draft, DraftToken, EmittedToken, Round, Verdict
from tests.support.simulator import row_of

Times = dict[int, float]
CURVES: dict[str, tuple[Times, Times]] = {
    "avx2": (
        {1: 57, 2: 65, 3: 71, 4: 80, 5: 99, 6: 109, 7: 116, 8: 150, 10: 177, 12: 201, 16: 270},
        {1: 17.1, 2: 22, 4: 34.7, 8: 64.5, 16: 110, 64: 284, 128: 556},
    ),
    "avx512": (
        {1: 31.7, 2: 39.7, 3: 51.2, 4: 62.5, 5: 71.3, 6: 81.7, 7: 83.4, 8: 97.2, 10: 123.3, 12: 137.2, 16: 187.4},
        {1: 9.0, 2: 12.5, 4: 20, 8: 35, 16: 62, 64: 185, 128: 365},
    ),
}
"""t(w) of Qwen2.5-Coder 1.5B and, with guesses made of its logits, of the 0.5B in Q4_0, on two machines [ms]."""

HEAD_SHARES = {1: 0.08, 2: 0.1, 3: 0.13, 4: 0.17, 8: 0.3, 16: 0.39, 64: 0.95}
"""A head's reading of so many tokens over a pass of the target over one, as measured for the head that shipped: its
rows, the engine's pass, and the logits of the last."""

OTHER_MS = 0.45
STATES_MS = 0.3
"""What a pass takes longer where it hands out the states that a head reads: 0.17 to 0.4 ms on both engines."""

BUSY = (2.2, 3.1)
WIDEST = 7


class Guess(NamedTuple):
    """A draft token, and how likely it is accepted if those before it are."""

    token: DraftToken
    fate: float


class Source(Protocol):
    """A drafter of one answer."""

    def ask(self, plan: Plan, position: int, at: int) -> Guess | None:
        """Draft the answer's token ``at``, ``position`` of which are settled."""


class FreeSource:
    """A drafter that costs nothing."""

    def __init__(self, name: str, trace: dict[str, list[float]]) -> None:
        self.name, self.trace = name, trace

    def ask(self, plan: Plan, position: int, at: int) -> Guess | None:
        confidence = self.trace["confidence"][at]
        if confidence < 0:
            plan.nothing(self.name)
            return None
        expected = plan.keep(self.name, confidence)
        if expected is None:
            return None
        return Guess(DraftToken(0, self.name, confidence, None, expected), self.trace["right"][at])


class ModelSource:
    """What drafts by passes.

    Args:
        name: of the drafter.
        step: takes a pass over so many tokens; returns its time [ms].
        rng: for fates that are probabilities.
        is_sampled: whether draft tokens may be samples.
    """

    def __init__(self, name: str, step: Callable[[int], float], rng: np.random.Generator, is_sampled: bool) -> None:
        self.name, self.step, self.rng, self.is_sampled = name, step, rng, is_sampled

    def read(self, plan: Plan, n_tokens: int) -> None:
        plan.spent(self.name, n_tokens, self.step(n_tokens))

    def propose(self, plan: Plan, trace: dict[str, Any], at: int) -> Guess | None:
        confidence = trace["confidence"][at]
        if confidence < 0:
            return None
        sampled = self.is_sampled and plan.samples(self.name, confidence)
        expected = plan.keep(self.name, confidence, sampled=sampled)
        if expected is None:
            return None
        n_rest = int(1 / confidence) + 1  # none of them is as probable
        law = Distribution(np.arange(n_rest + 1), np.array([confidence, *[(1 - confidence) / n_rest] * n_rest]))
        token = DraftToken(0, self.name, confidence, law if sampled else None, expected)
        return Guess(token, trace["sampled" if sampled else "right"][at])


class DraftModelSource(ModelSource):
    """A draft model: it reads the prompt when that pays."""

    def __init__(self, trace: dict[str, Any], name: str, *args: Any) -> None:
        super().__init__(name, *args)
        self.n_prompt = trace["prompt_tokens"]
        self.trace = trace["sources"][name]
        self.steps = self.trace.get("steps")  # of one with another vocabulary
        self.known: int | None = None  # tokens of the answer that it has read; None: not the prompt
        self.position = 0

    def ask(self, plan: Plan, position: int, at: int) -> Guess | None:
        if self.known is not None and position != self.position:
            self.known = min(self.known, position)
        self.position = position
        left = at + 1 + (self.n_prompt if self.known is None else -self.known)
        while left > 0 and (piece := plan.more(self.name, left)):
            self.read(plan, piece)
            left -= piece
        if left > 0:
            return None
        for _ in range(self.steps[at] - 1 if self.steps else 0):
            self.read(plan, 1)
        self.known = at + 1
        return self.propose(plan, self.trace, at)


class HeadSource(ModelSource):
    """A chained head: see ``drafters.head``, of which this is the bookkeeping."""

    def __init__(self, trace: dict[str, Any], *args: Any) -> None:
        super().__init__("head", *args)
        found = trace["sources"]["head"]
        self.by_depth = [{name: found[name][depth] for name in found} for depth in range(len(found["right"]))]
        self.n_prompt = trace["prompt_tokens"]
        self.n_read = 0  # tokens of the text
        self.position, self.n_drafted = -1, 0

    def ask(self, plan: Plan, position: int, at: int) -> Guess | None:
        n_text, depth = self.n_prompt + position, at - position
        is_new = position != self.position
        n_unread = min(max(1, n_text - 1 - self.n_read), MAX_STATES) if is_new else 0
        n_drafted = 0 if is_new else self.n_drafted
        n_rows = n_unread + depth - n_drafted
        if depth >= len(self.by_depth) or not n_rows or not plan.more(self.name, n_rows):
            return None
        if is_new:
            self.read(plan, n_unread)
            self.position, self.n_read = position, n_text - 1
        for _ in range(n_drafted, depth):
            self.read(plan, 1)
        self.n_drafted = depth
        return self.propose(plan, self.by_depth[depth], at)


class Replay:
    """One policy's state, which answers change.

    Args:
        target: t(w) of the target [ms].
        model: the same of the draft model.
        temperature: of the traces.
        busy: whether the machine is slower than calibrated.
        sources: the drafters, in the order in which they are asked.
        rate: of the head's first draft tokens, as its card says.
        model_cost: of ``model2`` over that of ``model``, for one token and for more.
        passes: of draft models with another vocabulary, for a draft token on average.
        right: share of a drafter's right tokens that are right in this replay too, whatever their confidences say.

    Attributes:
        sent, accepted: draft tokens by drafter.
        n_passes: of the target.
    """

    def __init__(
        self,
        target: Times,
        model: Times,
        temperature: float,
        busy: bool,
        sources: Sequence[str] = ("ngram", "model"),
        rate: float | None = None,
        model_cost: Sequence[float] = (1.0, 1.0),
        passes: Mapping[str, float] = MappingProxyType({}),
        right: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        head = {width: share * target[1] for width, share in HEAD_SHARES.items()}
        second = {width: model_cost[width > 1] * ms for width, ms in model.items()}
        curves = {"head": head, "model": model, "model2": second}
        curves = {name: curve for name, curve in curves.items() if name in sources}
        slower = BUSY if busy else (1.0, 1.0)
        self.real_target, self.slower = PassTimes(dict(target)), slower[0]
        self.real = {name: PassTimes({w: slower[1] * ms for w, ms in curve.items()}) for name, curve in curves.items()}
        self.temperature, self.right = temperature, right

        self.infos = {
            name: DrafterInfo(
                name,
                runs_model=name in curves,
                as_text=name in passes,
                passes=passes.get(name, 1.0),
                taps=("norm",) if name == "head" else (),
                rate=rate if name == "head" else None,
            )
            for name in sources
        }

        def table(info: DrafterInfo, *, sampled: bool = False) -> SourceAcceptance:
            return SourceAcceptance(prior_of(info, greedy=temperature == 0, sampled=sampled))

        self.sources = {name: table(info) for name, info in self.infos.items()}
        samplers = {name: info for name, info in self.infos.items() if info.runs_model and not info.as_text}
        self.sampled = {name: table(info, sampled=True) for name, info in samplers.items()}
        self.times, self.draft_times = PassTimes(dict(target)), {n: PassTimes(dict(c)) for n, c in curves.items()}
        self.other_ms = OTHER_MS + (STATES_MS if "head" in sources else 0.0)
        self.budget = TimeBudget()
        self.sent, self.accepted, self.n_passes = Counter[str](), Counter[str](), 0

    def answer(self, trace: dict[str, Any], rng: np.random.Generator, noise: float = 0.04) -> np.ndarray:
        """Time at which each token was there [ms], divided by that of plain decoding [n]."""
        certainty = trace["sources"]["model"]["certainty"]
        n, ms_draft = len(certainty), 0.0

        def step(times: PassTimes, width: int) -> float:
            nonlocal ms_draft
            ms = times(width) * rng.normal(1, noise)
            ms_draft += ms
            return ms

        sources: dict[str, Source] = {}
        for name in self.sources:
            args = partial(step, self.real.get(name)), rng, self.temperature > 0 and name in self.sampled
            if name == "head":
                sources[name] = HeadSource(trace, *args)
            elif name in ("model", "model2"):
                sources[name] = DraftModelSource(trace, name, *args)
            else:
                sources[name] = FreeSource(name, trace["sources"][name])
        params = SamplingParams(temperature=self.temperature, top_k=40)
        passes = {name: info.passes for name, info in self.infos.items() if info.as_text}
        controller = AutoController(
            self.times, self.draft_times, self.sources, self.sampled, WIDEST, self.budget, passes=passes, params=params
        )
        done = np.zeros(n)
        position, now = 0, 0.0
        while position < n:
            plan = controller.plan(room=min(256, 2 * n) - position, n_past=64)
            draft, fates, ms_draft = Draft(), [], 0.0
            while plan.room > 0 and position + len(draft) < n:
                at = position + len(draft)
                guesses = (sources[name].ask(plan, position, at) for name in sources)
                guess = next((guess for guess in guesses if guess is not None), None)
                if guess is None:
                    break
                draft.append(guess.token)
                fates.append(rng.random() < guess.fate * self.right.get(guess.token.source, 1.0))
            self.n_passes += 1
            accepted = fates.index(False) if False in fates else len(fates)
            self.sent.update(token.source for token in draft)
            self.accepted.update(token.source for token in draft[:accepted])
            ms_verify = self.real_target(len(draft) + 1) * self.slower * rng.normal(1, noise)
            emitted = min(accepted + 1, n - position)
            tokens = [EmittedToken(0, "plain")] * emitted
            round_ = Round(0, draft, Verdict(accepted, 0, "plain"), tokens, ms_draft=ms_draft, ms_verify=ms_verify)
            controller.observe(round_, row_of(max(1e-3, certainty[position + emitted - 1])))
            controller.learn(round_)
            now += ms_draft + ms_verify + self.other_ms
            done[position : position + emitted] = now
            position += emitted
        plain = (self.real_target(1) * self.slower + 0.25) * np.arange(1, n + 1)
        return np.asarray(plain / done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--curve", nargs="+", default=list(CURVES), choices=list(CURVES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[48, 64, 96, 128, 256])
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--draft", nargs="+", default=["ngram", "model"], choices=["ngram", "head", "model", "model2"])
    parser.add_argument(
        "--model-cost", type=float, nargs=2, default=(1.0, 1.0), help="of model2: a token, and more at a time"
    )
    args = parser.parse_args()
    for path in args.traces:
        stored = json.loads(path.read_text())
        traces = [t for t in stored["traces"] if len(t["sources"]["model"]["right"]) >= min(args.lengths)]
        for curve in args.curve:
            found: dict[str, list[tuple[str, int, float]]] = {}
            sent, accepted, n_tokens, n_passes = Counter[str](), Counter[str](), 0, 0
            for repeat in range(args.repeats):
                rng = np.random.default_rng(repeat)
                replay = None
                for i in rng.permutation(len(traces)):
                    trace = traces[i]
                    if replay is None or not args.learning:
                        replay = Replay(
                            *CURVES[curve],
                            stored["temperature"],
                            args.busy,
                            args.draft,
                            stored.get("rates", {}).get("head"),
                            args.model_cost,
                            stored.get("passes", {}),
                        )
                    speeds = replay.answer(trace, rng)
                    sent.update(replay.sent)
                    accepted.update(replay.accepted)
                    n_tokens, n_passes = n_tokens + len(speeds), n_passes + replay.n_passes
                    replay.n_passes = 0
                    replay.sent.clear()
                    replay.accepted.clear()
                    cuts = sorted({min(length, len(speeds)) for length in args.lengths})
                    found.setdefault(trace["category"], []).extend((trace["id"], n, float(speeds[n - 1])) for n in cuts)
            print(f"{path.name} {curve}{' busy' if args.busy else ''}{' learning' if args.learning else ''}")
            print("  " + ", ".join(f"{name}: sent {n}, accepted {accepted[name]}" for name, n in sent.items()))
            print(f"  {n_tokens / n_passes:.2f} tokens a pass of the target")
            everything = [row for rows in found.values() for row in rows]
            for name, rows in [*sorted(found.items()), ("all", everything)]:
                values = [value for _, _, value in rows]
                full = {key: value for key, _, value in rows}  # the last cut of each: its whole length
                low = sorted(rows, key=lambda row: row[2])[:3]
                under = sum(value < 0.97 for value in values)
                print(
                    f"  {name:10} whole {statistics.median(full.values()):.3f}  cut {statistics.median(values):.3f}"
                    f"  mean {statistics.fmean(values):.3f}  under 0.97: {under:2} of {len(values):3}  lowest "
                    + ", ".join(f"{key}@{n} {value:.3f}" for key, n, value in low)
                )


if __name__ == "__main__":
    main()
