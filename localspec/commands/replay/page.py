"""The page: a recording and all that shows it in one HTML file that needs, and reaches, nothing else.

The recording's text is not trusted. It is in the page as JSON only, with every ``<`` escaped, and the scripts put it on
the screen as text nodes. The page's policy then holds even if they did not.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from localspec.commands.replay.recording import Recording
from localspec.commands.report.templates import asset, policy, render

SCRIPTS = ("timeline", "words", "answer", "round", "strip", "summary", "tip", "player", "main")
"""In the order in which they build on each other; they share one scope."""


def replay_page(recording: Recording, name: str) -> str:
    """The recording as a page.

    Args:
        recording: what to show.
        name: what the file is called.
    """
    style, scripts = asset("style.css", __package__), [asset(f"{script}.js", __package__) for script in SCRIPTS]
    values = {
        "policy": policy([style], scripts),
        "style": style,
        "recording": _embedded({"name": name, **asdict(recording)}),
        "scripts": scripts,
    }
    return render("page.html", values, __package__)


def _embedded(value: object) -> str:
    """JSON that cannot end the element it stands in, in ASCII: no byte depends on the file's encoding."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
