"""A place to decode in, and an answer under way in it, which goes on a slice at a time.

Other programs, heat and clock move a machine's speed by more than most speed-ups, and they move it from one second to
the next. Arms that answer in slices, a few passes of one and a few of the other, meet the same machine. Each has target
and drafters of its own for that: contexts, not weights.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from localspec.backends.base import Context, ContextState
from localspec.commands.bench.arms import Arm
from localspec.commands.bench.record import Sample
from localspec.commands.questions import Question
from localspec.llm import LLM
from localspec.runtime.pair import Pair
from localspec.spec_decode.decoder import PREFILL_CHUNK
from localspec.spec_decode.rounds import FinishReason, Round, SpecStats
from localspec.system.usage import CPUTimes, others_share


class Stopped(Exception):
    """Somebody asked to stop; the answers under way do not count."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that was read.

    Attributes:
        question: what is asked.
        tokens: the prompt.
        state: what the target's memory holds after reading it; None where the engine cannot say.
        seconds: what reading took.
    """

    question: Question
    tokens: list[int]
    state: ContextState | None
    seconds: float


class UnderWay:
    """An answer of one arm, under way.

    Args:
        llm: the pair; what decodes runs on its thread.
        arm: how to decode.
        asked: the question.
        place: the repeat, and the place in the order of arms.
        begin: puts the arm's state in place and makes the rounds; takes the pair, and what is called after the prompt.
        stop: set when somebody wants to stop.
    """

    def __init__(
        self,
        llm: LLM,
        arm: Arm,
        asked: Asked,
        place: tuple[int, int],
        begin: Callable[[Pair, Callable[[int], None]], Iterator[Round]],
        stop: threading.Event,
    ) -> None:
        self.arm = arm
        self.backend = llm.backend_name
        self._llm = llm
        self._asked = asked
        self._place = place
        self._begin = begin
        self._stop = stop
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
            Stopped: somebody asked to stop.
        """
        before = CPUTimes.now()
        self._llm.run(lambda pair: self._advance(pair, None if n_tokens is None else self.n_tokens + n_tokens))
        self._spans.append((before, CPUTimes.now()))

    def _advance(self, pair: Pair, until: int | None) -> None:
        while self.finish_reason is None and (until is None or self.n_tokens < until):
            round_ = self._first(pair) if self._rounds is None else next(self._rounds, None)
            if round_ is None or self._stop.is_set():
                raise Stopped
            self._done.append(round_)
            self._stats.add(round_)

    def _first(self, pair: Pair) -> Round | None:
        self._started = time.time()
        read = time.perf_counter()

        def prefilled(n_cached: int) -> None:
            nonlocal read
            read = time.perf_counter()

        self._rounds = self._begin(pair, prefilled)
        round_ = next(self._rounds, None)
        self._stats.time_to_first_token_s = self._asked.seconds + time.perf_counter() - read
        return round_

    def close(self) -> None:
        """Leave the contexts as they are; nothing goes on after it."""
        rounds = self._rounds
        if rounds is not None:
            self._llm.run(lambda pair: rounds.close())  # type: ignore[attr-defined]

    def sample(self) -> Sample:
        """The answer as it was measured."""
        stats, (repeat, order) = self._stats, self._place
        ids = " ".join(str(token.id) for round_ in self._done for token in round_.emitted)
        assert stats.time_to_first_token_s is not None
        assert self.finish_reason is not None
        return Sample(
            question=self._asked.question.id,
            category=self._asked.question.category,
            backend=self.backend,
            arm=self.arm.name,
            repeat=repeat,
            order=order,
            started=round(self._started, 1),
            prompt_tokens=len(self._asked.tokens),
            tokens=stats.completion_tokens,
            token_sha256=hashlib.sha256(ids.encode()).hexdigest()[:16],
            finish_reason=self.finish_reason,
            num_rounds=stats.num_rounds,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            drafted_per_position=stats.drafted_per_position,
            accepted_per_position=stats.accepted_per_position,
            by_source=stats.by_source,
            seconds_prompt=round(self._asked.seconds, 6),
            seconds_draft=round(stats.seconds_draft, 6),
            seconds_verify=round(stats.seconds_verify, 6),
            seconds_other=round(stats.seconds_other, 6),
            time_to_first_token=round(stats.time_to_first_token_s, 6),
            rounds=[_figures(each) for each in self._done],
            judged=[judged for each in self._done for judged in _judged(each)],
            others_share=others_share(self._spans),
        )


def hold(context: Context, asked: Asked) -> None:
    """Have a target's context hold a prompt as it was read, and nothing else."""
    prompt = asked.tokens[:-1]
    n = context.reuse(prompt)
    if n < len(prompt) and asked.state is not None:
        context.import_state(asked.state)
        return
    for start in range(n, len(prompt), PREFILL_CHUNK):
        context.decode(prompt[start : start + PREFILL_CHUNK], "none")


def _figures(round_: Round) -> list[float]:
    times = (round_.ms_draft, round_.ms_verify, round_.ms_other)
    return [*(round(ms, 3) for ms in times), len(round_.draft), round_.verdict.n_accepted, len(round_.emitted)]


def _judged(round_: Round) -> list[list[Any]]:
    """The guesses that the target compared with its own token: the accepted ones and the first that was not."""
    accepted = round_.verdict.n_accepted
    return [
        [guess.source, position, round(guess.expected, 4), int(position < accepted)]
        for position, guess in enumerate(round_.draft[: accepted + 1])
    ]
