"""How many answers at a time: as many as make more tokens together, which t(w) says, and as there is memory for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localspec.backends.base import Context, Model, SequenceBatch
from localspec.backends.batch_trust import ensure_batches
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.shared_rows import LEAST_GAIN, SharedPasses
from localspec.errors import EngineError, UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.kv_memory import KV_VALUE_BYTES, kv_shape
from localspec.runtime.branches import why_chains
from localspec.runtime.model_loading import Loader, Report
from localspec.runtime.state import FULL_CONTEXTS, target_memory
from localspec.system.memory import read_memory

MOST = 16
"""t(w) is measured to 24 rows, and draft tokens need some of them."""

CELLS_EACH = 512
"""Tokens that an answer under way is reckoned to hold, its prompt included: every row passes over those of all, or
over those of its own (``Capabilities.own_cells``)."""

LEAST_CELLS = 1024
"""Room for each answer at least; see ``admission.RECKONED``."""

ENOUGH = 0.95
"""Of the most tokens per millisecond that any number makes; with more answers each becomes slower for little."""

N_CONTEXTS = FULL_CONTEXTS + 1
"""What memory is reckoned with: room for all answers, and a context in which some engines compute one that is alone."""

MEMORY_SHARE = 0.5
"""Of the memory that is free, what they may take: drafts and buffers come after them."""


@dataclass(frozen=True, slots=True)
class ParallelChoice:
    """A number of answers at a time, and why."""

    n: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {"parallel": self.n, "reason": self.reason}


def open_memory(
    loader: Loader, target: Model, times: PassTimes, n_ctx: int, report: Report
) -> tuple[ParallelChoice, str | None, Context, SequenceBatch | None]:
    """The target's memory, for as many answers as were asked for, or as are worth it.

    Returns:
        The number, why drafts are chains there (see ``why_chains``), and the memory as ``target_memory`` does.

    Raises:
        EngineError: there is no memory for it.
        EngineMismatch, UnsupportedModel: the engine cannot do what was asked for with this file.
    """
    options = loader.options

    def opened(choice: ParallelChoice) -> tuple[ParallelChoice, str | None, Context, SequenceBatch | None]:
        if choice.n > 1:
            ensure_batches(target, options.n_gpu_layers)
        chains = why_chains(target, times, options, choice.n, report)
        return choice, chains, *target_memory(target, n_ctx, choice.n, branches=chains is None)

    if options.parallel != "auto":
        return opened(ParallelChoice(int(options.parallel), "as asked for"))
    if options.placement.rpc:
        return opened(ParallelChoice(1, "if a server is lost, one answer at a time can go on when it is back"))
    available = read_memory().available if target.capabilities.device == "cpu" else None
    choice = choose_parallel(target, times, n_ctx, available)
    try:
        return opened(choice)
    except (EngineError, UnsupportedModel) as error:
        if choice.n == 1:
            raise
        return opened(ParallelChoice(1, str(error)))


def choose_parallel(model: Model, times: PassTimes, n_ctx: int, available: int | None) -> ParallelChoice:
    """The number for a model.

    Args:
        model: the target.
        times: what its passes cost.
        n_ctx: tokens of one context.
        available: memory that can be taken now [bytes]; None is not known, so that only trying tells.
    """
    if not model.capabilities.batches:
        return ParallelChoice(1, f"{model.backend} computes one conversation of this model at a time")
    if not model.capabilities.keeps_kv_type:
        kept = f"{model.backend} keeps values of several conversations in 16 bits"
        return ParallelChoice(1, f"{kept}, and a {model.kv_type} cache was asked for")
    needed = _batch_bytes(model, n_ctx)
    if available is not None and needed > MEMORY_SHARE * available:
        room = f"{N_CONTEXTS} contexts of {n_ctx:,} tokens take {needed / 1e9:.2f} GB"
        return ParallelChoice(1, f"{room}, over half of the {available / 1e9:.2f} GB that are free")
    most = max(1, min(MOST, FULL_CONTEXTS * n_ctx // min(n_ctx, LEAST_CELLS)))
    rates = [_rate(times, model, n) for n in range(1, most + 1)]
    if max(rates) < LEAST_GAIN * rates[0]:
        return ParallelChoice(1, "a pass over several takes as long here as theirs one after the other")
    n = next(i for i, rate in enumerate(rates, 1) if rate >= ENOUGH * max(rates))
    bound = f", and there is room for no more than {n}" if n == most < MOST else ""
    gain = rates[n - 1] / rates[0]
    return ParallelChoice(n, f"{n} together are expected to make {gain:.1f} times the tokens of one{bound}")


def _rate(times: PassTimes, model: Model, n: int) -> float:
    """Tokens per millisecond of n answers that draft nothing."""
    shared = SharedPasses(times, model.capabilities.device)
    shared.n_cells = CELLS_EACH if model.capabilities.own_cells else n * CELLS_EACH
    return n / shared.with_overhead(n, n)


def _batch_bytes(model: Model, n_ctx: int) -> int:
    with GGUFFile(model.path) as file:
        return kv_shape(file).bytes(N_CONTEXTS * n_ctx, model.kv_type if model.kv_type in KV_VALUE_BYTES else "f16")
