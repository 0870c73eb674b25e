"""An answer as blocks, one after the other: thinking, text and calls. OpenAI calls them items, Anthropic content."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from localspec.engine.request import Reply
from localspec.errors import written_json
from localspec.server.openai import figures
from localspec.server.requests import AnswerOptions
from localspec.server.service import AnswerTask, Service
from localspec.server.tool_calls import CallStart, TextPiece
from localspec.server.tools import Delta

BlockKind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """One block. The text of a call are its arguments, as JSON; ``id`` and ``name`` are those of a call."""

    index: int
    kind: BlockKind
    text: str = ""
    id: str = ""
    name: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Empty where the answer was cut within them."""
        try:
            value = written_json(self.text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class Change:
    """A block begins, grows by a piece, or ends."""

    what: Literal["begin", "piece", "end"]
    block: AnswerBlock
    piece: str = ""


class BlockReader:
    """Deltas -> changes of blocks. White space between thoughts and calls is no text."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None
        self._space = ""  # in front of a text that may not come

    def read(self, delta: Delta) -> Iterator[Change]:
        if delta.thinking:
            yield from self._say("thinking", delta.thinking)
        for piece in delta.pieces:
            if isinstance(piece, TextPiece):
                yield from self._say("text", piece.text)
            elif isinstance(piece, CallStart):
                self._space = ""
                yield from self._begin(AnswerBlock(len(self.blocks), "call", id=piece.id, name=piece.name))
            else:
                yield self._more(piece.text)

    def finish(self) -> Iterator[Change]:
        if self._space and not self.blocks:
            yield from self._begin(AnswerBlock(0, "text"))
            yield self._more(self._space)
        yield from self._end()

    def _say(self, kind: BlockKind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            self._space += text
            if self._space.isspace():
                return
            text, self._space = self._space, ""
            yield from self._begin(AnswerBlock(len(self.blocks), kind))
        yield self._more(text)

    def _begin(self, block: AnswerBlock) -> Iterator[Change]:
        yield from self._end()
        self._open = block
        self.blocks.append(block)
        yield Change("begin", replace(block))  # as it is now: it may have grown before this is read

    def _more(self, text: str) -> Change:
        assert self._open is not None
        self._open.text += text
        return Change("piece", self._open, text)

    def _end(self) -> Iterator[Change]:
        if self._open is not None:
            yield Change("end", self._open)
            self._open = None


class BlockAnswer(ABC):
    """The answer to one request; subclasses have the shape of an API.

    Args:
        service: what answers.
        options: of the request.
        task: what to answer.

    Attributes:
        finish_reason: as OpenAI's chat has it; None before the end.
    """

    def __init__(self, service: Service, options: AnswerOptions, task: AnswerTask) -> None:
        self.service = service
        self.task = task
        self.finish_reason: str | None = None
        self.created = time.time()
        self._options = options
        self._reader = BlockReader()
        self._reply: Reply | None = None

    @property
    def blocks(self) -> list[AnswerBlock]:
        return self._reader.blocks

    @property
    def reply(self) -> Reply:
        assert self._reply is not None
        return self._reply

    @abstractmethod
    def begin(self) -> Iterable[bytes]:
        """The events in front of all others."""

    @abstractmethod
    def change(self, change: Change) -> Iterable[bytes]:
        """The events that tell of a change."""

    @abstractmethod
    def end(self) -> Iterable[bytes]:
        """The events behind all others."""

    @abstractmethod
    def finished(self) -> dict[str, Any]:
        """The whole answer."""

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._changes()) as batches:
            async for _ in batches:
                pass
        return await asyncio.to_thread(self.finished)  # some APIs repeat in an answer all that was sent

    async def events(self) -> AsyncGenerator[bytes, None]:
        started = False  # what fails before there is anything to tell has its own status
        async with aclosing(self._changes()) as batches:
            async for changes in batches:
                if not started:
                    started = True
                    for event in await asyncio.to_thread(list, self.begin()):
                        yield event
                for change in changes:
                    for event in self.change(change):
                        yield event
        for event in await asyncio.to_thread(list, self.end()):
            yield event

    async def _changes(self) -> AsyncGenerator[list[Change], None]:
        async with aclosing(self.service.answers(self._options, [self.task])) as steps:
            async for step in steps:
                yield list(self._reader.read(step.delta))
                if step.reply is not None:
                    self._reply, self.finish_reason = step.reply, step.finish_reason
        yield list(self._reader.finish())

    def figures(self) -> dict[str, Any]:
        return figures([self.reply])


def identifier(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(14)}"
