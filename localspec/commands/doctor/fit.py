"""Does it fit? Weights, KV caches and compute buffers of all models, against the memory that is free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localspec.backends.gpus import Device
from localspec.backends.llama_binding import N_UBATCH
from localspec.commands.doctor.engines import FOR_GPUS
from localspec.commands.doctor.facts import EngineFacts, FitFacts, NeedFacts
from localspec.commands.doctor.models import ExaminedModel
from localspec.commands.report.model import Finding
from localspec.model_files.kv_memory import KV_VALUE_BYTES
from localspec.model_files.sources.base import size_text
from localspec.runtime.pair import DEFAULT_CTX

PROGRAM_BYTES = 64 << 20
"""What an engine's library, the vocabularies and Python take besides; 50 to 60 MB were measured."""

TIGHT = 0.9
"""Share of the free memory from which little is left for anything else."""

_LEAST_CTX = 512
"""Smaller contexts are not worth a word: they hold no conversation."""

_CTX_STEP = 256
"""Engines round a context up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where models would go.

    Attributes:
        engine: the engine that would load them; None where there is none.
        n_gpu_layers: ``--gpu-layers``; None takes all if the engine has a GPU.
        ram: free memory [bytes].
        ram_total: what the machine has, or the container may use [bytes].
    """

    engine: EngineFacts | None
    n_gpu_layers: int | None
    ram: int
    ram_total: int

    @property
    def backend(self) -> str:
        return self.engine.name if self.engine is not None else "ik-llama"

    @property
    def on_gpu(self) -> bool:
        """Whether any layer goes to a GPU."""
        engine = self.engine
        return engine is not None and engine.name in FOR_GPUS and engine.devices != [] and self.n_gpu_layers != 0

    @property
    def gpus(self) -> list[Device]:
        """GPUs that layers go to; empty too where the engine does not say which."""
        return (self.engine.devices or []) if self.engine is not None and self.on_gpu else []

    @property
    def gpu_free(self) -> int | None:
        return sum(device.free_bytes for device in self.gpus) if self.gpus else None

    @property
    def gpu_is_ram(self) -> bool:
        """Whether the GPU's memory is the machine's."""
        return bool(self.gpus) and all(device.shared for device in self.gpus)

    def gpu_share(self, model: ExaminedModel) -> float:
        """Share of a model that goes to the GPU."""
        if not self.on_gpu:
            return 0.0
        if self.n_gpu_layers is None or model.sizes is None:
            return 1.0
        return min(1.0, self.n_gpu_layers / (model.sizes.n_layer + 1))


def context_size(asked: int | None, target: ExaminedModel) -> int:
    """Tokens of context that a pair gets."""
    return asked or min(DEFAULT_CTX, target.n_ctx_train or DEFAULT_CTX)


def fit(models: Sequence[ExaminedModel], n_ctx: int, kv_type: str, room: Room, on_cpu: int | None = None) -> FitFacts:
    """Add it up.

    Args:
        models: the target first, then the draft models; a context is made for each.
        n_ctx: tokens of context.
        kv_type: type of the KV caches.
        room: where they would go.
        on_cpu: of a target that is spread over devices, what stays here [bytes]; the devices have rows of their own.
    """
    needs = [need(model, n_ctx, kv_type, room.backend) for model in models]
    on_gpu = sum(each.total * room.gpu_share(model) for each, model in zip(needs, models, strict=True))
    everything = sum(each.total for each in needs)
    ram = PROGRAM_BYTES + (everything if room.gpu_is_ram else everything - on_gpu)
    if on_cpu is not None:
        kept = needs[0].total - needs[0].weights_bytes - (needs[0].kv_bytes or 0)
        drafts = zip(needs[1:], models[1:], strict=True)
        on_gpu = sum(each.total * room.gpu_share(model) for each, model in drafts)
        ram = PROGRAM_BYTES + on_cpu + kept + sum(each.total for each in needs[1:]) - on_gpu
    known = all(each.kv_bytes is not None for each in needs) and needs[0].weights_bytes > 0
    short = ram > room.ram or (room.gpu_free is not None and on_gpu > room.gpu_free)
    known &= not room.on_gpu or room.gpu_free is not None
    return FitFacts(
        n_ctx=n_ctx,
        kv_type=kv_type,
        models=needs,
        ram_needed_bytes=round(ram),
        ram_available_bytes=room.ram,
        gpu_needed_bytes=round(on_gpu) if room.on_gpu else None,
        gpu_available_bytes=room.gpu_free,
        fits=False if short else True if known else None,
    )


def need(model: ExaminedModel, n_ctx: int, kv_type: str, backend: str) -> NeedFacts:
    """Memory to run a model.

    Args:
        model: the model.
        n_ctx: tokens of context.
        kv_type: type of the KV cache.
        backend: the engine; the reference one keeps everything in float64.
    """
    sizes = model.sizes
    if sizes is None:
        return NeedFacts(model.name, model.bytes, None, None)
    if backend == "reference":
        compute = 8 * sizes.vocab.n_tokens * n_ctx
        return NeedFacts(model.name, 8 * sizes.n_params, sizes.kv.bytes(n_ctx, "f64"), compute)
    # The buffer holds whichever is larger, the logits of N_UBATCH tokens or a layer's intermediate values, in float32;
    # within 1 % of what both engines report for vocabularies of 49k, 152k and 262k tokens.
    compute = 4 * N_UBATCH * (sizes.n_embd + max(sizes.vocab.n_tokens, 3 * sizes.n_ff + 4 * sizes.n_embd))
    padded = -(-n_ctx // _CTX_STEP) * _CTX_STEP
    return NeedFacts(model.name, model.bytes, sizes.kv.bytes(padded, kv_type), compute)


def fit_findings(models: Sequence[ExaminedModel], found: FitFacts, room: Room) -> Iterator[Finding]:
    """The rows on memory."""
    yield _ram(models, found, room)
    if found.gpu_needed_bytes is not None:
        yield _gpu(models, found, room)


def _ram(models: Sequence[ExaminedModel], found: FitFacts, room: Room) -> Finding:
    known = all(each.kv_bytes is not None for each in found.models)
    if not all(each.weights_bytes for each in found.models):
        return Finding("info", "memory", "what it needs is only known once the file is here")
    text = f"needs {'' if known else 'at least '}{size_text(found.ram_needed_bytes)}, {size_text(room.ram)} free"
    if found.gpu_needed_bytes is None or room.gpu_is_ram:
        text += f": {_sum(found)}"
    if found.ram_needed_bytes > room.ram:
        return Finding("fail", "memory", text, _remedy(models, found, room))
    if not known:
        return Finding("info", "memory", f"{text}; the cache is only known once the file is here")
    if found.ram_needed_bytes > TIGHT * room.ram:
        return Finding("note", "memory", f"{text}; little is left for other programs", _remedy(models, found, room))
    return Finding("ok", "memory", text)


def _gpu(models: Sequence[ExaminedModel], found: FitFacts, room: Room) -> Finding:
    needed = found.gpu_needed_bytes or 0
    text = f"needs {size_text(needed)}"
    if room.gpu_free is None:
        return Finding("info", "GPU memory", f"{text}; the engine does not say how much is free")
    text += f", {size_text(room.gpu_free)} free: {_sum(found)}"
    if needed > room.gpu_free:
        sizes = models[0].sizes
        layers = int(0.95 * room.gpu_free / needed * (sizes.n_layer + 1)) if sizes is not None else 0
        advice = f"use --gpu-layers {layers}" if layers > 0 else "use --gpu-layers 0, or a smaller model"
        return Finding("fail", "GPU memory", text, advice)
    return Finding("ok", "GPU memory", text)


def _sum(found: FitFacts) -> str:
    parts = [f"weights {size_text(sum(each.weights_bytes for each in found.models))}"]
    if kv := sum(each.kv_bytes or 0 for each in found.models):
        kind = f" {found.kv_type}" if found.kv_type != "f16" else ""
        parts.append(f"cache of {found.n_ctx:,} tokens{kind} {size_text(kv)}")
    if compute := sum(each.compute_bytes or 0 for each in found.models):
        parts.append(f"buffers {size_text(compute)}")
    return ", ".join(parts)


def _remedy(models: Sequence[ExaminedModel], found: FitFacts, room: Room) -> str:
    """What would fit, the least loss first."""
    limit = TIGHT * room.ram

    def fits(chosen: Sequence[ExaminedModel], n_ctx: int, kv_type: str) -> bool:
        return fit(chosen, n_ctx, kv_type, room).ram_needed_bytes <= limit

    ways: list[str] = []
    if all(model.sizes is not None for model in models) and room.backend != "reference":
        smaller = KV_VALUE_BYTES["q8_0"] < KV_VALUE_BYTES[found.kv_type]
        if smaller and fits(models, found.n_ctx, "q8_0"):
            ways.append("--kv-cache q8_0")
        contexts = range(_LEAST_CTX, found.n_ctx, _CTX_STEP)
        n_fitting = bisect_left(contexts, True, key=lambda n_ctx: not fits(models, n_ctx, found.kv_type))
        if n_fitting:
            ways.append(f"--ctx {contexts[n_fitting - 1]}")
    if len(models) > 1 and fits(models[:1], found.n_ctx, found.kv_type):
        ways.append("--draft ngram, which needs no second model")
    if ways:
        return "use " + ", or ".join(ways[:3])
    if found.ram_needed_bytes < TIGHT * room.ram_total:
        return "close other programs, or take a smaller model: localspec list --all"
    return "take a smaller model, or one quantised further: localspec list --all"
