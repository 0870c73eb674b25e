"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.browsing import PATIENCE, WIDE
from tests.support.tabs import Tab


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Opens tabs; at the end, none of them has reached for another server or complained."""
    with ExitStack() as stack:
        tabs: list[tuple[Tab, str]] = []

        def new(url: str, **options: Any) -> Tab:
            context = browser.new_context(**({"viewport": WIDE} | options))
            stack.callback(context.close)
            context.set_default_timeout(PATIENCE)
            made = Tab(context.new_page())
            tabs.append((made, url.partition("#")[0]))
            made.page.goto(url)
            made.until(
                "() => document.getElementById('engine').textContent || !document.getElementById('key-form').hidden"
                " || !document.getElementById('chat-alert').hidden"
            )
            return made

        yield new
        for each, url in tabs:
            assert [address for address in each.addresses if not address.startswith((url, "data:"))] == []
            assert each.complaints == []
            assert each.run("() => window.hacked") is None
