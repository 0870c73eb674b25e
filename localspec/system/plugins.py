"""Plugins: objects that packages, this one included, offer by name in entry points (see docs/plugins.md)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from localspec.errors import PluginError

DRAFTERS, BACKENDS, HEAD_KINDS = "localspec.drafters", "localspec.backends", "localspec.head_kinds"
"""The groups of entry points that are read."""


@cache
def offered(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name; of two with one name ours counts, then the first that is found.

    Those of a checkout are read from its pyproject.toml, so that a new one needs no installing.
    """
    found: dict[str, EntryPoint] = {}
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
        rows = project.get("entry-points", {}).get(group, {}) if project.get("name") == "localspec" else {}
        found = {name: EntryPoint(name, value, group) for name, value in rows.items()}
    installed = sorted(entry_points(group=group), key=lambda each: each.dist is None or each.dist.name != "localspec")
    for each in installed:
        found.setdefault(each.name, each)
    return found


def load(group: str, name: str) -> Any:
    """The object of an entry point.

    Raises:
        KeyError: none has the name.
        PluginError: importing it failed.
    """
    entry = offered(group)[name]
    try:
        return entry.load()
    except Exception as error:
        package = entry.dist.name if entry.dist is not None else entry.module
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise PluginError(f"the plugin {name!r} of {package} cannot be imported: {why}") from error
