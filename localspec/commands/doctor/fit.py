"""Does it fit? Weights, KV caches and compute buffers of all models against free memory."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from localspec.backends.llama.binding import Place, Placed
from localspec.backends.llama.ggml import Device, Ggml
from localspec.backends.llama.rpc import ask
from localspec.backends.placement import Share, Target, layout
from localspec.backends.registry import engine_module
from localspec.commands.doctor.facts import FOR_GPUS, EngineFacts, FitFacts, ModelFacts, NeedFacts
from localspec.engine import fit as memory
from localspec.engine.options import LoadOptions
from localspec.errors import EngineError, LocalspecError, ModelFileError, UnsupportedModel
from localspec.heads.kinds import is_published_head, read_open
from localspec.model_files.catalog import Catalog, Entry, free_bytes
from localspec.model_files.gguf import GGUFFile, model_bytes
from localspec.model_files.kv_memory import KV_VALUE_BYTES
from localspec.model_files.local_files import known_entries
from localspec.model_files.sources.base import size_text
from localspec.model_files.vocab import Vocab
from localspec.report.model import Finding, Status
from localspec.spec_decode.drafters.names import PARD
from localspec.spec_decode.drafters.pard import file_and_mask
from localspec.system.files import models_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedModel(ModelFacts):
    """A model with its ``spec`` for a command line, sizes from a readable header, and catalogue entry; ``unused`` says
    why a published head cannot draft here."""

    spec: str
    sizes: memory.Sizes | None = None
    vocab: Vocab | None = None
    entry: Entry | None = None
    unused: str | None = None

    @property
    def file(self) -> Path:
        return Path(self.path)

    @property
    def for_draft(self) -> str:
        """What ``--draft`` calls it."""
        return self.spec if self.spec.partition(":")[0] == PARD else str(self.path)

    def facts(self) -> ModelFacts:
        return ModelFacts(**{each.name: getattr(self, each.name) for each in fields(ModelFacts)})


def find_model(spec: str) -> ExaminedModel:
    """Look a model up. ``UnknownModel``: there is no such name or file."""
    catalog = Catalog.load()
    try:
        path = catalog.resolve(spec)
    except ModelFileError:
        return _of_entry(catalog.entry(spec))
    entry = catalog.of_path(path)
    name = spec if entry is not None and spec == entry.name else path.name.removesuffix(".gguf")
    return _read(path, spec, name, entry)


def find_draft(spec: str) -> ExaminedModel:
    """The same of what ``--draft`` names."""
    kind, _, rest = spec.partition(":")
    return replace(find_model(file_and_mask(rest)[0]), spec=spec) if kind == PARD else find_model(spec)


def of_path(path: Path) -> ExaminedModel:
    """A file, under its catalogue name if it has one."""
    entry = Catalog.load().of_path(path)
    is_entrys = entry is not None and entry.present and entry.path == path
    name = entry.name if entry is not None else path.name.removesuffix(".gguf")
    return _read(path, name if is_entrys else str(path), name, entry)


def on_disk() -> list[ExaminedModel]:
    """Models and published heads in the models folder, damaged ones included."""
    return [_of_entry(entry) for entry in known_entries() if entry.bytes_on_disk]


def _of_entry(entry: Entry) -> ExaminedModel:
    if entry.present:
        return _read(entry.path, entry.name, entry.name, entry, heads=True)
    error = None
    if entry.bytes_on_disk:
        error = f"it has {entry.bytes_on_disk:,} bytes instead of {entry.bytes:,}"
        if len(entry.files) > 1 and not all((models_dir() / file).is_file() for file in entry.files):
            error = "some of its parts are missing"
    return ExaminedModel(
        spec=entry.name, name=entry.name, path=str(entry.path), present=False, bytes=entry.bytes,
        bytes_exact=bool(entry.sha256), error=error, entry=entry,
    )  # fmt: skip


def _read(path: Path, spec: str, name: str, entry: Entry | None, *, heads: bool = False) -> ExaminedModel:
    """Read a file's header; a head is an error unless ``heads``."""
    model = ExaminedModel(
        spec=spec, name=name, path=str(path), present=True, bytes=model_bytes(path), bytes_exact=True, entry=entry
    )
    try:
        with GGUFFile(path) as gguf:
            model = replace(model, bytes=gguf.n_bytes, architecture=gguf.architecture, quantization=gguf.quantization)
            if heads and is_published_head(gguf):  # which has no vocabulary or memory to examine without its target
                try:
                    read_open(gguf)
                except UnsupportedModel as error:
                    return replace(model, unused=str(error))
                return model
            gguf.check_generates_text()
            vocab, sizes = Vocab.from_gguf(gguf), memory.Sizes.of(gguf)
            return replace(
                model,
                n_ctx_train=gguf.n_ctx_train or None,
                n_vocab=vocab.n_tokens,
                rollback="replay" if sizes.kv.recurrent else "exact",
                sizes=sizes,
                vocab=vocab,
            )
    except ModelFileError as error:
        return replace(model, error=str(error).removesuffix("; fetch it again"))
    except OSError as error:
        return replace(model, error=f"it cannot be read: {error.strerror or os.strerror(error.errno or 0)}")


def model_findings(models: list[ExaminedModel]) -> Iterator[Finding]:
    whole = [f"{model.name} ({size_text(model.bytes)})" for model in models if model.error is None]
    if whole:
        yield Finding("ok", "on disk", ", ".join(whole))
    elif not models:
        yield Finding("info", "on disk", f"none yet in {models_dir()}", "localspec pull; localspec list --all")
    for model in models:
        if model.error is not None:
            yield broken(model.name, model)
        elif model.unused is not None:
            yield Finding("note", model.name, model.unused, f"localspec rm {model.spec} frees its room on the disk")


def broken(name: str, model: ExaminedModel) -> Finding:
    again = "fetch the file again, or take another one"
    if model.entry is not None and model.file == model.entry.path:
        again = f"localspec rm {model.entry.name}; localspec pull {model.entry.name}"
    return Finding("fail", name, model.error or "it cannot be used", again)


def missing(model: ExaminedModel) -> Finding:
    """Finding on a model that is not on this disk."""
    size = f"{'' if model.bytes_exact else '~'}{size_text(model.bytes)}" if model.bytes else "of unknown size"
    room = free_bytes(models_dir())
    text = f"{model.name} is not on this disk ({size}; {size_text(room)} of disk free)"
    if model.bytes > room:
        return Finding("fail", "download", text, "make room on the disk, or set LOCALSPEC_HOME to a larger one")
    return Finding("note", "download", text, f"localspec pull {model.spec}")


@dataclass(frozen=True, slots=True)
class Room:
    """Where models would go."""

    engine: EngineFacts | None  # the engine that would load them; None where there is none
    n_gpu_layers: int | None  # ``--gpu-layers``; None takes all if the engine has a GPU
    ram: int  # free memory [bytes]
    ram_total: int  # what the machine has, or the container may use [bytes]

    @property
    def backend(self) -> str:
        return self.engine.name if self.engine is not None else "ik-llama"

    @property
    def on_gpu(self) -> bool:
        engine = self.engine
        return engine is not None and engine.name in FOR_GPUS and engine.devices != [] and self.n_gpu_layers != 0

    @property
    def gpus(self) -> list[Device]:
        """GPUs that layers go to; empty too where the engine does not name them."""
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
        return 1.0 if model.sizes is None else memory.gpu_share(self.n_gpu_layers, model.sizes.n_layer)


def fit(models: Sequence[ExaminedModel], n_ctx: int, kv_type: str, room: Room, on_cpu: int | None = None) -> FitFacts:
    """Memory of all models, the target first, each with a context; ``on_cpu``: of a target spread over devices, what
    stays here [bytes]."""
    needs = []
    for model in models:
        if model.sizes is None:
            needs.append(NeedFacts(model.name, model.bytes, None, None))
        else:
            needs.append(NeedFacts(model.name, *astuple(memory.need(model.sizes, n_ctx, kv_type, room.backend))))
    totals, shares = [each.total for each in needs], [room.gpu_share(model) for model in models]
    if on_cpu is not None:
        totals[0], shares[0] = on_cpu + (needs[0].compute_bytes or 0), 0.0
    on_gpu = sum(total * share for total, share in zip(totals, shares, strict=True))
    ram = memory.PROGRAM_BYTES + sum(totals) - (0.0 if room.gpu_is_ram else on_gpu)
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


def chosen_context(
    target: ExaminedModel, drafts: Sequence[ExaminedModel], heads: Sequence[Path], load: LoadOptions, room: Room
) -> tuple[int, Finding | None]:
    """The context that a pair would get [tokens], and a finding on it where it was not asked for; ``heads`` are files
    of heads, the target's own for its layer for multi-token prediction."""
    usual = min(memory.USUAL_CTX, target.n_ctx_train or memory.USUAL_CTX)
    if load.n_ctx is not None or target.sizes is None or load.placement:
        return load.n_ctx or usual, None
    sizes, trained = target.sizes, target.n_ctx_train or 0
    read = [sizes.own_layer if path == target.file else memory.read_sizes(path) for path in heads]
    loads = memory.loads_for(
        memory.Load(sizes, gpu_share=room.gpu_share(target)),
        [memory.Load(each.sizes, gpu_share=room.gpu_share(each)) for each in drafts if each.sizes is not None],
        [memory.Load(each, gpu_share=float(room.on_gpu)) for each in read if each is not None],
        parallel=1,
    )
    space = memory.Space.beside(room.ram, room.gpus)

    def chosen(kv_type: str) -> memory.ContextChoice:
        on_gpu = room.gpu_share(target) == 1
        return memory.choose_context(loads, kv_type, room.backend, space, trained, on_gpu=on_gpu)

    choice, advice = chosen(load.kv_cache_type), None
    smaller = KV_VALUE_BYTES["q8_0"] < KV_VALUE_BYTES[load.kv_cache_type] and room.backend != "reference"
    if smaller and (more := chosen("q8_0").n_ctx) > choice.n_ctx:
        advice = f"--kv-cache q8_0 allows {more:,}"
    status: Status = "ok" if choice.n_ctx >= usual else "note"
    return choice.n_ctx, Finding(status, "context", str(choice), advice)


def fit_findings(models: Sequence[ExaminedModel], found: FitFacts, room: Room) -> Iterator[Finding]:
    known = all(each.kv_bytes is not None for each in found.models)
    text = f"needs {'' if known else 'at least '}{size_text(found.ram_needed_bytes)}, {size_text(room.ram)} free"
    if found.gpu_needed_bytes is None or room.gpu_is_ram:
        text += f": {_sum(found)}"
    if not all(each.weights_bytes for each in found.models):
        yield Finding("info", "memory", "what it needs is only known once the file is here")
    elif found.ram_needed_bytes > room.ram:
        yield Finding("fail", "memory", text, _remedy(models, found, room))
    elif not known:
        yield Finding("info", "memory", f"{text}; the cache is only known once the file is here")
    elif found.ram_needed_bytes > memory.TIGHT * room.ram:
        yield Finding("note", "memory", f"{text}; little is left for other programs", _remedy(models, found, room))
    else:
        yield Finding("ok", "memory", text)
    if (needed := found.gpu_needed_bytes) is None:
        return
    text = f"needs {size_text(needed)}"
    if room.gpu_free is None:
        yield Finding("info", "GPU memory", f"{text}; the engine does not say how much is free")
        return
    text += f", {size_text(room.gpu_free)} free: {_sum(found)}"
    if needed <= room.gpu_free:
        yield Finding("ok", "GPU memory", text)
        return
    sizes = models[0].sizes
    layers = int(0.95 * room.gpu_free / needed * (sizes.n_layer + 1)) if sizes is not None else 0
    advice = f"use --gpu-layers {layers}" if layers > 0 else "use --gpu-layers 0, or a smaller model"
    yield Finding("fail", "GPU memory", text, advice)


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
    limit = memory.TIGHT * room.ram

    def fits(chosen: Sequence[ExaminedModel], n_ctx: int, kv_type: str) -> bool:
        return fit(chosen, n_ctx, kv_type, room).ram_needed_bytes <= limit

    ways: list[str] = []
    if all(model.sizes is not None for model in models) and room.backend != "reference":
        smaller = KV_VALUE_BYTES["q8_0"] < KV_VALUE_BYTES[found.kv_type]
        if smaller and fits(models, found.n_ctx, "q8_0"):
            ways.append("--kv-cache q8_0")
        contexts = range(memory.LEAST_CTX, found.n_ctx, memory.CTX_STEP)
        n_fitting = bisect_left(contexts, True, key=lambda n_ctx: not fits(models, n_ctx, found.kv_type))
        if n_fitting:
            ways.append(f"--ctx {contexts[n_fitting - 1]}")
    if len(models) > 1 and fits(models[:1], found.n_ctx, found.kv_type):
        ways.append("--draft ngram, which needs no second model")
    if ways:
        return "use " + ", or ".join(ways[:3])
    if found.ram_needed_bytes < memory.TIGHT * room.ram_total:
        return "close other programs, or take a smaller model: localspec list --all"
    return "take a smaller model, or one quantised further: localspec list --all"


# Several devices: what goes where, whether it fits, and what the network adds to a pass.


def spread(target: ExaminedModel, load: LoadOptions, engine: str, n_ctx: int) -> tuple[list[Finding], int | None]:
    """Findings on where a target's weights would go, and what stays in this machine's memory [bytes]."""
    placement = load.placement
    try:
        servers = {address: ask(address) for address in placement.rpc}
        binding = engine_module(engine).binding()
        with GGUFFile(target.file) as gguf:
            placed = Placed(placement, binding.places(placement), gguf, engine)
            used = [Target(each.name, each.buffer, _free(each, engine)) for each in placed.used]
            layers = load.n_gpu_layers if load.n_gpu_layers is not None else -1
            shares = layout(gguf, placement, used, layers, n_ctx, load.kv_cache_type)
    except LocalspecError as error:
        return [Finding("fail", "devices", str(error))], None
    rows = [_row(share, device) for share, device in zip(shares, [None, *used], strict=True)]
    if servers:
        wait = sum(facts.round_trip_ms for facts in servers.values())
        text = f"a pass waits for {len(servers)} round trip{'s' * (len(servers) > 1)}, {wait:.2g} ms in all"
        if target.sizes is not None:
            text += f"; every row of logits that comes back is {size_text(4 * target.sizes.n_vocab)}"
        insecure = "; nothing protects what goes to and fro" if placement.allow_insecure_rpc else ""
        rows.append(Finding("note" if insecure else "info", "network", text + insecure))
    return rows, shares[0].weights_bytes + shares[0].cache_bytes


def _free(place: Place, engine: str) -> int:
    if not place.handle:
        raise EngineError(f"{engine} does not say how much memory {place.name} has")
    return Ggml().memory(place.handle)[0]


def _row(share: Share, device: Target | None) -> Finding:
    first, last = share.layers[:1], share.layers[-1:]
    layers = "no layers" if not first else f"layer {first[0]}" if first == last else f"layers {first[0]} to {last[0]}"
    text = f"{layers}: {size_text(share.weights_bytes)}, cache {size_text(share.cache_bytes)}"
    if device is None:
        return Finding("info", share.name, text)
    text = f"{text} of {size_text(device.free_bytes)} free in {device.buffer}"
    if share.weights_bytes + share.cache_bytes > device.free_bytes:
        return Finding("fail", share.name, text, "use --tensor-split, --gpu-layers or --cpu-moe to put less there")
    return Finding("ok", share.name, text)
