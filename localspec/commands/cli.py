"""The command line: parsing only. Nothing heavy is imported here; commands import what they need when they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from localspec.commands.cli_app import Run, app, command
from localspec.commands.cli_options import (
    Backend,
    Json,
    Model,
    Think,
    ThinkBudget,
    Threads,
    Verbose,
    run_options,
)

__all__ = ["app", "parse"]


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


@command()
def chat(
    model: Model = None,
    project: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|none",
            help="Copy guesses from the text of this folder too; kept for chats that are started here.",
            show_default="what was kept",
        ),
    ] = None,
    think: Think = "auto",
    think_budget: ThinkBudget = None,
    resume: Annotated[
        bool, typer.Option("--continue", help="Go on with the last conversation, and its model.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Keep the conversation in LOCALSPEC_HOME, among the last 50.")
    ] = True,
    **options: Any,
) -> int:
    """Chat, and watch the guesses. Without a terminal on standard input each line is a turn."""
    from localspec.commands.chat.command import chat_command

    known = run_options(model, options)
    return chat_command(known, project, think=think, thinking_budget=think_budget, resume=resume, keep=keep)


@command()
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
    think: Think = "auto",
    think_budget: ThinkBudget = None,
    **options: Any,
) -> int:
    """Answer one prompt."""
    from localspec.commands.generate import generate_command
    from localspec.commands.options import answer_form

    form = answer_form(json_schema, grammar)
    known = run_options(model, options, **form)
    return generate_command(known, prompt, raw=raw, format=format, think=think, thinking_budget=think_budget)


@command(without=("draft_length", "idle"))
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
            metavar="auto|N|ngram:N|head+model:N",
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
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", show_default="by the mode")] = None,
    **options: Any,
) -> int:
    """Measure a pair: the same questions plainly and with guesses, in turns. Ctrl-C keeps what is done."""
    from localspec.commands.bench.command import Outputs, bench_command

    named = list(words or ())
    request = {
        "options": run_options(next(iter(named), None), options | {"max_tokens": max_tokens}),
        "backends": backend or (),
        "arms": arm or (),
        "categories": category or (),
        "prompts": prompts,
        "which": which,
        "quick": quick,
        "full": full,
        "minutes": minutes,
        "repeats": repeats,
        "slice_tokens": slice_tokens,
        "ignore_eos": ignore_eos,
        "resume": resume,
    }
    return bench_command(named, request, Outputs(json, markdown, html, svg, force))


@command(without=("idle",))
def verify(
    model: Model = None,
    as_json: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter answers.")] = False,
    prompts: Annotated[int | None, typer.Option(help="Questions to answer.", show_default="8, or 3 if --quick")] = None,
    **options: Any,
) -> int:
    """Audit a pair: is it lossless, here, with these kernels? Exit status 1 if not."""
    from localspec.commands.verify.command import verify_command

    return verify_command(run_options(model, options), prompts=prompts, quick=quick, as_json=as_json)


@command(without=("idle",))
def doctor(
    model: Model = None,
    as_json: Json = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure anew what passes cost, and keep it.")] = False,
    rank: Annotated[
        bool, typer.Option("--rank", help="Try the drafts on this disk for a minute, and rank them.")
    ] = False,
    **options: Any,
) -> int:
    """Examine this machine and a pair: does it fit, does it match, does it pay?"""
    from localspec.commands.doctor.command import doctor_command

    return doctor_command(run_options(model, options), as_json=as_json, calibrate=calibrate, rank=rank)


@command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen at; any but a loopback one needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 finds a free one.")] = 8642,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="What clients must send.",
            envvar="LOCALSPEC_API_KEY",
            show_envvar=False,
            show_default="$LOCALSPEC_API_KEY",
        ),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are told to come back.")] = 32,
    parallel: Annotated[
        str, typer.Option(metavar="auto|N", help="Requests that are answered at a time, in passes that they share.")
    ] = "1",
    prefix_cache: Annotated[
        int, typer.Option(min=0, max=1 << 20, metavar="MB", help="Memory for conversations that are put aside.")
    ] = 512,
    time_limit: Annotated[
        float, typer.Option(min=1, max=1e6, metavar="SECONDS", help="From a request to its answer's end.")
    ] = 3600.0,
    alias: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Another name of the model.")] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Let the web pages of this origin in; repeatable.")
    ] = None,
    allow_corpus: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH|chats", help="Let requests have guesses copied from this text; repeatable."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another name of this computer; repeatable.")
    ] = None,
    **options: Any,
) -> int:
    """Serve OpenAI's, Anthropic's and Ollama's APIs, and a chat page, to the programs on this computer."""
    from localspec.commands.serve.command import serve_command
    from localspec.commands.serve.settings import ServerSettings

    settings = ServerSettings(
        host=host,
        port=port,
        api_key=api_key,
        queue=queue,
        parallel=parallel,
        prefix_cache=prefix_cache,
        time_limit=time_limit,
        aliases=alias or (),
        origins=allow_origin or (),
        hosts=allow_host or (),
        corpora=allow_corpus or (),
    )
    return serve_command(run_options(model, options), settings)


@command()
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
) -> int:
    """Make a web page of a recording: the answer, and every guess as it was made and checked."""
    from localspec.commands.replay.command import replay_command

    return replay_command(file, html, force=force)


@command()
def distill(
    model: Model = None,
    minutes: Annotated[
        float | None, typer.Option(help="Work in all, testing and measuring included.", show_default="60")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that was begun.")] = False,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Questions to answer besides, as for bench --prompts.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="A file or folder of text to learn from; repeatable.")
    ] = None,
    chats: Annotated[bool, typer.Option("--chats", help="Learn from the chats saved in LOCALSPEC_HOME.")] = False,
    kind: Annotated[str, typer.Option(metavar="chained|parallel|medusa|eagle3", help="What kind of head.")] = "chained",
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="A page with the learning curve.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Begin anew where a run was begun.")] = False,
    backend: Backend = "auto",
    threads: Threads = None,
    verbose: Verbose = False,
) -> int:
    """Train a head for a model here, which guesses its next tokens quickly. Ctrl-C stops it, --resume goes on."""
    from localspec.commands.distill.command import DistillRequest, distill_command

    request = DistillRequest(
        model, minutes, kind, seed, resume, force, prompts, tuple(text or ()), chats, html, backend, threads, verbose
    )
    return distill_command(request)


@command()
def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...",
            help="Catalogue names, or hf:OWNER/REPO/FILE.gguf. Default: the default pair.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fetch nothing: ask the hub whether it still has them (default: all).")
    ] = False,
) -> int:
    """Fetch models, check their digests, print their paths."""
    from localspec.commands.files import check_command, pull_command

    return check_command(names or ()) if check else pull_command(names or ())


@command()
def list_(as_json: Json = False) -> int:
    """List the models known by name, and which are on this disk."""
    from localspec.commands.files import list_command

    return list_command(as_json)


@command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Models to remove.", show_default=False)],
) -> int:
    """Remove models from this disk."""
    from localspec.commands.files import rm_command

    return rm_command(names)


@command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="FILE", help="A model file, or a name.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Say what is in a model file: sizes, vocabulary, template, memory."""
    from localspec.commands.files import inspect_command

    return inspect_command(model, as_json)
