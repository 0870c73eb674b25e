"""How much of the program one answer goes through: what a debugger that steps through it meets."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import localspec
from localspec import LLM, SamplingParams
from localspec.spec_decode.drafters.base import Controller, Drafter
from tests.conftest import TinyFiles

MOST_FILES, MOST_FUNCTIONS = 25, 149
PASS = ["SpeculativeDecoder.decode", "answer"]
"""The frames above the target's pass, of an answer alone: no generator, and the decoder's own among them."""


def test_an_answer_enters_few_files_and_functions(tiny: TinyFiles) -> None:
    root = str(Path(localspec.__file__).parent)
    entered: set[tuple[str, str]] = set()
    above: list[list[str]] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(root) or code.co_name.startswith("<"):
            return
        entered.add((code.co_filename, code.co_qualname if sys.version_info >= (3, 11) else str(code.co_firstlineno)))
        if code.co_name == "decode" and code.co_filename.endswith("backends/base.py"):
            names, outer = list[str](), frame.f_back
            while outer is not None and len(names) < len(PASS):
                names.append(outer.f_code.co_name)
                outer = outer.f_back
            above.append(names)

    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(tiny.quick.target, draft=["ngram", tiny.quick.draft], backend="reference", idle=False, n_ctx=256) as llm:
        llm.generate("one two", params, draft_length=4)
        try:
            llm.run(lambda pair: sys.setprofile(note))
            sys.setprofile(note)
            llm.generate("one two three one two", params, draft_length=4)
        finally:
            sys.setprofile(None)
            llm.run(lambda pair: sys.setprofile(None))
    files = {file for file, _ in entered}
    assert len(files) <= MOST_FILES
    assert len(entered) <= MOST_FUNCTIONS
    assert [each.rpartition(".")[2] for each in PASS] in above


def members(interface: type) -> list[str]:
    return sorted(name for name in {*vars(interface), *interface.__annotations__} if not name.startswith("_"))


def test_a_controller_has_five_members_and_a_drafter_six() -> None:
    assert members(Controller) == ["explain", "learn", "may_use", "observe", "plan"]
    assert members(Drafter) == ["accept", "begin", "clone", "draft", "info", "process"]
