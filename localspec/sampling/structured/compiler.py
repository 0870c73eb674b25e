"""The library that matches grammars, llguidance: imported when needed, and compiling on a large stack."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from localspec.errors import EngineUnavailable

T = TypeVar("T")

STACK_BYTES = 512 << 20
"""Compiling follows references by recursion: a thousand in a row overflow the usual stack of a thread, which ends the
whole process. Of a large stack only what is used becomes memory; what is compiled needs no depth."""

MAX_ITEMS = 5000
"""Places in the grammar at which an answer may stand at once; the library's own limit is 2,000."""

_starting = threading.Lock()


def library() -> Any:
    """The module ``llguidance``.

    Raises:
        EngineUnavailable: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise EngineUnavailable(
            "JSON schemas, grammars and forced tool calls need the package llguidance: pip install 'llguidance>=1.9,<2'"
        ) from error
    return llguidance


def problem_of(grammar: str) -> str | None:
    """Why a grammar does not compile, in one line; None if it does. Needs no vocabulary."""
    llguidance = library()
    failed, messages = _deep(
        lambda: llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=_limits(llguidance))
    )
    return reason(messages[0]) if failed else None


def compiled(tokenizer: Any, grammar: str) -> Any:
    """An ``LLMatcher`` at the beginning of a grammar; it may be in its error state."""
    llguidance = library()
    return _deep(lambda: llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_limits(llguidance)))


def _limits(llguidance: Any) -> Any:
    # Errors come with a dump of the parser otherwise.
    return llguidance.LLParserLimits(verbose_errors=False, max_items_in_row=MAX_ITEMS)


def _deep(function: Callable[[], T]) -> T:
    """Run on a thread with a large stack."""
    result: list[T] = []
    thread = threading.Thread(target=lambda: result.append(function()), name="localspec-grammar", daemon=True)
    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return result[0]


_WHERE = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")
_EXCERPT = re.compile(r"\n +\d+ \| .*|\n?<non-verbose/>.*", re.DOTALL)


def reason(message: str) -> str:
    """What is wrong, from the library's message: one line without its excerpts and internal positions."""
    return one_line(_WHERE.sub("", _EXCERPT.sub("", message))) or "the library does not say why"


def one_line(text: str) -> str:
    """At most 240 characters on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 240 else line[:237] + "..."
