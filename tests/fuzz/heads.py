"""Damaged head files: a one-line ModelFileError, or a head that works; and small whatever sizes they claim."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from localspec.heads.file import read_card
from localspec.heads.listing import head_facts
from localspec.heads.trained import Head, load_head
from tests.fuzz.gguf_cases import SMALL, Builder, changes
from tests.fuzz.headers import inspect_it, reading
from tests.fuzz.target import Check, Target, table
from tests.support import ggufs
from tests.support.gguf_vocabs import bpe_vocab
from tests.support.heads import write_random_head

KINDS: dict[str, Any] = {"chained": {}, "exit": {"taps": ("layer:0",), "steps": 1}}

KEYS: list[str] = table("heads", "KEYS")


def _text(value: bytes) -> tuple[int, bytes]:
    return 8, struct.pack("<Q", len(value)) + value


SAID = {
    "kind": [each.encode() for each in KINDS],
    "taps": [b"," * 100_000, b"norm,layer:0", b"layer:9", b"norm,norm"],
    "training": [
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"minutes": NaN}',
        b'{"minutes": 1e400}',
        b'{"curve": [{"tokens_seen": -1}]}',
        b'{"curve": [{"acceptance": {"\\u001b[31m": [0.5]}}], "command": "\\n\\u001b"}',
        b'{"acceptance": {"code": [2.0]}}',
        b'{"acceptance": {"code": [0.5, true]}}',
        b'{"versions": []}',
        b"3",
    ],
}
SETTINGS = st.sampled_from(
    [("set", f"localspec.head.{key}", _text(text)) for key, texts in SAID.items() for text in texts]
)

CASES = st.tuples(
    st.sampled_from(list(KINDS)),
    st.lists(
        st.one_of(changes(KEYS, ["localspec.head.token_map"], b"head.fc.weight"), SETTINGS), min_size=1, max_size=3
    ),
)
"""(kind of head, changes)"""


def use(head: Head) -> None:
    """Draft a little."""
    rows = np.ones((2, head.card.n_embd * len(head.taps)), np.float32)
    with head.new_context(8) as context, np.errstate(all="ignore"):
        if head.kind != "exit":
            rows = head.true_rows(context, rows, head.token_map[:2].tolist())
        rows = context.decode_floats(rows, [0, 1]).logits
    assert rows.shape[1] == len(head.token_map)


@contextmanager
def _opened(folder: Path) -> Iterator[Check]:
    target = ggufs.write_llama(folder / "target.gguf", replace(SMALL, n_layer=2), bpe_vocab(300))

    def write(kind: Any) -> Any:
        return lambda path: write_random_head(target, path, kind, n_out=50, **KINDS[kind])

    build = Builder(folder, {kind: write(kind) for kind in KINDS})

    def load(path: Path) -> None:
        with load_head(path, target, "reference") as head:
            use(head)

    # A whole one may be for another model, or lead to rows that are not finite.
    readers = {"card": read_card, "inspect": inspect_it, "list": head_facts, "load": load}
    with mock.patch.dict(os.environ, {"LOCALSPEC_HOME": str(folder / "home")}):
        for kind in KINDS:
            load(build((kind, [])))  # imports are not to be counted
        yield reading(build, readers)


TARGET = Target("heads", CASES, _opened, in_suite=150)
