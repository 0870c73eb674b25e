"""What is made, and for how long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Model
from localspec.errors import UnsupportedModel, UsageError
from localspec.model_files.head_card import Kind
from localspec.training.shards import Passage
from localspec.values import checked_whole, is_number, shown

KINDS: tuple[Kind, ...] = ("chained", "parallel", "medusa", "eagle3")
MOST_MINUTES = 60.0 * 24 * 30

_MARKS_SHARE = 8
"""At most one in so many of a head's tokens is kept for being a special token: some files have thousands."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A head to be made.

    Attributes:
        kind: see ``head_card.Kind``.
        steps: how many tokens ahead it learns to guess.
        n_out: tokens that it can guess. Of what Qwen2.5-Coder 1.5B said to our tuning questions, the 16,384 that it
            said most in 11,000 tokens of examples, and then the lowest ids, cover 0.888; 32,768 cover 0.936.
        d_ff: width of its layer's MLP; the target's own, if that is less.
        seed: of every random choice.
    """

    kind: Kind = "chained"
    steps: int = 4
    n_out: int = 32768
    d_ff: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"a head is one of {', '.join(KINDS)}, not {shown(self.kind)}")
        checked_whole("steps", self.steps, 2, 16)
        checked_whole("the head's vocabulary", self.n_out, 16, 1 << 20)
        checked_whole("the width of the head's MLP", self.d_ff, 32, 1 << 16)
        checked_whole("the seed", self.seed, 0, (1 << 48) - 1)

    def taps(self, n_layers: int) -> tuple[str, ...]:
        """The hidden states that the head reads: the last one, and but for a medusa head one shortly before it. An
        EAGLE-3 head gets what goes into three layers from llama.cpp, and never the last state.

        Raises:
            UnsupportedModel: the model has too few layers.

        Of a linear head of Qwen2.5-Coder 1.5B, fitted to 18,000 rows, 0.236 of guesses were right with layer 25 and the
        last, 0.226 with the last alone, 0.212 with layer 2 and the last, 0.209 with layer 14 and the last, 0.218 with
        all four: more inputs need more examples.
        """
        if self.kind == "eagle3":
            if n_layers < 4:
                raise UnsupportedModel(
                    f"an EAGLE-3 head reads three layers of a model of four or more, not of {n_layers}"
                )
            return tuple(f"layer:{i}" for i in (min(n_layers // 2, n_layers - 4), n_layers - 3, n_layers - 2))
        return ("norm",) if self.kind == "medusa" else (f"layer:{max(0, n_layers - 3)}", "norm")

    def kept(self, n_layers: int) -> tuple[str, ...]:
        """The hidden states that examples keep: the taps, and the last one, which a head is fitted to."""
        taps = self.taps(n_layers)
        return taps if "norm" in taps else (*taps, "norm")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is done.

    Attributes:
        minutes: of work: making examples, training, testing and measuring; not the time that is stepped aside.
        n_places, n_steps: stop making examples, and training, after so many places to learn from, and so many steps of
            the optimiser; then the same is done however fast the machine is.
        n_tests: of our tuning questions, whose answers the head is tested on and never trained on; one for every two
            minutes at most.
        n_questions: asked at most to measure what the head is worth.
        max_tokens: of an answer then.
        longest_answer: tokens of an example.
    """

    minutes: float = 60.0
    n_places: int | None = None
    n_steps: int | None = None
    n_tests: int = 25
    n_questions: int = 12
    max_tokens: int = 96
    longest_answer: int = 320

    def __post_init__(self) -> None:
        if not is_number(self.minutes) or not 0 < self.minutes <= MOST_MINUTES:
            raise UsageError(f"minutes must be over 0 and at most {MOST_MINUTES:.0f}, not {shown(self.minutes)}")

    @property
    def seconds(self) -> float:
        return 60.0 * self.minutes


def token_map(passages: Iterable[Passage], model: Model, n_out: int) -> npt.NDArray[np.int32]:
    """The tokens that a head can guess, ascending: those that the target says most often, those that end its turns, and
    the other special tokens (marks of tool calls and the like), which few examples have.

    Special tokens take at most an eighth of the head's vocabulary, those that were said most before the lowest ids.
    What was never seen comes in the order of ids, which is about that of frequency where merges were learned.
    """
    n_vocab = model.vocab.n_tokens
    counts = np.zeros(model.n_vocab, dtype=np.int64)
    for passage in passages:
        if not passage.held_out:
            counts += np.bincount(passage.tokens[passage.start :], minlength=len(counts))
    most = counts.sum() + 1
    marks = sorted(model.vocab.marks, key=lambda token: -counts[token])[: n_out // _MARKS_SHARE]
    counts[marks] = most
    counts[list(model.vocab.eog)] = most + 1
    order = np.argsort(-counts[:n_vocab], kind="stable")
    return np.sort(order[: min(n_out, n_vocab)]).astype(np.int32)
