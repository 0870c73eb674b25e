"""What Windows does otherwise, as far as it can be acted out here: nobody has run localspec there yet."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import signal
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localspec import __main__ as program
from localspec.backends.registry import unavailable_reason
from localspec.backends.trial import survives
from localspec.commands.chat.screen import no_echo
from localspec.server.app import ending_signals
from localspec.system.files import write_atomically
from localspec.system.terminal import moves_cursor
from tests.conftest import TinyFiles
from tests.support.program import apart, localspec

ON_LINUX = pytest.mark.skipif(sys.platform == "win32", reason="acts out what is real there")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")


class Console:
    """The console's half of kernel32: what it is asked, and the modes that it has."""

    def __init__(self, *, is_console: bool = True, is_old: bool = False) -> None:
        self.is_console, self.is_old, self.mode = is_console, is_old, 3

    def GetConsoleMode(self, handle: Any, mode: Any) -> int:
        mode._obj.value = self.mode
        return int(self.is_console)

    def SetConsoleMode(self, handle: Any, mode: int) -> int:
        if self.is_old:
            return 0
        self.mode = mode
        return 1


@ON_LINUX
@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize(
    ("console", "moves", "mode"),
    [(Console(), True, 7), (Console(is_old=True), False, 3), (Console(is_console=False), True, 3)],
    ids=["console", "console before Windows 10", "mintty"],
)
def test_a_console_is_told_to_heed_escape_sequences(
    console: Console, moves: bool, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=console), raising=False)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(get_osfhandle=lambda number: number))
    assert moves_cursor(SimpleNamespace(isatty=lambda: True, fileno=lambda: 1)) is moves
    assert console.mode == mode
    assert not moves_cursor(io.StringIO())


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize(("own", "encoding", "shown"), [(None, "utf-8", "é ✓ 日本"), ("cp1252", "cp1252", "é ? ??")])
def test_a_file_or_pipe_gets_every_character_unless_the_person_chose_an_encoding(
    own: str | None, encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    if own is not None:
        monkeypatch.setenv("PYTHONIOENCODING", own)
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="cp1252"))
    program.prepare_streams()
    print("é ✓ 日本", flush=True)
    assert buffer.getvalue().decode(encoding) == f"{shown}{os.linesep}"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (OSError(errno.EINVAL, "Invalid argument"), True),
        (OSError(errno.EINVAL, "Invalid argument", "a:b"), False),
        (OSError(errno.ENOSPC, "No space left"), False),
        (ValueError(22), False),
    ],
)
def test_a_pipe_whose_reader_went_away(error: Exception, is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not program.is_windows_broken_pipe(error) or sys.platform == "win32"
    monkeypatch.setattr(sys, "platform", "win32")
    assert program.is_windows_broken_pipe(error) is is_one


COMMANDS = (
    "--help", "list", "inspect MODEL", "doctor MODEL --draft none --backend reference",
    "generate MODEL --draft ngram --raw -p é✓→ --max-tokens 8 --format events --backend reference",
    "chat MODEL --draft ngram --max-tokens 20 --backend reference",
)  # fmt: skip


@pytest.mark.usefixtures("measured_home")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_writes_to_a_console_of_cp1252(
    command: str, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model text, marks and tables hold characters that it lacks; a byte-level vocabulary says any of them."""
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    arguments = [str(tiny.quick.target) if word == "MODEL" else word for word in command.split()]
    said = "Grüße ✓\n/stats\n/why\n/view rounds\nagain\n".encode()
    done = localspec(*arguments, stdin=said, encoding="cp1252")
    assert done.returncode == 0, done.stderr
    assert b"codec" not in done.stderr
    assert done.stdout


@ON_LINUX
@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("held", [3, 1000])
def test_a_file_that_another_program_looks_at_is_replaced_a_moment_later(
    held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, tries = os.replace, []

    def refuse(source: Path, target: Path) -> None:
        tries.append(source)
        if len(tries) <= held:
            raise PermissionError(errno.EACCES, "Access is denied", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr("localspec.system.files._TRIES", 200)
    path = tmp_path / "kept"
    path.write_bytes(b"before")
    with nullcontext() if held == 3 else pytest.raises(PermissionError), write_atomically(path) as file:
        file.write(b"after")
    assert path.read_bytes() == (b"after" if held == 3 else b"before")
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]


@ON_LINUX
def test_ctrl_break_ends_the_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ending_signals() == [signal.SIGINT, signal.SIGTERM]
    monkeypatch.setattr(signal, "SIGBREAK", 21, raising=False)
    assert ending_signals() == [signal.SIGINT, signal.SIGTERM, 21]


def test_ctrl_c_during_a_trial_says_nothing_of_the_file(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("localspec.backends.trial.run_child", lambda *rest: asked.append(1) or 0xC000013A)
    for _ in range(2):
        assert not survives(tiny.bpe, "an engine", "f16", 1)
    assert len(asked) == 2


def test_a_chat_without_termios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "termios", None)
    with no_echo():
        pass


LOAD = """
import ctypes, sys
from pathlib import Path

find = ctypes.CDLL.__getattr__
def hiding(self, name):
    if name.startswith("ggml_") and "llama" in Path(self._name).name:
        raise AttributeError(name)  # Windows shows a library's own functions, not those of others that it needs
    return find(self, name)
ctypes.CDLL.__getattr__ = hiding

from localspec.backends.llama import ik_llama
with ik_llama.load(sys.argv[1]) as model, model.new_context(8, hidden=("norm",)) as context:
    forward = context.decode([1, 2, 3])
    print(forward.logits.shape[0], forward.hidden["norm"].shape[0])
"""


@ON_LINUX
def test_ik_llama_finds_ggml_where_a_library_shows_only_its_own_functions(tiny: TinyFiles, tmp_path: Path) -> None:
    if (reason := unavailable_reason("ik-llama")) is not None:
        pytest.skip(reason)
    spec = find_spec("ik_llama_cpp")
    package = Path(spec.origin).parent
    lib = tmp_path / "ik_llama_cpp/lib"
    lib.mkdir(parents=True)
    linked = package.parent / "ik_llama_cpp_python.libs"  # what libllama of a wheel for Linux is linked with
    (tmp_path / linked.name).symlink_to(linked)
    (lib / "ggml.dll").symlink_to(
        next(path for folder in (linked, package / "lib") for path in folder.glob("libggml*"))
    )
    for path in (package / "lib").glob("lib*"):
        (lib / path.name).symlink_to(path)
    assert apart(LOAD, tiny.bpe, IK_LLAMA_CPP_LIB_PATH=str(next(lib.glob("libllama.*")))) == "3 3"
