"""A trained head as a file, and whether an engine guesses with it as the trainer's network does."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec._version import __version__
from localspec.backends.base import FloatArray, Model
from localspec.heads.base import STATE, DraftHead
from localspec.heads.card import HeadCard, Training
from localspec.heads.file import write_head
from localspec.heads.kinds.eagle3 import write_eagle3
from localspec.heads.published import load_published
from localspec.heads.trained import Head, load_head
from localspec.heads.training.earlier_head import history
from localspec.heads.training.lessons import Embed, Packer, Size, Stretch, first_lesson, memory_of, n_lessons
from localspec.heads.training.network import NOWHERE, HeadNetwork, Weights
from localspec.heads.training.run_folder import Run
from localspec.heads.training.shards import Passage
from localspec.heads.training.trainer import Tally, Trainer, TrainingProgress
from localspec.model_files.gguf import GGUFFile, tensor_rows
from localspec.system.machine import cpu_name

# Places asked of a passage, from its first lesson on. A batch holds some of the prompt before them and a few after.
_N_PLACES = 64

_PER_CATEGORY = 4  # least passages of each category, where there are so many

_SIZE = Size(n_rows=256, n_lessons=_N_PLACES + 1, n_starts=_N_PLACES)


def training_facts(
    run: Run, command: str, engine: str, progress: TrainingProgress, n_places: int, earlier: Path | None
) -> Training:
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
        earlier=history(earlier) if earlier is not None else (),
    )


def write_checked(
    path: Path,
    trainer: Trainer,
    training: Training,
    target: GGUFFile,
    model: Model,
    passages: Sequence[Passage],
    n_threads: int | None,
    say: Callable[[str], None],
) -> HeadCard:
    """Write a head's file, and once more with its acceptance on an engine at held-out passages; returns its card."""
    card, weights, place = replace(trainer.card, training=training), trainer.weights, Path(target.path)
    eagle3 = card.kind == "eagle3"

    def write() -> None:
        if eagle3:
            write_eagle3(path, card, weights, target)
        else:
            write_head(path, card, weights)

    def embed(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return tensor_rows(target, "token_embd.weight", tokens)

    write()
    head = (
        load_published(path, model, n_threads=n_threads, say=say)
        if eagle3
        else load_head(path, place, model.backend, n_threads=n_threads, say=say)
    )
    with closing(head):
        found = check(head, trainer.network, weights, embed, passages)
    card = replace(card, training=replace(training, acceptance=found.acceptance))
    write()
    return card


@dataclass(frozen=True)
class EngineCheck:
    """Acceptance of a head on an engine, and its share of guesses, by step, that the unquantised network makes too."""

    acceptance: dict[str, tuple[float, ...]]
    agreement: tuple[float, ...]


def check(
    head: DraftHead,
    network: HeadNetwork,
    weights: Weights,
    embed: Embed,
    passages: Sequence[Passage],
    n_passages: int = 32,
) -> EngineCheck:
    """Compare guesses of an engine at held-out places, step by step as a drafter makes them, with the network's.

    The first places of about ``n_passages``, evenly chosen, are asked, and more of a category with few among them.
    """
    some, steps = evenly([passage for passage in passages if n_lessons(passage) > 0], n_passages), network.card.steps
    packer = Packer(network.card.token_map, embed, _SIZE, steps, memory_of(network.card.kind))
    tally, same, real = Tally(), np.zeros(steps), np.zeros(steps)
    for passage in some:
        begin = first_lesson(passage)
        end = begin + min(_N_PLACES, n_lessons(passage))
        piece = Stretch(passage, begin, end, memory=memory_of(network.card.kind))
        n = piece.end - begin
        batch = packer.pack([piece], np.arange(n, dtype=np.int32))
        expected, true = (np.asarray(rows)[:, :n] for rows in network.guesses(weights, batch))
        guessed = np.array([rows.argmax(1) for rows in engine_logits(head, piece, steps)], dtype=np.int32).T
        tally.add(passage.category, guessed, true)
        asked = true != NOWHERE
        same += ((guessed == expected) & asked).sum(1)
        real += asked.sum(1)
    return EngineCheck(tally.rates(), tuple((same / np.maximum(real, 1)).tolist()))


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
        if head.kind == "medusa":
            assert isinstance(head, Head)
            for state in states[piece.begin - first :]:
                yield head.medusa_logits(context, state)
            return
        tokens = passage.tokens[first + 1 :].tolist()
        # What lies behind the end of the passage is asked too, about anything: it is not counted.
        told = [*tokens, *[tokens[-1]] * steps]
        rows = head.true_rows(context, states, told[: end - first])
        for place, row in enumerate(rows[:, None]):
            if place < piece.begin - first:
                context.decode_floats(row, told[place : place + 1], "none")
                continue
            if head.kind == "parallel":
                assert isinstance(head, Head)
                together = np.concatenate([row, head.masks])
                yield context.decode_floats(together, [0] * steps).logits.copy()
            else:
                found = list[FloatArray]()
                for at in range(place, place + steps):
                    forward = context.decode_floats(row, told[at : at + 1])
                    found.append(forward.logits[0].copy())
                    row = head.chained_rows(forward.hidden[STATE], told[at + 1 : at + 2])
                yield np.stack(found)
            context.truncate(place + 1)
