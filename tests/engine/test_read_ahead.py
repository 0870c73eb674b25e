"""Reading in idle time: the next turn finds only the user's words unread, and says what it would have said anyway."""

from __future__ import annotations

import pytest

from localspec import LLM, SamplingParams
from localspec.backends.base import shared_prefix
from localspec.engine.pair import DRAFT_PIECE, TARGET_PIECE, ReadAhead
from tests.conftest import TinyFiles
from tests.support.contexts import watch_passes

pytestmark = pytest.mark.usefixtures("measured_home")

SOON = 60.0
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
SYSTEM = {"role": "system", "content": "You are terse, and you like boats, harbours, lanterns and crates of oranges."}


def test_a_draft_model_has_read_the_conversation_when_the_next_turn_comes(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny.pair.target, tiny.pair.draft, backend="reference", n_ctx=512, draft_length=2) as llm:
        (draft,) = [context for context in llm.inspect().contexts if context is not llm.inspect().context]
        first = llm.generate("the cat sat on the mat and", PARAMS, speculate=False)
        assert llm.wait_idle(SOON)
        assert draft.tokens == []  # plain decoding was asked for: there is nothing to read for
        first = llm.generate("the cat sat on the mat and", PARAMS)
        assert llm.wait_idle(SOON)
        said = llm.tokenize("the cat sat on the mat and", add_special=True) + first.token_ids
        assert draft.tokens == said
        seen = watch_passes(draft, monkeypatch)
        more = llm.generate(said + llm.tokenize(" so"), PARAMS)
        assert max(seen) <= 3  # the new words, and what a fully accepted draft leaves
    with LLM(tiny.pair.target, None, backend="reference", n_ctx=512) as plain:
        assert plain.generate(said + plain.tokenize(" so"), PARAMS).token_ids == more.token_ids


def test_what_the_next_prompt_begins_with_is_read_while_the_user_types(tiny: TinyFiles) -> None:
    messages = [SYSTEM, {"role": "user", "content": "Name a river."}]
    with LLM(tiny.pair.target, tiny.pair.draft, backend="reference", n_ctx=512, draft_length=2) as llm:
        prompt = llm.encode(messages)
        llm.read_ahead([SYSTEM])
        assert llm.wait_idle(SOON)
        n_read = [shared_prefix(context.tokens, prompt) for context in llm.inspect().contexts]
        assert min(n_read) >= len(llm.encode([SYSTEM])) - 8 > TARGET_PIECE
        reply = llm.chat(messages, PARAMS)
        assert reply.stats["cached_tokens"] == n_read[0]
    with LLM(tiny.pair.target, None, backend="reference", n_ctx=512) as plain:
        assert plain.chat(messages, PARAMS).token_ids == reply.token_ids


def test_another_conversation_is_not_disturbed_by_what_was_expected(tiny: TinyFiles) -> None:
    with LLM(tiny.pair.target, tiny.pair.draft, backend="reference", n_ctx=512, draft_length=2) as llm:
        llm.read_ahead([SYSTEM])
        assert llm.wait_idle(SOON)
        other = llm.generate("quite another text, which nobody expected", PARAMS)
        assert llm.wait_idle(SOON)
        said = llm.tokenize("quite another text, which nobody expected", add_special=True) + other.token_ids
        for context in llm.inspect().contexts:
            assert list(context.tokens[: len(said) - 1]) == said[:-1]


def test_no_step_reads_more_than_one_piece_and_none_once_a_request_waits(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny.pair.target, tiny.pair.draft, backend="reference", n_ctx=512, draft_length=2, idle=False) as llm:
        pair = llm.inspect()
        llm.read_ahead([SYSTEM])
        assert llm.wait_idle(SOON)
        assert [len(context.tokens) for context in pair.contexts] == [0, 0]  # without idle work
        (draft,) = [context for context in pair.contexts if context is not pair.context]
        llm.generate("the cat sat on the mat and then " * 12, PARAMS)
        reading = ReadAhead(pair)

        def read() -> list[int]:
            draft.truncate(0)
            seen = watch_passes(draft, monkeypatch)
            assert next(reading.steps(lambda: True))
            assert not seen
            while next(reading.steps(lambda: False)):
                assert seen[-1] <= DRAFT_PIECE
            return seen

        seen = llm.run(lambda pair: read())
        assert sum(seen) == len(pair.conversation)
        assert len(seen) > 2
