"""What happens in a round of speculative decoding, as data: ``Draft`` -> ``Verdict`` -> ``Round`` -> ``SpecStats``."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

from localspec.sampling.sampling import Distribution, TokenLogprobs

# A draft: tokens that are proposed to the target together, as a chain or as a tree.


@dataclass(frozen=True, slots=True)
class DraftToken:
    """One token of a draft, and the drafter that made it."""

    id: int
    source: str
    prob: float  # the drafter's own confidence in [0, 1]
    dist: Distribution | None = None  # what it was *sampled* from; None: it was chosen deterministically
    expected: float = 0.0  # the controller's calibrated probability that it is accepted, if those before it were


class Draft(list[DraftToken]):
    """The draft tokens of one round; empty means plain decoding.

    A chain, each token behind the one before it, unless ``add`` makes it branch: then it is a tree, and the target
    accepts one path of it.
    """

    branches = False
    _parents: Sequence[int] = ()  # of a chain nothing is kept

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self]

    @property
    def parents(self) -> list[int]:
        """For each draft token the index of the one that it follows; -1 is the last settled token."""
        return list(self._parents if self.branches else range(-1, len(self) - 1))

    def children(self, index: int) -> Sequence[int]:
        """The draft tokens that follow a draft token, or with -1 the last settled one: indices, in order."""
        if not self.branches:
            return range(index + 1, min(index + 2, len(self)))
        return [i for i, parent in enumerate(self._parents) if parent == index]

    def path(self, index: int) -> list[int]:
        """The draft tokens from the first one down to this: indices; none for -1."""
        path: list[int] = []
        while index >= 0:
            path.append(index)
            index = self._parents[index] if self.branches else index - 1
        return path[::-1]

    def add(self, token: DraftToken, parent: int) -> None:
        """Add a draft token that follows the one at index ``parent``, -1 being the last settled token; ``append`` is
        for chains.

        Raises:
            ValueError: there is no such draft token, or what follows it already is the same token.
        """
        last = len(self) - 1
        if not -1 <= parent <= last:
            raise ValueError(f"no draft token {parent} to follow: there are {last + 1}")
        if any(self[child].id == token.id for child in self.children(parent)):
            raise ValueError(f"token {token.id} follows draft token {parent} already")
        if parent != last or self.branches:
            self._parents, self.branches = [*self.parents, parent], True
        self.append(token)


TokenKind = Literal["accepted", "recovered", "bonus", "plain", "forced"]
Part = Literal["answer", "thinking", "mark"]  # what a text belongs to; a mark between the other two is not shown
FinishReason = Literal["stop", "length", "cancelled"]

FEWEST_PLAIN = 3
"""One-token passes of an answer whose median says what plain decoding would take: one alone can be an outlier."""

_INNER = ("seconds_plain_token", "seconds_one_token")  # fields of ``SpecStats`` that are no statistics


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a draft: how many tokens it accepted, and the token that it adds after them.

    ``kind`` is of the latter: ``recovered`` replaces a rejected draft token, ``bonus`` follows an accepted draft,
    ``plain`` had none; ``forced`` was not chosen at all, see ``Round``.
    """

    n_accepted: int
    next_token: int
    kind: TokenKind
    path: tuple[int, ...] | None = None  # the accepted tokens of a draft that branches: indices, in order

    @property
    def accepted(self) -> Sequence[int]:
        """The draft tokens that were accepted: indices, in order."""
        return range(self.n_accepted) if self.path is None else self.path


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """One verified token."""

    id: int
    kind: TokenKind
    source: str = "target"
    text: str = ""  # what it adds to the text; a half-finished character adds nothing yet
    logprobs: TokenLogprobs | None = None  # the target's, for requests that ask for it
    thinking: bool = False  # it belongs to a thinking block, marks included

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
    """What drafting while the target verifies did in one round."""

    hit: bool = False  # the verdict before was one that a draft had been prepared for
    taken: int = 0  # tokens of this round's draft that had been prepared
    outcomes: int = 0  # for so many drafts were prepared during this round's pass
    prepared: int = 0  # draft tokens that these have


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far a prompt is read."""

    total: int  # tokens of the prompt; of a draft model, which may read it later, of all that it has to read
    cached: int  # those of them that were in memory before; for a draft model, when its reading was first told
    processed: int  # those that are in memory now, ``cached`` included
    seconds: float  # since reading began
    reader: Literal["target", "draft"] = "target"

    @property
    def tokens_per_second(self) -> float:
        return (self.processed - self.cached) / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the rate so far; None before there is one."""
        rate = self.tokens_per_second
        return (self.total - self.processed) / rate if rate else None

    @property
    def fraction(self) -> float:
        """Of what was to be read, the part that is."""
        return (self.processed - self.cached) / max(1, self.total - self.cached)

    def as_event(self) -> dict[str, Any]:
        """The JSON object of ``--format events``."""
        left = self.seconds_left
        return (
            {"type": "prompt"}
            | asdict(self)
            | {
                "seconds": round(self.seconds, 3),
                "tokens_per_second": round(self.tokens_per_second, 2),
                "seconds_left": None if left is None else round(left, 1),
            }
        )

    def __str__(self) -> str:
        """For people: ``1,280 of 4,000 tokens · 96 tok/s · 28 s left``."""
        parts = ["draft model"] if self.reader == "draft" else []
        parts.append(f"{self.processed:,} of {self.total:,} tokens")
        if (left := self.seconds_left) is not None:
            minutes, seconds = divmod(math.ceil(left), 60)
            parts += [
                f"{self.tokens_per_second:,.0f} tok/s",
                f"{minutes} min {seconds} s left" if minutes else f"{seconds} s left",
            ]
        return " · ".join(parts)


@dataclass(slots=True)
class Round:
    """One round: the draft, its fate, what was emitted and what it took [ms].

    ``emitted`` ends early at an end token, a stop string or the token budget. ``spans`` is the text that became safe to
    show: what may still become a stop string, or half of a character, waits for a later round. Where an answer is
    broken off while text waits, one more round brings it; it has no draft and no tokens, and statistics do not count
    it. Where a thinking budget is spent, a round of ``forced`` tokens without a draft closes the block. ``ms_verify``
    is the target's pass, a replay included.
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
        nothing = Verdict(0, -1, "plain")
        return cls(index, Draft(), nothing, [], 0.0, 0.0, spans=spans, finish_reason=finish_reason)

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans if span.part == "answer")

    @property
    def thinking(self) -> str:
        return "".join(span.text for span in self.spans if span.part == "thinking")

    @property
    def tokens_expected(self) -> float:
        """Tokens that the round was expected to emit, the target's own included: 1 + a_1 + a_1·a_2 + …, over all paths
        of a draft that branches."""
        reach: list[float] = []
        for token, parent in zip(self.draft, self.draft.parents, strict=True):
            reach.append(token.expected * (reach[parent] if parent >= 0 else 1.0))
        return 1.0 + sum(reach)

    @property
    def accepted(self) -> list[bool]:
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

    docs/formats.md defines each. ``seconds_plain_token`` is t(1) as known otherwise [s], ``seconds_one_token`` the time
    of each pass over one token, sorted; None where the passes were other answers' too.
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
        draft, verdict, forced = round_.draft, round_.verdict, round_.verdict.kind == "forced"
        self.completion_tokens += len(round_.emitted)
        self.thinking_tokens += sum(token.thinking for token in round_.emitted)
        self.num_forced_tokens += len(round_.emitted) * forced
        self.num_rounds += not forced
        self.num_draft_tokens += len(draft)
        self.num_accepted_tokens += verdict.n_accepted
        depth = max(len(draft.path(i)) for i in range(len(draft))) if draft.branches else len(draft)
        missing = depth - len(self.drafted_per_position)
        self.drafted_per_position.extend([0] * missing)
        self.accepted_per_position.extend([0] * missing)
        for i in range(depth):
            self.drafted_per_position[i] += 1
            self.accepted_per_position[i] += i < verdict.n_accepted
        accepted = verdict.accepted
        for i, token in enumerate(draft):
            counts = self.by_source.setdefault(token.source, {"num_draft_tokens": 0, "num_accepted_tokens": 0})
            counts["num_draft_tokens"] += 1
            counts["num_accepted_tokens"] += i in accepted
        if round_.ahead is not None:
            self.num_ahead_hits += round_.ahead.hit
            self.num_ahead_tokens += round_.ahead.prepared
            self.num_ahead_tokens_used += round_.ahead.taken
        if not (draft or forced) and self.seconds_one_token is not None:
            insort(self.seconds_one_token, round_.ms_verify / 1e3)
        self.seconds_draft += round_.ms_draft / 1e3
        self.seconds_verify += round_.ms_verify / 1e3
        self.seconds_other += round_.ms_other / 1e3
        self.reason = round_.reason

    @classmethod
    def total(cls, answers: Iterable[Mapping[str, Any]]) -> SpecStats:
        """The figures of several answers together, without a time to the first token. The speed of plain decoding is
        known if it is of each; an answer without drafts is plain decoding."""
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

    def __getitem__(self, key: str) -> Any:
        return self.as_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())

    def __repr__(self) -> str:
        return f"SpecStats({self.as_dict()!r})"
