"""The whole decoder on the reference backend: what is said never depends on what was guessed, to the bit.

Hundreds of answers with drafters that guess well, badly, too much or nothing, at any length, are compared with plain
decoding: tokens, text and the reason for ending must be the same. Then, sampling without a seed, the law of whole
answers is enumerated with the real draft-model drafter and a controller that learns from every guess it sees.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from localspec.backends import reference
from localspec.backends.base import Context, Forward
from localspec.backends.tokenizer import NAMED
from localspec.controllers.fixed import FixedController
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler, ThinkingReader
from localspec.spec_decode.drafters.base import Controller, Drafter, DrafterInfo, Plan, Proposer
from localspec.spec_decode.drafters.corpus import CorpusDrafter, CorpusIndex, PathSource
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.drafters.other_vocabulary import MappedTokensDrafter
from localspec.spec_decode.drafters.pard import PardDrafter
from localspec.spec_decode.rounds import DraftToken, Round, Span
from localspec.system.steps import exhaust
from tests.conftest import TinyFiles
from tests.spec_decode.test_exactness import EXACT, PROMPT, SAMPLING, Predictions, plain_law
from tests.support.enumeration import largest_difference, law_of_answers
from tests.support.gguf_vocabs import micro_vocab
from tests.support.ggufs import micro_model

N_CTX = 72


@dataclass
class Answer:
    tokens: list[int]
    text: str
    finish_reason: str | None

    @classmethod
    def of(cls, rounds: list[Round]) -> Answer:
        tokens = [token.id for round_ in rounds for token in round_.emitted]
        return cls(tokens, "".join(round_.text for round_ in rounds), rounds[-1].finish_reason)


class RandomDrafter(Drafter):
    """Knows the plain answer, and guesses along it with a given share of errors, in bursts of any length."""

    info = DrafterInfo("random")

    def __init__(self, rng: random.Random, n_vocab: int) -> None:
        self.rng, self.n_vocab = rng, n_vocab
        self.answer: list[int] = []
        self.errors = 0.0

    def begin(self, tokens: Sequence[int], **situation: Any) -> None:
        self.n_prompt = len(tokens)

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        guesses: list[DraftToken] = []
        for _ in range(self.rng.randint(0, 6)):
            if not plan.more(self.info.source) or plan.keep(self.info.source, 0.5) is None:
                break
            at = len(tokens) + len(guesses) - self.n_prompt
            wrong = self.rng.random() < self.errors or at >= len(self.answer)
            guesses.append(
                DraftToken(self.rng.randrange(self.n_vocab) if wrong else self.answer[at], self.info.source, 0.5)
            )
        return guesses


class RandomController(Controller):
    """Another draft length every round, from none to more than the context has room for."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def plan(self, room: int, n_past: int, **situation: Any) -> Plan:
        return Plan(min(room, self.rng.choice([0, 1, 2, 3, 5, 8, 60])))

    def learn(self, round_: Round) -> None:
        pass

    def explain(self) -> str:
        return "random"


def run(decoder: SpeculativeDecoder, prompt: list[int], params: SamplingParams) -> list[Round]:
    decoder.prefill(prompt, lambda: False)
    text = TextAssembler(decoder.target.model.vocab, params.stop)
    return list(decoder.rounds(prompt, params, text))


def corpus_of(folder: Path, tokens: Sequence[int]) -> CorpusIndex:
    """A corpus of one file, whose text is token ids."""
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "ids.txt").write_text(" ".join(map(str, tokens)))
    index = CorpusIndex(
        PathSource(folder / "text"), folder / "index", "ids", lambda text: [int(each) for each in text.split()]
    )
    exhaust(index.update())
    return index


class World:
    """A target that decodes plainly from nothing every time, and one that drafts and never starts afresh."""

    chains = (SAMPLING, replace(SAMPLING, temperature=0.6, top_k=20), replace(SAMPLING, top_p=0.8))

    def __init__(self, pair_files: object, rng: random.Random, folder: Path) -> None:
        self.rng = rng
        self.target = reference.load(pair_files.target)  # type: ignore[attr-defined]
        self.small = reference.load(pair_files.draft)  # type: ignore[attr-defined]
        self.plain_context = self.target.new_context(N_CTX)
        self.random = RandomDrafter(rng, self.target.n_vocab)
        self.corpus = corpus_of(folder, [rng.randrange(self.target.n_vocab) for _ in range(2000)])
        groups = self.groups()
        taps = {tap for group in groups for drafter in group for tap in drafter.info.taps}
        context = self.target.new_context(N_CTX, hidden=sorted(taps))
        self.decoders = [self.decoder(context, group) for group in groups]
        self.prompt = [5, 6, 7]

    def decoder(self, context: Context, group: list[Drafter]) -> SpeculativeDecoder:
        return SpeculativeDecoder(context, group, RandomController(self.rng))

    def groups(self) -> list[list[Drafter]]:
        return [
            [self.random],
            [DraftModelDrafter(self.small.new_context(N_CTX))],
            [PardDrafter(self.small.new_context(N_CTX), 3), NgramDrafter()],
            [NgramDrafter(), DraftModelDrafter(self.small.new_context(N_CTX))],
            [NgramDrafter(), CorpusDrafter(self.corpus, "corpus", "corpus:x")],
            [DraftModelDrafter(self.small.new_context(N_CTX // 4)), self.random, NgramDrafter()],
        ]

    def next_prompt(self) -> list[int]:
        """Goes on from, edits, repeats or replaces the one before."""
        rng, n_vocab = self.rng, self.target.n_vocab
        kept = self.prompt[: rng.choice([0, 1, len(self.prompt) // 2, len(self.prompt)])]
        fresh = [rng.randrange(n_vocab) for _ in range(rng.randint(1, 6))]
        self.prompt = (kept + fresh * rng.choice([1, 1, 3]))[-40:]
        return self.prompt

    def plain(self, prompt: list[int], params: SamplingParams) -> Answer:
        self.plain_context.truncate(0)
        decoder = SpeculativeDecoder(self.plain_context, [], FixedController(0))
        rounds = run(decoder, prompt, params)
        assert all(round_.verdict.kind == "plain" and len(round_.emitted) == 1 for round_ in rounds)
        return Answer.of(rounds)

    def params(self, prompt: list[int], base: SamplingParams) -> SamplingParams:
        """Random budgets, stops that do occur, penalties and biases on top of ``base``."""
        rng = self.rng
        params = replace(base, max_tokens=rng.choice([1, 2, 3, 7, 12, 12, 20, None]), ignore_eos=rng.random() < 0.2)
        if rng.random() < 0.3:
            params = replace(params, repeat_penalty=1.3, frequency_penalty=0.2, repeat_last_n=rng.choice([1, 8, 64]))
        if rng.random() < 0.3:
            params = replace(params, logit_bias={self.target.vocab.eos: 6.0, 9: 2.0})
        if rng.random() < 0.5:
            text = self.plain(prompt, params).text
            if text:
                at = rng.randrange(len(text))
                params = replace(params, stop=(text[at : at + rng.randint(1, 4)], "never said"))
        return params

    def compare(self, base: SamplingParams) -> list[Round]:
        """One answer both ways; returns the rounds of the drafted one."""
        prompt = self.next_prompt()
        params = self.params(prompt, base)
        wanted = self.plain(prompt, params)
        self.random.answer, self.random.errors = wanted.tokens, self.rng.choice([0.0, 0.1, 0.5, 1.0])
        rounds = run(self.rng.choice(self.decoders), prompt, params)
        assert Answer.of(rounds) == wanted, (prompt, params)
        return rounds

    def compare_all(self, n: int, seeded: bool) -> list[Round]:
        """Rounds of n answers: greedy, or with seeds, temperatures and filters of all kinds."""
        rounds: list[Round] = []
        for seed in range(n):
            chain = self.rng.choice(self.chains)
            rounds += self.compare(replace(chain, seed=seed) if seeded else SamplingParams())
        return rounds


@pytest.fixture
def world(tiny: TinyFiles, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    return World(tiny.quick, random.Random(request.node.name), tmp_path)


def check_the_mix(rounds: list[Round], n_answers: int) -> None:
    """The comparison means something only if everything happened often: acceptance, rejection, every kind of end."""
    kinds = [token.kind for round_ in rounds for token in round_.emitted]
    for kind in ("accepted", "recovered", "bonus", "plain"):
        assert kinds.count(kind) > n_answers / 10, kind
    ends = [round_.finish_reason for round_ in rounds]
    assert ends.count("stop") > n_answers / 10
    assert ends.count("length") > n_answers / 10
    cut = [round_ for round_ in rounds if len(round_.emitted) <= round_.verdict.n_accepted]
    assert len(cut) > n_answers / 50, "no answer ended inside of an accepted draft"


@pytest.mark.parametrize("seeded", [False, True])
def test_answers_equal_plain_ones(world: World, seeded: bool) -> None:
    """Twice as many answers as the negative control needs to show a wrong rollback."""
    check_the_mix(world.compare_all(200, seeded), 200)


def test_the_comparison_notices_a_wrong_rollback(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: when two or more rows go, the row before them is spoiled."""
    truncate = Context.truncate

    def leaky(self: Context, n: int) -> None:
        if 1 < n < self.n_past - 1:
            token = self.tokens[n - 1]
            truncate(self, n - 1)
            self.decode([(token + 1) % 300], "none")
            self.tokens[-1] = token
        else:
            truncate(self, n)

    monkeypatch.setattr(Context, "truncate", leaky)
    with pytest.raises(AssertionError):
        world.compare_all(100, seeded=False)


# Without a seed: the law of whole answers, adaptive controller included.


class NosyController(Controller):
    """Drafts next by what it saw before: drafted tokens, confidences and verdicts, rejected guesses included."""

    def __init__(self) -> None:
        self.mood = 2

    def plan(self, room: int, n_past: int, **situation: Any) -> Plan:
        controller = self

        class Nosy(Plan):
            def samples(self, source: str, confidence: float) -> bool:
                # Any rule that looks at the law only, not at what comes out of it, must leave the answer's law alone.
                return (confidence < 0.6) == (controller.mood != 1)

            def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
                if confidence < 0.3:
                    controller.mood = 1
                return super().keep(source, confidence)

        return Nosy(min(room, self.mood))

    def learn(self, round_: Round) -> None:
        self.mood = sum(round_.draft.ids) % 3

    def explain(self) -> str:
        return "nosy"


class TableContext(Context):
    """A context that looks its rows up, so that a run of the enumeration costs nothing."""

    def __init__(self, predictions: Predictions) -> None:
        super().__init__(predictions.context.model, 32)
        self.predictions = predictions

    def _decode(self, tokens: Sequence[int], logits: str) -> Forward:
        seen = (*self.tokens, *tokens)
        n = {"all": len(tokens), "last": 1, "none": 0}[logits]
        rows = [self.predictions[seen[: len(seen) - n + i + 1]] for i in range(n)]
        return Forward(np.stack(rows) if rows else np.empty((0, self.model.n_vocab), dtype=np.float32))

    def _truncate(self, n: int) -> None:
        pass

    def _close(self) -> None:
        pass


def of_few(n: int, **options: Any) -> SamplingParams:
    return replace(SAMPLING, top_k=3, max_tokens=n, ignore_eos=True, **options)


def law_difference(
    patch: pytest.MonkeyPatch,
    target: Predictions,
    params: SamplingParams,
    make: Callable[[], SpeculativeDecoder],
    watch: Callable[[list[Round]], object] = lambda rounds: None,
) -> float:
    """The largest difference between the law of whole answers and plain sampling's; ``watch`` gets every answer."""

    def answer() -> list[Round]:
        rounds = run(make(), list(PROMPT), params)
        watch(rounds)
        return rounds

    return largest_difference(plain_law(params, target, params.max_tokens), law_of_answers(patch, answer))


def decoder_of(target: Predictions, *drafters: Drafter, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(TableContext(target), drafters, NosyController(), **options)


DRAFTERS: dict[str, Callable[[Predictions, CorpusIndex], list[Drafter]]] = {
    "model": lambda small, index: [DraftModelDrafter(TableContext(small))],
    "pard": lambda small, index: [PardDrafter(TableContext(small), mask=0)],
    "corpus": lambda small, index: [CorpusDrafter(index, "corpus", "corpus:x")],
    # The surer of the two is asked first.
    "n-grams, corpus": lambda small, index: [NgramDrafter(), CorpusDrafter(index, "corpus", "corpus:x")],
}


@pytest.mark.parametrize("drafters", DRAFTERS)
def test_the_law_of_whole_answers_is_that_of_plain_sampling(
    target: Predictions, small: Predictions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafters: str
) -> None:
    """Real decoder, real drafters, real proposer; to 1e-12. No random number serves two decisions."""
    plain = run(SpeculativeDecoder(TableContext(target), [], FixedController(0)), list(PROMPT), SamplingParams())
    index, rounds = corpus_of(tmp_path, [*PROMPT, *Answer.of(plain).tokens]), list[Round]()

    def made() -> SpeculativeDecoder:
        return decoder_of(target, *DRAFTERS[drafters](small, index))

    assert law_difference(monkeypatch, target, of_few(4), made, rounds.extend) < EXACT
    sources = {token.source for round_ in rounds for token in round_.emitted}
    assert ("corpus" if "corpus" in drafters else "model") in sources


class OneToken:
    """Thinking opens with a control token, anywhere, and is closed with one."""

    opening, closing, dropped = (NAMED + "<t>",), (NAMED + "</t>",), ()
    names: ClassVar = {3: NAMED + "<t>", 4: NAMED + "</t>"}
    forced: ClassVar = [4]


class TwoTokens(OneToken):
    opening = (NAMED + "<t>" + NAMED + "<u>",)
    names: ClassVar = {**OneToken.names, 2: NAMED + "<u>"}


class TokenAndText(OneToken):
    opening = (NAMED + "<t>a",)
    names: ClassVar = {2: NAMED + "<t>", 4: NAMED + "</t>"}


@pytest.mark.parametrize(
    ("marks", "budget", "controller"),
    [(OneToken, 0, NosyController), (TwoTokens, 1, NosyController), (TokenAndText, 0, lambda: FixedController(2))],
)
def test_the_law_where_a_block_opens_within_a_draft(
    target: Predictions, small: Predictions, monkeypatch: pytest.MonkeyPatch, marks: Any, budget: int, controller: Any
) -> None:
    """What a spent budget drops of a verdict is not judged again with the same noise: to 1e-12."""
    laws, vocab = [], target.context.model.vocab
    for make in (lambda: FixedController(0), controller):
        rounds: list[Round] = []

        def answer(make: Any = make, rounds: list[Round] = rounds) -> list[Round]:
            decoder = SpeculativeDecoder(TableContext(target), [DraftModelDrafter(TableContext(small))], make())
            decoder.prefill(list(PROMPT), lambda: False)
            text = TextAssembler(vocab, (), ThinkingReader(marks(), over=True, budget=budget))
            found = list(decoder.rounds(list(PROMPT), of_few(4, logit_bias={3: 3.0, 2: 3.0}), text))
            rounds += found
            return found

        laws.append(law_of_answers(monkeypatch, answer))
        assert any(round_.verdict.kind == "forced" for round_ in rounds)
        assert any(round_.draft for round_ in rounds) == (make is controller)
    assert largest_difference(*laws) < EXACT


def test_a_draft_behind_a_mark_that_has_half_come_keeps_to_the_budget() -> None:
    """A block may open with its first token."""
    for rest, room in (("a", 1), ("b", math.inf)):
        reader = ThinkingReader(TokenAndText(), over=True, budget=2)
        assert reader.room == math.inf
        for text, expected in ((NAMED + "<t>", 2), (rest, room)):
            reader.n_tokens += reader.inside
            reader.read(Span(text, "plain", "target"))
            assert reader.room == expected


OTHER_SPECIALS = replace(micro_vocab(5), tokens=["<x>", "</s>", "<s>", "a", "b"], bos=2, eos=1)


@pytest.mark.parametrize(
    ("vocab", "bias"),
    [(None, {}), (None, {5: 4.0, 6: 2.0, 1: 0.5}), (OTHER_SPECIALS, {}), (OTHER_SPECIALS, {2: 3.0, 1: 1.0})],
)
def test_the_law_with_a_draft_of_other_tokens(
    target: Predictions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab: Any, bias: dict[int, float]
) -> None:
    """Tokens that the target has no row for, or special ones that differ: q is the law of what is drawn, to 1e-12."""
    params, path, rounds = of_few(3, logit_bias=bias), tmp_path / "other.gguf", list[Round]()
    with reference.load(micro_model(path, 5 if vocab else 7, seed=5, vocab=vocab)) as draft_model:
        small = Predictions(draft_model)

        def made() -> SpeculativeDecoder:
            context = TableContext(small)
            return decoder_of(
                target, MappedTokensDrafter(context, target.context.model) if vocab else DraftModelDrafter(context)
            )

        assert law_difference(monkeypatch, target, params, made, rounds.extend) < EXACT
        guessed = {token.id for round_ in rounds for token in round_.draft}
        assert small.known
        if vocab:  # what has no partner is not drawn, and texts begin as the draft model numbers it
            assert guessed == {1, 2, 3, 4}
            assert all(read[0] == 2 for read in small.known)
        else:
            assert 0 <= min(guessed) <= max(guessed) < 5
            assert any(int(np.argmax(row)) >= 5 for row in (small[(*PROMPT, token)] for token in range(5)))


def test_the_law_with_a_draft_that_fails_after_some_tokens(
    target: Predictions, small: Predictions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a draft model is dropped depends on what was said and guessed, and must not show in what is said."""
    lost, rounds = list[str](), list[Round]()

    class Failing(TableContext):
        def _decode(self, tokens: Sequence[int], logits: str) -> Forward:
            forward = super()._decode(tokens, logits)
            if tokens[-1] == 3:
                forward.logits[:] = math.nan
            return forward

    def made() -> SpeculativeDecoder:
        return decoder_of(target, DraftModelDrafter(Failing(small)), lost=lambda each, why: lost.append(why))

    assert law_difference(monkeypatch, target, of_few(4), made, rounds.extend) < EXACT
    assert min(len(lost), sum(len(round_.draft) for round_ in rounds)) > 10


class Broken(Exception):
    pass


def fail(*args: Any) -> Any:
    raise Broken


@pytest.mark.parametrize("where", ["process", "truncate", "push", "accept", "observe", "learn"])
def test_a_round_that_fails_leaves_tokens_and_memory_as_they_were(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """And the answer that begins anew is right."""
    with reference.load(tiny.spm) as model, model.new_context(128) as context:
        prompt, params = model.tokenize("la la la la la", add_special=True), SamplingParams(max_tokens=30)
        decoder = SpeculativeDecoder(context, [NgramDrafter()], FixedController(3))
        expected = Answer.of(run(decoder, prompt, params))
        decoder.prefill(prompt, lambda: False)
        text = TextAssembler(model.vocab)
        decoder.start(prompt, params, text)
        rounds = [decoder.commit(decoder.decode(decoder.propose())) for _ in range(4)]
        before, budget = list(context.tokens), decoder.budget
        forward = decoder.decode(decoder.propose())
        owners = (text, context, decoder.controller, decoder.drafters[0])
        owner: Any = next(each for each in owners if hasattr(each, where))
        calls = iter([fail, getattr(owner, where)])  # what takes the round back needs ``truncate`` too
        with monkeypatch.context() as patch:
            patch.setattr(owner, where, lambda *args: next(calls)(*args))
            with pytest.raises(Broken):
                decoder.commit(forward)
        assert [*prompt, *Answer.of(rounds).tokens] == decoder.tokens
        assert (context.tokens, decoder.budget) == (before, budget)
        decoder.close()
        assert Answer.of(run(decoder, prompt, params)) == expected
