"""A short soak of ``localspec serve``; the long one is run by hand, its figures are in benchmarks/results/soak.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import TinyFiles

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_under_load_nothing_is_lost_mixed_up_or_stuck(tiny: TinyFiles, tmp_path: Path) -> None:
    pair = ["--draft", "ngram", "--draft", tiny.quick.draft, "--backend", "reference", "--gap", "0", "--parallel", "3"]
    out = tmp_path / "soak.json"
    size = ["--requests", "100", "--clients", "6", "--questions", "10", "--json", out]
    command = [sys.executable, SOAK, tiny.quick.target, *pair, *size]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["failures"] == []
    assert found["parallel"] == "3"
    assert found["requests"] >= 100
    assert found["greedy_equal"] > 40
    assert found["greedy_near_ties"] == 0
    assert found["server"]["failed"] == 0
    assert found["server"]["cancelled"] > 0
    assert found["memory_mb"]["growth"] < 50
    assert "Traceback" not in done.stderr
