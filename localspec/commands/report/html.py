"""Reports as one HTML page that needs, and reaches, nothing else: no script, no font, no picture but its own plots.

Everything is in the markup already, so the page also works where scripts are forbidden; hovering over a mark shows its
figures. All text is escaped, and the page's policy holds even if some were not.
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.commands.report.model import Figure, Part, Report
from localspec.commands.report.templates import asset, policy, render

STYLES = ("palette.css", "plot.css", "page.css")


def html(report: Report) -> str:
    """The report as a page."""
    style = "".join(asset(name) for name in STYLES)
    shown = {"report": report, "groups": _groups(report.parts), "style": style, "policy": policy([style])}
    return render("page.html", shown)


def _groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Each part, and with a figure those that stand beside it."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and _is_small(groups[-1][0]) and _is_small(part) and not part.title:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _is_small(part: Part) -> bool:
    return isinstance(part, Figure) and not part.wide and not part.summary
