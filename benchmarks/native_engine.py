"""What an ik-llama compiled for this CPU gains over its wheel: passes of both, taking turns.

    python benchmarks/native_engine.py WHEELS_PYTHON NATIVE_PYTHON [MODEL ...] [--minutes N] [--threads N]

Each interpreter has one of the builds, and what localspec needs. Each gets a process with the model loaded; in turns
they run a few passes of one width, 64 tokens in the memory, in an order that changes every time. A turn's ratio is that
of its shortest passes, as other programs can only make a pass longer; what counts is the median of the ratios, with its
95 % interval by order statistics. It ends when every interval is narrow, or after N minutes a model. Milliseconds are
medians of the turns' shortest passes on a machine as busy as it was; t(w)/t(1) is the median over the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import IO, cast

from localspec.measuring.statistics import order_statistics

ROOT = Path(__file__).parent.parent
WIDTHS = {1: 4, 2: 4, 4: 3, 8: 3, 16: 2, 256: 1}
"""Tokens in a pass -> passes in a turn."""

FILL = 64
ENOUGH = 0.015
"""Half the width of an interval, over the median, that is narrow."""


def work(path: str, threads: int | None) -> None:
    """The process of one build: reads "width passes", answers with the shortest time in milliseconds."""
    from localspec.backends.llama import ik_llama
    from localspec.backends.llama.ggml import built_for, system_info
    from localspec.backends.trust import CHECK_TEXT, check_model

    engine = ik_llama.binding()
    with ik_llama.load(path, n_threads=threads) as model:
        tokens = model.tokenize(CHECK_TEXT * 20, add_special=True)[: FILL + max(WIDTHS)]
        print(json.dumps([model.engine, built_for(system_info(engine.lib)), check_model(model).mean_kl]), flush=True)
        with model.new_context(FILL + max(WIDTHS) + 8) as context:
            context.decode(tokens[:FILL], "none")
            for line in sys.stdin:
                width, passes = map(int, line.split())
                best = float("inf")
                for _ in range(passes):
                    started = time.perf_counter()
                    context.decode(tokens[FILL : FILL + width], "last" if width > 16 else "all")
                    best = min(best, (time.perf_counter() - started) * 1e3)
                    context.truncate(FILL)
                print(best, flush=True)


class Worker:
    """The other end of ``work``."""

    def __init__(self, python: str, path: Path, threads: int | None) -> None:
        command = [python, __file__, "--work", str(path), *(["--threads", str(threads)] if threads else [])]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._in = cast(IO[str], self.process.stdin)
        self._out = cast(IO[str], self.process.stdout)
        self.engine, self.features, self.mean_kl = json.loads(self._out.readline() or "[null, null, null]")
        if self.engine is None:
            raise SystemExit(f"{python} could not load {path.name}")

    def ms(self, width: int, passes: int) -> float:
        """The shortest of some passes."""
        self._in.write(f"{width} {passes}\n")
        self._in.flush()
        return float(self._out.readline())

    def close(self) -> None:
        self._in.close()
        self.process.wait()


def compare(path: Path, pythons: list[str], minutes: float, threads: int | None) -> None:
    """Measure one model and print its table."""
    workers = [Worker(python, path, threads) for python in pythons]
    for worker in workers:
        print(f"{worker.engine}: {' '.join(worker.features)}; check of the engine: KL {worker.mean_kl:.2g} nats")
    times: dict[int, list[tuple[float, float]]] = {width: [] for width in WIDTHS}
    for width in WIDTHS:
        for worker in workers:
            worker.ms(width, 1)  # the first pass of a kind allocates
    ends, turn = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < ends and not (turn >= 20 and all(map(settled, times.values()))):
        for width, passes in WIDTHS.items():
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            found = {i: workers[i].ms(width, passes) for i in order}
            times[width].append((found[0], found[1]))
        turn += 1
    for worker in workers:
        worker.close()
    print(f"\n{path.name}, {turn} turns, load average {os.getloadavg()[0]:.1f}\n")
    print("| tokens in the pass | wheel ms | native ms | native / wheel (95 %) | wheel t(w)/t(1) | native t(w)/t(1) |")
    print("|--:|--:|--:|--:|--:|--:|")
    base = [median(pair[i] for pair in times[1]) for i in (0, 1)]
    for width, pairs in times.items():
        ms = [median(pair[i] for pair in pairs) for i in (0, 1)]
        ratios = [native / wheel for wheel, native in pairs]
        low, high = order_statistics(ratios, 0.95)
        relative = [median(pair[i] / one[i] for pair, one in zip(pairs, times[1], strict=True)) for i in (0, 1)]
        print(
            f"| {width} | {ms[0]:.1f} | {ms[1]:.1f} | {median(ratios):.3f} ({low:.3f} to {high:.3f}) "
            f"| {relative[0]:.2f} | {relative[1]:.2f} |"
        )
    rates = [256e3 / median(pair[i] for pair in times[256]) for i in (0, 1)]
    print(f"\nprefill {rates[0]:.0f} and {rates[1]:.0f} tok/s; t(1) {base[0]:.1f} and {base[1]:.1f} ms\n")


def settled(pairs: list[tuple[float, float]]) -> bool:
    ratios = [native / wheel for wheel, native in pairs]
    low, high = order_statistics(ratios, 0.95)
    return (high - low) / 2 <= ENOUGH * median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON MODEL")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.work, args.threads)
    from localspec.model_files.catalog import Catalog

    for name in args.pythons[2:] or ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"]:
        compare(Catalog.load().resolve(name), args.pythons[:2], args.minutes, args.threads)


if __name__ == "__main__":
    main()
