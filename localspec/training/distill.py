"""``localspec.distill``: a head for a target, made on this machine in a given time.

The target writes examples, the head learns from them, is written, compared with what was trained, and measured against
the drafters there are; it is kept if it makes answers faster by more than the noise. Everything lies in a folder of the
home and is written at least once a minute, so a run can be stopped, or killed, at any moment and goes on from there.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from localspec.backends.heads import target_facts
from localspec.backends.llama_cpp import NAME as LLAMA_CPP
from localspec.errors import Cancelled, EngineUnavailable, LocalspecError, UsageError
from localspec.measuring.questions import in_turns, own_questions, read_questions
from localspec.model_files.catalog import Catalog
from localspec.model_files.head_folders import heads_folder
from localspec.runtime.arguments import checked_spec
from localspec.system.files import write_atomically
from localspec.training.begun import Wanted, begun
from localspec.training.card_command import card_command
from localspec.training.chats import chat_in, saved_chats
from localspec.training.examples import TEST
from localspec.training.head_maker import HeadMaker
from localspec.training.material import Asked, Material, Overlap, read_texts, without
from localspec.training.recipe import Effort, Recipe
from localspec.training.run_folder import Run, RunError, RunFolder
from localspec.training.standing import Distilled, Report, Standing
from localspec.training.worth import Worth, measure_worth

Say = Callable[[str], None]


def distill(
    model: str | Path,
    *,
    minutes: float | None = None,
    kind: str = "chained",
    seed: int | None = None,
    begin_with: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    prompts: str | Path | Sequence[str | Path] | None = None,
    texts: Sequence[str | Path] = (),
    chats: bool = False,
    backend: str = "auto",
    n_threads: int | None = None,
    command: str = "",
    report: Report | None = None,
    say: Say | None = None,
    cancel: threading.Event | None = None,
    recipe: Recipe | None = None,
    effort: Effort | None = None,
) -> Distilled:
    """Train a head for a target: a small network that continues the target's own states, and so guesses its next
    tokens for almost nothing. No guess can change what the target says.

    >>> made = localspec.distill("qwen2.5-coder-1.5b", minutes=60, report=lambda standing: print(standing.text))
    >>> made.worth.gain  # tokens per second with the head over those without; it is kept if that is surely over 1

    Args:
        model: the target: a catalogue name, a path to a ``.gguf`` file, or ``hf:OWNER/REPO/FILE.gguf``.
        minutes: of work, all sittings of a run together; None is 60, or what the run was begun with.
        kind: ``chained``, ``parallel``, ``medusa`` or ``eagle3``; see docs/heads.md. The last one runs on
            llama-cpp, or on MLX.
        seed: of every random choice; None is 0, or one more than that of the head that it begins with, whose examples
            would else be written again.
        begin_with: a head's file, to go on from what it has learned; "none" begins with a linear head. None goes on
            from the head that drafters would take, if it is of this kind and size.
        resume: go on with the run of this kind of head that was begun. A run that is finished goes on if there are more
            minutes.
        force: begin anew where a run was begun.
        prompts: a file of questions in the format of Spec-Bench for the target to answer, or several.
        texts: files and folders of text for it to read.
        chats: whether it reads the chats that were saved in this ``LOCALSPEC_HOME``.
        backend, n_threads: as for ``LLM``.
        command: how the command line begins that its card says it is made with, up to the model; "" is a call from
            Python. What the run used is added.
        report: called after every pass and step, with where it stands.
        say: takes remarks, a line each.
        cancel: set it, from any thread, to stop; the run can be resumed.
        recipe: sizes of the head, instead of ``kind`` and ``seed``.
        effort: bounds on the work, instead of ``minutes``.

    Raises:
        UsageError: a value makes no sense; or a run was begun, and neither ``resume`` nor ``force`` is set, or it was
            begun with another seed.
        Cancelled: ``cancel`` was set.
        EngineError: the engine failed, returns no hidden states, or there is no JAX to train with.
        RunError: the disk refuses, or what lies there of the run is damaged.
    """
    wanted = Wanted(kind, seed, recipe, minutes if effort is None else effort.minutes, begin_with, resume, force)
    if effort is None and minutes is not None:
        effort = Effort(minutes)
    backend = _engine_for(wanted.new_recipe().kind, backend)
    say, report, cancel = say or (lambda line: None), report or (lambda standing: None), cancel or threading.Event()
    name = checked_spec("model", model)
    path = Catalog.load().resolve(name)
    folder = RunFolder(path, target_facts(path).fingerprint, wanted.new_recipe().kind)
    with _disk_errors(folder), folder.locked():
        run = begun(path, folder, wanted, say)
        _bring(run, [prompts] if isinstance(prompts, str | Path) else prompts or (), texts, chats=chats)
        effort = effort or Effort(run.minutes)
        material, tested = _lessons(run, effort)
        for remark in material.remarks:
            say(remark)
        folder.write(run)
        maker = HeadMaker(path, folder, run, effort, material, tested, report, say, cancel)
        made = maker.work(backend, n_threads, card_command(run, name, command))
        worth = _measured(path, folder, made.engine, n_threads, effort, maker, say)
        kept = _keep(path, folder, run.recipe.kind) if worth is not None and worth.pays else None
        run.finished = True
        folder.write(run)
    return Distilled(folder.head, kept, made.card, worth)


def _engine_for(kind: str, backend: str) -> str:
    """The engine to train on.

    Raises:
        UsageError: it cannot run a head of this kind.
        EngineUnavailable: there is no JAX.
    """
    if kind == "eagle3" and backend not in ("auto", LLAMA_CPP, "mlx"):
        raise UsageError(f"an EAGLE-3 head runs on {LLAMA_CPP} or mlx, and so does its target, not on {backend}")
    if find_spec("jax") is None:
        raise EngineUnavailable("training a head needs JAX: pip install 'localspec[distill]'")
    return LLAMA_CPP if kind == "eagle3" and backend == "auto" else backend


def _bring(run: Run, prompts: Sequence[str | Path], texts: Sequence[str | Path], *, chats: bool) -> None:
    """Add the user's own to what the run has of earlier sittings."""
    for paths, more in ((run.prompts, prompts), (run.texts, texts)):
        paths += [path for path in dict.fromkeys(map(os.path.abspath, more)) if path not in paths]
    run.chats |= chats


def _lessons(run: Run, effort: Effort) -> tuple[Material, Overlap]:
    """What the target is given besides its own prompts, with the questions that the head is tested on; and what must
    not be among the examples.

    Raises:
        UsageError: the user's own cannot be read, or nothing of it is left.
    """
    tested = Overlap(turn for which in ("report", "tuning") for q in own_questions(which) for turn in q.turns)
    material = without(_material(run), tested)
    return replace(material, asked=[*_tests(effort), *material.asked]), tested


def _material(run: Run) -> Material:
    """The user's own, as the run names it.

    Raises:
        UsageError: it cannot be read.
    """
    asked = [
        Asked(f"{Path(path).stem}/{question.id}", question.category, question.turns)
        for path in run.prompts
        for question in read_questions(Path(path))
    ]
    texts = read_texts([Path(text) for text in run.texts], chat_in) if run.texts else Material()
    chats = saved_chats() if run.chats else Material()
    return Material(asked, [*texts.read, *chats.read], [*texts.remarks, *chats.remarks])


def _tests(effort: Effort) -> list[Asked]:
    """Questions whose answers the head is tested on: a few of every category, whatever the time."""
    chosen = in_turns(own_questions("tuning"))[: min(effort.n_tests, int(effort.minutes / 2))]
    return [Asked(f"{TEST}{question.id}", question.category, question.turns[:1]) for question in chosen]


def _measured(
    path: Path, folder: RunFolder, backend: str, n_threads: int | None, effort: Effort, maker: HeadMaker, say: Say
) -> Worth | None:
    """What the head is worth; None where that cannot be measured, and ``say`` hears why."""

    def report(what: str, fraction: float | None) -> None:
        maker.show(Standing("measuring", text=what, fraction=fraction))

    try:
        return measure_worth(
            path,
            folder.head,
            backend=backend,
            n_threads=n_threads,
            n_questions=effort.n_questions,
            max_tokens=effort.max_tokens,
            seconds=maker.finishing_seconds,
            report=report,
            stop=maker.cancel,
        )
    except Cancelled:
        raise
    except LocalspecError as error:
        say(f"what the head is worth cannot be measured: {error}")
        return None


def _keep(path: Path, folder: RunFolder, kind: str) -> Path:
    """Put the head where drafters are looked for, in the place of an earlier one."""
    place = heads_folder() / f"{path.stem}.{kind}.gguf"
    place.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(place) as file:
        file.write(folder.head.read_bytes())
    return place


@contextmanager
def _disk_errors(folder: RunFolder) -> Iterator[None]:
    """A disk that refuses is one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RunError(
                f"the disk of {folder.path} is full; what was written is whole: make room, then --resume goes on"
            ) from None
        raise RunError(f"cannot write to {folder.path}: {error.strerror or error}") from None
