"""Where a run stands, for who watches it, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localspec.model_files.head_card import CurvePoint, HeadCard

if TYPE_CHECKING:
    from localspec.training.worth import Worth

Phase = Literal["loading", "examples", "training", "testing", "measuring", "waiting"]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands.

    Attributes:
        phase: what is done now; ``waiting``: others answer, and it steps aside.
        text: the same in words.
        fraction: of the whole work that is done; None while that cannot be said.
        seconds_left: of work.
        n_answers, n_places: passages on disk, and places in them.
        n_bytes: what they take on disk.
        rate: tokens per second, of what is done now.
        tokens_seen: lessons trained on, repetitions counted.
        curve: acceptance of held-out places so far; see ``head_card.CurvePoint``.
    """

    phase: Phase
    text: str = ""
    fraction: float | None = None
    seconds_left: float | None = None
    n_answers: int = 0
    n_places: int = 0
    n_bytes: int = 0
    rate: float = 0.0
    tokens_seen: int = 0
    curve: tuple[CurvePoint, ...] = ()


Report = Callable[[Standing], None]


@dataclass(frozen=True, slots=True)
class Distilled:
    """What came of a run.

    Attributes:
        path: the head file in the run's folder.
        kept: where it was put for drafters to find it; None where it does not pay here.
        card: all about it, the learning curve too.
        worth: tokens per second with and without it; None where that could not be measured.
    """

    path: Path
    kept: Path | None
    card: HeadCard
    worth: Worth | None
