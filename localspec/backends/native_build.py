"""Compile ik-llama for the CPU at hand: ``python -m localspec.backends.native_build``, with the Python it is for.

``pip install --no-binary`` alone does not do it: the source distribution of 0.1.5 lacks a script that its own build
runs to write down what it was built from. It is fetched, completed and installed from its folder. ``CMAKE_ARGS`` and
``CMAKE_BUILD_PARALLEL_LEVEL`` reach the build; everything that pip says goes to standard output.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from localspec.backends.llama.ik_llama import VERSION

PACKAGE = f"ik-llama-cpp-python=={VERSION}"
_LACKING = "vendor/ik_llama.cpp/common/cmake/build-info-gen-cpp.cmake"
_SCRIPT = """set(BUILD_NUMBER 0)
set(BUILD_COMMIT unknown)
set(BUILD_COMPILER unknown)
set(BUILD_TARGET unknown)
configure_file(common/build-info.cpp.in common/build-info.cpp)
"""


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a source distribution, and write what it lacks; returns its folder."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (source,) = (each for each in folder.iterdir() if each.is_dir())
    lacking = source / _LACKING
    if not lacking.exists():
        lacking.parent.mkdir(parents=True, exist_ok=True)
        lacking.write_text(_SCRIPT, encoding="utf-8")
    return source


def _pip(*arguments: str) -> int:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    """Replace the engine in this environment by one compiled here; returns pip's exit status."""
    os.environ["CMAKE_ARGS"] = f"{os.environ.get('CMAKE_ARGS', '')} -DGGML_NATIVE=ON".strip()
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    with tempfile.TemporaryDirectory(prefix="localspec-native-") as name:
        folder = Path(name)
        fetched = folder / "fetched"
        status = _pip("download", "--no-deps", "--no-binary", "ik-llama-cpp-python", "-d", str(fetched), PACKAGE)
        if status:
            return status
        source = unpack(next(fetched.glob("*.tar.gz")), folder / "source")
        # Without --no-cache-dir pip might take what it once compiled on another CPU.
        return _pip("install", "--no-cache-dir", "--force-reinstall", "--no-deps", "--progress-bar", "off", str(source))


if __name__ == "__main__":
    raise SystemExit(main())
