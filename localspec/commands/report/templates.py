"""Markup by template, with everything escaped, and the policy of pages that need and reach nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from localspec.terminal.text import on_one_line


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
