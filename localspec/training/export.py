"""What goes into a head's file besides weights, and whether an engine guesses with it as the trainer's network does."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from localspec import __version__
from localspec.backends.base import FloatArray
from localspec.backends.heads import STATE, Head
from localspec.model_files.head_card import Training
from localspec.system.machine import cpu_name
from localspec.training.evaluation import Tally
from localspec.training.lessons import Embed, Packer, Size, Stretch, first_lesson, n_lessons
from localspec.training.network import NOWHERE, HeadNetwork, Weights
from localspec.training.run_folder import Run
from localspec.training.shards import Passage
from localspec.training.trainer import TrainingProgress

_N_PLACES = 64
"""Places asked of a passage, from its first lesson on. A batch holds at most ``MEMORY`` before them and a few after."""

_SIZE = Size(n_rows=256, n_lessons=_N_PLACES + 1, n_starts=_N_PLACES)


def training_facts(run: Run, command: str, engine: str, progress: TrainingProgress, n_places: int) -> Training:
    """How a head was made.

    Args:
        run: the work so far.
        command: what makes it again.
        engine: name and version of what the target ran on.
        progress: the trainer's.
        n_places: tokens of examples that were learned from.
    """
    packages = {name: version(name) for name in ("numpy", "jax")}
    return Training(
        command=command,
        seed=run.recipe.seed,
        data_tokens=n_places,
        tokens_seen=progress.tokens_seen,
        minutes=(run.data_seconds + run.training_seconds) / 60,
        machine=cpu_name(),
        versions={"localspec": __version__, "engine": engine, "python": platform.python_version(), **packages},
        curve=progress.curve,
    )


@dataclass(frozen=True)
class EngineCheck:
    """How a finished head does on an engine.

    Attributes:
        acceptance: on the engine; see ``Tally.rates``.
        agreement: share of guesses, by step, that the network before quantisation makes too.
    """

    acceptance: dict[str, tuple[float, ...]]
    agreement: tuple[float, ...]


def check(
    head: Head, network: HeadNetwork, weights: Weights, embed: Embed, passages: Sequence[Passage], n_passages: int = 32
) -> EngineCheck:
    """Have an engine guess at held-out places, step by step as a drafter does, and compare.

    Args:
        head: loaded on the engine.
        network, weights: what it was made from.
        embed: the target's embeddings.
        passages: held-out ones; the first places of evenly chosen ones are asked.
        n_passages: how many; and one of each category that is not among them.
    """
    some = _evenly([passage for passage in passages if n_lessons(passage) > 0], n_passages)
    packer = Packer(head.token_map, embed, _SIZE, head.card.steps)
    tally, same, real = Tally(), np.zeros(head.card.steps), np.zeros(head.card.steps)
    for passage in some:
        begin = first_lesson(passage)
        piece = Stretch(passage, begin, begin + min(_N_PLACES, n_lessons(passage)))
        n = piece.end - begin
        batch = packer.pack([piece], np.arange(n, dtype=np.int32))
        expected, true = (np.asarray(rows)[:, :n] for rows in network.guesses(weights, batch))
        guessed = np.array([rows.argmax(1) for rows in engine_logits(head, piece)], dtype=np.int32).T
        tally.add(passage.category, guessed, true)
        asked = true != NOWHERE
        same += ((guessed == expected) & asked).sum(1)
        real += asked.sum(1)
    return EngineCheck(tally.rates(), tuple((same / np.maximum(real, 1)).tolist()))


def _evenly(passages: Sequence[Passage], n: int) -> list[Passage]:
    chosen = list(passages[:: max(1, len(passages) // n)][:n])
    seen = {passage.category for passage in chosen}
    first = {passage.category: passage for passage in reversed(passages)}
    return chosen + [passage for category, passage in first.items() if category not in seen]


def engine_logits(head: Head, piece: Stretch) -> Iterator[FloatArray]:
    """The logits of every step [steps, n_out], at every place of a piece, of a head on an engine.

    Further steps are told the passage's tokens, not their own.
    """
    first, end, steps = piece.first_row, piece.end, head.card.steps
    passage = piece.passage
    states = passage.states[first:end].reshape(end - first, -1).astype(np.float32)
    with head.new_context(end - first + steps) as context:
        if head.kind == "medusa":
            for state in states[piece.begin - first :]:
                yield head.medusa_logits(context, state)
            return
        tokens = passage.tokens[first + 1 :].tolist()
        # What lies behind the end of the passage is asked too, about anything: it is not counted.
        told = head.embed([*tokens, *[tokens[-1]] * steps])
        rows = head.fuse(states) + told[: end - first]
        for place, row in enumerate(rows):
            if place < piece.begin - first:
                context.decode_floats(row[None], [0], "none")
                continue
            if head.kind == "parallel":
                together = np.concatenate([row[None], head.masks])
                yield context.decode_floats(together, [0] * steps).logits.copy()
            else:
                found = list[FloatArray]()
                for step in range(steps):
                    forward = context.decode_floats(row[None], [0])
                    found.append(forward.logits[0].copy())
                    row = head.chain(forward.hidden[STATE])[0] + told[min(place + 1 + step, len(told) - 1)]
                yield np.stack(found)
            context.truncate(place + 1)
