"""The rooms of the package, in order: an import goes down only, never in a circle, and never to a private name."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

ROOMS = {
    "errors": "",
    "values": "",
    "system": "",
    "terminal": "",
    "corpora": "system",
    "model_files": "system",
    "backends": "system model_files",
    "prompts": "system model_files backends",
    "sampling": "model_files backends",
    "spec_decode": "system corpora backends sampling",
    "controllers": "system model_files backends sampling spec_decode",
    "runtime": "system corpora model_files backends prompts sampling spec_decode controllers",
    "api": "system model_files backends prompts sampling spec_decode runtime",
    "measuring": "system model_files backends sampling spec_decode controllers runtime api",
    "training": "system model_files backends prompts sampling runtime api measuring",
    "commands.files": "system terminal model_files backends",
    "commands.inspect": "terminal model_files",
    "commands.options": "system terminal model_files backends sampling spec_decode runtime api commands.files",
    "commands.report": "system terminal",
    "commands.chat": "system terminal model_files sampling spec_decode runtime api commands.options commands.report",
    "commands.replay": "system terminal spec_decode commands.report commands.chat",
    "commands.serve": "system terminal model_files prompts sampling spec_decode runtime api commands.options",
    "commands.verify": "system terminal backends sampling spec_decode controllers runtime api commands.options "
    "commands.report measuring",
    "commands.doctor": "system terminal model_files backends sampling spec_decode controllers runtime api "
    "commands.options commands.report measuring",
    "commands.bench": "system terminal model_files backends sampling spec_decode controllers runtime api "
    "commands.options commands.report measuring commands.doctor",
    "commands.distill": "system terminal model_files backends api training commands.options commands.report",
    "commands": "system terminal model_files spec_decode runtime api commands.files commands.inspect commands.options "
    "commands.chat commands.replay commands.serve commands.verify commands.doctor commands.bench commands.distill",
    "__main__": "terminal commands",
}
"""A folder or module of ``localspec``, and the rooms above it in this table that it may import from besides EVERYBODYS;
the longest name that fits a module is its room. ``api`` is the root: the package itself, ``llm`` and ``session``."""

EVERYBODYS = ("errors", "values")
API = ("", "llm", "session")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted((ROOT / "localspec").rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def room_of(module: str) -> str:
    name = module.removeprefix("localspec").lstrip(".")
    fitting = [room for room in ROOMS if f"{name}.".startswith(f"{room}.")]
    assert name in API or fitting, f"{module} is in no room of the table"
    return "api" if name in API else max(fitting, key=len)


@cache
def imports(module: str) -> list[tuple[int, str, str, bool]]:
    """Line, imported module, name taken from it, and whether the import is for the type checker alone."""
    tree = TREES[module]
    checked = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    for_types = {id(inner) for node in checked for inner in ast.walk(node)}
    taken: list[tuple[int, str, str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: imports are absolute here"
            inner = [(f"{node.module}.{alias.name}", alias.name) for alias in node.names]
            found = [(full, "") if full in FILES else (str(node.module), name) for full, name in inner]
        else:
            continue
        taken += [(node.lineno, name, what, id(node) in for_types) for name, what in found if name in FILES]
    return taken


def test_every_module_has_a_room_and_the_table_points_one_way() -> None:
    assert all(map(room_of, FILES))
    above: list[str] = []
    for room, allowed in ROOMS.items():
        assert set(allowed.split()) <= set(above), room
        above.append(room)


def test_imports_go_down_only() -> None:
    wrong = [
        f"{module}:{line} imports {name}: {room_of(module)} may not know {room_of(name)}"
        for module in FILES
        for line, name, _, types in imports(module)
        if room_of(name) not in (room_of(module), *EVERYBODYS, *ROOMS[room_of(module)].split())
        and not (module == "localspec" and types)  # what the package exports, for type checkers
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_modules() -> None:
    """Imports inside of functions count; those for the type checker alone do not."""
    circle: list[str] = []
    try:
        TopologicalSorter({m: {name for _, name, _, types in imports(m) if not types} for m in FILES}).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle, " <- ".join(circle)


def test_no_private_name_is_imported_from_another_room() -> None:
    wrong = [
        f"{module}:{line}: {name}.{taken}"
        for module in FILES
        for line, name, taken, _ in imports(module)
        if taken.startswith("_") and not taken.startswith("__") and room_of(module) != room_of(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_private_attribute_of_another_rooms_object_is_touched() -> None:
    """By name: ``x._y`` where classes of other rooms have a ``_y`` and none of one's own has."""
    unit = {module: module if room_of(module) == "api" else room_of(module) for module in FILES}
    owners: dict[str, set[str]] = defaultdict(set)
    touched: list[tuple[str, int, str]] = []
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                owners[node.name].add(unit[module])
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                    touched.append((module, node.lineno, node.attr))
                elif isinstance(node.ctx, ast.Store):
                    owners[node.attr].add(unit[module])
    wrong = [f"{m}:{line}: {attr}" for m, line, attr in touched if owners[attr] and unit[m] not in owners[attr]]
    assert not wrong, "\n".join(wrong)


def test_a_class_name_means_one_thing() -> None:
    """Of classes that a reader may meet in another module; those with an underscore are their module's own."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
