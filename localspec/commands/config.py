"""``config.toml`` in LOCALSPEC_HOME: values of options that a command line leaves out. People may edit it.

A key outside of tables holds for every command that has the option; in a table ``[COMMAND]`` it holds for that command,
and goes before the other. The command line goes before the environment, that before the file.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError, UsageError, nearest
from localspec.system.files import home, write_atomically

OWN_OPTIONS = ("chat", "serve")  # commands whose own options can be set as well, those of ``ONE_RUN`` excepted
ONE_RUN = ("continue", "help", "print", "project")  # what one run does, or what is remembered in another way
SAME_TABLE = {"launch": "serve"}  # commands that read another's table
# What a chat is to be like does not change what these measure, unless their own table says so.
MEASURING = ("bench", "verify", "doctor")
ANSWERS = {
    "max-tokens", "min-p", "repeat-penalty", "seed", "stop", "system", "temperature", "think", "think-budget", "top-k",
    "top-p",
}  # fmt: skip
# Options that have only the name of a common one: without a name, ``serve`` has every model of the disk.
OTHER_MEANINGS = {("distill", "seed"), ("serve", "model")}

Check = Callable[[str, Any], None]  # takes a parameter's name and value; ``UsageError``: that makes no sense


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the file, and the parameter of a command that reads it."""

    key: str  # ``ctx``, ``serve.port``
    parameter: Any  # click's
    context: Any  # click's, of the command

    def value(self, given: Any, check: Check) -> Any:
        """A value from the file or a command line, as the parameter takes it; ``UsageError``: it does not."""
        several = getattr(self.parameter, "multiple", False)
        texts = [_text(self.key, each) for each in (given if isinstance(given, list) else [given])]
        if len(texts) != 1 and not several:
            raise UsageError(f"{self.key} takes one value, not {len(texts)}")
        try:
            value = self.parameter.process_value(
                self.context, texts if several or self.parameter.nargs == -1 else texts[0]
            )
            check(self.parameter.name, value)
        except Exception as error:  # Typer brings its own copy of click in some releases
            if not (isinstance(error, UsageError) or hasattr(error, "format_message")):
                raise
            raise UsageError(f"{self.key}: {in_a_line(str(error))}") from None
        return list(value) if several else value[0] if isinstance(value, list) else value


def in_a_line(message: str) -> str:
    """A message of Typer's, without what tells its library's kinds of error apart."""
    return " ".join(message.split()).replace("Value error, ", "", 1).rstrip(".")


def _text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(f"{key} must be a text, a number, true or false, not {value!s:.60}")


# -- which settings there are ------------------------------------------------------------------------------------------


def settings(root: Any, common: Collection[str]) -> dict[str, Setting]:
    """Every key, in the order of the commands. ``common``: names of the parameters that commands share."""
    found: dict[str, Setting] = {}
    for name in root.commands:
        for setting in _of_command(root.commands[name].make_context(name, [], resilient_parsing=True), common):
            found.setdefault(setting.key, setting)
            if "." not in setting.key:  # a command's own table may hold it too
                inner = f"{SAME_TABLE.get(name, name)}.{setting.key}"
                found.setdefault(inner, Setting(inner, setting.parameter, setting.context))
    return dict(sorted(found.items(), key=lambda item: "." in item[0]))


def _of_command(context: Any, common: Collection[str]) -> Iterator[Setting]:
    """The settings that a command reads; of common ones the common key."""
    command = _table_of(context)
    for parameter in context.command.params:
        if parameter.param_type_name == "argument":
            if "MODEL" in (parameter.metavar or ""):
                own = (context.info_name, "model") in OTHER_MEANINGS
                yield Setting(f"{command}.model" if own else "model", parameter, context)
            continue
        name = max((option[2:] for option in parameter.opts if option.startswith("--")), key=len, default="")
        if parameter.name in common and (context.info_name, name) not in OTHER_MEANINGS:
            yield Setting(name, parameter, context)
        elif command in OWN_OPTIONS and name not in ONE_RUN:
            yield Setting(f"{command}.{name}", parameter, context)


def _table_of(context: Any) -> str:
    return SAME_TABLE.get(context.info_name, str(context.info_name))


def _unknown(key: str, known: Collection[str]) -> UsageError:
    names = {name.rpartition(".")[2]: name for name in sorted(known, key=len, reverse=True)}  # ctx, not chat.ctx
    near = names.get(key) or names.get(nearest(key, names) or "") or nearest(key, known)
    hint = f"; did you mean {near}?" if near else ""
    return UsageError(f"there is no setting {key!r:.60}{hint} (localspec config list --all shows them)")


# -- the file ----------------------------------------------------------------------------------------------------------


def settings_file() -> Path:
    return home() / "config.toml"


def read() -> dict[str, Any]:
    """What is in the file, keys with dashes; ``UsageError``: it cannot be read."""
    path = settings_file()
    try:
        return _dashed(tomllib.loads(_contents(path)))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not used, it is not TOML: {error}") from None


def _dashed(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.replace("_", "-"): _dashed(value) if isinstance(value, dict) else value for name, value in table.items()
    }


def found_in(data: Mapping[str, Any], key: str) -> Any:
    """The value of a key; None where there is none."""
    table, _, name = key.rpartition(".")
    inner = data.get(table, {}) if table else data
    return inner.get(name) if isinstance(inner, dict) else None


def problems(data: Mapping[str, Any], known: Collection[str], table: str | None = None) -> Iterator[str]:
    """A line for every key that is none, in the common part and in one table or (None) all of them."""
    commands = {key.partition(".")[0] for key in known if "." in key}
    for name, value in data.items():
        if isinstance(value, dict) and name in commands:
            if table in (None, name):
                for inner in value:
                    if f"{name}.{inner}" not in known:
                        yield str(_unknown(f"{name}.{inner}", known))
        elif name not in known:
            yield str(_unknown(name, known))


def settle(context: Any, given: dict[str, Any], common: Collection[str], check: Check) -> dict[str, Any]:
    """Put the file's values into the options of a command that neither the command line nor the environment gives.

    What cannot be used is a line on standard error, and the command goes on without it; a server, which nobody may be
    watching, does not start (``UsageError``). Returns what is from the file, by the name of the parameter; the model
    too, which is not put in.
    """
    command, lines = _table_of(context), list[str]()
    mine = list(_of_command(context, common))
    try:
        data = read() if mine else {}
    except UsageError as error:
        data, lines = {}, [str(error)]
    if data:
        known = settings(context.find_root().command, common)
        lines += [f"{settings_file()}: {line}" for line in problems(data, known, command)]
    used: dict[str, Any] = {}
    for setting in mine:
        name, parameter = setting.key.rpartition(".")[2], setting.parameter
        inner = f"{command}.{name}"
        common_too = "." not in setting.key and not (command in MEASURING and name in ANSWERS)
        key = name if common_too and found_in(data, inner) is None else inner
        value, source = found_in(data, key), context.get_parameter_source(parameter.name)
        is_given = source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")
        if value is None or (is_given and name != "model"):
            continue
        try:
            used["model" if name == "model" else parameter.name] = Setting(key, parameter, context).value(value, check)
        except UsageError as error:
            lines.append(f"{settings_file()}: {error}")
    given |= {name: value for name, value in used.items() if name != "model"}
    if lines and command == "serve":
        raise UsageError(lines[0])
    for line in lines:
        print(f"localspec: {line}", file=sys.stderr)
    return used


def write(key: str, value: Any) -> None:
    """Write the value of a key into the file, or remove it (None); the rest stays as it is, comments too.

    ``UsageError``: the file cannot be read or understood. ``LocalspecError``: it cannot be written.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    path = settings_file()
    table, _, name = key.rpartition(".")
    try:
        document: Any = tomlkit.parse(_contents(path))
        inner = document
        if table:
            if table not in document and value is not None:
                document[table] = tomlkit.table()
            inner = document.get(table, {})
            if not isinstance(inner, dict):
                raise UsageError(f"{path} cannot be changed: {table} is not a table")
        known = next((each for each in inner if each.replace("_", "-") == name), name)
        if value is not None:
            inner[known] = value
        elif known in inner:
            del inner[known]
            if table and not inner:
                del document[table]
        data = tomlkit.dumps(document)
        tomllib.loads(data)  # which reads the file, and refuses some that tomlkit takes
    except (TOMLKitError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be changed, it is not TOML: {error}") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path, private=True) as file:
            file.write(data.encode())
    except OSError as error:
        raise LocalspecError(f"cannot write {path}: {error.strerror or error}") from None


def _contents(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise UsageError(f"{path} is not UTF-8 text") from None


# -- localspec config --------------------------------------------------------------------------------------------------


def set_command(known: Mapping[str, Setting], key: str, texts: Sequence[str], check: Check) -> int:
    """Check a value, write it, and print the line of the file."""
    setting = _known(known, key)
    if setting.key.rpartition(".")[2] in ("draft", "model"):
        texts = [_absolute(text) for text in texts]
    value = setting.value(list(texts), check)
    write(setting.key, value)
    print(_line(setting.key, value))
    return 0


def get_command(known: Mapping[str, Setting], key: str) -> int:
    """Print a value, a list one a line; exit status 1 where none is set."""
    setting = _known(known, key)
    value = found_in(read(), setting.key)
    if value is None:
        return 1
    for each in value if isinstance(value, list) else [value]:
        print(_text(setting.key, each))
    return 0


def unset_command(known: Mapping[str, Setting], key: str) -> int:
    """Remove a key, a misspelt one too."""
    if found_in(read(), key.replace("_", "-")) is None:
        _known(known, key)
    else:
        write(key.replace("_", "-"), None)
    return 0


def list_command(known: Mapping[str, Setting], check: Check, *, everything: bool) -> int:
    """Print what is set, or every key and its meaning. A bad key or value is a line on standard error, and status 1."""
    data, n_set = read(), 0
    lines = [*problems(data, known)]
    for key, setting in known.items():
        if everything and not key_of_all(key, known):
            print(f"{key:<24} {' '.join((setting.parameter.help or '').split())}")
        value = found_in(data, key)
        if value is None:
            continue
        try:
            setting.value(value, check)
        except UsageError as error:
            lines.append(str(error))
        else:
            n_set += 1
            if not everything:
                print(_line(key, value))
    if not (n_set or lines or everything):
        print(f"nothing is set in {settings_file()}; localspec config list --all shows what can be", file=sys.stderr)
    for line in lines:
        print(f"localspec: {settings_file()}: {line}", file=sys.stderr)
    return 1 if lines else 0


def key_of_all(key: str, known: Collection[str]) -> bool:
    """Whether a key is of one command's table and stands for a common one there."""
    return key.partition(".")[2] in known


def _known(known: Mapping[str, Setting], key: str) -> Setting:
    key = key.replace("_", "-")
    if key not in known:
        raise _unknown(key, known)
    return known[key]


def _line(key: str, value: Any) -> str:
    import tomlkit

    return f"{key} = {tomlkit.item(value).as_string()}"


def _absolute(text: str) -> str:
    """The name of a model or a drafter that holds in every folder."""
    kind, colon, path = text.rpartition(":")
    if kind in ("", "corpus", "head") and Path(path).exists():
        return f"{kind}{colon}{Path(path).absolute()}"
    return text
