"""An earlier head to start from, in the place of a linear one; its training data is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from localspec.errors import LocalspecError, UsageError
from localspec.heads.card import HeadCard, TargetFacts
from localspec.heads.file import check_head, head_weights, read_card
from localspec.heads.trained import heads_for
from localspec.heads.training.run_folder import Recipe
from localspec.heads.training.shards import Passage
from localspec.model_files.gguf import GGUFFile, tensor_rows

if TYPE_CHECKING:
    from localspec.heads.training.lessons import Embed
    from localspec.heads.training.warm_start import Start


NO_HEAD = "none"


def earlier_head(target: Path, fingerprint: str, recipe: Recipe, named: str | Path | None) -> Path | None:
    """The file of the head to start from; None for a linear head.

    ``named`` is the file of a head; "none"; or None for the one that drafters would take, if it fits.

    Raises:
        UsageError: the named one does not fit, or cannot be read; says why.
    """
    from localspec.heads.training.warm_start import new_card  # needs JAX, which is asked for before this is called

    if named == NO_HEAD or (named is None and recipe.kind == "eagle3"):
        return None
    with GGUFFile(target) as file:
        n_out = min(recipe.n_out, TargetFacts.of(file, fingerprint).n_vocab)
        wanted = new_card(file, fingerprint, recipe, np.arange(n_out, dtype=np.int32))
    if named is None:
        return next((path for path in heads_for(target) if _misfit(read_card(path), wanted) is None), None)
    try:
        reason = _misfit(read_card(Path(named)), wanted)
    except (LocalspecError, OSError) as error:
        raise UsageError(f"cannot begin with the head {named}: {error}") from None
    if reason is not None:
        raise UsageError(f"cannot begin with the head {named}: {reason}")
    return Path(named)


def _misfit(card: HeadCard, wanted: HeadCard) -> str | None:
    """Why training cannot start from a head; None if it can."""
    if card.kind != wanted.kind:
        return f"it is a {card.kind} one, and a {wanted.kind} one is to be made"
    if card.target.fingerprint != wanted.target.fingerprint:
        return f"it was made for another file, {card.target.name}"
    if (card.taps, card.steps, card.shapes()) != (wanted.taps, wanted.steps, wanted.shapes()):
        return "its sizes, or the states that it reads, are others than those of the head to be made"
    return None


def going_on(path: Path, target: GGUFFile, card: HeadCard, embed: Embed, passages: Sequence[Passage]) -> Start:
    from localspec.heads.training.lessons import Examples
    from localspec.heads.training.warm_start import Start

    with GGUFFile(path) as file:
        check_head(file)
        weights = {name: head_weights(file, name) for name in file.tensors}
    if card.kind == "medusa":
        return Start(weights, {})
    sizes = Examples(card, embed, tensor_rows(target, "output_norm.weight", slice(0, 1))[0], passages).sizes
    n = card.n_embd
    return Start(weights, {"head.fc.weight": sizes[:-n], "head.embed.weight": sizes[-n:]})


def history(path: Path) -> tuple[str, ...]:
    training = read_card(path).training
    data, seen = training.data_tokens, training.tokens_seen
    return (*training.earlier, f"{training.command} ({data:,} tokens of data, {seen:,} seen)")
