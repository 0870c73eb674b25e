"""Replay the policy on recorded texts, with any machine's costs, in milliseconds: what every constant was chosen with.

    python benchmarks/replay_traces.py TRACES.json ... [--curve NAME ...] [--lengths 48 64 96 128 256] [--busy]
        [--learning] [--draft ngram recycled model] [--taught TRACES.json ...]

TRACES come from ``record_traces.py`` (with ``--prompts benchmarks/short_questions.jsonl``: 30 to 256 tokens each):
real texts, what each drafter would have guessed, and what became of it. Only the clock is simulated. An answer may end
anywhere, so each is cut at several lengths, and the ratio of its time to that of plain decoding is taken at each.
``--busy``: the machine is slower than calibrated, the target 2.2 times, a draft model 3.1 times, as measured beside a
program that takes 40 % of the CPUs. ``--learning`` keeps what was learned and saved from one answer to the next, in a
fixed random order; otherwise nothing is known before any answer. ``--draft`` names the drafters, in the order in which
they are asked: of greedy traces with their tokens also ``recycled``, which runs as it is; ``--taught`` has it learn the
answers of other traces first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record_traces import Spy
from localspec.backends.base import Forward
from localspec.controllers.acceptance import COPIED, GREEDY, MOST_PROBABLE, SAMPLE, SourceAcceptance
from localspec.controllers.auto_controller import AutoController
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.time_budget import TimeBudget
from localspec.sampling.sampling import Distribution, Noise, SamplingParams
from localspec.spec_decode.drafters.base import Drafter
from localspec.spec_decode.drafters.draft_model import MAX_ABRIDGED, MAX_COUNTERFACTUAL, N_HEAD, N_TAIL
from localspec.spec_decode.drafters.recycling import RecyclingDrafter
from localspec.spec_decode.proposer import SamplingProposer
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

OTHER_MS = 0.45
BUSY = (2.2, 3.1)
WIDEST = 7


class Replay:
    """One policy's state, which answers change.

    Args:
        target: t(w) of the target [ms].
        model: the same of the draft model.
        temperature: of the traces.
        busy: whether the machine is slower than calibrated.
        sources: the drafters, in the order in which they are asked.
        recycling: the drafter of ``recycled`` tokens, with what it has learned so far.
    """

    def __init__(
        self,
        target: Times,
        model: Times,
        temperature: float,
        busy: bool,
        sources: Sequence[str] = ("ngram", "model"),
        recycling: Drafter | None = None,
    ) -> None:
        self.real = PassTimes(dict(target)), PassTimes(dict(model))
        self.slower = BUSY if busy else (1.0, 1.0)
        self.temperature = temperature
        greedy = temperature == 0
        prior = {"model": GREEDY if greedy else MOST_PROBABLE}
        self.sources = {source: SourceAcceptance(prior.get(source, COPIED)) for source in sources}
        models = [source for source in sources if source == "model"]
        self.sampled = {source: SourceAcceptance(SAMPLE) for source in models}
        self.times, self.draft_times = PassTimes(dict(target)), {source: PassTimes(dict(model)) for source in models}
        self.recycling = recycling or RecyclingDrafter()
        self.budget = TimeBudget()

    def answer(self, trace: dict[str, Any], rng: np.random.Generator, noise: float = 0.04) -> np.ndarray:
        """Time at which each token was there [ms], divided by that of plain decoding [n]."""
        whole, short = (trace["sources"][name] for name in ("model", "abridged"))
        free = {source: trace["sources"].get(source) for source in self.sources if source != "model"}
        if "recycled" in free:
            free["recycled"] = recycled_trace(self.recycling, trace)
        n = len(whole["right"])
        controller = AutoController(self.times, self.draft_times, self.sources, self.sampled, WIDEST, self.budget)
        controller.begin(SamplingParams(temperature=self.temperature, top_k=40), trace["prompt_tokens"])
        done = np.zeros(n)
        position, now = 0, 0.0
        n_prompt = trace["prompt_tokens"]
        known: int | None = None  # tokens of the answer that the draft model has read; None: not the prompt
        model, ways = whole, [(n_prompt, whole)]
        if N_HEAD + N_TAIL * 5 // 4 < n_prompt <= MAX_ABRIDGED:
            ways.append((N_HEAD + N_TAIL, short))
        while position < n:
            plan = controller.plan(room=min(256, 2 * n) - position, n_past=64)
            draft, fates, ms_draft = Draft(), [], 0.0
            while plan.room > 0 and position + len(draft) < n:
                at = position + len(draft)
                guess = None
                for source, known_to in free.items():
                    confidence = known_to["confidence"][at]
                    if confidence < 0:
                        plan.nothing(source)
                        continue
                    expected = plan.keep(source, confidence)
                    if expected is not None:
                        guess = source, confidence, None, expected, known_to["right"][at]
                        break
                if guess is None and "model" in self.sources:
                    choices = ways if known is None else [(-known, model)]
                    for extra, trace_of in choices:
                        pending = at + 1 + extra
                        while plan.more("model", pending):
                            piece = plan.piece("model", pending) if hasattr(plan, "piece") else pending
                            ms = self.real[1](piece) * self.slower[1] * rng.normal(1, noise)
                            ms_draft += ms
                            plan.spent("model", piece, ms)
                            pending -= piece
                            if pending <= 0:
                                break
                        else:
                            continue
                        first = max(0, position - MAX_COUNTERFACTUAL, 0 if known is None else known)
                        if (pending := at + 1 + extra) > 2:
                            for i in range(first, position):
                                plan.counterfactual(
                                    "model", trace_of["confidence"][i], rng.random() < trace_of["right"][i]
                                )
                        model, known = trace_of, at + 1
                        confidence = model["confidence"][at]
                        sampled = self.temperature > 0 and plan.samples("model", confidence)
                        expected = plan.keep("model", confidence, sampled=sampled)
                        if expected is not None:
                            fate = model["sampled" if sampled else "right"][at]
                            law = Distribution(np.array([0, 1]), np.array([confidence, 1 - confidence]))
                            guess = "model", confidence, law if sampled else None, expected, fate
                        break
                if guess is None:
                    break
                source, confidence, law, expected, fate = guess
                draft.append(DraftToken(0, source, confidence, law, expected))
                fates.append(rng.random() < fate)
            accepted = fates.index(False) if False in fates else len(fates)
            ms_verify = self.real[0](len(draft) + 1) * self.slower[0] * rng.normal(1, noise)
            emitted = min(accepted + 1, n - position)
            tokens = [EmittedToken(0, "plain")] * emitted
            round_ = Round(0, draft, Verdict(accepted, 0, "plain"), tokens, ms_draft=ms_draft, ms_verify=ms_verify)
            controller.watch(row_of(max(1e-3, whole["certainty"][position + emitted - 1])))
            controller.update(round_)
            now += ms_draft + ms_verify + OTHER_MS
            done[position : position + emitted] = now
            position += emitted
            if known is not None:
                known = min(known, position)
        plain = (self.real[0](1) * self.slower[0] + 0.25) * np.arange(1, n + 1)
        return np.asarray(plain / done)


def recycled_trace(drafter: Drafter, trace: dict[str, Any]) -> dict[str, list[float]]:
    """What the drafter would have guessed at each place, learning from the target's rows as it goes."""
    tokens, found = list(trace["prompt"]), {"confidence": [], "right": []}
    proposer = SamplingProposer(SamplingParams(), Noise(0))
    drafter.begin(tokens)
    row = np.zeros((1, max(trace["answer"]) + 1), dtype=np.float32)
    for token in trace["answer"]:
        spy = Spy()
        guesses = drafter.draft(tokens, spy, proposer)
        found["confidence"].append(spy.confidence if guesses else -1.0)
        found["right"].append(float(bool(guesses) and guesses[0].id == token))
        row[0, token] = 1.0
        drafter.process(tokens[-1:], Forward(row))
        drafter.accept([token])
        row[0, token] = 0.0
        tokens.append(token)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--curve", nargs="+", default=list(CURVES), choices=list(CURVES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[48, 64, 96, 128, 256])
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--draft", nargs="+", default=["ngram", "model"], choices=["ngram", "recycled", "model"])
    parser.add_argument(
        "--taught", type=Path, nargs="*", default=[], help="traces that recycled tokens are learned from"
    )
    args = parser.parse_args()
    replays_tokens = "recycled" in args.draft
    taught = RecyclingDrafter()
    for path in args.taught:
        for trace in json.loads(path.read_text())["traces"]:
            recycled_trace(taught, trace)
    taught.begin([])  # which learns the last of them
    for path in args.traces:
        stored = json.loads(path.read_text())
        if replays_tokens and (stored["temperature"] or "answer" not in stored["traces"][0]):
            parser.error(f"{path}: recycled tokens are replayed on greedy traces that have their tokens")
        traces = [t for t in stored["traces"] if len(t["sources"]["model"]["right"]) >= min(args.lengths)]
        for curve in args.curve:
            found: dict[str, list[tuple[str, int, float]]] = {}
            for repeat in range(args.repeats):
                rng = np.random.default_rng(repeat)
                replay = Replay(*CURVES[curve], stored["temperature"], args.busy, args.draft, taught.clone(None))
                for i in rng.permutation(len(traces)):
                    trace = traces[i]
                    if not args.learning:
                        replay = Replay(
                            *CURVES[curve], stored["temperature"], args.busy, args.draft, taught.clone(None)
                        )
                    speeds = replay.answer(trace, rng)
                    cuts = sorted({min(length, len(speeds)) for length in args.lengths})
                    found.setdefault(trace["category"], []).extend((trace["id"], n, float(speeds[n - 1])) for n in cuts)
            print(f"{path.name} {curve}{' busy' if args.busy else ''}{' learning' if args.learning else ''}")
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
