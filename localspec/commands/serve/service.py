"""Answering requests: the one ``LLM``, the line in front of it, and what is counted."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect

from localspec import __version__
from localspec.commands.serve.access import Client, public_name
from localspec.commands.serve.body import BodyReader
from localspec.commands.serve.call_marks import MARKERS
from localspec.commands.serve.deltas import Delta, DeltaReader
from localspec.commands.serve.errors import ApiError, as_api_error, invalid, stopping, too_busy, too_late
from localspec.commands.serve.metrics import Metrics
from localspec.commands.serve.requests import AnswerOptions, ServedModel
from localspec.commands.serve.response_store import ResponseStore
from localspec.commands.serve.settings import ServerSettings
from localspec.commands.serve.slots import Slots, Windows
from localspec.commands.serve.tools import ToolUse, forced_call, messages_for
from localspec.errors import PromptTooLong, QueueFull, UsageError
from localspec.llm import LLM
from localspec.runtime.stream import AsyncRoundStream, Reply, Submit
from localspec.sampling.sampling import SamplingParams
from localspec.sampling.structured.constraint import constraint_for
from localspec.sampling.structured.request import grammar_of, is_schema
from localspec.spec_decode.rounds import Round

FILL_PRIORITY = 1
"""Of a completion at a cursor, where the request says nothing: it is short, and somebody has just stopped typing."""


@dataclass(frozen=True, slots=True)
class AnswerTask:
    """One answer to make.

    Attributes:
        prompt: token ids.
        params: the sampling parameters.
        tools: functions that may be called; none where a schema says what the answer is.
        prediction: token ids of a text that the answer is likely to repeat.
        begun: the beginning of the answer that stands at the prompt's end.
        keep_tokens: see ``Asking.rounds``.
        enough: asked after every round: whether the answer may end there.
        think: of a chat, see ``Asking.rounds``; None: a text, where thinking is not separated.
    """

    prompt: list[int]
    params: SamplingParams
    tools: ToolUse = field(default_factory=ToolUse)
    prediction: Sequence[int] = ()
    begun: str = ""
    keep_tokens: int | None = None
    enough: Callable[[], bool] = lambda: False
    think: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """What happened to answer ``index``: a round and the delta that it makes, or the end and the last delta."""

    index: int
    delta: Delta
    round: Round | None = None
    reply: Reply | None = None
    finish_reason: str | None = None


class Service:
    """What the endpoints share.

    Args:
        llm: the loaded pair; it is not closed here.
        settings: how to behave.

    Attributes:
        ending: set once the server goes down; whatever runs then ends.
        client: who is answered, see ``seen_by``.
        slots, windows: of ``/infill``, the client's own.
    """

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        llm.max_queue = settings.queue
        self.bodies = BodyReader(settings.body_bytes, settings.bodies_bytes, settings.body_seconds)
        self.metrics = Metrics()
        self.client = Client()
        self.slots, self.windows = Slots(), Windows()
        self._of_owner: dict[str, tuple[Slots, Windows]] = {self.client.owner: (self.slots, self.windows)}
        self.responses = ResponseStore()
        self.ending = asyncio.Event()
        self.started = time.time()
        self.fingerprint = f"localspec-{__version__}-{llm.backend_name}"
        llm.vocab.show(MARKERS)  # the marks of tool calls are read as text

    def seen_by(self, client: Client) -> Service:
        """The service as a client sees it: with the drafters that it may use, and the slots and windows of its own."""
        seen = copy(self)
        seen.client = client
        seen.slots, seen.windows = self._of_owner.setdefault(client.owner, (Slots(), Windows()))
        return seen

    @property
    def names(self) -> list[str]:
        """What requests may call the model; the first is what answers call it."""
        return list(dict.fromkeys([public_name(self.llm.model_name), *self.settings.aliases]))

    def check_model(self, name: str | None) -> None:
        """Refuse requests to a model that is not this one; Ollama's clients may add ``:latest``."""
        if name and name.removesuffix(":latest") not in (*self.names, self.llm.model_name):
            message = f"there is no model {name!r:.80} here; this server answers with {self.names[0]}"
            raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def drafters(self) -> dict[str, str]:
        """The drafters that may draft for the client, by what it calls them; see ``Client.drafters``."""
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

    def chat_task(self, messages: Sequence[Any], tools: ToolUse, options: AnswerOptions) -> AnswerTask:
        """Messages through the chat template. It may take a while: not for the event loop.

        Raises:
            UsageError, TemplateError: they cannot be.
        """
        params, begun, think = options.params, "", options.think
        if tools.required:
            begun, params = forced_call(self.llm.template, tools, params)
        is_form = grammar_of(params.response_format, params.grammar) is not None
        if is_form and think == "auto":  # what has a given form begins at once
            think = "off"
        tokens = self.chat_tokens(messages, tools, options, think, self.llm.n_ctx)
        constraint_for(params, self.llm.vocab)  # compiled here, and not while the engine waits
        if not tools.required and is_schema(params.response_format):
            tools = ToolUse()
        if begun:
            tokens += self.llm.tokenize(begun, parse_special=True)
        return AnswerTask(self._fitting(tokens), params, tools, self._prediction(options), begun, think=think)

    def chat_tokens(
        self,
        messages: Sequence[Any],
        tools: ToolUse,
        options: AnswerOptions,
        think: str | None = None,
        room: int | None = None,
    ) -> list[int]:
        """What the target would read, whether it fits or not (but see ``LLM.encode``); it may take a while too.

        Raises:
            ApiError: a variable that the template does not know.
            UsageError, TemplateError: the messages cannot be.
        """
        for name in options.variables:
            if not re.search(rf"\b{re.escape(name)}\b", self.llm.template.source):
                path = f"chat_template_kwargs.{name:.60}"
                raise invalid(f"{path}: the model's chat template has no such variable", path)
        return self.llm.encode(
            messages_for(messages, self.settings.system),
            tools=list(tools.tools) or None,
            add_generation_prompt=options.ending == "assistant",
            continue_final_message=options.ending == "continue",
            variables=options.variables,
            think=think or options.think,
            room=room,
        )

    def text_task(self, prompt: str | list[int], options: AnswerOptions) -> AnswerTask:
        """A text to continue as it is, or token ids. It may take a while: not for the event loop.

        Editors write the marks of fill-in-the-middle into the text themselves.

        Raises:
            UsageError: it is empty, or too long.
        """
        prediction = self._prediction(options)
        constraint_for(options.params, self.llm.vocab)
        marked = self.llm.marked_fill_prompt(prompt) if isinstance(prompt, str) else None
        if marked is not None:
            tokens, before = self._fitting(marked.tokens), marked.n_before
            return AnswerTask(tokens, options.params, prediction=prediction, keep_tokens=before)
        tokens = prompt if isinstance(prompt, list) else self.llm.encode(prompt, room=self.llm.n_ctx)
        return AnswerTask(self._fitting(tokens), options.params, prediction=prediction)

    def fill_task(self, prefix: str, suffix: str, options: AnswerOptions) -> AnswerTask:
        """A text to fill in between two. It may take a while: not for the event loop.

        Raises:
            UsageError: it cannot be.
        """
        prompt = self.llm.fill_prompt(prefix, suffix, max_tokens=options.params.max_tokens)
        prediction = self._prediction(options)
        constraint_for(options.params, self.llm.vocab)
        return AnswerTask(prompt.tokens, options.params, prediction=prediction, keep_tokens=prompt.n_before)

    def _prediction(self, options: AnswerOptions) -> list[int]:
        # No answer is longer than the context, so what lies behind cannot be copied.
        n_ctx = self.llm.n_ctx
        text = options.prediction[: n_ctx * self.llm.vocab.longest]
        return self.llm.tokenize(text)[:n_ctx] if text else []

    def _fitting(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise UsageError("the prompt is empty: there is nothing to continue")
        if len(tokens) >= self.llm.n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens and the context holds {self.llm.n_ctx}, answer included; "
                "shorten it, or start the server with a larger --ctx"
            )
        return tokens

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
                submitters = await asyncio.to_thread(
                    lambda: [self._submitter(options, task, conversation) for task in tasks]
                )
                streams = [await stack.enter_async_context(AsyncRoundStream(submit)) for submit in submitters]
            except QueueFull as error:
                raise too_busy(str(error), self.metrics.mean_request_seconds * (self.llm.queue_length + 1)) from None
            if holding is not None:
                stack.enter_context(holding)
            for index, (task, stream) in enumerate(zip(tasks, streams, strict=True)):
                async with aclosing(self._answer(options, task, index, stream)) as events:
                    async for event in events:
                        yield event

    def _submitter(self, options: AnswerOptions, task: AnswerTask, conversation: object) -> Submit:
        """What queues a task."""
        drafters, names = self.drafters, options.drafters
        if names is None and len(usual := self.served().usual) < len(self.llm.draft_names):
            names = usual
        chosen = None if names is None else [drafters.get(name, name) for name in names]
        if chosen == [] and len(drafters) == len(self.llm.draft_names):
            chosen = None  # nothing is drafted; what could draft for this client still reads the answer
        usual_priority = 0 if task.keep_tokens is None else FILL_PRIORITY
        return self.llm.submitter(
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
        reader = DeltaReader(tools.tools, task.begun, parallel=tools.parallel, wants_tokens=logprobs)
        cut = False
        async for round_ in stream:
            yield AnswerEvent(index, reader.read(round_), round_)
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

    def check_open(self) -> None:
        """Refuse what comes while the server goes down."""
        if self.ending.is_set():
            raise stopping()

    @contextmanager
    def counted(self, endpoint: str, started: float, *, goes_on: bool = False) -> Iterator[None]:
        """Count a request by how the block ends; ``goes_on``: only if it fails there, as another block follows."""
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
                self.metrics.finished(endpoint, outcome, time.monotonic() - started)


def repeated(task: AnswerTask, n: int) -> list[AnswerTask]:
    """The same task n times; with a seed, each answer has a seed of its own."""
    seed = task.params.seed
    if seed is None:
        return [task] * n
    return [task, *(replace(task, params=replace(task.params, seed=(seed + i) % (1 << 63))) for i in range(1, n))]
