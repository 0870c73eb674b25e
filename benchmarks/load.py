"""How do several clients fare at once? Mixed work, Poisson arrivals; beside llama-server with as many slots.

    python benchmarks/load.py [MODEL] [--draft NAME ...] [--backend NAME] [--clients 1,2,4,8] [--parallel 1,4]
        [--requests 6] [--gap 0.5] [--seed 0] [--rounds 1] [--llama-server [BINARY]] [--llama-draft NAME] [--json FILE]

For every number of clients each server is started anew and answers the same requests: ``localspec serve`` with each
``--parallel``, and for those over 1 once more without drafts (plain), and with ``--llama-server`` llama.cpp's own
(compiled by ``build_llama_cpp.py`` unless BINARY is given) with as many slots as clients. Of several ``--rounds`` each
asks all of them something else, every second one in the opposite order; the table has the medians.

A client sends so many requests, one after the other, after pauses drawn from an exponential law; what it asks is drawn
too: chats, completions, chats with a long prompt, one that leaves after some pieces, one that is slow to read. Decoding
is greedy, without the draft models of idle time (``--no-idle``).

Tokens per second are those of all answers over the time from the first request to the last answer's end. Times to the
first piece of text and between pieces are at the median and the 95th percentile of those who read at once; a piece can
be several tokens. What a client that left had until then counts, a token a piece.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.build_llama_cpp import SOURCE, build, default_folder
from benchmarks.fill import running
from localspec import __version__
from localspec.model_files.catalog import Catalog
from localspec.system.machine import cpu_name, default_threads

LLAMA_PORT = 8644
CONTEXT = 4096
LEAVES_AFTER = 6  # pieces
SLOW_S = 0.05  # a piece

KINDS = {"chat": 8, "completion": 5, "long prompt": 3, "leaves": 2, "slow reader": 2}
"""What is asked, and how often, of 20."""

QUESTIONS = (
    "Explain what a hash table is to a beginner.",
    "Write a Python function that merges two sorted lists.",
    "Name five rivers and say one thing about each.",
    "Translate to French: The weather was fine and we walked along the river until it was dark.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "A train leaves at 9:40 and takes 2 hours 35 minutes. When does it arrive? Think step by step.",
)
CODE = '''def area(width, height):
    """The area of a rectangle."""
    return width * height


def perimeter(width, height):
    """The perimeter of a rectangle."""
'''


@dataclass
class Measured:
    """What the clients of one run saw; shared by them.

    Attributes:
        firsts, gaps: seconds to the first piece, and between two.
    """

    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    n_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def long_text(rng: random.Random) -> str:
    words = ("river", "tower", "letter", "winter", "engine", "garden", "market", "shadow", "copper", "window", "ladder")
    return " ".join(f"{rng.choice(words)} {n}" for n in range(150))


def request(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """Kind, path and body."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    common = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    if kind == "completion":
        return kind, "/v1/completions", common | {"prompt": CODE, "max_tokens": 48}
    content = rng.choice(QUESTIONS)
    if kind == "long prompt":
        content = f"How many words are in this list, about? Then: {content}\n\n{long_text(rng)}"
    messages = [{"role": "user", "content": content}]
    return kind, "/v1/chat/completions", common | {"messages": messages, "max_tokens": rng.choice([32, 64, 96])}


def ask(url: str, kind: str, path: str, body: dict[str, Any], measured: Measured) -> None:
    """One request, read to its end as its kind reads."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=600)
    last = time.perf_counter()
    times: list[float] = []
    n_tokens = None
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"{response.status} {response.read(200)!r}")
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if usage := event.get("usage"):
                n_tokens = int(usage["completion_tokens"])
            choice = next(iter(event.get("choices") or ()), {})
            if not (choice.get("text") or (choice.get("delta") or {}).get("content")):
                continue
            now = time.perf_counter()
            times.append(now - last)
            last = now
            if kind == "leaves" and len(times) >= LEAVES_AFTER:
                break
            if kind == "slow reader":
                time.sleep(SLOW_S)
    except (OSError, http.client.HTTPException, ValueError) as error:
        with measured.lock:
            measured.failures.append(f"{kind}: {error}")
        return
    finally:
        connection.close()
    with measured.lock:
        measured.n_tokens += len(times) if n_tokens is None else n_tokens
        if kind != "slow reader" and times:
            measured.firsts.append(times[0])
            measured.gaps += times[1:]


def run(url: str, n_clients: int, n_requests: int, gap: float, seed: int) -> dict[str, Any]:
    """All that the clients ask of one server."""
    measured = Measured()

    def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        for _ in range(n_requests):
            time.sleep(rng.expovariate(1 / gap))
            ask(url, *request(rng), measured)

    ask(url, *request(random.Random(seed)), Measured())  # what is done once is not measured
    threads = [threading.Thread(target=client, args=(number,)) for number in range(n_clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    return {
        "clients": n_clients,
        "tokens": measured.n_tokens,
        "seconds": seconds,
        "tokens_per_second": measured.n_tokens / seconds,
        "first_s": [quantile(measured.firsts, q) for q in (0.5, 0.95)],
        "gap_s": [quantile(measured.gaps, q) for q in (0.5, 0.95)],
        "failures": measured.failures,
    }


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else float("nan")


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs of one server; failures of all."""
    speed = statistics.median(run["tokens_per_second"] for run in runs)
    pairs = {name: [statistics.median(run[name][i] for run in runs) for i in (0, 1)] for name in ("first_s", "gap_s")}
    return {"tokens_per_second": speed} | pairs | {"failures": [failure for run in runs for failure in run["failures"]]}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", action="append")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--clients", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--parallel", type=numbers, default=[1, 4])
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--gap", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--llama-server", nargs="?", const="", metavar="BINARY")
    parser.add_argument("--llama-draft", metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    catalog = Catalog.load()
    ours = [sys.executable, "-m", "localspec", "serve", options.model, "--port", "0", "--no-idle"]
    ours += ["--backend", options.backend, "--ctx", str(CONTEXT), "--threads", str(options.threads)]
    drafts = [part for name in options.draft or ["auto"] for part in ("--draft", name)]
    theirs: dict[str, list[str]] = {}
    if options.llama_server is not None:
        built = options.llama_server or build(["llama-server"], default_folder(), options.threads)["llama-server"]
        theirs["llama-server"] = [str(built), "-m", str(catalog.resolve(options.model)), "-t", str(options.threads)]
        if options.llama_draft:
            more = ["-md", str(catalog.resolve(options.llama_draft)), "--spec-type", "draft-simple"]
            theirs["llama-server, drafted"] = theirs["llama-server"] + more
    rows = []
    for n_clients in options.clients:
        arms: list[tuple[str, list[str], str | None]] = []
        for n in options.parallel:
            command = [*ours, "--parallel", str(n)]
            if n > 1:
                arms.append((f"localspec, parallel {n}, plain", [*command, "--draft", "none"], None))
            arms.append((f"localspec, parallel {n}", command + drafts, None))
        slots = ["-np", str(n_clients), "-c", str(CONTEXT * n_clients), "--port", str(LLAMA_PORT)]
        arms += [(name, command + slots, f"http://127.0.0.1:{LLAMA_PORT}") for name, command in theirs.items()]
        found: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in arms}
        for number in range(options.rounds):
            for name, command, url in arms if number % 2 == 0 else arms[::-1]:
                print(f"\r\x1b[K{n_clients} clients, round {number + 1}, {name}", end="", file=sys.stderr, flush=True)
                with running(command, url) as at:
                    found[name].append(run(at, n_clients, options.requests, options.gap, options.seed + number))
        rows += [medians(runs) | {"clients": n_clients, "arm": name, "runs": runs} for name, runs in found.items()]
    print("\r\x1b[K", end="", file=sys.stderr)
    print(f"{cpu_name()}, {options.threads} threads; localspec {__version__}, llama.cpp of {SOURCE}; {options.model}\n")
    print("| clients | | tokens/s | first piece, s (p50, p95) | between pieces, ms (p50, p95) | failed |")
    print("|--:|---|--:|--:|--:|--:|")
    for row in rows:
        first = ", ".join(f"{seconds:.2f}" for seconds in row["first_s"])
        gap = ", ".join(f"{seconds * 1e3:.0f}" for seconds in row["gap_s"])
        speed, failed = f"{row['tokens_per_second']:.1f}", len(row["failures"])
        print(f"| {row['clients']} | {row['arm']} | {speed} | {first} | {gap} | {failed} |")
    for row in rows:
        for failure in row["failures"]:
            print(f"{row['arm']}, {row['clients']} clients: {failure}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
