"""An answer whose passes are run by somebody else is the answer that it is alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from localspec.backends.base import Forward, Model
from localspec.backends.reference import load
from localspec.controllers.fixed import FixedController
from localspec.sampling.sampling import SamplingParams
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.passes import TargetPass, read_alone
from localspec.spec_decode.rounds import Round
from tests.conftest import TinyFiles

PARAMS = (SamplingParams(max_tokens=30), SamplingParams(max_tokens=20, temperature=1.0, seed=3))


def decoder_of(model: Model, stack: ExitStack) -> SpeculativeDecoder:
    context = stack.enter_context(model.new_context(128))
    return SpeculativeDecoder(context, [NgramDrafter()], FixedController(3))


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token.id for round_ in rounds for token in round_.emitted]


def test_answers_whose_passes_take_turns_are_those_alone(tiny: TinyFiles) -> None:
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
            assert read_alone(decoder.reading(prompt, lambda: False), decoder.target) == 0
            assert decoder.target.tokens == prompt[:-1]

        together: list[list[Round]] = [[], []]
        asked = zip(decoders, prompts, PARAMS, texts[2:], strict=True)
        running = dict(enumerate(d.steps(prompt, params, text) for d, prompt, params, text in asked))
        wanted_of = {i: next(steps) for i, steps in running.items()}
        while running:
            passes: dict[int, Forward] = {}
            for i, step in wanted_of.items():
                assert isinstance(step, TargetPass)
                passes[i] = decoders[i].target.decode(step.tokens, step.logits)
            for i, forward in passes.items():
                round_ = running[i].send(forward)
                assert isinstance(round_, Round)
                together[i].append(round_)
            for i in list(running):
                following = next(running[i], None)
                if following is None:
                    del running[i], wanted_of[i]
                else:
                    wanted_of[i] = following
        assert [tokens_of(rounds) for rounds in together] == alone
        assert any(len(round_.draft) for rounds in together for round_ in rounds)
