"""The same text in another engine, in idle time: is the engine that answers right, and the faster one?

The check before the first answer compares an engine with itself. What all of its kernels get wrong alike shows only
against another engine; loading that takes seconds and as much memory again, so it waits for idle time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from localspec.backends import trust
from localspec.backends.base import Model
from localspec.errors import Cancelled
from localspec.system.memory import read_memory
from localspec.system.steps import Steps

ROOM = 1.3
"""Free memory, in sizes of the file, under which no second copy of a model is loaded beside the first."""

Compare = Callable[[Model, Model], Steps[None]]


class SecondOpinion:
    """Another installed engine, compared with the one that a model is loaded with.

    Args:
        model: the model that answers.
        path: its file as the user named it.
        options: what it was loaded with.
        refuse: called with a line if the engine turns out to be wrong.
        compare: what else to do with a model that is right, on the engine that answers and on the other.
        compared: whether ``compare`` has found what it looks for.
    """

    def __init__(
        self,
        model: Model,
        path: Path,
        options: dict[str, Any],
        refuse: Callable[[str], None],
        compare: Compare,
        compared: bool,
    ) -> None:
        self.model, self.path, self.options, self.refuse = model, path, options, refuse
        self.compare, self.compared = compare, compared

    @property
    def waits(self) -> bool:
        """Whether there is something to find out."""
        if self.model.capabilities.batch_invariant or self.model.path != self.path:
            return False
        if not trust.other_engines(self.model):
            return False
        verdict = self._verdict()
        return verdict is not None and bool(verdict["holds"]) and ("waits" in verdict or not self.compared)

    def steps(self, stopped: Callable[[], bool]) -> Steps[None]:
        """Load the other engine's model, compare, measure, remember.

        Args:
            stopped: asked while the model is loaded.

        Raises:
            Cancelled: ``stopped`` was true.
        """
        if read_memory().available < ROOM * self.model.size_bytes:
            return
        other = trust.load_elsewhere(self.model, self.path, self.options, lambda fraction: not stopped())
        if other is None:
            if stopped():
                raise Cancelled("loading was stopped")
            self._settle(trust.settled(self._verdict() or {}))
            return
        try:
            yield
            yield from self._ask(other)
        finally:
            other.close()

    def _ask(self, other: Model) -> Steps[None]:
        verdict = self._verdict()
        if verdict is None:
            return
        if "waits" in verdict:
            verdict = yield from trust.comparing_verdict(self.model, other, verdict)
            self._settle(verdict)
        if not verdict["holds"]:
            self.refuse(
                f"{self.model.engine} gives wrong results for {self.path.name} ({verdict['why']}): "
                "answers may be wrong. Start again to use another engine or a repacked copy of the file"
            )
        elif not self.compared:
            yield from self.compare(self.model, other)

    def _key(self) -> dict[str, str]:
        return trust.verdict_key(self.model.backend, self.options, trust.fingerprint(self.path))

    def _verdict(self) -> dict[str, Any] | None:
        return trust.verdicts().get(self._key())

    def _settle(self, verdict: dict[str, Any]) -> None:
        if verdict:
            trust.verdicts().put(self._key(), verdict)
