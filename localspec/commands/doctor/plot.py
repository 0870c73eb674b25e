"""Bars of characters."""

from __future__ import annotations

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def bars(values: Sequence[float], *, height: int = 4, width: int = 3, gap: int = 2, unicode: bool = True) -> list[str]:
    """Vertical bars from zero up.

    Args:
        values: none negative.
        height: lines.
        width: columns of a bar.
        gap: columns between bars.
        unicode: eighths of a line with block characters; else ``_`` and ``#``.

    Returns:
        The lines, the top one first, each ``len(values) * (width + gap) - gap`` columns wide.
    """
    most = max(values, default=0.0) or 1.0
    lines = []
    for line in range(height - 1, -1, -1):
        cells = []
        for value in values:
            filled = value / most * height - line  # of this line, in lines
            eighths = min(8, max(0, round(filled * 8)))
            if line == 0 and value > 0:
                eighths = max(1, eighths)  # little is not nothing
            mark = _EIGHTHS[eighths] if unicode else " _##"[-(-eighths // 3)]
            cells.append(mark * width)
        lines.append((" " * gap).join(cells))
    return lines
