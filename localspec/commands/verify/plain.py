"""The oracle: the target alone, in fresh contexts that are never rolled back, token by token and in wide passes.

Rows of logits are kept small, and compared by how far two computations of one row lie apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, repeat
from typing import Literal

import numpy as np

from localspec.backends.base import Context, FloatArray, Model
from localspec.backends.trust import agreement
from localspec.errors import EngineError
from localspec.sampling.sampling import Ids, SamplingParams, edit_logits
from localspec.spec_decode.decoder import PREFILL_CHUNK

TOP = 20
"""Tokens that a deviation looks at: those that could have been chosen."""

KEPT = 64
"""Tokens of a row that are kept: a row of 152,000 logits takes 600 KB, and an audit compares hundreds."""

SINGLE = 2e-5
"""Logits: what taking logarithms of numbers in single precision may change."""

SLACK = 8
"""Tokens of room behind a text, for probes."""


class AuditStopped(Exception):
    """The audit was interrupted."""


Check = Callable[[], Literal[False]]
"""Called between passes; raises ``AuditStopped`` where the audit is to end."""


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far two computations of one row lie apart; all 0 exactly where they are equal to the bit.

    Attributes:
        rms: root mean square change of the top 20 logits about their common shift, in logits.
        swing: largest change of one of them against the best: bounds the gap that a flipped argmax can have.
        kl: Kullback-Leibler divergence over the tokens kept, in nats.
        flips: whether the argmax differs.
    """

    rms: float = 0.0
    swing: float = 0.0
    kl: float = 0.0
    flips: bool = False


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The most probable tokens of a row [n <= KEPT], best first, among equals the lower id as in greedy decoding, with
    their logits [n]; and a digest of the whole row."""

    ids: Ids
    logits: FloatArray
    digest: bytes

    @classmethod
    def of(cls, row: FloatArray) -> KeptRow:
        """Keep what matters of a row [n_vocab].

        Raises:
            EngineError: its largest value is not a finite number.
        """
        if not np.isfinite(row.max()):
            raise EngineError("the engine returned non-finite logits")
        n = min(KEPT, len(row))
        # All that equal the last one kept are candidates, so that ties are cut by id and not by chance.
        candidates = np.flatnonzero(row >= np.partition(row, len(row) - n)[len(row) - n])
        ids = candidates[np.argsort(-row[candidates], kind="stable")][:n]
        return cls(ids, row[ids], digest_of(row))

    @property
    def best(self) -> int:
        """The argmax."""
        return int(self.ids[0])

    def gap(self, token: int) -> float:
        """How far a token lies under the most probable one, in logits; at least that, where it was not kept."""
        at = np.flatnonzero(self.ids == token)
        return float(self.logits[0]) - float(self.logits[int(at[0]) if len(at) else -1])

    def compared(self, row: FloatArray) -> Deviation:
        """Compare another computation of the same row [n_vocab] with this one."""
        if digest_of(row) == self.digest:
            return Deviation()
        change = (row[self.ids].astype(np.float64) - self.logits)[:TOP]
        rms, swing = float(change.std()), float(np.abs(change - change[0]).max())
        kl = agreement(self.logits[None], row[self.ids][None]).mean_kl
        # Not equal to the bit, but all by the same amount, or only far down: the smallest number that says so.
        return Deviation(max(rms, 1e-12), swing, kl, int(np.argmax(row)) != self.best)

    def near(self, top: Sequence[tuple[int, float]], argmax: int) -> Deviation:
        """Compare with another computation of the row of which little is known: its most probable tokens with their
        logarithms, which differ from logits by one number; and its argmax."""
        at = {int(token): i for i, token in enumerate(self.ids)}
        pairs = [(value, float(self.logits[at[token]])) for token, value in top if token in at]
        change = np.array([value - logit for value, logit in pairs] or [0.0])
        rms = float(change.std())
        if rms < SINGLE:
            return Deviation(flips=argmax != self.best)
        return Deviation(rms, float(np.abs(change - change[0]).max()), 0.0, argmax != self.best)


def digest_of(row: FloatArray) -> bytes:
    """Equal for rows that are equal to the bit."""
    return blake2b(row.tobytes(), digest_size=16).digest()


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """What the target alone answers greedily, or what it computes of an answer that was given.

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

    def compared(self, position: int, row: FloatArray) -> Deviation:
        """How far another row of raw logits [n_vocab] for the token at ``position`` lies from the right one."""
        return self.rows[position].compared(edit_logits(row, self.before(position), self.params))


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


def replayed(
    model: Model, name: str, prompt: list[int], tokens: list[int], params: SamplingParams, check: Check
) -> PlainAnswer:
    """An answer that was given, read by the book: in a fresh context, one token a pass."""
    text, rows = list(prompt), list[KeptRow]()
    with model.new_context(len(prompt) + len(tokens)) as context:
        for token in tokens:
            check()
            rows.append(KeptRow.of(edit_logits(row_behind(context, text, check), text, params)))
            text.append(token)
    return PlainAnswer(name, prompt, tokens, rows, params)


def wide_passes(
    model: Model,
    plain: PlainAnswer,
    n_rows: int,
    lengths: Iterable[int],
    widths: Iterator[int],
    check: Check,
    *,
    branches: bool = False,
) -> Iterator[list[Deviation]]:
    """Compute the first rows of an answer again in a fresh context, in passes over several tokens.

    The ``lengths`` of the passes over the prompt matter as much as the ``widths`` of those over the answer: a cached
    prompt's passes fall elsewhere than those of a new one, and engines take other kernels for long passes than for
    short ones. So does whether the context takes branching drafts (``branches``): ik-llama's computes without flash
    attention.

    Yields:
        How far the rows of each pass lie from the answer's.
    """
    text, first = plain.before(n_rows - 1), len(plain.prompt) - 1
    with model.new_context(len(text) + SLACK, branches=branches) as context:
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
