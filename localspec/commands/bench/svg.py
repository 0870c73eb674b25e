"""Drawing: a few SVG elements, axes with round numbers, and the one style that all plots share.

Plots have no size of their own but a coordinate system, and no colours but the style's variables: on the page these
are the page's, in a file of its own the style comes with it. Everything reads in light and dark, and no meaning hangs
on a colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

PALETTE = """
:root {
  color-scheme: light dark;
  --ground: #fff; --panel: #f6f7f9; --line: #d5dae1; --grid: #e6e9ee; --text: #1b1f24; --muted: #57606a;
  --s0: #1f7a3f; --s1: #0e6f88; --s2: #6a3fc8; --s3: #b02a70; --s4: #8a5a00; --s5: #2f5fd0;
  --draft: #8a5cd6; --verify: #5b6b80; --other: #c48a1b; --good: #0b5328; --bad: #a11d16; --note: #fff4d6;
  --note-text: #5c4200;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0e1217; --panel: #161b22; --line: #303843; --grid: #232a34; --text: #e6e9ee; --muted: #9ba6b4;
    --s0: #4fc878; --s1: #43bcd6; --s2: #ad90f2; --s3: #ea79b3; --s4: #e0ac4a; --s5: #7ea6ff;
    --draft: #a684ec; --verify: #8797ad; --other: #d9a441; --good: #94e6ad; --bad: #ff9d94; --note: #3a2f10;
    --note-text: #f5d98f;
  }
}
"""

STYLE = """
svg.plot { font: 12px/1.2 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
.plot text { fill: var(--text); font-variant-numeric: tabular-nums; }
.plot .muted { fill: var(--muted); }
.plot .strong { font-weight: 650; }
.plot .end { text-anchor: end; }
.plot .mid { text-anchor: middle; }
.plot .grid { stroke: var(--grid); stroke-width: 1; fill: none; }
.plot .axis { stroke: var(--line); stroke-width: 1; fill: none; }
.plot .even { stroke: var(--text); stroke-width: 1.2; stroke-dasharray: 5 3; fill: none; }
.plot .band { fill: var(--panel); }
.plot .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.plot .bar { stroke-width: 2; }
.plot .thin { stroke-width: 1.5; stroke-dasharray: 3 2; }
.plot .dash { stroke-dasharray: 6 3; }
.plot .hollow { fill: var(--ground); stroke-width: 1.8; }
.plot .draft { fill: var(--draft); }
.plot .verify { fill: var(--verify); }
.plot .other { fill: var(--other); }
.plot .count { fill: var(--line); }
""" + "".join(
    f".plot .c{i} {{ stroke: var(--s{i}); }} .plot .f{i} {{ fill: var(--s{i}); stroke: var(--s{i}); }}\n"
    for i in range(6)
)

N_COLOURS = 6


class Drawing:
    """Collects elements in a coordinate system of so many units.

    Args:
        width, height: of the coordinate system; a unit is a pixel where there is room.
        title: what it shows, for those who cannot see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self._parts.append(f'<path class="{css}" d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}"/>')

    def path(self, points: Sequence[tuple[float, float]], css: str) -> None:
        """A line through points."""
        if points:
            steps = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
            self._parts.append(f'<path class="{css}" d="M{steps}"/>')

    def boxes(self, boxes: Iterable[tuple[float, float, float, float]], css: str) -> None:
        """Many rectangles (x, y, width, height) as one element: a run has thousands of rounds."""
        drawn = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in boxes if w > 0 and h > 0)
        if drawn:
            self._parts.append(f'<path class="{css}" d="{drawn}"/>')

    def mark(self, kind: int, x: float, y: float, css: str, tip: str = "", size: float = 4.5) -> None:
        """A marker: circle, square, diamond or triangle, so that arms differ without colour."""
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        x_, y_, s = _n(x), _n(y), size
        shape = kind % 4
        if shape == 0:
            self._parts.append(f'<circle class="{css}" cx="{x_}" cy="{y_}" r="{_n(s)}">{inside}</circle>')
            return
        outlines: dict[int, list[tuple[float, float]]] = {
            1: [(-1, -1), (1, -1), (1, 1), (-1, 1)],
            2: [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
            3: [(0, -1.2), (1.2, 1), (-1.2, 1)],
        }
        outline = outlines[shape]
        points = "L".join(f"{_n(x + dx * s * 0.9)} {_n(y + dy * s * 0.9)}" for dx, dy in outline)
        self._parts.append(f'<path class="{css}" d="M{points}z">{inside}</path>')

    def text(self, x: float, y: float, text: str, css: str = "") -> None:
        style = f' class="{css}"' if css else ""
        self._parts.append(f'<text{style} x="{_n(x)}" y="{_n(y)}">{escape(text)}</text>')

    def svg(self, style: str = "") -> str:
        """The element; with its own style where it stands alone."""
        own = f"<style>{style}</style>" if style else ""
        return (
            f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} {_n(self.height)}" '
            f'width="{_n(self.width)}" height="{_n(self.height)}" role="img" aria-label="{escape(self.title)}">'
            f"{own}{''.join(self._parts)}</svg>"
        )


class Scale:
    """Values -> coordinates, linearly.

    Args:
        low, high: the values at both ends.
        start, end: their coordinates.
    """

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
    """A number on an axis."""
    return f"{value:.10g}"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else str(int(value))
