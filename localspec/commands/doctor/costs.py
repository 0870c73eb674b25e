"""Passes of a loaded pair, measured: t(w) of target and drafts, from the calibration on disk or anew."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from localspec.backends.base import Context, Model
from localspec.backends.repack import why_copied
from localspec.commands.doctor.facts import CostFacts, CurveFacts
from localspec.commands.doctor.models import count
from localspec.commands.report.model import Finding
from localspec.controllers.break_even import Times
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.sources.base import size_text
from localspec.runtime.engine_choice import ENGINES, compared
from localspec.runtime.preparation import second_opinion
from localspec.system.interrupts import on_interrupt
from localspec.system.steps import exhaust
from localspec.system.usage import BUSY

if TYPE_CHECKING:
    from localspec.llm import LLM
    from localspec.runtime.pair import Pair

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
"""Widths of a pass that are shown: what a draft of up to 15 tokens needs, as finely as calibration measures."""

_FILL, _PASSES = 64, 7
_STALE = 1.35
"""Ratio of a pass just now to the calibrated one from which the calibration is doubted."""

Progress = Callable[[str, float | None], None]
_Result = TypeVar("_Result")


class Watch:
    """Progress, and a Ctrl-C that stops what the worker thread does at the next report.

    Args:
        report: where progress is shown.

    Attributes:
        stopped: set by ``stop``.
    """

    def __init__(self, report: Progress) -> None:
        self._report = report
        self.stopped = threading.Event()

    def report(self, what: str, fraction: float | None) -> None:
        """Show progress.

        Raises:
            KeyboardInterrupt: after ``stop``.
        """
        self.check()
        self._report(what, fraction)

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` after ``stop``."""
        if self.stopped.is_set():
            raise KeyboardInterrupt

    def stop(self) -> None:
        """Ask to stop; may be called from a signal handler."""
        self.stopped.set()

    def call(self, llm: LLM, work: Callable[[Pair], _Result]) -> _Result:
        """``LLM.run``; Ctrl-C ends it between two passes."""
        with on_interrupt(self.stop):
            result = llm.run(work)
        self.check()
        return result


def measure_costs(
    llm: LLM, target_name: str, draft_names: Sequence[str], bandwidth_gb_per_s: float | None, watch: Watch
) -> tuple[CostFacts, Times]:
    """What passes cost here.

    Args:
        llm: the loaded pair.
        target_name: what to call the target.
        draft_names: what to call the draft models, in the order in which they were named; heads have their own names.
        bandwidth_gb_per_s: measured memory bandwidth, for the bound.
        watch: progress and interruption.

    Returns:
        The figures, and the target's t(w) at every width.
    """
    state, names = llm.run(lambda pair: pair.state), iter(draft_names)
    target = state.target
    with GGUFFile(target.path) as gguf:
        read = bytes_per_token(gguf)
    on_cpu = target.capabilities.device == "cpu"
    facts = CostFacts(
        engine=target.engine,
        device=target.capabilities.device,
        target=_curve(target_name, target, state.times),
        drafts=[
            _curve(next(names) if each.drafter.reads_text else each.name, each.model, each.times)
            for each in state.models
        ],
        now_ms=round(watch.call(llm, lambda pair: single_pass_ms(target, pair.context, watch)), 4),
        bytes_per_token=read,
        bound_ms=round(read / (bandwidth_gb_per_s * 1e6), 4) if bandwidth_gb_per_s and on_cpu else None,
        why_chains=llm.run(lambda pair: pair.why_chains),
        provisional=state.times.noisy,
        others_share=state.times.others_share,
    )
    return facts, state.times


def bytes_per_token(gguf: GGUFFile) -> int:
    """Weights that a pass over one token reads [bytes].

    Of the token embedding it is one row, unless the same matrix makes the logits; of the experts of a mixture, those
    that are used.
    """
    used, experts = count(gguf, "expert_used_count"), count(gguf, "expert_count")
    share = used / experts if 0 < used <= experts else 1.0
    looked_up = {"per_layer_token_embd.weight"} | ({"token_embd.weight"} if "output.weight" in gguf.tensors else set())
    total = 0.0
    for tensor in gguf.tensors.values():
        if tensor.name not in looked_up:
            total += tensor.n_bytes * (share if "_exps." in tensor.name else 1.0)
    return round(total)


def _curve(name: str, model: Model, times: Times) -> CurveFacts:
    return CurveFacts(name, model.path.name, {width: round(times(width), 4) for width in WIDTHS})


def single_pass_ms(model: Model, context: Context, watch: Watch) -> float:
    """The median time of a one-token pass, just now."""
    fill = min(_FILL, context.n_ctx - 1)
    token = model.tokenize("a") or [0]
    context.truncate(0)
    context.decode((token * fill)[:fill], "none")
    samples = []
    for _ in range(_PASSES):
        watch.check()
        started = time.perf_counter()
        context.decode(token[:1])
        samples.append((time.perf_counter() - started) * 1e3)
        context.truncate(fill)
    context.truncate(0)
    return statistics.median(samples[1:])


def compare_engines(llm: LLM, watch: Watch, *, busy: bool) -> Iterator[Finding]:
    """The row on which engine ``auto`` takes for this file; both are measured where that was not done yet.

    Args:
        llm: the loaded pair.
        watch: progress and interruption.
        busy: whether others use the CPUs: then what was measured before is not measured again, nor called good.
    """
    options = llm.run(lambda pair: pair.options)
    known = compared(llm.model_path, options.n_threads, options.kv_cache_type)
    opinion = llm.run(lambda pair: second_opinion(pair, llm.model_path))
    if opinion.waits and (known is None or not busy):
        watch.report("timing passes of both engines", None)
        watch.call(llm, lambda pair: exhaust(opinion.steps(lambda: False), watch.check))
    found = compared(llm.model_path, options.n_threads, options.kv_cache_type)
    if found is None:
        return
    took = ", ".join(f"{ms / 1e3:.1f} s on {name}" for name, ms in sorted(found.ms.items(), key=lambda each: each[1]))
    text = f"on {found.day} a nominal answer took {took}"
    if found.provisional:
        others = f", while others used {found.others_share:.0%} of the CPU" if found.others_share >= BUSY else ""
        text += f"{others}: nothing is chosen by that, auto keeps {ENGINES[0]} and measures again in idle time"
        yield Finding("note", "engines", text, "on an otherwise idle machine: localspec doctor --calibrate")
        return
    taken = ENGINES[1] if found.prefers(ENGINES[1], ENGINES[0]) else ENGINES[0]
    yield Finding("info" if busy else "ok", "engines", f"{text}: auto takes {taken}, and --backend overrides")


def branches_finding(cost: CostFacts) -> Finding:
    """The row on drafts that branch."""
    text = f"drafts do not branch: {cost.why_chains}" if cost.why_chains else "drafts may branch"
    return Finding("info", "branches", text)


def copies_findings(llm: LLM) -> Iterator[Finding]:
    """The rows on models that run from a copy, as an engine computes their own tensors wrongly."""
    drafts = llm.run(lambda pair: [(draft.path, draft.model) for draft in pair.state.models])
    for path, model in dict.fromkeys([(llm.model_path, llm.run(lambda pair: pair.target)), *drafts]):
        if (why := why_copied(path, model.path)) is not None:
            bits, types = why
            text = f"{path.name} is run from {bits} copy: {model.backend} has a bug with {types} files."
            yield Finding("info", "copy", text)


def cost_finding(cost: CostFacts, bandwidth_gb_per_s: float | None) -> Finding:
    """The row on the target's single passes."""
    calibrated = cost.target.ms[1]
    text = f"t(1) {calibrated:.3g} ms"
    if abs(cost.now_ms / calibrated - 1) > 0.1:
        text += f", just now {cost.now_ms:.3g} ms"
    if cost.bound_ms is not None:
        weights = f"its {size_text(cost.bytes_per_token)} of weights"
        text += f"; reading {weights} at {bandwidth_gb_per_s:.1f} GB/s takes {cost.bound_ms:.3g} ms"
    again = "on an otherwise idle machine: localspec doctor --calibrate"
    if cost.provisional:
        others = f", others used {cost.others_share:.0%} of the CPU" if cost.others_share >= BUSY else ""
        return Finding("note", "one token", f"{text}: provisional{others}, and measured again in idle time", again)
    if 1 / _STALE < cost.now_ms / calibrated < _STALE:
        return Finding("ok", "one token", text)
    text += f": {'slower' if cost.now_ms > calibrated else 'faster'} than when it was calibrated"
    return Finding("note", "one token", text, again)
