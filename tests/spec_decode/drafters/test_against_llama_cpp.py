"""Published heads as llama.cpp's own program drafts with them: the same draft tokens, round by round.

``llama-speculative-simple`` is compiled from the source that llama-cpp-python ships, once, where the benchmarks keep
llama.cpp's programs; minutes of work. $LOCALSPEC_TEST_PROGRAMS names another folder.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.build_llama_cpp import build, default_folder
from localspec import LLM, SamplingParams
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs
from tests.support.gemma4_ggufs import write_assistant, write_gemma4
from tests.support.mtp_ggufs import FAMILIES, write_apart
from tests.support.published_heads import write_dflash, write_eagle3

FOLDER = Path(os.environ.get("LOCALSPEC_TEST_PROGRAMS") or default_folder())
"""Read before ``isolated_home`` hides it."""

N_ROUNDS = 200
N_DRAFT = 4
N_TOKENS = 150
TEXTS = ("one two one two", "the of and to in is that", "with the not he his but", "an or had from this", "be by")
UNTOLD = [-1] * N_DRAFT
"""The draft of a round that the program does not print: of DFlash2 only how much of it was right."""

Files = tuple[Path, Path | None]
"""A target and a head in a file of its own."""

Make = Callable[[Path, Path], Files]
"""Of a target and a folder."""

_CANDIDATE = re.compile(rb"draft candidate +0, pos +(\d+): +(\d+) ")
_ACCEPTED = re.compile(rb"accepted (\d+)/(\d+) draft tokens, the last target token is: \((\d+)\)")


@dataclass
class DraftRound:
    """A round: the tokens drafted, how many were accepted, and what the target said then."""

    draft: list[int]
    n_accepted: int
    next_token: int


@pytest.fixture(scope="module")
def program() -> Path:
    open_backend("llama-cpp")
    return build(["llama-speculative-simple"], FOLDER.absolute(), os.cpu_count() or 1)["llama-speculative-simple"]


def rounds_of_program(
    program: Path, target: Path, head: Path | None, text: str, ends: Collection[int]
) -> list[DraftRound]:
    kind = ["--spec-type", "draft-mtp"] if head is None else ["--spec-type", f"draft-{head.stem}", "-md", str(head)]
    options = ["--spec-draft-n-max", str(N_DRAFT), "--spec-draft-p-min", "0", "--no-spec-draft-backend-sampling"]
    options += ["-n", str(N_TOKENS), "-c", "512", "--temp", "0", "-t", "1", "-td", "1", "-lv", "5", "--fit", "off"]
    command = [str(program), "-m", str(target), *kind, *options, "-p", text]
    log = subprocess.run(command, capture_output=True, check=True, timeout=120, stdin=subprocess.DEVNULL).stderr
    found: list[DraftRound] = []
    draft: list[int] = []
    for line in log.splitlines():
        if match := _CANDIDATE.search(line):
            draft = [*draft[: int(match[1])], int(match[2])]
        elif match := _ACCEPTED.search(line):
            n_accepted, n_drafted, token = map(int, match.groups())
            found.append(DraftRound(draft[:n_drafted] or UNTOLD[:n_drafted], n_accepted, token))
            draft = []
    # Till its budget cuts drafts, or an end token comes: behind that it accepts nothing, and stops; we go on.
    return list(takewhile(lambda it: len(it.draft) == N_DRAFT and it.next_token not in ends, found))


def rounds_here(llm: LLM, text: str) -> list[DraftRound]:
    params = SamplingParams(max_tokens=N_TOKENS + 8, ignore_eos=True)
    rounds = llm.rounds(text, params)
    return [
        DraftRound([token.id for token in round_.draft], round_.verdict.n_accepted, round_.verdict.next_token)
        for round_ in rounds
    ]


def dflash2(target: Path, folder: Path) -> Files:
    """And a target that says things twice, of which more is right than the first token."""
    target = ggufs.correlated_pair(folder, shape=ggufs.Shape(n_layer=4, residual=1.0, tied=True)).target
    return target, write_dflash(target, folder / "dflash.gguf", block_size=8, selector=8)


def assistant(**options: Any) -> Make:
    """A Gemma 4 and what reads its keys and values."""

    def make(target: Path, folder: Path) -> Files:
        target = write_gemma4(folder / "gemma4.gguf", **options)
        return target, write_assistant(target, folder / "mtp.gguf")

    return make


def published(write: Callable[..., Path], kind: str, **options: Any) -> Make:
    return lambda target, folder: (target, write(target, folder / f"{kind}.gguf", **options))


def hybrid(path: Path) -> Path:
    return ggufs.write_hybrid(path, residual=0.3, mtp=1)


def family(write: Callable[[Path], Path]) -> Make:
    return lambda target, folder: (write(folder / "family.gguf"), None)


MADE: dict[str, Make] = {
    "eagle3": published(write_eagle3, "eagle3", n_out=300),
    "dflash": published(write_dflash, "dflash", block_size=16, windows=[True, False]),
    "dspark": published(write_dflash, "dspark", n_out=300, markov=True),
    "dflash2": dflash2,
    "apart": lambda target, folder: write_apart(hybrid(folder / "w.gguf"), folder / "trunk.gguf", folder / "mtp.gguf"),
    "assistant": assistant(),
    # The target's last layers share keys and values of earlier ones, as E2B's and E4B's do.
    "assistant of shared": assistant(pattern=(True, False) * 3, n_shared=2, n_each=32),
    "glm": family(ggufs.write_glm),
    "qwen35": family(hybrid),
    # Of Qwen3-Next the program's first drafts have one token, two and three, so there are no rounds of one length.
    **{name: family(write) for name, write in FAMILIES.items() if name != "qwen3next"},
}


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", MADE)
def test_the_same_tokens_are_drafted_and_accepted(program: Path, tiny: TinyFiles, tmp_path: Path, kind: str) -> None:
    """200 rounds over several prompts, each up to the first token that ends the program's answer."""
    target, head = MADE[kind](tiny.pair.target, tmp_path)
    options: dict[str, Any] = {"n_ctx": 512, "idle": False, "remember": False, "n_threads": 1}
    theirs: list[DraftRound] = []
    mine: list[DraftRound] = []
    with LLM(target, "mtp" if head is None else head, backend="llama-cpp", draft_length=N_DRAFT, **options) as llm:
        ends = llm.run(lambda pair: pair.target.vocab.eog)
        for case in range(40):
            text = " ".join(TEXTS[case % len(TEXTS) :] + TEXTS[: case // len(TEXTS)])
            expected = rounds_of_program(program, target, head, text, ends)
            found = rounds_here(llm, text)[: len(expected)]
            if kind == "dflash2":
                found = [replace(each, draft=UNTOLD[: len(each.draft)]) for each in found]
            assert found == expected, text
            theirs, mine = theirs + expected, mine + found
            if len(theirs) >= N_ROUNDS:
                break
    assert len(theirs) >= N_ROUNDS
    assert sum(each.n_accepted for each in mine) == sum(each.n_accepted for each in theirs) > 20
