"""What a drafter must provide, and what it is given. A drafter proposes tokens; it can never change the answer, only
how fast it comes.

Being wrong is cheap, being *dishonest about randomness* is not: whether a draft token that was **sampled** is sent to
the target must not depend on which token came out (dropping unlikely samples would skew the law of what remains). So
``Plan.keep`` is asked before a sample is drawn, with a confidence computed from the distribution alone. Draft tokens
made deterministically, or with the target's own noise, may be dropped at will.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from localspec.backends.base import Context, Forward
from localspec.errors import UsageError
from localspec.sampling.sampling import (
    Distribution,
    Ids,
    Noise,
    NotNumbers,
    Row,
    SamplingParams,
    best_and_certainty,
    draft_distribution,
    edit_logits,
    top_k_ids,
)
from localspec.spec_decode.rounds import Draft, DraftToken, Round
from localspec.spec_decode.verification import STREAM_DRAFT, STREAM_TARGET

if TYPE_CHECKING:
    from localspec.sampling.constraint import Constraint


class DrafterFailed(Exception):
    """A drafter cannot go on; the answer can. ``str(error)`` says why, in a clause without a subject."""


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What the rest needs to know of a drafter."""

    source: str  # its name in rounds and statistics: ``model``, ``ngram``, …
    name: str = ""  # what ``--draft`` calls it, where it loads no model; "" is its source
    runs_model: bool = False  # a draft token takes a pass of a model, which has a cost model; else nothing
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
            DrafterFailed, EngineError: it cannot go on; it is not asked again.
            ContextFull: it has no room now.
        """

    def accept(self, emitted: Sequence[int]) -> None:  # noqa: B027 - optional hook
        """The round is over: these tokens were settled."""


# How far to draft: the permission that drafters ask token by token.

SURE_COPY = 0.7  # confidence of a copy under which a draft model is asked instead, where nothing is weighed


@dataclass
class Plan:
    """The permission to draft in one round; drafters ask it token by token.

    This one weighs nothing: drafters are asked in the order in which they were loaded, and what they have is taken
    while there is room. Others weigh.

    Args:
        room: how many more tokens may be drafted in this round.
        copying: sources whose copies give way to a draft model's token where they are under ``SURE_COPY``.
        n_branches: most tokens of the draft outside of its chain.
    """

    room: int
    copying: Collection[str] = ()
    n_branches: int = 0
    # Whether the draft's end may be left out where draft tokens of other answers are worth more.
    gives_way: ClassVar[bool] = False

    def branching(self) -> Branching | None:
        """The permission to let the draft branch; None where that cannot pay."""
        return Branching(self.n_branches) if self.n_branches else None

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
        """Whether a draft token should be a sample, or the most probable one; asked before ``keep``, where a request
        samples with fresh noise."""
        return True

    def nothing(self, source: str) -> None:
        """The drafter, asked for a draft token, has none."""

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        """Whether a draft token is worth a row of the target's pass; takes one of ``room``.

        ``confidence`` is the drafter's own estimate, in [0, 1], that its most probable token is right; ``sampled`` says
        that the draft token will be a sample instead. Returns the calibrated probability of acceptance if the token
        should be sent, else None.
        """
        if self.room <= 0 or (confidence < SURE_COPY and source in self.copying):
            return None
        self.room -= 1
        return confidence


@dataclass
class Branching:
    """The permission to add branches to a drafted chain, asked token by token. This one takes all there is room for."""

    room: int

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


# How a draft model's logits become a draft token.

# Tokens that may come instead of a draft token, with the share of each in the probability that another one comes.
Alternatives = Sequence[tuple[int, float]]
N_ALTERNATIVES = 3
_NOT_NUMBERS = "computed logits that are not numbers"


class Rival(NamedTuple):
    """What else a draft model would propose at a position, drawn only once it is wanted."""

    confidence: float  # the model's own estimate, in [0, 1], that this is right where its first proposal is not
    token: int  # -1 where it is to be sampled
    law: Distribution | None  # what it is to be sampled from: that of the first proposal, without it


class Proposer:
    """Turns logits into draft tokens in the way that the request's verification accepts most often.

    Drafters need not know about sampling: they ask ``confidence`` of a row, and then ``choose``.

    * Greedy: the argmax.
    * With a fixed seed: the draft's own distribution q, drawn with the *target's* noise. Where q and p are alike, the
      same noise picks the same token (a Gumbel coupling); and since the target's draw does not depend on the draft, the
      text is a function of the seed alone.
    * Without a seed: a sample from q with noise of its own, for rejection sampling, which accepts it with probability
      sum(min(p, q)); or the most probable token, accepted with p(x). Which is more depends on how alike p and q are and
      how peaked; the plan says which to take.

    Where the answer follows a grammar, q is masked by it as the target's p is: so a sampled token stays honest about
    its law. For the same reason what the target has no row for is cut off before q is made.

    Args:
        params, noise: the request's.
        constraint: the grammar that the answer follows.
        n_vocab: how many token ids the target takes; None is as many as the draft model.
    """

    def __init__(
        self, params: SamplingParams, noise: Noise, constraint: Constraint | None = None, n_vocab: int | None = None
    ) -> None:
        self.params = params
        self.noise = noise
        self.constraint = constraint
        self.n_vocab = n_vocab
        # How many of the largest logits of a row it needs, see ``Context.decode``; 0 needs whole rows.
        self.n_best = params.n_best if constraint is None else 0
        # Whether draft tokens may be sampled with noise of their own: at a temperature, without a seed.
        self.has_fresh_noise = not params.greedy and params.seed is None
        # What is kept only where it is not None: by position what else there was to choose, and what may come instead
        # of the tokens drafted last; every sample that was drawn, sent or not, with the law it was drawn from.
        self.rivals: dict[int, Rival] | None = None
        self.alternatives: dict[int, Alternatives] | None = None
        self.drawn: list[tuple[int, Distribution]] | None = None
        self._choice: int | Distribution = 0
        self._row: tuple[Row, Ids | None, float] | None = None  # greedily, while rivals or alternatives are wanted
        self._n_sampled = 0

    def n_legal(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first, the target takes and the grammar allows here."""
        if self.n_vocab is not None and tokens and not 0 <= min(tokens) <= max(tokens) < self.n_vocab:
            n_vocab = self.n_vocab
            tokens = tokens[: next(i for i, token in enumerate(tokens) if not 0 <= token < n_vocab)]
        return len(tokens) if self.constraint is None else self.constraint.n_legal(tokens)

    def confidence(self, row: Row, history: Sequence[int], ids: Ids | None = None) -> float:
        """The draft's confidence [0, 1] in the token that ``choose`` would make; independent of fresh randomness. 0:
        the request bans all that the draft model could propose.

        Args:
            row: the draft model's logits [n], which can be more or fewer than the target's.
            history: the tokens before the one to draft.
            ids: the target's tokens that the logits belong to, increasing [n]; None is 0, 1, 2, …

        Raises:
            DrafterFailed: the logits are not numbers.
        """
        greedy, constraint = self.params.greedy, self.constraint
        if self.n_vocab is not None and len(row) > self.n_vocab:
            row = row[: self.n_vocab]
        if greedy or constraint is not None:
            best, confidence = best_and_certainty(row)
            if not math.isfinite(row[best]):  # NaN anywhere is the maximum
                raise DrafterFailed(_NOT_NUMBERS)
        if constraint is not None:
            row = constraint.masked(row, ids)
            if row.max() == -math.inf:  # a trimmed vocabulary has nothing that may come here
                return 0.0
        if not greedy:
            try:
                self._choice = draft_distribution(row, history, self.params, ids)
            except UsageError:  # banned, all of them; the target may have more
                return 0.0
            except NotNumbers:
                raise DrafterFailed(_NOT_NUMBERS) from None
            return self._choice.top
        if constraint is not None or self.params.edits_logits:
            row = edit_logits(row, history, self.params, ids)
            best, confidence = best_and_certainty(row)
            confidence = confidence if row[best] > -math.inf else 0.0
        self._choice = best if ids is None else int(ids[best])
        is_wanted = self.rivals is not None or self.alternatives is not None
        self._row = (row, ids, confidence) if is_wanted else None
        return confidence

    def choose(self, position: int, *, sampled: bool = True) -> tuple[int, Distribution | None]:
        """The draft token for the row last given to ``confidence``, and the law it was sampled from, if it was."""
        choice, law = self._choice, None
        if isinstance(choice, int):
            token = choice
        elif not self.has_fresh_noise:
            token = choice.sample(self.noise, position, STREAM_TARGET)
        elif sampled:
            token, law = self._drawn_from(choice), choice
        else:
            token = choice.argmax()
        if self.rivals is not None:
            rival = self._second_best() if self.params.greedy else self._without(token, position, law is not None)
            if rival is not None:
                self.rivals[position] = rival
        if self.alternatives is not None:
            self.alternatives[position] = self._others(token, position)
        return token, law

    def draw(self, rival: Rival) -> int:
        """The token of a rival, sampled where it has a law: the second draw of a distribution, without replacement."""
        return rival.token if rival.law is None else self._drawn_from(rival.law)

    def _second_best(self) -> Rival | None:
        if self._row is None:
            return None
        row, ids, confidence = self._row
        best = int(np.argmax(row))
        others = [
            start + int(np.argmax(part)) for start, part in ((0, row[:best]), (best + 1, row[best + 1 :])) if len(part)
        ]
        if not others or confidence >= 1.0:
            return None
        second = max(others, key=lambda at: float(row[at]))
        share = confidence * math.exp(float(row[second] - row[best])) / (1.0 - confidence)
        return Rival(min(1.0, share), second if ids is None else int(ids[second]), None)

    def _without(self, token: int, position: int, sampled: bool) -> Rival | None:
        law = self._choice
        if isinstance(law, int) or len(law.ids) < 2:
            return None
        law = law.minus(Distribution(np.array([token]), np.ones(1)))
        if sampled:
            return Rival(law.top, -1, law)
        # With a seed the target's own noise chooses, as it chose the first.
        second = law.argmax() if self.params.seed is None else law.sample(self.noise, position, STREAM_TARGET)
        return Rival(law.prob(second), second, None)

    def _drawn_from(self, law: Distribution) -> int:
        # Addressed by count: after a rejection a position is drafted again, perhaps only because of what the controller
        # learned from the token before. Drawn with the same noise, the new one would not follow q given that.
        self._n_sampled += 1
        token = law.sample(self.noise, self._n_sampled, STREAM_DRAFT)
        if self.drawn is not None:
            self.drawn.append((token, law))
        return token

    def _others(self, token: int, position: int) -> Alternatives:
        choice = self._choice
        if isinstance(choice, int):
            assert self._row is not None  # kept where alternatives are wanted
            row, ids, _ = self._row
            near = top_k_ids(row, N_ALTERNATIVES + 1)
            weights = np.exp(row[near].astype(np.float64) - float(row.max()))
            choice = Distribution(near if ids is None else ids[near], weights)
        left = choice.ids != token
        ids, probs = choice.ids[left], choice.probs[left]
        if not len(ids):
            return ()
        if self.params.seed is not None and not self.params.greedy:
            # The target draws with this noise too: what comes second with it is what it will most likely say instead.
            second = Distribution(ids, probs).sample(self.noise, position, STREAM_TARGET)
            return ((second, 0.5),)
        best = np.argsort(-probs, kind="stable")[:N_ALTERNATIVES]
        return [(int(ids[i]), float(probs[i] / probs.sum())) for i in best]


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

Shares = Mapping[str, float]  # in [0, 1], by source
NO_SHARES: Shares = MappingProxyType({})


class Controller(ABC):
    """Decides, round by round, how far to draft for one request; learns from every round."""

    def may_use(self, source: str) -> bool:
        """Whether a drafter may be asked at all; if not, it need not keep up with the conversation."""
        return True

    @abstractmethod
    def plan(self, room: int, n_past: int, *, hidden: Shares = NO_SHARES, lost: Set[str] = frozenset()) -> Plan:
        """The permission to draft in the next round.

        Args:
            room: most tokens that can be drafted within the token budget and the context.
            n_past: tokens in the target's memory.
            hidden: of the steps of a source, how many the target's passes hide; none of others.
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
