"""``config.toml``: what commands take from it, and ``localspec config``; people edit the file too."""

from __future__ import annotations

import errno
import json
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer

from localspec.commands import config
from localspec.commands.cli import COMMON, app
from localspec.errors import UsageError
from tests.conftest import TinyFiles
from tests.support.program import assert_one_line, localspec

pytestmark = pytest.mark.usefixtures("measured_home")


def written(text: str) -> Path:
    path = config.settings_file()
    path.write_text(text, encoding="utf-8")
    return path


def set_(*words: str) -> None:
    result = localspec("config", "set", *words)
    assert result.returncode == 0, result.stderr


def answer(*arguments: str | Path) -> dict[str, Any]:
    result = localspec("generate", *arguments, "--format", "json")
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_the_rest_of_the_file_stays() -> None:
    for text, wanted in (
        ("# mine\nview = 'rounds' # so\n[chat]\nview = 'x'\n", "# mine\nview = \"plain\" # so\n[chat]\nview = 'x'\n"),
        ('system = """\nview = 1\n"""\nview="rounds"\n', 'system = """\nview = 1\n"""\nview="plain"\n'),
    ):
        path = written(text)
        config.write("view", "plain")
        assert (path.read_text(), path.stat().st_mode & 0o077) == (wanted, 0)


def test_any_text_comes_back() -> None:
    config.write("view", "rounds")
    for text in ("[#]'''a\"b\\c\nd\te\x7f\x01é 你 🙂", ""):
        config.write("chat.system", text)
        assert config.read() == {"view": "rounds", "chat": {"system": text}}
    config.write("chat.system", None)
    assert config.read() == {"view": "rounds"}


def test_set_get_unset_list_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written("# by hand\ndraft_length = 2  # few\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    set_("draft-length", "3")
    set_("serve.port", "9000")
    set_("draft", "ngram", "corpus:notes")
    set_("chat.keep", "off")
    set_("chat.prompt-cache", "1GB")
    set_("bench.backend", "llama-cpp", "reference")
    set_("verify.main-gpu", "1")
    set_("verify.rpc", "10.0.0.9:50052")
    set_("verify.allow-insecure-rpc", "on")
    assert path.read_text().startswith('# by hand\ndraft_length = "3"  # few\n')
    assert tomllib.loads(path.read_text()) == {
        "draft_length": "3", "serve": {"port": 9000}, "chat": {"keep": False, "prompt-cache": "1GB"},
        "bench": {"backend": ["llama-cpp", "reference"]},
        "verify": {"main-gpu": 1, "rpc": ["10.0.0.9:50052"], "allow-insecure-rpc": True},
        "draft": ["ngram", f"corpus:{tmp_path / 'notes'}"],  # it holds in any folder
    }  # fmt: skip
    listed = localspec("config", "list").stdout.decode().splitlines()
    assert f'draft = ["ngram", "corpus:{tmp_path / "notes"}"]' in listed
    assert {"chat.keep = false", 'draft-length = "3"', "serve.port = 9000"} < {*listed}
    assert localspec("config", "get", "draft").stdout.decode().splitlines()[0] == "ngram"
    assert localspec("config", "unset", "draft").returncode == 0
    result = localspec("config", "get", "draft")
    assert (result.returncode, result.stdout) == (1, b"")
    assert localspec("config", "path").stdout.decode().strip() == str(path)
    everything = localspec("config", "list", "--all").stdout.decode()
    assert [name in everything for name in ("serve.port  ", "kv-cache  ", "chat.ctx")] == [True, True, False]


def test_a_bad_key_or_value_is_not_written() -> None:
    for line, said in {
        "view oops": "view: ",
        "veiw plain": "did you mean view?",
        "port 9000": "did you mean serve.port?",
        "serve.port 70000": "serve.port: ",
        "serve.parallel many": "serve.parallel: ",
        "serve.prompt-cache plenty": "serve.prompt-cache: --prompt-cache must be a size",
        "serve.memory plenty": "serve.memory: --memory must be a size",
        "serve.keep-alive long": "serve.keep-alive: --keep-alive must be a duration",
        "bench.backend reference,nosuch": "bench.backend: unknown backend",
        "serve.allow-origin here": "--allow-origin must be like",
        "ctx 1 2": "ctx takes one value, not 2",
        "idle perhaps": "idle: ",
        "top-p 7": "top-p: ",
        "model nosuch": "there is no model 'nosuch'",
        "generate.json-schema x": "there is no setting",
    }.items():
        assert_one_line(localspec("config", "set", *line.split()), 2, said)
        assert not config.settings_file().exists()


def test_a_file_that_is_no_toml_is_not_written_over() -> None:
    path = written("view = ")
    assert_one_line(localspec("config", "set", "ctx", "9"), 2, "cannot be changed, it is not TOML")
    assert_one_line(localspec("config", "list"), 2, "it is not TOML")
    assert path.read_text() == "view = "
    path.write_text("chat = {seed = 1,}\n")  # TOML 1.1, which tomlkit takes
    with pytest.raises(UsageError, match="cannot be changed, it is not TOML"):
        config.write("ctx", "9")
    assert path.read_text() == "chat = {seed = 1,}\n"
    path.write_text("chat = 3\n")
    assert_one_line(localspec("config", "set", "chat.view", "plain"), 2, "chat is not a table")
    path.unlink()
    path.mkdir()
    assert_one_line(localspec("config", "set", "ctx", "9"), 2, "cannot read")


def test_the_command_line_goes_before_the_table_and_that_before_the_rest(tiny: TinyFiles) -> None:
    for setting in (("model", str(tiny.pair.target)), ("draft", "none"), ("backend", "reference"), ("max-tokens", "5")):
        set_(*setting)
    first = answer("la la la")["stats"]  # the one argument is the prompt, the model the file's
    assert first["completion_tokens"] == 5
    set_("generate.max-tokens", "4")
    assert answer("-p", "la la")["stats"]["completion_tokens"] == 4
    assert answer("-p", "la la", "--max-tokens", "3")["stats"]["completion_tokens"] == 3
    # The system prompt reaches the model, and is left out where it has no place.
    set_("system", "la la la la la la")
    assert answer("la la la")["stats"]["prompt_tokens"] > first["prompt_tokens"] + 5
    assert answer("--raw", "-p", "la la")["stats"]["completion_tokens"] == 4
    assert_one_line(localspec("generate", "--raw", "-p", "x", "--system", "y"), 2, "--system needs the chat template")
    set_("generate.system", "")
    assert answer("la la la")["stats"]["prompt_tokens"] <= first["prompt_tokens"]


def given(command: str, *argv: str) -> dict[str, Any]:
    root: Any = typer.main.get_command(app)
    parent = root.make_context("localspec", [command])
    context = root.commands[command].make_context(command, [*argv], parent=parent)
    return config.settle(context, {}, COMMON, lambda name, value: None)


def test_the_environment_goes_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    written("ctx = 99\n[serve]\nport = 9000\napi-key = 'file'\n")
    assert given("serve") == {"n_ctx": "99", "port": 9000, "api_key": "file"}
    monkeypatch.setenv("LOCALSPEC_API_KEY", "environment")
    assert given("serve", "--port", "7") == {"n_ctx": "99"}


def test_how_chats_answer_does_not_change_what_is_measured() -> None:
    written("temperature = 1.5\nctx = 99\nseed = 3\nbackend = 'reference'\n[bench]\ntop-k = 3\n")
    assert given("bench") == {"n_ctx": "99", "top_k": 3, "backend": ["reference"]}
    assert given("doctor") == {"n_ctx": "99", "backend": "reference"}
    assert given("distill") == {"backend": "reference"}  # its seed is another thing
    assert given("chat") == {"n_ctx": "99", "temperature": 1.5, "seed": 3, "backend": "reference"}


BAD_FILES = {
    "view = ": "is not TOML",
    "veiw = 'plain'": "there is no setting 'veiw'; did you mean view?",
    "ctx = 'many'": "ctx: ",
    "ctx = true": "ctx: ",
    "system = {a = 1979-05-27}": "system must be a text",
    "temperature = -1": "temperature: ",
    "[generate]\ntop-k = -3": "generate.top-k: ",
    "[generate]\nport = 3": "there is no setting 'generate.port'",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_line_of_the_file_is_a_line_and_the_command_goes_on(text: str, tiny: TinyFiles) -> None:
    path = written(text)
    options = ("--backend", "reference", "--draft", "none", "--max-tokens", "2")
    result = localspec("generate", tiny.pair.target, "-p", "la", *options)
    assert result.returncode == 0
    (line,) = [line for line in result.stderr.decode().splitlines() if "config.toml" in line]
    assert line.startswith(f"localspec: {path}")
    assert BAD_FILES[text] in line
    assert localspec("list").stderr == b""  # reads nothing of it


def test_a_server_does_not_start_with_a_file_that_it_cannot_read() -> None:
    written("[serve]\napikey = 'secret'\n")
    assert_one_line(localspec("serve", "/no/such.gguf"), 2, "serve.apikey", "did you mean serve.api-key?")
    written("[chat]\nport = 3\n[serve]\nhost = '0.0.0.0'\n")  # another command's table is not its own
    assert_one_line(localspec("serve", "/no/such.gguf"), 2, "needs --api-key")


def test_a_file_that_cannot_be_written_is_no_bad_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "write_atomically", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert_one_line(localspec("config", "set", "ctx", "64"), 1, "cannot write", "No space left on device")
