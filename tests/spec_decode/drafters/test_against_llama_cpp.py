"""Published heads as llama.cpp's own program drafts with them: the same draft tokens, round by round.

``llama-speculative-simple`` is compiled from the source that llama-cpp-python ships, once, where the benchmarks keep
llama.cpp's programs; minutes of work. $LOCALSPEC_TEST_PROGRAMS names another folder.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.build_llama_cpp import build, default_folder
from localspec import LLM, SamplingParams
from localspec.heads.training.distill import distill
from localspec.heads.training.run_folder import Effort, Recipe
from tests.conftest import TinyFiles, open_backend
from tests.support import ggufs
from tests.support.gemma4_ggufs import write_assistant, write_gemma4
from tests.support.mtp_ggufs import FAMILIES, write_apart
from tests.support.published_heads import write_dflash, write_eagle3
from tests.support.trained_heads import trained_head

FOLDER = Path(os.environ.get("LOCALSPEC_TEST_PROGRAMS") or default_folder())
"""Read before ``isolated_home`` hides it."""

N_ROUNDS = 200
N_DRAFT = 4
N_TOKENS = 150
TEXTS = ("one two one two", "the of and to in is that", "with the not he his but", "an or had from this", "be by")
UNTOLD = [-1] * N_DRAFT
"""The draft of a round that the program does not print: of DFlash2 only how much of it was right."""

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
    """llama.cpp's own program."""
    open_backend("llama-cpp")
    return build(["llama-speculative-simple"], FOLDER.absolute(), os.cpu_count() or 1)["llama-speculative-simple"]


def rounds_of_program(program: Path, target: Path, head: Path | None, text: str) -> list[DraftRound]:
    """What llama.cpp drafts, read from its log."""
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
    return found


def rounds_here(llm: LLM, text: str) -> list[DraftRound]:
    params = SamplingParams(max_tokens=N_TOKENS + 8, ignore_eos=True)
    rounds = llm.rounds(text, params)
    return [
        DraftRound([token.id for token in round_.draft], round_.verdict.n_accepted, round_.verdict.next_token)
        for round_ in rounds
    ]


def eagle3(tiny: TinyFiles, folder: Path) -> tuple[Path, Path | None]:
    return tiny.pair.target, write_eagle3(tiny.pair.target, folder / "eagle3.gguf", n_out=300)


def dflash(tiny: TinyFiles, folder: Path) -> tuple[Path, Path | None]:
    return tiny.pair.target, write_dflash(
        tiny.pair.target, folder / "dflash.gguf", block_size=16, windows=[True, False]
    )


def dspark(tiny: TinyFiles, folder: Path) -> tuple[Path, Path | None]:
    return tiny.pair.target, write_dflash(tiny.pair.target, folder / "dspark.gguf", n_out=300, markov=True)


def dflash2(tiny: TinyFiles, folder: Path) -> tuple[Path, Path | None]:
    """And a target that says things twice, of which more is right than the first token."""
    target = ggufs.correlated_pair(folder, shape=ggufs.Shape(n_layer=4, residual=1.0, tied=True)).target
    return target, write_dflash(target, folder / "dflash.gguf", block_size=8, selector=8)


def glm(tiny: TinyFiles, folder: Path) -> tuple[Path, Path | None]:
    return ggufs.write_glm(folder / "glm.gguf"), None


def qwen35(tiny: TinyFiles, folder: Path) -> tuple[Path, Path | None]:
    return ggufs.write_hybrid(folder / "qwen35.gguf", residual=0.3, mtp=1), None


def apart(tiny: TinyFiles, folder: Path) -> tuple[Path, Path | None]:
    """The MTP layer in a file of its own."""
    whole = ggufs.write_hybrid(folder / "whole.gguf", residual=0.3, mtp=1)
    return write_apart(whole, folder / "trunk.gguf", folder / "mtp.gguf")


def assistant(tiny: TinyFiles, folder: Path) -> tuple[Path, Path | None]:
    """A Gemma 4 and what reads its keys and values."""
    target = write_gemma4(folder / "gemma4.gguf")
    return target, write_assistant(target, folder / "mtp.gguf")


def assistant_of_shared(tiny: TinyFiles, folder: Path) -> tuple[Path, Path | None]:
    """One whose target's last layers share those of earlier ones, as E2B's and E4B's do."""
    target = write_gemma4(folder / "gemma4.gguf", pattern=(True, False) * 3, n_shared=2, n_each=32)
    return target, write_assistant(target, folder / "mtp.gguf")


COMPARED = [name for name in FAMILIES if name != "qwen3next"]
"""Of Qwen3-Next the program's first drafts have one token, two and three, so there are no rounds of one length."""


def family(name: str) -> Callable[[TinyFiles, Path], tuple[Path, Path | None]]:
    """A model of another family with an MTP layer."""

    def make(tiny: TinyFiles, folder: Path) -> tuple[Path, Path | None]:
        return FAMILIES[name](folder / "family.gguf"), None

    make.__name__ = name
    return make


def distilled(tiny: TinyFiles, folder: Path) -> tuple[Path, Path | None]:
    """A head of EAGLE-3's layout as ``localspec distill`` makes it."""
    pytest.importorskip("jax", reason="heads are trained with JAX")
    shape = ggufs.Shape(n_layer=5, n_embd=64, n_head=4, n_head_kv=2, n_ff=96, residual=0.4)
    target = ggufs.write_llama(folder / "target.gguf", shape, ggufs.bpe_vocab(300))
    effort = Effort(1e4, n_places=3000, n_steps=20, n_tests=3, n_questions=1, max_tokens=8, longest_answer=60)
    recipe = Recipe(kind="eagle3", steps=N_DRAFT, n_out=200, d_ff=64)
    made = distill(target, recipe=recipe, effort=effort, n_threads=1).path
    return target, made.rename(folder / "eagle3.gguf")  # the name says the kind


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "make",
    [
        eagle3,
        distilled,
        dflash,
        dspark,
        dflash2,
        glm,
        qwen35,
        apart,
        assistant,
        assistant_of_shared,
        *map(family, COMPARED),
    ],
)
def test_the_same_tokens_are_drafted_and_accepted(
    program: Path, tiny: TinyFiles, tmp_path: Path, make: Callable[..., Any]
) -> None:
    """200 rounds over several prompts, each up to the first token that ends the program's answer."""
    target, head = make(tiny, tmp_path)
    options: dict[str, Any] = {"n_ctx": 512, "idle": False, "remember": False, "n_threads": 1}
    theirs: list[DraftRound] = []
    mine: list[DraftRound] = []
    with LLM(target, "mtp" if head is None else head, backend="llama-cpp", draft_length=N_DRAFT, **options) as llm:
        ends = llm.run(lambda pair: pair.target.vocab.eog)
        for case in range(40):
            text = " ".join(TEXTS[case % len(TEXTS) :] + TEXTS[: case // len(TEXTS)])
            expected = rounds_of_program(program, target, head, text)
            # Till its budget cuts drafts, or an end token comes: behind that it accepts nothing, and stops; we go on.
            expected = list(takewhile(lambda it: len(it.draft) == N_DRAFT and it.next_token not in ends, expected))
            found = rounds_here(llm, text)[: len(expected)]
            if make is dflash2:
                found = [replace(each, draft=UNTOLD[: len(each.draft)]) for each in found]
            assert found == expected, text
            theirs, mine = theirs + expected, mine + found
            if len(theirs) >= N_ROUNDS:
                break
    assert len(theirs) >= N_ROUNDS
    assert sum(each.n_accepted for each in mine) == sum(each.n_accepted for each in theirs) > 20


MINUTES = 15
"""Of making a head. On two busy cores SmolLM2 135M then wrote 20,000 tokens of examples."""

REAL_TEXTS = (
    "The history of the bicycle begins",
    "To cook rice well, first",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village,",
    "The three most important rules of writing are",
    "Photosynthesis is the process",
)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_trained_head_of_a_real_model_drafts_there_as_here(program: Path, real_model: Callable[[str], Path]) -> None:
    """The two were compiled apart, so a tie may part them, from which on an answer is another one."""
    target = real_model("smollm2-135m")
    head = trained_head(target, "eagle3", MINUTES)
    options: dict[str, Any] = {"n_ctx": 512, "idle": False, "remember": False, "n_threads": 1}
    same: list[DraftRound] = []
    n_parted = 0
    with LLM(target, head, backend="llama-cpp", draft_length=N_DRAFT, **options) as llm:
        ends = llm.run(lambda pair: pair.target.vocab.eog)
        for text in REAL_TEXTS:
            expected = rounds_of_program(program, target, head, text)
            expected = list(takewhile(lambda it: len(it.draft) == N_DRAFT and it.next_token not in ends, expected))
            pairs = zip(rounds_here(llm, text), expected, strict=False)
            alike = [mine for mine, theirs in takewhile(lambda pair: pair[0] == pair[1], pairs)]
            n_parted += len(alike) < len(expected)
            same += alike
    assert n_parted <= 1
    assert len(same) >= N_ROUNDS
    assert sum(each.n_accepted > 0 for each in same) > 0.12 * len(same)
