"""What this machine is: read from files such as the kernel writes, and from the machine that runs the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from localspec.system import machine
from localspec.system.machine import CPUTimes, others_share, peak_memory_bytes
from tests.support.program import apart

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")
MIB, FREQUENCY = 1 << 20, "devices/system/cpu/cpu0/cpufreq"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


CGROUP_2 = {
    "proc/self/cgroup": "0::/outer/inner",
    "sys/fs/cgroup/outer/memory.max": str(300 * MIB),
    "sys/fs/cgroup/outer/memory.current": str(250 * MIB),
    "sys/fs/cgroup/outer/memory.stat": f"anon 1\ninactive_file {100 * MIB}\nactive_file {20 * MIB}\nfile 9",
    "sys/fs/cgroup/outer/inner/memory.max": "max",
    "sys/fs/cgroup/outer/inner/memory.current": str(10 * MIB),
    "sys/fs/cgroup/outer/inner/cpu.max": "50000 100000",
    "sys/fs/cgroup/cpu.max": "max 1",
}
# In a container the kernel tells the host's path, while the container's group is mounted as the root.
CGROUP_1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(200 * MIB),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(150 * MIB),
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {30 * MIB}\ntotal_active_file 0",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
}


@linux_only
@pytest.mark.parametrize(("files", "room", "limit", "cpus"), [(CGROUP_2, 170, 300, 0.5), (CGROUP_1, 80, 200, 1.5)])
def test_limits_of_a_container(tmp_path: Path, files: dict[str, str], room: int, limit: int, cpus: float) -> None:
    """The tightest of a group and its parents counts, and cached files are no use of memory."""
    found = machine.read_memory(tree(tmp_path, files))
    assert (found.available, found.limit, found.usable) == (room * MIB, limit * MIB, limit * MIB)
    assert machine.cpu_quota(tmp_path) == cpus


@linux_only
def test_limits_that_are_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n3:cpu:/\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",  # as the kernel writes "none" in v1
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu.max": "max 100000",
    }
    for root in (tree(tmp_path / "limits", files), tmp_path / "nothing"):
        found = machine.read_memory(root)
        assert 0 < found.available <= found.total == found.usable
        assert found.limit is machine.cpu_quota(root) is None


MOUSE = {"mouse/type": "Battery", "mouse/status": "Discharging", "mouse/scope": "Device"}


@linux_only
@pytest.mark.parametrize(
    ("mains", "battery", "expected"),
    [(None, None, None), ("1", "Charging", False), ("0", "Discharging", True), (None, "Discharging", True)],
)
def test_battery(tmp_path: Path, mains: str | None, battery: str | None, expected: bool | None) -> None:
    supplies = MOUSE | ({"AC/type": "Mains", "AC/online": mains} if mains else {})
    supplies |= {"BAT0/type": "Battery", "BAT0/status": battery} if battery else {}
    root = tree(tmp_path, {f"sys/class/power_supply/{name}": text for name, text in supplies.items()})
    assert machine.on_battery(root) is expected


@linux_only
@pytest.mark.parametrize(
    ("folder", "files", "part"),
    [
        ("firmware/acpi", {"platform_profile": "low-power"}, "low-power"),
        ("firmware/acpi", {"platform_profile": "balanced"}, None),
        (FREQUENCY, {"scaling_max_freq": "2000000", "cpuinfo_max_freq": "4600000"}, "2.0 of 4.6 GHz"),
        (FREQUENCY, {"scaling_governor": "powersave", "scaling_driver": "acpi-cpufreq"}, "powersave"),
        (FREQUENCY, {"scaling_governor": "powersave", "scaling_driver": "intel_pstate"}, None),
        (FREQUENCY, {}, None),
    ],
)
def test_slow_clock(tmp_path: Path, folder: str, files: dict[str, str], part: str | None) -> None:
    found = machine.slow_clock(tree(tmp_path, {f"sys/{folder}/{name}": text for name, text in files.items()}))
    assert found is None if part is None else part in (found or "")


@linux_only
def test_throttling(tmp_path: Path) -> None:
    name = "sys/devices/system/cpu/cpu{}/thermal_throttle/{}_throttle_count"
    files = {name.format(0, "core"): "3", name.format(1, "core"): "4", name.format(0, "package"): "2"}
    assert machine.throttle_count(tree(tmp_path, files)) == 9
    assert machine.throttled(9, 9) is False
    assert machine.throttled(9, 10) is True
    assert machine.throttled(None, 10) is None
    assert machine.throttle_count(tmp_path / "nothing") is None


@pytest.mark.skipif(sys.platform != "linux", reason="only there may a process choose its CPUs")
def test_a_process_that_may_use_one_cpu_gets_one_thread() -> None:
    program = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
    program += "from localspec.system.machine import default_threads; print(default_threads())"
    assert apart(program) == "1"


@linux_only
def test_cpu_features(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu sse avx avx2 fma f16c avx512f avx512_vnni"})
    assert machine.cpu_features(root) == ["AVX", "AVX2", "FMA", "F16C", "AVX-512", "AVX512-VNNI"]
    root = tree(tmp_path, {"proc/cpuinfo": "Features\t: fp asimd asimdhp asimddp i8mm"})
    assert machine.cpu_features(root) == ["NEON", "FP16", "DOTPROD", "I8MM"]


def test_bandwidth() -> None:
    speed = machine.measure_bandwidth(2, available=8 * machine.MOST, seconds=0.05)
    assert 1e8 < speed < 1e13
    assert machine.measure_bandwidth(2, available=1 << 30, seconds=0.05) is None  # no room for an honest array


@linux_only
def test_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.visible_gpus(tmp_path) == []
    assert machine.visible_gpus(tree(tmp_path, {"dev/dri/renderD128": ""})) == ["other"]
    assert machine.visible_gpus(tree(tmp_path, {"proc/driver/nvidia/version": "x"})) == ["NVIDIA"]


def test_others_cpu_time_is_what_is_not_ours() -> None:
    before = CPUTimes(at=10.0, busy=100.0, own=5.0, n_cpus=4)
    # In two seconds the four CPUs were busy for 0.8 s each, of which half a second in all was ours.
    after = CPUTimes(at=12.0, busy=103.2, own=5.5, n_cpus=4)
    assert others_share([(before, after)]) == pytest.approx(2.7 / 8, abs=1e-4)
    later = CPUTimes(at=14.0, busy=103.2, own=5.5, n_cpus=4)
    assert others_share([(before, after), (after, later)]) == pytest.approx(2.7 / 16, abs=1e-4)
    assert others_share([(before, CPUTimes(at=11.0, busy=100.0, own=5.01, n_cpus=4))]) == 0.0  # of coarse ticks
    assert others_share([(before, before)]) is others_share([]) is None


def test_the_counters_are_this_machine_s() -> None:
    before = CPUTimes.now()
    sum(i * i for i in range(2_000_000))
    after = CPUTimes.now()
    assert (after.own > before.own, after.busy >= before.busy, after.at > before.at) == (True, True, True)
    assert 1 <= after.n_cpus <= (os.cpu_count() or 1)
    assert 1 <= machine.default_threads() <= machine.usable_cpus()
    assert 0 <= machine.busy_share(0.02) <= 1
    assert (peak_memory_bytes() or 0) > 1 << 20
