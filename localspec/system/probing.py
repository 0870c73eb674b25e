"""What the system says of itself, in small files and by its programs; empty where it says nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path


def read_text(path: Path) -> str:
    """A small file, as those of ``/proc`` and ``/sys``, without white space around it."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def output(*command: str) -> str:
    """What a program prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
