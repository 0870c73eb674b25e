"""``LLM``: a loaded pair behind an interface that any thread, and asyncio, can use."""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, Unpack, cast

from localspec.backends.base import shared_prefix
from localspec.backends.placement import Placement
from localspec.engine import saved
from localspec.engine.answer import answer, never_ran, score
from localspec.engine.loading import Report, giving_way
from localspec.engine.options import (
    PREFIX_CACHE_BYTES,
    LoadOptions,
    checked_bound,
    checked_loading,
    checked_spec,
    draft_specs,
)
from localspec.engine.pair import Pair
from localspec.engine.request import (
    AsyncRoundStream,
    DraftLength,
    Reply,
    Request,
    RequestOptions,
    RoundStream,
    checked_length,
    split_options,
)
from localspec.engine.saved import SavedContext, restore_contexts, save_contexts
from localspec.engine.scheduler import Scheduler
from localspec.engine.worker import Job, Result, Turns, Worker, on_mains
from localspec.errors import Cancelled, Closed, SessionFileError, UsageError, checked_whole
from localspec.model_files.catalog import Catalog
from localspec.model_files.vocab import Vocab
from localspec.prompts.infill import FILL_TOKENS, SUFFIX_TOKENS, ContextFiles, FillPrompt, fill_prompt, marked_prompt
from localspec.prompts.prompts import Prompt
from localspec.prompts.thinking import ThinkingFormat
from localspec.sampling.sampling import SAMPLING, SamplingParams, ScoredToken, checked_top
from localspec.system.files import printable

# The ways to ask: ``rounds``, ``stream``, ``chat``, and the same for asyncio. ``LLM`` and ``Session`` have them.

Question = TypeVar("Question")


class Asking(ABC, Generic[Question]):
    """Turns one thing, the job of a question, into every way to ask it."""

    @abstractmethod
    def job(self, question: Question, params: SamplingParams | None, **options: Unpack[RequestOptions]) -> Job:
        """Check a question and its options, and return what a stream queues."""

    def _as_chat(self, question: Question | str) -> Question | str:
        return question

    def rounds(
        self, question: Question, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RoundStream:
        """Answer, round by round: the drafts and their fate.

        >>> with llm.rounds(messages, params, draft_length=4, deadline=20.0) as rounds:
        ...     for round_ in rounds:
        ...         print([token.id for token in round_.draft], round_.verdict.n_accepted, round_.text)
        >>> rounds.reply.stats["acceptance_rate"]

        Args:
            question: an ``LLM`` takes messages for the chat template, a string to continue as it is, or token ids; a
                ``Session`` the next question of its conversation.
            params: sampling parameters; None is greedy. Each can be given by its own name too, as in ``max_tokens=64``,
                which takes precedence.
            speculate: False decodes plainly, in the same loop.
            draft_length: overrides the LLM's ``draft_length`` for this request.
            drafters: which of the LLM's ``draft_names`` take part; None is all.
            prediction: a text that the answer is likely to repeat, such as the file to be edited: n-grams copy from it.
            think: ``on`` or ``off``, where the chat template has a switch for it or the model marks what it thinks;
                ``low``, ``medium``, ``high`` where it takes an effort. None, or ``auto``, is the template's own way.
                Thinking is separated into ``Round.thinking`` in answers to messages; in those to a text or token ids
                only if ``think`` is given.
            thinking_budget: tokens after which an open thinking block is closed for the model; None is any number.
            deadline: seconds from now, waiting included, after which the request ends within a round, its
                ``finish_reason`` ``cancelled`` by ``deadline``. One that is late in the queue never runs.
            conversation: anything hashable. Requests of one conversation run in order; conversations take turns. None
                is a conversation of its own. (A ``Session`` is one already.)
            priority: waiting requests with the highest come first; 0 is ordinary, less is for batches of texts.
            logprobs: how many of the most probable tokens (0 to 20) to name for every token of the answer, with its own
                log-probability, in ``EmittedToken.logprobs``; from the target's raw logits, see ``sampling.logprobs``.
            keep_tokens: how much of the prompt's beginning to keep in memory for the next prompt; None is all of it,
                and the answer.

        Raises:
            QueueFull: ``max_queue`` requests are waiting.
            UsageError: an option makes no sense, or there is none of that name. What is wrong with the prompt is raised
                when the stream is read.
            Closed: after ``close``.
        """
        return RoundStream(self.job(question, params, **options))

    def stream(
        self, question: Question, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Iterator[str]:
        """Answer piece by piece: verified text only; options as in ``rounds``.

        >>> for piece in llm.stream("Once upon a time", SamplingParams(max_tokens=64)):
        ...     print(piece, end="", flush=True)
        """
        with self.rounds(question, params, **options) as rounds:
            for round_ in rounds:
                if round_.text:
                    yield round_.text

    def chat(
        self, question: Question | str, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Reply:
        """Answer a conversation, or a single question; options as in ``rounds``.

        >>> llm.chat([{"role": "user", "content": "Name three rivers."}]).text
        """
        reply: Reply = self.job(self._as_chat(question), params, **options).outcome()  # type: ignore[arg-type]
        return reply

    def arounds(
        self, question: Question, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncRoundStream:
        """As ``rounds``, for asyncio; leaving the loop or cancelling the task stops the engine within a round.

        The request is queued by this call, so ``QueueFull`` comes from here.

        >>> async with llm.arounds(messages, params) as rounds:
        ...     async for round_ in rounds:
        ...         print(round_.text, end="")
        ...     reply = await rounds.reply()
        """
        return AsyncRoundStream(self.job(question, params, **options))

    async def astream(
        self, question: Question, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[str]:
        """As ``stream``, for asyncio."""
        async with self.arounds(question, params, **options) as rounds:
            async for round_ in rounds:
                if round_.text:
                    yield round_.text

    async def achat(
        self, question: Question | str, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Reply:
        """As ``chat``, for asyncio."""
        return await self.arounds(self._as_chat(question), params, **options).reply()  # type: ignore[arg-type]


# ``Session``: one conversation on a loaded pair, which can be saved and go on after a restart.

Message = dict[str, Any]


class Session(Asking[str]):
    """One conversation: it remembers its turns, and asks the next question with all of them.

    Several sessions share a pair. What the models hold of each is kept while others speak, within
    ``LLM.prefix_cache_bytes``. Questions of one session are answered in order; sessions take turns.

    >>> session = llm.session(system="You are terse.")
    >>> session.chat("Name a river.").text
    >>> session.save("rivers.session")
    >>> llm.load_session("rivers.session").chat("Which is longer?").text  # after a restart, nothing is read again

    A question and its answer become part of the conversation when the answer ends. One that was cancelled counts as far
    as it came; where it has no token, or the request failed, the conversation stays as it was.

    Attributes:
        params: sampling parameters of questions that bring none; None is greedy.
        notes: what a program wants to keep with the conversation, as JSON has it; saved and loaded with it.
        notice: one line that says why a saved memory could not be used; None if it could, or if the session is new.
    """

    def __init__(
        self,
        llm: LLM,
        system: str | None = None,
        params: SamplingParams | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        split_options(params, {})
        self._llm = llm
        self._conversation = object()
        self.params = params
        self.messages = []
        self.system = system
        self.messages += [dict(message) for message in messages]
        self.notes: dict[str, Any] = {}
        self.notice: str | None = None

    @property
    def system(self) -> str | None:
        """The system prompt; None where the conversation has none. May be changed between questions."""
        return str(self.messages[0]["content"]) if self.messages and self.messages[0].get("role") == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None and not isinstance(text, str):
            raise UsageError(f"system must be a text, not {type(text).__name__}")
        said = self.messages[self.system is not None :]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *said]

    @property
    def messages(self) -> list[Message]:
        """The turns so far, for the chat template; may be edited, or replaced by another sequence, between turns."""
        return self._messages

    @messages.setter
    def messages(self, messages: Iterable[Message]) -> None:
        # A list stays the one that was given; of anything else one is made, as answers are appended to it.
        self._messages = messages if isinstance(messages, list) else list(messages)

    def undo(self) -> bool:
        """Take the last question and its answer back; whether there was one."""
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i]["role"] == "user":
                del self.messages[i:]
                return True
        return False

    def save(self, path: str | Path, *, memory: bool = True) -> None:
        """Save the conversation, and what the models hold of it where the engine can give it, for ``LLM.load_session``.

        Waits for the questions asked before. The file is complete under its name, or what that held before stays.
        ``memory=False`` saves the text alone, in kilobytes; loaded again, it has to be read again.

        Raises:
            SessionFileError: it cannot be written, or the name belongs to something else.
            Closed: the LLM was closed.
        """
        llm, file = self._llm, _file(path)

        def take(pair: Pair) -> tuple[list[Message], list[SavedContext]]:
            messages = [dict(message) for message in self.messages]
            if not messages or not memory:
                return messages, []
            tokens = llm.encode(messages, add_generation_prompt=False)
            return messages, save_contexts(pair.state.text_contexts, pair.prefix_cache, tokens)

        messages, memories = llm.run(take, conversation=self._conversation)
        saved.write(file, to_text(self) | {"messages": messages}, memories)

    async def asave(self, path: str | Path, *, memory: bool = True) -> None:
        """As ``save``, for asyncio."""
        await asyncio.to_thread(self.save, path, memory=memory)

    def job(self, question: str, params: SamplingParams | None, **options: Unpack[RequestOptions]) -> Job:
        if not isinstance(question, str):
            raise UsageError("a session is asked with a text; earlier turns are remembered")
        if "conversation" in options:
            raise UsageError("a session is a conversation of its own")
        asked: Message = {"role": "user", "content": question}
        # Made when its turn comes: what was asked before may still be waiting for its answer.
        job = self._llm.job(
            lambda: [*self.messages, asked],
            self.params if params is None else params,
            **(options | {"conversation": self._conversation}),
        )

        def settle(job: Job) -> None:
            done = not job.cancelled() and (job.refused or job.exception()) is None
            if done and (reply := job.result()).token_ids:
                # What was thought is kept with the answer; the template says whether the model sees it again.
                thought = {"reasoning_content": reply.thinking} if reply.thinking else {}
                self.messages += [asked, {"role": "assistant", "content": reply.text} | thought]

        job.settle = settle
        return job


def _file(path: str | Path) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise UsageError(f"a session is kept in a file; {path!r} is no path") from None


def to_text(session: Session) -> dict[str, Any]:
    """The text part of a session's file; of its parameters what differs from the defaults."""
    params, default = session.params or SamplingParams(), SamplingParams()
    changed = {name: getattr(params, name) for name in SAMPLING if getattr(params, name) != getattr(default, name)}
    return {
        "model": printable(session._llm.model_name),
        "messages": [dict(message) for message in session.messages],
        "params": None if session.params is None else changed,
        "notes": session.notes,
    }


def load(llm: LLM, path: str | Path, *, memory: bool = True) -> Session:
    """See ``LLM.load_session``."""
    path = _file(path)
    text, memories, damage = saved.read(path, memory=memory)
    try:
        messages = [dict(message) for message in text["messages"]]
        values, params = text["params"], None
        if values is not None:
            bias = {int(token): float(value) for token, value in values.get("logit_bias", {}).items()}
            params = SamplingParams(**(values | {"logit_bias": bias}))
        session = Session(llm, None, params, messages)
        session.notes = dict(text.get("notes", {}))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise SessionFileError(f"{path} is damaged: its text is not a conversation") from None
    if not memory:
        return session
    reason: str | None = damage or llm.run(
        lambda pair: restore_contexts(pair.state.text_contexts, pair.prefix_cache, memories)
    )
    if reason and session.messages:
        session.notice = f"{reason}; the conversation will be read again"
    return session


class FillOptions(RequestOptions, total=False):
    """The keywords of ``LLM.fill``, which explains them."""

    context_files: ContextFiles
    name: str | None
    single_line: bool


class LLM(Asking[Prompt]):
    """A target model and its drafters, loaded and ready.

    One worker thread owns the engine; every method may be called from any thread. One request runs at a time, or as
    many as ``parallel`` says; the others wait: those of one conversation in order, conversations in turns.

    >>> with LLM("qwen2.5-coder-1.5b", draft="qwen2.5-coder-0.5b") as llm:
    ...     messages = [{"role": "user", "content": "Write a haiku."}]
    ...     reply = llm.chat(messages, SamplingParams(max_tokens=64), deadline=30.0)
    ...     print(reply.text, reply.finish_reason, reply.stats["acceptance_rate"])

    Args:
        model: a catalogue name, a path to a ``.gguf`` file, or ``hf:OWNER/REPO/FILE.gguf`` (already pulled).
        draft: ``auto`` (n-grams, and the heads and the catalogue's draft for the target that are on disk), None, or one
            or several of ``ngram``, ``head`` (or ``head:FILE``), ``mtp``, ``early-exit`` (or ``early-exit:N``, with N
            layers of the target), ``corpus:PATH`` (also with ``auto``), ``pard:FILE`` and models as above.
        draft_length: ``auto`` weighs cost and acceptance token by token; a number drafts that many tokens each round.
        backend: ``auto``, ``llama-cpp``, ``ik-llama``, ``mlx`` or ``reference``.
        n_ctx: context size in tokens, answer included; None is what the model was trained for, on a CPU at most
            32,768, or what memory holds; see ``context_info``.
        n_threads: CPU threads; None takes the physical cores.
        n_gpu_layers: layers on the GPU; None takes all that fit if the engine was built for one.
        kv_cache_type: f16, f32, q8_0 or q4_0.
        light_draft: let a draft model on the CPU be replaced by a lighter copy of it where that drafts faster; made and
            compared at the first load, kept on disk. It cannot change an answer.
        remember: keep on disk, for the next run, how often draft tokens were accepted and which tokens mostly followed
            which in answers.
        draft_backend: the engine for draft models; None is ``backend``.
        prefix_cache_bytes: memory [bytes] for other conversations than the present one, so that going back to one reads
            nothing again; least recently used out. A token takes what it takes in the contexts: 40 KiB with
            Qwen2.5-Coder 1.5B and 0.5B at f16. 0 keeps none.
        max_queue: most requests that may wait, those of one conversation counted once; one more raises ``QueueFull``.
            None is any number.
        idle: measure, make copies and read ahead while no request waits, never on battery; a request waits for one pass
            at most. False does what has to be done while loading.
        placement: where the target's weights go, with more than one device; see ``Placement``.
        parallel: most requests that are answered at a time, in passes of the target that they share; or ``auto``.
        prompt_cache_bytes: bound of the folder ``prompts`` in LOCALSPEC_HOME [bytes], in which what the models hold of
            conversations from 512 tokens on is kept, when nothing is asked or at the end: after a restart a prompt
            that continues one reads what is new. Least recently used out; 0 keeps and uses none.
        progress: called while loading, from the worker thread, with what is being done and the fraction done (or
            None); an exception from it cancels the load and is raised here.
        cancel: set it, from any thread, to cancel the load.

    Raises:
        UnknownModel, ModelFileError, VocabularyMismatch, EngineError: the pair cannot be loaded.
        Cancelled: ``cancel`` was set.
    """

    def __init__(
        self,
        model: str | Path,
        draft: str | Path | Sequence[str | Path] | None = "auto",
        *,
        draft_length: DraftLength = "auto",
        backend: str = "auto",
        n_ctx: int | None = None,
        n_threads: int | None = None,
        n_gpu_layers: int | None = None,
        kv_cache_type: str = "f16",
        light_draft: bool = True,
        remember: bool = True,
        draft_backend: str | None = None,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        max_queue: int | None = None,
        idle: bool = True,
        placement: Placement | None = None,
        parallel: int | str = 1,
        prompt_cache_bytes: int = 0,
        progress: Report | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        cancel = checked_loading(progress, cancel)
        self._progress: Report = progress or (lambda what, fraction: None)
        self.draft_length = draft_length
        options = LoadOptions(
            backend,
            draft_backend,
            n_ctx,
            n_threads,
            n_gpu_layers,
            kv_cache_type,
            light_draft,
            remember,
            prefix_cache_bytes,
            idle,
            Placement() if placement is None else placement,
            parallel,
            prompt_cache_bytes,
        )
        bound, drafts, name = checked_bound(max_queue), draft_specs(draft), checked_spec("model", model)
        path = self._path = Catalog.load().resolve(name)
        self.model_name = name if not name.endswith(".gguf") else path.name.removesuffix(".gguf")
        self.chat_defaults: dict[str, Any] = Catalog.load().chat_defaults(path)
        # What can be refused was refused before there is a thread.
        self._worker = Worker(bound, on_mains if options.idle else None)
        pair = self._pair = self._load(path, drafts, options, cancel)
        self.backend_name, self.engine = pair.target.backend, pair.target.engine
        pair.name, self.n_ctx, self.template = self.model_name, pair.context.n_ctx, pair.encoder.template
        if pair.parallel.n > 1:
            self._worker.batch, self._worker.queue.at_once = Scheduler(pair).run, pair.parallel.n
        # Neither the worker nor this holds on to the LLM: dropped without close(), it gives its memory back too.
        self._finalizer = weakref.finalize(self, self._worker.close, pair.close, cancel=True, wait=False)
        self._finalizer.atexit = False

    def _load(self, path: Path, draft: Sequence[str], options: LoadOptions, cancel: threading.Event) -> Pair:
        loaded: list[Pair] = []
        try:
            self._worker.call(lambda: loaded.append(Pair(path, draft, options, self._report(cancel), self._worker)))
            if cancel.is_set():
                raise Cancelled(f"loading {path.name} was cancelled")
            return loaded[0]
        except BaseException:
            # Ctrl-C ends only the wait: the thread still loads. It notices at its next report, and leaves nothing.
            cancel.set()
            self._worker.close(*(pair.close for pair in loaded), wait=False)
            raise

    def _report(self, cancel: threading.Event | None = None) -> Report:
        def report(what: str, fraction: float | None) -> None:
            if cancel is not None and cancel.is_set():
                raise Cancelled(f"{what}: cancelled")
            self._progress(what, fraction)

        return report

    @classmethod
    async def aload(cls, *args: Any, cancel: threading.Event | None = None, **options: Any) -> LLM:
        """``LLM(...)`` without blocking the event loop; cancelling the task cancels the load.

        >>> async with await LLM.aload("qwen2.5-coder-1.5b") as llm:
        ...     reply = await llm.achat([{"role": "user", "content": "Hello!"}])
        """
        cancel = cancel or threading.Event()
        loading = asyncio.ensure_future(asyncio.to_thread(cls, *args, cancel=cancel, **options))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            cancel.set()
            loading.add_done_callback(_close_if_loaded)
            raise

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def draft_length(self) -> DraftLength:
        """``auto`` or a number of tokens; takes effect with the next request."""
        return self._draft_length

    @draft_length.setter
    def draft_length(self, value: DraftLength) -> None:
        self._draft_length = checked_length(value)

    @property
    def draft_names(self) -> list[str]:
        """The drafters in use, in the order they are asked."""
        return self._pair.state.draft_names

    @property
    def warnings(self) -> list[str]:
        """One-line remarks from loading that a user should see."""
        return list(self._pair.warnings)

    @property
    def plain_tokens_per_second(self) -> float:
        """Expected speed of plain decoding here, from the measured time of a one-token pass."""
        return 1e3 / self._pair.times(1)

    @property
    def model_path(self) -> Path:
        return self._path

    @property
    def size_bytes(self) -> int:
        return self._pair.target.size_bytes

    @property
    def vocab(self) -> Vocab:
        return self._pair.target.vocab

    @property
    def queue_length(self) -> int:
        """How many requests wait for their turn; the one that runs is not counted."""
        return len(self._worker.queue)

    @property
    def busy(self) -> bool:
        return self._worker.n_running > 0

    def context_info(self) -> dict[str, Any]:
        """``n_ctx``, the ``reason`` for that size in words, and whether it is ``short``: for want of memory less than
        8,192 tokens, and than the model was trained for."""
        return asdict(self._pair.context_choice)

    def parallel_info(self) -> dict[str, Any]:
        """``parallel``: how many requests may run at a time, and ``reason``; ``running``: how many do; ``passes``."""
        return self._pair.parallel_info() | {"running": self._worker.n_running}

    @property
    def max_queue(self) -> int | None:
        """Most requests that may wait; one more raises ``QueueFull``. None is any number."""
        return self._worker.queue.max_waiting

    @max_queue.setter
    def max_queue(self, value: int | None) -> None:
        self._worker.queue.max_waiting = checked_bound(value)

    def set_draft(
        self, spec: str | Path | Sequence[str | Path] | None, *, gives_way: Callable[[], bool] | None = None
    ) -> None:
        """Replace the drafters, as the ``draft`` argument does; on an error the ones in use stay.

        With ``gives_way`` loading reports nothing, and ends with ``Cancelled`` once a request waits or it says so.
        """
        specs, report = draft_specs(spec), self._report()
        if gives_way is not None:
            report = giving_way(lambda: self._worker.queue.is_urgent or gives_way())
        self.run(lambda pair: pair.set_draft(specs, report))

    def explain(self) -> str:
        """Why there is, or is not, drafting now: sentences for people, a line for each drafter."""
        return self._pair.explain(self.draft_length)

    # -- questions -----------------------------------------------------------------------------------------------

    def _as_chat(self, question: Prompt | str) -> Prompt:
        return [{"role": "user", "content": question}] if isinstance(question, str) else question

    def generate(
        self, text: str | Sequence[int], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Reply:
        """Continue a text as it is, without the chat template; options as in ``rounds``.

        >>> llm.generate("def fibonacci(n):", SamplingParams(max_tokens=80, stop=["\\n\\n"])).text
        """
        reply: Reply = self.job(text, params, **options).outcome()
        return reply

    async def agenerate(
        self, text: str | Sequence[int], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Reply:
        """As ``generate``, for asyncio."""
        return await AsyncRoundStream(self.job(text, params, **options)).reply()

    def fill(
        self, prefix: str, suffix: str = "", params: SamplingParams | None = None, **options: Unpack[FillOptions]
    ) -> Reply:
        """Fill in what stands between two texts: completion at a cursor, for models with fill-in-the-middle tokens.

        The text before the cursor stays in memory: the next request for the same place reads what was typed since, and
        the suffix.

        >>> llm.fill("def area(r):\\n    return ", "\\n\\nprint(area(2))\\n", single_line=True).text

        Args:
            prefix, suffix, context_files, name: as in ``fill_prompt``.
            params: sampling parameters; None is greedy, at most 128 tokens.
            single_line: end before the next line break.
            options: as in ``rounds``.

        Raises:
            UsageError: the model has no fill-in-the-middle tokens, or there is no text at all.
            QueueFull, Closed: as in ``rounds``.
        """
        reply: Reply = self._filling(prefix, suffix, params, options).outcome()
        return reply

    async def afill(
        self, prefix: str, suffix: str = "", params: SamplingParams | None = None, **options: Unpack[FillOptions]
    ) -> Reply:
        """As ``fill``, for asyncio; cancelling the task stops the engine."""
        return await AsyncRoundStream(self._filling(prefix, suffix, params, options)).reply()

    def _filling(self, prefix: str, suffix: str, params: SamplingParams | None, options: FillOptions) -> Job:
        asked: dict[str, Any] = dict(options)
        files, name = asked.pop("context_files", ()), asked.pop("name", None)
        single_line = asked.pop("single_line", False)
        params, rest = split_options(SamplingParams(max_tokens=FILL_TOKENS) if params is None else params, asked)
        if single_line:
            params = replace(params, stop=[*params.stop, "\n"])
        prompt = self.fill_prompt(prefix, suffix, files, name=name, max_tokens=params.max_tokens)
        return self.job(prompt.tokens, params, **{"keep_tokens": prompt.n_before} | rest)

    def logprobs(
        self, prompt: Prompt, *, top: int = 0, deadline: float | None = None, conversation: Hashable | None = None
    ) -> list[ScoredToken]:
        """How probable the target finds each token of a given text after those before it.

        >>> scored = llm.logprobs("The capital of France is Paris.")
        >>> perplexity = math.exp(-sum(t.logprob for t in scored[1:]) / (len(scored) - 1))

        Args:
            prompt: a text (a begin-of-text token in front where the model wants one), messages, or token ids.
            top: how many of the most probable tokens to name at each place (0 to 20).
            deadline, conversation: as in ``rounds``.

        Returns:
            One ``ScoredToken`` per token; the first has no logprob, as nothing predicts it.

        Raises:
            PromptTooLong: it does not fit into the context.
            Cancelled: the deadline passed first.
        """
        scored: list[ScoredToken] = self._scoring(prompt, top, deadline, conversation).outcome()
        return scored

    async def alogprobs(
        self, prompt: Prompt, *, top: int = 0, deadline: float | None = None, conversation: Hashable | None = None
    ) -> list[ScoredToken]:
        """As ``logprobs``, for asyncio."""
        stream = AsyncRoundStream(self._scoring(prompt, top, deadline, conversation))
        return cast(list[ScoredToken], await stream.reply())

    # -- text, without waiting for the queue ---------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        ``add_special`` puts the begin-of-text token in front if the model wants one; ``parse_special`` reads
        ``<|im_end|>`` and the like as the special tokens they name, so not for a user's own text.
        """
        return self._pair.encoder.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text that tokens stand for; bytes that are not valid UTF-8 become U+FFFD."""
        return self._pair.encoder.detokenize(tokens)

    def token_text(self, token: int) -> str:
        """A token on its own, for display: half of a character shows as U+FFFD, a special token as its name."""
        return self._pair.encoder.token_text(token)

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        think: str = "auto",
        room: int | None = None,
    ) -> list[int]:
        """The token ids that a prompt stands for, through the chat template if it is a list of messages.

        In a text, names of special tokens such as ``<|im_end|>`` are these tokens; in messages they are text.

        Args:
            tools: descriptions of functions, for templates that know about tools.
            add_generation_prompt: end with what begins the answer to messages.
            continue_final_message: end in the middle of the last message, which is the beginning of the answer.
            variables: further variables of the chat template.
            think: as in ``rounds``.
            room: a text that must have more tokens than this is refused by its length; None takes any.

        Raises:
            UsageError, PromptTooLong, TemplateError: the prompt cannot be.
        """
        return self._pair.encoder.encode(
            prompt,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            think=think,
            room=room,
        )

    @property
    def thinking(self) -> ThinkingFormat | None:
        """How the model marks what it thinks before it answers; None where it is not known to think."""
        return self._pair.encoder.thinking

    def count_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt has, chat template included where it is a list of messages."""
        return len(self.encode(prompt))

    def fill_prompt(
        self,
        prefix: str,
        suffix: str = "",
        context_files: ContextFiles = (),
        *,
        name: str | None = None,
        max_tokens: int | None = None,
        suffix_tokens: int = SUFFIX_TOKENS,
    ) -> FillPrompt:
        """The prompt that ``fill`` sends; where there is no room for all, what is far from the cursor is left out.

        >>> prompt = llm.fill_prompt("def area(r):\\n    return ", "\\n")
        >>> llm.stream(prompt.tokens, params, keep_tokens=prompt.n_before)  # as ``fill``, piece by piece

        Args:
            prefix: the text before the cursor.
            suffix: the text behind it.
            context_files: names and texts of other files (a mapping, or pairs), the most relevant last.
            name: of the file with the cursor.
            max_tokens: room that is left for the answer; at most half of the context is.
            suffix_tokens: most tokens of the suffix, which is read again after every key stroke.

        Raises:
            UsageError: the model has no fill-in-the-middle tokens, or all texts are empty.
        """
        n_answer = min(max_tokens or FILL_TOKENS, self.n_ctx // 2)
        room = self.n_ctx - n_answer
        return fill_prompt(
            self._pair.encoder, prefix, suffix, context_files, room=room, name=name, suffix_tokens=suffix_tokens
        )

    def marked_fill_prompt(self, text: str) -> FillPrompt | None:
        """A text with the model's own fill-in-the-middle marks in it, read as these; None if it has not all three.

        >>> llm.marked_fill_prompt("<|fim_prefix|>def area(r):<|fim_suffix|>\\n<|fim_middle|>")
        """
        return marked_prompt(self._pair.encoder, text, self.n_ctx)

    def read_ahead(self, messages: Sequence[Mapping[str, Any]] | FillPrompt, *, think: str = "auto") -> None:
        """Read in idle time what a chat's next prompt will begin with: these messages, or a ``fill_prompt``.

        Raises:
            UsageError, TemplateError: as from ``encode``.
        """
        if isinstance(messages, FillPrompt):
            self._pair.read_ahead.expect(messages.tokens[: messages.n_before], anew=True)
        else:
            asked = ([*messages, {"role": "user", "content": text}] for text in ("a", "1"))
            one, other = (self.encode(each, think=think) for each in asked)
            self._pair.read_ahead.expect(one[: shared_prefix(one, other)])
        self._worker.idle_work_waits()

    # -- conversations -------------------------------------------------------------------------------------------

    def session(self, system: str | None = None, params: SamplingParams | None = None) -> Session:
        """A new conversation that remembers its turns; see ``Session``.

        >>> session = llm.session(system="You are terse.", params=SamplingParams(temperature=0.7))
        >>> session.chat("Name a river.").text
        """
        return Session(self, system, params)

    def load_session(self, path: str | Path, *, memory: bool = True) -> Session:
        """A conversation that ``Session.save`` wrote, ready to go on without reading it again.

        What the models held is used if it is whole and comes from the same model file, engine and cache type; otherwise
        ``Session.notice`` says why not. ``memory=False`` takes the text alone, which is safe with a file from anywhere.

        Raises:
            SessionFileError: the file is missing, foreign, from another version, or damaged in its text.
        """
        return load(self, path, memory=memory)

    async def aload_session(self, path: str | Path, *, memory: bool = True) -> Session:
        """As ``load_session``, for asyncio."""
        return await asyncio.to_thread(self.load_session, path, memory=memory)

    @property
    def prefix_cache_bytes(self) -> int:
        """Bound of the memory that put-aside conversations may take [bytes]; 0 keeps none. Takes effect at once."""
        return self._pair.prefix_cache.max_bytes

    @prefix_cache_bytes.setter
    def prefix_cache_bytes(self, value: int) -> None:
        bound = checked_whole("prefix_cache_bytes", value, 0)
        self.run(lambda pair: pair.prefix_cache.bound(bound))

    def cache_info(self) -> dict[str, int]:
        """The prefix cache: ``entries``, ``bytes``, ``max_bytes``, ``hits``, ``restored``
        (from the disk), ``stored``, ``evictions``."""
        return self._pair.prefix_cache.info()

    # -- the worker ----------------------------------------------------------------------------------------------

    def inspect(self) -> Pair:
        """The loaded pair, for tests and tools: models, contexts, cost models, prompt encoder and worker.

        What it holds is private to localspec and may change with any version. Its models belong to the worker's
        thread: look at them while no request runs, or within ``run``.

        >>> llm.inspect().context.tokens  # what the target's memory holds

        Raises:
            Closed: after ``close``.
        """
        if self._worker.queue.closed:
            raise Closed(self._worker.queue.closed)
        return self._pair

    def run(self, work: Callable[[Pair], Result], *, conversation: Hashable | None = None) -> Result:
        """Run ``work(pair)`` on the worker thread in its turn, and return what it returns, or raise what it raises.

        For what measures, audits or saves a loaded pair. The pair is not thread-safe: use nothing of it after ``work``.
        With a ``conversation`` its turn comes after the requests of that.

        >>> llm.run(lambda pair: pair.state.times(1))  # expected milliseconds of a one-token pass

        Raises:
            Closed: after ``close``.
        """
        return self._worker.call(lambda: work(self._pair), conversation=conversation)

    def job(
        self, question: Prompt | Callable[[], Prompt], params: SamplingParams | None, **options: Unpack[RequestOptions]
    ) -> Job:
        """See ``Asking.job``; a question that is a function is called when its turn comes."""
        pair, (params, rest) = self._pair, split_options(params, options)
        queued = {name: rest.pop(name) for name in ("deadline", "conversation", "priority") if name in rest}
        if rest.get("draft_length") is None:
            rest["draft_length"] = self._draft_length
        return Job(
            lambda job: answer(pair, job),
            abandoned=lambda job: never_ran(pair, job),
            request=Request(pair.encoder, question, params, **rest),
            submit=self._worker.queue.put,
            **queued,
        )

    def _scoring(self, prompt: Prompt, top: int, deadline: float | None, conversation: Hashable | None) -> Job:
        pair, n_top = self._pair, checked_top(top)
        return Job(
            lambda job: score(pair, pair.encoder.encode(prompt), n_top, job),
            deadline=deadline,
            conversation=conversation,
            submit=self._worker.queue.put,
        )

    def take_turns(self, turns: Turns) -> None:
        """Share the cores with all LLMs that are given the same: their rounds alternate. From the next request on."""
        self._worker.turns = turns

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no request and no work for idle time is left, at most so long [s]; whether that came about."""
        return self._worker.queue.wait_at_rest(timeout)

    def close(self, *, cancel: bool = False) -> None:
        """Finish the requests that run and wait, or ``cancel`` them, and free the memory; safe to call twice."""
        self._finalizer.detach()
        self._worker.close(self._pair.close, cancel=cancel)

    async def aclose(self, *, cancel: bool = False) -> None:
        """As ``close``, for asyncio."""
        await asyncio.to_thread(self.close, cancel=cancel)

    def __repr__(self) -> str:
        drafts = ", ".join(self.draft_names) or "none"
        return f"<LLM {self.model_name}: {self.engine}, {self.n_ctx} tokens of context, drafts: {drafts}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.close(cancel=kind is not None)

    async def __aenter__(self) -> LLM:
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        await self.aclose(cancel=kind is not None)


def _close_if_loaded(loading: asyncio.Future[LLM]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result()._finalizer()
