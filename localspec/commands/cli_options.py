"""Options that several commands share, each written once. Nothing heavy is imported here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localspec.values import MAX_COUNT, MAX_THREADS

if TYPE_CHECKING:
    from localspec.commands.options import RunOptions

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Catalogue name, path of a .gguf file, or hf:OWNER/REPO/FILE.gguf. Default: the catalogue's default pair.",
        show_default=False,
    ),
]
Draft = Annotated[
    list[str] | None,
    typer.Option(
        metavar="auto|none|ngram|head|corpus:PATH|MODEL",
        help="Who guesses, n-grams besides; repeat for several together. MODEL may be an EAGLE-3 or DFlash file. "
        "Also head:FILE, mtp (the model's own layer for it), early-exit[:LAYERS].",
        show_default="auto",
    ),
]
DraftOnly = Annotated[bool, typer.Option("--draft-only", help="Only those that --draft names: no n-grams besides.")]
DraftLength = Annotated[str, typer.Option(metavar="auto|N", help="Guesses per round.")]
Backend = Annotated[str, typer.Option(metavar="auto|llama-cpp|ik-llama|mlx|reference", help="The engine.")]
DraftBackend = Annotated[
    str | None, typer.Option(metavar="auto|llama-cpp|…", help="The engine of draft models.", show_default="--backend")
]
Temperature = Annotated[
    float | None, typer.Option(help="0 always takes the likeliest token.", show_default="the model's")
]
TopK = Annotated[int | None, typer.Option(min=0, help="Keep the N likeliest tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this total probability.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens less likely than this share of the likeliest.")]
RepeatPenalty = Annotated[float | None, typer.Option(help="Over 1 makes recent tokens less likely.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text again.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer.", show_default="what the context holds")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text; repeatable.")]
Ctx = Annotated[int | None, typer.Option(min=1, max=MAX_COUNT, help="Context size in tokens, answer included.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_THREADS, help="CPU threads.", show_default="the physical cores"),
]
KVCache = Annotated[str, typer.Option(metavar="f16|f32|q8_0|q4_0", help="Type of the attention cache.")]
GpuLayers = Annotated[
    int | None,
    typer.Option(min=0, max=MAX_COUNT, help="Layers on the GPU.", show_default="all, if the engine can"),
]
SplitMode = Annotated[
    str | None,
    typer.Option(metavar="none|layer|row", help="How the target is split over devices.", show_default="layer"),
]
TensorSplit = Annotated[
    str | None,
    typer.Option(metavar="N,N…", help="Shares of the devices, e.g. 3,1.", show_default="by free memory"),
]
MainGpu = Annotated[int | None, typer.Option(min=0, metavar="N", help="The one GPU of --split-mode none.")]
Device = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,NAME…|none", help="Devices for the target, as doctor names them; none: the CPU."),
]
OverrideTensor = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN=BUFFER", help="Put tensors whose name matches into that memory; repeatable."),
]
CpuMoe = Annotated[bool, typer.Option("--cpu-moe", help="Keep all experts of a MoE target on the CPU.")]
NCpuMoe = Annotated[
    int | None, typer.Option(min=0, max=MAX_COUNT, metavar="N", help="Keep the experts of the first N layers there.")
]
Rpc = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="An RPC server of llama.cpp, on loopback or a tunnel's end; repeatable."),
]
AllowInsecureRpc = Annotated[
    bool, typer.Option("--allow-insecure-rpc", help="Take other addresses: anyone on the way can read and change all.")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")]
LightDraft = Annotated[
    bool,
    typer.Option(help="On a CPU, draft with a lighter copy of the draft model where that is faster; made once."),
]
Idle = Annotated[
    bool,
    typer.Option(help="Measure, copy and read ahead while nobody waits (never on battery), not before an answer."),
]


def _known_think(value: str) -> str:
    words = ("auto", "on", "off", "low", "medium", "high")  # thinking.THINK, whose imports take their time
    if value not in words:
        raise typer.BadParameter(f"it is one of {', '.join(words)}, not {value!r}")
    return value


Think = Annotated[
    str,
    typer.Option(
        metavar="auto|on|off|low|medium|high",
        callback=_known_think,
        help="Whether the model thinks before it answers, where its chat template leaves the choice.",
    ),
]
ThinkBudget = Annotated[
    int | None,
    typer.Option(min=0, max=MAX_COUNT, metavar="N", help="Longest thinking in tokens, then it answers."),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show what the engine logs.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


LOADING = {
    "backend": "backend",
    "draft_backend": "draft_backend",
    "ctx": "n_ctx",
    "threads": "n_threads",
    "gpu_layers": "n_gpu_layers",
    "kv_cache": "kv_cache_type",
    "light_draft": "light_draft",
    "idle": "idle",
}
"""What an option of loading is called in ``LoadOptions``."""

PLACEMENT = (
    "split_mode",
    "tensor_split",
    "main_gpu",
    "device",
    "override_tensor",
    "cpu_moe",
    "n_cpu_moe",
    "rpc",
    "allow_insecure_rpc",
)
"""Options that say where the target's weights go; ``Placement`` calls them the same."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens")


def _shared(
    draft: Draft = None,
    draft_only: DraftOnly = False,
    draft_length: DraftLength = "auto",
    backend: Backend = "auto",
    draft_backend: DraftBackend = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repeat_penalty: RepeatPenalty = None,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    ctx: Ctx = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = None,
    split_mode: SplitMode = None,
    tensor_split: TensorSplit = None,
    main_gpu: MainGpu = None,
    device: Device = None,
    override_tensor: OverrideTensor = None,
    cpu_moe: CpuMoe = False,
    n_cpu_moe: NCpuMoe = None,
    rpc: Rpc = None,
    allow_insecure_rpc: AllowInsecureRpc = False,
    kv_cache: KVCache = "f16",
    light_draft: LightDraft = True,
    idle: Idle = True,
    system: System = None,
    verbose: Verbose = False,
) -> None:
    """The shared options, in the order of ``--help``."""


def with_shared_options(function: Callable[..., int], without: Collection[str] = ()) -> inspect.Signature:
    """The signature of a command, its ``**options`` replaced by the shared options.

    Args:
        function: the command; a shared option that it declares itself takes the shared one's place.
        without: shared options that make no sense for it.
    """
    signature = inspect.signature(function, eval_str=True)
    own = dict(signature.parameters)
    if own.pop("options", None) is None:
        return signature
    shared = inspect.signature(_shared, eval_str=True).parameters
    last = [own.pop(name, parameter) for name, parameter in shared.items() if name not in without]
    return signature.replace(parameters=[*own.values(), *last])


def run_options(model: str | None, given: dict[str, Any], **sampling: Any) -> RunOptions:
    """The shared options as given, checked.

    Raises:
        UsageError: a value makes no sense.
    """
    from localspec.commands.options import RunOptions, placement
    from localspec.runtime.load_options import LoadOptions

    rest = {"idle": False} | given
    placed = {name: rest.pop(name) for name in PLACEMENT if name in rest}
    load = LoadOptions(
        **{keyword: rest.pop(option) for option, keyword in LOADING.items() if option in rest},
        placement=placement(placed),
    )
    sampling |= {name: value for name in SAMPLING if (value := rest.pop(name)) is not None}
    if stop := rest.pop("stop"):
        sampling["stop"] = tuple(stop)
    return RunOptions(model=model, draft=rest.pop("draft") or (), load=load, sampling=sampling, **rest)
