"""One answer of a request, from rounds to deltas: text, tool calls, and the tokens that log-probabilities belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec.commands.serve.tool_calls import CallArguments, CallStart, Piece, TextPiece, ToolCallReader
from localspec.spec_decode.rounds import EmittedToken, Round


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last one.

    Attributes:
        pieces: verified text, and beginnings and arguments of tool calls, in their order.
        thinking: what was thought before it.
        tokens: tokens whose text has been released, calls included, thinking not.
    """

    pieces: Sequence[Piece] = ()
    thinking: str = ""
    tokens: list[EmittedToken] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.pieces or self.thinking or self.tokens)

    @property
    def text(self) -> str:
        """All that is no tool call."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, TextPiece))

    @property
    def calls(self) -> list[CallStart | CallArguments]:
        return [piece for piece in self.pieces if not isinstance(piece, TextPiece)]


class DeltaReader:
    """Reads rounds.

    Args:
        tools: functions that may be called; empty reads no calls.
        begun: the beginning of the answer that the model was given, where a call is forced.
        parallel: whether there may be several calls.
        wants_tokens: whether tokens are collected.

    Attributes:
        calls: reads the tool calls.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], begun: str = "", *, parallel: bool = True, wants_tokens: bool = False
    ) -> None:
        self.calls = ToolCallReader(tools, parallel=parallel)
        self.calls.push(begun)
        self._wants_tokens = wants_tokens
        self._waiting: deque[tuple[int, EmittedToken]] = deque()
        self._n_read = 0
        self._n_released = 0

    def read(self, round_: Round) -> Delta:
        """The delta that a round makes."""
        self._n_released += sum(len(span.text) for span in round_.spans)
        return Delta(self.calls.push(round_.text), round_.thinking, self._released(round_))

    def finish(self, *, cut: bool) -> Delta:
        """What was still waiting when the answer ended; ``cut``: before its end."""
        return Delta(self.calls.finish(cut=cut))

    def _released(self, round_: Round) -> list[EmittedToken]:
        """The tokens whose text has come out; those of a stop string never do, and an end token has none."""
        if not self._wants_tokens:
            return []
        for token in round_.emitted:
            self._waiting.append((self._n_read, token))
            self._n_read += len(token.text)
        over = round_.finish_reason is not None
        released = []
        while self._waiting:
            start, token = self._waiting[0]
            if not (start < self._n_released if over else start + len(token.text) <= self._n_released):
                break
            self._waiting.popleft()
            if not token.thinking:
                released.append(token)
        return released
