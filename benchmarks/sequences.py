"""What several conversations in one pass cost, and what it costs to have no flash attention for it.

    python benchmarks/sequences.py FILE [--backend NAME] [--past N] [--repeats N] [--threads N]

All of it in one process, alternating; the least process time of the repeats, on one thread, which other programs
disturb least. Each sequence holds ``--past`` tokens.

- ``apart``: one row in each of n contexts, a pass each, as without a batch.
- ``together``: one row of each of n sequences, in one pass.
- ``one of n rows``: n rows of one conversation in a context, as when a draft is verified.
- ``no flash``: these n rows in a memory of several sequences that holds nothing else (on ik-llama: without flash
  attention).
- ``among others``: these n rows in the memory that all share; every row passes over all cells that are in use.
- ``after cuts``: as ``together``, each sequence having lost the last of three rows: draft tokens that were rejected.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

from localspec.backends.base import Model, Piece
from localspec.backends.registry import engine_module
from localspec.system.machine import cpu_name

WIDTHS = (1, 2, 4, 8)


def ms(use: Callable[[], object]) -> float:
    started = time.process_time()
    use()
    return (time.process_time() - started) * 1e3


def measure(model: Model, past: int, repeats: int) -> None:
    most = max(WIDTHS)
    texts = [[1 + (7 * i + 13 * sequence) % 200 for i in range(past)] for sequence in range(most)]
    contexts = [model.new_context(past + most + 8) for _ in texts]
    with model.new_batch(most, most * (past + most + 8)) as batch, model.new_batch(2, past + most + 8) as lonely:
        lonely[0].decode(texts[0], "none")
        for sequence, (context, text) in enumerate(zip(contexts, texts, strict=True)):
            context.decode(text, "none")
            batch[sequence].decode(text, "none")

        def cut() -> None:
            for sequence in range(most):
                batch.truncate(sequence, past)
                contexts[sequence].truncate(past)
            lonely.truncate(0, past)

        columns = ("apart", "together", "one of n rows", "no flash", "among others", "after cuts")
        print(f"{'n':>3} " + " ".join(f"{column:>13}" for column in columns) + "  [ms]")
        for n in WIDTHS:
            rows = list(range(5, 5 + n))
            each = [Piece(sequence, [7]) for sequence in range(n)]
            drafts = [Piece(sequence, [7, 8, 9]) for sequence in range(n)]
            found: list[list[float]] = [[] for _ in columns]
            for _ in range(repeats):
                found[0].append(sum(ms(lambda i=i: contexts[i].decode([7])) for i in range(n)))  # type: ignore[misc]
                found[1].append(ms(lambda: batch.decode(each)))  # noqa: B023
                cut()
                batch.decode([Piece(most - 1, [7], "none")])  # so that gaps are closed outside of what is timed
                cut()
                found[2].append(ms(lambda: contexts[0].decode(rows)))  # noqa: B023
                found[3].append(ms(lambda: lonely[0].decode(rows)))  # noqa: B023
                found[4].append(ms(lambda: batch[0].decode(rows)))  # noqa: B023
                cut()
                batch.decode(drafts)
                for sequence in range(n):
                    batch.truncate(sequence, past + 2)
                found[5].append(ms(lambda: batch.decode(each)))  # noqa: B023
                cut()
                batch.decode([Piece(most - 1, [7], "none")])
                cut()
            print(f"{n:>3} " + " ".join(f"{min(times):>13.1f}" for times in found))

        batch.truncate(1, 0)
        shared = ms(lambda: batch.copy_prefix(0, 1, past))
        out = ms(lambda: batch[0].export_state())
        state = batch[0].export_state()
        into = ms(lambda: batch[1].import_state(state))
        print(f"a prefix of {past} tokens: {shared:.2f} ms; its state out {out:.1f} ms, in {into:.1f} ms")
        for context in contexts:
            context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--backend", default="ik-llama")
    parser.add_argument("--past", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    load = engine_module(args.backend).load
    with load(args.file, n_threads=args.threads) as model:
        print(f"{cpu_name()}, Python {platform.python_version()}, {model.engine}, {args.file.name}, {args.past} tokens")
        measure(model, args.past, args.repeats)


if __name__ == "__main__":
    main()
