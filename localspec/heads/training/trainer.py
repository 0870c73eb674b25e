"""Training a head for a given time; it can be stopped at any moment and resumed."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError
from localspec.heads.card import ALL_TEXTS, CurvePoint, HeadCard, Training
from localspec.heads.training.lessons import (
    NOWHERE,
    Embed,
    Packer,
    Reading,
    Size,
    Stretch,
    first_lesson,
    n_lessons,
)
from localspec.heads.training.network import HeadNetwork, Weights
from localspec.heads.training.shards import Passage
from localspec.heads.training.start import Start
from localspec.system.files import write_atomically

# How often a head is right about text that it has not seen: at the first places of held-out passages.

_N_PASSAGES, _N_PLACES = 32, 64  # 2,048 places give a share to within 0.02 (two standard errors)
_PER_CATEGORY = 4  # least passages of each category, where there are so many
_SIZE = Size(n_rows=256, n_lessons=_N_PLACES + 1, n_starts=_N_PLACES)  # of a batch, which has one passage


def places_tested(passages: Sequence[Passage]) -> list[Stretch]:
    """The first places of about ``_N_PASSAGES``, evenly chosen, and more of a category with few among them."""
    passages = [passage for passage in passages if n_lessons(passage) > 0]
    chosen = set(range(0, len(passages), max(1, len(passages) // _N_PASSAGES))[:_N_PASSAGES])
    for category in {passage.category for passage in passages}:
        own = [i for i, passage in enumerate(passages) if passage.category == category]
        missing = max(0, min(_PER_CATEGORY, len(own)) - len(chosen.intersection(own)))
        chosen.update([i for i in own if i not in chosen][:missing])
    begins = [(passages[i], first_lesson(passages[i])) for i in sorted(chosen)]
    return [Stretch(each, begin, begin + min(_N_PLACES, n_lessons(each))) for each, begin in begins]


CHECKPOINT_SECONDS = 50.0  # between checkpoints: with what a step and the writing take, at most a minute's work is lost

_POLL_SECONDS = 0.01
_FORMAT = 2


class CheckpointError(LocalspecError):
    """The file is no checkpoint, or one of another head."""


# Less than a second's work on two cores with a target of 1.5B
DEFAULT_SIZE = Size(n_rows=512, n_lessons=256, n_starts=64, n_candidates=6144)


@dataclass(frozen=True)
class TrainingSettings:
    seed: int = 0
    size: Size = DEFAULT_SIZE  # of a batch, whose gradients are computed at a time
    n_batches: int = 2  # of a step of the optimiser
    learning_rate: float = 2e-4  # the highest
    warm_up: int = 20  # steps to the highest rate
    final: float = 0.05  # share of the highest that it falls to, along a cosine, when the time is over
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # largest norm of a step's gradient
    half: bool | None = None  # multiply in bfloat16; None asks the machine

    def rate(self, step: int, share: float) -> float:
        """The learning rate of a step, when this share of the time is over."""
        cosine = 0.5 * (1 + np.cos(np.pi * min(1.0, share)))
        return float(
            self.learning_rate * min(1.0, (step + 1) / self.warm_up) * (self.final + (1 - self.final) * cosine)
        )


class Trainer:
    """A head in training, from its checkpoint if there is one.

    Memory: five float32 of each trained weight, the trimmed output rows and some hundred megabytes for a batch. The
    checkpoint holds three float32 of each weight.

    Args:
        begin: what it begins with; called where there is no checkpoint.
        output: the target's output rows for ``card.token_map`` [n_out, n_embd].

    Attributes:
        seconds: of training so far, without testing.
        tokens_seen: lessons so far, repetitions counted.
        rate: tokens per second, smoothed.
        curve: acceptance at held-out places so far.

    Raises:
        CheckpointError: the file is damaged, or of another head.
    """

    def __init__(
        self,
        card: HeadCard,
        begin: Callable[[], Start],
        output: npt.NDArray[np.float32],
        embed: Embed,
        passages: Sequence[Passage],
        held_out: Sequence[Passage],
        checkpoint: Path,
        settings: TrainingSettings,
    ) -> None:
        self.settings = settings
        self.card = card
        half = half_is_faster() if self.settings.half is None else self.settings.half
        self.network = HeadNetwork(card, output, half=half)
        self._packer = Packer(card.token_map, embed, self.settings.size, card.steps)
        self._passages = passages
        self._test_packer, self._tested = Packer(card.token_map, embed, _SIZE, card.steps), places_tested(held_out)
        self._path = checkpoint
        self._parts: dict[str, Weights] = {"weights": {}, "sizes": {}, "first": {}, "second": {}}
        self._place = (0, 0)  # of ``Reading``
        self.step = self.tokens_seen = 0
        self.seconds = self.rate = 0.0
        self.curve: list[CurvePoint] = []
        self._saved = time.monotonic()
        if checkpoint.exists():
            self._load()
        else:
            start = begin()
            for part, group in (("weights", start.weights), ("sizes", start.sizes)):
                self._parts[part] = {name: jnp.array(value) for name, value in group.items()}
            for part in ("first", "second"):
                self._parts[part] = _zeros(self._parts["weights"])
            self.save()

    @property
    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        return {name: np.array(value) for name, value in self._parts["weights"].items()}

    def rates(self, stopping: Callable[[], bool] = lambda: False) -> dict[str, tuple[float, ...]] | None:
        """Share of held-out places at which the first n guesses are all the target's, for n = 1, 2, …; see ``Rates``.

        Tokens outside of the trimmed vocabulary are wrong. None if ``stopping`` came first.
        """
        right, real = defaultdict[str, Any](int), defaultdict[str, Any](int)
        for piece in self._tested:
            if stopping():
                return None
            n = piece.end - piece.begin
            batch = self._test_packer.pack([piece], np.arange(n, dtype=np.int32))
            guesses = self.network.guesses(self._parts["weights"], batch)
            guessed, true = (np.asarray(rows)[:, :n] for rows in guesses)
            for name in (ALL_TEXTS, piece.passage.category):
                right[name] += np.logical_and.accumulate(guessed == true, axis=0).sum(1)
                real[name] += (true != NOWHERE).sum(1)
        return {name: tuple((n / np.maximum(real[name], 1)).tolist()) for name, n in sorted(right.items())}

    def train(
        self,
        seconds: float,
        report: Callable[[], None],
        stopping: Callable[[], bool],
        *,
        test_every: float = 300.0,
    ) -> None:
        """Train up to so many seconds altogether; test at the beginning, every ``test_every`` seconds, and at the end.

        Args:
            report: called after every step and test.
            stopping: asked a hundred times a second; once it is true, this saves and returns. After an exception, a
                ``KeyboardInterrupt`` too, only the last checkpoint is left.
        """
        reading = Reading(self._passages, self._packer, self.settings.seed, self._place)
        while not stopping():
            tested = self.curve[-1].minutes if self.curve else -test_every
            over, minutes = self.seconds >= seconds, self.seconds / 60
            if 60 * (minutes - tested) >= test_every or (over and minutes > tested):
                rates = self.rates(stopping)
                if rates is None:
                    break
                self.curve.append(CurvePoint(self.tokens_seen, minutes, rates))
                report()
            if over:
                break
            if not self._one_step(reading, seconds, stopping):
                break
            self._place = reading.place
            report()
            if time.monotonic() - self._saved > CHECKPOINT_SECONDS:
                self.save()
        self.save()

    def _one_step(self, reading: Reading, seconds: float, stopping: Callable[[], bool]) -> bool:
        """One step of the optimiser; False, and nothing has changed, if it was stopped."""
        began, settings = time.monotonic(), self.settings
        weights = self._parts["weights"]
        sums, taught = _zeros(weights), 0
        for _ in range(settings.n_batches):
            batch, n = reading.batch()
            sums = self.network.gradients(weights, sums, batch)
            while not all(gradient.is_ready() for gradient in sums.values()):  # computed by other threads, meanwhile
                if stopping():
                    return False
                time.sleep(_POLL_SECONDS)
            taught += n
        rate = settings.rate(self.step, self.seconds / seconds)
        first, second, sizes = (self._parts[part] for part in ("first", "second", "sizes"))
        new = _adam(settings, weights, first, second, sums, sizes, self.step + 1, rate)
        self._parts |= zip(("weights", "first", "second"), new, strict=True)
        jax.block_until_ready(new)
        took = time.monotonic() - began
        self.step += 1
        self.tokens_seen += taught
        self.seconds += took
        self.rate = taught / took if self.rate == 0 else 0.8 * self.rate + 0.2 * taught / took
        return True

    def save(self) -> None:
        facts = {"format": _FORMAT, "head": self._identity(), "place": self._place, "step": self.step}
        facts |= {"tokens": self.tokens_seen, "seconds": self.seconds, "rate": self.rate}
        facts["curve"] = Training(curve=tuple(self.curve)).to_json()
        arrays: dict[str, Any] = {
            f"{part}/{name}": np.asarray(value) for part, group in self._parts.items() for name, value in group.items()
        }
        with write_atomically(self._path, private=True) as file:
            np.savez(file, facts=np.array(json.dumps(facts)), **arrays)
        self._saved = time.monotonic()

    def _identity(self) -> str:
        card = self.card
        return f"{card.taps} of {card.target.fingerprint}, {card.token_map.sum()}, {card.shapes()}"

    def _load(self) -> None:
        try:
            with self._path.open("rb") as opened, np.load(opened) as file:
                facts = json.loads(str(file["facts"]))
                if facts["format"] != _FORMAT or facts["head"] != self._identity():
                    raise CheckpointError(f"{self._path.name} is of another head; remove it, or finish that one first")
                for part, group in self._parts.items():
                    names = (name for name in file if name.startswith(f"{part}/"))
                    group |= {name.partition("/")[2]: jnp.array(file[name]) for name in names}
            epoch, index = facts["place"]
            self._place = int(epoch), int(index)
            self.step, self.tokens_seen = int(facts["step"]), int(facts["tokens"])
            self.seconds, self.rate = float(facts["seconds"]), float(facts["rate"])
            self.curve = list(Training.from_json(facts["curve"]).curve)
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise CheckpointError(f"{self._path.name} is damaged ({error}); remove it to begin anew") from None


def _zeros(weights: Weights) -> Weights:
    return {name: jnp.zeros_like(value) for name, value in weights.items()}


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
def _adam(
    settings: TrainingSettings,
    weights: Weights,
    first: Weights,
    second: Weights,
    sums: Weights,
    sizes: Weights,
    step: Any,
    rate: Any,
) -> tuple[Weights, Weights, Weights]:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) on the mean gradient of the batches, clipped.

    Weights of inputs that are not of about the size 1 move as much less or more as if they were.
    """
    norm = jnp.sqrt(sum((gradient**2).sum() for gradient in sums.values())) / settings.n_batches
    scale = jnp.minimum(1.0, settings.clip / (norm + 1e-6)) / settings.n_batches
    beta1, beta2 = settings.betas
    new: tuple[Weights, Weights, Weights] = ({}, {}, {})
    for name, weight in weights.items():
        gradient = scale * sums[name]
        m = beta1 * first[name] + (1 - beta1) * gradient
        v = beta2 * second[name] + (1 - beta2) * gradient**2
        change = (m / (1 - beta1**step)) / (jnp.sqrt(v / (1 - beta2**step)) + 1e-8)
        if name in sizes:
            change /= sizes[name]
        for group, value in zip(new, (weight - rate * change, m, v), strict=True):
            group[name] = value
    return new


def half_is_faster() -> bool:
    """Whether this machine multiplies bfloat16 clearly faster than float32: true of CPUs with AVX512-BF16 or AMX."""
    times = {}
    for kind in (jnp.float32, jnp.bfloat16):
        a, b = jnp.ones((256, 1024), kind), jnp.ones((1024, 4096), kind)
        product = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
        product(a, b).block_until_ready()
        runs = []
        for _ in range(3):
            began = time.perf_counter()
            product(a, b).block_until_ready()
            runs.append(time.perf_counter() - began)
        times[kind] = min(runs)
    return times[jnp.bfloat16] < 0.8 * times[jnp.float32]
