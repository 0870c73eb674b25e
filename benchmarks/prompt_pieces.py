"""How should prompts be read beside other answers? ``benchmarks/load.py``'s requests, with a simulated clock.

    python benchmarks/prompt_pieces.py [--clients 2 4 8] [--requests 30] [--seeds 3] [--slower 1.0]

Policies: ``narrow`` reads every prompt in each pass, as much as keeps that under three plain tokens; ``whole`` reads
up to 512 tokens at once, as llama-server does; ``shipped`` is ``controllers.prompt_pieces``. There is a seat for every
client up to four, nothing is drafted, prompts have 25 tokens that are not known yet (chats), 45 (completions) or 560,
and t(w) is that of Qwen2.5-Coder-1.5B on ik-llama (the wheel) on machine B: 25 ms a token on two cores, and of wider
passes half the CPU time that three answers and a piece of a prompt take on one, 73 ms and 12 for each row of it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.load import KINDS, quantile
from localspec.controllers.batching import LEAST_ROWS, PromptPieces
from localspec.controllers.cost_model import PassTimes
from localspec.spec_decode.decoder import PREFILL_CHUNK

CURVE = {
    1: 25.0,
    3: 36.5,
    4: 44.4,
    7: 59.0,
    8: 64.0,
    11: 86.5,
    19: 133.6,
    32: 209.0,
    67: 428.0,
    131: 828.0,
    512: 3210.0,
}
N_SEATS, GAP_MS, OWN_MS = 4, 500.0, 0.6
UNREAD = {"completion": 45, "long prompt": 560}

Policy = Callable[[int, Sequence[int]], list[int]]
"""Rows of answers and unread tokens of each prompt, first come first -> how many of each go into the pass."""


@dataclass
class Request:
    client: int
    came: float
    unread: int
    n_left: int
    last: float = 0.0


def narrow(times: PassTimes) -> Policy:
    def divide(n_answers: int, unread: Sequence[int]) -> list[int]:
        rows = PREFILL_CHUNK
        while n_answers and rows > LEAST_ROWS and times(n_answers + rows) > 3 * times(1):
            rows -= 1
        return [min(each, max(1, rows // len(unread))) for each in unread]

    return divide


def whole(times: PassTimes) -> Policy:
    def divide(n_answers: int, unread: Sequence[int]) -> list[int]:
        rows, pieces = 512, []
        for each in unread:
            pieces.append(min(each, rows))
            rows -= pieces[-1]
        return pieces

    return divide


def shipped(times: PassTimes) -> Policy:
    pieces = PromptPieces(times)

    def divide(n_answers: int, unread: Sequence[int]) -> list[int]:
        found = pieces.divide(n_answers, unread, [0] * len(unread), PREFILL_CHUNK)
        pieces.observe(n_answers, sum(found), times(n_answers + sum(found)))
        return found

    return divide


def simulate(divide: Policy, times: PassTimes, n_clients: int, n_requests: int, seed: int) -> list[float]:
    """Tokens per second; time to the first token at p50 and p95 [s]; between tokens at p50 and p95, and the longest."""
    rngs = [random.Random(f"{seed} {client}") for client in range(n_clients)]
    comes = [rng.expovariate(1 / GAP_MS) for rng in rngs]
    left = [n_requests] * n_clients
    under_way: list[Request] = []
    firsts: list[float] = []
    gaps: list[float] = []
    now = 0.0
    while under_way or any(left):
        for client in sorted(range(n_clients), key=comes.__getitem__):
            if left[client] and comes[client] <= now and len(under_way) < N_SEATS:
                rng = rngs[client]
                kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
                n_tokens = {"completion": 48, "leaves": 8}.get(kind) or rng.choice([32, 64, 96])
                under_way.append(Request(client, comes[client], UNREAD.get(kind, 25), n_tokens))
                left[client], comes[client] = left[client] - 1, float("inf")
        if not under_way:
            now = min(come for come, n in zip(comes, left, strict=True) if n)
            continue
        reading = sorted((each for each in under_way if each.unread), key=lambda each: each.came)
        answers = [each for each in under_way if not each.unread]
        pieces = divide(len(answers), [each.unread for each in reading]) if reading else []
        now += times(len(answers) + sum(pieces)) + OWN_MS * (1 + len(answers))
        for each in answers:
            (gaps if each.last else firsts).append(now - (each.last or each.came))
            each.last, each.n_left = now, each.n_left - 1
            if not each.n_left:
                under_way.remove(each)
                comes[each.client] = now + rngs[each.client].expovariate(1 / GAP_MS)
        for each, n in zip(reading, pieces, strict=True):
            each.unread -= n
    rate = (len(firsts) + len(gaps)) / now * 1e3
    return [
        rate,
        *(quantile(firsts, q) / 1e3 for q in (0.5, 0.95)),
        *(quantile(gaps, q) for q in (0.5, 0.95)),
        max(gaps),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slower", type=float, default=1.0)
    options = parser.parse_args()
    times = PassTimes({width: options.slower * ms for width, ms in CURVE.items()})
    print("| clients | | tokens/s | first token, s (p50, p95) | between tokens, ms (p50, p95, most) |")
    print("|--:|---|--:|--:|--:|")
    for n in options.clients:
        for policy in (narrow, whole, shipped):
            runs = [simulate(policy(times), times, n, options.requests, seed) for seed in range(options.seeds)]
            rate, first, late, gap, long, most = (sum(values) / len(runs) for values in zip(*runs, strict=True))
            numbers = f"{rate:.1f} | {first:.2f}, {late:.2f} | {gap:.0f}, {long:.0f}, {most:.0f}"
            print(f"| {n} | {policy.__name__} | {numbers} |")


if __name__ == "__main__":
    main()
