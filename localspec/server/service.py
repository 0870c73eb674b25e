"""Answering requests with one ``LLM``: the line in front of it, and what is counted."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from prometheus_client import Histogram, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

from localspec._version import __version__
from localspec.engine.request import AsyncRoundStream, Reply
from localspec.engine.worker import Job
from localspec.errors import PromptTooLong, QueueFull, UsageError
from localspec.llm import LLM
from localspec.prompts.infill import FillPrompt
from localspec.sampling.constraint import constraint_for
from localspec.sampling.sampling import SamplingParams
from localspec.server.access import Client
from localspec.server.http import ServerSettings, as_api_error, invalid, too_busy, too_late
from localspec.server.requests import AnswerOptions, ChatRequest, CompletionRequest, ServedModel
from localspec.server.tool_calls import MARKERS
from localspec.server.tools import Delta, DeltaReader, ToolUse, forced_call, messages_for
from localspec.spec_decode.rounds import PromptProgress, Round, SpecStats

# Answers of ``/v1/responses`` that later requests may go on from, by ``previous_response_id``.

MAX_RESPONSES, MAX_BYTES = 1000, 64 << 20
"""As much as may be kept for requests that are being read (``ServerSettings.bodies_bytes``)."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer as it was sent, the conversation up to and with it (without instructions), and whose it is."""

    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    owner: str = ""


class ResponseStore:
    """Keeps so many answers in memory, of so many bytes as JSON; those used least recently go first. Thread-safe."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max = max_responses, max_bytes
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    def put(self, name: str, stored: StoredResponse) -> None:
        n_bytes = len(json.dumps([stored.response, stored.messages]))
        with self._lock:
            self._kept[name] = stored, n_bytes
            self._n_bytes += n_bytes
            while len(self._kept) > self._max[0] or self._n_bytes > self._max[1]:
                self._n_bytes -= self._kept.popitem(last=False)[1][1]

    def get(self, name: str) -> StoredResponse | None:
        with self._lock:
            if name not in self._kept:
                return None
            self._kept.move_to_end(name)
            return self._kept[name][0]

    def item(self, name: str, may_read: Callable[[str], bool]) -> dict[str, Any] | None:
        """An item of an answer that is kept, by its id, which is made of the answer's; ``may_read`` asks the owner."""
        stored = self.get(f"resp_{name.partition('_')[2][:-4]}")
        items = stored.response["output"] if stored is not None and may_read(stored.owner) else ()
        return next((item for item in items if item["id"] == name), None)

    def remove(self, name: str) -> bool:
        with self._lock:
            if name not in self._kept:
                return False
            self._n_bytes -= self._kept.pop(name)[1]
            return True


# What the server counts, for ``/v1/localspec/stats`` and ``/metrics``.

OUTCOMES = ("answered", "cancelled", "invalid", "rejected", "failed")
"""How a request ends: answered, its client left, a wrong request (4xx), turned away (429, 503), failed (500)."""

_OF_ONE_ANSWER = ("time_to_first_token_s", "estimated_plain_tokens_per_second", "estimated_speedup", "reason")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class Metrics(Collector):
    """Totals since the start. Used from the event loop only."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.stats = SpecStats()
        self._seconds_answered = 0.0

        def seconds(stem: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"localspec_{stem}_seconds", about, buckets=buckets, registry=None)

        self._request = seconds("request", "From a request to the end of its answer.", _SECONDS)
        self._first_token = seconds("time_to_first_token", "From its turn to the first token.", _SECONDS)
        self._token = seconds("time_per_output_token", "Decoding time over tokens.", _TOKEN_SECONDS)

    def finished(self, endpoint: str, outcome: str, seconds: float) -> None:
        self.requests[endpoint, outcome] += 1
        if outcome == "answered":
            self._seconds_answered += seconds
            self._request.observe(seconds)

    def count(self, reply: Reply) -> None:
        stats = reply.stats
        self.stats = SpecStats.total([self.stats, stats])
        if stats.time_to_first_token_s is not None:
            self._first_token.observe(stats.time_to_first_token_s)
        if stats.completion_tokens:
            self._token.observe(stats.seconds_decode / stats.completion_tokens)

    @property
    def mean_request_seconds(self) -> float:
        """How long a request takes, by those that were answered."""
        n = self._by_outcome()["answered"]
        return self._seconds_answered / n if n else 2.0

    def _by_outcome(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (_, outcome), count in self.requests.items():
            found[outcome] += count
        return found

    def as_dict(self) -> dict[str, Any]:
        """The totals under the names of ``SpecStats``."""
        by_outcome = self._by_outcome()
        totals = {name: value for name, value in self.stats.items() if name not in _OF_ONE_ANSWER}
        return {"requests": {outcome: by_outcome[outcome] for outcome in OUTCOMES}, **totals}

    def collect(self) -> Iterator[Metric]:
        """The totals as families of Prometheus."""
        stats = self.stats
        of_source = sorted(stats.by_source.items())
        drafted = [((source,), counts["num_draft_tokens"]) for source, counts in of_source]
        accepted = [((source,), counts["num_accepted_tokens"]) for source, counts in of_source]
        positions = [((str(i),), n) for i, n in enumerate(stats.accepted_per_position)]
        phases = [((phase,), stats[f"seconds_{phase}"]) for phase in ("draft", "other", "prompt", "verify")]
        counters: tuple[tuple[str, str, str, Iterable[tuple[tuple[str, ...], float]]], ...] = (
            ("requests", "Requests by how they ended.", "endpoint outcome", sorted(self.requests.items())),
            ("prompt_tokens", "Tokens of prompts.", "", [((), stats.prompt_tokens)]),
            ("cached_prompt_tokens", "Those that were in memory.", "", [((), stats.cached_tokens)]),
            ("completion_tokens", "Tokens of answers.", "", [((), stats.completion_tokens)]),
            ("rounds", "Passes of the target that emitted tokens.", "", [((), stats.num_rounds)]),
            ("draft_tokens", "Draft tokens sent to the target, by drafter.", "source", drafted),
            ("accepted_tokens", "Draft tokens it accepted, by drafter.", "source", accepted),
            ("accepted_tokens_per_position", "Accepted by place in the draft.", "position", positions),
            ("seconds", "Time by what it went into.", "phase", phases),
        )
        for stem, about, labels, samples in counters:
            family = CounterMetricFamily(f"localspec_{stem}", about, labels=labels.split())
            for values, number in samples:
                family.add_metric(values, number)
            yield family
        for histogram in (self._request, self._first_token, self._token):
            for metric in histogram.collect():
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
                yield metric


@contextmanager
def counted(of: Callable[[], Metrics], endpoint: str, started: float, *, goes_on: bool = False) -> Iterator[None]:
    """Count a request by how the block ends, where ``of`` says then; ``goes_on``: only if it fails there, as another
    block follows."""
    outcome = "cancelled"
    try:
        yield
        outcome = "answered"
    except Exception as error:
        if not isinstance(error, ClientDisconnect):
            status = as_api_error(error).status
            outcome = "rejected" if status in (429, 503) else "invalid" if status < 500 else "failed"
        raise
    finally:
        if not (goes_on and outcome == "answered"):
            of().finished(endpoint, outcome, time.monotonic() - started)


FILL_PRIORITY = 1
"""Priority of a completion at a cursor where the request names none: it is short, and a person waits for it."""


@dataclass(frozen=True, slots=True)
class AnswerTask:
    """One answer to make.

    Attributes:
        prompt: token ids.
        params: the sampling parameters.
        tools: functions that may be called; none where a schema says what the answer is.
        prediction: token ids of a text that the answer is likely to repeat.
        opening: the beginning of the answer that stands at the prompt's end.
        keep_tokens: see ``Asking.rounds``.
        enough: asked after every round: whether the answer may end there.
        think: of a chat, see ``Asking.rounds``; None: a text, where thinking is not separated.
    """

    prompt: list[int]
    params: SamplingParams
    tools: ToolUse = field(default_factory=ToolUse)
    prediction: Sequence[int] = ()
    opening: str = ""
    keep_tokens: int | None = None
    enough: Callable[[], bool] = lambda: False
    think: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """What happened to answer ``index``: how far its prompt is read, where that was asked for; a round and the delta
    that it makes; or the end and the last delta."""

    index: int
    delta: Delta
    round: Round | None = None
    reply: Reply | None = None
    finish_reason: str | None = None
    progress: PromptProgress | None = None


Kept = TypeVar("Kept")


class Service:
    """Answers with one model.

    Args:
        llm: the loaded pair.
        settings: how to behave.
        responses: the answers that the server keeps.
        metrics: what is counted, also before the model was loaded.
        names: what requests may call the model; the first is what answers call it.

    Attributes:
        client: who is answered, see ``seen_by``.
    """

    def __init__(
        self, llm: LLM, settings: ServerSettings, responses: ResponseStore, metrics: Metrics, names: Sequence[str]
    ) -> None:
        self.llm, self.settings = llm, settings
        self.responses, self.metrics, self.names = responses, metrics, names
        llm.max_queue = settings.queue
        self.client = Client()
        self._kept: dict[tuple[str, Any], Any] = {}
        self.fingerprint = f"localspec-{__version__}-{llm.backend_name}"
        llm.vocab.show(MARKERS)  # the marks of tool calls are read as text

    def seen_by(self, client: Client) -> Service:
        """The service as a client sees it: with the drafters that it may use, and what is kept for it."""
        seen = copy(self)
        seen.client = client
        return seen

    def kept(self, kind: Callable[[], Kept]) -> Kept:
        """What an API keeps for the client, the same one from its first request on. Thread-safe."""
        found: Kept = self._kept.setdefault((self.client.owner, kind), kind())
        return found

    def close(self) -> None:
        """Free the model; what it still answers is cancelled."""
        self.llm.close(cancel=True)

    @property
    def drafters(self) -> dict[str, str]:
        return self.client.drafters(self.llm.draft_names)

    def served(self) -> ServedModel:
        llm, settings, drafters = self.llm, self.settings, self.drafters
        on_request = [public for public, name in drafters.items() if name in settings.corpora]
        thinks = llm.thinking is not None
        as_loaded = {name: public for public, name in drafters.items()}
        names, n_vocab = list(drafters), llm.vocab.n_tokens
        item = partial(self.responses.item, may_read=self.client.may_read)
        return ServedModel(settings.params, names, n_vocab, on_request, thinks, item, as_loaded)

    # -- prompts -------------------------------------------------------------------------------------------------------

    def tasks(self, request: ChatRequest | CompletionRequest) -> list[AnswerTask]:
        """What is to be answered: one task of a chat, one of each text. It takes time: not for the event loop.

        Raises:
            UsageError, TemplateError: the messages fit neither template nor context, or the model has no tokens to fill
                in between two texts.
        """
        options = request.options
        if isinstance(request, ChatRequest):
            return [self.chat_task(request.messages, request.tools, options)]
        return [self.text_task(prompt, request.suffix, options) for prompt in request.prompts]

    def chat_task(self, messages: Sequence[Any], tools: ToolUse, options: AnswerOptions) -> AnswerTask:
        """Messages through the chat template."""
        task = self.chat_prompt(messages, tools, options, self.llm.n_ctx)
        if not tools.required and task.params.constrained and task.params.grammar is None:  # a schema; not a tool's
            tools = ToolUse()
        return self._ready(replace(task, tools=tools), options)

    def text_task(self, prompt: str | list[int], suffix: str | None, options: AnswerOptions) -> AnswerTask:
        """A text to continue, in which editors may have written the marks of fill-in-the-middle; one to fill in before
        a suffix; or token ids."""
        fill: FillPrompt | None = None
        if suffix is not None:
            fill = self.llm.fill_prompt(str(prompt), suffix, max_tokens=options.params.max_tokens)
        elif isinstance(prompt, str):
            fill = self.llm.marked_fill_prompt(prompt)
        if fill is not None:
            return self._ready(AnswerTask(fill.tokens, options.params, keep_tokens=fill.n_before), options)
        tokens = prompt if isinstance(prompt, list) else self.llm.encode(prompt, room=self.llm.n_ctx)
        return self._ready(AnswerTask(tokens, options.params), options)

    def _ready(self, task: AnswerTask, options: AnswerOptions) -> AnswerTask:
        """The task with the prediction that came with it, if there is room for its prompt."""
        constraint_for(task.params, self.llm.vocab)  # compiled here, and not while the engine waits
        n_ctx = self.llm.n_ctx
        if not task.prompt:
            raise UsageError("the prompt is empty: there is nothing to continue")
        if len(task.prompt) >= n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(task.prompt)} tokens and the context holds {n_ctx}, answer included; "
                "shorten it, or start the server with a larger --ctx"
            )
        predicted = options.prediction[: n_ctx * self.llm.vocab.longest]  # no answer is longer than the context
        return replace(task, prediction=self.llm.tokenize(predicted)[:n_ctx] if predicted else [])

    def chat_prompt(
        self, messages: Sequence[Any], tools: ToolUse, options: AnswerOptions, room: int | None = None
    ) -> AnswerTask:
        """The prompt of a chat, and how its answer begins; ``room``: see ``LLM.encode``. It may take a while too.

        Raises:
            ApiError: a variable that the template does not know.
            UsageError, TemplateError: the messages cannot be.
        """
        params, opening, think = options.params, "", options.think
        if tools.required:
            opening, params = forced_call(self.llm.template, tools, params)
        if think == "auto" and params.constrained:
            think = "off"  # what has a given form begins at once
        for name in options.variables:
            if not re.search(rf"\b{re.escape(name)}\b", self.llm.template.source):
                path = f"chat_template_kwargs.{name:.60}"
                raise invalid(f"{path}: the model's chat template has no such variable", path)
        tokens = self.llm.encode(
            messages_for(messages, self.settings.system),
            tools=list(tools.tools) or None,
            add_generation_prompt=options.ending == "assistant",
            continue_final_message=options.ending == "continue",
            variables=options.variables,
            think=think,
            room=room,
        )
        if opening:
            tokens += self.llm.tokenize(opening, parse_special=True)
        return AnswerTask(tokens, params, opening=opening, think=think)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def answers(
        self,
        options: AnswerOptions,
        tasks: Sequence[AnswerTask],
        holding: AbstractContextManager[None] | None = None,
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Answer every task, one after the other. To be closed where it is not read to the end.

        Args:
            options: how.
            tasks: what.
            holding: what is entered once the queue has taken all of them, and left when they are answered.

        Raises:
            ApiError: the queue is full, or the wait was too long.
            LocalspecError: the engine failed.
        """
        conversation = object()
        async with AsyncExitStack() as stack:
            try:
                # In a thread: what was asked is checked once more, its grammar too.
                jobs = await asyncio.to_thread(lambda: [self._job(options, task, conversation) for task in tasks])
                streams = [await stack.enter_async_context(AsyncRoundStream(job)) for job in jobs]
            except QueueFull as error:
                raise too_busy(str(error), self.metrics.mean_request_seconds * (self.llm.queue_length + 1)) from None
            if holding is not None:
                stack.enter_context(holding)
            for index, (task, stream) in enumerate(zip(tasks, streams, strict=True)):
                async with aclosing(self._answer(options, task, index, stream)) as events:
                    async for event in events:
                        yield event

    def _job(self, options: AnswerOptions, task: AnswerTask, conversation: object) -> Job:
        drafters, names = self.drafters, options.drafters
        if names is None and len(usual := self.served().usual) < len(self.llm.draft_names):
            names = usual
        chosen = None if names is None else [drafters.get(name, name) for name in names]
        if chosen == [] and len(drafters) == len(self.llm.draft_names):
            chosen = None  # nothing is drafted; what could draft for this client still reads the answer
        usual_priority = 0 if task.keep_tokens is None else FILL_PRIORITY
        return self.llm.job(
            task.prompt,
            task.params,
            speculate=names is None or len(names) > 0,
            draft_length=options.draft_length,
            deadline=self.settings.time_limit,
            conversation=conversation,
            priority=usual_priority if options.priority is None else options.priority,
            logprobs=options.logprobs,
            drafters=chosen,
            prediction=task.prediction,
            keep_tokens=task.keep_tokens,
            think=task.think,
            thinking_budget=options.thinking_budget,
        )

    async def _answer(
        self, options: AnswerOptions, task: AnswerTask, index: int, stream: AsyncRoundStream
    ) -> AsyncGenerator[AnswerEvent, None]:
        tools, logprobs = task.tools, options.logprobs is not None
        reader = DeltaReader(tools.tools, task.opening, parallel=tools.parallel, wants_tokens=logprobs)
        cut = False
        async for step in stream.steps():
            if isinstance(step, PromptProgress):
                if options.stream and (options.progress or options.rounds):
                    yield AnswerEvent(index, Delta(), progress=step)
                continue
            yield AnswerEvent(index, reader.read(step), step)
            if (reader.calls.n_done and not tools.parallel) or task.enough():
                cut = True
                await stream.aclose()
                break
        reply = await stream.reply()
        if index == 0 and reply.cancelled_by == "deadline" and not reply.stats.prompt_tokens:
            raise too_late(self.settings.time_limit)
        self.metrics.count(reply)
        reply = self.client.shown(reply, self.drafters)
        finish_reason: str = "length" if reply.finish_reason == "cancelled" else reply.finish_reason
        last = reader.finish(cut=finish_reason == "length")
        if reader.calls.n_calls and (cut or finish_reason == "stop"):
            finish_reason = "tool_calls"
        yield AnswerEvent(index, last, reply=reply, finish_reason=finish_reason)


def repeated(task: AnswerTask, n: int) -> list[AnswerTask]:
    """The same task n times; with a seed, each answer has a seed of its own."""
    seed = task.params.seed
    if seed is None:
        return [task] * n
    return [task, *(replace(task, params=replace(task.params, seed=(seed + i) % (1 << 63))) for i in range(1, n))]
