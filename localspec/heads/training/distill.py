"""``localspec.distill``: a head for a target, made on this machine in a given time.

The target writes examples, the head learns from them, is written, and measured against the drafters there are; it is
kept if it makes answers faster by more than the noise. All lies in a folder of the home and is written at least once a
minute, so a run that was stopped, or killed, can be resumed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.engine.options import checked_spec
from localspec.engine.saved import chat_files
from localspec.errors import Cancelled, EngineUnavailable, LocalspecError, UsageError
from localspec.heads.card import HeadCard
from localspec.heads.file import heads_folder, read_card
from localspec.heads.trained import heads_for, target_facts
from localspec.heads.training.examples import TEST, Asked, Material, Overlap, chat_in, read_texts, without
from localspec.heads.training.run_folder import Effort, Recipe, Report, Run, RunError, RunFolder
from localspec.heads.training.start import NO_HEAD, earlier_head
from localspec.llm import LLM
from localspec.measuring.statistics import Values, estimate
from localspec.measuring.subject import (
    PLAIN,
    SLICE_TOKENS,
    Arm,
    EngineUnderTest,
    Sample,
    blocks,
    measure,
    places,
)
from localspec.model_files.catalog import Catalog
from localspec.prompts.questions import in_turns, own_questions, read_questions
from localspec.sampling.sampling import SamplingParams
from localspec.system.files import home, is_same_file, write_atomically

if TYPE_CHECKING:
    from localspec.heads.training.head_maker import HeadMaker


def _open_run(
    target: Path,
    folder: RunFolder,
    say: Callable[[str], None],
    *,
    seed: int | None,
    recipe: Recipe | None,
    minutes: float | None,
    begin_with: str | Path | None,
    resume: bool,
) -> Run:
    """The run to work on, with the head that it begins with in its folder; for the arguments see ``distill``.

    Raises:
        UsageError: there is one, and neither resume nor force was said; none to resume; or it was begun differently.
        RunError: what lies there is damaged.
    """
    run = folder.read()
    if run is not None:
        what, done = "made" if run.finished else "begun", (run.data_seconds + run.training_seconds) / 60
        state = f"a head of this model was {what}, {done:.0f} minutes of work"
        if not resume:
            raise UsageError(f"{state}: --resume goes on with it (--minutes counts them), --force begins anew")
        if recipe is None and seed not in (None, run.recipe.seed):
            was = f"the run was begun with the seed {run.recipe.seed}"
            raise UsageError(f"{was}: leave --seed out, or --force begins anew")
        if recipe not in (None, run.recipe):
            raise UsageError(f"the run was begun with another recipe, {run.recipe}; --force begins anew")
        if run.finished and (minutes or 0.0) <= run.minutes:
            raise UsageError(f"{state}; --minutes over {run.minutes:g} goes on with it")
        run.minutes, run.finished = float(minutes or run.minutes), False
    elif resume:
        raise UsageError("there is no head of this model to go on with; leave --resume out")
    else:
        run = Run(recipe or Recipe(seed=seed or 0), float(minutes or Effort().minutes))
    if folder.checkpoint.exists():
        if begin_with is not None:
            raise UsageError(
                "this head has learned already: what it begins with cannot be changed; --force begins anew"
            )
    elif begin_with is not None or not resume:
        earlier = earlier_head(target, folder.fingerprint, run.recipe, begin_with)
        if earlier is None:
            run.begins_with, run.begins_with_sha256 = NO_HEAD, ""
            folder.earlier.unlink(missing_ok=True)
        else:
            data = earlier.read_bytes()
            run.begins_with, run.begins_with_sha256 = earlier.name, hashlib.sha256(data).hexdigest()[:16]
            with write_atomically(folder.earlier, private=True) as file:
                file.write(data)
            if seed is None and recipe is None and not resume:
                run.recipe = replace(run.recipe, seed=read_card(folder.earlier).training.seed + 1)
            say(f"it goes on from {earlier.name}, with other examples (seed {run.recipe.seed})")
    return run


def card_command(run: Run, model: str) -> str:
    """The command line that makes the head of the whole run again.

    Files are named without folders, which are of this machine. As a comment follow the first digits of the SHA-256 of
    the head that it begins with, and a recipe that no option asks for.
    """
    words = ["localspec", "distill", model, "--seed", str(run.recipe.seed), "--minutes", f"{run.minutes:g}"]
    for option, paths in (("--prompts", run.prompts), ("--text", run.texts)):
        words += [word for path in paths for word in (option, Path(path).name)]
    words += [*["--chats"] * run.chats, "--begin-with", run.begins_with]
    comments = [f"{run.begins_with}: sha256 {run.begins_with_sha256}"] if run.begins_with_sha256 else []
    comments += [] if run.recipe == Recipe(seed=run.recipe.seed) else [str(run.recipe)]
    return "  # ".join([shlex.join(words), *comments])


# What a head is worth here: tokens per second with it and without it, on questions it was not trained on.

_FEWEST = 6  # questions that are asked whatever time is left

_N_CTX = 4096


@dataclass(frozen=True, slots=True)
class Worth:
    """Tokens per second, all questions together, greedy."""

    plain: float  # without drafting
    without: float  # with the drafters that there are without the head, another head of the target included
    head: float  # with the head added; what --draft auto does once it is kept
    gain: float  # speed with the head over the better of the two without it, the median over the questions
    n_questions: int
    drafters: tuple[str, ...]  # those there are without the head, by name
    interval: tuple[float, float] | None = None  # of the gain, at 95 %; None where too few questions were asked

    @property
    def pays(self) -> bool:
        """Whether answers are faster with the head by more than chance may give."""
        return self.interval is not None and self.interval[0] > 1

    @property
    def is_unclear(self) -> bool:
        return self.interval is None or self.interval[0] <= 1 <= self.interval[1]


@dataclass(frozen=True, slots=True)
class Distilled:
    """Result of a run.

    Attributes:
        path: the head file in the run's folder.
        kept: where it was put for drafters to find it; None where it does not pay here.
        worth: tokens per second with and without it; None where that could not be measured.
    """

    path: Path
    kept: Path | None
    card: HeadCard
    worth: Worth | None


Say = Callable[[str], None]


def distill(
    model: str | Path,
    *,
    minutes: float | None = None,
    seed: int | None = None,
    begin_with: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    prompts: str | Path | Sequence[str | Path] | None = None,
    texts: Sequence[str | Path] = (),
    chats: bool = False,
    backend: str = "auto",
    n_threads: int | None = None,
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
        minutes: of work, all calls of a run together; None is 60, or what the run was begun with.
        seed: of every random choice; None is 0, or one more than that of the head that it begins with.
        begin_with: a head's file to start from; "none" starts with a linear head. None takes the head that drafters
            would take, if it is of this size.
        resume: go on with the run; a finished one goes on if there are more minutes.
        force: begin anew where a run was begun.
        prompts: files of questions in the format of Spec-Bench for the target to answer.
        texts: files and folders of text for it to read.
        chats: whether it reads the chats that were saved in this ``LOCALSPEC_HOME``.
        backend, n_threads: as for ``LLM``.
        report: called after every pass and step, with where it stands.
        say: takes remarks, a line each.
        cancel: set it, from any thread, to stop; the run can be resumed.
        recipe: sizes of the head, instead of ``seed``.
        effort: bounds on the work, instead of ``minutes``.

    Raises:
        UsageError: a value makes no sense; or a run was begun, and neither ``resume`` nor ``force`` is set, or it was
            begun with another seed.
        Cancelled: ``cancel`` was set.
        EngineError: the engine failed, returns no hidden states, or there is no JAX to train with.
        RunError: the disk refuses, or what lies there of the run is damaged.
    """
    if find_spec("jax") is None:
        raise EngineUnavailable("training a head needs JAX: pip install 'localspec[distill]'")
    if effort is None and minutes is not None:
        effort = Effort(minutes)
    Recipe(seed=seed or 0)  # refuses a wrong seed before the model is read
    say, report, cancel = say or (lambda line: None), report or (lambda standing: None), cancel or threading.Event()
    name = checked_spec("model", model)
    path = Catalog.load().resolve(name)
    folder = RunFolder(path, target_facts(path).fingerprint)
    with _disk_errors(folder), folder.locked():
        if force:
            folder.clear()
        run = _open_run(
            path,
            folder,
            say,
            seed=seed,
            recipe=recipe,
            minutes=None if effort is None else effort.minutes,
            begin_with=begin_with,
            resume=resume,
        )
        prompts = [prompts] if isinstance(prompts, str | Path) else prompts or ()
        for paths, more in ((run.prompts, prompts), (run.texts, texts)):
            paths += [place for place in dict.fromkeys(map(os.path.abspath, more)) if place not in paths]
        run.chats |= chats
        effort = effort or Effort(run.minutes)
        material, tested = _lessons(run, effort)
        for remark in material.remarks:
            say(remark)
        folder.write(run)
        from localspec.heads.training.head_maker import HeadMaker  # needs JAX, which is there now

        maker = HeadMaker(path, folder, run, effort, material, tested, report, say, cancel)
        card, engine = maker.work(backend, n_threads, card_command(run, name))
        worth: Worth | None = None
        kept: Path | None = None
        try:
            worth = measure_worth(path, folder.head, engine, n_threads, effort, maker)
        except Cancelled:
            raise
        except LocalspecError as error:
            say(f"what the head is worth cannot be measured: {error}")
        if worth is not None and worth.pays:
            kept = heads_folder() / f"{path.stem}.gguf"
            kept.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(kept) as file:
                file.write(folder.head.read_bytes())
        run.finished = True
        folder.write(run)
    return Distilled(folder.head, kept, card, worth)


def _lessons(run: Run, effort: Effort) -> tuple[Material, Overlap]:
    """What the target is given besides its own prompts, the questions that the head is tested on first; and what must
    not be among the examples.

    Raises:
        UsageError: the user's own cannot be read, or nothing of it is left.
    """
    tested = Overlap(turn for which in ("report", "tuning") for q in own_questions(which) for turn in q.turns)
    asked = [
        Asked(f"{Path(path).stem}/{question.id}", question.category, question.turns)
        for path in run.prompts
        for question in read_questions(Path(path))
    ]
    texts = read_texts([Path(text) for text in run.texts]) if run.texts else Material()
    chats = [chat for path in chat_files(home()) if (chat := chat_in(path)) is not None] if run.chats else []
    if run.chats and not chats:
        raise UsageError(f"no chat was saved in {home()}; --text takes those that were saved elsewhere")
    read = [*texts.read, *{chat.name: chat for chat in chats}.values()]
    material = without(Material(asked, read, texts.remarks), tested)
    chosen = in_turns(own_questions("tuning"))[: min(effort.n_tests, int(effort.minutes / 2))]
    tests = [Asked(f"{TEST}{question.id}", question.category, question.turns[:1]) for question in chosen]
    return replace(material, tests=tests), tested


def measure_worth(
    target: Path, head: Path, backend: str, n_threads: int | None, effort: Effort, maker: HeadMaker
) -> Worth:
    """Ask questions in three ways of decoding that take turns, for about as long as is kept for it; six in any case.

    Raises:
        Cancelled: it was stopped.
        LocalspecError: the pair cannot be loaded.
    """

    def report(what: str, fraction: float | None) -> None:
        maker.show("measuring", what, 1.0 if fraction is None else fraction)

    began, draft = time.monotonic(), Catalog.load().draft_for(target)
    heads = [path for path in heads_for(target)[:1] if not is_same_file(path, head)]
    others = ["ngram", *(f"head:{path}" for path in heads), *([str(draft)] if draft is not None else [])]
    options: dict[str, Any] = {"backend": backend, "n_threads": n_threads, "n_ctx": _N_CTX, "prefix_cache_bytes": 0}
    options |= {"idle": False, "remember": False, "progress": report, "cancel": maker.cancel}
    with LLM(target, [*others, f"head:{head}"], **options) as llm:
        common = ("ngram", "model") if draft is not None else ("ngram",)
        without = Arm("without", (*common, "head") if heads else common, "auto")
        auto = Arm("auto", (*common, "head2" if heads else "head"), "auto")
        subject = EngineUnderTest(llm, [without, auto], maker.cancel, in_slices=True)
        try:
            subject.warm_up()
            questions = in_turns(own_questions("tuning"), short_first=True)[: effort.n_questions]
            params, samples = SamplingParams(max_tokens=effort.max_tokens), list[Sample]()
            for block in blocks(questions, 1):
                if block.index >= _FEWEST and time.monotonic() - began > maker.finishing_seconds:
                    break
                report("measuring what the head is worth", block.index / len(questions))
                wanted = places([subject], block)
                samples += measure(block, wanted, params, SLICE_TOKENS, lambda answer, fraction: None)
        finally:
            subject.restore()
        names = tuple(Path(name).stem for name in others)
    speeds = {arm: _speed(samples, arm) for arm in (PLAIN.name, without.name, auto.name)}
    gains = {
        question: [_speed(mine, auto.name) / max(_speed(mine, PLAIN.name), _speed(mine, without.name))]
        for question in dict.fromkeys(sample.question for sample in samples)
        for mine in [[sample for sample in samples if sample.question == question]]
    }
    gain, interval = gain_of(gains)
    return Worth(speeds["plain"], speeds["without"], speeds["auto"], gain, len(gains), names, interval)


def gain_of(gains: Values) -> tuple[float, tuple[float, float] | None]:
    """The median gain over the questions and its interval at 95 %; None in its place for fewer than six questions."""
    found = estimate(gains)
    assert found is not None
    if not found.is_firm or found.low is None or found.high is None:
        return found.median, None
    return found.median, (found.low, found.high)


def _speed(samples: Sequence[Sample], arm: str) -> float:
    mine = [sample for sample in samples if sample.arm == arm]
    return sum(sample.tokens for sample in mine) / sum(sample.seconds for sample in mine)


@contextmanager
def _disk_errors(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RunError(
                f"the disk of {folder.path} is full; what was written is whole: make room, then --resume goes on"
            ) from None
        raise RunError(f"cannot write to {folder.path}: {error.strerror or error}") from None
