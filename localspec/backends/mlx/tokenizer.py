"""Byte-level BPE by the ``tokenizers`` package, given a file's vocabulary, merges and split into words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from localspec.errors import UnsupportedModel
from localspec.model_files.vocab import byte_of_character

# A GGUF only names the split (``tokenizer.ggml.pre``) into words, which merges stay within. What the names mean is a
# convention of llama.cpp: its expressions are the definition.

# llama.cpp's classes of characters are those of Unicode 15.1, the package's those of 16.0. These came between.
_NEWER = (
    r"\x{897}\x{1B4E}\x{1B4F}\x{1B7F}\x{1C89}\x{1C8A}\x{2427}-\x{2429}\x{31E4}\x{31E5}\x{A7CB}-\x{A7CD}"
    r"\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D40}-\x{10D8F}\x{10EC2}-\x{10EFC}\x{11380}-\x{113E2}"
    r"\x{116D0}-\x{116E3}\x{11BC0}-\x{11BF9}\x{11F5A}\x{13460}-\x{143FA}\x{16100}-\x{16139}\x{16D40}-\x{16D79}"
    r"\x{18CFF}\x{1CC00}-\x{1CEB3}\x{1E5D0}-\x{1E5FF}\x{1F8B2}-\x{1F8C1}\x{1FA89}\x{1FA8F}\x{1FABE}\x{1FAC6}"
    r"\x{1FADC}-\x{1FADF}\x{1FAE9}\x{1FBCB}-\x{1FBEF}"
)


def _class(category: str) -> str:
    return rf"[\p{{{category}}}&&[^{_NEWER}]]"


L, N, P, M, S = (_class(category) for category in "LNPMS")

_ENGLISH = "'s|'t|'re|'ve|'m|'ll|'d"
# Spelled out: a case-insensitive match would also take the long s for an s.
_ENGLISH_ANY_CASE = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_BLANK_ENDS = r"\s+(?!\S)|\s+"

_GPT2 = rf"{_ENGLISH}| ?{L}+| ?{N}+| ?[^\s{L}{N}]+|{_BLANK_ENDS}"


def _gpt4(numbers: str, *, contractions: str = f"(?:{_ENGLISH_ANY_CASE})|", letters: str = L) -> str:
    """The family that GPT-4's tokenizer began; its members differ in how they cut numbers."""
    marks = rf"[^\s{letters}{N}]"
    return rf"{contractions}[^\r\n{L}{N}]?[{letters}]+|{numbers}| ?{marks}+[\r\n]*|\s*[\r\n]+|{_BLANK_ENDS}"


_QWEN2 = _gpt4(N)
_LLAMA3 = _gpt4(f"{N}{{1,3}}")

# Upper- and lower-case letters are told apart among ASCII letters only.
_UPPER, _LOWER = f"(?:(?={L})[^a-z])", f"(?:(?={L})[^A-Z])"


def _cased(numbers: str, suffix: str = "") -> str:
    """Words that end where a capital follows a small letter (Mistral's Tekken, GPT-4o)."""
    start = rf"[^\r\n{L}{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{numbers}| ?[^\s{L}{N}]+[\r\n/]*|\s*[\r\n]+|{_BLANK_ENDS}"


_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    rf"|[^\r\n{L}{P}{S}]?[{L}{M}]+| ?[{P}{S}]+[\r\n]*|\s*[\r\n]+|{_BLANK_ENDS}"
)

_GROUPS: tuple[tuple[tuple[str, ...], list[str]], ...] = (
    (("default",), [rf"[{P}$+<=>^~|]+", _GPT2, f"{N}+", "[0-9][0-9][0-9]"]),
    (("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais",
       "trillion", "granite-docling", "exaone4"), [_GPT2]),
    (("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), [N, _GPT2]),
    (("falcon",), [rf"[{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"]),
    (("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), [_QWEN2]),
    (("qwen35",), [_gpt4(N, letters=f"{L}{M}")]),
    (("ufakzeka",), [_gpt4(N, contractions="")]),
    (("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), [_LLAMA3]),
    (("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), [_LLAMA3]),
    (("tekken",), [_cased(N)]),
    (("gpt-4o", "llama4", "kanana2", "minimax-m2"), [_cased(f"{N}{{1,3}}", f"(?:{_ENGLISH_ANY_CASE})?")]),
    (("deepseek-v3", "hunyuan-dense", "joyai-llm"), [f"{N}{{1,3}}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_WORDS]),
    (("deepseek-coder",), [r"[\r\n]", rf"\s?{L}+", rf"\s?{P}+", "[一-龥ࠀ-一가-퟿]+", N]),
)  # fmt: skip

SPLITS = {name: expressions for names, expressions in _GROUPS for name in names}
"""Expressions in Oniguruma's syntax: each cuts what the ones before left in one piece."""

IGNORES_MERGES = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "glm4", "glm5")
)
"""Splits whose words are taken whole where the vocabulary has them, whatever the merges say."""


class ByteLevel:
    """Byte-level BPE over text without special tokens; see ``backends.tokenizer.ByteLevelMaker``.

    Raises:
        UnsupportedModel: an unknown split into words.
    """

    def __init__(self, ids: Mapping[str, int], merges: Iterable[str], pre: str, file_name: str) -> None:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        if pre not in SPLITS:
            what = f"{file_name} splits words by the rule {pre!r}, which the MLX backend does not know"
            raise UnsupportedModel(f"{what}; use --backend llama-cpp")
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[pre]]
        spaces = ((merge, merge.find(" ", 1)) for merge in merges)
        pairs = dict.fromkeys((merge[:at], merge[at + 1 :]) for merge, at in spaces if at > 0)
        # The package wants a token for every byte, every merge and what it merges. llama.cpp does without: what a merge
        # without a token leaves is looked up letter by letter, and what has no token is dropped.
        vocab, self._n_tokens = dict(ids), len(ids)
        self._spelled: dict[int, list[int]] = {}
        for text in (*byte_of_character(), *(each for left, right in pairs for each in (left, right, left + right))):
            if text not in vocab:
                vocab[text] = token = len(vocab)
                self._spelled[token] = [ids[c] for c in text if c in ids and c.isascii()]
        self._tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(pairs), ignore_merges=pre in IGNORES_MERGES))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._spelled and max(tokens, default=0) >= self._n_tokens:
            return [each for token in tokens for each in self._spelled.get(token, (token,))]
        return tokens
