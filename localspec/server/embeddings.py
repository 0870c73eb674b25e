"""A server whose file is an embedding model: OpenAI's ``/v1/embeddings``, Ollama's ``/api/embed``."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localspec.backends.llama.embedding import EmbeddingModel
from localspec.errors import PromptTooLong
from localspec.server.access import ALL, Address
from localspec.server.bodies import Body, Flag, read, whole
from localspec.server.events import while_connected
from localspec.server.guard import application
from localspec.server.http import ApiError, BodyReader, ServerSettings, invalid, stopping, too_busy
from localspec.server.ollama import OllamaOptions, version

Row = npt.NDArray[np.float32]

MAX_INPUTS = 2048  # OpenAI's own limit
CHATS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/infill", "/api/chat", "/api/generate",
)  # fmt: skip


class EmbeddingsBody(Body):
    """The body of ``/v1/embeddings``."""

    model: str | None = None
    input: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, whole(1, 1 << 20)] | None = None


class OllamaEmbedBody(Body):
    """The body of ``/api/embed``."""

    model: str | None = None
    input: Any = None
    truncate: Flag = True
    dimensions: Annotated[int, whole(1, 1 << 20)] | None = None


class OllamaEmbeddingsBody(Body):
    """The body of ``/api/embeddings``, Ollama's older address."""

    model: str | None = None
    prompt: str


AnyBody = TypeVar("AnyBody", EmbeddingsBody, OllamaEmbedBody, OllamaEmbeddingsBody)


class EmbeddingService:
    """What answers; ``ending`` is set once the server goes down."""

    def __init__(self, model: EmbeddingModel, settings: ServerSettings) -> None:
        self.settings = settings
        self.ending = asyncio.Event()
        self._model = model
        self._names = list(dict.fromkeys([model.path.stem, *settings.aliases]))
        self._bodies = BodyReader(settings.body_bytes, settings.bodies_bytes, settings.body_seconds)
        self._turn = asyncio.Lock()  # of one text: a request of many lets others in between
        self._n_asked = 0
        self._started = time.time()

    def application(self) -> Starlette:
        post = ("POST",)
        addresses = [
            # llama.vscode calls every model GPT-4, and llama-server heeds no name; the answer says whose it is.
            Address("/v1/embeddings", self._at(EmbeddingsBody, self._openai, any_name=True), methods=post),
            Address("/api/embed", self._at(OllamaEmbedBody, self._ollama), methods=post),
            Address("/api/embeddings", self._at(OllamaEmbeddingsBody, self._ollama_of_old), methods=post),
            *(Address(path, _no_chat, methods=post) for path in CHATS),
            Address("/v1/models", self._models),
            Address("/api/version", version),
            Address("/health", self._health, ALL),
        ]
        return application(self.settings, addresses)

    def _at(
        self,
        kind: type[AnyBody],
        answer: Callable[[AnyBody], Coroutine[Any, Any, dict[str, Any]]],
        *,
        any_name: bool = False,
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(http: Request) -> Response:
            async with self._bodies.json(http) as value:
                body = read(kind, value)
            if (options := value.get("options")) is not None:
                read(OllamaOptions, options, "options")
            name = body.model
            if name and not any_name and name.removesuffix(":latest") not in self._names:
                message = f"there is no model {name!r:.80} here; this server answers with {self._names[0]}"
                raise ApiError(404, message, param="model", code="model_not_found")
            whole = await while_connected(http.receive, self.ending, answer(body))
            return await asyncio.to_thread(JSONResponse, whole)

        return endpoint

    async def _openai(self, body: EmbeddingsBody) -> dict[str, Any]:
        self._check_dimensions(body.dimensions)
        rows, n_tokens = await self._embedded(body.input, "input")
        is_text = body.encoding_format == "base64"
        encoded = await asyncio.to_thread(lambda: [_base64(row) if is_text else row.tolist() for row in rows])
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(encoded)],
            "model": self._names[0],
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    async def _ollama(self, body: OllamaEmbedBody) -> dict[str, Any]:
        self._check_dimensions(body.dimensions)
        started = time.monotonic_ns()
        rows, n_tokens = await self._embedded(body.input, "input", body.truncate)
        return {
            "model": self._names[0],
            "embeddings": await asyncio.to_thread(lambda: [row.tolist() for row in rows]),
            "total_duration": time.monotonic_ns() - started,
            "load_duration": 0,
            "prompt_eval_count": n_tokens,
        }

    async def _ollama_of_old(self, body: OllamaEmbeddingsBody) -> dict[str, Any]:
        rows, _ = await self._embedded(body.prompt, "prompt", True)
        return {"embedding": rows[0].tolist()}

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions not in (None, self._model.n_embd):
            raise invalid(f"dimensions: this model makes {self._model.n_embd} numbers", "dimensions")

    async def _embedded(self, value: Any, name: str, cut: bool = False) -> tuple[list[Row], int]:
        """The embeddings of a text, token ids, or a list of either, and their number of tokens.

        Args:
            value: what was sent.
            name: of the field.
            cut: whether texts that are too long are cut, rather than refused.

        Raises:
            ApiError: it is something else, or too many wait.
            LocalspecError: a text does not fit, or the engine failed.
        """
        inputs = await asyncio.to_thread(_inputs, value, name)
        if self._n_asked > self.settings.queue:
            raise too_busy(f"{self.settings.queue} requests wait already", 1)
        self._n_asked += 1
        try:
            rows, n_tokens = [], 0
            for each in inputs:
                tokens = await asyncio.to_thread(self._tokens, each, cut)
                async with self._turn:
                    if self.ending.is_set():
                        raise stopping()
                    rows.append(await asyncio.to_thread(self._model.embed, tokens))
                n_tokens += len(tokens)
            return rows, n_tokens
        finally:
            self._n_asked -= 1

    def _tokens(self, each: str | list[int], cut: bool) -> list[int]:
        if isinstance(each, str) and (most := self._model.most_characters) is not None and len(each) > most:
            if not cut:
                raise PromptTooLong(
                    f"the text has {len(each)} characters, more than {self._model.n_ctx} tokens stand for"
                )
            each = each[:most]
        tokens = self._model.tokenize(each) if isinstance(each, str) else each
        if cut and len(tokens) > self._model.n_ctx:
            tokens = [*tokens[: self._model.n_ctx - 1], tokens[-1]]  # the last one may be the mark of the end
        return tokens

    async def _models(self, request: Request) -> Response:
        about = {"object": "model", "created": int(self._started), "owned_by": "localspec"}
        own = {"context": self._model.n_ctx, "backend": self._model.backend, "dimensions": self._model.n_embd}
        data = [{"id": name} | about | {"localspec": own} for name in self._names]
        return JSONResponse({"object": "list", "data": data})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})


async def _no_chat(request: Request) -> Response:
    raise ApiError(400, "this model makes embeddings; it continues no text", code="unsupported_endpoint")


def _inputs(value: Any, name: str) -> list[str | list[int]]:
    def is_tokens(item: Any) -> bool:
        return isinstance(item, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in item)

    inputs = [value] if isinstance(value, str) or (value and is_tokens(value)) else value
    if not isinstance(inputs, list) or not all(isinstance(item, str) or is_tokens(item) for item in inputs):
        raise invalid(f"{name} must be a text, token ids, or a list of either", name)
    if not 0 < len(inputs) <= MAX_INPUTS or not all(inputs):
        raise invalid(f"{name} must hold 1 to {MAX_INPUTS} texts, none empty", name)
    return inputs


def _base64(row: Row) -> str:
    return base64.b64encode(np.asarray(row, "<f4").tobytes()).decode()
