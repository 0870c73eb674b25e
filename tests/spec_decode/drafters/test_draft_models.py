"""Draft models: one that was left behind, whose guesses are judged as it reads, and one that fills in masks (PARD)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from localspec import LLM, LocalspecError, SamplingParams
from localspec.engine.pair import Pair as LoadedPair
from localspec.sampling.sampling import Ids, Noise, Row
from localspec.spec_decode.drafters.base import Plan, Proposer
from tests.conftest import Backend, TinyFiles
from tests.support.gguf_vocabs import bpe_vocab
from tests.support.ggufs import Pair, Shape, write_llama


class Recorder(Plan):
    """A plan that only writes down."""

    def __init__(self, worth: int = 1 << 20, piece: int = 1 << 20) -> None:
        super().__init__(1)
        self.worth, self.piece = worth, piece
        self.n_pieces = 0

    def more(self, source: str, pending: int = 0, held: float | None = None) -> int:
        return min(pending, self.piece) if pending <= self.worth else 0

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        self.n_read, self.ms, self.n_pieces = n_tokens, ms, self.n_pieces + 1

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        return None


@pytest.fixture
def llm(tiny: TinyFiles) -> Iterator[LLM]:
    with LLM(tiny.pair.target, tiny.pair.draft, backend="reference", n_ctx=256) as llm:
        yield llm


PROMPT = [20 + i % 60 for i in range(100)]


def test_a_guess_is_charged_for_what_is_made_of_its_logits_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(Proposer):
        def confidence(self, row: Row, history: Sequence[int], ids: Ids | None = None) -> float:
            now[0] += 0.05
            return super().confidence(row, history, ids)

    (drafter,), plan = llm.inspect().state.drafters, Recorder()
    drafter.begin(PROMPT)
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("localspec.spec_decode.drafters.draft_model.time", clock)
    llm.run(lambda pair: drafter.draft(PROMPT, plan, Slow(SamplingParams(), Noise(0))))
    assert plan.ms == pytest.approx(50)


def test_all_of_a_prompt_is_read_once_that_has_come_to_be_worth_it(llm: LLM) -> None:
    (drafter,), context = llm.inspect().state.drafters, llm.inspect().contexts[1]

    def read() -> None:
        proposer = Proposer(SamplingParams(), Noise(0))
        context.truncate(0)
        drafter.begin(PROMPT)
        drafter.draft(PROMPT, Recorder(10), proposer)
        assert context.tokens == []
        drafter.accept([7])
        for piece, n_pieces in ((200, 1), (40, 3)):
            context.truncate(0)
            plan = Recorder(200, piece)
            drafter.draft([*PROMPT, 7], plan, proposer)
            assert context.tokens == [*PROMPT, 7]
            assert plan.n_pieces == n_pieces

    llm.run(lambda pair: read())


SHAPE = Shape(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, residual=0.1)
N_VOCAB = 300
MASK = 250
PROMPTS = ["the cat is in the hat and", "she was here", "é and ü: 日本 for"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and the same as a draft that fills in masks."""
    folder, vocab = tmp_path_factory.mktemp("pard"), bpe_vocab(N_VOCAB)
    extra = {"llama.pard_token": MASK}
    return Pair(*(write_llama(folder / f"{i}.gguf", SHAPE, vocab, extra=extra) for i in range(2)))


def open_llm(pair: Pair, draft: object = None, **options: object) -> LLM:
    options = {"backend": "reference", "n_ctx": 256, "idle": False, "remember": False, **options}
    return LLM(pair.target, str(pair.draft) if draft is None else draft, **options)


def test_each_draft_is_what_a_fresh_reading_of_text_and_masks_says(tiny: TinyFiles, backend: Backend) -> None:
    """Place by place, after accepted and rejected drafts, a long prompt, and another conversation in that memory."""
    pair, mask, seen = tiny.pair, 3, list[tuple[list[int], list[int]]]()
    with LLM(pair.target, f"pard:{pair.draft}:{mask}", backend=backend.name, n_ctx=256, idle=False) as llm:
        for prompt in (*PROMPTS, " ".join(PROMPTS * 2), PROMPTS[0]):
            text = llm.run(lambda loaded, prompt=prompt: loaded.target.tokenize(prompt, add_special=True))
            for round_ in llm.rounds(list(text), replace(GREEDY, max_tokens=20), draft_length=5):
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
    with open_llm(pair) as llm:
        for n in range(8, 14):  # one of these ends with a round that read masks
            llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=n), draft_length=4)
            assert MASK not in llm.run(lambda loaded: list(loaded.state.models[0].context.tokens))


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
        open_llm(pair, spec.format(file=file)).close()
    assert "\n" not in str(caught.value)


def test_how_a_file_is_recognised(pair: Pair, tmp_path: Path) -> None:
    named = {"general.name": "PARD Llama 3.2 1B", "tokenizer.ggml.mask_token_id": MASK}
    extras = {"named": named, "plain": {"general.name": "A parody"}}
    drafts = [write_llama(tmp_path / name, SHAPE, bpe_vocab(N_VOCAB), extra=extra) for name, extra in extras.items()]
    for draft, is_pard in zip([pair.draft, *drafts], [True, True, False], strict=True):
        with open_llm(pair, str(draft)) as llm:
            assert llm.run(lambda loaded: loaded.state.models[0].drafter.info.one_pass) == is_pard
            assert llm.draft_names == [draft.stem]
