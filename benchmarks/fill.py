"""How long until an editor has its suggestion? One character is typed between two requests.

    python benchmarks/fill.py [MODEL] [--draft NAME ...] [--tokens 500,2000,6000] [--places 3] [--keys 4] [--file PATH]
        [--backend NAME] [--llama-server [BINARY]] [--llama-draft NAME] [--json FILE]

A file (the standard library's ``argparse.py``) is cut in the middle of a line, with so many tokens around the cursor,
and "typed" from there, character by character, as it really goes on; after each, ``/infill`` is asked for the rest of
the line, as an editor would. That is done at several places of the file. ``localspec serve`` answers plainly and
drafted; with ``--llama-server``, llama.cpp's own server answers the same bodies (compiled by ``build_llama_cpp.py``
unless BINARY is given), and with ``--llama-draft`` once more with that draft model. All servers are there at once and
take turns key stroke by key stroke, in reversed order at every other one; localspec does nothing between requests
(``--no-idle``), so no server takes the other's time.

Decoding is greedy. Times are from sending to the whole answer [ms]: the first request at a place, which reads
everything (of localspec one for both arms), and the median of those after it. ``read`` and ``said`` are tokens a
request: those that were not there from the request before, and those of the suggestion. llama-server gets the batch
that lets it read as much as localspec does, for it cuts what is before the cursor to three quarters of that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.build_llama_cpp import SOURCE, build, default_folder
from localspec import __version__
from localspec.model_files.catalog import Catalog
from localspec.system.machine import cpu_name, default_threads

BEHIND_TOKENS = 200
"""Tokens behind the cursor, of those around it."""

CHARACTERS_PER_TOKEN = 4.3  # of Python under Qwen's tokeniser; the table says how many tokens there really were

LEAST_LINE, INTO_LINE = 40, 8  # characters: of a line that is typed, and of it what is there already

LLAMA_PORT = 8643
CONTEXT = 8192
LLAMA_OPTIONS = ["-c", str(2 * CONTEXT), "-b", str(CONTEXT), "-np", "1"]  # what is beyond a batch has room in the rest
START_SECONDS = 600.0


@dataclass
class Arm:
    """One way to be answered.

    Attributes:
        name: in the table.
        url: of its server.
        own: what its requests have beside the common body.
        first: whether the first request at a place is sent to it; else another arm of the server has had that read.
        answers: milliseconds and answer, of each request but the first at a place, by size.
        firsts: of the first ones.
    """

    name: str
    url: str
    own: dict[str, Any] = field(default_factory=dict)
    first: bool = True
    answers: dict[int, list[tuple[float, dict[str, Any]]]] = field(default_factory=lambda: defaultdict(list))
    firsts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def ask(self, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Milliseconds, and the answer."""
        data = json.dumps(body | self.own).encode()
        request = urllib.request.Request(f"{self.url}/infill", data, {"Content-Type": "application/json"})
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=1800) as response:
            answer = json.load(response)
        return (time.perf_counter() - started) * 1e3, answer

    def row(self, size: int) -> dict[str, Any]:
        times, answers = zip(*self.answers[size], strict=True)
        timings = [answer["timings"] for answer in answers]
        return {
            "size": size,
            "arm": self.name,
            "tokens": statistics.median(each["tokens_evaluated"] for each in answers),
            "first_ms": statistics.median(self.firsts[size]) if self.first else None,
            "next_ms": statistics.median(times),
            "read": statistics.median(each["prompt_n"] for each in timings),
            "said": statistics.mean(each["predicted_n"] for each in timings),
            "drafted": sum(each.get("draft_n", 0) for each in timings),
            "accepted": sum(each.get("draft_n_accepted", 0) for each in timings),
            "all_ms": times,
            "contents": [each["content"] for each in answers],
        }


@contextmanager
def running(command: Sequence[str], url: str | None = None) -> Iterator[str]:
    """A server, by its URL: the first line that it prints, or the one that is given, once it is healthy."""
    output = subprocess.PIPE if url is None else subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, text=True)
    try:
        if url is None:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
        deadline = time.monotonic() + START_SECONDS
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(command)} did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:  # llama-server was seen to compute on after SIGTERM, for ever
            process.kill()
            process.wait()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (OSError, ValueError):
        return False


def cursors(text: str, n_places: int) -> list[int]:
    """Places in the second half of a text, where all sizes fit in front, in the middle of long lines."""
    starts = [i + 1 for i, letter in enumerate(text) if letter == "\n" and i > len(text) // 2]
    found = []
    for start, end in pairwise(starts):
        line = text[start : end - 1]
        if len(line.strip()) >= LEAST_LINE:
            found.append(start + len(line) - len(line.lstrip()) + INTO_LINE)
    if len(found) < n_places:
        sys.exit(f"the second half of the file has fewer than {n_places} lines of {LEAST_LINE} characters")
    return [found[(2 * i + 1) * len(found) // (2 * n_places)] for i in range(n_places)]


def bodies(text: str, cursor: int, n_tokens: int, n_keys: int) -> list[dict[str, Any]]:
    """Requests of a person who types on at the cursor, each place with a slot of its own: nothing slides from it."""
    n_before = int((n_tokens - BEHIND_TOKENS) * CHARACTERS_PER_TOKEN)
    n_behind = int(BEHIND_TOKENS * CHARACTERS_PER_TOKEN)
    behind = text.index("\n", cursor + n_keys)
    return [
        {
            "id_slot": cursor,
            "input_prefix": text[max(0, cursor - n_before) : cursor + i],
            "input_suffix": text[behind : behind + n_behind],
            "n_predict": 32,
            "stop": ["\n"],
            "samplers": ["top_k"],
            "temperature": 0.0,
            "top_k": 1,
            "cache_prompt": True,
        }
        for i in range(n_keys + 1)
    ]


def measure(arms: Sequence[Arm], text: str, sizes: Sequence[int], n_places: int, n_keys: int) -> None:
    """Ask all arms all there is to ask."""
    for size in sizes:
        for n, cursor in enumerate(cursors(text, n_places), 1):
            print(f"\r\x1b[K{size} tokens, place {n} of {n_places}", end="", file=sys.stderr, flush=True)
            first, *others = bodies(text, cursor, size, n_keys)
            for arm in arms:
                if arm.first:
                    arm.firsts[size].append(arm.ask(first)[0])
            for i, body in enumerate(others):
                for arm in arms if i % 2 else reversed(arms):
                    arm.answers[size].append(arm.ask(body))
    print("\r\x1b[K", end="", file=sys.stderr)


def same(rows: Sequence[dict[str, Any]]) -> str:
    """How many suggestions of each arm are those of the first, in words."""
    said = defaultdict(list)
    for row in rows:
        said[row["arm"]] += row["contents"]
    first, *others = said
    counts = {arm: sum(map(str.__eq__, said[arm], said[first])) for arm in others}
    return f"of {len(said[first])} suggestions the same as {first}: " + ", ".join(f"{a} {n}" for a, n in counts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", action="append")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", default="500,2000,6000")
    parser.add_argument("--places", type=int, default=3)
    parser.add_argument("--keys", type=int, default=4)
    parser.add_argument("--file", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--llama-server", nargs="?", const="", metavar="BINARY")
    parser.add_argument("--llama-draft", metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = options.file.read_text(encoding="utf-8")
    catalog = Catalog.load()
    model = catalog.resolve(options.model)
    ours = [sys.executable, "-m", "localspec", "serve", options.model, "--port", "0", "--no-idle"]
    ours += ["--backend", options.backend, "--ctx", str(CONTEXT), "--threads", str(options.threads)]
    for name in options.draft or ["auto"]:
        ours += ["--draft", name]
    with ExitStack() as servers:
        url = servers.enter_context(running(ours))
        arms = [Arm("plain", url, {"localspec": {"off": True}}), Arm("drafted", url, first=False)]
        if options.llama_server is not None:
            built = options.llama_server or build(["llama-server"], default_folder(), options.threads)["llama-server"]
            theirs = [str(built), "-m", str(model), "-t", str(options.threads), *LLAMA_OPTIONS]
            drafts = {"llama-server": []}
            if options.llama_draft:
                draft = str(catalog.resolve(options.llama_draft))
                drafts["llama-server, drafted"] = ["-md", draft, "--spec-type", "draft-simple"]
            for port, (name, more) in enumerate(drafts.items(), LLAMA_PORT):
                url = f"http://127.0.0.1:{port}"
                servers.enter_context(running([*theirs, *more, "--port", str(port)], url))
                arms.append(Arm(name, url, {"id_slot": 0}))  # it has one
        sizes = [int(n) for n in options.tokens.split(",")]
        measure(arms, text, sizes, options.places, options.keys)
    rows = [arm.row(size) for size in sizes for arm in arms]

    print(f"{cpu_name()}, {options.threads} threads; localspec {__version__}, llama.cpp of {SOURCE}; {model.name}\n")
    print("| tokens | | first, ms | next key, ms | read | said | accepted of drafted |\n|--:|---|--:|--:|--:|--:|--:|")
    for row in rows:
        first = "" if row["first_ms"] is None else f"{row['first_ms']:,.0f}"
        print(
            f"| {row['tokens']:,.0f} | {row['arm']} | {first} | {row['next_ms']:,.0f} | {row['read']:g} | "
            f"{row['said']:.1f} | {row['accepted']} of {row['drafted']} |"
        )
    print(f"\n{same(rows)}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
