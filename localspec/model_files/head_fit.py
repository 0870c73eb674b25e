"""Whether a head can draft for a target."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.model_files.head_card import HeadCard, TargetFacts


@dataclass(frozen=True)
class HeadFit:
    """Whether a head fits a target.

    Attributes:
        usable: whether it can draft for it.
        exact: whether it was trained for that very file.
        why: why it cannot, or what to know about it where it is not exact; else "".
    """

    usable: bool
    exact: bool = False
    why: str = ""


def fit(card: HeadCard, target: TargetFacts) -> HeadFit:
    """Whether a head can draft for a target: what it guesses is always checked, so it need not be the same file."""
    theirs = card.target
    if theirs.fingerprint == target.fingerprint:
        return HeadFit(usable=True, exact=True)
    for what, its, wanted in (
        ("the architecture", theirs.architecture, target.architecture),
        ("a width of", theirs.n_embd, target.n_embd),
        ("a number of layers of", theirs.n_layers, target.n_layers),
        ("an output matrix of rows numbering", theirs.n_vocab, target.n_vocab),
    ):
        if its != wanted:
            why = f"it is for {theirs.name}, with {what} {its} where {target.name} has {wanted}"
            return HeadFit(usable=False, why=why)
    if theirs.vocab != target.vocab:
        return HeadFit(
            usable=False, why=f"it is for {theirs.name}, whose vocabulary differs from that of {target.name}"
        )
    return HeadFit(
        usable=True, why=f"it was trained for another file of this shape ({theirs.name}), so it may guess worse"
    )
