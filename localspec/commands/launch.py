"""``localspec launch``: starts a coding agent against the server of this computer."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any

from localspec.errors import LocalspecError, UsageError, did_you_mean
from localspec.model_files.catalog import Catalog
from localspec.system.process import interrupts_left_to_others

SMALL_CONTEXT = 16384  # tokens; agents send prompts of several thousand before anything is asked
_ANSWER_S, _STOP_S = 5.0, 20.0


@dataclass(frozen=True, slots=True)
class Agent:
    """How a program learns of a server. ``$url``, ``$model``, ``$key`` and ``$context`` are the server's."""

    install: str  # the command that its makers give for installing it
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()  # before the person's own
    alone: Sequence[str] = ()  # if the person gives none


_OPENCODE = {
    "model": "localspec/$model",
    "small_model": "localspec/$model",
    "provider": {
        "localspec": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "localspec",
            "options": {"baseURL": "$url/v1", "apiKey": "$key"},
            "models": {"$model": {"name": "$model"}},
        }
    },
}

AGENTS = {
    "claude": Agent(
        "npm install -g @anthropic-ai/claude-code",
        {
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_AUTH_TOKEN": "$key",
            "ANTHROPIC_API_KEY": "",  # goes before the token otherwise
            "ANTHROPIC_MODEL": "$model",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "$model",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "$model",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model",
            "CLAUDE_CODE_SUBAGENT_MODEL": "$model",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "codex": Agent(
        "npm install -g @openai/codex",
        {"LOCALSPEC_API_KEY": "$key"},
        [
            *("-c", 'model="$model"', "-c", 'model_provider="localspec"', "-c", "model_context_window=$context"),
            *("-c", 'model_providers.localspec={name="localspec",base_url="$url/v1",wire_api="responses",'
              'env_key="LOCALSPEC_API_KEY"}'),
        ],
    ),
    "opencode": Agent("npm install -g opencode-ai", {"OPENCODE_CONFIG_CONTENT": json.dumps(_OPENCODE)}),
    "aider": Agent(
        "python -m pip install aider-install && aider-install",
        {"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": "$key"},
        ["--model", "openai/$model", "--no-show-model-warnings"],
    ),
    "goose": Agent(
        "brew install block-goose-cli",
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": "$model",
            "OPENAI_HOST": "$url",
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": "$key",
        },
        alone=["session"],
    ),
    "qwen": Agent(
        "npm install -g @qwen-code/qwen-code",
        {"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "$key", "OPENAI_MODEL": "$model"},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """The server that is wanted, and how it is started if it is not there."""

    port: int  # where to look for one, and to start one; 0 starts one anywhere
    api_key: str | None = None  # what it asks for; None: nothing
    model: str | None = None  # which one the agent is to use; None leaves it to the server
    options: Sequence[str] = ()  # further ones of ``localspec serve``

    def serve(self, port: int) -> list[str]:
        """The arguments that start it, for one model."""
        return ["serve", self.model or Catalog.load().default_pair()[0].name, "--port", str(port), *self.options]


@dataclass(frozen=True, slots=True)
class Found:
    """A server that answers, and the model of it that is used; ``context`` [tokens] is None until it is loaded."""

    url: str
    model: str
    context: int | None = None


def launch_command(name: str, arguments: Sequence[str], choice: ServerChoice, *, only_print: bool) -> int:
    """Run an agent until it ends; returns its exit status. A server that was started for it is stopped then."""
    agent = AGENTS.get(name)
    if agent is None:
        raise UsageError(f"no program {name!r:.40} is known{did_you_mean(name, AGENTS)}; there are {', '.join(AGENTS)}")
    found = _asked(f"http://127.0.0.1:{choice.port}", choice) if choice.port else None
    if only_print:
        if found is None:
            words = choice.serve(choice.port)
            print(f"# no such server is running; first: {shlex.join(['localspec', *words])}")
            found = Found(f"http://127.0.0.1:{choice.port}", Path(words[1]).name.removesuffix(".gguf"))
        _print(*_settled(name, agent, arguments, found, choice.api_key))
        return 0
    program = shutil.which(name)
    if program is None:
        raise UsageError(f"{name} is not installed; its makers say: {agent.install}")
    # Ctrl-C is the agent's; a request to end lets the server be stopped first.
    for each in {"SIGTERM", "SIGHUP"} & {*dir(signal)}:
        signal.signal(getattr(signal, each), lambda number, frame: sys.exit(128 + number))
    with interrupts_left_to_others(), ExitStack() as stack:
        if found is None:
            url = stack.enter_context(_started(choice))
            found = _asked(url, replace(choice, model=None))  # the one that it was started with
            if found is None:
                raise LocalspecError(f"the server that was started at {url} does not answer")
        if found.context is not None and found.context < SMALL_CONTEXT:
            line = f"the context holds {found.context:,} tokens, and agents begin with several thousand; see --ctx"
            print(f"localspec: {line}", file=sys.stderr)
        print(f"localspec: {found.model} at {found.url}", file=sys.stderr, flush=True)
        environment, command = _settled(program, agent, arguments, found, choice.api_key)
        with subprocess.Popen(command, env=os.environ | environment) as child:
            try:
                return child.wait()
            finally:
                child.terminate()  # nothing once it has ended


def _settled(
    program: str, agent: Agent, arguments: Sequence[str], found: Found, key: str | None
) -> tuple[dict[str, str], list[str]]:
    """Variables and command line for a server."""
    context = found.context or 2 * SMALL_CONTEXT
    facts = {"url": found.url, "model": found.model, "key": key or "none", "context": context}

    def filled(text: str) -> str:
        return Template(text).substitute(facts)

    environment = {name: filled(value) for name, value in agent.environment.items()}
    return environment, [program, *map(filled, agent.arguments), *(arguments or agent.alone)]


def _print(environment: Mapping[str, str], command: Sequence[str]) -> None:
    for variable, value in environment.items():
        quoted = value.replace("'", "''")
        print(f"$env:{variable} = '{quoted}'" if sys.platform == "win32" else f"export {variable}={shlex.quote(value)}")
    print(subprocess.list2cmdline(command) if sys.platform == "win32" else shlex.join(command))


# -- the server --------------------------------------------------------------------------------------------------------


def _asked(url: str, choice: ServerChoice) -> Found | None:
    """What a server of ours says of the model that is wanted; None: there is none, or it has no such model."""
    request = urllib.request.Request(f"{url}/v1/models")
    if choice.api_key is not None:
        request.add_header("Authorization", f"Bearer {choice.api_key}")
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for this computer
        with opener.open(request, timeout=_ANSWER_S) as response:
            rows: list[dict[str, Any]] = json.load(response)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise UsageError(f"the server at {url} asks for its key: --api-key KEY, or LOCALSPEC_API_KEY") from None
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    ours = [row for row in rows if isinstance(row, dict) and row.get("owned_by") == "localspec"]
    names = None if choice.model is None else (choice.model, Path(choice.model).stem)
    wanted = [row for row in ours if names is None or row["id"] in names]
    chosen = next((row for row in wanted if row["localspec"].get("loaded", True)), next(iter(wanted), None))
    if chosen is None:
        return None
    context = chosen["localspec"].get("context")
    return Found(url, str(chosen["id"]), context if isinstance(context, int) else None)


@contextmanager
def _started(choice: ServerChoice) -> Iterator[str]:
    """A server that is stopped when the block ends; what it says until it answers is shown."""
    with socket.socket() as sock:
        sock.settimeout(_ANSWER_S)
        is_taken = choice.port and sock.connect_ex(("127.0.0.1", choice.port)) == 0
    port = 0 if is_taken else choice.port
    command = [sys.executable, "-m", "localspec", *choice.serve(port)]
    environment = os.environ | ({"LOCALSPEC_API_KEY": choice.api_key} if choice.api_key is not None else {})
    # In a group of its own: Ctrl-C is for the agent.
    group: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    quiet = threading.Event()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **group
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        lines = server.stderr

        def show() -> None:
            for line in lines:  # read to the end, or the server would wait for a reader
                if not quiet.is_set():
                    sys.stderr.write(line.decode("utf-8", "replace"))
                    sys.stderr.flush()

        reader = threading.Thread(target=show, daemon=True)
        reader.start()
        try:
            url = server.stdout.readline().decode().strip()
            if not url:
                reader.join(_ANSWER_S)
                raise LocalspecError("the server could not be started")
            quiet.set()
            yield url
        finally:
            quiet.set()
            server.terminate()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
