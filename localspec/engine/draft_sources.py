"""What ``--draft NAME`` stands for: plugins of the group ``localspec.drafters``; see docs/plugins.md.

A plugin's object is a callable that returns a ``Drafter`` which needs no file, or a ``DraftSource``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localspec.backends.base import Context, Model
from localspec.controllers.calibration import WHOLE, PassKind
from localspec.errors import PluginError, UsageError
from localspec.spec_decode.drafters.base import Drafter
from localspec.system.plugins import DRAFTERS, load, offered


@dataclass(frozen=True)
class DraftWeights:
    """Loaded weights that draft by passes of their own.

    Attributes:
        model: the weights.
        new_context: makes the memory of one answer, for a text of so many tokens.
        drafter: makes the drafter that decodes in such a memory, with its name in rounds and statistics.
        passes: which passes are timed for the cost model, given such a memory.
        close: frees the weights; safe to call twice, after their memories.
    """

    model: Model
    new_context: Callable[[int], Context]
    drafter: Callable[[Context, str], Drafter]
    close: Callable[[], None]
    passes: Callable[[Context], PassKind] = lambda context: WHOLE


@dataclass(frozen=True)
class FoundDraft:
    """A file to draft with: what ``--draft`` calls it, and what people do ("" is its source's name)."""

    path: Path
    spec: str
    name: str = ""


class DraftSource:
    """A kind of drafter that loads weights.

    Attributes:
        name: its own, of its entry point.
        only_one: whether two of it, of different files, are refused.
    """

    name: str
    only_one = False

    def check(self, argument: str) -> None:
        """Refuse, with ``UsageError``, what follows the colon in ``--draft NAME:ARGUMENT``."""
        raise UsageError(f"--draft {self.name} takes nothing after a colon, not {argument}")

    def takes(self, path: Path) -> bool:
        """Whether a file that ``--draft`` names is one of this kind."""
        return False

    def automatic(self, target: Model) -> Iterator[str]:
        """What ``--draft auto`` loads of this kind for a target, as ``--draft`` calls it."""
        yield from ()

    def find(self, argument: str, target: Model) -> FoundDraft:
        """The file for a target, or ``LocalspecError``; ``argument`` follows the colon, or is a path, or empty."""
        raise NotImplementedError

    def load(
        self,
        path: Path,
        target: Model,
        *,
        backend: str | None,
        n_threads: int | None,
        n_gpu_layers: int | None,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> DraftWeights:
        """Load a file that was found for a target.

        Args:
            path, target: of ``find``.
            backend: the engine that was asked for; None or "auto" leaves it open.
            n_threads: CPU threads; None takes the physical cores.
            n_gpu_layers: as for ``backends.load``.
            say: takes a line before long work; an exception from it ends the loading.
            warn: takes remarks that a user should keep.

        Raises:
            LocalspecError: it does not fit, is damaged, or the engine cannot compute it.
        """
        raise NotImplementedError


def is_free(name: str) -> bool:
    """Whether a name for ``--draft`` is that of a drafter that needs no file. Raises ``PluginError``."""
    return name in offered(DRAFTERS) and not isinstance(load(DRAFTERS, name), DraftSource)


def free_drafter(name: str) -> Drafter:
    """A new drafter of a name that ``is_free``. Raises ``PluginError`` where the plugin makes none."""
    drafter = load(DRAFTERS, name)()
    if not isinstance(drafter, Drafter):
        raise PluginError(f"the plugin {name!r} returns {type(drafter).__name__}, which is no localspec drafter")
    return drafter


def draft_source(name: str) -> DraftSource | None:
    """The kind of drafter that a name stands for, if one that loads weights. Raises ``PluginError``."""
    found = load(DRAFTERS, name) if name in offered(DRAFTERS) else None
    return found if isinstance(found, DraftSource) else None


def draft_sources(warn: Callable[[str], None] = lambda line: None) -> Iterator[DraftSource]:
    """All kinds of drafters that load weights; ``warn`` takes a line about each that cannot be imported."""
    for name in offered(DRAFTERS):
        try:
            found = draft_source(name)
        except PluginError as error:
            warn(str(error))
            continue
        if found is not None:
            yield found
