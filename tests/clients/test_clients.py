"""Client libraries that are not ours against a real server: each program of this folder, with streams, tools and forms.

``LOCALSPEC_TEST_CLIENTS`` names a Python that has ``requirements.txt``, ``LOCALSPEC_TEST_VERCEL`` a folder with what
``package.json`` lists; ``.ci/run`` makes both. A server that no program could use would fail them all: each asserts on
what its library made of the answers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM
from localspec.server.service import ChoiceJob, Service
from tests.conftest import TinyFiles
from tests.support.serving import Server, serve
from tests.support.waiting import PATIENCE

HERE = Path(__file__).parent
PROGRAMS = sorted(path.name for path in HERE.glob("with_*.py"))


@pytest.fixture(scope="module")
def server(tiny: TinyFiles, module_home: Path) -> Iterator[Server]:
    pytest.importorskip("llguidance")
    with LLM(tiny.quick.target, draft="ngram", backend="reference", n_ctx=8192, idle=False) as llm, serve(llm) as made:
        yield made


@pytest.fixture(autouse=True)
def held_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse requests whose answer nothing holds: what a random model says, and when it ends, depends on the CPU."""
    made = Service.choices

    def held(service: Service, *asked: Any) -> list[ChoiceJob]:
        choices = made(service, *asked)
        for choice in choices:
            held_by = choice.job.request.params
            assert held_by.grammar or held_by.response_format, "neither grammar, schema nor forced call"
        return choices

    monkeypatch.setattr(Service, "choices", held)


def run(server: Server, *command: str, cwd: Path) -> None:
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "DO_NOT_TRACK": "1"}
    asked = [*command, server.url, server.service.llm.model_name]
    options: Any = {"env": os.environ | quiet, "capture_output": True, "text": True, "timeout": PATIENCE}
    found = subprocess.run(asked, cwd=cwd, check=False, **options)
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_python_client(server: Server, program: str) -> None:
    python = os.environ.get("LOCALSPEC_TEST_CLIENTS")
    if not python:
        pytest.skip("LOCALSPEC_TEST_CLIENTS names no Python")
    run(server, python, str(HERE / program), cwd=HERE)


def test_vercels_sdk(server: Server) -> None:
    folder, node = os.environ.get("LOCALSPEC_TEST_VERCEL"), shutil.which("node")
    if not folder or node is None:
        pytest.skip("LOCALSPEC_TEST_VERCEL names no folder, or there is no node")
    run(server, node, str(HERE / "with_vercel.mjs"), cwd=Path(folder))
