"""Heads and early exits: what is said has the target's law, and they read just what they should.

On the reference engine, with random heads that are right often enough; on all: ``tests/engine/test_any_drafter.py``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.backends import reference
from localspec.backends.base import Context, FloatArray, Forward
from localspec.controllers.fixed import FixedController
from localspec.errors import EngineError, UsageError
from localspec.heads.base import DraftHead
from localspec.heads.drafters import HEAD_DRAFTERS, ChainedHead
from localspec.heads.published import load_published
from localspec.heads.sources import exit_head
from localspec.heads.trained import STATE, Head, load_head, target_facts
from localspec.sampling.sampling import Ids, Row, SamplingParams
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Drafter, Plan, Proposer
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.rounds import DraftToken, Round
from tests.conftest import TinyFiles
from tests.spec_decode.test_exactness import EXACT, SAMPLING, Predictions
from tests.spec_decode.test_lossless import (
    N_CTX,
    NosyController,
    RandomController,
    TableContext,
    World,
    law_difference,
    run,
)
from tests.support import ggufs
from tests.support.gguf_vocabs import micro_vocab
from tests.support.heads import write_random_head
from tests.support.published_heads import write_eagle3

STEPS = 4
KINDS = ("chained", "exit")


def open_head(target: Path, folder: Path, kind: str, backend: str = "reference", **options: Any) -> Head:
    """A random head, or an exit after the first layer."""
    if kind == "exit":
        path = exit_head(target, target_facts(target), 1)
    else:
        path = folder / f"{kind}-{len(list(folder.iterdir()))}.gguf"
        write_random_head(target, path, kind, steps=STEPS, **options)  # type: ignore[arg-type]
    return load_head(path, target, backend)


def source_of(kind: str) -> str:
    return "early-exit" if kind == "exit" else "head"


def drafter_of(head: Head, n_ctx: int = N_CTX) -> Any:
    return HEAD_DRAFTERS[head.kind](head, head.new_context(n_ctx), source_of(head.kind))


WINDOW = 64
"""States that wait to be read: enough for the conversations of these tests."""


@pytest.fixture(autouse=True)
def window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.heads.trained.MAX_STATES", WINDOW)


TAPS = ("layer:0", "norm")


class StatesContext(TableContext):
    """A target's context that looks up its states too."""

    def __init__(self, predictions: Predictions) -> None:
        super().__init__(predictions)
        self.hidden = TAPS

    def _decode(self, tokens: Sequence[int], logits: str) -> Forward:
        forward: Any = super()._decode(tokens, logits)
        return Forward(forward.logits, {"layer:0": self._rows(tokens, "layer:0", len(tokens)),
                                        "norm": self._rows(tokens, "norm", len(forward))})  # fmt: skip

    def _decode_first_layers(self, tokens: Sequence[int], n_layers: int) -> Forward:
        rows = self._rows(tokens, "layer:0", len(tokens))
        return Forward(np.empty((0, self.model.n_vocab), dtype=np.float32), {"layer:0": rows})

    def _rows(self, tokens: Sequence[int], name: str, n: int) -> FloatArray:
        """The states after the last n of these tokens."""
        seen, found = (*self.tokens, *tokens), []
        for end in range(len(seen) - n + 1, len(seen) + 1):
            _ = self.predictions[seen[:end]]
            found.append(self.predictions.states[seen[:end]][name])
        return np.array(found, dtype=np.float32).reshape(n, self.model.n_embd)


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = ggufs.Shape(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, n_ctx=64, sharpness=1.0)
    return ggufs.write_llama(tmp_path_factory.mktemp("micro") / "micro.gguf", shape, micro_vocab(5))


@pytest.fixture(scope="module")
def states(micro: Path) -> Iterator[Predictions]:
    with reference.load(micro) as model:
        yield Predictions(model, TAPS)


LAWS = replace(SAMPLING, top_k=4, repeat_penalty=1.2, ignore_eos=True, max_tokens=3)


@pytest.mark.parametrize("kind", [*KINDS, "eagle3"])
def test_the_law_of_whole_answers_is_that_of_plain_sampling(
    states: Predictions, micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """To 1e-12, with a controller that learns from every guess it sees; a head can guess four tokens of five.

    Published heads are computed by the reference backend, as the others are.
    """
    head: DraftHead
    if kind == "eagle3":
        path = write_eagle3(micro, tmp_path / "eagle3.gguf", (1, 1, 1), n_out=4)
        head = load_published(path, states.context.model)
    else:
        head = open_head(micro, tmp_path, kind, **({"n_out": 4, "taps": TAPS} if kind == "chained" else {}))
    context, samples = head.new_context(32), list[DraftToken]()

    def made() -> SpeculativeDecoder:
        context.truncate(0)
        drafter = HEAD_DRAFTERS[head.kind](head, context, source_of(head.kind))
        return SpeculativeDecoder(StatesContext(states), [drafter], NosyController())

    def watch(rounds: list[Round]) -> None:
        samples.extend(token for round_ in rounds for token in round_.draft if token.dist is not None and not samples)

    assert law_difference(monkeypatch, states, LAWS, made, watch) < EXACT
    assert samples
    head.close()


# What they read.


class Oracle:
    """What a head should compute, from the definitions in ``backends.heads`` and from nothing but the text."""

    def __init__(self, target: Path, head: Head) -> None:
        self.head = head
        self.model = reference.load(target)
        self.context = self.model.new_context(256, hidden=head.taps)
        self.memory = head.new_context(256)

    def logits(self, text: Sequence[int], n_settled: int, first: int) -> FloatArray:
        """For the token after ``text``: the first of its tokens are settled, and states known from a position on."""
        head = self.head
        self.context.truncate(0)
        hidden = self.context.decode(text).hidden
        states = np.concatenate([hidden[tap] for tap in head.taps], axis=1)
        self.memory.truncate(0)
        if head.kind == "exit":
            return self.memory.decode_floats(states[-1:], [0]).logits[0]
        rows = head.true_rows(self.memory, states[first : n_settled - 1], text[first + 1 : n_settled])
        forward = self.memory.decode_floats(rows, [0] * len(rows))
        for token in text[n_settled:]:
            forward = self.memory.decode_floats(head.chained_rows(forward.hidden[STATE][-1:], [token]), [0])
        return forward.logits[-1]

    def agrees(self, asked: Asked) -> bool:
        expected = self.logits(asked.text, asked.n_settled, asked.first)
        return float(np.abs(asked.row - expected).max()) < ALIKE


ALIKE = 1e-3
"""Logits of one row, fused alone or among others; those of other rows differ by 1 and more."""


@dataclass
class Asked:
    """A row that a head asked the proposer about.

    Attributes:
        text: what stands before the token that it is about.
        n_settled: how much of that is settled.
        first: position of the first row in the head's memory.
    """

    row: FloatArray
    text: list[int]
    n_settled: int
    first: int


def watch(monkeypatch: pytest.MonkeyPatch, drafter: Any, target: Context) -> list[Asked]:
    """All rows that a drafter asks the proposer about."""
    seen: list[Asked] = []
    draft, confidence = drafter.draft, Proposer.confidence
    n_settled = [0]

    def drafting(tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        if target._partial is None:  # an early exit holds some of the draft there
            n_settled[0] = target.n_past + 1
        with monkeypatch.context() as patch:
            patch.setattr(Proposer, "confidence", asked)
            return draft(tokens, plan, proposer)  # type: ignore[no-any-return]

    def asked(self: Proposer, row: Row, history: Sequence[int], ids: Ids | None = None) -> float:
        assert np.array_equal(drafter.head.token_map, ids)
        seen.append(Asked(row.copy(), list(history), n_settled[0], getattr(drafter, "_first", 0)))
        return confidence(self, row, history, ids)

    monkeypatch.setattr(drafter, "draft", drafting)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_every_guess_is_made_of_the_states_of_the_text_before_it(
    tiny: TinyFiles, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that go on from, edit, repeat or replace one another, and some that are broken off; drafts of every
    length, others' tokens in them, rounds without any, answers without the head between."""
    world = World(tiny.quick, random.Random(kind), tmp_path)
    options: dict[str, Any] = {"taps": ("layer:0", "norm"), "n_out": 200} if kind == "chained" else {}
    with open_head(tiny.quick.target, tmp_path, kind, **options) as head:
        drafter, oracle = drafter_of(head), Oracle(tiny.quick.target, head)
        context = world.target.new_context(N_CTX, hidden=head.taps)
        world.decoders = [
            SpeculativeDecoder(context, group, RandomController(world.rng))
            for group in ([drafter], [world.random, drafter], [world.random], [drafter])
        ]
        rows = watch(monkeypatch, drafter, context)
        n_checked, n_deep, n_known = 0, 0, 0
        for _ in range(60):
            rows.clear()
            if world.rng.random() < 0.5:
                polls = iter([False, True])
                world.decoders[0].prefill(words(60, world.rng.randrange(9)), lambda polls=polls: next(polls))
            world.compare(SamplingParams())
            for asked in rows:
                assert oracle.agrees(asked), asked
                n_checked += 1
                n_deep += len(asked.text) > asked.n_settled
                n_known += asked.first > 0
                assert kind == "exit" or len(asked.text) - asked.n_settled < STEPS, "further than it was trained for"
        assert n_checked > 200
        assert n_deep > 50
        assert n_known > 20 or kind == "exit"


# What they keep.


class Reader:
    """A target, a head, and answers whose drafts are a given number of tokens long."""

    def __init__(self, target: Path, folder: Path, n_ctx: int = 512) -> None:
        self.path = target
        self.head = open_head(target, folder, "chained", taps=("layer:0",))
        self.model = reference.load(target)
        self.target = self.model.new_context(n_ctx, hidden=self.head.taps)
        self.drafter: ChainedHead = drafter_of(self.head, n_ctx)
        self.n_rows: list[int] = []
        self.lost: list[str] = []
        decode = self.drafter.context.decode_floats

        def counted(rows: FloatArray, tokens: Sequence[int], logits: Any = "all", n_best: int = 0) -> Forward:
            self.n_rows.append(len(rows))
            return decode(rows, tokens, logits, n_best)

        self.drafter.context.decode_floats = counted  # type: ignore[method-assign]

    def answer(
        self, prompt: Sequence[int], n_tokens: int = 8, n_draft: int = 3, drafters: Sequence[Drafter] | None = None
    ) -> list[int]:
        """The prompt with the answer; greedy."""
        del self.n_rows[:]
        decoder = SpeculativeDecoder(
            self.target,
            [self.drafter] if drafters is None else drafters,
            FixedController(n_draft),
            lambda drafter, why: self.lost.append(why),
        )
        rounds = run(decoder, list(prompt), SamplingParams(max_tokens=n_tokens, ignore_eos=True))
        return [*prompt, *(token.id for round_ in rounds for token in round_.emitted)]


@pytest.fixture
def reader(tiny: TinyFiles, tmp_path: Path) -> Reader:
    return Reader(tiny.quick.target, tmp_path)


def words(n: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(20, 280, n)]


def test_of_a_long_prompt_the_end_is_read_and_of_what_follows_all(reader: Reader) -> None:
    text = reader.answer(words(300))
    assert reader.drafter.held.start == 299 - WINDOW
    assert reader.n_rows[0] == WINDOW
    n_first = len(reader.drafter.held)
    longer = reader.answer([*text, *words(40, 1)])
    assert reader.drafter.held.start == 299 - WINDOW
    assert reader.n_rows[0] == len(text) + 39 - (299 - WINDOW) - n_first  # each row once
    reader.answer([*longer[:-20], *words(30, 2)])  # an edit: what stands before it was read already
    assert reader.n_rows[0] <= 31
    reader.answer(longer[:-20])  # and nothing at all is new
    assert reader.n_rows[0] == 1


def test_a_conversation_that_was_put_aside_begins_anew_in_its_memory(reader: Reader) -> None:
    text = reader.answer(words(100))
    state = reader.target.export_state()
    reader.answer(words(100, 1))
    reader.target.import_state(state)
    n_held = reader.target.n_past
    plain = reader.answer([*text, 31], 12, drafters=[])
    reader.target.truncate(n_held)
    assert reader.answer([*text, 31], 12) == plain
    assert reader.drafter.held.start == n_held
    assert 0 < reader.n_rows[0] < 4
    assert reader.lost == []


def test_a_memory_that_is_full_begins_anew(tiny: TinyFiles, tmp_path: Path) -> None:
    reader = Reader(tiny.quick.target, tmp_path)
    small = drafter_of(reader.head, 40)
    plain = reader.answer(words(30), 120, 0)
    assert reader.answer(words(30), 120, 3, [small]) == plain
    assert small.held.start >= 60
    assert 0 < small.context.n_past <= 40


def test_clones_take_turns_in_one_context(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """As forks of a state do: one finds what the other left, which is of no use to it."""
    clone, oracle = reader.drafter.clone(None), Oracle(reader.path, reader.head)
    assert clone.context is reader.drafter.context
    prompts = [words(60), words(64, 1)]
    seen = [watch(monkeypatch, drafter, reader.target) for drafter in (reader.drafter, clone)]
    for turn in range(6):
        i = turn % 2
        prompts[i] = reader.answer(prompts[i], 10, 3, [(reader.drafter, clone)[i]])
    for rows in seen:
        assert len(rows) > 20
        assert all(oracle.agrees(asked) for asked in rows)
    assert reader.lost == []


# What goes wrong.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["engine", "states", "logits"])
def test_a_head_that_fails_is_done_without(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    reader = Reader(tiny.quick.target, tmp_path)
    with open_head(tiny.quick.target, tmp_path, kind) as head:
        drafter = drafter_of(head)
        reader.target = reader.model.new_context(N_CTX, hidden=head.taps)
        plain = reader.answer(words(20), 24, 0, [])
        owner, name = drafter.context, "_decode_floats"
        if how == "states":
            owner, name = reader.target, "_decode_first_layers" if kind == "exit" else "_decode"
        decode, left = getattr(owner, name), iter(range(5))

        def failing(*args: Any) -> Forward:
            fails = next(left, None) is None
            if fails and how == "engine":
                raise EngineError("out of memory")
            forward: Forward = decode(*args)
            for rows in [forward.logits] if how == "logits" else forward.hidden.values() if how == "states" else ():
                rows[:] = np.nan if fails else rows
            return forward

        monkeypatch.setattr(owner, name, failing)
        reader.target.truncate(0)
        assert reader.answer(words(20), 24, 3, [drafter, NgramDrafter()]) == plain
        assert reader.lost == ["failed: out of memory" if how == "engine" else reader.lost[0]]
        assert how == "engine" or "not numbers" in reader.lost[0]
        assert reader.target.tokens == plain[:-1]


def test_states_that_nobody_returns_are_an_error(reader: Reader) -> None:
    with (
        reader.model.new_context(32) as context,
        pytest.raises(UsageError, match="was not made to return 'layer:0'"),
    ):
        SpeculativeDecoder(context, [reader.drafter], FixedController(1))


def test_an_early_exit_leaves_the_target_as_it_was(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        open_head(tiny.quick.target, tmp_path, "exit") as head,
        reference.load(tiny.quick.target) as model,
        model.new_context(64, hidden=head.taps) as target,
    ):
        text, controller = words(12), FixedController(4)
        decoder = SpeculativeDecoder(target, [NgramDrafter(), drafter_of(head)], controller)
        decoder.prefill(text, lambda: False)
        decoder.start(text, SamplingParams(), TextAssembler(model.vocab, ()))
        for _ in range(2):
            assert len(decoder.propose().tokens) == 5
            assert target.tokens == text[:-1]

        class Interrupted(Plan):
            def spent(self, source: str, n_tokens: int, ms: float) -> None:
                raise KeyboardInterrupt

        monkeypatch.setattr(controller, "plan", lambda *args, **situation: Interrupted(4))
        with pytest.raises(KeyboardInterrupt):
            decoder.propose()
        assert target.tokens == text[:-1]
        target.decode(text[-1:])
