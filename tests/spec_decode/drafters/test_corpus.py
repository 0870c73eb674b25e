"""Drafts copied from files: the drafter, its rank beside n-grams, and a pair that has it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from localspec import LLM, SamplingParams
from localspec.engine.saved import said_in
from localspec.errors import UsageError
from localspec.sampling.sampling import Noise
from localspec.server.conversations import ConversationStore
from localspec.spec_decode.drafters import corpus as module
from localspec.spec_decode.drafters.base import Plan
from localspec.spec_decode.drafters.corpus import CorpusDrafter, CorpusIndex, PathSource
from localspec.spec_decode.drafters.group import DrafterGroup
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.proposer import Proposer
from localspec.system.steps import exhaust
from tests.conftest import TinyFiles

ANYTHING = Proposer(SamplingParams(), Noise(0))
KINDS = {
    "greedy": SamplingParams(max_tokens=60, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True),
}


def tokens_of(text: str) -> list[int]:
    return [ord(char) for char in text]


def drafter_of(folder: Path, **texts: str) -> CorpusDrafter:
    root = folder / "text"
    root.mkdir()
    for name, text in texts.items():
        (root / f"{name}.txt").write_text(text)
    index = CorpusIndex(PathSource(root), folder / "home", "v", tokens_of)
    exhaust(index.update())
    return CorpusDrafter(index, "corpus", "corpus:text")


def drafted(drafter: CorpusDrafter | DrafterGroup, text: str, n: int) -> str:
    return "".join(chr(token.id) for token in drafter.draft(tokens_of(text), Plan(n), ANYTHING))


def test_it_copies_what_follows_in_a_file(tmp_path: Path) -> None:
    drafter = drafter_of(tmp_path, a="the cat sat on the mat", b="a dog ran")
    drafter.begin(tokens_of("my cat"))
    assert drafted(drafter, "my cat", 7) == " sat on"
    assert drafted(drafter, "my cat", 90) == " sat on the mat"
    assert drafted(drafter, "my cat sat on", 4) == " the"  # behind what another one drafted
    drafter.accept(tokens_of(" s"))
    assert drafted(drafter, "my cat s", 5) == "at on"
    drafter.accept(tokens_of("?"))
    assert drafted(drafter, "my cat s?", 5) == ""
    drafter.begin(tokens_of("a d"))
    assert drafted(drafter, "a d", 5) == "og ra"


def test_it_learns_how_often_it_is_right(tmp_path: Path) -> None:
    drafter = drafter_of(tmp_path, a="abcdefgh" * 20)
    before = drafter.clone(None)
    drafter.begin(tokens_of("ab"))
    text = "ab"
    for _ in range(100):
        right = drafter.draft(tokens_of(text), Plan(1), ANYTHING)
        token = "x" if len(text) % 2 else chr(right[0].id) if right else "a"
        drafter.accept(tokens_of(token))
        text += token
    after = drafter.clone(None)
    for each in (before, after):
        each.begin(tokens_of("xa"))
    assert after.confidence(tokens_of("xa")) < before.confidence(tokens_of("xa"))


@pytest.mark.parametrize("surer", ["corpus", "ngram"])
def test_the_surer_of_corpus_and_ngrams_goes_first(tmp_path: Path, surer: str) -> None:
    """A longer match is right more often, wherever it is: at each place the one with more confidence drafts."""
    long, short = "one two three four five six", "five six"
    in_file, in_prompt = (long, short) if surer == "corpus" else (short, long)
    drafter = drafter_of(tmp_path, a=f"{in_file} A.")
    prompt = f"{in_prompt} N. {long}"
    for order in ([NgramDrafter(), drafter], [drafter, NgramDrafter()]):
        group = DrafterGroup(order)
        for each in order:
            each.begin(tokens_of(prompt))
        draft = group.draft(tokens_of(prompt), Plan(2), ANYTHING)
        assert {token.source for token in draft} == {surer}
        assert draft.ids == tokens_of(" A" if surer == "corpus" else " N")


# -- in a pair ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_answers(tiny: TinyFiles, folder: Path, prompts: Sequence[str]) -> dict[str, list[int]]:
    """A file with what the target answers, so that there is something to copy; the answers of each kind."""
    folder.mkdir(exist_ok=True)
    answers = {}
    with LLM(tiny.quick.target, None, backend="reference", n_ctx=256) as llm:
        for name, params in KINDS.items():
            for prompt in prompts:
                reply = llm.generate(prompt, params)
                answers[f"{name} {prompt}"] = reply.token_ids
                (folder / f"{name}-{len(answers)}.txt").write_text(prompt + reply.text, encoding="utf-8", newline="")
    return answers


def test_answers_are_the_same_and_faster(tiny: TinyFiles, tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "project"
    answers = write_answers(tiny, folder, ["la la la", "the quick"])
    spec = f"corpus:{folder}"
    options = {"draft_length": 4, "backend": "reference", "n_ctx": 256, "idle": False}
    n_accepted = 0
    for draft in ([spec], ["auto", spec], ["ngram", spec]):
        with LLM(tiny.quick.target, draft, **options) as llm:
            assert spec in llm.draft_names
            for key, answer in answers.items():
                name, _, prompt = key.partition(" ")
                reply = llm.generate(prompt, KINDS[name])
                assert reply.token_ids == answer
                n_accepted += reply.stats["by_source"].get("corpus", {}).get("num_accepted_tokens", 0)
    assert n_accepted > 50
    assert list((home / "corpora").rglob("*.segment"))


def test_files_are_read_while_nobody_waits(
    tiny: TinyFiles, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr("localspec.engine.worker.on_battery", lambda: False)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.txt").write_text("some words that are there from the start")
    with LLM(tiny.quick.target, f"corpus:{folder}", draft_length=4, backend="reference", n_ctx=256) as llm:
        assert any("1 files" in line and "while nobody waits" in line for line in llm.warnings)
        assert llm.wait_idle(60)
        index = llm.run(lambda pair: pair.state.free[0].index)  # type: ignore[attr-defined]
        n_before = index.n_tokens
        assert n_before > 0
        assert any(line.endswith("tokens are indexed") for line in llm.warnings)
        (folder / "b.txt").write_text("and others that came later")
        llm.generate("la", SamplingParams(max_tokens=2))
        deadline = time.monotonic() + 60
        while index.n_tokens == n_before and time.monotonic() < deadline:
            llm.wait_idle(1)
        assert index.n_tokens > n_before


def test_saved_chats_are_a_corpus_if_one_says_so(tiny: TinyFiles, home: Path) -> None:
    options = {"draft_length": 4, "backend": "reference", "n_ctx": 512, "idle": False}
    home.mkdir(exist_ok=True)
    with LLM(tiny.quick.target, None, **options) as llm:
        session = llm.session(params=KINDS["greedy"])
        answer = session.chat("la la la").token_ids
        session.save(home / "a.chat")
        (home / "b.chat").write_bytes((home / "a.chat").read_bytes()[:-9])  # damaged
    with LLM(tiny.quick.target, "corpus:chats", **options) as llm:
        reply = llm.session(params=KINDS["greedy"]).chat("la la la")
        assert reply.token_ids == answer
        assert reply.stats["by_source"]["corpus"]["num_accepted_tokens"] > 0


def test_conversations_of_the_page_are_among_the_saved_chats(tiny: TinyFiles, home: Path) -> None:
    options = {"draft_length": 4, "backend": "reference", "n_ctx": 512, "idle": False}
    with LLM(tiny.quick.target, None, **options) as llm:
        said = llm.session(params=KINDS["greedy"]).chat("la la la")
    files = [{"name": "a.py", "text": "an area\n", "edit": True}]
    messages = [{"role": "user", "content": "la la la", "files": files}, {"role": "assistant", "content": said.text}]
    store = ConversationStore(home / "conversations")
    name = store.create({"title": "la", "system": "", "settings": {}, "messages": messages})["id"]
    for other, text in (
        ("0" * 16, "{"),
        ("1" * 16, '{"messages": 3}'),
        ("2" * 16, "[]"),
        ("notes", '{"messages": []}'),
    ):
        (home / "conversations" / f"{other}.json").write_text(text)
    assert said_in(home / "conversations" / f"{name}.json") == ["la la la", said.text, "an area\n"]
    assert said_in(home / "conversations" / f"{'1' * 16}.json") == []
    with LLM(tiny.quick.target, "corpus:chats", **options) as llm:
        reply = llm.session(params=KINDS["greedy"]).chat("la la la")
        assert reply.token_ids == said.token_ids
        assert reply.stats["by_source"]["corpus"]["num_accepted_tokens"] > 0


def test_what_makes_no_sense_is_refused(tiny: TinyFiles, tmp_path: Path, home: Path) -> None:
    with LLM(tiny.quick.target, "ngram", backend="reference", n_ctx=64, idle=False) as llm:
        for wrong, why in (
            ("corpus", "takes a file or a folder"),
            ("corpus:", "takes a file or a folder"),
            ("corpora", "did you mean corpus"),
            (f"corpus:{tmp_path / 'missing'}", "missing: No such file"),
            (["none", f"corpus:{tmp_path}"], "stand alone"),
            (["auto", "ngram", f"corpus:{tmp_path}"], "stand alone"),
            ([f"corpus:{i}" for i in range(9)], "8 times"),
        ):
            with pytest.raises(UsageError, match=why):
                llm.set_draft(wrong)  # type: ignore[arg-type]
            assert llm.draft_names == ["ngram"]
        (tmp_path / "a").mkdir()
        llm.set_draft([f"corpus:{tmp_path / 'a'}", "ngram", f"corpus:{tmp_path / 'a' / '..' / 'a'}"])
        assert llm.draft_names == ["ngram", f"corpus:{tmp_path / 'a'}"]
        assert any("holds no text" in line for line in llm.warnings)
