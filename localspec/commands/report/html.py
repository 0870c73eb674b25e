"""Reports as one HTML page that needs, and reaches, nothing else: no script, no font, no picture but its own plots.

Everything is in the markup already, so the page also works where scripts are forbidden; hovering over a mark tells its
figures. All text is escaped, and the page's policy holds even if some were not.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from localspec.commands.report.model import Figure, Part, Report
from localspec.terminal.text import on_one_line

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


# -- templates ---------------------------------------------------------------------------------------------------------


def render(template: str, values: Mapping[str, Any], package: str = __package__) -> str:
    """A template in a package's folder ``templates``; what it is given is escaped."""
    return _environment(package).get_template(template).render(values)


@cache
def _environment(package: str) -> Environment:
    environment = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Names come from files and the command line: none may reorder or hide what stands around it.
        finalize=lambda value: value if hasattr(value, "__html__") else on_one_line(str(value)),
    )
    environment.filters["kind"] = lambda part: type(part).__name__
    return environment


def asset(name: str, package: str = __package__) -> str:
    """A style or script from a package's folder ``templates``, as the browser sees it: with line feeds alone."""
    text = files(package).joinpath("templates", name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


def policy(styles: Iterable[str], scripts: Iterable[str] = ()) -> str:
    """A content security policy: nothing is fetched or sent, no style or script counts but these, and nothing can be
    turned from a string into markup."""
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {_digests(styles)}",
            *((f"script-src {_digests(scripts)}",) if scripts else ()),
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _digests(texts: Iterable[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
