"""What happens in a round of speculative decoding, as data: ``Draft`` -> ``Verdict`` -> ``Round`` -> ``SpecStats``.

``Draft`` is in ``draft``; it can be imported from here.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal, overload

from localspec.sampling.sampling import Distribution, TokenLogprobs

# A draft: tokens that are proposed to the target together, as a chain or as a tree.


@dataclass(frozen=True, slots=True)
class DraftToken:
    """One token of a draft.

    Attributes:
        id: token id.
        source: the drafter that made it, e.g. ``"model"`` or ``"ngram"``.
        prob: the drafter's own confidence in [0, 1]; a model's probability, an n-gram's estimate.
        dist: the distribution the token was *sampled* from; None when it was chosen deterministically (a point mass).
        expected: the controller's calibrated probability that it is accepted, given that the ones before it were.
    """

    id: int
    source: str
    prob: float
    dist: Distribution | None = None
    expected: float = 0.0


class Draft(Sequence[DraftToken]):
    """The draft tokens of one round; empty means plain decoding.

    A draft is a chain, each token behind the one before it, unless it is made to branch: then it is a tree, of which
    the target accepts one path. A token comes after the one that it follows, and no two that follow the same are alike.

    Args:
        tokens: the draft tokens.
        parents: which of them each follows, as for ``append``; None is a chain.
    """

    __slots__ = ("_parents", "_tokens")

    def __init__(self, tokens: Sequence[DraftToken] = (), parents: Sequence[int] | None = None) -> None:
        self._tokens: list[DraftToken] = [] if parents is not None else list(tokens)
        self._parents: list[int] | None = None  # of a chain nothing is kept
        for token, parent in zip(tokens, parents or (), strict=parents is not None):
            self.append(token, parent)

    def first(self, n: int) -> Draft:
        """The first n draft tokens."""
        if n >= len(self):
            return self
        return Draft(self._tokens[:n], None if self._parents is None else self._parents[:n])

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self._tokens]

    @property
    def branches(self) -> bool:
        """Whether it is a tree, and no chain."""
        return self._parents is not None

    @property
    def parents(self) -> list[int]:
        """For each draft token the index of the one that it follows; -1 is the last settled token."""
        return list(range(-1, len(self._tokens) - 1)) if self._parents is None else self._parents

    @property
    def depths(self) -> list[int]:
        """For each draft token how many come before it on its path."""
        if self._parents is None:
            return list(range(len(self._tokens)))
        depths: list[int] = []
        for parent in self._parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def children(self, index: int) -> Sequence[int]:
        """The draft tokens that follow a draft token, or with -1 the last settled one: indices, in order."""
        if self._parents is None:
            return range(index + 1, min(index + 2, len(self._tokens)))
        return [i for i, parent in enumerate(self._parents) if parent == index]

    def path(self, index: int) -> list[int]:
        """The draft tokens from the first one down to this: indices; none for -1."""
        if self._parents is None:
            return list(range(index + 1))
        path: list[int] = []
        while index >= 0:
            path.append(index)
            index = self._parents[index]
        return path[::-1]

    def append(self, token: DraftToken, parent: int | None = None) -> None:
        """Add a draft token.

        Args:
            token: the draft token.
            parent: index of the draft token that it follows; -1 is the last settled token, None the last draft token.

        Raises:
            ValueError: there is no such draft token, or what follows it already is the same token.
        """
        last = len(self._tokens) - 1
        if parent is not None and parent != last and self._parents is None:
            self._parents = self.parents
        if self._parents is not None:
            parent = last if parent is None else parent
            if not -1 <= parent <= last:
                raise ValueError(f"no draft token {parent} to follow: there are {last + 1}")
            if any(self._tokens[child].id == token.id for child in self.children(parent)):
                raise ValueError(f"token {token.id} follows draft token {parent} already")
            self._parents.append(parent)
        self._tokens.append(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[DraftToken]:
        return iter(self._tokens)

    def __getitem__(self, index: Any) -> Any:
        return self._tokens[index]


__all__ = [
    "Draft",
    "DraftToken",
    "EmittedToken",
    "FinishReason",
    "Part",
    "Round",
    "Span",
    "SpecStats",
    "TokenKind",
    "Verdict",
]

TokenKind = Literal["accepted", "recovered", "bonus", "plain", "forced"]
Part = Literal["answer", "thinking", "mark"]
"""What a piece of text belongs to: the answer, the thinking before it, or a mark between the two that is not shown."""
FinishReason = Literal["stop", "length", "cancelled"]

FEWEST_PLAIN = 3
"""One-token passes of an answer whose median says what plain decoding would take: one alone can be an outlier."""

CountName = Literal[
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "thinking_tokens",
    "num_forced_tokens",
    "num_rounds",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_ahead_hits",
    "num_ahead_tokens",
    "num_ahead_tokens_used",
]
FigureName = Literal[
    "seconds_prompt", "seconds_draft", "seconds_verify", "seconds_other", "mean_acceptance_length", "tokens_per_second"
]
EstimateName = Literal[
    "time_to_first_token_s", "acceptance_rate", "estimated_plain_tokens_per_second", "estimated_speedup"
]
"""Keys of ``SpecStats`` whose values are whole numbers, numbers, and numbers that there may be none of."""

_INNER = ("seconds_plain_token", "seconds_one_token")
"""Fields of ``SpecStats`` that are no statistics."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a draft.

    Attributes:
        n_accepted: how many draft tokens the target accepted: of a chain the first ones.
        next_token: the token that the target itself adds after them.
        kind: ``recovered`` replaces a rejected draft token, ``bonus`` follows an accepted draft, ``plain`` had none;
            ``forced`` was not chosen at all: see ``Round``.
        path: the accepted draft tokens of a draft that branches: indices, in order. None for a chain.
    """

    n_accepted: int
    next_token: int
    kind: TokenKind
    path: tuple[int, ...] | None = None

    @property
    def accepted(self) -> Sequence[int]:
        """The draft tokens that were accepted: indices, in order."""
        return range(self.n_accepted) if self.path is None else self.path

    @property
    def last_accepted(self) -> int:
        """Index of the last of them; -1 where there is none."""
        return self.n_accepted - 1 if not self.path else self.path[-1]


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """One verified token. ``text`` is what it adds to the text (a half-finished character adds nothing yet).

    ``logprobs`` is the target's, for requests that ask for it. ``thinking``: it belongs to a thinking block, marks
    included.
    """

    id: int
    kind: TokenKind
    source: str = "target"
    text: str = ""
    logprobs: TokenLogprobs | None = None
    thinking: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The token as the JSON object of ``--format events``."""
        event: dict[str, Any] = {"id": self.id, "text": self.text, "kind": self.kind, "source": self.source}
        if self.thinking:
            event["thinking"] = True
        if self.logprobs is not None:
            event["logprob"] = self.logprobs.logprob
            event["top_logprobs"] = [{"id": token, "logprob": logprob} for token, logprob in self.logprobs.top]
        return event


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of verified text released to the user, with the token kind and source it came from."""

    text: str
    kind: TokenKind
    source: str
    part: Part = "answer"


@dataclass(slots=True)
class AheadCount:
    """What drafting while the target verifies did in one round.

    Attributes:
        hit: whether the verdict before was one that a draft had been prepared for.
        taken: how many tokens of this round's draft had been prepared.
        outcomes: how many outcomes drafts were prepared for during this round's pass.
        prepared: how many draft tokens these have.
    """

    hit: bool = False
    taken: int = 0
    outcomes: int = 0
    prepared: int = 0


@dataclass(slots=True)
class Round:
    """One round: the draft, its fate, what was emitted and what it took.

    ``draft`` holds the rejected tokens too. ``emitted`` ends early at an end token, a stop string or the token budget,
    so it can be shorter than ``verdict.n_accepted + 1``. ``spans`` is the text that became safe to show in this round:
    text that may still turn out to be a stop string, or half of a character, waits for a later one. Where an answer is
    broken off while text waits, one more round brings it; it has no draft and no tokens, and statistics do not count
    it. Where a thinking budget is spent, the target reads the tokens that close the block: a round of ``forced`` tokens
    without a draft.

    ``ahead`` counts what was drafted while the target verified, where that is done.

    Times are in milliseconds. ``ms_verify`` is the target's pass, a replay included; ``ms_verify_expected`` is what the
    cost model expected, None where there is none.
    """

    index: int
    draft: Draft
    verdict: Verdict
    emitted: list[EmittedToken]
    ms_draft: float
    ms_verify: float
    ms_other: float = 0.0
    ms_verify_expected: float | None = None
    n_past: int = 0
    draft_texts: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    reason: str = ""
    finish_reason: FinishReason | None = None
    ahead: AheadCount | None = None

    @classmethod
    def of_rest(cls, index: int, spans: list[Span], finish_reason: FinishReason) -> Round:
        """What closes an answer that was broken off while some of its text was held back: no draft, no tokens."""
        nothing = Verdict(0, -1, "plain")
        return cls(index, Draft(), nothing, [], 0.0, 0.0, spans=spans, finish_reason=finish_reason)

    @property
    def text(self) -> str:
        """The verified text of the answer that this round released; without thinking."""
        return "".join(span.text for span in self.spans if span.part == "answer")

    @property
    def thinking(self) -> str:
        """The verified text of thinking that this round released, its marks left out."""
        return "".join(span.text for span in self.spans if span.part == "thinking")

    @property
    def width(self) -> int:
        """How many tokens the target's pass was over."""
        return len(self.emitted) if self.verdict.kind == "forced" else len(self.draft) + 1

    @property
    def tokens_expected(self) -> float:
        """Tokens that the round was expected to emit, the target's own included: 1 + a_1 + a_1·a_2 + …

        Of a draft that branches it is the sum over all paths: at most one of several draft tokens that follow the same
        one is accepted, each with its own probability.
        """
        reach: list[float] = []
        for token, parent in zip(self.draft, self.draft.parents, strict=True):
            reach.append(token.expected * (reach[parent] if parent >= 0 else 1.0))
        return 1.0 + sum(reach)

    @property
    def accepted(self) -> list[bool]:
        """For each drafted token, whether it was accepted."""
        accepted = self.verdict.accepted
        return [i in accepted for i in range(len(self.draft))]

    def as_event(self) -> dict[str, Any]:
        """The round as the JSON object of ``--format events`` (documented in docs/formats.md)."""
        texts = self.draft_texts or [""] * len(self.draft)
        thinking = {"thinking": self.thinking} if self.thinking else {}
        ahead = {"ahead": asdict(self.ahead)} if self.ahead else {}
        parents = [{"parent": parent} if self.draft.branches else {} for parent in self.draft.parents]
        return {
            "type": "round",
            "index": self.index,
            "draft": [
                {
                    "id": token.id,
                    "text": text,
                    "source": token.source,
                    "prob": round(token.prob, 6),
                    "expected": round(token.expected, 4),
                    "accepted": accepted,
                    **parent,
                }
                for token, text, accepted, parent in zip(self.draft, texts, self.accepted, parents, strict=True)
            ],
            "emitted": [token.as_dict() for token in self.emitted],
            "text": self.text,
            **thinking,
            "ms_draft": round(self.ms_draft, 3),
            "ms_verify": round(self.ms_verify, 3),
            "ms_other": round(self.ms_other, 3),
            "tokens_expected": round(self.tokens_expected, 3),
            "ms_verify_expected": None if self.ms_verify_expected is None else round(self.ms_verify_expected, 3),
            **ahead,
            "reason": self.reason,
        }


@dataclass(eq=False, repr=False)
class SpecStats(Mapping[str, Any]):
    """Counters of one answer, under vLLM's names; a read-only mapping once the answer is complete.

    Denominators:

    * ``num_rounds``: target passes that emitted at least one token (prefill is not a round, nor are forced tokens).
    * ``thinking_tokens``: those of ``completion_tokens`` that belong to thinking blocks, marks included;
      ``num_forced_tokens``: those that closed a block because its budget was spent.
    * ``num_draft_tokens``: those sent to the target; ``num_accepted_tokens``: those it accepted. One that was accepted
      but lies beyond an end token, stop string or the budget counts as accepted: the target did accept it.
    * ``acceptance_rate``: accepted / drafted tokens; None when nothing was drafted.
    * ``mean_acceptance_length``: completion tokens that were not forced / rounds, the target's own token included:
      plain decoding is 1.
    * ``accepted_per_position[i]``: rounds in which a draft token at position i was accepted;
      ``drafted_per_position[i]``: rounds that had one there. Of a draft that branches there may be several.
    * ``num_ahead_hits``: rounds whose draft, or its beginning, was made while the target verified the one before;
      ``num_ahead_tokens``: draft tokens made so, ``num_ahead_tokens_used`` those of them that were sent.
    * ``tokens_per_second``: completion tokens / (seconds_draft + seconds_verify + seconds_other); prompt excluded.
    * ``estimated_plain_tokens_per_second``: 1 / t(1), t(1) being the median time of this answer's own one-token passes
      if it has ``FEWEST_PLAIN`` of them, else ``seconds_plain_token``. ``estimated_speedup`` is the ratio of the two.
      None where nothing was drafted, which is plain decoding, or where t(1) is not known.

    Attributes:
        seconds_plain_token: t(1) as known otherwise [s]; None where it is not.
        seconds_one_token: of each pass over one token [s], sorted; None where the passes were other answers' too.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    thinking_tokens: int = 0
    num_forced_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    seconds_prompt: float = 0.0
    seconds_draft: float = 0.0
    seconds_verify: float = 0.0
    seconds_other: float = 0.0
    time_to_first_token_s: float | None = None
    seconds_plain_token: float | None = None
    seconds_one_token: list[float] | None = field(default_factory=list)
    by_source: dict[str, dict[str, int]] = field(default_factory=dict)
    num_ahead_hits: int = 0
    num_ahead_tokens: int = 0
    num_ahead_tokens_used: int = 0
    reason: str = ""

    def add(self, round_: Round) -> None:
        """Count one finished round; what only brings the rest of the text is none."""
        if not round_.emitted:
            return
        self.completion_tokens += len(round_.emitted)
        self.thinking_tokens += sum(token.thinking for token in round_.emitted)
        forced = round_.verdict.kind == "forced"
        self.num_forced_tokens += len(round_.emitted) * forced
        self.num_rounds += not forced
        self.num_draft_tokens += len(round_.draft)
        self.num_accepted_tokens += round_.verdict.n_accepted
        depth = max(round_.draft.depths, default=-1) + 1
        missing = depth - len(self.drafted_per_position)
        self.drafted_per_position.extend([0] * missing)
        self.accepted_per_position.extend([0] * missing)
        for i in range(depth):
            self.drafted_per_position[i] += 1
            self.accepted_per_position[i] += i < round_.verdict.n_accepted
        for token, accepted in zip(round_.draft, round_.accepted, strict=True):
            counts = self.by_source.setdefault(token.source, {"num_draft_tokens": 0, "num_accepted_tokens": 0})
            counts["num_draft_tokens"] += 1
            counts["num_accepted_tokens"] += accepted
        if round_.ahead is not None:
            self.num_ahead_hits += round_.ahead.hit
            self.num_ahead_tokens += round_.ahead.prepared
            self.num_ahead_tokens_used += round_.ahead.taken
        if round_.width == 1 and not forced and self.seconds_one_token is not None:
            insort(self.seconds_one_token, round_.ms_verify / 1e3)
        self.seconds_draft += round_.ms_draft / 1e3
        self.seconds_verify += round_.ms_verify / 1e3
        self.seconds_other += round_.ms_other / 1e3
        self.reason = round_.reason

    @classmethod
    def total(cls, answers: Iterable[Mapping[str, Any]]) -> SpecStats:
        """The figures of several answers together, with the same denominators; the time to the first token is none.

        An answer without drafts is plain decoding, and counts as it went. Plain decoding is not known of all if it is
        not known of each.
        """
        total = cls(seconds_one_token=None)
        plain_seconds: float | None = 0.0
        for stats in (each.as_dict() if isinstance(each, cls) else each for each in answers):
            for name, known in vars(total).items():
                if isinstance(known, int | float):
                    setattr(total, name, known + (stats.get(name) or 0))
            for name in ("drafted_per_position", "accepted_per_position"):
                pairs = zip_longest(getattr(total, name), stats.get(name) or (), fillvalue=0)
                setattr(total, name, [a + b for a, b in pairs])
            for source, counts in (stats.get("by_source") or {}).items():
                sums = total.by_source.setdefault(source, {"num_draft_tokens": 0, "num_accepted_tokens": 0})
                for name in sums:
                    sums[name] += counts.get(name, 0)
            name = "estimated_plain_tokens_per_second" if stats.get("num_draft_tokens") else "tokens_per_second"
            if n_tokens := stats.get("completion_tokens") or 0:
                speed = stats.get(name)
                plain_seconds = plain_seconds + n_tokens / speed if speed and plain_seconds is not None else None
        total.seconds_plain_token = plain_seconds / total.completion_tokens if plain_seconds else None
        return total

    @property
    def seconds_decode(self) -> float:
        return self.seconds_draft + self.seconds_verify + self.seconds_other

    def _plain_speed(self) -> float | None:
        """Estimated tokens per second of plain decoding."""
        if not self.num_draft_tokens:
            return None
        own = self.seconds_one_token or []
        seconds = own[(len(own) - 1) // 2] if len(own) >= FEWEST_PLAIN else self.seconds_plain_token
        return 1.0 / seconds if seconds else None

    def as_dict(self) -> dict[str, Any]:
        speed = self.completion_tokens / self.seconds_decode if self.seconds_decode else 0.0
        plain = self._plain_speed()
        chosen = self.completion_tokens - self.num_forced_tokens
        counted = asdict(replace(self, seconds_one_token=None))  # without a copy of what can be long
        counted = {name: value for name, value in counted.items() if name not in _INNER}
        return counted | {
            "acceptance_rate": self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None,
            "mean_acceptance_length": chosen / self.num_rounds if self.num_rounds else 0.0,
            "tokens_per_second": speed,
            "estimated_plain_tokens_per_second": plain,
            "estimated_speedup": speed / plain if plain and speed else None,
        }

    @overload
    def __getitem__(self, key: CountName) -> int: ...
    @overload
    def __getitem__(self, key: FigureName) -> float: ...
    @overload
    def __getitem__(self, key: EstimateName) -> float | None: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: str) -> Any:
        return self.as_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())

    def __repr__(self) -> str:
        return f"SpecStats({self.as_dict()!r})"
