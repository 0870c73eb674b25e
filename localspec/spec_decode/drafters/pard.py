"""PARD: a draft model that drafts several tokens in one pass (An et al. 2025, arXiv:2504.18583).

Behind the text it reads mask tokens, all the same one, and was trained to say at each what comes that far ahead: at the
last token of the text the next one, at the i-th mask the one i places further. Its attention is causal, so that it is
an ordinary GGUF; what is published are small Llama 3 and Qwen 2.5 models.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from localspec.backends.base import FEW_ROWS, Context
from localspec.errors import EngineError, ModelFileError, UsageError, is_whole, shown
from localspec.model_files.gguf import GGUFFile
from localspec.sampling.sampling import Ids, Row
from localspec.spec_decode.drafters.base import Drafter, Plan, Proposer, proposed
from localspec.spec_decode.drafters.draft_model import DraftModelDrafter
from localspec.spec_decode.drafters.names import PARD
from localspec.spec_decode.rounds import DraftToken

MOST_GUESSES = 16  # tokens that one pass drafts; trained with 8, and published figures go up to 12
MOST_ROWS = 24  # rows of a pass whose logits are all made, where the engine does not keep room for them

# Mask tokens of the published models, by the names that converted files give these ids: they are unused otherwise
# (github.com/AMD-AGI/PARD, config/train).
_PUBLISHED = {151665: "[PAD151665]", 128020: "<|reserved_special_token_12|>"}


def file_and_mask(argument: str) -> tuple[str, int | None]:
    """FILE and TOKEN of ``--draft pard:FILE[:TOKEN]``. Raises ``UsageError`` where there is no file."""
    file, colon, token = argument.rpartition(":")
    found = (file, int(token)) if colon and token.isascii() and token[:9].isdigit() and len(token) < 10 else None
    if not argument or (found is not None and not file):
        raise UsageError(f"--draft {PARD}:FILE names the file of a draft model that fills in mask tokens")
    return found or (argument, None)


def mask_token(path: Path, *, named: bool = False, token: int | None = None) -> int | None:
    """The mask token of a file that says it is a PARD model; None where it does not.

    It does by a field ``ARCHITECTURE.pard_token``, or by a name that begins with PARD (``general.name``). Then, and
    where it is ``named`` as one, its mask token is ``token``, or that of the field or of
    ``tokenizer.ggml.mask_token_id``, or the one that published models use with its vocabulary.

    Raises:
        ModelFileError: the file cannot be read, or does not have the token.
        UsageError: it is ``named``, and names no mask token.
    """
    with GGUFFile(path) as file:
        tokens = file.metadata.get("tokenizer.ggml.tokens", ())
        field, title = file.field("pard_token"), str(file.metadata.get("general.name", ""))
        if not named and field is None and not title.lower().startswith(PARD):
            return None
        for value in (token, field, file.metadata.get("tokenizer.ggml.mask_token_id")):
            if value is None:
                continue
            if not is_whole(value) or not 0 <= value < len(tokens):
                raise ModelFileError(f"{path.name} has {len(tokens)} tokens, and no mask token {shown(value)}")
            return int(value)
        for published, name in _PUBLISHED.items():
            if published < len(tokens) and tokens[published] == name:
                return published
    if not named:
        return None
    raise UsageError(
        f"{path.name} names no mask token: --draft {PARD}:FILE:TOKEN takes its id, pard_token in the published model's "
        "config.json"
    )


class PardDrafter(DraftModelDrafter):
    """Drafts up to ``MOST_GUESSES`` tokens by one pass over what it has not read and masks.

    A guess does not depend on the draft before it, so that its law is known before any token of the draft is drawn:
    rejection sampling is exact. Masks leave the memory when the round is over. A draft that is longer than one pass
    takes another one, which reads the tokens drafted so far.

    Args:
        context: of the draft model.
        mask: its mask token.
        source: see ``DrafterInfo``.
    """

    def __init__(self, context: Context, mask: int, source: str = "model") -> None:
        super().__init__(context, source)
        self.info = replace(self.info, one_pass=True, rows_of_draft=True)
        self._mask = mask
        self._text: Sequence[int] = ()  # what was read before the masks
        self._guesses: list[tuple[Row, Ids | None]] = []

    def clone(self, context: Context | None) -> Drafter:
        return PardDrafter(context or self.context, self._mask, self.info.source)

    def draft(self, tokens: Sequence[int], plan: Plan, proposer: Proposer) -> list[DraftToken]:
        source, ahead = self.info.source, len(tokens) - len(self._text)
        if not 0 <= ahead < len(self._guesses) or tokens[: len(self._text)] != self._text:
            known = self._n_known(tokens, plan)
            if known is None:
                return []
            self._read_masks(tokens, known, plan, proposer)
            ahead = 0
        elif not plan.more(source):
            return []
        row, ids = self._guesses[ahead]
        confidence = proposer.confidence(row, tokens, ids=ids)
        return proposed(source, confidence, len(tokens), plan, proposer)

    def _read_masks(self, tokens: Sequence[int], known: int, plan: Plan, proposer: Proposer) -> None:
        """Read the text from ``known`` on, and masks."""
        context, source = self.context, self.info.source
        n_best = proposer.n_best if proposer.n_vocab is None or context.model.n_vocab <= proposer.n_vocab else 0
        most = FEW_ROWS if context.model.capabilities.keeps_rows else MOST_ROWS
        width = min(plan.width(source), MOST_GUESSES, most, context.n_free - (len(tokens) - known) + 1)
        first = max(known, len(tokens) + width - 1 - most)  # the logits of all rows from here on are made
        started = time.perf_counter()
        if first > known:
            context.decode(tokens[known:first], "none")
            plan.spent(source, first - known, (time.perf_counter() - started) * 1e3)
            started = time.perf_counter()
        forward = context.decode([*tokens[first:], *[self._mask] * (width - 1)], "all", n_best)
        self._text = list(tokens)
        ids = [None] * len(forward) if forward.ids is None else forward.ids
        self._guesses = [*zip(forward.logits, ids, strict=True)][len(tokens) - first - 1 :]
        plan.spent(source, len(forward), (time.perf_counter() - started) * 1e3)

    def begin(self, tokens: Sequence[int], *, prediction: Sequence[int] = (), target: Context | None = None) -> None:
        self._forget_masks()

    def accept(self, emitted: Sequence[int]) -> None:
        self._forget_masks()

    def _forget_masks(self) -> None:
        if self._guesses:
            self._guesses = []
            with suppress(EngineError):  # the next reading finds out
                self.context.reuse(self._text)
