"""What a rejected draft costs where memory cannot be rewound: with llama.cpp's snapshots, and by a replay.

    python benchmarks/rollback.py [FILE] [--past N ...] [--draft N] [--rejected N] [--rounds N]

FILE is a model with recurrent layers; without one a made-up Qwen 3.5 of four layers is written to a temporary folder.
In one process, in turns: a plain token, and rounds of a draft of which the last tokens are rejected, in a context that
keeps snapshots and in one that copies the state before a pass. A row of the table each: median milliseconds, on one
thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from localspec.backends.registry import engine_module

ROOT = Path(__file__).parents[1]


def made_up(folder: Path) -> Path:
    """The file that tests use."""
    sys.path.insert(0, str(ROOT))
    from tests.support.ggufs import write_hybrid

    return write_hybrid(folder / "qwen35.gguf", residual=0.3)


def contexts(model: Any, n_ctx: int) -> dict[str, Any]:
    """One that keeps snapshots, where there is room for them, and one that does not."""
    found = {f"snapshots of {model.n_snapshots} tokens": model.new_context(n_ctx)} if model.n_snapshots else {}
    vars(model)["n_snapshots"] = 0
    return found | {"a copy and a replay": model.new_context(n_ctx)}


def measure(model: Any, past: int, n_draft: int, n_rejected: int, n_rounds: int) -> list[tuple[str, float, float]]:
    """By how memory goes back: milliseconds of a plain token and of a round."""
    opened = contexts(model, past + (n_draft + 2) * n_rounds + 64)
    text, draft = [20 + (7 * i) % 200 for i in range(past)], [20 + 3 * i for i in range(n_draft + 1)]
    plain: dict[str, list[float]] = {name: [] for name in opened}
    drafted: dict[str, list[float]] = {name: [] for name in opened}
    for context in opened.values():
        context.decode(text, "none")
    for _ in range(n_rounds):
        for name, context in opened.items():
            started = time.perf_counter()
            context.decode(draft[:1])
            plain[name].append(time.perf_counter() - started)
            started = time.perf_counter()
            context.decode(draft)
            context.truncate(context.n_past - n_rejected)
            drafted[name].append(time.perf_counter() - started)
    for context in opened.values():
        context.close()
    del vars(model)["n_snapshots"]
    return [(name, median(plain[name]) * 1e3, median(drafted[name]) * 1e3) for name in opened]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--past", type=int, nargs="+", default=[256, 3000])
    parser.add_argument("--draft", type=int, default=4, help="tokens drafted")
    parser.add_argument("--rejected", type=int, default=2, help="of them, rejected")
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    if not 0 < args.rejected <= args.draft:
        parser.error("--rejected is from 1 to --draft")
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or made_up(Path(folder))
        with engine_module("llama-cpp").load(path, n_threads=1) as model:
            print("| tokens before | memory goes back by | a plain token | a round |\n|--:|---|--:|--:|")
            for past in args.past:
                for name, token, round_ in measure(model, past, args.draft, args.rejected, args.rounds):
                    print(f"| {past:,} | {name} | {token:.2f} ms | {round_:.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
