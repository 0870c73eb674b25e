"""``localspec.distill``: a head for a target, made on this machine in a given time.

The target writes examples, the head learns from them, is written, compared with what was trained, and measured against
the drafters there are; it is kept if it makes answers faster. Everything lies in a folder of the home and is written at
least once a minute, so a run can be stopped, or killed, at any moment and goes on from there.
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
from localspec.commands.questions import in_turns, own_questions, read_questions
from localspec.errors import Cancelled, EngineUnavailable, LocalspecError, UsageError
from localspec.model_files.catalog import Catalog
from localspec.model_files.head_folders import heads_folder
from localspec.runtime.arguments import checked_spec
from localspec.system.files import write_atomically
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
    seed: int = 0,
    resume: bool = False,
    force: bool = False,
    prompts: str | Path | None = None,
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
    >>> made.worth.gain  # tokens per second with the head over those without; it is kept if that is over 1

    Args:
        model: the target: a catalogue name, a path to a ``.gguf`` file, or ``hf:OWNER/REPO/FILE.gguf``.
        minutes: of work, all sittings of a run together; None is 60, or what the run was begun with.
        kind: ``chained``, ``parallel``, ``medusa`` or ``eagle3``; see docs/heads.md. The last one runs on
            llama-cpp, or on MLX.
        seed: of every random choice.
        resume: go on with the run of this kind of head that was begun. A run that is finished goes on if there are more
            minutes.
        force: begin anew where a run was begun.
        prompts: a file of questions in the format of Spec-Bench, for the target to answer.
        texts: files and folders of text for it to read.
        chats: whether it reads the chats that were saved in this ``LOCALSPEC_HOME``.
        backend, n_threads: as for ``LLM``.
        command: what makes it again, for its card; None is this call.
        report: called after every pass and step, with where it stands.
        say: takes remarks, a line each.
        cancel: set it, from any thread, to stop; the run can be resumed.
        recipe: sizes of the head, instead of ``kind`` and ``seed``.
        effort: bounds on the work, instead of ``minutes``.

    Raises:
        UsageError: a value makes no sense; or a run was begun, and neither ``resume`` nor ``force`` is set.
        Cancelled: ``cancel`` was set.
        EngineError: the engine failed, returns no hidden states, or there is no JAX to train with.
        RunError: the disk refuses, or what lies there of the run is damaged.
    """
    recipe = recipe or Recipe(kind=kind, seed=seed)  # type: ignore[arg-type]
    if effort is None and minutes is not None:
        effort = Effort(minutes)
    if recipe.kind == "eagle3":
        backend = LLAMA_CPP if backend == "auto" else backend
        if backend not in (LLAMA_CPP, "mlx"):
            raise UsageError(f"an EAGLE-3 head runs on {LLAMA_CPP} or mlx, and so does its target, not on {backend}")
    say, cancel, name = say or (lambda line: None), cancel or threading.Event(), checked_spec("model", model)
    if find_spec("jax") is None:
        raise EngineUnavailable("training a head needs JAX: pip install 'localspec[distill]'")
    path = Catalog.load().resolve(name)
    folder = RunFolder(path, target_facts(path).fingerprint, recipe.kind)
    with _disk_errors(folder), folder.locked():
        run = _begun(folder, recipe, None if effort is None else effort.minutes, resume=resume, force=force)
        effort = effort or Effort(run.minutes)
        run.prompts += [os.path.abspath(prompts)] if prompts is not None else []
        run.texts += [os.path.abspath(text) for text in texts]
        run.prompts, run.texts = list(dict.fromkeys(run.prompts)), list(dict.fromkeys(run.texts))
        run.chats |= chats
        tested = Overlap(turn for which in ("report", "tuning") for q in own_questions(which) for turn in q.turns)
        material = without(_material(run), tested)
        material = replace(material, asked=[*_tests(effort), *material.asked])
        for remark in material.remarks:
            say(remark)
        folder.write(run)
        maker = HeadMaker(path, folder, run, effort, material, tested, report or (lambda standing: None), say, cancel)
        made = maker.work(backend, n_threads, command or f"localspec.distill({name!r}, minutes={effort.minutes:g})")
        worth = _measured(path, folder, made.engine, n_threads, effort, maker, say)
        kept = None
        if worth is not None and worth.gain > 1:
            kept = _keep(path, folder, recipe.kind)
        run.finished = True
        folder.write(run)
    return Distilled(folder.head, kept, made.card, worth)


def _begun(folder: RunFolder, recipe: Recipe, minutes: float | None, *, resume: bool, force: bool) -> Run:
    """The run to work on.

    Raises:
        UsageError: there is one, and what to do with it was not said; or there is none to go on with.
    """
    if force:
        folder.clear()
    run = folder.read()
    if run is None:
        if resume:
            raise UsageError(f"there is no {recipe.kind} head of this model to go on with; leave --resume out")
        return Run(folder.fingerprint, recipe, float(minutes or Effort().minutes))
    done = (run.data_seconds + run.training_seconds) / 60
    state = f"a {recipe.kind} head of this model was {'made' if run.finished else 'begun'}, {done:.0f} minutes of work"
    if not resume:
        raise UsageError(f"{state}: --resume goes on with it (--minutes counts them), --force begins anew")
    if run.target != folder.fingerprint:
        raise RunError(f"{folder.path} is of another file; --force begins anew")
    if run.finished and (minutes or 0.0) <= run.minutes:
        raise UsageError(f"{state}; --minutes over {run.minutes:g} goes on with it")
    run.minutes, run.finished = float(minutes or run.minutes), False
    return run


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
