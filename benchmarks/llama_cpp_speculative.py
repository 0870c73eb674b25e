"""llama.cpp's own C++ programs, plain and with a draft model: the figures that localspec's are to be held against.

    python benchmarks/llama_cpp_speculative.py --prompts FILE [--model NAME] [--draft NAME] [--tokens N] [--repeats N]
        [--drafts K ...] [--p-min P ...] [--programs simple tree] [--localspec [BACKEND]] [--set NAME] [--json FILE]
        [--resume FILE]

FILE has a JSON object a line: ``id``, ``category``, ``prompt`` and perhaps ``set`` (without one, it is in every set).
The programs are compiled once (``build_llama_cpp.py``; ``--build DIR`` says where). Two of them draft with a second
model:

simple  llama-speculative-simple, which shares its drafting code with llama-server. After each check the draft model
        reads the checked tokens once more, in one pass. ``--spec-draft-p-min`` (once ``--draft-p-min``) ends a draft
        early; the default is 0, never.
tree    llama-speculative, the older example, here with one branch. It reads nothing twice and knows no least
        probability.

Plain decoding is llama-speculative-simple too, so that one clock times all arms: it refuses to run without drafting,
so it gets n-gram lookup with patterns of 1024 tokens and drafts of 1, which looks for nothing before 1026 tokens and,
by a rule of that code (a draft shorter than the pattern is dropped), proposes nothing after. It was as fast as
llama-completion where they took turns (18.8 and 18.9 tok/s, medians of 3).

With ``--localspec`` localspec's ``auto`` takes its turn among the arms, in this process, with the same files, threads
and prompts; what it has read of a prompt is forgotten before each answer, and its speed counts the draft model's
reading of the prompt, which theirs does not.

Speed is what the programs print as decoded tokens per second: from the end of reading the prompt to the end of the
text, without loading. They decode one to K + 1 tokens more than asked, and count them. Decoding is greedy and ends with
the model's turn, or goes on with ``--ignore-eos``; texts of the arms can part, as passes over several tokens round
differently. The programs get localspec's number of threads and its OpenMP setting. Arms take turns prompt by prompt,
in reversed order in every other repeat. Printed are medians over a category's prompts of the medians over repeats.
Ctrl-C ends the run and keeps what is done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.build_llama_cpp import CMAKE_OPTIONS, SOURCE, build, default_folder
from localspec import LLM, SamplingParams, __version__
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab
from localspec.prompts.templates import ChatTemplate
from localspec.system.machine import cpu_name, default_threads, prepare_threads

PROGRAMS = {"simple": "llama-speculative-simple", "tree": "llama-speculative"}
PLAIN = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1024", "--spec-ngram-simple-size-m", "1"]
LOCALSPEC = "localspec auto"
TIMES = {
    "prompt_tokens": r"encoded\s+(\d+) tokens",
    "tokens": r"decoded\s+(\d+) tokens",
    "seconds": r"decoded\s+\d+ tokens in\s+([\d.]+) seconds",
    "tokens_per_second": r"decoded\s+\d+ tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s",
    "drafted": r"n_drafted = (\d+)",
    "accepted": r"n_accept  = (\d+)",
}


def read_prompts(path: Path, chosen: str, only: list[str] | None) -> list[dict[str, Any]]:
    lines = path.read_text("utf-8").splitlines()
    prompts: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
    prompts = [p for p in prompts if p.get("set", chosen) == chosen and (not only or p["category"] in only)]
    if not prompts:
        raise SystemExit(f"{path} has no such prompts")
    return prompts


class Renderer:
    """Prompts as the model's chat template writes them."""

    def __init__(self, model: Path) -> None:
        with GGUFFile(model) as gguf:
            vocab = Vocab.from_gguf(gguf)
            source = gguf.metadata.get("tokenizer.chat_template")
        self.template = ChatTemplate.for_vocab(None if source is None else str(source), vocab)
        # The programs put the first token there themselves.
        self.bos = vocab.token_text(vocab.bos) if vocab.add_bos and vocab.bos is not None else ""

    def __call__(self, prompt: str) -> str:
        return self.template.render([{"role": "user", "content": prompt}]).removeprefix(self.bos)


def arms_of(args: argparse.Namespace, draft: Path) -> dict[str, tuple[str, list[str]]]:
    """Name -> (program, its options)."""
    arms: dict[str, tuple[str, list[str]]] = {"plain": ("simple", PLAIN)}
    for k in args.drafts:
        with_draft = ["-md", str(draft), "--spec-draft-n-max", str(k)]
        if "simple" in args.programs:
            simple = [*with_draft, "--spec-type", "draft-simple"]
            arms[f"simple {k}"] = ("simple", simple)
            for p_min in args.p_min:
                arms[f"simple {k} p{p_min:g}"] = ("simple", [*simple, "--spec-draft-p-min", str(p_min)])
        if "tree" in args.programs:
            arms[f"tree {k}"] = ("tree", with_draft)
    return arms


def measure(command: list[str], prompt: str) -> dict[str, Any]:
    """Run a program and read what it prints about itself."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "prompt.txt"
        file.write_bytes(prompt.encode())
        # The text goes to standard output, everything else to standard error.
        done = subprocess.run([*command, "-bf", str(file)], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    said = done.stderr.decode(errors="replace")
    found = {name: re.search(pattern, said) for name, pattern in TIMES.items()}
    if done.returncode or not all(found.values()):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{said[-2000:]}")
    numbers = {name: float(match[1]) for name, match in found.items() if match}
    return numbers | {"text": done.stdout.decode(errors="replace").partition(prompt)[2].strip()}


class Localspec:
    """localspec with n-grams and the draft model, as ``draft_length`` auto decodes; loaded when first asked."""

    def __init__(self, model: Path, draft: Path, backend: str, args: argparse.Namespace) -> None:
        self._options = {
            "draft": ["ngram", draft],
            "backend": backend,
            "n_ctx": args.ctx,
            "n_threads": args.threads,
            "remember": False,
            "prefix_cache_bytes": 0,
        }
        self._model = model
        self._params = SamplingParams(max_tokens=args.tokens, ignore_eos=args.ignore_eos)
        self._llm: LLM | None = None

    def measure(self, prompt: str) -> dict[str, Any]:
        """One answer, with nothing read before."""
        if self._llm is None:
            self._llm = LLM(self._model, **self._options)
            # As their programs do, before anything is timed.
            self._llm.chat([{"role": "user", "content": "Count to ten."}], SamplingParams(max_tokens=16))
        llm = self._llm

        def forget() -> None:
            for context in llm.inspect().contexts:
                context.truncate(0)

        llm.run(lambda pair: forget())
        reply = llm.chat([{"role": "user", "content": prompt}], self._params)
        stats = reply.stats
        return {
            "prompt_tokens": stats["prompt_tokens"],
            "tokens": stats["completion_tokens"],
            "seconds": stats["seconds_draft"] + stats["seconds_verify"] + stats["seconds_other"],
            "tokens_per_second": stats["tokens_per_second"],
            "drafted": stats["num_draft_tokens"],
            "accepted": stats["num_accepted_tokens"],
            "text": reply.text,
        }

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()


def median_speed(runs: list[dict[str, Any]], ids: list[str], arm: str) -> float | None:
    """Median over prompts of the median over repeats; None unless every prompt that has begun has this arm."""
    medians = []
    for prompt in ids:
        speeds = [run["tokens_per_second"] for run in runs if run["id"] == prompt and run["arm"] == arm]
        if not speeds:
            return None
        medians.append(statistics.median(speeds))
    return statistics.median(medians) if medians else None


def summarise(runs: list[dict[str, Any]], arms: list[str]) -> list[dict[str, Any]]:
    """A row per category and one for all prompts: speeds of all arms, and the best with a draft."""
    rows = []
    # A prompt that has not been through all arms would favour those it has been through.
    complete = [i for i in {r["id"]: 0 for r in runs} if {r["arm"] for r in runs if r["id"] == i} >= set(arms)]
    categories = list(dict.fromkeys(run["category"] for run in runs if run["id"] in complete))
    for category in [*categories, None]:
        ids = list({r["id"]: 0 for r in runs if r["id"] in complete and category in (None, r["category"])})
        speeds = {arm: speed for arm in arms if (speed := median_speed(runs, ids, arm)) is not None}
        if len(speeds) > 1:
            best = max((arm for arm in speeds if arm not in ("plain", LOCALSPEC)), key=lambda arm: speeds[arm])
            row = {"category": category or "all", "prompts": len(ids), "speeds": speeds, "best": best}
            rows.append(row | {f"over {arm}": over(runs, ids, arm) for arm in (best, "plain") if LOCALSPEC in speeds})
    return rows


def over(runs: list[dict[str, Any]], ids: list[str], arm: str) -> float:
    """Median over prompts of localspec's speed over an arm's, prompt by prompt."""
    ratios = []
    for prompt in ids:
        ours, theirs = median_speed(runs, [prompt], LOCALSPEC), median_speed(runs, [prompt], arm)
        if ours is not None and theirs:
            ratios.append(ours / theirs)
    return statistics.median(ratios)


def show(rows: list[dict[str, Any]]) -> None:
    ours = any(LOCALSPEC in row["speeds"] for row in rows)
    head = f" {'localspec':>10} {'x best':>6} {'x plain':>7}" if ours else ""
    print(f"{'':14} {'prompts':>7} {'plain tok/s':>11} {'best tok/s':>10} {'x':>5}{head}  with")
    for row in rows:
        plain, best = row["speeds"]["plain"], row["speeds"][row["best"]]
        name, ratio = row["category"], best / plain
        if ours:
            our = f" {row['speeds'][LOCALSPEC]:>10.1f} {row['over ' + row['best']]:>6.2f} {row['over plain']:>7.2f}"
        else:
            our = ""
        print(f"{name:14} {row['prompts']:>7} {plain:>11.1f} {best:>10.1f} {ratio:>5.2f}{our}  {row['best']}")
    if rows:
        print("all prompts: " + ", ".join(f"{arm} {speed:.1f}" for arm, speed in rows[-1]["speeds"].items()))


def write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(report, indent=1, ensure_ascii=False), "utf-8")
        part.replace(path)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--set", default="report", choices=("tuning", "report"))
    parser.add_argument("--category", action="append", help="these categories only")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 8, 16])
    parser.add_argument("--p-min", type=float, nargs="*", default=[0.75], help="besides the default, 0")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=["simple"])
    parser.add_argument("--localspec", nargs="?", const="auto", metavar="BACKEND", help="localspec takes part")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--build", type=Path, default=default_folder(), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="a report to go on with; also where it is written")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    prepare_threads()
    built = build(list(PROGRAMS.values()), args.build.absolute(), default_threads())
    programs = {name: built[program] for name, program in PROGRAMS.items()}
    catalog = Catalog.load()
    model, draft = catalog.resolve(args.model), catalog.resolve(args.draft)
    arms = arms_of(args, draft)
    common = ["-m", str(model), "-t", str(args.threads), "-c", str(args.ctx), "-b", str(args.ctx), "-n"]
    common += [str(args.tokens), "--no-escape", "--temp", "0", "--top-k", "1", "--samplers", "top_k", "--fit", "off"]
    common += ["--ignore-eos"] if args.ignore_eos else []
    localspec = Localspec(model, draft, args.localspec, args) if args.localspec else None
    commands = {arm: [str(programs[program]), *common, *options] for arm, (program, options) in arms.items()}
    # What must not change within one report; the arms and prompts may grow.
    settings = {"model": model.name, "draft": draft.name, "options": common[2:], "set": args.set, "cpu": cpu_name()}
    report: dict[str, Any] = {
        "settings": settings,
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_"))},
        "versions": {"python": platform.python_version(), "source": SOURCE, "cmake_options": CMAKE_OPTIONS},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv,
        "commands": commands,
        "runs": [],
        "summary": [],
    }
    if args.resume is not None and args.resume.is_file():
        earlier = json.loads(args.resume.read_text("utf-8"))
        if earlier["settings"] != settings:
            raise SystemExit(f"{args.resume} was made with {earlier['settings']}, not {settings}")
        report["runs"], report["started"] = earlier["runs"], earlier["started"]
    if localspec is not None:
        commands[LOCALSPEC] = [f"LLM(..., backend={args.localspec!r}), localspec {__version__}"]
    order = list(commands)
    target, runs = args.json or args.resume, report["runs"]
    done = {(run["id"], run["arm"], run["repeat"]) for run in runs}
    prompts, render = read_prompts(args.prompts, args.set, args.category), Renderer(model)
    print(f"{cpu_name()}, {args.threads} threads, llama.cpp of {SOURCE}; {model.name}, draft {draft.name}", flush=True)
    try:
        for prompt in prompts:
            text = render(prompt["prompt"])
            for repeat in range(args.repeats):
                for arm in order if repeat % 2 == 0 else order[::-1]:
                    if (prompt["id"], arm, repeat) in done:
                        continue
                    print(f"\r\x1b[K{prompt['id']} {repeat} {arm}", end="", file=sys.stderr, flush=True)
                    run = {"id": prompt["id"], "category": prompt["category"], "arm": arm, "repeat": repeat}
                    if arm == LOCALSPEC:
                        assert localspec is not None
                        runs.append(run | localspec.measure(prompt["prompt"]))
                    else:
                        runs.append(run | measure(commands[arm], text))
                    write(target, report)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
    finally:
        if localspec is not None:
            localspec.close()
    print("\r\x1b[K", end="", file=sys.stderr)
    report["summary"] = summarise(runs, order)
    write(target, report)
    show(report["summary"])


if __name__ == "__main__":
    main()
