"""Plots as SVG: shapes and words in a coordinate system, axes with round numbers, charts with a legend.

Colours are variables of the style, which a file of its own includes. Plots read in light and dark, and no meaning hangs
on colour alone.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from localspec.system.terminal import on_one_line

# Escaped markup from templates, and the policy of pages.


def render(template: str, values: Mapping[str, Any], package: str = __package__) -> str:
    """A template in a package's folder ``templates``, with escaped values."""
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
    """A style or script from a package's folder ``templates``, with line feeds."""
    text = files(package).joinpath("templates", name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


def policy(styles: Iterable[str], scripts: Iterable[str] = ()) -> str:
    """A content security policy: no requests, no other styles and scripts, and no string becomes markup."""
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


N_COLOURS = 6  # classes ``c0``… (strokes) and ``f0``… (fills) of the style

_OUTLINES: tuple[list[tuple[float, float]], ...] = (
    [],
    [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    [(0, -1.2), (1.2, 1), (-1.2, 1)],
)
"""Circle, square, diamond and triangle tell series apart without colour."""


@dataclass(frozen=True, slots=True)
class _Element:
    """A path, or words at a place."""

    css: str
    d: str = ""
    tip: str = ""
    text: str = ""
    x: str = ""
    y: str = ""


class Drawing:
    """Elements in a coordinate system of ``width`` by ``height`` units; a unit is a pixel where there is room."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._elements: list[_Element] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self.path([(x1, y1), (x2, y2)], css)

    def path(self, points: Sequence[tuple[float, float]], css: str) -> None:
        if points:
            self._elements.append(_Element(css, f"M{_joined(points)}"))

    def boxes(self, boxes: Iterable[tuple[float, float, float, float]], css: str) -> None:
        """Rectangles (x, y, width, height) as one element: a run has thousands of rounds."""
        drawn = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in boxes if w > 0 and h > 0)
        if drawn:
            self._elements.append(_Element(css, drawn))

    def mark(self, kind: int, x: float, y: float, css: str, tip: str = "", size: float = 4.5) -> None:
        """A marker whose shape differs by kind."""
        if outline := _OUTLINES[kind % len(_OUTLINES)]:
            d = f"M{_joined([(x + dx * size * 0.9, y + dy * size * 0.9) for dx, dy in outline])}z"
        else:
            r, across = _n(size), _n(2 * size)
            d = f"M{_n(x - size)} {_n(y)}a{r} {r} 0 1 0 {across} 0a{r} {r} 0 1 0 -{across} 0z"
        self._elements.append(_Element(css, d, tip))

    def text(self, x: float, y: float, text: str, css: str = "") -> None:
        self._elements.append(_Element(css, text=text, x=_n(x), y=_n(y)))

    def legend(self, names: Iterable[tuple[str, str]], x: float, y: float) -> float:
        """Series by name and style, in as many rows as that takes; returns where the last row stands."""
        begin = x
        for i, (name, css) in enumerate(names):
            wide = 30 + 6.6 * len(name)
            if x + wide > self.width and x > begin:
                x, y = begin, y + 14
            if css == "even":
                self.line(x - 4, y - 4, x + 12, y - 4, css)
            else:
                self.mark(i, x + 5, y - 4, css, size=4)
            self.text(x + 16, y, name)
            x += wide
        return y

    def svg(self, *, alone: bool = False) -> str:
        """The element; with its style if it stands alone."""
        style = asset("palette.css") + asset("plot.css") if alone else ""
        size = {"width": _n(self.width), "height": _n(self.height)}
        return render("plot.svg", size | {"title": self.title, "style": style, "elements": self._elements})


class Scale:
    """Linear map of values to coordinates; what lies outside is drawn at the end."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high if high > low else low + 1.0, start, end

    def __call__(self, value: float) -> float:
        share = (min(self.high, max(self.low, value)) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers within a range."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    rough = span / most
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    return f"{value:.10g}"


@dataclass(frozen=True, slots=True)
class Axis:
    """A range and what it measures; ``percent`` for shares. Without ``ticks`` (value -> text), round numbers."""

    name: str
    low: float
    high: float
    ticks: Mapping[float, str] = field(default_factory=dict)
    percent: bool = False

    @property
    def texts(self) -> Mapping[float, str]:
        found = ticks(self.low, self.high, most=6)
        return self.ticks or {value: f"{value:.0%}" if self.percent else label(value) for value in found}


@dataclass(frozen=True, slots=True)
class Point:
    """A measured value and its interval."""

    x: float
    y: float
    tip: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Values that belong together; ``hollow`` marks are for what is known less well."""

    name: str
    points: Sequence[Point]
    line: bool = True
    hollow: bool = False


_LEFT, _RIGHT, _DEEP = 48.0, 500.0, 206.0


def chart(
    title: str,
    x_axis: Axis,
    y_axis: Axis,
    series: Sequence[Series],
    *,
    reference: tuple[str, Sequence[tuple[float, float]]] | None = None,
    bars: Sequence[tuple[float, float, float]] = (),
) -> Drawing:
    """Series over two axes, with a dashed ``reference`` line. ``bars`` (from, to, share of the highest) stand at its
    foot."""
    drawing = Drawing(520, 0, title)
    styles = [f"c{i % N_COLOURS} hollow" if each.hollow else f"f{i % N_COLOURS}" for i, each in enumerate(series)]
    names = [(each.name, style) for each, style in zip(series, styles, strict=True)]
    names += [(reference[0], "even")] if reference else []
    top = drawing.legend(names, 30.0 + 6.2 * len(y_axis.name), 12.0) + 18
    bottom = top + _DEEP
    drawing.height = bottom + 40
    to_x, to_y = Scale(x_axis.low, x_axis.high, _LEFT, _RIGHT), Scale(y_axis.low, y_axis.high, bottom, top)
    for value, text in y_axis.texts.items():
        drawing.line(_LEFT, to_y(value), _RIGHT, to_y(value), "grid")
        drawing.text(_LEFT - 6, to_y(value) + 4, text, "end muted")
    drawing.line(_LEFT, bottom, _RIGHT, bottom, "axis")
    for value, text in x_axis.texts.items():
        drawing.text(to_x(value), bottom + 16, text, "mid muted")
    drawing.text((_LEFT + _RIGHT) / 2, bottom + 34, x_axis.name, "mid muted")
    drawing.text(0, 12, y_axis.name, "muted")
    drawing.boxes(
        ((to_x(a) + 1, bottom - 50 * share, to_x(b) - to_x(a) - 2, 50 * share) for a, b, share in bars), "count"
    )
    if reference:
        drawing.path([(to_x(a), to_y(b)) for a, b in reference[1]], "even")
    for i, each in enumerate(series):
        colour = i % N_COLOURS
        if each.line:
            drawing.path([(to_x(point.x), to_y(point.y)) for point in each.points], f"c{colour} line")
        for point in each.points:
            if point.low is not None and point.high is not None:
                drawing.line(to_x(point.x), to_y(point.low), to_x(point.x), to_y(point.high), f"c{colour} thin")
            drawing.mark(i, to_x(point.x), to_y(point.y), styles[i], point.tip, size=4)
    return drawing


def _joined(points: Iterable[tuple[float, float]]) -> str:
    return "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else str(int(value))
