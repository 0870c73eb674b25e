"""Damaged GGUF files: valid tiny ones, changed in their structure or in their bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
from hypothesis import strategies as st

from tests.fuzz.target import table
from tests.support import ggufs
from tests.support.gguf_vocabs import bpe_vocab, spm_vocab

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

SMALL = ggufs.Shape(n_layer=1, n_embd=64, n_head=2, n_head_kv=1, n_ff=64, n_ctx=256)

BASES: dict[str, Callable[[Path], Path]] = {
    "bpe": lambda path: ggufs.write_llama(path, SMALL, bpe_vocab(300)),
    "spm": lambda path: ggufs.write_llama(path, SMALL, spm_vocab(300)),
    "q8_0": lambda path: ggufs.write_llama(path, SMALL, bpe_vocab(300), tensor_type="Q8_0"),
}
"""Valid files of the architecture that every engine reads."""


@dataclass
class Tensor:
    name: bytes
    dims: list[int]
    kind: int
    offset: int


@dataclass
class Header:
    """A GGUF taken apart; ``encode`` puts it together again, as wrong as it has become."""

    version: int
    keys: list[tuple[bytes, int, bytes]]
    tensors: list[Tensor]
    data: bytes
    n_keys: int | None = None
    n_tensors: int | None = None
    patches: list[tuple[float, bytes]] = field(default_factory=list)
    cut: float | None = None
    tail: bytes = b""

    def encode(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        out = bytearray(b"GGUF" + struct.pack("<IQQ", self.version, n_tensors, n_keys))
        for key, kind, value in self.keys:
            out += _text(key) + struct.pack("<I", kind) + value
        for tensor in self.tensors:
            out += _text(tensor.name) + struct.pack("<I", len(tensor.dims))
            out += b"".join(struct.pack("<Q", dim % (1 << 64)) for dim in tensor.dims)
            out += struct.pack("<IQ", tensor.kind, tensor.offset % (1 << 64))
        header = len(out)
        out += bytes(-len(out) % 32) + self.data
        for share, patch in self.patches:
            at = 4 + int(share * max(0, header - 4 - len(patch)))
            out[at : at + len(patch)] = patch
        if self.cut is not None:
            del out[int(self.cut * len(out)) :]
        return bytes(out + self.tail)


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def take_apart(path: Path) -> Header:
    """The parts of a valid file."""
    reader, keys, tensors = gguf.GGUFReader(path), [], []
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF."):
            value = b"".join(part.tobytes() for part in entry.parts[3:])
            keys.append((name.encode(), int(entry.types[0]), value))
    for each in reader.tensors:
        _, title, _, dims, kind, offset = each.field.parts
        tensors.append(Tensor(title.tobytes(), dims.tolist(), int(kind[0]), int(offset[0])))
    version = int(reader.fields["GGUF.version"].parts[-1][0])
    return Header(version, keys, tensors, path.read_bytes()[reader.data_offset :])


# -- values ------------------------------------------------------------------------------------------------------------

NUMBERS: list[int] = table("gguf_cases", "NUMBERS")


def number(kind: int, value: float) -> bytes:
    """A number as the file stores it in a type that may be too small for it."""
    if kind in (6, 12):
        return struct.pack(_FORMATS[kind], value)
    return (int(value) % (1 << 64)).to_bytes(8, "little")[: _SIZES[kind]]


FLOATS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"), 1e-5, 0.5])
NAMES = b"llama gpt2 qwen2 bert mamba none linear yarn longrope default gpt-2 <|im_end|> <s> \xff\xfe"
TEXTS = st.sampled_from([b"", b"\x00", b"a" * 70, b"\n\x1b[31m", *NAMES.split()]) | st.binary(max_size=12)


@st.composite
def values(draw: Any) -> tuple[int, bytes]:
    """A type and a value of it: a number, a text, or an array (nested ones too)."""
    kind = draw(st.sampled_from([4, 4, 4, 5, 10, 11, 6, 12, 7, 0, 8, 8, 9, 9, 9, 1, 2, 3]))
    if kind == 8:
        return kind, _text(draw(TEXTS))
    if kind != 9:
        value = draw(FLOATS) if kind in (6, 12) else draw(st.sampled_from(NUMBERS))
        return kind, number(kind, value)
    item = draw(st.sampled_from([4, 5, 6, 7, 8, 9, 12, 0, 10]))
    n = draw(st.sampled_from([0, 1, 2, 5, 300]))
    if item == 8:
        texts = draw(st.lists(TEXTS, min_size=1, max_size=4))
        body = b"".join(_text(texts[i % len(texts)]) for i in range(n))
    elif item == 9:
        body = (struct.pack("<IQ", 4, 1) + bytes(4)) * n
    else:
        item_value = draw(FLOATS) if item in (6, 12) else draw(st.sampled_from(NUMBERS))
        body = number(item, item_value) * n
    claimed = draw(st.sampled_from([n, n, n, n, n + 1, 1 << 40, (1 << 64) - 1]))
    return kind, struct.pack("<IQ", item, claimed) + body


KEYS: list[str] = table("gguf_cases", "KEYS")
MORE_WHOLES: list[str] = table("hyperparameters", "MORE_WHOLES")
MORE_FLOATS: list[str] = table("hyperparameters", "MORE_FLOATS")

NAN, INFINITY = b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f"

ARRAYS = ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.merges"]

TYPES = st.one_of(
    st.integers(0, 45), st.integers(97, 99), st.integers(133, 158), st.integers(202, 233), st.integers(335, 402),
    st.sampled_from([1 << 31, (1 << 32) - 1]),
)  # fmt: skip
"""Types of ggml, of ik_llama.cpp, and of nobody."""

ITEMS = [*range(8), -1, 1 << 31]

SHARES = st.floats(0, 1, exclude_max=True)


def changes(keys: list[str], arrays: list[str], tensor: bytes) -> st.SearchStrategy[tuple[Any, ...]]:
    """Ways to damage a file: its metadata and what it might have besides (``keys``), the lists among them, its
    tensors, one of which may get the name ``tensor``."""
    return st.one_of(
        st.tuples(st.just("set"), st.sampled_from(keys), values()),
        st.tuples(st.just("number"), st.sampled_from(keys), st.sampled_from(NUMBERS)),
        st.tuples(st.just("drop"), st.sampled_from(keys)),
        st.tuples(st.just("twice"), st.sampled_from(keys)),
        st.tuples(st.just("rename"), st.sampled_from(keys), TEXTS),
        st.tuples(st.just("text"), st.sampled_from(arrays), SHARES, TEXTS),
        st.tuples(st.just("item"), st.sampled_from(arrays), SHARES, st.sampled_from(ITEMS)),
        st.tuples(st.just("shorter"), st.sampled_from(arrays), st.sampled_from([0, 1, 5, 260, 299])),
        st.tuples(st.just("dims"), SHARES, st.lists(st.sampled_from(NUMBERS), max_size=5)),
        st.tuples(st.just("dim"), SHARES, st.integers(0, 3), st.sampled_from(NUMBERS)),
        st.tuples(st.just("type"), SHARES, TYPES),
        st.tuples(st.just("offset"), SHARES, st.one_of(st.sampled_from(NUMBERS), SHARES)),
        st.tuples(st.just("same offset"), SHARES, SHARES),
        st.tuples(st.just("tensor name"), SHARES, st.one_of(TEXTS, st.just(tensor))),
        st.tuples(st.just("tensor twice"), SHARES),
        st.tuples(st.just("tensor gone"), SHARES),
        st.tuples(st.just("swap"), SHARES, SHARES),
        st.tuples(st.just("n_keys"), st.sampled_from(NUMBERS)),
        st.tuples(st.just("n_tensors"), st.sampled_from(NUMBERS)),
        st.tuples(st.just("version"), st.sampled_from([0, 1, 2, 3, 4, 1 << 24, (1 << 32) - 1])),
        st.tuples(st.just("cut"), SHARES),
        st.tuples(st.just("tail"), st.binary(max_size=40)),
        st.tuples(st.just("patch"), SHARES, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("patch"), SHARES, st.sampled_from([n.to_bytes(8, "little") for n in NUMBERS])),
        st.tuples(st.just("data"), SHARES, st.sampled_from([NAN * 8, INFINITY * 8, b"\xff" * 64])),
    )  # fmt: skip


def apply(header: Header, change: tuple[Any, ...]) -> None:
    """Change a header as a case says."""
    kind, first, *rest = change
    if kind in ("n_keys", "n_tensors", "version", "cut", "tail"):
        setattr(header, kind, first)
    elif kind == "patch":
        header.patches.append((first, *rest))
    elif kind == "a number":
        _change_number(header, first, *rest)
    elif kind == "data":
        at = int(first * len(header.data)) // 4 * 4
        header.data = header.data[:at] + rest[0] + header.data[at + len(rest[0]) :]
    elif isinstance(first, str):
        _change_key(header, kind, first.encode(), rest)
    elif header.tensors:
        _change_tensor(header, kind, int(first * len(header.tensors)), rest)


def _change_number(header: Header, share: float, whole: int, real: float) -> None:
    """One of the numbers that a file has, or may have besides, becomes another one by its type."""
    architecture = next(value[8:] for key, _, value in header.keys if key == b"general.architecture").decode()
    kinds = {f"{architecture}.{name}".encode(): 4 for name in MORE_WHOLES}
    kinds |= {f"{architecture}.{name}".encode(): 6 for name in MORE_FLOATS}
    kinds |= {key: kind for key, kind, _ in header.keys if kind in _SIZES and kind != 7}
    key, kind = list(kinds.items())[int(share * len(kinds))]
    _change_key(header, "set", key, [(kind, number(kind, real if kind in (6, 12) else whole))])


def _change_key(header: Header, kind: str, name: bytes, rest: list[Any]) -> None:
    at = next((i for i, key in enumerate(header.keys) if key[0] == name), len(header.keys))
    here = header.keys[at : at + 1]
    if kind == "set":
        here = [(name, *rest[0])]
    elif kind == "number" and (not here or here[0][1] in _SIZES):
        kept = here[0][1] if here else 4
        here = [(name, kept, number(kept, float(rest[0]) if kept in (6, 12) else rest[0]))]
    elif kind == "drop":
        here = []
    elif kind == "twice":
        header.keys += here
    elif kind == "rename" and here:
        here = [(rest[0], *here[0][1:])]
    elif kind in ("text", "item", "shorter") and here and here[0][1] == 9:
        here = [(name, 9, _changed_array(here[0][2], kind, *rest))]
    header.keys[at : at + 1] = here


def _changed_array(raw: bytes, kind: str, where: Any, value: Any = None) -> bytes:
    item, n = struct.unpack_from("<IQ", raw)
    items, start = list[bytes](), 12
    for _ in range(n):
        size = 8 + struct.unpack_from("<Q", raw, start)[0] if item == 8 else _SIZES.get(item, 16)
        items.append(raw[start : start + size])
        start += size
    if kind == "shorter":
        items = items[:where]
    elif items:
        at = int(where * len(items))
        if kind == "text" and item == 8:
            items[at] = _text(value)
        elif kind == "item" and item in _SIZES:
            items[at] = number(item, float(value) if item in (6, 12) else value)
        elif kind == "item":
            items[at] = items[value % len(items)]
    return struct.pack("<IQ", item, len(items)) + b"".join(items)


def _change_tensor(header: Header, kind: str, index: int, rest: list[Any]) -> None:
    tensor, value = header.tensors[index], rest[0] if rest else None
    if kind == "dims":
        tensor.dims = list(value)
    elif kind == "dim" and tensor.dims:
        tensor.dims[value % len(tensor.dims)] = rest[1]
    elif kind == "type":
        tensor.kind = value
    elif kind == "offset":
        tensor.offset = int(value * len(header.data)) if isinstance(value, float) else value
    elif kind == "tensor name":
        tensor.name = value
    elif kind == "tensor twice":
        header.tensors.append(tensor)
    elif kind == "tensor gone":
        del header.tensors[index]
    elif kind in ("same offset", "swap"):
        other = header.tensors[int(value * len(header.tensors))]
        if kind == "same offset":
            tensor.offset = other.offset
        else:
            tensor.dims, other.dims = other.dims, tensor.dims


CASES = st.tuples(
    st.sampled_from(sorted(BASES)), st.lists(changes(KEYS, ARRAYS, b"token_embd.weight"), min_size=1, max_size=3)
)
"""(name of the base, changes)"""


class Builder:
    """Writes the file of a case: a valid one that one of ``bases`` writes, changed."""

    def __init__(self, folder: Path, bases: Mapping[str, Callable[[Path], Path]] = BASES) -> None:
        self.path = folder / "case.gguf"
        self._bases = {name: take_apart(write(folder / f"base-{name}.gguf")) for name, write in bases.items()}

    def __call__(self, case: tuple[str, list[tuple[Any, ...]]]) -> Path:
        name, changes = case
        header = deepcopy(self._bases[name])
        for change in changes:
            apply(header, change)
        self.path.write_bytes(header.encode())
        return self.path
