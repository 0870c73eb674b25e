"""The command line: parsing only. Nothing heavy is imported here; commands import what they need when they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from localspec import __version__

Run = Callable[[], int]

app = typer.Typer(
    name="localspec",
    help="A large local model, answering faster with the same words: a small draft guesses, the model checks.",
    no_args_is_help=False,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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
Verbose = Annotated[bool, typer.Option("--verbose", help="Show what the engine logs.")]


def parse(argv: Sequence[str]) -> Run | str:
    """Read a command line.

    Returns:
        The command, ready to run, or what is wrong with the line.

    Raises:
        SystemExit: all that was asked for (``--help``, ``--version``) has been printed.
    """
    command = typer.main.get_command(app)
    try:
        result = command.main(list(argv), prog_name="localspec", standalone_mode=False)
    except Exception as error:
        # Typer brings its own copy of click in some releases and uses the real one in others.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _with_help(message(), getattr(error, "ctx", None))
    if callable(result):
        return result  # type: ignore[no-any-return]
    if result == 130:  # how Typer reports a Ctrl-C
        raise KeyboardInterrupt
    raise SystemExit(result or 0)


def _with_help(message: str, ctx: Any) -> str:
    line = " ".join(message.split()).rstrip(".")
    path = ctx.command_path if ctx is not None else "localspec"
    return f"{line} ({path} --help lists what there is)"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"localspec {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def _options(given: dict[str, Any]) -> Callable[[], Any]:
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
        "system",
        "verbose",
    )

    given = {"draft_backend": None} | given

    def build() -> Any:
        from localspec.options import RunOptions, answer_form

        form = answer_form(given.get("json_schema"), given.get("grammar"))
        return RunOptions(draft=given["draft"] or (), sampling=sampling | form, **{name: given[name] for name in rest})

    return build


@app.command()
def chat(
    model: Model = None,
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
    """Chat, and watch the guesses. Without a terminal on standard input each line is a turn."""
    options = _options(locals())

    def run() -> int:
        from localspec.repl.command import chat_command

        return chat_command(options())

    return run


@app.command()
def generate(
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Default: standard input.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    format: Annotated[str, typer.Option(metavar="text|json|events", help="What is printed.")] = "text",
    json_schema: Annotated[
        str | None, typer.Option("--json-schema", metavar="FILE", help="Answer in JSON that follows this schema.")
    ] = None,
    grammar: Annotated[str | None, typer.Option(metavar="FILE", help="Answer as this GBNF grammar has it.")] = None,
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
    """Answer one prompt."""
    options = _options(locals())

    def run() -> int:
        from localspec.generate import generate_command

        return generate_command(options(), prompt, raw=raw, format=format)

    return run


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
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
    options = _options(locals())

    def run() -> int:
        from localspec.doctor.command import doctor_command

        return doctor_command(options(), as_json=as_json, calibrate=calibrate, rank=rank)

    return run


@app.command()
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
    options = _options(locals())

    def run() -> int:
        from localspec.audit.command import verify_command

        return verify_command(options(), prompts=prompts, quick=quick, as_json=as_json)

    return run


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen at; any but a loopback one needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 finds a free one.")] = 8642,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="What clients must send.", show_default="$LOCALSPEC_API_KEY")
    ] = None,
    queue: Annotated[int, typer.Option(help="Requests that may wait; more are told to come back.")] = 32,
    prefix_cache: Annotated[int, typer.Option(metavar="MB", help="Memory for conversations that are put aside.")] = 512,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="From a request to its answer's end.")] = 3600.0,
    alias: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Another name of the model.")] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Let the web pages of this origin in; repeatable.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another name of this computer; repeatable.")
    ] = None,
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
    """Serve OpenAI's API, and a chat page, to the programs on this computer."""
    options = _options(locals())

    def run() -> int:
        from localspec.server.command import ServeOptions, serve_command

        serving = ServeOptions(
            host=host,
            port=port,
            api_key=api_key,
            queue=queue,
            prefix_cache=prefix_cache,
            time_limit=time_limit,
            alias=alias or (),
            allow_origin=allow_origin or (),
            allow_host=allow_host or (),
        )
        return serve_command(options(), serving)

    return run


@app.command()
def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...",
            help="Catalogue names, or hf:OWNER/REPO/FILE.gguf. Default: the default pair.",
            show_default=False,
        ),
    ] = None,
) -> Run:
    """Fetch models, check their digests, print their paths."""

    def run() -> int:
        from localspec.files import pull_command

        return pull_command(names or ())

    return run


@app.command("list")
def list_(as_json: Json = False) -> Run:
    """List the models known by name, and which are on this disk."""

    def run() -> int:
        from localspec.files import list_command

        return list_command(as_json)

    return run


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Models to remove.", show_default=False)],
) -> Run:
    """Remove models from this disk."""

    def run() -> int:
        from localspec.files import rm_command

        return rm_command(names)

    return run


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="FILE", help="A model file, or a name.", show_default=False)],
    as_json: Json = False,
) -> Run:
    """Say what is in a model file: sizes, vocabulary, template, memory."""

    def run() -> int:
        from localspec.files import inspect_command

        return inspect_command(model, as_json)

    return run


@app.command()
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
        from localspec.replay.command import replay_command

        return replay_command(file, html, force=force)

    return run


@app.command()
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
    options = _options(given | {"model": next(iter(named), None), "draft_length": "auto", "backend": "auto"})

    def run() -> int:
        from localspec.bench.command import Outputs, bench_command

        request = {
            "options": options(),
            "backends": backend or (),
            "arms": arm or (),
            "categories": category or (),
            **{name: given[name] for name in ("prompts", "which", "quick", "full", "minutes", "repeats")},
            **{name: given[name] for name in ("ignore_eos", "resume")},
        }
        return bench_command(named, request, Outputs(json, markdown, html, svg, force))

    return run
