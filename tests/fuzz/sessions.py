"""Conversations: asked, cancelled, edited, undone, saved, damaged, loaded; each answer is that of a fresh ``LLM``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from localspec import LLM, LocalspecError, SamplingParams
from localspec.llm import Session
from tests.fuzz.target import Check, Target, one_line, timed
from tests.support.ggufs import Shape, bpe_vocab, correlated_pair

PARAMS = [
    SamplingParams(max_tokens=6, ignore_eos=True),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=8, temperature=1.0, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=10, stop=["e", "th"], logit_bias={5: 2.0}),
]
TEXTS = st.sampled_from(["the", "of and", "", "<|im_end|>", "é😀", "\ud800", "\x00", "the of and " * 12])
SHARES = st.floats(0, 1, exclude_max=True)

STEPS = st.one_of(
    st.tuples(st.just("ask"), TEXTS, st.integers(0, len(PARAMS) - 1)),
    st.tuples(st.just("ask"), TEXTS, st.integers(0, len(PARAMS) - 1)),
    st.tuples(st.just("ask"), st.just("the"), st.integers(0, len(PARAMS) - 1)),
    st.tuples(st.just("cancel"), TEXTS, st.integers(0, 3)),
    st.tuples(st.just("undo")),
    st.tuples(st.just("edit"), SHARES, TEXTS),
    st.tuples(st.just("drop"), SHARES),
    st.tuples(st.just("add"), st.sampled_from(["user", "assistant", "system", "x y", ""]), TEXTS),
    st.tuples(st.just("other"), st.sampled_from(["the of", "and in the is that for " * 4])),
    st.tuples(st.just("cache"), st.sampled_from([0, 1 << 14, 1 << 20])),
    st.tuples(st.just("reload")),
    st.tuples(st.just("damage"), st.sampled_from(["flip", "cut", "tail", "zero"]), SHARES),
)
CASES = st.lists(STEPS, min_size=1, max_size=7)


def damaged(raw: bytes, how: str, share: float) -> bytes:
    at = int(share * len(raw))
    if how == "flip":
        return raw[:at] + bytes([raw[at] ^ 0x41]) + raw[at + 1 :]
    if how == "cut":
        return raw[:at]
    return raw + b"\x00x" if how == "tail" else raw[:at] + bytes(len(raw) - at)


class Talk:
    """One conversation on two pairs: drafted, with everything remembered, and plain, reading it all again each time."""

    def __init__(self, llm: LLM, plain: LLM, path: Path) -> None:
        self.llm, self.plain, self.path = llm, plain, path
        self.session: Session = llm.session(system="Be brief.")

    def step(self, what: str, *rest: Any) -> None:
        messages = self.session.messages
        if what == "ask":
            self._ask(rest[0], PARAMS[rest[1]])
        elif what == "cancel":
            before = list(messages)
            with self.session.rounds(rest[0], PARAMS[0]) as rounds:
                for _ in zip(range(rest[1]), rounds, strict=False):
                    pass
            said = rounds.reply.token_ids
            assert len(self.session.messages) == len(before) + 2 * bool(said)
        elif what == "undo":
            self.session.undo()
        elif what == "edit" and messages:
            messages[int(rest[0] * len(messages))]["content"] = rest[1]
        elif what == "drop" and messages:
            del messages[int(rest[0] * len(messages))]
        elif what == "add":
            messages.append({"role": rest[0], "content": rest[1]})
        elif what == "other":
            self.llm.generate(rest[0], PARAMS[0])
        elif what == "cache":
            self.llm.prefix_cache_bytes = rest[0]
        elif what in ("reload", "damage"):
            self._reload(rest)

    def _ask(self, text: str, params: SamplingParams) -> None:
        asked = [*self.session.messages, {"role": "user", "content": text}]
        failure: LocalspecError | None = None
        try:
            reply = self.session.chat(text, params)
        except LocalspecError as error:
            one_line(error)
            failure = error
        if failure is not None:
            assert self.session.messages == asked[:-1], "a failed question became part of the conversation"
            try:
                self.plain.chat(asked, params)
            except LocalspecError:
                return
            raise AssertionError("plain decoding has no objection") from failure
        expected = self.plain.chat(asked, params)
        said = (reply.token_ids, reply.text, reply.finish_reason)
        assert said == (expected.token_ids, expected.text, expected.finish_reason)

    def _reload(self, damage: tuple[Any, ...]) -> None:
        kept = [dict(message) for message in self.session.messages]
        self.session.save(self.path)
        if damage:
            self.path.write_bytes(damaged(self.path.read_bytes(), *damage))
        try:
            session = self.llm.load_session(self.path)
        except LocalspecError as error:
            one_line(error)
            if not damage:
                raise AssertionError("it cannot read what it wrote") from error
            self.path.unlink()
            return
        assert session.messages == kept, "another conversation came back"
        self.session = session


@contextmanager
def _opened(folder: Path) -> Iterator[Check]:
    shape, path = Shape(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.4), folder / "talk.session"
    pair = correlated_pair(folder, bpe_vocab(300), shape=shape, name="asked")
    options: dict[str, Any] = {"backend": "reference", "n_ctx": 160}
    with (
        LLM(pair.target, draft=["ngram", str(pair.draft)], **options) as llm,
        LLM(pair.target, draft=None, prefix_cache_bytes=0, **options) as plain,
    ):

        def check(steps: list[tuple[Any, ...]]) -> None:
            path.unlink(missing_ok=True)
            talk = Talk(llm, plain, path)
            with timed("the conversation", 60.0):
                for step in steps:
                    try:
                        talk.step(*step)
                    except LocalspecError as error:
                        one_line(error)
                llm.prefix_cache_bytes = 1 << 20

        yield check


TARGET = Target("sessions", CASES, _opened, in_suite=60)
