"""Compiles llama.cpp's own programs, for this CPU, from the source distribution of llama-cpp-python.

    nice -n 19 python benchmarks/build_llama_cpp.py [--build DIR] [--jobs N] PROGRAM ...
    python benchmarks/build_llama_cpp.py --slim FILE.tar.xz

The second writes the distribution again without what compiling it needs not (see ``LEFT_OUT``): 4 MB instead of 77, to
carry to a machine without a network. ``gpu_proof.py`` does, and compiles the Python binding of it there.

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

from localspec.system.files import home
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


_NOT_LIBRARIES = (
    ".devops", ".github", "benches", "ci", "conversion", "docs", "examples", "gguf-py", "media", "models", "pocs",
    "requirements", "skills", "tests", "tools",
)  # fmt: skip
LEFT_OUT = (".git", "docker", "docs", "examples", "tests", *(f"vendor/llama.cpp/{name}" for name in _NOT_LIBRARIES))
"""Folders that a slim archive lacks: history, vocabularies and templates for tests, pages, its own programs with their
web page, converters. What is left builds the libraries."""


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
        with tarfile.open(fetch_distribution(Path(scratch))) as tar:
            wanted = [member for member in tar.getmembers() if "/vendor/llama.cpp/" in member.name]
            tar.extractall(scratch, wanted, filter="data")
        next(Path(scratch).glob("*/vendor/llama.cpp")).replace(target)


def fetch_distribution(folder: Path) -> Path:
    """The source distribution of llama-cpp-python, put into a folder."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*pip, "-d", str(folder), SOURCE], check=True, stdout=sys.stderr)
    return next(folder.glob("*.tar.gz"))


def slim(distribution: Path, out: Path) -> None:
    """Write a source distribution again without the folders of ``LEFT_OUT``, as xz."""
    part = out.with_name(out.name + ".part")
    with tarfile.open(distribution) as tar, tarfile.open(part, "w:xz", preset=6) as packed:
        for member in tar:
            inside = member.name.partition("/")[2]
            if not any(inside == folder or inside.startswith(folder + "/") for folder in LEFT_OUT):
                packed.addfile(member, tar.extractfile(member) if member.isfile() else None)
    part.replace(out)


def build_binding(archive: Path, folder: Path, jobs: int, options: Sequence[str]) -> Path:
    """Compile llama-cpp-python from a source distribution, slim or whole; what was compiled before is not again.

    Args:
        archive: the distribution.
        folder: where it is unpacked and compiled.
        jobs: processes.
        options: of cmake, such as ``-DGGML_CUDA=ON``.

    Returns:
        A folder for ``PYTHONPATH``, with the package ``llama_cpp`` in it.
    """
    source, out, site = folder / "source", folder / "out", folder / "site"
    if not (source / "CMakeLists.txt").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            next(Path(scratch).iterdir()).replace(source)
    tools = cmake_tools(folder)
    cmake = shutil.which("cmake", path=tools["PATH"]) or "cmake"
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=tools["PATH"]) else []
    own = [option for option in CMAKE_OPTIONS if "SHARED" not in option]
    configure = [cmake, "-S", str(source), "-B", str(out), *generator, *own, "-DLLAVA_BUILD=OFF", *options]
    subprocess.run(configure, check=True, env=tools, stdout=sys.stderr)
    # Installing would compile llama.cpp's helpers for programs too, which the package needs not.
    compiling = [cmake, "--build", str(out), "--target", "llama", "-j", str(jobs)]
    subprocess.run(compiling, check=True, env=tools, stdout=sys.stderr)
    ours = shutil.ignore_patterns("lib", "__pycache__", "server")
    shutil.copytree(source / "llama_cpp", site / "llama_cpp", ignore=ours, dirs_exist_ok=True)
    if not (site / "llama_cpp/lib").is_dir():
        (site / "llama_cpp/lib").symlink_to(out / "bin")
    return site


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
    parser.add_argument("programs", nargs="*", metavar="PROGRAM")
    parser.add_argument("--slim", type=Path, metavar="FILE.tar.xz", help="write the slim source archive")
    parser.add_argument("--build", type=Path, default=default_folder(), metavar="DIR")
    parser.add_argument("--jobs", type=int, default=default_threads(), help="compile with so many processes")
    args = parser.parse_args()
    if args.slim is None and not args.programs:
        parser.error("name a PROGRAM, or --slim FILE")
    if args.slim is not None:
        with tempfile.TemporaryDirectory() as scratch:
            slim(fetch_distribution(Path(scratch)), args.slim)
        print(f"{args.slim}: {args.slim.stat().st_size / 2**20:.1f} MiB, without {', '.join(LEFT_OUT)}")
    for program, path in build(args.programs, args.build.absolute(), args.jobs).items():
        print(f"{program}: {path}")


if __name__ == "__main__":
    main()
