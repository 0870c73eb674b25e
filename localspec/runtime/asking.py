"""The ways to ask: ``rounds``, ``stream``, ``chat``, and the same for asyncio. ``LLM`` and ``Session`` have them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar, Unpack, cast

from localspec.prompts.infill import FILL_TOKENS, ContextFiles, FillPrompt
from localspec.prompts.prompts import Prompt
from localspec.runtime.arguments import RequestOptions, split_options
from localspec.runtime.stream import AsyncRoundStream, Reply, RoundStream, Submit
from localspec.sampling.logprobs import ScoredToken
from localspec.sampling.sampling import SamplingParams

Question = TypeVar("Question")


class Asking(ABC, Generic[Question]):
    """Turns one thing, how to queue a question, into every way to ask it."""

    @abstractmethod
    def submitter(self, question: Question, params: SamplingParams | None, **options: Unpack[RequestOptions]) -> Submit:
        """Check a question and its options, and return what queues it."""

    def _as_chat(self, question: Question | str) -> Question | str:
        """What ``chat`` makes of a question."""
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
            question: for an ``LLM`` messages for the chat template, a string to continue as it is, or token ids; for a
                ``Session`` the next question of its conversation.
            params: sampling parameters; None is greedy. Each can also be given by its own name, as in
                ``max_tokens=64``, which counts more than ``params``.
            speculate: False decodes plainly, in the same loop.
            draft_length: overrides the LLM's ``draft_length`` for this request.
            drafters: which of the LLM's ``draft_names`` take part in this request; None is all.
            prediction: a text that the answer is likely to repeat, such as the file to be edited: n-grams copy from it.
            think: ``on`` or ``off``, where the model's chat template has a switch for it or the model marks what it
                thinks; ``low``, ``medium``, ``high`` where it takes an effort. None, or ``auto``, is the template's own
                way. In an answer to messages ``Round.thinking`` is then apart from ``Round.text``; of a text or token
                ids nothing is told apart unless ``think`` is given.
            thinking_budget: tokens after which a thinking block that is still open is closed for the model, so that it
                answers; None is any number.
            deadline: seconds from now, waiting included, after which the request ends as if it had been closed: within
                a round, ``finish_reason`` ``cancelled`` by ``deadline``. One that is late in the queue never runs.
            conversation: anything hashable. Requests of one conversation run in order; conversations take turns. None
                is a conversation of its own. (A ``Session`` is one already.)
            priority: of the requests that wait those with the highest come first; 0 is ordinary, less is for what may
                wait, such as a batch of texts.
            logprobs: judge every token of the answer: ``EmittedToken.logprobs`` holds its log-probability, and those of
                this many most probable tokens (0 to 20). From the target's raw logits, see ``sampling.logprobs``.
            keep_tokens: how much of the prompt's beginning is worth keeping in memory when the answer is there, for the
                next prompt to go on from; None is all of it, and the answer.

        Raises:
            QueueFull: ``max_queue`` requests are waiting.
            UsageError: an option makes no sense, or there is none of that name. What is wrong with the prompt is raised
                when the stream is read.
            Closed: after ``close``.
        """
        return RoundStream(self.submitter(question, params, **options))

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
        with self.rounds(self._as_chat(question), params, **options) as rounds:  # type: ignore[arg-type]
            return rounds.reply

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
        return AsyncRoundStream(self.submitter(question, params, **options))

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
        async with self.arounds(self._as_chat(question), params, **options) as rounds:  # type: ignore[arg-type]
            return await rounds.reply()


class AskingModel(Asking[Prompt]):
    """What only a model can be asked, and not a conversation."""

    @abstractmethod
    def _scorer(self, prompt: Prompt, top: int, deadline: float | None, conversation: Hashable | None) -> Submit:
        """Check what is to be scored, and return what queues it."""

    def _as_chat(self, question: Prompt | str) -> Prompt:
        return [{"role": "user", "content": question}] if isinstance(question, str) else question

    def generate(
        self, text: str | Sequence[int], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Reply:
        """Continue a text as it is, without the chat template; options as in ``rounds``.

        >>> llm.generate("def fibonacci(n):", SamplingParams(max_tokens=80, stop=["\\n\\n"])).text
        """
        with self.rounds(text, params, **options) as rounds:
            return rounds.reply

    async def agenerate(
        self, text: str | Sequence[int], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Reply:
        """As ``generate``, for asyncio."""
        async with self.arounds(text, params, **options) as rounds:
            return await rounds.reply()

    @abstractmethod
    def fill_prompt(
        self,
        prefix: str,
        suffix: str = "",
        context_files: ContextFiles = (),
        *,
        name: str | None = None,
        max_tokens: int | None = None,
    ) -> FillPrompt:
        """See ``Tokenizing``."""

    def fill(
        self,
        prefix: str,
        suffix: str = "",
        params: SamplingParams | None = None,
        *,
        context_files: ContextFiles = (),
        name: str | None = None,
        single_line: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Reply:
        """Fill in what stands between two texts: completion at a cursor. For models with fill-in-the-middle tokens.

        What stands before the cursor stays in memory, so that the next request for the same place in the same files
        reads only what was typed since, and the suffix.

        >>> llm.fill("def area(r):\\n    return ", "\\n\\nprint(area(2))\\n", single_line=True).text

        Args:
            prefix: the text before the cursor.
            suffix: the text behind it.
            params: sampling parameters; None is greedy, at most 128 tokens.
            context_files: names and texts of other files (a mapping, or pairs), the most relevant last; where there is
                no room for all, the first are left out.
            name: of the file with the cursor.
            single_line: end before the next line break.
            options: as in ``rounds``.

        Raises:
            UsageError: the model has no fill-in-the-middle tokens, or there is no text at all.
            QueueFull, Closed: as in ``rounds``.
        """
        prompt, params, options = self._fill(prefix, suffix, params, context_files, name, single_line, options)
        with self.rounds(prompt.tokens, params, **options) as rounds:
            return rounds.reply

    async def afill(
        self,
        prefix: str,
        suffix: str = "",
        params: SamplingParams | None = None,
        *,
        context_files: ContextFiles = (),
        name: str | None = None,
        single_line: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Reply:
        """As ``fill``, for asyncio; cancelling the task, as when something else was typed, stops the engine."""
        prompt, params, options = self._fill(prefix, suffix, params, context_files, name, single_line, options)
        async with self.arounds(prompt.tokens, params, **options) as rounds:
            return await rounds.reply()

    def _fill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None,
        files: ContextFiles,
        name: str | None,
        single_line: bool,
        options: RequestOptions,
    ) -> tuple[FillPrompt, SamplingParams, RequestOptions]:
        params, rest = split_options(SamplingParams(max_tokens=FILL_TOKENS) if params is None else params, **options)
        if single_line:
            params = replace(params, stop=[*params.stop, "\n"])
        prompt = self.fill_prompt(prefix, suffix, files, name=name, max_tokens=params.max_tokens)
        return prompt, params, cast(RequestOptions, {"keep_tokens": prompt.n_before} | rest)

    def logprobs(
        self,
        prompt: Prompt,
        *,
        top: int = 0,
        deadline: float | None = None,
        conversation: Hashable | None = None,
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
            QueueFull, UsageError, Closed: as in ``rounds``.
        """
        with RoundStream(self._scorer(prompt, top, deadline, conversation)) as stream:
            return cast(list[ScoredToken], stream.reply)

    async def alogprobs(
        self,
        prompt: Prompt,
        *,
        top: int = 0,
        deadline: float | None = None,
        conversation: Hashable | None = None,
    ) -> list[ScoredToken]:
        """As ``logprobs``, for asyncio."""
        async with AsyncRoundStream(self._scorer(prompt, top, deadline, conversation)) as stream:
            return cast(list[ScoredToken], await stream.reply())
