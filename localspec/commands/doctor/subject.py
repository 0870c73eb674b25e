"""A model that was asked about: on this disk or not, whole or damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localspec.commands.doctor.header import Header, read_header
from localspec.commands.doctor.report import Check, ModelFacts
from localspec.errors import ModelFileError
from localspec.model_files.catalog import Catalog, Entry, free_bytes
from localspec.model_files.gguf_parts import model_bytes
from localspec.model_files.local_files import known_entries
from localspec.model_files.sources.base import size_text
from localspec.system.home import models_dir


@dataclass(frozen=True, slots=True)
class Subject:
    """One model.

    Attributes:
        spec: what names it on a command line.
        name: for people.
        path: where its file is, or will be.
        present: whether it is there.
        bytes: its size; 0 if unknown.
        bytes_exact: whether that is known exactly.
        header: facts of the file, where it can be read.
        error: what is wrong with it.
        entry: its catalogue entry.
    """

    spec: str
    name: str
    path: Path
    present: bool
    bytes: int
    bytes_exact: bool
    header: Header | None = None
    error: str | None = None
    entry: Entry | None = None

    def facts(self) -> ModelFacts:
        """For the report."""
        header = self.header
        return ModelFacts(
            name=self.name,
            path=str(self.path),
            present=self.present,
            bytes=self.bytes,
            bytes_exact=self.bytes_exact,
            architecture=header.architecture if header else None,
            quantization=header.quantization if header else None,
            n_ctx_train=header.n_ctx_train or None if header else None,
            n_vocab=header.vocab.n_tokens if header else None,
            rollback=header.rollback if header else None,
            error=self.error,
        )


def find_subject(spec: str) -> Subject:
    """Look a model up; its header is read where it is on disk.

    Raises:
        UnknownModel: there is no such name or file.
    """
    catalog = Catalog.load()
    try:
        path = catalog.resolve(spec)
    except ModelFileError:
        return _of_entry(catalog.entry(spec))
    entry = catalog.of_path(path)
    name = entry.name if entry is not None and spec == entry.name else path.name.removesuffix(".gguf")
    return _read(Subject(spec, name, path, True, model_bytes(path), True, entry=entry))


def of_path(path: Path) -> Subject:
    """A file, under its catalogue name if it has one."""
    entry = Catalog.load().of_path(path)
    name = entry.name if entry is not None else path.name.removesuffix(".gguf")
    spec = entry.name if entry is not None and entry.present and entry.path == path else str(path)
    return _read(Subject(spec, name, path, True, model_bytes(path), True, entry=entry))


def on_disk() -> list[Subject]:
    """Every model under the models folder, damaged ones included."""
    return [_of_entry(entry) for entry in known_entries() if entry.bytes_on_disk]


def _of_entry(entry: Entry) -> Subject:
    exact = bool(entry.sha256) or entry.present
    size = entry.bytes_on_disk if entry.present else entry.bytes
    subject = Subject(entry.name, entry.name, entry.path, entry.present, size, exact, entry=entry)
    if entry.present:
        return _read(subject)
    if not entry.bytes_on_disk:
        return subject
    if len(entry.files) > 1 and not all((models_dir() / file).is_file() for file in entry.files):
        return _broken(subject, "some of its parts are missing")
    return _broken(subject, f"it has {entry.bytes_on_disk:,} bytes instead of {entry.bytes:,}")


def _read(subject: Subject) -> Subject:
    try:
        header = read_header(subject.path)
    except ModelFileError as error:
        return _broken(subject, str(error).removesuffix("; fetch it again"))
    except OSError as error:
        return _broken(subject, f"it cannot be read: {error.strerror or os.strerror(error.errno or 0)}")
    known = (subject.spec, subject.name, subject.path, True)
    return Subject(*known, header.weights_bytes, True, header, entry=subject.entry)


def _broken(subject: Subject, error: str) -> Subject:
    known = (subject.spec, subject.name, subject.path, subject.present, subject.bytes, subject.bytes_exact)
    return Subject(*known, error=error, entry=subject.entry)


def model_checks(models: list[Subject]) -> Iterator[Check]:
    """The rows on what is on this disk."""
    whole = [f"{model.name} ({size_text(model.bytes)})" for model in models if model.error is None]
    if whole:
        yield Check("models", "on disk", "ok", ", ".join(whole))
    elif not models:
        yield Check("models", "on disk", "info", f"none yet in {models_dir()}", "localspec pull; localspec list")
    for model in models:
        if model.error is not None:
            yield broken_check("models", model)


def broken_check(section: str, model: Subject) -> Check:
    """The row on a file that cannot be used."""
    if model.entry is not None and model.path == model.entry.path:
        again = f"localspec rm {model.entry.name}; localspec pull {model.entry.name}"
    else:
        again = "fetch the file again, or take another one"
    return Check(
        section, "file" if section == "pair" else model.name, "fail", model.error or "it cannot be used", again
    )


def download_check(model: Subject) -> Check:
    """The row on a model that is not on this disk: what it takes to have it."""
    size = f"{'' if model.bytes_exact else '~'}{size_text(model.bytes)}" if model.bytes else "of unknown size"
    room = free_bytes(models_dir())
    text = f"{model.name} is not on this disk ({size}; {size_text(room)} of disk free)"
    if model.bytes > room:
        return Check("pair", "download", "fail", text, "make room on the disk, or set LOCALSPEC_HOME to a larger one")
    return Check("pair", "download", "note", text, f"localspec pull {model.spec}")
