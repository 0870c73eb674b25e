"""``propose`` and ``commit``: several answers in one loop are those alone, and a round that fails changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from localspec.backends.base import Model
from localspec.backends.reference import load
from localspec.controllers.fixed import FixedController
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.rounds import Round
from tests.conftest import TinyFiles

PARAMS = (SamplingParams(max_tokens=30), SamplingParams(max_tokens=20, temperature=1.0, seed=3))


def decoder_of(model: Model, stack: ExitStack) -> SpeculativeDecoder:
    context = stack.enter_context(model.new_context(128))
    return SpeculativeDecoder(context, [NgramDrafter()], FixedController(3))


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token.id for round_ in rounds for token in round_.emitted]


def test_answers_that_take_turns_are_those_alone(tiny: TinyFiles) -> None:
    with load(tiny.spm) as model, ExitStack() as stack:
        prompts = [model.tokenize("once upon a time there was " * n, add_special=True) for n in (1, 2)]
        texts = [TextAssembler(model.vocab, params.stop) for params in PARAMS * 2]
        alone = []
        for prompt, params, text in zip(prompts, PARAMS, texts[:2], strict=True):
            decoder = decoder_of(model, stack)
            decoder.prefill(prompt, lambda: False)
            alone.append(tokens_of(list(decoder.rounds(prompt, params, text))))

        decoders = [decoder_of(model, stack) for _ in prompts]
        for decoder, prompt in zip(decoders, prompts, strict=True):
            assert decoder.prefill(prompt, lambda: False) == 0
            assert decoder.target.tokens == prompt[:-1]

        together: list[list[Round]] = [[], []]
        for decoder, prompt, params, text in zip(decoders, prompts, PARAMS, texts[2:], strict=True):
            decoder.start(prompt, params, text)
        while going := [i for i, decoder in enumerate(decoders) if decoder.finish_reason is None]:
            rows = [decoders[i].propose() for i in going]
            forwards = [decoders[i].target.decode(each.tokens) for i, each in zip(going, rows, strict=True)]
            for i, forward in zip(going, forwards, strict=True):
                round_ = decoders[i].commit(forward)
                assert round_ is not None
                together[i].append(round_)
        assert [tokens_of(rounds) for rounds in together] == alone
        assert any(len(round_.draft) for rounds in together for round_ in rounds)


@pytest.mark.parametrize("where", ["process", "truncate", "emit", "accept", "observe", "learn"])
def test_a_round_that_fails_leaves_tokens_and_memory_as_they_were(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """And the answer that begins anew is right."""

    class Broken(Exception):
        pass

    def fail(*args: Any, **options: Any) -> Any:
        raise Broken

    with load(tiny.spm) as model, ExitStack() as stack:
        prompt, params = model.tokenize("la la la la la", add_special=True), SamplingParams(max_tokens=30)
        decoder = decoder_of(model, stack)
        decoder.prefill(prompt, lambda: False)
        expected = tokens_of(list(decoder.rounds(prompt, params, TextAssembler(model.vocab))))
        decoder.prefill(prompt, lambda: False)
        text = TextAssembler(model.vocab)
        decoder.start(prompt, params, text)
        said: list[int] = []
        for _ in range(4):
            round_ = decoder.commit(decoder.decode(decoder.propose()))
            assert round_ is not None
            said += [token.id for token in round_.emitted]
        before, budget = list(decoder.target.tokens), decoder.budget
        forward = decoder.decode(decoder.propose())
        owner: Any = {"emit": text, "truncate": decoder.target}.get(where)
        if owner is None:
            owner = decoder.controller if hasattr(decoder.controller, where) else decoder.group.drafters[0]
        truncate = decoder.target.truncate
        with monkeypatch.context() as patch:
            patch.setattr(owner, "push" if where == "emit" else where, fail)
            if where == "truncate":  # at first: what takes the round back needs it too
                calls = iter([fail, truncate])
                patch.setattr(owner, where, lambda n: next(calls)(n))
            with pytest.raises(Broken):
                decoder.commit(forward)
        assert [*prompt, *said] == decoder.tokens
        assert (decoder.target.tokens, decoder.budget) == (before, budget)
        decoder.close()
        decoder.prefill(prompt, lambda: False)
        assert tokens_of(list(decoder.rounds(prompt, params, TextAssembler(model.vocab)))) == expected
