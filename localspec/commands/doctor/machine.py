"""The computer: its processor, its memory, and how free it is."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from localspec.commands.doctor.facts import MachineFacts
from localspec.commands.report.model import Finding
from localspec.model_files.sources.base import size_text
from localspec.system import bandwidth, memory, power, usage
from localspec.system.machine import cpu_features, cpu_name, default_threads, usable_cpus, visible_gpus


def look_at_machine(n_threads: int | None = None, *, measure: bool = True) -> MachineFacts:
    """Read what the system says, and measure the memory's bandwidth.

    Args:
        n_threads: threads that were asked for; None takes the default.
        measure: False leaves the bandwidth out.
    """
    found, cores, threads = memory.read_memory(), usable_cpus(), n_threads or default_threads()
    busy = usage.busy_share()
    speed = bandwidth.measure_bandwidth(min(threads, cores), available=found.available) if measure else None
    return MachineFacts(
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        features=cpu_features(),
        cores=cores,
        threads=threads,
        cpu_quota=memory.cpu_quota(),
        memory_total_bytes=found.total,
        memory_available_bytes=found.available,
        memory_limit_bytes=found.limit,
        bandwidth_gb_per_s=round(speed / 1e9, 2) if speed else None,
        busy_share=round(busy, 3),
        on_battery=power.on_battery(),
        gpus=visible_gpus(),
    )


def machine_findings(machine: MachineFacts) -> Iterator[Finding]:
    """The rows on the computer."""
    yield _cpu(machine)
    free = size_text(machine.memory_available_bytes)
    whole = f" of {size_text(machine.memory_total_bytes)}"
    if machine.memory_limit_bytes is not None:
        whole = f", of {size_text(machine.memory_limit_bytes)} that the container may use"
    yield Finding("ok", "memory", f"{free} free{whole}")
    if machine.bandwidth_gb_per_s is not None:
        threads = f"{machine.threads} thread" + "s" * (machine.threads != 1)
        busy = machine.busy_share >= usage.BUSY
        yield Finding("info" if busy else "ok", "bandwidth", f"{machine.bandwidth_gb_per_s:.1f} GB/s read by {threads}")
    if machine.busy_share >= usage.BUSY:
        yield Finding(
            "note", "load", f"others use {machine.busy_share:.0%} of the CPU: what is timed now is too slow",
            "stop them, then: localspec doctor --calibrate",
        )  # fmt: skip
    if machine.on_battery:
        yield Finding("note", "power", "on battery, where the clock is lower", "plug it in before you compare")
    if (why := power.slow_clock()) is not None:
        yield Finding("note", "clock", why, "choose the performance setting before you compare")


def _cpu(machine: MachineFacts) -> Finding:
    threads = f"{machine.threads} of {machine.cores} CPUs used"
    text = f"{machine.cpu} · {threads} · {' '.join(machine.features) or 'instruction sets unknown'}"
    quota = machine.cpu_quota
    if quota is not None and quota < machine.threads - 0.01:
        text += f"; its container grants the time of {quota:.3g} only, so threads stall"
        return Finding("note", "CPU", text, f"use --threads {max(1, int(quota))}")
    if machine.threads > machine.cores:
        text += ": more threads than CPUs slow each other down"
        return Finding("note", "CPU", text, f"use --threads {machine.cores}")
    return Finding("ok", "CPU", text)


HEAT = Finding(
    "note", "heat", "the CPU was slowed by heat or a power limit while this was measured",
    "let it cool, then: localspec doctor --calibrate",
)  # fmt: skip
