"""What our own code costs: plain decoding through ``LLM`` against a bare ctypes loop, and our time per round.

    python benchmarks/overhead.py [MODEL] [--draft DRAFT] [--backend NAME] [--tokens N] [--repeats N]

The bare loop is the least any Python program can do with the same engine: fill a batch of one token, ``llama_decode``,
read the logits, NumPy argmax. Both run the same model, the same prompt and the same number of tokens, alternating, in
one process; medians over the repeats and of the pairwise ratios. Time per round outside the models is ``ms_other`` of
rounds that drafted 8 tokens, plus what drafting took beyond the draft model's passes.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import resource
import statistics
import time

import numpy as np

from localspec import LLM, SamplingParams
from localspec.backends.llama.model import LlamaContext
from localspec.system.machine import cpu_name

PROMPT = "def fibonacci(n):\n    "


def bare_loop(context: LlamaContext, prompt: list[int], n_tokens: int) -> float:
    """Seconds per token of the least loop there is."""
    lib, handle = context._binding.lib, context._handle
    context.truncate(0)
    context.decode(prompt[:-1], "none")
    batch = lib.llama_batch_init(1, 0, 1)
    batch.n_tokens, batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 1, 0, 1
    n_vocab, token = context.model.n_vocab, prompt[-1]
    started = time.perf_counter()
    for position in range(len(prompt) - 1, len(prompt) - 1 + n_tokens):
        batch.token[0], batch.pos[0] = token, position
        lib.llama_decode(handle, batch)
        address = ctypes.cast(lib.llama_get_logits(handle), ctypes.c_void_p).value
        token = int(np.argmax(np.frombuffer((ctypes.c_float * n_vocab).from_address(address), dtype=np.float32)))
    seconds = time.perf_counter() - started
    lib.llama_batch_free(batch)
    context._binding.remove(handle, 0)
    context.tokens = []
    return seconds / n_tokens


def through_llm(llm: LLM, n_tokens: int) -> float:
    """Seconds per token of plain decoding, as a caller sees it: first round to last."""
    params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
    arrivals = []
    for _ in llm.rounds(PROMPT, params, speculate=False):
        arrivals.append(time.perf_counter())
    return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)


def per_round(llm: LLM, params: SamplingParams) -> float:
    """Median milliseconds outside the models in rounds with 8 drafted tokens."""
    llm.chat([{"role": "user", "content": "Count: 1 2 3 4 5 6 7 8 9 10 11 12"}], params, speculate=False)
    rounds = llm.rounds([{"role": "user", "content": "Count: 1 2 3 4 5 6 7 8 9 10 11 12"}], params, draft_length=8)
    times = [round_.ms_other for round_ in rounds if len(round_.draft) == 8]
    return statistics.median(times) if times else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with LLM(args.model, draft=args.draft, backend=args.backend, n_ctx=1024) as llm:
        loaded = llm.inspect()
        context = loaded.target.new_context(1024)
        assert isinstance(context, LlamaContext)
        prompt = llm.tokenize(PROMPT, add_special=True)
        # On the worker thread: GNU OpenMP keeps a pool of threads for every thread that decodes, and two are in each
        # other's way.
        llm.run(lambda pair: bare_loop(context, prompt, 8))
        through_llm(llm, 8)
        bare, ours = [], []
        for _ in range(args.repeats):
            bare.append(llm.run(lambda pair: bare_loop(context, prompt, args.tokens)))
            ours.append(through_llm(llm, args.tokens))
        context.close()
        ratio = statistics.median(b / o for b, o in zip(bare, ours, strict=True))
        print(f"{cpu_name()}, Python {platform.python_version()}, {llm.engine}, {args.model}, draft {llm.draft_names}")
        speeds = [1 / statistics.median(seconds) for seconds in (bare, ours)]
        print(f"bare loop {speeds[0]:.1f} tok/s, LLM {speeds[1]:.1f} tok/s, ratio {ratio:.3f}")
        greedy = per_round(llm, SamplingParams(max_tokens=200, ignore_eos=True))
        sampled = per_round(llm, SamplingParams(temperature=0.8, top_k=40, max_tokens=200, ignore_eos=True))
        print(f"outside the models, rounds of 8 drafted tokens: greedy {greedy:.2f} ms, top-k 40 {sampled:.2f} ms")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        weights = sum(m.size_bytes for m in [loaded.target, *(draft.model for draft in loaded.state.models)]) / 2**20
        print(f"peak resident {peak / 1024:.0f} MiB ({before / 1024:.0f} before loading); weights {weights:.0f} MiB")


if __name__ == "__main__":
    main()
