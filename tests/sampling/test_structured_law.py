"""The law of an answer that follows a grammar, by enumeration: drafted or not, it is the target's under the mask.

The mask is defined here again, by nothing but the texts of the grammar, and the law of plain masked sampling is
computed from it with ``distribution`` alone. The real decoder, drafters, proposer and constraint must give the same to
1e-12. Tokens of several letters overlap, so that most texts can be cut in several ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from localspec.backends import reference
from localspec.errors import EngineError
from localspec.sampling.constraint import Constraint, MaskedRows, constraint_for
from localspec.sampling.sampling import SamplingParams, distribution
from localspec.spec_decode.decoder import SpeculativeDecoder
from localspec.spec_decode.detokenizer import TextAssembler
from localspec.spec_decode.drafters.base import Drafter, DrafterInfo, Plan, Proposer
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.drafters.grammar import GrammarDrafter
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.rounds import DraftToken, Round
from tests.spec_decode.test_exactness import DEFECT, EXACT, Predictions, Tokens
from tests.spec_decode.test_lossless import NosyController, TableContext
from tests.support import ggufs
from tests.support.enumeration import largest_difference, law_of_answers
from tests.support.gguf_vocabs import CONTROL, NORMAL, UNKNOWN, TinyVocab

TEXTS = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "ba", "bb", "abc"]
END = 2
PROMPT = (1, 3, 4, 6, 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Predictions, Predictions]]:
    folder: Path = tmp_path_factory.mktemp("letters")
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * 7]
    vocab = TinyVocab(
        "llama", TEXTS, types, [0.0] * 3 + [-float(i) for i in range(7)], bos=1, eos=2, unk=0, add_space_prefix=False
    )
    shape = ggufs.Shape(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, n_ff=32, n_ctx=64, sharpness=0.5)
    files = [ggufs.write_llama(folder / f"{seed}.gguf", shape, vocab, seed=seed) for seed in (3, 4)]
    with reference.load(files[0]) as target, reference.load(files[1]) as small:
        yield Predictions(target), Predictions(small)


@dataclass(frozen=True)
class Language:
    """A grammar, and the same by definition: whether a text is in it, and whether one in it begins so."""

    gbnf: str
    says: Callable[[str], bool]
    begins: Callable[[str], bool]


def listed(*words: str) -> Language:
    choice = " | ".join(f'"{word}"' for word in words)
    return Language(f"root ::= {choice}", words.__contains__, lambda text: any(w.startswith(text) for w in words))


def balanced(text: str) -> bool:
    half = len(text) // 2
    return len(text) % 2 == 1 and text == "a" * half + "c" + "b" * half


def begins_balanced(text: str) -> bool:
    head, c, tail = text.partition("c")
    return set(head) <= {"a"} and (not c or (set(tail) <= {"b"} and len(tail) <= len(head)))


LANGUAGES = {
    "words that begin one another": listed("ab", "aba", "abab", "abc", "ba", "babc", "bb", "c"),
    "recursive": Language('root ::= "a" root "b" | "c"', balanced, begins_balanced),
    "forced text": listed("abcabab", "abcabba", "bbabcab"),
    "anything": Language("root ::= [abc]*", lambda text: True, lambda text: True),
}

SAMPLING = SamplingParams(temperature=1.0)
CHAINS = {
    "temperature 1": SAMPLING,
    "hot, top-k": replace(SAMPLING, temperature=1.6, top_k=3),
    "top-p, penalties": replace(SAMPLING, top_p=0.8, repeat_penalty=1.4, frequency_penalty=0.3, repeat_last_n=4),
    "min-p, bias": replace(SAMPLING, min_p=0.1, logit_bias={3: 1.5, 4: -1.0, END: 2.0}),
    "greedy": SamplingParams(),
    "greedy, penalties": SamplingParams(repeat_penalty=1.8, presence_penalty=0.5, logit_bias={7: 2.0}),
}


def plain_law(language: Language, target: Predictions, params: SamplingParams, n: int) -> dict[Tokens, float]:
    """The law of answers of at most n tokens, by definition."""

    def answers(said: Tokens, text: str) -> dict[Tokens, float]:
        may_follow = [len(t) > 0 and i > END and language.begins(text + t) for i, t in enumerate(TEXTS)]
        if len(said) == n or (text and language.says(text) and not any(may_follow)):
            return {said: 1.0}
        may_follow[END] = language.says(text)
        history = (*PROMPT, *said)
        law = distribution(np.where(may_follow, target[history], -np.inf).astype(np.float32), history, params)
        found: dict[Tokens, float] = {}
        for token, probability in zip(law.ids.tolist(), law.probs.tolist(), strict=True):
            rest = {(*said, token): 1.0} if token == END else answers((*said, token), text + TEXTS[token])
            for answer, weight in rest.items():
                found[answer] = found.get(answer, 0.0) + probability * weight
        return found

    return answers((), "")


class Meddler(Drafter):
    """Guesses by rote, mostly what the grammar forbids; what it says once legal must do no harm either."""

    info = DrafterInfo("meddler")

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        guesses: list[DraftToken] = []
        for token in ((len(tokens) * 5) % 7 + 3, 3, 9, END, 0)[: 1 + len(tokens) % 4]:
            if plan.room > 0 and plan.keep(self.info.source, 0.5) is not None:
                guesses.append(DraftToken(token, self.info.source, 0.5))
        return guesses


Make = Callable[[Predictions, Predictions, Constraint], list[Drafter]]
DRAFTERS: dict[str, Make] = {
    "model": lambda target, small, c: [DraftModelDrafter(TableContext(small))],
    "n-gram, model": lambda target, small, c: [NgramDrafter(), DraftModelDrafter(TableContext(small))],
    "grammar, model": lambda t, s, c: [grammar_drafter(t, c), DraftModelDrafter(TableContext(s))],
    "grammar, n-gram": lambda target, small, c: [grammar_drafter(target, c), NgramDrafter()],
    "meddler, model": lambda target, small, c: [Meddler(), DraftModelDrafter(TableContext(small))],
}


def grammar_drafter(target: Predictions, constraint: Constraint) -> Drafter:
    return GrammarDrafter(constraint, target.context.model.tokenize)


def drafted_law(
    monkeypatch: pytest.MonkeyPatch,
    language: Language,
    models: tuple[Predictions, Predictions],
    params: SamplingParams,
    make: Make,
    n: int,
) -> dict[Tokens, float]:
    """The law of answers with the real decoder and everything behind it; every draft is checked to be legal."""
    target, small = models
    params, vocab = replace(params, max_tokens=n, grammar=language.gbnf), target.context.model.vocab

    def answer() -> list[Round]:
        constraint = constraint_for(params, vocab)
        assert constraint is not None
        decoder = SpeculativeDecoder(TableContext(target), make(target, small, constraint), NosyController())
        decoder.prefill(PROMPT, lambda: False)
        rounds = list(decoder.rounds(PROMPT, params, TextAssembler(vocab), constraint=constraint))
        told = ""
        for round_ in rounds:
            text = told
            for token in round_.draft.ids:
                legal = language.says(text) if token == END else token > END and language.begins(text + TEXTS[token])
                assert legal, f"{TEXTS[token]} was drafted after {text!r}"
                text += TEXTS[token]
            told += "".join(TEXTS[token.id] for token in round_.emitted)
        return rounds

    return law_of_answers(monkeypatch, answer)


@pytest.mark.parametrize("drafters", DRAFTERS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_law_is_that_of_plain_masked_sampling(
    monkeypatch: pytest.MonkeyPatch, models: tuple[Predictions, Predictions], language: str, drafters: str
) -> None:
    n = 2 if language == "anything" else 3
    for name in CHAINS if language == "words that begin one another" else ("hot, top-k", "greedy, penalties"):
        params = CHAINS[name]
        plain = plain_law(LANGUAGES[language], models[0], params, n)
        assert sum(plain.values()) == pytest.approx(1.0, abs=EXACT)
        law = drafted_law(monkeypatch, LANGUAGES[language], models, params, DRAFTERS[drafters], n)
        assert largest_difference(plain, law) < EXACT, name


def test_the_languages_are_worth_enumerating(models: tuple[Predictions, Predictions]) -> None:
    """Answers end by themselves, by an end token and by the budget; the same text is said in several ways."""
    ends, n_alike = set(), 0
    for language in LANGUAGES.values():
        law = plain_law(language, models[0], SAMPLING, 3)
        assert sum(p > 0.01 for p in law.values()) >= 4
        ends |= {"token" if END in answer else "budget" if len(answer) == 3 else "itself" for answer in law}
        texts = ["".join(TEXTS[token] for token in answer) for answer in law]
        n_alike += len(texts) - len(set(texts))
    assert n_alike > 10
    assert ends == {"token", "budget", "itself"}


def test_masks_of_the_wrong_place_are_noticed(
    monkeypatch: pytest.MonkeyPatch, models: tuple[Predictions, Predictions]
) -> None:
    """Forbidden tokens come out, which is an error, or the law differs."""

    def late(self: MaskedRows, index: int) -> object:
        self.constraint.place(self.draft[: max(0, index - 1)])
        return self.constraint.masked(self.logits[index])

    monkeypatch.setattr(MaskedRows, "__getitem__", late)
    language = LANGUAGES["forced text"]
    try:
        law = drafted_law(monkeypatch, language, models, SAMPLING, DRAFTERS["model"], 3)
    except (EngineError, AssertionError):
        return
    assert largest_difference(plain_law(language, models[0], SAMPLING, 3), law) > DEFECT
