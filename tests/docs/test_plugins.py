"""The package of docs/plugins.md, installed as a stranger's and used; nothing of this repository is touched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import TinyFiles

ROOT = Path(__file__).parents[2]


def localspec(site: Path, *commands: list[str]) -> tuple[list[int], str, str]:
    """The exit statuses of commands, one after the other in one process, and what they wrote."""
    program = "import json, sys; from localspec.__main__ import run; statuses = [run(each) for each in json.loads("
    program += "sys.argv[1])]; print(json.dumps(statuses))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *out, statuses = done.stdout.splitlines(keepends=True)
    return json.loads(statuses), "".join(out), done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the page's package is installed in."""
    pytest.importorskip("hatchling")
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (source / name).write_text(text, encoding="utf-8")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"  # what pip calls
    subprocess.run([sys.executable, "-c", build, str(source)], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_its_drafter_and_its_engine_are_used(site: Path, tiny: TinyFiles) -> None:
    asked = ["generate", str(tiny.quick.target), "-p", "la la la", "--max-tokens", "12", "--format", "json"]
    asked += ["--draft-length", "3"]
    commands = [[*asked, "--backend", "next", "--draft", "next"]]
    commands += [[*asked, "--backend", "reference", "--draft", draft] for draft in ("none", "next")]
    statuses, out, err = localspec(site, *commands)
    assert statuses == [0, 0, 0], err
    answer, plain, other = map(json.loads, out.splitlines())
    drafted = answer["stats"]["by_source"]["next"]
    assert drafted["num_accepted_tokens"] == drafted["num_draft_tokens"] > 0
    # On another engine the drafter is mostly wrong, and changes nothing.
    assert other["text"] == plain["text"]
    assert other["stats"]["by_source"]["next"]["num_draft_tokens"] > 0


def test_one_that_cannot_be_imported_is_a_line(site: Path, tmp_path: Path, tiny: TinyFiles) -> None:
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    rows = "broken = localspec_broken:Drafter\n"
    (info / "entry_points.txt").write_text(f"[localspec.drafters]\n{rows}[localspec.backends]\n{rows}")
    (tmp_path / "localspec_broken.py").write_text("import a_library_that_is_missing\n")
    asked = ["generate", str(tiny.quick.target), "-p", "la", "--max-tokens", "3"]
    named = [[*asked, "--draft", "broken", "--backend", "reference"], [*asked, "--backend", "broken"]]
    statuses, _, err = localspec(tmp_path, *named, [*asked, "--backend", "reference"])  # auto goes on without it
    assert statuses == [1, 1, 0], err
    why = "the plugin 'broken' of broken cannot be imported: ModuleNotFoundError: No module named "
    assert len([line for line in err.splitlines() if line.startswith(f"localspec: {why}")]) >= 2
    assert err.count(why) == 3
