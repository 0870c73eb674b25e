"""The program: runs a command and turns whatever goes wrong into one line and an exit status.

0 done, 1 the work failed, 2 bad usage, 130 interrupted, 141 the reader of a pipe went away.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

BAD_USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit; never returns."""
    status = BROKEN_PIPE
    try:
        status = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except OSError as error:
        if not (isinstance(error, BrokenPipeError) or is_windows_broken_pipe(error)):
            raise
        # Python would complain while flushing at exit; there is nobody left to read it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if status == INTERRUPTED:
        # The engine may be deep in native code on its own thread; unwinding it at interpreter exit can abort.
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def run(argv: Sequence[str]) -> int:
    """Run the command line.

    Returns:
        The exit status. Errors have been reported in one line on standard error.

    Raises:
        BrokenPipeError: whoever read our output has stopped.
    """
    try:
        prepare_streams()
        from localspec.commands.cli import parse

        command = parse(argv)
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else BAD_USAGE
    if isinstance(command, str):
        return _fail(command, BAD_USAGE)
    try:
        return command()
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        raise
    except Exception as error:
        if is_windows_broken_pipe(error):
            raise BrokenPipeError from None
        if os.environ.get("LOCALSPEC_DEBUG"):
            raise
        from localspec.errors import line_of, status_of

        return _fail(line_of(error), status_of(error))


def prepare_streams() -> None:
    """Have output be what it should be in files and pipes, and as near to it as it can on a terminal.

    Windows would write files and pipes in an encoding of its own (cp1252, say), which has no place for most of what a
    model says; input is read as UTF-8 as well. ``PYTHONIOENCODING`` and ``PYTHONUTF8`` stand.
    """
    theirs = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            ours = sys.platform == "win32" and not theirs and not stream.isatty()
            # A terminal that lacks a character shows '?'.
            stream.reconfigure(encoding="utf-8" if ours else None, errors="replace")


def is_windows_broken_pipe(error: Exception) -> bool:
    """Whether a write failed as it does on Windows where the reader of a pipe went away: EINVAL, of no file."""
    return (
        sys.platform == "win32"
        and isinstance(error, OSError)
        and error.errno == errno.EINVAL
        and error.filename is None
    )


def _fail(message: str, status: int) -> int:
    from localspec.system.terminal import terminal_size, visible, wrapped

    line = "localspec: " + " ".join(visible(message).split())
    rows = wrapped(line, terminal_size()[0]) if sys.stderr.isatty() else [line]  # for scripts it is one line
    print(*rows, sep="\n", file=sys.stderr)
    return status


def _interrupted() -> int:
    start = "\n" if sys.stderr.isatty() else ""  # the terminal has just printed ^C
    print(f"{start}localspec: interrupted", file=sys.stderr)
    return INTERRUPTED


if __name__ == "__main__":
    main()
