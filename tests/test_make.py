"""``scripts/make.py``: the README's two commands, by way of make and without it."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent

STUB = """#!/bin/sh
# Stands for the interpreter of a virtual environment that is up to date: pip takes note, all else is answered.
case "$*" in
    *"localspec engine build"*) echo "$*" >>"$NOTES"; exit "${BUILD_STATUS:-0}" ;;
    *"-m pip"*) echo "$*" >>"$NOTES"; exit "${PIP_STATUS:-0}" ;;
    *candidates*) exit "${ENGINE_STATUS:-0}" ;;
    *pytest*) echo "$*"; cat ;;
esac
"""


class Checkout:
    """A copy of what ``scripts/make.py`` reads, with an environment that needs nothing more."""

    def __init__(self, folder: Path, make: bool) -> None:
        self.folder, self.notes = folder, folder / "notes"
        self.command = ["make"] if make else [sys.executable, "scripts/make.py"]
        for name in ("scripts/make.py", "Makefile", "pyproject.toml"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        stub = folder / ".venv/bin/python"
        stub.parent.mkdir(parents=True)
        stub.write_text(STUB)
        stub.chmod(0o755)
        stub.with_name("localspec").symlink_to(shutil.which("echo") or "echo")
        self.stamp = folder / ".venv/.installed"
        self.stamp.write_text(f"{folder} [] []\n")
        self.environment = os.environ | {"NOTES": str(self.notes)}
        set_by_make = ("PYTHON", "NATIVE", "VENV", "VENV_TEST", "ARGS", "MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL")
        for name in (*set_by_make, "CMAKE_ARGS"):
            self.environment.pop(name, None)

    def run(
        self, *arguments: str, text: str = "", status: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*self.command, *arguments], cwd=self.folder, env=self.environment | environment, input=text,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return done

    def chat(self, *settings: str, **environment: str) -> tuple[str, list[str]]:
        """What is said on the way to the chat, and what pip was asked for by then."""
        done = self.run(*settings, "chat", **environment)
        assert done.stdout == "chat\n"  # the program, and nothing before it
        return done.stderr, self.asked()

    def asked(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []


@pytest.fixture(params=["make", "without make"])
def checkout(tmp_path: Path, request: pytest.FixtureRequest) -> Checkout:
    if sys.platform == "win32" or (request.param == "make" and shutil.which("make") is None):
        pytest.skip("make is not installed, or the stand-in for Python, a shell script, cannot run")
    (tmp_path / "checkout").mkdir()
    return Checkout(tmp_path / "checkout", request.param == "make")


def test_chat_native_has_the_engine_compiled_once_and_only_if_asked_to(checkout: Checkout) -> None:
    assert checkout.chat() == checkout.chat("NATIVE=0") == ("", [])
    for n in (1, 2):  # where it fails it is tried again
        said, asked = checkout.chat("NATIVE=1", BUILD_STATUS="1")
        assert (said, len(asked)) == ("localspec: NATIVE=1: going on with the engine's wheel\n", n)
    said, asked = checkout.chat("NATIVE=1")
    assert (said, asked) == ("", ["-m localspec engine build"] * 3)
    for again in (checkout.chat("NATIVE=1"), checkout.chat(NATIVE="1"), checkout.chat()):
        assert again == ("", asked)
    later = (checkout.folder / ".venv/.native").stat().st_mtime + 10
    os.utime(checkout.stamp, (later, later))  # another installation may have brought another version of it
    assert len(checkout.chat("NATIVE=1")[1]) == 4


def test_a_changed_project_is_installed_anew(checkout: Checkout) -> None:
    """By the environment that is there; the stamp is written when all is done, and names what was installed."""
    later = checkout.stamp.stat().st_mtime + 10
    os.utime(checkout.folder / "pyproject.toml", (later, later))
    said, asked = checkout.chat(PYTHON=sys.executable)
    assert said.startswith("localspec: installing into .venv with Python 3.")
    assert [line.endswith("-e .") for line in asked] == [True]
    os.utime(checkout.stamp, (later, later))
    assert checkout.chat() == ("", asked)
    checkout.stamp.unlink()
    said, asked = checkout.chat(ENGINE_STATUS="3")
    assert "the ready-made engine does not run on this machine: compiling llama-cpp-python" in said
    assert asked[-1].endswith("-e .[llama-cpp]")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PIP_STATUS": "1"}, "the installation failed; all of pip's output is in {folder}/.venv/install.log"),
        ({"PYTHON": "nothing-here"}, "no Python 3.11, 3.12 or 3.13 found under PYTHON=nothing-here"),
    ],
)
def test_an_installation_that_fails_is_one_line_and_leaves_no_stamp(
    checkout: Checkout, environment: dict[str, str], said: str
) -> None:
    checkout.stamp.unlink()
    done = checkout.run("chat", status=2 if checkout.command == ["make"] else 1, **environment)
    assert "localspec: " + said.format(folder=checkout.folder) in done.stderr
    assert not checkout.stamp.exists()


def test_the_suite_runs_in_an_environment_of_its_own_and_reads_standard_input(checkout: Checkout) -> None:
    shutil.copytree(checkout.folder / ".venv", checkout.folder / "other", symlinks=True)
    (checkout.folder / "other/.installed").write_text(f"{checkout.folder} [dev] [all]\n")
    options = ["VENV_TEST=other", "test", "ARGS=-k ngram"]
    if checkout.command != ["make"]:
        options = ["VENV_TEST=other", "test", "-k", "ngram"]
    done = checkout.run(*options, text="hello")
    assert done.stdout == "-m pytest -n 3 --dist loadfile -k ngram\nhello"


def test_what_cannot_be_built_is_left_out(checkout: Checkout) -> None:
    """The environment of the tests is whole without the engines that have to be compiled."""
    tests = checkout.folder / ".venv-test"
    shutil.copytree(checkout.folder / ".venv", tests, symlinks=True)
    (tests / ".installed").unlink()
    picky = STUB.replace('exit "${PIP_STATUS:-0}"', 'case "$*" in *,all]*) exit 1 ;; esac; exit 0')
    (tests / "bin/python").write_text(picky)
    said = checkout.run("test").stderr
    assert "localspec: going on without the extra 'all', which could not be built here" in said
    assert [line.rpartition(" ")[2] for line in checkout.asked()] == [".[dev,all]", ".[dev]"]
    assert (tests / ".installed").exists()


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_script", ROOT / "scripts/make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["make", "check_here", "stages"])
def test_any_python_can_read_them(name: str) -> None:
    text = (ROOT / f"scripts/{name}.py").read_text("utf-8")
    ast.parse(text, feature_version=(3, 7))
    assert text.isascii() or name != "make"  # a console of any encoding can show its messages


def test_windows_asks_the_launcher_too(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.setattr(script, "WINDOWS", True)
    assert ["py", "-3.12"] in script.interpreters()
    monkeypatch.setenv("PYTHON", "py -3.11")
    assert script.interpreters() == [["py", "-3.11"]]
    environment = script.Environment(".venv")
    assert Path(environment.program("localspec")) == ROOT / ".venv/Scripts/localspec.exe"


@pytest.mark.skipif(sys.platform == "win32", reason="there Python cannot send SIGINT to its parent")
def test_on_windows_the_program_is_waited_for_and_ctrl_c_is_left_to_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "WINDOWS", True)
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(0.5); raise SystemExit(7)"
    with pytest.raises(SystemExit) as ended:
        script.start([sys.executable, "-c", code])
    assert ended.value.code == 7
