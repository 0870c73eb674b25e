"""Plain decoding against ``auto`` and a fixed draft length, on the same prompts in the same run.

    python benchmarks/speed.py [MODEL] [--draft NAME ...] [--backend NAME] [--tokens N] [--repeats N] [--temperature T]

For every prompt the arms take turns, and the order is reversed in every other repeat. Speed is tokens per second of
decoding (drafting, passes and our own code; the draft model's reading of the prompt counts as drafting, the target's
reading is the same in every arm and does not count). Printed are the median ratio to plain decoding of the same repeat
for each prompt, and the medians over the prompts. ``localspec bench`` will replace this script.
"""

from __future__ import annotations

import argparse
import platform
import statistics

from localspec import LLM, SamplingParams
from localspec.backends.machine import cpu_name

PROMPTS = {
    "code": "Write a Python class for a bounded LRU cache with get, put and a hit counter, with docstrings.",
    "edit": "Rename the variable `tmp` to `total` and add type hints. Return the whole code.\n\n"
    "def mean(xs):\n    tmp = 0\n    for x in xs:\n        tmp = tmp + x\n    if len(xs) == 0:\n        return 0\n"
    "    return tmp / len(xs)\n\ndef spread(xs):\n    tmp = mean(xs)\n    return sum((x - tmp) ** 2 for x in xs)\n",
    "chat": "I moved to a new city and find it hard to meet people. What would you suggest?",
    "extract": "Give name, age and city of each person as a JSON list.\n\nMara Lindt, who is 34, left Graz for Oslo in "
    "spring. Her neighbour Tom Abara (51) stayed in Graz. In Oslo she shares a flat with Ida Berg, 29.",
    "maths": "A train covers 180 km in 2 h 15 min, then 90 km in 45 min. What is its mean speed? Show each step.",
    "translate": "Translate into French: The museum opens at nine, but the garden behind it is open all night.",
    "summarise": "Summarise in two sentences: Honeybees tell one another where food is by a dance. The angle of the "
    "dance to the vertical gives the direction relative to the sun, its length the distance. Other bees follow the "
    "dancer in the dark of the hive and read the dance by touch. On cloudy days they use polarised light instead.",
    "creative": "Begin a short story about a lighthouse keeper who finds a door in the rock.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", action="append")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--fixed", type=int, default=4)
    parser.add_argument("--only", action="append", choices=PROMPTS, help="these prompts only")
    args = parser.parse_args()
    params = SamplingParams(
        temperature=args.temperature,
        top_k=40 if args.temperature else 0,
        max_tokens=args.tokens,
        ignore_eos=True,
    )
    arms: dict[str, dict[str, object]] = {
        "plain": {"speculate": False},
        "auto": {"draft_length": "auto"},
        f"fixed {args.fixed}": {"draft_length": args.fixed},
    }
    with LLM(args.model, args.draft or "auto", backend=args.backend, n_ctx=1024) as llm:
        print(
            f"{cpu_name()}, Python {platform.python_version()}, {llm.engine}, {args.model}, drafters {llm.draft_names}"
        )
        print(f"{args.tokens} tokens, temperature {args.temperature}, {args.repeats} repeats")
        print(
            f"{'':10} {'plain tok/s':>11} "
            + " ".join(f"{arm:>8} x" for arm in list(arms)[1:])
            + "   accepted, length (auto)"
        )
        ratios: dict[str, list[float]] = {arm: [] for arm in arms}
        for name in args.only or PROMPTS:
            prompt = PROMPTS[name]
            speeds: dict[str, list[float]] = {arm: [] for arm in arms}
            note = ""
            for repeat in range(args.repeats):
                order = list(arms) if repeat % 2 == 0 else list(arms)[::-1]
                for arm in order:
                    llm._call(lambda: [context.truncate(0) for _, context in llm._pair._models.values()])
                    stats = llm.chat([{"role": "user", "content": prompt}], params, **arms[arm]).stats
                    speeds[arm].append(stats["tokens_per_second"])
                    if arm == "auto":
                        note = f"{stats['acceptance_rate']:.2f}, {stats['mean_acceptance_length']:.2f}"
            for arm in arms:
                pairs = zip(speeds[arm], speeds["plain"], strict=True)
                ratios[arm].append(statistics.median(speed / plain for speed, plain in pairs))
            row = " ".join(f"{ratios[arm][-1]:>10.2f}" for arm in list(arms)[1:])
            print(f"{name:10} {statistics.median(speeds['plain']):>11.1f} {row}   {note}", flush=True)
        row = " ".join(f"{statistics.median(ratios[arm]):>10.2f}" for arm in list(arms)[1:])
        print(f"{'median':10} {'':>11} {row}")


if __name__ == "__main__":
    main()
