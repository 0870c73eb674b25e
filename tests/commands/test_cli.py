"""The command line as a shell sees it: one line per error, exit statuses, start-up."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localspec.commands import files
from localspec.commands.options import ensure_model
from localspec.errors import DownloadError, ModelFileError
from localspec.heads.file import heads_folder
from localspec.model_files.catalog import Catalog, Entry
from localspec.system.files import home
from tests.conftest import TinyFiles
from tests.support import ggufs
from tests.support.endless import write_endless
from tests.support.heads import write_random_head
from tests.support.interrupting import interrupted
from tests.support.waiting import PATIENCE

PROGRAM = [sys.executable, "-m", "localspec"]


def localspec(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the program to its end."""
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=PATIENCE, check=False)


def assert_one_line(result: subprocess.CompletedProcess[bytes], status: int, *parts: str) -> None:
    """It failed with a status and one readable line on standard error, and printed nothing else."""
    errors = result.stderr.decode()
    assert result.returncode == status, errors
    lines = [line for line in errors.splitlines() if line.startswith("localspec: ")]
    assert len(lines) == 1, errors
    assert "Traceback" not in errors
    assert "internal error" not in errors
    assert result.stdout == b""
    for part in parts:
        assert part in lines[0]


# -- start-up ----------------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom localspec.__main__ import run\nassert run(['--help']) == 0\n"
        "heavy = {'numpy', 'rich', 'prompt_toolkit', 'jinja2', 'gguf', 'ik_llama_cpp', 'llama_cpp', 'platformdirs'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr == "[]\n"
    for command in ("chat", "generate", "pull", "list", "rm", "inspect"):
        assert f"  {command} " in result.stdout


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_help_names_the_shared_options(command: str) -> None:
    text = localspec(command, "--help").stdout.decode()
    options = (
        "draft draft-length backend temperature top-k top-p min-p repeat-penalty seed max-tokens stop ctx threads "
        "gpu-layers system verbose"
    )
    for option in options.split():
        assert f"--{option} " in text


def test_version() -> None:
    assert localspec("--version").stdout.startswith(b"localspec 0.")


# -- bad usage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["chta"], "Did you mean 'chat'"),
        (["generate", "--temprature", "1"], "did you mean --temperature?"),
        (["generate", "--temp", "0"], "did you mean --temperature?"),
        (["generate", "--max", "0"], "did you mean --max-tokens?"),
        (["generate", "--draft-o"], "did you mean --draft-only?"),
        (["generate", "--qqq"], "no such option: --qqq (see localspec generate --help)"),
        (["generate", "--seed", "x"], "--seed"),
        (["generate", "--draft-length", "many", "-p", "x"], "draft length"),
        (["generate", "--draft-length", "-1", "-p", "x"], "draft length"),
        (["generate", "--draft-length", "100000", "-p", "x"], "draft length"),
        (["generate", "--temperature", "nan", "-p", "x"], "temperature"),
        (["generate", "--temperature", "-1", "-p", "x"], "temperature"),
        (["generate", "--temperature", "1e9", "-p", "x"], "temperature"),
        (["generate", "--top-k", "-5", "-p", "x"], "--top-k"),
        (["generate", "--top-p", "0", "-p", "x"], "top_p"),
        (["generate", "--top-p", "inf", "-p", "x"], "top_p"),
        (["generate", "--min-p", "1", "-p", "x"], "min_p"),
        (["generate", "--repeat-penalty", "0", "-p", "x"], "repeat_penalty"),
        (["generate", "--max-tokens", "0", "-p", "x"], "--max-tokens"),
        (["generate", "--seed", str(10**30), "-p", "x"], "seed"),
        (["generate", "--stop", "", "-p", "x"], "stop"),
        (["generate", "--ctx", "0", "-p", "x"], "--ctx"),
        (["generate", "--ctx", str(10**18), "-p", "x"], "--ctx"),
        (["generate", "--threads", "0", "-p", "x"], "--threads"),
        (["generate", "--threads", "1000000", "-p", "x"], "--threads"),
        (["generate", "--gpu-layers", "-1", "-p", "x"], "--gpu-layers"),
        (["generate", "--draft", "auto", "--draft", "ngram", "-p", "x"], "--draft auto"),
        (["generate", "--draft", "ngrm", "-p", "x"], "did you mean ngram"),
        (["generate", "--format", "xml", "-p", "x"], "--format"),
        (["generate", "--raw", "--system", "s", "-p", "x"], "--system"),
        (["generate", "-p", " \n"], "empty"),
        (["generate"], "empty"),
        (
            ["generate", "Hello"],
            "there is no model 'Hello'; see: localspec list --all (a prompt of one word goes after -p)",
        ),
        (["generate", "Tell me a joke", "-p", "x"], "there is no model 'Tell me a joke'"),
        (["generate", "/no/such.gguf", "Hello", "-p", "x"], "two prompts"),
        (["generate", "/no/such model.gguf"], "does not exist"),
        (["generate", "qwen2.5-coder-1.5", "-p", "x"], "did you mean qwen2.5-coder-1.5b"),
        (["generate", "/no/such.gguf", "-p", "x"], "does not exist"),
        (["generate", "/", "-p", "x"], "folder"),
        (["generate", "hf:odd", "-p", "x"], "hf:OWNER/REPO"),
        (["generate", "/no/such.gguf", "--prompt"], "requires an argument"),
        (["rm"], "NAME"),
        (["inspect", "/no/such.gguf"], "does not exist"),
    ],
)
def test_bad_usage(arguments: list[str], part: str) -> None:
    assert_one_line(localspec(*arguments), 2, part)


def test_an_argument_that_is_not_utf8() -> None:
    command = [os.fsencode(part) for part in PROGRAM] + [b"generate", b"-p", b"\xff"]
    result = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    assert_one_line(result, 2, "UTF-8")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_options_and_models(shell: str) -> None:
    for line, wanted in (
        ("localspec ch", "chat"),
        ("localspec generate --temp", "--temperature"),
        ("localspec chat smoll", "smollm2-135m"),
        ("localspec bench --draft ngr", "ngram"),
        ("localspec pull qwen2.5-coder-0", "qwen2.5-coder-0.5b"),
    ):
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_TYPER_COMPLETE_ARGS": line}
        asked = {
            **os.environ,
            **words,
            "_LOCALSPEC_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        found = subprocess.run(PROGRAM, env=asked, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert wanted in found.stdout, (line, found.stderr)


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_standard_input_that_is_not_utf8(tiny: TinyFiles, command: str) -> None:
    arguments = [command, tiny.bpe, "--backend", "reference", "--draft", "none", "--max-tokens", "4"]
    assert_one_line(localspec(*arguments, stdin=b"caf\xe9\n"), 2, "UTF-8", "0xe9")


def test_an_unknown_backend(tiny: TinyFiles) -> None:
    assert_one_line(localspec("generate", tiny.bpe, "--backend", "llamacpp", "-p", "x"), 2, "llama-cpp")


# -- files that are no models ------------------------------------------------------------------------------------------


def test_files_that_are_no_models(tiny: TinyFiles, tmp_path: Path) -> None:
    whole = tiny.bpe.read_bytes()
    files = {
        "empty": b"",
        "text": b"hello, I am a text file that somebody renamed",
        "zip": b"PK\x03\x04" + bytes(1000),
        "magic": b"GGML" + whole[4:],
        "header": whole[:20],
        "half": whole[: len(whole) // 2],
        "noise": whole[:64] + bytes(255 for _ in range(4000)),
    }
    for name, data in files.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        assert_one_line(localspec("generate", path, "-p", "x", "--draft", "none"), 1, path.name)


def test_models_that_cannot_generate(tiny: TinyFiles) -> None:
    for path in (tiny.tokenizer_only, tiny.embedding):
        assert_one_line(localspec("generate", path, "-p", "x", "--draft", "none"), 1, path.name)


def test_a_model_that_is_not_on_this_disk() -> None:
    assert_one_line(localspec("generate", "qwen2.5-coder-1.5b", "-p", "x"), 1, "localspec pull qwen2.5-coder-1.5b")


def test_offline_without_the_default_pair() -> None:
    for command in (["generate", "-p", "x"], ["chat"]):
        assert_one_line(localspec(*command), 1, "LOCALSPEC_OFFLINE")


class _Pulled:
    """Stands in for ``files.pull``; ``fails`` names the models that cannot be had."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails
        self.names: list[str] = []

    def __call__(self, name: str) -> None:
        self.names.append(name)
        if name in self.fails:
            raise DownloadError(f"{name} cannot be had")


def test_the_default_pair_is_fetched_on_first_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "0")
    target, draft = (entry.name for entry in Catalog.load().default_pair())
    monkeypatch.setattr(files, "pull", pull := _Pulled())
    assert ensure_model(None, ["auto"]) == target
    assert pull.names == [target, draft]
    assert f"fetching {target} and {draft} (1.6 GB), once" in capsys.readouterr().err
    monkeypatch.setattr(files, "pull", pull := _Pulled())
    assert ensure_model(None, ["none"]) == target
    assert pull.names == [target]
    monkeypatch.setattr(files, "pull", _Pulled(draft))
    assert ensure_model(None, ["auto"]) == target
    assert f"continuing without {draft}" in capsys.readouterr().err
    monkeypatch.setattr(files, "pull", _Pulled(target))
    with pytest.raises(DownloadError):
        ensure_model(None, ["auto"])


def test_with_a_head_on_the_disk_the_draft_model_is_not_fetched_unasked(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what asks without someone at a terminal; said where the target is fetched, and not at every later start."""
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "0")
    target, draft = Catalog.load().default_pair()
    names: list[str] = []

    def pull(name: str) -> None:
        names.append(name)
        if name == target.name:
            target.path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tiny.quick.target, target.path)

    monkeypatch.setattr(files, "pull", pull)
    monkeypatch.setattr(Entry, "present", property(lambda entry: entry.path.exists()))
    heads_folder().mkdir(parents=True)
    head = write_random_head(tiny.quick.target, heads_folder() / "a-head.gguf")
    assert ensure_model(None, ["auto"], sparing=True) == target.name
    err = capsys.readouterr().err
    assert names == [target.name]
    assert f"localspec pull {draft.name} fetches the draft model (0.5 GB) as well" in err
    assert ensure_model(None, ["auto"], sparing=True) == target.name
    assert (names, capsys.readouterr().err) == ([target.name], "")
    head.unlink()
    assert ensure_model(None, ["auto"], sparing=True) == target.name
    assert names == [target.name, draft.name]


def test_a_named_model_is_never_fetched_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "0")
    monkeypatch.setattr(files, "pull", pull := _Pulled())
    assert ensure_model("smollm2-135m", ()) == "smollm2-135m"
    assert pull.names == []
    assert ensure_model("smollm2-135m", (), yes=True) == "smollm2-135m"
    assert pull.names == ["smollm2-135m"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets somebody sit at a terminal and type something."""
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "0")

    def typed(text: str) -> None:
        stdin = io.StringIO(text)
        monkeypatch.setattr(stdin, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    return typed


@pytest.mark.parametrize(("answer", "fetches"), [("\n", True), ("Y\n", True), ("what?\nyes\n", True), ("n\n", False)])
@pytest.mark.parametrize("model", ["smollm2-135m", "hf:acme/tiny/tiny.gguf"])
def test_at_a_terminal_one_question_fetches_a_named_model(
    terminal: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    answer: str,
    fetches: bool,
) -> None:
    monkeypatch.setattr(files, "pull", pull := _Pulled())
    terminal(answer)
    if fetches:
        assert ensure_model(model, ["auto"]) == model
    else:
        with pytest.raises(ModelFileError, match=f"localspec pull {model}"):
            ensure_model(model, ["auto"])
    size = ": 98.4 MB" if model == "smollm2-135m" else ""
    assert capsys.readouterr().err.startswith(f"{model} is not here{size}. Fetch it? [Y/n] ")
    assert pull.names == [model] * fetches


def test_nothing_is_asked_that_was_answered(
    terminal: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line, by the environment, or by the disk; a path is nothing to fetch."""
    monkeypatch.setattr(files, "pull", pull := _Pulled())
    terminal("")
    assert ensure_model("smollm2-135m", (), yes=True) == "smollm2-135m"
    assert pull.names == ["smollm2-135m"]
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "1")
    assert ensure_model("smollm2-135m", (), yes=True) == "smollm2-135m"
    assert ensure_model("/no/such.gguf", ()) == "/no/such.gguf"
    with pytest.raises(ModelFileError, match="LOCALSPEC_OFFLINE"):
        ensure_model(None, ["auto"])
    assert pull.names == ["smollm2-135m"]
    assert "Fetch" not in capsys.readouterr().err


def test_a_draft_that_is_named_is_asked_for_too(
    terminal: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "pull", pull := _Pulled())
    terminal("\n")
    ensure_model("qwen2.5-coder-1.5b", ["ngram", "qwen2.5-coder-0.5b", "head:x.gguf"])
    assert "qwen2.5-coder-1.5b and qwen2.5-coder-0.5b are not here: 1.61 GB. Fetch them?" in capsys.readouterr().err
    assert pull.names == ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"]


@pytest.mark.parametrize("sparing", [True, False])
@pytest.mark.parametrize("answer", ["\n", "no\n", ""])
def test_at_a_terminal_the_default_model_is_one_question(
    terminal: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    sparing: bool,
) -> None:
    monkeypatch.setattr(files, "pull", pull := _Pulled())
    target, draft = (entry.name for entry in Catalog.load().default_pair())
    terminal(answer)
    if answer == "\n":
        assert ensure_model(None, ["auto"], sparing=sparing) == target
        assert pull.names == [target, draft]
    else:
        with pytest.raises(ModelFileError, match="was not fetched; localspec list --all shows smaller models"):
            ensure_model(None, ["auto"], sparing=sparing)
        assert pull.names == []
    err = capsys.readouterr().err
    assert err.count("[Y/n]") == 1
    size = "1.12 GB (491 MB more for a draft model, if" if sparing else "1.61 GB. Fetch them?"
    assert size in err


def test_what_is_not_to_be_fetched_is_not_spoken_of(
    terminal: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "pull", pull := _Pulled())
    target, draft = (entry.name for entry in Catalog.load().default_pair())
    for drafters, late in (([], False), (["ngram"], False), (["ngram"], True)):
        pull.names.clear()
        terminal("\n")
        assert ensure_model(None, drafters, sparing=True, late=late) == target
        assert pull.names == [target]
        assert ("more for a draft model" in capsys.readouterr().err) == late
    monkeypatch.setattr(Entry, "present", property(lambda entry: entry.name == target))
    for answer, fetched in (("n\n", []), ("\n", [draft])):
        pull.names.clear()
        terminal(answer)
        assert ensure_model(None, ["auto"]) == target
        assert f"{draft} is not here: 491 MB. Fetch it?" in capsys.readouterr().err
        assert pull.names == fetched
        if not fetched:  # a no is remembered, and the way to be asked again is said
            terminal("")
            assert ensure_model(None, ["auto"]) == target
            assert capsys.readouterr().err == ""
            shutil.rmtree(home() / "declined")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("command", ["chat", "serve", "generate -p x", "bench", "verify", "distill"])
def test_every_command_asks_at_a_terminal(command: str) -> None:
    import pexpect

    verb, *more = command.split()
    environment = {**os.environ, "LOCALSPEC_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    arguments = ["-m", "localspec", verb, "smollm2-135m", *more]
    child = pexpect.spawn(sys.executable, arguments, env=environment, timeout=PATIENCE, encoding="utf-8")
    child.expect_exact("smollm2-135m is not here: 98.4 MB. Fetch it? [Y/n] ")
    child.sendline("n")
    child.expect_exact("localspec: smollm2-135m is not on this disk; run: localspec pull smollm2-135m")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 1


def test_a_draft_with_another_vocabulary(tiny: TinyFiles) -> None:
    arguments = ["generate", tiny.bpe, "--draft", tiny.spm, "--backend", "reference", "-p", "x"]
    assert_one_line(localspec(*arguments), 1, tiny.spm.name)


def test_a_draft_larger_than_the_target_is_a_warning(tiny: TinyFiles) -> None:
    pair = tiny.pair
    result = localspec(
        "generate", pair.draft, "--draft", pair.target, "--backend", "reference", "-p", "x", "--max-tokens", "3"
    )
    assert result.returncode == 0
    assert "larger than the target" in result.stderr.decode()


def test_a_prompt_longer_than_the_context(tiny: TinyFiles) -> None:
    arguments = ["generate", tiny.bpe, "--ctx", "16", "--backend", "reference", "--draft", "none", "-p", "word " * 50]
    assert_one_line(localspec(*arguments), 2, "16", "--ctx")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% for i in range(10**12) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{% if %}",
        "{{ 'x' * 10**12 }}",
    ],
)
def test_a_chat_template_that_fails_or_never_ends(tmp_path: Path, template: str) -> None:
    path = ggufs.write_llama(tmp_path / "odd-template.gguf", extra={"tokenizer.chat_template": template})
    result = localspec("generate", path, "--backend", "reference", "--draft", "none", "-p", "x")
    assert_one_line(result, 1, "template")


# -- pipes and signals -------------------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    model = write_endless(tmp_path / "endless.gguf")
    command = [*PROGRAM, "generate", str(model), "--backend", "reference", "--draft", "none", "-p", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(PATIENCE) in (0, 141)
    assert not [line for line in errors.splitlines() if line.startswith("localspec:")]
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


def test_list_into_a_reader_that_stops_at_once() -> None:
    command = shlex.join(PROGRAM) + " list | true; echo ${PIPESTATUS[0]}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert result.stdout.strip() in ("0", "141")


@pytest.mark.parametrize(
    ("at", "count"),
    [
        ("import localspec.commands.cli", 1),
        ("import typer", 1),
        ("import localspec.llm", 1),
        ("import numpy", 1),
        ("import localspec.backends.base", 1),
        ("open MODEL", 1),
        ("said measuring what a pass", 1),
        ("call localspec.backends.reference:ReferenceContext._decode", 2),
        ("call localspec.backends.reference:ReferenceContext._decode", 40),
        ("call localspec.spec_decode.rounds:SpecStats.add", 1),
        ("call localspec.spec_decode.rounds:SpecStats.add", 25),
    ],
)
def test_ctrl_c_at_any_moment(tmp_path: Path, at: str, count: int) -> None:
    model = write_endless(tmp_path / "endless.gguf")
    arguments = ["generate", model, "--backend", "reference", "--draft", "ngram", "-p", "x"]
    _, lines = interrupted(at.replace("MODEL", str(model)), arguments, count=count)
    assert lines[-1] == "localspec: interrupted"


READING = """
import sys

class Buffer:
    def read(self):
        print("reading", file=sys.stderr, flush=True)
        return sys.__stdin__.buffer.read()

class Stdin:
    buffer = Buffer()
    isatty = lambda self: False

sys.stdin = Stdin()
from localspec.__main__ import main
main(["generate"])
"""


def test_ctrl_c_while_reading_standard_input() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", READING], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"reading\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (130, b"localspec: interrupted\n")
