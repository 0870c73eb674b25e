"""The answer to one request, whole or as events; and as blocks: OpenAI calls them items, Anthropic content."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from localspec.engine.request import AsyncRoundStream, Reply
from localspec.errors import QueueFull, written_json
from localspec.server.http import too_busy, too_late
from localspec.server.service import ChoiceJob, Service
from localspec.server.tool_calls import CallStart, TextPiece
from localspec.server.tools import Delta
from localspec.spec_decode.rounds import PromptProgress, Round


class ApiAnswer(ABC):
    """The answer to one request; subclasses have the shape of an API. Made in a thread: templates take time.

    Args:
        service: what answers.
        choices: the answers to make, one after the other; none where nothing is to be said.

    Raises:
        LocalspecError: the request does not fit the template, the context or the model.
    """

    seconds_loading = 0.0  # for which the request waited until its model was loaded
    holding: AbstractContextManager[None] = nullcontext()  # entered once the queue has taken all choices, until the end

    def __init__(self, service: Service, choices: Sequence[ChoiceJob]) -> None:
        self.service = service
        self.choices = choices
        self.created = time.time()
        self.replies: list[Reply] = []  # of the choices that are done

    def begin(self) -> Iterable[bytes]:
        """The events in front of all others."""
        return ()

    def progress(self, index: int, progress: PromptProgress) -> Iterable[bytes]:
        """The events of how far the prompt of a choice is read."""
        return ()

    @property
    def over(self) -> bool:
        """Whether the answer may end after the round that was read last."""
        return False

    @abstractmethod
    def read(self, index: int, delta: Delta, round_: Round) -> Iterable[bytes]:
        """Take in what a round adds to a choice; its events."""

    @abstractmethod
    def done(self, index: int, delta: Delta, finish_reason: str) -> Iterable[bytes]:
        """Take in the rest of a choice, and why it ended, as OpenAI's chat has it; its events."""

    def end(self) -> Iterable[bytes]:
        """The events behind all others."""
        return ()

    @abstractmethod
    def finished(self) -> dict[str, Any]:
        """The whole answer."""

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._steps()) as steps:
            async for events in steps:
                for _ in events:
                    pass
        return await asyncio.to_thread(self.finished)  # some APIs repeat in an answer all that was sent

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False  # what fails before there is anything to tell has its own status
        async with aclosing(self._steps()) as steps:
            async for events in steps:
                if not begun:
                    begun = True
                    for event in await asyncio.to_thread(list, self.begin()):
                        yield event
                for event in events:
                    yield event
        for event in await asyncio.to_thread(list, self.end()):
            yield event

    async def _steps(self) -> AsyncGenerator[Iterable[bytes], None]:
        """The events of every step of the engine; what they tell is taken in as they are read."""
        service = self.service
        async with AsyncExitStack() as stack:
            try:
                streams = [await stack.enter_async_context(AsyncRoundStream(choice.job)) for choice in self.choices]
            except QueueFull as error:
                wait = service.metrics.mean_request_seconds * (service.llm.queue_length + 1)
                raise too_busy(str(error), wait) from None
            stack.enter_context(self.holding)
            for index, (choice, stream) in enumerate(zip(self.choices, streams, strict=True)):
                reader, cut = choice.reader, False
                async for step in stream.steps():
                    if isinstance(step, PromptProgress):
                        yield self.progress(index, step)
                        continue
                    yield self.read(index, reader.read(step), step)
                    if cut := reader.over or self.over:
                        await stream.aclose()
                        break
                reply = await stream.reply()
                if index == 0 and reply.cancelled_by == "deadline" and not reply.stats.prompt_tokens:
                    raise too_late(service.settings.time_limit)
                service.metrics.count(reply)
                self.replies.append(service.client.shown(reply, service.drafters))
                reason: str = "length" if reply.finish_reason == "cancelled" else reply.finish_reason
                rest = reader.finish(cut=reason == "length")
                if reader.calls.n_calls and (cut or reason == "stop"):
                    reason = "tool_calls"
                yield self.done(index, rest, reason)

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


class BlockAnswer(ApiAnswer):
    """One choice, in blocks. White space between thoughts and calls is no text."""

    def __init__(self, service: Service, choices: Sequence[ChoiceJob]) -> None:
        super().__init__(service, choices)
        self.blocks: list[AnswerBlock] = []
        self.finish_reason: str | None = None  # as OpenAI's chat has it; None before the end
        self._open: AnswerBlock | None = None
        self._space = ""  # in front of a text that may not come

    @abstractmethod
    def told(self, what: Literal["begin", "piece", "end"], block: AnswerBlock, piece: str = "") -> Iterable[bytes]:
        """The events of a block that begins, has grown by a piece, or ends."""

    def read(self, index: int, delta: Delta, round_: Round | None = None) -> Iterator[bytes]:
        if delta.thinking:
            yield from self._say("thinking", delta.thinking)
        for piece in delta.pieces:
            if isinstance(piece, TextPiece):
                yield from self._say("text", piece.text)
            elif isinstance(piece, CallStart):
                self._space = ""
                yield from self._begin("call", id=piece.id, name=piece.name)
            else:
                yield from self._more(piece.text)

    def done(self, index: int, delta: Delta, finish_reason: str) -> Iterator[bytes]:
        yield from self.read(index, delta)
        if self._space and not self.blocks:
            yield from self._begin("text")
            yield from self._more(self._space)
        self.finish_reason = finish_reason
        yield from self._end()

    def _say(self, kind: BlockKind, text: str) -> Iterator[bytes]:
        if self._open is None or self._open.kind != kind:
            self._space += text
            if self._space.isspace():
                return
            text, self._space = self._space, ""
            yield from self._begin(kind)
        yield from self._more(text)

    def _begin(self, kind: BlockKind, **own: str) -> Iterator[bytes]:
        yield from self._end()
        self._open = AnswerBlock(len(self.blocks), kind, **own)
        self.blocks.append(self._open)
        yield from self.told("begin", self._open)

    def _more(self, text: str) -> Iterable[bytes]:
        assert self._open is not None
        self._open.text += text
        return self.told("piece", self._open, text)

    def _end(self) -> Iterator[bytes]:
        if self._open is not None:
            yield from self.told("end", self._open)
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
