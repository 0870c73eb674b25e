"""Is it faster, and never slower? Plain decoding, ``auto`` and fixed draft lengths on the same prompts.

    python benchmarks/speed.py [MODEL] [--draft NAME ...] [--set report|tuning] [--arms plain,auto,1,2,4,8]
        [--tokens N] [--repeats N] [--minutes N] [--json FILE [--resume]] [--markdown FILE]
    python benchmarks/speed.py --report FILE.json ... [--markdown FILE]

One ``LLM`` is loaded. For every prompt the arms run one after the other, in an order that rotates from prompt to prompt
and is reversed in every other repeat. Before each run the target has read the prompt (one token is decoded plainly), so
its prefill is in no arm; the draft model's memory is empty, so its reading of the prompt is in the arm. What is learned
(costs, acceptance, n-gram hit rates) each arm keeps for itself, from a fresh start in every repeat; within a repeat it
carries over from prompt to prompt, as in a session. Turns before a prompt's last are answered once, greedily, untimed.

Speed is tokens / (seconds drafting + verifying + other), as in ``SpecStats``. A ratio is an arm's speed divided by
plain's on the same prompt in the same repeat. Reported are medians over prompts of the medians over repeats, with 95 %
bootstrap intervals (prompts and repeats drawn again, 2000 times).
Temperatures over 0 sample with top-k 40. Without --seed the arms then say different things. With it each prompt and
repeat has a seed of its own and all arms say the same, but a draft model's guesses are compared with that seed's draws;
rejection, which verifies them without a seed, accepts more. Ctrl-C and --minutes end a run; what is done is reported.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from localspec import LLM, LocalspecError, Reply, Round, SamplingParams, __version__
from localspec.backends.machine import cpu_name
from localspec.drafters.ngram import NgramDrafter
from localspec.failures import line_of
from localspec.interrupts import on_interrupt

FORMAT = 1
COUNTS = ("prompt_tokens", "num_rounds", "num_draft_tokens", "num_accepted_tokens", "by_source")
SECONDS = ("seconds_prompt", "seconds_draft", "seconds_verify", "seconds_other")
SETTINGS = ("set", "prompts", "tokens", "temperature", "seed", "ignore_eos")
Json = dict[str, Any]


class Bench:
    """Runs the arms; ``samples`` grows by one with every run of an arm."""

    def __init__(self, llm: LLM, args: argparse.Namespace, samples: list[Json]) -> None:
        self.llm, self.args, self.samples = llm, args, samples
        self.stop = threading.Event()
        self.openings: dict[str, list[Json]] = {}
        ngrams = [(drafter, "_hits") for drafter in llm._pair._drafters if isinstance(drafter, NgramDrafter)]
        pair = [(llm._pair, name) for name in ("times", "_draft_times", "_experience")]
        self.learners: list[tuple[object, str]] = [*pair, *ngrams]
        self.fresh = copy.deepcopy([getattr(*learner) for learner in self.learners])

    def become(self, arm: str) -> None:
        """Give the runtime what this arm has learned, and drafters that remember no text; on the worker thread."""
        for (owner, name), value in zip(self.learners, self.learned[arm], strict=True):
            setattr(owner, name, value)
        for drafter in self.llm._pair._drafters:
            drafter.begin([])
        for _, context in self.llm._pair._models.values():
            context.truncate(0)

    def answer(self, messages: list[Json], params: SamplingParams, arm: str) -> tuple[Reply, list[Round]]:
        length = int(arm) if arm.isdigit() else "auto"
        rounds = []
        with self.llm.rounds(messages, params, speculate=arm != "plain", draft_length=length) as stream:
            for round_ in stream:
                rounds.append(round_)
                if self.stop.is_set():
                    stream.close()
            return stream.reply, rounds

    def conversation(self, prompt: Json) -> list[Json]:
        """The messages up to the last question; earlier ones are answered by the target, once."""
        if prompt["id"] not in self.openings:
            messages = self.openings[prompt["id"]] = [{"role": "user", "content": prompt["turns"][0]}]
            for turn in prompt["turns"][1:]:
                reply, _ = self.answer(messages, SamplingParams(max_tokens=self.args.tokens), "plain")
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": turn}]
        return self.openings[prompt["id"]]

    def measure(self, prompt: Json, arm: str, repeat: int) -> Json:
        """One run of one arm."""
        args, seed, messages = self.args, None, self.conversation(prompt)
        if args.seed is not None:
            seed = int.from_bytes(hashlib.sha256(f"{args.seed}/{prompt['id']}/{repeat}".encode()).digest()[:8], "big")
        top_k = 40 if args.temperature else 0
        params = SamplingParams(args.temperature, top_k, seed=seed, max_tokens=args.tokens, ignore_eos=args.ignore_eos)
        self.llm._call(lambda: self.become("plain"))
        self.answer(messages, replace(params, max_tokens=1), "plain")
        self.llm._call(lambda: self.become(arm))
        reply, rounds = self.answer(messages, params, arm)
        judged = [
            [guess.source, round(guess.expected, 4), int(i < round_.verdict.n_accepted)]
            for round_ in rounds
            for i, guess in enumerate(round_.draft[: round_.verdict.n_accepted + 1])
        ]
        return {
            **{"prompt": prompt["id"], "category": prompt["category"], "arm": arm, "repeat": repeat},
            **{"time": round(time.time(), 1), "tokens": reply.stats.completion_tokens},
            **{key: reply.stats[key] for key in SECONDS + COUNTS},
            "finish_reason": reply.finish_reason,
            "sha256": hashlib.sha256(reply.text.encode()).hexdigest(),
            "judged": judged,
        }

    def run(self, prompts: list[Json], arms: list[str], stored: Json) -> None:
        deadline = time.monotonic() + 60 * (self.args.minutes or float("inf"))
        done = {(s["prompt"], s["arm"], s["repeat"]) for s in self.samples}
        for arm in arms:  # the first pass of a width allocates
            self.answer([{"role": "user", "content": "Count: 1 2 3 4 1 2 3"}], SamplingParams(max_tokens=8), arm)
        for repeat in range(self.args.repeats):
            self.learned: dict[str, list[Any]] = {arm: copy.deepcopy(self.fresh) for arm in arms}
            for index, prompt in enumerate(prompts):
                order = np.roll(arms, -index)[:: -1 if repeat % 2 else 1].tolist()
                for arm in [arm for arm in order if (prompt["id"], arm, repeat) not in done]:
                    if time.monotonic() > deadline:
                        return
                    sample = self.measure(prompt, arm, repeat)
                    if self.stop.is_set():
                        return
                    self.samples.append(sample)
                    save(self.args.json, stored)
                    where = f"repeat {repeat + 1}, {index + 1}/{len(prompts)} {prompt['id']}"
                    print(f"{where}: {arm} {speed(sample):.1f} tok/s", flush=True)


def save(path: Path | None, stored: Json) -> None:
    """Store the run, one sample a line; an interruption leaves the old file or the new one."""
    if path is not None:
        head = json.dumps({key: value for key, value in stored.items() if key != "samples"}, ensure_ascii=False)
        lines = ",\n".join(json.dumps(sample) for sample in stored["samples"])
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(f'{head[:-1]}, "samples": [\n{lines}\n]}}\n', encoding="utf-8")
        os.replace(temporary, path)


def load(path: Path) -> Json:
    stored: Json = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("format") != FORMAT:
        raise SystemExit(f"{path}: not a speed run of format {FORMAT}")
    return stored


def measure_all(args: argparse.Namespace, arms: list[str]) -> Json:
    source = args.prompts or resources.files("localspec.bench").joinpath("prompts.jsonl")
    prompts = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    prompts = [prompt for prompt in prompts if prompt["set"] == args.set]
    if args.categories:
        prompts = [prompt for prompt in prompts if prompt["category"] in args.categories.split(",")]
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    with LLM(args.model, args.draft or "auto", backend=args.backend, remember=False) as llm:
        print(*llm.warnings, sep="\n")
        stored: Json = {
            "machine": {"cpu": cpu_name(), "threads": llm._pair.target.n_threads, "os": platform.system()},
            **{"format": FORMAT, "engine": llm.engine, "model": llm.model_name, "drafters": llm.draft_names},
            "settings": {name: getattr(args, name) for name in SETTINGS} | {"prompts": str(args.prompts or "own")},
            **{"python": platform.python_version(), "localspec": __version__},
            "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
            "command": shlex.join(["python", *sys.argv]),
            "samples": [],
        }
        if args.resume and args.json.exists():
            before = load(args.json)
            for key in ("machine", "engine", "model", "drafters", "settings"):
                if before[key] != stored[key]:
                    raise SystemExit(f"{args.json} was measured with {key} {before[key]}, this would be {stored[key]}")
            stored["samples"] = before["samples"]
            stored["commit"] = ", ".join(dict.fromkeys([*before["commit"].split(", "), stored["commit"]]))
        bench = Bench(llm, args, stored["samples"])
        with on_interrupt(bench.stop.set):
            bench.run(prompts, arms, stored)
    return stored


def speed(sample: Json) -> float:
    return float(sample["tokens"] / sum(sample[key] for key in SECONDS[1:]))


def compare(samples: list[Json], arm: str, base: str) -> dict[str, list[float]]:
    """By prompt, the ratio of two arms' speeds in every run and repeat that has both."""
    speeds = {sample["where"]: speed(sample) for sample in samples if sample["arm"] == base}
    found: dict[str, list[float]] = {}
    for sample in samples:
        if sample["arm"] == arm and sample["where"] in speeds:
            found.setdefault(sample["prompt"], []).append(speed(sample) / speeds[sample["where"]])
    return found


def middle(ratios: dict[str, list[float]]) -> float:
    return statistics.median(map(statistics.median, ratios.values())) if ratios else float("nan")


def interval(ratios: dict[str, list[float]], draws: int = 2000) -> str:
    """95 % bootstrap interval of ``middle``."""
    counts = np.array([len(values) for values in ratios.values()])
    if counts.sum() < 2:
        return "-"
    table = np.array([values + [np.nan] * (counts.max() - len(values)) for values in ratios.values()])
    rng = np.random.default_rng(1)
    prompts = rng.integers(len(counts), size=(draws, len(counts), 1))
    repeats = (rng.random((draws, *table.shape)) * counts[prompts]).astype(int)
    drawn = np.where(np.arange(counts.max()) < counts[prompts], table[prompts, repeats], np.nan)
    low, high = np.percentile(np.median(np.nanmedian(drawn, axis=2), axis=1), [2.5, 97.5])
    return f"{low:.2f} to {high:.2f}"


def markdown(header: str, rows: list[list[Any]]) -> str:
    """A Markdown table that is aligned as plain text too; the first two columns to the left."""
    cells = [header.split(", "), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * (width - 1) + "-:"[i > 1] for i, width in enumerate(widths)])
    line = " | ".join(f"{{:{'<>'[i > 1]}{width}}}" for i, width in enumerate(widths))
    return "\n".join(f"| {line.format(*row)} |" for row in cells)


def reliability(judged: list[list[Any]]) -> str:
    """Predicted against observed acceptance by source, in ten bins, and how far off it is on average (ECE)."""
    rows, errors = [], []
    sources = sorted({source for source, _, _ in judged})
    for source in sources if len(sources) == 1 else ["all", *sources]:
        pairs = np.array([pair[1:] for pair in judged if source in ("all", pair[0])])
        bins, error = np.minimum((pairs[:, 0] * 10).astype(int), 9), 0.0
        for each in np.unique(bins):
            predicted, observed = pairs[bins == each].mean(axis=0)
            error += abs(predicted - observed) * (bins == each).mean()
            rows.append([source, f"{each / 10:.1f}", (bins == each).sum(), f"{predicted:.3f}", f"{observed:.3f}"])
        errors.append(f"{source} {error:.3f} ({len(pairs)} guesses)")
    table = markdown("source, bin from, guesses, predicted, observed", rows)
    return f"Auto's predictions, for guesses that the target judged. Calibration error: {', '.join(errors)}.\n\n{table}"


def report(runs: list[Json]) -> str:
    samples: list[Json] = []
    parts = ["# Speed against plain decoding"]
    for i, run in enumerate(runs):
        samples += [sample | {"where": (sample["prompt"], i, sample["repeat"])} for sample in run["samples"]]
        about = [*run["machine"].values(), f"Python {run['python']}", f"localspec {run['localspec']} {run['commit']}"]
        about += [run["engine"], run["model"], f"drafters {run['drafters']}", run["settings"]]
        parts.append(f"{', '.join(map(str, about))}, {len(run['samples'])} samples: `{run['command']}`")
    arms = sorted({s["arm"] for s in samples}, key=lambda arm: {"plain": -2, "auto": -1}.get(arm) or int(arm))
    plain = {sample["where"]: sample["sha256"] for sample in samples if sample["arm"] == "plain"}
    details, contest = [], []
    for category in ["all", *dict.fromkeys(sample["category"] for sample in samples)]:
        here = [sample for sample in samples if category in ("all", sample["category"])]
        ratios = {arm: compare(here, arm, "plain") for arm in arms}
        for arm in [arm for arm in arms if ratios[arm]]:
            own = [sample for sample in here if sample["arm"] == arm]
            total = {key: sum(s[key] for s in own) for key in ("tokens", "num_rounds", "seconds_draft")}
            medians = {prompt: statistics.median(values) for prompt, values in ratios[arm].items()}
            worst = min(medians, key=lambda prompt: medians[prompt])
            row = [category, arm, f"{statistics.median(map(speed, own)):.1f}", f"{middle(ratios[arm]):.3f}"]
            row += [interval(ratios[arm]), f"{sum(value < 1 for value in medians.values())} of {len(medians)}"]
            row += [f"{medians[worst]:.3f}", worst, f"{total['tokens'] / total['num_rounds']:.2f}"]
            row += [f"{total['seconds_draft'] / sum(s['tokens'] / speed(s) for s in own):.0%}"]
            details.append([*row, f"{sum(plain.get(s['where']) == s['sha256'] for s in own)} of {len(own)}"])
        if ratios.get("auto") and (fixed := [arm for arm in arms if arm.isdigit() and ratios[arm]]):
            best = max(fixed, key=lambda arm: middle(ratios[arm]))
            duel = compare(here, "auto", best)
            contest.append([category, best, *(f"{middle(r):.3f}" for r in (ratios[best], ratios["auto"], duel))])
            contest[-1].append(interval(duel))
    note = "*Length*: tokens per pass. *Drafting*: share of the time. *Same text*: answers equal to plain's."
    header = "category, arm, tok/s, ratio, 95 %, under 1, worst, on prompt, length, drafting, same text"
    parts += [note, markdown(header, details)]
    if contest:
        header = "category, best fixed, its ratio, auto's ratio, auto / fixed, 95 %"
        parts += ["The fixed length that was best in hindsight, against auto:", markdown(header, contest)]
    if judged := [pair for sample in samples if sample["arm"] == "auto" for pair in sample["judged"]]:
        parts.append(reliability(judged))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", action="append", help="repeatable; default: n-grams and the model's own draft")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--set", choices=["report", "tuning"], default="report")
    parser.add_argument("--prompts", type=Path, help="a file like localspec/bench/prompts.jsonl")
    parser.add_argument("--categories", help="separated by commas")
    for name, default in {"tokens": 256, "temperature": 0.0, "repeats": 1}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--arms", default="plain,auto,1,2,3,4,6,8", help="a number is a fixed draft length")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--json", type=Path, help="where to store every sample")
    parser.add_argument("--resume", action="store_true", help="measure what the --json file lacks")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="print the report of stored runs")
    parser.add_argument("--markdown", type=Path, help="where to store the report")
    args = parser.parse_args()
    arms = args.arms.split(",")
    if "plain" not in arms or not all(arm in ("plain", "auto") or arm.isdigit() for arm in arms):
        parser.error("--arms must be plain, and any of auto and numbers")
    if (args.resume and not args.json) or (args.json and args.json.exists() and not args.resume):
        parser.error("--json FILE and --resume: both to go on with a stored run, and a new file for a new one")
    text = report([load(path) for path in args.report] if args.report else [measure_all(args, arms)])
    print("\n" + text)
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except LocalspecError as error:
        raise SystemExit(line_of(error)) from None
