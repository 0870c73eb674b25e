"""Drafts copied from files: the index, which is in step with them, the drafter, and a pair that has it."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from localspec import LLM, SamplingParams
from localspec.engine.pair import Pair
from localspec.engine.saved import said_in
from localspec.errors import LocalspecError, UsageError
from localspec.sampling.sampling import Noise
from localspec.server.conversations import ConversationStore
from localspec.spec_decode.drafters import corpus as module
from localspec.spec_decode.drafters.base import Plan, Proposer
from localspec.spec_decode.drafters.corpus import DEPTH, MOST_FILE_BYTES, CorpusDrafter, CorpusIndex, PathSource
from localspec.spec_decode.drafters.group import DrafterGroup
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.system.steps import exhaust
from tests.conftest import TinyFiles


def tokens_of(text: str) -> list[int]:
    return [ord(char) for char in text]


class Corpus:
    """A folder with an index."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root / "text", root / "home"
        self.root.mkdir()

    def write(self, name: str, content: str | bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        if path.stat().st_mtime_ns == before:  # a coarse clock
            os.utime(path, ns=(before + 10**9, before + 10**9))

    def open(self) -> CorpusIndex:
        return CorpusIndex(PathSource(self.root), self.home, "vocabulary", tokens_of)

    def index(self) -> CorpusIndex:
        """One that is up to date."""
        index = self.open()
        exhaust(index.update())
        return index

    @property
    def files(self) -> list[Path]:
        return sorted(self.home.rglob("*.segment"))


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


def following(index: CorpusIndex, text: str) -> str:
    """What is proposed after a text, one character at a time, until there is nothing or the same text comes again."""
    match, found = index.match(tokens_of(text)), ""
    while (best := index.continuation(match)) is not None and len(found) < 60:
        found += chr(best.token)
        match = index.step(match, best.token)
    return found


def brute(texts: Sequence[str], text: str) -> tuple[int, Counter[str]]:
    """Length of the longest match, up to ``DEPTH``, and what follows it how often."""
    for length in range(min(DEPTH, len(text)), 0, -1):
        end = text[-length:]
        places = [(each, i) for each in texts for i in range(len(each)) if each.startswith(end, i)]
        if places:
            return length, Counter(each[i + length] for each, i in places if i + length < len(each))
    return 0, Counter()


def test_a_sample_of_many_places_stands_for_all(corpus: Corpus) -> None:
    corpus.write("a.txt", "ab" * 5000 + "ac" * 500)
    index = corpus.index()
    match = index.match(tokens_of("?a"))
    best = index.continuation(match)
    assert best is not None
    assert (chr(best.token), best.times > 0.8 * best.total) == ("b", True)
    assert best.total <= module.MOST_PLACES
    assert not match.is_whole
    further = index.step(match, best.token)
    assert (further.length, further.is_whole) == (2, False)  # looked for: there may be others


def test_whatever_becomes_of_the_files_the_index_follows(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written, changed and deleted, and it is brought up to date, broken off, opened anew: only what changed
    is read, nothing half is taken for whole, and what is gone is in no proposal and soon in no file. It finds what a
    plain search finds, also in repeats that are longer than the depth that is sorted."""
    monkeypatch.setattr(module, "BATCH", 150)
    monkeypatch.setattr(module, "BUCKET", 16)
    monkeypatch.setattr(module, "MOST_PLACES", 10_000)
    read, text_of = list[str](), PathSource.text
    monkeypatch.setattr(PathSource, "text", lambda self, name: (read.append(name), text_of(self, name))[1])
    corpus.write("picture.png", b"\x89PNG\0\0")  # one that has no text is not looked into again either
    corpus.write("empty.txt", "")
    rng, index, texts, changed = random.Random(5), corpus.open(), {"empty.txt": ""}, {"picture.png", "empty.txt"}
    n_whole = n_broken = n_compared = n_long = 0
    for turn in range(150):
        for i in range(rng.randrange(4)):
            name = rng.choice([f"{turn}-{i}.txt", *texts])
            if name in texts and rng.random() < 0.4:
                (corpus.root / name).unlink()
                del texts[name]
                changed.discard(name)
            else:
                texts[name] = "".join(rng.choices("abc", k=rng.randrange(1, 80))) * rng.choice([1, 1, 3])
                corpus.write(name, texts[name])
                changed.add(name)
        index, most, before = rng.choice([index, corpus.open()]), rng.choice([1, 3, 8, 10_000]), set(changed)
        steps = index.update()
        is_whole = sum(1 for _ in zip(range(most), steps, strict=False)) < most
        steps.close()
        assert {*read} <= before
        assert {path.suffix for path in corpus.home.rglob("*") if path.is_file()} <= {"", ".segment"}
        found = index if is_whole else corpus.open()
        survey = exhaust(found.survey())
        held = {name for segment in found.segments for name in segment.kept}
        changed -= held
        sizes = [path.stat().st_size for path in corpus.root.iterdir()]
        assert (survey.n_files, survey.n_bytes, survey.n_new) == (len(sizes), sum(sizes), len(changed))
        if is_whole:
            assert not changed
            assert len(corpus.files) == len(found.segments) <= module.MOST_SEGMENTS
            assert found.n_tokens * (1 - module.DEAD_SHARE) <= sum(map(len, texts.values()))
        n_whole, n_broken = n_whole + is_whole, n_broken + (not is_whole)
        for source in rng.choices(list(texts.values()) or ["a"], k=5):
            end = rng.randrange(len(source) + 1)
            text = rng.choice(["", "cab"]) + source[max(0, end - rng.randrange(60)) : end]
            length, follows = brute([texts[name] for name in held & texts.keys()], text)
            match = found.match(tokens_of(text))
            best = found.continuation(match)
            some_is_gone = found.n_tokens > sum(segment.n_kept for segment in found.segments)
            if best is None and some_is_gone:
                continue  # a longer match in what is gone hides it until that is written anew
            assert (match.length, best is None) == (length, not follows)
            if best is not None:
                assert (best.times, best.total) == (max(follows.values()), follows.total())
                further = found.continuation(found.step(match, best.token))
                again = found.continuation(found.match(tokens_of(text + chr(best.token))))
                assert (further or (0, 0, 0))[1:3] == (again or (0, 0, 0))[1:3] or some_is_gone or length >= DEPTH
            n_compared, n_long = n_compared + 1, n_long + (length >= DEPTH)
        read.clear()
    assert min(n_whole, n_broken, n_compared / 10, n_long) > 30


def test_what_is_gone_is_work(corpus: Corpus) -> None:
    for name in ("a.txt", "b.txt"):
        corpus.write(name, "something that is there for a while")
    index = corpus.index()
    assert index.idle_work() is None
    (corpus.root / "a.txt").unlink()
    assert exhaust(index.survey()).n_new == 0
    assert index.idle_work() is not None


@pytest.mark.parametrize("damage", ["cut", "header", "magic", "empty"])
def test_a_damaged_index_is_built_anew(corpus: Corpus, damage: str) -> None:
    corpus.write("a.txt", "the cat sat on the mat. " * 30)
    corpus.index()
    (path,) = corpus.files
    if os.name == "posix":  # it is readable by this user alone
        assert (path.stat().st_mode | path.parent.stat().st_mode) & 0o077 == 0
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-8],
            "header": content[:40] + b"\xff\xff" + content[42:],
            "magic": b"another file" + content,
            "empty": b"",
        }[damage]
    )
    index = corpus.open()
    assert exhaust(index.survey()).n_new == 1
    exhaust(index.update())
    assert following(index, "the cat sat").startswith(" on the mat.")
    assert len(corpus.files) == 1


def test_places_of_a_damaged_order_break_nothing(corpus: Corpus) -> None:
    corpus.write("a.txt", "ab" * 1000)
    corpus.index()
    (path,) = corpus.files
    content, rng = bytearray(path.read_bytes()), random.Random(0)
    for place in rng.sample(range(2000), 100):
        content[len(content) - 4 * place - 4 : len(content) - 4 * place] = b"\xff\xff\xff\x7f"
    path.write_bytes(content)
    index = corpus.open()
    exhaust(index.survey())
    tokens = {token for n in range(1, 60) for token in index.match(tokens_of("ab" * n)).following}
    assert {ord("a"), 0} <= tokens  # outside of the file there are zeros


def test_two_processes_do_not_build_at_once(corpus: Corpus) -> None:
    corpus.write("a.txt", "the cat sat on the mat")
    index = corpus.open()
    index.folder.mkdir(parents=True)
    with FileLock(index.folder / "lock"):
        other = corpus.open()
        exhaust(other.update())
        assert not other.segments
    exhaust(other.update())
    assert following(other, "the cat") == " sat on the mat"
    exhaust(index.survey())
    assert following(index, "the cat") == " sat on the mat"  # what the other one built


def test_too_much_is_refused_before_anything_is_read(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.write("a.txt", "too much " * 20)
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    with pytest.raises(UsageError, match=r"has .* GB of text in 1 files; at most .*: name folders in it"):
        exhaust(corpus.open().survey())
    monkeypatch.undo()
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(UsageError, match=r"cannot index .*there is less on the disk"):
        exhaust(corpus.open().update())


ANYTHING = Proposer(SamplingParams(), Noise(0))
ENDLESS = SamplingParams(max_tokens=60, ignore_eos=True)


# The drafter, and its rank beside n-grams.


def drafter_of(corpus: Corpus, **texts: str) -> CorpusDrafter:
    for name, text in texts.items():
        corpus.write(f"{name}.txt", text)
    return CorpusDrafter(corpus.index(), "corpus", "corpus:text")


def drafted(drafter: CorpusDrafter, text: str, n: int) -> str:
    return "".join(chr(token.id) for token in drafter.draft(tokens_of(text), Plan(n), ANYTHING))


def test_it_copies_what_follows_in_a_file(corpus: Corpus) -> None:
    drafter = drafter_of(corpus, a="the cat sat on the mat", b="a dog ran")
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


def test_it_learns_how_often_it_is_right(corpus: Corpus) -> None:
    drafter = drafter_of(corpus, a="abcdefgh" * 20)
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
def test_the_surer_of_corpus_and_ngrams_goes_first(corpus: Corpus, surer: str) -> None:
    """A longer match is right more often, wherever it is: at each place the one with more confidence drafts."""
    long, short = "one two three four five six", "five six"
    in_file, in_prompt = (long, short) if surer == "corpus" else (short, long)
    drafter = drafter_of(corpus, a=f"{in_file} A.")
    prompt = f"{in_prompt} N. {long}"
    for order in ([NgramDrafter(), drafter], [drafter, NgramDrafter()]):
        group = DrafterGroup([*order], ANYTHING)
        for each in order:
            each.begin(tokens_of(prompt))
        draft = group.draft(tokens_of(prompt), Plan(2))
        assert {token.source for token in draft} == {surer}
        assert draft.ids == tokens_of(" A" if surer == "corpus" else " N")


def test_files_are_read_while_nobody_waits(tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters that cannot be loaded keep no file of those in use from being read."""
    monkeypatch.setattr("localspec.engine.worker.on_battery", lambda: False)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.txt").write_text("some words that are there from the start")

    def change(pair: Pair) -> None:
        pair.set_draft([f"corpus:{folder}"], lambda what, fraction: None)
        with pytest.raises(LocalspecError):
            pair.set_draft([str(tmp_path / "missing.gguf")], lambda what, fraction: None)

    with LLM(tiny.quick.target, None, draft_length=4, backend="reference", n_ctx=256) as llm:
        llm.run(change)
        assert any("1 files" in line and "in idle time" in line for line in llm.warnings)
        assert llm.wait_idle(60)
        index = llm.run(lambda pair: pair.state.free[0].index)  # type: ignore[attr-defined]
        n_before = index.n_tokens
        assert n_before > 0
        assert any(line.endswith("tokens are indexed") for line in llm.warnings)
        (folder / "b.txt").write_text("and others that came later")
        index._due = 0.0  # some time later
        llm.generate("la", SamplingParams(max_tokens=2))
        deadline = time.monotonic() + 60
        while index.n_tokens == n_before and time.monotonic() < deadline:
            llm.wait_idle(1)
        assert index.n_tokens > n_before
        assert llm.wait_idle(60)
        assert sum(line.endswith("tokens are indexed") for line in llm.warnings) == 1  # the first time


def test_saved_chats_and_conversations_of_the_page_are_a_corpus_if_one_says_so(
    tiny: TinyFiles, measured_home: Path
) -> None:
    options, home = {"draft_length": 4, "backend": "reference", "n_ctx": 512, "idle": False}, measured_home
    with LLM(tiny.quick.target, None, **options) as llm:
        saved, page = llm.session(params=ENDLESS), llm.session(params=ENDLESS)
        answers = [saved.chat("la la la"), page.chat("the quick")]
        saved.save(home / "a.chat")
        (home / "b.chat").write_bytes((home / "a.chat").read_bytes()[:-9])  # damaged
    files = [{"name": "a.py", "text": "an area\n", "edit": True}]
    messages = [{**message, "files": files} if message["role"] == "user" else message for message in page.messages]
    store = ConversationStore(home / "conversations")
    name = store.create({"title": "la", "system": "", "settings": {}, "messages": messages})["id"]
    for other, text in (("0", "{"), ("1", '{"messages": 3}'), ("2", "[]"), ("notes", '{"messages": []}')):
        (home / "conversations" / f"{other * 16 if other.isdigit() else other}.json").write_text(text)
    assert said_in(home / "conversations" / f"{name}.json") == ["the quick", answers[1].text, "an area\n"]
    assert said_in(home / "conversations" / f"{'1' * 16}.json") == []
    with LLM(tiny.quick.target, "corpus:chats", **options) as llm:
        for question, answer in zip(("la la la", "the quick"), answers, strict=True):
            reply = llm.session(params=ENDLESS).chat(question)
            assert reply.token_ids == answer.token_ids
            assert reply.stats["by_source"]["corpus"]["num_accepted_tokens"] > 0


def test_what_makes_no_sense_is_refused(tiny: TinyFiles, tmp_path: Path) -> None:
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


# Which files of a folder are text that may be read.


def readable(path: Path) -> dict[str, str]:
    """Name -> text of what a corpus of a path is made of."""
    source = PathSource(path)
    texts = {file.name: source.text(file.name) for file in exhaust(source.files())}
    return {name: text for name, text in texts.items() if text is not None}


def test_the_text_of_a_folder(corpus: Corpus) -> None:
    """Nothing hidden, large or binary; a pipe is not waited for."""
    root = corpus.root
    corpus.write("a.py", "a = 1\n")
    corpus.write("deep/er/b.txt", "Grüße\n")
    corpus.write("bom.txt", b"\xef\xbb\xbftext")
    corpus.write("latin.txt", b"Gr\xfc\xdfe")
    corpus.write("picture.png", b"\x89PNG\0\0")
    corpus.write("late.bin", b"x" * 10_000 + b"\0")
    for name in ("empty", ".env", ".git/config", "large.log"):
        corpus.write(name, "SECRET=1" * name.startswith("."))
    os.truncate(root / "large.log", MOST_FILE_BYTES + 1)
    if hasattr(os, "mkfifo"):
        os.mkfifo(root / "pipe.txt")
        assert PathSource(root).text("pipe.txt") is None
    assert readable(root) == {"a.py": "a = 1\n", "deep/er/b.txt": "Grüße\n", "bom.txt": "text"}
    assert readable(root / "a.py") == {"a.py": "a = 1\n"}
    source = PathSource(root)
    root.rename(root.with_name("gone"))
    with pytest.raises(OSError):  # noqa: PT011 - of whatever kind: one that vanishes is not empty
        exhaust(source.files())


def test_what_git_ignores_is_not_read(corpus: Corpus) -> None:
    """Rules of the folder, of those within, of the repository around it and its own; the innermost decides."""
    corpus.write(".git/info/exclude", "private.txt\n")
    corpus.write(".gitignore", "*.log\nbuild/\n!\n[\n/src/secret.txt\n")
    corpus.write("src/.gitignore", "!keep.log\n*.tmp\n")
    wanted = {"keep.log", "build.txt", "deep/secret.txt"}
    for name in (*wanted, "../x.log", "other.log", "a.tmp", "secret.txt", "private.txt", "build/out.txt"):
        corpus.write(f"src/{name}", "text")
    assert set(readable(corpus.root / "src")) == wanted
    assert set(readable(corpus.root)) == {f"src/{name}" for name in wanted}


def test_no_link_is_followed(corpus: Corpus) -> None:
    root, secret, alias = corpus.root, corpus.root.parent / "outside" / "secret.txt", corpus.root.with_name("alias")
    corpus.write("../outside/secret.txt", "no")
    corpus.write("a.txt", "yes")
    try:
        (root / "link.txt").symlink_to(secret)
        (root / "folder").symlink_to(secret.parent)
        alias.symlink_to(root)
    except OSError:
        pytest.skip("no links here")
    assert readable(root) == readable(alias) == {"a.txt": "yes"}  # the folder that is named may be a link
    source = PathSource(root)
    (root / "a.txt").unlink()
    (root / "a.txt").symlink_to(secret)
    if hasattr(os, "O_NOFOLLOW"):
        assert source.text("a.txt") is None  # it was a file when it was found
