"""MLX on real files: the text is llama.cpp's but for ties, the audit holds, and a pair may be of two engines.

SmolLM2 is also compared with the float64 reference. It is a small model with many near ties, and llama.cpp rounds the
states to 8 bits before it multiplies them with quantised weights: its answers leave the file's own sooner than MLX's.

On a CPU MLX takes 0.1 s (SmolLM2) to 1.5 s (Qwen 1.5B) a token, whatever the width of a pass, so texts are compared
without generating them: llama.cpp answers greedily, and MLX reads prompt and answer in one pass. Up to the first token
that it would have chosen otherwise, its own greedy answer is the same; and at each such token the two candidates have
to be a tie, within what the engines differ by where they agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from localspec import LLM, SamplingParams
from localspec.__main__ import run
from localspec.backends import mlx, reference
from localspec.backends.base import FloatArray, Model
from localspec.prompts.templates import ChatTemplate
from tests.conftest import TinyFiles, open_backend

pytestmark = [pytest.mark.real, pytest.mark.slow]

CODE = "Write a Python function that merges two sorted lists."
SKY = "Explain in three sentences why the sky is blue."
PLANETS = "List the planets of the solar system."
STEAM = "The history of the steam engine begins"
SORT = "def quicksort(items):"

N_EXACT = 32
"""Tokens compared with the reference, which takes 0.1 s for each."""


def prompt_tokens(model: Model, text: str) -> list[int]:
    """A chat where the model has a template; Gemma's base model continues the text."""
    if not model.chat_template:
        return model.tokenize(text, add_special=True)
    template = ChatTemplate.for_vocab(model.chat_template, model.vocab)
    segments = template.render_segments([{"role": "user", "content": text}])
    return [token for piece, special in segments for token in model.tokenize(piece, parse_special=special)]


def greedy(model: Model, prompt: list[int], n: int) -> tuple[list[int], FloatArray]:
    """A greedy answer, one token a pass, and the rows that it was chosen from."""
    answer: list[int] = []
    rows: list[FloatArray] = []
    with model.new_context(len(prompt) + n) as context:
        context.decode(prompt[:-1], "none")
        while len(answer) < n and not (answer and answer[-1] in model.vocab.eog):
            rows.append(context.decode([(answer or prompt)[-1]], "last").logits[0].copy())
            answer.append(int(rows[-1].argmax()))
    return answer, np.stack(rows)


def rows_of(model: Model, prompt: list[int], answer: list[int]) -> FloatArray:
    """The rows that an answer would be chosen from, in one pass."""
    with model.new_context(len(prompt) + len(answer)) as context:
        context.decode(prompt[:-1], "none")
        return context.decode([prompt[-1], *answer[:-1]]).logits.copy()


def gap_noise(a: FloatArray, b: FloatArray) -> float:
    """The largest change, between two engines, of how far one of the five best tokens is behind the best [logits]."""
    top = np.argsort(-a, axis=1)[:, :5]
    gaps = [np.take_along_axis(x, top, axis=1) - np.take_along_axis(x, top[:, :1], axis=1) for x in (a, b)]
    return float(np.abs(gaps[0] - gaps[1]).max())


@pytest.mark.parametrize(
    ("name", "prompts", "n"),
    [
        ("smollm2-135m", [CODE, SKY, PLANETS], 40),
        ("gemma3-270m", [STEAM, SORT], 40),
        ("qwen2.5-coder-0.5b", [CODE, SKY], 40),
        ("qwen2.5-coder-1.5b", [CODE], 34),
    ],
)
def test_the_text_is_llama_cpps_but_for_ties(
    name: str,
    prompts: list[str],
    n: int,
    real_model: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    open_backend("mlx")
    with open_backend("llama-cpp").load(real_model(name), n_gpu_layers=0) as theirs, mlx.load(real_model(name)) as ours:
        for text in prompts:
            prompt = prompt_tokens(ours, text)
            answer, expected = greedy(theirs, prompt, n)
            rows = rows_of(ours, prompt, answer)
            chosen = rows.argmax(axis=1)
            differ, agree = np.flatnonzero(chosen != answer), np.flatnonzero(chosen == answer)
            noise = gap_noise(expected[agree], rows[agree])
            margins = [
                max(expected[i].max() - expected[i, chosen[i]], rows[i].max() - rows[i, answer[i]]) for i in differ
            ]
            with capsys.disabled():
                ties = ", ".join(f"{i} by {margin:.2f}" for i, margin in zip(differ, margins, strict=True))
                print(f"\n{name}, {text[:24]!r}: of {len(answer)} tokens differ: {ties or 'none'}; noise {noise:.2f}")
            assert noise < 2.0, "these are not the same weights"
            assert max(margins, default=0.0) <= noise
            assert len(differ) <= len(answer) // 8


def test_the_text_is_the_references(real_model: Callable[[str], Path]) -> None:
    """In float64 from the file's own bits: every token of MLX's answer, and rows a hundred times closer than noise."""
    open_backend("mlx")
    path = real_model("smollm2-135m")
    with reference.load(path) as exact, mlx.load(path) as ours:
        prompt = prompt_tokens(ours, PLANETS)
        answer, expected = greedy(exact, prompt, N_EXACT)
        rows = rows_of(ours, prompt, answer)
    assert rows.argmax(axis=1).tolist() == answer
    assert gap_noise(expected, rows) < 0.01


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", ["a tiny pair", "a tiny window", "smollm2-135m"])
def test_the_audit_holds(
    file: str, tiny: TinyFiles, real_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`localspec verify`: forced drafts, verification's law, rolled-back memories; exit status 1 on a defect."""
    open_backend("mlx")
    if file == "a tiny pair":
        models = [str(tiny.pair.target), "--draft", str(tiny.pair.draft)]
    else:
        models = [str(tiny.sliding if file == "a tiny window" else real_model(file)), "--draft", "ngram"]
    quick = ["--quick", "--prompts", "1", "--max-tokens", "16", "--ctx", "512", "--json"]
    status = run(["verify", *models, "--backend", "mlx", *quick])
    report = json.loads(capsys.readouterr().out)
    assert status == 0, report
    assert report["backend"] == "mlx"


@pytest.mark.timeout(900)
def test_a_target_on_mlx_and_its_draft_on_llama_cpp(real_model: Callable[[str], Path]) -> None:
    """The same file twice: what the engines disagree on is noise, so most guesses are accepted. (Not nearly all: of 40
    tokens llama.cpp's rounding moves up to 5, and what a round guessed behind such a token goes with it. Guesses that
    were mapped or rolled back wrongly would be accepted about never.)"""
    open_backend("llama-cpp")
    open_backend("mlx")
    path = real_model("smollm2-135m")
    with LLM(path, draft=path, backend="mlx", draft_backend="llama-cpp", light_draft=False, n_ctx=256) as llm:
        reply = llm.chat([{"role": "user", "content": PLANETS}], SamplingParams(max_tokens=40), draft_length=5)
    assert llm.backend_name == "mlx"
    assert reply.stats["num_draft_tokens"] >= 20
    assert reply.stats["acceptance_rate"] > 0.6, reply.stats
