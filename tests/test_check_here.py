"""``scripts/check_here.py`` and its stages: what is done is kept, and one file says all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from localspec.commands.cli import parse

ROOT = Path(__file__).parent.parent


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import stages

    return stages


@pytest.fixture
def check_here(stages: ModuleType) -> ModuleType:
    import check_here

    return check_here


def work(stages: ModuleType, folder: Path, key: str = "one", **codes: str) -> object:
    """Stages of these names that run code; ``last`` needs ``first``."""
    listed = [
        stages.Stage(name, f"does {name}", [sys.executable, "-c", code], needs=["first"] if name == "last" else [])
        for name, code in codes.items()
    ]
    return stages.Stages(listed, folder / "kept", key, folder)


COUNT = "open('count', 'a').write('x'); print('counted ✓')"


def test_what_is_done_is_not_done_again(stages: ModuleType, tmp_path: Path) -> None:
    for _ in range(2):
        assert work(stages, tmp_path, first=COUNT).run()
    assert (tmp_path / "count").read_text() == "x"
    assert work(stages, tmp_path, first=COUNT).run(again=True)
    assert work(stages, tmp_path, "other", first=COUNT).run()  # another commit, another model
    (tmp_path / "kept/state.json").write_text("[{")  # cut short: as if nothing had been done
    assert work(stages, tmp_path, "other", first=COUNT).run()
    assert (tmp_path / "count").read_text() == "xxxx"


def test_what_failed_is_done_again_and_what_needs_it_waits(stages: ModuleType, tmp_path: Path) -> None:
    codes = {"first": "import os; raise SystemExit(os.path.exists('bad') * 3)", "last": COUNT, "beside": COUNT}
    (tmp_path / "bad").touch()
    failing = work(stages, tmp_path, **codes)
    assert not failing.run()
    assert [each.status for each in failing.outcomes.values()] == [stages.FAILED, stages.SKIPPED, stages.DONE]
    assert "FAILED (status 3)" in failing.table()
    assert "skipped (needs first)" in failing.table()
    (tmp_path / "bad").unlink()
    assert work(stages, tmp_path, **codes).run()
    assert (tmp_path / "count").read_text() == "xx"


def test_only_some_stages_and_only_while_there_is_time(stages: ModuleType, tmp_path: Path) -> None:
    codes = {"first": COUNT, "beside": COUNT}
    assert work(stages, tmp_path, **codes).run(only=["beside"])
    assert (tmp_path / "count").read_text() == "x"
    late = work(stages, tmp_path, **codes)
    late.stages[0].minutes = 5
    assert late.run(minutes=4)
    assert late.outcomes["first"].status == stages.LATE
    assert late.run(minutes=6)
    assert late.outcomes["first"].status == stages.DONE


def test_output_is_kept_whatever_its_characters(stages: ModuleType, tmp_path: Path) -> None:
    found = work(stages, tmp_path, first="print('✓ 日本'); print('b'); print('c')")
    assert found.run()
    assert found.output("first") == "✓ 日本\nb\nc"
    assert found.output("first", 2) == "[1 lines left out]\nb\nc"
    assert found.output("last") == ""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a parent")
def test_ctrl_c_keeps_what_was_done_and_the_next_run_goes_on(stages: ModuleType, tmp_path: Path) -> None:
    """As from a terminal: to all in front, once the stage's output is read."""
    long = """
import os, signal, time
print(1)
while not os.path.getsize("kept/long.log"):
    time.sleep(0.01)
for process in (os.getppid(), os.getpid()):
    os.kill(process, signal.SIGINT)
time.sleep(60)
"""
    assert not work(stages, tmp_path, first="", long=long, never="").run()
    kept = json.loads((tmp_path / "kept/state.json").read_text())
    assert [(each["name"], each["status"]) for each in kept] == [("first", "done"), ("long", "interrupted")]


def test_a_run_writes_one_file_without_the_person_s_name(
    check_here: ModuleType, stages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage in its order, here with programs that only say where they are."""
    home = tmp_path / "anna.muster"
    monkeypatch.setattr(Path, "home", lambda: home)
    real = check_here.stages

    def acted(arguments: object) -> list[object]:
        found = real(arguments)
        for stage in found:
            where = home / stage.name
            stage.command = [sys.executable, "-c", f"print({str(where)!r}, {str(ROOT)!r})"]
        return found

    monkeypatch.setattr(check_here, "stages", acted)
    arguments = ["--out", str(tmp_path / "report.md"), "--folder", str(tmp_path / "kept"), "--mlx"]
    assert check_here.main(arguments) == 0
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    names = ["install", "engines", "contract", "models", "doctor", "verify", "bench", "mlx"]
    assert [line.split()[1] for line in text.splitlines() if line.startswith("## ")] == names
    assert all(f"HOME/{name} CHECKOUT" in text for name in names)
    assert "anna" not in text
    assert "Python: " in text
    with pytest.raises(SystemExit):
        check_here.main([*arguments, "--only", "nothing"])


def test_its_programs_exist(check_here: ModuleType) -> None:
    found = {stage.name: stage for stage in check_here.stages(check_here.argparse.Namespace(model="", draft="", mlx=1))}
    assert all((ROOT / name).exists() for name in (*check_here.CONTRACT, "scripts/make.py", "benchmarks/mlx_metal.py"))
    for name in ("models", "doctor", "verify", "bench"):
        assert callable(parse(found[name].command[3:])), name
    environment = os.environ | found["engines"].environment
    done = subprocess.run(
        [sys.executable, "-c", check_here.ENGINES], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "reference: loads" in done.stdout
