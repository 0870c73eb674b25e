"""Where to keep a conversation that is not the present one: copied out of the context, or as a second sequence in it?

    python benchmarks/prefix_cache.py MODEL.gguf [--backend ik-llama|llama-cpp] [--tokens 1500] [--kv-cache f16]

Copying costs once per switch; the bytes lie in ordinary memory. A second sequence costs nothing to switch to, but its
cells lie in the context that all conversations share, and every pass walks over them. Both are measured here on one
context each, next to what reading the conversation again would take. Figures are medians; the passes of the two
contexts are taken in turns, so that what else the machine does meets both alike.

The second part uses llama.cpp's own sequences and needs ``--backend llama-cpp``, with a unified cache (what several
sequences of up to the whole context need).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from localspec import backends
from localspec.backends.llama.binding import N_BATCH, N_UBATCH
from localspec.backends.llama.model import LlamaModel

TEXT = Path(__file__).read_text(encoding="utf-8")


def seconds(function: Any, *args: Any) -> float:
    started = time.perf_counter()
    function(*args)
    return time.perf_counter() - started


def copying(model: LlamaModel, tokens: list[int], repeats: int) -> None:
    with model.new_context(len(tokens) + 256) as context:
        reading = seconds(context.decode, tokens, "none")
        exports, imports = [], []
        for _ in range(repeats):
            exports.append(seconds(context.export_state))
            state = context.export_state()
            context.truncate(0)
            imports.append(seconds(context.import_state, state))
    out, back = statistics.median(exports) * 1e3, statistics.median(imports) * 1e3
    size = state.n_bytes / 1e6
    print(f"reading {len(tokens)} tokens: {reading:.2f} s")
    print(
        f"copied out: {out:.1f} ms, copied in: {back:.1f} ms ({size:.1f} MB, {size * 1e3 / len(tokens):.1f} kB a token)"
    )
    print(f"a switch costs {(out + back) / 1e3 / reading:.2%} of reading again")


def two_sequences(model: LlamaModel, tokens: list[int], own: int, repeats: int) -> None:
    """Time of a one-token pass with and without another conversation's cells in the cache."""
    import llama_cpp as lib

    def new(n_seq: int) -> int:
        params = lib.llama_context_default_params()
        params.n_ctx = -(-(len(tokens) + own + 64) // 256) * 256
        params.n_batch, params.n_ubatch, params.n_seq_max = N_BATCH, N_UBATCH, n_seq
        params.n_threads = params.n_threads_batch = model.n_threads
        params.kv_unified, params.swa_full, params.no_perf = True, True, True
        ctx = lib.llama_init_from_model(model.handle, params)
        assert ctx
        return int(ctx)

    batch = lib.llama_batch_init(N_BATCH, 0, 1)

    def decode(ctx: int, ids: list[int], start: int, sequence: int) -> None:
        for at in range(0, len(ids), N_BATCH):
            piece = ids[at : at + N_BATCH]
            batch.n_tokens = len(piece)
            for i, token in enumerate(piece):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + at + i, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, i == len(piece) - 1
            assert lib.llama_decode(ctx, batch) == 0
        lib.llama_synchronize(ctx)

    alone, shared = new(1), new(2)
    decode(shared, tokens, 0, 1)
    for ctx in (alone, shared):
        decode(ctx, tokens[:own], 0, 0)
    times: dict[int, list[float]] = {alone: [], shared: []}
    for _ in range(repeats):
        for ctx in (alone, shared):
            times[ctx].append(seconds(decode, ctx, [tokens[own]], own, 0))
            lib.llama_memory_seq_rm(lib.llama_get_memory(ctx), 0, own, -1)
    plain, crowded = (statistics.median(times[ctx]) * 1e3 for ctx in (alone, shared))
    ratios = np.array(times[shared]) / np.array(times[alone])
    low, high = np.percentile(
        [np.median(np.random.default_rng(i).choice(ratios, len(ratios))) for i in range(1000)], [2.5, 97.5]
    )
    print(
        f"a pass of one token at {own}: {plain:.1f} ms alone, {crowded:.1f} ms beside {len(tokens)} foreign cells: "
        f"x {np.median(ratios):.3f} (95 % {low:.3f} to {high:.3f})"
    )
    lib.llama_batch_free(batch)
    for ctx in (alone, shared):
        lib.llama_free(ctx)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="llama-cpp", choices=["llama-cpp", "ik-llama"])
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--own", type=int, default=300, help="tokens of the present conversation")
    parser.add_argument("--kv-cache", default="f16")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    model = backends.load(options.model, options.backend, kv_type=options.kv_cache, check=False)
    assert isinstance(model, LlamaModel)
    text = model.tokenize(TEXT)
    tokens = (text * (options.tokens // len(text) + 1))[: options.tokens]
    print(f"{options.model.name} · {model.engine} · {model.n_threads} threads · cache {options.kv_cache}")
    copying(model, tokens, options.repeats)
    if options.backend == "llama-cpp":
        two_sequences(model, tokens, min(options.own, len(tokens) - 1), options.repeats)
    model.close()


if __name__ == "__main__":
    main()
