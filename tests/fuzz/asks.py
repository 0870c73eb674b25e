"""Requests of every kind to one ``LLM`` after another: an answer equal to that of plain decoding, or one line.

Whatever a request was (wrong, cancelled, late, constrained), the next one is answered as a fresh ``LLM`` would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from localspec import LLM, LocalspecError, Reply, SamplingParams
from tests.fuzz.target import Check, Target, Timed, one_line, table
from tests.support import ggufs

N_CTX = 160
N_VOCAB = 300

ODD: list[Any] = [
    None,
    True,
    "",
    "x",
    b"x",
    [],
    {},
    (),
    0,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    -float("inf"),
    10**30,
    -(2**63),
]
ODD += [
    2**64,
    object,
    [None],
    {"a": 1},
    {1: "x"},
    {None: 1},
    np.int64(5),
    np.float32(0.5),
    np.array([1, 2]),
    1j,
    "\ud800",
    "\x00",
]


class Odd:
    """A value that fits nowhere, with a repr that says which."""

    def __init__(self, index: int) -> None:
        self.index = index

    @property
    def value(self) -> Any:
        return ODD[self.index]

    def __repr__(self) -> str:
        return f"Odd({self.index})"


ODDS = st.integers(0, len(ODD) - 1).map(Odd)

STOPS = st.sampled_from(
    [
        "e",
        "th",
        " the",
        "the ",
        "\n",
        "é",
        "he in",
        "ab",
        "aab",
        "aaab",
        "b",
        "\x00",
        "😀",
        "�",
        " ",
        "in",
        "the of and " * 40,
    ]
)

RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7, 100.0, 1e-9]),
    "top_k": st.sampled_from([0, 1, 2, 5, 40, N_VOCAB - 1, N_VOCAB, 10**9]),
    "top_p": st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999]),
    "min_p": st.sampled_from([0.0, 1e-9, 0.01, 0.2, 0.9, 0.999]),
    "repeat_penalty": st.sampled_from([1.0, 1e-9, 0.7, 1.3, 2.0, 1e9]),
    "repeat_last_n": st.sampled_from([0, 1, 2, 5, 64, 1000, 2**40]),
    "presence_penalty": st.sampled_from([0.0, -1.0, 0.5, 3.0, 1e30]),
    "frequency_penalty": st.sampled_from([0.0, -0.5, 0.5, -1e30]),
    "logit_bias": st.dictionaries(
        st.sampled_from([*range(0, N_VOCAB, 7), N_VOCAB - 1, N_VOCAB, -1, 2**40]),
        st.sampled_from([-float("inf"), 3.0, -3.0, 8.0, 1e30, -1e30]),
        max_size=4,
    ),
    "max_tokens": st.sampled_from([1, 2, 3, 7, 20, 40, 10**9]),
    "stop": st.lists(STOPS, max_size=3) | STOPS,
    "ignore_eos": st.booleans(),
    "seed": st.sampled_from([0, 1, -2, 2**63, 2**64 - 1, -(2**63), 12345]),
}
FORMATS: list[dict[str, Any]] = table("asks", "FORMATS")
BROKEN_FORMATS: list[dict[str, Any]] = table("asks", "BROKEN_FORMATS")


@st.composite
def sampling(draw: Any) -> dict[str, Any]:
    """Arguments of ``SamplingParams``, mostly right."""
    names = draw(st.lists(st.sampled_from(sorted(RIGHT)), max_size=6, unique=True))
    given = {name: draw(RIGHT[name]) for name in names}
    if given.get("temperature") and given.get("seed") is None:
        given["seed"] = draw(st.integers(0, 2**64 - 1))
    given.setdefault("max_tokens", draw(st.sampled_from([1, 2, 5, 12, 30])))
    chance = draw(st.integers(0, 19))
    if chance < 4:
        given |= draw(st.sampled_from(FORMATS))
        given["ignore_eos"] = False
    elif chance == 4:
        given |= draw(st.sampled_from(BROKEN_FORMATS))
    elif chance < 8:
        given[draw(st.sampled_from([*sorted(RIGHT), "response_format", "grammar"]))] = draw(ODDS)
    return given


TEXTS = st.one_of(
    st.sampled_from(table("asks", "texts")),
    st.text(max_size=12),
    st.text(st.characters(), max_size=6),
    st.sampled_from(["the of and " * 30, "a" * 300]),
)
IDS = st.one_of(
    st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=40),
    st.lists(st.sampled_from([0, 1, 5, N_VOCAB - 1, N_VOCAB, -1, 2**40, 2**70]), max_size=4),
    st.sampled_from([N_CTX - 1, N_CTX, N_CTX + 1, N_CTX - 2]).map(lambda n: [i % 250 for i in range(n)]),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "user\n"]), "content": TEXTS | ODDS}
    ),
    max_size=3,
)
PROMPTS = st.one_of(TEXTS, IDS, IDS, MESSAGES, ODDS)

ENDS = st.one_of(
    st.just(("read",)),
    st.just(("read",)),
    st.just(("read",)),
    st.tuples(st.just("closed after"), st.integers(0, 4)),
    st.tuples(st.just("dropped after"), st.integers(0, 4)),
    st.tuples(st.just("raised after"), st.integers(0, 4)),
    st.tuples(st.just("stream closed after"), st.integers(0, 4)),
    st.tuples(st.just("late by"), st.sampled_from([1e-9, 1e-3, 5e-3])),
    st.tuples(st.just("task cancelled after"), st.integers(0, 4)),
    st.tuples(st.just("asyncio"), st.just(0)),
)


@st.composite
def requests(draw: Any) -> dict[str, Any]:
    """One request: prompt, sampling parameters, options, and how it ends."""
    options: dict[str, Any] = {}
    chance = draw(st.integers(0, 9))
    if chance < 4:
        options["draft_length"] = draw(st.sampled_from([0, 1, 2, 4, 9, 30, "auto", "3"]))
    if chance in (3, 4):
        options["drafters"] = draw(st.sampled_from([["ngram"], [], ["model"], ["nobody"], None]))
    if chance in (5, 6):
        options["prediction"] = draw(TEXTS | IDS)
    if chance == 7:
        options["logprobs"] = draw(st.sampled_from([0, 2, 20]))
    if chance == 8:
        options["speculate"] = draw(st.booleans())
    if chance == 9:
        name = st.sampled_from(
            ["draft_length", "drafters", "prediction", "logprobs", "speculate", "deadline", "conversation"]
        )
        options[draw(name)] = draw(ODDS)
    return {
        "prompt": draw(PROMPTS),
        "continues": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        "params": draw(sampling()),
        "options": options,
        "end": draw(ENDS),
    }


CASES = st.lists(requests(), min_size=1, max_size=4)


def _real(value: Any) -> Any:
    """A case's value with the odd ones put in."""
    if isinstance(value, Odd):
        return value.value
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_real(item) for item in value]
    return value


def ask(llm: LLM, prompt: Any, params: SamplingParams, options: dict[str, Any], end: tuple[Any, ...]) -> Reply | None:
    """Ask as a case says; None where nobody sees the reply."""
    how, *rest = end
    if how == "late by":
        options = {"deadline": rest[0]} | options
    if how in ("task cancelled after", "asyncio"):
        return asyncio.run(_in_a_task(llm, prompt, params, options, rest[0] if how != "asyncio" else None))
    if how == "stream closed after":
        pieces = llm.stream(prompt, params, **options)
        for _ in zip(range(rest[0]), pieces, strict=False):
            pass
        pieces.close()  # type: ignore[attr-defined]
        return None
    with llm.rounds(prompt, params, **options) as rounds:
        if how in ("closed after", "dropped after", "raised after"):
            for _ in zip(range(rest[0]), rounds, strict=False):
                pass
            if how == "dropped after":
                del rounds
                return None
            if how == "raised after":
                with suppress(ZeroDivisionError), rounds:
                    raise ZeroDivisionError
            rounds.close()
            reply = rounds.reply
        else:
            text = "".join(round_.text for round_ in rounds)
            reply = rounds.reply
            assert text == reply.text, "the pieces do not sum to the text"
    return reply


async def _in_a_task(llm: LLM, prompt: Any, params: SamplingParams, options: Any, after: int | None) -> Reply | None:
    if after is None:
        return await llm.agenerate(prompt, params, **options)

    async def read() -> Reply:
        async with llm.arounds(prompt, params, **options) as rounds:
            seen = 0
            async for _ in rounds:
                seen += 1
                if seen == after:
                    raise asyncio.CancelledError
            return await rounds.reply()

    task = asyncio.ensure_future(read())
    if not after:
        await asyncio.sleep(0)
        task.cancel()
    with suppress(asyncio.CancelledError):
        return await task
    return None


SETTLED = (SamplingParams(max_tokens=8, ignore_eos=True), SamplingParams(max_tokens=8, temperature=1.0, seed=3))
"""Ordinary requests, asked after every case."""


class Asker:
    """Checks each request against plain decoding, and that the next one is right."""

    def __init__(self, llm: LLM, plain: LLM, names: dict[str, str], fresh: list[Reply]) -> None:
        self.llm = llm
        self._plain = plain
        self._fresh = fresh
        self._names = names
        self._said: list[int] = []

    def check(self, case: dict[str, Any]) -> None:
        prompt, options = _real(case["prompt"]), _real(case["options"])
        if isinstance(options.get("drafters"), list):
            options["drafters"] = [
                self._names.get(name, name) if isinstance(name, str) else name for name in options["drafters"]
            ]
        if isinstance(prompt, list) and all(type(item) is int for item in prompt):
            prompt = self._said[: int(case["continues"] * len(self._said))] + prompt
        try:
            params = SamplingParams(**_real(case["params"]))
        except LocalspecError as error:
            one_line(error)
            return
        reply: Reply | str | None
        try:
            reply = ask(self.llm, prompt, params, options, case["end"])
        except LocalspecError as error:
            reply = one_line(error)
        if isinstance(reply, Reply):
            self._compare(reply, prompt, params)
            if reply.token_ids:
                self._said = (self.llm.encode(prompt) + reply.token_ids)[:N_CTX]
        elif reply is not None and case["end"] == ("read",) and not options:
            assert isinstance(self._answer(prompt, params), str), (
                f"plain decoding has no objection, drafting says: {reply}"
            )

    def _answer(self, prompt: Any, params: SamplingParams) -> Reply | str:
        try:
            return self._plain.generate(prompt, params)
        except LocalspecError as error:
            return one_line(error)

    def _compare(self, reply: Reply, prompt: Any, params: SamplingParams) -> None:
        expected = self._answer(prompt, params)
        if isinstance(expected, str) and reply.finish_reason == "cancelled" and not reply.token_ids:
            return  # it never came so far
        assert isinstance(expected, Reply), f"plain decoding says {expected}, drafting answers {reply.text!r}"
        if reply.finish_reason == "cancelled":
            assert reply.token_ids == expected.token_ids[: len(reply.token_ids)], "cancelled, and not a beginning"
            assert expected.text.startswith(reply.text.rstrip("\ufffd")), (reply.text, expected.text)
        else:
            assert (reply.token_ids, reply.finish_reason) == (expected.token_ids, expected.finish_reason)
            assert reply.text == expected.text
        if reply.text or not params.stop:
            stops = [params.stop] if isinstance(params.stop, str) else params.stop
            assert not any(stop in reply.text for stop in stops), "a stop string is part of the text"

    def settle(self) -> None:
        """After everything: an ordinary request is answered as by a fresh pair."""
        for params, expected in zip(SETTLED, self._fresh, strict=True):
            reply = self.llm.generate("the of and", params)
            said = (reply.token_ids, reply.text, reply.finish_reason)
            assert said == (expected.token_ids, expected.text, expected.finish_reason)
        assert not self.llm.busy
        assert not self.llm.queue_length


def write_pair(folder: Path) -> ggufs.Pair:
    shape = ggufs.Shape(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.4)
    return ggufs.correlated_pair(folder, ggufs.bpe_vocab(N_VOCAB), shape=shape, name="asked")


@contextmanager
def _opened(folder: Path) -> Iterator[Check]:
    pair = write_pair(folder)

    options: dict[str, Any] = {"backend": "reference", "n_ctx": N_CTX}
    with LLM(pair.target, draft=None, **options) as llm:
        fresh = [llm.generate("the of and", params) for params in SETTLED]
    with (
        LLM(pair.target, draft=["ngram", str(pair.draft)], prefix_cache_bytes=1 << 19, **options) as llm,
        LLM(pair.target, draft=None, prefix_cache_bytes=0, **options) as plain,
    ):
        names = {"model": llm.draft_names[1], "ngram": llm.draft_names[0]}
        asker = Asker(llm, plain, names, fresh)

        def check(case: list[dict[str, Any]]) -> None:
            with Timed("the requests", 60.0):
                for each in case:
                    asker.check(each)
                asker.settle()

        yield check


TARGET = Target("requests", CASES, _opened, in_suite=100)
