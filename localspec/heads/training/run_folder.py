"""A run on disk: what it is to make, how far it is, its examples and checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Model
from localspec.errors import LocalspecError, UsageError, checked_whole, is_number, shown
from localspec.heads.card import CurvePoint
from localspec.heads.training.shards import Passage
from localspec.system.files import home, private_folder, write_atomically

# What is made, and for how long.

MOST_MINUTES = 60.0 * 24 * 30

_MARKS_SHARE = 8  # largest share of special tokens among a head's: some files have thousands


@dataclass(frozen=True, slots=True)
class Recipe:
    """A head to be made: it guesses ``n_out`` tokens, ``steps`` ahead, with an MLP of the width ``d_ff`` at most."""

    steps: int = 4
    n_out: int = 32768
    d_ff: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        checked_whole("steps", self.steps, 2, 16)
        checked_whole("the head's vocabulary", self.n_out, 16, 1 << 20)
        checked_whole("the width of the head's MLP", self.d_ff, 32, 1 << 16)
        checked_whole("the seed", self.seed, 0, (1 << 48) - 1)


def taps_of(n_layers: int) -> tuple[str, ...]:
    """The hidden states that a head reads of a target, the last one at the end."""
    return (f"layer:{max(0, n_layers - 3)}", "norm")


@dataclass(frozen=True, slots=True)
class Effort:
    """Bounds on the work; with ``n_places`` and ``n_steps`` the result does not depend on how fast the machine is."""

    minutes: float = 60.0  # of making examples, training, testing and measuring, without pauses
    n_places: int | None = None  # to learn from
    n_steps: int | None = None  # of the optimiser
    n_tests: int = 25  # tuning questions that the head is tested on; at most one for every two minutes
    n_questions: int = 12  # asked at most to measure what the head is worth
    max_tokens: int = 96  # of an answer then
    # Tokens of an example. More answers teach more than longer ones, and a run that is stopped has more of them whole.
    longest_answer: int = 320

    def __post_init__(self) -> None:
        if not is_number(self.minutes) or not 0 < self.minutes <= MOST_MINUTES:
            raise UsageError(f"minutes must be over 0 and at most {MOST_MINUTES:.0f}, not {shown(self.minutes)}")

    @property
    def seconds(self) -> float:
        return 60.0 * self.minutes


def token_map(passages: Iterable[Passage], model: Model, n_out: int) -> npt.NDArray[np.int32]:
    """The tokens that a head can guess, ascending: the target's most frequent ones, and special tokens.

    Unseen tokens come in the order of ids, about that of frequency where merges were learned.
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


_FORMAT = 1
_STATE = "run.json"


class RunError(LocalspecError):
    """A run cannot go on."""


@dataclass(slots=True)
class Run:
    """State of a run."""

    recipe: Recipe
    minutes: float = 0.0  # that were asked for, all calls together
    data_seconds: float = 0.0  # of work so far
    training_seconds: float = 0.0
    finished: bool = False  # the minutes are over and the head was measured
    begins_with: str = "none"  # file name of the head that training begins with; "none" is a linear one
    begins_with_sha256: str = ""  # the first digits of that file's digest
    prompts: list[str] = field(default_factory=list)  # the user's own, as paths
    texts: list[str] = field(default_factory=list)
    chats: bool = False
    token_map: list[int] = field(default_factory=list)  # the tokens that the head can guess; none before training


class RunFolder:
    """The folder of the run for one target."""

    def __init__(self, target: Path, fingerprint: str) -> None:
        self.path = home() / "distill" / f"{target.stem[:60]}-{fingerprint[:8]}"
        self.fingerprint = fingerprint
        self.shards = self.path / "shards"
        self.checkpoint = self.path / "checkpoint.npz"
        self.head = self.path / "head.gguf"
        self.earlier = self.path / "earlier.gguf"  # the head that training begins with, if any

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out within the block; RunError if one works here."""
        from filelock import FileLock, Timeout

        private_folder(self.path)
        try:
            with FileLock(self.path.with_name(f"{self.path.name}.lock"), timeout=0):
                yield
        except Timeout:
            raise RunError("another localspec distill trains this head now") from None

    def read(self) -> Run | None:
        """The run that was begun here; None where there is none, RunError if it cannot be read."""
        try:
            text = (self.path / _STATE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            facts: dict[str, Any] = json.loads(text)
            if facts.pop("format") != _FORMAT:
                raise ValueError("it is of another version")
            recipe = Recipe(**facts.pop("recipe"))
            return Run(recipe=recipe, **facts)
        except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            raise RunError(f"{self.path / _STATE} is damaged ({error}); --force begins anew") from None

    def write(self, run: Run) -> None:
        with write_atomically(self.path / _STATE, private=True) as file:
            file.write(json.dumps({"format": _FORMAT} | asdict(run)).encode())

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        private_folder(self.path)


# Where a run stands, for who watches it.

Phase = Literal["loading", "examples", "training", "testing", "measuring", "waiting"]


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress of a run."""

    phase: Phase  # waiting: paused while others answer
    text: str = ""  # the same in words
    fraction: float | None = None  # of the whole work that is done; None while that is unknown
    seconds_left: float | None = None
    n_answers: int = 0  # passages on disk
    n_places: int = 0  # tokens in them
    n_bytes: int = 0
    rate: float = 0.0  # tokens per second, of what is done now
    tokens_seen: int = 0  # lessons trained on, repetitions counted
    curve: tuple[CurvePoint, ...] = ()  # acceptance at held-out places so far


Report = Callable[[RunProgress], None]
