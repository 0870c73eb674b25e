"""Training a head for a given time; it can be stopped at any moment and resumed."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from localspec.backends.base import FloatArray
from localspec.errors import LocalspecError
from localspec.heads.base import STATE, DraftHead
from localspec.heads.card import ALL_TEXTS, CurvePoint, HeadCard
from localspec.heads.training.lessons import (
    NOWHERE,
    Cursor,
    Embed,
    Packer,
    Reading,
    Size,
    Stretch,
    first_lesson,
    memory_of,
    n_lessons,
)
from localspec.heads.training.network import HeadNetwork, Weights
from localspec.heads.training.shards import Passage
from localspec.heads.training.start import Start
from localspec.system.files import write_atomically

# How often a head is right about text that it has not seen.

_SIZE = Size(n_rows=1024, n_lessons=257, n_starts=256)
_N_TESTED = 2000  # places, about: they give a share to within 0.02 (two standard errors)


class Tally:
    """Counts of places where a head was right, by category."""

    def __init__(self) -> None:
        self._right: dict[str, Any] = defaultdict(int)
        self._real: dict[str, Any] = defaultdict(int)

    def add(self, category: str, guessed: npt.NDArray[np.int32], true: npt.NDArray[np.int32]) -> None:
        """Count places by what was guessed there and what the target would say, or ``NOWHERE`` [steps, n]."""
        right = np.logical_and.accumulate(guessed == true, axis=0).sum(1)
        real = (true != NOWHERE).sum(1)
        for name in (ALL_TEXTS, category):
            self._right[name] += right
            self._real[name] += real

    def rates(self) -> dict[str, tuple[float, ...]]:
        """Share of places at which the first n guesses are all the target's, for n = 1, 2, …; see ``Rates``."""
        return {name: tuple((n / np.maximum(self._real[name], 1)).tolist()) for name, n in sorted(self._right.items())}


class HeldOutTest:
    """The same places of held-out passages, asked again and again while a head is trained; spread evenly."""

    def __init__(self, passages: Sequence[Passage], card: HeadCard, embed: Embed) -> None:
        self._packer = Packer(card.token_map, embed, _SIZE, card.steps, memory_of(card.kind))
        stride = max(1, -(-sum(map(n_lessons, passages)) // _N_TESTED))
        self._groups = list(self._grouped(passages, stride))

    def _grouped(self, passages: Sequence[Passage], stride: int) -> Iterator[list[Stretch]]:
        group, rows, lessons = list[Stretch](), 0, 0
        for piece in (piece for passage in passages for piece in self._pieces(passage, stride)):
            n_rows, n = self._packer.rows_of(piece), len(places(piece))
            if group and (rows + n_rows >= _SIZE.n_rows or lessons + n > _SIZE.n_starts):
                yield group
                group, rows, lessons = [], 0, 0
            group.append(piece)
            rows, lessons = rows + n_rows, lessons + n
        if group:
            yield group

    def _pieces(self, passage: Passage, stride: int) -> Iterator[Stretch]:
        at, last = first_lesson(passage), first_lesson(passage) + n_lessons(passage)
        while at < last:
            # A piece sees at most as many places before it as it may have lessons; so two of these halves always fit.
            end = min(last, at + _SIZE.n_starts * min(stride, 2))
            yield Stretch(passage, at, end, stride, self._packer.memory)
            at += -(-(end - at) // stride) * stride

    def rates(
        self, network: HeadNetwork, weights: Weights, stopping: Callable[[], bool] = lambda: False
    ) -> dict[str, tuple[float, ...]] | None:
        """As ``Tally.rates``; tokens outside of the trimmed vocabulary are wrong. None if ``stopping`` came first."""
        found = Tally()
        for group in self._groups:
            if stopping():
                return None
            n = sum(len(places(piece)) for piece in group)
            batch = self._packer.pack(group, np.arange(n, dtype=np.int32))
            guessed, true = (np.asarray(rows)[:, :n] for rows in network.guesses(weights, batch))
            at = 0
            for piece in group:
                here = slice(at, at := at + len(places(piece)))
                found.add(piece.passage.category, guessed[:, here], true[:, here])
        return found.rates()


def places(piece: Stretch) -> range:
    return range(piece.begin, piece.end, piece.stride)


# How often a head is right on an engine, as a drafter makes its guesses.

_N_PLACES = 64  # places asked of a passage, from its first lesson on

_PER_CATEGORY = 4  # least passages of each category, where there are so many


def engine_rates(
    head: DraftHead, passages: Sequence[Passage], steps: int, memory: int, n_passages: int = 32
) -> dict[str, tuple[float, ...]]:
    """As ``Tally.rates``, by an engine's guesses at the first places of about so many passages, evenly chosen, and more
    of a category with few among them. For ``memory`` see ``memory_of``."""
    tally = Tally()
    for passage in evenly([passage for passage in passages if n_lessons(passage) > 0], n_passages):
        begin = first_lesson(passage)
        piece = Stretch(passage, begin, begin + min(_N_PLACES, n_lessons(passage)), memory=memory)
        best = np.array([rows.argmax(1) for rows in engine_logits(head, piece, steps)]).T  # [steps, n]
        # Step k at place p guesses token p + 2 + k, which the target's logits after token p + 1 + k are for.
        at = np.arange(piece.begin, piece.end) + 1 + np.arange(steps)[:, None]
        true = np.where(at < len(passage), passage.top_ids[np.minimum(at, len(passage) - 1), 0], NOWHERE)
        tally.add(passage.category, head.token_map[best], true)
    return tally.rates()


def evenly(passages: Sequence[Passage], n: int) -> list[Passage]:
    """About n of the passages, and of each category at least ``_PER_CATEGORY``, or all there are."""
    chosen = set(range(0, len(passages), max(1, len(passages) // n))[:n])
    for category in {passage.category for passage in passages}:
        own = [i for i, passage in enumerate(passages) if passage.category == category]
        missing = max(0, min(_PER_CATEGORY, len(own)) - len(chosen.intersection(own)))
        chosen.update([i for i in own if i not in chosen][:missing])
    return [passages[i] for i in sorted(chosen)]


def engine_logits(head: DraftHead, piece: Stretch, steps: int) -> Iterator[FloatArray]:
    """An engine's logits of every step [steps, n_out], at every place; steps are given the passage's tokens."""
    first, end = piece.first_row, piece.end
    passage = piece.passage
    states = passage.states[first:end].reshape(end - first, -1).astype(np.float32)
    with head.new_context(end - first + steps) as context:
        tokens = passage.tokens[first + 1 :].tolist()
        # What lies behind the end of the passage is asked too, about anything: it is not counted.
        told = [*tokens, *[tokens[-1]] * steps]
        rows = head.true_rows(context, states, told[: end - first])
        for place, row in enumerate(rows[:, None]):
            if place < piece.begin - first:
                context.decode_floats(row, told[place : place + 1], "none")
                continue
            found = list[FloatArray]()
            for at in range(place, place + steps):
                forward = context.decode_floats(row, told[at : at + 1])
                found.append(forward.logits[0].copy())
                row = head.chained_rows(forward.hidden[STATE], told[at + 1 : at + 2])
            yield np.stack(found)
            context.truncate(place + 1)


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
    decay: float = 0.01
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
        settings: TrainingSettings | None = None,
    ) -> None:
        self.settings = settings or TrainingSettings()
        self.card = card
        half = half_is_faster() if self.settings.half is None else self.settings.half
        self.network = HeadNetwork(card, output, half=half)
        self._packer = Packer(card.token_map, embed, self.settings.size, card.steps, memory_of(card.kind))
        self._passages = passages
        self._test_set = HeldOutTest(held_out, card, embed)
        self._path = checkpoint
        self._parts: dict[str, Weights] = {"weights": {}, "sizes": {}, "first": {}, "second": {}}
        self._cursor = Cursor(self.settings.seed)
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

    def train(
        self,
        seconds: float,
        report: Callable[[], None],
        stopping: Callable[[], bool],
        *,
        test_every: float = 300.0,
    ) -> bool:
        """Train up to so many seconds altogether; test at the beginning, every ``test_every`` seconds, and at the end.

        Args:
            report: called after every step and test.
            stopping: asked a hundred times a second; once it is true, this saves and returns. After an exception, a
                ``KeyboardInterrupt`` too, only the last checkpoint is left.

        Returns:
            Whether the time is over.
        """
        reading = Reading(self._passages, self._packer, self._cursor)
        while not stopping():
            tested = self.curve[-1].minutes if self.curve else -test_every
            over, minutes = self.seconds >= seconds, self.seconds / 60
            if 60 * (minutes - tested) >= test_every or (over and minutes > tested):
                rates = self._test_set.rates(self.network, self._parts["weights"], stopping)
                if rates is None:
                    break
                self.curve.append(CurvePoint(self.tokens_seen, minutes, rates))
                report()
            if over:
                break
            before = replace(self._cursor)
            if not self._one_step(reading, seconds, stopping):
                self._cursor = before
                break
            report()
            if time.monotonic() - self._saved > CHECKPOINT_SECONDS:
                self.save()
        self.save()
        return self.seconds >= seconds

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
        new = _adamw(settings, weights, first, second, sums, sizes, self.step + 1, rate)
        self._parts |= zip(("weights", "first", "second"), new, strict=True)
        jax.block_until_ready(new)
        took = time.monotonic() - began
        self.step += 1
        self.tokens_seen += taught
        self.seconds += took
        self.rate = taught / took if self.rate == 0 else 0.8 * self.rate + 0.2 * taught / took
        return True

    def save(self) -> None:
        facts = {"format": _FORMAT, "head": self._identity(), "cursor": asdict(self._cursor), "step": self.step}
        facts |= {"tokens": self.tokens_seen, "seconds": self.seconds, "rate": self.rate}
        facts["curve"] = [asdict(point) for point in self.curve]
        arrays: dict[str, Any] = {
            f"{part}/{name}": np.asarray(value) for part, group in self._parts.items() for name, value in group.items()
        }
        with write_atomically(self._path, private=True) as file:
            np.savez(file, facts=np.array(json.dumps(facts)), **arrays)
        self._saved = time.monotonic()

    def _identity(self) -> list[Any]:
        card = self.card
        return [card.kind, list(card.taps), card.target.fingerprint, int(card.token_map.sum()), card.shapes()]

    def _load(self) -> None:
        try:
            with self._path.open("rb") as opened, np.load(opened) as file:
                facts = json.loads(str(file["facts"]))
                if facts["format"] != _FORMAT or facts["head"] != json.loads(json.dumps(self._identity())):
                    raise CheckpointError(f"{self._path.name} is of another head; remove it, or finish that one first")
                for part, group in self._parts.items():
                    names = (name for name in file if name.startswith(f"{part}/"))
                    group |= {name.partition("/")[2]: jnp.array(file[name]) for name in names}
            self._cursor = Cursor(**facts["cursor"])
            self.step, self.tokens_seen = int(facts["step"]), int(facts["tokens"])
            self.seconds, self.rate = float(facts["seconds"]), float(facts["rate"])
            self.curve = [
                CurvePoint(p["tokens_seen"], p["minutes"], {k: tuple(v) for k, v in p["acceptance"].items()})
                for p in facts["curve"]
            ]
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise CheckpointError(f"{self._path.name} is damaged ({error}); remove it to begin anew") from None


def _zeros(weights: Weights) -> Weights:
    return {name: jnp.zeros_like(value) for name, value in weights.items()}


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
def _adamw(
    settings: TrainingSettings,
    weights: Weights,
    first: Weights,
    second: Weights,
    sums: Weights,
    sizes: Weights,
    step: Any,
    rate: Any,
) -> tuple[Weights, Weights, Weights]:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) on the mean gradient of the batches, clipped.

    Vectors do not decay. Weights of inputs that are not of about the size 1 move as much less or more as if they were.
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
        decay = settings.decay if weight.ndim > 1 else 0.0
        for group, value in zip(new, (weight - rate * (change + decay * weight), m, v), strict=True):
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
