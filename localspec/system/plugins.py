"""Plugins: objects that packages, this one included, offer by name in entry points (see docs/plugins.md)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.errors import PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DRAFTERS, BACKENDS, HEAD_KINDS = "localspec.drafters", "localspec.backends", "localspec.head_kinds"
"""The groups of entry points that are read."""


@cache
def offered(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name; of two with one name ours counts, then the first that is found."""
    found: dict[str, EntryPoint] = {}
    for each in _entry_points():
        if each.group == group:
            found.setdefault(each.name, each)
    return found


@cache
def _entry_points() -> list[EntryPoint]:
    """All of ours, then those of other packages; in a checkout ours as its pyproject.toml has them now."""
    from importlib.metadata import EntryPoint, entry_points  # 30 ms

    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {}) if pyproject.is_file() else {}
    groups = project.get("entry-points", {}) if project.get("name") == "localspec" else {}
    ours = [EntryPoint(name, value, group) for group, rows in groups.items() for name, value in rows.items()]
    found = [each for group in (DRAFTERS, BACKENDS, HEAD_KINDS) for each in entry_points(group=group)]
    return ours + sorted(found, key=lambda each: each.dist is None or each.dist.name != "localspec")


def load(group: str, name: str) -> Any:
    """The object of an entry point; ``KeyError``: none has the name; ``PluginError``: importing it failed."""
    entry = offered(group)[name]
    try:
        return entry.load()
    except Exception as error:
        package = entry.dist.name if entry.dist is not None else entry.module
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise PluginError(f"the plugin {name!r} of {package} cannot be imported: {why}") from error
