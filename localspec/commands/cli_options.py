"""Options that several commands share. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

Run = Callable[[], int]

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
        metavar="auto|none|ngram|MODEL", help="Who guesses; repeat for several together.", show_default="auto"
    ),
]
DraftLength = Annotated[str, typer.Option(metavar="auto|N", help="Guesses per round.")]
Backend = Annotated[str, typer.Option(metavar="auto|llama-cpp|ik-llama|mlx|reference", help="The engine.")]
DraftBackend = Annotated[
    str | None, typer.Option(metavar="auto|llama-cpp|…", help="The engine of draft models.", show_default="--backend")
]
Temperature = Annotated[
    float | None, typer.Option(help="0 always takes the likeliest token.", show_default="the model's")
]
TopK = Annotated[int | None, typer.Option(help="Keep the N likeliest tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this total probability.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens less likely than this share of the likeliest.")]
RepeatPenalty = Annotated[float | None, typer.Option(help="Over 1 makes recent tokens less likely.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text again.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer.", show_default="what the context holds")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text; repeatable.")]
Ctx = Annotated[int | None, typer.Option(help="Context size in tokens, answer included.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="the physical cores")]
KVCache = Annotated[str, typer.Option(metavar="f16|f32|q8_0|q4_0", help="Type of the attention cache.")]
GpuLayers = Annotated[int | None, typer.Option(help="Layers on the GPU.", show_default="all, if the engine can")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")]
LightDraft = Annotated[
    bool,
    typer.Option(help="On a CPU, draft with a lighter copy of the draft model where that is faster; made once."),
]
Idle = Annotated[
    bool,
    typer.Option(help="Measure, copy and read ahead while nobody waits (never on battery), not before an answer."),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show what the engine logs.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def shared_options(given: dict[str, Any]) -> Callable[[], Any]:
    """The shared options as given; ``RunOptions`` checks them when it is called."""
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens")
    sampling = {name: given[name] for name in names if given[name] is not None}
    if given["stop"]:
        sampling["stop"] = tuple(given["stop"])
    rest = (
        "model",
        "draft_length",
        "backend",
        "draft_backend",
        "ctx",
        "threads",
        "gpu_layers",
        "kv_cache",
        "light_draft",
        "idle",
        "system",
        "verbose",
    )

    given = {"draft_backend": None, "idle": False} | given

    def build() -> Any:
        from localspec.commands.options import RunOptions, answer_form

        form = answer_form(given.get("json_schema"), given.get("grammar"))
        return RunOptions(draft=given["draft"] or (), sampling=sampling | form, **{name: given[name] for name in rest})

    return build
