"""An answer as blocks, one after the other: thinking, text, and calls. OpenAI calls them items, Anthropic content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from localspec.commands.serve.deltas import Delta
from localspec.commands.serve.tool_calls import CallStart, TextPiece
from localspec.values import written_json

BlockKind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """One block.

    Attributes:
        index: its place in the answer.
        kind: what it is.
        text: so far; of a call the arguments, as JSON.
        id, name: of a call and its function.
    """

    index: int
    kind: BlockKind
    text: str = ""
    id: str = ""
    name: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a call; none where the answer was cut before they were whole."""
        try:
            value = written_json(self.text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class Change:
    """A block begins, grows by a piece, or ends."""

    what: Literal["begin", "piece", "end"]
    block: AnswerBlock
    piece: str = ""


class BlockReader:
    """Deltas -> changes of blocks. White space between thoughts and calls is no text.

    Attributes:
        blocks: all so far.
    """

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None
        self._space = ""  # in front of a text that may not come

    def read(self, delta: Delta) -> Iterator[Change]:
        if delta.thinking:
            yield from self._say("thinking", delta.thinking)
        for piece in delta.pieces:
            if isinstance(piece, TextPiece):
                yield from self._say("text", piece.text)
            elif isinstance(piece, CallStart):
                self._space = ""
                yield from self._begin(AnswerBlock(len(self.blocks), "call", id=piece.id, name=piece.name))
            else:
                yield self._more(piece.text)

    def finish(self) -> Iterator[Change]:
        """The answer is over."""
        if self._space and not self.blocks:
            yield from self._begin(AnswerBlock(0, "text"))
            yield self._more(self._space)
        yield from self._end()

    def _say(self, kind: BlockKind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            self._space += text
            if self._space.isspace():
                return
            text, self._space = self._space, ""
            yield from self._begin(AnswerBlock(len(self.blocks), kind))
        yield self._more(text)

    def _begin(self, block: AnswerBlock) -> Iterator[Change]:
        yield from self._end()
        self._open = block
        self.blocks.append(block)
        yield Change("begin", replace(block))  # as it is now: it may have grown before this is read

    def _more(self, text: str) -> Change:
        assert self._open is not None
        self._open.text += text
        return Change("piece", self._open, text)

    def _end(self) -> Iterator[Change]:
        if self._open is not None:
            yield Change("end", self._open)
            self._open = None
