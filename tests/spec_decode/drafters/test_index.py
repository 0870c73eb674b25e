"""The index of a corpus: what it finds, and that it is in step with the files."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from localspec.errors import UsageError
from localspec.spec_decode.drafters import corpus as module
from localspec.spec_decode.drafters.corpus import DEPTH, CorpusIndex, PathSource, Survey
from localspec.system.steps import exhaust


def tokenize(text: str) -> list[int]:
    return [ord(char) for char in text]


class Corpus:
    """A folder with an index."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root / "text", root / "home"
        self.root.mkdir()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.write_text(text, newline="")
        if path.stat().st_mtime_ns == before:  # a coarse clock
            os.utime(path, ns=(before + 10**9, before + 10**9))

    def open(self) -> CorpusIndex:
        return CorpusIndex(PathSource(self.root), self.home, "vocabulary", tokenize)

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
    match, found = index.match(tokenize(text)), ""
    while (best := index.continuation(match)) is not None and len(found) < 60:
        found += chr(best.token)
        match = index.step(match, best.token)
    return found


def test_what_follows_the_longest_match(corpus: Corpus) -> None:
    corpus.write("a.txt", "the cat sat on the mat")
    corpus.write("b.txt", "a dog sat in the sun")
    index = corpus.index()
    assert following(index, "my cat sat") == " on the mat"
    assert following(index, "my dog sat") == " in the sun"
    match = index.match(tokenize("?the "))
    assert match.length == 4
    assert index.continuation(match) in [(ord(char), 1, 3, 4) for char in "cms"]
    for text in ("?", "", "the mat"):  # a file does not go on in the next
        assert index.continuation(index.match(tokenize(text))) is None


def brute(texts: Sequence[str], text: str) -> tuple[int, Counter[str]]:
    """Length of the longest match, up to ``DEPTH``, and what follows it how often."""
    for length in range(min(DEPTH, len(text)), 0, -1):
        end = text[-length:]
        places = [(each, i) for each in texts for i in range(len(each)) if each.startswith(end, i)]
        if places:
            return length, Counter(each[i + length] for each, i in places if i + length < len(each))
    return 0, Counter()


def test_it_finds_what_a_plain_search_finds(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """600 random texts of three letters in 12 files, in several segments, sorted in small buckets."""
    rng = random.Random(7)
    monkeypatch.setattr(module, "BATCH", 200)
    monkeypatch.setattr("localspec.spec_decode.drafters.corpus.BUCKET", 16)
    texts = ["".join(rng.choices("abc", k=rng.randrange(1, 120))) for _ in range(12)]
    texts += [texts[0] * 3, texts[1][:50]]  # long repeats, over the depth that is sorted
    for i, text in enumerate(texts):
        corpus.write(f"{i}.txt", text)
    index = corpus.index()
    assert len(index.segments) > 1
    monkeypatch.setattr(module, "MOST_PLACES", 10_000)
    n_long = 0
    for _ in range(600):
        source = rng.choice(texts)
        end = rng.randrange(len(source) + 1)
        text = rng.choice(["", "b", "cab"]) + source[max(0, end - rng.randrange(60)) : end] + rng.choice(["", "", "a"])
        length, follows = brute(texts, text)
        match = index.match(tokenize(text))
        assert match.length == length, text
        best = index.continuation(match)
        assert (best is None) == (not follows), text
        if best is not None:
            assert best.times == max(follows.values()) == follows[chr(best.token)]
            assert best.total == follows.total()
            assert match.is_whole
            further = index.continuation(index.step(match, best.token))
            again = index.continuation(index.match(tokenize(text + chr(best.token))))
            assert (further or (0, 0, 0))[1:3] == (again or (0, 0, 0))[1:3] or length >= DEPTH
        n_long += length >= DEPTH
    assert n_long > 10


def test_a_sample_of_many_places_stands_for_all(corpus: Corpus) -> None:
    corpus.write("a.txt", "ab" * 5000 + "ac" * 500)
    index = corpus.index()
    match = index.match(tokenize("?a"))
    best = index.continuation(match)
    assert best is not None
    assert (chr(best.token), best.times > 0.8 * best.total) == ("b", True)
    assert best.total <= module.MOST_PLACES
    assert not match.is_whole
    assert index.step(match, best.token).length == 2  # looked for: there may be others


def test_only_what_changed_is_read_again(corpus: Corpus) -> None:
    for i in range(20):
        corpus.write(f"{i}.txt", f"number {i} is here. " * 20)
    index = corpus.open()
    survey = exhaust(index.survey())
    assert (survey.n_files, survey.n_new, index.is_current) == (20, 20, False)
    corpus.index()
    read: list[str] = []
    index = corpus.open()
    text = index.source.text
    index.source.text = lambda name: read.append(name) or text(name)  # type: ignore[method-assign,func-returns-value]
    assert exhaust(index.survey()) == Survey(20, survey.n_bytes, 0, 0)
    assert index.is_current
    assert following(index, "number 7").startswith(" is here")
    corpus.write("7.txt", "number 7 was there")
    (corpus.root / "8.txt").unlink()
    corpus.write("new.txt", "something new")
    assert exhaust(index.survey()).n_new == 2
    assert not index.is_current
    exhaust(index.update())
    assert sorted(read) == ["7.txt", "new.txt"]
    for each in (index, corpus.open()):
        exhaust(each.survey())
        assert following(each, "number 7") == " was there"
        assert following(each, "something") == " new"
        assert "8" not in following(each, "number ")[:1]


def test_a_file_that_is_gone_is_not_copied_from(corpus: Corpus) -> None:
    corpus.write("a.txt", "my secret is red")
    corpus.write("b.txt", "another file with much more text, " * 50)
    assert following(corpus.index(), "my secret is") == " red"
    (corpus.root / "a.txt").unlink()
    index = corpus.open()
    exhaust(index.survey())
    assert "red" not in following(index, "my secret is")
    corpus.write("b.txt", "changed, so that nothing of the segment is left")
    corpus.index()
    assert all("secret" not in path.read_bytes().decode("utf-32-be", "replace") for path in corpus.files)
    assert len(corpus.files) == 1


def test_small_segments_are_merged(corpus: Corpus) -> None:
    for i in range(30):
        corpus.write(f"{i}.txt", f"file {i:02} says {i * 7919 % 1000:03}")
        index = corpus.index()
        assert len(index.segments) <= module.MOST_SEGMENTS
        assert len(corpus.files) == len(index.segments)
    assert index.n_tokens == 30 * len("file 00 says 000")
    for i in range(30):
        assert following(index, f"file {i:02} says ") == f"{i * 7919 % 1000:03}"


def test_what_is_broken_off_goes_on(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step: what was written stays, nothing half is taken for whole, nothing is left behind."""
    monkeypatch.setattr(module, "BATCH", 100)
    for i in range(8):
        corpus.write(f"{i}.txt", f"this is file {i}. " * 4)
    for n_steps in range(60):
        index = corpus.open()
        steps = index.update()
        n = sum(1 for _ in zip(range(n_steps), steps, strict=False))
        steps.close()
        assert not [path for path in corpus.home.rglob("*") if path.suffix == ".tmp"]
        again = corpus.open()
        exhaust(again.survey())
        assert again.n_tokens in range(0, 8 * 64 + 1, 64)
        if n < n_steps:
            break
    else:
        raise AssertionError("it never came to its end")
    assert again.is_current


@pytest.mark.parametrize("damage", ["cut", "header", "magic", "tokens", "empty"])
def test_a_damaged_index_is_built_anew(corpus: Corpus, damage: str) -> None:
    corpus.write("a.txt", "the cat sat on the mat. " * 30)
    corpus.index()
    (path,) = corpus.files
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(
        {
            "cut": content[:-8],
            "header": content[:40] + b"\xff\xff" + content[42:],
            "magic": b"another file" + content,
            "tokens": content[:half] + bytes(len(content) - half),
            "empty": b"",
        }[damage]
    )
    index = corpus.open()
    assert exhaust(index.survey()).n_new == 1
    exhaust(index.update())
    assert following(index, "the cat sat").startswith(" on the mat.")
    assert len(corpus.files) == 1


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


def test_what_has_no_text_is_not_read_twice(corpus: Corpus) -> None:
    (corpus.root / "picture.png").write_bytes(b"\x89PNG\0\0")
    index = corpus.index()
    assert (index.n_tokens, index.match([1, 2]).length) == (0, 0)
    assert exhaust(corpus.open().survey()).n_new == 0


def test_too_much_is_refused_before_anything_is_read(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.write("a.txt", "too much " * 20)
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    with pytest.raises(UsageError, match=r"has .* GB of text in 1 files; at most .*: name folders in it"):
        exhaust(corpus.open().survey())
    monkeypatch.undo()
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(UsageError, match=r"cannot index .*there is less on the disk"):
        exhaust(corpus.open().update())


def test_an_index_is_readable_by_this_user_alone(corpus: Corpus) -> None:
    corpus.write("a.txt", "private text")
    corpus.index()
    if os.name == "posix":
        assert corpus.files[0].stat().st_mode & 0o077 == 0
        assert corpus.files[0].parent.stat().st_mode & 0o077 == 0
