"""What our own probability work costs: the time of ``verify`` for 8 drafted tokens on a vocabulary of 151,936.

    python benchmarks/probability_cost.py

Settings alternate within every repeat, so that a noisy machine hits all of them alike; figures are medians. All guesses
are accepted, the most expensive case: every row is looked at. Logits are synthetic, shaped like a model's: most tokens
far below a few candidates.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time

import numpy as np

from localspec.sampling.sampling import Noise, SamplingParams, distribution
from localspec.spec_decode.rounds import Draft, DraftToken
from localspec.spec_decode.verification import STREAM_TARGET, verify

SETTINGS = {
    "greedy": (SamplingParams(), 1.0),
    "greedy, repeat penalty": (SamplingParams(repeat_penalty=1.1), None),
    "temperature 0.8, top-k 40": (SamplingParams(temperature=0.8, top_k=40, seed=1), 3.0),
    "temperature 0.8, top-k 40, penalty": (SamplingParams(temperature=0.8, top_k=40, repeat_penalty=1.1, seed=1), None),
    "temperature 0.8, top-k 40, top-p 0.95": (SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1), 3.0),
    "temperature 0.8, min-p 0.05": (SamplingParams(temperature=0.8, min_p=0.05, seed=1), None),
    "temperature 0.8, top-p 0.95": (SamplingParams(temperature=0.8, top_p=0.95, seed=1), None),
    "temperature 0.8, unrestricted": (SamplingParams(temperature=0.8, seed=1), None),
}
"""Name -> parameters and, where there is one, the target in milliseconds."""


def synthetic_logits(n_rows: int, n_vocab: int, seed: int = 0) -> np.ndarray:
    """Logits like a language model's: a normal bulk and a few dozen candidates above it [n_rows, n_vocab]."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, 2.0, (n_rows, n_vocab)).astype(np.float32)
    for row in logits:
        row[rng.integers(0, n_vocab, 60)] = 8.0 + rng.exponential(3.0, 60)
    return logits


def accepted_draft(logits: np.ndarray, tokens: list[int], params: SamplingParams) -> Draft:
    """Deterministic guesses that ``verify`` will accept."""
    draft, history, noise = Draft(), list(tokens), Noise(params.seed)
    for i in range(len(logits) - 1):
        token = distribution(logits[i], history, params).sample(noise, len(tokens) + i, STREAM_TARGET)
        draft.append(DraftToken(token, "bench", 1.0))
        history.append(token)
    return draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--drafted", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    logits = synthetic_logits(args.drafted + 1, args.vocab)
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, args.vocab, 1000)]
    drafts = {name: accepted_draft(logits, tokens, params) for name, (params, _) in SETTINGS.items()}
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(args.repeats):
        for name, (params, _) in SETTINGS.items():
            # The engine has just written the logits in a round; a cache full of another setting's rows is no worse.
            started = time.perf_counter()
            verdict = verify(drafts[name], logits, tokens, params, Noise(params.seed))
            times[name].append((time.perf_counter() - started) * 1e3)
            assert verdict.n_accepted == args.drafted
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"NumPy {np.__version__}; {args.drafted} drafted tokens, vocabulary {args.vocab}, {args.repeats} repeats"
    )
    print(f"{'setting':40} {'median ms':>9} {'fastest':>8} {'target':>7}")
    for name, (_, target) in SETTINGS.items():
        goal = f"{target:.1f}" if target else ""
        print(f"{name:40} {statistics.median(times[name]):9.2f} {min(times[name]):8.2f} {goal:>7}")


if __name__ == "__main__":
    main()
