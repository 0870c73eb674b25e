"""``localspec engine``: ik-llama compiled for this CPU. The compiler here is a script that links the wheel's libraries
with a byte more; all else is as it is for a user. Two tests compile."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from localspec.backends import native_build
from localspec.backends.llama import ik_llama
from localspec.backends.llama.ggml import digest
from localspec.backends.registry import unavailable_reason
from localspec.controllers.cost_model import PassTimes
from localspec.engine.loading import compiled_offer
from localspec.errors import EngineMismatch, EngineUnavailable
from localspec.system.machine import cpu_features
from tests.conftest import TinyFiles
from tests.support.program import apart, localspec
from tests.support.waiting import PATIENCE, wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the compiler's stand-in is a shell script"),
    pytest.mark.skipif(unavailable_reason("ik-llama") is not None, reason="ik-llama-cpp-python is not installed"),
]

CMAKE = """#!/bin/sh
case "$1" in
    -S) mkdir -p "$4" && : > "$4/CMakeCache.txt" ;;
    --build)
        echo "[1/2] Building CXX object iqk.cpp.o"
        while [ -e "$BUSY" ]; do sleep 0.1; done
        [ -e "$BROKEN" ] && { echo "iqk.cpp:7: error: no such kernel"; exit 1; }
        mkdir -p "$2/src" && cp "$WHEEL"/*.so "$2/src" && printf x >> "$2/src/libggml.so"
        echo "[2/2] Linking" ;;
esac
"""


class Machine:
    """A home, and tools on the PATH."""

    def __init__(self, home: Path, tools: Path) -> None:
        self.folder, self.tools = home / "build" / f"ik-llama-{ik_llama.VERSION}", tools
        self.busy, self.broken = tools / "busy", tools / "broken"
        self.kernels = self.folder / "source/ggml/src/iqk"
        self.kernels.mkdir(parents=True)  # as if it had been fetched
        for name in ik_llama.KERNELS:
            shutil.copy(Path(ik_llama.__file__).with_name(name), self.kernels)
        wheel = ik_llama.package_library()
        self.environment = {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "LOCALSPEC_HOME": str(home),
            "WHEEL": str(wheel.parent),
            "BUSY": str(self.busy),
            "BROKEN": str(self.broken),
        }
        tools.mkdir()
        (tools / "cmake").write_text(CMAKE)
        (tools / "c++").write_text("")
        for path in (tools / "cmake", tools / "c++"):
            path.chmod(0o755)
        bundled = wheel.parent.parent.parent / "ik_llama_cpp_python.libs"
        for place in (self.folder.parent, self.folder):  # where the wheel's libraries look for what they load
            if bundled.is_dir():
                (place / bundled.name).symlink_to(bundled)

    def engine(self, tiny: TinyFiles) -> str:
        """What a new process loads a model with."""
        code = (
            "import sys\nfrom localspec.backends.llama.ik_llama import load\n"
            "with load(sys.argv[1]) as model:\n    print(model.engine)"
        )
        return apart(code, tiny.bpe)


@pytest.fixture
def machine(isolated_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(isolated_home, tmp_path / "tools")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


def engine_command(*arguments: str, status: int = 0) -> str:
    """What ``localspec engine`` prints."""
    done = localspec("engine", *arguments)
    assert done.returncode == status, done.stderr
    return (done.stdout + done.stderr).decode()


def silent(what: str, fraction: float | None) -> None:
    pass


def test_it_takes_the_wheels_place_and_is_undone_with_one_command(machine: Machine, tiny: TinyFiles) -> None:
    wheel = f"ik-llama {ik_llama.binding().version}"
    (found,), (wrong,) = native_build.build([tiny.bpe, tiny.trap], silent)
    assert wrong.startswith(f"what was compiled computes {tiny.trap.name} wrongly (batches differ from single tokens")
    assert (found.file, found.top1) == (tiny.bpe.name, 1.0)
    assert found.mean_kl < 1e-6
    assert all(set(times) == set(native_build.TIMED) and min(times.values()) > 0 for times in found.ms)
    assert {each.name for each in machine.folder.iterdir() if not each.is_symlink()} == {"build.log", "lib"}
    compiled = machine.engine(tiny)
    assert compiled.startswith(f"ik-llama {ik_llama.VERSION}+")
    assert compiled != wheel
    assert digest(machine.folder / "lib") in compiled
    listing = json.loads(engine_command("list", "--json"))
    assert listing["used"] == "compiled"
    assert [each["file"] for each in listing["comparisons"]] == [tiny.bpe.name]
    assert "is here and in use" in engine_command("build")
    assert "the wheel is used again" in engine_command("remove")
    assert machine.engine(tiny) == wheel
    assert not machine.folder.exists()
    assert "nothing was compiled" in engine_command("remove")


def test_what_is_not_whole_for_another_cpu_or_does_not_load_is_not_used(machine: Machine, tiny: TinyFiles) -> None:
    wheel = machine.engine(tiny)
    native_build.build([], silent)
    library = ik_llama.compiled_library()
    record, ggml = library.with_name(ik_llama.RECORD), library.with_name(ik_llama.GGML)
    whole = json.loads(record.read_text())
    for changed in (whole | {"flags": [*whole["flags"], "avx1024"]}, whole | {"digest": "00000000"}, []):
        record.write_text(json.dumps(changed))
        assert ik_llama.compiled_library() is None
    record.write_text(json.dumps(whole))
    assert ik_llama.compiled_library() == library
    ggml.write_text("no library")
    assert ik_llama.compiled_library() is None
    assert "is damaged or for another CPU" in engine_command("list")
    record.write_text(json.dumps(whole | {"digest": digest(library.parent)}))
    assert ik_llama.compiled_library() == library
    assert machine.engine(tiny) == wheel


def test_what_has_an_earlier_versions_kernels_is_used_and_compiled_again(
    machine: Machine, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = machine.tools / "source"
    shutil.copytree(machine.folder / "source", source)
    native_build.build([], silent)
    record = machine.folder / "lib" / ik_llama.RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | {"kernels": "00000000"}))
    used = machine.engine(tiny)
    assert ik_llama.EARLIER in engine_command("list")
    with ik_llama.load(tiny.bpe) as model:
        assert compiled_offer(model, PassTimes({1: 10.0, 8: 20.0})) == ik_llama.EARLIER
    shutil.copytree(source, machine.folder / "source")
    assert "is used from now on" in engine_command("build")
    assert machine.engine(tiny) == used
    assert ik_llama.EARLIER not in engine_command("list")
    assert "is here and in use" in engine_command("build")
    # The source of a build that an earlier version began is fetched anew.
    shutil.copytree(source, machine.folder / "source")
    (machine.kernels / ik_llama.KERNELS[0]).write_text("")
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "1")
    assert "so the source of ik-llama is not fetched" in engine_command("build", "--force", status=1)


def test_an_interrupted_build_goes_on_and_is_not_used_before(machine: Machine) -> None:
    machine.busy.touch()
    command = [sys.executable, "-m", "localspec", "engine", "build", "--force"]
    with subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, text=True) as process:
        log = machine.folder / "build.log"
        wait_until(lambda: process.poll() is not None or (log.is_file() and "[1/2]" in log.read_text()))
        for other in (["build", "--force"], ["remove"]):
            assert "another process is compiling" in engine_command(*other, status=1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("interrupted; what is compiled is kept")
    assert ik_llama.compiled_library() is None
    assert "a build was interrupted" in engine_command("list")
    machine.busy.unlink()
    assert "going on with the build" in engine_command("build", "--force", "--idle")
    assert ik_llama.compiled_library() is not None


COMPARING = """
import signal
from concurrent.futures import ProcessPoolExecutor
from localspec.backends import native_build

def submit(pool, work, *given, submit=ProcessPoolExecutor.submit):
    print(work.__name__, flush=True)
    return submit(pool, work, *given)

ProcessPoolExecutor.submit = submit
native_build._examine = signal.sigtimedwait  # stands for minutes of passes
native_build._examined([signal.SIGUSR1], 600)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_comparison_ends_with_the_program_that_began_it(end: int) -> None:
    command = [sys.executable, "-c", COMPARING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert "sigtimedwait\n" in process.stdout
        children = psutil.Process(process.pid).children()
        process.send_signal(end)
        assert process.wait(PATIENCE) == -end
    _, left = psutil.wait_procs(children, PATIENCE)
    assert left == []


def test_a_compiler_that_fails_is_one_line_and_nothing_is_used(machine: Machine) -> None:
    machine.broken.touch()
    for n in (1, 2):  # the second begins anew, as half a file may be what it fails on
        with pytest.raises(EngineUnavailable, match=r"failed: iqk\.cpp:7: error: no such kernel; all that was said"):
            native_build.build([], silent)
        assert (machine.folder / "build.log").read_text().count("error") == n
    assert ik_llama.compiled_library() is None


@pytest.mark.usefixtures("machine")
def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bare"))
    monkeypatch.setenv("CXX", "")
    said = engine_command("build", "--force", status=1).splitlines()[-1]
    assert "takes a C++ compiler and cmake, which is not here" in said
    assert "apt install" in said


def test_an_engine_that_computes_wrongly_or_does_not_load_is_not_used(
    machine: Machine, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineMismatch, match="wrongly"):  # as both do this file, which is as bad
        native_build.build([tiny.trap], silent)
    assert ik_llama.compiled_library() is None
    (machine.tools / "wheel").mkdir()
    for name in (ik_llama.GGML, ik_llama.LLAMA):
        (machine.tools / "wheel" / name).write_text("no library")
    monkeypatch.setenv("WHEEL", str(machine.tools / "wheel"))
    with pytest.raises(EngineUnavailable, match="does not run"):
        native_build.build([tiny.bpe], silent)
    assert ik_llama.compiled_library() is None


def test_each_type_of_tensors_is_compared_once(tiny: TinyFiles) -> None:
    assert native_build.files_to_compare([tiny.bpe, tiny.spm, tiny.bpe]) == [
        min(tiny.bpe, tiny.spm, key=lambda path: path.stat().st_size)
    ]
    assert tiny.trap in native_build.files_to_compare([tiny.bpe, tiny.trap])


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("cmake") and native_build.compiler()), reason="no compiler is here")
def test_qwen_is_the_same_on_what_is_really_compiled(
    real_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCALSPEC_OFFLINE")  # the source is fetched
    home = tmp_path / "native"
    command = [sys.executable, "-m", "localspec", "engine", "build", "--force"]
    (home / "models").mkdir(parents=True)
    for model in (real_model("qwen2.5-coder-0.5b"), real_model("qwen2.5-coder-1.5b")):
        (home / "models" / model.name).symlink_to(model)
    environment = os.environ | {"LOCALSPEC_HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "same best token at" in done.stdout
    # Where all tensors are K-quants, a token's logits do not depend on how many are verified beside it.
    apart(WIDTHS, model, **environment)


WIDTHS = """
import sys
import numpy as np
from localspec.backends.llama.ik_llama import compiled_library, load

assert compiled_library() is not None
for n_threads in (1, 2, 3, 5):  # of 12 heads and 2 KV heads
    with load(sys.argv[1], n_threads=n_threads) as model, model.new_context(512) as context:
        text = "Speculative decoding checks several tokens of a draft at once. " * 40
        tokens = model.tokenize(text, add_special=True)

        def logits(width):
            context.truncate(0)
            context.decode(tokens[:300], "none")
            passes = [context.decode(tokens[at : at + width], "all").logits.copy() for at in range(300, 324, width)]
            return np.concatenate(passes)

        alone = logits(1)
        for width in (2, 3, 4, 6, 8):
            np.testing.assert_array_equal(logits(width), alone, f"passes over {width} tokens, {n_threads} threads")
"""


def random_blocks(q: int, n_blocks: int, size: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Weights as ik-llama interleaves four rows of them, with scales that are numbers."""
    blocks = rng.integers(256, size=(n_blocks, size), dtype=np.uint8)
    n_scales = 4 if q == 6 else 8
    blocks[:, : 2 * n_scales] = rng.uniform(0, 0.01, (n_blocks, n_scales)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif("AVX512-VNNI" not in cpu_features(), reason="our kernels are for AVX512-VNNI")
@pytest.mark.skipif(native_build.compiler() is None, reason="no compiler is here")
def test_our_kernels_compute_what_the_engines_own_do_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCALSPEC_OFFLINE")  # the source is fetched
    found = native_build.fetched(native_build.PACKAGE, "vendor/ik_llama.cpp", tmp_path, subprocess.call)
    assert found is not None
    native_build.put_kernels(found)
    source = found / "ggml"
    library = tmp_path / "kernels.so"
    flags = ["-O2", "-march=native", "-std=c++17", "-w", "-shared", "-fPIC", "-DGGML_USE_IQK_MULMAT"]
    folders = [f"-I{source / part}" for part in ("src/iqk", "src", "include")]
    here = Path(__file__).with_name("kernels.cpp")
    subprocess.run([str(native_build.compiler()), *flags, *folders, str(here), "-o", str(library)], check=True)
    ctypes.CDLL(str(ik_llama.package_library().with_name(ik_llama.GGML)), mode=ctypes.RTLD_GLOBAL)
    kernels = ctypes.CDLL(str(library))
    sizes = (ctypes.c_int * 4)()
    kernels.sizes(sizes)
    rng = np.random.default_rng(1)
    n, n_rows = 768, 12
    column = np.dtype([("d", "f4"), ("sum", "f4"), ("quants", "i1", 256), ("sums", "u1", 32)])
    assert column.itemsize == sizes[3]
    for q, size in zip((4, 5, 6), sizes, strict=False):
        weights = random_blocks(q, n_rows // 4 * n // 256, size, rng)
        columns = np.zeros((8, n // 256), column)
        columns["d"] = rng.uniform(0, 0.1, columns.shape)
        columns["quants"] = rng.integers(-127, 128, columns["quants"].shape)
        by_half = columns["quants"].reshape(8, -1, 16, 16).sum(-1)
        # Of Q6_K sums of integers, of 16 each; of the others as numbers, of 32 each.
        sums = by_half.astype("i2") if q == 6 else by_half.reshape(8, -1, 8, 2).sum(-1).astype("f4")
        columns["sums"] = np.ascontiguousarray(sums).view("u1").reshape(columns["sums"].shape)
        for n_columns in range(1, 9):
            results = np.full((2, n_columns, n_rows), np.nan, np.float32)
            for ours in (0, 1):
                kernels.multiply(
                    q, ctypes.c_bool(ours), n, n_rows, weights.ctypes.data_as(ctypes.c_void_p),
                    ctypes.c_size_t(n // 256 * size // 4), n_columns, columns.ctypes.data_as(ctypes.c_void_p),
                    ctypes.c_size_t(columns[0].nbytes), results[ours].ctypes.data_as(ctypes.c_void_p),
                )  # fmt: skip
            assert np.isfinite(results).all()
            assert results[0].std() > 0
            np.testing.assert_array_equal(results[0].view(np.int32), results[1].view(np.int32), f"Q{q}_K, {n_columns}")
