"""Damaged files that once ended the process, or raised what was no error of ours; found by ``tests/fuzz``."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec.backends import reference
from localspec.errors import LocalspecError, ModelFileError, UnsupportedModel
from localspec.heads.listing import inspect
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.vocab import Vocab
from tests.conftest import open_backend
from tests.fuzz.engines import Engine
from tests.fuzz.gguf_cases import Builder

FIRST_TENSOR, NORM = 0.0, 0.09
"""Where the embedding and the first norm stand among the tensors."""

U32, U64, TEXT, FLOAT, BOOL = 4, 10, 8, 6, 7
EPSILON = "llama.attention.layer_norm_rms_epsilon"

CASES: dict[str, list[Any]] = {
    "a size of 0": [("dim", FIRST_TENSOR, 0, 0)],
    "sizes whose product overflows": [("type", FIRST_TENSOR, 43), ("dims", FIRST_TENSOR, [1 << 40, 1 << 40])],
    "a tensor of no known type": [("type", FIRST_TENSOR, 1 << 31)],
    "a type without blocks": [("type", FIRST_TENSOR, 40)],
    "weights of integers": [("type", FIRST_TENSOR, 24)],
    "weights of F64": [("dims", FIRST_TENSOR, [64, 100]), ("type", FIRST_TENSOR, 28)],
    "a norm that is F16": [("type", NORM, 1)],
    "two equal tokens": [("item", "tokenizer.ggml.tokens", 0.0, 6)],
    "tokens that are equal up to a zero byte": [("text", "tokenizer.ggml.tokens", 0.5, b"!\0x")],
    "a merge of nothing": [("text", "tokenizer.ggml.merges", 0.0, b"llama")],
    "tensors anywhere": [("set", "general.alignment", (U32, struct.pack("<I", 1))), ("rename", "general.name", b"n")],
    "token types that are a text": [("set", "tokenizer.ggml.token_type", (TEXT, struct.pack("<Q", 1) + b"k"))],
    "five tokens": [("shorter", "tokenizer.ggml.tokens", 5)],
    "more experts used than there are": [("set", "llama.expert_used_count", (U32, struct.pack("<I", 1)))],
    "too many experts": [("number", "llama.expert_count", 1 << 31)],
    "a file type of 64 bits": [("set", "general.file_type", (U64, struct.pack("<Q", 0)))],
    "more layers than engines have room for": [("number", "llama.block_count", 513)],
    "a norm that divides by nothing": [("set", EPSILON, (FLOAT, struct.pack("<f", 0.0)))],
    "a norm with an epsilon under 0": [("set", EPSILON, (FLOAT, struct.pack("<f", -1.0)))],
    "a norm with an epsilon that is no number": [("set", EPSILON, (FLOAT, struct.pack("<f", math.nan)))],
    "an endless rope": [("set", "llama.rope.freq_base", (FLOAT, struct.pack("<f", math.inf)))],
    "a rope that does not turn": [("number", "llama.rope.freq_base", 0)],
    "a rope whose base is no number": [("set", "llama.rope.freq_base", (BOOL, b"\0"))],
    "heads that do not share evenly": [("number", "llama.attention.head_count_kv", 3)],
    "heads that share no width": [("number", "llama.attention.head_count", 3)],
    "heads of an odd width": [("number", "llama.attention.key_length", 15)],
    "no heads": [("number", "llama.attention.head_count", 0)],
    "no width": [("number", "llama.embedding_length", 0)],
    "a width in words": [("set", "llama.embedding_length", (TEXT, struct.pack("<Q", 4) + b"many"))],
    "no layers": [("number", "llama.block_count", 0)],
    "no feed-forward channels": [("number", "llama.feed_forward_length", 0)],
    "a single number for the embedding": [("dims", FIRST_TENSOR, [])],
    "a name of two lines": [("tensor name", 0.99, b"\n\x1b[31m")],
    "rows that are no whole blocks": [("type", 0.5, 137)],
}
"""Changes of a file of a byte-level model."""

IN_PYTHON = {
    "a norm that is F16",
    "a merge of nothing",
    "tensors anywhere",
    "two equal tokens",
    "tokens that are equal up to a zero byte",
    "five tokens",
    "a file type of 64 bits",
}
HARMLESS = {
    "llama-cpp": {"a norm that is F16", "no feed-forward channels", "a merge of nothing"},
    "ik-llama": {"no feed-forward channels", "a merge of nothing", "tensors anywhere"},
    "mlx": IN_PYTHON,
    "reference": IN_PYTHON
    | {
        "a type without blocks",
        "more experts used than there are",
        "no feed-forward channels",
        "a name of two lines",
    },
}
"""What an engine can do with all the same, or refuses for a reason of its own."""


@pytest.fixture(scope="module", params=["ik-llama", "llama-cpp", "mlx", "reference"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    open_backend(request.param)
    loaded = Engine(request.param, tmp_path_factory.mktemp("engine") / "log")
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("name", CASES)
def test_no_engine_dies_of_it(engine: Engine, build: Builder, name: str) -> None:
    answer = engine.ask(build(("bpe", CASES[name])))  # fails where the process ended
    if "error" not in answer:
        assert name in HARMLESS[engine.backend]
        return
    assert {"ModelFileError", "EngineError"} & set(answer["kinds"]), answer
    assert answer["error"].isprintable(), answer


def test_the_reference_backend_names_a_type_that_it_cannot_unpack(build: Builder) -> None:
    with pytest.raises(ModelFileError, match="cannot unpack"):
        reference.load(build(("bpe", [("type", FIRST_TENSOR, 99)])))


def test_characters_that_a_vocabulary_cannot_spell_become_its_unknown_token(build: Builder) -> None:
    with reference.load(build(("spm", []))) as whole, GGUFFile(whole.path) as file:
        shorter = file.metadata["tokenizer.ggml.tokens"]
        n_special = list(shorter).index("<0x00>")
    # Byte tokens gone: their texts are others now.
    renamed = [
        ("text", "tokenizer.ggml.tokens", (i + 0.5) / 300, b"no%d" % i) for i in range(n_special, n_special + 256)
    ]
    with reference.load(build(("spm", renamed))) as model:
        assert model.vocab.unk == 0
        assert 0 in model.tokenize("😀")


def test_a_single_number_is_a_tensor_of_one_value(build: Builder) -> None:
    with GGUFFile(build(("bpe", [("dims", NORM, [])]))) as file:
        assert (1,) in [tensor.shape for tensor in file.tensors.values()]


@pytest.mark.parametrize("read", [inspect, lambda path: Vocab.from_gguf(GGUFFile(path))])
def test_scores_must_be_as_many_as_tokens(build: Builder, read: Callable[[Path], Any]) -> None:
    path = build(("spm", [("shorter", "tokenizer.ggml.scores", 5)]))
    if read is inspect:
        assert read(path)["vocabulary"] is None
    else:
        with pytest.raises(UnsupportedModel, match="300 tokens but 5 scores"):
            read(path)


def test_an_error_is_one_printable_line_whatever_it_quotes() -> None:
    error = LocalspecError("a\nb\x1b[31m\r\n\tc \udc80 é😀")
    assert str(error) == "a b\\x1b[31m c \\udc80 é😀"
    assert str(error).encode()
