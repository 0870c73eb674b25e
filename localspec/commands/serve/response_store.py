"""Answers of ``/v1/responses`` that later requests may go on from, by ``previous_response_id``."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_RESPONSES, MAX_BYTES = 1000, 64 << 20
"""As much as may be kept for requests that are being read (``ServerSettings.bodies_bytes``)."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer.

    Attributes:
        response: as it was sent.
        messages: the conversation up to and with it, without instructions.
        owner: whose it is, see ``access.Client``.
    """

    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    owner: str = ""


class ResponseStore:
    """Keeps answers in memory; those used least recently go first. Used from any thread.

    Args:
        max_responses: how many.
        max_bytes: of all of them together, as JSON.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max = max_responses, max_bytes
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    def put(self, name: str, stored: StoredResponse) -> None:
        n_bytes = len(json.dumps([stored.response, stored.messages]))
        with self._lock:
            self._kept[name] = stored, n_bytes
            self._n_bytes += n_bytes
            while len(self._kept) > self._max[0] or self._n_bytes > self._max[1]:
                self._n_bytes -= self._kept.popitem(last=False)[1][1]

    def get(self, name: str) -> StoredResponse | None:
        with self._lock:
            if name not in self._kept:
                return None
            self._kept.move_to_end(name)
            return self._kept[name][0]

    def item(self, name: str, may_read: Callable[[str], bool]) -> dict[str, Any] | None:
        """An item of an answer that is kept, by its id, which is made of the answer's; ``may_read``: of its owner."""
        stored = self.get(f"resp_{name.partition('_')[2][:-4]}")
        items = stored.response["output"] if stored is not None and may_read(stored.owner) else ()
        return next((item for item in items if item["id"] == name), None)

    def remove(self, name: str) -> bool:
        """Whether it was there."""
        with self._lock:
            if name not in self._kept:
                return False
            self._n_bytes -= self._kept.pop(name)[1]
            return True
