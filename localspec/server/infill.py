"""``POST /infill``: llama-server's address for completion in an editor, as llama.vim and llama.vscode use it."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

from localspec.prompts.infill import FILL_TOKENS
from localspec.server.answers import ApiAnswer, prompt_progress
from localspec.server.bodies import MAX_COUNT, Body, Flag, between, items, whole
from localspec.server.events import event
from localspec.server.http import ApiError
from localspec.server.requests import ApiBody, CompletionRequest, ServedModel, Shared, Stops
from localspec.server.service import ChoiceJob, Service
from localspec.server.tools import Delta
from localspec.spec_decode.rounds import PromptProgress, Round, SpecStats

MAX_FILES, MAX_SAMPLERS, MAX_FIELDS, WIDEST_INDENT = 1024, 64, 64, 1 << 16

_LINE = re.compile(r"\n([ \t]*)(?=\S)")


class InputExtra(Body):
    filename: str = "snippet"
    text: str = ""


class InfillBody(ApiBody, Shared):
    """The body of ``/infill``."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[InputExtra], items(MAX_FILES)] = []
    prompt: str = ""
    n_predict: Annotated[int, whole(-1, MAX_COUNT)] = -1
    samplers: Annotated[list[Any], items(MAX_SAMPLERS)] = []
    id_slot: Annotated[int, whole(-1, MAX_COUNT)] = -1
    n_indent: Annotated[int, whole(0, WIDEST_INDENT)] = 0
    t_max_predict_ms: Annotated[float, between(-1, MAX_COUNT)] = 0.0
    response_fields: Annotated[list[str], items(MAX_FIELDS)] = []
    stop: Stops | None = None
    stream: Flag = False
    return_progress: Flag = False

    def asked(self, served: ServedModel) -> CompletionRequest:
        # A suggestion is not a conversation: the server's temperature does not hold. The samplers ``infill`` and, where
        # no ``samplers`` name it, ``temperature`` make no choice by chance here: the most probable token is taken.
        chooses = self.temperature is not None and (not self.samplers or "temperature" in self.samplers)
        body = self if chooses else self.model_copy(update={"temperature": 0.0})
        max_tokens = FILL_TOKENS if self.only_reads else self.n_predict
        how = body.job_options(served, stop=self.stop, max_tokens=max_tokens)
        return CompletionRequest(*how, [self.input_prefix + self.prompt], self.input_suffix)

    @property
    def slot(self) -> int | None:
        """The editor's; None is one of its own."""
        return None if self.id_slot == -1 else self.id_slot

    @property
    def only_reads(self) -> bool:
        """Whether nothing is to be said: the next request will begin so."""
        return self.n_predict == 0


MAX_HELD = 4096  # characters of white space that are held back at most


class LineRules:
    """Ends an answer where a line stands further left than it may, or where several lines took long enough.

    Args:
        n_indent: a line that begins with less white space than this ends the answer, before it.
        seconds: from the first token on, after which an answer of several lines ends; None is any time.
    """

    def __init__(self, n_indent: int, seconds: float | None) -> None:
        self.over = False  # nothing that follows counts
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


# Slots of ``/infill``: an editor has one, in which its newest request replaces the one before.
#
# An editor sends a window of lines before the cursor. What slides out of it is put in front again, so that prompts have
# a common prefix.

MAX_WINDOWS, MAX_CHARACTERS = 64, 1 << 18
"""Editors whose windows are remembered, the latest, and the longest window [characters]: 16 MB together."""

HEAD_CHARACTERS = 200  # of a window's beginning, looked for in the one before: some five lines

MOST_WINDOWS = 2  # a prompt grows to so many windows; then it begins anew with the one that was sent


class Slots:
    """Which request has which slot. Used from the event loop only."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._superseded = set[asyncio.Task[Any]]()

    @contextmanager
    def newest(self, slot: int | None) -> Iterator[None]:
        """Within the block the task has the slot (None: one of its own); the one that had it before is cancelled, which
        is an ``ApiError`` there."""
        if slot is None:
            yield
            return
        task = asyncio.current_task()
        assert task is not None
        if older := self._tasks.get(slot):
            self._superseded.add(older)
            older.cancel()
        self._tasks[slot] = task
        try:
            yield
        except asyncio.CancelledError:
            # As asyncio.timeout does it: only if the task was cancelled here alone.
            if task in self._superseded and task.uncancel() == 0:
                raise ApiError(409, f"a newer request took slot {slot}", code="superseded") from None
            raise
        finally:
            self._superseded.discard(task)
            if self._tasks.get(slot) is task:  # a newer request may have had it, and be gone already
                del self._tasks[slot]


class Windows:
    """What each editor showed before the cursor, from as far up as it was read. Thread-safe.

    A window without a slot continues the latest one without a slot that it overlaps with.
    """

    def __init__(self) -> None:
        self._shown: dict[int, str] = {}  # without a slot, under numbers below 0
        self._unnamed = itertools.count(-1, -1)
        self._changing = threading.Lock()

    def joined(self, slot: int | None, prefix: str) -> str:
        """The text before the cursor, with what slid out of the editor's window put in front of it."""
        if not prefix or (slot is None and len(prefix) < HEAD_CHARACTERS):  # so little may stand in any text
            return prefix
        with self._changing:
            key = slot
            if key is None:
                others = (n for n, before in reversed(self._shown.items()) if n < 0 and _place(before, prefix) >= 0)
                key = next(others, next(self._unnamed))
            whole = join(self._shown.pop(key, ""), prefix)
            if len(whole) <= MAX_CHARACTERS:
                self._shown[key] = whole
            if len(self._shown) > MAX_WINDOWS:
                del self._shown[next(iter(self._shown))]
        return whole


def join(before: str, prefix: str) -> str:
    """A window with what an earlier one has in front of it; the window alone if they are not of one text."""
    start = _place(before, prefix)
    if start <= 0 or start + len(prefix) > MOST_WINDOWS * len(prefix):
        return prefix
    return before[:start] + prefix


def _place(before: str, prefix: str) -> int:
    """Where in an earlier window this one begins, with at least half of what follows in common; -1 if nowhere."""
    start = before.find(prefix[:HEAD_CHARACTERS])
    half = min(len(before) - start, len(prefix)) // 2
    return start if start >= 0 and before.startswith(prefix[:half], start) else -1


class InfillAnswer(ApiAnswer):
    """One suggestion; none where the editor only has something read."""

    def __init__(self, service: Service, body: InfillBody) -> None:
        asked, milliseconds = body.asked(service.served()), body.t_max_predict_ms
        self._body, self._params = body, asked.params
        self._rules = LineRules(body.n_indent, milliseconds / 1e3 if milliseconds > 0 else None)
        self._content = ""
        prefix = service.kept(Windows).joined(body.slot, str(asked.prompts[0]))
        files = [(extra.filename or "snippet", extra.text) for extra in body.input_extra]
        fill = service.llm.fill_prompt(prefix, body.input_suffix, files, max_tokens=asked.params.max_tokens)
        self._n_prompt = len(fill.tokens)
        choices = list[ChoiceJob]()
        if body.only_reads:
            service.llm.read_ahead(fill)
        else:
            # The slot is taken once the queue has this request: one that is refused leaves an older one alone.
            self.holding = service.kept(Slots).newest(body.slot)
            choices = service.choices(replace(asked, prompts=[fill]))
        super().__init__(service, choices)

    @property
    def over(self) -> bool:
        return self._rules.over

    def progress(self, index: int, progress: PromptProgress) -> Iterator[bytes]:
        if self._body.return_progress and progress.reader == "target":
            yield event(self._frame("") | {"prompt_progress": prompt_progress(progress)})

    def read(self, index: int, delta: Delta, round_: Round | None = None) -> Iterator[bytes]:
        yield from self._told("" if self._rules.over else self._rules.push(delta.text))

    def done(self, index: int, delta: Delta, finish_reason: str) -> Iterator[bytes]:
        yield from self.read(index, delta)
        yield from self._told(self._rules.finish())

    def _told(self, text: str) -> Iterator[bytes]:
        self._content += text
        if text:
            yield event(self._frame(text))

    def end(self) -> Iterator[bytes]:
        yield event(self._last(""))

    def finished(self) -> dict[str, Any]:
        return self._last(self._content)

    def _frame(self, content: str) -> dict[str, Any]:
        return {"index": 0, "content": content, "id_slot": self._body.id_slot, "stop": False}

    def _last(self, content: str) -> dict[str, Any]:
        llm, params, n_prompt = self.service.llm, self._params, self._n_prompt
        stats = self.replies[0].stats if self.replies else SpecStats()
        n = n_prompt + stats.completion_tokens if self.replies else 0
        return self._picked(
            self._frame(content)
            | {
                "stop": True,
                "model": self.service.names[0],
                "tokens_predicted": stats.completion_tokens,
                "tokens_evaluated": n_prompt,
                "tokens_cached": n,
                "truncated": n >= llm.n_ctx,
                "has_new_line": "\n" in self._content,
                "stop_type": self._stop_type(),
                "generation_settings": {
                    "n_ctx": llm.n_ctx,
                    "n_predict": -1 if params.max_tokens is None else params.max_tokens,
                    "temperature": params.temperature,
                    "top_k": params.top_k,
                    "top_p": params.top_p,
                    "stop": list(params.stop),
                },
                "timings": _timings(stats),
                "localspec": self.figures(),
            }
        )

    def _stop_type(self) -> str:
        if not self.replies:
            return "none"
        reply = self.replies[0]
        if self._rules.over or reply.finish_reason != "stop":  # the engine may have been ahead, and done
            return "limit"
        return "eos" if reply.token_ids and reply.token_ids[-1] in self.service.llm.vocab.eog else "word"

    def _picked(self, answer: dict[str, Any]) -> dict[str, Any]:
        if not self._body.response_fields:
            return answer
        picked = {}
        for path in self._body.response_fields:
            value: Any = answer
            for name in path.split("/"):
                value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
            if value is not _MISSING:
                picked[path] = value
        return picked


_MISSING = object()


def _timings(stats: SpecStats) -> dict[str, float | int]:
    """Under llama-server's names; ``draft_n`` and ``draft_n_accepted`` are draft tokens sent to the target."""
    timings: dict[str, float | int] = {"cache_n": stats.cached_tokens}
    for name, n, seconds in (
        ("prompt", stats.prompt_tokens - stats.cached_tokens, stats.seconds_prompt),
        ("predicted", stats.completion_tokens, stats.seconds_draft + stats.seconds_verify + stats.seconds_other),
    ):
        timings |= {f"{name}_n": n, f"{name}_ms": seconds * 1e3}
        timings[f"{name}_per_token_ms"] = seconds * 1e3 / n if n else 0.0
        timings[f"{name}_per_second"] = n / seconds if seconds else 0.0
    return timings | {"draft_n": stats.num_draft_tokens, "draft_n_accepted": stats.num_accepted_tokens}
