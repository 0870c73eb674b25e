"""The commands that examine: ``bench``, ``verify``, ``doctor``, ``replay``. Parsing only, as in ``cli``."""

from __future__ import annotations

from typing import Annotated

import typer

from localspec.commands.cli_options import (
    Backend,
    Ctx,
    Draft,
    DraftBackend,
    DraftLength,
    GpuLayers,
    Json,
    KVCache,
    LightDraft,
    MaxTokens,
    MinP,
    Model,
    RepeatPenalty,
    Run,
    Seed,
    Stop,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    Verbose,
    shared_options,
)


def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] | show FILE | compare A B",
            help="The model to measure; or a file of bench --json to show again, or two to compare.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two minutes: short answers.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Long answers, fixed lengths too, no time limit.")] = False,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="auto|N|ngram:N|model:N",
            help="What to measure against plain decoding; repeatable, or with commas.",
            show_default="auto",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Questions in Spec-Bench's or SPEED-Bench's format, as JSON lines."),
    ] = None,
    which: Annotated[
        str | None, typer.Option("--set", metavar="report|tuning", help="Which of our own questions.")
    ] = None,
    category: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this kind; repeatable.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Time budget.", show_default="15, or 2 if --quick")] = None,
    repeats: Annotated[int | None, typer.Option(help="Ask each question so often.")] = None,
    slice_tokens: Annotated[
        int | None,
        typer.Option(
            "--slice", metavar="TOKENS", help="Take turns after so many tokens; 0: after answers.", show_default="4"
        ),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Let answers go on to --max-tokens.")] = False,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Keep everything measured.")] = None,
    markdown: Annotated[str | None, typer.Option(metavar="FILE|-", help="A report.")] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="A page with plots.")] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="The plot of speed-ups.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="FILE", help="Go on with a file of --json.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="auto|llama-cpp|ik-llama|reference",
            help="The engine; repeatable, or with commas: side by side.",
            show_default="auto",
        ),
    ] = None,
    draft: Draft = None,
    draft_backend: DraftBackend = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repeat_penalty: RepeatPenalty = None,
    seed: Seed = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", show_default="by the mode")] = None,
    stop: Stop = None,
    ctx: Ctx = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = None,
    kv_cache: KVCache = "f16",
    light_draft: LightDraft = True,
    system: System = None,
    verbose: Verbose = False,
) -> Run:
    """Measure a pair: the same questions plainly and with guesses, in turns. Ctrl-C keeps what is done."""
    given = locals()
    named = list(words or ())
    options = shared_options(given | {"model": next(iter(named), None), "draft_length": "auto", "backend": "auto"})

    def run() -> int:
        from localspec.commands.bench.command import Outputs, bench_command

        request = {
            "options": options(),
            "backends": backend or (),
            "arms": arm or (),
            "categories": category or (),
            **{name: given[name] for name in ("prompts", "which", "quick", "full", "minutes", "repeats")},
            **{name: given[name] for name in ("slice_tokens", "ignore_eos", "resume")},
        }
        return bench_command(named, request, Outputs(json, markdown, html, svg, force))

    return run


def verify(
    model: Model = None,
    as_json: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter answers.")] = False,
    prompts: Annotated[int | None, typer.Option(help="Questions to answer.", show_default="8, or 3 if --quick")] = None,
    draft: Draft = None,
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
    kv_cache: KVCache = "f16",
    light_draft: LightDraft = True,
    system: System = None,
    verbose: Verbose = False,
) -> Run:
    """Audit a pair: is it lossless, here, with these kernels? Exit status 1 if not."""
    options = shared_options(locals())

    def run() -> int:
        from localspec.commands.verify.command import verify_command

        return verify_command(options(), prompts=prompts, quick=quick, as_json=as_json)

    return run


def doctor(
    model: Model = None,
    as_json: Json = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure anew what passes cost, and keep it.")] = False,
    rank: Annotated[
        bool, typer.Option("--rank", help="Try the drafts on this disk for a minute, and rank them.")
    ] = False,
    draft: Draft = None,
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
    kv_cache: KVCache = "f16",
    light_draft: LightDraft = True,
    system: System = None,
    verbose: Verbose = False,
) -> Run:
    """Examine this machine and a pair: does it fit, does it match, does it pay?"""
    options = shared_options(locals())

    def run() -> int:
        from localspec.commands.doctor.command import doctor_command

        return doctor_command(options(), as_json=as_json, calibrate=calibrate, rank=rank)

    return run


def replay(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="What generate --format events printed, or a chat that /save wrote; - is standard input.",
            show_default=False,
        ),
    ],
    html: Annotated[
        str | None,
        typer.Option(
            metavar="OUT", help="Where the page goes; - is standard output.", show_default="FILE with .html instead"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
) -> Run:
    """Make a web page of a recording: the answer, and every guess as it was made and checked."""

    def run() -> int:
        from localspec.commands.replay.command import replay_command

        return replay_command(file, html, force=force)

    return run
