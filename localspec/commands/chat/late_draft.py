"""Head and draft model of a chat come after the prompt: the target alone, with n-grams, can answer meanwhile.

A draft model that is not on the disk is fetched first, if by the target's passes on this machine it will add something;
they are loaded between requests. Whatever is asked goes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from localspec.errors import Cancelled, Closed, line_of
from localspec.model_files.catalog import short_name
from localspec.runtime.at_hand import drafts_at_hand, heads_of
from localspec.runtime.engine_choice import draft_gain
from localspec.system.usage import BUSY

if TYPE_CHECKING:
    from localspec.llm import LLM
    from localspec.model_files.catalog import Entry

ASKED_S = (1, 2, 4, 8, 16, 32, 64)
"""How long better figures than the first are waited for, between one look and the next [s]."""

LEAVING_S = 5.0
"""How long leaving waits for downloads to end; what arrived is kept."""


class LateDraft:
    """A thread that brings head and draft model into a loaded LLM.

    Attributes:
        status: what it is doing, in a few words; empty when it is done.
        notes: lines for the person, to be shown when there is room for them.

    Args:
        llm: loaded with n-grams alone.
        missing: draft models to fetch first, where they pay.
        changed: called from the thread when ``status`` changes.
        corpora: names of corpora that draft besides.
    """

    def __init__(
        self,
        llm: LLM,
        missing: Sequence[Entry],
        changed: Callable[[], None] = lambda: None,
        corpora: Sequence[str] = (),
    ) -> None:
        self.status = "looking whether a draft model would help"
        self.notes: list[str] = []
        self.changed = changed
        self._llm, self._missing = llm, list(missing)
        self._corpora = corpora
        self._before = llm.draft_names
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="localspec draft", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give up: the person leaves, or chose a draft."""
        self._leaving.set()
        self._thread.join(LEAVING_S)

    def wait(self, timeout: float) -> bool:
        """Wait for the end of it; whether that came about."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            first = self._llm.run(lambda pair: next(heads_of(pair.target), None)) if self._missing else None
            if first is not None:
                self._load("the head")
            if not self._missing or self._would_gain():
                for entry in self._missing:
                    self._fetch(entry)
                self._load("the draft model")
        except (Cancelled, Closed):
            pass
        except Exception as error:  # whatever it is, the chat goes on
            self.notes.append(f"going on without a draft model: {line_of(error)}")
        self._say("")

    def _would_gain(self) -> bool:
        """Whether the draft model would make answers faster here; if not, that is said."""
        self._say("looking whether a draft model would help")
        for seconds in ASKED_S:  # the first figures are rough, and better ones come while nothing is asked
            if not self._llm.run(lambda pair: pair.times.quick) or self._leaving.wait(seconds):
                break
        gain, times = self._llm.run(lambda pair: (draft_gain(pair.times), pair.times))
        if gain > 1.0:
            return True
        names, size = " ".join(entry.name for entry in self._missing), sum(entry.bytes for entry in self._missing)
        what, pull = f"The draft model ({size / 1e9:.1f} GB)", f"To get it anyway: localspec pull {names}"
        if times.noisy:
            when = "while other programs used the CPU" if times.others_share >= BUSY else "so far"
            why = f"was not downloaded: by what was measured {when} it would not help"
            self.notes.append(f"{what} {why}. The next start looks again. {pull}")
        else:
            why = "would not make answers faster on this machine, so it was not downloaded"
            self.notes.append(f"{what} {why}. {pull}")
        return False

    def _fetch(self, entry: Entry) -> None:
        from localspec.model_files import sources

        def watch(what: str, done: int, total: int) -> None:
            if self._leaving.is_set():
                raise Cancelled(f"{what}: stopped")
            self._say(f"fetching the draft model {short_name(entry.name)}" + (f" {done / total:.0%}" if total else ""))

        sources.pull(entry, watch=watch)

    def _load(self, what: str) -> None:
        """Load what ``auto`` finds on the disk by now; ``what`` is said meanwhile."""
        self._say(f"loading {what}")
        while not self._leaving.is_set() and self._llm.draft_names == self._before:
            try:
                self._llm.set_draft(["auto", *self._corpora], gives_way=self._leaving.is_set)
                self._before = self._llm.draft_names
                return
            except Cancelled:  # something was asked: try again when it is answered
                continue

    def _say(self, status: str) -> None:
        if status != self.status:
            self.status = status
            self.changed()


def may_be_drafted_for(llm: LLM) -> bool:
    """Whether ``auto`` would load anything for the target of an LLM: a head, a layer of its own, a draft model."""
    return llm.run(lambda pair: next(drafts_at_hand(pair.target), None) is not None)
