"""How a draft model's logits become a draft token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
from localspec.spec_decode.verification import STREAM_DRAFT, STREAM_TARGET

if TYPE_CHECKING:
    from localspec.sampling.constraint import Constraint


# Tokens that may come instead of a draft token, with the share of each in the probability that another one comes.
Alternatives = Sequence[tuple[int, float]]
N_ALTERNATIVES = 3
_NOT_NUMBERS = "computed logits that are not numbers"


class DrafterFailed(Exception):
    """A drafter cannot go on; the answer can. ``str(error)`` says why, in a clause without a subject."""


class Rival(NamedTuple):
    """What else a draft model would propose at a position, drawn only once it is wanted.

    ``confidence`` is its own estimate, in [0, 1], that this is right where its first proposal is not; ``law`` what
    ``token`` (-1) is to be sampled from: that of the first proposal, without it. None where it is not sampled.
    """

    confidence: float
    token: int
    law: Distribution | None


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

    Attributes:
        has_fresh_noise: whether draft tokens may be sampled with noise of their own: at a temperature, without a seed.
        n_best: how many of the largest logits of a row it needs, see ``Context.decode``; 0 needs whole rows.
        rivals: by position, what else there was to choose; None does not look for it.
        drawn: every sample that was drawn, sent or not, with the law it was drawn from; None does not keep them.
        alternatives: by position, what may come instead of the tokens drafted last; None does not look for it.
    """

    def __init__(
        self, params: SamplingParams, noise: Noise, constraint: Constraint | None = None, n_vocab: int | None = None
    ) -> None:
        self.params = params
        self.noise = noise
        self.constraint = constraint
        self.n_vocab = n_vocab
        self.n_best = params.n_best if constraint is None else 0
        self._is_greedy, self._edits_logits = params.greedy, params.edits_logits  # asked for with every row
        self.has_fresh_noise = not self._is_greedy and params.seed is None
        self.rivals: dict[int, Rival] | None = None
        self.drawn: list[tuple[int, Distribution]] | None = None
        self.alternatives: dict[int, Alternatives] | None = None
        self._choice: int | Distribution = 0
        self._row: tuple[Row, Ids | None, float] | None = None  # greedily, while rivals or alternatives are wanted
        self._n_sampled = 0

    def n_legal(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first, the target takes and the grammar allows here."""
        if self.n_vocab is not None and tokens and not 0 <= min(tokens) <= max(tokens) < self.n_vocab:
            n_vocab = self.n_vocab
            tokens = tokens[: next(i for i, token in enumerate(tokens) if not 0 <= token < n_vocab)]
        return len(tokens) if self.constraint is None else self.constraint.n_legal(tokens)

    def extend(self, token: int) -> bool:
        """The token is part of the draft. Returns whether no other can follow it."""
        if self.constraint is None:
            return False
        self.constraint.advance(token)
        return self.constraint.complete

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
        if self.n_vocab is not None and len(row) > self.n_vocab:
            row = row[: self.n_vocab]
        if not self._is_greedy and self.constraint is None:
            return self._sure_of_law(row, history, ids)
        best, confidence = best_and_certainty(row)
        if not math.isfinite(row[best]):  # NaN anywhere is the maximum
            raise DrafterFailed(_NOT_NUMBERS)
        if self.constraint is not None:
            row = self.constraint.masked(row, ids)
            if row.max() == -math.inf:  # a trimmed vocabulary has nothing that may come here
                return 0.0
        if self._is_greedy:
            if self.constraint is not None or self._edits_logits:
                row = edit_logits(row, history, self.params, ids)
                best, confidence = best_and_certainty(row)
                confidence = confidence if row[best] > -math.inf else 0.0
            self._choice = best if ids is None else int(ids[best])
            is_wanted = self.rivals is not None or self.alternatives is not None
            self._row = (row, ids, confidence) if is_wanted else None
            return confidence
        return self._sure_of_law(row, history, ids)

    def _sure_of_law(self, row: Row, history: Sequence[int], ids: Ids | None) -> float:
        try:
            q = draft_distribution(row, history, self.params, ids)
        except UsageError:  # banned, all of them; the target may have more
            return 0.0
        except NotNumbers:
            raise DrafterFailed(_NOT_NUMBERS) from None
        self._choice = q
        return q.top

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
            rival = self._second_best() if self._is_greedy else self._without(token, position, law is not None)
            if rival is not None:
                self.rivals[position] = rival
        if self.alternatives is not None:
            self.alternatives[position] = self._others(token, position)
        return token, law

    def draw(self, rival: Rival) -> int:
        """The token of a rival, sampled where it has a law: the second draw of a distribution, without replacement."""
        if rival.law is None:
            return rival.token
        return self._drawn_from(rival.law)

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
