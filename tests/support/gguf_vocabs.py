"""Tokenizers small enough to read, of the kinds that real files have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
KINDS = {"normal": NORMAL, "control": CONTROL, "user_defined": USER_DEFINED, "unused": UNUSED}

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyVocab:
    """The tokenizer section of a file: ``tokens[i]`` has ``types[i]`` and, for SentencePiece, ``scores[i]``."""

    model: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] = ()
    merges: Sequence[str] = ()
    pre: str = "default"
    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    unk: int | None = None
    add_bos: bool = False
    add_space_prefix: bool = True
    chat_template: str | None = CHATML

    def __len__(self) -> int:
        return len(self.tokens)

    def id(self, token: str) -> int:
        """The id of a token string as stored."""
        return list(self.tokens).index(token)


WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he"]
WORDS += ["his", "but", "at", "are", "this", "have", "from", "or", "had", "an"]


def spm_vocab(n_vocab: int = 384) -> TinyVocab:
    """SentencePiece: scores decide merges, text without a piece falls back to byte tokens, a space is put in front."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, CONTROL]
    tokens = special + [f"<0x{i:02X}>" for i in range(256)]
    types += [BYTE] * 256
    pieces = ["▁", *"etaoinshrdlucmfwygpbvkxjqzETAOINS.,\n", "é", "ü"]
    pieces += ["▁t", "he", "▁a", "in", "on", "re", "er", "th", "an", "▁the", "nd", "▁and", "ing", "▁▁", "▁▁▁▁", "éü"]
    pieces += [f"▁{word}" for word in WORDS]
    pieces = list(dict.fromkeys(pieces))[: n_vocab - len(tokens)]
    pieces += [f"<pad{i}>" for i in range(n_vocab - len(tokens) - len(pieces))]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(pieces))]
    types += [UNUSED if piece.startswith("<pad") else NORMAL for piece in pieces]
    return TinyVocab("llama", tokens + pieces, types, scores, bos=1, eos=2, eot=4, unk=0, add_bos=True, pre="default")


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = {byte: 256 + i for i, byte in enumerate(b for b in range(256) if b not in plain)}
    return [chr(shifted.get(byte, byte)) for byte in range(256)]


def bpe_vocab(n_vocab: int = 384, pre: str = "gpt-2") -> TinyVocab:
    """Byte-level BPE in the manner of GPT-2 and Qwen, with ChatML's special tokens at the end."""
    symbols = byte_symbols()

    def as_symbols(text: str) -> str:
        return "".join(symbols[byte] for byte in text.encode())

    tokens, merges = list(symbols), []
    for word in ["th", "he", "in", "er", "an", "re", "on", "é", "ü", "😀", "日本", "  ", "    ", "\n\n", *WORDS]:
        for variant in (word, f" {word}"):
            pieces = list(as_symbols(variant))
            while len(pieces) > 1:
                # Fold from the left; an earlier word's merge is used again where it fits.
                pair = next((p for p in pairwise(pieces) if " ".join(p) in merges), None)
                left, right = pair or (pieces[0], pieces[1])
                if pair is None:
                    merges.append(f"{left} {right}")
                    if left + right not in tokens:
                        tokens.append(left + right)
                at = next(i for i in range(len(pieces) - 1) if (pieces[i], pieces[i + 1]) == (left, right))
                pieces[at : at + 2] = [left + right]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    room = n_vocab - len(special)
    tokens = tokens[:room]
    known = set(tokens)
    merges = [merge for merge in merges if merge.replace(" ", "") in known]
    types = [NORMAL] * len(tokens)
    tokens += special
    types += [CONTROL] * len(special)
    types += [UNUSED] * (n_vocab - len(tokens))
    tokens += [f"<pad{i}>" for i in range(n_vocab - len(tokens))]
    ids = {token: i for i, token in enumerate(tokens)}
    return TinyVocab(
        "gpt2", tokens, types, merges=merges, pre=pre, bos=ids["<|endoftext|>"], eos=ids["<|im_end|>"],
        eot=ids["<|im_end|>"],
    )  # fmt: skip


QWEN_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def fim_vocab(names: Sequence[str] = QWEN_FIM, vocab: TinyVocab | None = None) -> TinyVocab:
    """A vocabulary (byte-level BPE by default) with control tokens of fill-in-the-middle behind it."""
    vocab = vocab or bpe_vocab(384 - len(names))
    return with_tokens(vocab, vocab.chat_template, control=names)


def micro_vocab(n_vocab: int = 6) -> TinyVocab:
    """As few tokens as can be, so that all continuations can be enumerated; only the reference backend loads it."""
    tokens = ["<unk>", "<s>", "</s>", *"abcdefghijklmnop"][:n_vocab]
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * 16][:n_vocab]
    scores = [0.0, 0.0, 0.0, *(-float(i) for i in range(16))][:n_vocab]
    return TinyVocab("llama", tokens, types, scores, bos=1, eos=2, unk=0, add_bos=True, chat_template=None)


def renamed_vocab(vocab: TinyVocab, token: int, text: str) -> TinyVocab:
    """The vocabulary with one token spelled differently: a draft with it does not fit a target without."""
    tokens = list(vocab.tokens)
    tokens[token] = text
    return replace(vocab, tokens=tokens)


def vocab_metadata(vocab: TinyVocab) -> dict[str, Any]:
    """The ``tokenizer.*`` keys."""
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": vocab.model,
        "tokenizer.ggml.pre": vocab.pre,
        "tokenizer.ggml.tokens": vocab.tokens,
        "tokenizer.ggml.token_type": vocab.types,
        "tokenizer.ggml.add_bos_token": vocab.add_bos,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": vocab.add_space_prefix,
    }
    optional = {
        "tokenizer.ggml.scores": vocab.scores or None,
        "tokenizer.ggml.merges": vocab.merges or None,
        "tokenizer.ggml.bos_token_id": vocab.bos,
        "tokenizer.ggml.eos_token_id": vocab.eos,
        "tokenizer.ggml.eot_token_id": vocab.eot,
        "tokenizer.ggml.unknown_token_id": vocab.unk,
        "tokenizer.chat_template": vocab.chat_template,
    }
    return metadata | {key: value for key, value in optional.items() if value is not None}


def with_tokens(vocab: TinyVocab, chat_template: str | None, **types: Sequence[str]) -> TinyVocab:
    """A vocabulary with another template and more tokens at its end, by type: ``normal``, ``control``, …"""
    tokens, kinds = list(vocab.tokens), list(vocab.types)
    for name, texts in types.items():
        tokens += texts
        kinds += [KINDS[name]] * len(texts)
    scores = [*vocab.scores, *[0.0] * (len(tokens) - len(vocab.tokens))] if vocab.scores else ()
    return replace(vocab, tokens=tokens, types=kinds, scores=scores, chat_template=chat_template)
