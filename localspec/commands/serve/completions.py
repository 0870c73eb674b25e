"""``POST /v1/completions``: a text continued as it is, or filled in before a suffix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from localspec.commands.serve.answers import ApiAnswer, finite
from localspec.commands.serve.deltas import Delta
from localspec.commands.serve.requests import CompletionRequest
from localspec.commands.serve.service import AnswerTask, Service, repeated
from localspec.spec_decode.rounds import EmittedToken

_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionAnswer(ApiAnswer):
    """The texts continued. Made in a thread: cutting long texts into tokens may take a while.

    Raises:
        UsageError: a prompt is empty, or does not fit into the context, or the model cannot fill in.
    """

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        n, prompts = request.options.n, request.prompts
        tasks = [each for task in completion_tasks(service, request) for each in repeated(task, n)]
        super().__init__(service, request.options, tasks)
        self._echoes: list[str] = []
        if request.echo:
            texts = [prompt if isinstance(prompt, str) else service.llm.detokenize(prompt) for prompt in prompts]
            self._echoes = [text for text in texts for _ in range(n)]
        self._offsets = [0] * len(tasks)

    def begin(self, index: int) -> Iterator[dict[str, Any]]:
        if self._echoes:
            yield {"text": self._echoes[index]}

    def pieces(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        piece: dict[str, Any] = {"text": delta.text}
        if self.options.logprobs is not None:
            piece["logprobs"] = self._logprobs(index, delta.tokens)
        yield piece

    def end(self) -> dict[str, Any]:
        return {"text": ""}

    def whole_choice(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        text = "".join(piece["text"] for piece in pieces)
        if self.options.logprobs is None:
            return {"text": text}
        each = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        return {"text": text, "logprobs": {name: [v for one in each for v in one[name]] for name in _LOGPROBS}}

    def _logprobs(self, index: int, tokens: Sequence[EmittedToken]) -> dict[str, Any]:
        llm = self.service.llm
        rows = []
        for token in tokens:
            assert token.logprobs is not None
            top = {llm.token_text(id): finite(logprob) for id, logprob in token.logprobs.top}
            rows.append((llm.token_text(token.id), finite(token.logprobs.logprob), top, self._offsets[index]))
            self._offsets[index] += len(token.text)
        return {name: [row[i] for row in rows] for i, name in enumerate(_LOGPROBS)}


def completion_tasks(service: Service, request: CompletionRequest) -> list[AnswerTask]:
    """What to answer, for each prompt.

    Raises:
        UsageError: a prompt is empty, or does not fit into the context, or the model cannot fill in.
    """
    if request.suffix is None:
        return [service.text_task(prompt, request.options) for prompt in request.prompts]
    return [service.fill_task(str(prompt), request.suffix, request.options) for prompt in request.prompts]
