"""Drafting while the target verifies, against the ordinary order, on two devices that wait: beside the formula.

    python benchmarks/ahead.py [--ms T] [--tokens N] [--ratios T/D …] [--acceptance A …] [--lengths K …] [--repeats N]
                               [--cautious] [--json FILE]

A target whose passes take T ms and a draft whose steps take D (tests/support/waiting_engine.py: real threads, the real
clock, no computing), greedily, with drafts of a fixed length k. At each place the draft's most probable token is right
with probability A, each place for itself; where it is not, its second is in half of the cases. The cells are seconds of
the ordinary order over seconds with drafting ahead, the two in turns on the same text, medians over the repeats; then
the share of rounds whose draft had been prepared.

The formula: a round takes T + k·D in the ordinary order and T + (1 - h)·k·D ahead, and emits the same tokens, so the
speed-up is (T + k·D) / (T + (1 - h)·k·D). h is the probability of an outcome that there are steps for: of T/D steps,
an outcome takes k, and what comes after a draft accepted whole takes one more to know. Outcomes are taken in the order
of their probabilities, A^i·(1 - A)/2 for token i rejected and the draft's second in its place, A^k·A and A^k·(1 - A)/2
for all accepted and the draft's first or second. The last column is the bound that no preparing can pass, h = 1.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

from localspec.controllers.fixed import FixedController
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.ahead import DraftAhead
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.rounds import Round
from localspec.system.machine import cpu_name
from tests.support import ggufs
from tests.support.gguf_vocabs import bpe_vocab
from tests.support.waiting_engine import Timing, WaitingModel

SECOND = 0.5


def expected_hits(n_steps: float, acceptance: float, k: int) -> float:
    """The probability of an outcome that was prepared for, with so many draft steps beside a pass."""
    outcomes: list[tuple[float, str]] = []
    for i in range(k):
        heapq.heappush(outcomes, (-(acceptance**i) * (1 - acceptance) * SECOND, "draft"))
    heapq.heappush(outcomes, (-(acceptance**k), "read"))
    total = 0.0
    while outcomes and n_steps >= 1:
        negative, kind = heapq.heappop(outcomes)
        if kind == "read":
            n_steps -= 1
            heapq.heappush(outcomes, (negative * acceptance, "draft"))
            heapq.heappush(outcomes, (negative * (1 - acceptance) * SECOND, "draft"))
        else:  # one that is not finished counts by its part
            total -= negative * min(1.0, n_steps / k)
            n_steps -= k
    return total


def answer(
    files: ggufs.Pair, ms: float, step: float, acceptance: float, k: int, n: int, beside: DraftAhead | None
) -> list[Round]:
    """The rounds of one answer."""
    target = WaitingModel(files.target, Timing(ms))
    small = WaitingModel(files.draft, Timing(step, device="cpu", right=acceptance, second=SECOND))
    drafters = [DraftModelDrafter(small.new_context(n + 128))]
    decoder = SpeculativeDecoder(target.new_context(n + 128), drafters, FixedController(k), ahead=beside)
    prompt = [5, 6, 7]
    decoder.prefill(prompt, lambda: False)
    params = SamplingParams(max_tokens=n, ignore_eos=True)
    return list(decoder.rounds(prompt, params, TextAssembler(target.vocab, ())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ms", type=float, default=40.0)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--ratios", type=float, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.8, 0.9])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--cautious", action="store_true", help="leave some passes alone to see whether it pays, as always in use"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}; target {args.ms:g} ms a pass\n")
    print("| t/d | k | acceptance | measured | prepared | formula | prepared, by it | all prepared |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        shape = ggufs.Shape(n_layer=1, n_embd=8, n_head=1, n_head_kv=1, n_ff=8, n_ctx=8192)
        files = ggufs.correlated_pair(Path(folder), bpe_vocab(300), shape=shape)
        for ratio in args.ratios:
            for k in args.lengths:
                for acceptance in args.acceptance:
                    step = args.ms / ratio
                    speedups, hits = [], []
                    for _ in range(args.repeats):
                        seconds, texts = [], []
                        for ahead in (False, True):
                            started = time.perf_counter()
                            beside = DraftAhead(cautious=args.cautious) if ahead else None
                            rounds = answer(files, args.ms, step, acceptance, k, args.tokens, beside)
                            seconds.append(time.perf_counter() - started)
                            texts.append([token.id for round_ in rounds for token in round_.emitted])
                        assert texts[0] == texts[1]
                        speedups.append(seconds[0] / seconds[1])
                        hits.append(sum(round_.ahead.hit for round_ in rounds if round_.ahead) / len(rounds))
                    expected = expected_hits(ratio, acceptance, k)
                    formula, most = ((ratio + k) / (ratio + (1 - h) * k) for h in (expected, 1.0))
                    measured, hit = statistics.median(speedups), statistics.median(hits)
                    print(
                        f"| {ratio:g} | {k} | {acceptance:g} | {measured:.2f} | {hit:.0%} | {formula:.2f} "
                        f"| {expected:.0%} | {most:.2f} |",
                        flush=True,
                    )
                    results.append(
                        {"ratio": ratio, "k": k, "acceptance": acceptance, "measured": measured, "hits": hit}
                        | {"formula": formula, "expected_hits": expected, "all_prepared": most}
                    )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
