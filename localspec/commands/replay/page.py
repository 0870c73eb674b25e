"""The page: a recording and all that shows it in one HTML file that needs, and reaches, nothing else.

The recording's text is not trusted. It is in the page as JSON only, with every ``<`` escaped, and the scripts put it on
the screen as text nodes. The page's policy then holds even if they did not: no script or style runs but those below,
by digest; nothing can be turned from a string into markup (trusted types); nothing is fetched or sent.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib.resources import files
from string import Template

from localspec.commands.replay.recording import Recording

SCRIPTS = ("timeline", "words", "answer", "round", "strip", "summary", "tip", "player", "main")
"""In the order in which they build on each other; they share one scope."""


def render(recording: Recording, name: str) -> str:
    """The recording as a page.

    Args:
        recording: what to show.
        name: what the file is called.
    """
    folder = files("localspec.commands.replay") / "page"

    def part(file: str) -> str:
        # CSP digests are over what the browser sees, and it sees line feeds.
        return "\n" + (folder / file).read_text(encoding="utf-8").replace("\r\n", "\n")

    style = part("style.css")
    scripts = [part(f"{script}.js") for script in SCRIPTS]
    return Template(part("page.html").lstrip()).substitute(
        policy=_policy(style, scripts),
        style=style,
        recording=_embedded({"name": name, **asdict(recording)}),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _policy(style: str, scripts: Iterable[str]) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(map(_digest, scripts)),
            "style-src " + _digest(style),
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(value: object) -> str:
    """JSON that cannot end the element it stands in, in ASCII: no byte depends on the file's encoding."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
