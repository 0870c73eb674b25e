"""An answer of one arm, timed: it goes on a slice at a time, and is a ``Sample`` in the end."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localspec.backends.base import Context, ContextState
from localspec.errors import Cancelled
from localspec.measuring.arms import Arm
from localspec.measuring.questions import Question
from localspec.runtime.pair import Pair
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.decoder import PREFILL_CHUNK
from localspec.spec_decode.rounds import FinishReason, Round, SpecStats
from localspec.system.usage import CPUTimes, others_share

if TYPE_CHECKING:
    from localspec.measuring.subject import EngineUnderTest


_COUNTS = ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "drafted_per_position", "accepted_per_position",
           "by_source")  # fmt: skip
_TIMES = ("seconds_prompt", "seconds_draft", "seconds_verify", "seconds_other")
"""Figures of ``SpecStats`` that a sample keeps."""

NEAR_TIE = 0.5
"""Logits between two tokens that rounding may swap: passes of other widths move logits by 0.1 to 0.25."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of one arm; times are seconds unless the name says otherwise. SCHEMA.md of ``bench`` documents all."""

    question: str
    category: str
    backend: str
    arm: str
    repeat: int
    order: int  # place of its first slice among the answers to this question
    started: float  # seconds since 1970
    prompt_tokens: int
    tokens: int  # as the engine counted them, an end token included
    token_sha256: str  # equal answers have equal ones
    finish_reason: str
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    by_source: dict[str, dict[str, int]]
    seconds_prompt: float  # the target's reading, measured once for all arms of a question and repeat
    seconds_draft: float  # a draft model's reading of the prompt included
    seconds_verify: float
    seconds_other: float
    time_to_first_token: float  # seconds_prompt, and from there to the end of the arm's first round
    rounds: list[list[float]]  # milliseconds drafting, verifying, other; draft tokens, accepted ones, emitted tokens
    judged: list[list[Any]]  # source, position, predicted acceptance, 1 if accepted: draft tokens the target judged
    others_share: float | None = None  # of the CPUs' time, used by other programs meanwhile
    parted_at: int | None = None  # greedy: first token, from 0, that plain has otherwise
    parted_by: float | None = None  # logits between the two tokens there

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 < self.seconds < math.inf:
            raise ValueError(f"{self.tokens} tokens in {self.seconds} seconds")
        if any(len(row) != 6 for row in self.rounds) or any(len(row) != 4 for row in self.judged):
            raise ValueError("rounds have six figures, judged draft tokens four")

    @property
    def seconds(self) -> float:
        """Decoding time, the denominator of speed: the target's reading of the prompt is not in it."""
        return self.seconds_draft + self.seconds_verify + self.seconds_other

    @property
    def speed(self) -> float:
        """Tokens per second of decoding."""
        return self.tokens / self.seconds

    @property
    def stats(self) -> dict[str, Any]:
        """What of ``SpecStats`` is kept of it."""
        return {name: getattr(self, name) for name in _COUNTS + _TIMES} | {"completion_tokens": self.tokens}

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.question, self.backend, self.arm, self.repeat


@dataclass(frozen=True, slots=True)
class ReadQuestion:
    """A question whose prompt the target has read.

    Attributes:
        question: what is asked.
        tokens: the prompt.
        state: what the target's context holds after reading it; None where the engine cannot say.
        seconds: what reading took.
    """

    question: Question
    tokens: list[int]
    state: ContextState | None
    seconds: float

    def put_into(self, context: Context, n_states: int = 0) -> None:
        """Have a target's context hold the prompt, and nothing else; but for its last ``n_states`` tokens.

        Those are left to read where a head wants the target's states after them (``Drafter.n_states``), which the arm
        does before its time begins to count: no copy of a context holds states.
        """
        prompt = self.tokens[:-1]
        n = context.reuse(prompt)
        if n < len(prompt) and self.state is not None:
            context.import_state(self.state)
            n = len(prompt)
        n_wanted = max(0, len(prompt) - n_states)
        if n > n_wanted:
            context.truncate(n_wanted)
        for start in range(n, n_wanted, PREFILL_CHUNK):
            context.decode(prompt[start : min(start + PREFILL_CHUNK, n_wanted)], "none")


class TimedAnswer:
    """An answer of one arm; nothing is decoded before ``advance``.

    Args:
        subject: the pair.
        arm: how to decode.
        asked: the question.
        params: how to sample.
        place: the repeat, and the place in the order of arms.
    """

    def __init__(
        self, subject: EngineUnderTest, arm: Arm, asked: ReadQuestion, params: SamplingParams, place: tuple[int, int]
    ) -> None:
        self.arm = arm
        self.backend = subject.llm.backend_name
        self._subject = subject
        self._asked = asked
        self._params = params
        self._place = place
        self._rounds: Iterator[Round] | None = None
        self._done: list[Round] = []
        self._stats = SpecStats()
        self._started = 0.0
        self._spans: list[tuple[CPUTimes, CPUTimes]] = []

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._stats.completion_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it is under way."""
        return self._done[-1].finish_reason if self._done else None

    def advance(self, n_tokens: int | None) -> None:
        """Go on by so many tokens, or a few more, as rounds are not cut; None: to the end.

        Raises:
            Cancelled: the subject was stopped.
        """
        before = CPUTimes.now()
        self._subject.llm.run(lambda pair: self._advance(pair, None if n_tokens is None else self.n_tokens + n_tokens))
        self._spans.append((before, CPUTimes.now()))

    def _advance(self, pair: Pair, until: int | None) -> None:
        while self.finish_reason is None and (until is None or self.n_tokens < until):
            round_ = self._first(pair) if self._rounds is None else next(self._rounds, None)
            if round_ is None or self._subject.stop.is_set():
                raise Cancelled("measuring was stopped")
            self._done.append(round_)
            self._stats.add(round_)

    def _first(self, pair: Pair) -> Round | None:
        self._started = time.time()
        read = time.perf_counter()

        def prefilled(n_cached: int) -> None:
            nonlocal read
            read = time.perf_counter()

        self._subject.become(self.arm, pair)
        self._asked.put_into(pair.context, max((each.n_states for each in pair.state.drafters), default=0))
        self._rounds = pair.rounds(
            self._asked.tokens, self._params, self.arm.length, prefilled, self._subject.stop.is_set
        )
        round_ = next(self._rounds, None)
        self._stats.time_to_first_token_s = self._asked.seconds + time.perf_counter() - read
        return round_

    def close(self) -> None:
        """Leave the contexts as they are; nothing goes on after it."""
        rounds = self._rounds
        if rounds is not None:
            self._subject.llm.run(lambda pair: rounds.close())  # type: ignore[attr-defined]

    @property
    def prompt(self) -> list[int]:
        """Tokens of the prompt."""
        return self._asked.tokens

    @property
    def tokens(self) -> list[int]:
        """Tokens of the answer."""
        return [token.id for round_ in self._done for token in round_.emitted]

    def sample(self) -> Sample:
        """The answer as it was measured."""
        stats, (repeat, order), question = self._stats, self._place, self._asked.question
        stats.seconds_prompt = self._asked.seconds
        ids = " ".join(map(str, self.tokens))
        assert stats.time_to_first_token_s is not None
        assert self.finish_reason is not None
        return Sample(
            question=question.id,
            category=question.category,
            backend=self.backend,
            arm=self.arm.name,
            repeat=repeat,
            order=order,
            started=round(self._started, 1),
            prompt_tokens=len(self._asked.tokens),
            tokens=stats.completion_tokens,
            token_sha256=hashlib.sha256(ids.encode()).hexdigest()[:16],
            finish_reason=self.finish_reason,
            **{name: getattr(stats, name) for name in _COUNTS},
            **{name: round(getattr(stats, name), 6) for name in _TIMES},
            time_to_first_token=round(stats.time_to_first_token_s, 6),
            rounds=[_figures(each) for each in self._done],
            judged=[judged for each in self._done for judged in _judged(each)],
            others_share=others_share(self._spans),
        )


def _figures(round_: Round) -> list[float]:
    times = (round_.ms_draft, round_.ms_verify, round_.ms_other)
    return [*(round(ms, 3) for ms in times), len(round_.draft), round_.verdict.n_accepted, len(round_.emitted)]


def _judged(round_: Round) -> list[list[Any]]:
    """The draft tokens that the target compared with its own: all at the places of accepted ones, and at the next."""
    draft, path, judged = round_.draft, round_.verdict.accepted, list[list[Any]]()
    for position, at in enumerate((-1, *path)):
        for rival in draft.children(at):
            judged.append([draft[rival].source, position, round(draft[rival].expected, 4), int(rival in path)])
    return judged
