"""The oracle: what the target says alone, in memories that are never rolled back, token by token and in wide passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np

from localspec.backends.base import Context, Model
from localspec.commands.questions import own_questions
from localspec.commands.verify.findings import Path
from localspec.commands.verify.rows import KeptRow
from localspec.commands.verify.width_noise import WidthNoise
from localspec.sampling.sampling import SamplingParams, edit_logits
from localspec.spec_decode.decoder import PREFILL_CHUNK

Check = Callable[[], None]
"""Called between passes; raises to stop."""

SLACK = 8
"""Tokens of room behind a path, for probes."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question of the audit."""

    name: str
    text: str


def prompts() -> list[Prompt]:
    """The prompts that speed is reported on: the shortest of each category first, then the next of each."""
    by_category: dict[str, list[Prompt]] = {}
    for question in own_questions("report"):
        by_category.setdefault(question.category, []).append(Prompt(question.id, question.turns[0]))
    ranked = [sorted(group, key=lambda prompt: len(prompt.text)) for group in by_category.values()]
    tiers = [[group[i] for group in ranked if i < len(group)] for i in range(max(map(len, ranked)))]
    return list(chain.from_iterable(sorted(tier, key=lambda prompt: len(prompt.text)) for tier in tiers))


def feed(context: Context, tokens: Sequence[int], check: Check, lengths: Iterable[int] = repeat(PREFILL_CHUNK)) -> None:
    """Decode tokens in passes of these lengths, without looking at any logits."""
    at = 0
    for length in lengths:
        if at >= len(tokens):
            return
        check()
        context.decode(tokens[at : at + length], "none")
        at += length


def plain_path(model: Model, name: str, prompt: list[int], params: SamplingParams, n_tokens: int, check: Check) -> Path:
    """The greedy answer by the book: a fresh memory, one token a pass, the argmax.

    Args:
        model: the target.
        name: of the prompt.
        prompt: its tokens.
        params: penalties and biases, and whether end tokens end it.
        n_tokens: longest answer.
        check: see ``Check``.
    """
    ends = frozenset() if params.ignore_eos else model.vocab.eog
    tokens, rows = list(prompt), []
    with model.new_context(len(prompt) + n_tokens) as context:
        feed(context, prompt[:-1], check)
        for _ in range(n_tokens):
            check()
            row = KeptRow.of(edit_logits(context.decode(tokens[-1:], "last").logits[0], tokens, params))
            rows.append(row)
            tokens.append(row.best)
            if row.best in ends:
                break
    return Path(name, prompt, tokens[len(prompt) :], rows, params.ignore_eos)


def wide_rows(
    model: Model,
    path: Path,
    params: SamplingParams,
    lengths: Iterable[int],
    widths: Iterator[int],
    noise: WidthNoise,
    check: Check,
) -> None:
    """Decode a path again in a fresh memory, in passes of other widths, and note how far the rows move.

    Args:
        model: the target.
        path: what to decode.
        params: penalties and biases.
        lengths: of the passes over the prompt. They matter as much as those over the answer: a cached prompt's passes
            fall elsewhere than those of a new one, and engines take other kernels for long passes than for short ones.
        widths: of the passes over the answer; as many as it takes are consumed.
        noise: what is found is added to it.
        check: see ``Check``.
    """
    tokens = path.before(len(path.answer) - 1)
    with model.new_context(len(tokens) + SLACK) as context:
        first = len(path.prompt) - 1
        feed(context, tokens[:first], check, lengths)
        at = first
        while at < len(tokens):
            check()
            width = min(next(widths), len(tokens) - at)
            noise.widths.add(width)
            for i, row in enumerate(context.decode(tokens[at : at + width]).logits):
                row = edit_logits(row, tokens[: at + i + 1], params)
                known = path.rows[at + i - first]
                noise.deviations.append(known.compared(row))
                noise.n_flips += int(np.argmax(row)) != known.best
            at += width


def cuts(n_tokens: int) -> list[Iterable[int]]:
    """Ways to cut a prompt of so many tokens into passes: as a cache would that knows half of it, in long, in short and
    in very short ones."""
    half = max(1, n_tokens // 2)
    return [chain((half,), repeat(PREFILL_CHUNK)), repeat(PREFILL_CHUNK // 2 - 3), repeat(16), repeat(5)]
