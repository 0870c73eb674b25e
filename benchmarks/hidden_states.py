"""What hidden states cost: passes that return none, one and four of them, and passes that end early.

    python benchmarks/hidden_states.py [FILE] [--backend NAME] [--repeats N] [--threads N]

The same tokens in one process, alternating; the least process time of the repeats, which other programs disturb least.
Without a file, a model of 28 layers whose own work is next to nothing: what remains is the cost of asking. ``by name``
looks every node up by its name, as passes of a new shape do (see ``backends.state_tap``).
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from localspec.backends.base import Context, Model
from localspec.backends.llama.model import LlamaContext
from localspec.backends.registry import engine_module
from localspec.system.machine import cpu_name
from tests.support import ggufs

N_PAST = 64
WIDTHS = (1, 8)


def least_ms(repeats: int, contexts: dict[str, Context], use: Callable[[Context], object]) -> dict[str, float]:
    """The least process time of a pass in each context, back to ``N_PAST`` after each [milliseconds]."""
    found = dict.fromkeys(contexts, float("inf"))
    for _ in range(repeats):
        for name, context in contexts.items():
            started = time.process_time()
            use(context)
            found[name] = min(found[name], (time.process_time() - started) * 1e3)
            context.truncate(N_PAST)
    return found


def measure(model: Model, repeats: int) -> None:
    n = model.n_layers
    four = ("norm", *(f"layer:{i}" for i in (2, n // 2, n - 3)))
    names = {"none": (), "one": ("norm",), "four": four, "four by name": four}
    contexts = {name: model.new_context(128, hidden=hidden) for name, hidden in names.items()}
    by_name = contexts["four by name"]
    if isinstance(by_name, LlamaContext):
        by_name.passes._repeatable = False
    else:
        del contexts["four by name"]
    tokens = [1 + i % 200 for i in range(N_PAST)]
    for context in contexts.values():
        context.decode(tokens, "none")
    for width in WIDTHS:
        least = least_ms(repeats, contexts, lambda context, width=width: context.decode(tokens[:width]))  # type: ignore[misc]
        extra = ", ".join(f"{name} {ms - least['none']:+.2f}" for name, ms in least.items() if name != "none")
        print(f"a pass of {width}: {least['none']:.2f} ms; hidden states: {extra} ms")
    if model.capabilities.first_layers:
        early = {f"{k}": model.new_context(128, hidden=(f"layer:{k - 1}",)) for k in {n // 8, n // 4, n // 2} - {0}}
        for context in early.values():
            context.decode(tokens, "none")
        least = least_ms(repeats, early, lambda c: c.decode_first_layers([7], int(c.hidden[0][6:]) + 1))
        print("; ".join(f"{k} of {n} layers: {ms:.2f} ms" for k, ms in sorted(least.items(), key=lambda e: e[1])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--backend", default="ik-llama")
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = ggufs.Shape(n_layer=28, n_embd=64, n_head=2, n_head_kv=1, n_ff=128)
        path = args.file or ggufs.write_llama(Path(folder) / "deep.gguf", shape)
        load = engine_module(args.backend).load
        with load(path, n_threads=args.threads) as model:
            print(f"{cpu_name()}, Python {platform.python_version()}, {model.engine}, {path.name}")
            measure(model, args.repeats)


if __name__ == "__main__":
    main()
