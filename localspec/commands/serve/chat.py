"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from localspec.commands.serve.answers import ApiAnswer, finite
from localspec.commands.serve.deltas import Delta
from localspec.commands.serve.requests import ChatRequest
from localspec.commands.serve.service import Service, repeated
from localspec.commands.serve.tool_calls import CallStart
from localspec.spec_decode.rounds import EmittedToken


class ChatAnswer(ApiAnswer):
    """The answer to a chat. Made in a thread: templates and grammars may take a while.

    Raises:
        LocalspecError: the messages do not fit the template or the context.
    """

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, request: ChatRequest) -> None:
        task = service.chat_task(request.messages, request.tools, request.options)
        super().__init__(service, request.options, repeated(task, request.options.n))

    def begin(self, index: int) -> Iterator[dict[str, Any]]:
        yield {"delta": {"role": "assistant", "content": "", "refusal": None}}

    def pieces(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.thinking:
            yield {"delta": {"reasoning_content": delta.thinking}}
        if delta.text or delta.tokens:
            piece: dict[str, Any] = {"delta": {"content": delta.text}}
            if self.options.logprobs is not None:
                piece["logprobs"] = {"content": [self._entry(token) for token in delta.tokens], "refusal": None}
            yield piece
        for call in delta.calls:
            if isinstance(call, CallStart):
                said = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            else:
                said = {"function": {"arguments": call.text}}
            yield {"delta": {"tool_calls": [{"index": call.index} | said]}}

    def end(self) -> dict[str, Any]:
        return {"delta": {}}

    def whole_choice(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {}
        texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        calls: list[dict[str, Any]] = []
        arguments: list[list[str]] = []
        for delta in (dict(piece["delta"]) for piece in pieces):
            for call in delta.pop("tool_calls", ()):
                if "id" in call:
                    calls.append({name: value for name, value in call.items() if name != "index"})
                    arguments.append([])
                arguments[-1].append(call["function"]["arguments"])
            for name, said in texts.items():
                if name in delta:
                    said.append(delta[name])
            message |= delta
        message |= {name: "".join(said) for name, said in texts.items() if said}
        for call, said in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(said)
        if calls:
            message |= {"tool_calls": calls, "content": message["content"] or None}
        if self.options.logprobs is None:
            return {"message": message}
        tokens = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        return {"message": message, "logprobs": {"content": tokens, "refusal": None}}

    def _entry(self, token: EmittedToken) -> dict[str, Any]:
        """``logprobs.content`` for one token."""
        assert token.logprobs is not None
        top = [self._named(id, logprob) for id, logprob in token.logprobs.top]
        return self._named(token.id, token.logprobs.logprob) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        llm = self.service.llm
        raw = list(llm.vocab.token_bytes(token))
        return {"token": llm.token_text(token), "logprob": finite(logprob), "bytes": raw}
