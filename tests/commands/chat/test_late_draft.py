"""The chat's draft model comes after the prompt: what is asked meanwhile is answered, and leaving ends it."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.commands import files
from localspec.commands.chat import chat as chat_module
from localspec.commands.chat.chat import Chat, LateDraft, header, may_be_drafted_for
from localspec.commands.chat.commands import run_command
from localspec.commands.chat.screen import ChatScreen
from localspec.commands.options import RunOptions
from localspec.engine import drafts
from localspec.engine.options import LoadOptions
from localspec.errors import Cancelled, DownloadError
from localspec.heads.file import heads_folder
from localspec.model_files import sources
from localspec.model_files.catalog import Catalog, Entry
from localspec.spec_decode.drafters.names import AUTOMATIC
from tests.conftest import TinyFiles
from tests.support.heads import write_random_head
from tests.support.waiting import held

SOON = 60.0
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
DRAFT = Entry("some-draft", "some-draft.gguf", bytes=100)


def head_of(target: Path) -> None:
    heads_folder().mkdir(parents=True)
    write_random_head(target, heads_folder() / "a-head.gguf")


@pytest.fixture
def llm(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(Catalog, "draft_for", lambda self, path: tiny.quick.draft)
    monkeypatch.setattr(chat_module, "gain_of_size", lambda state, n_bytes: 1.1)
    monkeypatch.setattr(drafts, "LEAST_GAIN", 0.0)  # what passes cost here has no say in these tests
    with LLM(tiny.quick.target, "ngram", backend="reference", n_ctx=256) as loaded:
        yield loaded


@pytest.fixture
def chat(llm: LLM) -> Chat:
    return Chat(llm, ChatScreen(io.StringIO(), io.StringIO(), plain=True), params=GREEDY)


def shown(chat: Any) -> str:
    return str(chat.screen.file.getvalue() + chat.screen.errors.getvalue())


def names(tiny: TinyFiles, *heads: str) -> list[str]:
    return [*AUTOMATIC, *heads, tiny.quick.draft.stem]


def finished(late: LateDraft) -> LateDraft:
    late.join(SOON)
    assert (late.is_alive(), late.status) == (False, "")
    return late


def test_what_is_asked_goes_first_and_then_it_joins(llm: LLM, tiny: TinyFiles) -> None:
    changes: list[str] = []
    with held(llm):
        late = LateDraft(llm, [])
        late.changed = lambda: changes.append("changed")
        stream = llm.rounds("x", GREEDY)
    assert len(stream.reply.token_ids) == 8
    finished(late)
    assert (llm.draft_names, late.notes, bool(changes)) == (names(tiny), [], True)


class Fetching:
    """A download that reports half of it and then waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.half, self.go_on, self.broke_off = threading.Event(), threading.Event(), threading.Event()
        self._error = error
        monkeypatch.setattr(sources, "pull", self)

    def __call__(self, entry: Entry, *, watch: Any) -> Path:
        try:
            watch(f"downloading {entry.name}", 50, 100)
            self.half.set()
            while not self.go_on.wait(0.001):
                watch(f"downloading {entry.name}", 50, 100)
        except BaseException:
            self.broke_off.set()
            raise
        if self._error is not None:
            raise self._error
        return entry.path


@pytest.mark.parametrize("then", ["it comes", "the person leaves", "another is chosen"])
def test_the_chat_answers_while_the_draft_is_fetched(
    llm: LLM, chat: Chat, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    fetching = Fetching(monkeypatch)
    late = chat.late = LateDraft(llm, [DRAFT])
    assert fetching.half.wait(SOON)
    header(chat)
    assert "; fetching the draft model some-draft 50%." in shown(chat)
    assert chat.ask("x")
    assert "fetching the draft model some-draft 50%" in chat.toolbar
    if then == "it comes":
        fetching.go_on.set()
    else:
        if then == "another is chosen":
            assert run_command(chat, "/draft ngram")
        else:
            late.stop()
        assert fetching.broke_off.wait(SOON)
    finished(late)
    expected = names(tiny) if then == "it comes" else ["ngram"]
    assert (llm.draft_names, late.notes, "fetching" in chat.toolbar) == (expected, [], False)
    assert chat.ask("x")


def test_what_came_up_meanwhile_is_said_once_at_the_next_prompt(
    llm: LLM, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came up before the header is said there: of a draft model that was left out while the chat began."""
    llm.inspect().warnings.append("a draft is left out")
    header(chat)
    Fetching(monkeypatch, DownloadError("no source")).go_on.set()
    chat.late = finished(LateDraft(llm, [DRAFT]))
    llm.inspect().warnings.append("another one")
    chat.show_news()
    chat.show_news()
    for said in ("going on without a draft model: no source", "note: a draft is left out", "note: another one"):
        assert shown(chat).count(said) == 1
    assert chat.ask("x")


def test_only_the_target_is_fetched_before_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "0")
    fetched: list[str] = []
    loaded: list[Any] = []
    monkeypatch.setattr(files, "pull", fetched.append)
    monkeypatch.setattr("localspec.llm.LLM", lambda *args, **options: loaded.append(args))
    target, draft = Catalog.load().default_pair()
    missing: list[Entry] = []
    RunOptions().open(lambda what, fraction: None, late=missing)
    assert (fetched, missing, loaded) == ([target.name], [draft], [(target.name, list(AUTOMATIC))])


def test_the_head_comes_before_the_draft_model_is_fetched(
    llm: LLM, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching = Fetching(monkeypatch)
    monkeypatch.setattr(Catalog, "draft_for", lambda self, path: tiny.quick.draft if fetching.go_on.is_set() else None)
    assert not may_be_drafted_for(llm)
    head_of(tiny.quick.target)
    assert may_be_drafted_for(llm)
    late = LateDraft(llm, [DRAFT])
    assert fetching.half.wait(SOON)
    assert llm.draft_names == [*AUTOMATIC, "head"]
    fetching.go_on.set()
    finished(late)
    assert llm.draft_names == names(tiny, "head")


@pytest.mark.parametrize(
    ("with_head", "noisy", "others"), [(True, False, 0.0), (False, False, 0.0), (False, True, 0.4), (False, True, 0.0)]
)
def test_a_draft_model_that_would_add_nothing_is_not_fetched(
    llm: LLM, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, with_head: bool, noisy: bool, others: float
) -> None:
    """On a busy machine, or where repeats disagree, nothing is said of this machine."""
    if with_head:
        head_of(tiny.quick.target)
    llm.wait_idle(SOON)
    times = llm.inspect().times
    times.quick, times.noisy, times.others_share = False, noisy, others
    fetched: list[Entry] = []
    monkeypatch.setattr(sources, "pull", lambda entry, **options: fetched.append(entry))
    monkeypatch.setattr(Catalog, "draft_for", lambda self, path: None)
    monkeypatch.setattr(chat_module, "gain_of_size", lambda state, n_bytes: 1.02)
    (note,) = finished(LateDraft(llm, [DRAFT])).notes
    assert (fetched, llm.draft_names) == ([], [*AUTOMATIC, "head"] if with_head else ["ngram"])
    said = [text in note for text in ("on this machine", "The next start looks again", "other programs")]
    assert said == [not noisy, noisy, others > 0]
    assert note.endswith("To get it anyway: localspec pull some-draft")


def test_loading_that_gives_way_to_a_request_is_no_remark_and_is_made_up_for(llm: LLM, tiny: TinyFiles) -> None:
    """A head's too, which ``auto`` otherwise goes on without where it fails."""
    head_of(tiny.quick.target)
    for _ in range(2):
        with pytest.raises(Cancelled):
            llm.set_draft(["auto"], gives_way=lambda: True)
        assert (llm.draft_names, llm.warnings) == (["ngram"], [])
    llm.set_draft(["auto"], gives_way=lambda: False)
    assert (llm.draft_names, llm.warnings) == (names(tiny, "head"), [])


def test_a_remark_is_made_once_however_often_a_draft_is_loaded(tiny: TinyFiles) -> None:
    with LLM(tiny.quick.draft, "ngram", backend="reference", n_ctx=256, idle=False) as llm:
        for _ in range(3):
            llm.set_draft(["ngram", tiny.quick.target])
            llm.set_draft("ngram")
        assert ["is larger than the target" in warning for warning in llm.warnings] == [True]


def test_what_was_asked_for_is_there_from_the_first_token() -> None:
    assert RunOptions().draft_may_come_late
    for asked in ({"draft_length": "3"}, {"draft": ("some.gguf",)}, {"load": LoadOptions(idle=False)}):
        assert not RunOptions(**asked).draft_may_come_late
