"""Commands with heads that models are published with: EAGLE-3, an MTP layer, DFlash; each as with any other drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from localspec.__main__ import run
from localspec.commands.bench.record import read_record
from tests.conftest import TinyFiles, open_backend
from tests.support.ggufs import write_glm
from tests.support.published_heads import write_dflash, write_eagle3

pytestmark = pytest.mark.usefixtures("in_warm_home")


class Published(NamedTuple):
    """A drafter: parts of the command line that name its target and itself, and what rounds and arms call it."""

    target: list[str]
    draft: str
    source: str


@pytest.fixture(scope="module", params=["EAGLE-3", "MTP", "DFlash"])
def published(request: pytest.FixtureRequest, tiny: TinyFiles, tmp_path_factory: pytest.TempPathFactory) -> Published:
    open_backend("llama-cpp")
    folder, options = tmp_path_factory.mktemp("published"), ["--backend", "llama-cpp", "--ctx", "2048"]
    if request.param == "MTP":
        return Published([str(write_glm(folder / "glm.gguf")), *options], "mtp", "mtp")
    write = write_eagle3 if request.param == "EAGLE-3" else write_dflash
    return Published([str(tiny.pair.target), *options], str(write(tiny.pair.target, folder / "head.gguf")), "head")


def test_bench_measures_it_and_verify_audits_it(
    published: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an arm, which says the same as plain decoding, with draft tokens of the head alone."""
    questions, record = tmp_path / "questions.jsonl", tmp_path / "run.json"
    rows = [{"question_id": i, "category": "chat", "turns": [f"a b c {i} a b c"]} for i in range(2)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    given, arm = [*published.target, "--draft", published.draft, "--max-tokens", "16"], f"{published.source}:3"
    options = ["--prompts", str(questions), "--arm", arm, "--repeats", "1", "--minutes", "60", f"--json={record}"]
    assert run(["bench", *given, *options]) == 0
    drafted = [each for each in read_record(record).samples if each.arm == arm]
    assert len(drafted) == 2
    assert all(each.num_draft_tokens > 0 and set(each.by_source) == {published.source} for each in drafted)
    capsys.readouterr()
    assert run(["verify", *given, "--draft-only", "--quick", "--prompts", "1", "--json"]) == 0
    arms = {each["arm"].split()[0]: each["drafted"] for each in json.loads(capsys.readouterr().out)["arms"]}
    assert arms[published.source] > 0, arms
