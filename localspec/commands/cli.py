"""The command line: parsing only. Nothing heavy is imported here; commands import what they need when they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from inspect import Signature
from inspect import signature as signature_of
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from localspec._version import __version__
from localspec.errors import MAX_COUNT, MAX_THREADS, did_you_mean
from localspec.heads import PUBLISHED, TRAINED_KINDS

if TYPE_CHECKING:
    from localspec.commands.options import RunOptions, ThinkOptions


# Options that several commands share.


def models(incomplete: str) -> list[tuple[str, str]]:
    """Names of the catalogue that begin so, with their notes."""
    from localspec.model_files.catalog import Catalog

    catalog = Catalog.load()
    return [(name, catalog[name].note) for name in catalog if name.startswith(incomplete)]


def _drafts(incomplete: str) -> list[tuple[str, str]]:
    """Words and names for ``--draft`` that begin so."""
    from localspec.engine.options import draft_words

    return [(word, "") for word in draft_words() if word.startswith(incomplete)] + models(incomplete)


Model = Annotated[
    str | None,
    Argument(
        autocompletion=models,
        metavar="MODEL",
        help="Catalogue name, path of a .gguf file, or hf:OWNER/REPO/FILE.gguf. Default: the catalogue's default pair.",
        show_default=False,
    ),
]
Backend = Annotated[str, Option(metavar="auto|llama-cpp|ik-llama|mlx|reference", help="Inference engine.")]
Threads = Annotated[
    int | None, Option("--threads", min=1, max=MAX_THREADS, help="CPU threads.", show_default="the physical cores")
]


def _known_think(value: str) -> str:
    words = ("auto", "on", "off", "low", "medium", "high")  # thinking.THINK, whose imports take their time
    if value not in words:
        raise typer.BadParameter(f"must be one of {', '.join(words)}, not {value!r}")
    return value


Think = Annotated[
    str,
    Option(
        metavar="auto|on|off|low|medium|high",
        callback=_known_think,
        help="Whether the model thinks before answering, if its chat template supports the choice.",
    ),
]
ThinkBudget = Annotated[int | None, Option(min=0, max=MAX_COUNT, metavar="N", help="Maximum thinking tokens.")]
Verbose = Annotated[bool, Option("--verbose", help="Show engine logs.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


def _shared(
    draft: Annotated[
        list[str] | None,
        Option(
            autocompletion=_drafts,
            metavar="auto|none|ngram|head|corpus:PATH|MODEL",
            help="Drafters to use, in addition to n-grams; repeatable. "
            f"MODEL may be {PUBLISHED}. "
            "Also head:FILE, mtp (the model's own multi-token-prediction layer), early-exit[:LAYERS].",
            show_default="auto",
        ),
    ] = None,
    draft_only: Annotated[bool, Option("--draft-only", help="Use only the drafters named by --draft.")] = False,
    draft_length: Annotated[str, Option(metavar="auto|N", help="Tokens to draft per round.")] = "auto",
    backend: Backend = "auto",
    draft_backend: Annotated[
        str | None,
        Option(metavar="auto|llama-cpp|…", help="Inference engine for draft models.", show_default="--backend"),
    ] = None,
    temperature: Annotated[
        float | None, Option(help="Sampling temperature; 0 is greedy.", show_default="the model's")
    ] = None,
    top_k: Annotated[int | None, Option(min=0, help="Sample from the N most likely tokens; 0 disables.")] = None,
    top_p: Annotated[
        float | None, Option(help="Sample from the most likely tokens up to this total probability.")
    ] = None,
    min_p: Annotated[float | None, Option(help="Minimum probability, relative to the most likely token.")] = None,
    repeat_penalty: Annotated[
        float | None, Option(help="Penalty for repeating recent tokens; values above 1 discourage it.")
    ] = None,
    seed: Annotated[int | None, Option(help="Random seed; the same seed reproduces the same text.")] = None,
    max_tokens: Annotated[
        int | None, Option(min=1, help="Maximum answer tokens.", show_default="what fits the context")
    ] = None,
    stop: Annotated[list[str] | None, Option(metavar="TEXT", help="Stop before this text; repeatable.")] = None,
    n_ctx: Annotated[
        int | None, Option("--ctx", min=1, max=MAX_COUNT, help="Context size in tokens, including the answer.")
    ] = None,
    n_threads: Threads = None,
    n_gpu_layers: Annotated[
        int | None,
        Option(
            "--gpu-layers", min=0, max=MAX_COUNT, help="Layers to place on the GPU.", show_default="all, if supported"
        ),
    ] = None,
    split_mode: Annotated[
        str | None,
        Option(metavar="none|layer|row", help="How to split the target model across devices.", show_default="layer"),
    ] = None,
    tensor_split: Annotated[
        str | None,
        Option(metavar="N,N…", help="Fraction of the model for each device, e.g. 3,1.", show_default="by free memory"),
    ] = None,
    main_gpu: Annotated[int | None, Option(min=0, metavar="N", help="GPU to use with --split-mode none.")] = None,
    device: Annotated[
        list[str] | None,
        Option(metavar="NAME,NAME…|none", help="Devices for the target model, as listed by doctor; none: CPU only."),
    ] = None,
    override_tensor: Annotated[
        list[str] | None, Option(metavar="PATTERN=BUFFER", help="Place matching tensors in BUFFER; repeatable.")
    ] = None,
    cpu_moe: Annotated[bool, Option("--cpu-moe", help="Keep all MoE experts of the target model on the CPU.")] = False,
    n_cpu_moe: Annotated[
        int | None,
        Option(min=0, max=MAX_COUNT, metavar="N", help="Keep the MoE experts of the first N layers on the CPU."),
    ] = None,
    rpc: Annotated[
        list[str] | None,
        Option(metavar="HOST:PORT", help="llama.cpp RPC server, on loopback or through a tunnel; repeatable."),
    ] = None,
    allow_insecure_rpc: Annotated[
        bool, Option("--allow-insecure-rpc", help="Allow non-loopback addresses; traffic can be read and altered.")
    ] = False,
    kv_cache_type: Annotated[
        str, Option("--kv-cache", metavar="f16|f32|q8_0|q4_0", help="Data type of the KV cache.")
    ] = "f16",
    light_draft: Annotated[
        bool, Option(help="On a CPU, draft with a requantized copy of the draft model where that is faster.")
    ] = True,
    idle: Annotated[bool, Option(help="Do background work while idle, but never on battery.")] = True,
    system: Annotated[str | None, Option(metavar="TEXT", help="System prompt.")] = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Fetch models that are not here without asking.")] = False,
    verbose: Verbose = False,
) -> None:
    """In the order of ``--help``."""


def with_shared_options(function: Callable[..., int], without: Collection[str] = ()) -> Signature:
    """Signature of a command with the shared options, but those in ``without``, in place of ``**options``.

    An option that the command declares itself takes the shared one's place.
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
    from dataclasses import fields

    from localspec.backends.placement import Placement
    from localspec.commands.options import RunOptions, placement
    from localspec.engine.options import LoadOptions
    from localspec.sampling.sampling import SamplingParams

    rest = {"idle": False} | given

    def taken(options: type[Any]) -> dict[str, Any]:
        return {field.name: rest.pop(field.name) for field in fields(options) if field.name in rest}

    load = LoadOptions(placement=placement(taken(Placement)), **taken(LoadOptions))
    sampling |= {name: value for name, value in taken(SamplingParams).items() if value not in (None, [])}
    if "stop" in sampling:
        sampling["stop"] = tuple(sampling["stop"])
    return RunOptions(model=model, draft=rest.pop("draft") or (), load=load, sampling=sampling, **rest)


# The application.

Run = Callable[[], int]

app = typer.Typer(
    name="localspec",
    help="Faster local LLM answers by lossless speculative decoding.",
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"localspec {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def command(without: Collection[str] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a function a command; see ``with_shared_options``.

    Parsing only binds arguments. The command runs outside of Typer, which treats Ctrl-C, closed pipes and errors in its
    own way.
    """

    def register(function: Callable[..., int]) -> Callable[..., int]:
        def bind(**given: Any) -> Run:
            return partial(function, **given)

        bind.__signature__ = with_shared_options(function, without)  # type: ignore[attr-defined]
        app.command(function.__name__.rstrip("_"), help=function.__doc__)(bind)
        return function

    return register


__all__ = ["app", "parse"]


def parse(argv: Sequence[str]) -> Run | str:
    """Read a command line: the command, ready to run, or what is wrong with the line.

    Raises:
        SystemExit: all that was asked for (``--help``, ``--version``) has been printed.
    """
    command = typer.main.get_command(app)
    try:
        result = command.main(list(argv), prog_name="localspec", standalone_mode=False)
    except Exception as error:
        # Typer brings its own copy of click in some releases and uses the real one in others.
        if not hasattr(error, "format_message"):
            raise
        return _with_help(_message_of(error), getattr(error, "ctx", None))
    if callable(result):
        return result  # type: ignore[no-any-return]
    if result == 130:  # how Typer reports a Ctrl-C
        raise KeyboardInterrupt
    raise SystemExit(result or 0)


def _message_of(error: Any) -> str:
    """What is wrong with the line, with the known option nearest to an unknown one."""
    name, ctx = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if name is None or ctx is None or not hasattr(error, "possibilities"):
        return str(error.format_message())
    known = [option for parameter in ctx.command.params for option in (*parameter.opts, *parameter.secondary_opts)]
    return f"no such option: {name}{did_you_mean(name, (each for each in known if each.startswith('-')))}"


def _with_help(message: str, ctx: Any) -> str:
    line = " ".join(message.split()).rstrip(".")
    path = ctx.command_path if ctx is not None else "localspec"
    return f"{line} (see {path} --help)"


@command()
def chat(
    model: Model = None,
    project: Annotated[
        str | None,
        Option(
            metavar="PATH|none",
            help="Also draft from the text files of this folder; remembered for chats started here.",
            show_default="as remembered",
        ),
    ] = None,
    think: Think = "auto",
    think_budget: ThinkBudget = None,
    resume: Annotated[bool, Option("--continue", help="Continue the last conversation, with its model.")] = False,
    keep: Annotated[
        bool, Option("--keep/--no-keep", help="Save the conversation in LOCALSPEC_HOME; the last 50 are kept.")
    ] = True,
    **options: Any,
) -> int:
    """Chat with a model in the terminal. If standard input is not a terminal, each line is one turn."""
    from localspec.commands.chat.command import chat_command

    asked: ThinkOptions = {"think": think, "thinking_budget": think_budget}
    return chat_command(run_options(model, options), project, asked, resume=resume, keep=keep)


@command()
def generate(
    model: Model = None,
    text: Annotated[
        str | None,
        Argument(metavar="PROMPT", help="Prompt to answer; without MODEL it needs several words.", show_default=False),
    ] = None,
    prompt: Annotated[
        str | None,
        Option("--prompt", "-p", metavar="TEXT", help="Prompt, if not an argument.", show_default="standard input"),
    ] = None,
    raw: Annotated[bool, Option("--raw", help="Continue the prompt verbatim, without the chat template.")] = False,
    format: Annotated[str, Option(metavar="text|json|events", help="Output format.")] = "text",
    json_schema: Annotated[
        str | None, Option("--json-schema", metavar="FILE", help="Constrain the answer to this JSON schema.")
    ] = None,
    grammar: Annotated[str | None, Option(metavar="FILE", help="Constrain the answer to this GBNF grammar.")] = None,
    think: Think = "auto",
    think_budget: ThinkBudget = None,
    **options: Any,
) -> int:
    """Answer one prompt."""
    from localspec.commands.generate import generate_command, model_and_prompt
    from localspec.commands.options import answer_form

    form = answer_form(json_schema, grammar)
    model, prompt = model_and_prompt(model, text, prompt)
    asked: ThinkOptions = {"think": think, "thinking_budget": think_budget}
    return generate_command(run_options(model, options, **form), prompt, asked, raw=raw, format=format)


@command(without=("draft_length", "idle"))
def bench(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[MODEL] | show FILE | compare A B",
            help="Model to measure; or one bench --json file to show, or two to compare.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Two-minute run with short answers.")] = False,
    full: Annotated[bool, Option("--full", help="Long answers, also fixed draft lengths, no time limit.")] = False,
    arm: Annotated[
        list[str] | None,
        Option(
            metavar="auto|N|ngram:N|head+model:N",
            help="Configurations to compare with plain decoding; repeatable or comma-separated.",
            show_default="auto",
        ),
    ] = None,
    prompts: Annotated[
        str | None, Option(metavar="FILE", help="Questions in Spec-Bench or SPEED-Bench JSON Lines format.")
    ] = None,
    which: Annotated[str | None, Option("--set", metavar="report|tuning", help="Built-in question set to use.")] = None,
    category: Annotated[
        list[str] | None, Option(metavar="NAME", help="Use only questions of this category; repeatable.")
    ] = None,
    minutes: Annotated[float | None, Option(help="Time budget in minutes.", show_default="15, or 2 if --quick")] = None,
    repeats: Annotated[int | None, Option(help="Times to ask each question.")] = None,
    slice_tokens: Annotated[
        int | None,
        Option(
            "--slice",
            metavar="TOKENS",
            help="Tokens to decode before switching configurations; 0: whole answers.",
            show_default="4",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Ignore end-of-text tokens and continue to --max-tokens.")
    ] = False,
    json: Annotated[str | None, Option(metavar="FILE|-", help="Write all measurements as JSON.")] = None,
    markdown: Annotated[str | None, Option(metavar="FILE|-", help="Write a Markdown report.")] = None,
    html: Annotated[str | None, Option(metavar="FILE", help="Write an HTML report with plots.")] = None,
    svg: Annotated[str | None, Option(metavar="FILE", help="Write the speed-up plot as SVG.")] = None,
    resume: Annotated[str | None, Option(metavar="FILE", help="Resume the run saved in a --json file.")] = None,
    force: Annotated[bool, Option("--force", help="Overwrite existing files.")] = False,
    backend: Annotated[
        list[str] | None,
        Option(
            metavar="auto|llama-cpp|ik-llama|reference",
            help="Inference engines to compare; repeatable or comma-separated.",
            show_default="auto",
        ),
    ] = None,
    max_tokens: Annotated[int | None, Option(help="Maximum answer tokens.", show_default="depends on the mode")] = None,
    **options: Any,
) -> int:
    """Measure the speed-up over plain decoding, interleaved on the same questions. Ctrl-C keeps finished answers."""
    from localspec.commands.bench.command import Outputs, bench_command
    from localspec.commands.bench.runner import BenchRequest

    named = list(words or ())
    request = BenchRequest(
        run_options(named[0] if named else None, options | {"max_tokens": max_tokens}), backend or (), arm or (),
        category or (), prompts, which, quick, full, minutes, repeats, slice_tokens, ignore_eos, resume,
    )  # fmt: skip
    return bench_command(named, request, Outputs(json, markdown, html, svg, force))


@command(without=("idle",))
def verify(
    model: Model = None,
    as_json: Json = False,
    quick: Annotated[bool, Option("--quick", help="Ask fewer questions, with shorter answers.")] = False,
    prompts: Annotated[int | None, Option(help="Number of questions.", show_default="8, or 2 if --quick")] = None,
    **options: Any,
) -> int:
    """Check that decoding with these drafters is lossless on this machine. Exit status 1 if not."""
    from localspec.commands.verify.command import verify_command

    return verify_command(run_options(model, options), prompts=prompts, quick=quick, as_json=as_json)


@command(without=("idle",))
def doctor(
    model: Model = None,
    as_json: Json = False,
    calibrate: Annotated[bool, Option("--calibrate", help="Measure forward-pass costs again and save them.")] = False,
    rank: Annotated[
        bool, Option("--rank", help="Try the drafts on this disk for a minute and rank them by speed.")
    ] = False,
    details: Annotated[bool, Option("--details", help="Show everything that was looked at and measured.")] = False,
    **options: Any,
) -> int:
    """Does a model fit this machine, does guessing ahead pay here, and with what."""
    from localspec.commands.doctor.command import doctor_command

    known = run_options(model, options)
    return doctor_command(known, as_json=as_json, calibrate=calibrate, rank=rank, details=details)


@command()
def serve(
    model: Model = None,
    host: Annotated[str, Option(help="Address to listen on; a non-loopback address requires --api-key.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8642,
    api_key: Annotated[
        str | None,
        Option(
            metavar="KEY",
            help="API key that clients must send.",
            envvar="LOCALSPEC_API_KEY",
            show_envvar=False,
            show_default="$LOCALSPEC_API_KEY",
        ),
    ] = None,
    queue: Annotated[int, Option(min=0, help="Maximum waiting requests; further ones get HTTP 429.")] = 32,
    parallel: Annotated[
        str, Option(metavar="auto|N", help="Requests answered concurrently; auto: as many as gain throughput.")
    ] = "auto",
    prefix_cache: Annotated[
        int, Option(min=0, max=1 << 20, metavar="MB", help="Memory for cached conversation prefixes.")
    ] = 512,
    time_limit: Annotated[
        float, Option(min=1, max=1e6, metavar="SECONDS", help="Time limit per request, including its answer.")
    ] = 3600.0,
    alias: Annotated[
        list[str] | None, Option(metavar="NAME", help="Additional model name to accept; repeatable.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, Option(metavar="URL", help="Allow requests from web pages of this origin (CORS); repeatable.")
    ] = None,
    allow_corpus: Annotated[
        list[str] | None,
        Option(metavar="PATH|chats", help="Allow requests from this computer to draft from this text; repeatable."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, Option(metavar="NAME", help="Additional Host header to accept; repeatable.")
    ] = None,
    **options: Any,
) -> int:
    """Serve OpenAI, Anthropic and Ollama compatible APIs, and a web chat."""
    from localspec.commands.serve import serve_command
    from localspec.server.http import ServerSettings

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
        Argument(
            metavar="FILE",
            help="Output of generate --format events, or a chat saved by /save; - is standard input.",
            show_default=False,
        ),
    ],
    html: Annotated[
        str | None,
        Option(metavar="OUT", help="Page to write; - is standard output.", show_default="FILE with suffix .html"),
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite OUT if it exists.")] = False,
) -> int:
    """Make a web page from a recording: the answer, with every drafted token and its verification."""
    from localspec.commands.replay.command import replay_command

    return replay_command(file, html, force=force)


@command()
def distill(
    model: Model = None,
    minutes: Annotated[float | None, Option(help="Total time budget in minutes.", show_default="60")] = None,
    resume: Annotated[bool, Option("--resume", help="Resume the interrupted run.")] = False,
    prompts: Annotated[
        list[str] | None,
        Option(metavar="FILE", help="Additional questions, in the format of bench --prompts; repeatable."),
    ] = None,
    text: Annotated[
        list[str] | None, Option(metavar="PATH", help="File or folder of text to train on; repeatable.")
    ] = None,
    chats: Annotated[bool, Option("--chats", help="Train on the chats saved in LOCALSPEC_HOME.")] = False,
    kind: Annotated[str, Option(metavar=TRAINED_KINDS, help="Kind of head.")] = "chained",
    seed: Annotated[
        int | None, Option(help="Random seed.", show_default="0, or the seed of the starting head plus one")
    ] = None,
    begin_with: Annotated[
        str | None,
        Option(
            metavar="FILE|none",
            help="Head to start from; none starts with a linear one.",
            show_default="the head that --draft head would use",
        ),
    ] = None,
    html: Annotated[str | None, Option(metavar="FILE", help="Write a page with the learning curve.")] = None,
    force: Annotated[bool, Option("--force", help="Start over, discarding an existing run.")] = False,
    backend: Backend = "auto",
    threads: Threads = None,
    verbose: Verbose = False,
) -> int:
    """Train a draft head for a model on this machine. Ctrl-C stops it; --resume continues."""
    from localspec.commands.distill.command import DistillRequest, distill_command

    asked, texts = tuple(prompts or ()), tuple(text or ())
    request = DistillRequest(
        model, minutes, kind, seed, begin_with, resume, force, asked, texts, chats, html, backend, threads, verbose
    )
    return distill_command(request)


@command()
def pull(
    names: Annotated[
        list[str] | None,
        Argument(
            autocompletion=models,
            metavar="NAME...",
            help="Catalogue names, parts of them, or hf:OWNER/REPO/FILE.gguf. Default: the default pair.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool, Option("--check", help="Check that models (default: all) still exist on the hub; download nothing.")
    ] = False,
) -> int:
    """Download models, verify their digests, and print their paths."""
    from localspec.commands.files import check_command, pull_command

    return check_command(names or ()) if check else pull_command(names or ())


@command()
def list_(
    as_json: Json = False,
    everything: Annotated[bool, Option("--all", help="List the whole catalogue, with what can be fetched.")] = False,
) -> int:
    """List the models on this disk, each with its heads."""
    from localspec.commands.files import list_command

    return list_command(as_json, everything)


@command()
def rm(
    names: Annotated[
        list[str], Argument(autocompletion=models, metavar="NAME...", help="Models to remove.", show_default=False)
    ],
) -> int:
    """Remove models from this disk."""
    from localspec.commands.files import rm_command

    return rm_command(names)


@command()
def inspect(
    model: Annotated[str, Argument(metavar="FILE", help="Path or name of a model file.", show_default=False)],
    as_json: Json = False,
) -> int:
    """Show what is in a model file: sizes, vocabulary, chat template, memory use."""
    from localspec.commands.files import inspect_command

    return inspect_command(model, as_json)
