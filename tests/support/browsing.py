"""A real Chromium for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 120_000  # Milliseconds until something that should have happened counts as missing. No speed is tested

WIDE = {"width": 1280, "height": 860}


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the extra 'dev')")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium here: none of {', '.join(NAMES)} is on the PATH (apt-get install chromium)")
    api.expect.set_options(timeout=PATIENCE)
    with api.sync_playwright() as playwright:
        # In a container we are root, and there Chromium's own sandbox cannot start.
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


CONTRAST = """() => {
    const parse = (colour) => { const [r, g, b, a = 1] = colour.match(/[0-9.]+/g).map(Number); return [r, g, b, a]; };
    const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const found = [];
    for (const element of document.querySelectorAll("body *")) {
        const text = [...element.childNodes].map((node) => (node.nodeType === 3 ? node.data : "")).join("").trim();
        const style = getComputedStyle(element);
        const seen = element.getClientRects().length && style.visibility === "visible" && !element.closest(".sr");
        if (!text || !seen) continue;
        let ground = null;
        for (let up = element; up && !ground; up = up.parentElement) {
            const colour = parse(getComputedStyle(up).backgroundColor);
            if (colour[3] > 0) ground = colour;
        }
        const [high, low] = [luminance(parse(style.color)), luminance(ground)].sort((a, b) => b - a);
        found.push([`${element.tagName}.${element.className}: ${text.slice(0, 20)}`, (high + 0.05) / (low + 0.05)]);
    }
    return found;
}"""
"""Each text that can be seen on the page, with its contrast against what is behind it."""
