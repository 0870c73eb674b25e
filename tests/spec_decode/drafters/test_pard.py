"""A draft model that fills in mask tokens: several draft tokens in one pass, and the answer is the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localspec import LLM, LocalspecError, SamplingParams
from localspec.commands.doctor.facts import payoff
from localspec.controllers.acceptance import GREEDY as TYPICAL
from localspec.controllers.acceptance import SourceAcceptance
from localspec.controllers.auto import AutoController
from localspec.controllers.cost_model import PassTimes
from localspec.engine.pair import Pair as LoadedPair
from localspec.engine.request import Reply
from tests.conftest import Backend, TinyFiles
from tests.support.gguf_vocabs import bpe_vocab
from tests.support.ggufs import Pair, Shape, llama_weights, perturbed, write_llama

SHAPE = Shape(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.1)
N_VOCAB = 300
MASK = 250
SAID = 80  # the token that the target mostly says
PROMPTS = ["the cat is in the hat and", "she was here", "é and ü: 日本 for"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
WAYS = [GREEDY, replace(GREEDY, temperature=0.8, seed=7), replace(GREEDY, temperature=1.2, seed=8, top_k=20)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target that soon repeats itself, and a draft of nearly its weights that reads a mask as what is repeated."""
    folder, vocab = tmp_path_factory.mktemp("pard"), bpe_vocab(N_VOCAB)
    weights = llama_weights(SHAPE, N_VOCAB)
    embedding, output = weights["token_embd.weight"], weights["output.weight"]
    output[SAID] = 2.0 * embedding.mean(axis=0) + 6.0 * embedding[SAID] / np.linalg.norm(embedding[SAID])
    for token in range(0, N_VOCAB, 3):
        embedding[token] = 0.5 * embedding[token] + 0.5 * embedding[SAID]
    near = perturbed(weights, 2, 0.01)
    near["token_embd.weight"][MASK] = near["token_embd.weight"][SAID]
    return Pair(
        write_llama(folder / "target.gguf", SHAPE, vocab, weights=weights),
        write_llama(folder / "draft.gguf", SHAPE, vocab, weights=near, extra={"llama.pard_token": MASK}),
    )


def answers(target: Path, draft: str | None, params: SamplingParams, length: int = 4, **options: object) -> list[Reply]:
    options = {"backend": "reference", "n_ctx": 256, "idle": False, "remember": False, **options}
    with LLM(target, draft, **options) as llm:
        return [llm.generate(prompt, params, draft_length=length if draft else 0) for prompt in PROMPTS]


def ids(replies: Sequence[Reply]) -> list[Sequence[int]]:
    return [each.token_ids for each in replies]


@pytest.mark.parametrize("length", [1, 4, 12])
@pytest.mark.parametrize("params", WAYS, ids=["greedy", "seeded", "filtered"])
def test_the_answer_is_the_target_s_and_masks_are_accepted(pair: Pair, params: SamplingParams, length: int) -> None:
    drafted = answers(pair.target, str(pair.draft), params, length)
    assert ids(drafted) == ids(answers(pair.target, None, params))
    sent, right = (sum(each.stats[f"num_{what}_tokens"] for each in drafted) for what in ("draft", "accepted"))
    assert sent > 30
    if params is GREEDY and length > 1:
        assert right > 2 * sum(each.stats["num_rounds"] for each in drafted)


def test_any_draft_model_named_so_keeps_the_answer(tiny: TinyFiles, backend: Backend) -> None:
    """Masks that mean nothing cost time only; on every engine."""
    options = {"backend": backend.name, "n_ctx": 128}
    plain = answers(tiny.pair.target, None, GREEDY, **options)
    drafted = answers(tiny.pair.target, f"pard:{tiny.pair.draft}:3", GREEDY, 5, **options)
    assert all(each.stats["num_draft_tokens"] for each in drafted)
    if backend.name == "reference":
        assert ids(drafted) == ids(plain)
    else:  # rows of other widths are rounded otherwise; a wrong memory says something else from the start
        assert [each[:4] for each in ids(drafted)] == [each[:4] for each in ids(plain)]


def test_each_draft_is_what_a_fresh_reading_of_text_and_masks_says(tiny: TinyFiles, backend: Backend) -> None:
    """Place by place, after accepted and rejected drafts, a long prompt, and another conversation in that memory."""
    pair, mask, seen = tiny.pair, 3, list[tuple[list[int], list[int]]]()
    with LLM(pair.target, f"pard:{pair.draft}:{mask}", backend=backend.name, n_ctx=256, idle=False) as llm:
        for prompt in (*PROMPTS, " ".join(PROMPTS * 2), PROMPTS[0]):
            text = llm.run(lambda loaded, prompt=prompt: loaded.target.tokenize(prompt, add_special=True))
            for round_ in llm.rounds(list(text), GREEDY, draft_length=5):
                if round_.draft:
                    seen.append((list(text), [token.id for token in round_.draft]))
                text += [token.id for token in round_.emitted]

        def fresh(loaded: LoadedPair) -> list[list[int]]:
            found = []
            with loaded.state.models[0].model.new_context(256) as context:
                for text, draft in seen:
                    context.truncate(0)
                    context.decode(text[:-1], "none")
                    rows = context.decode([text[-1], *[mask] * (len(draft) - 1)]).logits
                    found.append(rows.argmax(axis=1).tolist())
            return found

        wanted = llm.run(fresh)
    assert len(seen) > 20
    assert max(len(set(draft)) for _, draft in seen) > 1  # places differ
    agreed = [draft == row for (_, draft), row in zip(seen, wanted, strict=True)]
    assert sum(agreed) >= 0.95 * len(agreed)  # two tokens can be equally likely


def test_masks_leave_the_memory(pair: Pair) -> None:
    def held(loaded: LoadedPair) -> list[int]:
        return list(loaded.state.models[0].context.tokens)

    with LLM(pair.target, str(pair.draft), backend="reference", n_ctx=256, idle=False) as llm:
        for n in range(8, 14):  # one of these ends with a round that read masks
            llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=n), draft_length=4)
            assert MASK not in llm.run(held)


def test_several_answers_at_a_time_and_a_conversation(pair: Pair) -> None:
    with (
        LLM(pair.target, draft=None, backend="reference", n_ctx=256) as plain,
        LLM(pair.target, str(pair.draft), backend="reference", n_ctx=256, parallel=3, idle=False) as llm,
    ):
        streams = [llm.stream(prompt, GREEDY, draft_length=3) for prompt in PROMPTS]
        texts = ["".join(stream) for stream in streams]
        assert texts == [plain.generate(prompt, GREEDY).text for prompt in PROMPTS]
        one, other = llm.session(), plain.session()
        for question in PROMPTS:
            params = replace(GREEDY, max_tokens=12)
            assert one.chat(question, params).text == other.chat(question, params).text
        assert sum(llm.generate(prompt, GREEDY, draft_length=3).stats["num_accepted_tokens"] for prompt in PROMPTS) > 20


def test_auto_and_other_drafters_beside_it_stay_exact(pair: Pair, tmp_path: Path) -> None:
    wanted = ids(answers(pair.target, None, GREEDY))
    for draft in ([str(pair.draft)], ["ngram", str(pair.draft)]):
        with LLM(pair.target, draft, backend="reference", n_ctx=256, idle=False, remember=False) as llm:
            assert [llm.generate(prompt, GREEDY).token_ids for prompt in PROMPTS] == wanted
            assert [llm.generate(prompt, GREEDY, draft_length=3).token_ids for prompt in PROMPTS] == wanted


@pytest.mark.parametrize(
    ("extra", "spec", "said"),
    [
        ({}, "pard:{file}", "names no mask token"),
        ({}, "pard:{file}:300", "has 300 tokens, and no mask token 300"),
        ({"llama.pard_token": "x"}, "{file}", "no mask token"),
        ({"llama.pard_token": 5000}, "pard:{file}", "no mask token 5000"),
        ({}, "pard:", "names the file"),
        ({}, "pard::7", "names the file"),
        ({}, "pard:{file}.not", "does not exist"),
    ],
)
def test_bad_files_and_names_get_one_line(
    pair: Pair, tmp_path: Path, extra: dict[str, object], spec: str, said: str
) -> None:
    file = write_llama(tmp_path / "d.gguf", SHAPE, bpe_vocab(N_VOCAB), extra=extra)
    with pytest.raises(LocalspecError, match=said) as caught:
        LLM(pair.target, spec.format(file=file), backend="reference", n_ctx=256).close()
    assert "\n" not in str(caught.value)


def test_how_a_file_is_recognised(pair: Pair, tmp_path: Path) -> None:
    vocab = bpe_vocab(N_VOCAB)
    named = {"general.name": "PARD Llama 3.2 1B", "tokenizer.ggml.mask_token_id": MASK}
    files = {
        "by its field": (pair.draft, True),
        "by its name": (write_llama(tmp_path / "named.gguf", SHAPE, vocab, extra=named), True),
        "by neither": (write_llama(tmp_path / "plain.gguf", SHAPE, vocab, extra={"general.name": "A parody"}), False),
    }
    for draft, is_pard in files.values():
        with LLM(pair.target, str(draft), backend="reference", n_ctx=64, idle=False) as llm:
            assert llm.run(lambda loaded: loaded.state.models[0].drafter.info.one_pass) == is_pard
            assert llm.draft_names == [draft.stem]


# -- what it costs -----------------------------------------------------------------------------------------------------


def planned(draft_ms: dict[int, float], rows_of_draft: bool) -> tuple[int, int]:
    """How many masks the controller has read, and tokens it takes, where four in five are right, as the draft says."""
    controller = AutoController(
        PassTimes({w: 10.0 + 0.2 * w for w in range(1, 20)}),
        {"model": PassTimes(draft_ms)},
        {"model": SourceAcceptance(TYPICAL)},
        one_pass=frozenset({"model"}),
        rows_of_draft=frozenset({"model"} if rows_of_draft else ()),
    )
    plan, n = controller.plan(16, 20), 0
    width = plan.width("model")
    while n < width and plan.more("model", 0 if n else 1) and plan.keep("model", 0.8) is not None:
        n += 1
    return width, n


def test_a_pass_is_as_wide_as_its_rows_are_worth() -> None:
    """The first row has its price, and each further one; a draft does not get dearer by its steps."""
    flat, steep = {1: 2.0, 16: 2.1}, {1: 2.0, 16: 2.0 + 15 * 2.0}
    assert planned(flat, rows_of_draft=True)[0] > planned(steep, rows_of_draft=True)[0] >= 1
    assert planned({1: 60.0, 16: 61.0}, rows_of_draft=True)[1] == 0


def test_what_it_needs_to_pay_is_that_of_a_pass_of_as_many_rows() -> None:
    step, rows = (payoff("m", lambda w: 10.0, 4.0, block) for block in (None, lambda n: 4.0 + 0.5 * (n - 1)))
    assert step.break_even[1] == rows.break_even[1]
    assert (rows.break_even[4] or 1.0) < (step.break_even[4] or 1.0)
    assert rows.best_length[0.8] < payoff("m", lambda w: 10.0, 4.0, lambda n: 4.0).best_length[0.8]
