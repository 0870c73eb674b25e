"""``localspec replay``: a recording as a web page."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from localspec.commands.replay.page import replay_page
from localspec.commands.replay.recording import RecordingError, read
from localspec.commands.report.output import STREAM, checked_output, write_output
from localspec.errors import UsageError
from localspec.system.files import is_same_file

MAX_BYTES = 1 << 28


def replay_command(file: str, html: str | None = None, *, force: bool = False) -> int:
    """Write the page; prints its path, or the page itself if ``html`` is ``-``.

    Args:
        file: the output of ``generate --format events`` or a saved chat; ``-`` reads standard input.
        html: where the page goes; None: next to the file, or where the file came from a pipe, into one.
        force: replace a file that is there.

    Returns:
        The exit status.

    Raises:
        UsageError: the page has no place to go.
        RecordingError: the file cannot be shown.
        OutputError: the page cannot be written.
    """
    try:
        recording = read(_bytes(file))
    except RecordingError as error:
        raise RecordingError(f"cannot replay {_called(file)}: {error}") from None
    out = _destination(file, html, force)
    if recording.damage:
        print(f"localspec: {_called(file)} is shown only in part: {recording.damage}", file=sys.stderr)
    page = replay_page(recording, Path(file).name if file != STREAM else "")
    if out is None:
        sys.stdout.buffer.write(page.encode())
        sys.stdout.buffer.flush()
    else:
        write_output(out, page)
        print(out)
    return 0


def _called(file: str) -> str:
    return "standard input" if file == STREAM else file


def _bytes(file: str) -> bytes:
    if file == STREAM:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if sys.stdin is not None else b""
    else:
        try:
            with open(file, "rb") as opened:
                data = opened.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a name with a null character
            raise RecordingError(str(getattr(error, "strerror", None) or error)) from None
    if len(data) > MAX_BYTES:
        raise RecordingError(f"it is larger than {MAX_BYTES >> 20} MB")
    return data


def _destination(file: str, html: str | None, force: bool) -> Path | None:
    """Where the page goes; None is standard output."""
    if html == STREAM or (html is None and file == STREAM):
        return None
    wanted = html or str(Path(file).with_suffix(".html"))
    if file != STREAM and is_same_file(wanted, file):
        raise UsageError(f"{wanted} is the recording itself: choose another name with --html")
    out = checked_output(wanted, force=force, otherwise=", --html OUT chooses another name")
    return Path(os.path.realpath(out))  # a link keeps pointing where it does
