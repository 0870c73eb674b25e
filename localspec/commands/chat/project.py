"""The project of a folder: what a chat that is started there copies from, named once."""

from __future__ import annotations

from pathlib import Path

from localspec.commands.options import RunOptions
from localspec.errors import UsageError
from localspec.spec_decode.drafters.names import CORPUS, is_corpus
from localspec.system.home import home
from localspec.system.json_store import JsonStore

NONE = "none"
"""What is said instead of a path to forget it."""


def kept_project() -> Path | None:
    """What was kept for the folder that one is in."""
    path = (_store().get(_key()) or {}).get("path")
    return Path(path) if isinstance(path, str) and path else None


def keep_project(path: Path | None) -> None:
    """Keep it for the folder that one is in; None forgets it."""
    _store().put(_key(), {"path": "" if path is None else str(path)})


def named_project(named: str) -> Path | None:
    """A project as a person named it, made absolute; None is ``none``.

    Raises:
        UsageError: there is no such path.
    """
    if named == NONE:
        return None
    try:
        return Path(named).expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"project {named}: {getattr(error, 'strerror', None) or 'no such path'}") from None


def with_project(options: RunOptions, named: str | None) -> RunOptions:
    """Have a chat copy from a project too, and keep it; where none is named, from the one that was kept.

    Args:
        options: the chat's.
        named: ``--project``.

    Raises:
        UsageError: there is no such path.
    """
    if named is not None:
        project = named_project(named)
        keep_project(project)
    else:
        project = kept_project()
        if project is not None and not (project.exists() and options.drafters()):
            project = None
    return options if project is None else options.with_corpus(str(project))


def drafters_with(names: list[str], project: Path | None) -> list[str]:
    """Names of drafters with another project in place of the one that was kept."""
    before = f"{CORPUS}:{kept_project()}"
    others = [name for name in names if not (is_corpus(name) and name == before)]
    return others if project is None else list(dict.fromkeys([*others, f"{CORPUS}:{project}"]))


def _store() -> JsonStore:
    return JsonStore(home() / "projects", 1)


def _key() -> dict[str, str]:
    return {"folder": str(Path.cwd())}
