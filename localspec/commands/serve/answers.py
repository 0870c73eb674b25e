"""A request's answer in OpenAI's shape, whole or as events; ``chat`` and ``completions`` say how theirs differ."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from localspec.commands.serve.deltas import Delta
from localspec.commands.serve.events import event
from localspec.commands.serve.requests import AnswerOptions
from localspec.commands.serve.service import AnswerEvent, AnswerTask, Service
from localspec.runtime.stream import Reply

ROUND_EVENT = "localspec.round"


class ApiAnswer(ABC):
    """One request's answer; it may have several choices.

    The choices of its chunks are what everything is made of: streamed as they are, or added up to whole choices.

    Args:
        service: what answers.
        options: of the request.
        tasks: one for each choice.

    Attributes:
        prefix: of the identifier, as OpenAI has it.
        kind, chunk_kind: ``object`` of a whole answer, and of a piece of one.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, service: Service, options: AnswerOptions, tasks: Sequence[AnswerTask]) -> None:
        self.service = service
        self.options = options
        self._tasks = tasks
        self._id = f"{self.prefix}-{secrets.token_hex(14)}"
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._replies: list[Reply] = []

    @abstractmethod
    def begin(self, index: int) -> Iterable[dict[str, Any]]:
        """What the chunks of a choice begin with."""

    @abstractmethod
    def pieces(self, index: int, delta: Delta) -> Iterable[dict[str, Any]]:
        """What the chunks say of a delta."""

    @abstractmethod
    def end(self) -> dict[str, Any]:
        """What the last chunk of a choice says, besides the reason."""

    @abstractmethod
    def whole_choice(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """All that the chunks of a choice said, as one."""

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        pieces: list[list[dict[str, Any]]] = [[] for _ in self._tasks]
        async with aclosing(self.service.answers(self.options, self._tasks)) as happenings:
            async for happening in happenings:
                pieces[happening.index] += [*self._opening(happening.index), *self._choices(happening)]
        return await asyncio.to_thread(self._whole, pieces)

    def _whole(self, pieces: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        choices = [_choice(i, self.whole_choice(said), said[-1]["finish_reason"]) for i, said in enumerate(pieces)]
        return self._frame(self.kind) | {
            "choices": choices,
            "usage": self._usage(),
            "localspec": figures(self._replies),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""

        def chunk(name: str | None = None, **content: Any) -> bytes:
            return event(self._frame(self.chunk_kind) | {"choices": []} | content, name)

        usage = {"usage": None} if self.options.include_usage else {}
        async with aclosing(self.service.answers(self.options, self._tasks)) as happenings:
            async for happening in happenings:
                for choice in self._opening(happening.index):
                    yield chunk(choices=[choice], **usage)
                if happening.round is not None and self.options.rounds:
                    # OpenAI's clients do not look at an event's name, so it is also a chunk without choices.
                    own = {"choice": happening.index, "round": happening.round.as_event()}
                    yield chunk(ROUND_EVENT, localspec=own)
                for choice in self._choices(happening):
                    yield chunk(choices=[choice], **usage)
        if self.options.include_usage or self.options.rounds:
            yield chunk(usage=self._usage(), localspec=figures(self._replies))

    def _opening(self, index: int) -> Iterator[dict[str, Any]]:
        if index not in self._begun:
            self._begun.add(index)
            for piece in self.begin(index):
                yield _choice(index, piece)

    def _choices(self, happening: AnswerEvent) -> Iterator[dict[str, Any]]:
        if happening.delta:
            for piece in self.pieces(happening.index, happening.delta):
                yield _choice(happening.index, piece)
        if happening.reply is not None:
            self._replies.append(happening.reply)
            yield _choice(happening.index, self.end(), happening.finish_reason)

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.service.names[0],
            "system_fingerprint": self.service.fingerprint,
        }

    def _usage(self) -> dict[str, Any]:
        """OpenAI's usage. Predictions are draft tokens of any drafter; what the client sent as one is among them.

        Accepted are those that are in the answer, rejected those that the target refused. Neither is part of
        ``completion_tokens`` twice: an accepted one is a token of the answer, a rejected one is none.
        """
        prompts = {id(task.prompt): len(task.prompt) for task in self._tasks}  # several answers to one count it once
        prompt = sum(prompts.values())
        completion = sum(reply.stats.completion_tokens for reply in self._replies)
        accepted = sum(token.kind == "accepted" for reply in self._replies for token in reply.tokens)
        thought = sum(reply.stats.thinking_tokens for reply in self._replies)
        rejected = sum(reply.stats.num_draft_tokens - reply.stats.num_accepted_tokens for reply in self._replies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": self._replies[0].stats.cached_tokens if self._replies else 0,
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
                "reasoning_tokens": thought,
                "audio_tokens": 0,
            },
        }


def figures(replies: Sequence[Reply]) -> dict[str, Any]:
    """Our own part of an answer: its statistics, or a list of them where there are several replies."""
    first, last = replies[0], replies[-1]
    stats = [reply.stats.as_dict() for reply in replies]
    return {
        "stats": stats[0] if len(stats) == 1 else stats,
        "draft": last.draft,
        "backend": last.backend,
        "explanation": last.explanation,
        "seconds_waited": round(first.seconds_waited, 3),
    }


def _choice(index: int, piece: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, **piece, "logprobs": piece.get("logprobs"), "finish_reason": finish_reason}


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # OpenAI's own figure for "never"; JSON has no infinity
