"""``localspec serve``."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.commands.options import RunOptions, ensure_model, read_size
from localspec.engine.loading import Report
from localspec.engine.options import LoadOptions
from localspec.errors import UsageError
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.sources.base import size_text
from localspec.server.http import KEEP_ALIVE_S, KeepAlive, ServerSettings, read_keep_alive
from localspec.spec_decode.drafters.names import AUTOMATIC

if TYPE_CHECKING:
    from localspec.backends.llama.embedding import EmbeddingModel
    from localspec.server.app import Runner


INTERRUPTED = 130

_FIELDS = {"alias": "aliases", "allow_corpus": "corpora", "allow_host": "hosts", "allow_origin": "origins"}


def server_settings(**given: Any) -> ServerSettings:
    """Settings by the names of the command's options; ``UsageError``: a value makes no sense."""
    return ServerSettings(**{_FIELDS.get(name, name): value for name, value in given.items()})


@dataclass(frozen=True, slots=True)
class SeveralOptions:
    """Options of a server of several models.

    Attributes:
        memory: what they may take together, such as ``8GB``; None is a share of what is free.
        keep_alive: how long an idle one stays loaded, as Ollama's field has it; None is the usual.
    """

    memory: str | None = None
    keep_alive: str | None = None

    @property
    def bytes(self) -> int | None:
        return None if self.memory is None else read_size("--memory", self.memory)

    @property
    def seconds(self) -> KeepAlive:
        if self.keep_alive is None:
            return KEEP_ALIVE_S
        try:
            return read_keep_alive(self.keep_alive)
        except ValueError:
            message = "a duration such as 5m, or a number of seconds; -1 is for ever"
            raise UsageError(f"--keep-alive must be {message}, not {self.keep_alive!r:.40}") from None


def check_setting(name: str, value: Any) -> None:
    """See that the value of an option makes sense; ``UsageError``: it does not."""
    if name in SeveralOptions.__slots__:
        several = SeveralOptions(**{name: value})
        several.bytes, several.seconds  # noqa: B018 - raise
    else:
        server_settings(**{"api_key": "any", name: value})


def serve_command(
    options: RunOptions, settings: ServerSettings, names: Sequence[str] = (), several: SeveralOptions | None = None
) -> int:
    """Serve until Ctrl-C (exit status 130) or SIGTERM (0). The one line on standard output is the URL, once clients are
    answered. One name is loaded at the start and stays; several, or all on the disk, are loaded when asked for."""
    from localspec.backends.llama.embedding import pooling_of

    several = several or SeveralOptions()
    several.bytes, several.seconds  # noqa: B018 - refused before anything is fetched
    options.set_up_logging()
    asked = options.corpora()
    for corpus in settings.corpora:
        options = options.with_corpus(corpus)
    # What drafts for everybody is not for those alone who ask for it.
    settings = replace(settings, corpora=[name for name in options.corpora() if name not in asked])
    if len(names) == 1 and several == SeveralOptions():
        options = replace(options, model=names[0])
        ensure_model(names[0], (), yes=options.yes)  # before its header is read
        path = Catalog.load().resolve(names[0])
        with GGUFFile(path) as file:
            makes_embeddings = pooling_of(file) is not None
        runner = _serve_embeddings(path, options, settings) if makes_embeddings else _serve_chats(options, settings)
    else:
        runner = _serve_several(options, settings, names, several)
    say("stopped")
    return INTERRUPTED if runner.signal == signal.SIGINT else 0


def _serve_several(
    options: RunOptions, settings: ServerSettings, names: Sequence[str], several: SeveralOptions
) -> Runner:
    from localspec.heads.assembly import engine_files
    from localspec.llm import LLM
    from localspec.server.app import Runner, listen, url_of
    from localspec.server.hosting import Host, LoadPlan, Opening, ServedFile

    for name in names:
        ensure_model(name, (), yes=options.yes)
    drafters = options.drafters()

    def text(file: ServedFile, plan: LoadPlan, report: Report, cancel: threading.Event) -> LLM:
        parallel = settings.parallel if plan.parallel else 1
        load = replace(
            options.load,
            n_ctx=plan.n_ctx,
            parallel=parallel,
            prefix_cache_bytes=plan.cache_bytes,
            n_gpu_layers=plan.n_gpu_layers,
        ).as_arguments()
        chosen = drafters if plan.drafts or "auto" not in drafters else [*AUTOMATIC, *options.corpora()]
        llm = LLM(file.spec, chosen, draft_length=options.length(), progress=report, cancel=cancel, **load)
        for warning in llm.warnings:
            say(f"{file.name}: {warning}")
        return llm

    def embedding(file: ServedFile, plan: LoadPlan) -> EmbeddingModel:
        return _embedder(file.path, replace(options.load, n_ctx=plan.n_ctx))

    opening = Opening(
        text,
        embedding,
        lambda llm, own: replace(own, params=options.params(llm.chat_defaults), system=options.system),
        n_ctx=options.load.n_ctx,
        backend=options.load.backend,
        kv_type=options.load.kv_cache_type,
        n_gpu_layers=options.load.n_gpu_layers,
        drafts="auto" in drafters,
        parallel=settings.parallel != 1,
        specs=names or None,
        made_of=engine_files,
        warn=say,
    )
    with listen(settings.host, settings.port) as sock:
        host = Host(settings, opening, memory=several.bytes, keep_alive=several.seconds)
        if not host.models:
            ensure_model(None, drafters, sparing=True, yes=options.yes)
            host.refresh()
        url = url_of(sock)
        kept = "as long as there is room" if several.seconds is None else f"for {several.seconds:g} s after their use"
        shown = ", ".join(model.names[0] for model in host.models)
        say(f"{len(host.models)} models, loaded when asked for, kept {kept}: {shown}")
        gpus = f", and {size_text(host.gpu_memory)} on GPUs" if host.gpu_memory else ""
        hint = "; --memory changes it" if several.memory is None else ""
        say(f"memory for models: {size_text(host.memory)}{gpus}{hint}")
        say(f"chat page at {url}/, OpenAI's API at {url}/v1, Anthropic's and Ollama's at {url} · Ctrl-C stops")
        runner = Runner(host, verbose=options.verbose, on_start=lambda: print(url, flush=True))
        runner.run(sockets=[sock])
    return runner


def say(line: str) -> None:
    print(f"localspec: {line}", file=sys.stderr, flush=True)


def _serve_chats(options: RunOptions, settings: ServerSettings) -> Runner:
    from localspec.server.access import copies_texts
    from localspec.server.app import Runner, listen, url_of
    from localspec.server.hosting import Host

    options = replace(options, load=replace(options.load, parallel=settings.parallel))
    with listen(settings.host, settings.port) as sock, options.opened(tell=True) as llm:
        llm.prefix_cache_bytes = settings.prefix_cache << 20
        settings = replace(settings, params=options.params(llm.chat_defaults), system=options.system)
        url = url_of(sock)
        draft = " + ".join(llm.draft_names) or "none"
        say(f"{llm.model_name} · {llm.backend_name} · draft: {draft}")
        if not settings.local and (private := [name for name in llm.draft_names if copies_texts(name)]):
            why = "their texts are for this computer alone, and others reach this server"
            say(f"not used for requests: {', '.join(private)}: {why}")
        if settings.parallel != 1:
            parallel = llm.parallel_info()
            say(f"requests at a time: {parallel['parallel']} ({parallel['reason']})")
        say(f"chat page at {url}/, OpenAI's API at {url}/v1, Anthropic's and Ollama's at {url} · Ctrl-C stops")
        host = Host.of_one(llm, settings)
        runner = Runner(host, verbose=options.verbose, on_start=lambda: print(url, flush=True))
        runner.run(sockets=[sock])
    return runner


def _embedder(path: Path, load: LoadOptions) -> EmbeddingModel:
    from localspec.backends.llama.embedding import EmbeddingModel

    if load.backend not in ("auto", "llama-cpp"):
        raise UsageError(f"--backend {load.backend} makes no embeddings: leave it out, or use llama-cpp")
    return EmbeddingModel(path, n_ctx=load.n_ctx, n_threads=load.n_threads, n_gpu_layers=load.n_gpu_layers)


def _serve_embeddings(path: Path, options: RunOptions, settings: ServerSettings) -> Runner:
    from localspec.server.app import Runner, listen, url_of
    from localspec.server.hosting import Host

    with listen(settings.host, settings.port) as sock, closing(_embedder(path, options.load)) as model:
        url = url_of(sock)
        about = f"embeddings of {model.n_embd} numbers, of texts up to {model.n_ctx} tokens"
        say(f"{path.stem} · {model.backend} · {about}")
        say(f"OpenAI's {url}/v1/embeddings, Ollama's {url}/api/embed · Ctrl-C stops")
        host = Host.of_one(model, settings)
        runner = Runner(host, verbose=options.verbose, on_start=lambda: print(url, flush=True))
        runner.run(sockets=[sock])
    return runner
