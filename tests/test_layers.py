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
    "_version": "",
    "system": "errors",
    "model_files": "errors system",
    "report": "errors system",
    "backends": "errors system model_files",
    "sampling": "errors model_files backends",
    "prompts": "errors system model_files backends",
    "spec_decode": "errors system model_files backends sampling",
    "controllers": "errors system model_files backends sampling spec_decode",
    "engine": "errors system model_files backends sampling prompts spec_decode controllers",
    "llm": "errors system model_files backends sampling prompts engine",
    "measuring": "errors system model_files report backends sampling prompts spec_decode controllers engine llm",
    "server": "errors _version system model_files backends sampling prompts spec_decode engine llm",
    "heads": "errors _version system model_files backends sampling prompts spec_decode controllers engine llm "
    "measuring",
    "": "errors _version backends sampling spec_decode engine llm heads",
    "commands": "errors _version system model_files report backends sampling prompts spec_decode controllers engine "
    "llm measuring server heads",
    "__main__": "errors system commands",
}
"""Each folder or module of ``localspec``, from the ground up, and what it may import from; imports for the type checker
count. The longest name that fits a module is its room; ``""`` is the package's own ``__init__``, which nothing imports.
"""

N_FLOORS = 12
"""Most rooms on top of each other: below ``__main__``, which runs the commands."""

N_MODULES = 211


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted((ROOT / "localspec").rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def room_of(module: str) -> str:
    name = module.removeprefix("localspec").lstrip(".")
    fitting = [room for room in ROOMS if room and f"{name}.".startswith(f"{room}.")]
    assert fitting or not name, f"{module} is in no room of the table"
    return max(fitting, key=len, default="")


@cache
def imports(module: str) -> list[tuple[int, str, str]]:
    """Line, imported module, name taken from it; of every import: at the top, in functions, for the type checker."""
    taken: list[tuple[int, str, str]] = []
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: imports are absolute here"
            inner = [(f"{node.module}.{alias.name}", alias.name) for alias in node.names]
            found = [(full, "") if full in FILES else (str(node.module), name) for full, name in inner]
        else:
            continue
        taken += [(node.lineno, name, what) for name, what in found if name in FILES]
    return taken


def test_every_module_has_a_room_and_the_table_points_one_way() -> None:
    assert {room_of(module) for module in FILES} == set(ROOMS)
    above: list[str] = []
    for room, allowed in ROOMS.items():
        assert set(allowed.split()) <= set(above), room
        above.append(room)


def test_imports_go_down_only_and_the_table_says_no_more_than_they() -> None:
    taken = {room: {room_of(name) for m in FILES if room_of(m) == room for _, name, _ in imports(m)} for room in ROOMS}
    assert {room: set(allowed.split()) for room, allowed in ROOMS.items()} == {r: t - {r} for r, t in taken.items()}


def test_the_house_has_few_floors_and_modules() -> None:
    floors: dict[str, int] = {}
    for room, below in ROOMS.items():
        floors[room] = 1 + max((floors[each] for each in below.split()), default=0)
    assert max(floor for room, floor in floors.items() if room != "__main__") <= N_FLOORS
    assert len(FILES) <= N_MODULES


def test_no_circle_of_modules() -> None:
    circle: list[str] = []
    try:
        TopologicalSorter({m: {name for _, name, _ in imports(m)} for m in FILES}).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle, " <- ".join(circle)


def test_no_private_name_is_imported_from_another_room() -> None:
    wrong = [
        f"{module}:{line}: {name}.{taken}"
        for module in FILES
        for line, name, taken in imports(module)
        if taken.startswith("_") and not taken.startswith("__") and room_of(module) != room_of(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_private_attribute_of_another_rooms_object_is_touched() -> None:
    """By name: ``x._y`` where classes of other rooms have a ``_y`` and none of one's own has."""
    unit = {module: room_of(module) for module in FILES}
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


def test_kinds_of_heads_are_named_in_their_room_alone() -> None:
    naming = [module for module, path in FILES.items() if "eagle" in path.read_text(encoding="utf-8").lower()]
    assert {room_of(module) for module in naming} == {"heads"}, naming
