"""Characters out of bytes, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.rounds import Span, TokenKind

KINDS: Sequence[TokenKind] = ("accepted", "recovered", "bonus", "plain")
LETTERS = "ab\U0001f600é\n"
TEXTS = st.text(alphabet=LETTERS, max_size=40) | st.text(alphabet="ab", max_size=20)
STOPS = st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=4) | st.text("ab", min_size=1, max_size=7), max_size=4)


class Pieces:
    """A vocabulary in which token i is the i-th piece of some bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


@st.composite
def pieces_of(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes, cut anywhere: inside of characters too, and with empty pieces."""
    data = draw(whole)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=len(data) + 2)))
    bounds = [0, *cuts, len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def assemble(pieces: Sequence[bytes], stop: Sequence[str]) -> tuple[str, bool]:
    assembler = TextAssembler(Pieces(pieces), stop)
    spans = [span for i in range(len(pieces)) for span in assembler.push(i, "plain", "target")]
    spans += assembler.finish()
    return "".join(span.text for span in spans), assembler.stopped


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The definition: an answer ends where a stop string first begins in it."""
    found = [text.find(s) for s in stop if s in text]
    return (text[: min(found)], True) if found else (text, False)


def releasable(text: str, stop: Sequence[str]) -> int:
    """How much of a text can be shown whatever follows it."""
    cut, _ = cut_at_stop(text, stop)
    opens = [i for i in range(len(text)) if any(s.startswith(text[i:]) and s != text[i:] for s in stop)]
    return min([len(cut), *opens])


class TestCharacters:
    @given(pieces_of(st.one_of(TEXTS.map(str.encode), st.binary(max_size=30))))
    def test_pieces_make_the_text_of_the_whole(self, pieces: list[bytes]) -> None:
        assert assemble(pieces, []) == (b"".join(pieces).decode("utf-8", "replace"), False)

    @pytest.mark.parametrize(
        ("pieces", "texts", "rest"),
        [
            ([b"a\xf0", b"\x9f\x98", b"\x80b"], ["a", "", "\U0001f600b"], ""),  # it comes with its last byte
            # Bytes are given up as soon as they cannot become a character, and not before.
            ([b"\xf0\x9f", b"x", b"\xff", b"\xe2\x82"], ["", "\ufffdx", "\ufffd", ""], "\ufffd"),
        ],
    )
    def test_a_character_comes_when_it_is_certain(self, pieces: list[bytes], texts: list[str], rest: str) -> None:
        assembler = TextAssembler(Pieces(pieces))
        for i, text in enumerate(texts):
            spans = assembler.push(i, "plain", "target")
            assert (assembler.token_text, "".join(span.text for span in spans)) == (text, text)
        assert [span.text for span in assembler.finish()] == [rest] * bool(rest)
        assert assembler.finish() == []


class TestTextAssembler:
    @given(pieces_of(TEXTS.map(str.encode)), STOPS)
    def test_text_ends_where_a_stop_string_first_begins(self, pieces: list[bytes], stop: list[str]) -> None:
        text = b"".join(pieces).decode()
        assert assemble(pieces, stop) == cut_at_stop(text, stop)

    @given(TEXTS, STOPS)
    @example("aabaaabaaax", ["aabaaax"])
    @example("abcx", ["abcde", "b", "c"])
    def test_exactly_what_is_safe_is_released(self, text: str, stop: list[str]) -> None:
        assembler = TextAssembler(Pieces([c.encode() for c in text]), stop)
        released = ""
        for i in range(len(text)):
            released += "".join(span.text for span in assembler.push(i, "plain", "target"))
            if assembler.stopped:
                break
            assert released == text[: releasable(text[: i + 1], stop)]
        assert text.startswith(released)

    @given(pieces_of(TEXTS.map(str.encode)), STOPS, st.data())
    def test_every_character_keeps_the_kind_and_source_of_the_token_that_completed_it(
        self, pieces: list[bytes], stop: list[str], data: st.DataObject
    ) -> None:
        tags = [(data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from("mn"))) for _ in pieces]
        assembler, plain = TextAssembler(Pieces(pieces), stop), TextAssembler(Pieces(pieces))
        expected: list[tuple[str, TokenKind, str]] = []
        spans: list[Span] = []
        for i, tag in enumerate(tags):
            expected += [(character, *tag) for span in plain.push(i, *tag) for character in span.text]
            spans += assembler.push(i, *tag)
        spans += assembler.finish()
        got = [(character, span.kind, span.source) for span in spans for character in span.text]
        assert got == expected[: len(got)]

    @given(st.lists(st.sampled_from(["a", "b", "", "\ufdd1", "<|x|>", "|>"]), max_size=12), st.data())
    def test_a_name_in_a_stop_string_means_the_control_token_too(self, said: list[str], data: st.DataObject) -> None:
        """The control token ``<|x|>`` is the empty piece here: it has no text of its own."""
        stop = data.draw(st.lists(st.sampled_from(["<|x|>", "a<|x|>", "<|x|>b", "<|x|><|x|>", "b", "x"]), max_size=3))
        assembler = TextAssembler(Pieces([b"", *(each.encode() for each in said)]), stop, named={"<|x|>": 0})
        text = ""
        for i, each in enumerate(said, 1):
            text += "".join(span.text for span in assembler.push(i if each else 0, "plain", "target"))
            if assembler.stopped:
                break
        text += "".join(span.text for span in assembler.finish())
        sign = "\ufffd" if any("<|x|>" in each for each in stop) else "\ufdd1"  # what stands for the token within
        signed = "".join({"": "\ue000", "\ufdd1": sign}.get(each, each) for each in said)
        cut, stopped = cut_at_stop(signed, [*stop, *(each.replace("<|x|>", "\ue000") for each in stop)])
        assert (text, assembler.stopped) == (cut.replace("\ue000", ""), stopped)
