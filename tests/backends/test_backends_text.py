"""The contract of every backend, text side: tokenising, special tokens, and bytes that spell the text again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localspec.backends.base import Model
from localspec.errors import UsageError
from tests.conftest import Backend, TinyFiles

TEXTS = [
    "",
    " ",
    "the and of",
    "The rain  in Spain\n\n\tstays.",
    "1 + 1 = 2; it's he'll I'VE",
    "naïve café Üben é",
    "日本語とemoji 😀👨‍👩‍👧 ok",
    "\x00\x01\x7f \x85 \u3000 \ufffd",
    "<|im_start|>user\nhello<|im_end|>",
    "a<s>b</s>c",
    "   leading and trailing   ",
    "the and 😀 of\n" * 2000,
]


@pytest.fixture(scope="module", params=["spm", "bpe"])
def text_model(backend: Backend, tiny: TinyFiles, request: pytest.FixtureRequest) -> Iterator[Model]:
    with backend.load(getattr(tiny, request.param)) as model:
        yield model


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_bytes_of_the_tokens_spell_the_text(text_model: Model, text: str) -> None:
    vocab = text_model.vocab
    spelled = b"".join(vocab.token_bytes(token) for token in text_model.tokenize(text))
    space = b" " if text and text_model.path.name == "tiny-spm-f32.gguf" else b""
    assert spelled == space + text.encode()


def test_special_tokens_are_read_only_when_asked_for(text_model: Model) -> None:
    vocab, text = text_model.vocab, "a<|im_end|>b"
    special = {i for i in range(text_model.n_vocab) if vocab.token_bytes(i).startswith(b"<|")} | set(vocab.eog)
    assert len(set(text_model.tokenize(text, parse_special=True)) & special) == 1
    assert not set(text_model.tokenize(text)) & special, "a user's text forged a special token"


def test_begin_of_text_is_added_where_the_file_wants_it(text_model: Model) -> None:
    plain, special = text_model.tokenize("the"), text_model.tokenize("the", add_special=True)
    if text_model.vocab.add_bos:
        assert special == [text_model.vocab.bos, *plain]
    else:
        assert special == plain


def test_a_lone_surrogate_is_a_usage_error(text_model: Model) -> None:
    with pytest.raises(UsageError, match="surrogate"):
        text_model.tokenize("half \ud83d of an emoji")
