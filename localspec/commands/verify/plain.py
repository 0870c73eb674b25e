"""The oracle: the target alone, in fresh contexts that are never rolled back, token by token and in wide passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from localspec.backends.base import Context, FloatArray, Model
from localspec.commands.verify.rows import Deviation, KeptRow
from localspec.sampling.sampling import SamplingParams, edit_logits
from localspec.spec_decode.decoder import PREFILL_CHUNK

SLACK = 8
"""Tokens of room behind a text, for probes."""


class AuditStopped(Exception):
    """The audit was interrupted."""


Check = Callable[[], None]
"""Called between passes; raises ``AuditStopped`` where the audit is to end."""


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """What the target alone answers greedily.

    Attributes:
        name: the prompt's id.
        prompt, tokens: token ids of the prompt and of the answer.
        rows: the row behind each token of the answer; penalties are applied.
        params: penalties and biases, and whether the answer goes on behind end tokens.
    """

    name: str
    prompt: list[int]
    tokens: list[int]
    rows: list[KeptRow]
    params: SamplingParams

    def before(self, position: int) -> list[int]:
        """All tokens before the answer's token at ``position``."""
        return self.prompt + self.tokens[:position]

    def second_best(self) -> list[int]:
        """At each place of the answer, the token that came closest to being chosen."""
        return [int(row.ids[min(1, len(row.ids) - 1)]) for row in self.rows]

    def compared(self, position: int, row: FloatArray) -> Deviation:
        """How far another row of raw logits [n_vocab] for the token at ``position`` lies from the right one."""
        return self.rows[position].compared(edit_logits(row, self.before(position), self.params))


def feed(context: Context, tokens: Sequence[int], check: Check, lengths: Iterable[int] = repeat(PREFILL_CHUNK)) -> None:
    """Make a context hold these tokens, decoding what it lacks in passes of these lengths."""
    at = context.reuse(tokens)
    for length in lengths:
        if at >= len(tokens):
            return
        check()
        context.decode(tokens[at : at + length], "none")
        at += length


def row_behind(context: Context, text: Sequence[int], check: Check) -> FloatArray:
    """The row of logits [n_vocab] behind a text; valid until the context's next pass."""
    feed(context, text[:-1], check)
    row: FloatArray = context.decode(text[-1:], "last").logits[0]
    return row


def plain_answer(
    model: Model, name: str, prompt: list[int], params: SamplingParams, n_tokens: int, check: Check
) -> PlainAnswer:
    """The greedy answer by the book: a fresh context, one token a pass, the argmax."""
    ends = frozenset() if params.ignore_eos else model.vocab.eog
    tokens, rows = list(prompt), list[KeptRow]()
    with model.new_context(len(prompt) + n_tokens) as context:
        while len(rows) < n_tokens and (not rows or rows[-1].best not in ends):
            check()
            row = KeptRow.of(edit_logits(row_behind(context, tokens, check), tokens, params))
            rows.append(row)
            tokens.append(row.best)
    return PlainAnswer(name, prompt, tokens[len(prompt) :], rows, params)


def wide_passes(
    model: Model, plain: PlainAnswer, n_rows: int, lengths: Iterable[int], widths: Iterator[int], check: Check
) -> Iterator[list[Deviation]]:
    """Compute the first rows of an answer again in a fresh context, in passes over several tokens.

    Args:
        model: the target.
        plain: the answer.
        n_rows: how many of its rows.
        lengths: of the passes over the prompt. They matter as much as those over the answer: a cached prompt's passes
            fall elsewhere than those of a new one, and engines take other kernels for long passes than for short ones.
        widths: of the passes over the answer; as many as it takes are consumed.
        check: see ``Check``.

    Yields:
        How far the rows of each pass lie from the answer's.
    """
    text, first = plain.before(n_rows - 1), len(plain.prompt) - 1
    with model.new_context(len(text) + SLACK) as context:
        feed(context, text[:first], check, lengths)
        while (at := context.n_past) < len(text):
            check()
            rows = context.decode(text[at : at + next(widths)]).logits
            yield [plain.compared(at - first + i, row) for i, row in enumerate(rows)]


def prompt_cuts(n_tokens: int) -> list[Iterable[int]]:
    """Ways to cut a prompt of so many tokens into passes: as a cache would that knows half of it, in long, in short and
    in very short ones."""
    half = max(1, n_tokens // 2)
    return [chain((half,), repeat(PREFILL_CHUNK)), repeat(PREFILL_CHUNK // 2 - 3), repeat(16), repeat(5)]
