"""A draft model that was left behind: what it would have guessed for the text it missed is judged when it reads it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from localspec import LLM, SamplingParams
from localspec.backends.base import FEW_ROWS, Forward
from localspec.sampling.sampling import Ids, Noise, Row
from localspec.spec_decode.drafters.base import Plan
from localspec.spec_decode.drafters.draft_model import MAX_COUNTERFACTUAL
from localspec.spec_decode.proposer import Proposer
from tests.conftest import TinyFiles


class Recorder(Plan):
    """A plan that only writes down."""

    def __init__(self, worth: int = 1 << 20, piece: int = 1 << 20) -> None:
        super().__init__(1)
        self.seen: list[tuple[float, bool]] = []
        self.worth, self.piece = worth, piece
        self.n_pieces = 0

    def more(self, source: str, pending: int = 0, held: float | None = None) -> int:
        return min(pending, self.piece) if pending <= self.worth else 0

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        self.n_read, self.ms, self.n_pieces = n_tokens, ms, self.n_pieces + 1

    def counterfactual(self, source: str, confidence: float, right: bool) -> None:
        self.seen.append((confidence, right))

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        return None


def test_guesses_for_missed_tokens_are_judged_and_no_others(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny.pair.target, tiny.pair.draft, backend="reference", n_ctx=256) as llm:
        pair = llm.inspect()
        (drafter,) = pair.state.drafters
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        answer = llm.generate("the cat sat", params, speculate=False).token_ids
        prompt = llm.tokenize("the cat sat", add_special=True)

        def catch_up(n: int) -> Recorder:
            context = pair.contexts[1]
            context.truncate(0)
            drafter.begin(prompt)
            drafter.accept(answer[:n])
            plan, n_rows, decode = Recorder(), [], context.decode

            def counted(tokens: Sequence[int], logits: Literal["all", "last", "none"] = "all", *args: Any) -> Forward:
                n_rows.append(len(tokens) if logits == "all" else 1)
                return decode(tokens, logits, *args)

            with monkeypatch.context() as patch:
                patch.setattr(context, "decode", counted)
                drafter.draft(prompt + answer[:n], plan, Proposer(params, Noise(0)))
            assert context.tokens == prompt + answer[:n]
            assert max(n_rows) <= FEW_ROWS
            return plan

        def rightly_guessed(n: int) -> list[bool]:
            model = pair.state.models[0].model
            with model.new_context(256) as fresh:
                tops = fresh.decode(prompt + answer[:n]).logits.argmax(axis=1)
            return [int(tops[len(prompt) - 1 + i]) == answer[i] for i in range(n)]

        plan = llm.run(lambda pair: catch_up(10))
        assert plan.n_read == len(prompt) + 10
        assert [right for _, right in plan.seen] == rightly_guessed(10)
        assert any(right for _, right in plan.seen)
        plan = llm.run(lambda pair: catch_up(40))
        assert [right for _, right in plan.seen] == rightly_guessed(40)[-MAX_COUNTERFACTUAL:]
        assert llm.run(lambda pair: catch_up(0)).seen == []  # a prompt is not what the target said


def test_a_guess_is_charged_for_what_is_made_of_its_logits_too(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    class Slow(Proposer):
        def confidence(self, row: Row, history: Sequence[int], n_known: int = 0, ids: Ids | None = None) -> float:
            now[0] += 0.05
            return super().confidence(row, history, n_known, ids)

    with LLM(tiny.pair.target, tiny.pair.draft, backend="reference", n_ctx=256) as llm:
        (drafter,) = llm.inspect().state.drafters
        prompt, plan = llm.tokenize("the cat sat", add_special=True), Recorder()
        drafter.begin(prompt)
        clock = SimpleNamespace(perf_counter=lambda: now[0])
        monkeypatch.setattr("localspec.spec_decode.drafters.draft_model.time", clock)
        llm.run(lambda pair: drafter.draft(prompt, plan, Slow(SamplingParams(), Noise(0))))
        assert plan.ms == pytest.approx(50)


def test_all_of_a_prompt_is_read_once_that_has_come_to_be_worth_it(tiny: TinyFiles) -> None:
    with LLM(tiny.pair.target, tiny.pair.draft, backend="reference", n_ctx=1024) as llm:
        (drafter,) = llm.inspect().state.drafters
        context = llm.inspect().contexts[1]

        def read() -> None:
            proposer = Proposer(SamplingParams(), Noise(0))
            context.truncate(0)
            drafter.begin(prompt)
            drafter.draft(prompt, Recorder(10), proposer)
            assert context.tokens == []
            drafter.accept([7])
            for piece, n_pieces in ((200, 1), (40, 3)):
                context.truncate(0)
                plan = Recorder(200, piece)
                drafter.draft([*prompt, 7], plan, proposer)
                assert context.tokens == [*prompt, 7]
                assert plan.n_pieces == n_pieces

        prompt = [20 + i % 60 for i in range(100)]
        llm.run(lambda pair: read())
