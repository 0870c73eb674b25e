"""Fill-in-the-middle prompts: the text before and after the cursor, and other files, as one list of token ids.

The order is prefix, suffix, middle, which all models with such tokens were trained on; other files come first, in the
form of a repository (Qwen2.5-Coder, arXiv:2409.12186, section 3.2.2) where there are tokens for it::

    [repo] name ⏎ [file] path ⏎ text … [file] path ⏎ [prefix] before [suffix] after [middle]

After the next key stroke the prompt differs from the cursor on. So the tokens before it should stay: what is cut for
lack of room is cut in steps, not token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localspec.errors import UsageError, listed
from localspec.prompts.prompts import PromptEncoder

# Names and texts of other files, the nearest to the cursor last.
ContextFiles = Mapping[str, str] | Sequence[tuple[str, str]]

FILL_TOKENS = 128  # Default length of an answer that fills in: some ten lines, as llama.cpp's editor plugins ask
SUFFIX_TOKENS = 256  # Tokens after the cursor that are read: about 25 lines, read anew after every key stroke

# The text far from the cursor is cut in eighths of the room, so that the beginning of the prompt seldom changes.
STEPS = 8

# Names where none is known: of the repository, and of the file with the cursor.
REPOSITORY, CURRENT = "project", "current"


@dataclass(frozen=True, slots=True)
class FillPrompt:
    """A prompt for the text at the cursor; its first ``n_before`` tokens come before it."""

    tokens: list[int]
    n_before: int


def fill_prompt(
    encoder: PromptEncoder,
    prefix: str,
    suffix: str,
    files: ContextFiles = (),
    *,
    room: int,
    name: str | None = None,
    suffix_tokens: int = SUFFIX_TOKENS,
) -> FillPrompt:
    """The prompt for the text between a prefix and a suffix, of at most ``room`` tokens.

    Where there is not room for all, other ``files`` (see ``ContextFiles``) go first, then the text farthest from the
    cursor. ``name`` is that of the file with the cursor; of the suffix at most ``suffix_tokens`` are read.

    Raises:
        UsageError: the model has no tokens for that, there is nothing to fill in from, or hardly any room.
    """
    fim, encode = encoder.vocab.fim, encoder.tokenize
    if not {"fim_pre", "fim_suf", "fim_mid"} <= fim.keys():
        raise UsageError(
            "this model has no fill-in-the-middle tokens, so it cannot fill in before a suffix; "
            "a coder model such as qwen2.5-coder-1.5b can"
        )
    for text in (prefix, suffix):
        if not isinstance(text, str):
            raise UsageError(f"only a text can be tokenised, not {type(text).__name__}")
    files = _checked(files)
    # What there is no room for is left out below, to the token; of a text much longer than that the rest is not read.
    most = max(1, encoder.most_characters(room))
    prefix, suffix = prefix[_whole_steps(len(prefix) - 2 * most, most) :], suffix[:most]
    before, behind = encode(prefix), _behind(encoder, suffix)
    if not (before or behind or files):
        raise UsageError("prefix, suffix and context files are empty: there is nothing to fill in from")
    begin = [encoder.vocab.bos] if encoder.vocab.add_bos and encoder.vocab.bos is not None else []
    separator = [fim["fim_sep"]] if "fim_sep" in fim else []
    repository = [fim["fim_rep"], *encode(f"{REPOSITORY}\n")] if separator and "fim_rep" in fim else []
    current = [*separator, *encode(f"{name or CURRENT}\n")] if separator else []
    room -= len(begin) + 3  # prefix, suffix, middle
    if room < STEPS:
        raise UsageError("the context leaves no room for what stands around the cursor; raise --ctx (in Python n_ctx=)")
    step = room // STEPS
    behind = behind[: min(suffix_tokens, room // 4)]
    room -= len(behind)
    before = before[_whole_steps(len(before) - room, step) :]
    # The files' room counts the prefix in whole steps too: it is the same for many key strokes.
    room -= _whole_steps(len(before), step) + len(repository) + len(current)
    context: list[int] = []
    for path, text in ((path, text[:most]) for path, text in reversed(files)):
        file = [*separator, *encode(f"{path}\n{text}")] if separator else encode(f"{path}\n{text}\n\n")
        if len(file) > room and context:
            break
        context[:0] = file[: max(0, room)]
        room -= len(file)
    if context:
        context = [*repository, *context, *current]
    # Models that know no separator see the other files as what stands earlier in this one.
    start = [*context, fim["fim_pre"]] if separator else [fim["fim_pre"], *context]
    head = [*begin, *start, *before]
    return FillPrompt([*head, fim["fim_suf"], *behind, fim["fim_mid"]], len(head))


def marked_prompt(encoder: PromptEncoder, text: str, room: int) -> FillPrompt | None:
    """A prompt of at most ``room`` tokens whose text has the model's own marks, as Zed writes them; None: no marks."""
    vocab = encoder.vocab
    marks = ("fim_pre", "fim_suf", "fim_mid")
    if not all(mark in vocab.fim and vocab.token_text(vocab.fim[mark]) in text for mark in marks):
        return None
    encoder.check_room(room, text)
    tokens = encoder.tokenize(text, add_special=True, parse_special=True)
    return FillPrompt(tokens, tokens.index(vocab.fim["fim_suf"]))


def _behind(encoder: PromptEncoder, suffix: str) -> list[int]:
    """The suffix as it goes on within a text: SentencePiece would put a space in front of it."""
    if encoder.vocab.kind != "llama":
        return encoder.tokenize(suffix)
    anchor = encoder.tokenize("\n")
    tokens = encoder.tokenize(f"\n{suffix}")
    return tokens[len(anchor) :] if tokens[: len(anchor)] == anchor else encoder.tokenize(suffix)


def _whole_steps(n: int, step: int) -> int:
    """The least multiple of ``step`` that is no less than n, and than 0."""
    return -(-max(0, n) // step) * step


def _checked(files: ContextFiles) -> list[tuple[str, str]]:
    pairs = listed(files.items() if isinstance(files, Mapping) else files)
    for pair in [None] if pairs is None else pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise UsageError("context_files must be names and texts: a mapping, or pairs of strings")
    return [(name, text) for name, text in pairs or ()]
