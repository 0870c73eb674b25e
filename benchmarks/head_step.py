"""What a step of a head costs, beside a pass of its target: its parts, its own matrices by NumPy and in 8 bits.

    python benchmarks/head_step.py [MODEL] [--head FILE] [--backend NAME] [--repeats N] [--threads N]

A target's pass of one token, then a chained head's first step (a true row: the state, a token that was not seen lately,
the layer and its output rows) and a further one (a row of its own state), all in turns in one process, as a draft of
two tokens makes them; without what is done with the logits. Medians, and the least; a busy machine moves the former.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from localspec import backends
from localspec.backends.base import Context, FloatArray
from localspec.heads.base import STATE
from localspec.heads.file import head_weights
from localspec.heads.products import Products
from localspec.heads.trained import Head, heads_for, load_head
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import GGUFFile
from localspec.system.machine import cpu_name

N_PAST = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--head", type=Path, help="a chained one; without it, the first that fits")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    path = Catalog.load().resolve(args.model)
    found: dict[str, list[float]] = {}

    def timed(name: str, use: Callable[[], object]) -> None:
        began = time.perf_counter()
        use()
        found.setdefault(name, []).append((time.perf_counter() - began) * 1e3)

    with backends.load(path, backend=args.backend, n_threads=args.threads) as target:
        head_path = args.head or next(iter(heads_for(path)))
        with load_head(head_path, path, target.backend, n_threads=args.threads) as head:
            tokens = head.token_map[: args.repeats + N_PAST].tolist()
            kinds = {"8 bits": head._times, "NumPy": Products(matrices_of(head_path))}
            with target.new_context(256, hidden=head.taps) as context, head.new_context(256) as memory:
                context.decode(tokens[:N_PAST], "none")
                memory.decode_floats(np.zeros((16, head.card.n_embd), np.float32), range(16), "none")
                for token in tokens[N_PAST:]:
                    timed("target: a pass of one", lambda token=token: context.decode([token]))  # type: ignore[misc]
                    states = np.concatenate([context.decode([token]).hidden[tap] for tap in head.taps], axis=1)
                    context.truncate(N_PAST)
                    for kind, times in kinds.items():
                        head._times = times
                        step(head, memory, states, token, kind, timed)
            head._times = kinds["8 bits"]
            print(f"{target.engine}, {cpu_name()}, {platform.platform()}; {head_path.name}")
    plain = median(found["target: a pass of one"])
    for name, ms in found.items():
        print(
            f"{name:34} median {median(ms):7.2f} ms, least {min(ms):7.2f}   {median(ms) / plain:.3f} of a target token"
        )


def matrices_of(path: Path) -> list[FloatArray]:
    with GGUFFile(path) as file:
        return [head_weights(file, f"head.{part}.weight") for part in ("fc", "embed", "chain")]


def step(head: Head, memory: Context, states: FloatArray, token: int, kind: str, timed: Callable[..., None]) -> None:
    """A draft of two tokens, and its parts."""
    head._cache.clear()
    timed(f"{kind}: new token's share", lambda: head.embed([token]))
    row = head.true_rows(memory, states, [token])
    timed("head: its layer and output", lambda: memory.decode_floats(row, [token], "last"))
    memory.truncate(16)
    head._cache.clear()
    state = memory.decode_floats(row, [token], "last").hidden[STATE][-1:]
    memory.truncate(16)

    def first() -> None:
        memory.decode_floats(head.true_rows(memory, states, [token]), [token], "last")

    def further() -> None:
        memory.decode_floats(head.chained_rows(state, [token]), [token], "last")

    timed(f"{kind}: a first step", first)
    timed(f"{kind}: a further step", further)
    memory.truncate(16)


if __name__ == "__main__":
    main()
