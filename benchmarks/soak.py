"""Does the server stay right, and small, under load? Thousands of short requests, cancels, disconnects, bad requests.

    python benchmarks/soak.py [MODEL] [--draft NAME ...] [--backend NAME] [--parallel N] [--seconds N | --requests N]
        [--clients N] [--seed N] [--gap LOGITS] [--json FILE] [--markdown FILE]

``localspec serve`` runs as a process of its own. First every question is asked alone, decoded plainly: its *solo*
answer, with the log-probabilities of the twenty likeliest tokens at every place. Then clients ask at random, all at
once:

* greedy questions, streamed or not, with several draft lengths; their tokens have to be those of the solo answer. Where
  an answer leaves it, the token said must lie within the gap that the audit's rules allow under the likeliest one
  (rounding; ``localspec verify`` measures it, 0 for an exact engine). Another question's text lies far outside;
* questions with a temperature and a seed, predictions, forced tool calls: they must be answered in the right form;
* streams that are cut in the middle, clients that leave before their answer, heads and bodies that never end;
* requests that are wrong, each of which has one right status.

It fails (exit status 1) if an answer is lost, mixed up or of the wrong form, if a request takes longer than a minute,
if something still runs or waits at the end, or if the server's memory grows by more than 50 MB after the warm-up, which
is the first fifth of the run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]

GROWTH_LIMIT_MB = 50.0
PATIENCE_S = 60.0
WARM_UP = 0.2

SUBJECTS = (
    "rivers",
    "colours",
    "numbers",
    "trees",
    "towns",
    "tools",
    "birds",
    "stars",
    "metals",
    "words",
    "seas",
    "days",
)
TASKS = ("Name three {}.", "Write one sentence about {}.", "Why do people like {}? Be brief.", "List {}, then stop.")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"what": {"enum": ["a", "b"]}},
            "required": ["what"],
            "additionalProperties": False,
        },
    },
}
KINDS = {
    "greedy": 40,
    "greedy stream": 25,
    "sampled": 6,
    "prediction": 4,
    "tool call": 3,
    "cut stream": 8,
    "left early": 6,
    "never ends": 2,
    "wrong": 6,
}
"""What is asked, and how often, in percent."""


class SoakError(Exception):
    """Something that must not happen did."""


@dataclass
class Question:
    """A prompt, and its solo answer.

    Attributes:
        tokens: texts of the tokens, in order.
        tops: for each place, log-probabilities of the likeliest tokens by text.
    """

    prompt: str
    max_tokens: int
    tokens: list[str] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    text: str = ""

    def body(self, **more: Any) -> Json:
        messages = [{"role": "user", "content": self.prompt}]
        return {"messages": messages, "max_tokens": self.max_tokens, "temperature": 0} | more


@dataclass
class Tally:
    """What happened; shared by the clients."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    n_equal: int = 0
    n_tokens: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def n(self) -> int:
        return self.kinds.total()


class Server:
    """``localspec serve`` as a process of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "localspec", "serve", args.model, "--port", "0", "--ctx", str(args.ctx)]
        command += ["--backend", args.backend, "--queue", str(4 * args.clients)]
        command += ["--prefix-cache", str(args.prefix_cache), "--parallel", args.parallel]
        for draft in args.draft:
            command += ["--draft", draft]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise SoakError(f"the server did not start (exit status {self.process.wait()})")
        self.port = int(self.url.rpartition(":")[2])

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with closing(connection):
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            return response.status, response.read()

    def chat(self, body: Json) -> Json:
        status, answer = self.ask("POST", "/v1/chat/completions", body)
        if status != 200:
            raise SoakError(f"status {status} for {body}: {answer[:200]!r}")
        found: Json = json.loads(answer)
        return found

    def stats(self) -> Json:
        found: Json = json.loads(self.ask("GET", "/v1/localspec/stats")[1])
        return found

    def memory_mb(self) -> float:
        """What the process holds in memory."""
        status = Path(f"/proc/{self.process.pid}/status")
        if status.exists():
            line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
            return int(line.split()[1]) / 1024
        listed = subprocess.run(["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True, check=True)
        return int(listed.stdout) / 1024

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


# -- one request -------------------------------------------------------------------------------------------------------


class Client:
    """Asks at random and checks what comes."""

    def __init__(self, server: Server, questions: list[Question], args: argparse.Namespace, tally: Tally) -> None:
        self.server, self.questions, self.args, self.tally = server, questions, args, tally
        self.rng = random.Random()

    def run(self, seed: int, goes_on: Any) -> None:
        self.rng.seed(seed)
        while goes_on():
            (kind,) = self.rng.choices(list(KINDS), list(KINDS.values()))
            started = time.monotonic()
            try:
                getattr(self, kind.replace(" ", "_"))(self.rng.choice(self.questions))
            except (SoakError, OSError, http.client.HTTPException, ValueError, KeyError) as error:
                with self.tally.lock:
                    self.tally.failures.append(f"{kind}: {type(error).__name__}: {error}")
            with self.tally.lock:
                self.tally.kinds[kind] += 1
                if kind not in ("left early", "never ends", "cut stream", "wrong"):
                    self.tally.seconds.append(time.monotonic() - started)

    def own(self) -> Json:
        """How to speculate in this request."""
        return {"localspec": self.rng.choice([{}, {"draft_length": "auto"}, {"draft_length": 3}, {"off": True}])}

    def greedy(self, question: Question) -> None:
        choice = self.server.chat(question.body(logprobs=True, **self.own()))["choices"][0]
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        self.compare(question, tokens, choice["message"]["content"])

    def greedy_stream(self, question: Question) -> None:
        body = question.body(logprobs=True, stream=True, stream_options={"localspec_rounds": True}, **self.own())
        status, answer = self.server.ask("POST", "/v1/chat/completions", body)
        if status != 200 or not answer.endswith(b"data: [DONE]\n\n"):
            raise SoakError(f"a stream ended with {answer[-200:]!r} (status {status})")
        chunks = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
        tokens, text, verified = [], "", ""
        for chunk in chunks:
            if "round" in chunk.get("localspec", {}):
                verified += chunk["localspec"]["round"]["text"]
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                tokens += [entry["token"] for entry in (choice["logprobs"] or {}).get("content", [])]
        if verified != text:
            raise SoakError(f"the rounds say {verified!r}, the text is {text!r}")
        self.compare(question, tokens, text)

    def compare(self, question: Question, tokens: list[str], text: str) -> None:
        """The audit's rule: equal, or at the first difference within what rounding explains."""
        tally = self.tally
        for i, (said, solo) in enumerate(zip(tokens, question.tokens, strict=False)):
            if said != solo:
                top = question.tops[i]
                gap = max(top.values()) - top.get(said, -99.0)
                with tally.lock:
                    tally.gaps.append(gap)
                if gap > self.args.gap:
                    raise SoakError(
                        f"{question.prompt!r}: {said!r} at {i} lies {gap:.2f} logits under {solo!r}: {text!r}"
                    )
                return
        if tokens != question.tokens or text != question.text:
            raise SoakError(f"{question.prompt!r}: {text!r} is not {question.text!r}")
        with tally.lock:
            tally.n_equal += 1
            tally.n_tokens += len(tokens)

    def sampled(self, question: Question) -> None:
        body = question.body(n=2, stop=["\n\n"]) | {"temperature": 0.9, "seed": self.rng.randrange(1000)}
        found = self.server.chat(body)
        if len(found["choices"]) != 2 or any("\n\n" in choice["message"]["content"] for choice in found["choices"]):
            raise SoakError(f"two answers were asked for, without a stop string: {found['choices']}")

    def prediction(self, question: Question) -> None:
        body = question.body(logprobs=True, prediction={"type": "content", "content": question.text})
        choice = self.server.chat(body)["choices"][0]
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        self.compare(question, tokens, choice["message"]["content"])

    def tool_call(self, question: Question) -> None:
        found = self.server.chat(question.body(tools=[TOOL], tool_choice="required") | {"max_tokens": 100})
        choice = found["choices"][0]
        arguments = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
        if choice["finish_reason"] != "tool_calls" or arguments["what"] not in ("a", "b"):
            raise SoakError(f"no tool call: {choice}")

    # -- clients that misbehave --------------------------------------------------------------------------------------

    def connect(self, body: Any, cut: int | None = None) -> socket.socket:
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
        whole = f"{head}Content-Type: application/json\r\n\r\n".encode() + data
        sock = socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE_S)
        sock.sendall(whole[:cut])
        return sock

    def cut_stream(self, question: Question) -> None:
        with closing(self.connect(question.body(stream=True) | {"max_tokens": 200})) as sock:
            for _ in range(self.rng.randrange(1, 6)):
                if not sock.recv(1 << self.rng.randrange(6, 14)):
                    break

    def left_early(self, question: Question) -> None:
        with closing(self.connect(question.body(stream=self.rng.random() < 0.3) | {"max_tokens": 200})) as sock:
            time.sleep(self.rng.random() ** 3)
            if self.rng.random() < 0.3:
                sock.shutdown(socket.SHUT_WR)

    def never_ends(self, question: Question) -> None:
        with closing(self.connect(question.body(), cut=self.rng.randrange(1, 150))):
            time.sleep(self.rng.random())

    def wrong(self, question: Question) -> None:
        body = question.body()
        method, path, sent, headers, right = self.rng.choice(
            [
                ("POST", "/v1/chat/completions", body | {"temperature": -1}, {}, 400),
                ("POST", "/v1/chat/completions", body | {"messages": []}, {}, 400),
                ("POST", "/v1/chat/completions", body | {"stop": [""]}, {}, 400),
                ("POST", "/v1/chat/completions", body | {"localspec": {"draft": "/etc/passwd"}}, {}, 400),
                ("POST", "/v1/chat/completions", b'{"messages": [', {}, 400),
                ("POST", "/v1/chat/completions", b"\xff" * 100, {}, 400),
                ("POST", "/v1/completions", {"prompt": "word " * 20_000}, {}, 400),
                ("POST", "/v1/completions", b" " * (9 << 20), {}, 413),
                ("POST", "/v1/chat/completions", body | {"model": "nobody"}, {}, 404),
                ("POST", "/v1/chat/completions", body, {"Content-Type": "text/plain"}, 415),
                ("POST", "/v1/chat/completions", body, {"Host": "evil.example"}, 403),
                ("POST", "/v1/chat/completions", body, {"Origin": "http://evil.example"}, 403),
                ("GET", "/v1/chat/completions", None, {}, 405),
                ("GET", "/nothing", None, {}, 404),
            ]
        )
        try:
            status, answer = self.server.ask(method, path, sent, headers)
        except ConnectionError:
            if right == 413:
                return  # it was told, and hung up on, while it still talked
            raise
        with self.tally.lock:
            self.tally.statuses[status] += 1
        if status != right or set(json.loads(answer)["error"]) != {"message", "type", "param", "code"}:
            raise SoakError(f"{path} with {str(sent)[:80]}: {status} instead of {right}: {answer[:200]!r}")


# -- the run -----------------------------------------------------------------------------------------------------------


def solo(server: Server, n: int) -> list[Question]:
    """Every question alone, decoded plainly."""
    questions = []
    for i in range(n):
        prompt = TASKS[i % len(TASKS)].format(SUBJECTS[i % len(SUBJECTS)]) + ("" if i < 12 else f" ({i})")
        question = Question(prompt, 4 + 3 * (i % 5))
        body = question.body(logprobs=True, top_logprobs=20, localspec={"off": True})
        choice = server.chat(body)["choices"][0]
        question.text = choice["message"]["content"]
        for entry in choice["logprobs"]["content"]:
            question.tokens.append(entry["token"])
            question.tops.append({top["token"]: top["logprob"] for top in entry["top_logprobs"]})
        questions.append(question)
    return questions


def audit_gap(args: argparse.Namespace) -> float:
    """How far under the likeliest token rounding may put the one that is said, as the audit measures it here."""
    command = [sys.executable, "-m", "localspec", "verify", args.model, "--draft", "ngram", "--quick", "--json"]
    done = subprocess.run([*command, "--backend", args.backend], capture_output=True, text=True, check=False)
    try:
        found: float = json.loads(done.stdout)["noise"]["gap_bound"]
    except (ValueError, KeyError):
        raise SoakError(f"localspec verify failed: {done.stderr.strip().splitlines()[-1:]}") from None
    return found


def soak(args: argparse.Namespace) -> Json:
    """The whole run.

    Raises:
        SoakError: the server could not even be started.
    """
    if args.gap is None:
        print("measuring what rounding explains (localspec verify)", file=sys.stderr)
        args.gap = audit_gap(args)
    server, tally = Server(args), Tally()
    try:
        questions = solo(server, args.questions)
        started = time.monotonic()

        def goes_on() -> bool:
            if args.requests:
                return tally.n < args.requests
            return time.monotonic() - started < args.seconds

        clients = [Client(server, questions, args, tally) for _ in range(args.clients)]
        threads = [
            threading.Thread(target=client.run, args=(args.seed * 1000 + i, goes_on), daemon=True)
            for i, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        shown = 0.0
        while any(thread.is_alive() for thread in threads):
            elapsed = time.monotonic() - started
            tally.memory.append((elapsed, server.memory_mb()))
            if elapsed - shown >= 10:
                shown = elapsed
                print(f"{elapsed:4.0f} s {tally.n} requests, {tally.memory[-1][1]:.0f} MB", file=sys.stderr)
            for thread in threads:
                thread.join(0.5 / len(threads))
        seconds = time.monotonic() - started
        end = time.monotonic() + 10
        while (queue := server.stats()["queue"])["running"] or queue["waiting"]:
            if time.monotonic() > end:
                tally.failures.append(f"after the end: {queue}")
                break
            time.sleep(0.05)
        for question in questions:  # and all is as it was
            clients[0].greedy(question)
        tally.memory.append((seconds, server.memory_mb()))
        totals = server.stats()["totals"]
    finally:
        with suppress(subprocess.TimeoutExpired):
            if server.stop() != 0:
                tally.failures.append("the server did not end well")
        if server.process.poll() is None:
            server.process.kill()
            tally.failures.append("the server did not end")
    return report(args, tally, seconds, totals)


def report(args: argparse.Namespace, tally: Tally, seconds: float, totals: Json) -> Json:
    warm = max((mb for at, mb in tally.memory if at <= WARM_UP * seconds), default=tally.memory[0][1])
    most = max(mb for _, mb in tally.memory)
    latencies = sorted(tally.seconds) or [0.0]
    growth = most - warm
    failures = list(tally.failures)
    if growth > GROWTH_LIMIT_MB:
        failures.append(f"memory grew by {growth:.0f} MB after the warm-up")
    if (slowest := latencies[-1]) > PATIENCE_S:
        failures.append(f"a request took {slowest:.0f} s")
    return {
        "model": args.model,
        "draft": args.draft,
        "backend": args.backend,
        "parallel": args.parallel,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "seconds": round(seconds, 1),
        "clients": args.clients,
        "requests": tally.n,
        "kinds": dict(tally.kinds.most_common()),
        "refused": dict(sorted(tally.statuses.items())),
        "greedy_equal": tally.n_equal,
        "greedy_near_ties": len(tally.gaps),
        "largest_gap": max(tally.gaps, default=0.0),
        "gap_bound": args.gap,
        "latency_s": {
            "median": round(statistics.median(latencies), 3),
            "95 %": round(latencies[int(0.95 * (len(latencies) - 1))], 3),
            "most": round(latencies[-1], 3),
        },
        "memory_mb": {
            "start": round(tally.memory[0][1], 1),
            "after warm-up": round(warm, 1),
            "most": round(most, 1),
            "end": round(tally.memory[-1][1], 1),
            "growth": round(growth, 1),
        },
        "server": totals["requests"],
        "tokens": totals["completion_tokens"],
        "acceptance_rate": round(totals["acceptance_rate"] or 0.0, 3),
        "failures": failures,
    }


def markdown(found: Json) -> str:
    memory, latency = found["memory_mb"], found["latency_s"]
    kinds = ", ".join(f"{n} {kind}" for kind, n in found["kinds"].items())
    refused = ", ".join(f"{n} × {status}" for status, n in found["refused"].items()) or "none"
    server = ", ".join(f"{n} {outcome}" for outcome, n in found["server"].items())
    compared = found["greedy_equal"] + found["greedy_near_ties"]
    rows = [
        ("model, draft, engine", f"{found['model']}, {' + '.join(found['draft'])}, {found['backend']}"),
        ("requests at a time", found["parallel"]),
        ("machine", found["machine"]),
        ("requests", f"{found['requests']} in {found['seconds']:.0f} s by {found['clients']} clients at once"),
        ("of them", kinds),
        ("wrong requests, refused with", refused),
        ("the server's own count", server),
        (
            "greedy answers compared with solo runs",
            f"{compared}: {found['greedy_equal']} equal token by token, {found['greedy_near_ties']} part at a near tie "
            f"(largest gap {found['largest_gap']:.3f} logits; the audit allows {found['gap_bound']:.2f})",
        ),
        ("latency", f"median {latency['median']} s, 95 % {latency['95 %']} s, most {latency['most']} s"),
        (
            "memory of the server",
            f"{memory['start']} MB at the start, {memory['after warm-up']} after the warm-up, "
            f"{memory['most']} at most, {memory['end']} at the end: "
            f"growth {memory['growth']} MB (limit {GROWTH_LIMIT_MB:.0f})",
        ),
        ("lost, mixed or stuck", "; ".join(found["failures"][:5]) or "none"),
    ]
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--parallel", default="1", help="requests at a time: a number or auto")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prefix-cache", type=int, default=64, help="MB; it fills for a while, which is no leak")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=float, help="logits; default: what localspec verify measures")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    args.draft = args.draft or ["ngram"]
    try:
        found = soak(args)
    except SoakError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    if args.markdown:
        args.markdown.write_text(markdown(found))
    print(markdown(found), end="")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
