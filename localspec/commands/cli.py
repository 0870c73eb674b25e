"""The command line: parsing only. Nothing heavy is imported here; commands import what they need when they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from localspec import __version__
from localspec.commands.cli_checks import bench, doctor, replay, verify
from localspec.commands.cli_options import (
    Backend,
    Ctx,
    Draft,
    DraftBackend,
    DraftLength,
    GpuLayers,
    Idle,
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

app = typer.Typer(
    name="localspec",
    help="A large local model, answering faster with the same words: a small draft guesses, the model checks.",
    no_args_is_help=False,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    idle: Idle = True,
    system: System = None,
    verbose: Verbose = False,
) -> Run:
    """Chat, and watch the guesses. Without a terminal on standard input each line is a turn."""
    options = shared_options(locals())

    def run() -> int:
        from localspec.commands.chat.command import chat_command

        return chat_command(options())

    return run


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
    idle: Idle = True,
    system: System = None,
    verbose: Verbose = False,
) -> Run:
    """Answer one prompt."""
    options = shared_options(locals())

    def run() -> int:
        from localspec.commands.generate import generate_command

        return generate_command(options(), prompt, raw=raw, format=format)

    return run


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
    idle: Idle = True,
    system: System = None,
    verbose: Verbose = False,
) -> Run:
    """Serve OpenAI's API, and a chat page, to the programs on this computer."""
    options = shared_options(locals())

    def run() -> int:
        from localspec.commands.serve.command import ServeOptions, serve_command

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
        from localspec.commands.files import pull_command

        return pull_command(names or ())

    return run


def list_(as_json: Json = False) -> Run:
    """List the models known by name, and which are on this disk."""

    def run() -> int:
        from localspec.commands.files import list_command

        return list_command(as_json)

    return run


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Models to remove.", show_default=False)],
) -> Run:
    """Remove models from this disk."""

    def run() -> int:
        from localspec.commands.files import rm_command

        return rm_command(names)

    return run


def inspect(
    model: Annotated[str, typer.Argument(metavar="FILE", help="A model file, or a name.", show_default=False)],
    as_json: Json = False,
) -> Run:
    """Say what is in a model file: sizes, vocabulary, template, memory."""

    def run() -> int:
        from localspec.commands.files import inspect_command

        return inspect_command(model, as_json)

    return run


for _command in (chat, generate, bench, verify, doctor, serve, replay, pull, list_, rm, inspect):
    app.command(_command.__name__.rstrip("_"))(_command)
