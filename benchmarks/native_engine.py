"""What an ik-llama compiled for this CPU gains over its wheel: passes of both, taking turns.

    localspec engine build
    python benchmarks/native_engine.py [MODEL ...] [--minutes N] [--threads N ...] [--library FILE ...]

Each build gets a process with the model loaded, and so does each number of threads. In turns they run a few passes of
one width, 64 tokens in the memory, in an order that changes every time. A turn's ratio is that of its shortest passes,
as other programs can only make a pass longer; what counts is the median of the ratios, with its 95 % interval by order
statistics. It ends when every interval is narrow, or after N minutes a model. Milliseconds are medians, and the least,
of the turns' shortest passes on a machine as busy as it was; t(w)/t(1) is the median over the turns. ``--library`` adds
another build's libllama, as ``-march`` with a name of another CPU makes.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from localspec.backends.llama import ik_llama
from localspec.backends.llama.ggml import built_for, system_info
from localspec.backends.trust import check_model, check_tokens
from localspec.measuring.statistics import order_statistics
from localspec.system.machine import busy_share, cpu_name, default_threads

WIDTHS = {1: 4, 2: 4, 3: 3, 4: 3, 5: 3, 6: 3, 7: 3, 8: 3, 16: 2, 256: 1}
"""Tokens in a pass -> passes in a turn."""

ENOUGH = 0.015
"""Half the width of an interval, over the median, that is narrow."""


N_FILL = 64


class BuildProcess:
    """A process that runs a file in one build of ik-llama."""

    def __init__(self, library: Path, model: Path, n_threads: int) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _load, (library, model, n_threads))
        self.engine, self.features, self.own_kl = self._pool.submit(_facts).result()

    def __enter__(self) -> BuildProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown()

    def ms(self, width: int, passes: int = 1) -> float:
        """The shortest of some passes over so many tokens, with ``N_FILL`` in the memory [ms]."""
        return self._pool.submit(_shortest, width, passes).result()


_loaded: list[Any] = []  # in such a process: the model, its context, a text


def _load(library: Path, path: Path, n_threads: int) -> None:
    os.environ[ik_llama.LIBRARY] = str(library)
    model = ik_llama.load(path, n_threads=n_threads)
    tokens = (check_tokens(model, N_FILL) * 100)[: N_FILL + max(WIDTHS)]
    context = model.new_context(len(tokens) + 8)
    context.decode(tokens[:N_FILL], "none")
    _loaded.extend((model, context, tokens))


def _facts() -> tuple[str, list[str], float]:
    model = _loaded[0]
    return model.engine, built_for(system_info(ik_llama.binding().lib)), check_model(model).mean_kl


def _shortest(width: int, passes: int) -> float:
    _, context, tokens = _loaded
    found = []
    for _ in range(passes):
        started = time.perf_counter()
        context.decode(tokens[N_FILL : N_FILL + width], "last" if width > 16 else "all")
        found.append((time.perf_counter() - started) * 1e3)
        context.truncate(N_FILL)
    return min(found)


def compare(path: Path, libraries: dict[str, Path], threads: list[int], minutes: float) -> None:
    """Measure one model and print its table."""
    busy = busy_share(1.0)
    times: dict[str, dict[int, list[float]]] = {}
    with ExitStack() as stack:
        arms: dict[str, BuildProcess] = {}
        for n in threads:
            for name, library in libraries.items():
                arm = stack.enter_context(BuildProcess(library, path, n))
                arms[f"{name}, {n} threads"] = arm
                print(f"{name}, {n} threads: {arm.engine}: {' '.join(arm.features)}; KL {arm.own_kl:.2g} nats")
        for name, arm in arms.items():
            times[name] = {width: [] for width in WIDTHS}
            for width in WIDTHS:
                arm.ms(width)  # the first pass of a kind allocates
        names, ends, turn = list(arms), time.monotonic() + 60 * minutes, 0
        while time.monotonic() < ends and not (turn >= 20 and all(settled(times, name) for name in names)):
            for width, passes in WIDTHS.items():
                for name in names if turn % 2 == 0 else reversed(names):
                    times[name][width].append(arms[name].ms(width, passes))
            turn += 1
    print(f"\n{path.name} on {cpu_name()}, {turn} turns; others used {busy:.0%} of the CPUs before, ", end="")
    print(f"load average {os.getloadavg()[0]:.1f} after\n")
    print("| | tokens in the pass | median ms | least ms | of the first arm's time (95 %) | t(w)/t(1) |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, by_width in times.items():
        for width, ms in by_width.items():
            relative = median(each / one for each, one in zip(ms, by_width[1], strict=True))
            low, high = order_statistics(ratios := of_the_first(times, name, width), 0.95)
            print(
                f"| {name} | {width} | {median(ms):.1f} | {min(ms):.1f} | {median(ratios):.3f} ({low:.3f} to "
                f"{high:.3f}) | {relative:.2f} |"
            )


def of_the_first(times: dict[str, dict[int, list[float]]], name: str, width: int) -> list[float]:
    first = next(iter(times.values()))[width]
    return [each / one for each, one in zip(times[name][width], first, strict=True)]


def settled(times: dict[str, dict[int, list[float]]], name: str) -> bool:
    for width in WIDTHS:
        ratios = of_the_first(times, name, width)
        low, high = order_statistics(ratios, 0.95)
        if (high - low) / 2 > ENOUGH * median(ratios):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[default_threads()], metavar="N")
    parser.add_argument("--library", type=Path, nargs="+", default=[], metavar="FILE")
    args = parser.parse_args()
    from localspec.model_files.catalog import Catalog

    known = {"wheel": ik_llama.package_library(), "compiled": ik_llama.compiled_library()}
    libraries = {name: path for name, path in known.items() if path is not None}
    libraries |= {str(path): path.absolute() for path in args.library}
    for name in args.models:
        compare(Catalog.load().resolve(name), libraries, args.threads, args.minutes)


if __name__ == "__main__":
    main()
