"""How much to draft, and from which drafter: what the decoder asks of a controller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from localspec.sampling.sampling import Row, SamplingParams
from localspec.spec_decode.drafters.base import Branching, Plan
from localspec.spec_decode.rounds import Round


class Controller(ABC):
    """Decides, round by round, how far to draft; learns from every round.

    Attributes:
        gives_way: whether the end of a draft may be left out where draft tokens of other answers are worth more.
    """

    gives_way = False

    def begin(self, params: SamplingParams, n_prompt: int) -> None:  # noqa: B027 - optional hook
        """A new request starts."""

    def enter(self, *, thinks: bool) -> None:  # noqa: B027 - optional hook
        """What comes next is thinking, or the answer; told before every plan."""

    def hide(self, shares: Mapping[str, float]) -> None:  # noqa: B027 - optional hook
        """What a step of a drafter takes is hidden, as to this share, behind the target's passes; before every plan.

        Args:
            shares: by source, in [0, 1]; nothing is hidden of others.
        """

    def may_use(self, source: str) -> bool:
        """Whether a drafter may be asked at all, as things stand; if not, it need not keep up with the conversation."""
        return True

    @abstractmethod
    def plan(self, room: int, n_past: int) -> Plan:
        """The permission to draft in the next round.

        Args:
            room: most tokens that can be drafted within the token budget and the context.
            n_past: tokens in the target's memory.
        """

    def branching(self) -> Branching | None:
        """The permission to let the draft of the plan just made branch; None where that cannot pay."""
        return None

    def watch(self, row: Row) -> None:  # noqa: B027 - optional hook
        """The logits [n_vocab], or the largest, that the target just chose a token from; ``update`` follows."""

    def lose(self, source: str) -> None:  # noqa: B027 - optional hook
        """A drafter failed and will draft no more."""

    def book(self, round_: Round) -> None:  # noqa: B027 - optional hook
        """What a finished round cost and gained, which the next plan has to know; ``update`` follows."""

    @abstractmethod
    def update(self, round_: Round) -> None:
        """Learn from a finished round, and note in it why it drafted as it did.

        Where a device computes passes by itself, after the next plan was made: while the first pass by it runs.
        """

    @abstractmethod
    def explain(self) -> str:
        """Why there is, or is not, drafting: sentences for people, a line for each drafter."""
