"""A model's vocabulary, read from its file and so the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.gguf_file import GGUFFile, StringArray

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|end_of_text|> "
    "</s> <|eom_id|> <EOT> _<EOT> <turn|> [EOT] [EOS] <|end_of_turn|> <|tool_response>".split()
)
"""Names under which models store tokens that end a turn or a text; the same that llama.cpp looks for."""

_PADDING = ("[PAD", "<unused", "<|unused", "<pad", "<dummy", "[unused", "<extra_id", "<|reserved")


class Vocab:
    """Tokens, their types and special ids.

    Attributes:
        kind: ``tokenizer.ggml.model``: ``gpt2`` (byte-level BPE), ``llama`` (SentencePiece), …
        pre: the pre-tokenizer's name, for byte-level BPE.
        n_tokens: number of named tokens; a model's logits may be wider by padding.
        types: token types [n_tokens] (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte).
        bos, eos, eot, unk, pad: special ids, or None.
        add_bos: whether a text begins with ``bos``.
        eog: ids that end a generation.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        types: npt.NDArray[np.int32],
        *,
        kind: str,
        pre: str = "",
        special: dict[str, int | None],
        add_bos: bool,
        raw: bytes | memoryview = b"",
    ) -> None:
        self._tokens = tokens
        self.types = types
        self.kind = kind
        self.pre = pre
        self.n_tokens = len(tokens)
        self.bos, self.eos, self.eot = special.get("bos"), special.get("eos"), special.get("eot")
        self.unk, self.pad = special.get("unk"), special.get("pad")
        self.add_bos = add_bos
        self._raw = raw
        self._bytes: dict[int, bytes] = {}
        ends = {i for i in (self.eos, self.eot, special.get("eom")) if i is not None}
        for i in np.flatnonzero((types == CONTROL) | (types == USER_DEFINED)):
            if tokens[int(i)] in END_TEXTS:
                ends.add(int(i))
        self.eog = frozenset(ends)

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> Vocab:
        """The vocabulary of an open file; independent of it afterwards."""
        meta = gguf.metadata
        stored = meta["tokenizer.ggml.tokens"]
        # A private copy of the bytes, so that the map of a file of gigabytes can go.
        raw = bytes(stored.raw) if isinstance(stored, StringArray) else b""
        tokens = StringArray(memoryview(raw), 0, len(stored), len(raw))
        types = np.array(meta.get("tokenizer.ggml.token_type", np.ones(len(tokens))), dtype=np.int32)
        kind = str(meta.get("tokenizer.ggml.model", ""))
        special = {}
        for short, key in (
            ("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("eom", "eom"), ("unk", "unknown"), ("pad", "padding"),
        ):  # fmt: skip
            value = meta.get(f"tokenizer.ggml.{key}_token_id")
            special[short] = int(value) if value is not None and 0 <= value < len(tokens) else None
        if kind == "llama":
            for short, default in (("bos", 1), ("eos", 2), ("unk", 0)):
                if special[short] is None and default < len(tokens):
                    special[short] = default
        add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", kind == "llama"))
        pre = str(meta.get("tokenizer.ggml.pre", ""))
        return cls(tokens, types, kind=kind, pre=pre, special=special, add_bos=add_bos, raw=raw)

    def token_text(self, token: int) -> str:
        """The token as the file stores it."""
        return self._tokens[token]

    def is_control(self, token: int) -> bool:
        """Whether the token has no text of its own."""
        return int(self.types[token]) in (UNKNOWN, CONTROL, UNUSED)

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the text; nothing for control tokens and padding."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._decode(token) if 0 <= token < self.n_tokens else b""
        return found

    def _decode(self, token: int) -> bytes:
        text, kind = self._tokens[token], int(self.types[token])
        if kind in (CONTROL, UNUSED) or (kind == UNKNOWN and self.kind != "llama"):
            return b""
        if kind == UNKNOWN:
            return " \u2047 ".encode()
        if kind == BYTE and text.startswith("<0x"):
            return bytes([int(text[3:5], 16)])
        if self.kind == "gpt2":
            if kind == USER_DEFINED:
                return text.encode()
            table = byte_of_character()
            return b"".join(table[c] if c in table else c.encode() for c in text)
        return text.replace("\u2581", " ").encode()

    @property
    def special_texts(self) -> list[str]:
        """Texts that a tokenizer reading special tokens would not read as text."""
        return [self._tokens[int(i)] for i in np.flatnonzero((self.types == CONTROL) | (self.types == USER_DEFINED))]

    def difference(self, other: Vocab) -> str | None:
        """The first difference that would make one model's tokens mean something else to the other, or None.

        Token strings, types and special ids must agree; padding rows at the end may differ in number. Whether a text
        begins with bos may differ too: only the target's choice counts.
        """
        if self.kind != other.kind:
            return f"the target's tokenizer is {self.kind!r}, the draft's {other.kind!r}"
        shared = min(self.n_tokens, other.n_tokens)
        if not (self._raw and self._raw == other._raw):
            for i, (a, b) in enumerate(zip(self._tokens, other._tokens, strict=False)):
                if a != b and not (_is_padding(a) and _is_padding(b)):
                    return f"token {i} is {a!r} in the target and {b!r} in the draft"
        if not np.array_equal(self.types[:shared], other.types[:shared]):
            i = int(np.flatnonzero(self.types[:shared] != other.types[:shared])[0])
            # Converters disagree on whether padding is unused, control or ordinary.
            if not _is_padding(self._tokens[i]):
                return f"token {i} ({self._tokens[i]!r}) has type {self.types[i]} in the target and {other.types[i]} in the draft"
        longer, whose = (self, "target") if self.n_tokens > other.n_tokens else (other, "draft")
        for i in range(shared, longer.n_tokens):
            if not _is_padding(longer._tokens[i]) and int(longer.types[i]) != UNUSED:
                return f"token {i} ({longer._tokens[i]!r}) exists in the {whose} only"
        for name in ("bos", "eos"):
            a, b = getattr(self, name), getattr(other, name)
            if a is not None and b is not None and a != b and name == "bos":
                return f"the {name} token is {a} in the target and {b} in the draft"
        return None


def _is_padding(text: str) -> bool:
    return text.startswith(_PADDING)


@cache
def byte_of_character() -> dict[str, bytes]:
    """GPT-2's printable stand-ins for bytes, undone."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table: dict[str, Any] = {chr(b): bytes([b]) for b in printable}
    for n, b in enumerate(b for b in range(256) if b not in set(printable)):
        table[chr(256 + n)] = bytes([b])
    return table
