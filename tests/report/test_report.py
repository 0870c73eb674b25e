"""One report in its three renderings: everything is in each, nothing in it acts on what shows it."""

from __future__ import annotations

import io
import re
from html import unescape
from xml.etree import ElementTree

from localspec.report.model import Facts, Figure, Finding, Findings, KeyFigure, KeyFigures, Report, Table, Text
from localspec.report.renderers import Screen, html, markdown
from localspec.report.svg import Axis, Drawing, Point, Scale, Series, asset, chart, ticks
from localspec.system.terminal import width

HOSTILE = "<b onclick=x>&\x1b[2J\u202egnp | `x`"


def plot(name: str = "model") -> Drawing:
    points = [Point(i, i / 4, f"tip {i} of {name}", low=0.1, high=0.9) for i in range(1, 4)]
    axes = Axis("length", 1, 3), Axis("share", 0, 1, percent=True)
    return chart(f"Shares of {name}", *axes, [Series(name, points)], reference=("even", [(1, 0), (3, 1)]))


def everything(name: str = "a model") -> Report:
    parts = [
        Facts({"machine": f"cpu of {name}"}),
        KeyFigures([KeyFigure("auto", "×1.20", f"auto is faster on {name}", "ok")]),
        Text(f"careful with {name}", "note"),
        Table(f"Speed of {name}", ["what", "tok/s"], [[name, "×1.20"]], f"a note on {name}", styles={0: "bad"}),
        Figure(f"A plot of {name}", lambda: plot(name), f"what {name} shows"),
        Figure("", plot, "its neighbour"),
        Figure("", plot, summary=f"more of {name}"),
        Findings("Checks", [Finding("fail", name, "does not fit", "take a smaller one"), Finding("ok", "cpu", "fine")]),
        Text("how it was measured", "small"),
    ]
    return Report("bench", name, parts)


def on_screen(report: Report, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Screen(file).report(report)
    file.flush()
    return raw.getvalue().decode(encoding)


SAID = ("a model", "auto is faster", "careful with", "×1.20", "a note", "Checks", "smaller one", "cpu of")


def test_all_is_in_every_rendering() -> None:
    shown, text, page = on_screen(everything()), markdown(everything()), html(everything())
    for part in SAID:
        assert all(part in each for each in (shown, text, page)), part
    assert ["how it was measured" in each for each in (shown, text, page)] == [False, True, True]
    ascii_only = on_screen(everything(), "ascii")
    assert {"x1.20", "XX"} <= set(ascii_only.split())
    assert "-> take a smaller one" in ascii_only
    assert page.count("<svg") == 3
    assert page.count('<div class="pair">') == 1, "figures without a title of their own stand side by side"
    assert "<details><summary>more of a model</summary>" in page


def test_names_are_shown_and_not_obeyed() -> None:
    report = everything(HOSTILE)
    shown, text, page = on_screen(report), markdown(report), html(report)
    assert not {"\x1b", "\u202e"} & set(shown + text + page)
    assert "&lt;b onclick=x&gt;&amp;␛[2J" in page
    assert ["<b onclick" in each for each in (shown, page)] == [True, False]


def test_the_page_lets_the_browser_load_nothing_and_markdown_tables_have_one_width() -> None:
    tables = re.findall(r"(?:^\|.*\|\n?)+", markdown(everything("a | b")), re.MULTILINE)
    assert len(tables) == 1
    assert len({width(line) for line in tables[0].splitlines()}) == 1
    assert tables[0].splitlines()[1].startswith("| ---")
    page = html(everything())
    assert "default-src 'none'; style-src 'sha256-" in unescape(page)
    assert not re.search(r"<(script|link|img|iframe)|(src|href|style)=", page)


def test_a_narrow_screen_leaves_out_the_last_columns() -> None:
    wide = Table("Positions", ["arm", *map(str, range(30))], [["model:4", *["100%"] * 30]])
    *_, head, row, left_out = lines = on_screen(Report("bench", "x", [wide])).splitlines()
    assert max(map(width, lines)) <= 80
    assert 8 <= (shown := len(row.split()) - 1) < 30
    assert head.split() == ["arm", *map(str, range(shown))]
    assert left_out.startswith(f"  no room for: {shown}, {shown + 1}")
    long = on_screen(Report("bench", "x", [Table("", ["name", "n"], [["n" * 100, "1234"]])]))
    assert max(map(width, long.splitlines())) <= 80
    assert "1234" in long


def test_charts_are_well_formed_and_keep_their_legend_inside() -> None:
    series = [Series(f"series number {i}", [Point(1, 0.5)]) for i in range(9)]
    drawing = chart("Many", Axis("x", 0, 2), Axis("y", 0, 1), series)
    root = ElementTree.fromstring(drawing.svg(alone=True))
    legend = [each for each in root.iter() if each.tag.endswith("text") and (each.text or "").startswith("series")]
    assert len(legend) == 9
    assert all(float(each.attrib["x"]) + 6.6 * len(each.text or "") < drawing.width for each in legend)
    assert "--s0" in next(each.text for each in root.iter() if each.tag.endswith("style"))


def test_axes_have_round_numbers_within_their_range() -> None:
    assert ticks(0, 1, most=5) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(0.83, 2.21) == [1, 1.2, 1.4, 1.6, 1.8, 2, 2.2]
    for low, high in ((0, 3e-4), (0, 2.7e5), (0.97, 1.01), (5, 5)):
        found = ticks(low, high)
        assert 1 <= len(found) <= 9
        assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    scale = Scale(0, 10, 100, 200)
    assert (scale(0), scale(5), scale(10), scale(99), scale(-1)) == (100, 150, 200, 200, 100)


def contrast(a: str, b: str) -> float:
    def light(colour: str) -> float:
        digits = colour.lstrip("#")
        digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
        shares = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((light(a), light(b)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_text_and_marks_stand_out_in_both_schemes() -> None:
    """WCAG: 4.5 for text, 3 for graphics."""
    schemes = asset("palette.css").split("@media")
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w+)", scheme))
        for text in ("text", "muted", "good", "bad", "s0", "s1", "s2", "s3", "s4", "s5"):
            for ground in ("ground", "panel"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for mark in ("draft", "verify", "other"):
            assert contrast(colours[mark], colours["ground"]) >= 2.9, mark
        assert contrast(colours["note-text"], colours["note"]) >= 4.5
