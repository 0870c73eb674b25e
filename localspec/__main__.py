"""The program: runs a command and turns whatever goes wrong into one line and an exit status.

0 done, 1 the work failed, 2 bad usage, 130 interrupted, 141 the reader of a pipe went away.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

BAD_USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit; never returns."""
    open_closed_streams()
    status = run(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if status == 0:
                status = _report(error)
            # Python would fail again while flushing at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if status == INTERRUPTED:
        # The engine may be deep in native code on its own thread; unwinding it at interpreter exit can abort.
        os._exit(status)
    sys.exit(status)


def run(argv: Sequence[str]) -> int:
    """Run the command line; its exit status. Errors have been reported in one line on standard error."""
    try:
        prepare_streams()
        from localspec.commands.cli import parse

        command = parse(argv)
        return _fail(command, BAD_USAGE) if isinstance(command, str) else command()
    except KeyboardInterrupt:
        start = "\n" if sys.stderr.isatty() else ""  # the terminal has just printed ^C
        with suppress(OSError):
            print(f"{start}localspec: interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else BAD_USAGE
    except Exception as error:
        return _report(error)


def open_closed_streams() -> None:
    """Open the null device in place of closed standard streams.

    A file opened later would get a closed stream's number, and with it what native code prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


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


def _report(error: Exception) -> int:
    if isinstance(error, BrokenPipeError) or is_windows_broken_pipe(error):
        return BROKEN_PIPE
    if os.environ.get("LOCALSPEC_DEBUG"):
        raise error
    from localspec.errors import line_of, status_of

    return _fail(line_of(error), status_of(error))


def _fail(message: str, status: int) -> int:
    from localspec.system.terminal import terminal_size, visible, wrapped

    line = "localspec: " + " ".join(visible(message).split())
    rows = wrapped(line, terminal_size()[0]) if sys.stderr.isatty() else [line]  # for scripts it is one line
    with suppress(OSError):  # the exit status says it
        print(*rows, sep="\n", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
