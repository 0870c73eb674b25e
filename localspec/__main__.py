"""The program: runs a command and turns whatever goes wrong into one line and an exit status.

0 done, 1 the work failed, 2 bad usage, 130 interrupted, 141 the reader of a pipe went away.
"""

from __future__ import annotations

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
    except BrokenPipeError:
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
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal that lacks a character shows '?'
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
        if os.environ.get("LOCALSPEC_DEBUG"):
            raise
        from localspec.errors import line_of, status_of

        return _fail(line_of(error), status_of(error))


def _fail(message: str, status: int) -> int:
    from localspec.terminal.text import visible

    line = " ".join(visible(message).split())
    print(f"localspec: {line}", file=sys.stderr)
    return status


def _interrupted() -> int:
    start = "\n" if sys.stderr.isatty() else ""  # the terminal has just printed ^C
    print(f"{start}localspec: interrupted", file=sys.stderr)
    return INTERRUPTED


if __name__ == "__main__":
    main()
