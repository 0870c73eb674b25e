"""The work on a run: examples, then training until the time is over, then the head as a file."""

from __future__ import annotations

import platform
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec._version import __version__
from localspec.backends.base import Model, SequenceBatch
from localspec.backends.trust import check_batch
from localspec.engine.loading import Loader
from localspec.engine.options import LoadOptions
from localspec.errors import Cancelled, EngineError, UsageError
from localspec.heads.card import HeadCard, Training
from localspec.heads.file import output_rows, read_card, write_head
from localspec.heads.training.examples import N_CTX_EACH, ExampleMaker, Material, Overlap
from localspec.heads.training.lessons import n_lessons
from localspec.heads.training.run_folder import (
    Effort,
    Phase,
    Report,
    Run,
    RunError,
    RunFolder,
    RunProgress,
    taps_of,
    token_map,
)
from localspec.heads.training.shards import Passage, Shards
from localspec.heads.training.start import Start, going_on, new_card, start
from localspec.heads.training.trainer import Trainer, TrainingSettings
from localspec.model_files.gguf import GGUFFile, tensor_rows
from localspec.model_files.kv_memory import KV_VALUE_BYTES, kv_shape
from localspec.model_files.sources.base import size_text
from localspec.system.machine import cpu_name, read_memory
from localspec.system.process import Courtesy

# Texts that a target writes side by side; on CPUs more were slower (benchmarks/results/heads.md)
N_SEQUENCES, N_SEQUENCES_GPU = 8, 24

SECONDS_BETWEEN_WRITES = 45.0  # with the pass and the writing itself, at most a minute is lost
EXAMPLES_SHARE = 0.7  # share of the time for examples; the rest trains
FINISHING_SHARE, MOST_FINISHING_SECONDS = 0.15, 300.0  # kept for testing the head and measuring what it is worth

MOST_DISK_BYTES = 16 << 30
_SHARE_OF_FREE_DISK = 0.5
_BATCH_ROOM = 2 << 30  # memory of the batch that writes texts [bytes]

# Memory of training besides weights and their moments: batches, activations, the compiler [bytes]
_TRAINING_ROOM = 1 << 30

_LEAST_PLACES = 64  # examples before which training does not begin


class HeadMaker:
    """Works on a run, which it keeps up to date, until its time is over; ``tested`` must not be among the examples."""

    def __init__(
        self,
        target: Path,
        folder: RunFolder,
        run: Run,
        effort: Effort,
        material: Material,
        tested: Overlap,
        report: Report,
        say: Callable[[str], None],
        cancel: threading.Event,
    ) -> None:
        self.cancel = cancel
        self._target, self._folder, self._run, self._effort = target, folder, run, effort
        self._material, self._tested = material, tested
        self._report, self._say = report, say
        self._courtesy = Courtesy(self._waits, cancel.is_set)
        self._standing = RunProgress("loading")
        self.finishing_seconds = min(FINISHING_SHARE * effort.seconds, MOST_FINISHING_SECONDS)
        work = effort.seconds - self.finishing_seconds
        self._data_seconds, self._training_seconds = EXAMPLES_SHARE * work, (1 - EXAMPLES_SHARE) * work

    def show(self, phase: Phase, text: str, fraction: float | None = None, **more: Any) -> None:
        """Report where it stands: ``more`` fields of ``RunProgress``, and what was said of the others before."""
        done, left = self._run.data_seconds + self._run.training_seconds, None
        if phase != "measuring":
            left = max(0.0, self._data_seconds + self._training_seconds - done) + self.finishing_seconds
            fraction = min(1.0, 1 - left / self._effort.seconds)
        now: dict[str, Any] = {"phase": phase, "text": text, "fraction": fraction, "seconds_left": left, "rate": 0.0}
        self._standing = replace(self._standing, **(now | more))
        self._report(self._standing)

    def _waits(self, waiting: bool) -> None:
        self._report(replace(self._standing, phase="waiting") if waiting else self._standing)

    def _check_cancelled(self) -> None:
        if self.cancel.is_set():
            raise Cancelled("training was stopped")

    def work(self, backend: str, n_threads: int | None, command: str) -> tuple[HeadCard, str]:
        """Do all that is left of the run; returns the head's card, and the engine that the target ran on.

        Raises:
            Cancelled: it was stopped; what was done is on disk.
            LocalspecError: the target cannot be loaded, or its engine returns no hidden states.
            OSError: the disk refuses.
        """
        with ExitStack() as stack:
            file = stack.enter_context(GGUFFile(self._target))
            model = stack.enter_context(self._load(backend, n_threads))
            taps = taps_of(model.n_layers)
            self._shards = Shards(self._folder.shards, taps, model.n_embd)
            batch = stack.enter_context(self._open_batch(file, model, taps))
            maker = ExampleMaker(
                model,
                batch,
                self._run.recipe.seed,
                self._material,
                self._tested,
                self._shards.names,
                self._effort.longest_answer,
            )
            self._make_examples(maker)
            for remark in [*self._shards.remarks, *maker.remarks]:
                self._say(remark)
            trainer = self._trainer(file, model)
            self._train(trainer)
            return self._write_head(trainer, model, command), model.backend

    def _load(self, backend: str, n_threads: int | None) -> Model:
        def report(what: str, fraction: float | None) -> None:
            self._check_cancelled()
            self._report(RunProgress("loading", what, fraction))

        warnings: list[str] = []
        options = LoadOptions(backend=backend, n_threads=n_threads, idle=False, remember=False)
        model = Loader(options, warnings).load(self._target, report)
        for warning in warnings:
            self._say(warning)
        wrong = ""
        if not model.capabilities.hidden:
            wrong = f"returns no hidden states for {model.path.name}, from which a head learns"
        elif not check_batch(model).holds:
            wrong = f"computes texts of {model.path.name} otherwise side by side than alone"
        if wrong:
            model.close()
            raise EngineError(f"{model.engine} {wrong}; take another --backend")
        return model

    def _open_batch(self, file: GGUFFile, model: Model, taps: Sequence[str]) -> SequenceBatch:
        n_ctx = min(N_CTX_EACH, model.n_ctx_train or N_CTX_EACH)
        ids = np.arange(min(self._run.recipe.n_out, model.vocab.n_tokens), dtype=np.int32)
        card = new_card(file, self._folder.fingerprint, self._run.recipe, ids)
        weights = sum(int(np.prod(shape)) for shape in card.shapes().values())
        training = 20 * weights + 4 * card.n_out * card.n_embd + _TRAINING_ROOM  # see Trainer
        free = read_memory().available
        # Of an engine in float64 the memory is as if it said so.
        each = max(1, kv_shape(file).bytes(n_ctx, model.kv_type if model.kv_type in KV_VALUE_BYTES else "f64"))
        most = N_SEQUENCES_GPU if model.capabilities.device == "gpu" else N_SEQUENCES
        n = min(most, min(_BATCH_ROOM, (free - training) // 2) // each)
        if n < 1:
            raise UsageError(
                f"training needs about {size_text(training)} of memory in addition to the model, and "
                f"{size_text(free)} are free"
            )
        disk = shutil.disk_usage(self._folder.path).free
        self._most_bytes = int(min(MOST_DISK_BYTES, _SHARE_OF_FREE_DISK * disk + self._shards.n_bytes))
        self._say(
            f"at most {size_text(model.size_bytes + n * each + training)} of memory, and "
            f"{size_text(self._most_bytes + 30 * weights)} on the disk of {self._folder.path}; {n} texts side by side"
        )
        return model.new_batch(n, n * n_ctx, n_ctx=n_ctx, hidden=taps)

    def _make_examples(self, maker: ExampleMaker) -> None:
        finished: list[Passage] = []
        written = time.monotonic()
        said, worked = maker.n_tokens, 0.0
        try:
            while not self._enough(finished) and not self.cancel.is_set():
                self._courtesy()
                before = time.monotonic()
                finished += maker.step()
                now = time.monotonic()
                self._run.data_seconds += now - before
                worked += now - before
                passages = [*self._shards.passages, *finished]
                self.show(
                    "examples",
                    "the model writes examples",
                    n_answers=len(passages),
                    n_places=sum(map(len, passages)),
                    n_bytes=self._shards.n_bytes,
                    rate=(maker.n_tokens - said) / max(1e-3, worked),
                )
                if now - written > SECONDS_BETWEEN_WRITES:
                    self._write(maker, finished)
                    written = time.monotonic()
        finally:
            self._write(maker, finished)
        self._check_cancelled()
        self._shards.adopt_unfinished()
        passages, n_bytes = self._shards.passages, self._shards.n_bytes
        n_places = sum(map(len, passages))
        self._standing = replace(self._standing, n_answers=len(passages), n_places=n_places, n_bytes=n_bytes)
        if not _suffice(passages, _LEAST_PLACES):
            raise RunError(
                f"{n_places} tokens of examples are too few to learn from; go on with --resume and more --minutes"
            )

    def _enough(self, finished: list[Passage]) -> bool:
        if self._run.data_seconds >= self._data_seconds or self._shards.n_bytes >= self._most_bytes:
            return True
        n_places = self._effort.n_places
        return n_places is not None and _suffice([*self._shards.passages, *finished], n_places)

    def _write(self, maker: ExampleMaker, finished: list[Passage]) -> None:
        self._shards.append(finished, maker.unfinished())
        finished.clear()
        self._folder.write(self._run)

    def _passages(self, *, held_out: bool) -> list[Passage]:
        return [passage for passage in self._shards.passages if passage.held_out == held_out]

    def _trainer(self, file: GGUFFile, model: Model) -> Trainer:
        recipe, learned = self._run.recipe, self._passages(held_out=False)
        if not self._run.token_map:
            self._run.token_map = token_map(learned, model, recipe.n_out).tolist()
            self._folder.write(self._run)
        ids = np.array(self._run.token_map, dtype=np.int32)
        card = new_card(file, self._folder.fingerprint, recipe, ids)
        output = tensor_rows(file, output_rows(file), ids)

        def embed(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
            some, places = np.unique(tokens, return_inverse=True)
            return tensor_rows(file, "token_embd.weight", some)[places]

        def embed_or_stop(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
            self._courtesy()
            self._check_cancelled()
            return embed(tokens)

        def begin() -> Start:
            if self._folder.earlier.exists():
                return going_on(self._folder.earlier, card, embed_or_stop, learned)
            self.show("training", "fitting where to begin")
            return start(file, card, embed_or_stop, learned, recipe.seed)

        held_out, settings = self._passages(held_out=True), TrainingSettings(seed=recipe.seed)
        return Trainer(card, begin, output, embed, learned, held_out, self._folder.checkpoint, settings)

    def _train(self, trainer: Trainer) -> None:
        n_steps = self._effort.n_steps

        def stopping() -> bool:
            self._courtesy()
            return self.cancel.is_set() or (n_steps is not None and trainer.step >= n_steps)

        def report() -> None:
            self._run.training_seconds = trainer.seconds
            curve, seen = tuple(trainer.curve), trainer.tokens_seen
            self.show("training", "the head learns", rate=trainer.rate, tokens_seen=seen, curve=curve)

        trainer.train(
            self._training_seconds, report, stopping, test_every=min(600.0, max(30.0, self._training_seconds / 10))
        )
        self._run.training_seconds = trainer.seconds
        self._folder.write(self._run)
        self._check_cancelled()

    def _write_head(self, trainer: Trainer, model: Model, command: str) -> HeadCard:
        """Write the head's file, with its acceptance at held-out places in the card."""
        self.show("testing", "testing the head on answers it has not seen")
        earlier = list[str]()
        if self._folder.earlier.exists():
            before = read_card(self._folder.earlier).training
            of = f"({before.data_tokens:,} tokens of data, {before.tokens_seen:,} seen)"
            earlier = [*before.earlier, f"{before.command} {of}"]
        training = Training(
            command=command,
            seed=self._run.recipe.seed,
            data_tokens=sum(map(len, self._passages(held_out=False))),
            tokens_seen=trainer.tokens_seen,
            minutes=(self._run.data_seconds + self._run.training_seconds) / 60,
            machine=cpu_name(),
            versions={"localspec": __version__, "engine": model.engine, "python": platform.python_version()}
            | {name: version(name) for name in ("numpy", "jax")},
            curve=tuple(trainer.curve),
            acceptance=trainer.rates() or {},
            earlier=tuple(earlier),
        )
        card = replace(trainer.card, training=training)
        write_head(self._folder.head, card, trainer.weights)
        return card


def _suffice(passages: Sequence[Passage], n_places: int) -> bool:
    n_learned = sum(n_lessons(passage) for passage in passages if not passage.held_out)
    return n_learned >= n_places and any(passage.held_out for passage in passages)
