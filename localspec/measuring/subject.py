"""A loaded pair that decodes in one arm after the other, none helped by another.

Each arm has its own cost corrections, acceptance tables and n-gram hit rates. Draft models forget what they read, so
reading the prompt counts in the arm that needs it. The target's reading is measured once, apart.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from localspec.backends.base import Context, ContextState, FloatArray, shared_prefix
from localspec.controllers.fixed import MAX_FIXED_DRAFT
from localspec.engine.answer import rounds
from localspec.engine.draft_sources import is_free
from localspec.engine.pair import Pair
from localspec.engine.request import DraftLength, Reply
from localspec.engine.state import DecodingState, taps_of
from localspec.errors import Cancelled, EngineError, ModelFileError, PromptTooLong, UsageError
from localspec.llm import LLM
from localspec.measuring.statistics import Values, estimate
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.kv_memory import kv_shape
from localspec.prompts.questions import Question
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.decoder import PREFILL_CHUNK
from localspec.spec_decode.drafters.names import CORPUS
from localspec.spec_decode.rounds import FinishReason, Round, SpecStats
from localspec.system.machine import CPUTimes, others_share, read_memory
from localspec.system.plugins import DRAFTERS, offered

# Arms: ``plain``, ``auto``, and drafters with a fixed length.


@cache
def _pattern() -> re.Pattern[str]:
    names = "|".join(map(re.escape, (*offered(DRAFTERS), "model", CORPUS)))
    source = rf"(?:{names})\d*"
    return re.compile(rf"(?:(?P<sources>{source}(?:\+{source})*):)?(?P<length>auto|\d{{1,4}})")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding."""

    name: str  # as it was asked for
    sources: tuple[str, ...] | None  # drafters that take part (``ngram``, ``head``, ``model``, …); None: all
    length: DraftLength  # draft tokens a round, or ``auto``; 0 is plain decoding

    @property
    def is_plain(self) -> bool:
        return self.length == 0

    def among(self, sources: Sequence[str]) -> list[str]:
        """Those of the loaded drafters that take part."""
        return [] if self.is_plain else [each for each in sources if self.sources is None or each in self.sources]

    def check(self, sources: Sequence[str]) -> None:
        """Raise ``UsageError`` if the arm wants a drafter that is not loaded."""
        if not self.is_plain and not sources:
            raise UsageError(f"--arm {self.name} needs a drafter, and none is loaded: name one with --draft")
        for wanted in self.sources or ():
            if wanted not in sources:
                advice = f"add --draft {wanted}" if is_free(wanted) else "name one with --draft"
                raise UsageError(f"--arm {self.name}: no drafter {wanted!r} is loaded ({', '.join(sources)}); {advice}")


PLAIN = Arm("plain", None, 0)


def parse_arm(text: str) -> Arm:
    """``plain``, ``auto``, ``N``, ``ngram:N``, ``head+model:auto`` -> an arm; ``UsageError``: none of these."""
    if text == "plain":
        return PLAIN
    found = _pattern().fullmatch(text)
    if found is None:
        raise UsageError(f"no arm {text!r}: plain, auto, N, or ngram:N, head+model:N (N: guesses a round, or auto)")
    sources = tuple(dict.fromkeys(found["sources"].split("+"))) if found["sources"] else None
    if found["length"] == "auto":
        return Arm(text, sources, "auto")
    length = int(found["length"])
    if not 1 <= length <= MAX_FIXED_DRAFT:
        raise UsageError(f"--arm {text}: the draft length must be in 1..{MAX_FIXED_DRAFT}; plain drafts nothing")
    return Arm(text, sources, length)


def split_names(texts: Sequence[str]) -> list[str]:
    """Names from options that may be repeated and may hold several with commas."""
    return list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))


def parse_arms(texts: Sequence[str]) -> list[Arm]:
    """Arms from the command line, also separated by commas; ``plain`` comes first."""
    arms = [PLAIN, *map(parse_arm, split_names(texts))]
    return list({arm.name: arm for arm in arms}.values())


# One arm's answer, timed slice by slice.

_COUNTS = ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "drafted_per_position", "accepted_per_position",
           "by_source")  # fmt: skip
_TIMES = ("seconds_prompt", "seconds_draft", "seconds_verify", "seconds_other")
"""Figures of ``SpecStats`` that a sample keeps."""

NEAR_TIE = 0.5  # logits that rounding may bridge: passes of other widths move logits by 0.1 to 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of one arm, times in seconds; SCHEMA.md of ``bench`` documents all fields."""

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
        """Decoding time, the denominator of speed, without the target's reading of the prompt."""
        return self.seconds_draft + self.seconds_verify + self.seconds_other

    @property
    def speed(self) -> float:
        """Tokens per second of decoding."""
        return self.tokens / self.seconds

    @property
    def stats(self) -> dict[str, Any]:
        """Its part of ``SpecStats``."""
        return {name: getattr(self, name) for name in _COUNTS + _TIMES} | {"completion_tokens": self.tokens}

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.question, self.backend, self.arm, self.repeat


@dataclass(frozen=True, slots=True)
class ReadQuestion:
    """A question whose prompt the target has read; ``state`` is its context after that, where the engine exports it."""

    question: Question
    tokens: list[int]
    state: ContextState | None
    seconds: float

    def put_into(self, context: Context, n_states: int = 0) -> None:
        """Have a context hold the prompt alone, without its last ``n_states`` tokens: a head wants the target's states
        after those (``DrafterInfo``), no copy of a context holds them, and the arm reads them before its time counts.
        """
        prompt = self.tokens[:-1]
        if context.reuse(prompt) < len(prompt) and self.state is not None:
            context.import_state(self.state)
        feed(context, prompt[: max(0, len(prompt) - n_states)])


def feed(
    context: Context,
    tokens: Sequence[int],
    check: Callable[[], object] = lambda: None,
    lengths: Iterable[int] = itertools.repeat(PREFILL_CHUNK),
) -> None:
    """Make a context hold these tokens, decoding what it lacks in passes of these lengths, with ``check`` between."""
    at = context.reuse(tokens)
    for length in lengths:
        if at >= len(tokens):
            return
        check()
        context.decode(tokens[at : at + length], "none")
        at += length


def row_behind(context: Context, text: Sequence[int], check: Callable[[], object] = lambda: None) -> FloatArray:
    """Logits [n_vocab] behind a text, valid until the context's next pass."""
    feed(context, text[:-1], check)
    row: FloatArray = context.decode(text[-1:], "last").logits[0]
    return row


@dataclass(slots=True, eq=False)
class TimedAnswer:
    """An answer of one arm; nothing is decoded before ``advance``."""

    subject: EngineUnderTest
    arm: Arm
    asked: ReadQuestion
    params: SamplingParams
    repeat: int
    order: int  # place among the arms
    _rounds: Iterator[Round] | None = None
    _done: list[Round] = field(default_factory=list)
    _stats: SpecStats = field(default_factory=SpecStats)
    _started: float = 0.0  # seconds since 1970
    _read: float = 0.0  # when the prompt had been read
    _spans: list[tuple[CPUTimes, CPUTimes]] = field(default_factory=list)

    @property
    def backend(self) -> str:
        return self.subject.llm.backend_name

    @property
    def n_tokens(self) -> int:
        return self._stats.completion_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until the answer ended."""
        return self._done[-1].finish_reason if self._done else None

    def advance(self, n_tokens: int | None) -> None:
        """Decode at least ``n_tokens`` more; None: to the end. ``Cancelled``: the subject was stopped."""
        before = CPUTimes.now()
        self.subject.llm.run(partial(self._advance, math.inf if n_tokens is None else self.n_tokens + n_tokens))
        self._spans.append((before, CPUTimes.now()))

    def _advance(self, until: float, pair: Pair) -> None:
        if self._rounds is None:
            self._rounds = self._begin(pair)
        while self.finish_reason is None and self.n_tokens < until:
            round_ = next(self._rounds, None)
            if round_ is None or self.subject.stop.is_set():
                raise Cancelled("measuring was stopped")
            if not self._done:
                self._stats.time_to_first_token_s = self.asked.seconds + time.perf_counter() - self._read
            self._done.append(round_)
            self._stats.add(round_)

    def _begin(self, pair: Pair) -> Iterator[Round]:
        self._started = time.time()
        self.subject.become(self.arm, pair)
        self.asked.put_into(pair.context, max((each.info.n_states for each in pair.state.drafters), default=0))
        stopped = self.subject.stop.is_set
        return rounds(pair, self.asked.tokens, self.params, self.arm.length, self._prefilled, stopped)

    def _prefilled(self, n_cached: int) -> None:
        self._read = time.perf_counter()

    def close(self) -> None:
        rounds = self._rounds
        if rounds is not None:
            self.subject.llm.run(lambda pair: rounds.close())  # type: ignore[attr-defined]

    @property
    def tokens(self) -> list[int]:
        return [token.id for round_ in self._done for token in round_.emitted]

    def sample(self) -> Sample:
        stats, question = self._stats, self.asked.question
        stats.seconds_prompt = self.asked.seconds
        ids = " ".join(map(str, self.tokens))
        assert stats.time_to_first_token_s is not None
        assert self.finish_reason is not None
        return Sample(
            question=question.id,
            category=question.category,
            backend=self.backend,
            arm=self.arm.name,
            repeat=self.repeat,
            order=self.order,
            started=round(self._started, 1),
            prompt_tokens=len(self.asked.tokens),
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
    """Draft tokens that the target compared with its own: at the places of accepted ones and at the next."""
    draft, path, judged = round_.draft, round_.verdict.accepted, list[list[Any]]()
    for position, at in enumerate((-1, *path)):
        for rival in draft.children(at):
            judged.append([draft[rival].source, position, round(draft[rival].expected, 4), int(rival in path)])
    return judged


_WARM_UP = "Count: 1 2 3 4 1 2 3 4 1 2 3"
Json = dict[str, Any]


class EngineUnderTest:
    """A loaded pair that decodes in arms.

    Args:
        llm: the pair; ``remember=False``, so that every run starts from the same knowledge.
        arms: what it will be asked to do, ``plain`` besides. ``UsageError``: one wants a drafter that is not loaded.
        stop: set, it ends an answer within a round.
        system: the system prompt.
        in_slices: whether arms are to take turns within an answer; the attribute says whether memory allows it.
    """

    def __init__(
        self,
        llm: LLM,
        arms: Sequence[Arm],
        stop: threading.Event,
        system: str | None = None,
        *,
        in_slices: bool = False,
    ) -> None:
        self.llm = llm
        self.arms = list(dict.fromkeys([PLAIN, *arms]))
        self.stop = stop
        self._system = [{"role": "system", "content": system}] if system else []
        self.own = llm.run(lambda pair: pair.state)
        self.sources = [drafter.info.source for drafter in self.own.drafters]
        for arm in arms:
            arm.check(self.sources)
        self._untaught = {arm: self.own.fork(arm.among(self.sources)) for arm in self.arms}
        self._states: dict[Arm, DecodingState] = {}
        self._conversations: dict[str, list[Json]] = {}
        self.in_slices = in_slices and llm.run(self._separate_contexts)
        self.forget()

    def forget(self) -> None:
        """Let every arm start anew."""
        self._states = {arm: state.fork() for arm, state in self._untaught.items()}

    def become(self, arm: Arm, pair: Pair) -> None:
        """Decode in an arm whose drafters have read nothing; on the worker."""
        state = self._states[arm]
        for drafter in state.drafters:
            drafter.begin([])
        for draft in state.models:
            draft.context.truncate(0)
        pair.use(state)

    def _separate_contexts(self, pair: Pair) -> bool:
        """Make contexts for every arm but one, which has the pair's own, whose hidden states it wants if any arm does;
        returns False, without any, where memory lacks."""
        wants = {arm: set(taps_of(self._untaught[arm].drafters)) for arm in self.arms}
        last = max(self.arms, key=lambda arm: (wants[arm] == set(self.own.context.hidden), self.arms.index(arm)))
        others = [arm for arm in self.arms if arm is not last]
        kv_type, room = pair.options.kv_cache_type, read_memory().available
        needed = sum(kv_bytes(each, kv_type) for arm in others for each in self._untaught[arm].contexts)
        if needed > room / 2:  # an engine's buffers come on top
            return False
        apart = dict(self._untaught)
        try:
            for arm in others:
                apart[arm] = self.own.fork(arm.among(self.sources), own_contexts=True)
        except EngineError:
            for state in apart.values():
                pair.release(state)
            return False
        self._untaught = apart
        return True

    def restore(self) -> None:
        """Leave the pair as it was."""

        def put_back(pair: Pair) -> None:
            pair.use(self.own)
            for state in self._untaught.values():
                pair.release(state)

        self.llm.run(put_back)

    def warm_up(self) -> None:
        """Decode a little in every arm: the first pass of a width allocates."""
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        for arm in self.arms:
            self.llm.run(partial(self.become, arm))
            with suppress(PromptTooLong):  # a very small context
                self._answer([{"role": "user", "content": _WARM_UP}], params, arm)
        self.forget()

    def n_tokens(self, question: Question) -> int:
        """Tokens of a question's prompt, without answers to its earlier turns."""
        return self.llm.count_tokens([*self._system, *({"role": "user", "content": turn} for turn in question.turns)])

    def read(self, question: Question, params: SamplingParams) -> ReadQuestion:
        """Read a question's prompt into an empty context; earlier turns are answered once, plainly and untimed."""
        if question.id not in self._conversations:
            messages = [*self._system, {"role": "user", "content": question.turns[0]}]
            for turn in question.turns[1:]:
                reply = self._answer(messages, SamplingParams(max_tokens=params.max_tokens), PLAIN)
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": turn}]
            self._conversations[question.id] = messages

        def empty(pair: Pair) -> None:
            self.become(PLAIN, pair)
            pair.context.truncate(0)

        self.llm.run(empty)
        messages = self._conversations[question.id]
        reply = self._answer(messages, replace(params, max_tokens=1), PLAIN)
        tokens = self.llm.encode(messages)

        def state(pair: Pair) -> ContextState | None:
            pair.context.reuse(tokens[:-1])
            return pair.context.export_state() if pair.target.capabilities.saves_state else None

        state_read = self.llm.run(state) if self.in_slices else None
        return ReadQuestion(question, tokens, state_read, reply.stats["seconds_prompt"])

    def _answer(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, arm: Arm) -> Reply:
        speculate, length = not arm.is_plain, arm.length or None
        with self.llm.rounds(messages, params, speculate=speculate, draft_length=length) as stream:
            for _ in stream:
                if self.stop.is_set():
                    stream.close()
            reply = stream.reply
        if self.stop.is_set():
            raise Cancelled("measuring was stopped")
        return reply


def kv_bytes(context: Context, kv_type: str) -> int:
    """Bytes of a context's keys and values; 0 where the model's file does not say."""
    try:
        with GGUFFile(context.model.path) as gguf:
            return kv_shape(gguf).bytes(context.n_ctx, kv_type)
    except ModelFileError:
        return 0


# Schedule: the next question, and when it is enough.


@dataclass(frozen=True, slots=True)
class Block:
    """All arms on one question, once."""

    repeat: int  # from 0
    index: int  # place in the repeat, from 0
    question: Question  # what is asked
    ends_cycle: bool  # whether every category that still has questions has had its turn


def blocks(questions: Sequence[Question], repeats: int) -> Iterator[Block]:
    """The blocks of a run in order; the questions' categories take turns (``in_turns``)."""
    for repeat in range(repeats):
        seen: set[str] = set()
        for index, question in enumerate(questions):
            seen.add(question.category)
            following = questions[index + 1].category if index + 1 < len(questions) else None
            ends = following is None or following in seen
            if ends:
                seen = set()
            yield Block(repeat, index, question, ends)


STOP_LEVEL = 0.999


def is_tight(speedups: Sequence[Values], tolerance: float) -> bool:
    """Whether every arm's speed-up is known to ``tolerance`` (relative half-width) so that the run may end.

    An interval that ends a run by being narrow covers the median less often than it says. So this one is at the level
    of stopped clinical trials (Haybittle 1971; Peto et al. 1976), over the first half of the questions: simulated,
    the printed intervals then cover as they say.
    """
    halves = [dict(itertools.islice(values.items(), (len(values) + 1) // 2)) for values in speedups]
    found = [estimate(half, STOP_LEVEL) for half in halves]
    return bool(found) and all(
        each is not None and (each.level or 0.0) >= STOP_LEVEL and each.half_width <= tolerance for each in found
    )


class Clock:
    """Time budget of a run: ``seconds`` from ``began`` on a monotonic clock."""

    def __init__(self, began: float, seconds: float | None, n_blocks: int) -> None:
        self.deadline = None if seconds is None else began + seconds
        self.n_blocks = n_blocks
        self._took: list[float] = []

    def add(self, seconds: float) -> None:
        self._took.append(seconds)

    def has_time(self, now: float) -> bool:
        """Whether another block fits; the first always does."""
        if self.deadline is None or not self._took:
            return True
        return now + statistics.fmean(self._took[-8:]) <= self.deadline

    def left(self, now: float, n_done: int) -> float | None:
        """Seconds until the end; None while unknown."""
        by_budget = None if self.deadline is None else max(0.0, self.deadline - now)
        if not self._took:
            return by_budget
        by_work = statistics.fmean(self._took[-16:]) * (self.n_blocks - n_done)
        return by_work if by_budget is None else min(by_work, by_budget)


# Arms by turns. Other programs, heat and clock move a machine's speed by more than most speed-ups; arms that answer in
# slices meet the same machine. Each has contexts of its own and shares the weights.

SLICE_TOKENS = 4  # tokens before the next arm's turn: bursts of other programs last a second or less
Place = tuple[int, EngineUnderTest, Arm]  # place in the order of a block, and what answers there


def places(subjects: Sequence[EngineUnderTest], block: Block) -> list[Place]:
    """What answers a block: shifted from question to question, reversed in every other repeat: drift favours none."""
    order = [(subject, arm) for subject in subjects for arm in subject.arms]
    at = block.index % len(order)
    order = order[at:] + order[:at]
    return [(place, *each) for place, each in enumerate(order[::-1] if block.repeat % 2 else order)]


def measure(
    block: Block,
    wanted: Sequence[Place],
    params: SamplingParams,
    slice_tokens: int,
    report: Callable[[TimedAnswer, float], None] = lambda answer, fraction: None,
) -> list[Sample]:
    """Measure one question in several arms, as a whole or not at all (``Cancelled``: a subject was stopped).

    Arms that share contexts answer one after the other, whatever ``slice_tokens``. ``report`` is called before each
    slice (see ``take_turns``), with whose it is and how much is done at least.
    """
    asked = {each: each.read(block.question, params) for each in dict.fromkeys(subject for _, subject, _ in wanted)}
    if not all(subject.in_slices for subject in asked):
        slice_tokens = 0
    with ExitStack() as stack:
        answers = []
        for place, subject, arm in wanted:
            answers.append(TimedAnswer(subject, arm, asked[subject], params, block.repeat, place))
            stack.callback(answers[-1].close)
        budget = len(answers) * (params.max_tokens or subject.llm.n_ctx)
        for i in take_turns(answers, slice_tokens):
            report(answers[i], min(1.0, sum(each.n_tokens for each in answers) / budget))
    plain = {answer.subject: answer.tokens for answer in answers if answer.arm.is_plain and params.greedy}
    return [_parted(answer, plain.get(answer.subject, answer.tokens)) for answer in answers]


def _parted(answer: TimedAnswer, plain: Sequence[int]) -> Sample:
    """A sample, with where it parts from its engine's plain answer and how near the two tokens were."""
    own, sample = answer.tokens, answer.sample()
    at = shared_prefix(own, plain)
    if at == min(len(own), len(plain)):
        return sample
    row = answer.subject.llm.run(lambda pair: row_behind(pair.context, [*answer.asked.tokens, *own[:at]]).copy())
    return replace(sample, parted_at=at, parted_by=round(abs(float(row[own[at]] - row[plain[at]])), 4))


def take_turns(answers: Sequence[TimedAnswer], slice_tokens: int) -> Iterator[int]:
    """Bring answers to their ends by slices, the one with the fewest tokens next; ``slice_tokens`` 0 takes whole
    answers one after the other. Yields the index of the next."""
    left = list(range(len(answers)))
    while left:
        at = min(left, key=lambda i: answers[i].n_tokens) if slice_tokens else left[0]
        yield at
        answers[at].advance(slice_tokens or None)
        left = [i for i in left if answers[i].finish_reason is None]
