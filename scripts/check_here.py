"""What localspec does on this computer, in one file to send back: for systems that it has not been run on.

    python3 scripts/check_here.py                     on Windows: py scripts/check_here.py

Installs what the tests need into a virtual environment of the checkout (`.venv-test`), then runs in this order: the
contract that every engine must keep, `localspec doctor`, `verify --quick` and `bench --quick` on the default pair
(fetched once, 1.6 GB), and on a Mac with Apple silicon the table of MLX. Half an hour or so, most of it compiling.

It writes `check-here.md` when it ends: send that. Ctrl-C ends it too; the next call goes on with what is missing and
does again what failed. Nothing is sent anywhere by itself; your home folder's name is left out of what is written.
"""

from __future__ import annotations

import argparse
import locale
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from stages import Stage, Stages, commit, say

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ["tests/backends/test_backends.py", "tests/backends/test_backends_memory.py",
            "tests/backends/test_hidden_states.py", "tests/backends/test_heads.py",
            "tests/backends/test_reference.py", "tests/spec_decode/test_exactness.py", "tests/system"]  # fmt: skip
PAIR = ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"]

ENGINES = """
from localspec.backends import backend_names, unavailable_reason
from localspec.backends.registry import engine_module
from localspec.backends.llama.ggml import system_info
from localspec.system.machine import cpu_features, cpu_name, default_threads, visible_gpus
print(cpu_name(), "|", *cpu_features(), "| threads", default_threads(), "| GPUs", visible_gpus())
for name in backend_names():
    reason = unavailable_reason(name)
    print(f"{name}: {reason or 'loads'}")
    if reason is None and name in ("ik-llama", "llama-cpp"):
        found = engine_module(name).binding()
        print("   ", found.version, "|", system_info(found.lib).strip())
"""


def from_here(name: str) -> str:
    """A file by its whole path, as the stages run in another folder; any other name as it is."""
    return str(Path(name).absolute()) if Path(name).is_file() else name


def stages(arguments: argparse.Namespace) -> list[Stage]:
    """All that is done, in order."""
    windows, apple = sys.platform == "win32", sys.platform == "darwin" and platform.machine() == "arm64"
    folder = ROOT / (os.environ.get("VENV_TEST") or ".venv-test") / ("Scripts" if windows else "bin")
    python = str(folder / ("python.exe" if windows else "python"))
    localspec = [python, "-m", "localspec"]
    model = [from_here(arguments.model)] if arguments.model else []
    draft = ["--draft", from_here(arguments.draft)] if arguments.draft else []
    given = bool(arguments.model)
    tests = [*CONTRACT, *(["tests/backends/mlx"] if apple else [])]
    here = {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"}
    installed, fetched = ["install"], ["install", "models"]
    return [
        Stage("install", "an environment with every engine", [sys.executable, str(ROOT / "scripts/make.py"), "dev"]),
        Stage("engines", "which engines load", [python, "-c", ENGINES], installed, environment=here),
        Stage("contract", "what every engine must keep, consoles, files, signals",
              [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests], installed, environment=here),
        Stage("models", "fetch the default pair (1.6 GB)",
              [*localspec, *(["inspect", *model] if given else ["pull", *PAIR])], installed, environment=here),
        Stage("doctor", "this machine and the pair", [*localspec, "doctor", *model, *draft], fetched, environment=here),
        Stage("verify", "is it lossless here?", [*localspec, "verify", "--quick", *model, *draft], fetched,
              environment=here),
        Stage("bench", "what drafting gains, in two minutes", [*localspec, "bench", "--quick", *model, *draft], fetched,
              environment=here),
        Stage("mlx", "the table of MLX", [python, str(ROOT / "benchmarks/mlx_metal.py"), *model, *draft], fetched,
              skip="" if apple or arguments.mlx else "MLX is for Apple silicon", environment=here),
    ]  # fmt: skip


def machine() -> list[str]:
    """What this computer is, one fact a line."""
    return [
        f"system: {platform.platform()}, {platform.machine()}",
        f"Python: {platform.python_implementation()} {platform.python_version()}, {sys.maxsize.bit_length() + 1} bits",
        f"commit: {commit(ROOT) or 'unknown'}",
        f"encodings: files {locale.getpreferredencoding(False)}, names {sys.getfilesystemencoding()}, "
        f"standard output {sys.stdout.encoding}, errors {sys.stderr.encoding}",
        f"standard output is a terminal: {sys.stdout.isatty()}; TERM={os.environ.get('TERM', '')}",
        f"logical CPUs: {os.cpu_count()}",
    ]


def report(work: Stages) -> str:
    """The file to send back, in Markdown, without the name of the person's home."""
    parts = ["# localspec on this computer\n", "\n".join(f"- {fact}" for fact in machine()) + "\n", work.table()]
    for stage in work.stages:
        text = work.output(stage.name)
        if text:
            command = " ".join(stage.command[:1] + [word if len(word) < 100 else "…" for word in stage.command[1:]])
            parts.append(f"## {stage.name}\n\n`{command}`\n\n~~~~text\n{text}\n~~~~\n")
    return private("\n".join(parts))


def private(text: str) -> str:
    """Without the names of the checkout's folder and of the person's home."""
    for folder, shown in ((ROOT, "CHECKOUT"), (Path.home(), "HOME")):
        for name in {str(folder), folder.as_posix(), str(folder).replace("\\", "\\\\")} - {"/", ""}:
            text = text.replace(name, shown)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="STAGE", help="repeat for several")
    parser.add_argument("--again", action="store_true", help="do again what was done")
    parser.add_argument("--out", type=Path, default=ROOT / "check-here.md", metavar="FILE")
    parser.add_argument("--folder", type=Path, default=ROOT / ".check-here", help="keeps what is done")
    parser.add_argument("--model", help="another model than the default pair, and nothing is fetched")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--mlx", action="store_true", help="the table of MLX on Linux too")
    arguments = parser.parse_args(argv)
    if hasattr(sys.stderr, "reconfigure"):
        sys.stderr.reconfigure(errors="replace")
    known = stages(arguments)
    unknown = set(arguments.only) - {stage.name for stage in known}
    if unknown:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in known)}")
    work = Stages(known, arguments.folder, f"{commit(ROOT)} {arguments.model} {arguments.draft}", ROOT)
    good = False
    try:
        good = work.run(arguments.only, arguments.again)
    finally:
        arguments.out.write_text(report(work), encoding="utf-8")
        say(f"written: {arguments.out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
