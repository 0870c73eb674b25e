"""A target on two RPC servers, with delay put in between: does speculation hide the network?

    python benchmarks/network_delay.py TARGET [--draft MODEL] [--delays 0 2 10 50] [--max-tokens 64] [--json FILE]

Two servers are started on loopback, each behind a proxy that lets every byte arrive later, half of the delay each way:
the delay is that of a round trip to one server, and a pass waits for both, one after the other. The draft runs here.
For each delay the pair is loaded and calibrated anew, and answers the same questions plainly and with the controller's
own choice, in turns; nothing is remembered from one delay to the next. It needs ``python -m
localspec.backends.rpc_build`` once.

t(1) and t(8) are what was calibrated; "sent" is the draft tokens of a round in which any were sent, "a round" the
tokens that a round settles, "same" how many answers, all greedy, were the same text both ways.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from localspec import LLM, EngineError, Placement, SamplingParams
from localspec.backends.rpc_link import ask
from localspec.system.home import home

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
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            near, _ = self._listener.accept()
            host, _, port = self._target.rpartition(":")
            far = socket.create_connection((host, int(port)))
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


def measure(model: str, draft: str | None, delay_ms: float, servers: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """All questions at one delay."""
    placement = Placement(rpc=tuple(Delay(each, delay_ms / 1e3).address for each in servers), tensor_split=(1, 1))
    drafts = ["ngram"] if draft is None else ["ngram", draft]
    found: dict[str, Any] = {"delay_ms": delay_ms, "same": 0, "n": len(QUESTIONS)}
    total: dict[bool, dict[str, float]] = {}
    with LLM(
        model,
        drafts,
        placement=placement,
        idle=False,
        remember=False,
        light_draft=False,
        n_ctx=1024,
        prefix_cache_bytes=0,
    ) as llm:
        found["t"] = {w: round(llm.run(lambda pair, w=w: pair.times(w)), 2) for w in (1, 2, 4, 8, 16)}  # type: ignore[misc]
        for i, question in enumerate(QUESTIONS):
            texts = set()
            for speculate in (False, True) if i % 2 else (True, False):
                messages = [{"role": "user", "content": question}]
                params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
                rounds = list(stream := llm.rounds(messages, params, speculate=speculate))
                stats, reply = stream.reply.stats, stream.reply
                texts.add(reply.text)
                sums = total.setdefault(
                    speculate, dict.fromkeys(("tokens", "seconds", "rounds", "sent", "drafted"), 0.0)
                )
                sums["tokens"] += stats["completion_tokens"]
                sums["seconds"] += stats["completion_tokens"] / stats["tokens_per_second"]
                sums["rounds"] += stats["num_rounds"]
                sums["sent"] += stats["num_draft_tokens"]
                sums["drafted"] += sum(bool(round_.draft.ids) for round_ in rounds)
            found["same"] += len(texts) == 1
    for speculate, sums in total.items():
        found["auto" if speculate else "plain"] = {
            "tokens_per_second": round(sums["tokens"] / sums["seconds"], 2),
            "tokens_per_round": round(sums["tokens"] / max(1, sums["rounds"]), 2),
            "sent_per_drafted_round": round(sums["sent"] / max(1, sums["drafted"]), 2),
            "share_drafted": round(sums["drafted"] / max(1, sums["rounds"]), 2),
        }
    return found


def row(found: dict[str, Any]) -> str:
    plain, auto, times = found["plain"], found["auto"], found["t"]
    cells = [
        f"{found['delay_ms']:g} ms",
        f"{times[1]:.0f} ms",
        f"{times[8] / times[1]:.2f}",
        f"{plain['tokens_per_second']:.1f}",
        f"{auto['tokens_per_second']:.1f}",
        f"{auto['tokens_per_second'] / plain['tokens_per_second']:.2f}",
        f"{auto['share_drafted']:.0%}",
        f"{auto['sent_per_drafted_round']:.1f}",
        f"{auto['tokens_per_round']:.2f}",
        f"{found['same']} of {found['n']}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft", metavar="MODEL", help="besides n-grams")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 2, 10, 50], metavar="MS")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(
        "| delay | t(1) | t(8)/t(1) | plain tok/s | auto tok/s | ratio | rounds with a draft | sent | a round | same |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        servers = [stack.enter_context(server(args.threads)) for _ in range(2)]
        build = home() / "build"
        for delay in args.delays:
            # A home of its own: what was learned at one delay must not help at another.
            fresh = Path(scratch) / f"{delay:g}"
            fresh.mkdir()
            (fresh / "build").symlink_to(build)
            os.environ["LOCALSPEC_HOME"] = str(fresh)
            rows.append(measure(args.target, args.draft, delay, servers, args.max_tokens))
            print(row(rows[-1]), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
