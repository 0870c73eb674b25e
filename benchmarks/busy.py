"""Never slower beside other programs? The same answers plain and drafted, with 0, 1 and 2 spinning processes at work.

    python benchmarks/busy.py OUT_FOLDER [--set report | --prompts FILE] [--category NAME ...] [--max-tokens N]
        [--minutes N] [--temperature T] [--loads 0 1@0 2@0 1@19 2@19] [--model MODEL] [--draft NAME] [--backend NAME]

A load is ``N@NICE``: so many processes that only spin, at that niceness. The pair is calibrated first, without a load,
as it would be on a user's machine; then ``localspec bench`` runs once for each load, its arms taking turns every few
tokens, so that both meet the same machine. What is printed: plain and drafted speed, their ratio by category, and the
slowest of the answers that have 48 tokens or more. OUT_FOLDER keeps bench's own files.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localspec.commands.bench.record import read_record
from localspec.measuring.subject import Sample

LEAST_TOKENS = 48
SPIN = "import os, sys\nos.nice(int(sys.argv[1]))\nwhile True: pass"


@contextmanager
def spinning(load: str) -> Iterator[None]:
    """Processes that take CPU time, while the block runs."""
    number, _, nice = load.partition("@")
    running = [subprocess.Popen([sys.executable, "-c", SPIN, nice or "0"]) for _ in range(int(number))]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def bench(out: Path, args: argparse.Namespace, minutes: float) -> None:
    questions = ["--prompts", str(args.prompts)] if args.prompts else ["--set", args.set]
    chosen = [word for name in args.category or () for word in ("--category", name)]
    command = [sys.executable, "-m", "localspec", "bench", args.model, *questions, *chosen, "--arm", "auto"]
    command += ["--temperature", str(args.temperature), "--max-tokens", str(args.max_tokens), "--repeats", "1"]
    command += ["--minutes", str(minutes), "--json", str(out), "--force"]
    for option, name in (("--draft", args.draft), ("--backend", args.backend)):
        command += [option, name] if name else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def per_token(sample: Sample) -> float:
    return (sample.seconds_draft + sample.seconds_verify + sample.seconds_other) / sample.tokens


def show(load: str, samples: list[Sample]) -> None:
    plain = {s.question: s for s in samples if s.arm == "plain"}
    ratios: dict[str, list[tuple[float, str, int]]] = {}
    for sample in samples:
        if sample.arm != "plain" and sample.question in plain:
            ratio = per_token(plain[sample.question]) / per_token(sample)
            ratios.setdefault(sample.category, []).append((ratio, sample.question, sample.tokens))
    rows = [row for group in ratios.values() for row in group]
    if not rows:
        print(f"{load:>6}  nothing was measured in the time there was")
        return
    speeds = [statistics.median(1 / per_token(s) for s in plain.values())]
    long = [row for row in rows if row[2] >= LEAST_TOKENS]
    slow = ", ".join(f"{question} {ratio:.2f} ({n} tokens)" for ratio, question, n in sorted(long)[:3])
    under = sum(ratio < 0.97 for ratio, _, _ in long)
    by_category = "  ".join(f"{name} {statistics.median(r for r, _, _ in group):.2f}" for name, group in ratios.items())
    print(f"{load:>6}  plain {speeds[0]:5.1f} tok/s  all {statistics.median(r for r, _, _ in rows):.2f}  {by_category}")
    print(f"        {len(rows)} answers; {under} of {len(long)} under 0.97; slowest {slow}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", help="as for localspec bench")
    parser.add_argument("--backend")
    parser.add_argument("--set", default="report", choices=["report", "tuning"])
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--category", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--minutes", type=float, default=10.0, help="at most so long for each load")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--loads", nargs="+", default=["0", "1@0", "2@0", "1@19", "2@19"], metavar="N@NICE")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{args.model}, at most {args.max_tokens} tokens, temperature {args.temperature:g}, {os.cpu_count()} CPUs")
    bench(args.out / "calibration.json", args, 0.3)  # what it measures is not looked at
    for load in args.loads:
        file = args.out / f"load-{load.replace('@', '-nice-')}.json"
        with spinning(load):
            bench(file, args, args.minutes)
        show(load, read_record(file).samples)


if __name__ == "__main__":
    main()
