"""What ships, what is public, and what must not be in the tree."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import localspec
from localspec.backends.llama import ggml as ggml_module

ROOT = Path(__file__).parent.parent


PUBLIC = {
    "LLM", "AsyncRoundStream", "Cancelled", "Closed", "ContextFull", "DownloadError", "Draft", "DraftToken",
    "EmittedToken", "EngineError", "EngineMismatch", "EngineUnavailable", "LocalspecError", "ModelFileError",
    "Placement", "PromptTooLong", "QueueFull", "Reply", "RequestOptions", "Round", "RoundStream",
    "SamplingParams", "ScoredToken", "Session", "SessionFileError", "Span", "SpecStats", "TemplateError",
    "TokenLogprobs", "UnknownModel", "UsageError", "Verdict", "VocabularyMismatch", "__version__", "distill"
}  # fmt: skip
"""Removing a name from here is a breaking change; adding one is a promise."""

HEAVY = {
    "numpy", "gguf", "huggingface_hub", "llama_cpp", "ik_llama_cpp", "jinja2", "prompt_toolkit", "mlx", "mlx_lm",
    "transformers"
}  # fmt: skip
"""Too slow to import for `localspec --help`."""


def project() -> dict:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel that `pip install` would make of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as opened:
        yield opened


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    kinds = {
        ".py",
        ".typed",
        ".html",
        ".css",
        ".js",
        ".mjs",
        ".svg",
        ".json",
        ".jsonl",
        ".md",
        ".toml",
        ".txt",
        ".woff2",
    }
    found = [path for path in (ROOT / "localspec").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {path.suffix for path in found if path.name != "LICENSE"} == kinds
    assert {path.relative_to(ROOT).as_posix() for path in found} <= names
    assert {name.split("/")[0] for name in names} == {"localspec", f"localspec-{localspec.__version__}.dist-info"}


def test_wheel_holds_the_catalogue_and_the_licence(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("localspec/catalog.toml") == (ROOT / "models/catalog.toml").read_bytes()
    info = f"localspec-{localspec.__version__}.dist-info"
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert b"localspec = localspec.__main__:main" in wheel.read(f"{info}/entry_points.txt")


def test_the_catalogue_is_found_in_an_installed_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        "from localspec.model_files.catalog import Catalog; import localspec; print(localspec.__file__); Catalog.load()"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_versions_agree() -> None:
    assert localspec.__version__ == project()["version"] == metadata.version("localspec")


def test_public_names() -> None:
    assert set(localspec.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(localspec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        localspec.nothing  # noqa: B018 - the access is the test


def test_exactly_one_engine_is_required_everywhere() -> None:
    engines = [Requirement(line) for line in project()["dependencies"] if "llama" in line]
    assert {engine.name for engine in engines} == {"ik-llama-cpp-python", "llama-cpp-python"}
    # Where ik-llama-cpp-python 0.1.5 has wheels: manylinux_2_28 x86_64 and aarch64, macosx_11_0_arm64, win_amd64.
    with_wheel = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")}
    systems = ("linux", "darwin", "win32", "freebsd14")
    machines = ("x86_64", "aarch64", "arm64", "AMD64", "ARM64", "armv7l", "riscv64", "ppc64le")
    for system, machine, python in itertools.product(systems, machines, ("cpython", "pypy")):
        environment = {"sys_platform": system, "platform_machine": machine, "implementation_name": python}
        chosen = [engine.name for engine in engines if engine.marker and engine.marker.evaluate(environment)]
        fits = (system, machine) in with_wheel and python == "cpython"
        assert chosen == ["ik-llama-cpp-python" if fits else "llama-cpp-python"], environment


def test_json_answers_need_no_extra_where_there_is_a_wheel() -> None:
    (line,) = [line for line in project()["dependencies"] if line.startswith("llguidance")]
    required = Requirement(line)
    # llguidance 1.9.1: manylinux_2_31 x86_64 and aarch64, macosx arm64 and x86_64, win_amd64 and win_arm64; abi3.
    with_wheel = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64")}
    with_wheel |= {("win32", "AMD64"), ("win32", "ARM64")}
    machines = ("x86_64", "aarch64", "arm64", "AMD64", "ARM64", "armv7l", "riscv64", "ppc64le")
    systems = ("linux", "darwin", "win32", "freebsd14")
    for system, machine, python in itertools.product(systems, machines, ("cpython", "pypy")):
        environment = {"sys_platform": system, "platform_machine": machine, "implementation_name": python}
        fits = (system, machine) in with_wheel and python == "cpython"
        assert required.marker.evaluate(environment) == fits, environment
    (extra,) = map(Requirement, project()["optional-dependencies"]["structured"])
    assert (extra.name, extra.specifier, extra.marker) == (required.name, required.specifier, None)


def test_apples_gpu_needs_no_second_install() -> None:
    """Also resolved by hand, for macOS 14 on arm64 and Python 3.11 to 3.13, with wheels alone."""
    needed = {"mlx", "mlx-lm", "tokenizers"}
    required = [Requirement(line) for line in project()["dependencies"] if Requirement(line).name in needed]
    assert {each.name for each in required} == needed
    extra = {each.name: each for each in map(Requirement, project()["optional-dependencies"]["mlx"]) if not each.extras}
    for system, machine, python in itertools.product(
        ("linux", "darwin", "win32"), ("x86_64", "aarch64", "arm64", "AMD64"), ("cpython", "pypy")
    ):
        environment = {"sys_platform": system, "platform_machine": machine, "implementation_name": python}
        fits = (system, machine, python) == ("darwin", "arm64", "cpython")
        for each in required:
            assert each.marker.evaluate(environment) == fits, environment
            assert each.specifier == extra[each.name].specifier


def test_the_mlx_extra_asks_for_mlx_where_there_are_builds_and_for_nothing_elsewhere() -> None:
    requirements = [Requirement(line) for line in project()["optional-dependencies"]["mlx"]]
    # Wheels: macOS 14 arm64 with Metal; manylinux_2_35 x86_64 and aarch64 for the CPU, by the extra of that name.
    wanted = {
        ("darwin", "arm64"): {"mlx", "mlx-lm", "tokenizers"},
        ("linux", "x86_64"): {"mlx[cpu]", "mlx-lm", "tokenizers"},
        ("linux", "aarch64"): {"mlx[cpu]", "mlx-lm", "tokenizers"},
    }
    for system, machine in itertools.product(("linux", "darwin", "win32"), ("x86_64", "aarch64", "arm64", "AMD64")):
        environment = {"sys_platform": system, "platform_machine": machine}
        chosen = {
            each.name + "".join(f"[{extra}]" for extra in each.extras)
            for each in requirements
            if each.marker and each.marker.evaluate(environment)
        }
        assert chosen == wanted.get((system, machine), set()), environment
    (everything,) = (Requirement(line) for line in project()["optional-dependencies"]["all"])
    assert everything.extras >= {"mlx", "llama-cpp"}


def test_the_pinned_engine_is_the_one_the_binding_is_written_for() -> None:
    from localspec.backends.llama import ik_llama

    assert any(line.startswith(f"ik-llama-cpp-python=={ik_llama.VERSION};") for line in project()["dependencies"])
    assert f"`{ggml_module.NATIVE_COMMAND}`" in (ROOT / "docs/engines.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_needs_no_heavy_import(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom localspec.__main__ import main\n"
        f"sys.argv = ['localspec', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"print('heavy:', sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("heavy: []")


def test_nothing_in_the_tree_names_a_machine_or_a_registry() -> None:
    folders = re.compile(r"(?<![\w.~}/])/(?:root|home/\w|Users/\w|work/\w|opt/(?:pypi|wheels)|tmp/\w)")
    hosts = re.compile(r"\b(?:pypi|pythonhosted|npmjs)[.](?:org|com)")
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := folders.search(line) or hosts.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not found, "\n".join(found)
