"""Copying to the clipboard: with the platform's tool, or by asking the terminal (OSC 52)."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from typing import TextIO

from localspec.errors import UsageError

SECONDS = 5.0
"""What a tool may take; one that waits for a display that is gone would wait for ever."""

MAX_OSC_52 = 74_994
"""Bytes of text that a terminal takes for certain: xterm's own limit, 100,000 bytes of a sequence in base64."""


def copy(text: str, terminal: TextIO | None) -> str:
    """Put a text on the clipboard.

    Args:
        text: what to copy.
        terminal: where sequences reach the person's terminal; None if nowhere.

    Returns:
        How it was done, in words; a terminal does not say whether it did.

    Raises:
        UsageError: it cannot be done here.
    """
    tool = _tool()
    if tool is not None:
        encoding = "utf-16-le" if tool[0].startswith("clip") else "utf-8"
        try:
            # Not captured: some tools stay, to hand the text out, and would keep a pipe open.
            subprocess.run(
                tool, input=text.encode(encoding, "replace"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                timeout=SECONDS, check=True,
            )  # fmt: skip
            return f"with {tool[0]}"
        except (OSError, subprocess.SubprocessError):
            pass  # the terminal may do it
    data = text.encode("utf-8", "replace")
    failed = f"{tool[0]} failed" if tool else "no tool for it was found (wl-copy, xclip, xsel, pbcopy, clip, tmux)"
    if terminal is None:
        raise UsageError(f"cannot copy: {failed}, and no terminal is available")
    if len(data) > MAX_OSC_52:
        raise UsageError(f"cannot copy {len(data):,} bytes: {failed}, and terminals take {MAX_OSC_52:,} at most")
    terminal.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")
    terminal.flush()
    return f"by asking the terminal (OSC 52), which does not say whether it took it; {failed}"


def _tool() -> list[str] | None:
    """The command that takes a text for the clipboard on the person's own desk."""
    desk = not os.environ.get("SSH_CONNECTION")  # else the tools are another computer's
    candidates = [
        (desk and sys.platform == "darwin", ["pbcopy"]),
        (desk and bool(os.environ.get("WAYLAND_DISPLAY")), ["wl-copy"]),
        (desk and bool(os.environ.get("DISPLAY")), ["xclip", "-selection", "clipboard"]),
        (desk and bool(os.environ.get("DISPLAY")), ["xsel", "--clipboard", "--input"]),
        (desk, ["clip.exe"]),  # Windows, and Linux inside it
        (bool(os.environ.get("TMUX")), ["tmux", "load-buffer", "-w", "-"]),  # which asks the terminal around it
    ]
    return next((command for fits, command in candidates if fits and shutil.which(command[0])), None)
