"""Is one conversation as fast with ``--parallel N`` as without, where nobody else asks anything?

    python benchmarks/lone.py [MODEL] [--draft NAME ...] [--backend NAME] [--parallel 4] [--resting 3] [--tokens 24]
        [--seconds 100]

Three loaded models answer the same short chats in turns of a few tokens, so that each meets the same machine: one that
answers one request at a time, one with a memory of several conversations that is emptied before each chat, and one in
whose memory others of 480 tokens rest that ended before. Greedy, the decoding alone, nothing done in idle time. The
first round of chats is not counted.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial

from benchmarks.load import CONTEXT, QUESTIONS, long_text
from localspec import LLM, SamplingParams
from localspec.engine.pair import Pair

RESTING = 480


def forget(pair: Pair, shorter_than: int) -> None:
    """Have the memory of several hold no conversation of fewer tokens."""
    batch = pair.state.batch
    assert batch is not None
    for i in range(batch.n_sequences):
        if batch[i].n_past < shorter_than:
            batch[i].truncate(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", action="append")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--resting", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=100.0)
    options = parser.parse_args()
    names = {"one at a time": 1, "several, empty": options.parallel, "several, others rest": options.parallel}
    ways, counts = list(names), {name: Counter[str]() for name in names}
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    with ExitStack() as opened:
        llms = {
            name: opened.enter_context(
                LLM(
                    options.model,
                    options.draft or "auto",
                    backend=options.backend,
                    n_ctx=CONTEXT,
                    idle=False,
                    remember=False,
                    parallel=n,
                )
            )
            for name, n in names.items()
        }
        rng = random.Random(0)
        for _ in range(options.resting):
            llm = llms["several, others rest"]
            llm.generate(llm.tokenize(long_text(rng))[:RESTING], SamplingParams(temperature=0, max_tokens=1))
        started, n = time.monotonic(), 0
        while n < 2 * len(QUESTIONS) or time.monotonic() - started < options.seconds:
            messages = [{"role": "user", "content": QUESTIONS[n % len(QUESTIONS)]}]
            for name in ways[n % 3 :] + ways[: n % 3]:
                if name != ways[0]:  # else chats would take the places of those that rest
                    forgotten = RESTING if name == ways[2] else CONTEXT + 1
                    llms[name].run(partial(forget, shorter_than=forgotten))
                stats = llms[name].chat(messages, params).stats
                if n >= len(QUESTIONS):
                    counts[name].update(
                        tokens=stats.completion_tokens,
                        rounds=stats.num_rounds,
                        drafted=stats.num_draft_tokens,
                        target_us=round(stats.seconds_verify * 1e6),
                        draft_us=round(stats.seconds_draft * 1e6),
                        other_us=round(stats.seconds_other * 1e6),
                    )
            n += 1
    print("| | tokens/s | of one at a time | rounds | drafted | ms a round: target | drafting | other |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    speeds = {
        name: count["tokens"] / sum(count[f"{what}_us"] for what in ("target", "draft", "other")) * 1e6
        for name, count in counts.items()
    }
    for name, count in counts.items():
        times = " | ".join(
            f"{count[f'{what}_us'] / count['rounds'] / 1e3:.2f}" for what in ("target", "draft", "other")
        )
        of_one = speeds[name] / speeds[ways[0]]
        print(f"| {name} | {speeds[name]:.2f} | {of_one:.3f} | {count['rounds']} | {count['drafted']} | {times} |")


if __name__ == "__main__":
    main()
