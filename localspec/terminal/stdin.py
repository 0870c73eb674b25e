"""Text from standard input."""

from __future__ import annotations

import sys

from localspec.errors import UsageError


def decode(data: bytes, where: str) -> str:
    """Bytes as text; a byte order mark is dropped.

    Raises:
        UsageError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise UsageError(
            f"{where} is not valid UTF-8: byte 0x{byte:02x} at offset {error.start}; convert it first (iconv)"
        ) from None


def read_all() -> str:
    """All of standard input, without the newline that ends it.

    Raises:
        UsageError: it is not UTF-8.
    """
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        key = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"
        print(f"type the prompt, end it with {key} on a line of its own", file=sys.stderr, flush=True)
    text = decode(sys.stdin.buffer.read(), "standard input")
    return text.removesuffix("\n").removesuffix("\r")
