"""A loaded pair that decodes in one arm after the other, none of them helped by another.

Each arm decodes with a state of its own: the corrections of its cost model, its acceptance tables and its n-grams' hit
rates. Draft models forget what they have read, so that reading the prompt is in the arm that needs it. The target keeps
the prompt in its context: its reading of it is measured once, apart, and is in no arm.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from localspec.backends.base import Context, ContextState, FloatArray
from localspec.errors import Cancelled, EngineError, ModelFileError, PromptTooLong
from localspec.llm import LLM
from localspec.measuring.answer import ReadQuestion
from localspec.measuring.arms import PLAIN, Arm
from localspec.measuring.questions import Question
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.kv_memory import kv_shape
from localspec.runtime.pair import Pair
from localspec.runtime.state import DecodingState, taps_of
from localspec.runtime.stream import Reply
from localspec.sampling.sampling import SamplingParams
from localspec.system.memory import read_memory

_WARM_UP = "Count: 1 2 3 4 1 2 3 4 1 2 3"

Json = dict[str, Any]


class EngineUnderTest:
    """A loaded pair.

    Args:
        llm: the pair; ``remember=False``, so that every run starts from the same knowledge.
        arms: what it will be asked to do; ``plain`` always is among it.
        stop: set, it ends an answer within a round.
        system: the system prompt.
        in_slices: whether arms are to take turns within an answer, for which each needs contexts of its own.

    Attributes:
        in_slices: whether they can: whether there was memory for the contexts.
        own: the pair's state as it was loaded; arms decode with forks of it, so it learns nothing.

    Raises:
        UsageError: an arm wants a drafter that is not loaded.
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
        self.sources = [drafter.source for drafter in self.own.drafters]
        for arm in arms:
            arm.check(self.sources)
        self._untaught = {arm: self.own.fork(arm.among(self.sources)) for arm in self.arms}
        self._states: dict[Arm, DecodingState] = {}
        self._conversations: dict[str, list[Json]] = {}
        self.in_slices = in_slices and llm.run(self._separate_contexts)
        self.forget()

    # -- arms ----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Let every arm start anew."""
        self._states = {arm: state.fork() for arm, state in self._untaught.items()}

    def become(self, arm: Arm, pair: Pair) -> None:
        """Decode in an arm, its drafters having read nothing; on the worker."""
        state = self._states[arm]
        for drafter in state.drafters:
            drafter.begin([])
        for draft in state.models:
            draft.context.truncate(0)
        pair.use(state)

    def _separate_contexts(self, pair: Pair) -> bool:
        """Contexts for every arm but one, which has the pair's own; False, and none, where memory lacks for them.

        The one is an arm that wants the hidden states that the pair's own context returns, where there is one.
        """
        wants = {arm: set(taps_of(self._untaught[arm].drafters)) for arm in self.arms}
        last = max(self.arms, key=lambda arm: (wants[arm] == set(self.own.context.hidden), self.arms.index(arm)))
        others = [arm for arm in self.arms if arm is not last]
        kv_type, room = pair.options.kv_cache_type, read_memory().available
        needed = sum(kv_bytes(each, kv_type) for arm in others for each in self._untaught[arm].contexts)
        if room is not None and needed > room / 2:  # an engine's buffers come on top
            return False
        made: dict[Arm, DecodingState] = {}
        try:
            for arm in others:
                made[arm] = self.own.fork(arm.among(self.sources), own_contexts=True)
        except EngineError:
            for state in made.values():
                pair.release(state)
            return False
        self._untaught = made | {last: self._untaught[last]}
        return True

    def restore(self) -> None:
        """Leave the pair as it was, so that it can be closed."""

        def put_back(pair: Pair) -> None:
            pair.use(self.own)
            for state in self._untaught.values():
                pair.release(state)

        self.llm.run(put_back)

    # -- measuring -----------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Decode a little in every arm: the first pass of a width allocates."""
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        for arm in self.arms:
            self.llm.run(partial(self.become, arm))
            with suppress(PromptTooLong):  # a very small context
                self._answer([{"role": "user", "content": _WARM_UP}], params, arm)
        self.forget()

    def n_tokens(self, question: Question) -> int:
        """Tokens of a question's prompt; its earlier turns count without their answers."""
        return self.llm.count_tokens([*self._system, *({"role": "user", "content": turn} for turn in question.turns)])

    def read(self, question: Question, params: SamplingParams) -> ReadQuestion:
        """Read a question's prompt into an empty context.

        Earlier turns are answered first, plainly and untimed, the first time that a question is met.

        Raises:
            Cancelled: it was stopped.
        """
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

    def row_behind(self, tokens: Sequence[int]) -> FloatArray:
        """The target's logits [n_vocab] for what follows a text, in a pass of one token."""

        def row(pair: Pair) -> FloatArray:
            context = pair.context
            n = context.reuse(tokens[:-1])
            if n < len(tokens) - 1:
                context.decode(tokens[n:-1], "none")
            found: FloatArray = context.decode(tokens[-1:], "last").logits[0].copy()
            return found

        return self.llm.run(row)

    def _answer(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, arm: Arm) -> Reply:
        length = arm.length if arm.length else None
        with self.llm.rounds(messages, params, speculate=not arm.is_plain, draft_length=length) as stream:
            for _ in stream:
                if self.stop.is_set():
                    stream.close()
            reply = stream.reply
        if self.stop.is_set():
            raise Cancelled("measuring was stopped")
        return reply


def kv_bytes(context: Context, kv_type: str) -> int:
    """What a context's keys and values take; 0 where the model's file does not say."""
    try:
        with GGUFFile(context.model.path) as gguf:
            return kv_shape(gguf).bytes(context.n_ctx, kv_type)
    except ModelFileError:
        return 0
