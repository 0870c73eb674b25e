"""The command line: parsing only. Nothing heavy is imported here; commands import what they need when they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import signature as signature_of
from typing import TYPE_CHECKING, Any, Literal

import typer
from typer import Argument, Option

from localspec._version import __version__
from localspec.commands import config
from localspec.errors import MAX_COUNT, MAX_THREADS, ModelFileError, did_you_mean
from localspec.heads import PUBLISHED

if TYPE_CHECKING:
    from localspec.commands.options import RunOptions


# Options that several commands share.


_HERE = "on this disk"


def models(incomplete: str) -> list[tuple[str, str]]:
    """Names of the catalogue that begin so, with their notes; those on this disk first."""
    from localspec.model_files.catalog import Catalog

    found = [entry for entry in Catalog.load().values() if entry.name.startswith(incomplete)]
    found.sort(key=lambda entry: not entry.present)
    return [(entry.name, "; ".join(filter(None, [_HERE * entry.present, entry.note]))) for entry in found]


def models_here(incomplete: str) -> list[tuple[str, str]]:
    """Names of the catalogue that begin so, of models on this disk."""
    return [(name, note) for name, note in models(incomplete) if note.startswith(_HERE)]


def _drafts(incomplete: str) -> list[tuple[str, str]]:
    """Words and names for ``--draft`` that begin so."""
    from localspec.engine.options import draft_words

    return [(word, "") for word in draft_words() if word.startswith(incomplete)] + models(incomplete)


MODEL = Argument(
    None,
    autocompletion=models,
    metavar="MODEL",
    help="Catalogue name, path of a .gguf file, or hf:OWNER/REPO/FILE.gguf. Default: the catalogue's default pair.",
)
DRAFT = Option(
    None,
    autocompletion=_drafts,
    metavar="auto|none|ngram|head|corpus:PATH|MODEL",
    help="Drafters to use, in addition to n-grams; repeatable. "
    f"MODEL may be {PUBLISHED}. "
    "Also head:FILE, mtp (the model's own multi-token-prediction layer), early-exit[:LAYERS], pard:FILE[:TOKEN] (a "
    "draft model that fills in mask tokens).",
    show_default="auto",
)
CTX = Option("auto", "--ctx", metavar="auto|N", help="Context size in tokens, including the answer; auto: what fits.")
API_KEY = Option(None, metavar="KEY", help="API key that clients must send.", envvar="LOCALSPEC_API_KEY")
BACKEND = Option("auto", metavar="auto|llama-cpp|ik-llama|mlx|reference", help="Inference engine.")
THREADS = Option(None, "--threads", min=1, max=MAX_THREADS, help="CPU threads.", show_default="the physical cores")


# Repeated here: what reads them imports much.
Think = Literal["auto", "on", "off", "low", "medium", "high"]
View = Literal["tokens", "reading", "rounds", "plain"]
Format = Literal["text", "json", "events"]
THINK = Option("auto", help="Whether the model thinks before answering, if its chat template supports the choice.")
THINK_BUDGET = Option(None, min=0, max=MAX_COUNT, metavar="N", help="Maximum thinking tokens.")
PROMPT_CACHE = Option(
    "2GB",
    metavar="SIZE",
    help="Disk space in LOCALSPEC_HOME for what the models hold of prompts from 512 tokens on, so that these are not "
    "read again after a restart; 0 disables.",
)
VERBOSE = Option(False, "--verbose", help="Show engine logs.")
JSON = Option(False, "--json", help="Print JSON.")


def _shared(
    draft: list[str] | None = DRAFT,
    draft_only: bool = Option(False, "--draft-only", help="Use only the drafters named by --draft."),
    draft_length: str = Option("auto", metavar="auto|N", help="Tokens to draft per round."),
    backend: str = BACKEND,
    draft_backend: str | None = Option(
        None, metavar="auto|llama-cpp|…", help="Inference engine for draft models.", show_default="--backend"
    ),
    temperature: float | None = Option(
        None, help="Sampling temperature; 0 is greedy.", show_default="the model's; bench: 0; verify: 1"
    ),
    top_k: int | None = Option(None, min=0, help="Sample from the N most likely tokens; 0 disables."),
    top_p: float | None = Option(None, help="Sample from the most likely tokens up to this total probability."),
    min_p: float | None = Option(None, help="Minimum probability, relative to the most likely token."),
    repeat_penalty: float | None = Option(
        None, help="Penalty for repeating recent tokens; values above 1 discourage it."
    ),
    seed: int | None = Option(None, help="Random seed; the same seed reproduces the same text."),
    max_tokens: int | None = Option(
        None, min=1, help="Maximum answer tokens.", show_default="what fits the context; verify: 32, --quick: 16"
    ),
    stop: list[str] | None = Option(None, metavar="TEXT", help="Stop before this text; repeatable."),
    n_ctx: str = CTX,
    n_threads: int | None = THREADS,
    n_gpu_layers: str = Option(
        "auto", "--gpu-layers", metavar="auto|N", help="Layers to place on the GPU; auto: all that fit."
    ),
    split_mode: str | None = Option(
        None, metavar="none|layer|row", help="How to split the target model across devices.", show_default="layer"
    ),
    tensor_split: str | None = Option(
        None, metavar="N,N…", help="Fraction of the model for each device, e.g. 3,1.", show_default="by free memory"
    ),
    main_gpu: int | None = Option(None, min=0, metavar="N", help="GPU to use with --split-mode none."),
    device: list[str] | None = Option(
        None, metavar="NAME,NAME…|none", help="Devices for the target model, as listed by doctor; none: CPU only."
    ),
    override_tensor: list[str] | None = Option(
        None, metavar="PATTERN=BUFFER", help="Place matching tensors in BUFFER; repeatable."
    ),
    cpu_moe: bool = Option(False, "--cpu-moe", help="Keep all MoE experts of the target model on the CPU."),
    n_cpu_moe: int | None = Option(
        None, min=0, max=MAX_COUNT, metavar="N", help="Keep the MoE experts of the first N layers on the CPU."
    ),
    rpc: list[str] | None = Option(
        None, metavar="HOST:PORT", help="llama.cpp RPC server, on loopback or through a tunnel; repeatable."
    ),
    allow_insecure_rpc: bool = Option(
        False, "--allow-insecure-rpc", help="Allow non-loopback addresses; traffic can be read and altered."
    ),
    kv_cache_type: str = Option("f16", "--kv-cache", metavar="f16|f32|q8_0|q4_0", help="Data type of the KV cache."),
    light_draft: bool = Option(
        True, help="On a CPU, draft with a requantized copy of the draft model where that is faster."
    ),
    idle: bool = Option(True, help="Do background work while idle, but never on battery."),
    system: str | None = Option(None, metavar="TEXT", help="System prompt."),
    yes: bool = Option(False, "--yes", "-y", help="Fetch models that are not here without asking."),
    verbose: bool = VERBOSE,
) -> None:
    """In the order of ``--help``."""


def run_options(model: str | None, given: dict[str, Any], **sampling: Any) -> RunOptions:
    from localspec.commands.options import RunOptions

    return RunOptions.read(model, given, sampling)


COMMON = {"model", "think", "think_budget", "threads", "view", *signature_of(_shared).parameters}
"""Parameters that mean the same in every command that has them."""


_NEEDED: dict[str, dict[str, Any]] = {
    "main_gpu": {"split_mode": "none"},
    "rpc": {"allow_insecure_rpc": True},
    "allow_insecure_rpc": {"rpc": ["localhost:50052"]},
}
"""What an option makes no sense without; settings are checked one by one, and together where a command has them."""


def _check(name: str, value: Any) -> None:
    """See that the value of a parameter makes sense; ``UsageError``: it does not."""
    if name == "backend" and not isinstance(value, str):  # bench compares several
        from localspec.measuring.subject import split_names

        for each in split_names(value):
            run_options(None, {name: each})
    elif name in signature_of(_shared).parameters or name == "prompt_cache":
        run_options(None, _NEEDED.get(name, {}) | {name: value})
    elif name not in COMMON and name != "names" and name in signature_of(serve).parameters:
        from localspec.commands.serve import check_setting

        check_setting(name, value)


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
    version: bool = Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    _help_without_command(ctx)


def _help_without_command(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def command_group(name: str, help_text: str) -> typer.Typer:
    """A command that has commands of its own."""
    return typer.Typer(name=name, help=help_text, invoke_without_command=True, callback=_help_without_command)


def command(
    without: Collection[str] = (), group: typer.Typer = app, runs: str = ""
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Make a function a command; with ``runs``, ``MODULE:FUNCTION`` of this folder, that one is run with the same
    arguments in its place. ``**options`` stands for the shared options, but those that are in ``without`` or that the
    function declares itself. What the command line leaves out is ``config.toml``'s.

    Parsing only binds arguments. The command runs outside of Typer, which treats Ctrl-C, closed pipes and errors in its
    own way.
    """

    def register(function: Callable[..., int | None]) -> Callable[..., int | None]:
        def bind(ctx: typer.Context, **given: Any) -> Run:
            def run() -> int:
                used = config.settle(ctx, given, COMMON, _check)
                if loads:
                    given["from_file"] = used
                elif "model" in used and given["model"] is None:
                    given["model"] = used["model"]
                module, _, name = runs.partition(":")
                made = getattr(import_module(f"localspec.commands.{module}"), name) if runs else function
                return made(**given) or 0

            return run

        signature = signature_of(function, eval_str=True)
        own = dict(signature.parameters)
        loads = own.pop("options", None) is not None
        if loads:
            shared = signature_of(_shared, eval_str=True).parameters
            own |= {name: own.pop(name, parameter) for name, parameter in shared.items() if name not in without}
        context = signature_of(bind, eval_str=True).parameters["ctx"]
        bind.__signature__ = signature.replace(parameters=[context, *own.values()])  # type: ignore[attr-defined]
        name = function.__name__.removeprefix(f"{group.info.name}_").rstrip("_")
        group.command(name, help=function.__doc__)(bind)
        return function

    return register


__all__ = ["app", "parse"]


def parse(argv: Sequence[str]) -> Run | str:
    """Read a command line: the command, ready to run, or what is wrong with the line. ``SystemExit``: all that was
    asked for (``--help``, ``--version``) has been printed."""
    command = typer.main.get_command(app)
    try:
        result = command.main(list(argv), prog_name="localspec", standalone_mode=False)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # which Typer ends with status 1
            raise error.__context__ from None
        raise
    except Exception as error:
        # Typer brings its own copy of click in some releases and uses the real one in others.
        if not hasattr(error, "format_message"):
            raise
        line, ctx = config.in_a_line(_message_of(error)), getattr(error, "ctx", None)
        return f"{line} (see {ctx.command_path if ctx is not None else 'localspec'} --help)"
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


@command()
def chat(
    model: str | None = MODEL,
    project: str | None = Option(
        None,
        metavar="PATH|none",
        help="Also draft from the text files of this folder; remembered for chats started here.",
        show_default="as remembered",
    ),
    think: Think = THINK,
    think_budget: int | None = THINK_BUDGET,
    view: View | None = Option(None, help="How answers are shown.", show_default="tokens"),
    resume: bool = Option(False, "--continue", help="Continue the last conversation, with its model."),
    keep: bool = Option(
        True, "--keep/--no-keep", help="Save the conversation in LOCALSPEC_HOME; the last 50 are kept."
    ),
    prompt_cache: str = PROMPT_CACHE,
    **options: Any,
) -> int:
    """Chat with a model in the terminal. If standard input is not a terminal, each line is one turn."""
    from localspec.commands.chat.command import chat_command

    given = options | {"think": think, "think_budget": think_budget, "prompt_cache": prompt_cache}
    return chat_command(run_options(model, given), project, view=view, resume=resume, keep=keep)


@command()
def generate(
    model: str | None = MODEL,
    text: str | None = Argument(None, metavar="PROMPT", help="Prompt to answer; without MODEL it needs several words."),
    prompt: str | None = Option(
        None, "--prompt", "-p", metavar="TEXT", help="Prompt, if not an argument.", show_default="standard input"
    ),
    raw: bool = Option(False, "--raw", help="Continue the prompt verbatim, without the chat template."),
    format: Format = Option("text", help="Output format."),
    json_schema: str | None = Option(None, metavar="FILE", help="Constrain the answer to this JSON schema."),
    grammar: str | None = Option(None, metavar="FILE", help="Constrain the answer to this GBNF grammar."),
    think: Think = THINK,
    think_budget: int | None = THINK_BUDGET,
    **options: Any,
) -> int:
    """Answer one prompt."""
    from localspec.commands.generate import generate_command, model_and_prompt
    from localspec.commands.options import answer_form

    form = answer_form(json_schema, grammar)
    model, prompt = model_and_prompt(model, text, prompt)
    run = run_options(model, options | {"think": think, "think_budget": think_budget}, **form)
    return generate_command(run, prompt, raw=raw, format=format)


@command(without=("draft_length", "idle"))
def bench(
    words: list[str] | None = Argument(
        None,
        metavar="[MODEL] | show FILE | compare A B",
        help="Model to measure; or one bench --json file to show, or two to compare.",
    ),
    quick: bool = Option(False, "--quick", help="Two-minute run with short answers."),
    full: bool = Option(False, "--full", help="Long answers, also fixed draft lengths, no time limit."),
    arm: list[str] | None = Option(
        None,
        metavar="auto|N|ngram:N|head+model:N",
        help="Configurations to compare with plain decoding; repeatable or comma-separated.",
        show_default="auto",
    ),
    prompts: str | None = Option(
        None, metavar="FILE", help="Questions in Spec-Bench or SPEED-Bench JSON Lines format."
    ),
    which: str | None = Option(None, "--set", metavar="report|tuning", help="Built-in question set to use."),
    category: list[str] | None = Option(None, metavar="NAME", help="Use only questions of this category; repeatable."),
    minutes: float | None = Option(None, help="Time budget in minutes.", show_default="15, or 2 if --quick"),
    repeats: int | None = Option(None, help="Times to ask each question.", show_default="at most 3, or 5 if --full"),
    slice_tokens: int | None = Option(
        None,
        "--slice",
        metavar="TOKENS",
        help="Tokens to decode before switching configurations; 0: whole answers.",
        show_default="4",
    ),
    ignore_eos: bool = Option(False, "--ignore-eos", help="Ignore end-of-text tokens and continue to --max-tokens."),
    json: str | None = Option(None, metavar="FILE|-", help="Write all measurements as JSON."),
    markdown: str | None = Option(None, metavar="FILE|-", help="Write a Markdown report."),
    html: str | None = Option(None, metavar="FILE", help="Write an HTML report with plots."),
    svg: str | None = Option(None, metavar="FILE", help="Write the speed-up plot as SVG."),
    resume: str | None = Option(None, metavar="FILE", help="Resume the run saved in a --json file."),
    force: bool = Option(False, "--force", help="Overwrite existing files."),
    backend: list[str] | None = Option(
        None,
        metavar="auto|llama-cpp|ik-llama|mlx|reference",
        help="Inference engines to compare; repeatable or comma-separated.",
        show_default="auto",
    ),
    max_tokens: int | None = Option(None, help="Maximum answer tokens.", show_default="128; --quick: 64, --full: 256"),
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
    model: str | None = MODEL,
    as_json: bool = JSON,
    quick: bool = Option(False, "--quick", help="Ask fewer questions, with shorter answers."),
    prompts: int | None = Option(None, help="Number of questions.", show_default="8, or 2 if --quick"),
    **options: Any,
) -> int:
    """Check that decoding with these drafters is lossless on this machine. Exit status 1 if not."""
    from localspec.commands.verify.command import verify_command

    return verify_command(run_options(model, options), prompts=prompts, quick=quick, as_json=as_json)


@command(without=("idle",))
def doctor(
    model: str | None = MODEL,
    as_json: bool = JSON,
    calibrate: bool = Option(False, "--calibrate", help="Measure forward-pass costs again and save them."),
    rank: bool = Option(False, "--rank", help="Try the drafts on this disk for a minute and rank them by speed."),
    details: bool = Option(False, "--details", help="Show everything that was looked at and measured."),
    **options: Any,
) -> int:
    """Does a model fit this machine, does guessing ahead pay here, and with what."""
    from localspec.commands.doctor.command import doctor_command

    known = run_options(model, options)
    return doctor_command(known, as_json=as_json, calibrate=calibrate, rank=rank, details=details)


@command()
def serve(
    names: list[str] | None = Argument(
        None,
        autocompletion=models,
        metavar="MODEL...",
        help="Model to load and serve; or several, loaded when asked for. Default: all on this disk.",
    ),
    host: str = Option("127.0.0.1", help="Address to listen on; a non-loopback address requires --api-key."),
    port: int = Option(8642, min=0, max=65535, help="Port to listen on; 0 picks a free one."),
    api_key: str | None = API_KEY,
    queue: int = Option(32, min=0, help="Maximum waiting requests; further ones get HTTP 429."),
    parallel: str = Option(
        "auto", metavar="auto|N", help="Requests answered concurrently; auto: as many as gain throughput."
    ),
    prefix_cache: int = Option(512, min=0, max=1 << 20, metavar="MB", help="Memory for cached conversation prefixes."),
    prompt_cache: str = PROMPT_CACHE,
    memory: str | None = Option(
        None, metavar="SIZE", help="Memory for several models.", show_default="80% of what is free"
    ),
    keep_alive: str | None = Option(
        None, metavar="TIME", help="Keep an idle one of several models loaded; -1: always.", show_default="5m"
    ),
    time_limit: float = Option(
        3600.0, min=1, max=1e6, metavar="SECONDS", help="Time limit per request, including its answer."
    ),
    aliases: list[str] | None = Option(
        None, "--alias", metavar="NAME", help="Additional model name to accept; repeatable."
    ),
    origins: list[str] | None = Option(
        None, "--allow-origin", metavar="URL", help="Allow requests from web pages of this origin (CORS); repeatable."
    ),
    corpora: list[str] | None = Option(
        None,
        "--allow-corpus",
        metavar="PATH|chats",
        help="Allow requests from this computer to draft from this text; repeatable.",
    ),
    hosts: list[str] | None = Option(
        None, "--allow-host", metavar="NAME", help="Additional Host header to accept; repeatable."
    ),
    **options: Any,
) -> int:
    """Serve OpenAI, Anthropic and Ollama compatible APIs, and a web chat."""
    from localspec.commands.serve import serve_command
    from localspec.server.http import ServerSettings

    settings = ServerSettings(
        host, port, api_key, queue, parallel, prefix_cache, time_limit, aliases=aliases or (), origins=origins or (),
        hosts=hosts or (), corpora=corpora or (),
    )  # fmt: skip
    run = run_options(None, options | {"prompt_cache": prompt_cache})
    names = names or ([run.model] if run.model is not None else [])
    return serve_command(run, settings, names, memory=memory, keep_alive=keep_alive)


def _agents(incomplete: str) -> list[tuple[str, str]]:
    from localspec.commands.launch import AGENTS

    return [(name, agent.install) for name, agent in AGENTS.items() if name.startswith(incomplete)]


@command()
def launch(
    program: str = Argument(
        ...,
        autocompletion=_agents,
        metavar="PROGRAM",
        help="Coding agent: claude, codex, opencode, aider, goose, qwen.",
    ),
    arguments: list[str] | None = Argument(None, metavar="-- ARGS...", help="Arguments for the program."),
    model: str | None = Option(
        None,
        "--model",
        "-m",
        autocompletion=models,
        metavar="MODEL",
        help="Model to use.",
        show_default="what the server has loaded, or the default pair",
    ),
    n_ctx: str = CTX,
    draft: list[str] | None = DRAFT,
    port: int = Option(8642, min=0, max=65535, help="Port of the server; 0 starts one on a free port."),
    api_key: str | None = API_KEY,
    only_print: bool = Option(False, "--print", help="Print the environment and the command; start nothing."),
) -> int:
    """Start a coding agent with the settings for this server, which is started if it is not running and stopped with
    it. Arguments for the agent follow --."""
    from localspec.commands.launch import ServerChoice, launch_command

    options = [
        *(("--ctx", n_ctx) if n_ctx != "auto" else ()),
        *(word for name in draft or () for word in ("--draft", name)),
    ]
    return launch_command(program, arguments or (), ServerChoice(port, api_key, model, options), only_print=only_print)


@command(runs="replay.command:replay_command")
def replay(
    file: str = Argument(
        ..., metavar="FILE", help="Output of generate --format events, or a chat saved by /save; - is standard input."
    ),
    html: str | None = Option(
        None, metavar="OUT", help="Page to write; - is standard output.", show_default="FILE with suffix .html"
    ),
    force: bool = Option(False, "--force", help="Overwrite OUT if it exists."),
) -> None:
    """Make a web page from a recording: the answer, with every drafted token and its verification."""


@command()
def distill(
    model: str | None = MODEL,
    minutes: float | None = Option(None, help="Total time budget in minutes.", show_default="60"),
    resume: bool = Option(False, "--resume", help="Resume the interrupted run."),
    prompts: list[str] | None = Option(
        None, metavar="FILE", help="Additional questions, in the format of bench --prompts; repeatable."
    ),
    text: list[str] | None = Option(None, metavar="PATH", help="File or folder of text to train on; repeatable."),
    chats: bool = Option(False, "--chats", help="Train on the chats saved in LOCALSPEC_HOME."),
    seed: int | None = Option(None, help="Random seed.", show_default="0, or the seed of the starting head plus one"),
    begin_with: str | None = Option(
        None,
        metavar="FILE|none",
        help="Head to start from; none starts with a linear one.",
        show_default="the head that --draft head would use",
    ),
    html: str | None = Option(None, metavar="FILE", help="Write a page with the learning curve."),
    force: bool = Option(False, "--force", help="Start over, discarding an existing run."),
    backend: str = BACKEND,
    threads: int | None = THREADS,
    verbose: bool = VERBOSE,
) -> int:
    """Train a draft head for a model on this machine. Ctrl-C stops it; --resume continues."""
    from localspec.commands.distill import distill_command

    return distill_command(
        model, html, verbose=verbose, minutes=minutes, seed=seed, begin_with=begin_with, resume=resume,
        force=force, prompts=prompts or (), texts=text or (), chats=chats, backend=backend, n_threads=threads,
    )  # fmt: skip


@command()
def pull(
    names: list[str] | None = Argument(
        None,
        autocompletion=models,
        metavar="NAME...",
        help="Catalogue names, parts of them, or hf:OWNER/REPO/FILE.gguf. Default: the default pair.",
    ),
    check: bool = Option(
        False, "--check", help="Check that models (default: all) still exist on the hub; download nothing."
    ),
) -> int:
    """Download models, verify their digests, and print their paths."""
    from localspec.commands.files import check_command, pull_command

    return check_command(names or ()) if check else pull_command(names or ())


@command(runs="files:list_command")
def list_(
    as_json: bool = JSON,
    everything: bool = Option(False, "--all", help="List the whole catalogue, with what can be fetched."),
) -> None:
    """List the models on this disk, each with its heads."""


@command(runs="recommend:recommend_command")
def recommend(
    as_json: bool = JSON,
    everything: bool = Option(False, "--all", help="Also list models that are too large or too slow here."),
) -> None:
    """List models that would answer well on this machine, with size, time to fetch and expected speed."""


@command(runs="files:rm_command")
def rm(
    names: list[str] = Argument(..., autocompletion=models_here, metavar="NAME...", help="Models to remove."),
) -> None:
    """Remove models from this disk."""


@command(runs="files:cache_command")
def cache(clear: bool = Option(False, "--clear", help="Delete them."), as_json: bool = JSON) -> None:
    """List the prompts on this disk that chat and serve need not read again."""


@command(runs="files:inspect_command")
def inspect(
    model: str = Argument(..., autocompletion=models_here, metavar="FILE", help="Path or name of a model file."),
    as_json: bool = JSON,
) -> None:
    """Show what is in a model file: sizes, vocabulary, chat template, memory use."""


# ``localspec engine``

engine_app = command_group("engine", "ik-llama compiled for this CPU, with kernels that its wheel has not.")


@command(group=engine_app, runs="engine:build_command")
def engine_build(
    idle: bool = Option(False, "--idle", help="Give way to other programs, and pause while they use the CPUs."),
    jobs: int | None = Option(
        None, "--jobs", "-j", min=1, max=MAX_THREADS, metavar="N", help="Compilers at a time.", show_default="all cores"
    ),
    force: bool = Option(False, "--force", help="Compile even where nothing is expected of it, or again."),
) -> None:
    """Compile it and use it. It is compared with the wheel first; Ctrl-C stops, and the same command continues."""


@command(group=engine_app, runs="engine:list_command")
def engine_list(as_json: bool = JSON) -> None:
    """Show which one is used, what it uses of this CPU, and what its passes cost."""


@command(group=engine_app, runs="engine:remove_command")
def engine_remove() -> None:
    """Delete it and use the wheel again."""


app.add_typer(engine_app)


# ``localspec config``

config_app = command_group("config", "Values of options in config.toml, for when the command line leaves them out.")


def _keys(incomplete: str) -> list[tuple[str, str]]:
    known = _settings()
    return [
        (key, known[key].parameter.help or "")
        for key in known
        if key.startswith(incomplete) and ("." in incomplete or not config.key_of_all(key, known))
    ]


def _values(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    name = str(ctx.params.get("key") or "").rpartition(".")[2]
    return {"model": models, "draft": _drafts}.get(name, lambda _: [])(incomplete)


def _settings() -> dict[str, config.Setting]:
    return config.settings(typer.main.get_command(app), COMMON)


KEY = Argument(
    ...,
    autocompletion=_keys,
    metavar="KEY",
    help="An option without its dashes (ctx), or one of a single command (serve.port).",
)


@command(group=config_app)
def config_set(
    key: str = KEY,
    values: list[str] = Argument(
        ..., autocompletion=_values, metavar="VALUE...", help="Value; several for an option that is repeatable."
    ),
) -> int:
    """Set a value, for all commands or (COMMAND.KEY) for one."""

    from localspec.model_files.catalog import Catalog

    def check(name: str, value: Any) -> None:
        if name in ("model", "names", "words"):
            with suppress(ModelFileError):  # not on this disk yet
                Catalog.load().resolve(value[0] if isinstance(value, list) else value)
        _check(name, value)

    return config.set_command(_settings(), key, values, check)


@command(group=config_app)
def config_get(key: str = KEY) -> int:
    """Print a value. Exit status 1 if none is set."""
    return config.get_command(_settings(), key)


@command(group=config_app)
def config_unset(key: str = KEY) -> int:
    """Remove a value."""
    return config.unset_command(_settings(), key)


@command(group=config_app)
def config_list(
    everything: bool = Option(False, "--all", help="List all keys that can be set, with their meaning."),
) -> int:
    """List the values that are set. Exit status 1 if one of them cannot be used."""
    return config.list_command(_settings(), _check, everything=everything)


@command(group=config_app)
def config_path() -> int:
    """Print the path of the file, which may not exist yet."""
    print(config.settings_file())
    return 0


app.add_typer(config_app)
