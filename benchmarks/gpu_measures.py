"""What ``gpu_proof.py`` measures, one thing a call; each prints one JSON object as its last line.

    python benchmarks/gpu_measures.py WHAT FILE [--draft FILE] [--cpu] [--repeats N] [--most-rows N]

WHAT is one of

* ``passes``: t(w) over 1 to 64 rows behind 256 tokens, with the logits of every row and of the last alone, whose
  difference is what copying them costs; and reading 512 tokens;
* ``noise``: how much a row's logits depend on the width of its pass;
* ``rounds``: plain rounds and rounds of 8 draft tokens with a draft model: a draft step, the target's pass, and our own
  time, which is what a round takes while no pass runs, greedy and sampled; and how soon the engine comes back from a
  pass, so that the round before can be finished beside it;
* ``ahead``: drafting while the target verifies, the target on the GPU and the draft on the CPU: the target's pass and a
  draft step, each alone and beside the other; then seconds of the ordinary order over seconds of drafting ahead;
* ``head``: a step of a random head, and of reading for it;
* ``sequences``: one token each of 1 to 32 sequences in one pass.

The engine is llama.cpp, with every layer on the GPU, or none (``--cpu``). Medians; times are in milliseconds.

Two files of random weights never agree, so ``ahead`` says for both what comes: the passes are run and take what they
take, then the logits of three tokens in each row are overwritten. At every place the target has one token that it is
sure of, and the draft names it first in four places of five. The ordinary order has the same rows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from localspec import LLM, SamplingParams
from localspec.backends.base import Context, Forward, Model, Piece
from localspec.backends.llama import llama_cpp
from localspec.backends.llama.model import LlamaContext
from localspec.backends.trust import CHECK_TEXT, agreement
from localspec.controllers.fixed import FixedController
from localspec.engine.answer import rounds as rounds_of_pair
from localspec.engine.pair import Pair
from localspec.spec_decode.ahead import DraftAhead
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.rounds import Round
from tests.support.heads import write_random_head

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
NOISE_WIDTHS = (2, 4, 8, 16, 32, 64)
N_SEQUENCES = (1, 2, 4, 8, 16, 32)
N_PAST, N_READ = 256, 512
N_DRAFT, ACCEPTANCE, SECOND = 4, 0.8, 0.5
"""Of ``ahead``: draft tokens a round, how often one is right, and how often the draft's second is where it is not."""


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


class PassClock:
    """How long passes have taken so far; within the block, where one thread runs them."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __enter__(self) -> PassClock:
        self._feed = feed = Context._feed

        def timed(context: Context, tokens: Sequence[int], compute: Callable[[], Forward]) -> Forward:
            since = time.perf_counter()
            try:
                return feed(context, tokens, compute)
            finally:
                self._seconds += time.perf_counter() - since

        Context._feed = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        Context._feed = self._feed  # type: ignore[method-assign]

    def elsewhere(self) -> float:
        """The time, less that of the passes so far [s]; asked for in the thread that computes them."""
        return time.perf_counter() - self._seconds


def watched(llm: LLM, params: SamplingParams, draft_length: int) -> list[tuple[Round, float]]:
    """The rounds of an answer, after the first two, with our own time in each [ms].

    In the engine's own thread: another one may find the next pass begun already, or read two rounds at once.
    """

    def work(pair: Pair) -> list[tuple[Round, float]]:
        found: list[tuple[Round, float]] = []
        prompt = pair.target.tokenize(CHECK_TEXT, add_special=True)
        with PassClock() as clock:
            before = clock.elsewhere()
            for round_ in rounds_of_pair(pair, prompt, params, draft_length, lambda n: None, lambda: False):
                now = clock.elsewhere()
                found.append((round_, (now - before) * 1e3))
                before = now
        return found[2:]

    return llm.run(work)


def medians(seen: Sequence[tuple[Round, float]]) -> dict[str, Any]:
    """Of rounds that all have a draft, or none."""
    steps = [each.ms_draft / len(each.draft) for each, _ in seen if each.draft]
    return {
        "rounds": len(seen),
        "ms_pass": statistics.median(each.ms_verify for each, _ in seen),
        "ms_own": statistics.median(own for _, own in seen),
        "ms_step": statistics.median(steps) if steps else None,
    }


def rounds(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"backend": "llama-cpp", "n_gpu_layers": 0 if args.cpu else None, "n_ctx": 1024}
    options |= {"light_draft": False, "remember": False, "idle": False}
    found: dict[str, Any] = {}
    with LLM(args.file, [str(args.draft)], **options) as llm:
        found["drafts"] = llm.draft_names
        for name, sampling in (("greedy", {"temperature": 0.0}), ("sampled", {"temperature": 0.8, "top_k": 40})):
            params = SamplingParams(max_tokens=12 * args.repeats, ignore_eos=True, **sampling)
            for kind, length in (("plain", 0), ("drafted", 8)):
                seen = [pair for pair in watched(llm, params, length) if kind == "plain" or pair[0].draft]
                found[f"{kind}_{name}"] = medians(seen)
        found["ms_to_begin"] = llm.run(lambda pair: ms_to_begin(pair.context))
        found["overlaps"] = llm.run(lambda pair: pair.context.overlaps)
    return found


def ms_to_begin(context: Context) -> float:
    """How soon the engine came back from the last short passes: before a device has computed them, if it is one."""
    assert isinstance(context, LlamaContext)
    return statistics.median(context.passes._ms_to_begin)


class Script:
    """What a target and its draft say at each place of a text, whatever they compute.

    Args:
        n_vocab: tokens that both have.
        acceptance: share of the places at which the draft names the target's token first.
    """

    def __init__(self, n_vocab: int, acceptance: float) -> None:
        self.n_vocab, self.acceptance = n_vocab, acceptance

    def ranks(self, position: int, drafts: bool) -> dict[int, float]:
        """The most probable tokens at a place, with their probabilities."""
        chance = random.Random(position)
        right, near = chance.random() < self.acceptance, chance.random() < SECOND
        truth, other, third = chance.sample(range(16, min(256, self.n_vocab)), 3)
        if not drafts:
            return {truth: 0.9, other: 0.05, third: 0.01}
        rest = 1 - self.acceptance
        first, second, last = (truth, other, third) if right else (other, *((truth, third) if near else (third, truth)))
        return {first: self.acceptance, second: rest * SECOND, last: rest * (1 - SECOND) / 2}

    def play(self, context: Context, drafts: bool) -> Context:
        """Let a context say it."""
        decode = context.decode
        # Logits of random weights have a deviation of about 1: so much is the logarithm of a row's sum of exponentials.
        level = np.log(context.model.n_vocab) + 0.5

        def scripted(tokens: Sequence[int], logits: Literal["all", "last", "none"] = "all", n_best: int = 0) -> Forward:
            forward = decode(tokens, logits)  # all of them, whatever was asked for: they are changed below
            for i, row in enumerate(forward.logits, context.n_past - len(forward.logits) + 1):
                ranks = self.ranks(i, drafts)
                left = 1 - sum(ranks.values())
                for token, probability in ranks.items():
                    row[token] = level + np.log(probability / left)
            return forward

        context.decode = scripted  # type: ignore[method-assign]
        context.finds_best = False
        return context


def ahead(args: argparse.Namespace) -> dict[str, Any]:
    n_tokens, n_ctx = 12 * args.repeats, N_PAST + 12 * args.repeats + 32
    with load(args.file, args) as model, llama_cpp.load(args.draft, n_gpu_layers=0) as small:
        tokens = text(model, N_PAST + n_ctx)
        script = Script(min(model.n_vocab, small.n_vocab), ACCEPTANCE)
        found: dict[str, Any] = {
            "target_device": model.capabilities.device,
            "draft_device": small.capabilities.device,
            "draft_threads": small.n_threads,
        }
        with model.new_context(n_ctx) as target, small.new_context(n_ctx) as draft:

            def pass_ms() -> float:
                ms = timed(lambda: target.decode(tokens[N_PAST : N_PAST + N_DRAFT + 1]))
                target.truncate(N_PAST)
                return ms

            def step_ms() -> float:
                ms = timed(lambda: draft.decode(tokens[N_PAST : N_PAST + 1], "last"))
                draft.truncate(N_PAST)
                return ms

            for context in (target, draft):
                context.decode(tokens[:N_PAST], "none")
            pass_ms(), step_ms()  # the first of a kind allocates, and compiles graphs
            n = max(4, args.repeats)
            passes, steps = [pass_ms() for _ in range(n)], [step_ms() for _ in range(n)]
            found |= {"ms_pass": statistics.median(passes), "ms_step": statistics.median(steps)}
            beside: list[float] = []
            ended, begun = threading.Event(), threading.Event()

            def keep_drafting() -> None:
                try:
                    while not ended.is_set():
                        beside.append(step_ms())
                        begun.set()
                finally:
                    begun.set()

            thread = threading.Thread(target=keep_drafting)
            thread.start()
            begun.wait()
            passes = [pass_ms() for _ in range(n)]
            while len(beside) < 4 and thread.is_alive():
                passes.append(pass_ms())
            ended.set()
            thread.join()
            found |= {"ms_pass_beside": statistics.median(passes), "ms_step_beside": statistics.median(beside[1:])}
        with model.new_context(n_ctx) as target, small.new_context(n_ctx) as draft:
            script.play(target, drafts=False)
            script.play(draft, drafts=True)

            def answer(preparer: DraftAhead | None) -> tuple[float, list[int], dict[str, int]]:
                draft.truncate(0)
                drafter, controller = DraftModelDrafter(draft), FixedController(N_DRAFT)
                decoder = SpeculativeDecoder(target, [drafter], controller, ahead=preparer)
                decoder.prefill(tokens[:N_PAST], lambda: False)
                params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
                stream = decoder.rounds(tokens[:N_PAST], params, TextAssembler(model.vocab, ()))
                seen = [next(stream)]  # in it the draft reads the prompt
                started = time.perf_counter()
                seen += stream
                seconds = time.perf_counter() - started
                counts = [each.ahead for each in seen if each.ahead is not None]
                prepared = {
                    "rounds": len(seen),
                    "accepted": sum(each.verdict.n_accepted for each in seen),
                    "drafted": sum(len(each.draft) for each in seen),
                    "hits": sum(count.hit for count in counts),
                    "prepared": sum(count.prepared for count in counts),
                    "taken": sum(count.taken for count in counts),
                }
                return seconds, [token.id for each in seen for token in each.emitted], prepared

            ways: dict[str, list[float]] = {"ordinary": [], "ahead": []}
            said, counted = [], {}
            for _ in range(2 if args.repeats < 10 else 3):
                for way, samples in ways.items():
                    seconds, ids, counts = answer(DraftAhead(cautious=False) if way == "ahead" else None)
                    samples.append(seconds)
                    said.append(ids)
                    counted[way] = counts
            assert all(ids == said[0] for ids in said), "drafting ahead changed the text"
            medians = {way: statistics.median(samples) for way, samples in ways.items()}
            found |= {"seconds": medians, "speedup": medians["ordinary"] / medians["ahead"], "counts": counted}
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
            seen = [(each, own) for each, own in watched(llm, params, 4) if each.draft]
            return {"bytes": path.stat().st_size, **medians(seen)}


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
    "ahead": ahead,
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
    if args.what in ("rounds", "ahead") and args.draft is None:
        parser.error(f"{args.what} needs --draft")
    engine = llama_cpp.binding()
    if not args.cpu and not engine.gpu:
        sys.exit("llama-cpp-python is here without a GPU; --cpu measures on the CPU")
    print(json.dumps(MEASURES[args.what](args)))


if __name__ == "__main__":
    main()
