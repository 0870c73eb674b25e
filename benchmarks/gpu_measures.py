"""What ``gpu_proof.py`` measures, one thing a call; each prints one JSON object as its last line.

    python benchmarks/gpu_measures.py WHAT FILE [--draft FILE] [--cpu] [--repeats N] [--most-rows N]

WHAT is one of

* ``passes``: t(w) over 1 to 64 rows behind 256 tokens, with the logits of every row and of the last alone, whose
  difference is what copying them costs; and reading 512 tokens;
* ``noise``: how much a row's logits depend on the width of its pass;
* ``rounds``: plain rounds and rounds of 8 draft tokens with a draft model: a draft step, the target's pass, and our own
  time, greedy and sampled;
* ``head``: a step of a random head, and of reading for it;
* ``sequences``: one token each of 1 to 32 sequences in one pass.

The engine is llama.cpp, with every layer on the GPU, or none (``--cpu``). Medians; times are in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from localspec import LLM, SamplingParams
from localspec.backends import llama_cpp
from localspec.backends.base import Model
from localspec.backends.sequence_batch import Piece
from localspec.backends.trust import CHECK_TEXT, agreement
from tests.support.heads import write_random_head

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
NOISE_WIDTHS = (2, 4, 8, 16, 32, 64)
N_SEQUENCES = (1, 2, 4, 8, 16, 32)
N_PAST, N_READ = 256, 512


def load(path: Path, args: argparse.Namespace) -> Model:
    return llama_cpp.load(path, n_gpu_layers=0 if args.cpu else None)


def text(model: Model, n: int) -> list[int]:
    """As many tokens of an ordinary text."""
    tokens = model.tokenize(CHECK_TEXT, add_special=True)
    return [tokens[i % len(tokens)] for i in range(n)]


def timed(work: Callable[[], object]) -> float:
    """Milliseconds that it took; an engine has its logits on this side when a pass returns."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def passes(args: argparse.Namespace) -> dict[str, Any]:
    widths = [width for width in WIDTHS if width <= args.most_rows]
    with load(args.file, args) as model, model.new_context(N_PAST + max(N_READ, *widths)) as context:
        tokens = text(model, N_PAST + N_READ)
        found: dict[str, dict[int, list[float]]] = {"all": {}, "last": {}}
        reading = []
        context.decode(tokens[:N_PAST], "none")
        for repeat in range(args.repeats + 1):
            for rows, samples in found.items():
                wanted: Literal["all", "last"] = "all" if rows == "all" else "last"
                for width in widths:
                    ms = timed(lambda: context.decode(tokens[N_PAST : N_PAST + width], wanted))  # noqa: B023
                    context.truncate(N_PAST)
                    if repeat:  # the first of a kind allocates, and compiles graphs
                        samples.setdefault(width, []).append(ms)
            if repeat in (1, 2):
                reading.append(timed(lambda: context.decode(tokens[N_PAST:], "last")))
                context.truncate(N_PAST)
        medians = {rows: {w: statistics.median(ms) for w, ms in samples.items()} for rows, samples in found.items()}
        return {
            "engine": model.engine,
            "device": model.capabilities.device,
            "bytes": args.file.stat().st_size,
            "ms_all_rows": medians["all"],
            "ms_last_row": medians["last"],
            "read_tokens_per_second": N_READ / min(reading) * 1e3,
        }


def noise(args: argparse.Namespace) -> dict[str, Any]:
    n = min(64, args.most_rows)
    with load(args.file, args) as model, model.new_context(N_PAST + n) as context:
        tokens = text(model, N_PAST + n)
        context.decode(tokens[:N_PAST], "none")

        def rows(width: int) -> np.ndarray:
            """Logits of n rows, computed in passes of a width."""
            context.truncate(N_PAST)
            pieces = [tokens[N_PAST + i : N_PAST + min(i + width, n)] for i in range(0, n, width)]
            return np.concatenate([context.decode(piece).logits.copy() for piece in pieces])

        alone, again = rows(1), rows(1)
        spread = np.sort(alone, axis=1)[:, -2:]
        margins = spread[:, 1] - spread[:, 0]
        by_width = {}
        for width in (width for width in NOISE_WIDTHS if width <= n):
            wide = rows(width)
            found = agreement(alone, wide)
            by_width[width] = {
                "largest_difference": float(np.abs(wide - alone).max()),
                "median_difference": float(np.median(np.abs(wide - alone))),
                "mean_kl": found.mean_kl,
                "same_best": found.top1,
            }
        same = bool(np.array_equal(alone, again))
        return {"rows": n, "equal_when_repeated": same, "median_margin": float(np.median(margins)), "widths": by_width}


def rounds(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"backend": "llama-cpp", "n_gpu_layers": 0 if args.cpu else None, "n_ctx": 1024}
    options |= {"light_draft": False, "remember": False, "idle": False}
    found: dict[str, Any] = {}
    with LLM(args.file, [str(args.draft)], **options) as llm:
        found["drafts"] = llm.draft_names
        for name, sampling in (("greedy", {"temperature": 0.0}), ("sampled", {"temperature": 0.8, "top_k": 40})):
            params = SamplingParams(max_tokens=12 * args.repeats, ignore_eos=True, **sampling)
            for kind, drafted in (("plain", {"speculate": False}), ("drafted", {"draft_length": 8})):
                seen = list(llm.rounds(CHECK_TEXT, params, **drafted))[2:]  # type: ignore[arg-type]
                seen = [each for each in seen if kind == "plain" or each.draft]
                found[f"{kind}_{name}"] = {
                    "rounds": len(seen),
                    "ms_pass": statistics.median(each.ms_verify for each in seen),
                    "ms_own": statistics.median(each.ms_other for each in seen),
                    "ms_step": statistics.median(each.ms_draft / len(each.draft) for each in seen)
                    if kind == "drafted"
                    else None,
                }
    return found


def head(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"backend": "llama-cpp", "n_gpu_layers": 0 if args.cpu else None, "n_ctx": 1024}
    with tempfile.TemporaryDirectory() as folder:
        n_vocab = 0
        with load(args.file, args) as model:
            n_vocab = model.n_vocab
        path = write_random_head(args.file, Path(folder) / "head.gguf", n_out=min(32768, n_vocab))
        with LLM(args.file, [f"head:{path}"], remember=False, idle=False, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=12 * args.repeats, ignore_eos=True)
            seen = [each for each in llm.rounds(CHECK_TEXT, params, draft_length=4) if each.draft][2:]
            return {
                "bytes": path.stat().st_size,
                "rounds": len(seen),
                "ms_step": statistics.median(each.ms_draft / len(each.draft) for each in seen),
                "ms_pass": statistics.median(each.ms_verify for each in seen),
                "ms_own": statistics.median(each.ms_other for each in seen),
            }


def sequences(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    with load(args.file, args) as model:
        tokens = text(model, 64 + args.repeats + 1)
        for n in (n for n in N_SEQUENCES if n <= args.most_rows):
            with model.new_batch(n, n * (64 + args.repeats + 1)) as batch:
                for i in range(n):
                    batch[i].decode(tokens[:64], "none")
                samples = []
                for k in range(args.repeats + 1):
                    pieces = [Piece(i, [tokens[64 + k]]) for i in range(n)]
                    samples.append(timed(lambda: batch.decode(pieces)))  # noqa: B023
                ms = statistics.median(samples[1:])
                found[n] = {"ms": ms, "tokens_per_second": n / ms * 1e3}
    return {"sequences": found}


MEASURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "passes": passes,
    "noise": noise,
    "rounds": rounds,
    "head": head,
    "sequences": sequences,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--cpu", action="store_true", help="no layers on a GPU")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--most-rows", type=int, default=64)
    args = parser.parse_args(argv)
    if args.what == "rounds" and args.draft is None:
        parser.error("rounds needs --draft")
    engine = llama_cpp.binding()
    if not args.cpu and not engine.gpu:
        sys.exit("llama-cpp-python is here without a GPU; --cpu measures on the CPU")
    print(json.dumps(MEASURES[args.what](args)))


if __name__ == "__main__":
    main()
