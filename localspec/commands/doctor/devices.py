"""With several devices: what goes where, whether it fits, and what the network adds to a pass."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.backends.layout import Share, Target, layout
from localspec.backends.llama_placement import Place, Placed
from localspec.backends.placement import Placement
from localspec.backends.registry import engine_module
from localspec.backends.rpc_link import ServerFacts, ask
from localspec.commands.doctor.models import ExaminedModel
from localspec.commands.report.model import Finding
from localspec.errors import EngineError, LocalspecError
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.sources.base import size_text
from localspec.runtime.load_options import LoadOptions


@dataclass(frozen=True, slots=True)
class Spread:
    """A target on several devices.

    Attributes:
        rows: what to say of it.
        on_cpu_bytes: what stays in this machine's memory; None where that is not known.
    """

    rows: list[Finding]
    on_cpu_bytes: int | None = None


def spread(target: ExaminedModel, load: LoadOptions, engine: str, n_ctx: int) -> Spread:
    """Say where a target's weights would go.

    Args:
        target: the model; its file is here.
        load: how it would be loaded.
        engine: on which engine.
        n_ctx: tokens of context.
    """
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
        return Spread([Finding("fail", "devices", str(error))])
    rows = [_row(share, device) for share, device in zip(shares, [None, *used], strict=True)]
    if servers:
        rows.append(_network(placement, servers, target))
    return Spread(rows, shares[0].weights_bytes + shares[0].cache_bytes)


def _free(place: Place, engine: str) -> int:
    if not place.handle:
        raise EngineError(f"{engine} does not say how much memory {place.name} has")
    from localspec.backends.ggml import Ggml

    return Ggml().memory(place.handle)[0]


def _row(share: Share, device: Target | None) -> Finding:
    text = f"{_layers(share.layers)}: {size_text(share.weights_bytes)}, cache {size_text(share.cache_bytes)}"
    if device is None:
        return Finding("info", share.name, text)
    needed = share.weights_bytes + share.cache_bytes
    text = f"{text} of {size_text(device.free_bytes)} free in {device.buffer}"
    if needed > device.free_bytes:
        return Finding("fail", share.name, text, "use --tensor-split, --gpu-layers or --cpu-moe to put less there")
    return Finding("ok", share.name, text)


def _layers(numbers: tuple[int, ...]) -> str:
    if not numbers:
        return "no layers"
    return f"layers {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"layer {numbers[0]}"


def _network(placement: Placement, servers: dict[str, ServerFacts], target: ExaminedModel) -> Finding:
    wait = sum(facts.round_trip_ms for facts in servers.values())
    text = f"a pass waits for {len(servers)} round trip{'s' * (len(servers) > 1)}, {wait:.2g} ms in all"
    if target.sizes is not None:
        text += f"; every row of logits that comes back is {size_text(4 * target.sizes.vocab.n_tokens)}"
    insecure = "; nothing protects what goes to and fro" if placement.allow_insecure_rpc else ""
    return Finding("note" if insecure else "info", "network", text + insecure)
