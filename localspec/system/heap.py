"""What the C library keeps of freed memory, handed back to the system."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Give freed memory back; glibc keeps it for the process otherwise, 20 to 80 MB after an engine was closed.

    Does nothing where the C library is another one.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(ctypes.c_size_t(0))
