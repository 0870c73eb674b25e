"""The file of a saved session: the conversation as text, and what the models held of it.

::

    localspec-session 1\\n              format and version
    <bytes> <digest>\\n                 of the text part: 16 bytes of BLAKE2b in hexadecimal
    {...}                              the text part: JSON in UTF-8, which also lists the arrays that follow
    ...                                the arrays, one after the other; each has its own digest in the list

The text comes first and is checked apart, so a chat survives any damage to what follows: then it is read by the models
again. The digests guard against accidents, not against somebody who forges a file: engines check little of what they
are given, so load sessions only from where you would run programs from.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from localspec.backends.base import Context, ContextState, Model
from localspec.engine.prefix_cache import PrefixCache
from localspec.errors import EngineError, SessionFileError
from localspec.model_files.gguf import fingerprint
from localspec.spec_decode.drafters.corpus import TextFile, TextSource
from localspec.system.files import home, printable, write_atomically
from localspec.system.steps import Steps, exhaust

# What the models of a pair hold of a conversation, to be kept in a file and given back.


@dataclass(frozen=True, slots=True)
class SavedContext:
    maker: Mapping[str, str]
    tokens: Sequence[int]
    state: ContextState


def maker_of(model: Model) -> dict[str, str]:
    """What a saved memory has to match to be used again: the file's digest, the engine's version, the cache's type."""
    return {
        "file": fingerprint(model.path),
        "name": printable(model.path.name),
        "engine": model.engine,
        "device": model.capabilities.device,
        "kv_type": model.kv_type,
    }


def described(maker: Mapping[str, str]) -> str:
    parts = [maker.get("name", "?"), maker.get("engine", "?"), maker.get("kv_type", ""), maker.get("file", "")[:8]]
    return " · ".join(part for part in parts if part)


def save_contexts(contexts: Sequence[Context], cache: PrefixCache, tokens: Sequence[int]) -> list[SavedContext]:
    """What target and draft models hold of a conversation; less, or nothing, where that was dropped."""
    found = [(context, cache.export(context, tokens)) for context in contexts]
    return [SavedContext(maker_of(context.model), *held) for context, held in found if held is not None]


def restore_contexts(contexts: Sequence[Context], cache: PrefixCache, memories: Sequence[SavedContext]) -> str | None:
    """Make each model hold what its like held; None, or a line that says why the target does not."""
    of_target, *_ = [_give(context, cache, memories) for context in contexts]
    return of_target


def _give(context: Context, cache: PrefixCache, memories: Sequence[SavedContext]) -> str | None:
    model = context.model
    if not memories:
        return "what the model held was not saved"
    if not model.capabilities.saves_state:
        return f"{model.engine} cannot take a saved memory"
    ours = maker_of(model)
    alike = ours.keys() - {"name"}
    fitting = [memory for memory in memories if all(memory.maker.get(key) == ours[key] for key in alike)]
    if not fitting:
        return f"its memory is from {described(memories[0].maker)}, and this is {described(ours)}"
    cache.put_aside(context)
    try:
        cache.restore(context, fitting[0].tokens, fitting[0].state)
    except EngineError as error:
        return str(error)
    return None


MAGIC = b"localspec-session "
VERSION = 1
MAX_TEXT_BYTES = 1 << 28


def write(path: Path, text: Mapping[str, Any], memories: Sequence[SavedContext]) -> None:
    """``writing`` at once."""
    exhaust(writing(path, text, memories))


_PIECE = 8 << 20
"""Bytes that are read for a digest, or written, in a step."""


def writing(
    path: Path, text: Mapping[str, Any], memories: Sequence[SavedContext], *, durable: bool = True
) -> Steps[None]:
    """Save a session: complete under its name, or not at all; ``durable``: see ``write_atomically``.
    ``SessionFileError``: it cannot be written, or the name belongs to a file that is not a saved session."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a device would be replaced by a file
            raise SessionFileError(f"{path} is a device or a pipe")
        if path.exists() and path.stat().st_size:
            with path.open("rb") as file:
                _read_version(file, str(path))
    except SessionFileError:
        raise SessionFileError(f"{path} exists and is not a saved session; choose another name") from None
    except OSError as error:
        raise SessionFileError(f"cannot write {path}: {error.strerror or error}") from error
    arrays: list[npt.NDArray[Any]] = []
    listed = []
    for memory in memories:
        entries = []
        for name, array in memory.state.arrays.items():
            array = np.ascontiguousarray(array)
            arrays.append(array)
            hashed = blake2b(digest_size=_DIGEST_SIZE)
            for piece in _pieces(array):
                hashed.update(piece)
                yield
            entries.append(
                {"name": name, "dtype": array.dtype.str, "shape": list(array.shape), "digest": hashed.hexdigest()}
            )
        held = None if list(memory.state.tokens) == list(memory.tokens) else list(memory.state.tokens)
        listed.append({"maker": dict(memory.maker), "tokens": list(memory.tokens), "held": held, "arrays": entries})
    try:
        document = json.dumps({**text, "memories": listed}, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # a lone surrogate, or a value of some other kind
        raise SessionFileError(f"cannot write {path}: its messages are not JSON ({error})") from error
    try:
        with write_atomically(path, private=True, durable=durable) as file:
            file.write(MAGIC + b"%d\n%d %s\n" % (VERSION, len(document), _digest(document).encode()))
            file.write(document)
            for array in arrays:
                for piece in _pieces(array):
                    file.write(piece)
                    yield
    except (OSError, ValueError) as error:  # ValueError: no name for a file, as with a NUL in it
        reason = getattr(error, "strerror", None) or error
        raise SessionFileError(f"cannot write {path}: {reason}") from error


def read(path: Path, *, memory: bool = True) -> tuple[dict[str, Any], list[SavedContext], str | None]:
    """Read a saved session: its text, the memories, and a line if those are damaged. ``SessionFileError``: missing,
    foreign, from another version, or damaged in its text."""
    try:
        with path.open("rb") as file:
            text = read_text(file, str(path))
            listed = text.pop("memories", None)
            if not memory:
                return text, [], None
            try:
                return text, [_read_memory(each, file) for each in listed], None
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                return text, [], f"the memory saved in {path.name} is damaged ({error})"
    except (OSError, ValueError) as error:
        if isinstance(error, SessionFileError):
            raise
        raise SessionFileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def read_text(file: BinaryIO, name: str) -> dict[str, Any]:
    """The text part: ``messages``, ``params``, ``notes`` and ``model``; ``name`` is for ``SessionFileError``."""
    _read_version(file, name)
    damaged = SessionFileError(f"{name} is damaged: its text cannot be read")
    size, _, digest = file.readline(64).partition(b" ")
    if not size.isdigit() or len(size) > 12 or int(size) > MAX_TEXT_BYTES:
        raise damaged
    document = file.read(int(size))
    if len(document) != int(size) or _digest(document).encode() != digest.rstrip(b"\n"):
        raise damaged
    try:
        text = json.loads(document)
    except (ValueError, RecursionError):
        raise damaged from None
    if not isinstance(text, dict):
        raise damaged
    return text


def _read_version(file: BinaryIO, name: str) -> None:
    line = file.readline(64)
    if not line.startswith(MAGIC) or not line.endswith(b"\n"):
        raise SessionFileError(f"{name} is not a saved session")
    version = line[len(MAGIC) : -1].decode("ascii", "replace")
    if version != str(VERSION):
        raise SessionFileError(f"{name} has format version {version!r}; this localspec reads version {VERSION}")


def _read_memory(listed: Mapping[str, Any], file: BinaryIO) -> SavedContext:
    arrays = {}
    for entry in listed["arrays"]:
        dtype, shape = np.dtype(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        left = os.fstat(file.fileno()).st_size - file.tell()
        if dtype.hasobject or n_bytes < 0 or n_bytes > left:
            raise ValueError("it is cut short")
        data = np.empty(n_bytes, dtype=np.uint8)
        file.readinto(_bytes(data))  # type: ignore[attr-defined]
        if _digest(_bytes(data)) != entry["digest"]:
            raise ValueError("its digest is wrong")
        arrays[str(entry["name"])] = data.view(dtype).reshape(shape)
    tokens = [int(token) for token in listed["tokens"]]
    held = tokens if listed["held"] is None else [int(token) for token in listed["held"]]
    return SavedContext(dict(listed["maker"]), tokens, ContextState(tuple(held), arrays))


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _pieces(array: npt.NDArray[Any]) -> Iterator[memoryview]:
    data = _bytes(array)
    return (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))


_DIGEST_SIZE = 16


def _digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=_DIGEST_SIZE).hexdigest()


# Conversations that were saved in this home: chats, and those of the server's page.

CONVERSATIONS = "conversations"
"""The folder of a home in which the server keeps its page's conversations, each a JSON file named by its id."""

_CONVERSATION = re.compile(r"[0-9a-f]{16}\.json")

_OTHERS = ("models", "heads", "distill", "repacked", "engines", "corpora", "prompts")
"""Folders of a home with large files that are no chats."""


def chat_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink() and path.name not in _OTHERS:
            yield from chat_files(path)
        elif path.is_file():
            try:
                with path.open("rb") as file:
                    is_session = file.read(len(MAGIC)) == MAGIC
            except OSError:
                continue
            if is_session:
                yield path


def messages_in(path: Path) -> list[dict[str, Any]] | None:
    """The messages that were saved in a file; None if it is no such file, or damaged."""
    try:
        messages = read(path, memory=False)[0].get("messages")
    except (OSError, SessionFileError):
        return None
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        return None
    return messages


def said_in(path: Path) -> list[str]:
    """The texts of a chat or a conversation, those of its files too; none if it is neither, or damaged."""
    try:
        messages = json.loads(path.read_bytes())["messages"] if path.suffix == ".json" else messages_in(path)
        messages = [message for message in messages or () if isinstance(message, dict)]
        files = [file for message in messages for file in message.get("files") or ()]
        texts = [message.get("content") for message in messages] + [file.get("text") for file in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [text for text in texts if isinstance(text, str)]


class SavedChats(TextSource):
    """What was said in the chats saved in this home and in the conversations of the page, as text for a corpus."""

    def __init__(self) -> None:
        self._home = home()
        self.key = f"chats in {self._home}"

    def files(self) -> Steps[list[TextFile]]:
        found = []
        kept = self._home / CONVERSATIONS
        of_the_page = [path for path in sorted(kept.glob("*.json")) if _CONVERSATION.fullmatch(path.name)]
        for path in (*chat_files(self._home), *of_the_page):
            with suppress(FileNotFoundError):  # somebody has just deleted it
                facts = path.stat()
                found.append(TextFile(path.relative_to(self._home).as_posix(), facts.st_size, facts.st_mtime_ns))
            yield
        return found

    def text(self, name: str) -> str | None:
        text = "\n".join(said_in(self._home / name))
        return text.encode(errors="replace").decode() or None  # JSON can hold half a character
