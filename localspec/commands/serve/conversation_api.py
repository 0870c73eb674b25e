"""The addresses under which the page keeps conversations: list, search, save, export, delete."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from localspec.commands.serve.conversations import FINISHES, ConversationStore, as_markdown
from localspec.commands.serve.errors import invalid
from localspec.commands.serve.fields import Fields
from localspec.commands.serve.requests import MAX_COUNT, MAX_MESSAGES
from localspec.commands.serve.service import Service

PATH = "/v1/localspec/conversations"
MAX_FILES, MAX_SETTINGS, MAX_TITLE, MAX_VERSIONS = 32, 64, 200, 1000  # more than a person uses; the store bounds sizes
_STAMPS = ("id", "revision", "title", "created", "updated")


class ConversationApi:
    """The endpoints.

    Args:
        service: its reader reads their bodies.
        store: where conversations are kept.
    """

    def __init__(self, service: Service, store: ConversationStore) -> None:
        self._service = service
        self._store = store

    def routes(self) -> list[Route]:
        return [
            Route(PATH, self._all, methods=["GET", "POST"]),
            Route(PATH + "/{id}", self._one, methods=["GET", "PUT", "DELETE"]),
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
        """Save the body as a new conversation, or in the place of one; the answer is what the store says of it."""
        async with self._service.bodies.json(http) as body:
            fields = Fields(body)
            content = await asyncio.to_thread(conversation_of, fields)
        if name is None:
            kept = await asyncio.to_thread(self._store.create, content, fields.text("id"))
        else:
            revision = fields.integer("revision", 1, MAX_COUNT)
            if revision is None:
                raise invalid("revision is missing: that of what was changed", "revision")
            kept = await asyncio.to_thread(self._store.replace, name, revision, content)
        return JSONResponse({key: kept[key] for key in _STAMPS}, 201 if name is None else 200)


def conversation_of(fields: Fields) -> dict[str, Any]:
    """What a client wants kept, checked.

    Raises:
        ApiError: it is no conversation.
    """
    messages = _messages(fields.get("messages"), "messages")
    settings = fields.get("settings") or {}
    simple = isinstance(settings, dict) and all(
        isinstance(value, str | int | float | bool) for value in settings.values()
    )
    if not simple or len(settings) > MAX_SETTINGS or len(json.dumps(settings)) > 1 << 16:
        raise fields.wrong("settings", f"at most {MAX_SETTINGS} names with a string, a number, true or false")
    title = " ".join((fields.text("title") or "").split())[:MAX_TITLE] or "Untitled"
    return {"title": title, "system": fields.text("system") or "", "settings": settings, "messages": messages}


def _messages(value: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise invalid(f"{path} must be a list of 1 to {MAX_MESSAGES} messages", path)
    return [_message(Fields(item, f"{path}[{i}]")) for i, item in enumerate(value)]


def _message(fields: Fields) -> dict[str, Any]:
    message: dict[str, Any] = {"role": fields.required_text("role"), "content": fields.required_text("content")}
    fields.choice("role", ("user", "assistant"))
    if reasoning := fields.text("reasoning_content"):
        message["reasoning_content"] = reasoning
    if fields.has("finish"):
        message["finish"] = fields.choice("finish", FINISHES)
    files = []
    for i, item in enumerate(fields.items("files", MAX_FILES)):
        file = Fields(item, fields.path(f"files[{i}]"))
        files.append(
            {"name": file.required_text("name"), "text": file.required_text("text"), "edit": file.flag("edit")}
        )
    if files:
        message["files"] = files
    if versions := fields.items("versions", MAX_VERSIONS):
        message["versions"] = [_messages(each, fields.path(f"versions[{i}]")) for i, each in enumerate(versions)]
        message["version"] = fields.integer("version", 0, len(versions)) or 0
    return message
