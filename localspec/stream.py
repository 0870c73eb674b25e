"""What a request gives back: a ``RoundStream`` while it runs, a ``Reply`` when it is done."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from localspec.errors import Closed
from localspec.rounds import FinishReason, Round, SpecStats


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer.

    Attributes:
        text: verified text only; without the stop string that ended it, if one did.
        token_ids: the tokens behind it, an end token included.
        finish_reason: ``stop`` (end token or stop string), ``length`` (budget or context), or ``cancelled``.
        stats: see ``SpecStats``.
        model, draft, backend: what produced it.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: SpecStats
    model: str
    draft: list[str]
    backend: str

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of ``generate --format json``."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "model": self.model,
            "draft": self.draft,
            "backend": self.backend,
            "stats": self.stats.as_dict(),
        }


class Job:
    """One request on its way through the worker; ``put`` delivers Rounds, then a Reply or an exception."""

    def __init__(self, put: Callable[[Any], None]) -> None:
        self.put = put
        self.cancel = threading.Event()


class RoundStream(Iterator[Round]):
    """The rounds of one answer as they happen; after the last, ``reply`` holds the whole.

    Closing it, or dropping it, stops the engine within a round. ``reply`` is then what was said until there, with
    ``finish_reason`` ``cancelled``.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.job = Job(self._items.put)
        self._reply: Reply | None = None
        self._done = False

    def __iter__(self) -> RoundStream:
        return self

    def __next__(self) -> Round:
        if self._done:
            raise StopIteration
        item = self._next_item()
        if isinstance(item, Round):
            return item
        self._finish(item)
        raise StopIteration

    def _next_item(self) -> Any:
        while True:
            try:
                # A wait without a timeout cannot be interrupted by Ctrl-C on Windows.
                return self._items.get(timeout=1.0)
            except queue.Empty:
                continue

    def _finish(self, item: Any) -> None:
        self._done = True
        if isinstance(item, BaseException):
            raise item
        self._reply = item

    @property
    def reply(self) -> Reply:
        """The answer; waits for the end of the stream.

        Raises:
            LocalspecError: the request failed.
        """
        for _ in self:
            pass
        if self._reply is None:
            raise Closed("the request ended without an answer")
        return self._reply

    def close(self) -> None:
        """Stop decoding. Rounds not yet read are lost; ``reply`` has the text until here."""
        self.job.cancel.set()

    def __enter__(self) -> RoundStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.job.cancel.set()
