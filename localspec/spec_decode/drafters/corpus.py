"""Drafts copied from a person's own files: the index of a corpus, kept in step with its files, and the drafter."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import stat
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from localspec.backends.base import Context
from localspec.errors import UsageError
from localspec.spec_decode.drafters.base import Drafter, DrafterInfo
from localspec.spec_decode.drafters.ngram import Copy, CopyingDrafter
from localspec.system.files import private_folder, write_atomically
from localspec.system.steps import Steps

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

# Which files of a folder are text that may be read, and their text.

MOST_FILE_BYTES = 16 << 20  # a larger file in a folder is data or a log; one that is named itself is read
DEEPEST = 100  # folders within folders that are gone into
SCAN_STEP = 200  # entries of folders that are looked at in a step: some milliseconds
_PEEK = 8192
# What Windows calls hidden, and links of its own kinds.
_NOT_OURS = getattr(stat, "FILE_ATTRIBUTE_HIDDEN", 2) | getattr(stat, "FILE_ATTRIBUTE_REPARSE_POINT", 1024)


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file as it was found; ``name`` is its path within the source, with ``/``."""

    name: str
    size: int
    mtime_ns: int


class TextSource(ABC):
    """What a corpus is made of; ``key`` tells it from others, across runs."""

    key: str

    @abstractmethod
    def files(self) -> Steps[list[TextFile]]:
        """Its files as they are now; an ``OSError`` where they cannot be looked at."""

    @abstractmethod
    def text(self, name: str) -> str | None:
        """The text of a file; None if it is not a text file or cannot be read."""


class PathSource(TextSource):
    """A file, or the text files of a folder: nothing hidden, binary, ignored by Git's rules or behind a link. A
    ``UsageError`` where there is no such thing."""

    def __init__(self, path: Path) -> None:
        try:
            self.root = path.expanduser().resolve(strict=True)
            self._is_file = self.root.is_file()
            if not self._is_file:
                os.scandir(self.root).close()
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"corpus {path}: {getattr(error, 'strerror', None) or 'no such path'}") from None
        self.key = str(self.root)

    def files(self) -> Steps[list[TextFile]]:
        if self._is_file:
            found = self.root.stat()
            return [TextFile(self.root.name, found.st_size, found.st_mtime_ns)]
        files: list[TextFile] = []
        for n, file in enumerate(_walk(self.root, "", _rules_above(self.root)), 1):
            files += [] if file is None else [file]
            if n % SCAN_STEP == 0:
                yield
        return files

    def text(self, name: str) -> str | None:
        most = None if self._is_file else MOST_FILE_BYTES
        return read_text(self.root if self._is_file else self.root / name, most)


def read_text(path: Path, most_bytes: int | None) -> str | None:
    """The text of a regular file in UTF-8 that is no link, and no larger; None for anything else."""
    try:
        # What became a link or a pipe since it was found must neither be followed nor waited for.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or (most_bytes is not None and found.st_size > most_bytes):
                return None
            start = file.read(_PEEK)
            if b"\0" in start:
                return None
            rest = file.read() if most_bytes is None else file.read(most_bytes)
            text = (start + rest).decode("utf-8-sig")
    except (OSError, ValueError):
        return None
    return None if "\0" in text else text


# -- what a folder holds -----------------------------------------------------------------------------------------------

# Rules of ``.gitignore`` files and the folders that they hold for, the innermost last.
_Rules = tuple[tuple[Path, "GitIgnoreSpec"], ...]


def _walk(folder: Path, name: str, rules: _Rules) -> Iterator[TextFile | None]:
    """The text files under a folder; None for every other entry, so that the time of it can be shared out."""
    if name.count("/") >= DEEPEST:
        return
    rules = (*rules, *_rules_of(folder, ".gitignore"))
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # gone meanwhile, or not ours to read
        if not name:  # a disk that is not there must not look like an empty folder
            raise
        return
    for entry in entries:
        yield None
        try:
            entry.name.encode()
            found = entry.stat(follow_symlinks=False)
        except (OSError, ValueError):
            continue
        path, inner = folder / entry.name, f"{name}/{entry.name}" if name else entry.name
        is_folder = stat.S_ISDIR(found.st_mode)
        if entry.name.startswith(".") or getattr(found, "st_file_attributes", 0) & _NOT_OURS:
            continue
        if not (is_folder or (stat.S_ISREG(found.st_mode) and 0 < found.st_size <= MOST_FILE_BYTES)):
            continue
        verdicts = (
            spec.check_file(path.relative_to(above).as_posix() + "/" * is_folder).include
            for above, spec in reversed(rules)
        )
        if next((is_ignored for is_ignored in verdicts if is_ignored is not None), False):
            continue
        if is_folder:
            yield from _walk(path, inner, rules)
        else:
            yield TextFile(inner, found.st_size, found.st_mtime_ns)


def _rules_of(folder: Path, name: str) -> _Rules:
    """The rules in a file of this name for a folder; a line that is none is left out, as Git does."""
    from pathspec import GitIgnoreSpec

    text, lines = read_text(folder / name, 1 << 20), []
    for line in (text or "").splitlines():
        with suppress(ValueError):
            GitIgnoreSpec.from_lines([line])
            lines.append(line)
    return ((folder, GitIgnoreSpec.from_lines(lines)),) if lines else ()


def _rules_above(folder: Path) -> _Rules:
    """The rules of the repository that a folder lies in, down to the folder above it, and the repository's own."""
    above = [folder, *folder.parents]
    for n, each in enumerate(above):
        if (each / ".git").exists():
            own = _rules_of(each, ".git/info/exclude")
            return sum((_rules_of(parent, ".gitignore") for parent in reversed(above[1 : n + 1])), own)
    return ()


# A part of a corpus on disk: tokens, and their places in the order of the texts that end there.
#
# The texts are kept backwards, so that what ends like a text *begins* like it backwards, and all places of
# it stand together in the suffix array (Manber and Myers 1990): one binary search finds the longest match, two more
# how often it occurs. Only ``DEPTH`` tokens are compared, so sorting is bounded, and what a longer match would add is
# little.

MAGIC = b"localspec corpus 1\n"

DEPTH = 32  # tokens of the text's end that are compared: half as much again as n-grams tell apart (21)
WIDTH = 4  # bytes of a token, the most significant first: then bytes compare as tokens do
BREAK = 0xFFFFFFFF  # stands before and after the tokens of a file; no vocabulary has such a token
CHUNK = 1 << 24  # tokens that are counted together
MOST_VOCABULARY = 1 << 20  # more tokens than any vocabulary has
BUCKET = 1 << 18  # places that are sorted in a step (a quarter of a second), unless all are over 64 times as many

Tokens = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file in a segment, as it was when it was read; ``start`` is where its tokens begin, backwards."""

    file: TextFile
    start: int
    n_tokens: int


class Segment:
    """An immutable segment, mapped into memory.

    Raises:
        KeyError, TypeError, ValueError: the file is no whole segment.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.readline() != MAGIC:
                raise ValueError("it is no segment")
            header = json.loads(file.readline())
            self._offset = offset = file.tell()
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        rows = [(TextFile(*row[:3]), *row[3:]) for row in header["files"]]
        self.files = {file.name: IndexedFile(file, start, n) for file, start, n in rows}
        n, self.n_tokens = int(header["n"]), int(header["n_tokens"])
        if len(self._map) != offset + WIDTH * (n + self.n_tokens):
            raise ValueError("it is cut short")
        self._order = memoryview(self._map)[offset + WIDTH * n :].cast("I")
        self.tokens: Tokens = np.frombuffer(self._map, ">u4", n, offset)  # [n], with BREAK around every file
        self.keep(list(self.files))

    def _beginning(self, n_bytes: int) -> Callable[[int], bytes]:
        """What gives the first bytes of a place: the inner loop of a search."""
        mapped, offset = self._map, self._offset

        def at(place: int) -> bytes:
            start = offset + WIDTH * place
            return mapped[start : start + n_bytes]

        return at

    def keep(self, names: Collection[str]) -> None:
        """Pass over all files but these from now on; ``n_kept`` are their tokens."""
        spans = sorted((self.files[name].start, self.files[name].n_tokens) for name in names)
        self._spans = [(start, start + n) for start, n in spans] if len(spans) < len(self.files) else None
        self.kept, self.n_kept = list(names), sum(n for _, n in spans)

    def longest(self, text: bytes) -> int:
        """How many tokens the longest match of a text has, of which ``text`` are the last, as the file has tokens: the
        last first."""
        beginning = self._beginning(len(text))
        i = bisect_left(self._order, text, key=beginning)
        near = (beginning(self._order[j]) for j in (i - 1, i) if 0 <= j < self.n_tokens)
        return max((_n_shared(text, other) for other in near), default=0)

    def places(self, text: bytes, most: int) -> tuple[list[int], bool]:
        """Where a text ends in the segment, in files that are kept: about so many places, spread evenly over all; and
        whether these are all."""
        beginning = self._beginning(len(text))
        first = bisect_left(self._order, text, key=beginning)
        last = bisect_right(self._order, text, lo=first, key=beginning)
        step = max(1, -(-(last - first) // most))
        found = self._order[first:last:step].tolist()
        if self._spans is not None:
            spans = ((place, bisect_right(self._spans, (place, BREAK)) - 1) for place in found)
            found = [place for place, i in spans if i >= 0 and place < self._spans[i][1]]
        return found, step == 1

    def next_token(self, place: int) -> int:
        """The token that follows a place; ``BREAK`` at the end of a file."""
        start = self._offset + WIDTH * (place - 1)
        return int.from_bytes(self._map[start : start + WIDTH], "big")  # of a damaged order a place may lie outside

    def tokens_of(self, name: str) -> Tokens:
        """A file's tokens, backwards [n]."""
        each = self.files[name]
        return self.tokens[each.start : each.start + each.n_tokens]


def _n_shared(text: bytes, other: bytes) -> int:
    """Tokens that two texts of the same length begin with."""
    differing = int.from_bytes(text, "big") ^ int.from_bytes(other.ljust(len(text), b"\xff"), "big")
    return (8 * len(text) - differing.bit_length()) // (8 * WIDTH)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_segment(file: BinaryIO, path: Path, texts: Sequence[tuple[TextFile, Tokens]]) -> Steps[None]:
    """Sort the tokens of files, and write them, a bucket a step; they are mapped from ``path``, the file's own, while
    they are sorted. ``texts`` are files, with their tokens backwards [n]."""
    rows: list[list[Any]] = []
    at = 1
    for each, tokens in texts:
        rows.append([each.name, each.size, each.mtime_ns, at, len(tokens)])
        at += len(tokens) + 1
    n_tokens = at - 1 - len(texts)
    header = MAGIC + json.dumps({"n": at, "n_tokens": n_tokens, "files": rows}).encode()
    header += b" " * (-(len(header) + 1) % 8) + b"\n"
    edge = np.full(1, BREAK, ">u4").tobytes()
    file.write(header + edge)
    for _, tokens in texts:
        file.write(tokens.astype(">u4").tobytes() + edge)
    file.flush()
    mapped: Tokens = np.memmap(path, ">u4", "r", len(header), (at,))
    yield
    chunks = [(start, mapped[start : start + CHUNK]) for start in range(0, at, CHUNK)]
    counts = np.zeros(MOST_VOCABULARY, dtype=np.int64)
    for _, chunk in chunks:
        counts += np.bincount(chunk[chunk != BREAK], minlength=MOST_VOCABULARY)
    for low, high in _buckets(counts, max(BUCKET, n_tokens // 64)):
        places = [np.flatnonzero((chunk >= low) & (chunk < high)) + start for start, chunk in chunks]
        file.write(_sorted(mapped, np.concatenate(places)).astype(np.uint32).tobytes())
        yield


def _buckets(counts: Places, size: int) -> list[tuple[int, int]]:
    """Ranges of about ``size`` tokens."""
    ends = np.searchsorted(np.cumsum(counts), np.arange(0, counts.sum(), size) + size, side="left") + 1
    edges = [0, *np.unique(ends).clip(max=len(counts)).tolist(), len(counts)]
    return [(low, high) for low, high in pairwise(edges) if counts[low:high].any()]


def _sorted(tokens: Tokens, places: Places) -> Places:
    """Places by the ``DEPTH`` tokens that begin there: two more at a time, of those that are still alike."""
    order, last = places.copy(), len(tokens) - 1
    alike, group = np.arange(len(order)), np.zeros(len(order), dtype=np.int64)
    for depth in range(0, DEPTH, 2):
        if not len(alike):
            break
        at = order[alike] + depth
        pair = tokens[np.minimum(at, last)].astype(np.uint64) << np.uint64(32)
        pair |= tokens[np.minimum(at + 1, last)].astype(np.uint64)
        by = np.lexsort((pair, group))
        order[alike], pair = order[alike][by], pair[by]  # a group stays where it is
        is_new = np.ones(len(by), dtype=bool)
        is_new[1:] = (group[1:] != group[:-1]) | (pair[1:] != pair[:-1])
        starts = np.flatnonzero(is_new)
        sizes = np.diff(np.append(starts, len(by)))
        stay = np.repeat(sizes > 1, sizes)
        group, alike = np.repeat(starts, sizes)[stay], alike[stay]
    return order


# Of text in a corpus: indexed it takes about twice as much on disk, and hours of one core (``benchmarks/RESULTS.md``).
MOST_BYTES = 2 << 30
MOST_FILES = 500_000

LOOK_AGAIN_S = 30.0  # how soon after a look at the files there is another: 10,000 files take a tenth of a second
BATCH = 4 << 20  # tokens that are sorted together: ten to twenty megabytes of text, and 100 MB of memory meanwhile
MOST_SEGMENTS = 4  # each is searched apart, in some 10 µs; beyond so many the smallest are merged
DEAD_SHARE = 0.25  # of a segment's tokens, how many may be of files that changed before it is written anew
PIECE = 1 << 15  # characters that are tokenised in a step, up to the end of a line: about 20 ms
MOST_PLACES = 16  # places that are asked what follows them
BYTES_PER_BYTE = 3.0  # of an index for a byte of text, at most: 8 bytes a token of 3 to 4 bytes (Qwen2.5, code)


@dataclass(frozen=True, slots=True)
class Survey:
    """What a corpus holds, as far as names and sizes tell, and what of it is new or has changed."""

    n_files: int
    n_bytes: int
    n_new: int
    new_bytes: int


class Match:
    """Where in a corpus stands what a text ends with.

    ``text`` are its last tokens, as many as are compared, of which ``length`` agree (``DEPTH`` may stand for more);
    ``following`` the places one token on, by token, all of them where ``is_whole``.
    """

    def __init__(self, text: list[int], length: int, places: list[tuple[Segment, int]], is_whole: bool) -> None:
        self.text, self.length, self.is_whole = text, length, is_whole
        self.following: dict[int, list[tuple[Segment, int]]] = {}
        for segment, place in places:
            if (token := segment.next_token(place)) != BREAK:
                self.following.setdefault(token, []).append((segment, place - 1))


class CorpusIndex:
    """The index of one source for one tokenizer. One thread uses it; other processes may use the same folder.

    Args:
        folder: of all indices; each has one of its own in there.
        vocabulary: what tells tokenizers apart.
    """

    def __init__(
        self, source: TextSource, folder: Path, vocabulary: str, tokenize: Callable[[str], Sequence[int]]
    ) -> None:
        self.source = source
        self.folder = folder / hashlib.sha256(f"{vocabulary} {source.key}".encode()).hexdigest()[:20]
        self.segments: list[Segment] = []  # what can be searched now
        self.done = 0.0  # of what ``update`` reads, the share that it has read
        self._due = 0.0  # when to look at the files again, on the monotonic clock [s]
        self._tokenize = tokenize
        self._files: dict[str, TextFile] = {}

    @property
    def n_tokens(self) -> int:
        """Tokens that are searched, those of files that changed meanwhile included."""
        return sum(segment.n_tokens for segment in self.segments)

    # -- searching -------------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest match of the end of a text: two binary searches, and two more where it is."""
        text = list(tokens[-DEPTH:])
        key = np.array(text[::-1], dtype=">u4").tobytes()
        lengths = [segment.longest(key) for segment in self.segments] if text else []
        length = max(lengths, default=0)
        if not length:
            return Match(text, 0, [], False)
        places, is_whole = list[tuple[Segment, int]](), True
        for segment, n in zip(self.segments, lengths, strict=True):
            if n == length:
                found, are_all = segment.places(key[: length * WIDTH], MOST_PLACES)
                places += [(segment, place) for place in found]
                is_whole = is_whole and are_all
        return Match(text, length, places, is_whole)

    def step(self, place: Match, token: int) -> Match:
        """The match one token on; a new search where others may have been left out."""
        text, places = [*place.text[1 - DEPTH :], token], place.following.get(token)
        if places and place.is_whole:
            return Match(text, place.length + 1, places, True)
        return self.match(text)

    def continuation(self, place: Match) -> Copy | None:
        """What follows most often; None where nothing does."""
        if not place.following:
            return None
        token = max(place.following, key=lambda each: len(place.following[each]))
        return Copy(token, len(place.following[token]), sum(map(len, place.following.values())), place.length)

    # -- keeping in step -------------------------------------------------------------------------------------------

    def idle_work(self) -> Steps[None] | None:
        """What is to be done while there is no request: an ``update``, where the files were not looked at just now."""
        if time.monotonic() < self._due:
            return None
        self._due = math.inf  # until that is done
        return self.update()

    def survey(self) -> Steps[Survey]:
        """Look at the files, and open what is indexed of them.

        Raises:
            UsageError: there is more than an index may have.
        """
        try:
            yield from self._look()
        except OSError as error:
            raise UsageError(f"cannot look at {self.source.key}: {error.strerror or error}") from None
        self._open()
        new = self._new()
        is_current = not new and sum(len(segment.files) for segment in self.segments) == len(self._files)
        self._due = time.monotonic() + LOOK_AGAIN_S if is_current else 0.0
        n_bytes, new_bytes = (sum(file.size for file in files) for files in (self._files.values(), new))
        return Survey(len(self._files), n_bytes, len(new), new_bytes)

    def _look(self) -> Steps[None]:
        found = yield from self.source.files()
        n_bytes = sum(file.size for file in found)
        if n_bytes > MOST_BYTES or len(found) > MOST_FILES:
            raise UsageError(
                f"corpus {self.source.key} has {n_bytes / 1e9:.1f} GB of text in {len(found):,} files; "
                f"at most {MOST_BYTES / 1e9:.1f} GB in {MOST_FILES:,} can be indexed: name folders in it"
            )
        self._files = {file.name: file for file in found}

    def update(self) -> Steps[None]:
        """Index what is new, drop what is gone. What is broken off goes on from its last batch.

        Where another process is at it already, nothing is done.

        Raises:
            UsageError: there is more than an index may have, or the disk has no room or cannot be written.
        """
        try:
            private_folder(self.folder)
            with FileLock(self.folder / "lock", timeout=0):
                yield from self._look()
                self._open(clean=True)  # with what another process did meanwhile
                yield from self._read_new()
                yield from self._tidy()
        except Timeout:
            return
        except OSError as error:
            raise UsageError(f"cannot index {self.source.key}: {error.strerror or error}") from None
        finally:
            self._due = time.monotonic() + LOOK_AGAIN_S

    def _open(self, *, clean: bool = False) -> None:
        """Take up the segments there are, the newest version of every file first; ``clean`` deletes what is damaged or
        holds no file as it is now, with the lock held."""
        known = {segment.path: segment for segment in self.segments}
        self.segments = []
        for path in sorted(self.folder.glob("*.segment"), reverse=True):
            try:
                self.segments.append(known.get(path) or Segment(path))
            except OSError:
                pass
            except (KeyError, TypeError, ValueError):  # it is damaged
                if clean:
                    self._delete(path)
        taken: set[str] = set()
        for segment in list(self.segments):
            kept = [
                name for name, each in segment.files.items() if name not in taken and self._files.get(name) == each.file
            ]
            taken.update(kept)
            if not kept:
                self.segments.remove(segment)
                if clean:
                    self._delete(segment.path)
            segment.keep(kept)

    def _new(self) -> list[TextFile]:
        known = {each.file for segment in self.segments for each in segment.files.values()}
        return [file for file in self._files.values() if file not in known]

    def _read_new(self) -> Steps[None]:
        new = self._new()
        needed = BYTES_PER_BYTE * sum(file.size for file in new)
        if needed > shutil.disk_usage(self.folder).free:
            raise UsageError(
                f"cannot index {self.source.key}: that takes about {needed / 1e6:.0f} MB, "
                f"and there is less on the disk of {self.folder.parent}"
            )
        batch: list[tuple[TextFile, Tokens]] = []
        n_bytes, n_read = sum(file.size for file in new), 0
        for file in new:
            n_read += file.size
            self.done = n_read / max(1, n_bytes)
            text = self.source.text(file.name)
            yield
            tokens = yield from self._tokens(text or "")
            batch.append((file, tokens[::-1]))
            if file is new[-1] or sum(len(each) for _, each in batch) >= BATCH:
                yield from self._write(batch)
                batch = []

    def _tokens(self, text: str) -> Steps[Tokens]:
        parts = [np.empty(0, dtype=np.uint32)]
        start = 0
        while start < len(text):
            end = min(start + PIECE, len(text))
            if end < len(text):
                end = text.rfind("\n", start, end) + 1 or end
            parts.append(np.array(self._tokenize(text[start:end]), dtype=np.uint32))
            start = end
            yield
        return np.concatenate(parts)

    def _write(self, texts: list[tuple[TextFile, Tokens]]) -> Steps[None]:
        # Names sort by age, and none comes twice: one that is deleted may still be mapped elsewhere.
        path = self.folder / f"{time.time_ns():020}-{token_hex(4)}.segment"
        with write_atomically(path, private=True) as file:
            yield from write_segment(file, Path(file.name), texts)
        self._open(clean=True)

    def _tidy(self) -> Steps[None]:
        """Write anew what is mostly dead; merge the smallest segments while there are too many."""
        while True:
            worn = [segment for segment in self.segments if segment.n_kept < (1 - DEAD_SHARE) * segment.n_tokens]
            by_size = sorted(self.segments, key=lambda segment: segment.n_kept)
            several = by_size[: len(by_size) - MOST_SEGMENTS + 2] if len(by_size) > MOST_SEGMENTS else []
            old = worn or several
            if not old:
                return
            texts = [(segment.files[name].file, segment.tokens_of(name)) for segment in old for name in segment.kept]
            yield from self._write(texts)  # which leaves nothing of the old ones to keep

    @staticmethod
    def _delete(path: Path) -> None:
        with suppress(OSError):  # on Windows what is mapped stays, until it is looked at again
            path.unlink()


# -- drafting ----------------------------------------------------------------------------------------------------------


class CorpusDrafter(CopyingDrafter[Match]):
    """Copies from files that the user named (prompt-lookup decoding with a datastore: REST, He et al. 2023).

    As n-grams do for the conversation, but what one looks through is sorted on disk and mapped into memory. Of several
    places the token that follows at most of them is proposed.

    Args:
        index: of the files; clones share it.
        source, name: see ``DrafterInfo``.
    """

    def __init__(self, index: CorpusIndex, source: str, name: str) -> None:
        super().__init__(DrafterInfo(source, name, copies=True))
        self.index = self._texts = index
        self._settled = index.match([])

    def clone(self, context: Context | None) -> Drafter:
        clone = CorpusDrafter(self.index, self.info.source, self.info.name)
        clone._hits = deepcopy(self._hits)
        return clone

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        self._settled, self._n_settled = self.index.match(tokens), len(tokens)

    def _settle(self, token: int) -> Match:
        return self.index.step(self._settled, token)
