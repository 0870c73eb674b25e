"""What a drafter must provide. A drafter proposes tokens; it can never change the answer, only how fast it comes.

Being wrong is cheap, being *dishonest about randomness* is not: whether a draft token that was **sampled** is sent to
the target must not depend on which token came out (dropping unlikely samples would skew the law of what remains). So
``Plan.keep`` is asked before a sample is drawn, with a confidence computed from the distribution alone. Draft tokens
made deterministically, or with the target's own noise, may be dropped at will.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from localspec.backends.base import Context, Forward
from localspec.sampling.sampling import Row
from localspec.spec_decode.proposer import DrafterFailed as DrafterFailed
from localspec.spec_decode.proposer import Proposer as Proposer
from localspec.spec_decode.rounds import Draft, DraftToken, Round

SURE_COPY = 0.7  # confidence of a copy under which a draft model is asked instead, where nothing is weighed


class Plan:
    """The permission to draft in one round; drafters ask it token by token.

    This one weighs nothing: drafters are asked in the order in which they were loaded, and what they have is taken
    while there is room. Others weigh.

    Args:
        room: most tokens of the draft.
        copying: sources whose copies give way to a draft model's token where they are under ``SURE_COPY``.
        n_branches: most tokens of the draft outside of its chain.
    """

    gives_way = False  # whether the draft's end may be left out where draft tokens of other answers are worth more

    def __init__(self, room: int, copying: Collection[str] = (), n_branches: int = 0) -> None:
        self.room = room  # how many more tokens may be drafted in this round
        self._copying, self._n_branches = copying, n_branches

    def branching(self) -> Branching | None:
        """The permission to let the draft branch; None where that cannot pay."""
        return Branching(self._n_branches) if self._n_branches else None

    def order(self, sources: Sequence[str]) -> Sequence[str]:
        """In which order drafters are asked for the next token of the draft."""
        return sources

    def more(self, source: str, pending: int = 0, held: float | None = None) -> int:
        """Whether one more step of a drafter is worth its time; asked before the step.

        Args:
            source: the drafter's name.
            pending: tokens it must decode for the step; 0 when a step costs no pass of a model.
            held: confidence of a draft token that it has, and has not asked ``keep`` for: the step may change it.

        Returns:
            0 where it is not; else how many of the pending tokens to read before this is asked again for the rest.
        """
        return max(1, pending) if self.room > 0 else 0

    def width(self, source: str) -> int:
        """How many draft tokens a pass should make that takes a row for each (``DrafterInfo.rows_of_draft``); at least
        one."""
        return max(1, self.room)

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        """A pass over ``n_tokens`` tokens of the drafter's own model, and a draft token made of it, took so long."""

    def samples(self, source: str, confidence: float) -> bool:
        """Whether a draft token should be sampled from the draft's distribution, or be its most probable token; asked
        before ``keep``, where a request samples with fresh noise."""
        return True

    def nothing(self, source: str) -> None:
        """The drafter, asked for a draft token, has none."""

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        """Whether a draft token is worth a row of the target's pass; takes one of ``room``.

        ``confidence`` is the drafter's own estimate, in [0, 1], that its most probable token is right; ``sampled`` says
        that the draft token will be a sample instead. Returns the calibrated probability of acceptance if the token
        should be sent, else None.
        """
        if self.room <= 0 or (confidence < SURE_COPY and source in self._copying):
            return None
        self.room -= 1
        return confidence


class Branching:
    """The permission to add branches to a drafted chain, asked token by token. This one takes all there is room for."""

    def __init__(self, room: int) -> None:
        self.room = room

    def branch(self, draft: Draft, parent: int, source: str, confidence: float) -> float | None:
        """Whether another token that follows the draft token ``parent`` is worth a row of the target's pass.

        ``confidence`` is the drafter's own estimate that the token is right where those that follow ``parent`` already
        are not; as ever independent of the token, if it is sampled. Returns the probability of acceptance, given that
        ``parent`` is accepted, if it should be sent, else None.
        """
        if self.room <= 0:
            return None
        self.room -= 1
        return confidence


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What the rest needs to know of a drafter."""

    source: str  # its name in rounds and statistics: ``model``, ``ngram``, …
    name: str = ""  # what ``--draft`` calls it, where it loads no model; "" is its source
    runs_model: bool = False  # a draft token takes a pass of a model, of which there is a cost model; else nothing
    copies: bool = False  # it copies what it has read; an unsure copy can give way to a model's token
    one_pass: bool = False  # a pass of its model makes all of a draft, and not one token of it
    rows_of_draft: bool = False  # that pass has a row for each draft token, and costs as many; else it is one size
    own_tokens: bool = False  # its model reads the text in tokens of its own vocabulary, not in the target's
    as_text: bool = False  # its drafts are carried over as text: its likeliest tokens, never samples
    passes: float = 1.0  # of its model that a draft token takes on average
    taps: tuple[str, ...] = ()  # hidden states of the target that ``process`` brings, see ``Context.hidden``
    n_states: int = 0  # of the last tokens of a prompt, after how many it wants those states
    rate: float | None = None  # share of places at which its first token is right, as far as its file says

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.source)

    @property
    def is_draft_model(self) -> bool:
        """Whether it runs a model of its own over the text, and not over states of the target."""
        return self.runs_model and not self.taps

    @property
    def reads_text(self) -> bool:
        """Whether its context holds the text in the target's tokens: it can be read ahead, put aside and brought back.

        What decodes states of the target cannot read a text without it, and starts anew after a gap.
        """
        return self.runs_model and not self.taps and not self.own_tokens


class Drafter(ABC):
    """One source of draft tokens. Its resources belong to its maker: it closes no context."""

    info: DrafterInfo

    def clone(self, context: Context | None) -> Drafter:
        """Another one that knows what this one has learned, and has read nothing; ``context`` is what it decodes in, if
        it does, None this one's, in which the two take turns."""
        raise NotImplementedError(f"a drafter of {self.info.source} tokens cannot be cloned")

    def begin(  # noqa: B027 - optional hook
        self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None
    ) -> None:
        """A new answer to the prompt ``tokens`` begins; keep what earlier ones share with it.

        ``prediction`` is a text that the answer is likely to repeat, ``target`` the context that verifies the drafts:
        what a drafter decodes in it is gone by then.
        """

    def process(self, tokens: Sequence[int], forward: Forward) -> None:  # noqa: B027 - optional hook
        """The target decoded ``tokens``: in prefill, before ``begin``, or in a round, before ``accept``."""

    @abstractmethod
    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        """Draft what follows ``tokens``: everything settled, then what was drafted already in this round.

        Returns:
            At most ``plan.room`` draft tokens; empty when this drafter has nothing worth trying.

        Raises:
            DrafterFailed: it cannot go on; it is not asked again.
        """

    def accept(self, emitted: Sequence[int]) -> None:  # noqa: B027 - optional hook
        """The round is over: these tokens were settled."""


def proposed(source: str, confidence: float, position: int, plan: Plan, proposer: Proposer) -> list[DraftToken]:
    """The draft token at a position of the text, if the plan wants it; ``confidence`` is what ``proposer`` just
    returned."""
    if not confidence:
        return []
    sampled = proposer.has_fresh_noise and plan.samples(source, confidence)
    expected = plan.keep(source, confidence, sampled=sampled)
    if expected is None:
        return []
    token, dist = proposer.choose(position, sampled=sampled)
    prob = confidence if dist is None else dist.prob(token)
    return [DraftToken(token, source, prob, dist, expected)]


# How much to draft, and from which drafter: what the decoder asks of a controller.


class Controller(ABC):
    """Decides, round by round, how far to draft for one request; learns from every round."""

    def may_use(self, source: str) -> bool:
        """Whether a drafter may be asked at all; if not, it need not keep up with the conversation."""
        return True

    @abstractmethod
    def plan(
        self,
        room: int,
        n_past: int,
        *,
        hidden: Mapping[str, float] = MappingProxyType({}),
        lost: Set[str] = frozenset(),
    ) -> Plan:
        """The permission to draft in the next round.

        Args:
            room: most tokens that can be drafted within the token budget and the context.
            n_past: tokens in the target's memory.
            hidden: by source, the share [0, 1] of its steps that the target's passes hide; nothing of others.
            lost: sources of drafters that failed, and draft no more.
        """

    def observe(self, round_: Round, row: Row | None = None) -> None:  # noqa: B027 - optional hook
        """What a finished round cost and gained, which the next plan has to know; ``learn`` follows. ``row`` are the
        logits [n_vocab], or the largest, that the target chose its own token from."""

    @abstractmethod
    def learn(self, round_: Round) -> None:
        """Learn from a finished round, and note in it why it drafted as it did; perhaps after the next plan was made,
        while a device computes its pass."""

    @abstractmethod
    def explain(self) -> str:
        """Why there is, or is not, drafting: sentences for people, a line for each drafter."""
