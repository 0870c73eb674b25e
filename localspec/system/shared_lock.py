"""A lock that many hold together and one alone: readers do not wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedLock:
    """Held by any number of threads that share it, or by one alone; while one waits for that, no more may share it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_sharing = self._n_alone = 0
        self._is_alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold it with others; not within itself."""
        with self._changed:
            self._changed.wait_for(lambda: not self._n_alone)
            self._n_sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_sharing -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold it alone, once all others have let it go."""
        with self._changed:
            self._n_alone += 1
            try:
                self._changed.wait_for(lambda: not (self._n_sharing or self._is_alone))
            except BaseException:
                self._n_alone -= 1
                self._changed.notify_all()
                raise
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._n_alone -= 1
                self._is_alone = False
                self._changed.notify_all()
