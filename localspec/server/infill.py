"""``POST /infill``: llama-server's address for completion in an editor, as llama.vim and llama.vscode use it."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from localspec.engine.request import Reply
from localspec.prompts.infill import FILL_TOKENS
from localspec.server import known_fields as known
from localspec.server.events import event
from localspec.server.fields import Fields
from localspec.server.openai import figures
from localspec.server.requests import SHARED, AnswerOptions, ServedModel, completion_request
from localspec.server.service import AnswerEvent, AnswerTask, Service

MAX_FILES, MAX_SAMPLERS, MAX_FIELDS, MAX_SLOT = 1024, 64, 64, 1 << 31
LONGEST_MS, WIDEST_INDENT = 1 << 31, 1 << 16

_LINE = re.compile(r"\n([ \t]*)(?=\S)")


@dataclass(frozen=True, slots=True)
class InfillRequest:
    """The body of ``/infill``.

    Attributes:
        options: what it has in common with other requests.
        prefix, suffix: before and behind the cursor.
        files: name and text of other chunks of text.
        slot: the editor's; None is one of its own.
        n_indent: a line that begins with less white space than this ends the answer, before it.
        seconds: from the first token on, after which an answer of several lines ends; None is any time.
        fields: what of the answer is wanted, as paths such as ``timings/prompt_n``; empty is all.
        reads_only: nothing is to be said: the next request will begin so.
    """

    options: AnswerOptions
    prefix: str
    suffix: str
    files: list[tuple[str, str]]
    slot: int | None
    n_indent: int
    seconds: float | None
    fields: list[str]
    reads_only: bool


def infill_request(fields: Fields, served: ServedModel) -> InfillRequest:
    """Check the body of ``/infill``.

    The samplers ``infill`` and, where no ``samplers`` name it, ``temperature`` make no choice by chance here: then the
    most probable token is taken.

    Raises:
        ApiError: it makes no sense, or asks for what there is not.
    """
    fields.known(known.INFILL)
    n_predict = fields.integer("n_predict", -1, MAX_SLOT)
    samplers = fields.items("samplers", MAX_SAMPLERS)
    body = fields.those((*SHARED, "stop", "stream"))
    if samplers and "temperature" not in samplers:
        body.pop("temperature", None)
    # A suggestion is not a conversation: what the server takes for those, where nothing is said, does not hold.
    body = {"temperature": 0} | body | {"prompt": (fields.text("input_prefix") or "") + (fields.text("prompt") or "")}
    if n_predict != -1:
        body["max_tokens"] = n_predict or FILL_TOKENS
    request = completion_request(Fields(body), served)
    extra = enumerate(fields.items("input_extra", MAX_FILES))
    files = [Fields(item, f"input_extra[{i}]").known(known.INPUT_EXTRA) for i, item in extra]
    wanted = fields.items("response_fields", MAX_FIELDS)
    if not all(isinstance(name, str) for name in wanted):
        raise fields.wrong("response_fields", "a list of strings")
    slot = fields.integer("id_slot", -1, MAX_SLOT)
    milliseconds = fields.number("t_max_predict_ms", -1, LONGEST_MS) or 0.0
    return InfillRequest(
        options=request.options,
        prefix=body["prompt"],
        suffix=fields.text("input_suffix") or "",
        files=[(file.text("filename") or "snippet", file.text("text") or "") for file in files],
        slot=None if slot == -1 else slot,
        n_indent=fields.integer("n_indent", 0, WIDEST_INDENT) or 0,
        seconds=milliseconds / 1e3 if milliseconds > 0 else None,
        fields=wanted,
        reads_only=n_predict == 0,
    )


MAX_HELD = 4096
"""Characters of white space that are held back at most."""


class LineRules:
    """Ends an answer where a line stands further left than it may, or where several lines took long enough.

    Args:
        n_indent, seconds: see ``InfillRequest``.

    Attributes:
        over: nothing that follows counts.
    """

    def __init__(self, n_indent: int, seconds: float | None) -> None:
        self.over = False
        self._n_indent = n_indent
        self._seconds = seconds
        self._started: float | None = None
        self._held = ""
        self._has_lines = False  # a line break was released

    def push(self, text: str) -> str:
        """What counts of the answer's next piece, and can be told already."""
        self._started = self._started or time.monotonic()
        self._held += text
        # A line's white space is held back until it is known what follows.
        stripped = self._held.rstrip()
        end = len(stripped) if "\n" in self._held[len(stripped) :] else len(self._held)
        for line in _LINE.finditer(self._held):
            if len(line[1]) < self._n_indent:
                self.over, end = True, line.start()
                break
        if len(self._held) - end > MAX_HELD:  # so that white space without end takes no time without bound
            end = len(self._held)
        self._has_lines = self._has_lines or "\n" in self._held[:end]
        if self._seconds is not None and self._has_lines:
            self.over = self.over or time.monotonic() - self._started >= self._seconds
        return self._release(end)

    def finish(self) -> str:
        """The answer has ended: what was held back."""
        return "" if self.over else self._release(len(self._held))

    def _release(self, end: int) -> str:
        released, self._held = self._held[:end], self._held[end:]
        return released


class InfillAnswer:
    """One suggestion. Made in a thread: cutting texts into tokens may take a while.

    Raises:
        UsageError: the model has no fill-in-the-middle tokens, or there is no text at all.
    """

    def __init__(self, service: Service, request: InfillRequest) -> None:
        self.options = request.options
        self._service = service
        self._request = request
        self._rules = LineRules(request.n_indent, request.seconds)
        self._reply: Reply | None = None
        params = self.options.params
        prefix = service.windows.joined(request.slot, request.prefix)
        prompt = service.llm.fill_prompt(prefix, request.suffix, request.files, max_tokens=params.max_tokens)
        if request.reads_only:
            service.llm.read_ahead(prompt)
        self._task = AnswerTask(prompt.tokens, params, keep_tokens=prompt.n_before, enough=lambda: self._rules.over)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        async with aclosing(self._pieces()) as pieces:
            content = "".join([piece async for piece in pieces])
        return self._picked(self._frame(content) | self._end(content))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        content = ""
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                content += piece
                yield event(self._frame(piece))
        yield event(self._picked(self._frame("") | self._end(content)))

    async def _pieces(self) -> AsyncGenerator[str, None]:
        if self._request.reads_only:
            return
        # The slot is taken once the queue has this request: one that is refused leaves an older one alone.
        slot = self._service.slots.newest(self._request.slot)
        async with aclosing(self._service.answers(self.options, [self._task], slot)) as happenings:
            async for happening in happenings:
                if piece := self._text_of(happening):
                    yield piece

    def _text_of(self, happening: AnswerEvent) -> str:
        text = self._rules.push(happening.delta.text) if not self._rules.over else ""
        if happening.reply is not None:
            self._reply = happening.reply
            text += self._rules.finish()
        return text

    def _frame(self, content: str) -> dict[str, Any]:
        return {"index": 0, "content": content, "id_slot": -1 if (slot := self._request.slot) is None else slot} | {
            "stop": False
        }

    def _end(self, content: str) -> dict[str, Any]:
        """What llama-server says of a finished answer."""
        llm, params, reply = self._service.llm, self.options.params, self._reply
        n_prompt = len(self._task.prompt)
        n_said = reply.stats.completion_tokens if reply else 0
        settings: dict[str, Any] = {
            "n_ctx": llm.n_ctx,
            "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        }
        settings |= {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        return {
            "stop": True,
            "model": self._service.names[0],
            "tokens_predicted": n_said,
            "tokens_evaluated": n_prompt,
            "tokens_cached": n_prompt + n_said if reply else 0,
            "truncated": reply is not None and n_prompt + n_said >= llm.n_ctx,
            "has_new_line": "\n" in content,
            "stop_type": self._stop_type(),
            "generation_settings": settings | {"stop": list(params.stop)},
            "timings": _timings(reply),
            "localspec": figures([reply]) if reply else {},
        }

    def _stop_type(self) -> str:
        reply = self._reply
        if reply is None:
            return "none"
        if self._rules.over or reply.finish_reason != "stop":  # the engine may have been ahead, and done
            return "limit"
        return "eos" if reply.token_ids and reply.token_ids[-1] in self._service.llm.vocab.eog else "word"

    def _picked(self, answer: dict[str, Any]) -> dict[str, Any]:
        if not self._request.fields:
            return answer
        picked = {}
        for path in self._request.fields:
            value: Any = answer
            for name in path.split("/"):
                value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
            if value is not _MISSING:
                picked[path] = value
        return picked


_MISSING = object()


def _timings(reply: Reply | None) -> dict[str, float | int]:
    """Under llama-server's names; ``draft_n`` and ``draft_n_accepted`` are draft tokens sent to the target."""
    if reply is None:
        n_prompt = n_cached = n_said = n_draft = n_accepted = 0
        prompt_ms = said_ms = 0.0
    else:
        stats = reply.stats
        n_cached, n_said = stats.cached_tokens, stats.completion_tokens
        n_prompt = stats.prompt_tokens - n_cached
        n_draft, n_accepted = stats.num_draft_tokens, stats.num_accepted_tokens
        prompt_ms = stats.seconds_prompt * 1e3
        said_ms = (stats.seconds_draft + stats.seconds_verify + stats.seconds_other) * 1e3
    timings: dict[str, float | int] = {"cache_n": n_cached}
    for name, n, ms in (("prompt", n_prompt, prompt_ms), ("predicted", n_said, said_ms)):
        timings |= {f"{name}_n": n, f"{name}_ms": ms}
        timings |= {f"{name}_per_token_ms": ms / n if n else 0.0, f"{name}_per_second": n / ms * 1e3 if ms else 0.0}
    return timings | {"draft_n": n_draft, "draft_n_accepted": n_accepted}
