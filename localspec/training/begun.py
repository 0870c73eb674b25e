"""The run to work on: a new one or the one that lies there, and the head that it begins with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from localspec.errors import UsageError
from localspec.model_files.head_file import read_card
from localspec.system.files import write_atomically
from localspec.training.earlier_head import NO_HEAD, earlier_head
from localspec.training.recipe import Effort, Recipe
from localspec.training.run_folder import Run, RunError, RunFolder

_DIGITS = 16
"""Of a SHA-256."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for in this sitting; see ``distill``.

    Attributes:
        kind: of the head.
        seed, recipe: None goes with the run's.
        minutes: None goes with the run's, or is 60.
    """

    kind: str
    seed: int | None
    recipe: Recipe | None
    minutes: float | None
    begin_with: str | Path | None
    resume: bool
    force: bool

    def __post_init__(self) -> None:
        self.new_recipe()  # is checked here

    def new_recipe(self) -> Recipe:
        """Of a run that is begun."""
        return self.recipe or Recipe(kind=self.kind, seed=self.seed or 0)  # type: ignore[arg-type]


def begun(target: Path, folder: RunFolder, wanted: Wanted, say: Callable[[str], None]) -> Run:
    """The run to work on, with the head that it begins with in its folder.

    Raises:
        UsageError: there is one, and what to do with it was not said; there is none to go on with; or what is wanted
            differs from what was begun.
        RunError: what lies there is damaged, or of another file.
    """
    if wanted.force:
        folder.clear()
    run = folder.read()
    if run is not None:
        _go_on(run, folder, wanted)
    elif wanted.resume:
        raise UsageError(f"there is no {wanted.new_recipe().kind} head of this model to go on with; leave --resume out")
    else:
        run = Run(folder.fingerprint, wanted.new_recipe(), float(wanted.minutes or Effort().minutes))
    if not folder.checkpoint.exists() and (wanted.begin_with is not None or not wanted.resume):
        earlier = earlier_head(target, folder.fingerprint, run.recipe, wanted.begin_with)
        is_chosen = wanted.seed is not None or wanted.recipe is not None or wanted.resume
        _begin_with(earlier, folder, run, say, seed_is_chosen=is_chosen)
    elif wanted.begin_with is not None:
        raise UsageError("this head has learned already: what it begins with cannot be changed; --force begins anew")
    return run


def _go_on(run: Run, folder: RunFolder, wanted: Wanted) -> None:
    """Give a run that was begun its new minutes."""
    done, minutes = (run.data_seconds + run.training_seconds) / 60, wanted.minutes
    what = "made" if run.finished else "begun"
    state = f"a {run.recipe.kind} head of this model was {what}, {done:.0f} minutes of work"
    if not wanted.resume:
        raise UsageError(f"{state}: --resume goes on with it (--minutes counts them), --force begins anew")
    if run.target != folder.fingerprint:
        raise RunError(f"{folder.path} is of another file; --force begins anew")
    if wanted.recipe is None and wanted.seed not in (None, run.recipe.seed):
        raise UsageError(f"the run was begun with the seed {run.recipe.seed}: leave --seed out, or --force begins anew")
    if wanted.recipe not in (None, run.recipe):
        raise UsageError(f"the run was begun with another recipe, {run.recipe}; --force begins anew")
    if run.finished and (minutes or 0.0) <= run.minutes:
        raise UsageError(f"{state}; --minutes over {run.minutes:g} goes on with it")
    run.minutes, run.finished = float(minutes or run.minutes), False


def _begin_with(
    earlier: Path | None, folder: RunFolder, run: Run, say: Callable[[str], None], *, seed_is_chosen: bool
) -> None:
    """Keep a copy of the head that training begins with, or of none."""
    if earlier is None:
        run.begins_with, run.begins_with_sha256 = NO_HEAD, ""
        folder.earlier.unlink(missing_ok=True)
        return
    data = earlier.read_bytes()
    run.begins_with, run.begins_with_sha256 = earlier.name, hashlib.sha256(data).hexdigest()[:_DIGITS]
    with write_atomically(folder.earlier, private=True) as file:
        file.write(data)
    if not seed_is_chosen:
        run.recipe = replace(run.recipe, seed=read_card(folder.earlier).training.seed + 1)
    say(f"it goes on from {earlier.name}, with other examples (seed {run.recipe.seed})")
