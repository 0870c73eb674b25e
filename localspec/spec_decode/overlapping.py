"""Rounds finished and handed on while a device computes the next pass, of the target or of a draft model.

A variant of the loop for one answer: what a finished round leaves to be done is held until a pass has begun
(``Context.meanwhile``), and takes no time of the answer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localspec.backends.base import Context
from localspec.spec_decode.rounds import Round


class RoundOverlap:
    """Holds the last round until one of these contexts has begun a pass; ``hand_on`` finishes it and hands it on."""

    def __init__(self, contexts: Sequence[Context], hand_on: Callable[[Round], None]) -> None:
        self._contexts = contexts
        self._hand_on = hand_on
        self._held: Round | None = None
        self._error: BaseException | None = None

    def hold(self, round_: Round) -> None:
        """Hand it on within the next pass, or before one that is not computed by a device of its own."""
        self._held = round_
        for context in self._contexts:
            context.meanwhile = self._release

    def settle(self) -> None:
        """The pass is over: hand on the round that is held, if it still is; what that raises is raised here, not in a
        pass."""
        self._release()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _release(self) -> None:
        for context in self._contexts:
            context.meanwhile = None
        round_, self._held = self._held, None
        try:
            if round_ is not None:
                self._hand_on(round_)
        except BaseException as error:
            self._error = error
