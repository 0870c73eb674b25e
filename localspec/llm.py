"""``LLM``: a loaded pair behind an interface that any thread, and asyncio, can use."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from localspec.catalog import Catalog
from localspec.errors import Closed, UsageError
from localspec.pair import DraftLength, Pair, PairOptions, Report
from localspec.rounds import FinishReason, Round, SpecStats
from localspec.sampling import SamplingParams
from localspec.stream import Job, Reply, RoundStream
from localspec.text import ChatTemplate

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages


class LLM:
    """A target model and its drafters, loaded and ready.

    One worker thread owns the engine; every method may be called from any thread, requests queue in order.

    Args:
        model: a catalogue name, a path to a ``.gguf`` file, or ``hf:OWNER/REPO/FILE.gguf`` (already pulled).
        draft: ``auto`` (the catalogue's draft for the target if it is on disk, and n-grams), None, or one or several of
            ``ngram`` and models as above.
        draft_length: ``auto`` weighs cost and acceptance token by token; a number drafts that many tokens each round.
        backend: ``auto``, ``llama-cpp``, ``ik-llama`` or ``reference``.
        n_ctx: context size in tokens, answer included; None is 8192, or what the model was trained for if less.
        n_threads: CPU threads; None takes the physical cores.
        n_gpu_layers: layers on the GPU; None takes all if the engine was built for one.
        kv_cache_type: f16, f32, q8_0 or q4_0.
        light_draft: let a draft model on the CPU be replaced by a lighter copy of it where that drafts faster; made and
            compared at the first load, kept on disk. It cannot change what is said.
        remember: keep on disk how often guesses were right, for the next run.
        progress: called while loading, from the worker thread, with what is being done and the fraction done (or
            None); an exception from it cancels the load and is raised here.

    Raises:
        UnknownModel, ModelFileError, VocabularyMismatch, EngineError: the pair cannot be loaded.
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
        progress: Report | None = None,
    ) -> None:
        self._closed = False
        self._report: Report = progress or (lambda what, fraction: None)
        self.draft_length = draft_length
        for name, value in (("n_ctx", n_ctx), ("n_threads", n_threads)):
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be over 0, not {value}")
        path = Catalog.load().resolve(str(model))
        self.model_name = str(model) if not str(model).endswith(".gguf") else path.name.removesuffix(".gguf")
        options = PairOptions(backend, n_ctx, n_threads, n_gpu_layers, kv_cache_type, light_draft, remember)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="localspec", daemon=True)
        self._thread.start()
        try:
            self._pair: Pair = self._call(lambda: Pair(path, _specs(draft), options, self._report))
        except BaseException:
            self._work.put(None)
            self._closed = True
            raise
        target = self._pair.target
        self.backend_name = target.backend
        self.engine = target.engine
        self.n_ctx = self._pair.context.n_ctx
        self.template = ChatTemplate.for_vocab(target.chat_template, target.vocab)
        self.chat_defaults: dict[str, Any] = Catalog.load().chat_defaults(path)

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def draft_length(self) -> DraftLength:
        """``auto`` or a number of tokens; takes effect with the next request."""
        return self._draft_length

    @draft_length.setter
    def draft_length(self, value: DraftLength) -> None:
        self._draft_length = _checked_length(value)

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
    def size_bytes(self) -> int:
        """Bytes of the target's file."""
        return self._pair.target.size_bytes

    def set_draft(self, spec: str | Path | Sequence[str | Path] | None) -> None:
        """Replace the drafters, as the ``draft`` argument does; on an error the ones in use stay."""
        self._call(lambda: self._pair.set_draft(_specs(spec), self._report))

    def explain(self) -> str:
        """One sentence: why the runtime is, or is not, drafting now."""
        return self._pair.explain(self.draft_length)

    # -- text and tokens -----------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text; ``parse_special`` reads special tokens in it as such."""
        tokens: list[int] = self._call(
            lambda: self._pair.target.tokenize(text, add_special=add_special, parse_special=parse_special)
        )
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text that tokens stand for; bytes that are not valid UTF-8 become U+FFFD."""
        vocab = self._pair.target.vocab
        return b"".join(vocab.token_bytes(token) for token in tokens).decode("utf-8", "replace")

    def count_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt has, chat template included where it is a list of messages."""
        return len(self._call(lambda: self._encode(prompt)))

    def _encode(self, prompt: Prompt) -> list[int]:
        target = self._pair.target
        if isinstance(prompt, str):
            return target.tokenize(prompt, add_special=True)
        vocab = target.vocab
        tokens: list[int] = []
        for text, parse_special in self.template.render_segments(prompt):
            tokens += target.tokenize(text, parse_special=parse_special)
        if vocab.add_bos and vocab.bos is not None and tokens[:1] != [vocab.bos]:
            tokens.insert(0, vocab.bos)
        return tokens

    # -- generating ----------------------------------------------------------------------------------------------

    def rounds(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        draft_length: DraftLength | None = None,
    ) -> RoundStream:
        """Answer, round by round: the guesses and their fate.

        Args:
            prompt: messages for the chat template, or a string to continue as it is.
            params: sampling parameters; None is greedy.
            speculate: False decodes plainly, in the same loop.
            draft_length: overrides ``draft_length`` for this request.
        """
        stream = RoundStream()
        self._submit(stream.job, prompt, params, speculate=speculate, draft_length=draft_length)
        return stream

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[str]:
        """Answer piece by piece: verified text only; options as in ``rounds``."""
        with self.rounds(prompt, params, **options) as rounds:
            for round_ in rounds:
                if round_.text:
                    yield round_.text

    def chat(self, messages: Messages, params: SamplingParams | None = None, **options: Any) -> Reply:
        """Answer a conversation; options as in ``rounds``."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._wait(messages, params, options)

    def generate(self, text: str, params: SamplingParams | None = None, **options: Any) -> Reply:
        """Continue a text as it is, without the chat template; options as in ``rounds``."""
        return self._wait(text, params, options)

    def _wait(self, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any]) -> Reply:
        with self.rounds(prompt, params, **options) as rounds:
            return rounds.reply

    async def arounds(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Round]:
        """As ``rounds``, for asyncio; leaving the loop or cancelling the task stops the engine within a round."""
        async for item in self._aevents(prompt, params, options):
            if isinstance(item, Round):
                yield item

    async def _aevents(
        self, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any]
    ) -> AsyncIterator[Round | Reply]:
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Any] = asyncio.Queue()

        def put(item: Any) -> None:
            try:
                loop.call_soon_threadsafe(items.put_nowait, item)
            except RuntimeError:
                job.cancel.set()  # the loop is gone, and with it whoever wanted this

        job = Job(put)
        self._submit(job, prompt, params, **options)
        try:
            while True:
                item = await items.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Reply):
                    return
        finally:
            job.cancel.set()

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> AsyncIterator[str]:
        """As ``stream``, for asyncio."""
        async for round_ in self.arounds(prompt, params, **options):
            if round_.text:
                yield round_.text

    async def achat(self, messages: Messages, params: SamplingParams | None = None, **options: Any) -> Reply:
        """As ``chat``, for asyncio."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        reply: Reply | None = None
        async for item in self._aevents(messages, params, options):
            if isinstance(item, Reply):
                reply = item
        assert reply is not None
        return reply

    # -- the worker ----------------------------------------------------------------------------------------------

    def _submit(
        self,
        job: Job,
        prompt: Prompt,
        params: SamplingParams | None,
        speculate: bool = True,
        draft_length: DraftLength | None = None,
    ) -> None:
        if self._closed:
            raise Closed("this LLM was closed")
        length: DraftLength = 0 if not speculate else self.draft_length
        if speculate and draft_length is not None:
            length = _checked_length(draft_length)
        params = replace(params) if params is not None else SamplingParams()

        def run() -> None:
            try:
                job.put(self._answer(job, prompt, params, length))
            except BaseException as error:
                job.put(error)

        self._work.put(run)

    def _answer(self, job: Job, prompt: Prompt, params: SamplingParams, length: DraftLength) -> Reply:
        stats = SpecStats()
        started = time.perf_counter()
        tokens = self._encode(prompt)
        stats.prompt_tokens = len(tokens)
        text: list[str] = []
        token_ids: list[int] = []
        finish: FinishReason = "cancelled"

        def prefilled(cached: int) -> None:
            stats.cached_tokens = cached
            stats.seconds_prompt = time.perf_counter() - started

        for round_ in self._pair.rounds(tokens, params, length, prefilled, job.cancel.is_set):
            if stats.time_to_first_token_s is None:
                stats.time_to_first_token_s = time.perf_counter() - started
            stats.add(round_)
            text.append(round_.text)
            token_ids += [token.id for token in round_.emitted]
            finish = round_.finish_reason or finish
            job.put(round_)
        stats.seconds_plain_token = self._pair.times(1) / 1e3
        return Reply(
            "".join(text), token_ids, finish, stats, self.model_name, self._pair.draft_names, self._pair.target.backend
        )

    def _call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the worker thread and wait for its result."""
        if self._closed:
            raise Closed("this LLM was closed")
        done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((True, function()))
            except BaseException as error:
                done.put((False, error))

        self._work.put(run)
        while True:
            try:
                good, value = done.get(timeout=1.0)
            except queue.Empty:
                continue
            if good:
                return value
            raise value

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work

    def close(self) -> None:
        """Wait for the requests in the queue, then free the memory; safe to call twice."""
        if not self._closed:
            self._work.put(self._pair.close)
            self._work.put(None)
            self._closed = True
            self._thread.join()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _specs(draft: str | Path | Sequence[str | Path] | None) -> list[str]:
    if draft is None:
        return []
    if isinstance(draft, str | Path):
        return [str(draft)]
    return [str(each) for each in draft]


def _checked_length(value: DraftLength) -> DraftLength:
    from localspec.controller import FixedController

    if value == "auto":
        return value
    try:
        length = int(value)
    except ValueError:
        raise UsageError(f"the draft length must be auto or a number, not {value!r}") from None
    return FixedController(length).length
