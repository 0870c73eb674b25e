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
    "platformdirs", "rich", "transformers",
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


KINDS = ".py .typed .h .html .css .js .mjs .svg .json .jsonl .md .toml .txt .woff2"


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    names, info = set(wheel.namelist()), f"localspec-{localspec.__version__}.dist-info"
    found = [path for path in (ROOT / "localspec").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {path.suffix for path in found if path.name != "LICENSE"} == set(KINDS.split())
    assert {path.relative_to(ROOT).as_posix() for path in found} <= names
    assert {name.split("/")[0] for name in names} == {"localspec", info}
    assert wheel.read("localspec/catalog.toml") == (ROOT / "models/catalog.toml").read_bytes()
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert b"localspec = localspec.__main__:main" in wheel.read(f"{info}/entry_points.txt")
    wheel.extractall(tmp_path)  # where the catalogue is found, too
    code = "from localspec.model_files import catalog; catalog.Catalog.load(); print(catalog.__file__)"
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


SYSTEMS = ("linux", "darwin", "win32", "freebsd14")
MACHINES = ("x86_64", "aarch64", "arm64", "AMD64", "ARM64", "armv7l", "riscv64", "ppc64le")


def required(lines: list[str], among: set[str]) -> dict[tuple[str, str, str], set[str]]:
    """By system, machine and kind of Python, which of these requirements hold there, with their extras."""
    parsed = [each for each in map(Requirement, lines) if each.name in among]
    assert {each.name for each in parsed} == among
    found = {}
    for place in itertools.product(SYSTEMS, MACHINES, ("cpython", "pypy")):
        environment = dict(zip(("sys_platform", "platform_machine", "implementation_name"), place, strict=True))
        holding = [each for each in parsed if each.marker is None or each.marker.evaluate(environment)]
        found[place] = {each.name + "".join(f"[{extra}]" for extra in each.extras) for each in holding}
    return found


def test_what_is_required_has_wheels_where_it_is_required() -> None:
    """MLX is also resolved by hand, for macOS 14 on arm64 and Python 3.11 to 3.13, with wheels alone."""
    depends, extras = project()["dependencies"], project()["optional-dependencies"]
    mlx = {"mlx", "mlx-lm", "tokenizers"}
    # ik-llama-cpp-python 0.1.5: manylinux_2_28 x86_64 and aarch64, macosx_11_0_arm64, win_amd64.
    with_engine = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")}
    # llguidance 1.9.1: manylinux_2_31 x86_64 and aarch64, macosx arm64 and x86_64, win_amd64 and win_arm64; abi3.
    with_grammars = with_engine | {("darwin", "x86_64"), ("win32", "ARM64")}
    # MLX: macOS 14 arm64 with Metal; manylinux_2_35 x86_64 and aarch64 for the CPU, by the extra of that name.
    with_mlx = {("darwin", "arm64"): mlx} | {("linux", each): {*mlx, "mlx[cpu]"} - {"mlx"} for each in MACHINES[:2]}
    engines, grammars = {"ik-llama-cpp-python", "llama-cpp-python"}, {"llguidance"}
    chosen, forms, metal = (required(depends, names) for names in (engines, grammars, mlx))
    extra = required(extras["mlx"], mlx)
    for system, machine, python in chosen:
        place, fits = (system, machine, python), python == "cpython"
        at = (system, machine)
        assert chosen[place] == {"ik-llama-cpp-python" if fits and at in with_engine else "llama-cpp-python"}, place
        assert forms[place] == (grammars if fits and at in with_grammars else set()), place
        assert metal[place] == (mlx if fits and at == ("darwin", "arm64") else set()), place
        assert extra[place] == with_mlx.get(at, set()), place
    # What an extra asks for is what is asked for without it.
    plain = {each.name: each.specifier for each in map(Requirement, depends)}
    for each in map(Requirement, [*extras["structured"], *extras["mlx"]]):
        assert each.extras or each.specifier == plain[each.name]
    (everything,) = map(Requirement, extras["all"])
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
