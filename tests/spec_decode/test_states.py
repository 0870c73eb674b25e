"""The target's hidden states as drafters get them: of every settled token, whatever was drafted and taken back.

Drafters keep what ``process`` brings until they know what was settled, through the rollback of that pass. On a memory
that is rolled back by decoding again, those passes return states as well, and must not disturb what was kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from localspec.backends import reference
from localspec.backends.base import Context, FloatArray, Forward, Model
from localspec.controllers.fixed import FixedController
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.decoder import PREFILL_CHUNK, SpeculativeDecoder
from localspec.spec_decode.drafters.base import Drafter, DrafterFailed, DrafterInfo, Plan, Proposer
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.rounds import DraftToken
from tests.conftest import TinyFiles, open_backend
from tests.spec_decode.test_branching import Branchy
from tests.spec_decode.test_lossless import Answer, run
from tests.support.contexts import some_tokens

NOISE = 0.004
"""Largest difference of two states that rounding explains, as a share of the largest number in them."""

TAPS = ("layer:0", "norm")
MEMORIES = [
    "reference spm",
    "ik-llama spm",
    "llama-cpp spm",
    "mlx recurrent",
    "mlx convolutions",
    "mlx hybrid",
    "mlx sliding",
    "llama-cpp hybrid",
    "ik-llama hybrid",
    "llama-cpp recurrent",
]


@pytest.fixture(scope="module", params=MEMORIES)
def model(request: pytest.FixtureRequest, tiny: TinyFiles) -> Iterator[Model]:
    engine, kind = request.param.split()
    with open_backend(engine).load(getattr(tiny, kind), n_threads=1) as model:
        assert (model.capabilities.rollback == "replay") == (kind in ("recurrent", "convolutions", "hybrid"))
        yield model


class Recorder(Drafter):
    """Proposes the right answer up to a place that changes from round to round, if it is told one, and keeps the states
    of all passes."""

    info = DrafterInfo("recorder", taps=TAPS)

    def __init__(self, answer: Sequence[int] | None) -> None:
        self.answer = answer
        self.passes: list[tuple[list[int], Forward]] = []
        self.text: list[int] = []
        self.states: dict[str, dict[int, FloatArray]] = {name: {} for name in TAPS}
        self.n_accepted = self.n_rejected = 0

    def process(self, tokens: Sequence[int], forward: Forward) -> None:
        self.passes.append((list(tokens), forward))

    def begin(self, tokens: Sequence[int], **situation: Any) -> None:
        self.text = list(tokens)
        self.n_prompt = len(tokens)
        end = len(tokens) - 1
        for fed, forward in reversed(self.passes):
            assert fed == self.text[end - len(fed) : end]
            for name, rows in forward.hidden.items():  # of "norm" there is one, of the last token
                self.place(name, end - len(rows), forward, len(rows))
            end -= len(fed)
        self.passes.clear()

    def accept(self, emitted: Sequence[int]) -> None:
        ((fed, forward),) = self.passes
        self.passes.clear()
        self.n_accepted += len(emitted) - 1
        self.n_rejected += len(fed) - len(emitted)
        for name in TAPS:
            assert len(emitted) <= len(forward.hidden[name]) <= len(fed)
            self.place(name, len(self.text) - 1, forward, len(emitted))
        self.text += emitted

    def place(self, name: str, position: int, forward: Forward, n: int) -> None:
        self.states[name] |= {position + i: forward.hidden[name][i] for i in range(n)}  # as they are, not copies

    def forget(self, end: int) -> None:
        self.states = {name: {p: state for p, state in found.items() if p < end} for name, found in self.states.items()}

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        if self.answer is None:
            return []
        done = len(tokens) - self.n_prompt
        right = list(self.answer[done : done + len(self.text) % 5])
        proposed = [*right, *(7 + i for i in range(3))]
        return [DraftToken(token, self.info.source, 0.5) for token in proposed if plan.keep(self.info.source, 0.5)]


def answer(decoder: SpeculativeDecoder, prompt: Sequence[int], n: int) -> list[int]:
    return Answer.of(run(decoder, list(prompt), SamplingParams(max_tokens=n, ignore_eos=True))).tokens


def check(recorder: Recorder, model: Model) -> None:
    """Every state is what a new context returns for the same text."""
    text, settled = recorder.text, range(recorder.n_prompt - 2, len(recorder.text) - 1)
    with model.new_context(len(text), hidden=TAPS) as context:
        wanted = context.decode(text).hidden
    for name, found in recorder.states.items():
        noise = NOISE * np.abs(wanted[name]).max()
        steps = np.abs(np.diff(wanted[name], axis=0)).max(axis=1)
        assert np.median(steps) > 10 * noise, "states of neighbours are too much alike for a defect to show"
        assert found.keys() >= set(settled if name == "norm" else range(settled.stop))
        for position, state in found.items():
            assert np.abs(state - wanted[name][position]).max() < noise, (name, position)


def test_states_are_those_of_the_settled_text(model: Model) -> None:
    """A prompt of several pieces, an answer that ends within a draft, its continuation, and a prompt that shares half
    of all that."""
    prompt = some_tokens(PREFILL_CHUNK + 40)
    with model.new_context(512) as plain:
        right = answer(SpeculativeDecoder(plain, [], FixedController(0)), prompt, 60)
    recorder = Recorder(right)
    with model.new_context(512, hidden=TAPS) as context:
        decoder = SpeculativeDecoder(context, [recorder], FixedController(6))
        for n in (40, 20):
            prompt = [*prompt, *answer(decoder, prompt, n)]
            check(recorder, model)
            recorder.answer = right[n:]
        assert recorder.n_rejected > 60
        assert recorder.n_accepted > 20
        recorder.forget(90)
        answer(decoder, [*prompt[:90], *some_tokens(30, seed=1)], 20)
        check(recorder, model)


class Borrower(Drafter):
    """Decodes the last token and a wrong one in the target's own first layers; in the third round it fails there."""

    info = DrafterInfo("borrower", taps=TAPS)

    def __init__(self, target: Context) -> None:
        self.target = target
        self.n_rounds = 0

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        if self.target.n_past >= len(tokens):
            return []
        self.n_rounds += 1
        states = self.target.decode_first_layers([tokens[-1], 7], 1).hidden
        assert {name: rows.shape for name, rows in states.items()} == {"layer:0": (2, self.target.model.n_embd)}
        if self.n_rounds == 3:
            raise DrafterFailed("broke in the middle")
        return [DraftToken(7, self.info.source, 0.5)] if plan.keep(self.info.source, 0.5) else []


def test_what_was_drafted_in_the_targets_memory_leaves_no_trace(model: Model) -> None:
    """Nor where the drafter breaks off. Beside it another one gets its states."""
    if not model.capabilities.first_layers:
        pytest.skip("it ends no pass early")
    prompt, lost = some_tokens(60), list[str]()
    with model.new_context(512, hidden=TAPS) as context:
        recorder, borrower = Recorder([]), Borrower(context)
        drafters = [borrower, recorder]
        decoder = SpeculativeDecoder(context, drafters, FixedController(3), lambda drafter, why: lost.append(why))
        answer(decoder, prompt, 12)
        assert lost == ["broke in the middle"]
        check(recorder, model)


def test_states_are_those_of_the_accepted_path(tiny: TinyFiles) -> None:
    watcher, controller = Recorder(None), Branchy(random.Random(0))
    with reference.load(tiny.quick.target) as model, reference.load(tiny.quick.draft) as small:
        drafters = [DraftModelDrafter(small.new_context(128)), NgramDrafter(), watcher]
        decoder = SpeculativeDecoder(model.new_context(128, hidden=TAPS), drafters, controller)
        answer(decoder, [5, 6, 7], 50)
        assert controller.n_beside > 0
        check(watcher, model)
