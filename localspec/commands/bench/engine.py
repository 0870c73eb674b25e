"""One engine under test: a loaded pair that decodes in one arm after the other, none of them helped by another.

Between two answers an arm's own knowledge is put in place: the corrections of its cost model, its acceptance tables and
its n-grams' hit rates. Draft models forget what they have read, so that reading the prompt is in the arm that needs it.
The target keeps the prompt in its memory: its reading of it is measured once, apart, and is in no arm.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from localspec.backends.base import Context, ContextState
from localspec.backends.trust import fingerprint
from localspec.commands.bench.arms import PLAIN, Arm
from localspec.commands.bench.lane import Asked, Stopped, UnderWay, hold
from localspec.commands.bench.record import Engine, ModelFile
from localspec.commands.doctor.costs import WIDTHS, Watch
from localspec.commands.doctor.header import read_header
from localspec.commands.questions import Question
from localspec.controllers.calibration import calibrating
from localspec.controllers.cost_model import PassTimes
from localspec.errors import EngineError, ModelFileError, PromptTooLong
from localspec.llm import LLM
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.gguf_parts import model_bytes, model_files
from localspec.model_files.kv_memory import kv_shape
from localspec.runtime.pair import Pair
from localspec.runtime.state import DecodingState
from localspec.runtime.stream import Reply
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.rounds import Round
from localspec.system.home import home
from localspec.system.json_store import JsonStore
from localspec.system.memory import read_memory
from localspec.system.steps import exhaust

_WARM_UP = "Count: 1 2 3 4 1 2 3 4 1 2 3"

Json = dict[str, Any]


class EngineUnderTest:
    """A loaded pair.

    Args:
        llm: the pair; ``remember=False``, so that every run starts from the same knowledge.
        arms: what it will be asked to do.
        stop: set when somebody wants to stop.
        system: the system prompt.
        in_slices: whether arms are to take turns within an answer, for which each needs a lane of its own.

    Attributes:
        in_slices: whether they can: whether there was memory for the lanes.

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
        self.arms = list(arms)
        self._stop = stop
        self._system = [{"role": "system", "content": system}] if system else []
        self._own = llm.run(lambda pair: pair.state)
        """The pair's state as it was loaded; arms decode with forks of their lane, so this learns nothing."""
        self.sources = [drafter.source for drafter in self._own.drafters]
        for arm in arms:
            arm.check(self.sources)
        self._lanes = {arm.name: self._own.fork(self._sources_of(arm)) for arm in [PLAIN, *arms]}
        self._learned: dict[str, DecodingState] = {}
        self._conversations: dict[str, list[Json]] = {}
        self.in_slices = in_slices and llm.run(self._make_lanes)
        self.forget()

    # -- arms ----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Let every arm start anew."""
        self._learned = {name: lane.fork() for name, lane in self._lanes.items()}

    def _become(self, arm: Arm, pair: Pair) -> None:
        """Only this arm's drafters, with what it has learned, and with no text in their memories; on the worker."""
        state = self._learned[arm.name]
        for drafter in state.drafters:
            drafter.begin([])
        for draft in state.models:
            draft.context.truncate(0)
        pair.use(state)

    def _make_lanes(self, pair: Pair) -> bool:
        """A lane for every arm but one, which has the pair's own; False, and none, where memory lacks for them."""
        arms = [arm for arm in self.arms if not arm.is_plain]
        others = [arm for arm in [*arms[1:], PLAIN] if arms]
        room = read_memory().available
        kv_type = pair.options.kv_type
        need = sum(_context_bytes(each, kv_type) for arm in others for each in self._lanes[arm.name].contexts)
        if room is not None and need > room / 2:
            return False
        made: dict[str, DecodingState] = {}
        try:
            for arm in others:
                made[arm.name] = self._own.fork(self._sources_of(arm), own_contexts=True)
        except EngineError:
            for lane in made.values():
                pair.release(lane)
            return False
        self._lanes |= made
        return True

    def _sources_of(self, arm: Arm) -> list[str]:
        return [] if arm.is_plain else [source for source in self.sources if arm.source in (None, source)]

    def restore(self) -> None:
        """Leave the pair as it was, so that it can be closed."""

        def put_back(pair: Pair) -> None:
            pair.use(self._own)
            for lane in self._lanes.values():
                pair.release(lane)

        self.llm.run(put_back)

    # -- measuring -----------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Decode a little in every arm: the first pass of a width allocates."""
        for arm in self.arms:
            self.llm.run(partial(self._become, arm))
            with suppress(PromptTooLong):  # a very small context
                self._answer(
                    [{"role": "user", "content": _WARM_UP}], SamplingParams(max_tokens=8, ignore_eos=True), arm
                )
        self.forget()

    def n_tokens(self, question: Question) -> int:
        """Tokens of a question's prompt; its earlier turns count without their answers."""
        return self.llm.count_tokens(self._messages(question))

    def _messages(self, question: Question) -> list[Json]:
        return [*self._system, *({"role": "user", "content": turn} for turn in question.turns)]

    def prepare(self, question: Question, params: SamplingParams) -> Asked:
        """Read a question's prompt into an empty memory.

        Earlier turns are answered first, plainly and untimed, the first time that a question is met.
        """
        if question.id not in self._conversations:
            messages = [*self._system, {"role": "user", "content": question.turns[0]}]
            for turn in question.turns[1:]:
                reply = self._answer(messages, SamplingParams(max_tokens=params.max_tokens), PLAIN)
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": turn}]
            self._conversations[question.id] = messages

        def empty(pair: Pair) -> None:
            self._become(PLAIN, pair)
            pair.context.truncate(0)

        self.llm.run(empty)
        messages, once = self._conversations[question.id], replace(params, max_tokens=1)
        reply = self._answer(messages, once, PLAIN)
        tokens = self.llm.encode(messages)

        def state(pair: Pair) -> ContextState | None:
            context = pair.context
            context.reuse(tokens[:-1])
            return context.export_state() if context.model.capabilities.saves_state else None

        return Asked(question, tokens, self.llm.run(state) if self.in_slices else None, reply.stats["seconds_prompt"])

    def begin(self, arm: Arm, asked: Asked, params: SamplingParams, place: tuple[int, int]) -> UnderWay:
        """One answer, the prompt being in the target's memory; nothing is decoded yet.

        Args:
            arm: how to decode.
            asked: what ``prepare`` returned last.
            params: how to sample.
            place: the repeat, and the place in the order of arms.
        """

        def rounds(pair: Pair, prefilled: Callable[[int], None]) -> Iterator[Round]:
            self._become(arm, pair)
            hold(pair.context, asked)
            return pair.rounds(asked.tokens, params, arm.length, prefilled, self._stop.is_set)

        return UnderWay(self.llm, arm, asked, place, rounds, self._stop)

    def _answer(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, arm: Arm) -> Reply:
        length = arm.length if arm.length else None
        with self.llm.rounds(messages, params, speculate=not arm.is_plain, draft_length=length) as stream:
            for _ in stream:
                if self._stop.is_set():
                    stream.close()
            reply = stream.reply
        if self._stop.is_set():
            raise Stopped
        return reply

    # -- what it is ----------------------------------------------------------------------------------------------

    def facts(self, kv_cache: str, watch: Watch, *, measure: bool) -> Engine:
        """What ran here.

        Args:
            kv_cache: type of the attention cache.
            watch: progress and interruption.
            measure: measure t(w) now, rather than tell what was measured at the first load.
        """
        llm, own = self.llm, self._own
        loaded = [("target", llm.model_name, own.context)]
        loaded += [(draft.source, draft.name, draft.context) for draft in own.models]
        times = {"target": own.times} | {draft.source: draft.times for draft in own.models}
        measured: Literal["now", "before"] = "before"
        if measure:
            measured = "now"
            for source, name, context in loaded:
                watch.report(f"measuring what a pass of {name} costs", None)
                times[source] = watch.call(llm, partial(_measured, context, watch))
        return Engine(
            backend=llm.backend_name,
            version=llm.engine,
            device=own.target.capabilities.device,
            threads=own.target.n_threads,
            n_ctx=llm.n_ctx,
            models=[
                ModelFile(
                    source,
                    name,
                    context.model.path.name,
                    context.model.size_bytes,
                    sha256(context.model.path, watch),
                    _kv(context, kv_cache),
                )
                for source, name, context in loaded
            ],
            sources=self.sources,
            pass_ms={str(width): round(times["target"](width), 4) for width in WIDTHS},
            draft_ms={draft.source: round(times[draft.source](1), 4) for draft in own.models},
            passes_measured=measured,
            warnings=llm.warnings,
        )


def _measured(context: Context, watch: Watch, pair: Pair) -> PassTimes:
    return exhaust(calibrating(context.model, context.n_ctx), tick=watch.check)


def _kv(context: Context, kv_cache: str) -> int:
    try:
        with GGUFFile(context.model.path) as gguf:
            return kv_shape(gguf).bytes(context.n_ctx, kv_cache)
    except ModelFileError:
        return 0


def _context_bytes(context: Context, kv_type: str) -> int:
    """What another context like this one takes."""
    try:
        need = read_header(context.model.path).need("", context.n_ctx, kv_type, context.model.backend)
    except ModelFileError:
        return 0
    return (need.kv_bytes or 0) + (need.compute_bytes or 0)


def sha256(path: Path, watch: Watch) -> str:
    """A model's digest, of all its parts one after the other; kept, as reading a large file takes seconds."""
    files = model_files(path)
    changed = " ".join(str(file.stat().st_mtime_ns) for file in files)
    store, key = JsonStore(home() / "digests", 1), {"file": fingerprint(path), "changed": changed}
    known = (store.get(key) or {}).get("sha256")
    if isinstance(known, str):
        return known
    found, done, size = hashlib.sha256(), 0, model_bytes(path) or 1
    for each in files:
        with each.open("rb") as file:
            while block := file.read(1 << 22):
                found.update(block)
                done += len(block)
                watch.report(f"digest of {path.name}", done / size)
    store.put(key, {"sha256": found.hexdigest()})
    return found.hexdigest()
