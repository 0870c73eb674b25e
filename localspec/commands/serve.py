"""``localspec serve``."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from localspec.backends.llama.embedding import EmbeddingModel, pooling_of
from localspec.commands.options import RunOptions, ensure_model, read_size
from localspec.engine.loading import Report
from localspec.engine.options import LoadOptions
from localspec.errors import UsageError
from localspec.heads.assembly import engine_files
from localspec.llm import LLM
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.sources.base import size_text
from localspec.server.app import Runner, listen, url_of
from localspec.server.hosting import Host, LoadPlan, Opening, ServedFile
from localspec.server.http import KEEP_ALIVE_S, KeepAlive, ServerSettings, read_keep_alive
from localspec.spec_decode.drafters.names import AUTOMATIC, is_corpus

INTERRUPTED = 130


def keep_alive_s(text: str) -> KeepAlive:
    """How long an idle model of several stays loaded; ``UsageError``: no duration as Ollama's field has it."""
    try:
        return read_keep_alive(text)
    except ValueError:
        message = "a duration such as 5m, or a number of seconds; -1 is for ever"
        raise UsageError(f"--keep-alive must be {message}, not {text!r:.40}") from None


def check_setting(name: str, value: Any) -> None:
    """See that the value of an option makes sense; ``UsageError``: it does not."""
    if name == "memory":
        read_size("--memory", value)
    elif name == "keep_alive":
        keep_alive_s(value)
    else:
        ServerSettings(**{"api_key": "any", name: value})


def serve_command(
    options: RunOptions,
    settings: ServerSettings,
    names: Sequence[str] = (),
    *,
    memory: str | None = None,
    keep_alive: str | None = None,
) -> int:
    """Serve until Ctrl-C (exit status 130) or SIGTERM (0). The one line on standard output is the URL, once clients are
    answered.

    One name is loaded at the start and stays; several, or all on the disk, are loaded when asked for, as they are where
    ``memory`` (what they may take together) or ``keep_alive`` are given.
    """
    memory_bytes = None if memory is None else read_size("--memory", memory)
    seconds = KEEP_ALIVE_S if keep_alive is None else keep_alive_s(keep_alive)
    options.set_up_logging()
    asked = options.corpora()
    for corpus in settings.corpora:
        options = options.with_corpus(corpus)
    # What drafts for everybody is not for those alone who ask for it.
    settings = replace(settings, corpora=[name for name in options.corpora() if name not in asked])
    for name in names:
        ensure_model(name, (), yes=options.yes)
    with ExitStack() as stack:
        sock = stack.enter_context(listen(settings.host, settings.port))
        url = url_of(sock)
        api = f"chat page at {url}/, OpenAI's API at {url}/v1, Anthropic's and Ollama's at {url}"
        if len(names) != 1 or memory is not None or keep_alive is not None:
            host = _several(options, settings, names, memory_bytes, seconds)
        else:
            options = replace(options, model=names[0])
            path = Catalog.load().resolve(names[0])
            with GGUFFile(path) as file:
                makes_embeddings = pooling_of(file) is not None
            if makes_embeddings:
                host = _embeddings(path, options, settings, stack)
                api = f"OpenAI's {url}/v1/embeddings, Ollama's {url}/api/embed"
            else:
                host = _chats(options, settings, stack)
        say(f"{api} · Ctrl-C stops")
        runner = Runner(host, verbose=options.verbose, on_start=lambda: print(url, flush=True))
        runner.run(sockets=[sock])
    say("stopped")
    return INTERRUPTED if runner.signal == signal.SIGINT else 0


def say(line: str) -> None:
    print(f"localspec: {line}", file=sys.stderr, flush=True)


def _several(
    options: RunOptions, settings: ServerSettings, names: Sequence[str], memory: int | None, keep_alive: KeepAlive
) -> Host:
    """These models, or all on the disk, loaded when asked for."""
    drafters = options.drafters()

    def text(file: ServedFile, plan: LoadPlan, report: Report, cancel: threading.Event) -> LLM:
        chosen = drafters if plan.drafts or "auto" not in drafters else [*AUTOMATIC, *options.corpora()]
        load = plan.load.as_arguments()
        llm = LLM(file.spec, chosen, draft_length=options.length(), progress=report, cancel=cancel, **load)
        for warning in llm.warnings:
            say(f"{file.name}: {warning}")
        return llm

    def embedding(file: ServedFile, plan: LoadPlan) -> EmbeddingModel:
        return _embedder(file.path, plan.load)

    opening = Opening(
        text,
        embedding,
        lambda llm, own: replace(own, params=options.params(llm.chat_defaults), system=options.system),
        load=replace(options.load, parallel=settings.parallel),
        drafts="auto" in drafters,
        specs=names or None,
        made_of=engine_files,
        warn=say,
    )
    host = Host(settings, opening, memory=memory, keep_alive=keep_alive)
    if not host.models:
        ensure_model(None, drafters, yes=options.yes)
        host.refresh()
    kept = "as long as there is room" if keep_alive is None else f"for {keep_alive:g} s after their use"
    shown = ", ".join(model.names[0] for model in host.models)
    say(f"{len(host.models)} models, loaded when asked for, kept {kept}: {shown}")
    gpus = f", and {size_text(host.memory.gpu)} on GPUs" if host.memory.gpu else ""
    hint = "; --memory changes it" if memory is None else ""
    say(f"memory for models: {size_text(host.memory.ram)}{gpus}{hint}")
    return host


def _chats(options: RunOptions, settings: ServerSettings, stack: ExitStack) -> Host:
    """One model, loaded now."""
    options = replace(options, load=replace(options.load, parallel=settings.parallel))
    llm = stack.enter_context(options.opened(tell=True))
    llm.prefix_cache_bytes = settings.prefix_cache << 20
    say(f"{llm.model_name} · {llm.backend_name} · draft: {' + '.join(llm.draft_names) or 'none'}")
    if not settings.local and (private := [name for name in llm.draft_names if is_corpus(name)]):
        why = "their texts are for this computer alone, and others reach this server"
        say(f"not used for requests: {', '.join(private)}: {why}")
    if settings.parallel != 1:
        parallel = llm.parallel_info()
        say(f"requests at a time: {parallel['parallel']} ({parallel['reason']})")
    return Host.of_one(llm, replace(settings, params=options.params(llm.chat_defaults), system=options.system))


def _embeddings(path: Path, options: RunOptions, settings: ServerSettings, stack: ExitStack) -> Host:
    """One model that makes embeddings, loaded now."""
    model = stack.enter_context(closing(_embedder(path, options.load)))
    about = f"embeddings of {model.n_embd} numbers, of texts up to {model.n_ctx} tokens"
    say(f"{path.stem} · {model.backend} · {about}")
    return Host.of_one(model, settings)


def _embedder(path: Path, load: LoadOptions) -> EmbeddingModel:
    if load.backend not in ("auto", "llama-cpp"):
        raise UsageError(f"--backend {load.backend} makes no embeddings: leave it out, or use llama-cpp")
    return EmbeddingModel(path, n_ctx=load.n_ctx, n_threads=load.n_threads, n_gpu_layers=load.n_gpu_layers)
