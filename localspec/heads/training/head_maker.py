"""The work on a run: examples, then training until the time is over, then the head as a file."""

from __future__ import annotations

import platform
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec._version import __version__
from localspec.backends.base import Model, Piece, SequenceBatch
from localspec.backends.trust import check_batch
from localspec.engine.loading import Loader
from localspec.engine.options import LoadOptions
from localspec.errors import Cancelled, EngineError, UsageError
from localspec.heads.card import HeadCard, Training
from localspec.heads.file import output_rows, read_card, write_head
from localspec.heads.kinds.eagle3 import write_eagle3
from localspec.heads.published import load_published
from localspec.heads.trained import load_head
from localspec.heads.training.examples import N_CTX_EACH, ExampleMaker, Material, Overlap, format_of
from localspec.heads.training.lessons import memory_of
from localspec.heads.training.run_folder import Effort, Phase, Report, Run, RunError, RunFolder, RunProgress, token_map
from localspec.heads.training.shards import TOP_K, Passage, Shards
from localspec.heads.training.start import Start, going_on, new_card, start
from localspec.heads.training.trainer import Trainer, TrainingSettings, engine_rates
from localspec.model_files.gguf import GGUFFile, tensor_rows
from localspec.model_files.kv_memory import KV_VALUE_BYTES, kv_shape
from localspec.model_files.sources.base import size_text
from localspec.system.machine import cpu_name, read_memory
from localspec.system.process import Courtesy

# How many texts a target writes side by side: as many as memory allows and as make it quicker, which is measured.

# Numbers of sequences that are tried; where rows look at the cells of all sequences, fewer are faster
WIDTHS = (1, 2, 4, 8, 16, 24)

_WORTH = 1.05  # least speed-up for twice as many sequences: each keeps an unfinished answer

_PASSES = 3


def sequence_bytes(model: Model, n_ctx: int) -> int:
    """Memory of one sequence's attention cache [bytes]; 0 where the file does not say."""
    with GGUFFile(model.path) as file:
        return kv_shape(file).bytes(n_ctx, model.kv_type if model.kv_type in KV_VALUE_BYTES else "f64")


def open_batch(
    model: Model,
    n_ctx: int,
    taps: Sequence[str],
    room: int,
    patience: float,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[SequenceBatch, float]:
    """A batch of the width at which the target writes fastest, with half full sequences; and its tokens per second.

    Args:
        n_ctx: tokens of each sequence.
        taps: hidden states that passes return.
        room: memory that the batch may take [bytes].
        patience: seconds that ``n_ctx / 2`` tokens of one text may take: a short run needs some that are finished.
        stopped: ends measuring.
    """
    each = max(1, sequence_bytes(model, n_ctx))
    possible = [width for width in WIDTHS if width == 1 or width * each <= room]
    best, rate, n_filled = 1, 0.0, 0
    with model.new_batch(possible[-1], possible[-1] * n_ctx, n_ctx=n_ctx, hidden=taps) as batch:
        for width in possible:
            if stopped():
                break
            for sequence in range(n_filled, width):
                _half_fill(batch, sequence)
            n_filled, seconds = width, []
            for _ in range(_PASSES):
                began = time.perf_counter()
                batch.decode([Piece(sequence, [0]) for sequence in range(width)])
                seconds.append(time.perf_counter() - began)
            found = width / min(seconds)
            if width > 1 and min(seconds) * n_ctx / 2 > patience:
                break
            if found > _WORTH * rate:
                best, rate = width, found
    return model.new_batch(best, best * n_ctx, n_ctx=n_ctx, hidden=taps), rate


def _half_fill(batch: SequenceBatch, sequence: int) -> None:
    """Fill the first sequence with half its room, and copy its tokens, which is faster, to the others."""
    context = batch[sequence]
    if sequence and batch.model.capabilities.saves_state:
        context.import_state(batch[0].export_state())
        context.truncate(batch.n_ctx // 2)
    else:
        context.decode([0] * (batch.n_ctx // 2), "none")


SECONDS_BETWEEN_WRITES = 45.0  # with the pass and the writing itself, at most a minute is lost
EXAMPLES_SHARE = 0.7  # share of the time for examples; the rest trains
FINISHING_SHARE, MOST_FINISHING_SECONDS = 0.15, 300.0  # kept for testing the head and measuring what it is worth

MOST_DISK_BYTES = 16 << 30
_SHARE_OF_FREE_DISK = 0.5
_BATCH_ROOM = 2 << 30  # memory of the batch that writes texts [bytes]
_TEXTS_IN_TURN = 8  # least number of texts that each sequence comes to write

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
        self._learned: list[Passage] = []
        self._held_out: list[Passage] = []
        self._written = 0.0
        self.finishing_seconds = min(FINISHING_SHARE * effort.seconds, MOST_FINISHING_SECONDS)
        work = effort.seconds - self.finishing_seconds
        self._data_seconds, self._training_seconds = EXAMPLES_SHARE * work, (1 - EXAMPLES_SHARE) * work

    def show(self, standing: RunProgress) -> None:
        """Report where it stands, with what is known of the whole run filled in."""
        done = self._run.data_seconds + self._run.training_seconds
        rest = self._data_seconds + self._training_seconds - done
        left = max(0.0, rest) + (self.finishing_seconds if standing.phase != "measuring" else 0.0)
        self._standing = replace(
            standing,
            fraction=min(1.0, 1 - left / self._effort.seconds) if standing.fraction is None else standing.fraction,
            seconds_left=None if standing.phase == "measuring" else left,
            n_answers=len(self._learned) + len(self._held_out),
        )
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
            recipe = self._run.recipe
            taps = recipe.kept(model.n_layers)
            self._shards = Shards(self._folder.shards, taps, model.n_embd)
            for remark in self._shards.remarks:
                self._say(remark)
            self._take_in()
            batch = stack.enter_context(self._open_batch(file, model, taps))
            maker = ExampleMaker(
                model,
                format_of(model),
                batch,
                recipe.seed,
                self._material,
                self._tested,
                self._shards.names,
                longest_answer=self._effort.longest_answer,
            )
            self._make_examples(maker)
            for remark in maker.remarks:
                self._say(remark)
            trainer = self._trainer(file, model)
            self._train(trainer)
            return self._write_head(trainer, file, model, command, n_threads), model.backend

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
        card = self._card(file, ids)
        weights = sum(int(np.prod(shape)) for shape in card.shapes().values())
        training = 20 * weights + 4 * card.n_out * card.n_embd + _TRAINING_ROOM  # see Trainer
        free = read_memory().available
        room = min(_BATCH_ROOM, (free - training) // 2)
        if room < sequence_bytes(model, n_ctx):
            raise UsageError(
                f"training needs about {size_text(training)} of memory beside the model, and {size_text(free)} are free"
            )
        self._report(RunProgress("loading", "measuring how many texts side by side are quickest"))
        batch, rate = open_batch(model, n_ctx, taps, room, self._data_seconds / _TEXTS_IN_TURN, self.cancel.is_set)
        place = 2 * len(taps) * model.n_embd + 6 * TOP_K + 4
        disk = shutil.disk_usage(self._folder.path).free
        # Prompts are read quicker than answers are written.
        expected = 3 * rate * self._data_seconds * place
        self._most_bytes = int(min(expected, MOST_DISK_BYTES, _SHARE_OF_FREE_DISK * disk + self._shards.n_bytes))
        memory = model.size_bytes + batch.n_sequences * sequence_bytes(model, n_ctx) + training
        self._say(
            f"at most {size_text(memory)} of memory, and {size_text(self._most_bytes + 30 * weights)} on the disk of "
            f"{self._folder.path}; {batch.n_sequences} texts side by side"
        )
        return batch

    def _card(self, file: GGUFFile, ids: npt.NDArray[np.int32]) -> HeadCard:
        return new_card(file, self._folder.fingerprint, self._run.recipe, ids)

    def _make_examples(self, maker: ExampleMaker) -> None:
        finished: list[Passage] = []
        self._written = began = time.monotonic()
        said = maker.n_tokens
        waited = self._courtesy.seconds
        try:
            while not self._enough(finished) and not self.cancel.is_set():
                self._courtesy()
                before = time.monotonic()
                finished += maker.step()
                now = time.monotonic()
                self._run.data_seconds += now - before
                worked = max(1e-3, now - began - (self._courtesy.seconds - waited))
                rate = (maker.n_tokens - said) / worked
                self._show("examples", "the model writes examples", rate, sum(map(len, finished)))
                if now - self._written > SECONDS_BETWEEN_WRITES:
                    self._write(maker, finished)
        finally:
            self._write(maker, finished)
        self._check_cancelled()
        self._shards.adopt_unfinished()
        self._take_in()
        if not self._suffice(self._shards.passages):
            raise RunError(
                f"{self._n_places} tokens of examples are too few to learn from; go on with --resume and more --minutes"
            )

    def _enough(self, finished: list[Passage]) -> bool:
        if self._run.data_seconds >= self._data_seconds or self._shards.n_bytes >= self._most_bytes:
            return True
        passages, n_places = [*self._shards.passages, *finished], self._effort.n_places
        return n_places is not None and self._suffice(passages, n_places)

    @staticmethod
    def _suffice(passages: Sequence[Passage], n_places: int = _LEAST_PLACES) -> bool:
        n_learned = sum(len(passage) for passage in passages if not passage.held_out)
        return n_learned >= n_places and any(passage.held_out for passage in passages)

    def _write(self, maker: ExampleMaker, finished: list[Passage]) -> None:
        self._shards.append(finished, maker.unfinished())
        finished.clear()
        self._take_in()
        self._folder.write(self._run)
        self._written = time.monotonic()

    def _take_in(self) -> None:
        """Sort what is new on disk into what is learned from and what is held out."""
        for passage in self._shards.passages[len(self._learned) + len(self._held_out) :]:
            (self._held_out if passage.held_out else self._learned).append(passage)

    @property
    def _n_places(self) -> int:
        return sum(map(len, self._shards.passages))

    def _show(self, phase: Phase, text: str, rate: float, more: int = 0, trainer: Trainer | None = None) -> None:
        self.show(
            RunProgress(
                phase,
                text,
                n_places=self._n_places + more,
                n_bytes=self._shards.n_bytes,
                rate=rate,
                tokens_seen=trainer.tokens_seen if trainer else self._standing.tokens_seen,
                curve=tuple(trainer.curve) if trainer else self._standing.curve,
            )
        )

    def _trainer(self, file: GGUFFile, model: Model) -> Trainer:
        recipe, ids = self._run.recipe, self._folder.token_map()
        if ids is None:
            ids = token_map(self._learned, model, recipe.n_out)
            self._folder.keep_token_map(ids)
        card = self._card(file, ids)
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
                return going_on(self._folder.earlier, file, card, embed_or_stop, self._learned)
            self._report(replace(self._standing, phase="training", text="fitting where to begin"))
            return start(file, card, output, embed_or_stop, self._learned, recipe.seed)

        return Trainer(
            card,
            begin,
            output,
            embed,
            self._tapped(model, self._learned),
            self._tapped(model, self._held_out),
            self._folder.checkpoint,
            TrainingSettings(seed=recipe.seed),
        )

    def _train(self, trainer: Trainer) -> None:
        n_steps = self._effort.n_steps

        def stopping() -> bool:
            self._courtesy()
            return self.cancel.is_set() or (n_steps is not None and trainer.step >= n_steps)

        def report() -> None:
            self._run.training_seconds = trainer.seconds
            self._show("training", "the head learns", trainer.rate, trainer=trainer)

        trainer.train(
            self._training_seconds, report, stopping, test_every=min(600.0, max(30.0, self._training_seconds / 10))
        )
        self._run.training_seconds = trainer.seconds
        self._folder.write(self._run)
        self._check_cancelled()

    def _write_head(
        self, trainer: Trainer, file: GGUFFile, model: Model, command: str, n_threads: int | None
    ) -> HeadCard:
        """Write the head's file, and once more with its acceptance on an engine at held-out passages."""
        path, earlier = self._folder.head, self._folder.earlier
        training = Training(
            command=command,
            seed=self._run.recipe.seed,
            data_tokens=sum(map(len, self._learned)),
            tokens_seen=trainer.tokens_seen,
            minutes=(self._run.data_seconds + self._run.training_seconds) / 60,
            machine=cpu_name(),
            versions={"localspec": __version__, "engine": model.engine, "python": platform.python_version()}
            | {name: version(name) for name in ("numpy", "jax")},
            curve=tuple(trainer.curve),
            earlier=history(earlier) if earlier.exists() else (),
        )
        self._show("testing", "testing the head on answers it has not seen", 0.0, trainer=trainer)
        weights = trainer.weights
        card = _write(path, replace(trainer.card, training=training), weights, file)
        head = (
            load_published(path, model, n_threads=n_threads, say=self._say)
            if card.kind == "eagle3"
            else load_head(path, Path(file.path), model.backend, n_threads=n_threads, say=self._say)
        )
        with closing(head):
            found = engine_rates(head, self._tapped(model, self._held_out), card.steps, memory_of(card.kind))
        return _write(path, replace(card, training=replace(training, acceptance=found)), weights, file)

    def _tapped(self, model: Model, passages: Sequence[Passage]) -> list[Passage]:
        """Passages with the states that the head reads, and no others."""
        n = len(self._run.recipe.taps(model.n_layers))
        return [replace(passage, states=passage.states[:, :n]) for passage in passages]


def history(path: Path) -> tuple[str, ...]:
    """The commands that made an earlier head, and those that it started from."""
    training = read_card(path).training
    data, seen = training.data_tokens, training.tokens_seen
    return (*training.earlier, f"{training.command} ({data:,} tokens of data, {seen:,} seen)")


def _write(path: Path, card: HeadCard, weights: Mapping[str, npt.NDArray[np.float32]], target: GGUFFile) -> HeadCard:
    if card.kind == "eagle3":
        write_eagle3(path, card, weights, target)
    else:
        write_head(path, card, weights)
    return card
