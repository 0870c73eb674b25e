"""Keeps the engines' log out of the user's terminal: it all comes here, and is dropped unless asked for."""

from __future__ import annotations

import sys
from collections import deque


class EngineLog:
    """A sink for engine messages.

    Attributes:
        verbose: print messages to standard error.
        recent: the last messages, for error reports.
    """

    def __init__(self) -> None:
        self.verbose = False
        self.recent: deque[str] = deque(maxlen=50)

    def write(self, text: bytes | None) -> None:
        """Called by an engine, from any of its threads; must never raise into C."""
        try:
            message = (text or b"").decode("utf-8", "replace")
            self.recent.append(message)
            if self.verbose:
                sys.stderr.write(message)
        except Exception:  # the caller is C code, which cannot catch it
            return


engine_log = EngineLog()
