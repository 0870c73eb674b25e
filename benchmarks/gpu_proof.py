"""Everything about CUDA that needs a GPU to be known, by one command, on a machine without a network.

    python benchmarks/gpu_proof.py pack                 where there is a network: what is carried there, into .gpu-pack
    python benchmarks/gpu_proof.py run                  on the machine with an NVIDIA GPU and a CUDA toolkit
    python benchmarks/gpu_proof.py run --cpu --small    the same stages on tiny files and a CPU: whether they work

``pack`` writes llama-cpp-python's source without what compiling it needs not (4 MB, see ``build_llama_cpp.py``), and
those of localspec's requirements that are Python alone. numpy, psutil, jinja2, pyyaml, typing_extensions, pytest,
hypothesis, and cmake with a C++ compiler have to be there already; ``run`` looks for them first.

``run`` compiles llama-cpp-python for the GPU, runs the contract that every engine must keep, writes random weights of
real shapes (Qwen2.5 0.5B, 1.5B, 7B, 32B; Qwen3 30B-A3B; Q4_K_M), and measures what ``gpu_measures.py`` lists: t(w) to
64 rows, width noise, draft steps, our own time in a round, drafting on the CPU while the target verifies on the GPU,
steps of a head, several sequences. Stages that are done are
not done again: a run that was cut off goes on where it was, and one with ``--minutes`` begins nothing for which too
little is left. It needs 50 GB of disk; the minutes of the stages, 30 together, are guesses until it has run on a GPU.

It writes ``gpu-proof.json`` and ``gpu-proof.md`` after every run, however far that came. Of a run with ``--cpu`` they
say so in their first line. Random weights have no acceptance: nothing here says what drafting gains. In the stages
``ahead`` what is right is laid down (``gpu_measures.py``), as in ``ahead.py`` on devices that wait.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]  # the checkout, wherever this is called from

import build_llama_cpp  # noqa: E402

from scripts.stages import Stage, Stages, commit, say  # noqa: E402

SOURCE = "llama-cpp-python-slim.tar.xz"
CARRIED = ["click", "diskcache", "filelock", "gguf", "h11", "pathspec", "platformdirs", "prompt_toolkit", "starlette",
           "uvicorn", "wcwidth"]  # fmt: skip
"""Requirements of localspec and its tests that are Python alone."""
NEEDED = {"numpy": "numpy", "psutil": "psutil", "jinja2": "jinja2", "yaml": "pyyaml", "pytest": "pytest",
          "typing_extensions": "typing_extensions", "hypothesis": "hypothesis"}  # fmt: skip
"""Modules that have to be there, with the packages that they are in: what is carried and the tests import them."""
TOOLKIT = "the CUDA toolkit"
PROGRAMS = {"cmake": ["cmake"], "a C++ compiler": ["c++", "g++", "clang++"], TOOLKIT: ["nvcc"]}
MOST_BYTES = 60 << 20
MODELS = ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-30b-a3b", "qwen2.5-32b"]
MINUTES = {"qwen2.5-7b": 1.0, "qwen3-30b-a3b": 1.5, "qwen2.5-32b": 1.5}
CONTRACT = ["tests/backends/test_backends.py", "tests/backends/test_backends_memory.py",
            "tests/backends/test_hidden_states.py", "tests/backends/test_sequences.py",
            "tests/backends/test_heads.py"]  # fmt: skip
OWN_SHARE = 0.02
"""What our own time in a round may take of a 7B's pass."""


# -- what is carried ---------------------------------------------------------------------------------------------------


def pack(folder: Path, python: str) -> None:
    """Put together what the machine without a network needs."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    if not (folder / SOURCE).is_file():
        with tempfile.TemporaryDirectory() as scratch:
            build_llama_cpp.slim(build_llama_cpp.fetch_distribution(Path(scratch)), folder / SOURCE)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--platform", "any"]
    subprocess.run([*pip, "--python-version", python, "-d", str(wheels), *CARRIED], check=True, stdout=sys.stderr)
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {n_bytes / 2**20:.1f} MiB; the source is without {', '.join(build_llama_cpp.LEFT_OUT)}")
    if n_bytes > MOST_BYTES:
        sys.exit(f"that is more than {MOST_BYTES >> 20} MiB")


def install(packed: Path, site: Path) -> None:
    """Install those of the carried packages that are not here."""
    missing = []
    for name in CARRIED:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    print("missing:", *(missing or ["nothing"]))
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade"]
        command = [*pip, "--find-links", str(packed / "wheels"), "--target", str(site), *missing]
        subprocess.run(command, check=True)


# -- stages ------------------------------------------------------------------------------------------------------------


def stages(args: argparse.Namespace) -> list[Stage]:
    """All of them, in the order in which their results are worth most."""
    folder = args.folder
    python, script = sys.executable, str(Path(__file__).resolve())
    site, built = folder / "site", folder / "build" / "site"
    paths = [str(path) for path in (site, built, ROOT) if path in (site, ROOT) or not args.cpu or args.build]
    here = {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])}
    here |= {"LOCALSPEC_HOME": str(folder / "home"), "LOCALSPEC_OFFLINE": "1"}
    no_gpu = ["--cpu"] if args.cpu else []
    few = ["--repeats", "2", "--most-rows", "8"] if args.small else []
    no_build = "--cpu uses the llama-cpp-python that is installed; --build compiles it too"
    found = [
        Stage("machine", "what this machine is", [python, script, "machine"]),
        Stage("install", "what is missing of Python's packages",
              [python, script, "install", "--pack", str(args.pack), "--folder", str(folder)]),
        Stage("build", "compile llama-cpp-python from the slim archive",
              [python, script, "build", "--pack", str(args.pack), "--folder", str(folder), *no_gpu], ["install"],
              skip=no_build if args.cpu and not args.build else "", minutes=0 if args.cpu else 5, environment=here),
    ]  # fmt: skip
    ready = ["install"] if found[-1].skip else ["install", "build"]
    tests = [python, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider",
             "-m", "not real", "-k", "llama-cpp or llama_cpp"]  # fmt: skip
    only = ["-x", str(ROOT / CONTRACT[0])] if args.small else [str(ROOT / name) for name in CONTRACT]
    found.append(Stage("contract", "what every engine must keep", [*tests, *only], ready, minutes=2, environment=here))

    def measure(what: str, model: str, minutes: float, draft: str | None = None) -> Stage:
        command = [python, str(ROOT / "benchmarks/gpu_measures.py"), what, str(file(model)), *no_gpu, *few]
        needs = [*ready, f"write-{model}"]
        if draft is not None:
            command += ["--draft", str(file(draft))]
            needs.append(f"write-{draft}")
        return Stage(f"{what}-{model}", f"{what} of {model}", command, needs, minutes=minutes, environment=here)

    def file(model: str) -> Path:
        return folder / "models" / f"random-{model}.gguf"

    for model in MODELS:
        minutes = MINUTES.get(model, 0.5)
        write = [python, str(ROOT / "benchmarks/random_ggufs.py"), model, "--out", str(file(model))]
        write += ["--small"] if args.small else []
        found.append(Stage(f"write-{model}", f"random weights of {model}", write, ready, "", minutes, here))
        found += [measure("passes", model, minutes), measure("noise", model, minutes)]
        if model in ("qwen2.5-7b", "qwen2.5-32b"):
            found.append(measure("rounds", model, minutes, draft="qwen2.5-0.5b"))
        if model == "qwen2.5-7b":
            found.append(measure("ahead", model, minutes, draft="qwen2.5-0.5b"))
        if model in ("qwen2.5-1.5b", "qwen2.5-7b"):
            found.append(measure("head", model, 1))
        if model in ("qwen2.5-7b", "qwen3-30b-a3b"):
            found.append(measure("sequences", model, minutes))
    return found


def missing(*, compiles: bool, gpu: bool) -> list[str]:
    """What has to be on this machine and is not."""
    found = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])  # where cmake looks too
    for what, names in PROGRAMS.items() if compiles else ():
        if (gpu or what != TOOLKIT) and not any(shutil.which(name, path=folders) for name in names):
            found.append(what)
    return found


def machine() -> None:
    """Print what this machine is."""
    print(json.dumps({"system": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()}))
    query = "name,driver_version,memory.total,compute_cap"
    for command in (["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], ["nvcc", "--version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            print(f"{command[0]}: {done.stdout.strip().splitlines()[-1] if done.stdout.strip() else 'says nothing'}")
        except OSError:
            print(f"{command[0]}: not here")


# -- results -----------------------------------------------------------------------------------------------------------


def results(work: Stages) -> dict[str, Any]:
    """What the stages that are done have printed last, by stage."""
    found = {}
    for stage in work.stages:
        if work.is_done(stage.name):
            lines = work.output(stage.name).splitlines()
            try:
                found[stage.name] = json.loads(lines[-1])
            except (ValueError, IndexError):
                found[stage.name] = lines[-3:]
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, or a line that says that there is none."""
    lines = [list(head), ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if rows else "Not measured."


def page(found: dict[str, Any], work: Stages, args: argparse.Namespace) -> str:
    """All of it, in Markdown."""
    of = {what: {m: found[f"{what}-{m}"] for m in MODELS if f"{what}-{m}" in found} for what in
          ("passes", "noise", "rounds", "ahead", "head", "sequences")}  # fmt: skip
    where = "**Tried on a CPU: nothing here says anything about a GPU.**" if args.cpu else "llama.cpp on CUDA."
    sizes = " Tiny shapes." if args.small else ""
    parts = [f"# The proof on a GPU\n\n{where}{sizes} Random weights; medians; milliseconds. Commit {commit(ROOT)}."]
    parts.append("## Machine\n\n" + "\n".join(f"- {line}" for line in work.output("machine").splitlines()))
    parts.append("## Stages\n\n" + work.table())

    widths = sorted({int(w) for each in of["passes"].values() for w in each["ms_all_rows"]})
    rows = []
    for model, each in of["passes"].items():
        for kind in ("all", "last"):
            ms = {int(w): value for w, value in each[f"ms_{kind}_rows" if kind == "all" else "ms_last_row"].items()}
            cells = [f"{ms[1]:.2f} ms", *(f"{ms[w] / ms[1]:.2f}" for w in widths[1:])]
            rows.append([f"{model}, {each['bytes'] / 1e9:.1f} GB, {kind}", *cells])
    head = ["t(w) with logits of all rows, or of the last; then relative to t(1)", *map(str, widths)]
    parts.append("## Passes\n\n" + table(head, rows))
    reading = [[model, f"{each['read_tokens_per_second']:,.0f}"] for model, each in of["passes"].items()]
    parts.append(table(["reading 512 tokens", "tokens/s"], reading))

    rows = [
        [f"{model}, {width}", f"{each['largest_difference']:.3f}", f"{each['median_difference']:.4f}",
         f"{each['mean_kl']:.1e}", f"{each['same_best']:.0%}"]
        for model, measured in of["noise"].items() for width, each in measured["widths"].items()
    ]  # fmt: skip
    head = [
        "width noise: model, rows of a pass",
        "largest difference of a logit",
        "median",
        "mean KL",
        "same best token",
    ]
    parts.append("## Width noise\n\n" + table(head, rows))
    repeated = [m for m, each in of["noise"].items() if not each["equal_when_repeated"]]
    if repeated:
        parts.append(f"Passes of one row are not even equal to themselves when repeated: {', '.join(repeated)}.")

    rows = []
    for model, kinds in of["rounds"].items():
        for kind in ("plain_greedy", "drafted_greedy", "plain_sampled", "drafted_sampled"):
            each = kinds[kind]
            step = "" if each["ms_step"] is None else f"{each['ms_step']:.2f}"
            share = each["ms_own"] / each["ms_pass"]
            rows.append([f"{model}, {kind.replace('_', ', ')}", str(each["rounds"]), f"{each['ms_pass']:.2f}", step,
                         f"{each['ms_own']:.3f}", f"{share:.1%}"])  # fmt: skip
    head = ["rounds (8 draft tokens by the 0.5B)", "rounds", "pass", "a draft step", "our own time", "of the pass"]
    parts.append("## Rounds\n\n" + table(head, rows))
    began = ", ".join(f"{model} {kinds['ms_to_begin']:.2f} ms" for model, kinds in of["rounds"].items())
    beside = [model for model, kinds in of["rounds"].items() if kinds["overlaps"]]
    parts.append(
        f"The engine comes back from a pass after: {began or 'not measured'}. The round before is finished while the "
        f"device computes: {', '.join(beside) or 'for none'}."
    )
    if "qwen2.5-7b" in of["rounds"]:
        kinds = [each for each in of["rounds"]["qwen2.5-7b"].values() if isinstance(each, dict)]
        share = max(each["ms_own"] / each["ms_pass"] for each in kinds)
        verdict = "no GPU, no verdict on" if args.cpu or args.small else "under" if share < OWN_SHARE else "OVER"
        parts.append(
            f"Our own time is at most {share:.1%} of a pass of the 7B, {verdict} the {OWN_SHARE:.0%} it may take."
        )

    parts += ["## Drafting while the target verifies", *ahead_tables(of["ahead"])]

    rows = [[model, f"{each['ms_step']:.2f}", f"{each['ms_pass']:.2f}", f"{each['ms_own']:.3f}"]
            for model, each in of["head"].items()]  # fmt: skip
    parts.append("## Heads\n\n" + table(["a random head, 4 draft tokens a round", "a step", "pass", "own"], rows))
    rows = [
        [f"{model}, {n}", f"{each['ms']:.2f}", f"{each['tokens_per_second']:.0f}"]
        for model, measured in of["sequences"].items() for n, each in measured["sequences"].items()
    ]  # fmt: skip
    parts.append("## Sequences\n\n" + table(["sequences in a pass, a token each", "ms", "tokens/s"], rows))
    return "\n\n".join(parts) + "\n"


def ahead_tables(measured: dict[str, Any]) -> list[str]:
    """The target on one device and the 0.5B on the CPU: each alone and beside the other, then rounds both ways."""
    rows, answers = [], []
    for model, each in measured.items():
        where = f"{model} on {each['target_device']}, 0.5B on {each['draft_device']}"
        rows.append(
            [where, *(f"{each[name]:.2f}" for name in ("ms_pass", "ms_pass_beside", "ms_step", "ms_step_beside"))]
        )
        seconds, counts = each["seconds"], each["counts"]["ahead"]
        cells = [f"{seconds['ordinary']:.3f}", f"{seconds['ahead']:.3f}", f"{each['speedup']:.2f}"]
        accepted = f"{counts['accepted']} of {counts['drafted']}"
        prepared = [f"{counts['hits']} of {counts['rounds']}", str(counts["prepared"]), str(counts["taken"])]
        answers.append([where, accepted, *cells, *prepared])
    passes = ["milliseconds of", "a pass over 5 rows", "while a draft is made", "a draft step", "during passes"]
    rounds = ["drafts of 4, four in five right by script", "accepted", "seconds in the ordinary order",
              "with drafting ahead", "speed-up", "rounds prepared for", "tokens prepared", "used"]  # fmt: skip
    return [table(passes, rows), table(rounds, answers)]


def run(args: argparse.Namespace) -> int:
    """All stages, as far as they come; then the JSON and the page."""
    known = stages(args)
    if lacks := missing(compiles=not args.cpu or args.build, gpu=not args.cpu):
        sys.exit(f"not on this machine, and not carried: {', '.join(lacks)}")
    unknown = set(args.only) - {stage.name for stage in known}
    if unknown:
        sys.exit(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in known)}")
    work = Stages(known, args.folder / "kept", f"{commit(ROOT)} cpu={args.cpu} small={args.small}", ROOT)
    good = False
    try:
        good = work.run(args.only, args.again, args.minutes)
    finally:
        found = results(work)
        document = {"cpu": args.cpu, "small": args.small, "commit": commit(ROOT), "stages": found}
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "gpu-proof.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (args.out / "gpu-proof.md").write_text(page(found, work, args), encoding="utf-8")
        say(f"written: {args.out / 'gpu-proof.json'} and gpu-proof.md")
    return 0 if good else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "verb", choices=("pack", "run", "machine", "install", "build"), help="the last three are stages"
    )
    parser.add_argument("--pack", type=Path, default=ROOT / ".gpu-pack", metavar="DIR", help="what is carried")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".gpu-proof", metavar="DIR", help="builds, files, outcomes"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="for the JSON and the page; default: --folder")
    parser.add_argument("--cpu", action="store_true", help="no GPU, and the llama-cpp-python that is installed")
    parser.add_argument("--build", action="store_true", help="with --cpu: compile it all the same, for the CPU")
    parser.add_argument("--small", action="store_true", help="tiny shapes and few repeats")
    parser.add_argument("--only", action="append", default=[], metavar="STAGE", help="repeat for several")
    parser.add_argument("--again", action="store_true", help="do again what was done")
    parser.add_argument("--minutes", type=float, help="begin nothing for which too little of this is left")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="of the machine that is packed for")
    args = parser.parse_args(argv)
    args.pack, args.folder = args.pack.absolute(), args.folder.absolute()
    args.out = (args.out or args.folder).absolute()
    if args.verb == "run":
        return run(args)
    if args.verb == "pack":
        pack(args.pack, args.python)
    elif args.verb == "machine":
        machine()
    elif args.verb == "install":
        install(args.pack, args.folder / "site")
    else:
        options = [] if args.cpu else ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"]
        print(build_llama_cpp.build_binding(args.pack / SOURCE, args.folder / "build", os.cpu_count() or 2, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
