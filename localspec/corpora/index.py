"""The index of a corpus: its segments, kept in step with its files, and what follows the end of a text in them."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import numpy as np
from filelock import FileLock, Timeout

from localspec.corpora.segment import BREAK, DamagedSegment, Segment, Tokens, backwards, write_segment
from localspec.corpora.text_files import TextFile, TextSource
from localspec.errors import UsageError
from localspec.system.files import private_folder, write_atomically
from localspec.system.steps import Steps

MOST_BYTES = 2 << 30
"""Of text in a corpus: indexed it takes about twice as much on disk, and hours of one core: 2.8 million tokens, 3 to 4
bytes each, took 62 s on a busy machine (``benchmarks/RESULTS.md``)."""

MOST_FILES = 500_000

BATCH = 4 << 20
"""Tokens that are sorted and can be used together: ten to twenty megabytes of text, and 100 MB of memory meanwhile."""

MOST_SEGMENTS = 4
"""Each is searched apart, in some 10 µs; beyond so many the smallest are merged."""

DEAD_SHARE = 0.25
"""Of a segment's tokens, how many may be of files that changed before it is written anew without them."""

PIECE = 1 << 15
"""Characters that are tokenised in a step, up to the end of a line: about 20 ms."""

MOST_PLACES = 16
"""Places that are asked what follows them."""

BYTES_PER_BYTE = 3.0
"""Of an index for a byte of text, at most: 8 bytes a token, and 3 to 4 bytes of text in one (Qwen2.5, code)."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a corpus holds, and what of it is still to be read.

    Attributes:
        n_files, n_bytes: of text files, as far as names and sizes tell.
        n_new, new_bytes: those of them that are new or have changed.
    """

    n_files: int
    n_bytes: int
    n_new: int
    new_bytes: int


class Match:
    """Where in a corpus stands what a text ends with.

    Attributes:
        length: tokens that agree; ``DEPTH`` may stand for more.
    """

    def __init__(self, length: int, places: list[tuple[Segment, int]], is_whole: bool) -> None:
        self.length = length
        self._is_whole = is_whole
        self._next: dict[int, list[tuple[Segment, int]]] = {}
        for segment, place in places:
            if (token := segment.next_token(place)) != BREAK:
                self._next.setdefault(token, []).append((segment, place - 1))

    def best(self) -> tuple[int, int, int] | None:
        """What follows most often: token, how often, of how many places; None where nothing does."""
        if not self._next:
            return None
        token = max(self._next, key=lambda each: len(self._next[each]))
        return token, len(self._next[token]), sum(map(len, self._next.values()))

    def then(self, token: int) -> Match | None:
        """The match one token on; None where only a search can tell."""
        places = self._next.get(token)
        return Match(self.length + 1, places, True) if places and self._is_whole else None


class CorpusIndex:
    """The index of one source for one tokenizer. One thread uses it; other processes may use the same folder.

    Args:
        source: the files.
        folder: of all indices; each has one of its own in there.
        vocabulary: what tells tokenizers apart.
        tokenize: text -> token ids.

    Attributes:
        segments: what can be searched now.
        seen: when the files were last looked at, on the monotonic clock [s].
        done: of what ``update`` reads, how much it has read (0 to 1).
        is_current: whether ``survey`` found nothing to update; ``is_updating``: whether that was begun;
            ``was_updated``: whether it came to an end.
    """

    def __init__(
        self, source: TextSource, folder: Path, vocabulary: str, tokenize: Callable[[str], Sequence[int]]
    ) -> None:
        self.source = source
        self.folder = folder / hashlib.sha256(f"{vocabulary} {source.key}".encode()).hexdigest()[:20]
        self.segments: list[Segment] = []
        self.seen = float("-inf")
        self.done = 0.0
        self.is_current = self.is_updating = self.was_updated = False
        self._tokenize = tokenize
        self._files: dict[str, TextFile] = {}

    @property
    def n_tokens(self) -> int:
        """Tokens that are searched, those of files that changed meanwhile included."""
        return sum(segment.n_tokens for segment in self.segments)

    @property
    def size_bytes(self) -> int:
        """On disk."""
        return sum(segment.size_bytes for segment in self.segments)

    # -- searching -------------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest match of the end of a text: two binary searches, and two more where it is."""
        text = backwards(tokens)
        lengths = [segment.longest(text) for segment in self.segments] if text else []
        length = max(lengths, default=0)
        if not length:
            return Match(0, [], False)
        places, is_whole = list[tuple[Segment, int]](), True
        for segment, n in zip(self.segments, lengths, strict=True):
            if n == length:
                found, are_all = segment.places(text[: length * 4], MOST_PLACES)
                places += [(segment, place) for place in found]
                is_whole = is_whole and are_all
        return Match(length, places, is_whole)

    # -- keeping in step -------------------------------------------------------------------------------------------

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
        self.is_current = not new and sum(len(segment.files) for segment in self.segments) == len(self._files)
        sizes = (sum(file.size for file in files) for files in (self._files.values(), new))
        return Survey(len(self._files), next(sizes), len(new), next(sizes))

    def _look(self) -> Steps[None]:
        found = yield from self.source.files()
        self.seen = time.monotonic()
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
            self.is_updating, self.was_updated, self.seen = False, True, time.monotonic()

    def _open(self, *, clean: bool = False) -> None:
        """Take up the segments there are, the newest version of every file first.

        Args:
            clean: delete what is damaged, or holds no file as it is now; only with the lock held.
        """
        known = {segment.path: segment for segment in self.segments}
        self.segments = []
        for path in sorted(self.folder.glob("*.segment"), reverse=True):
            try:
                self.segments.append(known.get(path) or Segment(path))
            except DamagedSegment:
                if clean:
                    self._delete(path)
            except OSError:
                continue
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
            self.done = n_read / n_bytes
            text = self.source.text(file.name)
            yield
            tokens = yield from self._tokens(text or "")
            batch.append((file, tokens[::-1]))
            if sum(len(each) for _, each in batch) >= BATCH:
                yield from self._write(batch)
                batch = []
        if batch:
            yield from self._write(batch)

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
