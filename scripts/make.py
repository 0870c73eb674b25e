"""The checkout's commands, each in a virtual environment of its own, which it makes when needed.

    python3 scripts/make.py chat [OPTIONS]           talk to a model: localspec chat OPTIONS
    python3 scripts/make.py test [OPTIONS]           the test suite: pytest OPTIONS, with every engine installed
    python3 scripts/make.py dev [PROGRAM OPTIONS]    a program of the tests' environment, such as ruff, mypy or python

`make` calls this; where there is no make, as on Windows, call it yourself (there: `py scripts/make.py chat`). Settings
are environment variables, or come before the command, as in `make.py NATIVE=1 chat`:

    PYTHON    the interpreter to install with; otherwise the one that runs this, if it fits, or one that is found
    NATIVE=1  compile the engine for this CPU, once: no extra can ask for that, as extras only name packages
    VENV, VENV_TEST    where the environments lie (.venv, .venv-test)

Any Python from 3.7 on runs this file. All that it says goes to standard error, and standard input is left to the
program that it starts: `echo hello | make chat`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = sys.platform == "win32"
FITTING = ("3.13", "3.12", "3.11")
SETTINGS = ("PYTHON", "NATIVE", "VENV", "VENV_TEST")

# Ends with 3 where no engine suits this machine; an engine may also kill the process.
PROBE_ENGINE = """
from localspec.backends import candidates
from localspec.errors import EngineUnavailable
try:
    candidates()
except EngineUnavailable:
    raise SystemExit(3)
"""


def say(text: str) -> None:
    print(f"localspec: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    say(text)
    raise SystemExit(1)


# -- interpreters ------------------------------------------------------------------------------------------------------


def answers(command: list[str], code: str) -> str | None:
    """What an interpreter prints when it runs ``code``; None if it cannot."""
    try:
        done = subprocess.run(
            [*command, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    return done.stdout.decode("ascii", "replace").strip() if done.returncode == 0 else None


def interpreters() -> list[list[str]]:
    """Commands to try, the best first."""
    chosen = os.environ.get("PYTHON", "").strip()
    if chosen:
        return [[chosen] if shutil.which(chosen) else chosen.split()]  # a path with spaces, or "py -3.12"
    named = [[f"python{version}"] for version in FITTING] + [["python3"], ["python"]]
    launched = [["py", f"-{version}"] for version in FITTING] if WINDOWS else []
    return [[sys.executable], *named, *launched]


def find_interpreter() -> tuple[list[str], str]:
    """The command of an interpreter that can make an environment, and its version."""
    without_venv = None
    for command in interpreters():
        version = answers(command, "import sys; print('%d.%d' % sys.version_info[:2])")
        if version not in FITTING:
            continue
        if answers(command, "import ensurepip, venv") is not None:
            return command, version
        without_venv = version
    if without_venv is not None:
        fail(
            f"Python {without_venv} is here, but without its venv module; "
            f"on Debian and Ubuntu: apt install python{without_venv}-venv"
        )
    chosen = os.environ.get("PYTHON", "")
    under = f" under PYTHON={chosen}" if chosen else ""
    fail(f"no Python 3.11, 3.12 or 3.13 found{under}; install one, or name it: PYTHON=/path/to/python3.12")


# -- an environment ----------------------------------------------------------------------------------------------------


class Environment:
    """A virtual environment with this checkout installed in it, editable.

    Args:
        folder: where it lies, from the checkout's root.
        extras: what is installed with it, with commas between.
        wanted: extras that are installed too if they can be built here.
    """

    def __init__(self, folder: str, extras: str = "", wanted: str = "") -> None:
        self.name = folder
        self.folder = ROOT / folder
        self.extras, self.wanted = extras, wanted
        self.stamp, self.native = self.folder / ".installed", self.folder / ".native"
        self.log = self.folder / "install.log"
        self.state = f"{ROOT} [{extras}] [{wanted}]\n"

    def program(self, name: str) -> str:
        return str(self.folder / ("Scripts" if WINDOWS else "bin") / (name + (".exe" if WINDOWS else "")))

    def make(self) -> None:
        """Install what is missing: nothing, when that has been done since pyproject.toml last changed."""
        if not self._is_current():
            self._install()
        if os.environ.get("NATIVE", "0") not in ("", "0") and not self._native_is_current():
            self._compile_engine()

    def _is_current(self) -> bool:
        try:
            written = self.stamp.stat().st_mtime >= (ROOT / "pyproject.toml").stat().st_mtime
            current = written and self.stamp.read_text(encoding="utf-8") == self.state
        except OSError:
            return False
        return current and answers([self.program("python")], "") is not None

    def _install(self) -> None:
        command, version = find_interpreter()
        size = 180 if self.extras else 60
        say(f"installing into {self.name} with Python {version} (once, about {size} MB to fetch)")
        if self.stamp.exists():
            self.stamp.unlink()
        if answers([self.program("python")], "import pip") is None:
            made = subprocess.call([*command, "-m", "venv", "--clear", str(self.folder)], stdin=subprocess.DEVNULL)
            if made != 0:
                fail(f"Python {version} could not make the virtual environment {self.folder}")
        self.log.write_bytes(b"")
        if not (self.wanted and self._pip("-e", self._with(self.wanted))):
            if not self._pip("-e", self._with()):
                text = self.log.read_text(encoding="utf-8", errors="replace")
                for line in [line for line in text.splitlines() if "error" in line.lower()][-3:]:
                    print(line, file=sys.stderr)
                fail(f"the installation failed; all of pip's output is in {self.log}")
            if self.wanted:
                say(
                    f"going on without the extra '{self.wanted}', which could not be built here (a C++ compiler is "
                    f"needed; see {self.log}); its tests will be skipped. To try again, delete {self.folder}"
                )
        # A CPU that the engine's wheel does not suit (no AVX2, say) gets the engine that is compiled for it.
        status = self._run(PROBE_ENGINE)
        if status == 3 or not 0 <= status <= 128:
            say("the ready-made engine does not run on this machine: compiling llama-cpp-python for it, some minutes")
            if not self._pip("-e", self._with("llama-cpp")):
                fail(f"llama-cpp-python could not be built (a C++ compiler is needed); see {self.log}")
        self.stamp.write_text(self.state, encoding="utf-8")

    def _with(self, *more: str) -> str:
        extras = ",".join(filter(None, (self.extras, *more)))
        return f".[{extras}]" if extras else "."

    def _native_is_current(self) -> bool:
        return self.native.exists() and self.native.stat().st_mtime >= self.stamp.stat().st_mtime

    def _compile_engine(self) -> None:
        """Have the engine compiled for this CPU, if that uses more of it; or leave the wheel."""
        command = [self.program("python"), "-m", "localspec", "engine", "build"]
        if subprocess.call(command, stdin=subprocess.DEVNULL, stdout=sys.stderr) == 0:
            self.native.write_bytes(b"")
        else:
            say("NATIVE=1: going on with the engine's wheel")

    def _run(self, code: str) -> int:
        """Status of code in the environment's Python; what it complains of goes to the log."""
        with self.log.open("ab") as log:
            command = [self.program("python"), "-c", code]
            return subprocess.call(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)

    def _pip(self, *arguments: str) -> bool:
        """Install, and show what pip is at: one line that rewrites itself on a terminal."""
        command = [self.program("python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        # pip would compile all modules (14,000 for the tests), which takes as long as the rest of the installation.
        # Python compiles a module when it is first imported.
        command += ["--prefer-binary", "--no-compile", "--progress-bar", "off", *arguments]
        live = sys.stderr.isatty()
        with self.log.open("ab") as log:
            pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert pip.stdout is not None
            for raw in pip.stdout:
                log.write(raw)
                log.flush()
                line = raw.decode("ascii", "replace").strip()
                if re.match(r"Building wheel for llama.*started", line):
                    say("compiling llama-cpp-python: about 7 minutes on 2 cores, once")
                elif live and re.match(r"Downloading .* \(|Installing collected packages", line):
                    sys.stderr.write(f"\r  {line.split(':')[0]:60.60}")
                    sys.stderr.flush()
        if live:
            sys.stderr.write("\r" + " " * 62 + "\r")
            sys.stderr.flush()
        return pip.wait() == 0


# -- commands ----------------------------------------------------------------------------------------------------------


def start(command: list[str]) -> NoReturn:
    """Become another program; on Windows, which cannot, wait for it and leave Ctrl-C to it."""
    if not WINDOWS:
        os.execv(command[0], command)
    with subprocess.Popen(command) as child:
        while True:
            try:
                raise SystemExit(child.wait())
            except KeyboardInterrupt:
                continue


def main() -> None:
    arguments = sys.argv[1:]
    while arguments and arguments[0].partition("=")[0] in SETTINGS and "=" in arguments[0]:
        name, _, value = arguments.pop(0).partition("=")
        os.environ[name] = value
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb not in ("chat", "test", "dev"):
        print(__doc__, file=sys.stdout if verb in ("-h", "--help") else sys.stderr)
        raise SystemExit(0 if verb in ("-h", "--help") else 2)
    os.environ["PIP_USER"] = "0"  # a setting of the person's own pip that cannot work inside a virtual environment
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each process compiles all that it imports
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 2))
    here = os.getcwd()
    os.chdir(ROOT)
    if verb == "chat":
        environment = Environment(os.environ.get("VENV") or ".venv")
    else:
        environment = Environment(os.environ.get("VENV_TEST") or ".venv-test", "dev", "all")
    environment.make()
    if verb == "chat":
        os.chdir(here)  # files that the person names lie there
        start([environment.program("localspec"), "chat", *rest])
    elif verb == "test":
        start([environment.program("python"), "-m", "pytest", "-n", "3", "--dist", "loadfile", *rest])
    elif rest:
        start([environment.program(rest[0]), *rest[1:]])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted")
        raise SystemExit(130) from None
