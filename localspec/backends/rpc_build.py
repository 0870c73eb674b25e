"""Compile llama.cpp's RPC backend for the installed llama-cpp-python: ``python -m localspec.backends.rpc_build``.

Two source files of llama.cpp, out of the source distribution that llama-cpp-python itself was built from (fetched, 77
MB, unless ``--source`` names an unpacked one), against the libraries that are installed. Some 10 seconds, with a C++
compiler, which ``CXX`` names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from localspec.backends.llama.rpc import library_path
from localspec.backends.native_build import compiler, fetched
from localspec.errors import EngineUnavailable

_DEFINES = ("GGML_BACKEND_DL", "GGML_BACKEND_SHARED", "GGML_BACKEND_BUILD", "GGML_SHARED")


def build(source: Path) -> Path:
    """Compile the library of llama.cpp's ``source`` (``vendor/llama.cpp`` of the source distribution); its path.

    Raises:
        EngineUnavailable: there is no compiler, or it failed; its words are on standard error.
    """
    cxx = compiler()
    if cxx is None or sys.platform == "win32":
        raise EngineUnavailable(
            "there is no C++ compiler for this here; build llama-cpp-python with it instead: "
            "CMAKE_ARGS=-DGGML_RPC=ON pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python"
        )
    path, ggml = library_path(), source / "ggml"
    import llama_cpp

    folder = Path(llama_cpp.llama_cpp._lib._name).parent
    base = sorted(folder.glob("libggml-base.*"))[-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    files = [str(ggml / "src" / "ggml-rpc" / name) for name in ("ggml-rpc.cpp", "transport.cpp")]
    command = [cxx, "-std=c++17", "-O2", "-fPIC", "-shared", *(f"-D{name}" for name in _DEFINES)]
    command += [f"-I{ggml / 'include'}", f"-I{ggml / 'src'}", *files, str(base), "-pthread", "-o", str(scratch)]
    try:
        if subprocess.run(command, check=False).returncode:
            raise EngineUnavailable("compiling llama.cpp's RPC backend failed; see the compiler output above")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def fetch_source(folder: Path) -> Path:
    """llama.cpp's source that belongs to the installed llama-cpp-python; EngineUnavailable where pip has none."""
    import llama_cpp

    name = f"llama-cpp-python=={llama_cpp.__version__}"
    found = fetched(name, "vendor/llama.cpp/ggml", folder, partial(subprocess.call, stdout=sys.stderr))
    if found is None:
        raise EngineUnavailable(f"pip could not fetch the source of {name}; --source names an unpacked one")
    return found.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, metavar="DIR", help="llama.cpp's source, instead of fetching it")
    args = parser.parse_args()
    try:
        path = library_path()
        if not path.is_file():
            with tempfile.TemporaryDirectory(prefix="localspec-rpc-") as name:
                path = build(args.source or fetch_source(Path(name)))
    except ImportError as error:
        print(f"llama-cpp-python is not installed: {error}", file=sys.stderr)
        return 1
    except EngineUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
