"""Embeddings: OpenAI's ``/v1/embeddings``, Ollama's ``/api/embed``."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from localspec.backends.llama.embedding import EmbeddingModel
from localspec.engine.worker import Turns
from localspec.errors import PromptTooLong
from localspec.server.access import Client
from localspec.server.bodies import Flag, ModelBody, are_tokens, whole
from localspec.server.http import invalid, stopping, too_busy
from localspec.server.ollama import OllamaOptions, StayingBody

Row = npt.NDArray[np.float32]

MAX_INPUTS = 2048  # OpenAI's own limit


class EmbeddingsBody(ModelBody):
    """The body of ``/v1/embeddings``."""

    input: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, whole(1, 1 << 20)] | None = None


class OllamaEmbedBody(StayingBody):
    """The body of ``/api/embed``."""

    input: Any = None
    options: OllamaOptions | None = None  # checked; the model was loaded before, with the server's own
    truncate: Flag = True
    dimensions: Annotated[int, whole(1, 1 << 20)] | None = None

    @property
    def asks_nothing(self) -> bool:
        return self.input in (None, "")


class OllamaEmbeddingsBody(StayingBody):
    """The body of ``/api/embeddings``, Ollama's older address."""

    prompt: str
    options: OllamaOptions | None = None


@dataclass(eq=False)
class EmbeddingService:
    """Answers with one model that makes embeddings; the arguments are those of ``Host`` and ``Service``."""

    model: EmbeddingModel
    queue: int
    ending: asyncio.Event
    names: Sequence[str]
    turns: Turns
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of one text: a request of many lets others in between
    _n_asked: int = 0

    def close(self) -> None:
        self.model.close()

    def seen_by(self, client: Client) -> EmbeddingService:
        return self

    async def embedded(self, value: Any, name: str, cut: bool = False) -> tuple[list[Row], int]:
        """The embeddings of a text, token ids, or a list of either, and their number of tokens.

        Args:
            value: what was sent; an ``ApiError`` if it is something else.
            name: of the field.
            cut: whether texts that are too long are cut, rather than refused.
        """
        inputs = await asyncio.to_thread(_inputs, value, name)
        if self._n_asked > self.queue:
            raise too_busy(f"{self.queue} requests wait already", 1)
        self._n_asked += 1
        try:
            rows, n_tokens = [], 0
            for each in inputs:
                tokens = await asyncio.to_thread(self._tokens, each, cut)
                async with self._turn:
                    if self.ending.is_set():
                        raise stopping()
                    rows.append(await asyncio.to_thread(self._row, tokens))
                n_tokens += len(tokens)
            return rows, n_tokens
        finally:
            self._n_asked -= 1

    def _tokens(self, each: str | list[int], cut: bool) -> list[int]:
        if isinstance(each, str) and (most := self.model.most_characters) is not None and len(each) > most:
            if not cut:
                raise PromptTooLong(
                    f"the text has {len(each)} characters, more than {self.model.n_ctx} tokens stand for"
                )
            each = each[:most]
        tokens = self.model.tokenize(each) if isinstance(each, str) else each
        if cut and len(tokens) > self.model.n_ctx:
            tokens = [*tokens[: self.model.n_ctx - 1], tokens[-1]]  # the last one may be the mark of the end
        return tokens

    def _row(self, tokens: list[int]) -> Row:
        with self.turns.answering(), self.turns.one():
            return self.model.embed(tokens)


class EmbeddingAnswer:
    """The answer to a request for embeddings, in the shape of an API."""

    def __init__(self, service: EmbeddingService, body: Any) -> None:
        self.service, self.body = service, body
        n_embd = service.model.n_embd
        if getattr(body, "dimensions", None) not in (None, n_embd):
            raise invalid(f"dimensions: this model makes {n_embd} numbers", "dimensions")

    @classmethod
    def unloaded(cls, name: str) -> dict[str, Any]:
        """The answer to a request of Ollama's clients that unloads a model."""
        return {"model": name, "embeddings": []}


class OpenAIEmbeddings(EmbeddingAnswer):
    async def whole(self) -> dict[str, Any]:
        rows, n_tokens = await self.service.embedded(self.body.input, "input")

        def encoded(row: Row) -> Any:
            if self.body.encoding_format == "float":
                return row.tolist()
            return base64.b64encode(np.asarray(row, "<f4").tobytes()).decode()

        return {
            "object": "list",
            "data": await asyncio.to_thread(
                lambda: [{"object": "embedding", "index": i, "embedding": encoded(row)} for i, row in enumerate(rows)]
            ),
            "model": self.service.names[0],
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }


class OllamaEmbed(EmbeddingAnswer):
    async def whole(self) -> dict[str, Any]:
        started = time.monotonic_ns()
        rows, n_tokens = list[Row](), 0
        if not self.body.asks_nothing:  # else the model is only to be loaded
            rows, n_tokens = await self.service.embedded(self.body.input, "input", self.body.truncate)
        return {
            "model": self.service.names[0],
            "embeddings": await asyncio.to_thread(lambda: [row.tolist() for row in rows]),
            "total_duration": time.monotonic_ns() - started,
            "load_duration": 0,
            "prompt_eval_count": n_tokens,
        }


class OllamaEmbeddings(EmbeddingAnswer):
    async def whole(self) -> dict[str, Any]:
        rows, _ = await self.service.embedded(self.body.prompt, "prompt", True)
        return {"embedding": rows[0].tolist()}


def _inputs(value: Any, name: str) -> list[str | list[int]]:
    inputs = [value] if isinstance(value, str) or (value and are_tokens(value)) else value
    if not isinstance(inputs, list) or not all(isinstance(item, str) or are_tokens(item) for item in inputs):
        raise invalid(f"{name} must be a text, token ids, or a list of either", name)
    if not 0 < len(inputs) <= MAX_INPUTS or not all(inputs):
        raise invalid(f"{name} must hold 1 to {MAX_INPUTS} texts, none empty", name)
    return inputs
