"""How often drafters are right, by position in the draft and by kind of question, at every place of answers.

    python benchmarks/draft_acceptance.py [MODEL] [--draft NAME ...] [--set report] [--tokens 256] [--length 4]
        [--backend NAME] [--category NAME ...] [--json OUT] [--histograms] [--write-prior KIND CHOICE]
        [--traces TRACES.json:SOURCE ...]

The target answers plainly and greedily. Before each of its passes every drafter drafts, and nothing of that is sent:
so all are judged on the same text, at all places of it, those included at which no policy would ask them. "k right" is
the share of places at which the first k draft tokens are the answer's next k; where a drafter has none, it is not
right. The last places of an answer, fewer tokens from its end than a draft has, do not count. "step" is the median time
of its passes over that of a plain pass of the target; a step reads what the one before drafted, or what was said since.

``--histograms`` prints what is expected of a drafter before any evidence: how often a draft token with each confidence
is right, and how the confidences are distributed, by what they come after and by how certain the target is at that
place. ``--write-prior head greedy`` writes that, smoothed, into ``localspec/controllers/priors.json``, as prior of a
kind of drafter (``model``, ``carried``, ``head``, ``copy``) and a choice of its tokens (``greedy``, ``most_probable``,
``sample``). With ``--traces`` it comes of what ``record_traces.py`` recorded, and no model is loaded.

The speed that follows is measured by ``localspec bench``, whose arms take turns: all drafters but a head, all, a head
alone, a draft model alone, each on the 34 report questions with 256 tokens:

    localspec bench --full --repeats 1 --arm ngram+model:auto,auto,head:auto,model:auto --json greedy.json
        [--temperature 0.8] [--resume greedy.json]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import LLM, SamplingParams
from localspec.backends.base import Context, Forward
from localspec.controllers.acceptance import CERTAINTY_EDGES, HISTOGRAM_MEMORY, N_BINS, PRIORS, START, bin_of, leads_to
from localspec.controllers.fixed import FixedController
from localspec.engine.pair import Pair
from localspec.prompts.questions import SETS, of_categories, own_questions
from localspec.report.renderers import table
from localspec.sampling.sampling import top_probability
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Drafter, Plan, Proposer
from localspec.spec_decode.rounds import DraftToken, Round


class TimedPlan(Plan):
    """A draft of so many tokens; ``ms`` is what the passes for them took."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.ms: list[float] = []

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        self.ms.append(ms)


class Tally:
    """What became of draft tokens.

    Attributes:
        fates: tokens that were wrong and right, those before them being right, by bin of confidence.
        after: tokens by what they come after and by bin.
        where_certain: first tokens of drafts by the target's certainty and by bin.
    """

    def __init__(self) -> None:
        self.fates = np.zeros((2, N_BINS))
        self.after = np.zeros((3, N_BINS))
        self.where_certain = np.zeros((len(CERTAINTY_EDGES) + 1, N_BINS))

    def add(self, trace: dict[str, list[float]]) -> None:
        """Count what ``record_traces.py`` recorded of a draft model and an answer."""
        before = None
        for confidence, right, certainty in zip(trace["confidence"], trace["right"], trace["certainty"], strict=True):
            if confidence >= 0:
                at = bin_of(confidence)
                self.fates[:, at] += 1.0 - right, right
                self.where_certain[bisect_right(CERTAINTY_EDGES, certainty), at] += 1
                self.after[START, at] += 1
                if before is not None:  # as often as what it comes after was right
                    self.after[leads_to(before[0]), at] += before[1]
            before = (confidence, right) if confidence >= 0 else None


class Watched(Drafter):
    """Has a drafter draft in every round, keeps what it drafted, and sends nothing.

    Attributes:
        drafts: what it drafted, by how many tokens were settled.
        ms: time of its passes.
        tally: what became of them.
    """

    def __init__(self, drafter: Drafter, length: int) -> None:
        self._drafter, self._length = drafter, length
        self.info = drafter.info
        self.drafts: dict[int, list[int]] = {}
        self.confidences: dict[int, list[float]] = {}
        self.ms: list[float] = []
        self.tally = Tally()
        self._confidence: float | None = None

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        self.drafts, self.confidences = {}, {}
        self._drafter.begin(tokens, prediction=prediction, target=target)

    def process(self, tokens: Sequence[int], forward: Forward) -> None:
        if self._confidence is not None:  # it has drafted: this pass verifies
            certainty = bisect_right(CERTAINTY_EDGES, top_probability(forward.logits[-1]))
            self.tally.where_certain[certainty, bin_of(self._confidence)] += 1
        self._confidence = None
        self._drafter.process(tokens, forward)

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        mine, text, after = TimedPlan(self._length), list(tokens), START
        while mine.room > 0 and (found := self._drafter.draft(text, mine, proposer)):
            text += [token.id for token in found]
            for token in found:
                self._confidence = token.prob if after == START else self._confidence
                self.tally.after[after, bin_of(token.prob)] += 1
                self.confidences.setdefault(len(tokens), []).append(token.prob)
                after = leads_to(token.prob)
        self.drafts[len(tokens)] = text[len(tokens) :]
        if self.drafts[len(tokens)] and len(self.drafts) > 1:  # the first reads the prompt
            self.ms += mine.ms
        return []

    def accept(self, emitted: Sequence[int]) -> None:
        self._drafter.accept(emitted)

    def right(self, n_prompt: int, answer: Sequence[int]) -> list[int]:
        """At each place with a draft's length of tokens to come, how many draft tokens from the first are those [n]."""
        places = range(len(answer) - self._length)
        pairs = (zip(self.drafts.get(n_prompt + i, ()), answer[i:], strict=False) for i in places)
        return [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs]

    def count_fates(self, n_prompt: int, answer: Sequence[int]) -> None:
        """Take in what became of the drafts before an answer."""
        for i, n_right in enumerate(self.right(n_prompt, answer)):
            for k, confidence in enumerate(self.confidences.get(n_prompt + i, ())[: n_right + 1]):
                self.tally.fates[int(k < n_right), bin_of(confidence)] += 1


def watch(pair: Pair, watched: Sequence[Watched], prompt: list[int], n_tokens: int) -> list[Round]:
    """Answer plainly, drafting before every pass."""

    def failed(drafter: Drafter, why: str) -> None:
        raise SystemExit(f"{drafter.info.source} {why}")

    decoder = SpeculativeDecoder(pair.context, watched, FixedController(1), failed)
    decoder.prefill(prompt, lambda: False)
    text = TextAssembler(pair.target.vocab)
    return list(decoder.rounds(prompt, SamplingParams(max_tokens=n_tokens), text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", nargs="+", default=["auto"], help="as --draft of localspec, several at once")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--set", default="report", choices=SETS)
    parser.add_argument("--category", nargs="+", default=[], help="only these")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--length", type=int, default=4, help="of each draft")
    parser.add_argument("--histograms", action="store_true", help="print what is to be expected of the drafters")
    parser.add_argument("--write-prior", nargs=2, metavar=("KIND", "CHOICE"), help="of the first drafter")
    parser.add_argument("--traces", nargs="+", metavar="TRACES.json:SOURCE", help="what the prior is to come of")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.traces:
        tally = Tally()
        for path, source in (each.rsplit(":", 1) for each in args.traces):
            for trace in json.loads(Path(path).read_text())["traces"]:
                tally.add(trace["sources"][source])
        write_prior(tally, *args.write_prior)
        return
    right: dict[str, dict[str, list[int]]] = {}  # by drafter and category: tokens right, at each place
    plain_ms: list[float] = []
    with LLM(args.model, args.draft, backend=args.backend, remember=False, idle=False) as llm:
        watched = llm.run(lambda pair: [Watched(drafter, args.length) for drafter in pair.state.drafters])
        for question in of_categories(own_questions(args.set), args.category):
            prompt = llm.encode([{"role": "user", "content": question.turns[0]}])
            rounds = llm.run(lambda pair, prompt=prompt: watch(pair, watched, prompt, args.tokens))
            answer = [token.id for round_ in rounds for token in round_.emitted]
            plain_ms += [round_.ms_verify for round_ in rounds]
            for each in watched:
                found = each.right(len(prompt), answer)
                each.count_fates(len(prompt), answer)
                right.setdefault(each.source, {}).setdefault(question.category, []).extend(found)
            first = {each.source: f"{share(each.right(len(prompt), answer), 1):.2f}" for each in watched}
            print(question.id, len(answer), first, flush=True)
        engine = llm.backend_name
    plain = statistics.median(plain_ms)
    results: list[dict[str, Any]] = []
    for each in watched:
        step = statistics.median(each.ms) / plain if each.ms else 0.0
        places = right[each.source]
        for category, found in {"all": [n for group in places.values() for n in group], **places}.items():
            shares = [round(share(found, k), 4) for k in range(1, args.length + 1)]
            results.append(
                {"drafter": each.source, "category": category, "places": len(found), "right": shares, "step": step}
            )
    head = ["drafter", "question", "places", *(f"{k} right" for k in range(1, args.length + 1)), "step"]
    rows = [
        [r["drafter"], r["category"], str(r["places"]), *(f"{s:.3f}" for s in r["right"]), f"{r['step']:.3f}"]
        for r in results
    ]
    print(f"\n{args.model}, {engine}, a plain pass {plain:.1f} ms\n\n{table(head, rows, 2)}")
    for each in watched if args.histograms else ():
        print(f"\n{each.source}: tokens judged by bin of confidence, and the share that was right")
        judged = each.tally.fates.sum(axis=0)
        print(*(f"{n:.0f}" for n in judged), "\n" + _shares(each.tally.fates[1], judged))
        for title, counts in (
            ("by what it comes after", each.tally.after),
            ("where certain", each.tally.where_certain),
        ):
            print(f"{title} (tokens: {', '.join(f'{n:.0f}' for n in counts.sum(axis=1))})")
            for row in counts:
                print(_shares(row, row.sum()))
    if args.write_prior:
        write_prior(watched[0].tally, *args.write_prior)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "engine": engine, "ms": plain, "rows": results}) + "\n")


def write_prior(tally: Tally, kind: str, choice: str) -> None:
    """Replace one prior; half a token more in each bin keeps shares of bins that were not seen above 0."""
    priors = json.loads(PRIORS.read_text())
    wrong, right = tally.fates
    tables = {"histograms": tally.after, "where_certain": tally.where_certain}
    prior = priors.setdefault(kind, {}).setdefault(choice, {"drift": HISTOGRAM_MEMORY})
    prior |= {"acceptance": np.round((right + 0.5) / (wrong + right + 1.0), 3).tolist()} | {
        name: np.round((counts + 0.5) / (counts + 0.5).sum(axis=1, keepdims=True), 3).tolist()
        for name, counts in tables.items()
    }
    text = json.dumps(priors, indent=2)
    PRIORS.write_text(re.sub(r"\[\s+([\d.,\s]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text) + "\n")


def _shares(counts: npt.NDArray[np.float64], of: npt.NDArray[np.float64] | float) -> str:
    return "(" + ", ".join(f"{x:.2f}" for x in counts / np.maximum(of, 1)) + ")"


def share(right: Sequence[int], k: int) -> float:
    """Share of the places at which at least ``k`` draft tokens are right."""
    return sum(n >= k for n in right) / len(right)


if __name__ == "__main__":
    main()
