"""A model to examine: on this disk or not, whole or damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from localspec.commands.doctor.facts import ModelFacts
from localspec.commands.report.model import Finding
from localspec.errors import ModelFileError, UnsupportedModel
from localspec.model_files.catalog import Catalog, Entry, free_bytes
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.gguf_parts import model_bytes
from localspec.model_files.head_kinds import is_published_head, read_open
from localspec.model_files.kv_memory import KVShape, kv_shape
from localspec.model_files.local_files import known_entries
from localspec.model_files.sources.base import size_text
from localspec.model_files.vocab import Vocab
from localspec.system.home import models_dir


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a header says of memory and matching.

    Attributes:
        vocab: the vocabulary.
        kv: what keys and values take.
        n_layer: transformer blocks.
        n_embd, n_ff: widths of the residual stream and of the widest feed-forward layer.
        n_params: parameters.
    """

    vocab: Vocab
    kv: KVShape
    n_layer: int
    n_embd: int
    n_ff: int
    n_params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedModel(ModelFacts):
    """A model, with what it takes to examine it.

    Attributes:
        spec: what names it on a command line.
        sizes: from its header, where that can be read.
        entry: its catalogue entry.
        unused: of a published head, why none here drafts with it, if so. Its file is whole.
    """

    spec: str
    sizes: Sizes | None = None
    entry: Entry | None = None
    unused: str | None = None

    @property
    def file(self) -> Path:
        """Its path."""
        return Path(self.path)

    def facts(self) -> ModelFacts:
        """For the report."""
        return ModelFacts(**{each.name: getattr(self, each.name) for each in fields(ModelFacts)})


def find_model(spec: str) -> ExaminedModel:
    """Look a model up; its header is read where it is on this disk.

    Raises:
        UnknownModel: there is no such name or file.
    """
    catalog = Catalog.load()
    try:
        path = catalog.resolve(spec)
    except ModelFileError:
        return _of_entry(catalog.entry(spec))
    entry = catalog.of_path(path)
    return _read(path, spec, _stem(path) if entry is None or spec != entry.name else entry.name, entry)


def of_path(path: Path) -> ExaminedModel:
    """A file, under its catalogue name if it has one."""
    entry = Catalog.load().of_path(path)
    is_entrys = entry is not None and entry.present and entry.path == path
    name = entry.name if entry is not None else _stem(path)
    return _read(path, name if is_entrys else str(path), name, entry)


def on_disk() -> list[ExaminedModel]:
    """Every model and published head under the models folder, damaged ones included."""
    return [_of_entry(entry) for entry in known_entries() if entry.bytes_on_disk]


def _of_entry(entry: Entry) -> ExaminedModel:
    if entry.present:
        return _read(entry.path, entry.name, entry.name, entry, heads=True)
    error = None
    if entry.bytes_on_disk:
        error = f"it has {entry.bytes_on_disk:,} bytes instead of {entry.bytes:,}"
        if len(entry.files) > 1 and not all((models_dir() / file).is_file() for file in entry.files):
            error = "some of its parts are missing"
    return ExaminedModel(
        spec=entry.name, name=entry.name, path=str(entry.path), present=False, bytes=entry.bytes,
        bytes_exact=bool(entry.sha256), error=error, entry=entry,
    )  # fmt: skip


def _read(path: Path, spec: str, name: str, entry: Entry | None, *, heads: bool = False) -> ExaminedModel:
    """A file that is there; where a text is to come of it, a head is an error."""
    model = ExaminedModel(
        spec=spec, name=name, path=str(path), present=True, bytes=model_bytes(path), bytes_exact=True, entry=entry
    )
    try:
        with GGUFFile(path) as gguf:
            if heads and is_published_head(gguf):
                return _of_head(gguf, model)
            gguf.check_generates_text()
            vocab, kv = Vocab.from_gguf(gguf), kv_shape(gguf)
            n_layer, n_embd, n_ff = (
                count(gguf, field) for field in ("block_count", "embedding_length", "feed_forward_length")
            )
            return replace(
                model,
                bytes=gguf.n_bytes,
                architecture=gguf.architecture,
                quantization=gguf.quantization,
                n_ctx_train=gguf.n_ctx_train or None,
                n_vocab=vocab.n_tokens,
                rollback="replay" if kv.recurrent else "exact",
                sizes=Sizes(vocab, kv, n_layer, n_embd, n_ff, gguf.n_params),
            )
    except ModelFileError as error:
        return replace(model, error=str(error).removesuffix("; fetch it again"))
    except OSError as error:
        return replace(model, error=f"it cannot be read: {error.strerror or os.strerror(error.errno or 0)}")


def _of_head(gguf: GGUFFile, model: ExaminedModel) -> ExaminedModel:
    """A published head, which has no vocabulary and no memory to examine before its target is there."""
    unused = None
    try:
        read_open(gguf)
    except UnsupportedModel as error:
        unused = str(error)
    return replace(
        model,
        bytes=gguf.n_bytes,
        architecture=gguf.architecture,
        quantization=gguf.quantization,
        unused=unused,
    )


def count(gguf: GGUFFile, field: str) -> int:
    """A number from the header; the largest where there is one for each layer, 0 where it does not say."""
    value = gguf.field(field)
    try:
        return max(0, int(max(value)))
    except TypeError:
        return value if isinstance(value, int) and value >= 0 else 0
    except ValueError:
        return 0


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gguf")


def model_findings(models: list[ExaminedModel]) -> Iterator[Finding]:
    """The rows on what is on this disk."""
    whole = [f"{model.name} ({size_text(model.bytes)})" for model in models if model.error is None]
    if whole:
        yield Finding("ok", "on disk", ", ".join(whole))
    elif not models:
        yield Finding("info", "on disk", f"none yet in {models_dir()}", "localspec pull; localspec list --all")
    for model in models:
        if model.error is not None:
            yield broken(model.name, model)
        elif model.unused is not None:
            yield Finding("note", model.name, model.unused, f"localspec rm {model.spec} frees its room on the disk")


def broken(name: str, model: ExaminedModel) -> Finding:
    """The row on a file that cannot be used."""
    again = "fetch the file again, or take another one"
    if model.entry is not None and model.file == model.entry.path:
        again = f"localspec rm {model.entry.name}; localspec pull {model.entry.name}"
    return Finding("fail", name, model.error or "it cannot be used", again)


def missing(model: ExaminedModel) -> Finding:
    """The row on a model that is not on this disk: what it takes to have it."""
    size = f"{'' if model.bytes_exact else '~'}{size_text(model.bytes)}" if model.bytes else "of unknown size"
    room = free_bytes(models_dir())
    text = f"{model.name} is not on this disk ({size}; {size_text(room)} of disk free)"
    if model.bytes > room:
        return Finding("fail", "download", text, "make room on the disk, or set LOCALSPEC_HOME to a larger one")
    return Finding("note", "download", text, f"localspec pull {model.spec}")
