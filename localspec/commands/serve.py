"""``localspec serve``."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.commands.options import RunOptions, ensure_model
from localspec.errors import UsageError
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import GGUFFile
from localspec.server.http import ServerSettings

if TYPE_CHECKING:
    from localspec.server.app import AppRunner


INTERRUPTED = 130

_FIELDS = {"alias": "aliases", "allow_corpus": "corpora", "allow_host": "hosts", "allow_origin": "origins"}


def server_settings(**given: Any) -> ServerSettings:
    """Settings by the names of the command's options; ``UsageError``: a value makes no sense."""
    return ServerSettings(**{_FIELDS.get(name, name): value for name, value in given.items()})


def serve_command(options: RunOptions, settings: ServerSettings) -> int:
    """Serve until Ctrl-C (exit status 130) or SIGTERM (0). The one line on standard output is the URL, once clients are
    answered."""
    options.set_up_logging()
    if options.model is not None:
        ensure_model(options.model, (), yes=options.yes)  # before its header is read
    path = _embedding_file(options.model)
    runner = _serve_chats(options, settings) if path is None else _serve_embeddings(path, options, settings)
    print("localspec: stopped", file=sys.stderr)
    return INTERRUPTED if runner.signal == signal.SIGINT else 0


def _serve_chats(options: RunOptions, settings: ServerSettings) -> AppRunner:
    from localspec.server.access import copies_texts
    from localspec.server.app import Runner, listen, url_of

    asked = options.corpora()
    for corpus in settings.corpora:
        options = options.with_corpus(corpus)
    # What drafts for everybody is not for those alone who ask for it.
    settings = replace(settings, corpora=[name for name in options.corpora() if name not in asked])
    options = replace(options, load=replace(options.load, parallel=settings.parallel))
    with listen(settings.host, settings.port) as sock, options.opened() as llm:
        llm.prefix_cache_bytes = settings.prefix_cache << 20
        settings = replace(settings, params=options.params(llm.chat_defaults), system=options.system)
        url = url_of(sock)
        draft = " + ".join(llm.draft_names) or "none"
        print(f"localspec: {llm.model_name} · {llm.backend_name} · draft: {draft}", file=sys.stderr)
        if not settings.local and (private := [name for name in llm.draft_names if copies_texts(name)]):
            why = "their texts are for this computer alone, and others reach this server"
            print(f"localspec: not used for requests: {', '.join(private)}: {why}", file=sys.stderr)
        if settings.parallel != 1:
            parallel = llm.parallel_info()
            print(f"localspec: requests at a time: {parallel['parallel']} ({parallel['reason']})", file=sys.stderr)
        apis = f"OpenAI's API at {url}/v1, Anthropic's and Ollama's at {url}"
        print(f"localspec: chat page at {url}/, {apis} · Ctrl-C stops", file=sys.stderr)
        runner = Runner(llm, settings, verbose=options.verbose, on_start=lambda: print(url, flush=True))
        runner.run(sockets=[sock])
    return runner


def _embedding_file(model: str | None) -> Path | None:
    """The file of a model, if it is one that makes embeddings."""
    if model is None:  # the default pair
        return None
    from localspec.backends.llama.embedding import pooling_of

    path = Catalog.load().resolve(model)
    with GGUFFile(path) as file:
        return path if pooling_of(file) is not None else None


def _serve_embeddings(path: Path, options: RunOptions, settings: ServerSettings) -> AppRunner:
    from localspec.backends.llama.embedding import EmbeddingModel
    from localspec.server.app import AppRunner, listen, url_of
    from localspec.server.embeddings import EmbeddingService

    load = options.load
    if load.backend not in ("auto", "llama-cpp"):
        raise UsageError(f"--backend {load.backend} makes no embeddings: leave it out, or use llama-cpp")
    with ExitStack() as stack:
        sock = stack.enter_context(listen(settings.host, settings.port))
        model = EmbeddingModel(path, n_ctx=load.n_ctx, n_threads=load.n_threads, n_gpu_layers=load.n_gpu_layers)
        stack.callback(model.close)
        url = url_of(sock)
        about = f"embeddings of {model.n_embd} numbers, of texts up to {model.n_ctx} tokens"
        print(f"localspec: {path.stem} · {model.backend} · {about}", file=sys.stderr)
        print(f"localspec: OpenAI's {url}/v1/embeddings, Ollama's {url}/api/embed · Ctrl-C stops", file=sys.stderr)
        service = EmbeddingService(model, settings)
        runner = AppRunner(
            service.application(), service.ending, verbose=options.verbose, on_start=lambda: print(url, flush=True)
        )
        runner.run(sockets=[sock])
    return runner
