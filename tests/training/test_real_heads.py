"""Heads of real models that the command makes in two minutes: they draft, are right far more often than untrained ones,
and change nothing in an answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localspec import LLM, SamplingParams
from localspec.heads.file import read_card
from localspec.system.files import home
from tests.conftest import REAL_FOLDER
from tests.support.heads import write_random_head
from tests.support.replaying import margins, rows_at_width, width_noise

TEXTS = (
    "The history of the bicycle begins in the nineteenth century, when",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a small village, there lived an old man who",
)
MINUTES = 2


def trained_head(target: Path) -> Path:
    """The head of a real model, made once by the command and kept beside the folder of models."""
    place = REAL_FOLDER.parent / "heads-for-tests" / target.stem / "chained.gguf"
    if not place.exists():
        pytest.importorskip("jax", reason="heads are trained with JAX")
        command = [sys.executable, "-m", "localspec", "distill", str(target), "--minutes", str(MINUTES)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        assert done.returncode == 0, done.stderr
        (made,) = (home() / "distill").glob("*/head.gguf")
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(".part")
        part.write_bytes(made.read_bytes())
        os.replace(part, place)
    return place


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_a_head_made_in_minutes_drafts(real_model: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    target = real_model(name)
    trained = trained_head(target)
    card = read_card(trained)
    untrained = write_random_head(
        target, tmp_path / "untrained.gguf", "chained", card.taps, card.n_out, steps=card.steps, copies_target=False
    )
    params = SamplingParams(max_tokens=96, ignore_eos=True)
    right = {}
    for head in (trained, untrained):
        with LLM(target, f"head:{head}", draft_length=2, n_ctx=512, idle=False, remember=False) as llm:
            n_first = n_accepted = 0
            for text in TEXTS:
                rounds = list(llm.rounds(text, params))
                n_first += sum(len(round_.draft) > 0 for round_ in rounds)
                n_accepted += sum(round_.verdict.n_accepted > 0 for round_ in rounds)
                # Every token is the likeliest one, to within what the width of a pass changes. Logits deviate by 6.
                prompt, answer = llm.encode(text), [token.id for round_ in rounds for token in round_.emitted]
                single = rows_at_width(1, llm, prompt, answer)
                off = margins(single, answer)
                assert off.max() <= max(0.1, 2 * width_noise(llm, prompt, answer, single))
                assert (off == 0).mean() >= 0.9
        assert n_first > 100
        right[head] = n_accepted / n_first
    # A machine that is busy meanwhile makes less of two minutes.
    assert right[trained] > right[untrained] + 0.03
    assert card.training.acceptance["all"][0] > right[untrained] + 0.03
