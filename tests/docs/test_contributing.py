"""CONTRIBUTING, followed to the letter in a copy of the tree: its blocks are the files, the edits and the commands."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TinyFiles
from tests.support.standin import Server

ROOT = Path(__file__).parents[2]


def section(title: str) -> list[tuple[str, str]]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n## {title}\n")
    assert rest, title
    return re.findall(r"^```(\w+)\n(.*?)^```", re.split(r"^## ", rest, flags=re.MULTILINE)[0], re.MULTILINE | re.DOTALL)


class Copy:
    """The tree, as somebody has it who follows the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("localspec", "tests", "models", "scripts", "docs"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.said = ""  # what the commands printed

    def follow(self, title: str, **values: str) -> Copy:
        """Do what a section says; ``values`` take the place of texts in it that stand for the reader's own."""
        for language, text in section(title):
            for placeholder, value in values.items():
                text = text.replace(placeholder, value)
            first, _, rest = text.partition("\n")
            path = self.folder / first.removeprefix("# ")
            if language == "python":
                assert not path.exists()
                path.write_text(rest, encoding="utf-8")
            elif language == "toml":
                path.write_text(f"{path.read_text(encoding='utf-8')}\n{rest}", encoding="utf-8")
            elif language == "diff":
                self._edit(text)
            else:
                for line in text.splitlines():
                    program, *arguments = shlex.split(line)
                    assert program == "python", line
                    self.python(*arguments)
        return self

    def _edit(self, text: str) -> None:
        for name, edit in re.findall(r"^--- (.*)\n((?:[ +-](?!-- ).*\n|\n)*)", text, re.MULTILINE):
            lines = edit.splitlines()
            before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
            after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
            path = self.folder / name
            there = path.read_text(encoding="utf-8")
            assert there.count(before) == 1, f"{name} has not, once:\n{before}"
            path.write_text(there.replace(before, after), encoding="utf-8")

    def answer(self, model: str, *options: str) -> None:
        asked = ["-p", "la la la", "--max-tokens", "9", "--format", "json"]
        self.python("-m", "localspec", "generate", model, *asked, *options)

    def python(self, *arguments: str) -> None:
        """Run Python in the copy; it has to end well."""
        command, environment = [sys.executable, *arguments], os.environ | {"PYTHONPATH": str(self.folder)}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        self.said += done.stdout
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    (tmp_path / "tree").mkdir()
    return Copy(tmp_path / "tree")


def test_a_drafter_is_added_as_the_page_says(copy: Copy, tiny: TinyFiles, tmp_path: Path) -> None:
    question = tmp_path / "question.jsonl"
    question.write_text('{"question_id": 1, "category": "song", "turns": ["la la la"]}\n')
    copy.follow("A drafter")
    assert "1 passed" in copy.said
    copy.answer(str(tiny.quick.target), "--backend", "reference", "--draft", "toy", "--draft-length", "3")
    assert '"toy": {"num_draft_tokens"' in copy.said
    arms = ("--arm", "toy:4", "--backend", "reference", "--draft", "toy", "--prompts", str(question))
    limits = ("--minutes", "0.02", "--repeats", "1", "--ctx", "512", "--max-tokens", "8")
    copy.python("-m", "localspec", "bench", str(tiny.quick.target), *arms, *limits)
    assert "toy:4" in copy.said


def test_a_backend_is_added_as_the_page_says(copy: Copy, tiny: TinyFiles) -> None:
    copy.follow("A backend")
    assert " passed" in copy.said
    copy.answer(str(tiny.quick.target), "--backend", "toy", "--draft", "ngram")
    assert '"backend": "toy"' in copy.said


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("LOCALSPEC_OFFLINE")
    yield server
    server.close()


def test_a_model_is_added_as_the_page_says(copy: Copy, tiny: TinyFiles, hub: Server) -> None:
    content = tiny.quick.target.read_bytes()
    hub.files["/acme/toy-1b-GGUF/resolve/main/toy-1b-q4_k_m.gguf"] = content
    copy.follow("A model", **{"1234": str(len(content)), "0" * 64: hashlib.sha256(content).hexdigest()})
    assert "\n| `toy-1b` | 0.00 GB | Apache-2.0 | – |" in (copy.folder / "docs/models.md").read_text(encoding="utf-8")
    assert re.search(r"toy-1b-q4_k_m\.gguf", copy.said)
    copy.answer("toy-1b", "--backend", "reference")
    assert '"model": "toy-1b"' in copy.said
