"""Conversations that the page keeps on this computer's disk: one JSON file each, bounded in number and size."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import AfterValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from localspec.engine.saved import CONVERSATIONS
from localspec.server.access import READS_TEXTS, Address
from localspec.server.bodies import MAX_COUNT, Body, Flag, items, must_be, read, whole
from localspec.server.http import ApiError, BodyReader, invalid
from localspec.server.requests import MAX_MESSAGES
from localspec.system.files import home, private_folder, write_atomically

FORMAT = 1
Finish = Literal["stop", "length", "cancelled", "broken"]
"""How an answer ended: by itself, at its longest, stopped by a person, or broken off (as an unfinished one)."""
_LOCK_SECONDS = 10.0  # a server that was stopped with Ctrl-Z holds its lock for ever
_ID = re.compile(r"[0-9a-f]{16}")
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "title": str, "system": str, "settings": dict, "messages": list,
    "revision": int, "created": (int, float), "updated": (int, float),
}  # fmt: skip
"""What a file has apart from its format and its id: it may have been edited by hand, or damaged."""


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """How many are kept, and their size as JSON [bytes]; 100,000 tokens of text are about 0.5 MB."""

    conversations: int = 1000
    bytes_each: int = 4 << 20
    bytes_together: int = 256 << 20


class ConversationStore:
    """A folder of conversations. Several servers may share it.

    A conversation is a mapping with ``id``, ``revision`` (one more with every change), ``created`` and ``updated``
    [seconds since 1970], and what the client sent: ``title``, ``system``, ``settings``, ``messages``. A message of the
    user may have ``versions``: what else stood in its place and after it, each a list of messages, one that begins
    with an answer having the same question; ``version`` is its own number among them, from 0.

    Args:
        folder: where the files lie; made when first needed.
        limits: beyond them nothing is deleted: saving is refused.
    """

    def __init__(self, folder: Path, limits: ConversationLimits | None = None) -> None:
        self.folder = folder
        self.limits = limits or ConversationLimits()
        self._summaries: dict[str, tuple[tuple[int, int], dict[str, Any] | None]] = {}

    def list(self, query: str = "") -> list[dict[str, Any]]:
        """``id``, ``title``, ``updated`` and number of ``messages`` of each, the latest first.

        Args:
            query: words that must all occur in it, in any case; empty lists all.
        """
        words = query.casefold().split()
        found = []
        for path in self._files():
            summary = self._summary(path)
            if summary is not None and (not words or self._has(path, words)):
                found.append(summary)
        return sorted(found, key=lambda summary: summary["updated"], reverse=True)

    def get(self, name: str) -> dict[str, Any]:
        """A conversation; an ``ApiError`` if there is none of that id (404), or its file cannot be read (500)."""
        path = self._path(name)
        try:
            return _read(path)
        except FileNotFoundError:
            raise _missing() from None
        except (OSError, ValueError, RecursionError):
            raise ApiError(500, "the file of this conversation is damaged", code="conversation_damaged") from None

    def create(self, content: Mapping[str, Any], name: str | None = None) -> dict[str, Any]:
        """Keep a new one.

        Args:
            content: what is kept.
            name: its id, 16 hexadecimal digits, where the client chose it, so that it can ask again safely.

        Raises:
            ApiError: there is one of that id (409), a limit is reached (413, 507), or the disk refuses (507).
        """
        if name is not None and not _ID.fullmatch(name):
            raise invalid("id must be 16 hexadecimal digits, in lower case", "id")
        with self._writing():
            present = list(self._files())
            if name is not None and self._path(name) in present:
                raise _changed()
            if len(present) >= self.limits.conversations:
                raise _full(f"{self.limits.conversations} conversations are kept, which is the most; delete some")
            stamps = {"id": name or secrets.token_hex(8), "revision": 1, "created": time.time()}
            return self._write({**content, **stamps})

    def replace(self, name: str, revision: int, content: Mapping[str, Any]) -> dict[str, Any]:
        """Change the conversation of an id and a revision.

        Raises:
            ApiError: it has been changed since (409), is not there (404), a limit is reached, or the disk refuses.
        """
        with self._writing():
            old = self.get(name)
            if old["revision"] != revision:
                raise _changed()
            stamps = {"id": name, "revision": revision + 1, "created": old["created"]}
            return self._write({**content, **stamps})

    def delete(self, name: str) -> None:
        with self._writing():
            try:
                self._path(name).unlink()
            except FileNotFoundError:
                raise _missing() from None

    def _write(self, conversation: dict[str, Any]) -> dict[str, Any]:
        conversation |= {"format": FORMAT, "updated": time.time()}
        encoded = json.dumps(conversation, ensure_ascii=False, separators=(",", ":")).encode()
        if len(encoded) > self.limits.bytes_each:
            message = f"a conversation may take {self.limits.bytes_each / 1e6:.1f} MB, and this one takes more"
            raise ApiError(413, message, code="conversation_too_large")
        path = self._path(conversation["id"])
        others = sum(_size(other) for other in self._files() if other != path)
        if others + len(encoded) > self.limits.bytes_together:
            raise _full(f"all conversations may take {self.limits.bytes_together / 1e6:.0f} MB together; delete some")
        with write_atomically(path, private=True) as file:
            file.write(encoded)
        return conversation

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            private_folder(self.folder)
            with FileLock(self.folder / ".lock", timeout=_LOCK_SECONDS):
                yield
        except Timeout:
            raise _full("another server is writing to the conversations") from None
        except OSError as error:
            raise _full(f"the conversation cannot be written: {error.strerror or 'the disk refuses'}") from error

    def _files(self) -> Iterator[Path]:
        return (path for path in self.folder.glob("*.json") if _ID.fullmatch(path.stem))

    def _path(self, name: str) -> Path:
        if not _ID.fullmatch(name):
            raise _missing()
        return self.folder / f"{name}.json"

    def _summary(self, path: Path) -> dict[str, Any] | None:
        """The list's entry of a file, read again when it has changed; None of a damaged one."""
        try:
            stat = path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            known = self._summaries.get(path.stem)
            if known is None or known[0] != stamp:
                whole = _read(path)
                summary = {key: whole[key] for key in ("id", "title", "updated")} | {"messages": len(whole["messages"])}
                known = self._summaries[path.stem] = (stamp, summary)
            return known[1]
        except (OSError, ValueError, RecursionError):
            return None

    def _has(self, path: Path, words: Sequence[str]) -> bool:
        try:
            whole = _read(path)
        except (OSError, ValueError, RecursionError):
            return False
        messages = list(_all_messages(whole["messages"]))
        texts = [whole["title"], *(message["content"] for message in messages)]
        texts += [file["name"] for message in messages for file in message.get("files", ())]
        text = "\n".join(texts).casefold()
        return all(word in text for word in words)


def as_markdown(conversation: Mapping[str, Any]) -> str:
    """A conversation as Markdown: files are named, thinking is left out."""
    parts = [f"# {conversation['title']}"]
    if conversation["system"]:
        parts.append("\n".join(f"> {line}".rstrip() for line in conversation["system"].splitlines()))
    for message in conversation["messages"]:
        names = ", ".join(file["name"] for file in message.get("files", ()))
        who = "You" if message["role"] == "user" else "Answer"
        parts.append(f"## {who}" + (f" (with {names})" if names else ""))
        parts.append(message["content"])
        if message.get("finish") == "broken":
            parts.append("*(The answer broke off here.)*")
    return "\n\n".join(parts).rstrip() + "\n"


def _read(path: Path) -> dict[str, Any]:
    """A file's conversation.

    Raises:
        OSError: it cannot be read; ValueError: it is none of ours, or of another version.
    """
    whole = json.loads(path.read_bytes(), parse_float=_finite, parse_constant=lambda name: None)
    if not isinstance(whole, dict) or whole.get("format") != FORMAT or whole.get("id") != path.stem:
        raise ValueError("not a conversation")
    if not _has_fields(whole, _FIELDS) or not all(map(_is_message, whole["messages"])):
        raise ValueError("parts of the conversation are missing")
    whole["settings"] = {name: value for name, value in whole["settings"].items() if value is not None}
    return whole


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None  # no browser reads it otherwise


def _is_message(message: Any) -> bool:
    if not _has_fields(message, {"role": str, "content": str}):
        return False
    files, versions = message.get("files", []), message.get("versions", [])
    if not isinstance(files, list) or not isinstance(versions, list) or not isinstance(message.get("version", 0), int):
        return False
    has_files = all(_has_fields(file, {"name": str, "text": str}) for file in files)
    return has_files and all(isinstance(each, list) and each and all(map(_is_message, each)) for each in versions)


def _all_messages(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those of other versions too."""
    for message in messages:
        yield message
        for version in message.get("versions", ()):
            yield from _all_messages(version)


def _has_fields(value: Any, fields: Mapping[str, type | tuple[type, ...]]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in fields.items())


def _size(path: Path) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0  # deleted just now


def _changed() -> ApiError:
    message = "this conversation has been changed elsewhere since it was opened"
    return ApiError(409, message, code="conversation_changed")


def _missing() -> ApiError:
    return ApiError(404, "there is no such conversation", code="conversation_not_found")


def _full(message: str) -> ApiError:
    return ApiError(507, message, kind="invalid_request_error", code="conversations_full")


# The addresses: list, search, save, export, delete.

PATH = "/v1/localspec/conversations"
MAX_FILES, MAX_SETTINGS, MAX_TITLE, MAX_VERSIONS = 32, 64, 200, 1000  # more than a person uses; the store bounds sizes
_STAMPS = ("id", "revision", "title", "created", "updated")


class ConversationApi:
    """The endpoints."""

    def __init__(self, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._store = ConversationStore(home() / CONVERSATIONS)

    def addresses(self) -> list[Address]:
        return [
            Address(PATH, self._all, READS_TEXTS, ("GET", "POST")),
            Address(PATH + "/{id}", self._one, READS_TEXTS, ("GET", "PUT", "DELETE")),
        ]

    async def _all(self, http: Request) -> Response:
        if http.method == "POST":
            return await self._saved(http, None)
        found = await asyncio.to_thread(self._store.list, http.query_params.get("q", "")[:200])
        return JSONResponse({"object": "list", "data": found, "limits": dataclasses.asdict(self._store.limits)})

    async def _one(self, http: Request) -> Response:
        name = http.path_params["id"]
        if http.method == "PUT":
            return await self._saved(http, name)
        if http.method == "DELETE":
            await asyncio.to_thread(self._store.delete, name)
            return Response(status_code=204)
        conversation = await asyncio.to_thread(self._store.get, name)
        if http.query_params.get("format") == "markdown":
            return PlainTextResponse(await asyncio.to_thread(as_markdown, conversation), media_type="text/markdown")
        return await asyncio.to_thread(JSONResponse, conversation)

    async def _saved(self, http: Request, name: str | None) -> Response:
        """Save the body as a new conversation, or in the place of one."""
        async with self._bodies.json(http) as body:
            asked = await asyncio.to_thread(read, ConversationBody, body)
        if name is None:
            kept = await asyncio.to_thread(self._store.create, asked.content(), asked.id)
        elif asked.revision is None:
            raise invalid("revision is missing: that of what was changed", "revision")
        else:
            kept = await asyncio.to_thread(self._store.replace, name, asked.revision, asked.content())
        return JSONResponse({key: kept[key] for key in _STAMPS}, 201 if name is None else 200)


class KeptFile(Body):
    name: str
    text: str
    edit: Flag = False


def _is_a_version(version: int, message: ValidationInfo) -> int:
    n = len(message.data.get("versions", ()))
    if version > n:
        raise PydanticCustomError("rule", "rule", {"rule": f"an integer in 0..{n}"})
    return version


class KeptMessage(Body):
    role: Literal["user", "assistant"]
    content: str
    reasoning_content: str = ""
    finish: Finish | None = None
    files: Annotated[list[KeptFile], items(MAX_FILES)] = []
    versions: Annotated[list[KeptMessages], items(MAX_VERSIONS)] = []
    version: Annotated[int, whole(0, MAX_VERSIONS), AfterValidator(_is_a_version)] = 0


KeptMessages = Annotated[list[KeptMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def _are_settings(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_SETTINGS
        and all(isinstance(each, str | int | float | bool) for each in value.values())
        and len(json.dumps(value)) <= 1 << 16
    )


class ConversationBody(Body):
    """A conversation to keep."""

    id: str | None = None
    revision: Annotated[int, whole(0, MAX_COUNT)] | None = None
    title: str = ""
    system: str = ""
    settings: Annotated[
        dict[str, Any],
        must_be(f"at most {MAX_SETTINGS} names with a string, a number, true or false", _are_settings),
    ] = {}
    messages: KeptMessages

    def content(self) -> dict[str, Any]:
        """What is kept."""
        title = " ".join(self.title.split())[:MAX_TITLE] or "Untitled"
        return {"title": title, "system": self.system, "settings": self.settings} | self.model_dump(
            include={"messages"}, exclude_unset=True
        )
