"""The rounds of fixed requests, as JSON lines: what a change of the inside alone leaves as it is, to the bit.

    python -m tests.seeded_rounds > before.jsonl
    python -m tests.seeded_rounds > after.jsonl; diff before.jsonl after.jsonl
    python -m tests.seeded_rounds ENGINE > rounds.jsonl

Every kind of drafter of ``tests.fuzz.answers``, alone and several together, in chains, in branches and ahead, one
answer at a time and three, at fixed draft lengths: greedy and sampled, with grammars, stop strings, thinking budgets,
log-probabilities, sessions that are saved, prefixes that are shared. A line is a request: its prompt, of each round the
draft (ids, sources, probabilities), the verdict, what was emitted and shown, and the statistics without times. Fast
engines round, so there a line may differ by a near tie. Where several answers share passes, prompts are read in pieces
by measured times, so there the source of a draft may differ now and then: run it twice to see which lines do.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from localspec import Round
from tests.fuzz.answers import DRAFTS, WAYS, Case, World, case_of

N_ASKS = 8


class RecordedStream:
    """A stream of rounds that keeps them."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.rounds: list[Round] = []

    def __iter__(self) -> Iterator[Round]:
        return self

    def __next__(self) -> Round:
        self.rounds.append(next(self._stream))
        return self.rounds[-1]

    @property
    def reply(self) -> Any:
        for _ in self:
            pass
        return self._stream.reply

    def close(self) -> None:
        self._stream.close()


class RecordingWorld(World):
    """Asks as the comparison of answers does, and keeps what was asked."""

    def _sent(self, *args: Any) -> Any:
        asked = super()._sent(*args)
        asked.stream = RecordedStream(asked.stream)
        self.asked.append(asked)
        return asked

    def record(self, case: Case) -> list[dict[str, Any]]:
        """The rounds of all requests of a case, in the order in which they were asked."""
        self.asked: list[Any] = []
        self.check(case)
        return [record_of(each) for each in self.asked]


def record_of(asked: Any) -> dict[str, Any]:
    """What is the same whenever and wherever a request is answered."""
    stats = asked.stream.reply.stats.as_dict()
    counted = {
        name: value for name, value in stats.items() if not name.startswith(("seconds", "time", "tokens_per", "est"))
    }
    counted.pop("reason")
    return {
        "prompt": asked.tokens,
        "rounds": [round_of(each) for each in asked.stream.rounds],
        "finish_reason": asked.stream.reply.finish_reason,
        "thinking": asked.stream.reply.thinking,
        "stats": counted,
    }


def round_of(round_: Round) -> dict[str, Any]:
    event = round_.as_event()
    kept = {name: event[name] for name in ("index", "draft", "emitted", "text")}
    verdict = round_.verdict
    return kept | {"n_past": round_.n_past, "verdict": [verdict.n_accepted, verdict.next_token, verdict.kind]}


def cases() -> Iterator[tuple[str, Case]]:
    """Names and cases: nothing in them depends on time."""
    for drafts in DRAFTS:
        for way in (*WAYS, "several"):
            rng = random.Random(f"{drafts} {way}")
            case = case_of(rng, drafts, 3 if way == "several" else 1, "chain" if way == "several" else way, N_ASKS)
            asks = [
                replace(ask, late=False, leaves=None, length=4 if ask.length == "auto" else ask.length)
                for ask in case.asks
            ]
            seeded = [replace(ask, params=ask.params % 6) for ask in asks]  # the seventh has no seed
            yield f"{'+'.join(drafts)} {way}", replace(case, asks=tuple(seeded))


def records(engine: str, folder: Path) -> Iterator[dict[str, Any]]:
    """A record for each request."""
    world = RecordingWorld(engine, folder)
    try:
        for name, case in cases():
            for i, record in enumerate(world.record(case)):
                yield {"case": name, "ask": i} | record
    finally:
        world.close()


def main() -> None:
    engine = sys.argv[1] if len(sys.argv) > 1 else "reference"
    with tempfile.TemporaryDirectory() as folder:
        for record in records(engine, Path(folder)):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
