"""A model's vocabulary, read from its file and so the same for every engine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import UnsupportedModel, is_whole, shown
from localspec.model_files.gguf import KNOWN, GGUFFile, StringArray

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_TOKENS: dict[str, list[str]] = KNOWN["tokens"]
_ENDS = frozenset(_TOKENS["end_of_turn"] + _TOKENS["end_of_message"] + _TOKENS["other_ends"])
_FILL_IN: dict[str, list[str]] = KNOWN["fill_in"]
_FILL_IN_TOO: dict[str, list[str]] = KNOWN["fill_in_too"]
_SHOWN = _TOKENS["shown"]
_NAMES = _ENDS.union(*_FILL_IN.values(), *_FILL_IN_TOO.values(), _SHOWN)
_LONGEST_NAME = max(len(name.encode()) for name in _NAMES)

_PADDING = re.compile(r"\[(PAD|unused)_?\d*\]|<\|?(unused|pad|dummy|extra|reserved|placeholder)[^>]*>", re.IGNORECASE)
_BYTE_TOKEN = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_KEYS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
_KEYS |= {name: name for name in _FILL_IN}
_OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}  # of files from before October 2024
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unk": 0}, "gpt2": {"bos": 11, "eos": 11}, "gemma4": {}, "t5": {"eos": 1}}


class Vocab:
    """Tokens, their types and special ids."""

    kind: str  # ``tokenizer.ggml.model``: ``gpt2`` (byte-level BPE), ``llama`` (SentencePiece), …
    pre: str  # the pre-tokenizer's name, for byte-level BPE
    n_tokens: int  # number of named tokens; a model's logits may be wider by padding
    types: npt.NDArray[np.int32]  # [n_tokens] (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte)
    add_bos: bool  # whether a text begins with ``bos``
    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    unk: int | None = None
    pad: int | None = None
    eog: frozenset[int] = frozenset()  # ids that end a generation
    # Ids of fill-in-the-middle tokens, by ``fim_`` and ``pre``, ``suf``, ``mid``, ``pad``, ``rep``, ``sep``.
    fim: Mapping[str, int] = MappingProxyType({})

    def __init__(self, tokens: StringArray, types: npt.NDArray[np.int32], kind: str, pre: str = "") -> None:
        self._tokens = tokens
        self.types = types
        self.kind = kind
        self.pre = pre
        self.n_tokens = len(tokens)
        self.add_bos = kind == "llama" or (kind == "gpt2" and pre in KNOWN["pre_tokenizers"]["with_bos"])
        self._hidden: set[int] = set()
        self._shown: set[int] = set()

    @classmethod
    def none(cls) -> Vocab:
        """No tokens: of a head, which reads rows of floats."""
        no_strings = StringArray(memoryview(b""), np.zeros(1, dtype=np.int64))
        return cls(no_strings, np.empty(0, dtype=np.int32), "none")

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> Vocab:
        """The vocabulary of an open file, independent of it; ``UnsupportedModel``: none, or of an unknown kind."""
        get = gguf.metadata.get
        tokens, kind = get("tokenizer.ggml.tokens"), str(get("tokenizer.ggml.model", ""))
        if not isinstance(tokens, StringArray) or not len(tokens):
            raise UnsupportedModel(f"{gguf.path.name} has no vocabulary, so it cannot generate text")
        if kind not in _DEFAULT_IDS:
            raise UnsupportedModel(f"{gguf.path.name} has a tokenizer of the kind {kind!r}, which is not supported")
        _check_lists(gguf, len(tokens))
        types = np.array(get("tokenizer.ggml.token_type", np.ones(len(tokens)))[: len(tokens)], dtype=np.int32)
        vocab = cls(tokens.copy(), types, kind, str(get("tokenizer.ggml.pre", "")))
        special: dict[str, int | None] = {}
        for name, key in _KEYS.items():
            value = get(f"tokenizer.ggml.{key}_token_id", _DEFAULT_IDS[kind].get(name))
            if value is None and name in _OLD_KEYS:
                value = get(f"tokenizer.ggml.{_OLD_KEYS[name]}_token_id")
            special[name] = value if value is not None and is_whole(value) and 0 <= value < len(tokens) else None
        add_bos = get("tokenizer.ggml.add_bos_token")
        if isinstance(add_bos, int):
            vocab.add_bos = bool(add_bos)
        vocab._find_special(special)
        return vocab

    def _find_special(self, special: dict[str, int | None]) -> None:
        """Fill in the special ids: those declared, and those known by their name."""
        named = self._named()
        for what, names in {"eot": _TOKENS["end_of_turn"], "eom": _TOKENS["end_of_message"], **_FILL_IN}.items():
            found = next((named[name] for name in names if name in named), None)
            if special.get(what) is None and found is not None:
                special[what] = found
                self._hidden.add(found)
        self.bos, self.eos, self.eot = special["bos"], special["eos"], special["eot"]
        self.unk, self.pad = special["unk"], special["pad"]
        too = {what: named[name] for what, names in _FILL_IN_TOO.items() for name in names if name in named}
        self.fim = too | {name: token for name in _FILL_IN if (token := special.get(name)) is not None}
        ends = {named[name] for name in _ENDS if name in named}
        self._hidden |= ends
        ends |= {
            i for i in (special[k] for k in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")) if i is not None
        }
        self._shown = {named[name] for name in _SHOWN if name in named}
        for also, wrong in (
            ({"<|return|>", "<|call|>"}, "<|end|>"),
            ({"<|flush|>", "<|calls|>"}, "<|end|>"),
            ({"<|flush|>", "<|call|>"}, "<|end|>"),
            ({"<|tool_response>"}, "</s>"),
        ):
            # In these vocabularies the token is part of a message, not its end.
            if also <= named.keys() and wrong in named:
                ends.discard(named[wrong])
                self._shown.add(named[wrong])
        self._hidden -= self._shown
        self.eog = frozenset(ends)

    def _named(self) -> dict[str, int]:
        raw, offsets = np.frombuffer(self._tokens.raw, dtype=np.uint8), self._tokens.offsets
        lengths = np.diff(offsets) - 8
        likely = np.flatnonzero((lengths >= 3) & (lengths <= _LONGEST_NAME))
        first, last = raw[offsets[likely] + 8], raw[offsets[likely + 1] - 1]
        likely = likely[np.isin(first, list(b"<[_\xe2")) & np.isin(last, list(b">]"))]
        found = ((self._tokens[i], i) for i in likely.tolist())
        return {text: i for text, i in found if text in _NAMES}

    # -- one token -----------------------------------------------------------------------------------------------

    def token_text(self, token: int) -> str:
        """The token as the file stores it; ``IndexError``: no such token."""
        if not 0 <= token < self.n_tokens:
            raise IndexError(token)
        return self._tokens.bytes_at(token).decode("utf-8", "replace")

    def is_control(self, token: int) -> bool:
        """Whether the token is a mark without a text of its own."""
        if token in self._shown:
            return False
        return token in self._hidden or int(self.types[token]) in (UNKNOWN, CONTROL, UNUSED)

    def show(self, texts: Iterable[str]) -> None:
        """Let control tokens with these texts be part of the text."""
        wanted = set(texts)
        marks = np.flatnonzero(self.types != NORMAL).tolist()
        self._shown |= {i for i in marks if i not in self.eog and self._tokens[i] in wanted}
        self._hidden -= self._shown

    def named(self, texts: Iterable[str]) -> dict[str, int]:
        """The control tokens whose names are in one of these texts."""
        wanted = list(texts)
        names = ((str(self._tokens[i]), i) for i in self.marks if self.is_control(i))
        return {name: i for name, i in names if name and any(name in text for text in wanted)}

    @property
    def longest(self) -> int:
        """Most bytes of text that a token stands for, names of special ones included."""
        return int(np.diff(self._tokens.offsets).max(initial=8)) - 8  # as stored, which is as long or longer

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the text; nothing for control tokens and padding."""
        if not 0 <= token < self.n_tokens or token in self._hidden:
            return b""
        raw, kind = self._tokens.bytes_at(token), int(self.types[token])
        if kind == BYTE:
            match = _BYTE_TOKEN.fullmatch(raw)
            return bytes([int(match[1], 16)]) if match else b""
        if kind == USER_DEFINED or token in self._shown:
            return raw
        if kind != NORMAL:
            return b""
        if self.kind == "gpt2":
            table = byte_of_character()
            return b"".join([table.get(c) or c.encode() for c in raw.decode("utf-8", "replace")])
        return raw.replace("\u2581".encode(), b" ")

    def display(self, token: int) -> str:
        """A token on its own, for people: half of a character as U+FFFD, a special token as its name."""
        if not 0 <= token < self.n_tokens:
            return f"<{shown(token)}>"
        return (self.token_bytes(token) or self._tokens.bytes_at(token)).decode("utf-8", "replace")

    @property
    def _marked(self) -> list[int]:
        marked = np.flatnonzero((self.types == CONTROL) | (self.types == USER_DEFINED)).tolist()
        return sorted({*marked, *self._hidden, *self._shown})

    @property
    def marks(self) -> list[int]:
        return [i for i in self._marked if not self._is_padding(i)]

    @property
    def special(self) -> npt.NDArray[np.bool_]:
        """Which tokens are not of ordinary text, but control, user-defined or unused ones [n_tokens]."""
        found = ~np.isin(self.types, (NORMAL, BYTE))
        found[self.marks] = True
        return found

    @property
    def special_texts(self) -> list[str]:
        return [self._tokens[i] for i in self._marked]

    # -- two vocabularies ----------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits, equal for equal token strings, types and special ids."""
        digest = hashlib.blake2b(self._tokens.raw, digest_size=8)
        digest.update(self.types.tobytes())
        digest.update(repr((self.kind, self.bos, self.eos, sorted(self.eog))).encode())
        return digest.hexdigest()

    def difference(self, other: Vocab, *, special: bool = True) -> str | None:
        """The first difference that would make this target's tokens mean something else to a draft, or None.

        Token strings, types and special ids must agree. Padding may differ in number and name, and one of the two may
        have more tokens without text at the end (marks for images), which the other must not be fed. The pre-tokenizer,
        merges, ``add_bos``, and ``bos`` where not both files begin with one, may differ, as the target's are used for
        both; so may ``unk`` and ``pad``, which are never generated.

        Args:
            other: the draft's vocabulary.
            special: whether special tokens must agree too, or only those of ordinary text.

        Returns:
            A clause for an error message, e.g. ``token 5 is 'a' in the target and 'b' in the draft``.
        """
        if not special and self.difference(other) is None:
            return None
        if self.kind != other.kind:
            return f"the target's tokenizer is of the kind {self.kind!r}, the draft's {other.kind!r}"
        shared = min(self.n_tokens, other.n_tokens)
        ignored = None if special else self.special[:shared] | other.special[:shared]
        for i in self._unlike(other, shared):
            if (self._is_padding(i) and other._is_padding(i)) or (ignored is not None and ignored[i]):
                continue
            mine, its = self._tokens[i], other._tokens[i]
            if mine != its:
                return f"token {i} is {mine!r} in the target and {its!r} in the draft"
            return f"token {i} ({mine!r}) has type {self.types[i]} in the target and {other.types[i]} in the draft"
        longer, whose = (self, "target") if self.n_tokens > other.n_tokens else (other, "draft")
        for i in range(shared, longer.n_tokens):
            # Gemma's larger models add marks for images; what has no text is never asked of a draft.
            if not longer._is_padding(i) and (
                not longer.is_control(i) or i in longer.eog if special else not longer.special[i]
            ):
                return f"token {i} is {longer._tokens[i]!r} in the {whose} and missing in the other"
        if not special:
            return None
        names = {"eos": "end-of-text"} | ({"bos": "begin-of-text"} if self.add_bos and other.add_bos else {})
        for name, words in names.items():
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                return f"the {words} token is {self._label(mine)} in the target and {self._label(its)} in the draft"
        if self.eog != other.eog:
            odd = min(self.eog ^ other.eog)
            return f"{self._label(odd)} ends an answer only in the {'target' if odd in self.eog else 'draft'}"
        return None

    def _unlike(self, other: Vocab, shared: int) -> Iterator[int]:
        """Those of the first ``shared`` tokens whose string or type differs, in order."""
        mine, its = self._tokens, other._tokens
        lengths = (np.diff(tokens.offsets[: shared + 1]) for tokens in (mine, its))
        odd = np.not_equal(*lengths) | (self.types[:shared] != other.types[:shared])
        start = 0
        for end in [*np.flatnonzero(odd).tolist(), shared]:
            stretches = (bytes(each.raw[each.offsets[start] : each.offsets[end]]) for each in (mine, its))
            if len(set(stretches)) > 1:
                yield from (i for i in range(start, end) if mine.bytes_at(i) != its.bytes_at(i))
            if end < shared:
                yield end
            start = end + 1

    def _is_padding(self, token: int) -> bool:
        return int(self.types[token]) == UNUSED or _PADDING.fullmatch(self._tokens[token]) is not None

    def _label(self, token: int | None) -> str:
        if token is None:
            return "none"
        return f"{token} {self._tokens[token]!r}" if token < self.n_tokens else str(token)


def _check_lists(gguf: GGUFFile, n_tokens: int) -> None:
    """Refuse lists that do not fit the tokens: engines read them without looking."""
    for name, what, kinds in (("token_type", "token types", "iu"), ("scores", "scores", "f")):
        stored = gguf.metadata.get(f"tokenizer.ggml.{name}")
        if stored is None:
            continue
        if not isinstance(stored, np.ndarray) or stored.dtype.kind not in kinds or stored.dtype.itemsize != 4:
            raise UnsupportedModel(f"{gguf.path.name} is damaged: its {what} are not a list of 32-bit numbers")
        if len(stored) < n_tokens:
            raise UnsupportedModel(f"{gguf.path.name} has {n_tokens} tokens but {len(stored)} {what}")
    merges = gguf.metadata.get("tokenizer.ggml.merges")
    if merges is not None and not isinstance(merges, StringArray):
        raise UnsupportedModel(f"{gguf.path.name} is damaged: its merges are not a list of texts")


@cache
def byte_of_character() -> dict[str, bytes]:
    """GPT-2's printable stand-ins -> bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table: dict[str, Any] = {chr(b): bytes([b]) for b in printable}
    for n, b in enumerate(b for b in range(256) if b not in set(printable)):
        table[chr(256 + n)] = bytes([b])
    return table
