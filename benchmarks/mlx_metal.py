"""What MLX gives on this machine: a table in Markdown, for whoever has a Mac to run it on.

    python benchmarks/mlx_metal.py [MODEL] [--draft DRAFT] [--tokens N] [--repeats N] [--against llama-cpp] [--no-speed]

Without arguments: the catalogue's default pair, as ``localspec chat --backend mlx`` runs it. Three things are measured:

* weights: bytes of the file, of the arrays it is repacked into, and what a pass over one token reads of them, against
  what the device can read in the same time;
* passes: t(w), how often a pass waits for the device, and how many operations its graph has (an upper bound of the
  kernels that are launched, since operations that only view memory are left out and some others are fused);
* speed: tokens per second, plainly and with ``--draft-length auto``, taking turns on the same prompts.

It runs on Linux too, on the CPU, where only bytes and waits mean anything: norms and rotations, one operation each on a
GPU, come apart there.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten
from mlx_sizes import bytes_per_token

from localspec import LLM, SamplingParams
from localspec.backends import mlx
from localspec.backends.base import Context, Model
from localspec.backends.mlx.model import MLXModel
from localspec.backends.trust import CHECK_TEXT
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import GGUFFile
from localspec.prompts.questions import own_questions
from localspec.system.machine import cpu_name

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
N_PAST = 64

# What only looks at memory in another way launches nothing.
VIEWS = {"Broadcast", "Reshape", "Transpose", "Slice", "ExpandDims", "Squeeze", "Split", "AsStrided", "Flatten"}
VIEWS |= {"Unflatten", "View", "Full", "NumberOfElements", "StopGradient", "Depends"}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def megabytes(n_bytes: float) -> str:
    return f"{n_bytes / 1e6:,.0f} MB"


# -- weights -----------------------------------------------------------------------------------------------------------


def read_bandwidth(model: MLXModel) -> float:
    """Bytes per second that the device reads when a sum is all it computes: the best of five."""
    import mlx.core as mx

    def measure() -> float:
        numbers = mx.ones(((512 if model.capabilities.device == "gpu" else 64) << 18,), dtype=mx.float32)
        mx.eval(numbers)
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            mx.eval(mx.sum(numbers))
            seconds.append(time.perf_counter() - started)
        return numbers.nbytes / min(seconds)

    return model.owner.run(measure)


def weights_table(models: dict[str, MLXModel], ms: dict[str, float], bandwidth: float) -> str:
    rows = []
    for role, model in models.items():
        with GGUFFile(model.path) as file:
            in_file = bytes_per_token(file)
            repacked = bytes_per_token(file, str(model.network.compute_dtype).rpartition(".")[2])
        least = repacked / bandwidth * 1e3
        in_memory = sum(array.nbytes for _, array in tree_flatten(model.network.module.parameters()))
        rows.append(
            [role, model.path.name, megabytes(model.size_bytes), megabytes(in_memory),
             megabytes(in_file), megabytes(repacked), f"{repacked / in_file:.2f}",
             f"{least:.1f} ms", f"{ms[role]:.1f} ms", f"{least / ms[role]:.0%}"]
        )  # fmt: skip
    head = ["model", "file", "file size", "in memory", "a token reads: of the file", "as repacked", "ratio"]
    return table([*head, "least time for that", "t(1)", "reached"], rows)


# -- passes ------------------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What happened while counting.

    Attributes:
        waits: evaluations that were waited for.
        operations: operations in the evaluated graphs, views of memory left out.
    """

    waits: int = 0
    operations: int = 0
    by_name: dict[str, int] = field(default_factory=dict)


@contextmanager
def counting(graphs: bool) -> Iterator[Counts]:
    """Count evaluations and, where asked for, what is in them."""
    import mlx.core as mx

    counts, evaluate = Counts(), mx.eval

    def watch(*arrays: Any) -> None:
        counts.waits += 1
        if graphs:
            with tempfile.NamedTemporaryFile(suffix=".dot") as file:
                mx.export_to_dot(file.name, *_leaves(arrays))
                for name in re.findall(r'label ="(\w+)"', Path(file.name).read_text()):
                    if name not in VIEWS:
                        counts.operations += 1
                        counts.by_name[name] = counts.by_name.get(name, 0) + 1
        evaluate(*arrays)

    mx.eval = watch
    try:
        yield counts
    finally:
        mx.eval = evaluate


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, list | tuple):
        return [leaf for each in tree for leaf in _leaves(each)]
    return [tree]


def fill(context: Context, model: Model) -> list[int]:
    """Put ``N_PAST`` tokens into an empty context and return more to go on with."""
    text = model.tokenize(CHECK_TEXT, add_special=True)
    tokens = [text[i % len(text)] for i in range(N_PAST + max(WIDTHS))]
    context.truncate(0)
    context.decode(tokens[:N_PAST], "none")
    return tokens[N_PAST:]


def pass_times(model: Model, repeats: int) -> dict[int, float]:
    """Milliseconds of a pass by its width, with ``N_PAST`` tokens in the memory: medians, widths taking turns."""
    samples: dict[int, list[float]] = {width: [] for width in WIDTHS}
    with model.new_context(N_PAST + max(WIDTHS)) as context:
        tokens = fill(context, model)
        for repeat in range(repeats + 1):
            for width in WIDTHS:
                started = time.perf_counter()
                context.decode(tokens[:width])
                if repeat:  # the first of a kind allocates and compiles
                    samples[width].append((time.perf_counter() - started) * 1e3)
                context.truncate(N_PAST)
    return {width: statistics.median(found) for width, found in samples.items()}


def passes_table(times: dict[str, dict[int, float]]) -> str:
    rows = []
    for role, found in times.items():
        rows.append([role, *(f"{found[w]:.1f} ms" if w == 1 else f"{found[w] / found[1]:.2f}" for w in WIDTHS)])
    return table(["t(w), then relative to t(1)", *map(str, WIDTHS)], rows)


def counts_table(models: dict[str, MLXModel]) -> str:
    rows = []
    for role, model in models.items():
        with model.new_context(N_PAST + max(WIDTHS)) as context:
            tokens = fill(context, model)
            for width in (1, 5):
                with counting(graphs=True) as counts:
                    forward = context.decode(tokens[:width])
                    forward.logits.argmax(axis=1)
                context.truncate(N_PAST)
                most = sorted(counts.by_name.items(), key=lambda pair: -pair[1])[:5]
                shown = ", ".join(f"{name} {n}" for name, n in most)
                rows.append([role, str(width), str(counts.waits), str(counts.operations), shown])
    return table(["model", "tokens in the pass", "waits", "operations", "most of them"], rows)


# -- speed -------------------------------------------------------------------------------------------------------------


def speed_table(llm: LLM, other: LLM | None, n_tokens: int, repeats: int, say: Callable[[str], None]) -> str:
    """Tokens per second by kind of work: medians over turns of the same prompt."""
    rows = []
    for category in ("chat", "code", "edit"):
        question = next(each for each in own_questions() if each.category == category)
        messages = [{"role": "user", "content": question.turns[0]}]
        params = SamplingParams(max_tokens=n_tokens)
        speeds: dict[str, list[float]] = {"plain": [], "auto": [], "other": []}
        acceptance, waits, n_rounds = 0.0, 0, 0
        for repeat in range(repeats):
            say(f"{category}, turn {repeat + 1} of {repeats}")
            speeds["plain"].append(llm.chat(messages, params, speculate=False).stats["tokens_per_second"])
            with counting(graphs=False) as counts:
                reply = llm.chat(messages, params, draft_length="auto")
            speeds["auto"].append(reply.stats["tokens_per_second"])
            acceptance = reply.stats["acceptance_rate"] or 0.0
            waits, n_rounds = waits + counts.waits, n_rounds + reply.stats.num_rounds
            if other is not None:
                speeds["other"].append(other.chat(messages, params, speculate=False).stats["tokens_per_second"])
        plain, auto = (statistics.median(speeds[name]) for name in ("plain", "auto"))
        ratio = statistics.median(a / p for a, p in zip(speeds["auto"], speeds["plain"], strict=True))
        row = [category, f"{plain:.1f}", f"{auto:.1f}", f"{ratio:.2f}", f"{acceptance:.0%}", f"{waits / n_rounds:.2f}"]
        rows.append(row + ([f"{statistics.median(speeds['other']):.1f}"] if other is not None else []))
    head = [
        "prompt",
        "plain tok/s",
        "auto tok/s",
        "auto : plain",
        "accepted",
        "waits a round, drafts and prompt included",
    ]
    return table(head + ([f"plain tok/s, {other.engine}"] if other is not None else []), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="MLX on this machine, as tables in Markdown.")
    default = [entry.name for entry in Catalog.load().default_pair()]
    parser.add_argument("model", nargs="?", default=default[0])
    parser.add_argument("--draft", action="append", help="default: the catalogue's for the model, and n-grams")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", metavar="BACKEND", help="also plain decoding with another engine")
    parser.add_argument("--no-speed", action="store_true", help="weights and passes only")
    arguments = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    engine = mlx.binding()
    say("loading")
    with LLM(arguments.model, draft=arguments.draft or "auto", backend="mlx", n_ctx=2048) as llm:
        models = {"target": llm.inspect().target}
        models |= {f"draft {i + 1}": draft.model for i, draft in enumerate(llm.inspect().state.models)}
        assert all(isinstance(model, MLXModel) for model in models.values())
        say("timing passes")
        times = {role: pass_times(model, arguments.repeats) for role, model in models.items()}
        bandwidth = read_bandwidth(models["target"])
        print(f"{cpu_name()} · {platform.platform()} · Python {platform.python_version()} · MLX {engine.version}")
        print(f"on {' '.join(engine.built_for)}, which reads {bandwidth / 1e9:.3g} GB/s in a sum\n")
        print(weights_table(models, {role: found[1] for role, found in times.items()}, bandwidth))
        print(passes_table(times))
        print(counts_table(models))
        if not arguments.no_speed:
            other = None
            if arguments.against:
                other = LLM(arguments.model, draft=None, backend=arguments.against, n_ctx=2048)
            try:
                print(speed_table(llm, other, arguments.tokens, arguments.repeats, say))
            finally:
                if other is not None:
                    other.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
