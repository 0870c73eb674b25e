"""What makes an engine read prompts faster: pieces, micro-batches, threads, flash attention, cache type.

    python -m benchmarks.reading [FILE] [--draft NAME] [--backends ik-llama llama-cpp] [--tokens 512] [--past 0]
        [--repeats 3]
    python -m benchmarks.reading [FILE] --passes 1 2 4 8 [--threads 1 2] [--backends …] [--past 64] [--repeats 9]

An arm is the shipped setting with one thing changed. The arms of an engine take turns prompt by prompt, in reversed
order at every other one; all read the same tokens, after ``--past`` others. Printed are tokens a second of the shipped
setting, and the ratio of each arm to it: the median over repeats, and its range.

``pieces of N`` passes N tokens at a time to the engine, between which the cancel flag is looked at; ``micro-batch N``
is what the engine computes at once; ``no draft`` is the shipped setting of the target alone, to which the last two arms
add the draft model's reading of the same prompt: after it, or piece by piece in turns.

With ``--passes`` it is passes over so many tokens with logits, as rounds have, at each number of threads, in turns:
medians in milliseconds. Both are printed for the file itself, as the best number differs with its size.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from localspec import backends
from localspec.backends.base import Context
from localspec.backends.llama import binding
from localspec.backends.registry import engine_module
from localspec.backends.trust import CHECK_TEXT
from localspec.model_files.catalog import Catalog
from localspec.spec_decode.decoder import PREFILL_CHUNK
from localspec.system.machine import cpu_name, default_threads

SHIPPED, WITH_DRAFT, IN_TURNS = "no draft", "with the draft after", "with the draft in turns"


@dataclass
class Arm:
    """A way to read.

    Attributes:
        contexts: read one after the other, or piece by piece in turns where ``in_turns``.
        piece: tokens passed to the engine at a time.
        seconds: of each prompt.
    """

    name: str
    contexts: Sequence[Context]
    piece: int
    in_turns: bool
    seconds: list[float]

    def read(self, past: Sequence[int], prompt: Sequence[int]) -> None:
        for each in self.contexts:
            each.truncate(0)
            _read([each], past, self.piece)
        started = time.perf_counter()
        for group in [self.contexts] if self.in_turns else [[each] for each in self.contexts]:
            _read(group, prompt, self.piece)
        self.seconds.append(time.perf_counter() - started)


def _read(contexts: Sequence[Context], tokens: Sequence[int], piece: int) -> None:
    for start in range(0, len(tokens), piece):
        for each in contexts:
            each.decode(tokens[start : start + piece], "last" if start + piece >= len(tokens) else "none")


@contextmanager
def without_flash(engine: str) -> Iterator[None]:
    """Contexts made meanwhile have no flash attention."""
    kind = type(engine_module(engine).binding())
    real: Callable[..., None] = kind.set_context_options

    def options(self: Any, params: Any, n_sequences: int, branches: bool = False) -> None:
        real(self, params, n_sequences, branches)
        if hasattr(params, "flash_attn_type"):
            params.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        else:
            params.flash_attn = False

    with patch.object(kind, "set_context_options", options):
        yield


def arms_of(engine: str, file: Path, draft: Path, n_ctx: int, stack: ExitStack) -> list[Arm]:
    threads = default_threads()

    def context(path: Path = file, **options: Any) -> Context:
        model = backends.load(path, engine, check=False, n_threads=options.pop("n_threads", threads), **options)
        stack.callback(model.close)
        made = model.new_context(n_ctx)
        stack.callback(made.close)
        return made

    usual, small = context(), context(draft)
    arms = [Arm(SHIPPED, [usual], PREFILL_CHUNK, False, [])]
    arms += [Arm(f"pieces of {n}", [usual], n, False, []) for n in (32, 64, 256, 512)]
    for n in (128, 512):
        with patch.object(binding, "N_UBATCH", n):
            arms.append(Arm(f"micro-batch {n}, pieces of 512", [context()], 512, False, []))
    arms += [Arm(f"{n} threads", [context(n_threads=n)], PREFILL_CHUNK, False, []) for n in (1, 2 * threads)]
    with without_flash(engine):
        arms.append(Arm("no flash attention", [context()], PREFILL_CHUNK, False, []))
    arms.append(Arm("cache of q8_0", [context(kv_type="q8_0")], PREFILL_CHUNK, False, []))
    arms.append(Arm(WITH_DRAFT, [usual, small], PREFILL_CHUNK, False, []))
    arms.append(Arm(IN_TURNS, [usual, small], PREFILL_CHUNK, True, []))
    return arms


def passes(engine: str, file: Path, options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        contexts: dict[int, Context] = {}
        for n in options.threads or (1, default_threads()):
            model = backends.load(file, engine, check=False, n_threads=n)
            stack.callback(model.close)
            contexts[n] = model.new_context(options.past + max(options.passes) + 8)
            stack.callback(contexts[n].close)
        words = itertools.cycle(next(iter(contexts.values())).model.tokenize(CHECK_TEXT, add_special=False))
        past = list(itertools.islice(words, options.past))
        ms: dict[tuple[int, int], list[float]] = {}
        for context in contexts.values():
            context.decode(past, "last")
        for turn in range(options.repeats):
            for n, context in contexts.items() if turn % 2 else reversed(contexts.items()):
                for width in options.passes:
                    context.truncate(len(past))
                    started = time.perf_counter()
                    context.decode(list(itertools.islice(words, width)), "all")
                    ms.setdefault((n, width), []).append((time.perf_counter() - started) * 1e3)
        print(f"| {engine} | " + " | ".join(f"{width} tokens" for width in options.passes) + " |")
        print("|---" + "|--:" * len(options.passes) + "|")
        for n in contexts:
            print(f"| {n} threads | " + " | ".join(f"{median(ms[n, width]):.1f}" for width in options.passes) + " |")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--backends", nargs="+", default=["ik-llama", "llama-cpp"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--past", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--passes", type=int, nargs="+", help="tokens of passes with logits, in place of prompts")
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads of these passes")
    options = parser.parse_args()
    catalog = Catalog.load()
    file, draft = catalog.resolve(options.file), catalog.resolve(options.draft)
    read = "passes" if options.passes else f"{options.tokens} tokens"
    print(f"{file.name}, {read} after {options.past} tokens; {cpu_name()}, {default_threads()} threads\n")
    for engine in options.backends:
        if options.passes:
            passes(engine, file, options)
            continue
        with ExitStack() as stack:
            arms = arms_of(engine, file, draft, options.past + options.tokens + 64, stack)
            words = itertools.cycle(arms[0].contexts[0].model.tokenize(CHECK_TEXT, add_special=False))
            past = list(itertools.islice(words, options.past))
            prompt = list(itertools.islice(words, options.tokens))
            for turn in range(options.repeats):
                for arm in arms if turn % 2 else reversed(arms):
                    arm.read(past, prompt)
            speeds = {arm.name: [options.tokens / each for each in arm.seconds] for arm in arms}
            print(f"| {engine}, {median(speeds[SHIPPED]):.0f} tok/s | over the shipped setting | |\n|---|--:|--:|")
            for name, each in speeds.items():
                ratios = sorted(mine / shipped for mine, shipped in zip(each, speeds[SHIPPED], strict=True))
                print(f"| {name} | {median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |")
            print()


if __name__ == "__main__":
    main()
