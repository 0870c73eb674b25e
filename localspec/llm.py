"""``LLM``: a loaded pair behind an interface that any thread, and asyncio, can use."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Unpack

from localspec.backends.placement import Placement
from localspec.errors import Cancelled
from localspec.model_files.catalog import Catalog
from localspec.model_files.vocab import Vocab
from localspec.prompts.prompts import Prompt, PromptEncoder
from localspec.prompts.templates import ChatTemplate
from localspec.runtime import arguments
from localspec.runtime.answering import answer, never_ran, score
from localspec.runtime.arguments import (
    DraftLength,
    RequestOptions,
    checked_bound,
    checked_length,
    checked_spec,
    draft_specs,
    split_options,
)
from localspec.runtime.asking import AskingModel
from localspec.runtime.idle import PREPARATION, IdleWork, OnMains
from localspec.runtime.jobs import Job
from localspec.runtime.load_options import PREFIX_CACHE_BYTES, LoadOptions
from localspec.runtime.model_loading import Report, giving_way
from localspec.runtime.pair import Pair
from localspec.runtime.read_ahead import ReadAhead
from localspec.runtime.request import AnswerRequest
from localspec.runtime.scheduler import serve_beside
from localspec.runtime.stream import Submit
from localspec.runtime.tokenizing import Tokenizing
from localspec.runtime.worker import Result, Worker
from localspec.sampling.logprobs import checked_top
from localspec.sampling.sampling import SamplingParams
from localspec.session import Session
from localspec.session import load as load_session
from localspec.values import checked_whole


class LLM(Tokenizing, AskingModel):
    """A target model and its drafters, loaded and ready.

    One worker thread owns the engine; every method may be called from any thread. One request runs at a time, or as
    many as ``parallel`` says; the others wait: those of one conversation in order, conversations in turns.

    >>> with LLM("qwen2.5-coder-1.5b", draft="qwen2.5-coder-0.5b") as llm:
    ...     messages = [{"role": "user", "content": "Write a haiku."}]
    ...     reply = llm.chat(messages, SamplingParams(max_tokens=64), deadline=30.0)
    ...     print(reply.text, reply.finish_reason, reply.stats["acceptance_rate"])

    Args:
        model: a catalogue name, a path to a ``.gguf`` file, or ``hf:OWNER/REPO/FILE.gguf`` (already pulled).
        draft: ``auto`` (n-grams, and the head and the catalogue's draft for the target that are on disk), None, or one
            or several of ``ngram``, ``recycled``, ``head`` (or ``head:FILE``), ``mtp``, ``early-exit`` (or
            ``early-exit:N``, with N layers of the target) and models as above.
        draft_length: ``auto`` weighs cost and acceptance token by token; a number drafts that many tokens each round.
        backend: ``auto``, ``llama-cpp``, ``ik-llama``, ``mlx`` or ``reference``.
        n_ctx: context size in tokens, answer included; None is 8192, or what the model was trained for if less.
        n_threads: CPU threads; None takes the physical cores.
        n_gpu_layers: layers on the GPU; None takes all if the engine was built for one.
        kv_cache_type: f16, f32, q8_0 or q4_0.
        light_draft: let a draft model on the CPU be replaced by a lighter copy of it where that drafts faster; made and
            compared at the first load, kept on disk. It cannot change an answer.
        draft_backend: the engine for draft models; None is ``backend``.
        remember: keep on disk, for the next run, how often draft tokens were accepted and which tokens mostly followed
            which in answers.
        prefix_cache_bytes: memory [bytes] that conversations other than the present one may take, so that going back to
            one reads nothing again; least recently used out. A token takes what it takes in the context, in target and
            draft: 40 KiB with Qwen2.5-Coder 1.5B and 0.5B at f16. 0 keeps none.
        max_queue: most requests that may wait (the one that runs not counted, those of one conversation counted once);
            beyond it a request raises ``QueueFull`` at once. None is any number.
        idle: work while nobody waits: measuring, making copies, reading ahead. It gives way to a request within a pass,
            and is not done on battery. False does what has to be done while loading, and then nothing between requests.
        placement: where the target's weights go, with more than one device; see ``Placement``.
        parallel: most requests that are answered at a time, in passes of the target that they share; or ``auto``.
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
        progress: Report | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        cancel = arguments.checked_loading(progress, cancel)
        self._progress: Report = progress or (lambda what, fraction: None)
        self.draft_length = draft_length
        engines, sizes = (backend, draft_backend), (n_ctx, n_threads, n_gpu_layers)
        place = Placement() if placement is None else placement
        options = LoadOptions(
            *engines, *sizes, kv_cache_type, light_draft, remember, prefix_cache_bytes, idle, place, parallel
        )
        bound, drafts, name = checked_bound(max_queue), draft_specs(draft), checked_spec("model", model)
        path = self._path = Catalog.load().resolve(name)
        self.model_name = name if not name.endswith(".gguf") else path.name.removesuffix(".gguf")
        self.chat_defaults: dict[str, Any] = Catalog.load().chat_defaults(path)
        # What can be refused was refused before there is a thread.
        self._worker = Worker(bound, IdleWork(OnMains()) if options.idle else None)
        self._pair = self._load(path, drafts, options, cancel)
        target = self._pair.target
        self.backend_name, self.engine = target.backend, target.engine
        self.n_ctx = self._pair.context.n_ctx
        try:
            self.template = ChatTemplate.for_vocab(target.chat_template, target.vocab)
        except BaseException:
            self._worker.close(self._pair.close)
            raise
        self._encoder = PromptEncoder(target, self.template)
        serve_beside(self._pair, self._encoder, self._worker)
        self._read_ahead = ReadAhead(self._pair)
        self._worker.when_idle(self._read_ahead)
        self._last = (self._encoder.close, self._pair.close)
        self._worker.when_idle(self._pair.preparation, priority=PREPARATION)
        # Neither the worker nor this holds on to the LLM: dropped without close(), it gives its memory back too.
        self._finalizer = weakref.finalize(self, self._worker.close, *self._last, cancel=True, wait=False)
        self._finalizer.atexit = False

    def _load(self, path: Path, draft: Sequence[str], options: LoadOptions, cancel: threading.Event) -> Pair:
        loaded: list[Pair] = []

        def load() -> None:
            loaded.append(Pair(path, draft, options, self._report(cancel)))

        try:
            self._worker.call(load)
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
        return self._pair.draft_names

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
        """The target's file, as it was named."""
        return self._path

    @property
    def size_bytes(self) -> int:
        """Bytes of the target's file."""
        return self._pair.target.size_bytes

    @property
    def vocab(self) -> Vocab:
        """The target's vocabulary."""
        return self._pair.target.vocab

    @property
    def queue_length(self) -> int:
        """How many requests wait for their turn; the one that runs is not counted."""
        return len(self._worker.queue)

    @property
    def busy(self) -> bool:
        """Whether a request runs now."""
        return self._worker.n_running > 0

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

        Args:
            spec: as the ``draft`` argument.
            gives_way: None loads to the end. Otherwise nothing is reported, and loading ends with ``Cancelled`` as soon
                as a request waits or this says so.
        """
        specs, report = draft_specs(spec), self._report()
        if gives_way is not None:
            report = giving_way(lambda: self._worker.queue.presses or gives_way())
        self.run(lambda pair: pair.set_draft(specs, report))

    def explain(self) -> str:
        """Why there is, or is not, drafting now: sentences for people, a line for each drafter."""
        return self._pair.explain(self.draft_length)

    # -- conversations -------------------------------------------------------------------------------------------

    def session(self, system: str | None = None, params: SamplingParams | None = None) -> Session:
        """A new conversation that remembers its turns; see ``Session``.

        >>> session = llm.session(system="You are terse.", params=SamplingParams(temperature=0.7))
        >>> session.chat("Name a river.").text
        """
        return Session(self, system, params)

    def load_session(self, path: str | Path, *, memory: bool = True) -> Session:
        """A conversation that ``Session.save`` wrote, ready to go on without reading it again.

        What the models held is used if it comes from the same model file, engine and cache type and is whole; otherwise
        ``Session.notice`` says in one line why not, and the next answer reads the conversation's text again.

        Args:
            path: the file.
            memory: False takes the text alone: safe with a file from anywhere, where what models held is not.

        Raises:
            SessionFileError: the file is missing, foreign, from another version, or damaged in its text.
        """
        return load_session(self, path, memory=memory)

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

        def change(pair: Pair) -> None:
            pair.prefix_cache.max_bytes = bound

        self.run(change)

    def cache_info(self) -> dict[str, int]:
        """The prefix cache: ``entries``, ``bytes``, ``max_bytes``, ``hits``, ``stored``, ``evictions``."""
        return self._pair.prefix_cache.info()

    # -- the worker ----------------------------------------------------------------------------------------------

    def run(self, work: Callable[[Pair], Result], *, conversation: Hashable | None = None) -> Result:
        """Run ``work(pair)`` on the worker thread in its turn, so while no request runs, and return what it returns.

        For what measures, audits or saves a loaded pair: ``Pair.state`` is what it decodes with, ``Pair.use`` has it
        decode with something else. The pair is not thread-safe, so nothing of it should be used after ``work`` ended.

        >>> llm.run(lambda pair: pair.state.times(1))  # expected milliseconds of a one-token pass

        Args:
            work: what it raises is raised here.
            conversation: its turn comes after the requests of this conversation; see ``rounds``.

        Raises:
            Closed: after ``close``.
        """
        return self._worker.call(lambda: work(self._pair), conversation=conversation)

    def submitter(
        self,
        question: Prompt | Callable[[], Prompt],
        params: SamplingParams | None,
        **options: Unpack[RequestOptions],
    ) -> Submit:
        """See ``Asking.submitter``; a question that is a function is called when its turn comes."""
        params, rest = split_options(params, **options)
        queued = {name: rest.pop(name) for name in ("deadline", "conversation", "priority") if name in rest}
        request = AnswerRequest.checked(question, params, self._encoder, self.draft_length, self.model_name, **rest)
        return self._submitter(
            lambda job: answer(request, self._pair, self._encoder, job),
            lambda job: never_ran(request, job, self._pair),
            request=request,
            **queued,
        )

    def _scorer(self, prompt: Prompt, top: int, deadline: float | None, conversation: Hashable | None) -> Submit:
        n_top = checked_top(top)
        return self._submitter(
            lambda job: score(self._encoder.encode(prompt), n_top, self._pair, self._encoder, job),
            lambda job: Cancelled(f"the request was cancelled by its {job.cancelled_by} while it waited"),
            deadline=deadline,
            conversation=conversation,
        )

    def _submitter(self, work: Callable[[Job], Any], abandoned: Callable[[Job], Any], **options: Any) -> Submit:
        def submit(deliver: Callable[[Any], Any]) -> Job:
            job = Job(work, deliver, abandoned=abandoned, **options)
            self._worker.queue.put(job)
            return job

        return submit

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no request and no work for idle time is left, at most so long [s]; whether that came about."""
        return self._worker.wait_idle(timeout)

    def close(self, *, cancel: bool = False) -> None:
        """Finish the requests that run and wait, then free the memory; safe to call twice.

        Args:
            cancel: stop them within a round instead; their replies say ``cancelled``.
        """
        self._finalizer.detach()
        self._worker.close(*self._last, cancel=cancel)

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
