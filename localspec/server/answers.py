"""The answer to one request, whole or as events; and as blocks: OpenAI calls them items, Anthropic content."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from localspec.engine.request import Reply
from localspec.errors import written_json
from localspec.server.requests import AnswerOptions
from localspec.server.service import AnswerEvent, AnswerTask, Service
from localspec.server.tool_calls import CallStart, TextPiece
from localspec.server.tools import Delta
from localspec.spec_decode.rounds import PromptProgress

Part = TypeVar("Part")
"""What an answer tells of a step."""


class ApiAnswer(ABC, Generic[Part]):
    """The answer to one request; subclasses have the shape of an API. Made in a thread: templates take time.

    Args:
        service: what answers.
        options: of the request.
        tasks: one for each choice; none where nothing is to be said.

    Attributes:
        replies: of the tasks that are done.
        seconds_loading: for which the request waited until its model was loaded.
        holding: see ``Service.answers``.

    Raises:
        LocalspecError: the request does not fit the template, the context or the model.
    """

    seconds_loading = 0.0
    holding: AbstractContextManager[None] | None = None

    def __init__(self, service: Service, options: AnswerOptions, tasks: Sequence[AnswerTask]) -> None:
        self.service = service
        self.options = options
        self.tasks = tasks
        self.created = time.time()
        self.replies: list[Reply] = []

    def begin(self) -> Iterable[bytes]:
        """The events in front of all others."""
        return ()

    @abstractmethod
    def read(self, step: AnswerEvent) -> Iterable[Part]:
        """Take a step in."""

    @abstractmethod
    def told(self, part: Part) -> Iterable[bytes]:
        """The events of a part."""

    def end(self) -> Iterable[bytes]:
        """The events behind all others."""
        return ()

    @abstractmethod
    def finished(self) -> dict[str, Any]:
        """The whole answer."""

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._steps()) as steps:
            async for _ in steps:
                pass
        return await asyncio.to_thread(self.finished)  # some APIs repeat in an answer all that was sent

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False  # what fails before there is anything to tell has its own status
        async with aclosing(self._steps()) as steps:
            async for parts in steps:
                if not begun:
                    begun = True
                    for event in await asyncio.to_thread(list, self.begin()):
                        yield event
                for part in parts:
                    for event in self.told(part):
                        yield event
        for event in await asyncio.to_thread(list, self.end()):
            yield event

    async def _steps(self) -> AsyncGenerator[list[Part], None]:
        async with aclosing(self.service.answers(self.options, self.tasks, self.holding)) as steps:
            async for step in steps:
                if step.reply is not None:
                    self.replies.append(step.reply)
                yield list(self.read(step))

    def figures(self) -> dict[str, Any]:
        """``localspec`` in an answer: statistics, a list of them where there are several replies."""
        if not self.replies:
            return {}
        first, last = self.replies[0], self.replies[-1]
        stats = [reply.stats.as_dict() for reply in self.replies]
        return {
            "stats": stats[0] if len(stats) == 1 else stats,
            "draft": last.draft,
            "backend": last.backend,
            "explanation": last.explanation,
            "seconds_waited": round(first.seconds_waited, 3),
        }


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


class BlockAnswer(ApiAnswer[Change]):
    """One choice, in blocks. White space between thoughts and calls is no text.

    Attributes:
        blocks: so far.
        finish_reason: as OpenAI's chat has it; None before the end.
    """

    def __init__(self, service: Service, options: AnswerOptions, tasks: Sequence[AnswerTask]) -> None:
        super().__init__(service, options, tasks)
        self.blocks: list[AnswerBlock] = []
        self.finish_reason: str | None = None
        self._open: AnswerBlock | None = None
        self._space = ""  # in front of a text that may not come

    def read(self, step: AnswerEvent) -> Iterator[Change]:
        yield from self._changes(step.delta)
        if step.reply is not None:
            self.finish_reason = step.finish_reason
            if self._space and not self.blocks:
                yield from self._begin(AnswerBlock(0, "text"))
                yield self._more(self._space)
            yield from self._end()

    def _changes(self, delta: Delta) -> Iterator[Change]:
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


def prompt_progress(progress: PromptProgress) -> dict[str, int]:
    """How far a prompt is read, as llama-server says it."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(progress.seconds * 1e3),
    }


def identifier(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(14)}"
