"""The command line as a shell sees it: one line per error, exit statuses, start-up."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from localspec.__main__ import run
from localspec.commands import cli, files
from localspec.commands.chat.screen import VIEWS
from localspec.commands.options import ensure_model
from localspec.errors import DownloadError, LocalspecError
from localspec.heads.file import heads_folder
from localspec.model_files.catalog import Catalog, Entry
from localspec.prompts.thinking import THINK
from localspec.system.files import home
from tests.conftest import TinyFiles
from tests.model_files.test_catalog import put
from tests.support import ggufs
from tests.support.endless import write_endless
from tests.support.heads import write_random_head
from tests.support.interrupting import interrupted
from tests.support.program import PROGRAM, assert_one_line, localspec
from tests.support.waiting import PATIENCE


def test_help_names_the_commands() -> None:
    shown = localspec("--help").stdout.decode()
    for command in ("chat", "generate", "pull", "list", "rm", "inspect"):
        assert f"  {command} " in shown
    assert localspec("--version").stdout.startswith(b"localspec 0.")


BAD_USAGE = {
    "chta": "Did you mean 'chat'",
    "rm": "NAME",
    "inspect /no/such.gguf": "does not exist",
    "generate": "empty",
    "generate -p ' \n'": "empty",
    "generate --temprature 1": "did you mean --temperature?",
    "generate --max 0": "did you mean --max-tokens?",
    "generate --qqq": "no such option: --qqq (see localspec generate --help)",
    "generate --seed x": "--seed",
    "generate Hello": "there is no model 'Hello'; see: localspec list --all (a prompt of one word goes after -p)",
    "generate 'Tell me a joke' -p x": "there is no model 'Tell me a joke'",
    "generate /no/such.gguf Hello -p x": "two prompts",
    "generate '/no/such model.gguf'": "does not exist",
    "generate /no/such.gguf --prompt": "requires an argument",
    **{f"generate -p x {options}": part for options, part in {
        "--draft-length many": "draft length",
        "--temperature nan": "temperature",
        "--max-tokens 0": "--max-tokens",
        "--stop ''": "stop",
        "--gpu-layers -1": "--gpu-layers",
        "--draft auto --draft ngram": "--draft auto",
        "--draft ngrm": "did you mean ngram",
        "--format xml": "--format",
        "qwen2.5-coder-1.5": "did you mean qwen2.5-coder-1.5b",
    }.items()},
}  # fmt: skip
"""What is typed, and part of the line that says what is wrong with it."""


@pytest.mark.parametrize("line", BAD_USAGE)
def test_bad_usage(line: str) -> None:
    assert_one_line(localspec(*shlex.split(line)), 2, BAD_USAGE[line])


def test_the_words_of_an_option_are_those_of_what_reads_it() -> None:
    assert (get_args(cli.View), get_args(cli.Think)) == (VIEWS, THINK)


def test_what_is_not_utf8(tiny: TinyFiles) -> None:
    for command in ("chat", "generate"):
        result = localspec(command, tiny.quick.target, *PLAIN[:4], "--max-tokens", "4", stdin=b"caf\xe9\n")
        assert_one_line(result, 2, "UTF-8", "0xe9")
    command = [os.fsencode(part) for part in PROGRAM] + [b"generate", b"-p", b"\xff"]
    result = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    assert_one_line(result, 2, "UTF-8")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell", "pwsh"])
def test_a_shell_completes_commands_options_and_models(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_LOCALSPEC_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    for line, wanted in (
        ("localspec ch", "chat"),
        ("localspec generate --temp", "--temperature"),
        ("localspec chat smoll", "smollm2-135m"),
        ("localspec bench --draft ngr", "ngram"),
        ("localspec pull qwen2.5-coder-0", "qwen2.5-coder-0.5b"),
        ("localspec config set kv", "kv-cache"),
        ("localspec config set model smoll", "smollm2-135m"),
    ):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_WORD_TO_COMPLETE", line.split()[-1])
        assert wanted in localspec().stdout.decode(), line


def test_models_on_the_disk_are_completed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog.load()
    put(here := catalog["smollm2-135m"])
    monkeypatch.setenv("_LOCALSPEC_COMPLETE", "complete_zsh")
    for line, others in (("chat ", True), ("bench --draft ", True), ("rm ", False)):
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"localspec {line}")
        said = localspec().stdout.decode()
        names = sorted((name for name in catalog if f'"{name}"' in said), key=said.index)
        assert (names[0], len(names) > 1) == (here.name, others)


PLAIN = ("--backend", "reference", "--draft", "none", "-p", "x")


def test_what_cannot_answer_is_one_line(tiny: TinyFiles, tmp_path: Path) -> None:
    """What else a damaged file may be is for tests/backends/test_damaged_models.py and the fuzzer."""
    (cut := tmp_path / "cut.gguf").write_bytes(tiny.bpe.read_bytes()[:50_000])
    template = {"tokenizer.chat_template": "{{ raise_exception('no') }}"}
    odd = ggufs.write_llama(tmp_path / "odd.gguf", ggufs.Shape(n_layer=1), extra=template)
    for arguments, status, *parts in (
        *(([path, *PLAIN], 1, path.name) for path in (cut, tiny.tokenizer_only, tiny.embedding)),
        ([odd, *PLAIN], 1, "template"),
        (["qwen2.5-coder-1.5b", "-p", "x"], 1, "localspec pull qwen2.5-coder-1.5b"),
        (["-p", "x"], 1, "LOCALSPEC_OFFLINE"),
        ([tiny.bpe, "--backend", "llamacpp", "-p", "x"], 2, "llama-cpp"),
        ([tiny.quick.target, "--draft", tiny.embedding, *PLAIN[:2], "-p", "x"], 1, tiny.embedding.name),
        ([tiny.quick.target, "--ctx", "16", *PLAIN[:4], "-p", "word " * 50], 2, "16", "--ctx"),
    ):
        assert_one_line(localspec("generate", *arguments), status, *parts)
    assert_one_line(localspec("chat"), 1, "LOCALSPEC_OFFLINE")


class Disk:
    """Models that are here, and those that were fetched; ``fails`` cannot be had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pulled: list[str] = []
        self.present: set[str] = set()
        self.fails = ""
        monkeypatch.setenv("LOCALSPEC_OFFLINE", "0")
        monkeypatch.setattr(files, "pull", self._pull)
        monkeypatch.setattr("localspec.commands.options.larger_choice", lambda target: None)  # as on a small machine
        monkeypatch.setattr(Entry, "present", property(lambda entry: entry.name in self.present))

    def _pull(self, name: str) -> None:
        self.pulled.append(name)
        if name == self.fails:
            raise DownloadError(f"{name} cannot be had")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def sit_down(monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    stdin = io.StringIO(typed)
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


TARGET, DRAFT = (entry.name for entry in Catalog.load().default_pair())
SMOL, HUB, BIG = "smollm2-135m", "hf:acme/tiny/tiny.gguf", "qwen2.5-coder-1.5b"
SMOL_ASKED = f"{SMOL} is not here: 98.4 MB, about 1 min. Fetch it? [Y/n] "
BIG_ASKED = f"{BIG} and {DRAFT} are not here: 1.61 GB, about 3 min. Fetch them?"
TARGET_ASKED = "1.12 GB, about 2 min (491 MB more for a draft model, if that makes answers faster here). Fetch it?"
UNFETCHED = "was not fetched; localspec list --all shows smaller models"
YES, LATE, OFFLINE = {"yes": True}, {"late": True}, {"offline": True}

# The model, the drafters and options; what is typed (None: no terminal); what is fetched; what is said, and the
# error if there is one.
FETCHES: list[tuple[str | None, list[str], dict[str, Any], str | None, list[str], str, str]] = [
    (None, ["auto"], {}, None, [TARGET, DRAFT], f"fetching {TARGET} (1.1 GB), once", ""),
    (None, ["auto"], {"fails": DRAFT}, None, [TARGET, DRAFT], f"continuing without {DRAFT}", ""),
    (None, ["auto"], {"fails": TARGET}, None, [TARGET], "", "cannot be had"),
    (SMOL, [], {}, None, [], "", ""),  # a named model is never fetched unasked
    (SMOL, ["auto"], {}, "what?\nyes\n", [SMOL], SMOL_ASKED, ""),
    (SMOL, ["auto"], {}, "n\n", [], SMOL_ASKED, f"localspec pull {SMOL}"),
    (HUB, ["auto"], {}, "", [], f"{HUB} is not here. Fetch it? [Y/n] ", f"localspec pull {HUB}"),
    (BIG, ["ngram", DRAFT, "head:x.gguf"], {}, "\n", [BIG, DRAFT], BIG_ASKED, ""),
    # What was answered is not asked: by the command line, by the environment, or by the disk.
    (SMOL, [], YES, "", [SMOL], "", ""),
    (SMOL, [], YES | OFFLINE, "", [], "", ""),
    (None, ["auto"], OFFLINE, "", [], "", "LOCALSPEC_OFFLINE"),
    # The default model is one question.
    (None, ["auto"], {}, "\n", [TARGET, DRAFT], TARGET_ASKED, ""),
    (None, ["auto"], {}, "no\n", [], TARGET_ASKED, UNFETCHED),
    (None, [], {}, "\n", [TARGET], "1.12 GB, about 2 min. Fetch it?", ""),
    (None, ["ngram"], LATE, "\n", [TARGET], TARGET_ASKED, ""),
    (None, ["auto"], {"present": {TARGET}}, "\n", [DRAFT], f"{DRAFT} is not here: 491 MB, about 1 min. Fetch it?", ""),
]


@pytest.mark.parametrize(
    ("model", "drafters", "given", "typed", "pulled", "said", "error"), FETCHES, ids=range(len(FETCHES))
)
def test_what_is_asked_and_fetched(
    model: str | None, drafters: list[str], given: dict[str, Any], typed: str | None, pulled: list[str], said: str,
    error: str, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    options = dict(given)
    disk.present, disk.fails = options.pop("present", set()), options.pop("fails", "")
    if options.pop("offline", False):
        monkeypatch.setenv("LOCALSPEC_OFFLINE", "1")
    if typed is not None:
        sit_down(monkeypatch, typed)
    if error:
        with pytest.raises(LocalspecError, match=error):
            ensure_model(model, drafters, **options)
    else:
        assert ensure_model(model, drafters, **options) == (model or TARGET)
    err = capsys.readouterr().err
    assert disk.pulled == pulled
    assert said in err
    assert ("[Y/n]" in err) == ("Fetch" in said)


def test_a_draft_model_that_was_declined_is_not_offered_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.present = {TARGET}
    for typed, questions in (("n\n", 1), ("", 0)):
        sit_down(monkeypatch, typed)
        assert ensure_model(None, ["auto"]) == TARGET
        assert capsys.readouterr().err.count("[Y/n]") == questions
    shutil.rmtree(home() / "declined")  # as it says
    sit_down(monkeypatch, "\n")
    assert ensure_model(None, ["auto"]) == TARGET
    assert disk.pulled == [DRAFT]


def test_with_a_head_on_the_disk_the_draft_model_is_not_fetched_unasked(
    tiny: TinyFiles, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what asks without someone at a terminal; said where the target is fetched, and not at every later start."""
    target, _ = Catalog.load().default_pair()
    target.path.parent.mkdir(parents=True)
    shutil.copy(tiny.quick.target, target.path)
    heads_folder().mkdir(parents=True)
    head = write_random_head(tiny.quick.target, heads_folder() / "a-head.gguf")
    note = f"localspec pull {DRAFT} fetches the draft model (0.5 GB) as well"
    for present, pulled, said in (((), [TARGET], True), ((TARGET,), [TARGET], False)):
        disk.present = {*present}
        assert ensure_model(None, ["auto"]) == TARGET
        assert (disk.pulled, note in capsys.readouterr().err) == (pulled, said)
    head.unlink()
    assert ensure_model(None, ["auto"]) == TARGET
    assert disk.pulled == [TARGET, DRAFT]


@pytest.mark.usefixtures("disk")
def test_every_command_asks_at_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for verb, *more in (["chat"], ["serve"], ["generate", "-p", "x"], ["bench"], ["verify"], ["distill"]):
        sit_down(monkeypatch, "n\n")
        assert run([verb, SMOL, *more]) == 1
        err = capsys.readouterr().err
        assert SMOL_ASKED in err
        assert f"localspec: {SMOL} is not on this disk; run: localspec pull {SMOL}" in " ".join(err.split())


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    model = write_endless(tmp_path / "endless.gguf")
    command = [*PROGRAM, "generate", str(model), "--backend", "reference", "--draft", "none", "-p", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(PATIENCE) in (0, 141)
    assert not re.search("^localspec:|Traceback|Exception ignored", errors, re.MULTILINE)


@pytest.mark.parametrize(
    ("at", "count"),
    [
        ("import localspec.commands.cli", 1),
        ("import localspec.llm", 1),
        ("open MODEL", 1),
        ("said measuring what a pass", 1),
        ("call localspec.backends.reference:ReferenceContext._decode", 40),
        ("call localspec.spec_decode.rounds:SpecStats.add", 25),
    ],
)
def test_ctrl_c_at_any_moment(tmp_path: Path, at: str, count: int) -> None:
    model = write_endless(tmp_path / "endless.gguf")
    arguments = ["generate", model, "--backend", "reference", "--draft", "ngram", "-p", "x"]
    _, lines = interrupted(at.replace("MODEL", str(model)), arguments, count=count)
    assert lines[-1] == "localspec: interrupted"


def test_ctrl_c_while_reading_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer = SimpleNamespace(read=lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=buffer, isatty=lambda: False))
    assert run(["generate"]) == 130
    assert capsys.readouterr() == ("", "localspec: interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize(
    ("arguments", "streams", "status", "said"),
    [
        ("config path", ">/dev/full", 1, "localspec: No space left on device\n"),
        ("--help", ">/dev/full", 1, "localspec: No space left on device\n"),
        ("generate -p", "2>/dev/full", 2, ""),
        ("config path", "<&- >&-", 0, ""),
        ("config path", "<&- >&- 2>&-", 0, ""),
        ("--help", "| true; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_streams_that_are_full_closed_or_left(arguments: str, streams: str, status: int, said: str) -> None:
    command = ["bash", "-c", f"{shlex.join(PROGRAM)} {arguments} {streams}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (status, said)
