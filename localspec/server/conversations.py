"""Conversations that the page keeps on this computer's disk: one JSON file each, bounded in number and size."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import AfterValidator, Field, StrictFloat, StrictInt, ValidationInfo
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from localspec.engine.saved import CONVERSATIONS
from localspec.errors import parse_json
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

    def list(self, query: str = "") -> list[dict[str, Any]]:
        """``id``, ``title``, ``updated`` and number of ``messages`` of each in which all words of the query occur, in
        any case, the latest first."""
        words, found = query.casefold().split(), []
        for path in self._files():
            with suppress(OSError, ValueError):  # damaged
                if not words or _has(_read(path), words):
                    stat = path.stat()
                    found.append(_summary(path, stat.st_mtime_ns, stat.st_size))
        return sorted(found, key=lambda summary: summary["updated"], reverse=True)

    def get(self, name: str) -> dict[str, Any]:
        """A conversation; an ``ApiError`` if there is none of that id (404), or its file cannot be read (500)."""
        path = self._path(name)
        try:
            return _read(path)
        except FileNotFoundError:
            raise _missing() from None
        except (OSError, ValueError):
            raise ApiError(500, "the file of this conversation is damaged", code="conversation_damaged") from None

    def create(self, content: Mapping[str, Any], name: str | None = None) -> dict[str, Any]:
        """Keep a new one; ``name``: its id, where the client chose it, so that it can ask again safely.

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
        others = sum(other.stat().st_size for other in self._files() if other != path)
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


@lru_cache(4096)
def _summary(path: Path, modified_ns: int, n_bytes: int) -> dict[str, Any]:
    """The list's entry of a file, which is read again when it has changed."""
    whole = _read(path)
    return {key: whole[key] for key in ("id", "title", "updated")} | {"messages": len(whole["messages"])}


def _has(conversation: Mapping[str, Any], words: Sequence[str]) -> bool:
    messages = list(_all_messages(conversation["messages"]))
    texts = [conversation["title"], *(message["content"] for message in messages)]
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
    """A file's conversation, which may have been edited by hand, or damaged.

    Raises:
        OSError: it cannot be read; ValueError: it is none of ours, or of another version.
    """
    whole: dict[str, Any] = parse_json(path.read_bytes())
    if StoredConversation.model_validate(whole).id != path.stem:
        raise ValueError("this is another conversation")
    return whole


def _all_messages(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those of other versions too."""
    for message in messages:
        yield message
        for version in message.get("versions", ()):
            yield from _all_messages(version)


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


Setting = Annotated[
    Any, must_be("a string, a number, true or false", lambda value: isinstance(value, str | int | float | bool))
]


class ConversationBody(Body):
    """A conversation to keep."""

    id: str | None = None
    revision: Annotated[int, whole(0, MAX_COUNT)] | None = None
    title: str = ""
    system: str = ""
    settings: Annotated[dict[str, Setting], Field(max_length=MAX_SETTINGS)] = {}
    messages: KeptMessages

    def content(self) -> dict[str, Any]:
        """What is kept."""
        title = " ".join(self.title.split())[:MAX_TITLE] or "Untitled"
        return {"title": title, "system": self.system, "settings": self.settings} | self.model_dump(
            include={"messages"}, exclude_unset=True
        )


class StoredConversation(ConversationBody):
    """What a file holds: nothing of it may be missing."""

    format: Literal[1]
    id: str
    revision: StrictInt
    created: StrictFloat
    updated: StrictFloat
    title: str
    system: str
    settings: dict[str, Any]
