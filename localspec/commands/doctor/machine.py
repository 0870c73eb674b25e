"""The computer: its processor, its memory, and how free it is."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from localspec.commands.doctor.report import Check, MachineFacts
from localspec.model_files.sources.base import size_text
from localspec.system import bandwidth, memory, power
from localspec.system.machine import cpu_features, cpu_name, default_threads, usable_cpus

_ROOT = Path("/")

BUSY = 0.15
"""Share of the CPUs' time in others' hands from which timings are not to be trusted."""


def look_at_machine(n_threads: int | None = None, *, measure: bool = True) -> MachineFacts:
    """Read what the system tells, and measure the memory's bandwidth.

    Args:
        n_threads: threads that were asked for; None takes the default.
        measure: False leaves the bandwidth out.
    """
    found = memory.read_memory()
    cores, threads = usable_cpus(), n_threads or default_threads()
    machine = MachineFacts(
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        features=cpu_features(),
        cores=cores,
        threads=threads,
        cpu_quota=memory.cpu_quota(),
        memory_total_bytes=found.total,
        memory_available_bytes=found.available,
        memory_limit_bytes=found.limit,
        busy_share=round(power.busy_share(), 3),
        on_battery=power.on_battery(),
        gpus=visible_gpus(),
    )
    if measure:
        speed = bandwidth.measure_bandwidth(min(threads, cores), available=found.available)
        machine = replace(machine, bandwidth_gb_per_s=round(speed / 1e9, 2) if speed else None)
    return machine


def visible_gpus(root: Path = _ROOT) -> list[str]:
    """Graphics hardware that the system shows: ``NVIDIA``, ``AMD``, ``Apple``, ``other``."""
    if sys.platform == "darwin":
        return ["Apple"] if platform.machine() == "arm64" else []
    found = []
    if (root / "proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        found.append("NVIDIA")
    if (root / "dev/kfd").exists():
        found.append("AMD")
    if not found and any((root / "dev/dri").glob("renderD*")):
        found.append("other")
    return found


def machine_checks(machine: MachineFacts) -> Iterator[Check]:
    """The rows on the computer."""
    yield _cpu(machine)
    yield _memory(machine)
    if machine.bandwidth_gb_per_s is not None:
        threads = f"{machine.threads} thread" + "s" * (machine.threads != 1)
        yield Check("machine", "bandwidth", "ok", f"{machine.bandwidth_gb_per_s:.1f} GB/s read by {threads}")
    if machine.busy_share is not None and machine.busy_share >= BUSY:
        yield Check(
            "machine", "load", "note", f"others use {machine.busy_share:.0%} of the CPU: what is timed now is too slow",
            "stop them, then: localspec doctor --calibrate",
        )  # fmt: skip
    if machine.on_battery:
        yield Check("machine", "power", "note", "on battery, where the clock is lower", "plug it in before you compare")
    if (why := power.slow_clock()) is not None:
        yield Check("machine", "clock", "note", why, "choose the performance setting before you compare")


def heat_check(machine: MachineFacts) -> Iterator[Check]:
    """A row where the CPU was slowed down while things were measured."""
    if machine.throttled:
        yield Check(
            "machine", "heat", "note", "the CPU was slowed by heat or a power limit while this was measured",
            "let it cool, then: localspec doctor --calibrate",
        )  # fmt: skip


def _cpu(machine: MachineFacts) -> Check:
    threads = f"{machine.threads} of {machine.cores} CPUs used"
    text = f"{machine.cpu} · {threads} · {' '.join(machine.features) or 'instruction sets not told'}"
    quota = machine.cpu_quota
    if quota is not None and quota < machine.threads - 0.01:
        fewer = max(1, int(quota))
        return Check(
            "machine", "CPU", "note", f"{text}; its container grants the time of {quota:.3g} only, so threads stall",
            f"use --threads {fewer}",
        )  # fmt: skip
    if machine.threads > machine.cores:
        return Check("machine", "CPU", "note", f"{text}: more threads than CPUs slow each other down",
                     f"use --threads {machine.cores}")  # fmt: skip
    return Check("machine", "CPU", "ok", text)


def _memory(machine: MachineFacts) -> Check:
    if machine.memory_available_bytes is None:
        return Check("machine", "memory", "info", "how much is free is not told here")
    text = f"{size_text(machine.memory_available_bytes)} free"
    if machine.memory_limit_bytes is not None:
        text += f", of {size_text(machine.memory_limit_bytes)} that the container may use"
    elif machine.memory_total_bytes is not None:
        text += f" of {size_text(machine.memory_total_bytes)}"
    return Check("machine", "memory", "ok", text)
