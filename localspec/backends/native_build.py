"""ik-llama compiled for this CPU, below LOCALSPEC_HOME; it takes the wheel's place once it was checked.

The source is the source distribution of the installed version, as pip finds it. Source and object files stay until all
is done, so an interrupted build goes on where it was. Before the libraries are used, processes of their own compare
them with the wheel's on models of this disk. Their record, without which no engine takes them, is written last.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import psutil

from localspec.backends.base import FloatArray
from localspec.backends.llama import ik_llama
from localspec.backends.llama.ggml import built_for, digest, system_info
from localspec.backends.trust import MAX_MEAN_KL, agreement, check_model, check_tokens
from localspec.errors import EngineError, EngineMismatch, EngineUnavailable, LocalspecError
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.sources.base import check_space
from localspec.model_files.sources.wheels import pip_command
from localspec.system.files import offline, write_atomically
from localspec.system.machine import BUSY, busy_share, cpu_flags, lower_priority, read_memory
from localspec.system.process import another_answers, on_interrupt

PACKAGE = f"ik-llama-cpp-python=={ik_llama.VERSION}"

_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_NATIVE=ON",
    "-DGGML_METAL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_ALL_WARNINGS=OFF",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
)

_KERNELS_AT = "ggml/src/iqk"  # folder of the source that has the kernels

_ROOM = 600 << 20  # bytes that source, object files and libraries take at most

_POLL_S = 0.2
_IDLE_S = 3.0  # seconds that a build in idle time runs between two looks at what else does

Report = Callable[[str, "float | None"], None]
"""What is being done, and the fraction of it that is done where that is known."""


def compiler() -> str | None:
    """The C++ compiler: ``CXX``, or the first that is installed; None where there is none."""
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def check_tools() -> None:
    """Raise EngineUnavailable, with how to install it, where something is lacking that compiling takes."""
    missing = [] if shutil.which("cmake") else ["cmake"]
    if sys.platform != "win32" and compiler() is None:  # on Windows cmake looks for it
        missing.insert(0, "a C++ compiler")
    if missing:
        hint = {
            "linux": "on Debian and Ubuntu: apt install g++ cmake",
            "darwin": "xcode-select --install, and: pip install cmake",
        }.get(sys.platform, "Visual Studio's Build Tools have both")
        raise EngineUnavailable(f"compiling ik-llama takes {' and '.join(missing)}, which is not here; {hint}")


# -- compiling ---------------------------------------------------------------------------------------------------------


def build(
    models: Sequence[Path], report: Report, *, jobs: int | None = None, idle: bool = False
) -> tuple[list[BuildComparison], list[str]]:
    """Compile, compare with the wheel on each of ``models``, and from then on use it.

    Args:
        models: files on which both engines are compared.
        jobs: compilers at a time; None: one for each core.
        idle: give way to all other programs, and pause while they use the CPUs.

    Returns:
        What was found on the files that it computes as the wheel does; and of the others, in a line each, that it
        contradicts itself: the check at the first load of a file (``trust``) finds such, and goes on without it.

    Raises:
        EngineUnavailable: there is no compiler, no source, or the build failed.
        EngineMismatch: what was compiled contradicts itself on each file, or the wheel alone on one, which no check
            would find later; it is not used.
        KeyboardInterrupt: it was stopped; the next call goes on from there.
    """
    check_tools()
    folder = ik_llama.compiled_folder()
    with _alone():
        folder.mkdir(parents=True, exist_ok=True)
        lib = _compiled(folder, report, jobs or os.cpu_count() or 1, idle)
        found: list[BuildComparison] = []
        contradicted: list[SelfContradiction] = []
        for path in models:
            try:
                found.append(compare(lib / ik_llama.LLAMA, path, report))
            except SelfContradiction as error:
                contradicted.append(error)
        if contradicted and not found:
            raise contradicted[0]
        place = folder / "lib"
        shutil.rmtree(place, ignore_errors=True)
        lib.replace(place)
        record = {
            "digest": digest(place),
            "kernels": ik_llama.compiled_kernels(folder / "source" / _KERNELS_AT),
            "flags": sorted(cpu_flags()),
            "day": time.strftime("%Y-%m-%d"),
            "comparisons": [asdict(each) for each in found],
        }
        with write_atomically(place / ik_llama.RECORD) as file:
            file.write(json.dumps(record, indent=1).encode())
        for name in ("source", "out"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return found, [str(error) for error in contradicted]


@contextmanager
def _alone() -> Iterator[None]:
    """Within the block no other process compiles the engine or deletes it; EngineError while one does."""
    from filelock import FileLock, Timeout

    folder = ik_llama.compiled_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder.with_name(folder.name + ".lock")).acquire(timeout=0)
    except Timeout:
        raise EngineError("another process is compiling ik-llama at this moment") from None
    with lock:
        yield


def unfinished() -> bool:
    """Whether a build was begun that can be gone on with."""
    return (ik_llama.compiled_folder() / "source").is_dir()


def remove() -> int:
    """Delete what was compiled, finished or not, so that the wheel is used again; how many bytes that frees."""
    folder = ik_llama.compiled_folder()
    if not folder.is_dir():
        return 0
    with _alone():
        freed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        (folder / "lib" / ik_llama.RECORD).unlink(missing_ok=True)  # first: from here on no engine takes the rest
        shutil.rmtree(folder)
    return freed


def _compiled(folder: Path, report: Report, jobs: int, idle: bool) -> Path:
    """The folder of the libraries, just linked."""
    source, out, log = folder / "source", folder / "out", folder / "build.log"
    log.unlink(missing_ok=True)
    if source.is_dir() and ik_llama.compiled_kernels(source / _KERNELS_AT) != ik_llama.compiled_kernels():
        shutil.rmtree(source)  # of a build that an earlier version began
    if not source.is_dir():
        check_space(folder, _ROOM, "compiling ik-llama")
        _fetch(source, log, report)
    # A compiler that was killed may have left half a file, which counts as done: what went on and failed begins anew.
    for begins in (False, True) if (out / "CMakeCache.txt").is_file() else (True,):
        if begins:
            shutil.rmtree(out, ignore_errors=True)
            _configure(source, out, log)
        if not _make(out, log, report, jobs, idle):
            break
    else:
        raise _failure("compiling ik-llama failed", log)
    lib = out / "lib"
    lib.mkdir(exist_ok=True)
    for name in (ik_llama.GGML, ik_llama.LLAMA):
        linked = next((path for path in out.rglob(name) if path.parent != lib), None)
        if linked is None:
            raise EngineUnavailable(f"compiling ik-llama made no {name}; all that was said is in {log}")
        shutil.copy2(linked, lib / name)
    return lib


def _fetch(source: Path, log: Path, report: Report) -> None:
    """Put llama.cpp's source, out of the source distribution, in its place."""
    if offline():
        raise EngineUnavailable("LOCALSPEC_OFFLINE is set, so the source of ik-llama is not fetched")
    report(f"fetching the source of {PACKAGE}, 42 MB", None)
    with tempfile.TemporaryDirectory(prefix="incoming-", dir=source.parent) as name:
        environment = {"TMPDIR": name, "TEMP": name, "TMP": name}
        found = fetched(PACKAGE, "vendor/ik_llama.cpp", Path(name), partial(_run, log=log, environment=environment))
        if found is None:
            raise _failure(f"pip could not fetch the source of {PACKAGE}", log)
        put_kernels(found)
        found.replace(source)


def put_kernels(source: Path) -> None:
    """Have our kernels compiled into ik-llama; ``ik_llama.KERNELS`` say which, and why."""
    place = source / _KERNELS_AT
    for name in ik_llama.KERNELS:
        shutil.copy2(Path(ik_llama.__file__).with_name(name), place)
    of_k_quants, of_attention = (f'#include "{name}"\n\n\\g<0>' for name in ik_llama.KERNELS)
    # Old, new, and how many are replaced (0: all). The kernels for x86 come before those for ARM.
    products: list[tuple[str, str, int]] = [
        (r"namespace \{", of_k_quants, 1),
        (r"if constexpr \(nrc_y == 1\) \{", "if constexpr (false) {", 0),  # one column is computed as several are
    ]
    for q in "456":
        loop = rf"const block_q{q}_k_r4 \* iq{q} = .*\n *for \(int ibl = 0; ibl < nbl; \+\+ibl\) \{{"
        products.append((loop, rf"\g<0> localspec::prefetch(iq{q}[ibl]);", 1))
        chosen = rf"IQK_SET_MUL_MAT_FUNCTIONS\(mul_mat_q{q}_k_r4_q8_k, kernels\)"
        products.append((chosen, f"LOCALSPEC_SET_FUNCTIONS(q{q}_k_r4)", 1))
    # Attention of one row leaves out cells at the end that attention of several looks at, and rounds otherwise.
    whole = (r"neq1 == 1 && nek1 > 256 && mask", "false", 1)
    attention = [whole, (r" *if \(neq3 == 1 && rk2 > 1 && neq1 == 1 && nth >= 1 && nek1/32 > 1", of_attention, 1)]
    for name, changes in (("iqk_gemm_kquants.cpp", products), ("iqk_flash_attn.cpp", attention)):
        text = (place / name).read_text(encoding="utf-8")
        for old, new, count in changes:
            text, n = re.subn(old, new, text, count=count)
            if not n:
                raise EngineUnavailable(f"the source of {PACKAGE} is not the one that our kernels are made for")
        (place / name).write_text(text, encoding="utf-8")


def fetched(package: str, part: str, folder: Path, run: Callable[[list[str]], int]) -> Path | None:
    """A folder of a package's source distribution, fetched to ``folder`` by pip, which ``run`` runs; None where pip has
    none."""
    command = [*pip_command(), "download", "--disable-pip-version-check", "--no-deps", "--no-input", "--no-cache-dir"]
    if run([*command, "--no-binary", package.partition("==")[0], "-d", str(folder), package]):
        return None
    with tarfile.open(next(folder.glob("*.tar.gz"))) as packed:
        packed.extractall(folder, [each for each in packed if f"/{part}/" in each.name], filter="data")
    return next(folder.glob(f"*/{part}"))


def _configure(source: Path, out: Path, log: Path) -> None:
    command = ["cmake", "-S", str(source), "-B", str(out), *_CMAKE, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
    if shutil.which("ninja"):
        command += ["-G", "Ninja"]
    flags = "" if sys.platform == "win32" else "-w"
    if platform.machine().lower() in ("arm64", "aarch64") and sys.platform != "win32":
        flags += " -mcpu=native"  # GGML_NATIVE says nothing to compilers for ARM
    command += [f"-DCMAKE_{language}_FLAGS={flags}" for language in ("C", "CXX") if flags]
    if _run(command, log):
        shutil.rmtree(out, ignore_errors=True)
        raise _failure("cmake failed", log)


def _make(out: Path, log: Path, report: Report, jobs: int, idle: bool) -> int:
    """Compile what is not compiled yet; the exit status."""
    what = "compiling ik-llama for this CPU" + (" in idle time" if idle else "")
    report(what, None)
    command = ["cmake", "--build", str(out), "--config", "Release", "--target", "llama", "--parallel", str(jobs)]
    begins = log.stat().st_size if log.exists() else 0
    done = re.compile(rb"^\[ *(\d+)(?:/(\d+)\]|%\])", re.MULTILINE)

    def watch() -> None:
        with log.open("rb") as file:
            file.seek(begins)
            steps = done.findall(file.read())
        if steps:
            report(what, int(steps[-1][0]) / int(steps[-1][1] or 100))

    return _run(command, log, watch, idle=idle)


def _run(
    command: Sequence[str],
    log: Path,
    watch: Callable[[], None] | None = None,
    *,
    idle: bool = False,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run a program to its end, its output to the log; the exit status. Stopped, it stops the program, and raises."""
    stopped: list[bool] = []
    with log.open("ab") as file, on_interrupt(lambda: stopped.append(True), ended_too=True):
        program = psutil.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        if idle:
            lower_priority(program.pid)
        looks = time.monotonic() + _IDLE_S
        try:
            while program.poll() is None and not stopped:
                time.sleep(_POLL_S)
                if watch is not None:
                    watch()
                if idle and time.monotonic() > looks:
                    _wait_for_idle_time(program, lambda: bool(stopped))
                    looks = time.monotonic() + _IDLE_S
        finally:
            for process in _tree(program):
                with suppress(psutil.Error):
                    process.terminate()  # a terminated compiler deletes what it has half done
            program.wait()
    if stopped:
        raise KeyboardInterrupt
    return int(program.returncode)


def _tree(program: psutil.Popen) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return [program, *program.children(recursive=True)] if program.poll() is None else []
    return []


def _wait_for_idle_time(program: psutil.Popen, stopped: Callable[[], bool]) -> None:
    """Pause a program until other programs leave the CPUs alone."""
    paused = _tree(program)
    for process in paused:
        with suppress(psutil.Error):
            process.suspend()
    try:
        while not stopped() and (another_answers() or busy_share() > BUSY):
            time.sleep(_IDLE_S / 2)
    finally:
        for process in paused:
            with suppress(psutil.Error):
                process.resume()


def _failure(what: str, log: Path) -> EngineUnavailable:
    """The first line of the log that names an error."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = next((line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)), lines[-1] if lines else "")
    return EngineUnavailable(f"{what}: {said[:200]}; all that was said is in {log}")


# -- checking ----------------------------------------------------------------------------------------------------------


class SelfContradiction(EngineMismatch):
    """What was compiled computes a file's passes over several tokens differently from those over one."""


@dataclass(frozen=True, slots=True)
class BuildComparison:
    """What was compiled, against the wheel, on one file."""

    file: str
    features: tuple[list[str], list[str]]  # instruction sets that the wheel and the compiled one use
    mean_kl: float  # of the compiled one's logits from the wheel's [nats]
    top1: float  # share of positions with the same most probable token
    ms: tuple[dict[int, float], dict[int, float]]  # t(w) of the wheel and of the compiled one [ms]

    def ratio(self, width: int) -> float:
        """Time of the compiled one's pass, of the wheel's."""
        return self.ms[1][width] / self.ms[0][width]


TIMED = {1: 8, 2: 8, 4: 6, 8: 6, 256: 2}
"""Tokens in a pass -> passes of an engine that are timed, twice."""

_FILL = 64


def files_to_compare(paths: Collection[Path]) -> list[Path]:
    """Of these, the smallest ones that have each type of tensors once, and fit memory twice."""
    room, seen, chosen = read_memory().available, set[str](), list[Path]()
    for path in sorted(paths, key=lambda each: each.stat().st_size):
        if 2.6 * path.stat().st_size > room:
            break
        try:
            with GGUFFile(path) as gguf:
                types = {tensor.type_name for tensor in gguf.tensors.values()}
                gguf.check_generates_text()
        except LocalspecError:
            continue
        if not types <= seen:
            seen |= types
            chosen.append(path)
    return chosen


def compare(library: Path, model: Path, report: Report) -> BuildComparison:
    """Run a file in both engines, a process each, and compare their logits and the time of their passes.

    Raises:
        SelfContradiction: the compiled one contradicts itself.
        EngineMismatch: they differ by more than noise.
        EngineUnavailable: the compiled one does not load.
    """
    wheel = ik_llama.package_library()
    if wheel is None:
        raise EngineUnavailable("the wheel of ik-llama is not here, which a compiled one is compared with")
    report(f"comparing it with the wheel on {model.name}", None)
    runs = [_examined(each, model) for each in (wheel, library, library, wheel)]  # in turns: other programs run too
    both, again = runs[:2], runs[:1:-1]
    found = agreement(*(each.logits for each in both))
    wrong = f"what was compiled computes {model.name} wrongly"
    if not both[1].own_kl <= MAX_MEAN_KL:
        raise SelfContradiction(f"{wrong} (batches differ from single tokens, KL {both[1].own_kl:.2g} nats)")
    if not found.holds:
        raise EngineMismatch(
            f"{wrong} (KL {found.mean_kl:.2g} nats from the wheel), so it is not used; localspec engine remove deletes "
            "it"
        )
    wheels, compiled = (
        {width: round(min(one.ms[width], two.ms[width]), 3) for width in TIMED}
        for one, two in zip(both, again, strict=True)
    )
    features = both[0].features, both[1].features
    return BuildComparison(model.name, features, found.mean_kl, found.top1, (wheels, compiled))


class _Examined(NamedTuple):
    """What a process that runs a file in one build of ik-llama found."""

    features: list[str]
    own_kl: float  # of its passes over several tokens from those over one [nats]
    logits: FloatArray  # of ``_FILL`` tokens, in passes of 16 [_FILL, n_vocab]
    ms: dict[int, float]  # median time of passes behind them


def _examined(library: Path, model: Path) -> _Examined:
    """Raises EngineUnavailable where the library does not load, or ends the process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _follow_parent) as pool:
        child: psutil.Process | None = None
        try:
            child = psutil.Process(pool.submit(os.getpid).result())
            return pool.submit(_examine, library, model).result()
        except Exception as error:
            raise EngineUnavailable(f"{library} does not run {model.name} here: {error}") from None
        except BaseException:  # Ctrl-C, which else would wait for the child's end
            if child is not None:
                with suppress(psutil.Error):
                    child.kill()
            raise


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end with it, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _examine(library: Path, path: Path) -> _Examined:
    os.environ[ik_llama.LIBRARY] = str(library)
    with ik_llama.load(path) as model:
        own_kl = check_model(model).mean_kl
        tokens = check_tokens(model, _FILL)
        tokens = (tokens * (2 + max(TIMED) // len(tokens) + _FILL // len(tokens)))[: _FILL + max(TIMED)]
        with model.new_context(len(tokens) + 8) as context:
            rows = [context.decode(tokens[i : i + 16]).logits.copy() for i in range(0, _FILL, 16)]
            ms: dict[int, list[float]] = {width: [] for width in TIMED}
            for width, turns in TIMED.items():
                for _ in range(turns + 1):
                    started = time.perf_counter()
                    context.decode(tokens[_FILL : _FILL + width], "last" if width > 16 else "all")
                    ms[width].append((time.perf_counter() - started) * 1e3)
                    context.truncate(_FILL)
        features = built_for(system_info(ik_llama.binding().lib))
        times = {width: median(found[1:]) for width, found in ms.items()}  # the first pass of a kind allocates
        return _Examined(features, own_kl, np.concatenate(rows), times)


def comparisons() -> list[BuildComparison]:
    """What was found when the compiled engine that is here was checked."""
    found = []
    for each in (ik_llama.compiled_record() or {}).get("comparisons", []):
        with suppress(KeyError, TypeError, ValueError):
            wheel, compiled = ({int(w): float(ms) for w, ms in times.items()} for times in each["ms"])
            found.append(BuildComparison(**{**each, "ms": (wheel, compiled)}))
    return found
