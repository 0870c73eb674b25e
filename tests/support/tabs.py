"""The server's page in a browser's tab, with what tests do there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def expect(found: Any) -> Any:
    """Playwright's assertions about what is found on a page; they wait until they hold."""
    import playwright.sync_api

    return playwright.sync_api.expect(found)


def said(words: str, finish: str | None = None) -> dict[str, Any]:
    """An event of a chat's answer."""
    return {"choices": [{"index": 0, "delta": {"content": words}, "finish_reason": finish}]}


def streamed(*events: dict[str, Any]) -> Callable[[Any], None]:
    """Answers with these events; whole if the last one has a finish reason, else the connection breaks off."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    if events and "choices" in events[-1] and events[-1]["choices"][0]["finish_reason"]:
        body += "data: [DONE]\n\n"
    return lambda route: route.fulfill(content_type="text/event-stream", body=body)


class Tab:
    """A page in the browser.

    Attributes:
        page: Playwright's page.
        asked: the bodies of requests for answers, in order.
        addresses: what was asked for.
        complaints: what it wrote to the console or raised; answers with an error status apart, which Chromium notes.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.asked: list[dict[str, Any]] = []
        self.addresses: list[str] = []
        self.complaints: list[str] = []
        page.on("request", self._note)
        page.on("console", self._complain)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append("dialog"), dialog.dismiss()))

    def _note(self, request: Any) -> None:
        self.addresses.append(request.url)
        if request.url.endswith("/completions"):
            self.asked.append(json.loads(request.post_data))

    def _complain(self, message: Any) -> None:
        if not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    def run(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def until(self, script: str, argument: Any = None) -> None:
        """Wait until a script's result is true."""
        self.page.wait_for_function(script, arg=argument)

    def click(self, name: str) -> None:
        """Click the button of this name."""
        self.page.get_by_role("button", name=name).click()

    def turns(self, n: int) -> None:
        """Wait until there are so many."""
        self.until("(n) => document.querySelectorAll('.turn').length === n", n)

    def saved(self, *titles: str) -> None:
        """Wait until the list of conversations shows these, and the server has all of them."""
        listed = "[...document.querySelectorAll('#list button')].map((it) => it.textContent).join()"
        held = "Object.keys(localStorage).some((name) => name.startsWith('localspec.unsaved.'))"
        self.until(f"(expected) => {listed} === expected && !{held}", ",".join(titles))

    def reload(self, n: int) -> None:
        """Load the page again, with so many turns."""
        self.page.reload()
        self.turns(n)

    def say(self, text: str) -> None:
        """Type a question, and press Enter."""
        self.page.focus("#question")
        self.page.keyboard.type(text)
        self.press("Enter")

    def idle(self) -> None:
        self.page.wait_for_selector("#stop:disabled", state="attached")

    def ask(self, text: str) -> str:
        """Ask, and wait for the whole answer; its text as it is copied."""
        n_before = self.page.locator(".turn").count()
        self.say(text)
        self.until("(n) => document.querySelectorAll('.turn').length > n", n_before)
        self.idle()
        return self.said()

    def said(self) -> str:
        """The last answer's text without rejected guesses."""
        return self.run(
            "() => [...document.querySelectorAll('.turn:last-of-type .answer .token:not(.rejected)')]"
            ".map((token) => token.textContent).join('')"
        )


Tabs = Callable[..., Tab]
"""Opens tabs at an address, with the options of a browser's context."""
