"""The documentation: nothing in it points nowhere, names what is not there, or is out of date."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer

from localspec import LLM, Draft, DraftToken, EmittedToken, Round, SamplingParams, SpecStats, Verdict, errors
from localspec.commands.chat.commands import ALIASES, COMMANDS
from localspec.commands.chat.screen import VIEWS
from localspec.commands.cli import app
from localspec.sampling import grammar as structured
from localspec.server import embeddings, infill, requests, responses
from localspec.server import http as fields_module
from localspec.server import service as service_module
from localspec.server import tool_calls as tool_calls_module
from localspec.server.app import MAX_CONNECTIONS
from localspec.server.conversations import ConversationLimits
from localspec.server.http import ServerSettings
from scripts import make_docs
from tests.conftest import TinyFiles
from tests.test_packaging import tracked_files

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md"}
    | {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
)
FOLDERS = "localspec|tests|docs|benchmarks|examples|models|scripts"
PIPS = {"--extra-index-url", "--force-reinstall", "--no-cache-dir", "--no-deps", "--no-binary", "--only-binary"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """The relative ones."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_blocks(text_of(page)))
    return [link for link in found if not re.match(r"https?:", link)]


@cache
def known_options() -> set[str]:
    sources = [make_docs.cli_page(), *(path.read_text(encoding="utf-8") for path in ROOT.glob("benchmarks/*.py"))]
    return set(re.findall(r"--[a-z][a-z0-9-]+", "\n".join(sources))) | PIPS


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere_and_every_python_block_parses(page: str) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), link
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), link
    for block in blocks(page):
        ast.parse(block)


@pytest.mark.parametrize("page", sorted({*PAGES} - {"CHANGELOG.md"}))
def test_everything_that_is_named_exists(page: str) -> None:
    """Paths with ``toy`` in them are the reader's, yet to be made; RESULTS has options of other days."""
    text = text_of(page)
    named = set(re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*[\w/]", text))
    assert not {path for path in named if "toy" not in path and not (ROOT / path).exists()}
    modules = {path.name for folder in ("localspec", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    assert set(re.findall(r"`(\w+\.py)`", text)) <= modules
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) - known_options()
    assert not options or page == "benchmarks/RESULTS.md"
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for name in set(re.findall(r"`(localspec(?:\.\w+){2,})", text)):
        pkgutil.resolve_name(name)


def test_the_environment_variables_that_are_named_are_those_that_are_read() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "localspec").rglob("*.py"))
    read = set(re.findall(r"""["'](LOCALSPEC_[A-Z_]+)["']""", sources))
    assert read == set(re.findall(r"^\| `(LOCALSPEC_[A-Z_]+)", text_of("docs/cli.md"), re.MULTILINE))


def test_every_slash_command_is_on_the_page_of_the_chat() -> None:
    named = set(re.findall(r"`/(\w+)", text_of("docs/chat.md")))
    assert {*COMMANDS, *ALIASES} - {"?"} == named
    assert {f"/view {view}" for view in VIEWS} <= set(re.findall(r"`(/view \w+)`", text_of("docs/chat.md")))


def test_every_figure_and_every_field_of_a_round_is_on_the_page_of_formats() -> None:
    _, _, stats = text_of("docs/formats.md").partition("\n## Stats\n")
    rows = re.findall(r"^\| (`.*?`(?:, `\w+`)*) \|", stats, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    named |= {f"seconds{name}" for name in named if name.startswith("_")}
    assert {name for name in named if not name.startswith("_")} == set(SpecStats())
    rounds = text_of("docs/formats.md").partition("\n## Events\n")[2].partition("\n## ")[0]
    guess, token = DraftToken(1, "ngram", 0.5), EmittedToken(1, "accepted")
    event = Round(0, Draft([guess]), Verdict(1, 2, "bonus"), [token], 1.0, 1.0).as_event()
    keys = set(event) | set(event["draft"][0]) | set(event["emitted"][0])
    assert keys <= set(re.findall(r"`(\w+)", rounds))


def test_every_address_is_on_the_page_of_the_server() -> None:
    source = (ROOT / "localspec/server/app.py").read_text(encoding="utf-8")
    page = text_of("docs/server.md")
    for address in re.findall(r'(?:Address|Api)\("(/[\w/]*)', source):
        assert f"{address}`" in page or f"{address}NAME`" in page, address


def test_the_bounds_of_the_server_are_those_that_hold() -> None:
    table = text_of("docs/server.md").partition("**Bounds.**")[2].partition("What is within")[0]
    server, conversations = ServerSettings(), ConversationLimits()
    bounds = [MAX_CONNECTIONS, server.body_bytes >> 20, server.body_seconds, server.bodies_bytes >> 20]
    bounds += [fields_module.LARGE_BYTES >> 10, fields_module.N_LARGE]
    bounds += [errors.MAX_DEPTH, errors.MAX_CONTAINERS, errors.MAX_DIGITS]
    bounds += [requests.MAX_MESSAGES, requests.MAX_TOOLS, requests.MAX_CHOICES, requests.MAX_STOPS, requests.MAX_STOP]
    bounds += [structured.MAX_SCHEMA, structured.MAX_OPTIONAL, requests.MAX_BIASES]
    bounds += [tool_calls_module.MAX_VALUES, tool_calls_module.MAX_SCHEMAS]
    bounds += [responses.MAX_METADATA, responses.MAX_NAME, responses.MAX_VALUE]
    bounds += [service_module.MAX_RESPONSES, service_module.MAX_BYTES >> 20]
    bounds += [conversations.conversations, conversations.bytes_each >> 20, conversations.bytes_together >> 20]
    bounds += [infill.MAX_FILES, infill.MAX_WINDOWS, infill.MAX_CHARACTERS, embeddings.MAX_INPUTS]
    assert set(re.findall(r"\d+(?:,\d{3})*", table)) == {f"{bound:,g}" for bound in bounds}


def test_the_readme_links_every_page_and_begins_with_two_commands() -> None:
    assert set(PAGES) - {"README.md"} <= {link.partition("#")[0] for link in links("README.md")}
    first = text_of("README.md").split("```")[1].splitlines()
    assert [line.split("#")[0].strip() for line in first if line.startswith("make")] == ["make chat", "make test"]


def test_no_page_lies_elsewhere() -> None:
    tracked = {path.relative_to(ROOT).as_posix() for path in tracked_files() if path.suffix == ".md"}
    results = {page for page in tracked if page.startswith("benchmarks/results/")}
    beside_what_it_describes = {
        "localspec/commands/bench/SCHEMA.md",
        "localspec/commands/verify/SCHEMA.md",
        "localspec/server/page/vendor/README.md",
    }
    assert tracked - results - beside_what_it_describes <= set(PAGES)


@pytest.mark.parametrize(
    ("page", "most"), [("README.md", 130), ("docs/cli.md", 300), ("docs/heads.md", 160), ("benchmarks/RESULTS.md", 600)]
)
def test_pages_that_grow_stay_short(page: str, most: int) -> None:
    assert len(text_of(page).splitlines()) <= most


@pytest.mark.parametrize("page", make_docs.PAGES)
def test_the_pages_that_are_made_are_not_stale(page: str) -> None:
    """``make docs`` makes them anew. Of the help only the words count: how it is laid out differs between typers."""
    made, kept = make_docs.PAGES[page](), text_of(page)
    assert words(made) == words(kept)
    if page == "docs/cli.md":
        commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        for name in commands:  # config has commands of its own, and short ones share a section
            assert re.search(rf"^(?:## |- `)localspec .*\b{name}\b", kept, re.MULTILINE), name
    else:
        assert made == kept


def words(text: str) -> list[str]:
    return re.sub(r"<[\w\[\]]+>|\[?\b(?:default|required)\b:?|[()\[\]{}]", " ", text).split()


HELP = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv, sys.path[0] = [path, "--help"], path.rpartition("/")[0]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print("ended", end.code, path)
"""


def test_every_benchmark_starts_and_is_on_its_page() -> None:
    paths = sorted(map(str, ROOT.glob("benchmarks/*.py")))
    page = text_of("docs/bench.md")
    assert not [path for path in paths if f"`benchmarks/{Path(path).name}`" not in page]
    found = subprocess.run([sys.executable, "-c", HELP, *paths], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert re.findall(r"^ended (\S+) (.*)$", found.stdout, re.MULTILINE) == [("0", path) for path in paths]
    assert len(re.findall("^usage:", found.stdout, re.MULTILINE)) == len(paths)


def test_the_samples_run(tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's, and those of the page on Python, as they stand but for the models and the engine."""
    pytest.importorskip("llguidance")
    monkeypatch.chdir(tmp_path)
    sample, session, _distill, form = blocks("docs/python.md")  # tests/training runs the third, which takes an hour
    assert sample.startswith(blocks("README.md")[0])
    models = f'"{tiny.quick.target}", draft="{tiny.quick.draft}", backend="reference", n_ctx=512'
    exec(sample.replace('"qwen2.5-coder-1.5b", draft="qwen2.5-coder-0.5b"', models), {})
    with LLM(tiny.quick.target, draft="ngram", backend="reference", n_ctx=512) as llm:
        exec(session + form, {"llm": llm, "SamplingParams": SamplingParams})
