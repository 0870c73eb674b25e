"""A target on two RPC servers, with delay put in between: does speculation hide the network?

    python benchmarks/network_delay.py TARGET [--draft MODEL] [--delays 0 2 10 50] [--max-tokens 64] [--draft-length N]
                                       [--json FILE]

Two servers are started on loopback, each behind a proxy that lets every byte arrive later, half of the delay each way:
the delay is that of a round trip to one server, and a pass waits for both, one after the other. The draft runs here.
For each delay the same questions are answered plainly and with the controller's own choice, in turns; where servers are
far enough away for drafting while the target verifies, a third arm does without it. Each arm has servers and a pair of
its own, loaded and calibrated anew, so that none gains by what another has learned. It needs
``python -m localspec.backends.rpc_build`` once.

t(1) and t(8) are what was calibrated; "ratio" is auto against plain, "in order" the third arm against plain; "sent" is
the draft tokens of a round in which any were sent, "a round" the tokens that a round settles; "prepared" the draft
tokens made while the target verified, "in vain" those of them that were not sent, "rounds prepared for" those whose
draft, or its beginning, was there; "same" how many answers, all greedy, were the same text every way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from localspec import LLM, EngineError, Placement, SamplingParams
from localspec.backends.llama.rpc import ask
from localspec.engine.request import DraftLength, checked_length
from localspec.system.files import home
from localspec.system.machine import cpu_name

QUESTIONS = (
    "Write a Python class for a stack with push, pop, peek, is_empty and __len__, with docstrings.",
    "Rename the variable x to total in this code, and print all of it:\n"
    "def add(values):\n    x = 0\n    for value in values:\n        x = x + value\n    return x\n",
    "List the names and years in this text as JSON: Ada Lovelace wrote in 1843, Alan Turing in 1936, Grace Hopper in "
    "1952, Donald Knuth in 1968.",
    "Explain in a few sentences why the sky is blue.",
)


class Delay:
    """A proxy that lets every byte arrive later.

    Args:
        address: where it leads.
        delay_s: half of it each way.
    """

    def __init__(self, address: str, delay_s: float) -> None:
        self._target, self._delay_s = address, delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = [self._listener]
        threading.Thread(target=self._run, daemon=True).start()

    def __enter__(self) -> Delay:
        return self

    def __exit__(self, *exc: object) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # closing alone leaves a thread that waits for it waiting
            each.close()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(near)
            host, _, port = self._target.rpartition(":")
            far = socket.create_connection((host, int(port)))
            self._open.append(far)
            for one, other in ((near, far), (far, near)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=self._read, args=(one, waiting), daemon=True).start()
                threading.Thread(target=self._write, args=(other, waiting), daemon=True).start()

    def _read(self, source: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"x"
        while data:
            try:
                data = source.recv(1 << 18)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self._delay_s / 2, data))

    def _write(self, sink: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        with suppress(OSError):
            while True:
                due, data = waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)


@contextmanager
def server(threads: int) -> Iterator[str]:
    """A server in a process of its own; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "localspec.backends.rpc_server", "--port", str(port), "--threads", str(threads)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit("the server ended: python -m localspec.backends.rpc_build first")
            with suppress(EngineError):
                ask(f"127.0.0.1:{port}")
                break
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


ARMS: dict[str, dict[str, Any]] = {"plain": {"speculate": False}, "auto": {}, "in order": {}}
"""``in order`` is ``auto`` without drafting while the target verifies."""


def measure(
    model: str,
    draft: str | None,
    delay_ms: float,
    servers: Mapping[str, Sequence[str]],
    max_tokens: int,
    length: DraftLength,
) -> dict[str, Any]:
    """All questions at one delay; ``servers`` by arm."""
    drafts = ["ngram"] if draft is None else ["ngram", draft]
    options: dict[str, Any] = {"idle": False, "remember": False, "light_draft": False}
    found: dict[str, Any] = {"delay_ms": delay_ms, "same": 0, "n": len(QUESTIONS)}
    with ExitStack() as stack:
        pairs: dict[str, LLM] = {}
        for name, addresses in servers.items():
            proxies = [stack.enter_context(Delay(each, delay_ms / 1e3)) for each in addresses]
            placement = Placement(rpc=tuple(each.address for each in proxies), tensor_split=(1, 1))
            pair = LLM(model, drafts, placement=placement, n_ctx=1024, prefix_cache_bytes=0, **options)
            pairs[name] = stack.enter_context(pair)
        found["t"] = {w: round(pairs["auto"].run(lambda pair, w=w: pair.times(w)), 2) for w in (1, 2, 4, 8, 16)}  # type: ignore[misc]
        found["ahead"] = pairs["auto"].run(lambda pair: pair.state.drafting_ahead is not None)
        arms = [name for name in ARMS if name != "in order" or found["ahead"]]
        sums = {name: dict.fromkeys((*COUNTED, "seconds", "drafted"), 0.0) for name in arms}
        for i, question in enumerate(QUESTIONS):
            texts = set()
            for name in arms[i % len(arms) :] + arms[: i % len(arms)]:
                texts.add(answer(pairs[name], question, name, max_tokens, sums[name], length))
            found["same"] += len(texts) == 1
    for name, each in sums.items():
        found[name] = {
            "tokens_per_second": round(each["completion_tokens"] / each["seconds"], 2),
            "tokens_per_round": round(each["completion_tokens"] / max(1, each["num_rounds"]), 2),
            "sent_per_drafted_round": round(each["num_draft_tokens"] / max(1, each["drafted"]), 2),
            "share_drafted": round(each["drafted"] / max(1, each["num_rounds"]), 2),
            "prepared": int(each["num_ahead_tokens"]),
            "in_vain": int(each["num_ahead_tokens"] - each["num_ahead_tokens_used"]),
            "hits": int(each["num_ahead_hits"]),
        }
    return found


COUNTED = ("completion_tokens", "num_rounds", "num_draft_tokens", "num_ahead_tokens", "num_ahead_tokens_used",
           "num_ahead_hits")  # fmt: skip


def answer(llm: LLM, question: str, arm: str, max_tokens: int, sums: dict[str, float], length: DraftLength) -> str:
    """One answer, its statistics added to the sums."""
    messages = [{"role": "user", "content": question}]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with without_ahead(llm) if arm == "in order" else nullcontext():
        rounds = list(stream := llm.rounds(messages, params, draft_length=length, **ARMS[arm]))
    stats = stream.reply.stats
    for name in COUNTED:
        sums[name] += stats[name]
    sums["seconds"] += stats["completion_tokens"] / stats["tokens_per_second"]
    sums["drafted"] += sum(bool(round_.draft.ids) for round_ in rounds)
    return stream.reply.text


@contextmanager
def without_ahead(llm: LLM) -> Iterator[None]:
    """Within the block nothing is drafted while the target verifies: users have no such choice."""
    state = llm.inspect().state
    kept, state.drafting_ahead = state.drafting_ahead, None
    try:
        yield
    finally:
        state.drafting_ahead = kept


HEAD = ("delay", "t(1)", "t(8)/t(1)", "plain tok/s", "auto tok/s", "ratio", "in order", "rounds with a draft", "sent",
        "a round", "prepared", "in vain", "rounds prepared for", "same")  # fmt: skip


def row(found: dict[str, Any]) -> str:
    plain, auto, times = found["plain"], found["auto"], found["t"]
    speed = plain["tokens_per_second"]
    cells = [
        f"{found['delay_ms']:g} ms",
        f"{times[1]:.0f} ms",
        f"{times[8] / times[1]:.2f}",
        f"{speed:.1f}",
        f"{auto['tokens_per_second']:.1f}",
        f"{auto['tokens_per_second'] / speed:.2f}",
        f"{found['in order']['tokens_per_second'] / speed:.2f}" if found["ahead"] else "–",
        f"{auto['share_drafted']:.0%}",
        f"{auto['sent_per_drafted_round']:.1f}",
        f"{auto['tokens_per_round']:.2f}",
        *(str(auto[name]) if found["ahead"] else "–" for name in ("prepared", "in_vain", "hits")),
        f"{found['same']} of {found['n']}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft", metavar="MODEL", help="besides n-grams")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 2, 10, 50], metavar="MS")
    parser.add_argument("--max-tokens", type=int, default=64)
    length_help = "the same in every round, for both arms that draft"
    parser.add_argument("--draft-length", type=checked_length, default="auto", metavar="N", help=length_help)
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    rows = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        servers = {name: [stack.enter_context(server(args.threads)) for _ in range(2)] for name in ARMS}
        build = home() / "build"
        for delay in args.delays:
            # A home of its own: what was learned at one delay must not help at another.
            fresh = Path(scratch) / f"{delay:g}"
            fresh.mkdir()
            (fresh / "build").symlink_to(build)
            os.environ["LOCALSPEC_HOME"] = str(fresh)
            rows.append(measure(args.target, args.draft, delay, servers, args.max_tokens, args.draft_length))
            print(row(rows[-1]), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
