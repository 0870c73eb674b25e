"""Recycled draft tokens: the table of successors, its file, and the drafter that learns from the target's passes."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec import LLM, SamplingParams
from localspec.backends.base import Forward
from localspec.controllers.fixed import FixedPlan
from localspec.sampling.sampling import Noise
from localspec.spec_decode.decoder import PREFILL_CHUNK
from localspec.spec_decode.drafters.recycling import (
    MOST_PENDING,
    N_BYTES,
    N_SLOTS,
    ORDERS,
    RecyclingDrafter,
    SuccessorTable,
)
from localspec.spec_decode.proposer import Proposer
from tests.conftest import TinyFiles
from tests.support.heads import write_random_head

ANYTHING = Proposer(SamplingParams(), Noise(0))
N_VOCAB = 64


def forward_of(tops: Sequence[int]) -> Forward:
    """A pass whose most probable tokens are these."""
    logits = np.zeros((len(tops), N_VOCAB), dtype=np.float32)
    logits[np.arange(len(tops)), tops] = 1.0
    return Forward(logits)


def answer(drafter: RecyclingDrafter, prompt: list[int], tokens: list[int]) -> None:
    """An answer that was decoded plainly."""
    drafter.begin(prompt)
    text = list(prompt)
    for token in tokens:
        drafter.verified(text[-1:], forward_of([token]))
        drafter.accept([token])
        text.append(token)


def drafted(drafter: RecyclingDrafter, tokens: Sequence[int], n: int) -> list[int]:
    return [token.id for token in drafter.draft(tokens, FixedPlan(n), ANYTHING)]


def known(table: SuccessorTable, tokens: Sequence[int]) -> dict[int, int]:
    """Order -> successor."""
    return {evidence.order: token for token, evidence in table.successors(tokens)}


class TestSuccessorTable:
    def test_every_order_has_a_successor_of_its_own(self) -> None:
        table = SuccessorTable()
        table.learn([1, 2, 3, 4], 5)
        table.learn([9, 9, 3, 4], 6)
        assert known(table, [1, 2, 3, 4]) == {1: 6, 2: 6, 4: 5}  # of those that came once, the last
        assert known(table, [9, 9, 3, 4])[4] == 6
        assert known(table, [8, 8, 3, 4]) == {1: 6, 2: 6}
        assert known(table, [4]) == {1: 6}
        assert known(table, [3]) == known(table, []) == {}

    @given(st.lists(st.integers(0, 2), min_size=1, max_size=80))
    def test_what_came_in_most_cases_is_known(self, successors: list[int]) -> None:
        """A successor that is over half of all has to be there in the end, whatever came between."""
        table = SuccessorTable()
        for successor in successors:
            table.learn([7], successor)
        token, n = Counter(successors).most_common(1)[0]
        if 2 * n > len(successors) + 1:
            assert known(table, [7]) == {1: token}

    def test_evidence_tells_how_often_it_came_and_did_not(self) -> None:
        table = SuccessorTable()
        seen = []
        for _ in range(6):
            table.learn([7], 1)
            seen.append(next(table.successors([7]))[1].seen)
        assert seen == [0, 1, 2, 2, 3, 3]
        table.learn([7], 2)
        assert next(table.successors([7]))[1].contradicted == 1
        for _ in range(300):
            table.learn([7], 1)
        assert next(table.successors([7]))[0] == 1

    def test_what_comes_often_outlasts_what_comes_once(self) -> None:
        """As many runs pass as would fill the table five times; a run that comes every thousandth time stays."""
        rng, table = random.Random(1), SuccessorTable()
        for i in range(5 * N_SLOTS // len(ORDERS)):
            table.learn([rng.randrange(150_000) for _ in range(ORDERS[-1])], rng.randrange(150_000))
            if i % 1000 < 2:
                table.learn([1, 2, 3, 4], 5)
        assert known(table, [1, 2, 3, 4])[4] == 5
        assert len(table._checks) == len(table._tokens) == N_SLOTS

    def test_it_goes_on_from_what_it_was(self) -> None:
        table, again = SuccessorTable(), SuccessorTable()
        table.learn([1, 2, 3, 4], 150_000)
        data = table.to_bytes()
        assert len(data) == N_BYTES < 1_400_000
        again.restore(data)
        assert list(again.successors([1, 2, 3, 4])) == list(table.successors([1, 2, 3, 4]))
        assert again.to_bytes() == data

    @pytest.mark.parametrize("damage", [lambda d: b"", lambda d: d[:-1], lambda d: d + b"x", lambda d: b"X" + d[1:]])
    def test_what_is_no_table_is_ignored(self, damage: Callable[[bytes], bytes]) -> None:
        table, again = SuccessorTable(), SuccessorTable()
        table.learn([1], 2)
        again.restore(damage(table.to_bytes()))
        assert known(again, [1]) == {}


class TestRecyclingDrafter:
    PROMPT, ANSWER = [1, 2], [10, 11, 12, 13, 14, 15]

    def test_drafts_what_was_said_in_an_answer_before(self) -> None:
        drafter = RecyclingDrafter()
        answer(drafter, self.PROMPT, self.ANSWER)
        assert drafted(drafter, [*self.PROMPT, 10, 11], 3) == []  # what this answer says is the n-grams' business
        drafter.begin([5, 2])
        assert drafted(drafter, [5, 2], 4) == [10, 11, 12, 13]
        assert drafted(drafter, [40, 11], 9) == [12, 13, 14, 15]
        assert drafted(drafter, [40], 3) == []

    def test_confidence_grows_with_the_run_and_the_evidence(self) -> None:
        drafter = RecyclingDrafter()
        answer(drafter, self.PROMPT, self.ANSWER)
        answer(drafter, self.PROMPT, self.ANSWER)
        drafter.begin([1])
        confidences = [token.prob for token in drafter.draft([40, 11], FixedPlan(4), ANYTHING)]
        assert confidences == sorted(confidences)
        assert confidences[0] < 0.3 < 0.7 < confidences[-1]
        other = RecyclingDrafter()
        answer(other, self.PROMPT, self.ANSWER)
        other.begin([1])
        assert other.draft([40, 11], FixedPlan(1), ANYTHING)[0].prob < confidences[0]

    def test_every_row_of_a_pass_is_a_lesson_also_those_of_rejected_tokens(self) -> None:
        drafter = RecyclingDrafter()
        drafter.begin([1, 2])
        drafter.verified([2, 20, 21], forward_of([20, 30, 31]))  # 21 is rejected: 30 comes in its place
        drafter.accept([20, 30])
        drafter.verified([30], forward_of([32]))
        drafter.accept([33])  # a sample: the most probable token is learned all the same
        drafter.begin([1])
        assert [drafted(drafter, run, 1) for run in ([1, 2], [2, 20], [20, 21], [20, 30])] == [[20], [30], [31], [32]]
        assert drafted(drafter, [2, 20, 30], 1) == [32]

    def test_the_reading_of_a_prompt_teaches_nothing(self) -> None:
        """However many rows its passes have: a last piece of one token has one, where a head wants its state."""
        drafter = RecyclingDrafter()
        drafter.process([1, 2, 3], Forward(np.zeros((0, N_VOCAB), np.float32)))
        drafter.process([1, 2, 3], forward_of([9]))
        drafter.process([3], forward_of([9]))
        answer(drafter, [1, 2, 3], [])
        drafter.accept([4])
        drafter.begin([1])
        assert drafted(drafter, [1, 2, 3], 2) == []

    @pytest.mark.parametrize(("top", "low", "high"), [(12, 0.9, 1.0), (9, 0.0, 0.01)])
    def test_estimates_follow_what_turned_out(self, top: int, low: float, high: float) -> None:
        drafter = RecyclingDrafter()
        answer(drafter, self.PROMPT, self.ANSWER)
        drafter.begin([40, 11])
        for _ in range(2000):  # five times the memory; the answer repeats 11, whatever is most probable
            drafter.verified([11], forward_of([top]))
            drafter.accept([11])
        assert low <= drafter.draft([40, 11], FixedPlan(1), ANYTHING)[0].prob <= high

    @pytest.mark.parametrize("n", [1, 2, 3, PREFILL_CHUNK + 1, PREFILL_CHUNK + 2])
    def test_beside_a_head_a_prompt_may_end_with_a_piece_of_any_length(
        self, tiny: TinyFiles, tmp_path: Path, n: int
    ) -> None:
        """Of the last piece a head wants a row, which is no verification."""
        head = write_random_head(tiny.quick.target, tmp_path / "head.gguf")
        options: Any = {"backend": "reference", "n_ctx": 256, "idle": False, "remember": False}
        with LLM(tiny.quick.target, ["recycled", f"head:{head}"], draft_length=3, **options) as llm:
            for _ in range(2):
                said = [llm.generate(list(range(5, 5 + n)), SamplingParams(max_tokens=8)).token_ids for _ in range(2)]
                assert said[0] == said[1]
                plain = llm.generate(list(range(5, 5 + n)), SamplingParams(max_tokens=8), speculate=False)
                assert plain.token_ids == said[0]

    def test_what_waits_to_be_learned_is_bounded(self) -> None:
        drafter = RecyclingDrafter()
        answer(drafter, [1], [5] * (MOST_PENDING + 10))
        assert len(drafter._pending) == MOST_PENDING

    def test_a_clone_learns_apart(self) -> None:
        drafter = RecyclingDrafter()
        answer(drafter, self.PROMPT, self.ANSWER)
        drafter.begin([1])
        clone = drafter.clone(None)
        assert isinstance(clone, RecyclingDrafter)
        answer(clone, self.PROMPT, [50, 51, 52])
        drafter.begin([1])
        clone.begin([1])
        assert drafted(drafter, [50], 1) == []
        assert drafted(clone, [50], 1) == [51]
        assert drafted(clone, [12], 1) == [13]

    def test_what_is_kept_is_all_that_was_learned_and_only_once(self) -> None:
        drafter, again = RecyclingDrafter(), RecyclingDrafter()
        drafter.begin([1])
        assert drafter.learned() == b""
        answer(drafter, self.PROMPT, self.ANSWER)
        again.restore(drafter.learned())
        assert drafted(again, [40, 11], 9) == [12, 13, 14, 15]
        assert drafter.learned() == again.learned() == b""


KINDS = {
    "greedy": SamplingParams(max_tokens=60, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=7, max_tokens=60, ignore_eos=True),
    "penalties": SamplingParams(temperature=0.7, seed=2, repeat_penalty=1.3, max_tokens=60, ignore_eos=True),
    "json": SamplingParams(response_format={"type": "json_object"}, max_tokens=40),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_text_does_not_depend_on_it(tiny: TinyFiles, kind: str) -> None:
    with LLM(tiny.quick.target, draft="recycled", draft_length=4, backend="reference", n_ctx=256) as llm:
        plain = [llm.generate(prompt, KINDS[kind], speculate=False).token_ids for prompt in ("la la la", "so so")]
        for _ in range(2):
            replies = [llm.generate(prompt, KINDS[kind]) for prompt in ("la la la", "so so")]
            assert [reply.token_ids for reply in replies] == plain
        assert replies[0].stats["num_draft_tokens"] > 0
        assert set(replies[0].stats["by_source"]) <= {"recycled", "grammar"}


def test_what_was_learned_stays_for_the_next_run_if_it_may(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    params = KINDS["greedy"]

    def accepted(*, remember: bool) -> int:
        with LLM(
            tiny.quick.target, "recycled", draft_length=3, backend="reference", n_ctx=256, remember=remember
        ) as llm:
            return int(llm.generate("la la la", params).stats["num_accepted_tokens"])

    files = tmp_path / "recycled"
    assert accepted(remember=False) == 0
    assert not files.exists()
    assert accepted(remember=True) == 0
    assert [path.stat().st_size for path in files.iterdir()] == [N_BYTES]
    assert accepted(remember=True) > 10
    assert accepted(remember=False) == 0
    (path,) = files.iterdir()
    if os.name == "posix":
        assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"damaged")
    assert accepted(remember=True) == 0
    assert accepted(remember=True) > 10
    path.unlink()
    files.rmdir()
    files.touch()  # nothing can be written there, nor read
    assert accepted(remember=True) == accepted(remember=True) == 0


def test_other_drafters_of_the_pair_do_not_lose_it(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    with LLM(tiny.quick.target, "recycled", draft_length=3, backend="reference", n_ctx=256) as llm:
        llm.generate("la la la", KINDS["greedy"])
        llm.set_draft(["ngram", "recycled"])
        assert llm.generate("la la la", KINDS["greedy"]).stats["by_source"]["recycled"]["num_accepted_tokens"] > 0


def test_a_prediction_is_copied_also_where_only_this_drafts(tiny: TinyFiles) -> None:
    with LLM(tiny.quick.target, "recycled", draft_length=4, backend="reference", n_ctx=256) as llm:
        answer = llm.generate("la la la", KINDS["greedy"], speculate=False).token_ids
        with llm.rounds("la la la", KINDS["greedy"], prediction=answer) as rounds:
            sources = {token.source for round_ in rounds for token in round_.draft}
        assert "ngram" in sources
