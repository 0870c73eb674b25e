"""Hundreds of mixed requests, several at a time, many left midway: nothing stays behind, and none is changed."""

from __future__ import annotations

import random
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from localspec import LLM, SamplingParams
from localspec.backends.base import Piece, shared_prefix
from localspec.engine.pair import Pair
from tests.conftest import open_backend
from tests.support import ggufs
from tests.support.gguf_vocabs import bpe_vocab
from tests.support.memory import allocated_mb, check_only_conversations_are_held, resident_mb, shared_memories
from tests.support.waiting import PATIENCE, wait_until

N_PARALLEL = 4
N_CLIENTS = 7
N_CTX = 512

WORDS = ("river", "tower", "la", "lo", "letter", "the", "winter", "engine", "return", "garden", "shadow", "in")
ENDINGS = {"whole": 10, "closed": 4, "dropped": 3, "late": 3}
"""How requests end, and how often, of 20: by themselves, closed by the caller, forgotten by the caller, which a server
does whose client has hung up, and by a deadline."""


@dataclass(frozen=True)
class Asked:
    """A request that does not depend on when it is made: a chat, a completion, or one with a long prompt."""

    question: Any
    params: SamplingParams
    options: dict[str, Any]

    @classmethod
    def nth(cls, n: int, drafters: Sequence[str], max_tokens: int) -> Asked:
        rng = random.Random(n)
        kind = rng.choice(["chat", "chat", "completion", "completion", "long"])
        text = " ".join(rng.choice(WORDS) for _ in range({"chat": 8, "completion": 12, "long": 90}[kind]))
        params = SamplingParams(
            max_tokens=rng.randint(2, max_tokens),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            seed=n,
        )
        options = {
            "drafters": rng.choice([None, None, [rng.choice(drafters)], []]),
            "draft_length": rng.choice(["auto", "auto", 0, 2, 4]),
            "conversation": rng.choice([None, None, "a", "b"]),
            "priority": rng.choice([0, 0, 1, -1]),
        }
        return cls(text if kind == "completion" else [{"role": "user", "content": text}], params, options)


@dataclass
class Mixture:
    """Clients that ask at random, all at once.

    Attributes:
        requests: what there is to ask.
        latest_s: deadlines are at most so far away.
        answers: the number of what was asked, the tokens, and whether it came to its end; dropped ones are not here.
        ended: how many, by ``finish_reason``.
    """

    llm: LLM
    requests: Sequence[Asked]
    latest_s: float
    answers: set[tuple[int, tuple[int, ...], bool]] = field(default_factory=set)
    ended: Counter[str] = field(default_factory=Counter)
    errors: list[BaseException] = field(default_factory=list)

    def run(self, seed: int, n_requests: int) -> None:
        """Until so many requests are over."""
        rngs = [random.Random(seed * N_CLIENTS + i) for i in range(N_CLIENTS)]
        turns = iter(range(n_requests))
        threads = [threading.Thread(target=self._client, args=(rng, turns)) for rng in rngs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
        assert not self.errors, self.errors
        wait_until(lambda: not self.llm.busy and not self.llm.queue_length, "nothing runs or waits")

    def _client(self, rng: random.Random, turns: Any) -> None:
        try:
            for _ in turns:
                self._ask(rng)
        except BaseException as error:
            self.errors.append(error)

    def _ask(self, rng: random.Random) -> None:
        n = rng.randrange(len(self.requests))
        asked, how = self.requests[n], rng.choices(list(ENDINGS), list(ENDINGS.values()))[0]
        deadline = rng.random() ** 2 * self.latest_s if how == "late" else None
        stream = self.llm.rounds(asked.question, asked.params, deadline=deadline, **asked.options)
        if how in ("closed", "dropped"):
            for _ in range(rng.randrange(4)):
                next(stream, None)
        if how == "dropped":
            self.ended["dropped"] += 1
            return
        if how == "closed":
            stream.close()
        reply = stream.reply
        self.ended[reply.finish_reason] += 1
        self.answers.add((n, tuple(reply.token_ids), reply.finish_reason != "cancelled"))


def check_memories(llm: LLM, prompts: Sequence[list[int]]) -> None:
    """All that is held is conversations, which begin with these; without them there is all the room, for the engine."""
    llm.generate(prompts[0], SamplingParams(max_tokens=2))  # the last one may have been left before it was read

    def check(pair: Pair) -> None:
        batch = pair.state.batch
        held = [batch[i].tokens for i in range(batch.n_sequences)]
        assert any(held)
        for tokens in held:
            assert not tokens or any(shared_prefix(tokens, each) >= min(len(tokens), len(each)) for each in prompts)
        check_only_conversations_are_held(pair)
        for memory in shared_memories(pair):
            for at in range(0, memory.n_ctx, 64):
                n = min(64, memory.n_ctx - at)
                memory.decode([Piece(i, [5] * n, "none") for i in range(memory.n_cells // memory.n_ctx)])
            assert memory.free_cells == memory.n_cells % memory.n_ctx
            for i in range(memory.n_sequences):
                memory[i].truncate(0)

    llm.run(check)


def growth(mixture: Mixture, n_phases: int, n_requests: int, held_mb: Callable[[], float]) -> float:
    """What ``held_mb`` grows by, while many requests come phase by phase, after a warm-up of two [MB].

    What an allocator keeps and gives back now and then comes and goes; so the median of the first three is compared
    with that of the last three.
    """
    after = []
    for phase in range(n_phases):
        mixture.run(phase, n_requests)
        after.append(held_mb())
    print(f"after each {n_requests} requests:", *(f"{mb:.1f}" for mb in after), "MB;", dict(mixture.ended))
    return median(after[-3:]) - median(after[2:5])


def check_endings(ended: Counter[str], n_requests: int) -> None:
    assert sum(ended.values()) == n_requests
    assert ended["length"] + ended["stop"] > n_requests / 3
    assert ended["dropped"] > n_requests / 20
    assert ended["cancelled"] > n_requests / 50


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ggufs.Pair:
    """For the reference engine, quick, and with so many tokens that a row that is kept shows."""
    shape = ggufs.Shape(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.4)
    return ggufs.correlated_pair(tmp_path_factory.mktemp("wide"), bpe_vocab(8192), shape=shape, name="wide")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_nothing_is_left_of_some_hundred_requests_and_each_is_what_it_is_alone(
    pair: ggufs.Pair, measured_home: Path
) -> None:
    drafts, threads = ["ngram", str(pair.draft)], set(threading.enumerate())
    options: Any = {"backend": "reference", "n_ctx": N_CTX}
    with LLM(pair.target, drafts, parallel=N_PARALLEL, prefix_cache_bytes=1 << 20, **options) as llm:
        requests = [Asked.nth(n, llm.draft_names, 12) for n in range(50)]
        mixture = Mixture(llm, requests, latest_s=0.2)
        tracemalloc.start()
        try:
            grown = growth(mixture, 8, 20, allocated_mb)
        finally:
            tracemalloc.stop()
        assert grown < 1.3  # a row kept of each of 60 would be 2.0, and what each held too
        check_endings(mixture.ended, 160)
        prompts = [llm.encode(asked.question) for asked in requests]
        check_memories(llm, prompts)
        assert llm.warnings == []
    wait_until(lambda: set(threading.enumerate()) <= threads, "no thread is left")
    with LLM(pair.target, None, **options) as llm:
        alone = [llm.generate(prompt, asked.params) for prompt, asked in zip(prompts, requests, strict=True)]
    for n, tokens, is_whole in mixture.answers:
        assert list(tokens) == alone[n].token_ids[: None if is_whole else len(tokens)]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("backend", ["ik-llama", "llama-cpp"])
def test_nothing_is_left_of_a_thousand_requests_to_a_real_model(
    backend: str, real_model: Callable[[str], Path]
) -> None:
    """A row is 0.2 MB here, and what an answer holds 0.02 MB a token: kept of each of 700 they would be over 140."""
    open_backend(backend)
    model, threads = real_model("smollm2-135m"), set(threading.enumerate())
    options: Any = {"backend": backend, "n_ctx": N_CTX, "light_draft": False}
    with LLM(model, ["ngram", str(model)], parallel=N_PARALLEL, prefix_cache_bytes=32 << 20, **options) as llm:
        requests = [Asked.nth(n, llm.draft_names, 20) for n in range(100)]
        mixture = Mixture(llm, requests, latest_s=2.0)
        assert growth(mixture, 10, 100, resident_mb) < 30.0
        check_endings(mixture.ended, 1000)
        check_memories(llm, [llm.encode(asked.question) for asked in requests])
        assert not any("not used any more" in each for each in llm.warnings)
    wait_until(lambda: set(threading.enumerate()) <= threads, "no thread is left")
