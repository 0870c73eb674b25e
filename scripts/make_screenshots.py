"""Takes the pictures of ``docs/images/``: the server's page in a real Chromium, with the default pair behind it.

``python -m scripts.make_screenshots`` takes all of them, ``… reading race`` some. Answers are greedy, so the words are
the same each time up to near ties; speeds are this machine's at that moment. It takes some minutes, and a gigabyte of
disk meanwhile.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.system.files import models_dir

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
MODELS = Path(os.environ.get("LOCALSPEC_TEST_MODELS") or models_dir())
TARGET, DRAFT = (MODELS / f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf" for size in ("1.5b", "0.5b"))
LARGEST = 100_000  # bytes of a picture, in a repository that is cloned
WIDE, NARROW = {"width": 1180, "height": 720}, {"width": 360, "height": 720}
PATIENCE = 300_000  # milliseconds; the machine may be slow and busy

CODE = '''\
def fibonacci(n: int) -> int:
    """The n-th Fibonacci number."""
    if n <= 1:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)
'''
FILE = {"name": "fibonacci.py", "mimeType": "text/plain", "buffer": CODE.encode()}
TABLE = "In a small Markdown table, compare recursion and a loop for Fibonacci numbers."
RENAME = "Rename the function to fib and show the code again."
VOWELS = "Plan a Python function that counts the vowels of a word, in three short steps. Then write it."

THINKER = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
"""A chat template that opens a block of thinking, for a model that does not think by itself."""
BUDGET = 70  # tokens, after which the block is closed


@contextmanager
def served(target: Path, home: Path) -> Iterator[str]:
    """``localspec serve`` with a home of its own; the page's address."""
    command = [sys.executable, "-m", "localspec", "serve", str(target), "--draft", str(DRAFT), "--port", "0"]
    environment = os.environ | {"LOCALSPEC_HOME": str(home)}
    with subprocess.Popen([*command, "--ctx", "2048"], stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.send_signal(signal.SIGINT)


class Camera:
    """A tab of the page, and the pictures that are wanted of it."""

    def __init__(self, page: Any, wanted: set[str]) -> None:
        self.page = page
        self._wanted = wanted

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.page.wait_for_function("() => document.getElementById('engine').textContent")
        self.page.fill("#temperature", "0")
        self.page.fill("#max-tokens", "220")

    def ask(self, question: str, file: dict[str, Any] | None = None) -> None:
        """Ask, and wait for the whole answer, which is shown from its beginning."""
        if file is not None:
            self.page.set_input_files("#file", file)
            self.page.locator("#attached li").wait_for()
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")
        self.page.wait_for_selector("#stop:enabled", state="attached")
        self.page.wait_for_selector("#stop:disabled", state="attached")
        self.page.evaluate("() => { document.activeElement.blur(); document.getElementById('talk').scrollTop = 0; }")

    def take(self, name: str) -> None:
        if name not in self._wanted:
            return
        self.page.mouse.move(0, 0)
        path = IMAGES / f"page-{name}.png"
        shot = self.page.screenshot(animations="disabled", caret="hide")
        path.write_bytes(with_palette(pixels(self.page.context.browser, shot)))
        size = path.stat().st_size
        print(f"{path.relative_to(ROOT)}: {size / 1000:.0f} kB", flush=True)
        if size > LARGEST:
            raise SystemExit(f"{path.name} is larger than {LARGEST / 1000:.0f} kB: show less in it")


def pixels(browser: Any, png: bytes) -> npt.NDArray[np.uint8]:
    """A picture's pixels, [row, column, red green blue]: browsers can read PNG, the standard library cannot."""
    script = """async (png) => {
        const bitmap = await createImageBitmap(await (await fetch(`data:image/png;base64,${png}`)).blob());
        const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
        context.drawImage(bitmap, 0, 0);
        const {data} = context.getImageData(0, 0, bitmap.width, bitmap.height);
        let text = "";
        for (let i = 0; i < data.length; i += 4096) text += String.fromCharCode(...data.subarray(i, i + 4096));
        return [bitmap.width, bitmap.height, btoa(text)];
    }"""
    page = browser.new_page()
    width, height, encoded = page.evaluate(script, base64.b64encode(png).decode())
    page.close()
    return np.frombuffer(base64.b64decode(encoded), np.uint8).reshape(height, width, 4)[:, :, :3]


def with_palette(picture: npt.NDArray[np.uint8]) -> bytes:
    """A PNG of at most 256 colours, half as large: the most frequent; others, shades at edges of letters, go to the
    nearest of them."""
    height, width, _ = picture.shape
    colours, index, counts = np.unique(picture.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    palette = colours[np.argsort(-counts, kind="stable")[:256]]
    apart = np.abs(colours[:, None].astype(np.int16) - palette[None].astype(np.int16)).sum(-1)
    rows = apart.argmin(1)[index].reshape(height, width).astype(np.uint8)
    unfiltered = np.insert(rows, 0, 0, axis=1)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", palette.tobytes()), (b"IDAT", zlib.compress(unfiltered.tobytes(), 9)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in (*parts, (b"IEND", b"")))


def conversation(camera: Camera, url: str) -> None:
    """Reading, in the dark, on a narrow screen, and every token."""
    page = camera.page
    camera.open(url)
    camera.ask(TABLE)
    page.click("#new-chat")
    page.wait_for_function("() => !document.querySelector('.turn')")
    camera.ask(RENAME, FILE)
    camera.take("reading")
    page.select_option("#theme", "dark")
    camera.take("dark")
    page.select_option("#theme", "")
    page.set_viewport_size(NARROW)
    camera.take("narrow")
    page.set_viewport_size(WIDE)
    page.select_option("#draft-length", "6")
    page.get_by_label("Tokens", exact=True).check()
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_selector("#stop:enabled", state="attached")
    page.wait_for_selector("#stop:disabled", state="attached")
    page.evaluate("() => { document.activeElement.blur(); document.getElementById('talk').scrollTop = 0; }")
    camera.take("tokens")
    page.get_by_label("Tokens", exact=True).uncheck()
    page.select_option("#draft-length", "auto")


def race(camera: Camera, url: str) -> None:
    page = camera.page
    camera.open(url)
    page.click("#race-tab")
    page.fill("#race-prompt", f"{RENAME}\n\n{CODE}")
    page.evaluate("() => (document.getElementById('race-prompt').scrollTop = 0)")
    page.click("#start")
    page.wait_for_selector("#again:enabled")  # both have been shown to their ends
    page.evaluate("() => document.activeElement.blur()")
    camera.take("race")


def thinking(camera: Camera, url: str) -> None:
    """Thoughts, folded, above the answer."""

    def with_budget(route: Any) -> None:
        route.continue_(post_data=json.dumps(json.loads(route.request.post_data) | {"thinking_budget": BUDGET}))

    camera.page.route("**/v1/chat/completions", with_budget)
    camera.open(url)
    camera.ask(VOWELS)
    camera.take("thinking")


def write_thinker(path: Path) -> None:
    """The target with another chat template."""
    change = ["gguf.scripts.gguf_new_metadata", "--chat-template", THINKER, str(TARGET), str(path)]
    subprocess.run([sys.executable, "-m", *change], check=True, stderr=subprocess.DEVNULL)


VIEWS: dict[Callable[[Camera, str], None], tuple[str, ...]] = {
    conversation: ("reading", "dark", "narrow", "tokens"),
    race: ("race",),
    thinking: ("thinking",),
}


def main() -> None:
    from playwright.sync_api import sync_playwright

    wanted = set(sys.argv[1:]) or {name for names in VIEWS.values() for name in names}
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for view, names in VIEWS.items():
            if not wanted & set(names):
                continue
            target, home = TARGET, Path(folder) / view.__name__  # each with conversations of its own
            if view is thinking:
                write_thinker(target := Path(folder) / "thinking-coder-1.5b.gguf")
            with served(target, home) as url:
                page = browser.new_page(viewport=WIDE)
                page.set_default_timeout(PATIENCE)
                view(Camera(page, wanted), url)
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
