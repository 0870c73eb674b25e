"""One answer in another API's shape, whole or as events; the other modules of this folder have the shapes."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from localspec.commands.serve.answers import figures
from localspec.commands.serve.apis.blocks import AnswerBlock, BlockReader, Change
from localspec.commands.serve.requests import AnswerOptions
from localspec.commands.serve.service import AnswerTask, Service
from localspec.runtime.stream import Reply


class BlockAnswer(ABC):
    """One answer.

    Args:
        service: what answers.
        options: of the request.
        task: what to answer.

    Attributes:
        blocks: what was said so far.
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
        """There at the end only."""
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
        """The answer in one piece."""
        async with aclosing(self._changes()) as batches:
            async for _ in batches:
                pass
        return await asyncio.to_thread(self.finished)  # some APIs repeat in an answer all that was sent

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        begun = False  # what fails before there is anything to tell has its own status
        async with aclosing(self._changes()) as batches:
            async for changes in batches:
                if not begun:
                    begun = True
                    for event in await asyncio.to_thread(list, self.begin()):
                        yield event
                for change in changes:
                    for event in self.change(change):
                        yield event
        for event in await asyncio.to_thread(list, self.end()):
            yield event

    async def _changes(self) -> AsyncGenerator[list[Change], None]:
        async with aclosing(self.service.answers(self._options, [self.task])) as happenings:
            async for happening in happenings:
                yield list(self._reader.read(happening.delta))
                if happening.reply is not None:
                    self._reply, self.finish_reason = happening.reply, happening.finish_reason
        yield list(self._reader.finish())

    def figures(self) -> dict[str, Any]:
        """What ``localspec`` in an answer says."""
        return figures([self.reply])


def identifier(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(14)}"
