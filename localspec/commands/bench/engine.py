"""One engine under test: a loaded pair that decodes in one arm after the other, none of them helped by another.

Between two answers an arm's own knowledge is put in place: the corrections of its cost model, its acceptance tables and
its n-grams' hit rates. Draft models forget what they have read, so that reading the prompt is in the arm that needs it.
The target keeps the prompt in its memory: its reading of it is measured once, apart, and is in no arm.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from localspec.backends.base import Context, ContextState, Model
from localspec.backends.trust import fingerprint
from localspec.commands.bench.arms import PLAIN, Arm
from localspec.commands.bench.conditions import Watcher
from localspec.commands.bench.lane import Asked, Lane, Stopped, UnderWay, hold
from localspec.commands.bench.record import Engine, ModelFile
from localspec.commands.doctor.costs import WIDTHS, Watch
from localspec.commands.doctor.header import read_header
from localspec.commands.questions import Question
from localspec.controllers.cost_model import PassTimes, calibrate_model
from localspec.errors import EngineError, ModelFileError, PromptTooLong
from localspec.llm import LLM
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.gguf_parts import model_bytes, model_files
from localspec.model_files.kv_memory import kv_shape
from localspec.runtime.pair import Pair
from localspec.runtime.stream import Reply
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.rounds import Round
from localspec.system.home import home
from localspec.system.json_store import JsonStore
from localspec.system.memory import read_memory

_WARM_UP = "Count: 1 2 3 4 1 2 3 4 1 2 3"

Json = dict[str, Any]


@dataclass(slots=True)
class _Knowledge:
    """What an arm has learned."""

    times: PassTimes
    draft_times: dict[str, PassTimes]
    experience: Any
    hits: list[Any]


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
        pair = llm._pair
        self._own = Lane(pair.context, list(pair._drafters), dict(pair._models))
        self._lanes = {arm.name: self._own for arm in [PLAIN, *arms]}
        self.sources = [drafter.source for drafter in self._own.drafters]
        for arm in arms:
            arm.check(self.sources)
        self._draft_sources = list(pair._draft_times)
        self._fresh = self._knowledge()
        self._learned: dict[str, _Knowledge] = {}
        self._conversations: dict[str, list[Json]] = {}
        self.forget()
        self.in_slices = in_slices and llm._call(self._make_lanes)

    # -- arms ----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Let every arm start anew."""
        self._learned = {arm.name: copy.deepcopy(self._fresh) for arm in self.arms}
        self._learned.setdefault(PLAIN.name, copy.deepcopy(self._fresh))

    def _knowledge(self) -> _Knowledge:
        pair = self.llm._pair
        hits = [drafter._hits for drafter in self._own.drafters if isinstance(drafter, NgramDrafter)]
        return copy.deepcopy(_Knowledge(pair.times, pair._draft_times, pair._experience, hits))

    def _become(self, arm: Arm) -> None:
        """Only this arm's drafters, with what it has learned, and with no text in their memories; on the worker."""
        pair, known, lane = self.llm._pair, self._learned[arm.name], self._lanes[arm.name]
        models = zip(self._draft_sources, lane.models.items(), strict=True)
        pair.context = lane.context
        pair._drafters = [drafter for drafter in lane.drafters if arm.source in (None, drafter.source)]
        pair._models = {path: model for source, (path, model) in models if arm.source in (None, source)}
        pair._draft_times = {s: times for s, times in known.draft_times.items() if arm.source in (None, s)}
        pair.times, pair._experience = known.times, known.experience
        ngrams = [drafter for drafter in lane.drafters if isinstance(drafter, NgramDrafter)]
        for drafter, hits in zip(ngrams, known.hits, strict=True):
            drafter._hits = hits
        for each in lane.drafters:
            each.begin([])
        for _, context in lane.models.values():
            context.truncate(0)

    def _make_lanes(self) -> bool:
        """A lane for every arm but one, which has the pair's own; False, and none, where memory lacks for them."""
        arms = [arm for arm in self.arms if not arm.is_plain]
        others = [arm for arm in [*arms[1:], PLAIN] if arms]
        room = read_memory().available
        need = sum(
            _context_bytes(each, self.llm._pair) for arm in others for each in self._own.asked(self._sources_of(arm))
        )
        if room is not None and need > room / 2:
            return False
        made: dict[str, Lane] = {}
        try:
            for arm in others:
                made[arm.name] = self._own.another(self._sources_of(arm))
        except EngineError:
            for lane in made.values():
                lane.close(self.llm._pair, self._own)
            return False
        self._lanes |= made
        return True

    def _sources_of(self, arm: Arm) -> list[str]:
        return [] if arm.is_plain else [source for source in self.sources if arm.source in (None, source)]

    def restore(self) -> None:
        """Leave the pair as it was, so that it can be closed."""

        def put_back() -> None:
            pair = self.llm._pair
            pair.context = self._own.context
            pair._drafters, pair._models = self._own.drafters, dict(self._own.models)
            for lane in self._lanes.values():
                lane.close(pair, self._own)
            pair.times, pair._draft_times = self._fresh.times, self._fresh.draft_times
            pair._experience = self._fresh.experience

        self.llm._call(put_back)

    # -- measuring -----------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Decode a little in every arm: the first pass of a width allocates."""
        for arm in self.arms:
            self.llm._call(partial(self._become, arm))
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

        def empty() -> None:
            self._become(PLAIN)
            self.llm._pair.context.truncate(0)

        self.llm._call(empty)
        messages, once = self._conversations[question.id], replace(params, max_tokens=1)
        reply = self._answer(messages, once, PLAIN)
        tokens = self.llm.encode(messages)

        def state() -> ContextState | None:
            context = self.llm._pair.context
            context.reuse(tokens[:-1])
            return context.export_state() if context.model.capabilities.saves_state else None

        return Asked(question, tokens, self.llm._call(state) if self.in_slices else None, reply.stats["seconds_prompt"])

    def begin(
        self, arm: Arm, asked: Asked, params: SamplingParams, place: tuple[int, int], watcher: Watcher
    ) -> UnderWay:
        """One answer, the prompt being in the target's memory; nothing is decoded yet.

        Args:
            arm: how to decode.
            asked: what ``prepare`` returned last.
            params: how to sample.
            place: the repeat, and the place in the order of arms.
            watcher: looks at the machine.
        """

        def rounds(prefilled: Callable[[int], None]) -> Iterator[Round]:
            self._become(arm)
            pair = self.llm._pair
            hold(pair.context, asked)
            return pair.rounds(asked.tokens, params, arm.length, prefilled, self._stop.is_set)

        return UnderWay(self.llm, arm, asked, place, rounds, self._stop, watcher)

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
        llm, pair = self.llm, self.llm._pair
        loaded = [("target", llm.model_name, pair.target, self._own.context)]
        names = {drafter.source: drafter.name for drafter in self._own.drafters}
        for source, (model, context) in zip(self._draft_sources, self._own.models.values(), strict=True):
            loaded.append((source, names[source], model, context))
        times: dict[str, PassTimes] = {"target": self._fresh.times, **self._fresh.draft_times}
        measured: Literal["now", "before"] = "before"
        if measure:
            measured = "now"
            for source, name, model, context in loaded:
                watch.report(f"measuring what a pass of {name} costs", None)
                times[source] = watch.call(llm, partial(_measured, model, context, watch))
        return Engine(
            backend=llm.backend_name,
            version=llm.engine,
            device=pair.target.capabilities.device,
            threads=pair.target.n_threads,
            n_ctx=llm.n_ctx,
            models=[
                ModelFile(
                    source,
                    name,
                    model.path.name,
                    model.size_bytes,
                    sha256(model.path, watch),
                    _kv(model, context, kv_cache),
                )
                for source, name, model, context in loaded
            ],
            sources=self.sources,
            pass_ms={str(width): round(times["target"](width), 4) for width in WIDTHS},
            draft_ms={source: round(times[source](1), 4) for source in self._draft_sources},
            passes_measured=measured,
            warnings=llm.warnings,
        )


def _measured(model: Model, context: Context, watch: Watch) -> PassTimes:
    return calibrate_model(model, context.n_ctx, tick=watch.check)


def _kv(model: Model, context: Context, kv_cache: str) -> int:
    try:
        with GGUFFile(model.path) as gguf:
            return kv_shape(gguf).bytes(context.n_ctx, kv_cache)
    except ModelFileError:
        return 0


def _context_bytes(context: Context, pair: Pair) -> int:
    """What another context like this one takes."""
    try:
        need = read_header(context.model.path).need("", context.n_ctx, pair.options.kv_type, context.model.backend)
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
