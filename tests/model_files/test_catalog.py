"""The catalogue, and how a MODEL argument becomes a file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from localspec.errors import ModelFileError, UnknownModel, UsageError
from localspec.model_files import catalog
from localspec.model_files.catalog import Catalog, Entry
from localspec.sampling.sampling import SamplingParams
from localspec.system.files import home, models_dir, offline, source_order
from localspec.system.machine import SystemMemory

CATALOG = Catalog.load()


@pytest.mark.parametrize("entry", CATALOG.values(), ids=list(CATALOG))
def test_entries_are_sound(entry: Entry) -> None:
    assert re.fullmatch(r"[a-z0-9.-]+", entry.name)
    assert entry.file.endswith(".gguf")
    assert entry.bytes > 50_000_000
    assert entry.license
    assert re.fullmatch(r"[0-9a-f]{64}|", entry.sha256)
    for place in entry.sources:
        if place["kind"] == "hf":
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", place["repo"])
        else:
            assert entry.sha256, "data wheels come from anyone: without a digest they cannot be trusted"
    for name in entry.draft:
        assert CATALOG[name].bytes < entry.bytes / 2
    for name in entry.heads:
        assert CATALOG[name].bytes < entry.bytes / 2
        assert CATALOG[name].note.endswith(": no model of its own")
    SamplingParams(**{key: value for key, value in entry.chat.items() if key != "system"})


def put(entry: Entry, path: Path | None = None) -> Path:
    """A file of the right size; sparse, so it takes no room."""
    path = path or entry.path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(entry.bytes)
    return path


def test_names_paths_and_addresses(tmp_path: Path) -> None:
    path = put(CATALOG["smollm2-135m"])
    assert CATALOG.resolve("smollm2-135m") == path == models_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"x")
    assert CATALOG.resolve(str(mine)) == mine
    other = models_dir() / "hf/acme/tiny-GGUF/sub/tiny.gguf"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"x")
    assert CATALOG.resolve("hf:acme/tiny-GGUF/sub/tiny.gguf") == other


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("qwen2.5-coder-7b", ModelFileError, "run: localspec pull qwen2.5-coder-7b"),
        ("hf:acme/tiny/tiny.gguf", ModelFileError, "run: localspec pull hf:acme/tiny/tiny.gguf"),
        ("qwen2.5-codr-1.5b", UnknownModel, "did you mean qwen2.5-coder-1.5b"),
        ("SmolLM2-135M", UnknownModel, "did you mean smollm2-135m"),
        ("xyzzy", UnknownModel, "see: localspec list"),
        ("", UnknownModel, "no model ''"),
        ("nowhere.gguf", UnknownModel, "'nowhere.gguf' does not exist"),
        ("/", UnknownModel, "is a folder"),
        (os.devnull, UnknownModel, "is no file" if os.name == "posix" else ""),
        ("a/b/c", UnknownModel, "does not exist"),
        ("hf:acme/tiny", UnknownModel, "hf:OWNER/REPO/FILE.gguf"),
        ("hf:a/b/../../../etc/passwd.gguf", UnknownModel, "not a hub address"),
        ("nul\0byte.gguf", UnknownModel, "does not exist"),
        ("line\nbreak", UnknownModel, "no model"),
        ("x" * 9999, UnknownModel, "no model"),
    ],
)
def test_what_cannot_be_resolved(spec: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)) as caught:
        CATALOG.resolve(spec)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_drafts_and_chat_defaults(tmp_path: Path) -> None:
    larger, second = put(CATALOG["qwen3-8b"]), put(CATALOG["qwen3-1.7b"])
    assert CATALOG.draft_for(larger) == second
    first = put(CATALOG["qwen3-0.6b"])
    assert CATALOG.draft_for(larger) == first
    target = CATALOG["qwen2.5-coder-1.5b"]
    path = put(target)
    assert CATALOG.draft_for(path) is None  # not pulled
    draft = put(CATALOG["qwen2.5-coder-0.5b"])
    assert CATALOG.draft_for(path) == draft
    assert CATALOG.chat_defaults(path)["system"]
    # The same file kept elsewhere, with its draft beside it.
    copy = put(target, tmp_path / "elsewhere" / path.name)
    assert CATALOG.draft_for(copy) == draft
    draft.unlink()
    assert CATALOG.draft_for(copy) is None
    beside = put(CATALOG["qwen2.5-coder-0.5b"], copy.with_name(draft.name))
    assert CATALOG.draft_for(copy) == beside
    # Another file of that name is another model.
    impostor = tmp_path / "impostor" / path.name
    impostor.parent.mkdir()
    impostor.write_bytes(b"x")
    assert CATALOG.draft_for(impostor) is None
    assert CATALOG.chat_defaults(impostor) == {}


def test_heads_of_the_same_sizes_go_by_the_catalogue(tmp_path: Path) -> None:
    """Files of a family fit one another, by all that their headers say."""
    names = ("qwen3.6-27b-eagle3", "qwen3.5-27b-dflash", "qwen3.6-27b-dflash")
    eagle3, other, dflash = (put(CATALOG[name]) for name in names)
    trained = tmp_path / "trained.gguf"
    files = [eagle3, trained, other, dflash]
    assert CATALOG.sort_heads(files, put(CATALOG["qwen3.6-27b"])) == [dflash, eagle3, trained]
    assert CATALOG.sort_heads(files, put(CATALOG["qwen3.5-27b"])) == [other, trained]
    assert CATALOG.sort_heads(files, tmp_path / "mine.gguf") == files  # which may be any of them


def test_the_default_pair_gives_way_where_memory_or_disk_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        return [entry.name for entry in CATALOG.default_pair()]

    assert len({entry.file for entry in CATALOG.values()}) == len(CATALOG)
    assert catalog.free_bytes(models_dir() / "not" / "there" / "yet") > 0

    monkeypatch.setattr(catalog, "read_memory", lambda: SystemMemory(16 << 30, 1 << 30))
    monkeypatch.setattr(catalog, "free_bytes", lambda folder: 100 << 30)
    assert names() == ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"]
    monkeypatch.setattr(catalog, "read_memory", lambda: SystemMemory(16 << 30, 1 << 30, limit=2 << 30))
    assert names() == ["smollm2-135m"]
    monkeypatch.setattr(catalog, "read_memory", lambda: SystemMemory(16 << 30, 1 << 30))
    monkeypatch.setattr(catalog, "free_bytes", lambda folder: 1 << 30)
    assert names() == ["smollm2-135m"]
    for name in CATALOG.default:
        put(CATALOG[name])
    assert names() == ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"]  # nothing more to write


# -- the environment --------------------------------------------------------------------------------------------------


def test_home_offline_and_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for value, expected in (("", False), ("0", False), ("false", False), ("1", True), ("yes", True)):
        monkeypatch.setenv("LOCALSPEC_OFFLINE", value)
        assert offline() is expected
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "h"))
    assert home() == tmp_path / "h"
    monkeypatch.setenv("LOCALSPEC_HOME", "~/somewhere")
    assert home() == Path.home() / "somewhere"
    monkeypatch.setenv("LOCALSPEC_HOME", " ")
    assert home().name == "localspec"
    assert not (tmp_path / "h").exists()
    monkeypatch.setenv("LOCALSPEC_SOURCE", "floppy")
    with pytest.raises(UsageError, match="floppy"):
        source_order()
