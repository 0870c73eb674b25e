"""What the doctor reads from the system: files as the kernel writes them, in a folder of our own."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from localspec.commands.doctor import machine
from localspec.commands.doctor.header import bytes_per_token, read_header
from localspec.commands.doctor.report import MachineFacts
from localspec.model_files.gguf_file import GGUFFile
from localspec.system import bandwidth, memory, power
from tests.conftest import TinyFiles
from tests.support import ggufs

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")
MIB = 1 << 20
UNLIMITED_V1 = "9223372036854771712"


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write files below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  1048576 kB\nMemFree:  1024 kB\nMemAvailable:  524288 kB"}


# -- memory ------------------------------------------------------------------------------------------------------------


@linux_only
def test_memory_without_a_limit(tmp_path: Path) -> None:
    found = memory.read_memory(tree(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/"}))
    assert (found.total, found.available, found.limit) == (1024 * MIB, 512 * MIB, None)


@linux_only
def test_a_limit_of_cgroup_v2(tmp_path: Path) -> None:
    """The tightest of a group and its parents counts, and cached files are no use of memory."""
    files = {
        "proc/self/cgroup": "0::/outer/inner",
        "sys/fs/cgroup/outer/memory.max": str(300 * MIB),
        "sys/fs/cgroup/outer/memory.current": str(250 * MIB),
        "sys/fs/cgroup/outer/memory.stat": f"anon 1\ninactive_file {100 * MIB}\nactive_file {20 * MIB}\nfile 9",
        "sys/fs/cgroup/outer/inner/memory.max": "max",
        "sys/fs/cgroup/outer/inner/memory.current": str(10 * MIB),
    }
    found = memory.read_memory(tree(tmp_path, MEMINFO | files))
    assert (found.available, found.limit) == (170 * MIB, 300 * MIB)


@linux_only
def test_a_limit_of_cgroup_v1_in_a_container(tmp_path: Path) -> None:
    """The kernel tells the host's path, while the container's group is mounted as the root."""
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(200 * MIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(150 * MIB),
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {30 * MIB}\ntotal_active_file 0",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    root = tree(tmp_path, MEMINFO | files)
    found = memory.read_memory(root)
    assert (found.available, found.limit) == (80 * MIB, 200 * MIB)
    assert memory.cpu_quota(root) == 1.5


@linux_only
def test_limits_that_are_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n3:cpu:/\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu.max": "max 100000",
    }
    root = tree(tmp_path, MEMINFO | files)
    assert memory.read_memory(root) == memory.Memory(1024 * MIB, 512 * MIB, None)
    assert memory.cpu_quota(root) is None


def test_a_cpu_quota_of_cgroup_v2(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "50000 100000", "sys/fs/cgroup/cpu.max": "max 1"}
    assert memory.cpu_quota(tree(tmp_path, files)) == 0.5


def test_a_quota_below_the_threads_is_noted() -> None:
    facts = MachineFacts("Linux", "A CPU", ["AVX2"], cores=8, threads=8, cpu_quota=2.0)
    check = next(machine.machine_checks(facts))
    assert (check.status, check.advice) == ("note", "use --threads 2")
    facts = MachineFacts("Linux", "A CPU", ["AVX2"], cores=8, threads=2, cpu_quota=2.0)
    assert next(machine.machine_checks(facts)).status == "ok"


def test_vm_stat_of_macos() -> None:
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               10.\nPages active:                            500.\n"
        "Pages inactive:                           20.\nPages speculative:                         3.\n"
        "Pages throttled:                           0.\nPages purgeable:                           7.\n"
        '"Translation faults":               99999999.\n'
    )
    assert memory.parse_vm_stat(text, "17179869184\n") == memory.Memory(17179869184, 40 * 16384)
    assert memory.parse_vm_stat("", "") == memory.Memory(None, None)


def test_memory_of_this_machine() -> None:
    found = memory.read_memory()
    assert found.total is not None
    assert found.total > 0
    assert found.available is None or 0 < found.available <= found.total


# -- power -------------------------------------------------------------------------------------------------------------


@linux_only
@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, None),
        ({"AC/type": "Mains", "AC/online": "1", "BAT0/type": "Battery", "BAT0/status": "Charging"}, False),
        ({"AC/type": "Mains", "AC/online": "0", "BAT0/type": "Battery", "BAT0/status": "Discharging"}, True),
        ({"BAT0/type": "Battery", "BAT0/status": "Discharging"}, True),
        ({"mouse/type": "Battery", "mouse/status": "Discharging", "mouse/scope": "Device"}, None),
    ],
)
def test_battery(tmp_path: Path, supplies: dict[str, str], expected: bool | None) -> None:
    root = tree(tmp_path, {f"sys/class/power_supply/{name}": text for name, text in supplies.items()})
    assert power.on_battery(root) is expected


def test_pmset() -> None:
    assert power.parse_pmset_battery("Now drawing from 'Battery Power'\n -InternalBattery-0 80%; discharging") is True
    assert power.parse_pmset_battery("Now drawing from 'AC Power'\n") is False
    assert power.parse_pmset_battery("") is None


@linux_only
@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({}, None),
        ({"sys/firmware/acpi/platform_profile": "low-power"}, "low-power"),
        ({"sys/firmware/acpi/platform_profile": "balanced"}, None),
        ({"FREQ/scaling_max_freq": "2000000", "FREQ/cpuinfo_max_freq": "4600000"}, "2.0 of 4.6 GHz"),
        ({"FREQ/scaling_governor": "powersave", "FREQ/scaling_driver": "acpi-cpufreq"}, "powersave"),
        ({"FREQ/scaling_governor": "powersave", "FREQ/scaling_driver": "intel_pstate"}, None),
    ],
)
def test_slow_clock(tmp_path: Path, files: dict[str, str], part: str | None) -> None:
    names = {name.replace("FREQ", "sys/devices/system/cpu/cpu0/cpufreq"): text for name, text in files.items()}
    found = power.slow_clock(tree(tmp_path, names))
    assert found is None if part is None else part in (found or "")


@linux_only
def test_throttling(tmp_path: Path) -> None:
    folder = "sys/devices/system/cpu/cpu{}/thermal_throttle/{}_throttle_count"
    root = tree(
        tmp_path, {folder.format(0, "core"): "3", folder.format(1, "core"): "4", folder.format(0, "package"): "2"}
    )
    assert power.throttle_count(root) == 9
    assert power.throttled(9, 9) is False
    assert power.throttled(9, 10) is True
    assert power.throttled(None, 10) is None
    assert power.throttle_count(tmp_path / "nothing") is None


@linux_only
def test_busy_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two readings 100 ticks pass, of which 60 idle and 15 waiting for a disk."""
    root = tree(tmp_path, {"proc/stat": "cpu 100 0 50 800 10 0 0 40 0 0\ncpu0 1"})

    def sleep(seconds: float) -> None:
        tree(tmp_path, {"proc/stat": "cpu 115 0 55 860 25 0 0 45 0 0\ncpu0 1"})

    monkeypatch.setattr(power.time, "sleep", sleep)
    assert power.busy_share(root=root) == pytest.approx(0.25)


def test_a_busy_machine_is_noted() -> None:
    facts = MachineFacts("Linux", "A CPU", ["AVX2"], cores=2, threads=2, busy_share=0.5, on_battery=True)
    checks = {check.name: check for check in machine.machine_checks(facts)}
    assert checks["load"].status == checks["power"].status == "note"
    assert "--calibrate" in (checks["load"].advice or "")


# -- the CPU -----------------------------------------------------------------------------------------------------------


@linux_only
def test_cpu_features(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu sse avx avx2 fma f16c avx512f avx512_vnni"})
    assert machine.cpu_features(root) == ["AVX", "AVX2", "FMA", "F16C", "AVX-512", "AVX512-VNNI"]
    root = tree(tmp_path, {"proc/cpuinfo": "Features\t: fp asimd asimdhp asimddp i8mm"})
    assert machine.cpu_features(root) == ["NEON", "FP16", "DOTPROD", "I8MM"]


@linux_only
def test_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.visible_gpus(tmp_path) == []
    assert machine.visible_gpus(tree(tmp_path, {"dev/dri/renderD128": ""})) == ["other"]
    assert machine.visible_gpus(tree(tmp_path, {"proc/driver/nvidia/version": "x"})) == ["NVIDIA"]


@pytest.mark.skipif(sys.platform == "darwin", reason="read from sysctl there")
def test_all_last_level_caches_count(tmp_path: Path) -> None:
    """Two CPUs share each cache of the third level; there are two of these."""
    files = {}
    for cpu in range(4):
        for index, (level, size, shared) in enumerate((("1", "32K", f"{cpu}"), ("3", "16384K", f"{cpu // 2 * 2}-"))):
            folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            files |= {f"{folder}/level": level, f"{folder}/size": size, f"{folder}/shared_cpu_list": shared}
    assert bandwidth.last_level_cache_bytes(tree(tmp_path, files)) == 32 * MIB
    assert bandwidth.last_level_cache_bytes(tmp_path / "nothing") == 32 * MIB


def test_bandwidth() -> None:
    speed = bandwidth.measure_bandwidth(2, seconds=0.05)
    assert speed is not None
    assert 1e8 < speed < 1e13
    assert bandwidth.measure_bandwidth(2, seconds=0.05, available=1 << 20) is None  # no room for an honest array


# -- headers -----------------------------------------------------------------------------------------------------------


def test_bytes_read_for_a_token(tmp_path: Path, tiny: TinyFiles) -> None:
    with GGUFFile(tiny.spm) as gguf:
        embedding = gguf.tensors["token_embd.weight"].n_bytes
        assert bytes_per_token(gguf) == sum(each.n_bytes for each in gguf.tensors.values()) - embedding
    shape = ggufs.Shape(n_layer=1, tied=True)
    with GGUFFile(ggufs.write_llama(tmp_path / "tied.gguf", shape)) as gguf:
        assert bytes_per_token(gguf) == sum(each.n_bytes for each in gguf.tensors.values())
    weights = ggufs.llama_weights(shape, 384)
    for kind in ("gate", "up", "down"):
        weights[f"blk.0.ffn_{kind}_exps.weight"] = np.ones((8, 32, 32), np.float32)
        del weights[f"blk.0.ffn_{kind}.weight"]
    extra = {"llama.expert_count": 8, "llama.expert_used_count": 2}
    path = ggufs.write_llama(tmp_path / "experts.gguf", shape, weights=weights, extra=extra)
    with GGUFFile(path) as gguf:
        experts = sum(each.n_bytes for name, each in gguf.tensors.items() if "_exps" in name)
        dense = sum(each.n_bytes for each in gguf.tensors.values()) - experts
        assert bytes_per_token(gguf) == dense + experts / 4


def test_need_grows_with_context_and_cache_type(tiny: TinyFiles) -> None:
    header = read_header(tiny.bpe)
    per_token = 2 * 2 * 2 * 32  # layers · (keys and values) · heads · width
    f16 = header.need("x", 1000, "f16", "ik-llama")
    assert f16.weights_bytes == tiny.bpe.stat().st_size
    assert f16.kv_bytes == 1024 * per_token * 2  # engines round up to 256
    assert header.need("x", 1000, "q8_0", "ik-llama").kv_bytes == 1024 * per_token * 34 // 32
    assert header.need("x", 1000, "f16", "reference").kv_bytes == 1000 * per_token * 8
    assert header.need("x", 1000, "f16", "reference").weights_bytes == 8 * header.n_params


@pytest.mark.real
def test_memory_of_a_real_model(real_model: Callable[[str], Path]) -> None:
    """What the engine itself reports for the cache and the buffers of a pass is what the header gave."""
    from localspec.backends import ik_llama
    from localspec.backends.noise import engine_log

    path = real_model("qwen2.5-coder-0.5b")
    need = read_header(path).need("x", 2048, "f16", "ik-llama")
    with ik_llama.load(path) as model:
        engine_log.recent.clear()
        with model.new_context(2048):
            said = "".join(engine_log.recent)
    kv, compute = (
        float(found[1]) * MIB
        for kind in ("KV", "compute")
        if (found := re.search(rf"CPU {kind} buffer size =\s+([\d.]+) MiB", said)) is not None
    )
    assert need.kv_bytes == pytest.approx(kv, rel=0.01)
    assert need.compute_bytes == pytest.approx(compute, rel=0.03)
