"""localspec's server beside llama.cpp's, plain and drafted, with the same file, questions and client.

    python -m benchmarks.servers MODEL --draft NAME --prompts FILE [--tokens 64] [--drafts 2 5] [--p-min 0]
        [--repeats 1] [--temperature 0] [--backend NAME] [--llama-server BINARY] [--json FILE]

FILE has a JSON object a line with ``id``, ``category`` and ``prompt``; questions that others publish can be measured so
without being kept here. llama-server is compiled by ``build_llama_cpp.py`` unless BINARY is given. It answers plainly,
and with the draft model at each pair of ``--drafts`` (most draft tokens) and ``--p-min`` (least probability); the best
of those is found afterwards, by the median over all questions, so the comparison favours it. localspec answers with
``auto``. All servers are there at once (each has the model in memory) and have as many threads; they take turns answer
by answer, in reversed order at every other question.

Speed is counted by the client: tokens after the first, over the time from the first piece of the answer to its end;
``first`` is the time to that piece, in which llama-server reads the prompt with its draft model too, and ``all`` is all
tokens over the whole time. Printed are medians over questions of ratios to llama-server's plain speed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks.build_llama_cpp import SOURCE, build, default_folder
from benchmarks.fill import running
from localspec import __version__
from localspec.model_files.catalog import Catalog
from localspec.system.files import write_atomically
from localspec.system.machine import cpu_name, default_threads

PORT = 8650
N_CTX = 4096
PLAIN, OURS = "llama-server", "localspec auto"


@dataclass(frozen=True)
class Arm:
    """A server, and what its requests have besides the question."""

    name: str
    url: str
    own: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What the client saw of one answer [s]."""

    question: str
    category: str
    arm: str
    n_tokens: int
    first: float
    whole: float

    @property
    def speed(self) -> float:
        return (self.n_tokens - 1) / (self.whole - self.first)

    @property
    def speed_of_all(self) -> float:
        return self.n_tokens / self.whole


def ask(arm: Arm, question: dict[str, Any], common: dict[str, Any]) -> Answer:
    address = urlsplit(arm.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=1800)
    messages = [{"role": "user", "content": question["prompt"]}]
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}} | common | arm.own
    started = time.perf_counter()
    first, n_tokens = None, 0
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"{arm.name}: {response.status} {response.read(300)!r}")
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        n_tokens = (event.get("usage") or {}).get("completion_tokens", n_tokens)
        choice = next(iter(event.get("choices") or ()), {})
        if first is None and (choice.get("delta") or {}).get("content"):
            first = time.perf_counter() - started
    whole = time.perf_counter() - started
    connection.close()
    return Answer(question["id"], question["category"], arm.name, n_tokens, first or whole, whole)


def table(answers: Sequence[Answer], arms: Sequence[str]) -> str:
    """Ratios to llama-server's plain speed, and tokens a second."""
    rows = ["| | speed | slowest | all | first, s | tok/s |", "|---|--:|--:|--:|--:|--:|"]
    by = {(each.arm, each.question): each for each in answers}
    questions = [question for arm, question in by if arm == PLAIN]
    for arm in arms:
        pairs = [(by[arm, each], by[PLAIN, each]) for each in questions if (arm, each) in by]
        speeds = [mine.speed / plain.speed for mine, plain in pairs]
        wholes = [mine.speed_of_all / plain.speed_of_all for mine, plain in pairs]
        first, tokens = median(mine.first for mine, _ in pairs), median(mine.speed for mine, _ in pairs)
        rows.append(
            f"| {arm} | {median(speeds):.2f} | {min(speeds):.2f} | {median(wholes):.2f} | {first:.1f} | {tokens:.1f} |"
        )
    return "\n".join(rows)


def against(answers: Sequence[Answer], arms: Sequence[str]) -> str:
    """localspec over llama-server's best draft setting and over its plain speed, question by question."""
    by = {(each.arm, each.question): each.speed for each in answers}
    questions = [question for arm, question in by if arm == PLAIN and (OURS, question) in by]
    drafted = [arm for arm in arms if arm.startswith(PLAIN) and arm != PLAIN]
    best = max(drafted, key=lambda arm: median(by[arm, each] / by[PLAIN, each] for each in questions))
    lines = []
    for other in (best, PLAIN):
        ratios = sorted(by[OURS, each] / by[other, each] for each in questions)
        lines.append(f"{OURS} over {other}: {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 5])
    parser.add_argument("--p-min", type=float, nargs="+", default=[0.0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--llama-server")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    catalog, threads = Catalog.load(), default_threads()
    model, draft = catalog.resolve(options.model), catalog.resolve(options.draft)
    questions = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines() if line]
    binary = options.llama_server or build(["llama-server"], default_folder(), threads)["llama-server"]
    theirs = [str(binary), "-m", str(model), "-t", str(threads), "-c", str(N_CTX), "-np", "1", "--jinja"]
    commands = {PLAIN: theirs}
    for length, least in product(options.drafts, options.p_min):
        more = ["-md", str(draft), "--spec-type", "draft-simple", "--spec-draft-n-max", str(length)]
        commands[f"{PLAIN}, {length} tokens, p-min {least:g}"] = [*theirs, *more, "--spec-draft-p-min", str(least)]
    mine = [sys.executable, "-m", "localspec", "serve", str(model), "--draft", str(draft), "--port", "0"]
    mine += ["--ctx", str(N_CTX), "--backend", options.backend, "--no-idle"]
    common = {"max_tokens": options.tokens, "temperature": options.temperature, "seed": 1}
    answers: list[Answer] = []
    with ExitStack() as stack:
        arms = [
            Arm(
                name,
                stack.enter_context(running([*command, "--port", str(PORT + i)], f"http://127.0.0.1:{PORT + i}")),
                {"cache_prompt": False},
            )
            for i, (name, command) in enumerate(commands.items())
        ]
        arms.append(Arm(OURS, stack.enter_context(running(mine)), {}))
        for arm in arms:
            ask(arm, questions[0], common | {"max_tokens": 8})
        for turn, question in enumerate(questions * options.repeats):
            for arm in arms if turn % 2 else reversed(arms):
                print(f"\r\x1b[K{turn + 1} of {len(questions) * options.repeats}, {arm.name}", end="", file=sys.stderr)
                answers.append(ask(arm, question, common))
            if options.json:
                with write_atomically(options.json) as file:
                    file.write(json.dumps([asdict(each) for each in answers], indent=1).encode())
    print("\r\x1b[K", end="", file=sys.stderr)
    names = [arm.name for arm in arms]
    print(f"{model.name} with {draft.name}; {SOURCE}, localspec {__version__}; {cpu_name()}, {threads} threads,")
    print(f"Python {platform.python_version()}; {len(questions)} questions, {options.tokens} tokens\n")
    print(table(answers, names))
    print()
    print(against(answers, names))


if __name__ == "__main__":
    main()
