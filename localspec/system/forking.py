"""What holds in the child of a fork: it has a copy of all that its parent has loaded, and none of the threads.

An engine waits for its threads when it computes, and when it is freed. So in the child what was loaded before the fork
is refused with one clear line, and never freed; the parent goes on with it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

REFUSAL = "this LLM was loaded before the process was forked, and belongs to the parent: load one in the child"

_KNOWN: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def in_child(owner: Any, renounce: Callable[[Any], None]) -> None:
    """Have ``renounce(owner)`` called in children that are forked while the owner lives.

    It runs before anything else there. Locks may be held for ever by threads that only the parent has, so it takes
    none, and makes new ones. The owner is not kept alive by this.
    """
    _KNOWN[owner] = renounce


def _forked() -> None:
    known = list(_KNOWN.items())
    _KNOWN.clear()
    for owner, renounce in known:
        renounce(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
