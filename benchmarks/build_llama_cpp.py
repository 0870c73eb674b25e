"""Compiles llama.cpp's own programs, for this CPU, from the source distribution of llama-cpp-python.

    nice -n 19 python benchmarks/build_llama_cpp.py [--build DIR] [--jobs N] PROGRAM ...

PROGRAM is a target such as ``llama-server`` or ``llama-speculative-simple``; what is there already is not compiled
again. Some minutes for the first, under LOCALSPEC_HOME unless ``--build`` says where. Prints where each one is. The
other benchmarks that run such programs compile what they need by themselves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from localspec.system.home import home
from localspec.system.machine import default_threads

SOURCE = "llama-cpp-python==0.3.36"
CMAKE_OPTIONS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",  # this version has replaced it by the next and only warns
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # the server's page would be fetched from the hub
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
]


def default_folder() -> Path:
    return home() / "build" / "llama.cpp"


def build(programs: Sequence[str], folder: Path, jobs: int) -> dict[str, Path]:
    """The programs by name, compiled where they are not there."""
    suffix = ".exe" if sys.platform == "win32" else ""
    paths = {program: folder / "out" / "bin" / f"{program}{suffix}" for program in programs}
    missing = [program for program, path in paths.items() if not path.is_file()]
    if not missing:
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "source"
    if not (source / "CMakeLists.txt").is_file():
        fetch_source(source)
    tools = cmake_tools(folder)
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=tools["PATH"]) else []
    cmake = shutil.which("cmake", path=tools["PATH"]) or "cmake"
    configure = [cmake, "-S", str(source), "-B", str(folder / "out"), *generator, *CMAKE_OPTIONS]
    subprocess.run(configure, check=True, env=tools, stdout=sys.stderr)
    targets = ["--target", *missing, "--config", "Release", "-j", str(jobs)]
    subprocess.run([cmake, "--build", str(folder / "out"), *targets], check=True, env=tools, stdout=sys.stderr)
    return paths


def fetch_source(target: Path) -> None:
    """Unpack llama.cpp from the source distribution."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*pip, "-d", scratch, SOURCE], check=True, stdout=sys.stderr)
        with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as tar:
            wanted = [member for member in tar.getmembers() if "/vendor/llama.cpp/" in member.name]
            tar.extractall(scratch, wanted, filter="data")
        next(Path(scratch).glob("*/vendor/llama.cpp")).replace(target)


def cmake_tools(folder: Path) -> dict[str, str]:
    """An environment in which cmake is found; it and ninja are fetched from the package index where it is not."""
    if shutil.which("cmake"):
        return dict(os.environ)
    tools = folder / "tools"
    scripts = tools / ("Scripts" if sys.platform == "win32" else "bin")
    if not tools.is_dir():
        venv.create(tools, with_pip=True)
    subprocess.run([str(scripts / "python"), "-m", "pip", "install", "-q", "cmake", "ninja"], check=True)
    return os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", metavar="PROGRAM")
    parser.add_argument("--build", type=Path, default=default_folder(), metavar="DIR")
    parser.add_argument("--jobs", type=int, default=default_threads(), help="compile with so many processes")
    args = parser.parse_args()
    for program, path in build(args.programs, args.build.absolute(), args.jobs).items():
        print(f"{program}: {path}")


if __name__ == "__main__":
    main()
