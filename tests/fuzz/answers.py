"""Answers with every kind of drafter, several at a time, on every engine: each is what the target alone says.

On the reference engine tokens, text, thinking, log-probabilities and the reason for ending are those of plain decoding.
Fast engines round differently in every width of a pass, so there each token is looked up in the target's own rows for
the text before it: it has to be the choice that they lead to, or to lie beside it by no more than rounding. The rest
of an answer (thinking told apart, budgets kept, stop strings) follows from its tokens, and is made of them again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from localspec import LLM, Reply, SamplingParams
from localspec.backends import unavailable_reason
from localspec.backends.base import Context, Model, Piece
from localspec.controllers.fixed import FixedController
from localspec.engine import drafts as drafts_module
from localspec.engine import fit as fit_module
from localspec.engine import state as state_module
from localspec.engine.pair import Pair
from localspec.engine.request import Request, RoundStream
from localspec.llm import Session
from localspec.sampling.constraint import constraint_for
from localspec.sampling.sampling import Noise, distribution, edit_logits
from localspec.spec_decode.ahead import DraftAhead
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.rounds import EmittedToken, Span
from localspec.spec_decode.verification import STREAM_TARGET
from tests.fuzz.target import Check, Target, timed
from tests.support.gguf_vocabs import spm_vocab
from tests.support.ggufs import Shape, correlated_pair, write_llama
from tests.support.heads import write_random_head
from tests.support.published_heads import write_dflash, write_eagle3
from tests.support.thinkers import FAMILIES
from tests.support.waiting import held

ENGINES = ("reference", "llama-cpp", "ik-llama", "mlx")
N_CTX = 176
N_VOCAB = 300

DRAFTS = (
    ("ngram",),
    ("model",),
    ("corpus",),
    ("early-exit",),
    ("chained",),
    ("ngram", "model"),
    ("early-exit", "model"),
    ("ngram", "chained"),
    ("ngram", "corpus", "model"),
    ("ngram", "early-exit", "chained"),
    ("pard",),
    ("text",),
)
"""What drafts together; in an answer that follows a grammar that drafts too."""

PUBLISHED = (("eagle3",), ("dflash",), ("dspark",), ("ngram", "eagle3", "model"), ("dflash", "ngram"), ("dflash2",))
"""The same with heads that models are published with; where the engine computes none of a kind, llama.cpp does."""

WAYS = ("chain", "branches", "ahead")  # How one answer at a time is drafted; several are drafted in chains

SHARP = SamplingParams(max_tokens=24)
PARAMS = (
    SHARP,
    SHARP,
    replace(SHARP, repeat_penalty=1.3, frequency_penalty=0.2, repeat_last_n=8),
    replace(SHARP, temperature=1.0, seed=3),
    replace(SHARP, temperature=0.6, seed=2**63),
    replace(SHARP, temperature=1.0, seed=7, presence_penalty=0.5),
    replace(SHARP, temperature=0.8),
)
FILTERED = (
    replace(SHARP, temperature=1.0, seed=5, top_k=5),
    replace(SHARP, temperature=1.5, seed=6, top_p=0.8, min_p=0.02),
    replace(SHARP, temperature=1.0, seed=9, top_k=20, repeat_penalty=1.2),
)
"""Where a token at the edge of what is kept would be in or out by rounding: for the reference engine."""

GRAMMARS: tuple[dict[str, Any], ...] = (
    {"grammar": 'root ::= "the " ("of" | "and")+ "é😀"'},
    {"grammar": 'root ::= [a-z]{1,20} "\\n" root | "the end"'},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["hello world", "hello there"]}}}},
    {"response_format": {"type": "json_object"}},
)
STOPS = ("e", "th", " the", "ab", "he in", "<|end|>")
FAMILY_NAMES = ("deepseek", "qwen")
"""Thinking opens anywhere, with a control token; or at the beginning of an answer, with a text."""

OPENING = 3.0  # Added to the logit of the token that opens a block, so that some do


@dataclass(frozen=True)
class Ask:
    """One question."""

    goes_on: int = 0  # from which conversation before it, counted from the last; 0 is none
    kept: float = 1.0  # what share of that it keeps; -1 keeps the prompt
    fresh: tuple[int, int] = (0, 5)  # seed and number of the tokens that come then
    params: int = 0  # of ``PARAMS``, then ``FILTERED``
    n_most: int = 12  # tokens of the answer
    stop: int | None = None  # stop, grammar: of ``STOPS`` and ``GRAMMARS``; None is none
    grammar: int | None = None
    budget: int | None = None  # of a thinking block; -1 lets thinking be, None does not tell it apart
    length: int | str = 4  # of drafts
    predicted: bool = False  # whether n-grams are told what the target will say, as far as the middle
    leaves: int | None = None  # after how many rounds nobody wants the answer any more; None takes all of it
    together: bool = True  # whether it is asked with the one before, rather than once that was answered
    late: bool = False  # whether it is asked once the first of those has begun to answer
    priority: int = 0  # of the request
    talk: int | None = None  # which session it is the next question of; None is token ids
    saved: bool = False  # whether that session is saved, and goes on from its file


@dataclass(frozen=True)
class Case:
    """Questions to one ``LLM``."""

    family: str  # of ``FAMILY_NAMES``
    drafts: tuple[str, ...]  # of ``DRAFTS``
    parallel: int  # how many are answered at a time
    way: str  # of ``WAYS``, where that is one
    cache: int  # bytes that conversations put aside may take
    asks: tuple[Ask, ...]  # the questions


def case_of(
    rng: random.Random,
    drafts: tuple[str, ...] | None = None,
    parallel: int | None = None,
    way: str = "",
    n_asks: int | None = None,
) -> Case:
    """A random case, of a kind if that is given."""
    parallel = rng.choice([1, 2, 3]) if parallel is None else parallel
    way = way or rng.choice(WAYS)
    drafts = rng.choice(DRAFTS) if drafts is None else drafts
    asks = [_ask(rng) for _ in range(rng.randint(2, 9) if n_asks is None else n_asks)]
    return Case(rng.choice(FAMILY_NAMES), drafts, parallel, way, rng.choice([0, 1 << 14, 1 << 22]), tuple(asks))


def _ask(rng: random.Random) -> Ask:
    def at_times(share: float, values: Sequence[Any], otherwise: Any = None) -> Any:
        return rng.choice(values) if rng.random() < share else otherwise

    grammar = at_times(0.12, range(len(GRAMMARS)))
    kept = rng.choice([1.0, 1.0, 0.5, 0.9, -1.0, -1.0])
    return Ask(
        goes_on=rng.choice([0, 1, 1, 2, 3]),
        kept=kept,
        fresh=(rng.randrange(1000), rng.choice([0, 0, 0, 1, 5] if kept < 0 else [0, 1, 2, 5, 20, 45])),
        params=rng.randrange(len(PARAMS) + len(FILTERED)),
        n_most=rng.choice([1, 2, 5, 12, 24]),
        stop=at_times(0.3, range(len(STOPS))),
        grammar=grammar,
        budget=None if grammar is not None else at_times(0.4, [-1, 0, 0, 1, 2, 4]),
        length=rng.choice([1, 2, 4, 7, "auto"]),
        predicted=rng.random() < 0.2,
        leaves=at_times(0.15, [0, 1, 3]),
        together=rng.random() < 0.75,
        late=rng.random() < 0.3,
        priority=at_times(0.15, [-1, 1], 0),
        talk=at_times(0.2, [0, 1]),
        saved=rng.random() < 0.5,
    )


CASES = st.randoms(use_true_random=False).map(case_of)


Said = tuple[list[int], list[int]]  # A prompt and its answer, in tokens


@dataclass
class Asked:
    """A question that was sent: its prompt, also as tokens, and what was asked for beside drafts."""

    ask: Ask
    prompt: Any
    tokens: list[int]
    params: SamplingParams
    options: dict[str, Any]
    stream: RoundStream


class World:
    """The files of one engine, and the target alone; how many answers were compared, and which sources had draft
    tokens accepted."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.n_answers, self.accepted = 0, set[str]()
        self._is_exact = engine == "reference"
        self._choices = (*PARAMS, *FILTERED) if self._is_exact else PARAMS
        self._plain: dict[str, LLM] = {}
        self._files: dict[str, dict[str, str]] = {}
        self._noise: dict[str, float] = {}

    def close(self) -> None:
        for llm in self._plain.values():
            llm.close()

    def files(self, family: str) -> dict[str, str]:
        """The target, and what ``--draft`` calls each kind of drafter."""
        if family not in self._files:
            shape = Shape(n_layer=3, n_embd=64, n_head=2, n_head_kv=1, n_ff=64, residual=0.15)
            pair = correlated_pair(self.folder, FAMILIES[family].vocab, shape=shape, name=family)
            texts = self.folder / f"texts-{family}"
            texts.mkdir()
            with LLM(pair.target, draft=None, **self._options() | {"backend": "reference"}) as llm:
                said = [llm.generate([token], replace(SHARP, ignore_eos=True)).text for token in range(3, 250, 6)]
            (texts / "said.txt").write_text("\n".join(said))
            found = {"target": str(pair.target), "model": str(pair.draft), "corpus": f"corpus:{texts}"}
            found |= {"ngram": "ngram", "early-exit": "early-exit:1", "pard": f"pard:{pair.draft}:3"}
            found["text"] = str(write_llama(self.folder / f"{family}-text.gguf", shape, spm_vocab()))
            found["chained"] = f"head:{write_random_head(pair.target, self.folder / f'{family}-head.gguf')}"
            layers, whole = (1, 1, 2), {"own_embeddings": True, "own_output": True}
            for name, write, options in (
                ("eagle3", write_eagle3, {"n_out": 200}),
                ("dflash", write_dflash, {"windows": [True, False]}),
                ("dspark", write_dflash, {"markov": True, "confidence": True, "n_out": 200}),
                ("dflash2", write_dflash, {"selector": 4, "block_size": 8}),
            ):
                made = write(pair.target, self.folder / f"{family}-{name}.gguf", layers, **whole, **options)
                found[name] = str(made)
            self._files[family] = found
        return self._files[family]

    def _options(self) -> dict[str, Any]:
        return {"backend": self.engine, "n_ctx": N_CTX, "n_threads": 1, "idle": False, "remember": False}

    def plain(self, family: str) -> LLM:
        """The target alone."""
        if family not in self._plain:
            target = self.files(family)["target"]
            self._plain[family] = LLM(target, draft=None, prefix_cache_bytes=0, **self._options())
        return self._plain[family]

    @contextmanager
    def opened(self, case: Case) -> Iterator[LLM]:
        """What the case asks."""
        files = self.files(case.family)
        with ExitStack() as patches:
            if case.parallel == 1 and case.way == "branches":
                patches.enter_context(patch.object(fit_module, "why_chains", _branches_here))
                branching = partial(FixedController, branches=3)
                patches.enter_context(patch.object(state_module, "FixedController", branching))
            if case.parallel == 1 and case.way == "ahead":
                patches.enter_context(patch.object(drafts_module, "ahead_of", _ahead_here))
            options = self._options() | {"parallel": case.parallel, "prefix_cache_bytes": case.cache}
            with LLM(files["target"], draft=[files[each] for each in case.drafts], **options) as llm:
                yield llm
                assert len(llm.draft_names) == len(case.drafts), f"a drafter was lost: {llm.warnings}"

    # -- asking ------------------------------------------------------------------------------------------------------

    def check(self, case: Case) -> None:
        """Ask all, and compare."""
        said: list[Said] = []
        with self.opened(case) as llm:
            talks = [llm.session(system="Be brief."), llm.session()]
            for group in _groups(case.asks):
                asked = self._answered(llm, case.family, group, said, talks)
                for each in asked:
                    self._compare(case.family, each)
                said += [(each.tokens, each.stream.reply.token_ids) for each in asked]

    def _answered(
        self, llm: LLM, family: str, group: Sequence[Ask], said: Sequence[Said], talks: list[Session]
    ) -> list[Asked]:
        """Ask a group together, those that are late once the first is being answered; until all are."""
        asked: list[Asked] = []
        taken: set[int] = set()
        early, late = [each for each in group if not each.late], [each for each in group if each.late]

        def send(ask: Ask) -> None:
            before = [*said, *((each.tokens, list[int]()) for each in asked)]
            talk = None if ask.talk in taken or ask.talk is None else talks[ask.talk]
            taken.update(() if talk is None else [ask.talk])
            asked.append(self._sent(llm, family, ask, before, talk))

        with held(llm):
            for ask in early:
                send(ask)
        if early and late:
            next(asked[0].stream, None)
        for ask in late:
            send(ask)
        for each in asked:
            if each.ask.leaves is not None:
                for _ in zip(range(each.ask.leaves), each.stream, strict=False):
                    pass
                each.stream.close()
        for each in asked:
            assert each.stream.reply
        for number in taken:
            if any(each.ask.talk == number and each.ask.saved for each in asked):
                messages = list(talks[number].messages)
                talks[number].save(self.folder / "talk.session")
                talks[number] = llm.load_session(self.folder / "talk.session")
                assert talks[number].messages == messages
        return asked

    def _sent(self, llm: LLM, family: str, ask: Ask, said: Sequence[Said], talk: Session | None) -> Asked:
        params, opening = self._choices[ask.params % len(self._choices)], FAMILIES[family].opening.strip()
        options: dict[str, Any] = {"logprobs": 2} if ask.fresh[0] % 4 == 0 else {}
        if ask.budget is not None:
            options |= {"think": "auto", "thinking_budget": None if ask.budget < 0 else ask.budget}
            (token,) = llm.tokenize(opening, parse_special=True)
            params = replace(params, logit_bias={token: OPENING})
        params = replace(params, max_tokens=ask.n_most, ignore_eos=ask.fresh[0] % 3 > 0 and ask.grammar is None)
        if ask.grammar is not None:
            params = replace(params, **GRAMMARS[ask.grammar])
        if ask.stop is not None:
            params = replace(params, stop=(STOPS[ask.stop],))
        drafting: dict[str, Any] = {"draft_length": ask.length, "priority": ask.priority}
        if talk is not None:
            question = "".join(chr(97 + (ask.fresh[0] + i) % 26) for i in range(ask.fresh[1])) or "the"
            asked = [*talk.messages, {"role": "user", "content": question}]
            tokens = _read(self.plain(family), asked, params, options)[0]
            if len(tokens) <= N_CTX - 30:
                return Asked(ask, asked, tokens, params, options, talk.rounds(question, params, **options, **drafting))
            talk.messages = talk.messages[:1]
        rng, n = random.Random(ask.fresh[0]), ask.fresh[1]
        fresh = [rng.randrange(3, 250) for _ in range(n if n < 20 else n // 2)]
        before, answer = said[-ask.goes_on] if 0 < ask.goes_on <= len(said) else ([], [])
        if ask.kept > 0:
            before = [*before, *answer]
            before = before[: round(ask.kept * len(before))]
        prompt = [*before, *fresh * (1 if n < 20 else 2)][: N_CTX - 30] or [5]
        if ask.predicted:
            known = self.plain(family).generate(prompt, params, **options).token_ids
            drafting["prediction"] = [*known[: len(known) // 2], 7, *known[len(known) // 2 :]]
        return Asked(ask, prompt, prompt, params, options, llm.rounds(prompt, params, **options, **drafting))

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _compare(self, family: str, asked: Asked) -> None:
        reply, plain = asked.stream.reply, self.plain(family)
        self.n_answers += 1
        counts = reply.stats["by_source"].items()
        self.accepted |= {source for source, each in counts if each["num_accepted_tokens"]}
        if self._is_exact and (asked.params.greedy or asked.params.seed is not None):
            expected = plain.rounds(asked.prompt, asked.params, **asked.options).reply
            self._equal(reply, expected, asked)
        else:
            problems = plain.run(lambda pair: list(self._misfits(pair, family, asked)))
            assert not problems, f"{problems[0]}: {asked}"
        check_text(plain, asked)

    def _equal(self, reply: Reply, expected: Reply, asked: Asked) -> None:
        n = len(reply.token_ids)
        assert reply.token_ids == expected.token_ids[:n], f"{reply.token_ids} is not {expected.token_ids}: {asked}"
        assert [each.logprobs for each in reply.tokens] == [each.logprobs for each in expected.tokens[:n]]
        if asked.ask.leaves is None:
            for name in ("token_ids", "text", "thinking", "finish_reason"):
                got, due = getattr(reply, name), getattr(expected, name)
                assert got == due, f"{name} {got!r} is not {due!r}: {asked}"

    def _misfits(self, pair: Pair, family: str, asked: Asked) -> Iterator[str]:
        """Tokens that the target would not have chosen."""
        if family not in self._noise:
            self._noise[family] = 0.0 if self._is_exact else noise_of(pair.context)
        most, tokens = 8 * max(5e-4, self._noise[family]), asked.stream.reply.tokens
        constraint = constraint_for(asked.params, pair.target.vocab)
        text = list(asked.tokens)
        pair.context.truncate(0)
        if not tokens:
            return
        rows = pair.context.decode([*text, *(each.id for each in tokens[:-1])]).logits[len(text) - 1 :]
        for row, token in zip(rows, tokens, strict=True):
            if token.kind != "forced":
                gap = gap_of(row if constraint is None else constraint.masked(row), token.id, text, asked.params)
                if gap > most:
                    yield f"token {len(text) - len(asked.tokens)} of {reply_ids(tokens)} is {gap:.3g} logits off"
            if constraint is not None:
                constraint.settle(token.id)
            text.append(token.id)


def reply_ids(tokens: Sequence[EmittedToken]) -> list[int]:
    return [token.id for token in tokens]


def gap_of(row: Any, token: int, text: Sequence[int], params: SamplingParams) -> float:
    """By how many logits a token falls behind the one that comes after a text, drawn with the request's noise."""
    edited = edit_logits(row, text, params).astype(np.float64)
    if not params.greedy:
        if params.seed is None:
            return 0.0 if distribution(row, text, params).prob(token) else np.inf
        drawn = Noise(params.seed).uniforms(len(text), np.arange(len(row)), STREAM_TARGET)
        edited -= params.temperature * np.log(-np.log(drawn))
    return float(edited.max() - edited[token])


def noise_of(context: Context) -> float:
    """How far rows of passes of different widths, and beside other sequences, are from each other [logits]."""
    rng = random.Random(1)
    texts = [[rng.randrange(3, 250) for _ in range(40)] for _ in range(3)]
    found = 0.0
    with context.model.new_batch(3, 400, n_ctx=120) as batch:
        several = [[] for _ in texts]
        for width in (1, 2, 4, 8, 25):
            start = batch[0].n_past
            pieces = [Piece(i, text[start : start + width]) for i, text in enumerate(texts)]
            for rows, forward in zip(several, batch.decode(pieces), strict=True):
                rows.append(forward.logits.copy())
    for text, rows in zip(texts, several, strict=True):
        context.truncate(0)
        whole = context.decode(text).logits.copy()
        context.truncate(0)
        single = np.concatenate([context.decode([token]).logits.copy() for token in text])
        beside = np.concatenate(rows)
        found = max(found, *(float(np.abs(each - whole).max()) for each in (single, beside)))
    context.truncate(0)
    return found


def check_text(plain: LLM, asked: Asked) -> None:
    """Text, thinking and the end of an answer are what its tokens make; forced are those of a spent budget alone."""
    reply, params = asked.stream.reply, asked.params
    _, thinking = _read(plain, asked.prompt, params, asked.options)
    text = TextAssembler(plain.vocab, params.stop, thinking, plain.vocab.named(params.stop))
    ends = frozenset() if params.ignore_eos else plain.vocab.eog
    spans: list[Span] = []
    forced: list[int] = []
    for i, token in enumerate(reply.tokens):
        is_over = text.stopped or (i > 0 and reply.tokens[i - 1].id in ends)
        assert not is_over, f"it goes on behind its end: {asked}"
        forced = forced or list(thinking.forced if thinking is not None else ())
        assert (token.kind == "forced") == bool(forced), f"token {i} of {reply.tokens}: {asked}"
        assert not forced or forced.pop(0) == token.id
        if token.id not in ends:
            spans += text.push(token.id, token.kind, token.source)
    spans += text.finish()
    for part, said in (("answer", reply.text), ("thinking", reply.thinking)):
        assert "".join(span.text for span in spans if span.part == part) == said, asked
    if reply.finish_reason == "length":
        assert len(reply.tokens) == min(params.max_tokens or N_CTX, N_CTX - len(asked.tokens)), asked


def _read(llm: LLM, prompt: Any, params: SamplingParams, options: dict[str, Any]) -> Any:
    """The tokens of a prompt, and what tells thinking apart in the answer."""
    return Request(llm.inspect().encoder, prompt, params, **options).read()


def _groups(asks: Sequence[Ask]) -> list[list[Ask]]:
    groups: list[list[Ask]] = []
    for ask in asks:
        if groups and ask.together:
            groups[-1].append(ask)
        else:
            groups.append([ask])
    return groups


def _ahead_here(target: Model, drafts: Any) -> DraftAhead:
    return DraftAhead(cautious=False, n_steps=3)


def _branches_here(model: Model, *_: Any) -> str | None:
    return None if model.capabilities.trees else model.why_no_trees()


@contextmanager
def _opened(engine: str, folder: Path) -> Iterator[Check]:
    world = World(engine, folder)

    def check(case: Case) -> None:
        with timed("the answers", 60.0):
            world.check(case)

    try:
        yield check
    finally:
        world.close()


TARGETS = [
    Target(f"answers on {name}", CASES, partial(_opened, name), in_suite=0, missing=partial(unavailable_reason, name))
    for name in ENGINES
]
