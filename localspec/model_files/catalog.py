"""The models that localspec knows by name, and how a MODEL argument becomes a file."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from localspec.errors import ModelFileError, UnknownModel, shown
from localspec.system.files import is_same_file, models_dir
from localspec.system.machine import read_memory

ROOM = 1.25
"""Memory that a model which is not loaded takes, over the size of its file: cache and buffers."""

_FIRST = re.compile(r"(.*)-00001-of-(\d{5})\.gguf", re.DOTALL)


def part_names(first: str) -> tuple[str, ...]:
    """The names of all files of a model, given that of the first, as ``gguf-split`` names them."""
    match = _FIRST.fullmatch(first)
    rest = range(2, int(match[2]) + 1) if match else ()
    return (first, *(f"{match[1]}-{i:05}-of-{match[2]}.gguf" for i in rest if match))


_HUB_SPEC = re.compile(r"hf:([\w.-]+)/([\w.-]+)/((?:[\w.-]+/)*[\w.-]+\.gguf)")
_SUFFIX = re.compile(r"[-._](instruct|it|chat|i?q\d\w*|b?f16|f32)(?=[-._]|$).*", re.IGNORECASE)

_GIB = 1 << 30
# Memory [bytes] under which the default pair (1.6 GB of weights and their caches) would crowd a machine.
MEMORY_FOR_DEFAULT = 3 * _GIB


@dataclass(frozen=True)
class Entry:
    """A model that can be fetched."""

    name: str
    file: str  # path under the models folder
    bytes: int = 0  # exact if ``sha256`` is known, else approximate, and 0 if unknown
    sha256: str = ""  # "": only the hub knows it
    license: str = "unknown"  # SPDX identifier, or the publisher's name for it
    sources: tuple[Mapping[str, Any], ...] = ()  # places to fetch it from, as the catalogue lists them
    draft: tuple[str, ...] = ()  # catalogue names of fitting drafts, best first
    heads: tuple[str, ...] = ()  # likewise of published heads
    base: bool = False  # whether it continues text and was not trained to chat
    active: float = 1.0  # share of the weights that a token reads; under 1 for a mixture of experts
    note: str = ""
    chat: Mapping[str, Any] = field(default_factory=dict)  # system prompt and sampling that a conversation starts with

    @property
    def path(self) -> Path:
        """Where the file is, or would be; of a model in parts, the first."""
        return models_dir() / self.file

    @property
    def files(self) -> tuple[str, ...]:
        """All files of the model under the models folder, its parts included."""
        return part_names(self.file)

    @property
    def present(self) -> bool:
        """Whether all of it is on disk. Files get their final name only after their digest was checked."""
        there = all(_is_file(models_dir() / file) for file in self.files)
        return there and (not self.sha256 or self.path.stat().st_size == self.bytes)

    @property
    def bytes_on_disk(self) -> int:
        paths = [models_dir() / file for file in self.files]
        return sum(path.stat().st_size for path in paths if path.is_file())


class Catalog(dict[str, Entry]):
    """Entries by name; ``default`` and ``fallback`` (where memory or disk is short) name a target and its drafts."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__()
        for name, row in data["models"].items():
            values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
            self[name] = Entry(name, **values)
        self.default = tuple(data["default"])
        self.fallback = tuple(data["fallback"])

    @staticmethod
    @cache
    def load() -> Catalog:
        """The catalogue that ships with localspec; read once."""
        packaged = resources.files("localspec").joinpath("catalog.toml")
        # In a checkout it has not been copied into the package.
        file = packaged if packaged.is_file() else Path(__file__).resolve().parents[2] / "models" / "catalog.toml"
        return Catalog(tomllib.loads(file.read_text("utf-8")))

    def entry(self, spec: str) -> Entry:
        """The entry of a catalogue name or an ``hf:OWNER/REPO/FILE.gguf`` address; else ``UnknownModel``."""
        if spec in self:
            return self[spec]
        if spec.startswith("hf:"):
            match = _HUB_SPEC.fullmatch(spec)
            if match is None or ".." in spec:
                raise UnknownModel(f"{shown(spec)} is not a hub address; use hf:OWNER/REPO/FILE.gguf")
            owner, repo, file = match.groups()
            source = {"kind": "hf", "repo": f"{owner}/{repo}", "file": file}
            return Entry(spec, f"hf/{owner}/{repo}/{file}", sources=(source,))
        close = difflib.get_close_matches(spec[:100].lower(), self, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "see: localspec list --all"
        raise UnknownModel(f"there is no model {shown(spec)}; {hint}")

    def find(self, part: str) -> Entry:
        """As ``entry``, by any part of a name that no other entry has; else ``UnknownModel``."""
        found = [name for name in self if part.lower() in name]
        if part in self or not part or not found:
            return self.entry(part)
        if len(found) > 1:
            raise UnknownModel(f"several models have {shown(part)} in their names: {', '.join(found)}")
        return self[found[0]]

    def resolve(self, spec: str) -> Path:
        """The file that a MODEL argument means: a catalogue name, a path to a ``.gguf``, or a hub address.
        ``UnknownModel``: no such name or file; ``ModelFileError``: known, but not on this disk yet."""
        if spec not in self and not spec.startswith("hf:"):
            path = Path(spec).expanduser()
            if _is_file(path):
                return path
            if spec.endswith(".gguf") or "/" in spec or os.sep in spec:
                there = "is no file" if path.exists() else "does not exist"
                what = "is a folder; name the .gguf file in it" if path.is_dir() else there
                raise UnknownModel(f"{shown(spec)} {what}")
        entry = self.entry(spec)
        if not entry.present:
            raise ModelFileError(f"{entry.name} is not on this disk; run: localspec pull {entry.name}")
        return entry.path

    def of_path(self, path: Path) -> Entry | None:
        """The entry whose file this is: by place, or by name and exact size for a copy kept elsewhere."""
        for entry in self.values():
            if entry.path.name == path.name and (
                is_same_file(entry.path, path)
                or (entry.sha256 and path.exists() and path.stat().st_size == entry.bytes)
            ):
                return entry
        return None

    def draft_for(self, path: Path) -> Path | None:
        entry = self.of_path(path)
        for name in entry.draft if entry else ():
            draft = self[name]
            beside = path.with_name(draft.path.name)
            if draft.present or (_is_file(beside) and self.of_path(beside) is draft):
                return draft.path if draft.present else beside
        return None

    def sort_heads(self, heads: Iterable[Path], target: Path) -> list[Path]:
        """Head files whose sizes and tokens fit a target, those of its entry first and without those that the catalogue
        has for other models only: models of a family can have the same sizes."""
        known = self.of_path(target)
        if known is None:
            return list(heads)
        of_any = {name for entry in self.values() for name in entry.heads}
        order = [*known.heads, ""]  # the last are those of no entry
        names = [(entry.name if (entry := self.of_path(path)) and entry.name in of_any else "", path) for path in heads]
        ranked = [(order.index(name), path) for name, path in names if name in order]
        return [path for _, path in sorted(ranked, key=lambda pair: pair[0])]

    def chat_defaults(self, path: Path) -> dict[str, Any]:
        entry = self.of_path(path)
        return dict(entry.chat) if entry else {}

    def default_pair(self) -> tuple[Entry, ...]:
        """The default target and its drafts; the small fallback where memory or disk is short."""
        pair = tuple(self[name] for name in self.default)
        # Data wheels are kept until the file is put together from them.
        missing = sum(2 * entry.bytes for entry in pair if not entry.present)
        if read_memory().usable < MEMORY_FOR_DEFAULT or (missing and free_bytes(models_dir()) < missing):
            return tuple(self[name] for name in self.fallback)
        return pair


def free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def short_name(model: str) -> str:
    """A model's name without tuning and quantisation, where there is little room."""
    return _SUFFIX.sub("", model) or model


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False
