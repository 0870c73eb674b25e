"""The package of docs/plugins.md, installed as a stranger's and used; nothing of this repository is touched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TinyFiles

ROOT = Path(__file__).parents[2]


def localspec(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, "-m", "localspec", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the page's package is installed in."""
    pytest.importorskip("hatchling")
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (source / name).write_text(text, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    done = subprocess.run([*pip, str(site), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site


def test_its_drafter_and_its_engine_are_used(site: Path, tiny: TinyFiles) -> None:
    asked = (str(tiny.quick.target), "-p", "la la la", "--max-tokens", "12", "--format", "json")
    done = localspec(site, "generate", *asked, "--backend", "next", "--draft", "next", "--draft-length", "3")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    drafted = answer["stats"]["by_source"]["next"]
    assert drafted["num_accepted_tokens"] == drafted["num_draft_tokens"] > 0
    # On another engine the drafter is mostly wrong, and changes nothing.
    plain, other = (
        json.loads(localspec(site, "generate", *asked, "--backend", "reference", "--draft", draft).stdout)
        for draft in ("none", "next")
    )
    assert other["text"] == plain["text"]
    assert other["stats"]["by_source"]["next"]["num_draft_tokens"] > 0


def test_one_that_cannot_be_imported_is_a_line(site: Path, tmp_path: Path, tiny: TinyFiles) -> None:
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    rows = "broken = localspec_broken:Drafter\n"
    (info / "entry_points.txt").write_text(f"[localspec.drafters]\n{rows}[localspec.backends]\n{rows}")
    (tmp_path / "localspec_broken.py").write_text("import a_library_that_is_missing\n")
    asked = ("generate", str(tiny.quick.target), "-p", "la", "--max-tokens", "3")
    why = "the plugin 'broken' of broken cannot be imported: ModuleNotFoundError: No module named "
    for options in (["--draft", "broken", "--backend", "reference"], ["--backend", "broken"]):
        done = localspec(tmp_path, *asked, *options)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f"localspec: {why}")
    done = localspec(tmp_path, *asked, "--backend", "reference")  # auto goes on without it
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(why) == 1
