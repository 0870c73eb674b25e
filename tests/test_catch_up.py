"""A draft model that was left behind: what it would have guessed for the text it missed is judged when it reads it."""

from __future__ import annotations

from localspec import LLM, SamplingParams
from localspec.auto_controller import AutoPlan
from localspec.drafters.draft_model import MAX_WITNESS
from localspec.proposer import SamplingProposer
from localspec.sampling import Noise
from tests.conftest import TinyFiles


class Recorder:
    """A plan that only writes down."""

    room = 1

    def __init__(self) -> None:
        self.seen: list[tuple[float, bool]] = []

    def more(self, source: str, pending: int = 0) -> bool:
        return True

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        self.n_read = n_tokens

    def nothing(self, source: str) -> None: ...

    def samples(self, source: str, confidence: float) -> bool:
        return True

    def witness(self, source: str, confidence: float, right: bool) -> None:
        self.seen.append((confidence, right))

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        return None


def test_guesses_for_missed_tokens_are_judged_and_no_others(tiny: TinyFiles) -> None:
    with LLM(tiny.pair.target, tiny.pair.draft, backend="reference", n_ctx=256) as llm:
        pair = llm._pair
        (drafter,) = pair._drafters
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        answer = llm.generate("the cat sat", params, speculate=False).token_ids
        prompt = llm.tokenize("the cat sat", add_special=True)

        def catch_up(n: int) -> Recorder:
            ((_, context),) = pair._models.values()
            context.truncate(0)
            drafter.begin(prompt)
            drafter.accept(answer[:n])
            plan = Recorder()
            drafter.draft(prompt + answer[:n], plan, SamplingProposer(params, Noise(0)))
            assert context.tokens == prompt + answer[:n]
            return plan

        def rightly_guessed(n: int) -> list[bool]:
            ((model, _),) = pair._models.values()
            with model.new_context(256) as fresh:
                tops = fresh.decode(prompt + answer[:n]).logits.argmax(axis=1)
            return [int(tops[len(prompt) - 1 + i]) == answer[i] for i in range(n)]

        plan = llm._call(lambda: catch_up(10))
        assert plan.n_read == len(prompt) + 10
        assert [right for _, right in plan.seen] == rightly_guessed(10)
        assert any(right for _, right in plan.seen)
        plan = llm._call(lambda: catch_up(40))
        assert [right for _, right in plan.seen] == rightly_guessed(40)[-MAX_WITNESS:]
        assert llm._call(lambda: catch_up(0)).seen == []  # a prompt is not what the target said


def test_what_was_witnessed_is_learned(tiny: TinyFiles) -> None:
    with LLM(tiny.pair.target, tiny.pair.draft, backend="reference", n_ctx=256) as llm:
        controller = llm._pair.controller("auto")
        plan = controller.plan(room=8, n_past=4)
        assert isinstance(plan, AutoPlan)
        before = plan.controller.sources["model"].expected(0.97)
        for _ in range(20):
            plan.witness("model", 0.97, right=False)
        assert plan.controller.sources["model"].expected(0.97) < before - 0.3
