"""The text of documents that people attach: PDF and Word. A process of its own reads them, since they may be damaged or
made to harm."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import PurePath

from localspec.errors import UsageError

MAX_BYTES = 32 << 20
"""Largest document."""

MAX_CHARACTERS = 1 << 20
"""Longest text, about 250,000 tokens."""

SECONDS = 30.0
"""Longest time that reading may take."""

_MEMORY_BYTES = 2 << 30
_UNPACKED_BYTES = 64 << 20
_LOCKED, _TOO_LONG = 3, 4  # Exit statuses
_CODE = "import sys; from localspec.prompts.documents import main; sys.exit(main(sys.argv[1]))"


def is_document(name: str) -> bool:
    return PurePath(name).suffix.lower() in READERS


def document_text(name: str, data: bytes) -> str:
    """The text of a document, pages and paragraphs apart by blank lines. The end of its name says of which kind it is.

    Raises:
        UsageError: it is too large, takes too long, is locked with a password, damaged, or has no text.
    """
    if len(data) > MAX_BYTES:
        raise UsageError(f"{name} has more than {MAX_BYTES >> 20} MiB")
    command = [sys.executable, "-c", _CODE, PurePath(name).suffix.lower()]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{name} takes longer than {SECONDS:.0f} s to read") from None
    text = done.stdout.decode("utf-8", "replace").replace("\0", "").strip()
    if done.returncode == _LOCKED:
        raise UsageError(f"{name} is locked with a password")
    if done.returncode == _TOO_LONG:
        raise UsageError(f"{name} has more than {MAX_CHARACTERS:,} characters of text, too many for any context")
    if done.returncode != 0:
        raise UsageError(f"{name} cannot be read: it is damaged, or no {PurePath(name).suffix[1:].upper()} file")
    if not text:
        raise UsageError(f"{name} has no text; its pages may be pictures")
    return text + "\n"


def main(suffix: str) -> int:
    """What the process does: a document on standard input, its text on standard output."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limits, and some systems none of memory
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    parts, length = [], 0
    try:
        for part in READERS[suffix](sys.stdin.buffer.read()):
            parts.append(part)
            length += len(part)
            if length > MAX_CHARACTERS:
                return _TOO_LONG
    except PermissionError:
        return _LOCKED
    sys.stdout.buffer.write("\n\n".join(parts).encode("utf-8", "replace"))
    return 0


def _pdf(data: bytes) -> Iterator[str]:
    import pypdf

    reader = pypdf.PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise PermissionError
    for page in reader.pages:
        yield page.extract_text().strip()


def _docx(data: bytes) -> Iterator[str]:
    import zipfile

    import docx
    from docx.table import Table

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(each.file_size for each in archive.infolist()) > _UNPACKED_BYTES:
            raise ValueError("too large when unpacked")
    for block in docx.Document(io.BytesIO(data)).iter_inner_content():
        if isinstance(block, Table):
            text = "\n".join(" | ".join(" ".join(cell.text.split()) for cell in row.cells) for row in block.rows)
        else:
            kind, _, level = (block.style.name or "" if block.style is not None else "").partition(" ")
            text = "#" * int(level) + " " if kind == "Heading" and level.isdecimal() else ""
            text += block.text
        if text.strip():
            yield text


READERS: dict[str, Callable[[bytes], Iterator[str]]] = {".pdf": _pdf, ".docx": _docx}
