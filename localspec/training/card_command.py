"""What makes a head again, as its card keeps it: of the whole run, and not of what its last sitting was called with."""

from __future__ import annotations

import shlex
from pathlib import Path

from localspec.training.recipe import Recipe
from localspec.training.run_folder import Run


def card_command(run: Run, model: str, typed: str = "") -> str:
    """A command line, or a call from Python.

    Of files there is the name only: folders are of this machine. A head that it begins with is named with the first
    digits of its file's SHA-256, as a comment: there may be others of that name.

    Args:
        run: with all that was asked for, in every sitting.
        model: the target, as it was named.
        typed: what a command line begins with; "" writes a call.
    """
    prompts, texts = ([Path(path).name for path in paths] for paths in (run.prompts, run.texts))
    if typed:
        parts = [model, "--kind", run.recipe.kind, "--seed", str(run.recipe.seed), "--minutes", f"{run.minutes:g}"]
        for option, names in (("--prompts", prompts), ("--text", texts)):
            parts += [part for name in names for part in (option, name)]
        parts += ["--chats"] if run.chats else []
        line = f"{typed} {shlex.join([*parts, '--begin-with', run.begins_with])}"
    else:
        usual = run.recipe == Recipe(kind=run.recipe.kind, seed=run.recipe.seed)
        facts: dict[str, object] = {"recipe": run.recipe}
        if usual:
            facts = {"kind": run.recipe.kind, "seed": run.recipe.seed}
        facts |= {"minutes": float(f"{run.minutes:g}")}
        facts |= {"prompts": prompts} if prompts else {}
        facts |= {"texts": texts} if texts else {}
        facts |= {"chats": True} if run.chats else {}
        facts |= {"begin_with": run.begins_with}
        line = f"localspec.distill({', '.join([repr(model), *(f'{name}={fact!r}' for name, fact in facts.items())])})"
    return f"{line}  # {run.begins_with}: sha256 {run.begins_with_sha256}" if run.begins_with_sha256 else line
