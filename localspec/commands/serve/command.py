"""``localspec serve``."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace

from localspec.commands.options import RunOptions
from localspec.commands.serve.settings import ServerSettings

INTERRUPTED = 130


def serve_command(options: RunOptions, settings: ServerSettings) -> int:
    """Serve until Ctrl-C or SIGTERM.

    The one line on standard output is the URL, once clients are answered.

    Returns:
        The exit status: 0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        LocalspecError: the port or the model cannot be had.
    """
    from localspec.commands.serve.runner import Runner, listen, url_of

    with listen(settings.host, settings.port) as sock, options.opened() as llm:
        llm.prefix_cache_bytes = settings.prefix_cache << 20
        settings = replace(settings, params=options.params(llm.chat_defaults), system=options.system)
        url = url_of(sock)
        draft = " + ".join(llm.draft_names) or "none"
        print(f"localspec: {llm.model_name} · {llm.backend_name} · draft: {draft}", file=sys.stderr)
        print(f"localspec: chat page at {url}/, OpenAI's API at {url}/v1 · Ctrl-C stops", file=sys.stderr)
        runner = Runner(llm, settings, verbose=options.verbose, on_start=lambda: print(url, flush=True))
        runner.run(sockets=[sock])
    print("localspec: stopped", file=sys.stderr)
    return INTERRUPTED if runner.signal == signal.SIGINT else 0
