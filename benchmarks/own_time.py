"""Our own time in a round, against passes of 5, 10 and 20 ms: what a fast device leaves us.

    python -m benchmarks.own_time [--ms 5 10 20] [--tokens N] [--vocab N] [--spin] [--json FILE] [--profile NAME]
                                  [--against DIR]

Through ``LLM``, with an engine whose passes wait instead of computing (tests/support/waiting_engine.py), over 152k
logits. Own time is the whole time of a round less what target and draft waited; handing the round to whoever reads the
stream is in it, so far as it is not done while the device is at the next pass. A wait sleeps; with ``--spin`` it keeps
a processor busy, as CUDA does by default: the processor's caches and clock are then what they are beside a GPU. Each
line is a way to decode: plain and with n-grams as ``auto`` does, a draft model with a fixed length and chosen by
``auto``, greedily and sampled. The draft model is right four times in five and takes a tenth of the target's pass;
*best rows* are engines that hand out the 64 largest logits of each row, as found on their device: putting them in order
is our own time. Medians over rounds after the first eight, by the clock and in time of the processor, which other
programs disturb less; the share is that of the time by the clock, the passes taken to last as long as they should.
``--profile`` prints where one of the ways spends its time. ``--against`` names another checkout, such as a worktree of
an earlier commit: both measure each way in turns, in processes of their own, and of the repeats the least disturbed
counts.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from localspec import LLM, SamplingParams
from localspec.engine.answer import rounds
from localspec.system.machine import cpu_name
from tests.support import ggufs
from tests.support.gguf_vocabs import bpe_vocab
from tests.support.waiting_engine import Timing, WaitingModel, waiting

GREEDY = SamplingParams(ignore_eos=True)
TOP_K = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, ignore_eos=True, seed=1)
SAMPLED = SamplingParams(temperature=0.8, ignore_eos=True)
BEST = "best"
WAYS: dict[str, tuple[SamplingParams, str | int, str | None]] = {
    "greedy, plain": (GREEDY, 0, None),
    "greedy, auto, n-grams": (GREEDY, "auto", "ngram"),
    "greedy, draft of 4": (GREEDY, 4, "model"),
    "greedy, draft of 8": (GREEDY, 8, "model"),
    "greedy, auto, draft": (GREEDY, "auto", "model"),
    "top-k 40, top-p 0.95, draft of 4": (TOP_K, 4, "model"),
    "greedy, draft of 4, best rows": (GREEDY, 4, BEST),
    "greedy, auto, draft, best rows": (GREEDY, "auto", BEST),
    "top-k 40, top-p 0.95, draft of 4, best rows": (TOP_K, 4, BEST),
    "whole law, plain": (SAMPLED, 0, None),
    "whole law, draft of 4": (SAMPLED, 4, "model"),
    "whole law, auto, draft": (SAMPLED, "auto", "model"),
}
WARM_ROUNDS = 8


@contextmanager
def loaded(ms: float, n_vocab: int, draft: str | None, *, spins: bool = False) -> Iterator[LLM]:
    """A waiting pair."""
    with tempfile.TemporaryDirectory() as folder:
        shape = ggufs.Shape(n_layer=1, n_embd=8, n_head=1, n_head_kv=1, n_ff=8, n_ctx=8192)
        files = ggufs.correlated_pair(Path(folder), bpe_vocab(300), shape=shape)
        best = draft == BEST
        target = Timing(ms, n_vocab=n_vocab, best=best, spins=spins)
        small = replace(target, ms=ms / 10, right=0.8)
        with waiting({files.target: target, files.draft: small}):
            named = files.draft if draft in ("model", BEST) else draft
            with LLM(files.target, draft=named, backend="reference", idle=False, remember=False) as llm:
                yield llm


def rounds_of(llm: LLM, way: str, n_tokens: int) -> list[dict[str, float]]:
    """Of each round: our own time by the clock and of the processor, and what its passes should last [ms]."""
    params, length, _ = WAYS[way]
    models = [
        m for m in (llm.inspect().target, *(d.model for d in llm.inspect().state.models)) if isinstance(m, WaitingModel)
    ]
    stream = llm.rounds("One two three", replace(params, max_tokens=n_tokens), draft_length=length)
    found: list[dict[str, float]] = []
    before = None
    for _ in stream:
        waits, busy = sum(model.seconds for model in models), sum(model.cpu_seconds for model in models)
        nominal = sum(model.nominal_ms for model in models)
        now = np.array([(time.perf_counter() - waits) * 1e3, (time.process_time() - busy) * 1e3, nominal])
        if before is not None:
            found.append(dict(zip(("own", "cpu", "models"), (now - before).tolist(), strict=True)))
        before = now
    return found[WARM_ROUNDS:]


def profile(way: str, ms: float, n_tokens: int, n_vocab: int, *, spins: bool) -> None:
    """Where the engine's thread spends its own time."""
    with loaded(ms, n_vocab, WAYS[way][2], spins=spins) as llm:
        rounds_of(llm, way, 64)
        params, length, _ = WAYS[way]
        profiler = cProfile.Profile()

        def work(pair: Any) -> int:
            fixed = replace(params, max_tokens=n_tokens)
            prompt = pair.target.tokenize("One two three")
            profiler.enable()
            n = sum(1 for _ in rounds(pair, prompt, fixed, length, lambda n: None, lambda: False))
            profiler.disable()
            return n

        n_rounds = llm.run(work)
    print(f"{way}: {n_rounds} rounds")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(28)


def side_by_side(args: argparse.Namespace) -> None:
    """This checkout and another, in turns; of each the repeat with the smallest median counts."""
    here = Path(__file__).resolve().parent.parent
    print("| way | " + " | ".join(f"{ms:g} ms: before (CPU), share; now (CPU), share" for ms in args.ms) + " |")
    print("|---|" + "---|" * len(args.ms))
    for way in args.ways:
        cells = []
        for ms in args.ms:
            runs: dict[Path, list[dict[str, float]]] = {args.against.resolve(): [], here: []}
            for _ in range(args.repeats):
                for folder, found in runs.items():
                    with tempfile.NamedTemporaryFile(suffix=".json") as file:
                        options = [
                            "--ways",
                            way,
                            "--ms",
                            str(ms),
                            "--tokens",
                            str(args.tokens),
                            "--vocab",
                            str(args.vocab),
                        ]
                        options += ["--spin"] * args.spin
                        command = [sys.executable, "-m", "benchmarks.own_time", *options, "--json", file.name]
                        env = {**os.environ, "PYTHONPATH": str(folder)}
                        subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
                        found += json.loads(Path(file.name).read_text(encoding="utf-8"))
            parts = []
            for found in runs.values():
                own, cpu, models = (min(run[of] for run in found) for of in ("own_ms", "cpu_ms", "models_ms"))
                parts.append(f"{own:.2f} ({cpu:.2f}), {own / (own + models):.1%}")
            cells.append("; ".join(parts))
        print(f"| {way} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ms", type=float, nargs="+", default=[5.0, 10.0, 20.0])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--spin", action="store_true", help="wait as CUDA does by default, the processor being busy")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="; ".join(WAYS))
    parser.add_argument("--profile", choices=WAYS, metavar="WAY", help="profile this way at the first --ms")
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="another checkout to measure in turns with this one"
    )
    parser.add_argument("--repeats", type=int, default=3, help="how often, with --against")
    args = parser.parse_args()
    if args.against:
        side_by_side(args)
        return
    with tempfile.TemporaryDirectory() as home:
        os.environ["LOCALSPEC_HOME"] = home
        if args.profile:
            profile(args.profile, args.ms[0], args.tokens, args.vocab, spins=args.spin)
            return
        print(f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, {args.vocab} logits\n")
        print("| way | " + " | ".join(f"{ms:g} ms: own (CPU), share" for ms in args.ms) + " |")
        print("|---|" + "---|" * len(args.ms))
        results = []
        for way in args.ways:
            cells = []
            for ms in args.ms:
                with loaded(ms, args.vocab, WAYS[way][2], spins=args.spin) as llm:
                    rounds = rounds_of(llm, way, args.tokens)
                own, cpu, models = (statistics.median(each[of] for each in rounds) for of in ("own", "cpu", "models"))
                cells.append(f"{own:.2f} ({cpu:.2f}), {own / (own + models):.1%}")
                results.append({"way": way, "ms": ms, "own_ms": own, "cpu_ms": cpu, "models_ms": models})
            print(f"| {way} | " + " | ".join(cells) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
