"""What one ``LLM`` is asked for a client; answers that are kept; and what is counted."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from prometheus_client import Histogram, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

from localspec._version import __version__
from localspec.engine.request import Reply
from localspec.engine.worker import Job
from localspec.errors import PromptTooLong, UsageError
from localspec.llm import LLM
from localspec.prompts.infill import FillPrompt
from localspec.sampling.constraint import constraint_for
from localspec.server.access import Client
from localspec.server.http import ServerSettings, as_api_error, invalid
from localspec.server.requests import ChatRequest, CompletionRequest, ServedModel
from localspec.server.tool_calls import MARKERS
from localspec.server.tools import DeltaReader, ToolUse, forced_call, messages_for
from localspec.spec_decode.rounds import SpecStats

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

    def remove(self, name: str) -> None:
        with self._lock:
            self._n_bytes -= self._kept.pop(name, (None, 0))[1]


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

    def _n(self, outcome: str) -> int:
        return sum(count for (_, ended), count in self.requests.items() if ended == outcome)

    @property
    def mean_request_seconds(self) -> float:
        """How long a request takes, by those that were answered."""
        return self._seconds_answered / n if (n := self._n("answered")) else 2.0

    def as_dict(self) -> dict[str, Any]:
        """The totals under the names of ``SpecStats``."""
        totals = {name: value for name, value in self.stats.items() if name not in _OF_ONE_ANSWER}
        return {"requests": {outcome: self._n(outcome) for outcome in OUTCOMES}, **totals}

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
class ChoiceJob:
    """One answer to make: what the engine is asked, and what reads its rounds."""

    job: Job
    prompt: list[int]
    reader: DeltaReader


Kept = TypeVar("Kept")


class Service:
    """Makes requests of what was asked of one model.

    Args:
        llm: the loaded pair.
        settings: how to behave.
        responses: the answers that the server keeps.
        metrics: what is counted, also before the model was loaded.
        names: what requests may call the model; the first is what answers call it.
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
        hides, thinks = len(drafters) < len(llm.draft_names), llm.thinking is not None
        on_request = [name for name in drafters.values() if name in settings.corpora]
        item = partial(self.responses.item, may_read=self.client.may_read)
        return ServedModel(settings.params, drafters, llm.vocab.n_tokens, on_request, hides, thinks, item)

    def choices(self, asked: ChatRequest | CompletionRequest, n: int = 1) -> list[ChoiceJob]:
        """What is to be answered: n answers to a chat, n to each text; with a seed, each of these has one of its own.
        It takes time: not for the event loop.

        Raises:
            UsageError, TemplateError: the messages or texts fit neither template nor context, or the model has no
                tokens to fill in between two texts.
        """
        llm, found, use, opening = self.llm, list[ChoiceJob](), ToolUse(), ""
        limits: dict[str, Any] = {"deadline": self.settings.time_limit, "conversation": object()}
        prompts: list[tuple[list[int], dict[str, Any]]]
        if isinstance(asked, ChatRequest):
            asked = self.formed(asked)
            prompts, opening = [(self.chat_prompt(asked, llm.n_ctx), {})], asked.opening
            # A schema says what the answer is, and it is not a tool's.
            if asked.tools.required or not asked.params.constrained or asked.params.grammar is not None:
                use = asked.tools
        else:
            prompts = [self._text_prompt(prompt, asked) for prompt in asked.prompts]
        params = asked.params
        constraint_for(params, llm.vocab)  # compiled here, and not while the engine waits
        for tokens, own in prompts:
            if not tokens:
                raise UsageError("the prompt is empty: there is nothing to continue")
            if len(tokens) >= llm.n_ctx:
                raise PromptTooLong(
                    f"the prompt has {len(tokens)} tokens and the context holds {llm.n_ctx}, answer included; "
                    "shorten it, or start the server with a larger --ctx"
                )
            options = limits | own | asked.options
            if text := options.get("prediction"):  # no answer is longer than the context
                options["prediction"] = llm.tokenize(text[: llm.n_ctx * llm.vocab.longest])[: llm.n_ctx]
            for i in range(n):
                another = i > 0 and params.seed is not None
                chosen = replace(params, seed=((params.seed or 0) + i) % (1 << 63)) if another else params
                reader = DeltaReader(use, opening, wants_tokens="logprobs" in options)
                found.append(ChoiceJob(llm.job(tokens, chosen, **options), tokens, reader))
        return found

    def _text_prompt(
        self, prompt: str | list[int] | FillPrompt, asked: CompletionRequest
    ) -> tuple[list[int], dict[str, Any]]:
        """The tokens of a text to continue, in which editors may have written the marks of fill-in-the-middle, of one
        to fill in before a suffix, or of token ids; and keywords of ``LLM.job``."""
        llm = self.llm
        if isinstance(prompt, str) and asked.suffix is not None:
            prompt = llm.fill_prompt(prompt, asked.suffix, max_tokens=asked.params.max_tokens)
        elif isinstance(prompt, str):
            prompt = llm.marked_fill_prompt(prompt) or llm.encode(prompt, room=llm.n_ctx)
        if isinstance(prompt, FillPrompt):
            return prompt.tokens, {"keep_tokens": prompt.n_before, "priority": FILL_PRIORITY}
        return prompt, {}

    def formed(self, asked: ChatRequest) -> ChatRequest:
        """A chat with the form that its answer must have: a call that is forced is begun, and what has a given form is
        not thought about before."""
        if asked.tools.required:
            opening, params = forced_call(self.llm.template, asked.tools, asked.params)
            asked = replace(asked, opening=opening, params=params)
        if asked.options["think"] == "auto" and asked.params.constrained:
            asked = replace(asked, options=asked.options | {"think": "off"})
        return asked

    def chat_prompt(self, asked: ChatRequest, room: int | None = None) -> list[int]:
        """The tokens of a chat that is ``formed``; ``room``: see ``LLM.encode``. An ``ApiError``: the template does not
        know a variable."""
        for name in asked.variables:
            if not re.search(rf"\b{re.escape(name)}\b", self.llm.template.source):
                path = f"chat_template_kwargs.{name:.60}"
                raise invalid(f"{path}: the model's chat template has no such variable", path)
        tokens = self.llm.encode(
            messages_for(asked.messages, self.settings.system),
            tools=list(asked.tools.tools) or None,
            add_generation_prompt=asked.ending == "assistant",
            continue_final_message=asked.ending == "continue",
            variables=asked.variables,
            think=asked.options["think"],
            room=room,
        )
        return tokens + self.llm.tokenize(asked.opening, parse_special=True) if asked.opening else tokens
