"""Options that several commands share, each written once. Nothing heavy is imported here."""

from __future__ import annotations

from inspect import Signature
from inspect import signature as signature_of
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localspec.values import MAX_COUNT, MAX_THREADS

if TYPE_CHECKING:
    from localspec.commands.options import RunOptions


def models(incomplete: str) -> list[tuple[str, str]]:
    """Names of the catalogue that begin so, with what the shell shows beside them."""
    from localspec.model_files.catalog import Catalog

    catalog = Catalog.load()
    return [(name, catalog[name].note) for name in catalog if name.startswith(incomplete)]


def _drafts(incomplete: str) -> list[tuple[str, str]]:
    """What ``--draft`` takes and begins so."""
    from localspec.runtime.arguments import WORDS

    return [(word, "") for word in WORDS if word.startswith(incomplete)] + models(incomplete)


Model = Annotated[
    str | None,
    typer.Argument(
        autocompletion=models,
        metavar="MODEL",
        help="Catalogue name, path of a .gguf file, or hf:OWNER/REPO/FILE.gguf. Default: the catalogue's default pair.",
        show_default=False,
    ),
]
Draft = Annotated[
    list[str] | None,
    typer.Option(
        autocompletion=_drafts,
        metavar="auto|none|ngram|head|corpus:PATH|MODEL",
        help="Drafters to use, in addition to n-grams; repeatable. MODEL may be an EAGLE-3 or DFlash file. "
        "Also head:FILE, mtp (the model's own multi-token-prediction layer), early-exit[:LAYERS].",
        show_default="auto",
    ),
]
DraftOnly = Annotated[bool, typer.Option("--draft-only", help="Use only the drafters named by --draft.")]
DraftLength = Annotated[str, typer.Option(metavar="auto|N", help="Tokens to draft per round.")]
Backend = Annotated[str, typer.Option(metavar="auto|llama-cpp|ik-llama|mlx|reference", help="Inference engine.")]
DraftBackend = Annotated[
    str | None,
    typer.Option(metavar="auto|llama-cpp|…", help="Inference engine for draft models.", show_default="--backend"),
]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0 is greedy.", show_default="the model's")
]
TopK = Annotated[int | None, typer.Option(min=0, help="Sample from the N most likely tokens; 0 disables.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the most likely tokens up to this total probability.")]
MinP = Annotated[float | None, typer.Option(help="Minimum probability, relative to the most likely token.")]
RepeatPenalty = Annotated[
    float | None, typer.Option(help="Penalty for repeating recent tokens; values above 1 discourage it.")
]
Seed = Annotated[int | None, typer.Option(help="Random seed; the same seed reproduces the same text.")]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Maximum answer tokens.", show_default="what fits the context")
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; repeatable.")]
Ctx = Annotated[int | None, typer.Option(min=1, max=MAX_COUNT, help="Context size in tokens, including the answer.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_THREADS, help="CPU threads.", show_default="the physical cores"),
]
KVCache = Annotated[str, typer.Option(metavar="f16|f32|q8_0|q4_0", help="Data type of the KV cache.")]
GpuLayers = Annotated[
    int | None,
    typer.Option(min=0, max=MAX_COUNT, help="Layers to place on the GPU.", show_default="all, if supported"),
]
SplitMode = Annotated[
    str | None,
    typer.Option(metavar="none|layer|row", help="How to split the target model across devices.", show_default="layer"),
]
TensorSplit = Annotated[
    str | None,
    typer.Option(
        metavar="N,N…", help="Fraction of the model for each device, e.g. 3,1.", show_default="by free memory"
    ),
]
MainGpu = Annotated[int | None, typer.Option(min=0, metavar="N", help="GPU to use with --split-mode none.")]
Device = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,NAME…|none", help="Devices for the target model, as listed by doctor; none: CPU only."),
]
OverrideTensor = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN=BUFFER", help="Place matching tensors in BUFFER; repeatable."),
]
CpuMoe = Annotated[bool, typer.Option("--cpu-moe", help="Keep all MoE experts of the target model on the CPU.")]
NCpuMoe = Annotated[
    int | None,
    typer.Option(min=0, max=MAX_COUNT, metavar="N", help="Keep the MoE experts of the first N layers on the CPU."),
]
Rpc = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST:PORT", help="llama.cpp RPC server, on loopback or through a tunnel; repeatable."),
]
AllowInsecureRpc = Annotated[
    bool, typer.Option("--allow-insecure-rpc", help="Allow non-loopback addresses; traffic can be read and altered.")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")]
LightDraft = Annotated[
    bool,
    typer.Option(help="On a CPU, draft with a requantized copy of the draft model where that is faster."),
]
Idle = Annotated[
    bool,
    typer.Option(help="Do background work while idle, but never on battery."),
]


def _known_think(value: str) -> str:
    words = ("auto", "on", "off", "low", "medium", "high")  # thinking.THINK, whose imports take their time
    if value not in words:
        raise typer.BadParameter(f"must be one of {', '.join(words)}, not {value!r}")
    return value


Think = Annotated[
    str,
    typer.Option(
        metavar="auto|on|off|low|medium|high",
        callback=_known_think,
        help="Whether the model thinks before answering, if its chat template supports the choice.",
    ),
]
ThinkBudget = Annotated[
    int | None,
    typer.Option(min=0, max=MAX_COUNT, metavar="N", help="Maximum thinking tokens."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Fetch models that are not here without asking.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show engine logs.")]
Names = Annotated[
    list[str] | None,
    typer.Argument(
        autocompletion=models,
        metavar="NAME...",
        help="Catalogue names, parts of them, or hf:OWNER/REPO/FILE.gguf. Default: the default pair.",
        show_default=False,
    ),
]
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
"""Names of loading options on the command line and in ``LoadOptions``."""

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
    yes: Yes = False,
    verbose: Verbose = False,
) -> None:
    """The shared options, in the order of ``--help``."""


def with_shared_options(function: Callable[..., int], without: Collection[str] = ()) -> Signature:
    """The signature of a command, its ``**options`` replaced by the shared options.

    Args:
        function: the command; a shared option that it declares itself takes the shared one's place.
        without: shared options that make no sense for it.
    """
    signature = signature_of(function, eval_str=True)
    own = dict(signature.parameters)
    if own.pop("options", None) is None:
        return signature
    shared = signature_of(_shared, eval_str=True).parameters
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
