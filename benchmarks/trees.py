"""What a context costs that takes tokens that branch, beside one that does not.

    python benchmarks/trees.py FILE [--backend NAME] [--past N ...] [--repeats N]

In one process, alternating: passes over 1 and 8 tokens in a context of each kind, a tree of 8 tokens with 4 leaves,
what keeping a path of it takes (the first one; a side branch), and the pass over one token behind a side branch, before
which ik-llama moves rows together. The least process time of the repeats, on one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from localspec.backends.base import Model
from localspec.backends.registry import engine_module

PARENTS = [-1, 0, 1, 2, 0, 1, -1, 6]


def ms(use: Callable[[], object]) -> float:
    started = time.process_time()
    use()
    return (time.process_time() - started) * 1e3


def measure(model: Model, past: int, repeats: int) -> dict[str, float]:
    """By what was done, the least milliseconds."""
    found: dict[str, float] = {}

    def put(name: str, use: Callable[[], object]) -> None:
        found[name] = min(ms(use), found.get(name, float("inf")))

    text, draft = [1 + (7 * i) % 200 for i in range(past)], list(range(5, 13))
    with model.new_context(past + 64) as plain, model.new_context(past + 64, branches=True) as branching:
        for context in (plain, branching):
            context.decode(text, "none")
        for _ in range(repeats):
            for n in (1, 8):
                put(f"plain, {n}", lambda n=n: plain.decode(draft[:n]))  # type: ignore[misc]
                put(f"branching, {n}", lambda n=n: branching.decode(draft[:n]))  # type: ignore[misc]
                plain.truncate(past)
                branching.truncate(past)
            put("tree of 8", lambda: branching.decode_tree(draft, PARENTS))
            put("keep the first path", lambda: branching.keep([0, 1, 2]))
            branching.truncate(past)
            branching.decode_tree(draft, PARENTS)
            put("keep a side branch", lambda: branching.keep([6, 7]))
            put("one behind it", lambda: branching.decode([5]))
            branching.truncate(past)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--backend", default="ik-llama")
    parser.add_argument("--past", type=int, nargs="+", default=[256, 1500])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with engine_module(args.backend).load(args.file, n_threads=1) as model:
        for past in args.past:
            figures = measure(model, past, args.repeats).items()
            print(
                f"{model.engine}, {past} tokens: " + ", ".join(f"{name} {took:.2f}" for name, took in figures) + " [ms]"
            )


if __name__ == "__main__":
    main()
