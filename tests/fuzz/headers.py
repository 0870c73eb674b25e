"""Damaged model files before everything in Python that reads them: a one-line ModelFileError, or it works."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from localspec.backends import reference
from localspec.commands.files import inspect_command
from localspec.errors import LocalspecError, ModelFileError
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.kv_memory import kv_shape
from localspec.model_files.vocab import Vocab
from localspec.prompts.templates import ChatTemplate
from tests.fuzz.gguf_cases import CASES, Builder
from tests.fuzz.target import Check, Target, one_line, peak_bytes, strict_json, timed

MAX_BYTES = 256 << 20
"""Memory that reading a file of 260 KB may take: far above the weights in float64, far below what headers can claim."""


def read_header(path: Path) -> None:
    with GGUFFile(path) as file:
        file.check_generates_text()
        vocab = Vocab.from_gguf(file)
        for token in range(-1, vocab.n_tokens + 1):
            vocab.token_bytes(token)
        assert vocab.difference(vocab) is None
        kv_shape(file).bytes(1 << 20)
        for name in file.tensors:
            assert len(file.tensor_bytes(name)) == file.tensors[name].n_bytes
        assert isinstance(file.quantization, str)


def inspect_it(path: Path) -> None:
    for as_json in (False, True):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert inspect_command(str(path), as_json) == 0
        if as_json:
            strict_json(said.getvalue())
        else:
            assert "\x1b" not in said.getvalue()
        said.getvalue().encode()


def compute(path: Path) -> None:
    with reference.load(path) as model, np.errstate(all="ignore"):
        ChatTemplate.for_vocab(model.chat_template, model.vocab)
        tokens = model.tokenize("hello 😀 <|im_end|>\n  the of", add_special=True, parse_special=True)
        assert all(0 <= token < model.vocab.n_tokens for token in tokens), tokens
        with model.new_context(16) as context:
            rows = context.decode([0, model.n_vocab - 1]).logits
            assert rows.shape == (2, model.n_vocab)
            context.truncate(1)
            context.decode(([token for token in tokens if token < model.n_vocab] or [0])[:8])


READERS = {"header": read_header, "inspect": inspect_it, "reference": compute}


def reading(build: Builder, readers: Mapping[str, Callable[[Path], Any]]) -> Check:
    """Every reader of the file of a case works, or says one line; ``load`` may say what is no damage."""

    def check(case: Any) -> None:
        path = build(case)
        for name, reader in readers.items():
            before = peak_bytes()
            try:
                with timed(name):
                    reader(path)
            except LocalspecError as error:
                one_line(error, LocalspecError if name == "load" else ModelFileError)
            finally:
                peak = peak_bytes() - before
            assert peak < MAX_BYTES, f"{name} took {peak / 1e6:.0f} MB"

    return check


@contextmanager
def _opened(folder: Path) -> Iterator[Check]:
    build = Builder(folder)
    compute(build(("bpe", [])))  # imports are not to be counted
    yield reading(build, READERS)


TARGET = Target("gguf headers", CASES, _opened, in_suite=150)
