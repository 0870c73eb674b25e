"""The page of ``localspec bench`` in a real Chromium: it shows everything, reaches for nothing, and fits any window.

That names are shown and not obeyed is tested with every part that a report may have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.commands.bench.record import Engine, ModelFile, Record
from localspec.commands.bench.report import bench_report
from localspec.commands.bench.results import analyse
from localspec.report.renderers import html
from tests.commands.bench.test_bench import SETTINGS, answer, run_of, sitting
from tests.commands.replay.test_replay_page import Tab
from tests.support.browsing import PATIENCE

ARMS = ["plain", "auto", "model:4"]


def record() -> Record:
    """A run of two categories and three arms, with everything that a page can show."""
    samples = []
    for i in range(14):
        for arm, gain in zip(ARMS, (1.0, 1.4 + 0.02 * i, 0.8), strict=True):
            drafted = {} if arm == "plain" else {
                "num_rounds": 5, "num_draft_tokens": 8, "num_accepted_tokens": 5, "drafted_per_position": [5, 3],
                "accepted_per_position": [3, 2],
                "by_source": {"model": {"num_draft_tokens": 8, "num_accepted_tokens": 5}},
                "judged": [["model", 0, 0.1 * (k + 0.5), k % 2] for k in range(10)],
                "rounds": [[5.0, 60.0 / gain, 0.3, 2, 1, 2]] * 5,
            }  # fmt: skip
            samples.append(answer(f"q{i}", arm, 10 * gain, category=("code", "chat")[i % 2], **drafted))
    models = [ModelFile("target", "target", "t.gguf", 1000, "0" * 64, 10),
              ModelFile("model", "draft", "d.gguf", 100, "1" * 64, 10)]  # fmt: skip
    times = {width: 40.0 + 8.0 * width for width in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)}
    engine = Engine("reference", "v", "cpu", 2, 64, models, ["model"], times, {"model": 10.0}, "now")
    settings = replace(SETTINGS, arms=ARMS)
    return run_of(samples, engines=[engine], settings=settings, sessions=[sitting(throttled=True)])


@contextmanager
def opened(browser: Any, path: Path, width: int = 1180, scheme: str = "light") -> Iterator[Any]:
    """A page that asks for nothing and complains about nothing."""
    tab = Tab(browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)).open(path)
    tab.page.set_default_timeout(PATIENCE)
    yield tab.page
    tab.page.close()
    assert (tab.addresses, tab.complaints) == ([], [])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, found = tmp_path_factory.mktemp("page") / "run.html", record()
    path.write_text(html(bench_report(found, analyse(found))), encoding="utf-8")
    return path


def test_every_plot_is_drawn_and_keeps_its_text_within(made: Path, browser: Any) -> None:
    with opened(browser, made) as page:
        titles = page.eval_on_selector_all("svg", "all => all.map(each => each.getAttribute('aria-label'))")
        for part in ("Speed over plain", "Time of a pass", "Break-even", "by position", "Reliability", "Rounds of"):
            assert any(part in title for title in titles), part
        heights = "all => all.map(each => each.getBoundingClientRect().height)"
        assert min(page.eval_on_selector_all("figure svg", heights)) > 100
        # Interval and mark of every arm in every category, and the line of plain decoding through all of them.
        plot = page.locator("svg").first
        assert plot.locator("title").count() == 3 * 2
        assert plot.locator(".even").count() >= 1
        assert "×1." in page.locator(".figures .ok b").inner_text()
        assert page.locator(".figures .fail b").inner_text() == "×0.80"
        assert "slowed by heat" in page.locator("p.note").inner_text()
        outside = page.eval_on_selector_all(
            "svg",
            """all => all.filter(svg => svg.getClientRects().length).flatMap(svg => {
                const frame = svg.getBoundingClientRect();
                return [...svg.querySelectorAll('text')].filter(text => {
                    const box = text.getBoundingClientRect();
                    return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
                }).map(text => text.textContent);
            })""",
        )
        assert outside == []


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1180, "dark"), (1600, "light")])
def test_it_fits_the_window_in_both_schemes_and_opens_by_keyboard(
    width: int, scheme: str, made: Path, browser: Any
) -> None:
    with opened(browser, made, width, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 150) == (scheme == "dark")
        page.locator("details summary", has_text="chat: q1").focus()
        page.keyboard.press("Enter")
        assert page.locator("details[open]", has_text="chat: q1").locator("svg").is_visible()
